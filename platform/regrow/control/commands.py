"""What control wants done; the shell that runs it does that, and tells it by events what came of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from regrow.control.membership import Member
from regrow.control.values import NEVER, NOTHING, Peer, Version


@dataclass(frozen=True)
class Reply:
    """The answer to the call that the event was."""

    value: Any


@dataclass(frozen=True)
class Form:
    """A generation is numbered: from here on older ones are fenced off. Its members hear of it when they ask."""

    generation: int
    members: tuple[Member, ...]


@dataclass(frozen=True)
class Record:
    """An event for the run's log, and for all that show it."""

    event: str
    fields: Mapping[str, Any]


@dataclass(frozen=True)
class BeginRows:
    """Rows of this generation follow, from `start_step` + 1 on; later ones of earlier generations are taken back."""

    generation: int
    start_step: int


@dataclass(frozen=True)
class LogRow:
    row: Mapping[str, Any]
    is_late: bool = False  # sent again: it may be of an earlier generation


@dataclass(frozen=True)
class GiveUp:
    """The run ends with this message."""

    message: str


# processes


@dataclass(frozen=True)
class Kill:
    """End a worker, through its node's keeper."""

    node: str
    pid: int
    started: int = 0  # `Member.started`: another process that has the pid by now lives on


@dataclass(frozen=True)
class Connect:
    """Members of a group: see whose liveness ports can be reached at all."""

    members: tuple[Member, ...]


@dataclass(frozen=True)
class Probe:
    """Try the liveness ports of these members, which the others wait for, or whose node may be dead."""

    members: tuple[Member, ...]


@dataclass(frozen=True)
class Hail:
    """Ask the liveness ports of the group's members on these nodes whether their processes run: `events.Running`."""

    nodes: tuple[str, ...]


# keepers


class Question(Enum):
    """What keepers are asked, and do not wait for anything to answer but STACKS, POSITIONS and LINKS."""

    HEARTBEATS = "heartbeats"  # `health.Pulse` of each worker
    POSITIONS = "positions"  # the same, once workers have said in which collective they are
    GPUS = "gpus"  # `values.GpuReading` of each
    STACKS = "stacks"  # a text
    HOLDINGS = "holdings"  # `values.Replica` of each snapshot of a version, and of later ones
    LINKS = "links"  # bytes/s to each node that holds its copies, the slower way


@dataclass(frozen=True)
class Ask:
    number: int
    question: Question
    nodes: tuple[str, ...]
    since: Version = NEVER  # of HOLDINGS


@dataclass(frozen=True)
class TellOver:
    """A generation is over for one of its ranks: no worker of these nodes is to wait in its collectives."""

    generation: int
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class Place:
    """A keeper's place in a generation: which nodes hold its copies, and its place in the tree of reports."""

    peers: tuple[Peer, ...]
    leader: str  # "": it reports to the coordinator
    members: tuple[str, ...]
    num_nodes: int  # itself, its members, theirs and so on


@dataclass(frozen=True)
class SendPlaces:
    number: int  # messages may overtake one another
    places: Mapping[str, Place]


@dataclass(frozen=True)
class Announce:
    """To these nodes, which tell the others: what is committed, and what is on its way to storage."""

    number: int  # messages may overtake one another
    newest: Version
    pinned: Version
    nodes: tuple[str, ...]
    kept: tuple[Version, ...] = ()  # to go back to, where units verify each other


@dataclass(frozen=True)
class RestartKeeper:
    """A node's keeper reports nothing and answers nothing: end it, and have Ray start another one, which finds all that
    it held."""

    node: str


@dataclass(frozen=True)
class SnapshotCommitted:
    """A step is committed in memory; for the figures."""

    version: Version


@dataclass(frozen=True)
class ShowRanks:
    """What each rank spends its time on, the slowest first, and what is suspected; for all that show it."""

    ranks: tuple[Mapping[str, Any], ...]
    suspects: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class ShowSnapshots:
    """What nodes took to make their newest snapshots safe, the slowest first; for all that show it."""

    nodes: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class SaveStacks:
    """What every worker was doing while the group stood still, by node."""

    stalled_s: float
    found: Mapping[str, str]


# storage


@dataclass(frozen=True)
class Write:
    """Have a node write what ranks of `origin` hold of a version: from their snapshots, or from its copies."""

    upload: int
    version: Version
    node: str
    origin: str
    copies: bool
    describe: bool  # the tensors too: one node is enough for that


@dataclass(frozen=True)
class WriteAll:
    """Have these nodes, and those that they speak for, write what each one's own ranks hold: `events.Spoken`."""

    upload: int
    version: Version
    nodes: tuple[str, ...]
    describes: str  # the node that is to describe the tensors, too
    timeout_s: float


@dataclass(frozen=True)
class ReadBack:
    """Have a node read what was written of `origin` in this upload, and compare."""

    upload: int
    node: str
    origin: str


@dataclass(frozen=True)
class ReadBackAll:
    """Have these nodes, and those that they speak for, read what each has written for all, and compare."""

    upload: int
    nodes: tuple[str, ...]
    timeout_s: float


@dataclass(frozen=True)
class PublishIndex:
    """All parts are written: put them together. `nodes`: all origins; `by`: the node whose keeper does it, or empty."""

    upload: int
    version: Version
    nodes: tuple[str, ...]
    by: str = ""


@dataclass(frozen=True)
class PublishCommit:
    """The index is there: make the log's rows durable, then write COMMIT."""

    upload: int
    version: Version


@dataclass(frozen=True)
class CleanUp:
    """This upload was given up, and no COMMIT of it is on its way: delete what was written for it."""

    upload: int
    version: Version


@dataclass(frozen=True)
class Withdraw:
    """COMMIT of this step was written after the run had gone back before it: take it away."""

    step: int


@dataclass(frozen=True)
class NoteDamaged:
    """A group could not read this step's checkpoint, or a rank has computed it wrong: it is not to count any more."""

    step: int
    detail: str
    computed_wrong: bool = False


@dataclass(frozen=True)
class Delete:
    """Delete checkpoints that are more than is kept. Those of these steps neither count nor go."""

    spared: int = NOTHING  # verified; NOTHING: none
    unread: tuple[int, ...] = ()  # not read back, it may be


Command = (
    Reply
    | Form
    | Record
    | BeginRows
    | LogRow
    | GiveUp
    | Kill
    | Connect
    | Probe
    | Hail
    | Ask
    | TellOver
    | SendPlaces
    | Announce
    | RestartKeeper
    | SnapshotCommitted
    | ShowRanks
    | ShowSnapshots
    | SaveStacks
    | Write
    | WriteAll
    | ReadBack
    | ReadBackAll
    | PublishIndex
    | PublishCommit
    | CleanUp
    | Withdraw
    | NoteDamaged
    | Delete
)


class Outbox(list[Command]):
    """Commands, in the order in which they are to be carried out."""

    def record(self, event: str, **fields: Any) -> None:
        self.append(Record(event, fields))

    def take(self) -> list[Command]:
        """All of them; it is empty then."""
        taken = list(self)
        self.clear()
        return taken
