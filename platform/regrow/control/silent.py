"""Keepers that answer nothing: they are started anew, within seconds where workers of their nodes run. Pure.

A keeper that does not answer says nothing of its node. Ports at which that node's workers listen do: a process that
runs says a word to what connects to it, a stopped one does not, nor does one on a host that is cut off. Where these
say nothing either, the keeper is given longer: its node may be busy, or gone, which others decide.
"""

from collections.abc import Collection

from regrow.control.commands import Ask, Hail, Outbox, Question, RestartKeeper

LATE_S = 2.0  # that nodes have not reported what others have: their keepers are asked
DARK_S = 5.0  # for a keeper to answer
HAIL_S = 1.5  # before that is over, workers' ports are asked
SURE_S = 60.0  # for a keeper to answer that is late, whatever its node's workers say
AGAIN_S = 20.0  # between two questions to a keeper that answers
START_AGAIN_S = 60.0  # between two starts of one
HANGS = -4  # the number of the question; others' are above, or -1 to -3


class SilentKeepers:
    """Which of the keepers that do not answer hang alone."""

    def __init__(self, out: Outbox) -> None:
        self._out = out
        self._heard_at: dict[str, float] = {}  # nodes, when a worker there was last known to run
        self._started_at: dict[str, float] = {}  # nodes, when their keepers were last started anew
        self._asked_at: dict[str, float] = {}  # nodes that are late, when their keepers were asked
        self._answered_at: dict[str, float] = {}

    def late(self, nodes: Collection[str], now: float) -> None:
        """These have not reported for some time what others have; call it as long as that is so."""
        self._asked_at = {node: at for node, at in self._asked_at.items() if node in nodes}
        new = [
            node
            for node in sorted(nodes)
            if node not in self._asked_at and now - self._answered_at.get(node, -AGAIN_S) >= AGAIN_S
        ]
        if new:
            self._asked_at |= dict.fromkeys(new, now)
            self._out.append(Ask(HANGS, Question.HEARTBEATS, tuple(new)))
        for at in sorted(set(self._asked_at.values())):
            silent = [node for node, asked_at in self._asked_at.items() if asked_at == at]
            hanging = self.hanging(silent, at, now)
            if now - at > SURE_S:
                self._start_anew([node for node in silent if node not in hanging], " and reports nothing", now)

    def unknown(self, nodes: Collection[str], since: float, now: float) -> None:
        """These train since then, and their keepers have not told a coordinator that was restarted what they hold."""
        if now - since > SURE_S:
            self._start_anew(sorted(nodes), "", now)

    def answered(self, node: str, now: float) -> None:
        """It is late for another reason."""
        self._answered_at[node] = now
        self._asked_at.pop(node, None)

    def runs(self, nodes: Collection[str], now: float) -> None:
        """Workers of these nodes run."""
        self._heard_at |= dict.fromkeys(nodes, now)

    def is_back(self, node: str) -> None:
        """Its keeper was started anew."""
        self._started_at.pop(node, None)
        self._asked_at.pop(node, None)

    def hanging(self, nodes: Collection[str], asked_at: float, now: float) -> set[str]:
        """Of nodes whose keepers were asked then, and have not answered: those whose workers run, once that is due.

        Their keepers are started anew.
        """
        hail_at = asked_at + DARK_S - HAIL_S
        if not nodes or now < hail_at:
            return set()
        self._out.append(Hail(tuple(sorted(nodes))))
        if now - asked_at <= DARK_S:
            return set()
        found = {node for node in nodes if self._heard_at.get(node, asked_at) > hail_at}
        self._start_anew(sorted(found), ", its workers run", now)
        return found

    def _start_anew(self, nodes: Collection[str], what: str, now: float) -> None:
        for node in nodes:
            if now - self._started_at.get(node, -START_AGAIN_S) >= START_AGAIN_S:
                self._started_at[node] = now
                text = f"the keeper of node {node[:12]} answers nothing{what}: it is started anew"
                self._out.record("keeper_restarted", node=node, detail=text)
                self._out.append(RestartKeeper(node))
