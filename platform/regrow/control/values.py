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
    """All snapshots of a version that a node's ranks wrote are checked, and copied to all these peers."""

    node: str
    version: Version
    peers: tuple[str, ...]  # the nodes that hold the copies


@dataclass(frozen=True)
class Peer:
    """A node, in another failure domain where there is one, that holds copies of another one's snapshots."""

    node: str
    address: Address  # of its keeper


class Replica(Protocol):
    """A snapshot file that a keeper holds; `state.memory.held.Held` says what of the state is in it."""

    @property
    def moment(self) -> Version: ...

    @property
    def copy_of(self) -> str:
        """The node whose ranks wrote it, or the beginning of its id; empty: the keeper's own."""
