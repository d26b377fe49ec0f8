"""Joining a generation: ask the coordinator for it, learn its members, form the process group.

Every process that joins brings a store of its own; rank 0's is the one that is used, and it ends with it.
"""

import contextlib
import datetime
import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NoReturn

import ray
import ray.util
import torch.distributed as dist
from torch.distributed import distributed_c10d

from regrow.control.membership import NODE_NAME, Formation, Member
from regrow.parallel.fsdp import ASYNCHRONOUS, BACKENDS, let_go_of_meshes, set_timeout
from regrow.runtime.abort import Address, Breaker, listening
from regrow.runtime.calls import CoordinatorClient
from regrow.runtime.liveness.pulse import started_at
from regrow.state.collective import HOST_GROUP, gather

STORE_S = 10.0  # for the leader's store to be there, once the generation is known
FORM_S, FORM_S_PER_RANK = 60.0, 0.05  # for all to come to it, and to each other

Waiting = Callable[[int, Breaker], None]  # this process is about to wait for the others of a generation


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


def machine_name() -> str:
    """Of the host, which outlives Ray's nodes and Kubernetes' pods on it."""
    return os.environ.get(NODE_NAME) or socket.gethostname()


def this_process(member_id: str, *, lifeline: int) -> Member:
    """As a member that has no store yet. `lifeline` is its port (`runtime.liveness.probe`)."""
    return Member(
        member_id,
        ray.get_runtime_context().get_node_id(),
        ray.util.get_node_ip_address(),
        port=0,
        pid=os.getpid(),
        lifeline=lifeline,
        machine=machine_name(),
        started=started_at(os.getpid()),
    )


def join_generation(
    coordinator: CoordinatorClient,
    *,
    me: Member,
    after: int,
    expected: int,
    backend: str,
    timeout_s: float,
    breaker: Breaker,
    waiting: Waiting,
) -> Joined | None:
    """Form the default process group of the next generation after `after`; None where the run is over.

    Collective. `expected` are the processes that started together. Every later collective fails after `timeout_s`.
    `waiting` and what is raised: as for `form_group`. A process that the others do without ends here.
    """
    store = dist.TCPStore(
        me.host, 0, is_master=True, wait_for_workers=False, timeout=datetime.timedelta(seconds=STORE_S)
    )
    member = replace(me, port=store.port)
    coordinator.join(member, expected)
    while True:
        answer = coordinator.formation(me.id, after)
        if answer.over or answer.given_up:
            return None
        if answer.unfit:
            expelled()
        if answer.formation is not None:
            break
        if answer.join_again:
            coordinator.join(member, expected)
        time.sleep(answer.wait_s)
    formation: Formation = answer.formation
    rank = formation.rank_of(me.id)
    assert rank is not None
    joined = Joined(formation, rank, frozenset(listening()))
    form_group(joined, store, backend=backend, timeout_s=timeout_s, breaker=breaker, waiting=waiting)
    return joined


def await_verdict(coordinator: CoordinatorClient, *, generation: int, me: Member, expected: int, message: str) -> None:
    """Tell of an error that this process would meet again; returns where it is the run's, or that is over.

    Where it is this process' own it ends here, and the others go on.
    """
    coordinator.trouble(generation, me, expected, message)
    while True:
        answer = coordinator.formation(me.id, generation)
        if answer.over or answer.given_up:
            return
        if answer.unfit:
            expelled()
        if answer.join_again:
            coordinator.trouble(generation, me, expected, message)
        time.sleep(answer.wait_s)


def expelled() -> NoReturn:
    """The others go on without this process: Ray Train starts another one, elsewhere if that happens again."""
    print("regrow: the run goes on without this process, which ends", file=sys.stderr, flush=True)
    os._exit(1)


def form_group(
    joined: Joined, store: dist.TCPStore, *, backend: str, timeout_s: float, breaker: Breaker, waiting: Waiting
) -> None:
    """Form the default process group of this generation. Collective. `store` is this process' own.

    Raises what torch raises where a member does not come: after a while, or once `breaker`, which `waiting` may
    hand to another thread, breaks it off.
    """
    leader, world_size = joined.formation.members[0], joined.world_size
    breaker.watch({(leader.host, leader.port)})
    waiting(joined.generation, breaker)
    if joined.rank:
        store = dist.TCPStore(
            leader.host, leader.port, wait_for_workers=False, timeout=datetime.timedelta(seconds=STORE_S)
        )
    deadline_s = form_s(world_size, timeout_s)
    store.set_timeout(datetime.timedelta(seconds=deadline_s))  # ids of communicators come by it, and a rank may be late
    # torch numbers groups, and members meet under that number: one that failed to form a group has used one up
    distributed_c10d._world.group_count = 0
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(f"generation-{joined.generation}", store),
        rank=joined.rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=deadline_s),
    )
    if backend == ASYNCHRONOUS:
        dist.new_group(backend=BACKENDS["cpu"], group_desc=HOST_GROUP)
    gather(joined.rank)  # within this deadline: gloo may connect as it is used (`hardware.settings`)
    set_timeout(timeout_s)


def form_s(world_size: int, timeout_s: float) -> float:
    """How long so many ranks may take to form a group whose collectives may take `timeout_s`."""
    return min(timeout_s, FORM_S + FORM_S_PER_RANK * world_size)


def leave_generation() -> None:
    """Give up the process groups: peers that wait for this rank see its connections close."""
    with contextlib.suppress(Exception):  # they may be broken already
        if dist.is_initialized():
            dist.destroy_process_group()
    let_go_of_meshes()
