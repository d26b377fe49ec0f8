"""What control, the nodes' memory and Ray's actors speak of: versions of the training state, and where they are."""

from dataclasses import asdict, dataclass, field
from typing import Protocol

NOTHING = -1  # no generation, no step
COMPUTED_WRONG = "a rank computed wrong; step {step} is the newest whose state is known to be right"

Scalar = int | float | str  # of what is kept with a state, beside its tensors

Address = tuple[str, int]  # host, port


def short_id(node: str) -> str:
    """As names of files have it."""
    return node[:12]


@dataclass(frozen=True, order=True)
class Version:
    """The training state of one step, as one generation computed it."""

    generation: int = NOTHING
    step: int = NOTHING


NEVER = Version()


@dataclass(frozen=True)
class Digest:
    """What a rank's snapshot adds up to, where other ranks hold the same shard."""

    rank: int
    shard: str
    replicas: int  # ranks that hold it
    value: int


@dataclass(frozen=True)
class CopyTimes:
    """How long a node took to make a version safe."""

    seconds: float  # from when the first of its ranks had sealed its part
    check_s: float  # of checksums, of all ranks' parts
    send_s: float  # the longest, to all peers
    bytes: int  # of one copy

    def to_plain(self) -> dict[str, float]:
        return asdict(self)


@dataclass(frozen=True)
class PartTimes:
    """How long a node took to write a part of a checkpoint."""

    check_s: float = 0.0  # in which checksums were compared, beside the writing
    write_s: float = 0.0  # of all of it
    bytes: int = 0

    def to_plain(self) -> dict[str, float]:
        return asdict(self)


@dataclass(frozen=True)
class SnapshotAck:
    """All snapshots of a version that a node's ranks wrote are checked, and copied to all these peers."""

    node: str
    version: Version
    peers: tuple[str, ...]  # the nodes that hold the copies
    by_way: bool = False  # these said so, for the node is not heard
    digests: tuple[Digest, ...] = ()  # of its ranks, where there are replicas
    times: CopyTimes | None = field(default=None, compare=False)  # None: those of another report


@dataclass(frozen=True)
class Peer:
    """A node, in another failure domain where there is one, that holds copies of another one's snapshots."""

    node: str
    address: Address  # of its keeper


@dataclass(frozen=True)
class GpuReading:
    """What a GPU tells of itself; None: it does not."""

    text: str
    temperature_c: int | None = None
    power_w: float | None = None

    def __str__(self) -> str:
        return self.text


class Replica(Protocol):
    """A snapshot file that a keeper holds; `state.memory.held.Held` says what of the state is in it."""

    @property
    def moment(self) -> Version: ...

    @property
    def writers(self) -> int:
        """Ranks that wrote such a file of this moment on the same node."""

    @property
    def copy_of(self) -> str:
        """The short id of the node whose ranks wrote it; empty: the keeper's own."""
