"""How long this rank waits in collectives: from its own arrival to each one's end, by the device's own clock.

All ranks of a group leave a collective together, so the rank that waits least is the one that the others wait for. On a
host the clock is the host's. On a GPU it is a pair of events on the stream that the collective is enqueued in, read
once the step is over: nothing waits for them. A wait there may lie beside computation.

Messages between the stages of a pipeline are waited for as collectives of its copy of the model are. Collectives inside
a tensor-parallel layer are not timed: what they wait counts as computing, on all ranks of the unit.
"""

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

from regrow.parallel.checksums import CheckedReduceScatter, GradientSums
from regrow.parallel.fsdp import fsdp_modules

SHARD, REPLICATE, ALL = "shard", "replicate", "all"  # ranks that one waits for: of its copy of the model, of others
GROUPS = (SHARD, REPLICATE, ALL)
KEPT_STEPS = 6  # whose marks are looked at, by `at_a_collective`


@dataclass
class Marks:
    """The collectives of one step: group, arrival and end of each, in the order in which they were enqueued."""

    of_device: bool
    pairs: list[list[Any]] = field(default_factory=list)  # seconds of the host, or events of the device; end last

    def seconds(self) -> dict[str, float]:
        """By group. Of a device, once it has come to the end of the step."""
        waits = dict.fromkeys(GROUPS, 0.0)
        for group, arrived, *ended in self.pairs:
            if not ended:
                continue
            if not self.of_device:
                waits[group] += ended[0] - arrived
            elif ended[0].query():
                waits[group] += arrived.elapsed_time(ended[0]) / 1e3
        return waits


class Waits:
    """Takes the time of a rank's collectives; one thread calls it, any may look."""

    def __init__(self, device: torch.device) -> None:
        self._of_device, self._lock = device.type == "cuda", threading.Lock()
        self._marks = Marks(self._of_device)
        self._messages, self._message_since_ns = 0, 0
        self._newest: deque[Marks] = deque([self._marks], maxlen=KEPT_STEPS)
        self._ready: Any = None  # when the newest gradients were, as a time of `_now`

    @contextmanager
    def inside(self, group: str) -> Iterator[None]:
        """A collective that does not return before it has ended, or before the current stream waits for its end."""
        pair = self.arrive(group)
        yield
        self.leave(pair)

    @contextmanager
    def message(self) -> Iterator[None]:
        """The same for a message of another stage, which torch's flight recorder does not know on gloo."""
        self._message_since_ns = time.time_ns()
        try:
            with self.inside(SHARD):
                yield
        finally:
            self._messages, self._message_since_ns = self._messages + 1, 0

    def at_a_message(self) -> tuple[int, int]:
        """How many messages this rank's host has come past, and since when it waits for one (unix time, ns; 0: it does
        not)."""
        return self._messages, self._message_since_ns

    def arrive(self, group: str) -> list[Any]:
        pair = [group, self._now()]
        self._marks.pairs.append(pair)
        return pair

    def leave(self, pair: list[Any]) -> None:
        pair.append(self._now())
        self._ready = pair[-1]

    def gradients_ready(self) -> None:
        """They are about to be summed: over shards, where there are several, then over the other copies."""
        self._ready = self._now()

    def copies_summed(self) -> None:
        """A sum over the other copies of the model has ended: it began where gradients were ready."""
        self._marks.pairs.append([REPLICATE, self._ready, self._now()])

    def take(self) -> Marks:
        """Those of the step that ends here; the next one begins."""
        taken, self._marks = self._marks, Marks(self._of_device)
        with self._lock:
            self._newest.append(self._marks)
        return taken

    def at_a_collective(self) -> bool:
        """Whether the device is not known to have come to something before its next collective.

        False where it has not arrived at any that it was given: it computes, or a kernel hangs. A host is asked by
        `liveness.heartbeat` itself.
        """
        if not self._of_device:
            return True
        with self._lock:
            pairs = [pair for marks in self._newest for pair in list(marks.pairs)]
        given = [pair for pair in pairs if len(pair) == 3 and not pair[2].query()]
        return not given or any(pair[1].query() for pair in given)

    def _now(self) -> Any:
        if not self._of_device:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class _TimedAllGather(DefaultAllGather):
    def __init__(self, waits: Waits) -> None:
        self._waits = waits

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        with self._waits.inside(SHARD):
            return super().__call__(output_tensor, input_tensor, group, async_op)


class _TimedReduceScatter(CheckedReduceScatter):
    def __init__(self, waits: Waits, sums: GradientSums, *, replicated: bool) -> None:
        super().__init__(sums)
        self._waits, self._replicated = waits, replicated

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The last thing that FSDP asks for before gradients are summed: of shards of one rank it asks no more."""
        buffer = super().allocate(size, dtype=dtype, device=device)
        if self._replicated:
            self._waits.gradients_ready()
        return buffer

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work:
        self._sums.summing(input_tensor)
        with self._waits.inside(SHARD):
            return super().__call__(output_tensor, input_tensor, group, op, async_op)


def time_collectives(model: nn.Module, device: torch.device, *, replicated: bool, sums: GradientSums) -> Waits:
    """Have the collectives of a model that FSDP has sharded timed, and what they add up told to `sums`.

    `replicated`: there are several copies of it.
    """
    waits = Waits(device)
    gather, scatter = _TimedAllGather(waits), _TimedReduceScatter(waits, sums, replicated=replicated)

    def copies_summed(summed: Tensor) -> None:
        sums.replicas_summed()
        waits.copies_summed()

    for module in fsdp_modules(model):
        module.set_custom_all_gather(gather)
        module.set_custom_reduce_scatter(scatter)
        if replicated:
            module.set_all_reduce_hook(copies_summed)
    return waits
