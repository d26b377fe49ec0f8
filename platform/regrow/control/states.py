"""The states of a run: what its group does, and how the run ends. Values; `group.Group` moves from one to the next.

Waiting -> Forming -> Training -> Waiting    a rank is lost, at whichever of them: the others form the next group
                      Training -> Leaving -> Forming    in good order: to grow, to leave nodes, to change arithmetic
any -> Stopping -> Finished, any -> GivenUp
"""

from dataclasses import dataclass

from regrow.control.membership import Formation, Seat


@dataclass(frozen=True)
class Waiting:
    """No generation is on: workers start, or the group is over for one of its ranks, and those that are left come."""


@dataclass(frozen=True)
class Forming:
    """A generation is numbered and given out; its ranks connect, build and restore."""

    generation: int


@dataclass(frozen=True)
class Training:
    """A group takes steps."""

    generation: int
    asked_to_leave: str = ""  # Cause.grow or drain, once its rows were answered so


@dataclass(frozen=True)
class LeavingGroup:
    """The group left in good order after a step, whose snapshot is worth waiting for until then."""

    step: int
    until: float


GroupState = Waiting | Forming | Training | LeavingGroup


@dataclass(frozen=True)
class Stopping:
    """The group was asked to commit a checkpoint and leave."""

    reason: str


@dataclass(frozen=True)
class Finished:
    """The last step is trained."""

    reason: str = "finished"


@dataclass(frozen=True)
class GivenUp:
    """Another attempt would meet the same."""

    message: str
    reason: str = "failed"


Ending = Stopping | Finished | GivenUp


@dataclass(frozen=True)
class Settling:
    """What of a run is still to be written, and where it is."""

    busy: bool  # a checkpoint is being written, or is to be
    failure: str  # why the newest one was not written, if it was not
    unstored: int | None  # the step that is committed in memory, and is not in storage
    nodes: tuple[str, ...]  # that hold it
    lost: str = ""  # which step was to be in storage and is nowhere, and why


@dataclass(frozen=True)
class Answer:
    """To a worker that asks for its generation: that, or the reason to end, or to ask again after `wait_s`. What is
    sent to it has its seat there instead."""

    formation: Formation | None = None
    seat: Seat | None = None
    over: bool = False
    given_up: str = ""
    unfit: bool = False  # the process is to end: what troubles it is its own
    join_again: bool = False  # the coordinator does not know it: it was restarted
    wait_s: float = 0.0


@dataclass(frozen=True)
class RowAnswer:
    """To rank 0, which has sent a row."""

    leave: str = ""  # why the group should leave
    wanted: int | None = None  # not taken: rows from this step on, which are not here, come first
    every_steps: int = 0  # from one snapshot to the next; 0: as before


@dataclass(frozen=True)
class StartedAnswer:
    """Of processes that were started long ago, by node and pid; of the others it is open whether they come."""

    heard: frozenset[tuple[str, int]]  # they have joined, or said why they do not
    to_end: frozenset[tuple[str, int]]  # they hang, it seems
