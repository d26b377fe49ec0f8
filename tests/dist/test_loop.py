"""The main loop on plain gloo ranks: it needs batches, a step and hooks, and neither Ray nor Hydra nor storage."""

import itertools
import math
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from regrow.accept.tiny import count_up_rows, tiny_model
from regrow.config.schema import OptimConfig, ParallelConfig
from regrow.control.values import Scalar
from regrow.data.read.batch import RankBatch
from regrow.optim.adamw import build_optimizer
from regrow.parallel.apply import build_model
from regrow.parallel.fsdp import axis_groups, build_mesh, shard_group
from regrow.plan.batch import plan_batch
from regrow.plan.mesh import plan_mesh
from regrow.record.log import METRIC_KEYS
from regrow.state.entries import Progress
from regrow.state.memory.writer import Snapshots
from regrow.train.callback import Called
from regrow.train.loop import LoopSettings, train
from regrow.train.metrics import Meter
from regrow.train.saver import LAST_ROOM_S, Cadence, SnapshotSaver
from regrow.train.step import TrainStep, whole_loss
from support.counted import expected
from support.gloo import RankError, run_ranks

SEQS, SLICES, TOKENS, STEPS = 12, 6, 16, 12
STALL_S = 0.25  # of training, for a checkpoint


@dataclass
class Slots:
    """Slots of one rank for the saver's policy, without memory: what is begun is committed once it is confirmed."""

    recorder: "Recorder"
    begun: int = -1
    is_late: bool = False
    copying: bool = False

    def room(self) -> int:
        return int(dist.get_rank() != 1 or self.recorder.launched not in self.recorder.full)

    def await_room(self, patience_s: float) -> bool:
        step = self.recorder.launched
        self.recorder.waited.append((step, patience_s == LAST_ROOM_S))
        return step not in self.recorder.stuck

    def begin(self, step: int, scalars: dict[str, int]) -> bool:
        assert not self.copying
        assert scalars["step"] == step
        self.copying, self.begun = True, step
        self.recorder.snapshots.append(step)
        return True

    def wait(self) -> float:
        self.copying = False
        return 0.0

    def confirm(self, step: int, scalars: Mapping[str, Scalar]) -> None:
        self.recorder.confirmed.append(step)
        self.recorder.kept[step] = {key.removeprefix("user."): value for key, value in scalars.items()}

    @property
    def asked(self) -> int:
        return self.begun

    def is_held(self, step: int) -> bool:
        return step > 0 and step not in self.recorder.lacked[dist.get_rank() % 2]

    def held_by_all(self, step: int) -> None:
        self.recorder.held.append(step)

    def newest_begun(self, at_most: int) -> int:
        return self.begun

    def is_committed(self, step: int) -> bool:
        return step not in self.recorder.full

    def await_commit(self, step: int, *, patience_s: float) -> float:
        return 0.0


@dataclass
class Recorder:
    """Hooks that keep what they were told, and ask to leave once `leave_at` rows were logged, on one rank alone."""

    leave_at: int | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)
    saved: list[tuple[int, int]] = field(default_factory=list)  # (step, rows logged before it)
    written: list[int] = field(default_factory=list)  # those of them that the ranks wrote themselves
    validated: list[int] = field(default_factory=list)
    snapshots: list[int] = field(default_factory=list)
    confirmed: list[int] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)  # this rank's, at the end
    full: frozenset[int] = frozenset()  # steps before which rank 1 has no room
    lacked: tuple[tuple[int, ...], ...] = ((), ())  # snapshots that a rank's node has not
    held: list[int] = field(default_factory=list)  # those that all have
    stuck: frozenset[int] = frozenset()  # those of them for which none comes, however long one waits
    waited: list[tuple[int, bool]] = field(default_factory=list)  # for room: (step, was it the last)
    spacings: dict[int, int] = field(default_factory=dict)  # between snapshots, as rank 0 hears after so many rows

    @property
    def launched(self) -> int:
        """The step that is being launched, or was."""
        return len(self.rows) + self.launching

    launching: int = 0
    called: Called | None = None
    kept: dict[int, dict[str, Scalar]] = field(default_factory=dict)  # of a callback, by step

    def step_done(self, row: Mapping[str, float]) -> None:
        if self.called is not None:
            self.called.after_step(row)

    def log(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        self.launching = 0

    def wants_to_leave(self) -> bool:
        self.launching = 1
        return self.leave_at is not None and len(self.rows) >= self.leave_at and dist.get_rank() == 0

    def spacing(self) -> int:
        return self.spacings.get(len(self.rows), 0) if dist.get_rank() == 0 else 0

    def want_checkpoint(self, step: int) -> None:
        self.saved.append((step, len(self.rows)))
        time.sleep(STALL_S)

    def write(self, progress: Progress) -> None:
        self.want_checkpoint(progress.step)
        self.written.append(progress.step)

    def validate(self, step: int) -> float:
        self.validated.append(step)
        return 1.5


def batches(slices: range, start_step: int) -> Iterator[RankBatch]:
    size = SEQS // SLICES
    for step in range(start_step, STEPS):
        rows = count_up_rows(step, num_rows=SEQS, seq_len=TOKENS).numpy().astype(np.uint32)
        mine = slice(slices.start * size, slices.stop * size)
        yield RankBatch(step, np.arange(SEQS)[mine] + step * SEQS, rows[mine])


def loop(
    leave_at: int | None = None,
    slices_per_pass: int = 1,
    full: tuple[int, ...] = (),
    poisoned: tuple[int, ...] = (),
    stuck: tuple[int, ...] = (),
    spacings: dict[int, int] | None = None,
    lacked: tuple[tuple[int, ...], tuple[int, ...]] = ((), ()),
) -> Recorder:
    """`full`, `stuck`, `spacings` and `lacked`: see Recorder; `poisoned`: steps with NaN in rank 0's gradient."""
    assert "ray" not in sys.modules
    assert "hydra" not in sys.modules
    world_size, device = dist.get_world_size(), torch.device("cpu")
    plan = plan_batch(num_slices=SLICES, world_size=world_size, slices_per_pass=slices_per_pass)
    mesh = build_mesh(plan_mesh(world_size=world_size, dp_replicate=1), "cpu")
    model = build_model(tiny_model(), ParallelConfig(), mesh=mesh, device=device, seed=0)
    optim = OptimConfig()
    hooks = Recorder(leave_at, full=frozenset(full), stuck=frozenset(stuck), spacings=spacings or {})
    hooks.lacked = lacked
    passes = itertools.count()

    def poisoned_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        number = 1 + next(passes) // plan.num_micro_batches
        factor = float("nan") if number in poisoned and dist.get_rank() == 0 else 1.0
        return whole_loss(model, inputs, targets) * factor

    step = TrainStep(
        model,
        build_optimizer(model, optim),
        max_grad_norm=1.0,
        groups=axis_groups(mesh),
        shard_group=shard_group(mesh),
        loss_function=poisoned_loss if poisoned else None,
    )
    progress = Progress()
    hooks.called = Called("support.counted:Counted", progress)
    left = train(
        step,
        batches(plan.ranges[dist.get_rank()], 0),
        progress,
        optim=optim,
        settings=LoopSettings(
            last_step=STEPS,
            total_tokens=STEPS * SEQS * TOKENS,
            tokens_per_step=SEQS * TOKENS,
            seqs_per_step=SEQS,
            slice_seqs=SEQS // SLICES,
            num_micro_batches=plan.num_micro_batches,
            validate_every_steps=4,
            nonfinite_skips=2,
        ),
        meter=Meter(SEQS * TOKENS, flops_per_token=1e6, peak_flops=1e9, world_size=world_size, generation=7),
        saver=SnapshotSaver(
            Cadence(STEPS, snapshot_every_steps=2, checkpoint_every_steps=5)
            if spacings is None
            else Cadence(STEPS, snapshot_every_steps=None),
            cast(Snapshots, Slots(hooks)),
            start_step=0,
            num_ahead=0,
            want_checkpoint=hooks.want_checkpoint,
            write=hooks.write,
            timeout_s=1.0,
            spacing=hooks.spacing,
            user=progress.user,
        ),
        hooks=hooks,
        device=device,
    )
    assert left == (leave_at is not None and progress.step < STEPS)
    hooks.weights = [weight.detach().to_local().clone() for weight in model.parameters()]  # type: ignore[attr-defined]
    return hooks


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_callback_hears_of_each_step_before_its_snapshot_is_confirmed(world_size: int) -> None:
    ranks = run_ranks(loop, world_size)
    for hooks in ranks:
        best = math.inf
        for step in range(1, STEPS + 1):
            best = min(best, hooks.rows[step - 1]["loss"])
            assert hooks.kept[step] == expected(step) | {"best": best}
        assert hooks.kept == ranks[0].kept


# 4 ranks have 2 or 1 of the 6 slices: with one slice a pass the short ones run a pass that counts for nothing
@pytest.mark.parametrize(
    ("slices_per_pass", "world_sizes"),
    [pytest.param(1, (2, 4), marks=pytest.mark.long), (2, (1, 3, 4)), pytest.param(4, (1, 2), marks=pytest.mark.long)],
)
def test_losses_and_digests_are_the_same_at_every_world_size(slices_per_pass: int, world_sizes: tuple[int]) -> None:
    alone = run_ranks(loop, 1)[0]
    for world_size in world_sizes:
        ranks = run_ranks(loop, world_size, None, slices_per_pass)
        for hooks in ranks:  # every rank knows the same numbers
            assert [row["batch_digest"] for row in hooks.rows] == [row["batch_digest"] for row in alone.rows]
            # float32 rounding of some dozen sums of terms near 5, carried through 12 steps
            assert [row["loss"] for row in hooks.rows] == pytest.approx([row["loss"] for row in alone.rows], abs=1e-5)
    assert alone.rows[-1]["loss"] < alone.rows[0]["loss"]


def test_rows_checkpoints_and_validation_come_when_they_are_due() -> None:
    hooks = run_ranks(loop, 1)[0]
    assert [row["step"] for row in hooks.rows] == list(range(1, STEPS + 1))
    assert all(set(METRIC_KEYS) <= row.keys() for row in hooks.rows)
    # a committed step's row is already logged
    assert hooks.saved == [(5, 5), (10, 10), (12, 12)]
    assert hooks.validated == [4, 8, 12]
    assert [row["step"] for row in hooks.rows if "validation_loss" in row] == [4, 8, 12]
    # the stall for a checkpoint belongs to the step after it
    assert [row["step"] for row in hooks.rows if row["snapshot_s"] >= STALL_S] == [6, 11]


def test_a_snapshot_is_begun_on_all_ranks_or_on_none() -> None:
    """One that some ranks begin is never committed, and its slots are never free again."""
    first, second = run_ranks(loop, 2, None, 1, (4, 7, 8, 10))
    assert first.snapshots == second.snapshots == [2, 5, 6, 10, 12]
    assert first.waited == second.waited == [(10, False)]  # it becomes a checkpoint
    assert first.saved == second.saved == [(5, 5), (10, 10), (12, 12)]


def test_ranks_learn_which_snapshots_all_nodes_hold() -> None:
    """Each is asked for twice, as two steps are launched before the next one is begun."""
    first, second = run_ranks(loop, 2, None, 1, (), (), (), None, ((4,), (6,)))
    assert first.held == second.held == [2, 2, 5, 8, 8, 10, 10]


def test_the_distance_that_one_rank_hears_is_that_of_all_ranks_from_the_same_step_on() -> None:
    first, second = run_ranks(loop, 2, None, 1, (), (), (), {4: 1, 6: 3})
    assert first.snapshots == second.snapshots == [4, 5, 6, 9, 12]
    assert first.confirmed == second.confirmed


def test_a_measured_distance_counts_from_the_snapshot_before_and_waits_for_no_link() -> None:
    """A step that some rank has no room for is left out, and the next one takes its place."""
    first, second = run_ranks(loop, 2, None, 1, (4, 5, 8), (), (), {})
    assert first.snapshots == second.snapshots == [6, 10, 12]
    assert not first.waited


def test_a_checkpoint_that_finds_no_room_does_not_hold_up_training() -> None:
    first, second = run_ranks(loop, 2, None, 1, (5, 12), (), (5, 12))
    assert first.snapshots == second.snapshots == [2, 4, 6, 8, 10]
    assert first.waited == second.waited == [(5, False), (12, True)]
    assert first.saved == second.saved == [(5, 5), (10, 10), (12, 12)]
    assert first.written == second.written == [12]  # nothing is in memory that keepers could write
    assert len(first.rows) == STEPS


def test_one_ranks_wish_to_leave_takes_all_ranks_out_at_the_same_step_with_a_checkpoint() -> None:
    ranks = run_ranks(loop, 3, 3)
    assert [hooks.saved for hooks in ranks] == [[(4, 4)]] * 3
    assert {len(hooks.rows) for hooks in ranks} == {4}


@pytest.mark.parametrize("leave_at", [STEPS - 1, STEPS])
def test_a_wish_to_leave_that_is_heard_at_the_last_step_does_not_keep_a_group_from_its_end(leave_at: int) -> None:
    """All ranks formed another group, with newcomers, that had nothing to train; then alone its end was told."""
    for hooks in run_ranks(loop, 2, leave_at):
        assert hooks.saved[-1] == (STEPS, STEPS)
        assert len(hooks.rows) == STEPS


def test_a_gradient_that_is_not_finite_changes_nothing_and_training_goes_on() -> None:
    ranks = run_ranks(loop, 2, None, 1, (), (5, 6, 9))
    for hooks in ranks:
        assert [row["step"] for row in hooks.rows if not math.isfinite(row["grad_norm"])] == [5, 6, 9]
        assert all(weight.isfinite().all() for weight in hooks.weights)
        assert hooks.rows[-1]["loss"] < hooks.rows[0]["loss"]


def test_too_many_in_a_row_end_the_loop_on_all_ranks_at_the_same_step() -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(loop, 2, None, 1, (), (5, 6, 7, 9))
    assert str(caught.value).count("NotFinite: the gradients of 3 steps in a row, up to step 7, are not finite") == 2
