"""Where steps run: what the host gives to the device, and how far it may be ahead of it."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol, TypeVar

import torch

from regrow.errors import first_line
from regrow.process_log import say

Result = TypeVar("Result")


class Stream(Protocol):
    """The order in which a device does what it is given. `asynchronous.Stream` is another one."""

    num_ahead: int  # steps that the host launches before it reads the result of one

    def submit(self, fn: Callable[[], Result]) -> "Future[Result]":
        """Have `fn` called, after whatever was submitted before it."""

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything is done; whether it was in time, and without an error of the device itself."""


class HostStream:
    """The host computes: everything is done when it is submitted, and raises there."""

    num_ahead = 0

    def submit(self, fn: Callable[[], Result]) -> "Future[Result]":
        done: Future[Result] = Future()
        done.set_result(fn())
        return done

    def drain(self, timeout_s: float) -> bool:
        return True


class CudaStream(HostStream):
    """What is submitted launches kernels; events tell when they are done."""

    num_ahead = 1

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def drain(self, timeout_s: float) -> bool:
        at_rest: Future[bool] = Future()

        def synchronize() -> None:
            try:
                for _ in range(2):  # kernels that a first one's end lets loose
                    torch.cuda.synchronize(self._device)
                at_rest.set_result(True)
            except RuntimeError as error:  # some errors stay with a CUDA process to its end
                say(f"regrow: {self._device} does not come to rest: {first_line(error)}")
                at_rest.set_result(False)

        threading.Thread(target=synchronize, name="drain", daemon=True).start()
        try:
            return at_rest.result(timeout_s)
        except TimeoutError:
            return False


def stream_of(device: torch.device) -> Stream:
    return HostStream() if device.type == "cpu" else CudaStream(device)
