"""Newcomers that are wrong in every way but dead: the group that trains does not stop for them."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from regrow.drill.hosts import why_impossible
from regrow.drill.nodes_apart import NodesApart, nodes_apart
from regrow.record.log import read_events, read_metrics
from regrow.storage import Storage
from support.cluster import SMALL

pytestmark = [
    pytest.mark.skipif(bool(why_impossible()), reason=f"no hosts apart: {why_impossible()}"),
    pytest.mark.timeout(900),
    pytest.mark.long,
]
SLOW = ["model.dim=256", "model.ffn_dim=704", "data.seq_len=128", "cluster.cpus_per_worker=2"]
HEALTH = {"health_check_initial_delay_ms": 30_000, "health_check_timeout_ms": 30_000}  # the machine may be busy


class Run:
    """A job on hosts apart."""

    def __init__(self, nodes: NodesApart, storage: Path) -> None:
        self.folder, self.output = storage / "run", storage / "run.out"
        self.process = nodes.start_job(
            [
                *(*SMALL, *SLOW, f"run.storage_path={storage}", "run.name=run", f"cluster.address={nodes.address}"),
                *("cluster.min_workers=2", "cluster.max_workers=3", "train.steps=100000"),
                *("snapshot.every_steps=1", "checkpoint.every_steps=1000", "data.storage_timeout_s=10"),
            ],
            self.output,
        )

    def events(self, name: str) -> list[dict[str, Any]]:
        return [event for event in read_events(Storage.at(self.folder)) if event["event"] == name]

    def step(self) -> int:
        rows = read_metrics(Storage.at(self.folder)) if (self.folder / "metrics.jsonl").exists() else []
        return int(rows[-1]["step"]) if rows else 0

    def until(self, condition: Callable[[], Any], patience_s: float = 240.0) -> None:
        give_up_at = time.monotonic() + patience_s
        while not condition():
            assert self.process.poll() is None, self.output.read_text(errors="replace")[-3000:]
            assert time.monotonic() < give_up_at, self.output.read_text(errors="replace")[-3000:]
            time.sleep(0.2)

    def unfit(self) -> list[str]:
        return [event["detail"] for event in self.events("unfit")]


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[NodesApart]:
    with nodes_apart(2, cpus=2, storage=tmp_path, memory_mb=420, system_config=HEALTH) as found:
        yield found


def test_newcomers_without_room_or_storage_cost_no_step_and_a_host_that_comes_back_has_room(
    nodes: NodesApart, tmp_path: Path
) -> None:
    run = Run(nodes, tmp_path)
    run.until(lambda: run.step() >= 10, 400.0)
    nodes.add(shm_mb=40)
    run.until(lambda: any("GB for snapshots" in said for said in run.unfit()))
    nodes.kill(2)
    nodes.add(broken="failing")
    run.until(lambda: any("mounted" in said for said in run.unfit()))
    assert any("joins once storage answers" in event["text"] for event in run.events("note"))
    nodes.kill(2)
    step = run.step()
    run.until(lambda: run.step() >= step + 5)
    assert len(run.events("generation")) == 1, "no rank has stopped for them"
    assert run.events("failure") == []
    nodes.restart_raylet(1)
    run.until(lambda: run.events("generation")[-1]["generation"] > 1 and run.step() >= step + 20)
    last = run.events("generation")[-1]
    assert (last["world_size"], last["source"]) == (2, "snapshot")
    assert len(nodes.memory_of(nodes.nodes[1].node_id)) == 1
    folders = [folder.name for memory in nodes.memory_folders() for folder in memory.glob("regrow-*")]
    assert len(folders) == 2, "what the raylet before left is this one's, or gone"
    run.process.kill()
