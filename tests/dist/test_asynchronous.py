"""The asynchronous backend has NCCL's manners: enqueued, mute about the dead, garbage after aborts, late watchdogs."""

import os
import signal
import threading
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType

from regrow.accept.tiny import tiny_model
from regrow.config.schema import OptimConfig, ParallelConfig, PipelineSchedule
from regrow.parallel import asynchronous
from regrow.parallel.asynchronous import default_stream
from support.gloo import run_ranks
from support.members import DEADLINE_S, OFF, ON, Member, launch, run_members, until
from support.ragged import ragged_model
from support.training import Training, build, micro_batches, whole

torch.set_num_threads(1)

FLOAT8 = torch.float8_e4m3fn


def raises_aborted(group: Any) -> bool:
    with pytest.raises(dist.DistBackendError, match="communicator was aborted"):
        dist.all_reduce(torch.ones(1), group=group)
    return True


# ---- data


def all_collectives(group: dist.ProcessGroup | None) -> dict[str, torch.Tensor]:
    rank, size = dist.get_rank(), dist.get_world_size()
    found: dict[str, torch.Tensor] = {}
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8):
        mine = (torch.arange(5 * size).reshape(size, 5) * (rank + 1) % 7).to(dtype)
        for name in ("SUM", "MAX", "MIN"):
            dist.all_reduce(into := mine.clone(), getattr(dist.ReduceOp, name), group)
            found[f"all_reduce {name} {dtype}"] = into
        dist.all_gather_single(into := torch.empty(size * size, 5, dtype=dtype), mine, group)
        found[f"all_gather_single {dtype}"] = into
        dist.reduce_scatter_single(into := torch.empty(5, dtype=dtype), mine.view(-1), group=group)
        found[f"reduce_scatter_single {dtype}"] = into
        dist.all_to_all_single(into := torch.empty_like(mine), mine, group=group)
        found[f"all_to_all_single {dtype}"] = into
    parts = [torch.full((3,), float(10 * rank + each)) for each in range(size)]
    dist.broadcast(into := parts[0].clone(), src=size - 1, group=group)
    found["broadcast"] = into
    dist.all_gather(into := [torch.empty(3) for _ in parts], parts[0], group)
    found["all_gather"] = torch.stack(into)
    dist.scatter(into := torch.empty(3), parts if rank == 1 else None, src=1, group=group)
    found["scatter"] = into
    dist.reduce_scatter(into := torch.empty(3), parts, group=group)
    found["reduce_scatter"] = into
    dist.all_reduce(into := torch.tensor(float(rank)), group=group)
    found["scalar"] = into
    dist.all_gather_single(into := torch.empty(0), torch.empty(0), group)
    found["nothing"] = into
    dist.all_gather_object(objects := [None] * size, {"rank": rank}, group)
    found["objects"] = torch.tensor([each["rank"] for each in objects])  # type: ignore[index]
    return found


def differences_from_gloo() -> list[str]:
    group = dist.new_group(backend="asynchronous")
    ours, gloo = default_stream().submit(partial(all_collectives, group)).result(), all_collectives(None)
    default_stream().submit(partial(dist.barrier, group)).result()
    assert ours.keys() == gloo.keys()
    return [name for name in gloo if not torch.equal(ours[name], gloo[name])]


def test_every_collective_gives_what_gloo_gives_in_every_type() -> None:
    assert run_ranks(differences_from_gloo, 3, env=OFF) == [[]] * 3


def what_gloo_lacks() -> tuple[list[float], list[float], list[float], bool]:
    group, rank = dist.new_group(backend="asynchronous"), dist.get_rank()
    works = [
        launch(group, mean := torch.tensor([float(rank), 6.0]), op=dist.ReduceOp.AVG),
        launch(group, scaled := torch.tensor([float(rank), 6.0]), op=dist._make_nccl_premul_sum(0.5)),
    ]
    bits = (torch.arange(9) * (rank + 1)).to(torch.uint8).view(FLOAT8)
    dist.all_gather_single(gathered := torch.empty(18, dtype=FLOAT8), bits, group)
    dist.barrier(group)
    assert all(work.is_completed() for work in works)
    expected = [each * (rank + 1) for rank in range(2) for each in range(9)]
    return mean.tolist(), scaled.tolist(), [gathered.view(torch.uint8).tolist() == expected], group.name()


def test_averages_scaled_sums_and_float8_are_right_and_a_barrier_makes_the_host_wait() -> None:
    assert run_ranks(what_gloo_lacks, 2, env=OFF) == [([0.5, 6.0], [0.5, 6.0], [True], "asynchronous")] * 2


def megabytes() -> bool:
    group, rank = dist.new_group(backend="asynchronous"), dist.get_rank()
    mine = torch.full((4_000_000,), rank + 1.0)
    launch(group, mine)
    default_stream().synchronize()
    return bool((mine == 6).all())


def test_megabytes_that_all_ranks_send_at_once_arrive() -> None:
    assert run_ranks(megabytes, 3, env=OFF) == [True] * 3


# ---- enqueued


def wait_behind_a_stream_that_is_held(member: Member) -> tuple[float, bool, float]:
    group = member.form()
    launch(group, torch.ones(1))
    open_gate = member.hold()
    work = launch(group, tensor := torch.ones(1))  # has waited for it, too
    dist.all_gather_single(gathered := torch.zeros(2), tensor, group)
    before, done = tensor.item(), work.is_completed()
    open_gate()
    member.stream.synchronize()
    assert work.is_completed()
    assert gathered.tolist() == [2.0, 2.0]
    return before, done, tensor.item()


def test_wait_returns_at_once_and_the_data_is_right_when_the_stream_has_got_there(tmp_path: Path) -> None:
    ends, notes = run_members(wait_behind_a_stream_that_is_held, 2, tmp_path, OFF)
    assert ends == [0, 0]
    assert notes == [(1.0, False, 2.0)] * 2


def collectives_of_a_submitted_function(member: Member) -> list[float]:
    group = member.form()

    def step() -> list[float]:
        seen = []
        for _ in range(3):
            dist.all_reduce(tensor := torch.ones(1), group=group)
            seen.append(tensor.item())
        return seen

    found: list[float] = member.stream.submit(step).result()
    return found


def test_what_the_stream_itself_calls_is_done_there_and_then(tmp_path: Path) -> None:
    ends, notes = run_members(collectives_of_a_submitted_function, 2, tmp_path, OFF)
    assert (ends, notes) == ([0, 0], [[2.0] * 3] * 2)


# ---- deaths and aborts


def death(member: Member) -> dict[str, Any]:
    """Rank 2 is killed; rank 0 sees that its stream hangs, then aborts; rank 1 is told nothing."""
    group, notes = member.form(), {}
    launch(group, torch.full((2,), 10.0**member.rank))  # 111
    member.stream.synchronize()
    member.say(f"ready {member.rank}")
    if member.rank == 2:
        member.hear("ready 0", "ready 1")
        os.kill(os.getpid(), signal.SIGKILL)
    work = launch(group, tensor := torch.full((2,), 2 * 10.0**member.rank))
    queued = launch(group, later := torch.full((2,), 3 * 10.0**member.rank))
    until(lambda: group.get_error() == ErrorType.REMOTE_ERROR)
    notes["hangs"] = not work.is_completed() and tensor.tolist() == [2 * 10.0**member.rank] * 2
    member.say(f"hangs {member.rank}")
    member.hear("hangs 0", "hangs 1")
    if member.rank == 0:
        group.abort()
        notes["completed"] = work.is_completed() and queued.is_completed()
        notes["raises"] = raises_aborted(group)
    else:  # without a word to it
        work.event.synchronize()
        queued.event.synchronize()
    notes["first"] = tensor.tolist()
    notes["second"] = later.tolist()
    return notes


@pytest.fixture(scope="module")
def after_death(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    ends, notes = run_members(death, 3, tmp_path_factory.mktemp("death"), OFF)
    assert ends == [0, 0, -signal.SIGKILL]
    return notes


def test_a_dead_peer_raises_nowhere_and_the_stream_hangs_in_the_collective(after_death: list[dict[str, Any]]) -> None:
    assert [each["hangs"] for each in after_death[:2]] == [True, True]


def test_an_abort_completes_what_is_queued_with_old_buffers_and_only_the_next_enqueue_raises(
    after_death: list[dict[str, Any]],
) -> None:
    assert after_death[0]["completed"]
    assert after_death[0]["raises"]
    assert after_death[0]["first"] == [122.0, 122.0]  # the dead rank's 100 is of the collective before, not 200


def test_a_peer_that_nobody_told_completes_with_old_buffers_when_another_one_aborts(
    after_death: list[dict[str, Any]],
) -> None:
    assert after_death[1]["first"] == [122.0, 122.0]
    assert after_death[1]["second"] == [2 + 30.0 + 100] * 2  # rank 0 only posted


def told_alone(member: Member) -> float:
    """All live; rank 0 aborts before its stream comes to a collective that the others are in."""
    group = member.form()
    launch(group, torch.full((1,), 10.0**member.rank))
    member.stream.synchronize()
    open_gate = member.hold() if member.rank == 0 else lambda: None
    work = launch(group, tensor := torch.full((1,), 2 * 10.0**member.rank))
    if member.rank == 0:
        aborting = threading.Thread(target=group.abort)
        aborting.start()
        until(lambda: raises_aborted(group))
        open_gate()
        aborting.join()
    work.event.synchronize()
    if member.rank:
        assert group.get_error() == ErrorType.SUCCESS
    member.say(f"done {member.rank}")
    member.hear("done 0", "done 1", "done 2")
    return tensor.item()


def test_an_aborted_rank_posts_without_data_and_its_peers_go_on_with_what_it_sent_before(tmp_path: Path) -> None:
    ends, sums = run_members(told_alone, 3, tmp_path, OFF)
    assert ends == [0, 0, 0]
    for rank, total in enumerate(sums[1:], 1):  # the other peer's part may have come, or not
        assert total - 2 * 10.0**rank - 1 in (10.0 ** (3 - rank), 2 * 10.0 ** (3 - rank))


def abort_where_the_data_is(member: Member) -> tuple[float, bool]:
    group = member.form()
    launch(group, torch.ones(1))
    member.stream.synchronize()
    asynchronous.SPIN_S = 5.0  # what is sent may be long in coming, where the machine is busy
    tensor = torch.full((1,), 7.0 * member.rank)
    if member.rank == 1:
        dist.broadcast(tensor, src=1, group=group)
        member.stream.synchronize()
        member.say("sent")
        member.hear("received")
        return tensor.item(), True
    open_gate = member.hold()
    dist.broadcast(tensor, src=1, group=group)
    aborting = threading.Thread(target=group.abort)
    aborting.start()
    until(lambda: raises_aborted(group))
    member.hear("sent")
    open_gate()
    aborting.join()
    member.say("received")
    return tensor.item(), raises_aborted(group)


def test_a_kernel_whose_data_is_there_completes_right_although_it_was_aborted(tmp_path: Path) -> None:
    assert run_members(abort_where_the_data_is, 2, tmp_path, OFF) == ([0, 0], [(7.0, True)] * 2)


def abort_in_the_middle_of_a_step(member: Member) -> tuple[bool, bool, bool]:
    group = member.form()
    launch(group, torch.ones(1))
    member.stream.synchronize()
    if member.rank == 1:
        member.hear("over")
        return True, True, True
    began = threading.Event()

    def step() -> str:
        began.set()
        for _ in range(3):
            dist.all_reduce(torch.ones(1), group=group)
        return "came to its end"

    first, second = member.stream.submit(step), member.stream.submit(step)
    began.wait()
    group.abort()
    third = member.stream.submit(step)
    third.synchronize()
    member.say("over")
    return first.result() == second.result() == "came to its end", third.exception() is not None, raises_aborted(group)


def test_steps_submitted_before_an_abort_come_to_their_end_and_one_submitted_after_raises(tmp_path: Path) -> None:
    assert run_members(abort_in_the_middle_of_a_step, 2, tmp_path, OFF) == ([0, 0], [(True, True, True)] * 2)


def abort_in_turn_or_at_once(member: Member) -> list[str]:
    """The stream hangs in the first group's collective; the other groups' are queued behind it."""
    notes = []
    for at_once in (False, True):
        member.form(int(at_once), timeout_s=0.5)
        groups: list[Any] = [dist.new_group(backend="asynchronous", timeout=timedelta(seconds=0.5)) for _ in range(3)]
        for group in groups:
            launch(group, torch.ones(1))
        member.stream.synchronize()
        if member.rank == 0:
            works = [launch(group, torch.ones(1)) for group in groups]
            aborts = [partial(try_to_abort, group, notes) for group in reversed(groups)]
            if at_once:
                threads = [threading.Thread(target=abort) for abort in aborts]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
            else:
                for abort in aborts:
                    abort()
            assert all(work.is_completed() for work in works)
            member.say(f"over {at_once}")
        member.hear(f"over {at_once}")
        dist.destroy_process_group()
    return notes


def try_to_abort(group: Any, notes: list[str]) -> None:
    try:
        group.abort()
        notes.append("done")
    except dist.DistBackendError as error:
        notes.append(str(error))


def test_aborts_in_the_wrong_order_block_until_their_deadline_and_side_by_side_they_do_not(tmp_path: Path) -> None:
    ends, (notes, _) = run_members(abort_in_turn_or_at_once, 2, tmp_path, OFF)
    assert ends == [0, 0]
    assert ["timed out" in note for note in notes] == [True, True, False] + [False] * 3


# ---- the watchdog


def hang_for_good(timeout_s: float, member: Member) -> None:
    group = member.form(timeout_s=timeout_s)
    launch(group, torch.ones(1))
    member.stream.synchronize()
    member.say(f"ready {member.rank}")
    member.hear("ready 0", "ready 1")
    if member.rank == 1 and timeout_s == DEADLINE_S:
        os.kill(os.getpid(), signal.SIGKILL)
    if member.rank == 0:
        launch(group, torch.ones(1))
        if os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") == "0":
            until(lambda: group.get_error() != ErrorType.SUCCESS)
            member.say("over")
            return
    threading.Event().wait() if member.rank == 0 else member.hear("over")


def test_the_watchdog_ends_a_process_whose_collective_failed_with_a_dead_peer(tmp_path: Path) -> None:
    env = {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "100"}
    ends, _ = run_members(partial(hang_for_good, DEADLINE_S), 2, tmp_path, env)
    assert ends == [-signal.SIGABRT, -signal.SIGKILL]


def test_a_watchdog_in_mode_0_sees_a_hang_and_ends_nothing(tmp_path: Path) -> None:
    env = {**OFF, "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0"}
    assert run_members(partial(hang_for_good, 0.5), 2, tmp_path, env)[0] == [0, 0]


def go_on_in_the_next_group(folder: Path, member: Member) -> None:
    group = member.form()
    launch(group, torch.ones(1))
    member.stream.synchronize()
    member.say(f"ready {member.rank}")
    member.hear("ready 0", "ready 1", "ready 2")
    if member.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    work = launch(group, torch.ones(1))
    until(lambda: group.get_error() == ErrorType.REMOTE_ERROR)
    member.say(f"seen {member.rank}")
    member.hear("seen 0", "seen 1")
    group.abort()
    assert work.is_completed()
    dist.destroy_process_group()
    launch(member.form(1, world_size=2), tensor := torch.ones(1))
    member.stream.synchronize()
    assert tensor.item() == 2
    (folder / f"went on {member.rank}").touch()
    threading.Event().wait()


def test_a_watchdog_that_saw_a_failure_ends_the_process_although_it_trains_on_in_the_next_group(tmp_path: Path) -> None:
    ends, _ = run_members(partial(go_on_in_the_next_group, tmp_path), 3, tmp_path, ON)
    assert ends == [-signal.SIGABRT, -signal.SIGABRT, -signal.SIGKILL]
    assert sorted(each.name for each in tmp_path.glob("went on *")) == ["went on 0", "went on 1"]


# ---- communicators


def come_late(late: int, member: Member) -> str:
    """The store's timeout is 1 s, the group's a minute and a half; one rank's first collective is after the other's."""
    group = member.form(store_s=1.0)
    if member.rank == late:
        if late == 0:
            member.hear("failed")
            return "never came"
        time.sleep(2.0)
    try:
        launch(group, tensor := torch.ones(1))
    except dist.DistBackendError as error:
        member.say("failed")
        return str(error)
    member.stream.synchronize()
    return str(tensor.item())


def test_a_rank_0_that_comes_late_fails_the_others_by_the_timeout_of_the_store_not_of_the_group(tmp_path: Path) -> None:
    ends, (_, said) = run_members(partial(come_late, 0), 2, tmp_path, OFF)
    assert ends == [0, 0]
    assert "no unique id from rank 0" in said


def test_any_other_rank_may_come_late_to_a_groups_first_collective(tmp_path: Path) -> None:
    assert run_members(partial(come_late, 1), 2, tmp_path, OFF) == ([0, 0], ["2.0", "2.0"])


# ---- messages


def send_round(member: Member) -> list[float]:
    """From rank to rank, by the host before anything is there, and by the stream; received ahead, and in order."""
    member.form()
    rank, size = member.rank, member.world_size
    before, after = (rank - 1) % size, (rank + 1) % size
    for sender in range(size):  # the first message of a pair waits for the other rank's: connected in one order
        if rank == sender:
            dist.isend(torch.zeros(3), group_dst=after)
        elif before == sender:
            dist.irecv(torch.zeros(3), group_src=sender)
    let_go = member.hold()
    came = [torch.zeros(3) for _ in range(4)]
    works = [dist.irecv(each, group_src=before) for each in came[:2]]
    works += [dist.isend(torch.full((3,), 10.0 * rank + each), group_dst=after) for each in range(2)]
    assert not any(work.is_completed() for work in works)
    for work in works:
        work.wait()  # for nothing: the stream is held
    totals = default_stream().submit(lambda: came[0] + came[1])

    def on_stream() -> torch.Tensor:
        ahead = [dist.irecv(each, group_src=before) for each in came[2:]]
        ahead += [dist.isend(torch.full((3,), 10.0 * rank + each), group_dst=after) for each in range(2, 4)]
        for work in ahead:
            work.wait()
        return came[2] + came[3]

    later = default_stream().submit(on_stream)
    let_go()
    return [totals.result()[0].item(), later.result()[0].item()]


def test_messages_arrive_in_order_and_the_stream_waits_for_them_not_the_host(tmp_path: Path) -> None:
    ends, found = run_members(send_round, 3, tmp_path, OFF)
    assert ends == [0] * 3
    assert found == [[20.0 * ((rank - 1) % 3) + 1, 20.0 * ((rank - 1) % 3) + 5] for rank in range(3)]


def receive_what_is_never_sent(member: Member) -> tuple[bool, float, bool]:
    group = member.form()
    for _ in range(2):  # connected
        dist.isend(torch.ones(1), group_dst=1) if member.rank == 0 else dist.irecv(torch.ones(1), group_src=0)
    if member.rank == 0:
        default_stream().synchronize()
        member.connect().get("aborted")
        return True, 0.0, True
    into = torch.full((1,), 7.0)
    work = dist.irecv(into, group_src=0)
    work.wait()
    hangs = not default_stream().drain(0.3)
    group.abort()
    member.connect().set("aborted", "1")
    return hangs, into.item(), default_stream().drain(DEADLINE_S)


def test_an_abort_ends_a_receive_with_what_came_before(tmp_path: Path) -> None:
    ends, found = run_members(receive_what_is_never_sent, 2, tmp_path, OFF)
    assert ends == [0, 0]
    assert found[1] == (True, 1.0, True)


# ---- training

OPTIM = OptimConfig(lr=1e-3, global_batch_seqs=12, num_slices=6)


def train_on_stream(training: Training) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and last weights; each step, from forward to packed reduction, is one function given to the stream."""
    submit = default_stream().submit
    step, losses = submit(partial(build, training)).result(), []
    for index in range(training.num_steps):
        mine, num_micro_batches = micro_batches(training, index)
        run = partial(step.run, mine, num_micro_batches=num_micro_batches, lr=training.optim.lr)
        losses.append(submit(run).result().resolve().loss)
    return losses, submit(
        lambda: {name: whole(p.detach()).clone() for name, p in step.model.named_parameters()}
    ).result()


def train_asynchronously(training: Training, member: Member) -> Any:
    member.form()
    return train_on_stream(training)


def train_as_on_gloo(training: Training, world_size: int, folder: Path) -> list[tuple[list[float], dict[str, Any]]]:
    """What `train_on_stream` returned on each rank; on gloo it returns nearly the same."""
    ends, found = run_members(partial(train_asynchronously, training), world_size, folder, OFF)
    assert ends == [0] * world_size
    for (losses, weights), gloo in zip(found, run_ranks(train_on_stream, world_size, training), strict=True):
        assert losses == pytest.approx(gloo[0], abs=1e-6)
        for name, weight in weights.items():
            torch.testing.assert_close(weight, gloo[1][name], rtol=0, atol=1e-6)
    return found


@pytest.mark.parametrize(("world_size", "dp_replicate"), [(2, 1), (3, 1), (4, 2)])
def test_fsdp_and_hsdp_are_bitwise_the_same_on_all_ranks_and_as_on_gloo(
    world_size: int, dp_replicate: int, tmp_path: Path
) -> None:
    training = Training(ragged_model(), ParallelConfig(dp_replicate=dp_replicate), OPTIM, num_steps=4)
    (losses, weights), *others = train_as_on_gloo(training, world_size, tmp_path)
    for other_losses, other_weights in others:
        assert other_losses == losses
        assert all(torch.equal(other_weights[name], weight) for name, weight in weights.items())


@pytest.mark.parametrize("schedule", list(PipelineSchedule))
def test_pipelines_train_as_on_gloo(schedule: PipelineSchedule, tmp_path: Path) -> None:
    parallel = ParallelConfig(pp=2, schedule=schedule)
    train_as_on_gloo(Training(tiny_model(num_layers=4), parallel, OPTIM, num_steps=4), 4, tmp_path)


def test_tensor_parallelism_trains_as_on_gloo(tmp_path: Path) -> None:
    train_as_on_gloo(Training(tiny_model(), ParallelConfig(tp=2), OPTIM, num_steps=4), 2, tmp_path)
