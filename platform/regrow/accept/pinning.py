"""CUDA's runtime as far as snapshots need it, on a CPU: what it pins is counted, and copies are done at once."""

import contextlib
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from regrow.state.entries import Entry

ALREADY_REGISTERED, NOT_REGISTERED, NO_MEMORY = 712, 713, 2  # errors of cudaHostRegister and cudaHostUnregister


class Runtime:
    """What is pinned now, by address, and how often anything was."""

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}  # bytes
        self.registered, self.ever = 0, 0  # calls, bytes
        self.room: int | None = None  # ranges that it pins at most

    @property
    def num_bytes(self) -> int:
        return sum(self.pinned.values())

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        if any(begin < address + num_bytes and address < begin + size for begin, size in self.pinned.items()):
            return ALREADY_REGISTERED
        if len(self.pinned) == self.room:
            return NO_MEMORY
        self.pinned[address] = num_bytes
        self.registered, self.ever = self.registered + 1, self.ever + num_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        return 0 if self.pinned.pop(address, None) is not None else NOT_REGISTERED


class _OnDevice(torch.Tensor):
    is_cuda = True


def on_a_device(entries: Sequence[Entry]) -> list[Entry]:
    """The same memory, by tensors that say they are on a device."""
    return [Entry(entry.box, entry.memory.as_subclass(_OnDevice)) for entry in entries]


@contextlib.contextmanager
def counting_runtime(runtime: Runtime | None = None) -> Iterator[Runtime]:
    """In CUDA's place; the same one again, where it is given."""
    runtime = runtime or Runtime()
    event = SimpleNamespace(synchronize=lambda: None, record=lambda: None, query=lambda: True)
    stream = SimpleNamespace(wait_stream=lambda other: None, wait_event=lambda event: None)
    stand_ins: dict[str, Any] = {
        "cudart": lambda: runtime,
        "Stream": lambda *_, **__: stream,
        "Event": lambda *_, **__: event,
        "current_stream": lambda *_: stream,
        "stream": lambda stream: contextlib.nullcontext(),
    }
    with mock.patch.multiple(torch.cuda, **stand_ins):
        yield runtime
