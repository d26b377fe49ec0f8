"""A committed snapshot on its way to storage: keepers write their nodes' parts, the index and COMMIT come last.

Every node writes what its ranks hold, each element once among replicas. Where a node does not, because it is gone or
its memory is damaged, one with its copies does. Neither side needs Ray or torch.
"""

import hashlib
import json
import secrets
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import numpy as np

from regrow.control.values import PartTimes, Scalar, Version
from regrow.errors import CheckpointError
from regrow.plan.boxes import ITEM_BYTES
from regrow.plan.placement import is_first_of_stage
from regrow.state.checksums import checksums, whole_chunks
from regrow.state.disk.format import DataFile, Index
from regrow.state.disk.gather import write_parts as write_stacks
from regrow.state.disk.metadata import encode
from regrow.state.disk.stacks import Part, parts_of
from regrow.state.memory.held import Held, Snapshot, open_snapshot
from regrow.state.memory.slots import SlotHeader
from regrow.storage import Storage

Tensors = dict[str, tuple[str, tuple[int, ...]]]  # name -> dtype, shape
WRITERS = 4  # files of a node that are written at once


@dataclass(frozen=True)
class WriteOrder:
    """Write what ranks of `origin` hold of a step: from its slots, or on its peer from their copies."""

    moment: Version
    origin: str  # the node whose ranks wrote the snapshot
    copies: bool
    folder: str  # in storage, of the step
    token: str  # of the file names: no name is ever written twice
    describe: bool  # the tensors too: one node is enough for that, but for a pipeline's, which do that by themselves


@dataclass(frozen=True)
class Written:
    """The files that came of an order, and what they are parts of."""

    files: tuple[DataFile, ...]
    num_ranks: int
    scalars: dict[str, Scalar]
    tensors_sha256: dict[int, str]  # of each stage that the node's ranks have
    tensors: dict[int, Tensors]  # the same, where they were asked for; of a stage, where its first rank is
    times: PartTimes = field(default_factory=PartTimes)


def write_parts(folder: Path, held: Iterable[Held], order: WriteOrder, *, run_id: str) -> Written:
    """What a keeper does: carry out an order from the files in its folder.

    Every byte is checked on its way against the checksum it got when it was sealed. Raises CheckpointError where the
    folder does not hold the step whole, or bytes are damaged; storage's errors are OSErrors.
    """
    mine = [each for each in held if each.moment == order.moment and each.is_of(order.origin, copy=order.copies)]
    if not mine or len(mine) != mine[0].writers:
        raise CheckpointError(
            f"has {len(mine)} of the {mine[0].writers if mine else 'many'} snapshots of step {order.moment.step}"
        )
    target = Storage.at(order.folder)

    begun = time.monotonic()

    def write(number: int, each: Held) -> tuple[DataFile | None, SlotHeader, PartTimes]:
        snapshot = open_snapshot(folder / each.file)
        if snapshot is None or snapshot.held != each:
            raise CheckpointError(f"{each.file} is not the snapshot of step {order.moment.step} any more")
        name = f"g{order.moment.generation:06d}-{order.token}-{number}.safetensors"
        file, times = _write_file(target, name, snapshot, run_id)
        return file, snapshot.header, times

    with ThreadPoolExecutor(WRITERS, thread_name_prefix="write") as writers:
        outcomes = list(writers.map(write, range(len(mine)), mine))
    took_s = time.monotonic() - begun
    header, stages = outcomes[0][1], {each.coordinates.along("pp")[0]: each for _, each, _ in outcomes}
    tensors = {stage: {box.name: (box.dtype, box.shape) for box in each.boxes} for stage, each in stages.items()}
    digests = {
        stage: hashlib.sha256(json.dumps(sorted(of_stage.items())).encode()).hexdigest()
        for stage, of_stage in tensors.items()
    }
    firsts = {each.coordinates.along("pp")[0] for _, each, _ in outcomes if is_first_of_stage(each.coordinates)}
    if header.coordinates.mesh.pp == 1:
        firsts = {0} if order.describe else set()
    data_files = tuple(file for file, *_ in outcomes if file is not None)
    described = {stage: of_stage for stage, of_stage in tensors.items() if stage in firsts}
    times = _together([each for *_, each in outcomes], took_s)
    return Written(data_files, len(mine), header.scalars, digests, described, times)


def _together(times: Sequence[PartTimes], took_s: float) -> PartTimes:
    """Of files that were written side by side in so long."""
    checking, writing = sum(each.check_s for each in times), sum(each.write_s for each in times)
    check_s = took_s * checking / (checking + writing) if checking else 0.0
    return PartTimes(check_s, took_s - check_s, sum(each.bytes for each in times))


def _write_file(target: Storage, name: str, snapshot: Snapshot, run_id: str) -> tuple[DataFile | None, PartTimes]:
    """Write one rank's part, and what that took; None where it has nothing to write."""
    header = snapshot.header
    parts = parts_of(header.boxes, header.coordinates)
    if not parts:
        return None, PartTimes()
    with snapshot.payload() as payload:
        begun = time.monotonic()
        _check(snapshot, payload, parts)
        checked = time.monotonic()
        memory = {
            number: payload[header.offsets[number] :][: header.boxes[number].num_bytes]
            for number in {number for part in parts for number in part.members}
        }
        of = {"run_id": run_id, "generation": header.generation, "step": header.step}
        file = write_stacks(target, name, parts, header.boxes, memory, **of)
        return file, PartTimes(checked - begun, time.monotonic() - checked, file.num_bytes)


def _check(snapshot: Snapshot, payload: memoryview, parts: Sequence[Part]) -> None:
    """What is written of a snapshot is what was sealed. Raises CheckpointError."""
    offsets, first_chunks = snapshot.header.offsets, snapshot.header.first_chunks
    for part in parts:
        first, last = part.start // part.stack.width, -(-part.stop // part.stack.width)
        for number in set(part.members):
            box, at = snapshot.header.boxes[number], part.rows.start
            row = box.num_bytes // len(part.rows)
            begin, end, chunks = whole_chunks((first - at) * row, (last - at) * row, box.num_bytes)
            crc = snapshot.crc[first_chunks[number] :][chunks]
            if not np.array_equal(checksums(payload[offsets[number] + begin : offsets[number] + end]), crc):
                raise CheckpointError(f"{snapshot.path.name}: {box.name} fails its checksum")


@dataclass
class Upload:
    """One checkpoint in the making, put together from what nodes have written. `control.checkpoints` decides which.

    `nodes` are those of the snapshot's generation.
    """

    moment: Version
    nodes: tuple[str, ...]
    folder: Storage  # of the step
    run_id: str
    _written: dict[str, Written] = field(default_factory=dict)  # by origin

    def orders(self) -> list[tuple[str, WriteOrder]]:
        """(node, order) to begin with: each node its own."""
        return [(node, self.order(node, copies=False, describe=node == self.nodes[0])) for node in self.nodes]

    def done(self, order: WriteOrder, written: Written) -> None:
        """An order was carried out."""
        self._written[order.origin] = written

    @property
    def complete(self) -> bool:
        return self._written.keys() == set(self.nodes)

    def index(self) -> Index:
        """Of the complete checkpoint. Raises CheckpointError where nodes hold different things."""
        first, digests = self._written[self.nodes[0]], dict[int, tuple[str, str]]()
        for node, written in self._written.items():
            for stage, digest in written.tensors_sha256.items():
                known, of_known = digests.setdefault(stage, (node, digest))
                if (written.scalars, digest) != (first.scalars, of_known):
                    raise CheckpointError(f"node {node[:12]} holds another state than {known[:12]}")
        stages = {stage: each for written in self._written.values() for stage, each in written.tensors.items()}
        assert stages.keys() == digests.keys(), f"{stages.keys()=} {digests.keys()=}"
        tensors = {name: each[name] for each in stages.values() for name in each}
        files = tuple(file for written in self._written.values() for file in written.files)
        have = sum(file.num_bytes - file.header_bytes for file in files)
        need = sum(prod(shape) * ITEM_BYTES[dtype] for dtype, shape in tensors.values())
        if have != need:
            raise CheckpointError(f"the nodes hold {have:,} of the {need:,} bytes of the state")
        num_ranks = sum(written.num_ranks for written in self._written.values())
        return Index(
            run_id=self.run_id,
            generation=self.moment.generation,
            step=self.moment.step,
            scalars=first.scalars,
            tensors={name: tensors[name] for name in sorted(tensors)},
            files=files,
            information={"world_size": num_ranks, "written_at": time.time()},
        )

    def order(self, origin: str, *, copies: bool, describe: bool) -> WriteOrder:
        """To write what ranks of `origin` hold: from their snapshots, or from the copies of them."""
        return WriteOrder(self.moment, origin, copies, str(self.folder), secrets.token_hex(4), describe)


def write_index(folder: Storage, index: Index) -> bytes:
    """Write the metadata file of a checkpoint whose files are there; what COMMIT is to hold.

    Raises CheckpointError where the files do not hold every element once.
    """
    head, rest = encode(index)
    name = f"g{index.generation:06d}-{secrets.token_hex(4)}.metadata"
    folder.write_chunks(name, [head, rest])
    return json.dumps({"index": name, "bytes": len(head), "sha256": hashlib.sha256(head).hexdigest()}).encode()
