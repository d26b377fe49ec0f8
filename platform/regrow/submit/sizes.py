"""How many pods a run needs and how large they are. Pure."""

from dataclasses import dataclass
from math import ceil

from regrow.config.schema import PretrainConfig, SubmitConfig
from regrow.config.topology import topologies
from regrow.forecast.memory import plan_snapshot_memory
from regrow.model.size import state_bytes
from regrow.plan.topology import least_shards

GIB = 2**30
HEADERS = 1.02  # of snapshots, over their tensors: headers, checksums, pages
COMMUNICATION_GB = 8.0  # that NCCL and gloo take of /dev/shm
PROCESSES_GB = 8.0  # of the raylet, the agents and the keeper
START_S = 90.0  # for new workers to be placed, to import and to join


@dataclass(frozen=True)
class Sizes:
    """Worker pods: how many, and what each has."""

    least_nodes: int
    most_nodes: int
    workers: int  # ranks on a node
    gpus: int
    cpus: int
    snapshot_bytes: int  # the most that snapshots take of a node's memory
    shm_gib: int
    memory_gib: int  # with /dev/shm


def sizes(config: PretrainConfig, submit: SubmitConfig) -> Sizes:
    """Pods for `cluster.min_workers` to `cluster.max_workers` ranks and the spare ones."""
    cluster = config.cluster
    most = cluster.max_workers + cluster.spare_workers
    workers = min(submit.workers_per_node, most)
    least_nodes, most_nodes = ceil(cluster.min_workers / workers), ceil(most / workers)
    snapshots = snapshot_bytes(config, workers_per_node=workers, copies=min(config.snapshot.copies, most_nodes - 1))
    shm = snapshots * HEADERS + (submit.object_store_gb + COMMUNICATION_GB) * 1e9
    shm_gib = ceil((submit.shm_gb * 1e9 if submit.shm_gb is not None else shm) / GIB)
    return Sizes(
        least_nodes=least_nodes,
        most_nodes=most_nodes,
        workers=workers,
        gpus=workers * cluster.gpus_per_worker,
        cpus=ceil(submit.cpus_per_node or workers * cluster.cpus_per_worker * 1.25 + 1),
        snapshot_bytes=snapshots,
        shm_gib=shm_gib,
        memory_gib=shm_gib + ceil((workers * submit.memory_gb_per_worker + PROCESSES_GB) * 1e9 / GIB),
    )


def snapshot_bytes(config: PretrainConfig, *, workers_per_node: int, copies: int) -> int:
    """The most that a worker asks of its node's memory before it takes snapshots, over all feasible world sizes."""
    if config.snapshot.every_steps == 0:
        return 0
    table, most = topologies(config), 0
    for world_size, topology in table.items():
        mesh = topology.mesh
        on_node = min(workers_per_node, world_size)  # copies are on spare nodes, too
        plan = plan_snapshot_memory(
            state_bytes=state_bytes(config.model, config.optim.moments, mesh.tp),
            slots=config.snapshot.slots,
            ranks_on_node=on_node,
            ranks_copied=on_node * copies,
            num_shards=mesh.dp_shard,
            least_shards=least_shards(table),
        )
        most = max(most, plan.total)
    return most


def longest_restart_s(config: PretrainConfig) -> float:
    """For which a node may have nothing to do although the run will need it: a hang found late, then a new start."""
    return config.train.collective_timeout_s + config.cluster.silence_s + START_S
