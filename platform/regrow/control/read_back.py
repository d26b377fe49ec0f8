"""A checkpoint is read once by the nodes that wrote it, before older ones are deleted for it. Pure.

One after another: what is being read is read to its end, however many come meanwhile, and of these the newest is next.
"""

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, replace

from regrow.control.commands import Delete, NoteDamaged, Outbox, ReadBack, ReadBackAll
from regrow.control.events import HasReadBack, Spoken
from regrow.control.peers import KeeperRegistry
from regrow.control.values import NOTHING

OLDER_STAY = "older ones stay"  # ends the note of a checkpoint that could not be read back
DELETED_LATER = (
    "reading back takes longer than from one checkpoint to the next, and old ones are deleted later; have "
    "checkpoints further apart, or storage that is read faster"
)
MOST_READERS = 3  # of a part, one after another, where nodes are gone or storage does not answer


class StoredSteps:
    """Checkpoints in storage, as far as this job knows of them: which of them hold a verified state."""

    def __init__(self, steps: Iterable[int], verified: int | None = None) -> None:
        """`steps`: of those that are there when the coordinator begins; of them, the ones up to step `verified` are
        taken for right. None: all of them, as by a job that begins."""
        self._steps, self._damaged = list(steps), list[int]()
        self._verified = self.newest if verified is None else verified  # states up to that of this step are
        self.keep = 0  # so many are kept, and the newest verified one; 0: none is verified at all
        self.compared = False  # units of the group that trains are, with each other

    @property
    def newest(self) -> int:
        return max(self._steps, default=NOTHING)

    def has(self, step: int) -> bool:
        """Whether this step's is there, and not damaged."""
        return step in self._steps

    def add(self, step: int) -> None:
        if step not in self._steps:
            self._steps.append(step)
        self._damaged = [each for each in self._damaged if each != step]

    def begin(self, start_step: int) -> None:
        """A group trains from this step: what comes after it is computed anew."""
        self._verified = min(self._verified, start_step)

    @property
    def told(self) -> dict[str, int]:
        """For the log: up to which step states are verified, where any is."""
        return {"verified_step": max(0, self._verified)} if self.keep else {}

    def verify(self, step: int) -> None:
        """States up to that of this step are verified."""
        self._verified = max(self._verified, step)

    def drop(self, step: int) -> None:
        """It is damaged."""
        self._steps = [each for each in self._steps if each != step]
        self._damaged.append(step)

    @property
    def spared(self) -> int | None:
        """The newest verified one, where it would be among the old ones that are deleted; NOTHING: it is not. None:
        nothing is to be deleted, as the next verification may be of any. A unit alone is taken on trust."""
        if not self.keep or len(self._later) < self.keep:
            return NOTHING
        verified = max((each for each in self._steps if each <= self._verified), default=NOTHING)
        return None if self.compared and verified == NOTHING else verified

    @property
    def deletions(self) -> list[Delete]:
        """That of old ones."""
        return [] if self.spared is None else [Delete(self.spared)]

    @property
    def deletions_left(self) -> list[Delete]:
        """That of those which a coordinator before may have died deleting, or reading back the newest first."""
        return self.deletions_but([self.newest])

    def deletions_for(self, step: int) -> list[Delete]:
        """That of what is older than this step's, which was read back: later ones were not."""
        return self.deletions_but([each for each in self._steps if each > step])

    def deletions_but(self, unread: Iterable[int]) -> list[Delete]:
        """That of old ones, for which checkpoints of these steps do not count."""
        return [replace(each, unread=tuple(sorted(unread))) for each in self.deletions]

    @property
    def _later(self) -> list[int]:
        return [each for each in self._steps if each > self._verified]

    def roll_back(self, step: int) -> tuple[int, list[int]]:
        """The newest one that still counts, and those that do not, where states after this step do not: also those that
        were damaged."""
        self._verified = step
        dropped = self._later + [each for each in self._damaged if each > step]  # which may yet be tried
        self._steps = [each for each in self._steps if each <= step]
        self._damaged = [each for each in self._damaged if each <= step]
        return self.newest, dropped


@dataclass(frozen=True)
class Committed:
    """A checkpoint whose COMMIT is there."""

    upload: int
    step: int
    before: int  # the newest step in storage, if this one is damaged
    writers: Mapping[str, str]  # by origin, the node that has written its part


class ReadBacks:
    """Of one checkpoint at a time."""

    def __init__(self, out: Outbox, steps: StoredSteps, *, timeout_s: float, keepers: KeeperRegistry) -> None:
        self._out, self._steps, self._timeout_s, self._keepers = out, steps, timeout_s, keepers
        self._next: Committed | None = None  # once the one that is being read is
        self._is_told = False  # that they come faster than they are read
        self.step = 0  # of the checkpoint
        self.before = 0  # the newest step in storage, if that is damaged
        self._upload = 0
        self._waiting: dict[str, list[str]] = {}  # by origin: nodes asked to read its part; the last of them does
        self._speakers: dict[str, str] = {}  # by origin whose answer comes with another's: the node that speaks for it
        self._nodes: tuple[str, ...] = ()  # which may be asked
        self._until, self._why = 0.0, ""  # what kept the newest node that could not from reading
        self.end_at: float | None = None  # the run ends: nothing is tried any more after that

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._next)

    def begin(self, new: Committed, now: float) -> None:
        """COMMIT of this upload is there. Where the run went back, or ends, what is being read counts no more."""
        if not self._waiting or new.step <= self.step or self.end_at is not None:
            self._next = None
            self._start(new, now)
            return
        self._next = new
        if not self._is_told:
            self._is_told = True
            late = f"the checkpoint of step {self.step} is still being read back, and that of step {new.step} is there"
            self._out.record("note", text=f"{late}: {DELETED_LATER}")

    def _start(self, new: Committed, now: float) -> None:
        upload, writers = new.upload, new.writers
        self.before = new.before if new.before != new.step else self.before  # where the step is committed once more
        self._upload, self.step, self._why = upload, new.step, ""
        self._waiting, self._until = {origin: [node] for origin, node in writers.items()}, now + self._timeout_s
        self._nodes = tuple(dict.fromkeys(writers.values()))
        is_its_own = all(origin == node for origin, node in writers.items())
        self._speakers = self._keepers.spoken_for(writers) if is_its_own else {}
        if self._speakers:
            nodes = tuple(dict.fromkeys(self._speakers.values()))
            self._out.append(ReadBackAll(upload, nodes, self._timeout_s))
        else:
            self._out.extend(ReadBack(upload, node, origin) for origin, node in writers.items())

    def take(self, event: HasReadBack) -> bool:
        """Whether the checkpoint is damaged, by this part of it. Once all is as it was written, older ones are deleted.

        What a node cannot read another one does; where none can, nothing is deleted for this checkpoint.
        """
        if event.upload != self._upload or event.origin not in self._waiting:
            return False
        self._speakers.pop(event.origin, None)
        if event.problem is None:
            self._ask_another(event.origin, event.why)
            return False
        del self._waiting[event.origin]
        if event.problem:
            self._waiting.clear()
            self._steps.drop(self.step)
            self._out.append(NoteDamaged(self.step, event.problem))
            if self._next is not None and self._next.before == self.step:
                self._next = replace(self._next, before=self.before)
        elif not self._waiting:
            self._out.extend(self._steps.deletions_for(self.step))
        return bool(event.problem)

    def left_out(self, event: Spoken) -> None:
        """Those that a node was to speak for, and has not, are asked themselves."""
        if event.upload == self._upload:
            self._ask_themselves({event.node})

    def gone_dark(self, nodes: set[str]) -> None:
        """Nothing is to be expected of these nodes any more, nor of what they were to pass on."""
        self._ask_themselves({self._speakers[node] for node in nodes if node in self._speakers})
        for origin in [origin for origin, asked in self._waiting.items() if asked[-1] in nodes]:
            if self._waiting:
                self._ask_another(origin, "says nothing")

    def _ask_themselves(self, speakers: Set[str]) -> None:
        for origin in [each for each, speaker in self._speakers.items() if speaker in speakers]:
            del self._speakers[origin]
            if origin in self._waiting:
                self._out.append(ReadBack(self._upload, origin, origin))

    def _ask_another(self, origin: str, why: str) -> None:
        """The same node only where there is no other: it may be back."""
        asked = self._waiting[origin]
        self._why = f"node {asked[-1][:12]} {why}"
        others = [node for node in self._nodes if node not in asked]
        node = next(filter(self._keepers.can_ask, others or asked), None)
        if node is None or len(asked) == MOST_READERS:
            self._give_up(self._why)
            return
        asked.append(node)
        self._out.append(ReadBack(self._upload, node, origin))

    def tick(self, now: float) -> None:
        is_late = self.end_at is not None and now > self.end_at
        if self._waiting and (is_late or now > self._until):
            late = "not before the run ended" if is_late else f"not within {self._timeout_s:.0f} s"
            self._give_up(f"{late}; {self._why}" if self._why else late)
        if self._next is not None and (not self._waiting or self.end_at is not None):
            new, self._next = self._next, None
            self._start(new, now)

    def _give_up(self, why: str) -> None:
        self._waiting.clear()
        found = f"the checkpoint of step {self.step} could not be read back ({why})"
        self._out.record("note", text=f"{found}: {OLDER_STAY}")
