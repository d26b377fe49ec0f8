"""When what is in memory alone is to be in storage: it may be lost with its nodes, or with the run. Pure."""

from regrow.control import events as e
from regrow.control.group import Group
from regrow.control.snapshots import Snapshots
from regrow.control.states import GivenUp

OF_GOING = e.Notice | e.DrainAsked | e.CheckpointCommitted  # after which nodes that go may take memory along


class AtRisk:
    """Asks for a checkpoint, again and again while there is a reason."""

    def __init__(self, group: Group, snapshots: Snapshots) -> None:
        self._group, self._snapshots = group, snapshots

    def look(self, now: float, event: e.Event | None = None) -> None:
        """After an event, or as time passes. Members are looked at one by one then, and not after each event: all ranks
        send some."""
        reason = self._of_the_run
        if not reason and (event is None or isinstance(event, OF_GOING)):
            reason = self._of_nodes
        if reason:
            self._snapshots.checkpoints.secure(reason, now)

    @property
    def _of_the_run(self) -> str:
        if isinstance(self._group.ending, GivenUp) or self._group.is_over:
            return "the run ends"
        return self._group.too_few.reason if self._group.too_few.since is not None else ""

    @property
    def _of_nodes(self) -> str:
        going, newest = self._group.nodes.exclusions.going, self._snapshots.commits.newest
        if going and not self._group.membership.could_form_without(going):
            return "too few nodes stay"
        if going and newest is not None and any({node, *peers} <= going for node, peers in newest.peers.items()):
            return "a node is to be taken away, and those with its copies"
        return ""
