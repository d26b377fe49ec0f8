"""A committed snapshot on its way to storage: keepers write their nodes' parts, the index and COMMIT come last.

Every node writes what its ranks hold, each element once among replicas. Where a node does not, because it is gone or
its memory is damaged, one with its copies does. In a large group an order goes down a tree of keepers, and what came of
it up, joined on its way (`Joined`). Neither side needs Ray or torch.
"""

import contextlib
import hashlib
import json
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

from regrow.control.values import PartTimes, Scalar, Version
from regrow.errors import CheckpointError
from regrow.plan.boxes import ITEM_BYTES
from regrow.plan.placement import is_first_of_stage
from regrow.state.checksums import hold, whole_chunks
from regrow.state.disk.format import DataFile, Index
from regrow.state.disk.gather import in_files
from regrow.state.disk.gather import write_parts as write_stacks
from regrow.state.disk.metadata import encode
from regrow.state.disk.packed import PackedFiles
from regrow.state.disk.stacks import Part, parts_of
from regrow.state.memory.held import Held, Snapshot, open_snapshot
from regrow.state.memory.slots import SlotHeader
from regrow.storage import Storage

Tensors = dict[str, tuple[str, tuple[int, ...]]]  # name -> dtype, shape
Fetch = Callable[[Any], PackedFiles]  # of `Joined.files`
WRITERS = 4  # files of a node that are written at once
TOKEN_BYTES = 8  # of an order: many thousand nodes make one each for the same folder


@dataclass(frozen=True)
class WriteOrder:
    """Write what ranks of `origin` hold of a step: from its slots, or on its peer from their copies."""

    moment: Version
    origin: str  # the node whose ranks wrote the snapshot
    copies: bool
    folder: str  # in storage, of the step
    token: str  # of the file names: no name is ever written twice
    describe: bool  # the tensors too: one node is enough for that, but for a pipeline's, which do that by themselves
    repeats: str = ""  # an order for all, by its token: what the node has written for it is the answer to this one


@dataclass(frozen=True)
class OrderForAll:
    """Every node of a tree is to write what its own ranks hold of a step."""

    moment: Version
    folder: str
    token: str  # of the order
    describes: str  # the node that is to describe the tensors, too
    timeout_s: float  # for what members answer

    def of(self, node: str) -> WriteOrder:
        """That node's own."""
        token = secrets.token_hex(TOKEN_BYTES)
        return WriteOrder(self.moment, node, False, self.folder, token, node == self.describes)


@dataclass(frozen=True)
class Written:
    """The files that came of an order, and what they are parts of."""

    files: tuple[DataFile, ...]
    num_ranks: int
    scalars: dict[str, Scalar]
    tensors_sha256: dict[int, str]  # of each stage that the node's ranks have
    tensors: dict[int, Tensors]  # the same, where they were asked for; of a stage, where its first rank is
    times: PartTimes = field(default_factory=PartTimes)


@dataclass(frozen=True)
class State:
    """What ranks of a node hold parts of."""

    scalars: dict[str, Scalar]
    tensors_sha256: dict[int, str]


@dataclass(frozen=True)
class Joined:
    """What many nodes have written, each its own."""

    times: dict[str, PartTimes]  # by node, of those that have
    problems: dict[str, tuple[str, bool]]  # the same of those that could not: why, and whether they have no such part
    num_ranks: int
    states: tuple[tuple[str, State], ...]  # all different ones, each with a node that holds it
    tensors: dict[int, Tensors]
    files: Any  # PackedFiles, or where the runtime finds them

    @staticmethod
    def of(written: Mapping[str, Written], problems: Mapping[str, tuple[str, bool]] | None = None) -> "Joined":
        """What nodes have written, by node."""
        held = {node: State(each.scalars, each.tensors_sha256) for node, each in written.items()}
        return Joined(
            {node: each.times for node, each in written.items()},
            dict(problems or {}),
            sum(each.num_ranks for each in written.values()),
            _different(held.items()),
            {stage: tensors for each in written.values() for stage, tensors in each.tensors.items()},
            PackedFiles.of({node: each.files for node, each in written.items()}),
        )

    @staticmethod
    def together(some: Sequence["Joined"]) -> "Joined":
        """All of these, whose files are at hand."""
        return Joined(
            {node: times for each in some for node, times in each.times.items()},
            {node: problem for each in some for node, problem in each.problems.items()},
            sum(each.num_ranks for each in some),
            _different(held for each in some for held in each.states),
            {stage: tensors for each in some for stage, tensors in each.tensors.items()},
            PackedFiles.joined([each.files for each in some]),
        )


def _different(held: Iterable[tuple[str, State]]) -> tuple[tuple[str, State], ...]:
    found: list[tuple[str, State]] = []
    for node, state in held:
        if all(state != known for _, known in found):
            found.append((node, state))
    return tuple(found)


def write_parts(folder: Path, held: Iterable[Held], order: WriteOrder, *, run_id: str) -> Written:
    """What a keeper does: carry out an order from the files in its folder.

    Every byte is checked against the checksum it got when it was sealed, beside the writing: no file is complete before
    all in it is. An order that fails leaves no file. Raises CheckpointError where the folder does not hold the step
    whole, bytes are damaged, or ranks keep different numbers; storage's errors are OSErrors.
    """
    mine = [each for each in held if each.moment == order.moment and each.is_of(order.origin, copy=order.copies)]
    if not mine or len(mine) != mine[0].writers:
        raise CheckpointError(
            f"has {len(mine)} of the {mine[0].writers if mine else 'many'} snapshots of step {order.moment.step}"
        )
    target, complete = Storage.at(order.folder), list[str]()
    try:
        return _write_all(folder, mine, order, target, complete, run_id=run_id)
    except Exception:
        target.retry_s = 0.0  # where storage does not answer, others wait for this one to say so
        for name in complete:  # tried again on a full disk, they would add up
            with contextlib.suppress(Exception):  # storage raises many kinds
                target.delete(name)
        raise


def _write_all(
    folder: Path, mine: Sequence[Held], order: WriteOrder, target: Storage, complete: list[str], *, run_id: str
) -> Written:
    """`write_parts` of these; `complete` gets the name of each file that is."""
    begun = time.monotonic()

    def write(number: int, each: Held) -> tuple[list[DataFile], SlotHeader, PartTimes]:
        snapshot = open_snapshot(folder / each.file)
        if snapshot is None or snapshot.held != each:
            raise CheckpointError(f"{each.file} is not the snapshot of step {order.moment.step} any more")
        name = f"g{order.moment.generation:06d}-{order.token}-{number}"
        files, times = _write_files(target, name, snapshot, run_id, complete)
        return files, snapshot.header, times

    with ThreadPoolExecutor(WRITERS, thread_name_prefix="write") as writers:
        outcomes = list(writers.map(write, range(len(mine)), mine))
    took_s = time.monotonic() - begun
    header = outcomes[0][1]
    for _, each, _ in outcomes:
        if each.scalars != header.scalars:
            raise CheckpointError(
                f"rank {each.coordinates.rank} keeps other numbers of step {order.moment.step} than rank "
                f"{header.coordinates.rank}: train.callback's state has to be a function of the rows"
            )
    stages = {each.coordinates.along("pp")[0]: each for _, each, _ in outcomes}
    tensors = {stage: {box.name: (box.dtype, box.shape) for box in each.boxes} for stage, each in stages.items()}
    digests = {
        stage: hashlib.sha256(json.dumps(sorted(of_stage.items())).encode()).hexdigest()
        for stage, of_stage in tensors.items()
    }
    firsts = {each.coordinates.along("pp")[0] for _, each, _ in outcomes if is_first_of_stage(each.coordinates)}
    if header.coordinates.mesh.pp == 1:
        firsts = {0} if order.describe else set()
    data_files = tuple(file for files, *_ in outcomes for file in files)
    described = {stage: of_stage for stage, of_stage in tensors.items() if stage in firsts}
    times = _together([each for *_, each in outcomes], took_s)
    return Written(data_files, len(mine), header.scalars, digests, described, times)


def _together(times: Sequence[PartTimes], took_s: float) -> PartTimes:
    """Of files that were written side by side in so long."""
    checking, writing = sum(each.check_s for each in times), sum(each.write_s for each in times)
    return PartTimes(took_s * checking / writing if writing else 0.0, took_s, sum(each.bytes for each in times))


def _write_files(
    target: Storage, name: str, snapshot: Snapshot, run_id: str, complete: list[str]
) -> tuple[list[DataFile], PartTimes]:
    """Write one rank's part, and what that took; no file where it has nothing to write."""
    header = snapshot.header
    parts = parts_of(header.boxes, header.coordinates)
    if not parts:
        return [], PartTimes()
    begun, files = time.monotonic(), list[DataFile]()
    with snapshot.payload() as payload, ThreadPoolExecutor(1, thread_name_prefix="check") as checker:
        checking = checker.submit(_check, snapshot, payload, parts)
        memory = {
            number: payload[header.offsets[number] :][: header.boxes[number].num_bytes]
            for number in {number for part in parts for number in part.members}
        }
        of = {"run_id": run_id, "generation": header.generation, "step": header.step}
        for number, some in enumerate(in_files(parts)):
            file_name = f"{name}{f'-{number}' if number else ''}.safetensors"
            files.append(write_stacks(target, file_name, some, header.boxes, memory, checking.result, **of))
            complete.append(file_name)
        num_bytes = sum(file.num_bytes for file in files)
        return files, PartTimes(checking.result(), time.monotonic() - begun, num_bytes)


def _check(snapshot: Snapshot, payload: memoryview, parts: Sequence[Part]) -> float:
    """What is written of a snapshot is what was sealed; the seconds that took. Raises CheckpointError."""
    begun = time.monotonic()
    offsets, first_chunks = snapshot.header.offsets, snapshot.header.first_chunks
    for part in parts:
        first, last = part.start // part.stack.width, -(-part.stop // part.stack.width)
        for number in set(part.members):
            box, at = snapshot.header.boxes[number], part.rows.start
            row = box.num_bytes // len(part.rows)
            begin, end, chunks = whole_chunks((first - at) * row, (last - at) * row, box.num_bytes)
            crc = snapshot.crc[first_chunks[number] :][chunks]
            if not hold(payload[offsets[number] + begin : offsets[number] + end], crc):
                raise CheckpointError(f"{snapshot.path.name}: {box.name} fails its checksum")
    return time.monotonic() - begun


@dataclass(frozen=True)
class Published:
    """A metadata file that is written."""

    num_bytes: int  # of the data files
    commit: bytes  # what COMMIT is to hold


@dataclass
class Upload:
    """One checkpoint in the making, put together from what nodes have written. `control.checkpoints` decides which.

    `nodes` are those of the snapshot's generation.
    """

    moment: Version
    nodes: tuple[str, ...]
    folder: Storage  # of the step
    run_id: str
    for_all: OrderForAll | None = None  # the order that all nodes have, where they have one
    _written: dict[str, Written] = field(default_factory=dict)  # by origin
    _joined: list[Joined] = field(default_factory=list)

    def orders(self) -> list[tuple[str, WriteOrder]]:
        """(node, order) to begin with: each node its own."""
        return [(node, self.order(node, copies=False, describe=node == self.nodes[0])) for node in self.nodes]

    def order_all(self, describes: str, timeout_s: float) -> OrderForAll:
        """To write what each node's own ranks hold."""
        token = secrets.token_hex(TOKEN_BYTES)
        self.for_all = OrderForAll(self.moment, str(self.folder), token, describes, timeout_s)
        return self.for_all

    def order(self, origin: str, *, copies: bool, describe: bool) -> WriteOrder:
        """To write what ranks of `origin` hold: from their snapshots, or from the copies of them."""
        repeats = self.for_all.token if self.for_all is not None and not copies else ""
        token = secrets.token_hex(TOKEN_BYTES)
        return WriteOrder(self.moment, origin, copies, str(self.folder), token, describe, repeats)

    def done(self, order: WriteOrder, written: Written) -> None:
        """An order was carried out."""
        self._written[order.origin] = written

    def joined(self, joined: Joined) -> None:
        """An order for all was, by some of the nodes."""
        self._joined.append(joined)

    @property
    def complete(self) -> bool:
        return {*self._written}.union(*(each.times for each in self._joined)) == set(self.nodes)

    def files_of(self, origin: str) -> Any:
        """What was written of an origin's: its files, or those of many nodes, or where the runtime finds these."""
        found = next((each.files for each in self._joined if origin in each.times), None)
        return self._written[origin].files if found is None else found

    @property
    def index_order(self) -> "IndexOrder":
        """To put together what nodes have written, every origin once: the checkpoint is complete."""
        joined = {origin for each in self._joined for origin in each.times}
        rest = {node: self._written[node] for node in self.nodes if node not in joined}
        pieces = [*self._joined, *([Joined.of(rest)] if rest else [])]
        return IndexOrder(self.moment, str(self.folder), self.run_id, tuple(pieces))


@dataclass(frozen=True)
class IndexOrder:
    """Write the metadata file of a checkpoint whose parts are there."""

    moment: Version
    folder: str
    run_id: str
    pieces: tuple[Joined, ...]

    def carry_out(self, target: Storage, fetch: Fetch) -> Published:
        """`target`: the folder, in storage. Raises CheckpointError where nodes hold different things, and OSError."""
        whole = Joined.together([replace(each, files=fetch(each.files)) for each in self.pieces])
        pointer = write_index(target, self._index(whole), whole.files)
        return Published(whole.files.num_bytes, pointer)

    def _index(self, whole: Joined) -> Index:
        first, digests = whole.states[0][1], dict[int, tuple[str, str]]()
        for node, state in whole.states:
            for stage, digest in state.tensors_sha256.items():
                known, of_known = digests.setdefault(stage, (node, digest))
                if (state.scalars, digest) != (first.scalars, of_known):
                    raise CheckpointError(f"node {node[:12]} holds another state than {known[:12]}")
        assert whole.tensors.keys() == digests.keys(), f"{whole.tensors.keys()=} {digests.keys()=}"
        tensors = {name: each[name] for each in whole.tensors.values() for name in each}
        have = whole.files.tensor_bytes
        need = sum(prod(shape) * ITEM_BYTES[dtype] for dtype, shape in tensors.values())
        if have != need:
            raise CheckpointError(f"the nodes hold {have:,} of the {need:,} bytes of the state")
        return Index(
            run_id=self.run_id,
            generation=self.moment.generation,
            step=self.moment.step,
            scalars=first.scalars,
            tensors={name: tensors[name] for name in sorted(tensors)},
            files=(),
            information={"world_size": whole.num_ranks, "written_at": time.time()},
        )


def write_index(folder: Storage, index: Index, files: PackedFiles) -> bytes:
    """Write the metadata file of a checkpoint whose files are there; what COMMIT is to hold.

    Raises CheckpointError where the files do not hold every element once.
    """
    head, rest = encode(index, files)
    name = f"g{index.generation:06d}-{secrets.token_hex(4)}.metadata"
    folder.write_chunks(name, [head, rest])
    return json.dumps({"index": name, "bytes": len(head), "sha256": hashlib.sha256(head).hexdigest()}).encode()
