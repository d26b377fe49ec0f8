"""What control is told, each with the time at which it happened (`Control.on(event, now)`).

Calls of workers that carry a generation are refused (`Fenced`) once that is over.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from regrow.control.membership import Member
from regrow.control.values import NOTHING, Address, PartTimes, Replica, SnapshotAck, Version
from regrow.control.verification import Outcome

# a worker


@dataclass(frozen=True)
class Joined:
    """A worker is ready for the next generation; see `Membership.join`."""

    member: Member
    expected: int  # processes that started together


@dataclass(frozen=True)
class Asked:
    """A worker asks for the first generation after `after` that it is in; the reply is a `states.Answer`."""

    member_id: str
    after: int


@dataclass(frozen=True)
class Began:
    """Rank 0: the group has restored, and trains from `start_step`."""

    generation: int
    start_step: int
    nodes: tuple[str, ...]
    details: Mapping[str, Any]  # for the log


@dataclass(frozen=True)
class Row:
    """Rank 0: the metrics of one step. The reply is a `RowAnswer`."""

    generation: int
    row: Mapping[str, Any]


@dataclass(frozen=True)
class RowsAgain:
    """Rank 0: all rows that it has from a step on that was wanted, of earlier generations too. Replies as `Row`."""

    generation: int
    since: int  # that step
    rows: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Verified:
    """Rank 0: what all units came to in the verification of a step. It comes before that step's row."""

    generation: int
    step: int
    outcome: Outcome


@dataclass(frozen=True)
class CheckpointWanted:
    """Rank 0: the snapshot of this step, or the next one if it is lost, is to become a checkpoint."""

    generation: int
    step: int


@dataclass(frozen=True)
class Leaving:
    """Rank 0: the whole group leaves after this step, to form anew or to stop; `cause` is empty where it is to stop."""

    generation: int
    step: int
    cause: str


@dataclass(frozen=True)
class NotFinite:
    """Rank 0: the whole group leaves, for gradients are not finite."""

    generation: int
    step: int
    detail: str


@dataclass(frozen=True)
class Logged:
    """Rank 0: something for the log that is true of this generation."""

    generation: int
    event: str
    fields: Mapping[str, Any]


@dataclass(frozen=True)
class Noted:
    """Something for the log that is true whatever generation it comes from."""

    event: str
    fields: Mapping[str, Any]


@dataclass(frozen=True)
class Done:
    """Rank 0: the last step is trained."""


@dataclass(frozen=True)
class Broke:
    """A rank cannot go on, because of a peer's death or by itself: its peers may wait for it, and hear nothing."""

    generation: int
    detail: str
    rank: int | None = None  # whose own error this is; None: of a collective, which may be any rank's


@dataclass(frozen=True)
class Unfit:
    """A process' device computes wrong numbers, or it may not join for what else was found; it ends itself."""

    node: str
    pid: int
    detail: str
    machine: str = ""  # `Member.machine`, of one that has not joined


@dataclass(frozen=True)
class Failed:
    """The run cannot go on, for a reason that is no rank's."""

    message: str


@dataclass(frozen=True)
class Superseded:
    """Another process writes the run: nothing of this one is to be written any more."""

    message: str


@dataclass(frozen=True)
class Trouble:
    """A process met an error that it would meet again, and asks (`Asked`) what is to become of it.

    It is the run's where all ranks of its group have one, or all processes that start; else it is the process' own.
    """

    generation: int  # of its group; 0: it has joined none
    member: Member
    expected: int  # processes that started together
    message: str


# Ray Train's controller, and the liveness probes


@dataclass(frozen=True)
class Died:
    """Processes, by node and pid, are gone; `left` are there still, those included that are starting. Told again."""

    processes: tuple[tuple[str, int], ...]
    left: int
    cause: str
    detail: str


@dataclass(frozen=True)
class Gone:
    """A node's keeper has seen one of its workers end."""

    node: str
    pid: int


@dataclass(frozen=True)
class ConnectionLost:
    """The connection that is held to a node's keeper has ended: its node may be dead, or it alone."""

    node: str


@dataclass(frozen=True)
class PortRefused:
    """The liveness ports of these members refuse connections: the processes are gone."""

    member_ids: tuple[str, ...]


@dataclass(frozen=True)
class Running:
    """A worker of each of these nodes has said at its liveness port that it runs."""

    nodes: tuple[str, ...]


@dataclass(frozen=True)
class GroupFailed:
    """Ray Train ends the whole group and starts another one."""

    cause: str
    detail: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class GroupShutDown:
    """Ray Train ends the whole group, whether it failed or not."""


@dataclass(frozen=True)
class GroupStarted:
    """Ray Train has started a whole group: its processes, by node and pid, which join from here on."""

    processes: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Placed:
    """How many workers live on each node where one was started lately, those included that are starting."""

    workers: Mapping[str, int]


@dataclass(frozen=True)
class Started:
    """Processes that were started long ago, each by node, pid and seconds since. Replies with a StartedAnswer."""

    processes: Sequence[tuple[str, int, float]]


@dataclass(frozen=True)
class Notice:
    """All nodes that are about to be taken away, and when, on the clock of `now`."""

    deadlines: Mapping[str, float]
    ahead_s: float = 0.0  # that clock, of unix time


@dataclass(frozen=True)
class NodesAlive:
    """The nodes that Ray has not found dead."""

    nodes: frozenset[str]


# a keeper


@dataclass(frozen=True)
class KeeperUp:
    """A node's keeper is up; `restarted`: in the place of one that died, and asks for work."""

    node: str
    domain: str  # that fails as one
    address: Address
    restarted: bool = False
    node_up_s: float | None = None  # since the node came up, where that is known


@dataclass(frozen=True)
class NeighboursAsked:
    """A keeper that is new: which nodes is it to measure its links to? The reply is a list of `values.Peer`."""

    node: str
    address: Address


@dataclass(frozen=True)
class KeepersFound:
    """Keepers that outlived an earlier coordinator: (node, newest commit it knows, what it holds)."""

    known: tuple[tuple[str, Version, Sequence[Replica]], ...]
    newest_generation: int = NOTHING  # of which any of them has heard; the log may not have


@dataclass(frozen=True)
class Sealed:
    """Nodes have versions safe."""

    acks: Sequence[SnapshotAck]


@dataclass(frozen=True)
class Complaint:
    """A keeper cannot do what it is for; `peer`: to copy to that node, which it tried for so long."""

    node: str
    text: str
    peer: str = ""
    tried_s: float = 0.0


@dataclass(frozen=True)
class GpuError:
    """The driver of a node's GPU reports an error; `meaning` is empty for those that programs cause."""

    node: str
    gpu: str
    xid: int
    meaning: str


@dataclass(frozen=True)
class Answered:
    """A keeper's answer to `commands.Ask`; None where it is gone."""

    question: int
    node: str
    answer: Any


@dataclass(frozen=True)
class Written:
    """A node has written what ranks of `origin` hold."""

    upload: int
    origin: str
    times: PartTimes = field(default_factory=PartTimes)


@dataclass(frozen=True)
class WriteFailed:
    """A node could not; `has_none`: because it is gone, or does not have the part whole."""

    upload: int
    origin: str
    node: str
    problem: str
    has_none: bool = False


@dataclass(frozen=True)
class HasReadBack:
    """A node has read what was written of `origin`; `problem`: storage has something else. None: it could not read."""

    upload: int
    origin: str
    problem: str | None
    why: str = ""  # it could not


@dataclass(frozen=True)
class Spoken:
    """What `node` and those that it speaks for answer to an order for all, each of its own part.

    Those of them that are left out have not answered, or it is gone.
    """

    upload: int
    node: str
    answers: Sequence[Written | WriteFailed | HasReadBack]


# storage


@dataclass(frozen=True)
class IndexWritten:
    upload: int


@dataclass(frozen=True)
class IndexNotWritten:
    """By the keeper that was to do it; or by the coordinator in its place."""

    upload: int
    problem: str = ""  # the coordinator's


@dataclass(frozen=True)
class CheckpointCommitted:
    upload: int
    step: int
    num_bytes: int


@dataclass(frozen=True)
class PublishFailed:
    """COMMIT of a checkpoint could not be written."""

    upload: int
    problem: str


@dataclass(frozen=True)
class Deleted:
    """Old checkpoints were deleted, or what an upload that failed has left; what went wrong, or empty."""

    problem: str
    upload: int = 0  # 0: old checkpoints


# a person, by a command


@dataclass(frozen=True)
class DrainAsked:
    """Maintenance: the group is to leave this node, and no worker to be started there. The reply is why not, or empty.

    Asked again it is the same.
    """

    node: str
    ahead_s: float = 0.0  # the clock of `now`, of unix time


@dataclass(frozen=True)
class UndrainAsked:
    """This node is in service again. The reply is why not, or empty."""

    node: str


# the driver, and the actor itself


@dataclass(frozen=True)
class StopAsked:
    """Commit a checkpoint and leave at the next step."""

    reason: str


@dataclass(frozen=True)
class Settle:
    """No worker is left: what is committed is to be in storage. Said again and again until that is settled."""


@dataclass(frozen=True)
class Restarted:
    """This coordinator takes the place of one that died. What its log says of the newest generation: its members, from
    where it trains, if it does, and which ranks it has lost, if it is over."""

    members: tuple[Member, ...]  # none: no group was formed since the driver started
    start_step: int | None
    nodes: tuple[str, ...]
    lost: tuple[int, ...] | None = None  # Ray tells of them once, and told the one before
    lost_at: float = 0.0  # the last of them


@dataclass(frozen=True)
class Closed:
    """The run is over: every write from here on is refused."""


Event = (
    Joined
    | Asked
    | Began
    | Row
    | RowsAgain
    | Verified
    | CheckpointWanted
    | Leaving
    | NotFinite
    | Logged
    | Noted
    | Done
    | Broke
    | Unfit
    | Failed
    | Superseded
    | Trouble
    | Died
    | Gone
    | ConnectionLost
    | PortRefused
    | Running
    | GroupFailed
    | GroupShutDown
    | GroupStarted
    | Placed
    | Started
    | Notice
    | NodesAlive
    | KeeperUp
    | NeighboursAsked
    | KeepersFound
    | Sealed
    | Complaint
    | GpuError
    | Answered
    | Written
    | WriteFailed
    | HasReadBack
    | Spoken
    | IndexWritten
    | IndexNotWritten
    | CheckpointCommitted
    | PublishFailed
    | Deleted
    | DrainAsked
    | UndrainAsked
    | StopAsked
    | Settle
    | Restarted
    | Closed
)
