"""What a worker is doing, and for how long that is usual, learned from how long it took them so far. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum


class Phase(StrEnum):
    """In the order in which a pulse holds them."""

    forming = "forming"  # meeting, building, restoring
    first_step = "first_step"  # all compile in it
    step = "step"
    data = "data"  # waiting for rows
    snapshot = "snapshot"  # waiting for room in memory, or for a snapshot to be safe
    validation = "validation"
    checkpoint = "checkpoint"  # the ranks write it themselves
    profile = "profile"
    storage = "storage"  # waiting for rows of a storage that fails
    callback = "callback"  # in the user's code, `train.callback`
    restore = "restore"  # reading a checkpoint from storage, or which there are, while a group forms


PHASES = tuple(Phase)
OWN_LIMITS = frozenset(Phase) - {Phase.forming, Phase.first_step, Phase.step}  # of which a group's first step has none
KEPT = 10  # of a phase, in a process: the longest of so many is what is usual
ROOM_S = 30.0  # that ranks wait for room for a snapshot, at the most
FACTOR = 1.5  # beyond what is usual, and
BEYOND_S = 20.0  # so much more: with two questions five seconds apart, a hang is found within 30 s
FORM_S, FORM_S_PER_RANK = 60.0, 0.05  # for all ranks to come to their group, and to each other
PATIENCE = 0.8  # of the time that a collective may take, for a rank alone to wait for rows of a storage that fails


def form_s(world_size: int, timeout_s: float) -> float:
    """How long so many ranks may take to form a group whose collectives may take `timeout_s`."""
    return min(timeout_s, FORM_S + FORM_S_PER_RANK * world_size)


@dataclass
class Usual:
    """How long phases take, in all groups so far."""

    unknown_s: float  # for a phase that no worker has come through yet, unless the others took longer
    least_s: Mapping[Phase, float] = field(default_factory=dict)  # what a phase may take by timeouts of its own
    longest_s: dict[Phase, float] = field(default_factory=dict)
    most_s: Mapping[Phase, float] = field(default_factory=dict)  # of these, whatever they took so far

    def learn(self, longest_s: Iterable[Sequence[float]]) -> None:
        """From all workers: of each the longest of its newest of each of PHASES; 0: none. What was long once is
        forgotten as they forget it."""
        for phase, newest in zip(PHASES, zip(*(each for each in longest_s if each), strict=True), strict=False):
            if max(newest) > 0:
                self.longest_s[phase] = max(newest)

    def limit_s(self, phase: Phase, others_s: float) -> float:
        """After which a worker hangs that others wait for; `others_s` is what it took them to get to where they wait.

        What compiles may take this one as long as the others, again.
        """
        known_s = self.longest_s.get(phase)
        usual_s = max(FACTOR * max(known_s or 0.0, others_s), self.least_s.get(phase, 0.0))
        limit_s = max(usual_s + BEYOND_S, self.unknown_s if known_s is None else 0.0)
        return min(limit_s, self.most_s.get(phase, limit_s))
