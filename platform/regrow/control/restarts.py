"""A group that Ray Train ends and starts as a whole: with `cluster.in_place=false` after each error, for another size,
and for a node that is taken away; else where none of its processes is left. Pure."""

from collections import Counter

from regrow.control.events import GroupFailed, GroupShutDown, GroupStarted
from regrow.control.group import Group
from regrow.control.states import Waiting
from regrow.record.events import Cause


class Restarts:
    """Of a run's group."""

    def __init__(self, group: Group, now: float) -> None:
        self._group = group
        self._num_before = 0  # processes of the group that was shut down without an error; 0: it was not
        if not group.in_place:
            group.too_few.restarts(now)

    def failed(self, event: GroupFailed, now: float) -> None:
        """All processes are ended, to be started anew."""
        group = self._group
        current = group.membership.current
        nodes = {current[rank].node for rank in event.ranks if rank < len(current)}
        self._all_ended(now)
        group.failed(*group.troubles.clear(event.cause, event.detail), event.ranks, nodes, interrupts=bool(current))
        group.first_steps.all_ended()
        group.health.lost(current)
        self._num_before = 0
        if not current and group.ending is None and group.first_steps.not_formed(event.cause):
            group.give_up(f"group after group failed before it was formed; last failure: {group.last_failure}")

    def shut_down(self, event: GroupShutDown, now: float) -> None:
        """Ray Train ends all processes, for which it needs no error: it may change how many there are."""
        group = self._group
        current = group.membership.current
        if group.ending is not None:  # they go by themselves
            return
        self._num_before = len(current) or self._num_before
        self._all_ended(now)
        group.troubles.clear("", "")
        group.first_steps.all_ended()
        group.health.lost(current)

    def started(self, event: GroupStarted, now: float) -> None:
        """These are all that there are; none of them has joined yet."""
        group, processes = self._group, frozenset(event.processes)
        if processes == group.processes or group.ending is not None:  # told again
            return
        self.shut_down(GroupShutDown(), now)
        if self._num_before:
            group.cause, self._num_before = Cause.grow if len(processes) > self._num_before else Cause.drain, 0
        group.processes = processes
        group.membership.announce(len(processes))
        unit, per_node = group.membership.unit, Counter(node for node, _ in processes)
        usable = sum(count // unit * unit for count in per_node.values())
        if usable >= min(group.membership.sizes):
            group.too_few.enough()
        else:
            where = ", ".join(f"{count} on node {node[:12]}" for node, count in sorted(per_node.items()))
            text = f"Ray Train has started {where}; parallel.tp={unit} takes as many of a node at a time"
            group.out.record("note", text=f"{text}, and only {usable} of {group.too_few.smallest} fit")

    def _all_ended(self, now: float) -> None:
        group = self._group
        group.membership.dissolve()
        group.enter(Waiting(), now)
        if not group.in_place:
            group.processes = frozenset()
            group.too_few.restarts(now)
