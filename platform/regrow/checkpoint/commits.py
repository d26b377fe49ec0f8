"""Which snapshot is the newest committed one: a step counts once every node of its generation has reported it. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

from regrow.checkpoint.keeper_node import Held, Sealed


@dataclass(frozen=True)
class SnapshotCommit:
    """A committed step and all files that hold parts of it: (node, file), copies included."""

    generation: int
    step: int
    files: tuple[tuple[str, Held], ...]


class SnapshotBoard:
    """Collects what keepers report, for one generation after another."""

    def __init__(self) -> None:
        self.newest: SnapshotCommit | None = None
        self._generation, self._nodes = 0, frozenset[str]()
        self._reported: dict[int, dict[str, Sealed]] = {}  # step -> node -> report

    def begin(self, generation: int, start_step: int, nodes: Iterable[str]) -> None:
        """From here on only this generation's reports count, and a step needs all these nodes'.

        A snapshot of a later step than the generation starts from is given up: it could not be read.
        """
        self._generation, self._nodes = generation, frozenset(nodes)
        self._reported.clear()
        if self.newest is not None and self.newest.step > start_step:
            self.newest = None

    def sealed(self, report: Sealed) -> SnapshotCommit | None:
        """Take a node's report; the commit that it completes, if it does."""
        if report.generation != self._generation or report.node not in self._nodes:
            return None
        if not report.peer and len(self._nodes) > 1:  # it had not heard yet of the node that is to hold its copies
            return None
        if self.newest is not None and report.step <= self.newest.step and self.newest.generation == self._generation:
            return None
        reports = self._reported.setdefault(report.step, {})
        reports[report.node] = report
        if self._nodes - reports.keys():
            return None
        files: list[tuple[str, Held]] = []
        for node in sorted(reports):
            sealed = reports[node]
            files += [(node, held) for held in sealed.files]
            if sealed.peer:
                files += [(sealed.peer, held.copy()) for held in sealed.files]
        self.newest = SnapshotCommit(self._generation, report.step, tuple(files))
        for step in [step for step in self._reported if step <= report.step]:
            del self._reported[step]
        return self.newest

    def rebuild(self, holdings: Iterable[tuple[str, tuple[int, int], Iterable[Held]]]) -> None:
        """After the coordinator was lost: from each keeper's (node, newest commit it knows, what it holds).

        Keepers hear of a commit after it was made, so the newest one that any of them knows is committed.
        """
        known = [(node, commit, list(held)) for node, commit, held in holdings]
        generation, step = max((commit for _, commit, _ in known), default=(-1, -1))
        files = [
            (node, held)
            for node, _, all_held in known
            for held in all_held
            if (held.generation, held.step) == (generation, step)
        ]
        if files:
            self.newest = SnapshotCommit(generation, step, tuple(files))
