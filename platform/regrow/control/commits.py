"""Which snapshot is the newest committed one: a step counts once every node of its generation has reported it. Pure."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from regrow.control.values import NEVER, NOTHING, Replica, SnapshotAck, Version

IsWhole = Callable[[Version, Sequence[Any]], bool]  # do these replicas cover everything of a version?


@dataclass(frozen=True)
class SnapshotCommit:
    """A committed step, and the nodes that hold it: each with those that have its copies."""

    version: Version
    peers: Mapping[str, tuple[str, ...]] = field(hash=False)


class CommitTracker:
    """Collects what keepers report, for one generation after another.

    Where units verify each other (`control.verification`), nodes keep two more versions than the newest: the newest
    one that is verified, and the newest one that the next verification may verify, once there are later ones.
    """

    def __init__(self, is_whole: IsWhole) -> None:
        self.newest: SnapshotCommit | None = None
        self.verified: SnapshotCommit | None = None  # of this generation
        self._candidate: SnapshotCommit | None = None
        self._verifies: int | None = None  # the next step that does
        self._is_whole = is_whole
        self._generation = 0
        self._peers: dict[str, tuple[str, ...]] = {}  # of the generation's nodes
        self._reported: dict[Version, set[str]] = {}  # which nodes did

    def begin(self, generation: int, start_step: int, peers: Mapping[str, tuple[str, ...]]) -> None:
        """From here on only this generation's reports count, and a step needs all these nodes', copied to their peers.

        A snapshot of a later step than the generation starts from is given up: it could not be read.
        """
        self._generation, self._peers = generation, dict(peers)
        self._reported.clear()
        self.verified = self._candidate = self._verifies = None
        if self.newest is not None and self.newest.version.step > start_step:
            self.newest = None

    @property
    def kept(self) -> tuple[Version, ...]:
        """What is not to be overwritten though there is a newer one."""
        return tuple(each.version for each in (self.verified, self._candidate) if each is not None)

    def expect(self, verifies: int) -> None:
        """The next step that verifies: then the state before it may be."""
        self._verifies = verifies

    def verify(self, step: int) -> None:
        """States up to that of this step are verified."""
        self.verified = self._newest_until(step) or self.verified
        if self._candidate is not None and self._candidate.version.step <= step:
            self._candidate = None

    def roll_back(self, step: int) -> None:
        """Later states are not to be used, nor what is yet reported, until another generation begins."""
        newest = self._newest_until(step)
        self.discard()
        self.newest = newest

    def _newest_until(self, step: int) -> SnapshotCommit | None:
        known = [each for each in (self.newest, self._candidate, self.verified) if each is not None]
        return max((each for each in known if each.version.step <= step), key=lambda each: each.version, default=None)

    def discard(self) -> None:
        """Nothing that was or will be reported counts, until another generation begins."""
        self._generation, self.newest = NOTHING, None
        self.verified = self._candidate = self._verifies = None
        self._reported.clear()

    def replan(self, peers: Mapping[str, tuple[str, ...]]) -> None:
        """The same generation's nodes have other peers: only copies that are with these count."""
        self._peers = dict(peers)
        self._reported.clear()

    def sealed(self, report: SnapshotAck) -> SnapshotCommit | None:
        """Take a node's report; the commit that it completes, if it does."""
        version = report.version
        if version.generation != self._generation or self._peers.get(report.node) != report.peers:
            return None  # it had not heard yet of the nodes that are to hold its copies
        if self.newest is not None and version <= self.newest.version:
            return None
        nodes = self._reported.setdefault(version, set())
        nodes.add(report.node)
        if len(nodes) < len(self._peers):
            return None
        before, self.newest = self.newest, SnapshotCommit(version, dict(self._peers))
        if self._verifies is not None and before is not None and before.version.step < self._verifies <= version.step:
            self._candidate = before
        for done in [each for each in self._reported if each <= version]:
            del self._reported[done]
        return self.newest

    def unreported(self) -> tuple[Version, set[str]]:
        """The oldest version that some nodes have reported, or NEVER, and the nodes that have not."""
        version = min(self._reported, default=NEVER)
        return version, self._peers.keys() - self._reported.get(version, self._peers.keys())

    def holds(self, step: int) -> bool:
        """Whether a step, or a later one, is committed."""
        return self.newest is not None and self.newest.version.step >= step

    def newest_of(self, whole: Iterable[Version], logged: int) -> Version:
        """The newest step of those that are held whole. Raises AssertionError where nothing was committed.

        The committed one, or a later one of the newest generation that not all of its nodes have reported: ranks seal a
        step once all its collectives have succeeded, so where they have all of it between them, as a replica has that
        survived, it is as good. Not after `logged`, the last step that has a row.
        """
        assert self.newest is not None
        committed, generation = self.newest.version, self._generation
        later = (each for each in whole if each.generation == generation and each.step <= logged)
        return max([committed, *later])

    def rebuild(
        self,
        known: Iterable[tuple[str, Version, Iterable[Replica]]],
        counts: Callable[[Version], bool] = lambda version: True,
    ) -> None:
        """After the coordinator was lost: from each keeper's (node, newest commit it knows, what it holds).

        Keepers hear of a commit after it was made, so the newest one that any of them knows is committed. Where parts
        of it are gone, a newer one was committed that only a lost node had heard of, and freed slots for: the newest
        that is held whole. What only copies are left of is written from these. Where a group trains by now, some
        have answered late: what is whole of its own steps counts, as what others hold was asked before.
        What does not count of the run any more, as the log has it, is as good as gone.
        """
        told = [(node, version, list(held)) for node, version, held in known]
        found = [(node, [each for each in held if counts(each.moment)]) for node, _, held in told]
        newest = max((version for _, version, _ in told if counts(version)), default=NEVER)
        all_held = [each for _, held in found for each in held]
        is_known = any(version != NEVER for _, version, _ in told)
        if is_known and not self._is_whole(newest, all_held):
            later = {each.moment for each in all_held if each.moment > newest}
            newest = max((version for version in later if self._is_whole(version, all_held)), default=newest)
        of_newest = [(node, [each for each in held if each.moment == newest]) for node, held in found]
        peers: dict[str, tuple[str, ...]] = {
            node: () for node, held in of_newest if any(not each.copy_of for each in held)
        }
        for node, held in of_newest:
            for origin in sorted({each.copy_of for each in held if each.copy_of}):
                name = next((known for known in peers if known.startswith(origin)), origin)
                peers[name] = (*peers.get(name, ()), node)
        is_its_own = newest.generation == self._generation and self._is_whole(newest, all_held)
        is_newer = self.newest is None or newest > self.newest.version
        if peers and is_newer and (self._generation == 0 or is_its_own):
            self.newest = SnapshotCommit(newest, peers)
