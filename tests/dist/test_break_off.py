"""A rank that waits in a collective for one that never comes is broken off from another thread; nothing else is."""

import contextlib
import datetime
import os
import random
import socket
import threading
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from regrow.accept.tiny import tiny_model
from regrow.config.schema import OptimConfig, ParallelConfig
from regrow.control.membership import Formation, Member
from regrow.control.phases import FORM_S
from regrow.parallel.fsdp import build_mesh
from regrow.plan.mesh import plan_mesh
from regrow.runtime.abort import Breaker, listening
from regrow.runtime.rendezvous import Doors, form_group, leave_generation
from regrow.state.collective import gather
from support.gloo import run_ranks
from support.training import Training, build, micro_batches


def wait_for_one_that_never_comes(folder: str) -> str:
    mesh = build_mesh(plan_mesh(dist.get_world_size(), 1), "cpu")  # a group of its own
    gloo = set().union(*gather(list(listening())))
    other = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(other.getsockname())
    server, _ = other.accept()
    left = Path(folder) / "left"
    if dist.get_rank() == 2:
        while len(list(Path(folder).glob("left-*"))) < 2:
            time.sleep(0.05)
        return "never came"
    breaker = Breaker()
    breaker.watch(gloo)
    threading.Timer(0.5, breaker.start).start()
    try:
        dist.all_reduce(torch.ones(4), group=mesh.get_group())
    except RuntimeError:
        client.sendall(b"still connected")
        said = server.recv(100).decode()
        left.with_name(f"left-{dist.get_rank()}").touch()
        breaker.settle()
        breaker.left()
        return said
    return "the collective came to an end"


# as gloo connects by itself, and as on GPUs: to a rank once something is sent to it
CONNECTS = pytest.mark.parametrize("env", [{}, {"TORCH_GLOO_LAZY_INIT": "1"}], ids=["at once", "as used"])


@CONNECTS
def test_waiting_ranks_get_an_error_and_other_connections_stay(env: dict[str, str], tmp_path: Path) -> None:
    found = run_ranks(wait_for_one_that_never_comes, 3, str(tmp_path), deadline_s=60.0, env=env)
    assert found == ["still connected", "still connected", "never came"]


def break_off_again_and_again(times: int) -> int:
    """How often the ranks came out of collectives that follow one another closely, in one of which they were."""
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    data, whole = torch.ones(1000), torch.empty(1000 * dist.get_world_size())
    for number in range(times):
        before = listening()
        group = dist.ProcessGroupGloo(
            dist.PrefixStore(str(number), store), rank, dist.get_world_size(), datetime.timedelta(seconds=300)
        )
        breaker = Breaker()
        breaker.watch(set().union(*gather(list(listening() - before))))
        threading.Timer(0.001 * random.Random(number).randrange(30), breaker.start).start()
        while True:
            try:
                group._allgather_base(whole, data).wait()
                group._reduce_scatter_base(data.clone(), whole).wait()
                group.allreduce([data]).wait()
            except RuntimeError:
                break
        breaker.settle()
        breaker.left()
    return times


def settle_at_once() -> tuple[int, bool]:
    """How many connections gloo has closed itself by then, and whether they are held open all the same."""

    def sockets() -> dict[str, str]:
        found = {}
        for entry in os.scandir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # the folder's own
                found[entry.name] = os.readlink(entry.path)
        return {number: name for number, name in found.items() if name.startswith("socket:")}

    breaker = Breaker()
    breaker.watch(set().union(*gather(list(listening()))))
    dist.barrier()
    before = sockets()
    breaker.start()
    breaker.settle()
    after = sockets()
    closed = [name for number, name in before.items() if after.get(number) != name]
    breaker.left()
    return len(closed), set(closed) <= set(after.values())


def test_gloo_has_let_go_of_what_was_shut_down_once_that_has_settled() -> None:
    assert run_ranks(settle_at_once, 3, deadline_s=60.0) == [(2, True)] * 3


def test_no_rank_stays_in_a_collective_that_it_was_about_to_send_for() -> None:
    """What is of a write that fails before gloo sees its connection end, gloo never lets go: a rank stayed for 45 s."""
    assert run_ranks(break_off_again_and_again, 2, 40, deadline_s=120.0) == [40, 40]


def wait_in_a_pipeline(folder: str) -> str:
    parallel, optim = ParallelConfig(pp=3), OptimConfig(global_batch_seqs=4, num_slices=4)
    training = Training(tiny_model(num_layers=3), parallel, optim)
    step = build(training)
    breaker = Breaker()
    breaker.watch(set().union(*gather(list(listening()))))
    mine, num_micro_batches = micro_batches(training, 0)
    if dist.get_rank() == 1:  # comes to the step's first sum, and no further
        dist.all_reduce(torch.zeros((), dtype=torch.int64))
        while len(list(Path(folder).glob("left-*"))) < 2:
            time.sleep(0.05)
        return "never came"
    threading.Timer(0.5, breaker.start).start()
    try:
        step.run(mine, num_micro_batches=num_micro_batches, lr=0.0)
    except RuntimeError as error:
        breaker.settle()
        breaker.left()
        (Path(folder) / f"left-{dist.get_rank()}").touch()
        return error.__notes__[0]
    return "the step came to an end"


@CONNECTS
def test_ranks_that_wait_for_a_message_between_stages_get_an_error(env: dict[str, str], tmp_path: Path) -> None:
    found = run_ranks(wait_in_a_pipeline, 3, str(tmp_path), deadline_s=60.0, env=env)
    what = "[1, 16, 32] of micro-batch 0 for stage"
    assert found == [
        f"waited for gradients {what} 0, from rank 1 of the pipeline",
        "never came",
        f"waited for activations {what} 2, from rank 1 of the pipeline",
    ]


def wait_for_a_third_then_form_without_the_second() -> tuple[float, float]:
    """Seconds until this rank heard that it need not wait for the third one; how many were in its group afterwards."""
    rank = dist.get_rank()
    doors = [Doors.at("127.0.0.1") for _ in range(2)]
    members = gather([asdict(each.of(Member(f"m{rank}", "node", "127.0.0.1", 0, rank))) for each in doors])
    dist.barrier()
    leave_generation()

    def form(generation: int, ranks: list[int]) -> None:
        def break_off_soon(generation: int, breaker: Breaker) -> None:
            threading.Timer(1.0, breaker.start).start()

        group = tuple(Member(**members[each][generation]) for each in ranks)
        form_group(
            Formation(generation, group).seat_of(ranks.index(rank), b"secret"),
            doors[generation],
            backend="gloo",
            timeout_s=600.0,
            breaker=Breaker(),
            waiting=break_off_soon if generation == 0 else lambda generation, breaker: None,
        )

    begun = time.monotonic()
    if rank != 2:
        with pytest.raises(RuntimeError):
            form(0, [0, 1, 2])
        leave_generation()
    waited_s = time.monotonic() - begun
    if rank != 1:
        form(1, [0, 2])
    return waited_s, sum(gather(1)) if dist.is_initialized() else 0


@CONNECTS
def test_who_waits_for_others_to_form_a_group_is_broken_off_and_forms_another(env: dict[str, str]) -> None:
    found = run_ranks(wait_for_a_third_then_form_without_the_second, 3, deadline_s=60.0, env=env)
    waited_s, in_group = zip(*found, strict=True)
    assert max(waited_s) < FORM_S
    assert in_group == (2, 0, 2)


def test_an_address_reads_as_sockets_have_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        assert address in listening()
    assert address not in listening()
