"""Steps in flight, and the row of `metrics.jsonl` that each becomes (keys: docs/file-formats.md).

On a device the host is a step ahead, and never waits for it.
"""

import math
import resource
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from regrow.control.verification import Checks
from regrow.parallel.stream import Stream
from regrow.train.hooks import Hooks, Saver
from regrow.train.step import StepResult, StepStats

Batch = TypeVar("Batch")
Result = TypeVar("Result")


@dataclass
class Meter:
    """Measures the time between finished steps on this rank, and what of it was waiting."""

    tokens_per_step: int
    flops_per_token: float
    peak_flops: float  # of all ranks together
    world_size: int
    generation: int
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    snapshot_s: float = 0.0  # since the last finished step
    clock: Callable[[], float] = time.time  # unix time, of rows
    _last: float = field(default_factory=time.perf_counter)
    _data_waits: list[tuple["Future[Any]", "Future[Any]"]] = field(default_factory=list)  # since the last finished step

    def next(self, batches: Iterator[Batch], stream: Stream) -> Batch:
        """The next batch. As long as the stream has a step to do meanwhile, nothing waits for it."""
        asked = stream.submit(self._now)
        batch = next(batches)
        self._data_waits.append((asked, stream.submit(self._now)))
        return batch

    def _now(self) -> Any:
        """On the stream: a time of the host, or an event of the device."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _data_wait_s(self) -> float:
        """Of the batches that came since the last finished step. The stream has come to the last one of them."""
        waits = [(asked.result(), came.result()) for asked, came in self._data_waits]
        self._data_waits.clear()
        if self.device.type != "cuda":
            return math.fsum(came - asked for asked, came in waits)
        for _, came in waits:
            came.synchronize()  # it is right behind the step that has been read
        return math.fsum(asked.elapsed_time(came) for asked, came in waits) / 1e3

    def snapshot_wait(self, wait: Callable[[], float]) -> None:
        """Have the step wait for a snapshot."""
        self.snapshot_s += wait()

    def outside_steps(self, work: Callable[[], Result]) -> Result:
        """Run something whose time belongs to no step, such as validation."""
        begun = time.perf_counter()
        result = work()
        self._last += time.perf_counter() - begun
        return result

    def finish(
        self, row: dict[str, object], result: StepResult, waits: Mapping[str, float] | None = None
    ) -> dict[str, object]:
        """The full row of a step that the host has just seen complete.

        tokens_per_s and mfu count the step without waiting for a snapshot or checkpoint. `waits` is what this rank
        waited in collectives, seconds by group.
        """
        now = time.perf_counter()
        step_s, data_wait_s = now - self._last, self._data_wait_s()
        tokens_per_s = self.tokens_per_step / max(step_s - self.snapshot_s, 1e-9)
        done = {
            **row,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "tokens_per_s": tokens_per_s,
            "mfu": tokens_per_s * self.flops_per_token / self.peak_flops,
            "step_s": step_s,
            "data_wait_s": data_wait_s,
            "snapshot_s": self.snapshot_s,
            "world_size": self.world_size,
            "generation": self.generation,
            "batch_digest": f"{result.digest:016x}",
            "time": self.clock(),
        }
        if waits:
            done |= {f"wait_{group}_s": seconds for group, seconds in waits.items()}
            waited_s = data_wait_s + self.snapshot_s + sum(waits.values())
            done["compute_s"] = max(0.0, step_s - waited_s)
        done["memory_bytes"] = _memory_bytes(self.device)
        self._last, self.snapshot_s = now, 0.0
        return done


def _memory_bytes(device: torch.device) -> int:
    """The most that this process has had of its device's memory, of the host's where that computes."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class NotFinite(Exception):
    """Too many steps in a row had a gradient that is not finite."""


@dataclass
class _Launched:
    step: int
    stats: Future[StepStats]
    row: dict[str, object]
    told: dict[str, float]  # what of it is known beforehand


class InFlight:
    """Launched steps, the oldest first, and what the newest one that was read has shown, the same on every rank."""

    def __init__(self, saver: Saver, hooks: Hooks, meter: Meter, checks: Checks, *, nonfinite_skips: int) -> None:
        """A row is logged, and a snapshot confirmed, once its step was read and vouched for."""
        self._checks = checks
        self.leaving = False  # some rank wants to leave
        self.blocked = False  # some rank has no room for a snapshot
        self._saver, self._hooks, self._meter = saver, hooks, meter
        self._nonfinite_skips, self._skipped = nonfinite_skips, 0
        self._launched: list[_Launched] = []

    def push(self, step: int, stats: Future[StepStats], row: dict[str, float]) -> None:
        told = {"step": step} | row
        self._launched.append(_Launched(step, stats, dict(told), told))

    def settle(self, left: int) -> None:
        """Read and log the oldest steps until only `left` are left. Raises NotFinite, and BrokenStep for one that its
        certificate does not vouch for."""
        while len(self._launched) > left:
            oldest = self._launched.pop(0)
            stats = oldest.stats.result()
            result = stats.resolve()
            self.leaving, self.blocked = self.leaving or result.flag, result.blocked
            self._saver.space(result.spacing)
            self._saver.held_by_all(oldest.step, result.held)
            if result.checksums:
                self._hooks.verified(oldest.step, self._checks.judge(oldest.step, result.checksums))
            told = {"loss": result.loss, "grad_norm": result.grad_norm, "num_tokens": result.num_tokens}
            self._hooks.step_done(oldest.told | told)
            self.waited(self._saver.confirm(oldest.step))
            self._hooks.log(self._meter.finish(oldest.row, result, stats.waits()))
            self._skipped = self._skipped + 1 if result.skipped else 0
            if self._skipped > self._nonfinite_skips:
                steps = f"{self._skipped} steps in a row, up to step {oldest.step},"
                raise NotFinite(f"the gradients of {steps} are not finite")

    def waited(self, seconds: float) -> None:
        """The host has waited for the saver. It costs time only where the device had nothing to do meanwhile."""
        self._meter.snapshot_s += 0.0 if self._launched else seconds

    def validate(self, step: int) -> None:
        """Put the validation loss into the row of the newest step, which is timed without it. Collective."""
        self.settle(1)
        self._launched[0].stats.result().resolve()  # the device has come to its end
        self._launched[0].row["validation_loss"] = self._meter.outside_steps(lambda: self._hooks.validate(step))
