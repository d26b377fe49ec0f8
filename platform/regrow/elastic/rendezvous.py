"""Joining a generation: one number for the group, one store on rank 0's node, one process group."""

import datetime
import os
from typing import Any

import ray
import ray.train
import ray.util
import torch.distributed as dist
from ray.train.collective import broadcast_from_rank_zero

from regrow.elastic.job import CALL_TIMEOUT_S
from regrow.errors import RegrowError
from regrow.parallel.fsdp import BACKENDS


def join_generation(coordinator: Any, *, device_type: str, timeout_s: float) -> int:
    """Form the default process group with the other workers of this Ray Train group; returns its generation.

    Collective. Every later collective fails after `timeout_s`. Raises RegrowError, on every rank, if the coordinator
    has given the run up.
    """
    context, timeout = ray.train.get_context(), datetime.timedelta(seconds=timeout_s)
    rank, world_size = context.get_world_rank(), context.get_world_size()
    store, plan = None, None
    if rank == 0:
        host = ray.util.get_node_ip_address()
        generation, given_up = ray.get(coordinator.begin_generation.remote(), timeout=CALL_TIMEOUT_S)
        store = dist.TCPStore(host, 0, world_size, is_master=True, timeout=timeout, wait_for_workers=False)
        plan = (generation, given_up, host, store.port)
    generation, given_up, host, port = broadcast_from_rank_zero(plan)
    if given_up:
        raise RegrowError(given_up)
    if store is None:
        store = dist.TCPStore(host, port, world_size, is_master=False, timeout=timeout, wait_for_workers=False)
    if device_type == "cuda":
        # a collective that fails must fail the process: the group is restarted as a whole
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    dist.init_process_group(
        BACKENDS[device_type],
        store=dist.PrefixStore(f"generation-{generation}", store),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )
    return int(generation)
