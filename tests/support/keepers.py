"""Nodes without Ray for tests: keepers on threads of this process, ranks that take snapshots, checkpoints from them."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from regrow.control.values import Peer, SnapshotAck, Version
from regrow.plan.boxes import Box
from regrow.plan.mesh import Coordinates, MeshShape
from regrow.plan.placement import placed
from regrow.state.disk.catalog import step_folder
from regrow.state.disk.format import COMMIT, DataFile
from regrow.state.disk.upload import Upload
from regrow.state.entries import Entry
from regrow.state.memory import held
from regrow.state.memory.holders import Holder
from regrow.state.memory.node import KeeperNode
from regrow.state.memory.slots import Committed
from regrow.state.memory.transport import Transport
from regrow.state.memory.writer import Snapshots
from regrow.storage import Storage

SECRET = b"of this run"
RUN = "0123456789abcdef"
SHAPES = {"model/embed": (97, 200), "model/norm": (20,), "model/w": (7, 300), "optim/exp_avg/w": (7, 300)}


def state(step: int) -> dict[str, torch.Tensor]:
    """The whole state after a step."""
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def scalars_of(step: int) -> dict[str, int]:
    return {"step": step, "cursor": 12 * step}


def entries_of(shard: int, num_shards: int, whole: dict[str, torch.Tensor] | None = None) -> list[Entry]:
    """A rank's shards: of a state, or of zeros."""
    entries = []
    for name, shape in SHAPES.items():
        box = placed(Box.whole(name, shape), Coordinates(MeshShape(1, num_shards), shard))
        memory = torch.zeros(box.num_elements)
        if whole is not None:
            memory.copy_(whole[name][box.slices].reshape(-1))
        entries.append(Entry(box, memory))
    return entries


def assert_state(entries: Sequence[Entry], step: int) -> None:
    """Every element is that of the state after `step`."""
    whole = state(step)
    for entry in entries:
        assert torch.equal(entry.memory, whole[entry.box.name][entry.box.slices].reshape(-1)), entry.box


@dataclass
class Node:
    keeper: KeeperNode
    reports: list[SnapshotAck] = field(default_factory=list)


def peers_of(nodes: Sequence[Node], number: int, copies: int = 1) -> tuple[Peer, ...]:
    """The nodes after this one."""
    after = [nodes[(number + each) % len(nodes)].keeper for each in range(1, copies + 1)]
    return tuple(Peer(keeper.node, keeper.address) for keeper in after)


@contextmanager
def cluster(
    folder: Path, num_nodes: int, copies: int = 1, transport: Callable[[str], Transport | None] = lambda node: None
) -> Iterator[list[Node]]:
    """Keepers of some nodes, the next ones being each one's peers."""
    nodes: list[Node] = []
    try:
        for number in range(num_nodes):
            reports: list[SnapshotAck] = []
            keeper = KeeperNode(
                folder / f"n{number}",
                node=f"node-{number}",
                host="127.0.0.1",
                secret=SECRET,
                run_id=RUN,
                report=reports.append,
                transport=transport(f"node-{number}"),
            )
            nodes.append(Node(keeper, reports))
        for number, node in enumerate(nodes):
            node.keeper.set_peers(peers_of(nodes, number, min(copies, num_nodes - 1)))
            node.keeper.start()
        yield nodes
    finally:
        for node in nodes:
            node.keeper.close(delete=True)


def wait_until(condition: Callable[[], object], deadline_s: float = 20.0) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def snapshot(
    nodes: list[Node], step: int, num_shards: int, *, generation: int = 1, replicas: int = 1, also: Sequence[int] = ()
) -> list[Snapshots]:
    """All ranks of a group take a snapshot of the state of `step`; returns once every node has reported it.

    `also`: then of these steps, into other slots.
    """
    entries, writers = [], []
    ranks = [(replica, shard) for replica in range(replicas) for shard in range(num_shards)]
    places = [number % len(nodes) for number in range(len(ranks))]
    for (replica, shard), place in zip(ranks, places, strict=True):
        entries.append(entries_of(shard, num_shards))
        writers.append(
            Snapshots(
                nodes[place].keeper.folder,
                entries[-1],
                coordinates=Coordinates(MeshShape(replicas, num_shards), replica * num_shards + shard),
                run_id=RUN,
                generation=generation,
                writers=places.count(place),
            )
        )
    used = [nodes[place] for place in sorted(set(places))]
    for each in (step, *also):
        moment = Version(generation, each)
        step_to(each, writers, entries)
        wait_until(lambda: all(any(report.version == moment for report in node.reports) for node in used))  # noqa: B023
    return writers


def step_to(step: int, writers: Sequence[Snapshots], entries: Sequence[Sequence[Entry]]) -> None:
    """All ranks have the state of this step, and take a snapshot of it."""
    whole = state(step)
    for mine, writer in zip(entries, writers, strict=True):
        for entry in mine:
            entry.memory.copy_(whole[entry.box.name][entry.box.slices].reshape(-1))
        assert writer.begin(step, scalars_of(step))
        writer.wait()
        writer.confirm(step)


def holders(nodes: list[Node], step: int) -> list[Holder]:
    """Who holds what of a step, as all keepers say."""
    found = []
    for node in nodes:
        held_of_step = [held for held in node.keeper.holdings() if held.moment.step == step]
        found += [Holder(node.keeper.node, node.keeper.address, held) for held in held_of_step]
    return found


def write_checkpoint(nodes: list[Node], checkpoints: Storage, step: int, generation: int = 1) -> list[DataFile]:
    """Have keepers write a snapshot that is in memory to storage, and commit it."""
    moment = Version(generation, step)
    keepers = {report.node: node.keeper for node in nodes for report in node.reports if report.version == moment}
    folder = checkpoints / step_folder(step)
    upload = Upload(moment, tuple(keepers), folder, RUN)
    files = list[DataFile]()
    for node, order in upload.orders():
        written = keepers[node].write(order)
        upload.done(order, written)
        files += written.files
    folder.write_bytes(COMMIT, upload.index_order.carry_out(folder, lambda files: files).commit)
    return files


def large_slots(node: Node, *, num_ranks: int, elements: int) -> list[Snapshots]:
    """Of ranks of one node, sealed at the same time."""
    made = []
    for rank in range(num_ranks):
        box = Box("model/w", (num_ranks * elements,), (rank * elements,), (elements,), "float32")
        memory = torch.randn(elements)
        place = Coordinates(MeshShape(1, num_ranks), rank)
        made.append(
            Snapshots(
                node.keeper.folder,
                [Entry(box, memory)],
                coordinates=place,
                run_id=RUN,
                generation=1,
                writers=num_ranks,
                num_slots=2,
            )
        )
    return made


def assert_copies_arrive(nodes: Sequence[Node], *, num_ranks: int, elements: int) -> None:
    """Ranks of the first node take three snapshots; after each one all other nodes have copies whose checksums hold."""
    ranks = large_slots(nodes[0], num_ranks=num_ranks, elements=elements)
    for step in (1, 2, 3):
        for each in ranks:
            assert each.begin(step, scalars_of(step))
            each.wait()
        for each in ranks:
            each.confirm(step)
        reported = Version(1, step)
        wait_until(lambda want=reported: nodes[0].reports and nodes[0].reports[-1].version == want)  # type: ignore[misc]
        for node in nodes[1:]:
            copies = [each for each in held.holdings(node.keeper.folder, RUN) if each.moment == Version(1, step)]
            assert len(copies) == num_ranks
            for copy in copies:
                snapshot = held.open_snapshot(node.keeper.folder / copy.file)
                assert snapshot is not None
                snapshot.check()
        for node in nodes:
            node.keeper.committed(Committed.of_plain({"number": step, "newest": [1, step], "pinned": [-1, -1]}))
    for each in ranks:
        each.close()
