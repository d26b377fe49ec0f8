"""Is this device fit to train on, and how fast is it? A matrix product that is checked, and timed by itself.

No collective is in it: in a step, where all ranks wait for each other, a slow one looks like all the others.
"""

import time

import torch
from torch import Tensor

from regrow.forecast.devices import GIB
from regrow.runtime.hardware.gpus import problem, read_gpus

SIZE = {"cpu": 384, "cuda": 4096}  # on CUDA, the most whose sums bfloat16 still holds
TRIES = 3
REPEATS = {"cpu": 1, "cuda": 10}  # of a product in a try: one alone takes 0.2 ms on an H100, and launching it varies
ROWS = 512  # of a product, that are checked at a time: in float64, and in what training leaves of the memory
CHECKS = 16  # vectors: one wrong element is overseen with probability 2 ** -CHECKS
LEAST_FREE = 0.9  # of a GPU's memory, where this process has nothing yet but its context
FREE_S, LOOK_S = 30.0, 0.2  # for a process that was killed to give its memory back, and between looks


class Unfit(Exception):
    """The device computes wrong numbers, or is known to be broken."""


def check_gpu(device: torch.device) -> None:
    """Raises Unfit where NVML knows something against a GPU, or where others have its memory and do not give it back.

    NVML knows nothing of a part of a GPU. A killed process, whose place this one takes, has its memory for a while yet.
    """
    if device.type != "cuda":
        return
    gpus, uuid = read_gpus(), f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    for gpu in gpus:
        if gpu.uuid == uuid and (found := problem(gpu, gpus)):
            raise Unfit(found)
    give_up_at = time.monotonic() + FREE_S
    while True:
        free, total = torch.cuda.mem_get_info(device)
        if free >= LEAST_FREE * total:
            return
        if time.monotonic() > give_up_at:
            raise Unfit(
                f"{(total - free) / GIB:.1f} of {total / GIB:.1f} GiB of {device} are in use, and were for "
                f"{FREE_S:.0f} s; end the processes that nvidia-smi shows there, or set cluster.check_hardware=false"
            )
        time.sleep(LOOK_S)


class Prober:
    """Keeps its matrices, so that a probe costs a few products and nothing else."""

    def __init__(self, device: torch.device) -> None:
        self.device, size = device, SIZE[device.type]
        self._seconds, self._repeats = 0.0, REPEATS[device.type]
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        generator = torch.Generator().manual_seed(0)
        # a third of them zero: every sum is an integer that the dtype holds exactly, in whatever order it is taken
        self.left, self.right = (
            torch.randint(-1, 2, (size, size), generator=generator).to(device, dtype) for _ in range(2)
        )
        self._vectors = (torch.randint(0, 2, (size, CHECKS), generator=generator) * 2 - 1).to(device, torch.float64)
        self._expected = self.left.double() @ (self.right.double() @ self._vectors)

    def probe(self) -> float:
        """Seconds that one product takes, the fastest of a few; of the probe before, where the memory is full.

        Raises Unfit where it is wrong (Freivalds' check: `A (B x) = C x` for random x).
        """
        seconds, product = float("inf"), self.left
        try:
            for _ in range(TRIES):
                self._wait()
                begun = time.perf_counter()
                for _ in range(self._repeats):
                    product = self.left @ self.right
                self._wait()
                seconds = min(seconds, (time.perf_counter() - begun) / self._repeats)
            self.check(product)
        except torch.OutOfMemoryError:  # nothing is wrong with the device, and the next step needs less than it had
            return self._seconds
        self._seconds = seconds
        return seconds

    def check(self, product: Tensor) -> None:
        pairs = zip(product.split(ROWS), self._expected.split(ROWS), strict=True)
        wrong = torch.cat([(rows.double() @ self._vectors != expected).any(dim=1) for rows, expected in pairs])
        if wrong.any():
            raise Unfit(f"{int(wrong.sum())} of {len(product)} rows of a matrix product are wrong on {self.device}")

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
