"""The main loop: draw this rank's slices, step, advance, look, save. Everything topological was decided before it.

Knows neither Ray nor Hydra nor storage: batches, the step and what to do with results are arguments.
"""

import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from regrow.config.schema import OptimConfig
from regrow.data.batch import RankBatch
from regrow.optim.schedule import lr_at
from regrow.parallel.stream import Stream, stream_of
from regrow.state.entries import Progress
from regrow.train.metrics import Meter
from regrow.train.step import StepStats, TrainStep


class NotFinite(Exception):
    """Too many steps in a row had a gradient that is not finite."""


class Hooks(Protocol):
    """What the loop needs done. `save` and `validate` are collective: every rank calls them at the same step."""

    def log(self, row: dict[str, object]) -> None:
        """Take a row of metrics."""

    def wants_to_leave(self) -> bool:
        """Has this rank been asked to leave? Travels to all ranks with the next step's reduction."""

    def has_room(self, num_snapshots: int) -> bool:
        """Whether this rank could begin so many snapshots now. One that some rank has no room for, none begins."""

    def snapshot(self, progress: Progress, *, blocked: bool, last: bool) -> float:
        """Begin to copy the state, which does not change before `await_snapshot`; returns the seconds of waiting.

        Where some rank is `blocked` it waits for room, longest where this is the `last` step, and begins on no rank if
        none comes. Again for the same step: nothing.
        """

    def confirm(self, step: int) -> float:
        """All collectives of a step have succeeded: its snapshot may become visible. Again for the same step: nothing.

        Waits until so much of what came before is safe that a lost node costs no more than it may; the seconds.
        """

    def await_snapshot(self) -> float:
        """The state is about to change: wait for the copy under way; returns the seconds."""

    def save(self, progress: Progress, *, last: bool) -> float:
        """Make a checkpoint of this step; the seconds that training stood still.

        Where its snapshot was not begun, a later one's will do, unless this is the `last`.
        """

    def validate(self, step: int) -> float:
        """Validation loss."""


@dataclass(frozen=True)
class LoopSettings:
    """Numbers fixed for the loop's life. Steps are counted from 1."""

    last_step: int
    total_tokens: int  # that the schedule spans
    tokens_per_step: int
    seqs_per_step: int
    slice_seqs: int
    num_micro_batches: int  # passes of every rank, among which it shares its slices evenly
    snapshot_every_steps: int  # 0: never
    checkpoint_every_steps: int | None
    validate_every_steps: int  # 0: never
    nonfinite_skips: int  # steps in a row that may be skipped


@dataclass
class _Launched:
    """A step whose numbers the host has not read yet."""

    stats: Future[StepStats]
    row: dict[str, object]


def train(
    step: TrainStep,
    batches: Iterator[RankBatch],
    progress: Progress,
    *,
    optim: OptimConfig,
    settings: LoopSettings,
    meter: Meter,
    hooks: Hooks,
    device: torch.device,
    stream: Stream | None = None,
) -> bool:
    """Train until `last_step`, or until a rank wants to leave; ends with a checkpoint of where it stands.

    Returns whether it was asked to leave. On a device the host reads step N's loss after launching step N+1, so that
    it never waits for the device; a wish to leave then takes effect one step later, on all ranks at the same one.
    `stream` is where steps run, the device's own where it is None. Raises NotFinite, on all ranks at the same step, and
    BrokenStep for one that its certificate does not vouch for.
    """
    stream = stream or stream_of(device)
    lag = stream.num_ahead
    launched: list[_Launched] = []
    leaving = blocked = False
    saved_at, skipped = progress.step, 0

    def settle(left: int) -> None:
        """Read and log the oldest launched steps until only `left` are left."""
        nonlocal leaving, blocked, skipped
        while len(launched) > left:
            oldest = launched.pop(0)
            result = oldest.stats.result().resolve()
            leaving, blocked = leaving or result.flag, result.blocked
            waited_s = hooks.confirm(int(str(oldest.row["step"])))
            meter.snapshot_s += 0.0 if launched else waited_s  # else the device trains meanwhile
            hooks.log(meter.finish(oldest.row, result))
            skipped = skipped + 1 if result.skipped else 0
            if skipped > settings.nonfinite_skips:
                step_number = oldest.row["step"]
                raise NotFinite(f"the gradients of {skipped} steps in a row, up to step {step_number}, are not finite")

    def await_snapshot() -> None:
        meter.snapshot_s += hooks.await_snapshot()

    def keep(*, save: bool, last: bool) -> None:
        """The state of this step is kept in memory, and in storage if it is to be saved."""
        nonlocal saved_at
        waited_s = hooks.snapshot(progress, blocked=blocked, last=last)
        meter.snapshot_s += 0.0 if launched else waited_s
        if not launched:  # the host has seen this step succeed
            meter.snapshot_s += hooks.confirm(progress.step)
        if save:  # after its row is logged, so that a committed step's row is never missing
            meter.snapshot_s += hooks.save(progress, last=last)
            saved_at = progress.step

    while progress.step < settings.last_step and not leaving:
        waited = time.perf_counter()
        batch = next(batches)
        meter.data_wait_s += time.perf_counter() - waited
        assert batch.step == progress.step, f"the stream gave step {batch.step}, training is at {progress.step}"

        lr = lr_at(progress.tokens_seen + settings.tokens_per_step, total_tokens=settings.total_tokens, config=optim)
        run = partial(
            step.run,
            _micro_batches(batch, settings, device),
            num_micro_batches=settings.num_micro_batches,
            lr=lr,
            flag=hooks.wants_to_leave(),
            # read `lag` steps later: this step's snapshot may have been begun by then
            blocked=not hooks.has_room(1 + (lag if _is_due(progress.step + 1, settings.snapshot_every_steps) else 0)),
            digest=batch.digest(),
            number=progress.step + 1,
            before_update=await_snapshot,
        )
        stats = stream.submit(run)
        progress.step += 1
        progress.cursor += settings.seqs_per_step
        progress.tokens_seen += settings.tokens_per_step
        launched.append(_Launched(stats, {"step": progress.step, "tokens_seen": progress.tokens_seen, "lr": lr}))

        last = progress.step == settings.last_step
        save_due = last or _is_due(progress.step, settings.checkpoint_every_steps)
        validate_due = settings.validate_every_steps and (last or _is_due(progress.step, settings.validate_every_steps))
        if validate_due:
            settle(1)
            launched[0].stats.result().resolve()  # the device is done with this step: what follows is timed on its own
            launched[0].row["validation_loss"] = meter.outside_steps(lambda: hooks.validate(progress.step))
        settle(0 if save_due else lag)
        if save_due or (_is_due(progress.step, settings.snapshot_every_steps) and not blocked):
            keep(save=save_due, last=last)

    settle(0)
    if saved_at != progress.step:
        keep(save=True, last=True)
    return leaving


def _is_due(step: int, every_steps: int | None) -> bool:
    return bool(every_steps) and step % (every_steps or 1) == 0


def _micro_batches(batch: RankBatch, settings: LoopSettings, device: torch.device) -> list[torch.Tensor]:
    """The rank's rows as token ids int64 [n, L+1] on the device, a tensor a pass, each of whole slices."""
    rows = torch.from_numpy(batch.rows.astype("int64"))
    if device.type == "cuda":
        rows = rows.pin_memory().to(device, non_blocking=True)
    slices = rows.unflatten(0, (-1, settings.slice_seqs))
    return [part.flatten(0, 1) for part in slices.tensor_split(min(len(slices), settings.num_micro_batches))]
