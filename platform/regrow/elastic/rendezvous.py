"""Joining a generation: offer oneself to the coordinator, learn who else is in it, form the process group.

Every process that joins brings a store of its own; rank 0's is the one that is used, and it ends with it.
"""

import contextlib
import datetime
import os
import time
from dataclasses import dataclass
from typing import Any

import ray
import ray.util
import torch.distributed as dist

from regrow.elastic.job import CALL_TIMEOUT_S
from regrow.errors import RegrowError
from regrow.parallel.break_off import Address, listening
from regrow.parallel.fsdp import BACKENDS, let_go_of_meshes
from regrow.plan.membership import Formation, Member

STORE_S = 10.0  # for the others to come to the store, once the generation is known


@dataclass(frozen=True)
class Joined:
    """This process' place in a generation."""

    formation: Formation
    rank: int
    listened: frozenset[Address]  # where this process did before it joined

    @property
    def generation(self) -> int:
        return self.formation.generation

    @property
    def world_size(self) -> int:
        return len(self.formation.members)

    @property
    def on_my_host(self) -> int:
        """Ranks that share this one's machine."""
        return sum(member.host == self.formation.members[self.rank].host for member in self.formation.members)


def join_generation(
    coordinator: Any,
    *,
    member_id: str,
    lifeline: int,
    after: int,
    expected: int,
    device_type: str,
    timeout_s: float,
) -> Joined | None:
    """Form the default process group of the next generation after `after`; None where the run is over.

    Collective. `lifeline` is the port of this process' (`observe.roll_call`); `expected` are the processes that started
    together. Every later collective fails after `timeout_s`.
    Raises RegrowError if the run was given up, and what forming a group raises where a member dies meanwhile.
    """
    host = ray.util.get_node_ip_address()
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=datetime.timedelta(seconds=STORE_S))
    member = Member(member_id, ray.get_runtime_context().get_node_id(), host, store.port, os.getpid(), lifeline)
    ray.get(coordinator.join.remote(member, expected), timeout=CALL_TIMEOUT_S)
    while True:
        answer = ray.get(coordinator.formation.remote(member_id, after), timeout=CALL_TIMEOUT_S)
        if answer.given_up:
            raise RegrowError(answer.given_up)
        if answer.over:
            return None
        if answer.formation is not None:
            break
        if answer.join_again:
            ray.get(coordinator.join.remote(member, expected), timeout=CALL_TIMEOUT_S)
        time.sleep(answer.wait_s)
    formation: Formation = answer.formation
    rank = formation.rank_of(member_id)
    assert rank is not None
    joined, leader = Joined(formation, rank, frozenset(listening())), formation.members[0]
    if rank:
        store = dist.TCPStore(
            leader.host, leader.port, wait_for_workers=False, timeout=datetime.timedelta(seconds=STORE_S)
        )
    if device_type == "cuda":
        # a collective that fails must fail the process: nothing on the device could be trusted
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    dist.init_process_group(
        BACKENDS[device_type],
        store=dist.PrefixStore(f"generation-{joined.generation}", store),
        rank=rank,
        world_size=joined.world_size,
        timeout=datetime.timedelta(seconds=timeout_s),
    )
    return joined


def leave_generation() -> None:
    """Give up the process groups: peers that wait for this rank see its connections close."""
    with contextlib.suppress(Exception):  # they may be broken already
        if dist.is_initialized():
            dist.destroy_process_group()
    let_go_of_meshes()
