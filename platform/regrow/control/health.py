"""When a group that stands still is worth asking about, and what to make of the answers. Pure; time is an argument.

A group stands still, while it trains or while it forms, because one of its processes does: the others wait for it.
Which one, its node's keeper knows, for it sees who is stopped, or has not run for long; a keeper that does not answer
is on a node that has gone dark.
Somebody who runs and does not get on is left in peace for long, and then compared with the others: whoever waits in no
collective, as they do, and begins none, is the one they wait for.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

NOTHING = -1
STEPS, SECONDS = 2.0, 0.4  # so many median steps, and seconds, without a step: ask
STOPPED_S = 0.7  # silent and stopped by a signal
DARK_S = 5.0  # for a keeper to answer
STUCK_SHARE = 0.25  # of a collective's timeout without a step: worth a look at where everyone is
WINDOW = 50  # steps that the median is of

Worker = tuple[str, int]  # node, pid
SLOW_FACTOR = 1.5  # of the median time
SLOW_TIMES = 2  # in a row


@dataclass(frozen=True)
class Pulse:
    """What a node knows of one of its workers."""

    pid: int
    generation: int
    step: int  # the newest one it finished in this generation
    silent_s: float  # since it last ran
    probe_s: float  # of its newest probe (`train.probe`); 0 before the first
    state: str  # of the process, as the kernel says: R, S and D run or wait, T is stopped; empty: it is gone
    asked: int = 0  # the newest question where it is (`ControlWord.traces`) that it has answered; 0: none
    collectives: int = NOTHING  # at that time: begun since the process began
    waits: bool = False  # at that time: one of them had not ended, or what it does may take long

    @property
    def stopped(self) -> bool:
        return self.state in ("T", "t")


@dataclass
class Stalls:
    """Watches the steps of one generation after the other."""

    silence_s: float  # that a process is allowed, whatever keeps it
    timeout_s: float  # of a collective
    stuck_s: float  # without a step: who keeps the others waiting? 0: never asked
    _step_s: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    forming: bool = False  # the group does not train yet
    _since: float | None = None  # the last progress; None: there is no group
    _looked: bool = False  # in this stall
    _has_stepped: bool = False  # in this generation

    def begin(self, now: float, *, forming: bool = False) -> None:
        """A generation begins to train, or to form: whoever is stopped then keeps the others waiting too, but that it
        takes long says nothing."""
        self._since, self._looked, self.forming, self._has_stepped = now, forming, forming, False

    def stepped(self, step_s: float, now: float) -> None:
        self._step_s.append(step_s)
        self.begin(now)
        self._has_stepped = True

    def end(self) -> None:
        """There is no group."""
        self._since, self.forming = None, False

    @property
    def training(self) -> bool:
        """Whether there is a group that trains."""
        return self._since is not None and not self.forming

    @property
    def patience_s(self) -> float:
        """Without a step for so long, the group stands still."""
        return STEPS * median(self._step_s) + SECONDS if self._step_s else self.silence_s

    def stalled_s(self, now: float) -> float:
        """For how long the group has stood still; 0 while it does not."""
        if self._since is None or now - self._since < self.patience_s:
            return 0.0
        return now - self._since

    def wants_a_look(self, now: float) -> bool:
        """Once a stall, after long: what does everyone do?"""
        if self._looked or self.stalled_s(now) < STUCK_SHARE * self.timeout_s:
            return False
        self._looked = True
        return True

    def stuck(self, now: float) -> bool:
        """Whether it takes so long that somebody who runs must be to blame; a first step, in which all compile, may."""
        return self.stuck_s > 0 and self._has_stepped and self.stalled_s(now) > self.stuck_s

    def hung(self, pulses: Sequence[Pulse]) -> list[Pulse]:
        """The processes that keep the others waiting."""
        return [
            pulse
            for pulse in pulses
            if not pulse.state or pulse.silent_s > self.silence_s or (pulse.stopped and pulse.silent_s > STOPPED_S)
        ]


def left_behind(before: Mapping[Worker, Pulse], now: Mapping[Worker, Pulse]) -> list[Worker]:
    """Who runs and is not where the others wait: in no collective, and in none since `before`, while some wait in one.

    Both are answers to the question where they are, of all of a group. Empty where it is most of them: then it is
    something else that they lack.
    """
    found = [
        worker
        for worker, pulse in now.items()
        if worker in before
        and before[worker].asked < pulse.asked
        and before[worker].collectives == pulse.collectives
        and not pulse.waits
        and not before[worker].waits
    ]
    return found if 2 * len(found) <= len(now) and any(pulse.waits for pulse in now.values()) else []


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
        slow = {(node, pulse.pid): pulse for node, pulse in timed if pulse.probe_s > SLOW_FACTOR * usual}
        self._slow = {who: 1 + self._slow.get(who, 0) for who in slow}
        return [
            (node, pulse, pulse.probe_s / usual)
            for (node, pid), pulse in slow.items()
            if self._slow[node, pid] == SLOW_TIMES
        ]
