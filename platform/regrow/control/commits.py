"""Which snapshot is the newest committed one: a step counts once every node of its generation has reported it. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from regrow.plan import placement
from regrow.state.memory.held import Held
from regrow.state.memory.node import Sealed
from regrow.state.memory.slots import Moment


@dataclass(frozen=True)
class SnapshotCommit:
    """A committed step, and the nodes that hold it: each with the node that has its copies, or ""."""

    moment: Moment
    peers: Mapping[str, str] = field(hash=False)


class SnapshotBoard:
    """Collects what keepers report, for one generation after another."""

    def __init__(self) -> None:
        self.newest: SnapshotCommit | None = None
        self._generation = 0
        self._peers: dict[str, str] = {}  # of the generation's nodes
        self._reported: dict[Moment, set[str]] = {}  # which nodes did

    def begin(self, generation: int, start_step: int, peers: Mapping[str, str]) -> None:
        """From here on only this generation's reports count, and a step needs all these nodes', copied to their peers.

        A snapshot of a later step than the generation starts from is given up: it could not be read.
        """
        self._generation, self._peers = generation, dict(peers)
        self._reported.clear()
        if self.newest is not None and self.newest.moment.step > start_step:
            self.newest = None

    def replan(self, peers: Mapping[str, str]) -> None:
        """The same generation's nodes have other peers: only copies that are with these count."""
        self._peers = dict(peers)
        self._reported.clear()

    def sealed(self, report: Sealed) -> SnapshotCommit | None:
        """Take a node's report; the commit that it completes, if it does."""
        moment = report.moment
        if moment.generation != self._generation or self._peers.get(report.node) != report.peer:
            return None  # it had not heard yet of the node that is to hold its copies
        if self.newest is not None and moment <= self.newest.moment:
            return None
        nodes = self._reported.setdefault(moment, set())
        nodes.add(report.node)
        if len(nodes) < len(self._peers):
            return None
        self.newest = SnapshotCommit(moment, dict(self._peers))
        for done in [each for each in self._reported if each <= moment]:
            del self._reported[done]
        return self.newest

    def newest_whole(self, held: Iterable[Held], logged: int) -> Moment:
        """The newest step that is whole in what is held. Raises AssertionError where nothing was committed.

        The committed one, or a later one of the newest generation that not all of its nodes have reported: ranks seal a
        step once all its collectives have succeeded, so where they have all of it between them, as a replica has that
        survived, it is as good. Not after `logged`, the last step that has a row.
        """
        assert self.newest is not None
        committed, held = self.newest.moment, list(held)
        later = {
            each.moment
            for each in held
            if each.moment > committed and each.moment.generation == self._generation and each.moment.step <= logged
        }
        return max((moment for moment in later if is_whole(moment, held)), default=committed)

    def rebuild(self, known: Iterable[tuple[str, Moment, Iterable[Held]]]) -> None:
        """After the coordinator was lost: from each keeper's (node, newest commit it knows, what it holds).

        Keepers hear of a commit after it was made, so the newest one that any of them knows is committed. Where parts
        of it are gone, a newer one was committed that only a lost node had heard of, and freed slots for: the newest
        that is held whole. Nodes that hold it are known again, where their copies are is not: there is no need to,
        all of them are asked.
        """
        found = [(node, moment, list(held)) for node, moment, held in known]
        newest = max((moment for _, moment, _ in found), default=Moment())
        all_held = [each for _, _, held in found for each in held]
        if newest != Moment() and not is_whole(newest, all_held):
            newest = max(
                (e.moment for e in all_held if e.moment > newest and is_whole(e.moment, all_held)), default=newest
            )
        nodes = [node for node, _, held in found if any(each.moment == newest for each in held)]
        if nodes:
            self.newest = SnapshotCommit(newest, dict.fromkeys(nodes, ""))


def is_whole(moment: Moment, held: Iterable[Held]) -> bool:
    """Whether the ranks whose state of a step is held have every element of it."""
    return placement.is_whole(each.coordinates for each in held if each.moment == moment)
