"""The memory of snapshot slots, which a process keeps from generation to generation.

An arena is a file in the keeper's folder: its pages are there from the start, because touching cold ones costs more
than a copy, mapped, and pinned for CUDA where there is a device, which takes seconds for tens of GB. A slot is a hard
link to one. Deleting the slot leaves the arena to its owner, for a slot of a later generation.

    arenas-<token>             locked by the process that owns the arenas, for as long as it lives
    arenas-<token>-<number>    an arena; of a process that is gone, any other may remove it

A slot that may be needed is never made another one of, nor one that is being read (`slots.reading`): then another
arena is taken. What becomes of memory is bounded by what two generations' slots would take side by side.
"""

import contextlib
import fcntl
import itertools
import logging
import mmap
import os
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path

from regrow.control.values import Version
from regrow.errors import CheckpointError
from regrow.state.memory import held
from regrow.state.memory.mapping import address_of, map_all
from regrow.state.memory.slots import Committed, open_slot, void

MOST_WASTE = 1.5  # of an arena's size to its slot's: groups of 4 and 3 nodes take turns in the same memory
_NAME = "arenas-"

log = logging.getLogger(__name__)
_pinned_for_good: list[mmap.mmap] = []  # mapped yet, or other memory at these addresses would pass for pinned


class Arena:
    """A file's memory, and the slot that it was last taken for."""

    def __init__(self, path: Path, num_bytes: int) -> None:
        """Create the file, every page of it. Raises CheckpointError where memory does not hold it."""
        self.path, self.num_bytes = path, num_bytes
        self.slot: Path | None = None
        self.taken = False
        self._address = 0  # where it is pinned
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, self.num_bytes)
            self.memory = map_all(descriptor, self.num_bytes)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise CheckpointError(
                f"{path}: no room for a snapshot of {num_bytes:,} bytes ({error.strerror}); give {path.parent} more "
                "memory (on Kubernetes, a larger memory volume), or use more workers"
            ) from error
        finally:
            os.close(descriptor)

    def pin(self) -> None:
        """Register the pages with CUDA, if they are not. Raises CheckpointError."""
        import torch

        if self._address:
            return
        address = address_of(self.memory)
        outcome = int(torch.cuda.cudart().cudaHostRegister(address, self.num_bytes, 0))
        if outcome:
            raise CheckpointError(
                f"cannot pin {self.num_bytes / 1e9:.1f} GB of {self.path.parent} for snapshots "
                f"(cudaHostRegister: error {outcome}); give the node more memory, or lower snapshot.slots"
            )
        self._address = address

    def link(self, slot: Path) -> None:
        """Make the arena, which is empty, this slot. Raises CheckpointError where that cannot be done."""
        try:
            os.link(self.path, slot)
        except OSError as error:
            raise CheckpointError(f"{slot}: cannot be made of {self.path.name} ({error.strerror})") from error
        self.slot = slot

    def empty(self) -> bool:
        """Give up the slot; False where it is being read, or the arena was removed."""
        try:
            with open(self.path, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                void(self.memory)  # for those that have opened the slot, and wait to read it
                if self.slot is not None:
                    held.remove(self.slot)
                    self.slot = None
        except (BlockingIOError, FileNotFoundError):
            return False
        return True

    def drop(self) -> None:
        """Let go of the memory, which is freed once it is no slot either, and CUDA has let go of it too."""
        if self._address:
            import torch

            outcome = int(torch.cuda.cudart().cudaHostUnregister(self._address))
            if outcome:
                _pinned_for_good.append(self.memory)
                told = "%.1f GB of %s stay pinned until this process ends (cudaHostUnregister: error %d)"
                log.warning(told, self.num_bytes / 1e9, self.path.parent, outcome)
            self._address = 0
        self.path.unlink(missing_ok=True)


class Arenas:
    """Those of this process. Never shared between threads."""

    def __init__(self, folder: Path) -> None:
        """`folder` is the keeper's."""
        self.folder = folder
        self._arenas: list[Arena] = []
        self._owner: _Owner | None = None
        self._numbers = itertools.count()

    @property
    def num_bytes(self) -> int:
        """Of all arenas."""
        return sum(arena.num_bytes for arena in self._arenas)

    def take(self, slots: Sequence[Path], num_bytes: int) -> list[Arena]:
        """An arena of at least so many bytes for each of these files, which it makes: empty slots.

        From before, where they are not much larger; those that are of no use now make room for others. Raises
        CheckpointError where memory does not hold them, and takes none then.
        """
        owner = self._own()
        num_bytes = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        free = [arena for arena in self._arenas if self._is_free(arena)]
        fit = [arena for arena in free if num_bytes <= arena.num_bytes <= num_bytes * MOST_WASTE]
        fit.sort(key=lambda arena: arena.num_bytes)
        self._drop(arena for arena in free if arena not in fit)
        while len(fit) > len(slots) and self.num_bytes > 2 * len(slots) * num_bytes:
            self._drop([fit.pop()])
        if len(fit) < len(slots):
            remove_abandoned(self.folder)
        made: list[Arena] = []
        try:
            for _ in slots[len(fit) :]:
                made.append(Arena(owner.path_of(next(self._numbers)), num_bytes))
            taken = [*fit, *made][: len(slots)]
            for arena, slot in zip(taken, slots, strict=True):
                arena.link(slot)
        except CheckpointError:
            for slot in slots:
                slot.unlink(missing_ok=True)
            for arena in made:
                arena.drop()
            raise
        self._arenas += made
        for arena in taken:
            arena.taken = True
        return taken

    def release(self, arenas: Iterable[Arena]) -> None:
        """Nothing writes to these any more. What is sealed in them stays until it is needed no longer."""
        for arena in arenas:
            arena.taken = False

    def close(self) -> None:
        """Let go of everything; slots stay."""
        self._drop(list(self._arenas))
        if self._owner is not None:
            self._owner.close()
            self._owner = None

    def _own(self) -> "_Owner":
        """Anew where the folder was deleted meanwhile."""
        while self._owner is None or not self._owner.is_there():
            self.close()
            self._owner = _Owner(self.folder)
        self._drop(arena for arena in self._arenas if not (arena.taken or arena.path.exists()))
        return self._owner

    def _is_free(self, arena: Arena) -> bool:
        if arena.taken:
            return False
        try:
            header = open_slot(arena.slot) if arena.slot is not None else None
        except CheckpointError:  # damaged: the keeper deletes it in time
            return False
        if header is not None:
            moment = Version(header.generation, header.step)
            if not Committed.read(self.folder).lets_go_of(moment):
                return False
        return arena.empty()

    def _drop(self, arenas: Iterable[Arena]) -> None:
        for arena in list(arenas):
            arena.drop()
            self._arenas.remove(arena)


class _Owner:
    """A file that is locked for as long as its process lives."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / f"{_NAME}{secrets.token_hex(6)}"
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def path_of(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}-{number}")

    def is_there(self) -> bool:
        """Not where another process saw it before it was locked, or the folder was deleted."""
        return os.fstat(self._file).st_nlink > 0

    def close(self) -> None:
        self.path.unlink(missing_ok=True)
        os.close(self._file)


def remove_abandoned(folder: Path) -> None:
    """Remove the arenas of processes that are gone. Those that are a slot stay as such."""
    files = sorted(folder.glob(f"{_NAME}*"))
    for owner in {folder / "-".join(path.name.split("-")[:2]) for path in files}:
        with contextlib.ExitStack() as stack:
            try:
                file = stack.enter_context(open(owner, "rb"))
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except FileNotFoundError:
                pass
            except OSError:  # its process lives; or it cannot be known
                continue
            for path in files:
                if path.name.startswith(f"{owner.name}-"):
                    path.unlink(missing_ok=True)
            owner.unlink(missing_ok=True)
