"""What cluster.spare_workers comes to: how many workers there are at the most, and whether a group leaves some out."""

from regrow.config.schema import ClusterConfig

AUTO = "auto"


def parks(cluster: ClusterConfig) -> bool:
    """Whether a group takes the fewest ranks whose step takes as long, and the others of max_workers are its spares.

    `auto` says so, and null where workers have GPUs. A group that restarts as a whole takes all.
    """
    wanted = cluster.gpus_per_worker > 0 if cluster.spare_workers is None else cluster.spare_workers == AUTO
    return wanted and cluster.in_place


def num_beyond(cluster: ClusterConfig) -> int:
    """Workers beyond max_workers, which wait as spares."""
    return cluster.spare_workers if isinstance(cluster.spare_workers, int) else 0


def most_workers(cluster: ClusterConfig) -> int:
    """The most workers that there are at once, spares among them."""
    return cluster.max_workers + num_beyond(cluster)
