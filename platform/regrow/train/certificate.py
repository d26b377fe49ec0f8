"""What proves to a host that the collectives of a step were real.

On NCCL an abort completes a broken step's collectives with what the buffers held, raises nothing, and an aborting rank
completes its peers' the same way. So every rank adds a number to a step's last sum which no buffer ever held, as
long as a flag is up that its device reads in the stream's order, after all other collectives of the step, and that its
host takes down before it aborts anything. The sum is right at one rank only if each rank's device came to read the flag
while it was up: so no abort had begun on any rank before the collectives of the step had ended there, and each ended
by itself. One rank may therefore vouch for all. It assumes that without an abort NCCL is right or hangs.

The last sum goes over the axes of the mesh in turn, since no group is of all ranks. A part is never more than the
numbers of its ranks, and an aborted axis has what its buffers held in earlier steps: the whole is right only if each
part is (`tests/unit/test_certificate_chain.py`).

A rank that hears that the generation is over believes nothing from then on, whatever the sum: the message that carries
it may have been torn.
"""

import hashlib

import torch
from torch import Tensor


class BrokenStep(Exception):
    """A step whose collectives are not known to have succeeded: nothing of it may be believed."""


class Certificate:
    """Of the steps of one generation, on one of its ranks. `clear` may be called from any thread."""

    def __init__(self, generation: int, world_size: int, device: torch.device) -> None:
        self._generation, self._world_size, self._device = generation, world_size, device
        # pinned: a pageable copy is staged when it is enqueued, not when the device comes to it
        self._alive = torch.ones(1, dtype=torch.float64, pin_memory=device.type == "cuda")
        self._over = False

    def clear(self) -> None:
        """Take the flag down, before anything is aborted."""
        self._alive.zero_()
        self._over = True

    def field(self, step: int) -> Tensor:
        """This rank's share [1] of the sum, float64 on the device: the last thing before the sum."""
        return self._alive.to(self._device, non_blocking=True) * self._number(step)

    def raise_if_over(self) -> None:
        """Raises BrokenStep once the flag is down: nothing more need be launched."""
        if self._over:
            raise BrokenStep(f"generation {self._generation} was over while a step was launched")

    def check(self, step: int, total: float) -> None:
        """Raises BrokenStep unless the sum of all ranks' fields shows that every collective of the step was real."""
        if self._over:
            raise BrokenStep(f"generation {self._generation} was over before step {step} was known to have succeeded")
        if total != self._world_size * self._number(step):
            raise BrokenStep(
                f"a collective of step {step} was broken off on some rank of generation {self._generation}"
            )

    def _number(self, step: int) -> int:
        """1 to 2**32, by generation and step; sums over 2**21 ranks are exact in float64."""
        digest = hashlib.sha256(f"{self._generation} {step}".encode()).digest()
        return int.from_bytes(digest[:4], "big") + 1
