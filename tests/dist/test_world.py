"""A generation has no communicator over all ranks: small values go over a tree, large ones along the axes."""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.managers import BaseManager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from regrow.accept.tiny import tiny_model
from regrow.config.schema import ClusterConfig, ObserveConfig, OptimConfig, ParallelConfig, PretrainConfig
from regrow.control.membership import Member
from regrow.parallel.fsdp import axis_groups, build_mesh
from regrow.parallel.tree import HELLO, Tree
from regrow.plan.mesh import MeshShape, plan_mesh
from regrow.plan.tree import FAN_OUT, children_of, parent_of
from regrow.runtime.abort import Breaker
from regrow.runtime.actor import Coordinator
from regrow.runtime.rendezvous import join_generation, leave_generation
from regrow.state.collective import gather
from support.counting_connections import count_in_a_generation
from support.gloo import run_ranks
from support.training import Training, build, micro_batches
from support.world import TIMEOUT_S, form

SECRET = b"s" * 32


# ---- the tree


@contextlib.contextmanager
def trees(size: int) -> Iterator[list[Tree]]:
    """Of as many ranks, in this process, connected."""
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(size)]
    made = [Tree(each, rank=rank, size=size, secret=SECRET, timeout_s=20.0) for rank, each in enumerate(listeners)]
    try:
        for rank in range(1, size):
            made[rank].call(made[parent_of(rank)].address)
        for each in made:
            each.take()
        yield made
    finally:
        for each in made:
            each.close()


def on_all(made: list[Tree], call: Callable[[Tree], object]) -> list[object]:
    """What it returns or raises, of each."""
    found: list[object] = [None] * len(made)

    def run(number: int) -> None:
        try:
            found[number] = call(made[number])
        except Exception as error:
            found[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(made))]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return found


@pytest.mark.parametrize("size", [1, 2, 5, 23])
def test_values_of_all_ranks_come_to_all_in_their_order_whatever_their_lengths(size: int) -> None:
    values = [bytes([rank]) * (rank % 7 * 1000) for rank in range(size)]
    with trees(size) as made:
        for _ in range(2):
            assert on_all(made, lambda each: each.gather(values[each.rank])) == [values] * size
            assert on_all(made, lambda each: each.broadcast(b"" if each.rank else b"x")) == [b"x"] * size


def test_a_rank_has_a_few_connections_however_many_there_are() -> None:
    with trees(300) as made:
        assert max(len(each.connections) for each in made) == FAN_OUT + 1
        assert sum(len(each.connections) for each in made) == 2 * 299
    rank, depth = 2**17 - 1, 0
    while rank:
        assert rank in children_of(parent_of(rank), 2**17)
        rank, depth = parent_of(rank), depth + 1
    assert depth == 9


def test_all_hear_of_a_rank_that_is_gone_as_each_that_hears_leaves() -> None:
    def gather_or_leave(each: Tree) -> float:
        begun = time.monotonic()
        with pytest.raises(dist.DistNetworkError, match="waited for rank"):
            each.gather(b"")
        each.close()
        return time.monotonic() - begun

    with trees(23) as made:
        made[5].close()
        waited_s = on_all([each for each in made if each.rank != 5], gather_or_leave)
    assert all(isinstance(each, float) and each < made[0].timeout_s / 2 for each in waited_s), waited_s


def test_strangers_at_a_rank_s_door_are_not_taken_for_members_nor_waited_for() -> None:
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    root, member, other = (
        Tree(listener, rank=int(number > 0), size=2, secret=secret, timeout_s=20.0)
        for number, (listener, secret) in enumerate(zip(listeners, (SECRET, SECRET, b"x" * 32), strict=True))
    )
    address = root.address
    with contextlib.closing(root), contextlib.closing(member), contextlib.closing(other):
        with socket.create_connection(address):  # says nothing
            other.call(address)
            member.call(address)
            root.take()
        assert on_all([root, member], lambda each: each.gather(bytes([each.rank]))) == [[b"\0", b"\1"]] * 2


def test_a_member_that_stands_still_between_connecting_and_its_hello_is_waited_for() -> None:
    """As on a host with more processes than cores: it never connects again, and was dropped for the generation."""
    listener, secret = socket.create_server(("127.0.0.1", 0)), SECRET
    root = Tree(listener, rank=0, size=2, secret=secret, timeout_s=20.0)
    looks = 0

    def is_over() -> bool:
        nonlocal looks
        looks += 1
        if looks == 4:  # some looks after it was taken
            member.sendall(HELLO.pack(secret, 1))
        return False

    with contextlib.closing(root), socket.create_connection(root.address) as member:
        root.take(is_over)
        assert looks >= 4


def test_a_generation_that_is_over_waits_for_none_to_come() -> None:
    over = threading.Event()
    with contextlib.closing(
        Tree(socket.create_server(("127.0.0.1", 0)), rank=0, size=2, secret=SECRET, timeout_s=60.0)
    ) as root:
        threading.Timer(0.3, over.set).start()
        with pytest.raises(dist.DistNetworkError, match=r"over before ranks \[1\] had come"):
            root.connect(None, is_over=over.is_set)


# ---- groups along axes


def test_ranks_of_eight_connect_along_their_axes_and_not_to_all() -> None:
    shape = MeshShape(dp_replicate=2, dp_shard=2, tp=2, pp=1)
    found = run_ranks(count_in_a_generation, 8, "gloo", shape)
    assert [sizes for sizes, _ in found] == [[2, 2, 2]] * 8
    along_axes = sum(size - 1 for size in (2, 2, 2))
    for rank, (_, connections) in enumerate(found):
        below = len(children_of(rank, 8)) + (rank > 0)
        # stores: its own has the others of the axes that it is first of, and it is connected to those of the rest
        assert connections <= along_axes + below + along_axes, f"rank {rank}"


# ---- training


def losses(backend: str | None, parallel: ParallelConfig) -> list[list[float]]:
    """Of two generations of a few steps each, on a default group as torch makes it where `backend` is None."""
    found = []
    for generation in (1, 2):
        if backend is not None:
            form(backend, generation)
        training = Training(tiny_model(num_layers=4), parallel, OptimConfig(global_batch_seqs=8, num_slices=4))
        step, of_steps = build(training, timeout_s=TIMEOUT_S), []
        for number in range(2):
            mine, num_micro_batches = micro_batches(training, number)
            result = step.run(mine, num_micro_batches=num_micro_batches, lr=1e-3, digest=1 + dist.get_rank()).resolve()
            of_steps.append((result.loss, result.grad_norm, result.digest, result.num_tokens))
        found.append(of_steps)
        del step
    return found


@pytest.mark.parametrize(
    "parallel",
    [
        ParallelConfig(pp=2, dp_replicate=2),
        pytest.param(ParallelConfig(tp=2, dp_replicate=2), marks=pytest.mark.long),
        pytest.param(ParallelConfig(cp=2, pp=2), marks=pytest.mark.long),
        pytest.param(ParallelConfig(), marks=pytest.mark.long),
    ],
    ids=["stages of replicas", "parts of replicas", "stages of shared rows", "shards"],
)
def test_steps_are_the_same_as_on_groups_that_torch_makes_of_all_ranks_in_each_generation(
    parallel: ParallelConfig,
) -> None:
    ours, theirs = run_ranks(losses, 4, "gloo", parallel), run_ranks(losses, 4, None, parallel)
    assert ours == theirs
    assert ours == [ours[0]] * 4
    assert ours[0][0] == ours[0][1]


# ---- by a coordinator


class _Served(BaseManager):
    """A coordinator's calls, for other processes."""


def join_twice(address: tuple[str, int]) -> list[tuple[int, int, list[str], float]]:
    """Two generations as a worker joins them: number, rank, the members, and what a sum over the axes came to."""
    mine = f"m{dist.get_rank()}"
    leave_generation()
    _Served.register("coordinator")
    manager = _Served(address=address, authkey=SECRET)
    manager.connect()
    coordinator = manager.coordinator()  # type: ignore[attr-defined]
    found, after = [], 0
    for _ in range(2):
        joined = join_generation(
            coordinator,
            me=Member(mine, "node", "127.0.0.1", 0, os.getpid()),
            after=after,
            expected=4,
            backend="gloo",
            timeout_s=TIMEOUT_S,
            breaker=Breaker(),
            waiting=lambda generation, breaker: None,
        )
        assert joined is not None
        mesh = build_mesh(plan_mesh(joined.world_size, 2), "cpu", timeout_s=TIMEOUT_S, connect_s=TIMEOUT_S)
        total = torch.tensor([float(joined.rank)])
        for group in axis_groups(mesh):
            dist.all_reduce(total, group=group)
        assert gather(mine) == [member.id for member in joined.formation.members]
        found.append((joined.generation, joined.rank, gather(mine), total.item()))
        leave_generation()
        after = joined.generation
    return found


def test_workers_join_the_generations_of_a_coordinator_by_their_seats(tmp_path: Path) -> None:
    config = PretrainConfig(
        cluster=ClusterConfig(min_workers=4, max_workers=4), observe=ObserveConfig(tensorboard=False, metrics=False)
    )
    made = Coordinator(str(tmp_path), "run", checkpoints="checkpoints", config=config, submitted={"time": time.time()})
    _Served.register("coordinator", callable=lambda: made, exposed=["join", "formation"])
    server = _Served(address=("127.0.0.1", 0), authkey=SECRET).get_server()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    found = run_ranks(join_twice, 4, server.address)
    made.shell.close()
    for generation in (0, 1):
        numbers, ranks, members, totals = zip(*(each[generation] for each in found), strict=True)
        assert set(numbers) == {generation + 1}
        assert sorted(ranks) == [0, 1, 2, 3]
        assert all(each == members[0] for each in members)
        assert sorted(members[0]) == ["m0", "m1", "m2", "m3"]
        assert totals == (6.0,) * 4
