"""What ranks believe of a step in which a group breaks, on the asynchronous backend: in the product's own loop."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType
from torch.distributed import distributed_c10d

from regrow.accept.tiny import count_up_rows, tiny_model
from regrow.config.schema import OptimConfig, ParallelConfig
from regrow.control.membership import Formation
from regrow.control.membership import Member as Place
from regrow.data.read.batch import RankBatch
from regrow.parallel import asynchronous
from regrow.parallel.fsdp import build_mesh, connect
from regrow.plan.mesh import plan_mesh
from regrow.plan.topology import plan_topology
from regrow.runtime import rendezvous
from regrow.runtime.abort import Breaker
from regrow.runtime.rendezvous import Doors, form_group, leave_generation
from regrow.state.collective import gather
from regrow.state.entries import Progress
from regrow.train.certificate import BrokenStep, Certificate
from regrow.train.loop import LoopSettings, train
from regrow.train.metrics import Meter, NotFinite
from regrow.train.step import evaluate
from support.gloo import run_ranks
from support.members import OFF, Member, run_members, until
from support.training import Training, build

torch.set_num_threads(1)

OPTIM = OptimConfig(lr=1e-3, global_batch_seqs=12, num_slices=6)
FATAL_STEP = 3


@dataclass
class Believer:
    """Hooks and a saver that keep what they were told."""

    confirmed: list[int]
    logged: list[int]

    def step_done(self, row: Mapping[str, float]) -> None: ...

    def log(self, row: dict[str, Any]) -> None:
        self.logged.append(row["step"])

    def confirm(self, step: int) -> float:
        self.confirmed.append(step)
        return 0.0

    def wants_to_leave(self) -> bool:
        return False

    def has_room(self, step: int) -> bool:
        return True

    def is_held(self, step: int) -> bool:
        return False

    def held_by_all(self, step: int, held: bool) -> None: ...

    def spacing(self) -> int:
        return 0

    def space(self, every_steps: int) -> None: ...

    def before_update(self) -> float:
        return 0.0

    def is_checkpoint_due(self, step: int) -> bool:
        return False

    def after_step(self, progress: Progress, *, blocked: bool, read: bool) -> float:
        return 0.0

    def finish(self, progress: Progress, *, blocked: bool) -> float:
        return 0.0

    def validate(self, step: int) -> float:
        return 0.0


def die(member: Member, breaker: Breaker) -> None:
    """The last rank, between a forward and a backward."""
    if member.rank == member.world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)


def be_told_alone(member: Member, breaker: Breaker) -> None:
    """Rank 0 hears that the group is over; nobody is dead, and the others hear nothing."""
    if member.rank == 0:
        groups: list[Any] = list(distributed_c10d._world.pg_map)
        breaker.start()
        until(lambda: all(group.is_aborted for group in groups))


def fail_alone(member: Member, breaker: Breaker) -> None:
    """The last rank has an error of its own, and leaves by it."""
    if member.rank == member.world_size - 1:
        raise torch.OutOfMemoryError("of this rank alone")


Fault = Callable[[Member, Breaker], None]


def restore_through(fault: Callable[[], None]) -> None:
    """Collectives as of a restore; the fault comes before the last of them."""
    for number in range(3):
        if number == 2:
            fault()
        dist.all_reduce(torch.ones(1000))


def train_through(
    fault: Fault, parallel: ParallelConfig, member: Member, *, fatal_step: int = FATAL_STEP
) -> tuple[list[int], list[int], str]:
    """Steps confirmed, steps logged, and how it ended. In step 0 means before the first one."""
    member.form()
    training = Training(tiny_model(), parallel, OPTIM)
    topology = plan_topology(member.world_size, num_slices=OPTIM.num_slices, tp=parallel.tp, cp=parallel.cp)
    plan, slices = topology.batch, topology.slices_of(member.rank)
    size = OPTIM.global_batch_seqs // OPTIM.num_slices
    mine = slice(slices.start * size, slices.stop * size)
    breaker, certificate = Breaker(), Certificate(1, member.world_size, torch.device("cpu"))
    breaker.first(certificate.clear)
    step, launched = member.stream.submit(partial(build, training)).result(), [0]
    step.certificate, whole_loss = certificate, step.loss_function

    def loss_function(*args: Any) -> torch.Tensor:
        loss: torch.Tensor = whole_loss(*args)
        if launched[0] == fatal_step:
            launched[0] += 1  # once
            fault(member, breaker)
        return loss

    def batches() -> Iterator[RankBatch]:
        for index in range(training.num_steps):
            rows = count_up_rows(index, num_rows=OPTIM.global_batch_seqs, seq_len=training.seq_len).numpy()
            member.stream.submit(partial(launched.__setitem__, 0, index + 1))
            yield RankBatch(index, np.arange(len(rows))[mine], rows[mine].astype(np.uint32))

    def tell_once_anybody_is_seen_to_be_gone() -> None:
        """As a keeper does, for deaths and for what a rank says itself."""
        groups: list[Any] = list(distributed_c10d._world.pg_map)
        until(lambda: member.store.check(["over"]) or any(map(sees_a_death, groups)))
        member.say("over")
        breaker.start()

    def sees_a_death(group: Any) -> bool:
        return fault is die and group.get_error() != ErrorType.SUCCESS

    threading.Thread(target=tell_once_anybody_is_seen_to_be_gone, daemon=True).start()
    step.loss_function = loss_function
    if fatal_step == 0:
        restored = member.stream.submit(partial(restore_through, partial(fault, member, breaker)))
    tokens, hooks, said = training.seq_len * OPTIM.global_batch_seqs, Believer([], []), "came to its end"
    try:
        if fatal_step == 0:
            restored.result()
        train(
            step,
            batches(),
            Progress(),
            optim=OPTIM,
            settings=LoopSettings(
                last_step=training.num_steps,
                total_tokens=training.num_steps * tokens,
                tokens_per_step=tokens,
                seqs_per_step=OPTIM.global_batch_seqs,
                slice_seqs=size,
                num_micro_batches=plan.num_micro_batches,
                validate_every_steps=0,
                nonfinite_skips=0,
            ),
            meter=Meter(tokens, flops_per_token=1e6, peak_flops=1e9, world_size=member.world_size, generation=1),
            saver=hooks,
            hooks=hooks,
            device=torch.device("cpu"),
            stream=member.stream,
        )
    except Exception as error:  # as `run_worker` does
        said = type(error).__name__
        breaker.start()
        assert member.stream.drain(60.0)
        member.say("over")
        breaker.settle()
        leave_generation()
        breaker.left()
    return hooks.confirmed, hooks.logged, said


LAYOUTS = {
    "fsdp": (3, ParallelConfig()),
    "hsdp": (4, ParallelConfig(dp_replicate=2)),
    "tp": (4, ParallelConfig(tp=2)),
    "cp": (4, ParallelConfig(cp=2)),
}


@pytest.mark.parametrize(
    ("fault", "layout"),
    [
        *((fault, "fsdp") for fault in (die, be_told_alone, fail_alone)),
        *((be_told_alone, "hsdp"), (die, "tp"), (die, "cp")),
        *(pytest.param(fault, "hsdp", marks=pytest.mark.long) for fault in (die, fail_alone)),
        *(pytest.param(fault, "tp", marks=pytest.mark.long) for fault in (be_told_alone, fail_alone)),
        pytest.param(be_told_alone, "cp", marks=pytest.mark.long),
    ],
)
def test_a_broken_step_is_believed_by_nobody(fault: Fault, layout: str, tmp_path: Path) -> None:
    world_size, parallel = LAYOUTS[layout]
    ends, found = run_members(partial(train_through, fault, parallel), world_size, tmp_path, OFF)
    assert ends[:-1] == [0] * (world_size - 1)
    assert ends[-1] == (-signal.SIGKILL if fault is die else 0)
    for confirmed, logged, said in found[: world_size - (fault is die)]:
        assert logged == sorted(set(confirmed)) == list(range(1, FATAL_STEP))
        assert said != "came to its end"
        assert said != NotFinite.__name__


@pytest.mark.parametrize("fault", [die, be_told_alone, fail_alone])
def test_a_restore_that_breaks_makes_no_step_that_is_believed(fault: Fault, tmp_path: Path) -> None:
    """Which has no certificate of its own: it comes before the first step in the same stream."""
    ends, found = run_members(partial(train_through, fault, ParallelConfig(), fatal_step=0), 3, tmp_path, OFF)
    assert ends == [0, 0, -signal.SIGKILL if fault is die else 0]
    for confirmed, logged, said in found[: 3 - (fault is die)]:
        assert (confirmed, logged) == ([], [])
        assert said != "came to its end"


# ---- what else the host reads


def validate_while_one_is_told(member: Member) -> str:
    member.form()
    training = Training(tiny_model(), ParallelConfig(), OPTIM)
    step = member.stream.submit(partial(build, training)).result()
    certificate, breaker = Certificate(1, member.world_size, torch.device("cpu")), Breaker()
    breaker.first(certificate.clear)
    rows = count_up_rows(0, num_rows=4, seq_len=training.seq_len)

    def score(number: int) -> float:
        whole_loss = step.loss_function

        def loss_function(*args: Any) -> torch.Tensor:
            if number == 2:
                be_told_alone(member, breaker)
            return whole_loss(*args)  # type: ignore[no-any-return]

        run = partial(evaluate, step.model, [rows], num_batches=1, groups=step.groups, loss_function=loss_function)
        loss, tokens = member.stream.submit(partial(run, certificate=certificate, number=number)).result()
        return loss / tokens

    assert score(1) > 0
    try:
        return f"believed {score(2)}"
    except BrokenStep:
        return "broken"
    except dist.DistBackendError:
        return "broken"


def test_a_validation_that_is_broken_off_is_believed_by_nobody(tmp_path: Path) -> None:
    ends, found = run_members(validate_while_one_is_told, 3, tmp_path, OFF)
    assert (ends, found) == ([0] * 3, ["broken"] * 3)


# ---- forming


def come_late_to_the_first_step(store_s: float) -> float:
    """Rank 0 is later than the store's timeout: its data took long, or compiling."""
    rank, rendezvous.STORE_S = dist.get_rank(), store_s
    doors = Doors.at("127.0.0.1")
    places = tuple(Place(**each) for each in gather(asdict(doors.of(Place(f"m{rank}", "node", "127.0.0.1", 0, rank)))))
    dist.barrier()
    leave_generation()
    form_group(
        Formation(1, places).seat_of(rank, b"secret"),
        doors,
        backend="asynchronous",
        timeout_s=60.0,
        breaker=Breaker(),
        waiting=lambda generation, breaker: None,
    )
    mesh = build_mesh(plan_mesh(len(places), 2), "cpu", timeout_s=60.0)
    connect(mesh)
    stream, total = asynchronous.default_stream(), torch.ones(1)
    assert stream.drain(60.0)
    if rank == 0:
        time.sleep(3 * store_s)
    for group in mesh.get_all_groups():
        dist.all_reduce(total, group=group)
    assert stream.drain(60.0)
    return total.item()


def test_who_is_late_for_a_first_step_has_its_communicators_made_before(tmp_path: Path) -> None:
    assert run_ranks(come_late_to_the_first_step, 4, 1.0, env=OFF) == [4.0] * 4
