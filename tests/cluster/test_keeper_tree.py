"""Reports go up a tree of keepers, commits down it: real keepers, a real coordinator, two of them under each."""

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from regrow.config.schema import ClusterConfig, ObserveConfig, PretrainConfig
from regrow.control import commands as c
from regrow.control import events as e
from regrow.control.core import Control
from regrow.control.membership import Member
from regrow.control.peers import plan_peers, plan_tree
from regrow.control.values import SnapshotAck, Version
from regrow.runtime.fleet import Fleet
from regrow.runtime.keeper import GROUPS, Keeper
from regrow.runtime.publisher import Publisher
from regrow.state.memory.held import is_whole
from regrow.state.memory.slots import Committed
from regrow.storage import Storage

NODES = [f"node-{number}" for number in range(7)]  # two, then four, then one


class Root:
    """Control and its keepers in an actor of their own, as the coordinator has them; a tree with two at its top."""

    def __init__(self, folder: Path, secret: bytes) -> None:
        config = PretrainConfig(cluster=ClusterConfig(max_workers=8), observe=ObserveConfig(metrics=False))
        self.control = Control(config, is_whole=is_whole, now=0.0, fan_out=2)
        publisher = Publisher(Storage.at(folder / "checkpoints"), "run", keep=2, flush_log=lambda: None)
        self.fleet = Fleet("run", secret, publisher)
        self.calls = 0

    def ready(self) -> int:
        return 0

    def tell(self, event: Any) -> None:
        carriers: dict[type, Any] = {c.SendPlaces: self.fleet.send_places, c.Announce: self.fleet.announce}
        for command in self.control.on(event, 1.0):
            carriers.get(type(command), lambda command: None)(command)

    def begin(self, keepers: dict[str, tuple[Any, Any]]) -> None:
        self.tell(e.Joined(Member("one for all", NODES[0], "host", 1, 1), 1))
        self.tell(e.Asked("one for all", 0))
        for handle, info in keepers.values():
            self.tell(self.fleet.register(handle, info))
        self.tell(e.Began(1, 0, tuple(keepers), {}))
        ray.get([handle.pulses.remote() for handle, _ in keepers.values()])  # asked after: they know their places

    def snapshots_sealed(self, reports: list[SnapshotAck]) -> None:
        self.calls += 1
        self.tell(e.Sealed(reports))

    def newest(self) -> tuple[Version | None, int]:
        return self.control.newest_snapshot, self.calls


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with tempfile.TemporaryDirectory(prefix="rgt", dir="/tmp", ignore_cleanup_errors=True) as temporary:
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            namespace="regrow",
            labels={"rack": "r7"},
            _temp_dir=f"{temporary}/ray",
        )
        try:
            yield Path(temporary)
        finally:
            ray.shutdown()


def test_a_step_that_all_report_is_committed_and_all_hear_of_it(folder: Path) -> None:
    assert [branch.num_nodes for branch in plan_tree(NODES, fan_out=2).values()] == [4, 3, 2, 1, 1, 1, 1]
    secret = b"of this run"
    root: Any = ray.remote(Root).options(num_cpus=0).remote(folder, secret)
    keeper: Any = ray.remote(concurrency_groups=GROUPS)(Keeper).options(num_cpus=0, max_concurrency=8)
    handles = {node: keeper.remote("run", node, str(folder / f"regrow-run-{node}"), "rack", 600.0) for node in NODES}
    infos = ray.get([handle.serve.remote(root, secret) for handle in handles.values()], timeout=120)
    assert {info.domain for info in infos} == {"r7"}
    assert all(info.object_store_bytes == 0 for info in infos), "its folder is not in /dev/shm"
    ray.get(root.begin.remote({info.node: (handles[info.node], info) for info in infos}), timeout=60)
    peers = plan_peers([(node, node) for node in NODES])
    for number, step in enumerate((1, 2), 1):
        moment = Version(1, step)
        for node in NODES[:-1]:
            ray.get(handles[node].relay.remote([SnapshotAck(node, moment, peers[node])]), timeout=60)
        time.sleep(0.2)
        assert ray.get(root.newest.remote())[0] == (Version(1, step - 1) if step > 1 else None), "one has not reported"
        handles[NODES[-1]].relay.remote([SnapshotAck(NODES[-1], moment, peers[NODES[-1]])])
        wait_until(lambda: all(Committed.read(Path(info.folder)).newest == moment for info in infos))  # noqa: B023
        assert ray.get(root.newest.remote()) == (moment, 2 * number), "two messages a step"
    again = SnapshotAck(NODES[-1], Version(1, 2), ("node-3",))  # others hold its copies now, say all but its leaders
    handles[NODES[-1]].relay.remote([again])
    wait_until(lambda: ray.get(root.newest.remote())[1] == 5)


def wait_until(condition: Any, deadline_s: float = 30.0) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)
