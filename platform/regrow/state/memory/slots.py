"""Snapshot slots: one rank's part of the training state of one step, as a plain file in memory (`/dev/shm`).

    magic, header bytes, sha256 of the header | header: JSON | padding | payload: the boxes, each at 64 bytes' multiple

A slot without its magic is empty, whatever else it holds: the magic is taken away before anything is overwritten and
put back last, once the payload is whole and the step is known to have succeeded on every rank. Files outlive the
process that wrote them. Their memory may be used again for another generation's slot (`arenas`), and the file be larger
than the slot: its readers hold a lock on it (`reading`). Imports torch for trainers only: keepers and the
coordinator do without.
"""

import contextlib
import fcntl
import hashlib
import json
import mmap
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from regrow.control.values import NEVER, Scalar, Version
from regrow.errors import CheckpointError
from regrow.plan.boxes import Box
from regrow.plan.mesh import Coordinates
from regrow.state.checksums import num_chunks

if TYPE_CHECKING:
    from torch import Tensor

SLOT = ".slot"  # suffix of a slot's file
COMMITTED, NOTICES = "committed", "keeper.sock"  # in a keeper's folder: the newest commit; its datagrams
SAFE, HELD_BY_ALL = "safe", "held by all "  # the newest step that the node holds, copies and all; a datagram's words
MAGIC = b"rgwsnap2"
_PREFIX = len(MAGIC) + 8 + 32  # magic, header bytes, sha256
_PAGE, _ALIGNED = 4096, 64
_SAFE = struct.Struct("<2q")
_COMMIT = struct.Struct("<8q")  # generation and step, of what is committed, of what is pinned, of two that are kept
_ROOM = 1024  # of a header, for the numbers that change with every step


@dataclass(frozen=True)
class SlotHeader:
    """What a sealed slot holds."""

    run_id: str
    generation: int
    step: int
    scalars: dict[str, Scalar]
    coordinates: Coordinates  # of the rank
    writers: int  # ranks of this generation on the node
    boxes: tuple[Box, ...]  # in the order of the payload
    payload_offset: int

    @cached_property
    def offsets(self) -> list[int]:
        """Where each box begins in the file, and where the payload ends."""
        at = [self.payload_offset]
        for box in self.boxes:
            at.append(-(-(at[-1] + box.num_bytes) // _ALIGNED) * _ALIGNED)
        return at

    @cached_property
    def first_chunks(self) -> list[int]:
        """The number of each box's first chunk among the checksums of the slot, and how many there are in all."""
        at = [0]
        for box in self.boxes:
            at.append(at[-1] + num_chunks(box.num_bytes))
        return at

    @cached_property
    def sha256(self) -> str:
        """Names the snapshot."""
        return hashlib.sha256(self.encode()).hexdigest()

    def encode(self) -> bytes:
        content: dict[str, Any] = {
            **{each.name: getattr(self, each.name) for each in fields(self)},
            "coordinates": self.coordinates.to_plain(),
            "boxes": [list(vars(box).values()) for box in self.boxes],
        }
        return json.dumps(content, separators=(",", ":")).encode()

    @staticmethod
    def decode(data: bytes) -> "SlotHeader":
        content = json.loads(data)
        content["coordinates"] = Coordinates.of_plain(content["coordinates"])
        content["boxes"] = tuple(
            Box(name, tuple(shape), tuple(offsets), tuple(sizes), dtype)
            for name, shape, offsets, sizes, dtype in content["boxes"]
        )
        header = SlotHeader(**content)
        vars(header)["sha256"] = hashlib.sha256(data).hexdigest()  # of the very bytes
        return header


class SlotFile:
    """A slot that this process fills, again and again. One writer at a time; never shared between threads."""

    def __init__(self, path: Path, header: SlotHeader, memory: mmap.mmap) -> None:
        """`memory` is that of the file, which is there and empty."""
        self.path, self.header, self._map = path, header, memory

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

    def void(self) -> None:
        """Take the magic away: from here on the slot is empty."""
        void(self._map)

    def seal(self, step: int, scalars: dict[str, Scalar]) -> SlotHeader:
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


def void(memory: mmap.mmap) -> None:
    """Make a slot empty."""
    memory[: len(MAGIC)] = bytes(len(MAGIC))


@contextlib.contextmanager
def reading(path: Path) -> Iterator[BinaryIO]:
    """A slot or a copy of one, open. Its memory becomes no other slot's meanwhile.

    It may have become one before: what is read is the slot's that `read_header` finds in here. Raises OSError.
    """
    with open(path, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        try:
            yield file
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # closing does not: a mapping may hold the file open for longer


def open_slot(path: Path) -> SlotHeader | None:
    """The header of a slot in this node's memory; None where it is empty, being written, or gone.

    Raises CheckpointError for a damaged one.
    """
    try:
        with reading(path) as file:
            return read_header(file)
    except FileNotFoundError:
        return None
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


def read_header(file: BinaryIO) -> SlotHeader | None:
    """The same of an open file."""
    content = read_encoded(file)
    return None if content is None else SlotHeader.decode(content)


def read_encoded(file: BinaryIO) -> bytes | None:
    """The bytes of that header."""
    prefix = file.read(_PREFIX)
    if prefix[: len(MAGIC)] != MAGIC:
        return None
    length = int.from_bytes(prefix[len(MAGIC) : len(MAGIC) + 8], "little")
    content = file.read(length) if length < os.fstat(file.fileno()).st_size else b""
    if hashlib.sha256(content).digest() != prefix[len(MAGIC) + 8 :]:
        raise CheckpointError("the header of the snapshot is damaged")
    return content


def has_header(file: BinaryIO, sha256: str) -> bool:
    """Whether an open file is the slot with that header, by what names it: the header itself is not read."""
    prefix = file.read(_PREFIX)
    return prefix[: len(MAGIC)] == MAGIC and prefix[len(MAGIC) + 8 :].hex() == sha256


@dataclass(frozen=True)
class Committed:
    """What a node knows of the run's snapshots: which must not be overwritten."""

    newest: Version = NEVER
    pinned: Version = NEVER  # on its way to storage
    number: int = 0  # of the coordinator's message: an older one may come later, and counts for nothing
    kept: tuple[Version, ...] = ()  # to go back to, at most two; see `control.verification`

    def lets_go_of(self, moment: Version) -> bool:
        """Whether a snapshot of this moment may be overwritten: a newer one is committed, and it is not needed."""
        return moment < self.newest and moment not in self.needed

    @property
    def needed(self) -> tuple[Version, ...]:
        """Besides the newest."""
        return self.pinned, *self.kept

    def to_plain(self) -> dict[str, Any]:
        """What JSON can hold."""
        versions = {"newest": self.newest, "pinned": self.pinned}
        kept = [[each.generation, each.step] for each in self.kept]
        named = {name: [each.generation, each.step] for name, each in versions.items()}
        return {"number": self.number, "kept": kept} | named

    @staticmethod
    def of_plain(plain: Mapping[str, Any]) -> "Committed":
        """What `to_plain` gave."""
        kept = tuple(Version(*each) for each in plain.get("kept", ()))
        return Committed(Version(*plain["newest"]), Version(*plain["pinned"]), int(plain["number"]), kept)

    @staticmethod
    def read(folder: Path) -> "Committed":
        """What was last written into a keeper's folder."""
        try:
            content = (folder / COMMITTED).read_bytes()
        except FileNotFoundError:
            return Committed()
        numbers = _COMMIT.unpack(content.ljust(_COMMIT.size, b"\xff"))  # of an earlier version: nothing is kept
        newest, pinned, *kept = (Version(*numbers[at : at + 2]) for at in range(0, len(numbers), 2))
        return Committed(newest, pinned, kept=tuple(each for each in kept if each != NEVER))

    def write(self, folder: Path) -> None:
        """Tell the node's trainers."""
        versions = (self.newest, self.pinned, *self.kept, NEVER, NEVER)[:4]
        numbers = [number for each in versions for number in (each.generation, each.step)]
        temporary = folder / f".{COMMITTED}"
        temporary.write_bytes(_COMMIT.pack(*numbers))
        os.replace(temporary, folder / COMMITTED)


def tell_safe(folder: Path, version: Version) -> None:
    """Tell the node's trainers that its parts of a step are checked, and copied where they are to be; not of an older
    one than before."""
    if version <= newest_safe(folder):
        return
    temporary = folder / f".{SAFE}"
    temporary.write_bytes(_SAFE.pack(version.generation, version.step))
    os.replace(temporary, folder / SAFE)


def newest_safe(folder: Path) -> Version:
    """What was told last; NEVER where nothing was."""
    try:
        return Version(*_SAFE.unpack((folder / SAFE).read_bytes()))
    except FileNotFoundError:
        return NEVER
