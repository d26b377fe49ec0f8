"""Silent nodes that are worth waiting for: without them what is committed in memory is not whole. Pure."""

from regrow.control.checkpoints import Checkpoints
from regrow.control.commands import Ask, Outbox, Question
from regrow.control.commits import CommitTracker
from regrow.control.peers import KeeperRegistry

MOST_S = 60.0  # that a group waits for such nodes
ASK_S = 1.0  # between questions to them
ARE_BACK = -3  # the number of the question; others' are above, or -1 and -2


class AwaitedNodes:
    """Several nodes fell silent at once, and have each other's copies; Ray has found none of them dead.

    A group without them would go back to storage, or to its beginning. It is waited for them for as long as the steps
    took that it would train again.
    """

    def __init__(self, commits: CommitTracker, keepers: KeeperRegistry, checkpoints: Checkpoints, out: Outbox) -> None:
        self._commits, self._keepers, self._checkpoints, self._out = commits, keepers, checkpoints, out
        self._silent_at = self._asked_at = 0.0
        self._told = False

    def gone_dark(self, now: float) -> None:
        """Some node more does not answer."""
        self._silent_at, self._told = now, False

    def wait(self, now: float, step_s: float) -> bool:
        """Whether a group should not form yet. Asks them meanwhile whether they are back."""
        newest = self._commits.newest
        if newest is None or newest.version.step <= self._checkpoints.stored:
            return False
        steps = newest.version.step - max(0, self._checkpoints.stored)
        most_s = min(MOST_S, steps * step_s)
        if now - self._silent_at > most_s:
            return False
        keepers = self._keepers
        parts = [{node, *peers} for node, peers in newest.peers.items()]
        missing = [part for part in parts if not any(keepers.is_there(node) for node in part)]
        silent = [sorted(node for node in part if keepers.is_silent(node)) for part in missing]
        if not missing or not all(silent):
            return False
        if now - self._asked_at > ASK_S:
            self._asked_at = now
            nodes = tuple(sorted({node for part in silent for node in part}))
            self._out.append(Ask(ARE_BACK, Question.HEARTBEATS, nodes))
            self._tell(nodes, newest.version.step, steps, most_s)
        return True

    def _tell(self, nodes: tuple[str, ...], step: int, steps: int, most_s: float) -> None:
        if not self._told:
            self._told = True
            names = ", ".join(node[:12] for node in nodes)
            text = f"step {step} is in the memory of nodes that do not answer ({names}): waiting up to {most_s:.0f} s"
            self._out.record("note", text=f"{text} for them, as a group without them would train {steps} steps again")
