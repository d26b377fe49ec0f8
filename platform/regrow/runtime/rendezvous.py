"""Joining a generation: ask the coordinator for it, learn its members, connect to the few that are next to it.

Every process that joins brings a store of its own, at which the groups meet whose first rank it comes to be, and a
port at which those below it in the tree of small values come. Both end with the generation.
"""

import contextlib
import datetime
import json
import math
import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NoReturn, cast

import ray
import ray.util
import torch.distributed as dist

from regrow.control.membership import NODE_NAME, Formation, Member, Seat
from regrow.control.phases import form_s
from regrow.control.states import Answer
from regrow.parallel.fsdp import let_go_of_meshes
from regrow.parallel.tree import Tree
from regrow.parallel.world import init_members
from regrow.parallel.world import members as members_of_world
from regrow.plan.tree import FAN_OUT
from regrow.process_log import say
from regrow.runtime.abort import Address, Breaker, listening
from regrow.runtime.calls import CoordinatorClient
from regrow.runtime.liveness.pulse import started_at
from regrow.state.collective import gather

STORE_S = 30.0  # for a connection to a store, which waits for no rank: less than a process has to leave a generation
KEEPER_S = 2.0  # for this node's keeper to say what it knows
KEEPER_POLL_S, SOON_S, PARKED_POLL_S = 0.02, 10.0, 0.1  # between questions to it; after a while, fewer
ALONE_S, ALONE_MOST_S = 10.0, 300.0  # without a keeper that was late, until it is asked again; twice as long each time

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
    def speaks(self) -> bool:
        """Whether this is the first rank of its node."""
        members = self.formation.members
        return not any(member.node == members[self.rank].node for member in members[: self.rank])

    @property
    def beside_first(self) -> bool:
        """Whether this rank is on the first one's node, or is that one."""
        return self.formation.members[self.rank].node == self.formation.members[0].node

    @property
    def on_my_host(self) -> int:
        """Ranks that share this one's machine."""
        return sum(member.host == self.formation.members[self.rank].host for member in self.formation.members)


@dataclass(frozen=True)
class Doors:
    """Where a process can be met by the others of its next generation."""

    host: str  # by which the others know it; both listen at all of the host's addresses, as torch's store does
    store: dist.TCPStore
    listener: socket.socket

    @staticmethod
    def at(host: str) -> "Doors":
        store = dist.TCPStore(
            host, 0, is_master=True, wait_for_workers=False, timeout=datetime.timedelta(seconds=STORE_S)
        )
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return Doors(host, store, socket.create_server(("", 0), family=family, backlog=FAN_OUT))

    @property
    def control(self) -> Address:
        return self.host, self.listener.getsockname()[1]

    def of(self, member: Member) -> Member:
        """As a member that can be met."""
        return replace(member, port=self.store.port, control=self.control[1])


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
    keeper: Any = None,
) -> Joined | None:
    """Form the default process group of the next generation after `after`; None where the run is over.

    Collective. `expected` are the processes that started together. Every later collective fails after `timeout_s`.
    `waiting` and what is raised: as for `form_group`. A process that the others do without ends here. `keeper`, this
    node's, speaks with the coordinator for its workers: thousands of these would keep that busy for seconds.
    """
    doors = Doors.at(me.host)
    member = doors.of(me)
    answer = _answered(coordinator, keeper, member, expected, after)
    if answer.unfit:
        expelled()
    if answer.seat is None:
        return None
    listened = frozenset(listening())
    formation = form_group(answer.seat, doors, backend=backend, timeout_s=timeout_s, breaker=breaker, waiting=waiting)
    return Joined(formation, answer.seat.rank, listened)


def _answered(coordinator: CoordinatorClient, keeper: Any, member: Member, expected: int, after: int) -> Answer:
    """The coordinator's answer, once there is one: by way of the keeper, or its own while that does not answer."""
    alone_s, has_joined = ALONE_S, False
    while True:
        if keeper is not None and (answer := _asked_of_keeper(keeper, member, expected, after)) is not None:
            return answer
        if not has_joined:  # more joins would be newcomers, and put off a larger group
            coordinator.join(member, expected)
            has_joined = True
        until = time.monotonic() + alone_s if keeper is not None else math.inf
        if (answer := _asked(coordinator, member, expected, after, until)) is not None:
            return answer
        alone_s = min(2 * alone_s, ALONE_MOST_S)


def _asked(coordinator: CoordinatorClient, member: Member, expected: int, after: int, until: float) -> Answer | None:
    """The coordinator's answer to a process that has joined; None where there is none yet at `until` (monotonic)."""
    while True:
        answer = coordinator.formation(member.id, after)
        if answer.over or answer.given_up or answer.unfit or answer.seat is not None:
            return answer
        if answer.join_again:
            coordinator.join(member, expected)
        if time.monotonic() >= until:
            return None
        time.sleep(answer.wait_s)


def _asked_of_keeper(keeper: Any, member: Member, expected: int, after: int) -> Answer | None:
    """The coordinator's answer by way of this node's keeper; None where that does not answer."""
    begun = time.monotonic()
    try:
        while (answer := ray.get(keeper.seat.remote(member, expected, after), timeout=KEEPER_S)) is None:
            waited_s = time.monotonic() - begun
            time.sleep(KEEPER_POLL_S if waited_s < SOON_S else PARKED_POLL_S)
    except ray.exceptions.RayError:
        return None
    return cast(Answer, answer)


def await_verdict(coordinator: CoordinatorClient, *, generation: int, me: Member, expected: int, message: str) -> None:
    """Tell of an error that this process would meet again; returns where it is the run's, or that is over.

    Where it is this process' own it ends here, and the others go on.
    """
    is_told = False
    while True:
        with contextlib.suppress(ray.exceptions.GetTimeoutError):  # one that was started anew may wait for storage
            if not is_told:
                coordinator.trouble(generation, me, expected, message)
            is_told = True
            answer = coordinator.formation(me.id, generation)
            if answer.over or answer.given_up:
                return
            if answer.unfit:
                expelled()
            is_told = not answer.join_again
            time.sleep(answer.wait_s)


def expelled() -> NoReturn:
    """The others go on without this process: Ray Train starts another one, elsewhere if that happens again."""
    say("regrow: the run goes on without this process, which ends", sys.stderr)
    os._exit(1)


def form_group(
    seat: Seat, doors: Doors, *, backend: str, timeout_s: float, breaker: Breaker, waiting: Waiting
) -> Formation:
    """Form the default process group of a generation, whose groups along axes are of `backend`. Collective.

    `doors` are this process' own. Raises what torch raises where a member does not come: after a while, or once
    `breaker`, which `waiting` may hand to another thread, breaks it off.
    """
    rank, size, deadline_s = seat.rank, seat.size, form_s(seat.size, timeout_s)
    tree = Tree(doors.listener, rank=rank, size=size, secret=seat.secret, timeout_s=deadline_s)
    breaker.watch({doors.control, *([seat.parent] if seat.parent else [])})
    waiting(seat.generation, breaker)
    try:
        tree.connect(seat.parent, is_over=lambda: breaker.begun)
        told = json.dumps([vars(member) for member in seat.members]).encode()
        members = tuple(Member(**each) for each in json.loads(tree.broadcast(told)))
    except BaseException:
        tree.close()
        raise

    def store_at(number: int) -> dist.Store:
        address = members[number].host, members[number].port
        breaker.watch({address})
        store = dist.TCPStore(*address, wait_for_workers=False, timeout=datetime.timedelta(seconds=STORE_S))
        store.set_timeout(datetime.timedelta(seconds=deadline_s))  # ids of communicators come by it, from a late rank
        return dist.PrefixStore(f"generation-{seat.generation}", store)

    init_members(rank=rank, size=size, tree=tree, backend=backend, store_at=store_at, keeps=doors.store)
    gather(rank)  # all are there
    tree.timeout_s = timeout_s
    return Formation(seat.generation, members)


def leave_generation() -> bool:
    """Give up the process groups: peers that wait for this rank see its connections close.

    Whether torch has let go of them; where one group's shutdown raises it keeps all, and none can be joined again.
    """
    with contextlib.suppress(Exception):  # they may be broken already
        if (world := members_of_world()) is not None:
            world.close()
    with contextlib.suppress(Exception):
        if dist.is_initialized():
            dist.destroy_process_group()
    let_go_of_meshes()
    return not dist.is_initialized()
