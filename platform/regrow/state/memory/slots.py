"""Snapshot slots: one rank's part of the training state of one step, as a plain file in memory (`/dev/shm`).

    magic, header bytes, sha256 of the header | header: JSON | padding | payload: the boxes, each at 64 bytes' multiple

A slot without its magic is empty, whatever else it holds: the magic is taken away before anything is overwritten and
put back last, once the payload is whole and the step is known to have succeeded on every rank. Files outlive the
process that wrote them; pages are there from the start, because touching cold ones costs more than the copy. Imports
torch for trainers only: keepers and the coordinator do without.
"""

import hashlib
import json
import mmap
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regrow.errors import CheckpointError
from regrow.plan.boxes import Box
from regrow.plan.mesh import Coordinates, MeshShape
from regrow.state.checksums import num_chunks

if TYPE_CHECKING:
    from torch import Tensor

SLOT = ".slot"  # suffix of a slot's file
COMMITTED, NOTICES = "committed", "keeper.sock"  # in a keeper's folder: the newest commit; its datagrams
NOTHING = -1  # no generation, no step
MAGIC = b"rgwsnap2"
_PREFIX = len(MAGIC) + 8 + 32  # magic, header bytes, sha256
_PAGE, _ALIGNED = 4096, 64
_COMMIT = struct.Struct("<qqqq")  # generation and step, of what is committed and of what is pinned
_ROOM = 1024  # of a header, for the numbers that change with every step


@dataclass(frozen=True)
class SlotHeader:
    """What a sealed slot holds."""

    run_id: str
    generation: int
    step: int
    scalars: dict[str, int]
    coordinates: Coordinates  # of the rank
    writers: int  # ranks of this generation on the node
    boxes: tuple[Box, ...]  # in the order of the payload
    payload_offset: int

    @property
    def offsets(self) -> list[int]:
        """Where each box begins in the file, and where the payload ends."""
        at = [self.payload_offset]
        for box in self.boxes:
            at.append(-(-(at[-1] + box.num_bytes) // _ALIGNED) * _ALIGNED)
        return at

    @property
    def first_chunks(self) -> list[int]:
        """The number of each box's first chunk among the checksums of the slot, and how many there are in all."""
        at = [0]
        for box in self.boxes:
            at.append(at[-1] + num_chunks(box.num_bytes))
        return at

    @property
    def sha256(self) -> str:
        """Names the snapshot."""
        return hashlib.sha256(self.encode()).hexdigest()

    def encode(self) -> bytes:
        content: dict[str, Any] = {
            **vars(self),
            "coordinates": [*vars(self.coordinates.mesh).values(), self.coordinates.rank],
            "boxes": [list(vars(box).values()) for box in self.boxes],
        }
        return json.dumps(content, separators=(",", ":")).encode()

    @staticmethod
    def decode(data: bytes) -> "SlotHeader":
        content = json.loads(data)
        *mesh, rank = content["coordinates"]
        content["coordinates"] = Coordinates(MeshShape(*mesh), rank)
        content["boxes"] = tuple(
            Box(name, tuple(shape), tuple(offsets), tuple(sizes), dtype)
            for name, shape, offsets, sizes, dtype in content["boxes"]
        )
        return SlotHeader(**content)


class SlotFile:
    """A slot that this process fills, again and again. One writer at a time; never shared between threads."""

    def __init__(self, path: Path, header: SlotHeader) -> None:
        """Create the file, every page of it. Raises CheckpointError where memory does not hold it."""
        self.path, self.header = path, header
        self._size = header.offsets[-1]
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, max(self._size, _PAGE))
            self._map = mmap.mmap(descriptor, max(self._size, _PAGE), flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except OSError as error:
            path.unlink()
            raise CheckpointError(
                f"{path}: no room for a snapshot of {self._size:,} bytes ({error.strerror}); give {path.parent} more "
                "memory (on Kubernetes, a larger memory volume), or use more workers"
            ) from error
        finally:
            os.close(descriptor)

    def memory(self) -> list["Tensor"]:
        """The payload: a flat tensor for each box, sharing the file's memory."""
        import torch

        tensors = []
        for box, offset in zip(self.header.boxes, self.header.offsets, strict=False):
            dtype = getattr(torch, box.dtype)
            if box.num_elements:
                tensors.append(torch.frombuffer(self._map, dtype=dtype, count=box.num_elements, offset=offset))
            else:
                tensors.append(torch.empty(0, dtype=dtype))
        return tensors

    def pages(self) -> "Tensor":
        """The whole file as bytes, uint8."""
        import torch

        return torch.frombuffer(self._map, dtype=torch.uint8)

    def void(self) -> None:
        """Take the magic away: from here on the slot is empty."""
        self._map[: len(MAGIC)] = bytes(len(MAGIC))

    def seal(self, step: int, scalars: dict[str, int]) -> SlotHeader:
        """The payload is that of `step`: make it visible."""
        header = replace(self.header, step=step, scalars=scalars)
        data = header.encode()
        assert _PREFIX + len(data) <= header.payload_offset, "the header outgrew its room"
        self._map[len(MAGIC) : _PREFIX] = len(data).to_bytes(8, "little") + hashlib.sha256(data).digest()
        self._map[_PREFIX : _PREFIX + len(data)] = data
        self._map[: len(MAGIC)] = MAGIC
        return header


def slot_name(generation: int, token: str, number: int) -> str:
    return f"g{generation:06d}-{token}-{number}{SLOT}"


def generation_of(name: str) -> int:
    """The generation that a slot, a copy or their checksums are of."""
    return int(name[1:].partition("-")[0])


def empty_header(
    boxes: Sequence[Box], coordinates: Coordinates, *, run_id: str, generation: int, writers: int
) -> SlotHeader:
    """The header of a slot for these boxes, its payload beginning on a page."""
    header = SlotHeader(run_id, generation, 0, {}, coordinates, writers, tuple(boxes), 0)
    room = _PREFIX + len(header.encode()) + _ROOM
    return replace(header, payload_offset=-(-room // _PAGE) * _PAGE)


def open_slot(path: Path) -> SlotHeader | None:
    """The header of a slot in this node's memory; None where it is empty, being written, or gone.

    Raises CheckpointError for a damaged one.
    """
    try:
        with open(path, "rb") as file:
            prefix = file.read(_PREFIX)
            if prefix[: len(MAGIC)] != MAGIC:
                return None
            length = int.from_bytes(prefix[len(MAGIC) : len(MAGIC) + 8], "little")
            content = file.read(length) if length < os.fstat(file.fileno()).st_size else b""
    except FileNotFoundError:
        return None
    if hashlib.sha256(content).digest() != prefix[len(MAGIC) + 8 :]:
        raise CheckpointError(f"{path}: the header of the snapshot is damaged")
    return SlotHeader.decode(content)


@dataclass(frozen=True, order=True)
class Moment:
    """A step of a generation."""

    generation: int = NOTHING
    step: int = NOTHING


@dataclass(frozen=True)
class Committed:
    """What a node knows of the run's snapshots: which must not be overwritten."""

    newest: Moment = Moment()
    pinned: Moment = Moment()  # on its way to storage

    @staticmethod
    def read(folder: Path) -> "Committed":
        """What was last written into a keeper's folder."""
        try:
            numbers = _COMMIT.unpack((folder / COMMITTED).read_bytes())
        except FileNotFoundError:
            return Committed()
        return Committed(Moment(*numbers[:2]), Moment(*numbers[2:]))

    def write(self, folder: Path) -> None:
        """Tell the node's trainers."""
        numbers = (self.newest.generation, self.newest.step, self.pinned.generation, self.pinned.step)
        temporary = folder / f".{COMMITTED}"
        temporary.write_bytes(_COMMIT.pack(*numbers))
        os.replace(temporary, folder / COMMITTED)
