"""Turns what a step returned into a row of `metrics.jsonl` (keys: docs/file-formats.md)."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from regrow.train.step import StepResult

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
    data_wait_s: float = 0.0  # since the last finished step
    snapshot_s: float = 0.0  # since the last finished step
    _last: float = field(default_factory=time.perf_counter)

    def next(self, batches: Iterator[Batch]) -> Batch:
        """The next batch, and how long it took to come."""
        begun = time.perf_counter()
        batch = next(batches)
        self.data_wait_s += time.perf_counter() - begun
        return batch

    def snapshot_wait(self, wait: Callable[[], float]) -> None:
        """Have the step wait for a snapshot."""
        self.snapshot_s += wait()

    def outside_steps(self, work: Callable[[], Result]) -> Result:
        """Run something whose time belongs to no step, such as validation."""
        begun = time.perf_counter()
        result = work()
        self._last += time.perf_counter() - begun
        return result

    def finish(self, row: dict[str, object], result: StepResult) -> dict[str, object]:
        """The full row of a step that the host has just seen complete.

        tokens_per_s and mfu count the step without waiting for a snapshot or checkpoint.
        """
        now = time.perf_counter()
        step_s = now - self._last
        tokens_per_s = self.tokens_per_step / max(step_s - self.snapshot_s, 1e-9)
        done = {
            **row,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "tokens_per_s": tokens_per_s,
            "mfu": tokens_per_s * self.flops_per_token / self.peak_flops,
            "step_s": step_s,
            "data_wait_s": self.data_wait_s,
            "snapshot_s": self.snapshot_s,
            "world_size": self.world_size,
            "generation": self.generation,
            "batch_digest": f"{result.digest:016x}",
            "time": time.time(),
        }
        self._last, self.data_wait_s, self.snapshot_s = now, 0.0, 0.0
        return done
