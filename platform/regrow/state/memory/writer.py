"""The trainer's side of snapshots: the state of a step is copied beside the next forward and backward.

After `optimizer.step` nothing changes the state until the next one, so the copy has all that time; the next
`optimizer.step` waits for what is left of it. Slots take turns. A step is sealed once its copy is whole and the
host has seen every collective of it succeed; the node's keeper hears of it by one datagram and does the rest:
checksums, the peer's copy, the commit. The trainer learns what was committed from a few bytes of shared memory, and
never overwrites the newest committed slot, nor one that is on its way, to a commit or to storage: where all are taken
the step has no snapshot, or waits for one if it must. Where nothing is committed for a while, as the coordinator hangs
or is started again, ranks tell each other what their nodes hold: what all do is as good as committed.
"""

import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from regrow.control.values import NOTHING, Scalar
from regrow.errors import CheckpointError
from regrow.plan.mesh import Coordinates
from regrow.state.entries import USER, Entry
from regrow.state.memory.arenas import Arena, Arenas
from regrow.state.memory.control_word import ControlWord
from regrow.state.memory.slots import (
    HELD_BY_ALL,
    NOTICES,
    Committed,
    SlotFile,
    empty_header,
    newest_safe,
    slot_name,
)

POLL_S, COMMIT_POLL_S = 0.01, 0.003
UNCOMMITTED_S = 5.0  # without a commit: ranks go by what all nodes hold
TELL_S, LAST_TELL_S = 0.1, 1.0  # for the keeper's socket to have room, and once no look at what is committed follows

Submit = Callable[[Callable[[], None]], object]


@dataclass
class _Slot:
    arena: Arena
    file: SlotFile
    memory: list[torch.Tensor]
    step: int = NOTHING  # that it holds, or is to hold once it is sealed


@dataclass
class _Pending:
    """A snapshot that is not sealed."""

    slot: _Slot
    scalars: dict[str, Scalar]
    copied: bool = False
    confirmed: bool = False


class Snapshots:
    """The snapshots of one rank in one generation."""

    def __init__(
        self,
        folder: Path,
        entries: Sequence[Entry],
        *,
        coordinates: Coordinates,
        run_id: str,
        generation: int,
        writers: int = 1,
        num_slots: int = 2,
        submit: Submit | None = None,
        arenas: Arenas | None = None,
    ) -> None:
        """`folder` is the keeper's; `writers` are the ranks that write there in this generation. What is given to
        `submit` is called once the steps that were launched before are done; None where they are done at once.
        `arenas` are this process', None: none that outlive the generation.

        Raises CheckpointError where the node's memory does not hold the slots.
        """
        self.folder, self.entries, self.generation = folder, list(entries), generation
        header = empty_header(
            [entry.box for entry in entries], coordinates, run_id=run_id, generation=generation, writers=writers
        )
        token = secrets.token_hex(6)
        paths = [folder / slot_name(generation, token, number) for number in range(num_slots)]
        self._arenas, self._owns_arenas = arenas or Arenas(folder), arenas is None
        self._slots: list[_Slot] = []
        try:
            for path, arena in zip(paths, self._arenas.take(paths, header.offsets[-1]), strict=True):
                file = SlotFile(path, header, arena.memory)
                self._slots.append(_Slot(arena, file, file.memory()))
            on_device = any(entry.memory.is_cuda for entry in entries)
            for slot in self._slots if on_device else ():
                slot.arena.pin()
            self.copier = _DeviceCopy() if on_device else _HostCopy(submit)
        except CheckpointError:
            self._let_go(unlink=True)
            raise
        self._pending: _Pending | None = None
        self._lock, self._telling = threading.Lock(), threading.Lock()
        self._untold: deque[str] = deque()  # notices for which the keeper's socket had no room
        self._begun, self._before, self._closed = NOTHING, NOTHING, False
        self._heard, self._heard_at = NOTHING, time.monotonic()  # the newest commit that the coordinator has told of
        self._held_by_all = NOTHING  # the newest step that took its place
        self._uncommitted_at = time.monotonic()  # when a snapshot was begun with all before it committed
        self._late = NOTHING  # a step whose commit was waited for in vain
        self.skipped = 0  # steps that found no free slot

    def room(self) -> int:
        """How many slots are free. Only `begin` makes them fewer.

        Ranks hear of a commit at different times, so each by itself they would leave out different steps, until every
        slot holds a step that some other rank lacks, and nothing is ever committed again. A group must begin a step on
        all ranks or on none: where each of them had room.
        """
        return len(self._free_slots())

    def await_room(self, patience_s: float) -> bool:
        """Wait until a slot is free; whether one is. In a generation that is over none comes free any more."""
        give_up_at = time.monotonic() + patience_s
        while not self.room():
            if time.monotonic() > give_up_at or self._is_over():
                return False
            time.sleep(POLL_S)
        return True

    @property
    def begun(self) -> int:
        """The newest step whose copy was begun."""
        return self._begun

    @property
    def is_late(self) -> bool:
        """Whether a commit was waited for in vain that has not come since."""
        return self._newest_committed() < self._late

    def is_committed(self, step: int) -> bool:
        """Whether this step of the generation, or a later one, is."""
        return step <= self._newest_committed()

    def newest_begun(self, at_most: int) -> int:
        """The newest step up to this one whose copy was begun; NOTHING where there is none."""
        return max((slot.step for slot in self._slots if slot.step <= at_most), default=NOTHING)

    def begin(self, step: int, scalars: Mapping[str, Scalar]) -> bool:
        """Start copying the state of `step`, on all ranks or on none. The optimizer must not step before `wait`.

        False where no slot is free. Again for the same step: nothing.
        """
        assert not self._closed, "its slots are another generation's"
        if step == self._begun:
            return True
        slot = self._free_slot()
        if slot is None:
            self.skipped += 1
            return False
        slot.file.void()
        if self._newest_committed() >= self._begun:
            self._uncommitted_at = time.monotonic()
        self._before, slot.step = self._begun, step
        self._begun = step
        pending = self._pending = _Pending(slot, dict(scalars))
        pairs = [(memory, entry.memory) for memory, entry in zip(slot.memory, self.entries, strict=True)]
        self.copier.start(pairs, lambda: self._seal(pending, copied=True))
        return True

    @property
    def asked(self) -> int:
        """The step of which ranks tell each other whether their nodes hold it: the newest one that was begun, or where
        there is another slot to be written meanwhile the one before. The same on all ranks; NOTHING: none."""
        return self._before if len(self._slots) > 2 else self._begun

    def is_held(self, step: int) -> bool:
        """Whether this node holds its parts of a step of this generation, or of a later one, with their copies."""
        safe = newest_safe(self.folder)
        return safe.generation == self.generation and NOTHING < step <= safe.step

    def held_by_all(self, step: int) -> None:
        """All nodes hold this step of this generation."""
        newest, now = self._newest_committed(), time.monotonic()
        if newest not in (self._heard, self._held_by_all):
            self._heard, self._heard_at = newest, now
        if step > newest and now - max(self._heard_at, self._uncommitted_at) > UNCOMMITTED_S:
            self._held_by_all, self._late = step, step + 1  # no commit is waited for until one comes
            self._tell(f"{HELD_BY_ALL}{self.generation} {step}")

    def wait(self) -> float:
        """Let nothing change the state before it is copied; the seconds that the host waited for that."""
        begun = time.perf_counter()
        self.copier.wait()
        return time.perf_counter() - begun

    def confirm(self, step: int, scalars: Mapping[str, Scalar] | None = None) -> None:
        """The host has seen that every collective of `step` succeeded: its snapshot may become visible, with these
        scalars of a callback in place of those that it was begun with."""
        pending = self._pending  # the copying thread may seal it, and take it away
        if pending is not None and pending.slot.step == step:
            if scalars is not None:
                pending.scalars = {k: v for k, v in pending.scalars.items() if not k.startswith(USER)} | dict(scalars)
            self.copier.poll()
            self._seal(pending, confirmed=True)

    def await_commit(self, step: int, *, patience_s: float) -> float:
        """Wait until this step of the generation, or a later one, is committed; the seconds that took.

        Not for ever: after `patience_s` nothing is waited for until a commit has come again, nor once the generation is
        over.
        """
        begun = time.perf_counter()
        while True:
            reached = self._newest_committed()
            waited_s = time.perf_counter() - begun
            if reached >= step or reached < self._late or self._is_over():
                return waited_s
            if waited_s > patience_s:
                self._late = step
                return waited_s
            time.sleep(COMMIT_POLL_S)

    def discard(self) -> None:
        """Delete the slots, of which none was begun, and let go of their pages."""
        self._closed = True
        self.copier.close()
        self._let_go(unlink=True)

    def close(self) -> None:
        """Void what is not sealed. SnapshotAck slots stay: they are what the next generation starts from."""
        if self._closed:
            return
        self._closed = True
        self.copier.close()  # or what still copies would write to another generation's slots
        self._tell(patience_s=LAST_TELL_S)
        if self._pending is not None:
            self._pending.slot.file.void()
            self._pending = None
        self._let_go(unlink=False)

    def _is_over(self) -> bool:
        """Whether the keeper has heard that this generation is."""
        return ControlWord.read(self.folder).over >= self.generation

    def _newest_committed(self) -> int:
        """Of this generation."""
        newest = self._committed().newest
        return newest.step if newest.generation == self.generation else NOTHING

    def _let_go(self, *, unlink: bool) -> None:
        for slot in self._slots if unlink else ():
            slot.file.path.unlink()
        self._arenas.release(slot.arena for slot in self._slots)
        if self._owns_arenas:
            self._arenas.close()

    def _seal(self, pending: _Pending, *, copied: bool = False, confirmed: bool = False) -> None:
        """Once it is both copied and confirmed, seal a snapshot and tell the keeper. On either thread."""
        with self._lock:
            pending.copied, pending.confirmed = pending.copied or copied, pending.confirmed or confirmed
            if self._pending is not pending or not (pending.copied and pending.confirmed):
                return
            pending.slot.file.seal(pending.slot.step, pending.scalars)
            self._pending = None
        self._tell(pending.slot.file.path.name)

    def _tell(self, *notices: str, patience_s: float = TELL_S) -> None:
        """The keeper. What its socket has no room for, as many ranks of a node seal at once, it is told again at the
        next look at what is committed."""
        with self._telling:
            self._untold.extend(notices)
            while self._untold:
                try:
                    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as keeper:
                        keeper.settimeout(patience_s)
                        keeper.connect(str(self.folder / NOTICES))  # or nothing would tell when there is room
                        keeper.send(self._untold[0].encode())
                except (BlockingIOError, TimeoutError):
                    return
                except OSError:  # a keeper that restarts looks into the folder
                    pass
                self._untold.popleft()

    def _committed(self) -> Committed:
        """As the keeper knows, which is told what it was not told."""
        if self._untold:
            self._tell(patience_s=0.0)
        return Committed.read(self.folder)

    def _free_slot(self) -> _Slot | None:
        return None if self._pending is not None else min(self._free_slots(), key=lambda slot: slot.step, default=None)

    def _free_slots(self) -> list[_Slot]:
        state = self._committed()
        kept = {moment.step for moment in (state.newest, *state.needed) if moment.generation == self.generation}
        newest = state.newest.step if state.newest.generation == self.generation else NOTHING
        return [slot for slot in self._slots if (slot.step <= newest and slot.step not in kept) or slot.step == NOTHING]


Pairs = list[tuple[torch.Tensor, torch.Tensor]]  # (to, from)


class _HostCopy:
    """Copies between host tensors on a thread; NumPy lets go of the interpreter meanwhile."""

    def __init__(self, submit: Submit | None) -> None:
        self._submit = submit
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="snapshot")
        self._copy: Future[None] | None = None
        self._begun = threading.Event()  # the newest one
        self._begun.set()

    def start(self, pairs: Pairs, done: Callable[[], None]) -> None:
        arrays = [(target.view(torch.uint8).numpy(), source.view(torch.uint8).numpy()) for target, source in pairs]

        def copy() -> None:
            for target, source in arrays:
                np.copyto(target, source)
            done()

        def begin() -> None:
            self._copy = self._thread.submit(copy)
            self._begun.set()

        self._begun.clear()
        if self._submit is None:
            begin()
        else:
            self._submit(begin)  # after the step whose state it is

    def wait(self) -> None:
        """Called where steps run."""
        if self._copy is not None:
            self._copy.result()

    def poll(self) -> None:
        """Where steps run ahead of the host, the copy was launched before the one that is confirmed after it."""
        if self._submit is not None:
            self._begun.wait()
            self.wait()

    def close(self) -> None:
        self._begun.wait()
        self._thread.shutdown()


class _DeviceCopy:
    """Copies from a CUDA device on a stream of its own, into pages that are pinned."""

    def __init__(self) -> None:
        self._stream, self._copied = torch.cuda.Stream(), torch.cuda.Event()
        self._done: Callable[[], None] | None = None

    def start(self, pairs: Pairs, done: Callable[[], None]) -> None:
        self._done = done
        self._stream.wait_stream(torch.cuda.current_stream())  # the optimizer's step
        with torch.cuda.stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            self._copied.record()

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._copied)  # the device waits, not the host

    def poll(self) -> None:
        """When a step is confirmed its copy, launched before the next step, is done or nearly so."""
        self._copied.synchronize()
        if self._done is not None:
            self._done()
            self._done = None

    def close(self) -> None:
        self._copied.synchronize()
