"""What snapshot.every_steps comes to: whether there are snapshots, and at which steps where that is said."""

from regrow.config.schema import SnapshotConfig


def takes_snapshots(snapshot: SnapshotConfig) -> bool:
    """Whether the training state is kept in the nodes' memory at all."""
    return snapshot.every_steps != 0


def fixed_every_steps(snapshot: SnapshotConfig) -> int | None:
    """Steps from one snapshot to the next; None where that is measured."""
    return snapshot.every_steps if isinstance(snapshot.every_steps, int) else None


def most_steps_lost(snapshot: SnapshotConfig) -> int:
    """Steps that a lost node may cost, as far as keepers keep up."""
    fixed = fixed_every_steps(snapshot)
    return snapshot.most_steps_lost if fixed is None else fixed
