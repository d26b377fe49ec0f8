"""One long run through resizes of real raylets, with nodes killed under it: every step gets exactly its batch."""

import contextlib
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from regrow.config.schema import DataConfig, OptimConfig, PretrainConfig
from regrow.data.read.batch import direct_batches, layout_of
from regrow.data.read.corpora import Corpora, order_of
from regrow.data.stream.actor import start_stream, stop_stream
from regrow.plan.batch import plan_batch
from support.corpus import write_rows
from support.streaming import consume_batches

CONFIG = PretrainConfig(
    data=DataConfig(seq_len=64, rows_per_group=8, rows_per_shard=64, window_steps=4, prefetch_windows=2),
    optim=OptimConfig(global_batch_seqs=24, num_slices=12),
)
LAYOUT = layout_of(CONFIG)
STEPS = 240
AFTERWARDS = 15  # steps that a group may do after what it was waited for
STALL_S = 5.0
RANK = "rank_slot"


class Nodes:
    """A head without CPUs, nodes that hold ranks, and data nodes, on which alone windows can be produced."""

    def __init__(self) -> None:
        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        self.ranks: list[Any] = []
        self.data: list[Any] = []

    def add_rank(self) -> None:
        self.ranks.append(self.cluster.add_node(num_cpus=0, resources={RANK: 1}, wait=True))

    def add_data(self) -> None:
        self.data.append(self.cluster.add_node(num_cpus=1, wait=True))

    def kill(self, node: Any) -> None:
        """The raylet and all its processes at once, with the blocks in its memory."""
        self.cluster.remove_node(node, allow_graceful=False)


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    nodes = Nodes()
    try:
        for _ in range(2):
            nodes.add_data()
        for _ in range(3):
            nodes.add_rank()
        ray.init(address=nodes.cluster.address, logging_level=logging.ERROR, log_to_driver=False)
        yield nodes
    finally:
        ray.shutdown()
        nodes.cluster.shutdown()


class Record:
    """What the ranks of the current group have trained on: parts of each step's digest."""

    def __init__(self) -> None:
        self.parts: dict[tuple[int, int], dict[int, int]] = {}  # (group, step) -> rank -> digest
        self.direct: dict[int, set[int]] = {}  # group -> windows that some rank read from the shards

    def step(self, group: int, step: int, rank: int, digest: int) -> None:
        self.parts.setdefault((group, step), {})[rank] = digest

    def fallback(self, group: int, window: int) -> None:
        self.direct.setdefault(group, set()).add(window)

    def read(self, group: int, world_size: int) -> dict[int, int]:
        """Digests of the steps that all ranks of a group have done."""
        return {
            step: sum(parts.values()) % 2**64
            for (g, step), parts in self.parts.items()
            if g == group and len(parts) == world_size
        }

    def read_directly(self, group: int) -> set[int]:
        return self.direct.get(group, set())


@ray.remote(num_cpus=0, resources={RANK: 1}, max_retries=0)
def rank_of_group(
    stream: Any, record: Any, corpora: Corpora, group: int, rank: int, slices: range, steps: range, step_s: float
) -> None:
    consume_batches(
        CONFIG,
        corpora,
        [stream.get.remote],
        slices,
        steps,
        stall_timeout_s=STALL_S,
        step_s=step_s,
        seen=lambda step, digest: ray.get(record.step.remote(group, step, rank, digest)),
        on_fallback=lambda window, reason: record.fallback.remote(group, window),
    )


@pytest.mark.long
def test_no_position_is_lost_or_repeated_while_nodes_come_and_die(nodes: Nodes, tmp_path: Path) -> None:
    write_rows(tmp_path, num_rows=301, seq_len=64)  # 12.5 global batches an epoch
    corpora = Corpora.at(tmp_path)
    order = order_of(CONFIG, corpora)
    undisturbed = [
        batch.digest()
        for batch in direct_batches(
            order, corpora.reader("train"), LAYOUT, slices=range(12), start_step=0, stop_step=STEPS
        )
    ]
    stream = start_stream(CONFIG, corpora, start_step=0, stop_step=STEPS)
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    record = ray.remote(Record).options(num_cpus=0, scheduling_strategy=here).remote()
    trained: list[int] = []  # digests of the steps that count, as the weights saw them

    def train(group: int, until: int, event: Any, *, rollback: int = 0, step_s: float = 0.05) -> None:
        """Run a group on all rank nodes until it has done step `until`; then let the event happen, and end it."""
        begin = max(0, len(trained) - rollback)
        world_size, steps = len(nodes.ranks), range(begin, min(until + AFTERWARDS, STEPS))
        tasks = [
            rank_of_group.remote(stream, record, corpora, group, rank, slices, steps, step_s)
            for rank, slices in enumerate(plan_batch(num_slices=12, world_size=world_size).ranges)
        ]
        deadline = time.monotonic() + 60
        while len(done := ray.get(record.read.remote(group, world_size))) < until - begin:
            ended, _ = ray.wait(tasks, num_returns=len(tasks), timeout=0)
            ray.get(ended)  # raises what a rank raised
            assert time.monotonic() < deadline, f"group {group} has done {len(done)} steps from {begin}"
            time.sleep(0.05)
        event(tasks)
        done = ray.get(record.read.remote(group, world_size))
        assert sorted(done) == list(range(begin, begin + len(done)))
        for step in range(begin, len(trained)):  # what was rolled back is done again, the same
            assert done[step] == trained[step]
        trained[begin:] = [done[step] for step in sorted(done)]
        for task in tasks:
            ray.cancel(task, force=True)
        for task in tasks:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.get(task, timeout=60)

    def nothing(tasks: list[Any]) -> None:
        pass

    def lose_a_data_node(tasks: list[Any]) -> None:
        """The group goes on through it."""
        nodes.kill(nodes.data.pop(0))
        ray.wait(tasks, num_returns=len(tasks), timeout=8.0)

    def lose_a_rank(tasks: list[Any]) -> None:
        nodes.kill(nodes.ranks.pop(0))
        ray.wait(tasks, num_returns=1, timeout=30.0)

    train(0, 20, lose_a_data_node)  # W=3
    assert len(trained) > 20
    train(1, len(trained) + 15, lose_a_rank)  # W=3, on what blocks the other data node produces
    nodes.add_data()
    train(2, len(trained) + 20, nothing, rollback=3)  # W=2
    nodes.add_rank()
    nodes.add_rank()
    train(3, len(trained) + 20, lose_a_data_node)  # W=4
    nodes.add_data()
    train(4, len(trained) + 12, lose_a_rank, rollback=9)  # W=4, back over a window's border
    nodes.kill(nodes.ranks.pop())
    nodes.kill(nodes.ranks.pop())
    train(5, len(trained) + 20, nothing, rollback=1)  # W=1
    nodes.add_rank()
    train(6, STEPS, nothing, step_s=0.02)  # W=2, to the end
    assert trained == undisturbed
    served = sorted(set(range(len(trained) // LAYOUT.window_steps)) - ray.get(record.read_directly.remote(6)))
    assert served[-1] > STEPS // LAYOUT.window_steps - 10  # the stream came back after all of it
    stop_stream(stream)
