"""The most memory that something takes: of torch's allocator on CPU, which keeps no count, by its profiler."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def peak_bytes(run: Callable[[], object], device: torch.device | None = None) -> int:
    """Bytes of tensors at the fullest moment of `run`, over what there was before it.

    On CPU what was allocated before is not known: freeing it in `run` counts for nothing.
    """
    if device is not None and device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    held = peak = 0
    for num_bytes in _allocations(profiler):
        held += num_bytes
        peak = max(peak, held)
    return peak


def _allocations(profiler: profile) -> Iterator[int]:
    """What was allocated, and, negative, what was freed, in order of time."""
    assert profiler.profiler is not None
    results = profiler.profiler.kineto_results
    assert results is not None
    events: list[Any] = [event for event in results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        yield event.nbytes()
