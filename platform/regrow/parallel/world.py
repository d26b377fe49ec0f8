"""The default group of a generation without a communicator over all of its ranks.

Torch wants a default group: it knows which ranks there are, and every other group is made from it. This one is no
more than that. What is large goes along one axis of the mesh, whose group meets at its own first rank's store; what is
small over a tree (`tree`). So what a rank connects to, and waits for, grows with the axes' sizes and not with their
product, and the groups are connected side by side.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from regrow.parallel.tree import Tree

NAME = "members"  # as a backend of torch's

_ProcessGroup: Any = dist.ProcessGroup  # its declared methods are overloaded


class Members(_ProcessGroup):
    """All ranks of a generation. It has no collectives."""

    group_name = ""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.tree: Tree | None = None
        self.backend = ""  # of groups along axes
        self.store_at: Callable[[int], dist.Store] | None = None  # a connection to the store of a rank
        self.keeps: object = None
        self.made: Counter[str] = Counter()  # groups by name

    def getBackendName(self) -> str:
        return NAME

    def _set_group_name(self, name: str) -> None:
        self.group_name = name

    def abort(self) -> None:
        self.close()

    def shutdown(self) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the others."""
        if self.tree is not None:
            self.tree.close()
        self.store_at = self.keeps = None


def _create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Members:
    return Members(rank, size)


dist.Backend.register_backend(NAME, _create, devices=["cpu", "cuda"])


def init_members(
    *, rank: int, size: int, tree: Tree, backend: str, store_at: Callable[[int], dist.Store], keeps: object = None
) -> None:
    """Make the default group. Local: `tree` is connected. Groups along axes are of `backend`, and `store_at` connects
    to a rank's store, anew each time; what it `keeps` lives as long: this rank's own."""
    # torch numbers groups, and members meet under that number: one that failed to form a group has used one up
    distributed_c10d._world.group_count = 0
    dist.init_process_group(NAME, store=dist.HashStore(), rank=rank, world_size=size)
    made = members()
    assert made is not None
    made.tree, made.backend, made.store_at, made.keeps = tree, backend, store_at, keeps


def members() -> Members | None:
    """The default group, where it is one of these."""
    world = dist.group.WORLD if dist.is_initialized() else None
    return world if isinstance(world, Members) else None


def new_groups(ranks_of: Mapping[str, Sequence[int]], timeout: timedelta) -> dict[str, dist.ProcessGroup]:
    """This rank's groups by name, each of these ranks in this order, connected side by side. Collective over each.

    A group's first rank has the store by which its ranks find each other. Raises what torch does where one does not
    come within `timeout`.
    """
    with ThreadPoolExecutor(max(1, len(ranks_of))) as threads:
        made = {name: threads.submit(_new_group, name, ranks, timeout) for name, ranks in ranks_of.items()}
    return {name: each.result() for name, each in made.items()}


def new_group(name: str, ranks: Sequence[int], timeout: timedelta | None = None) -> dist.ProcessGroup:
    """One more group of this rank, by whatever default group there is. Collective over its ranks alone."""
    if members() is None:
        made: Any = dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=True)
        return made
    return _new_group(name, ranks, timeout or distributed_c10d.default_pg_timeout)


def _new_group(name: str, ranks: Sequence[int], timeout: timedelta) -> dist.ProcessGroup:
    world, ranks = members(), list(ranks)
    assert world is not None
    assert world.store_at is not None, "the generation is over"
    name = f"{name}:{ranks[0]}"
    world.made[name] += 1  # the same on all its ranks: a generation may build its model twice
    numbered: Any = f"{name}:{world.made[name]}"
    store = world.store_at(ranks[0])  # of its own: where one group waits at it, another could not say what is awaited
    # `dist.new_group` has no other store than the default group's, at which all ranks of all groups would meet
    made, _ = distributed_c10d._new_process_group_helper(
        len(ranks),
        ranks.index(world.rank()),
        ranks,
        distributed_c10d.Backend(world.backend),
        store,
        numbered,
        timeout=timeout,
        group_desc=name,
    )
    distributed_c10d._world.pg_group_ranks[made] = {each: number for number, each in enumerate(ranks)}
    return made


@contextlib.contextmanager
def meeting_at(rank: int) -> Iterator[None]:
    """Have groups that torch makes by itself meet at a rank's store, which all of their ranks name."""
    world = members()
    if world is None:
        yield
        return
    assert world.store_at is not None, "the generation is over"
    before = distributed_c10d._world.pg_map[world]
    distributed_c10d._world.pg_map[world] = distributed_c10d.Backend(world.backend), world.store_at(rank)
    try:
        yield
    finally:
        distributed_c10d._world.pg_map[world] = before


def connect_side_by_side(groups: Sequence[dist.ProcessGroup], device: torch.device) -> None:
    """Have the communicators of groups made, each by a thread of its own, for backends that put that off. Collective
    over each; waits."""

    def connect(group: dist.ProcessGroup) -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # of this thread
        group._get_backend(device).eager_connect_single_device(device)

    with ThreadPoolExecutor(max(1, len(groups))) as threads:
        for made in [threads.submit(connect, group) for group in groups]:
            made.result()
