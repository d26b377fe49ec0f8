"""The main loop: draw this rank's rows, launch a step, read the one before it, keep the state.

Everything that depends on the topology was decided before it. It knows neither Ray nor Hydra nor storage: batches, the
step, and what to do with results and state are arguments.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from regrow.config.schema import OptimConfig
from regrow.control.verification import Checks
from regrow.data.read.batch import RankBatch
from regrow.optim.schedule import lr_at
from regrow.parallel.stream import Stream, stream_of
from regrow.state.entries import Progress
from regrow.train.hooks import Hooks, Saver
from regrow.train.metrics import InFlight, Meter
from regrow.train.step import TrainStep


@dataclass(frozen=True)
class LoopSettings:
    """Numbers fixed for the loop's life. Steps are counted from 1."""

    last_step: int
    total_tokens: int  # that the schedule spans
    tokens_per_step: int
    seqs_per_step: int
    slice_seqs: int
    num_micro_batches: int  # of every rank, among which it shares its slices evenly
    validate_every_steps: int  # 0: never
    nonfinite_skips: int  # steps in a row that may be skipped
    verify_every_steps: int = 0  # 0: never
    num_units: int = 1
    pp: int = 1
    num_stages: int = 1  # of a unit
    read_at_once: frozenset[int] = frozenset()  # steps that are read before another one is launched, on all ranks


def train(
    step: TrainStep,
    batches: Iterator[RankBatch],
    progress: Progress,
    *,
    optim: OptimConfig,
    settings: LoopSettings,
    meter: Meter,
    saver: Saver,
    hooks: Hooks,
    device: torch.device,
    stream: Stream | None = None,
) -> bool:
    """Train until `last_step`, or until a rank wants to leave; ends with a checkpoint of where it stands.

    Returns whether it left before `last_step`. On a device the host reads step N's loss after launching step N+1, so
    that it never waits for the device; a wish to leave then takes effect one step later, on all ranks at the same one.
    `stream` is where steps run, the device's own where it is None. Raises NotFinite, on all ranks at the same step, and
    BrokenStep for one that its certificate does not vouch for.
    """
    stream = stream or stream_of(device)
    checks = Checks(
        settings.verify_every_steps,
        settings.num_units,
        progress.step + 1,
        settings.last_step,
        settings.pp,
        settings.num_stages,
    )
    in_flight = InFlight(saver, hooks, meter, checks, nonfinite_skips=settings.nonfinite_skips)
    while progress.step < settings.last_step and not in_flight.leaving:
        batch = meter.next(batches, stream)
        assert batch.step == progress.step, f"the stream gave step {batch.step}, training is at {progress.step}"
        number, tokens_seen = progress.step + 1, progress.tokens_seen + settings.tokens_per_step
        lr = lr_at(tokens_seen, total_tokens=settings.total_tokens, config=optim)
        run = partial(
            step.run,
            _micro_batches(batch, settings, device),
            num_micro_batches=settings.num_micro_batches,
            lr=lr,
            flag=hooks.wants_to_leave(),
            blocked=not saver.has_room(number),
            held=saver.is_held(number),
            spacing=saver.spacing(),
            digest=batch.digest(),
            number=number,
            before_update=partial(meter.snapshot_wait, saver.before_update),
            verifies=checks.is_due(number),
        )
        in_flight.push(number, stream.submit(run), {"tokens_seen": tokens_seen, "lr": lr})
        progress.step, progress.tokens_seen = number, tokens_seen
        progress.cursor += settings.seqs_per_step

        if settings.validate_every_steps and _is_due(number, settings):
            in_flight.validate(number)
        is_read = number == settings.last_step or number in settings.read_at_once or not stream.num_ahead
        is_read = is_read or saver.is_checkpoint_due(number)
        in_flight.settle(0 if is_read else stream.num_ahead)
        in_flight.waited(saver.after_step(progress, blocked=in_flight.blocked, read=is_read))

    in_flight.settle(0)
    in_flight.waited(saver.finish(progress, blocked=in_flight.blocked))
    return in_flight.leaving and progress.step < settings.last_step


def _is_due(step: int, settings: LoopSettings) -> bool:
    return step == settings.last_step or step % settings.validate_every_steps == 0


def _micro_batches(batch: RankBatch, settings: LoopSettings, device: torch.device) -> list[torch.Tensor]:
    """The rank's rows as token ids int64 [n, T+1] on the device, a tensor a micro-batch, each of whole slices."""
    rows = torch.from_numpy(batch.rows.astype("int64"))
    if device.type == "cuda":
        rows = rows.pin_memory().to(device, non_blocking=True)
    slices = rows.unflatten(0, (-1, settings.slice_seqs))
    return [part.flatten(0, 1) for part in slices.tensor_split(min(len(slices), settings.num_micro_batches))]
