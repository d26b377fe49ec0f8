"""What control, the nodes' memory and Ray's actors speak of: versions of the training state, and where they are."""

from dataclasses import dataclass
from typing import Protocol

NOTHING = -1  # no generation, no step

Address = tuple[str, int]  # host, port


@dataclass(frozen=True, order=True)
class Version:
    """The training state of one step, as one generation computed it."""

    generation: int = NOTHING
    step: int = NOTHING


NEVER = Version()


@dataclass(frozen=True)
class SnapshotAck:
    """All snapshots of a version that a node's ranks wrote are checked, and copied if there is a peer to copy to."""

    node: str
    version: Version
    peer: str  # the node that holds the copies; empty: no other node


@dataclass(frozen=True)
class Peer:
    """The node, in another failure domain where there is one, that holds copies of another one's snapshots."""

    node: str
    address: Address  # of its keeper


class Replica(Protocol):
    """A snapshot file that a keeper holds; `state.memory.held.Held` says what of the state is in it."""

    @property
    def moment(self) -> Version: ...
