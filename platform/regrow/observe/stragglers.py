"""Who is slow: each process' own speed against the others', by a product that it timed without them. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from regrow.observe.pulse import Pulse

FACTOR = 1.5  # of the median time
TIMES = 2  # in a row


@dataclass
class Stragglers:
    """Takes what each check-up finds; names a process once, until it is as fast as the others again."""

    _slow: dict[tuple[str, int], int] = field(default_factory=dict)  # node and pid -> how often in a row

    def found(self, pulses: Sequence[tuple[str, Pulse]]) -> list[tuple[str, Pulse, float]]:
        """The pulses, with their nodes, of those that are slow for the second time, and by what factor."""
        timed = [(node, pulse) for node, pulse in pulses if pulse.probe_s > 0]
        if len(timed) < 3:  # of two, neither is the slow one
            return []
        usual = median(pulse.probe_s for _, pulse in timed)
        slow = {(node, pulse.pid): pulse for node, pulse in timed if pulse.probe_s > FACTOR * usual}
        self._slow = {who: 1 + self._slow.get(who, 0) for who in slow}
        return [
            (node, pulse, pulse.probe_s / usual)
            for (node, pid), pulse in slow.items()
            if self._slow[node, pid] == TIMES
        ]
