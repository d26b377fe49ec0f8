"""The most memory that something takes: of torch's allocator on CPU, which keeps no count, by its profiler."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True)
class Allocation:
    """Memory that was allocated or, negative, freed."""

    time_ns: int
    address: int
    num_bytes: int
    operators: tuple[str, ...]  # in which, outermost first


def peak_bytes(
    run: Callable[[], object], device: torch.device | None = None, *, leave_out: tuple[str, ...] = ()
) -> int:
    """Bytes of tensors at the fullest moment of `run`, over what there was before it.

    On CPU what was allocated before is not known: freeing it in `run` counts for nothing. What operators allocate for
    themselves whose names begin with one of `leave_out` can be left out there.
    """
    if device is not None and device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    held: dict[int, int] = {}
    total = peak = 0
    for each in sorted(_allocations(profiler), key=lambda each: each.time_ns):
        total -= held.pop(each.address, 0)  # it is freed now, or was on a thread that the profiler does not see
        if each.num_bytes < 0:
            continue
        if not any(name.startswith(leave_out) for name in each.operators):
            held[each.address] = each.num_bytes
            total += each.num_bytes
            peak = max(peak, total)
    return peak


def _allocations(profiler: profile) -> Iterator[Allocation]:
    assert profiler.profiler is not None
    results = profiler.profiler.kineto_results
    assert results is not None
    left: list[tuple[Any, tuple[str, ...]]] = [(event, ()) for event in results.experimental_event_tree()]
    while left:
        event, operators = left.pop()
        if event.tag.name == "Allocation":
            fields = event.extra_fields
            yield Allocation(event.start_time_ns, fields.ptr, fields.alloc_size, operators)
        left += [(child, (*operators, event.name)) for child in event.children]
