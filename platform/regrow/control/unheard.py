"""Processes that were started long ago, and say nothing: they hold places that others could have. Pure."""

import math
from dataclasses import dataclass, field

from regrow.control.commands import Outbox, Reply
from regrow.control.events import Started, Unfit
from regrow.control.group import Group
from regrow.control.states import StartedAnswer

AGAIN_S = 60.0  # for those that a coordinator knew before it was restarted to say something again
COMES_S = 600.0  # for the others to come, beyond the time after which they are asked about: it may take long to compile


@dataclass
class Unheard:
    """A process waits for storage, its keeper and the coordinator for minutes at the most before it joins, or says why
    it does not; one that hangs says nothing, and is neither in a group nor waits for one."""

    group: Group
    out: Outbox
    timeout_s: float  # of a collective
    _since: dict[tuple[str, int], float] = field(default_factory=dict)  # when one was told of first
    _noted: set[tuple[str, int]] = field(default_factory=set)
    _to_end: set[tuple[str, int]] = field(default_factory=set)
    _looked_at: float = -math.inf

    def look(self, event: Started, now: float) -> None:
        """Say which are heard of, and which are to end; a host on which that happens again and again is left alone."""
        group = self.group
        members = {(each.node, each.pid) for each in [*group.membership.current, *group.membership.waiting.values()]}
        self._keep({(node, pid) for node, pid, _ in event.processes}, now)
        heard = []
        for node, pid, age_s in event.processes:
            process, name = (node, pid), f"process {pid} on node {node[:12]}"
            if process in self._to_end:
                continue
            if process in members or process in group.nodes.heard_of:
                heard.append(process)
                continue
            starts = not members or group.ending is not None  # before the first one joins all may take as long
            since = self._since[process] = now if starts else self._since.get(process, now)
            said = f"was started {age_s:.0f} s ago, and has neither joined nor said why"
            if now - since > max(COMES_S, self.timeout_s):
                self._to_end.add(process)
                group.nodes.unfit(Unfit(node, pid, f"{name} {said}: ended"), now)
            elif now - since > AGAIN_S and process not in self._noted:
                self._noted.add(process)
                self.out.record("note", text=f"{name} {said}: its device, a mount or a compiler may hang there")
        self.out.append(Reply(StartedAnswer(frozenset(heard), frozenset(self._to_end))))

    def _keep(self, told: set[tuple[str, int]], now: float) -> None:
        """Forget others than these: a pid comes round again. These too, if none was told of for long."""
        told = told if now - self._looked_at <= COMES_S else set()
        self._looked_at = now
        self._since = {process: since for process, since in self._since.items() if process in told}
        self._noted &= told
        self._to_end &= told
