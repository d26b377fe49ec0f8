"""What `plan.topology` needs to know of a configuration."""

from typing import TypedDict

from regrow.config.schema import PretrainConfig
from regrow.plan.topology import Topology, plan_topology, topology_table


def topologies(config: PretrainConfig) -> dict[int, Topology]:
    """By world size, of every feasible one."""
    cluster = config.cluster
    return topology_table(min_workers=cluster.min_workers, max_workers=cluster.max_workers, **_rule(config))


def topology_of(config: PretrainConfig, world_size: int) -> Topology:
    """Of one world size, where there is no need for the table."""
    return plan_topology(world_size, **_rule(config))


class _Rule(TypedDict):
    num_slices: int
    dp_replicate: int
    tp: int
    slices_per_pass: int


def _rule(config: PretrainConfig) -> _Rule:
    return {
        "num_slices": config.optim.num_slices,
        "dp_replicate": config.parallel.dp_replicate,
        "tp": config.parallel.tp,
        "slices_per_pass": config.parallel.slices_per_pass,
    }
