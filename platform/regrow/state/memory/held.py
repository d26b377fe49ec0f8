"""What a keeper's folder holds: snapshots in files, each with its checksums beside it. No torch.

<name>.slot               a trainer's slot (`slots`)
<name>.slot.<node>.copy   the same of a rank on another node, whose peer this is
<file>.crc                beside each: sha256 of the header it belongs to, then the checksums of one box after another
"""

import contextlib
import hashlib
import logging
import os
import stat
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

import numpy as np

from regrow.control.values import Digest, Version, short_id
from regrow.errors import CheckpointError
from regrow.plan import placement
from regrow.plan.mesh import Coordinates
from regrow.state.checksums import CHUNK_BYTES, Crc, checksums, hold
from regrow.state.memory.slots import SLOT, SlotHeader, has_header, read_encoded, read_header, reading

COPY, CHECKSUMS = ".copy", ".crc"
SHA256_DIGITS = 64  # hexadecimal, that a checksum file begins with
PIECE_BYTES = 64 * CHUNK_BYTES  # that are read at once

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Held:
    """A sealed snapshot file that a keeper holds, and its checksums."""

    file: str
    moment: Version
    coordinates: Coordinates  # of the rank that wrote it
    writers: int  # ranks that wrote such a file of this step on their node
    header_sha256: str

    @property
    def is_copy(self) -> bool:
        return self.file.endswith(COPY)

    @property
    def copy_of(self) -> str:
        """The node whose copy it is, its id as `copy_name` has it; empty: of none."""
        return self.file.removesuffix(COPY).rpartition(".")[2] if self.is_copy else ""

    def is_of(self, node: str, *, copy: bool) -> bool:
        """Whether it is what this node's ranks wrote, or a copy of that."""
        return self.is_copy == copy and (not copy or self.file == copy_name(self.file.partition(SLOT)[0] + SLOT, node))


@dataclass(frozen=True)
class Snapshot:
    """A file of a snapshot, ready to be read."""

    path: Path
    header: SlotHeader
    crc: Crc  # of all boxes, one after another

    @property
    def held(self) -> Held:
        header = self.header
        moment = Version(header.generation, header.step)
        return Held(self.path.name, moment, header.coordinates, header.writers, header.sha256)

    @property
    def num_bytes(self) -> int:
        """Of the payload."""
        return self.header.offsets[-1] - self.header.payload_offset

    @contextlib.contextmanager
    def opened(self) -> Iterator[BinaryIO]:
        """The file, whose bytes become no other snapshot's meanwhile. Raises CheckpointError."""
        with contextlib.ExitStack() as stack:
            try:
                file = stack.enter_context(reading(self.path))
                if not has_header(file, self.header.sha256):
                    raise CheckpointError(f"{self.path}: holds another snapshot by now")
            except OSError as error:
                raise CheckpointError(f"{self.path}: cannot be read: {error}") from error
            yield file

    @contextlib.contextmanager
    def payload(self) -> Iterator[memoryview]:
        """The whole file's bytes, mapped. Raises CheckpointError."""
        with self.opened() as file:
            try:
                memory = _mapped(file, self.header)
            except (OSError, ValueError) as error:
                raise CheckpointError(f"{self.path}: cannot be mapped: {error}") from error
            yield memory

    @property
    def digest(self) -> Digest | None:
        """Of all of it, where other ranks hold the same shard."""
        coordinates = self.header.coordinates
        replicas = coordinates.mesh.dp_replicate
        if replicas == 1:
            return None
        shard = ".".join(str(coordinates.along(axis)[0]) for axis in ("pp", "dp_shard", "tp"))
        return Digest(coordinates.rank, shard, replicas, zlib.crc32(self.crc.tobytes()))

    def check(self) -> None:
        """Raises CheckpointError where a checksum does not hold."""
        with self.payload() as payload:
            if not all_hold(payload, self.header, self.crc):
                raise CheckpointError(f"{self.path}: fails its checksums")


def copy_name(slot: str, node: str) -> str:
    """Of a copy of a node's slot, on another one."""
    return f"{slot}.{short_id(node)}{COPY}"


def claim(folder: Path) -> None:
    """Make a keeper's folder, or take the one that is there. Raises CheckpointError where others may write to it.

    A folder for the memory of all users, as /dev/shm, lets each of them make one by any name.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status, me = folder.lstat(), os.geteuid()
    if status.st_uid != me:
        raise CheckpointError(f"{folder} belongs to user {status.st_uid}, keepers here are user {me}: have it deleted")
    if not stat.S_ISDIR(status.st_mode) or status.st_mode & 0o077:
        mode = stat.filemode(status.st_mode)
        raise CheckpointError(f"{folder} is {mode}, and a keeper's folder is its user's alone (drwx------): delete it")


def is_mine(folder: Path) -> bool:
    """Whether this user made a folder."""
    return folder.lstat().st_uid == os.geteuid()


def open_snapshot(path: Path) -> Snapshot | None:
    """A sealed file with its checksums; None where there is none. Raises CheckpointError for a damaged one."""
    found = encoded(path)
    if found is None:
        return None
    header = SlotHeader.decode(found[0])
    return Snapshot(path, header, checksums_in(found[1], header, path))


def encoded(path: Path) -> tuple[bytes, bytes] | None:
    """The same as it lies there: the header, and the checksum file, which may be cut short."""
    try:
        with reading(path) as file:
            header = read_encoded(file)
        beside = read_beside(path)
    except FileNotFoundError:
        return None
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    if header is None or beside[:SHA256_DIGITS] != hashlib.sha256(header).hexdigest().encode():
        return None
    return header, beside


def checksums_in(beside: bytes, header: SlotHeader, path: Path) -> Crc:
    """What a checksum file has. Raises CheckpointError where that is not of this header, or not all."""
    crc = beside[SHA256_DIGITS:]
    if beside[:SHA256_DIGITS] != header.sha256.encode() or len(crc) != 4 * header.first_chunks[-1]:
        raise CheckpointError(f"{path}: its checksums are cut short, or another snapshot's")
    return np.frombuffer(crc, "<u4")


def take_checksums(path: Path) -> Snapshot | None:
    """Checksum a slot that was sealed just now; None where it is empty again."""
    try:
        with reading(path) as file:
            header = read_header(file)
            if header is None:
                return None
            crc = checksums_of(file, header)
    except FileNotFoundError:
        return None
    write_beside(path, header.sha256.encode() + crc.tobytes())
    return open_snapshot(path)


def holdings(folder: Path, run_id: str) -> list[Held]:
    """Every sealed snapshot of a run that is in a folder with its checksums; damaged ones are left out, and logged."""
    held = []
    for path in sorted(folder.glob(f"*{SLOT}*")):
        if path.name.endswith((SLOT, COPY)):
            try:
                found = open_snapshot(path)
            except CheckpointError as error:
                log.warning("%s", error)
                continue
            if found is not None and found.header.run_id == run_id:
                held.append(found.held)
    return held


def is_whole(version: Version, held: Iterable[Held]) -> bool:
    """Whether the ranks whose state of a version is held have every element of it."""
    ranks = [each.coordinates for each in held if each.moment == version]
    return bool(ranks) and placement.is_whole(ranks[0].mesh, np.array([each.rank for each in ranks]))


def read_beside(path: Path) -> bytes:
    """The checksum file of a snapshot, as it is."""
    return _beside(path).read_bytes()


def write_beside(path: Path, data: bytes) -> None:
    """Put a checksum file in place."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(data)
    os.replace(temporary, _beside(path))


def bytes_held(folder: Path) -> int:
    """The memory that files take; a slot and its arena are one."""
    blocks = dict[int, int]()
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # it went just now
            status = path.stat()
            blocks[status.st_ino] = status.st_blocks
    return 512 * sum(blocks.values())


def forget(path: Path) -> None:
    """Delete the checksums of a snapshot, without which it is none."""
    _beside(path).unlink(missing_ok=True)


def remove(path: Path) -> None:
    """Delete a snapshot and its checksums."""
    forget(path)
    path.unlink(missing_ok=True)


def _beside(path: Path) -> Path:
    return path.with_name(path.name + CHECKSUMS)


def _mapped(file: BinaryIO, header: SlotHeader) -> memoryview:
    """The bytes of a file with this header. Raises CheckpointError where some are missing."""
    memory: memoryview = np.memmap(file, np.uint8, "r").data
    if len(memory) < header.offsets[-1]:
        raise CheckpointError(f"{file.name}: is cut short")
    return memory


def checksums_of(file: BinaryIO, header: SlotHeader) -> Crc:
    """Of all boxes of an open file with this header, one after another. Raises CheckpointError, and OSError.

    It is read piece by piece into memory that stays in a core's cache: to map its pages, and give them back, takes
    longer than the checksums, and a page that cannot be read would end the process.
    """
    memory, found = memoryview(bytearray(PIECE_BYTES)), [np.empty(0, "<u4")]
    for box, offset in zip(header.boxes, header.offsets, strict=False):
        for begin in range(0, box.num_bytes, PIECE_BYTES):
            piece = memory[: min(PIECE_BYTES, box.num_bytes - begin)]
            if os.preadv(file.fileno(), [piece], offset + begin) < len(piece):
                raise CheckpointError(f"{file.name}: is cut short")
            found.append(checksums(piece))
    return np.concatenate(found)


def all_hold(payload: memoryview, header: SlotHeader, crc: Crc) -> bool:
    """Whether these are the checksums of all boxes of a file with this header."""
    boxes = zip(header.boxes, header.offsets, pairwise(header.first_chunks), strict=False)
    return all(hold(payload[at : at + box.num_bytes], crc[first:last]) for box, at, (first, last) in boxes)
