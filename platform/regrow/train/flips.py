"""Bits that a drill flips on this rank, in weights, gradients or activations: to show what finds them.

A drill leaves an order for a process in the folder that `FLIPS` names, in the environment. Without it nothing is here.
"""

import json
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from regrow.parallel.float8 import inner_tensor

FLIPS = "REGROW_FLIP_BITS"
WEIGHTS, GRADIENTS, ACTIVATIONS = "weights", "gradients", "activations"
TOP_BIT = {torch.float32: (torch.int32, 22), torch.bfloat16: (torch.int16, 6), torch.float64: (torch.int64, 51)}

Batch = TypeVar("Batch")


@dataclass(frozen=True)
class Order:
    """What to flip: of weights one bit, once; of the others one in each pass, by this chance."""

    what: str  # WEIGHTS, GRADIENTS or ACTIVATIONS
    chance: float = 1.0

    def leave(self, folder: Path, pid: int) -> None:
        """For a process, which looks before each step. In place of the order before it."""
        temporary = folder / f".{pid}.json"
        temporary.write_text(json.dumps(vars(self)))
        os.replace(temporary, folder / f"{pid}.json")


class BitFlipper:
    """Flips bits of a model on this rank: of what comes out of its blocks, of that one's gradient, of a weight."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._order, self._dice = model, Order("", 0.0), random.Random(0)
        self._norm = model.norm  # None on a rank with earlier stages of a pipeline
        if isinstance(self._norm, nn.Module):
            self._norm.register_forward_pre_hook(self._before_norm)
        self.flipped = 0

    @torch.no_grad()
    def obey(self, order: Order) -> None:
        """From here on; an order for weights is carried out at once, one for the others by a last stage alone."""
        self._order = order
        if order.what != WEIGHTS and self._norm is None:
            print(f"no bit of {order.what} is flipped: this rank has no last stage of a pipeline", flush=True)
        if order.what == WEIGHTS:
            shards = [_local(parameter) for parameter in self._model.parameters() if parameter.ndim > 1]
            shard = max(shards, key=lambda each: each.numel())
            shard.copy_(flipped(shard))
            self.flipped += 1

    def look(self, folder: Path) -> None:
        """For an order that was left for this process."""
        path = folder / f"{os.getpid()}.json"
        if path.exists():
            order = Order(**json.loads(path.read_text()))
            path.unlink()
            self.obey(order)

    def _before_norm(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if self._order.what not in (GRADIENTS, ACTIVATIONS) or self._dice.random() >= self._order.chance:
            return None
        self.flipped += 1
        hidden: Tensor = _Flip.apply(inputs[0], self._order.what == ACTIVATIONS)
        return (hidden, *inputs[1:])


def flipping(batches: Iterator[Batch], model: nn.Module) -> Iterator[Batch]:
    """The same batches; before each, bits are flipped as a drill has ordered, if it is one."""
    folder = os.environ.get(FLIPS)
    if not folder:
        return batches
    flipper = BitFlipper(model)

    def watched() -> Iterator[Batch]:
        for batch in batches:
            flipper.look(Path(folder))
            yield batch

    return watched()


def flipped(tensor: Tensor) -> Tensor:
    """A copy whose first element has another top bit of its fraction: a quarter to a half more or less."""
    copy = tensor.detach().clone(memory_format=torch.contiguous_format)
    words, bit = TOP_BIT[copy.dtype]
    if copy.numel():
        copy.view(-1).view(words)[0] ^= 1 << bit
    return copy


class _Flip(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, activations: bool) -> Tensor:
        ctx.activations = activations
        return flipped(hidden) if activations else hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return (gradient if ctx.activations else flipped(gradient)), None


def _local(parameter: Tensor) -> Tensor:
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return inner_tensor(local)
