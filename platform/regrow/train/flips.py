"""Bits that a drill flips on this rank, in weights, gradients or activations, and steps that it makes longer: to show
what finds them. `train.orders` has how it says so."""

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from regrow.model.llama import Llama
from regrow.parallel.float8 import inner_tensor
from regrow.train.orders import ACTIVATIONS, DEVICE, GRADIENTS, ORDERS, SLOW, WEIGHTS, Order, Orders, Slowness

TOP_BIT = {torch.float32: (torch.int32, 22), torch.bfloat16: (torch.int16, 6), torch.float64: (torch.int64, 51)}

Batch = TypeVar("Batch")


class BitFlipper:
    """Flips bits of a model on this rank: of what comes out of its blocks, of that one's gradient, of a weight."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._dice, self._slowness = model, random.Random(0), Slowness()
        self._orders: dict[str, Order] = {}  # by what they are to do
        if isinstance(model.norm, nn.Module):
            model.norm.register_forward_pre_hook(self._before_norm)
        else:  # the rank has earlier stages of a pipeline
            [*_, last] = cast(Llama, model).stages.values()
            last.register_forward_hook(self._behind_stage)
        self.flipped = 0

    @torch.no_grad()
    def obey(self, order: Order) -> None:
        """From here on, beside what it was ordered before; an order for weights is carried out at once."""
        self._orders[order.what] = order
        if order.what == WEIGHTS:
            shards = [_local(parameter) for parameter in self._model.parameters() if parameter.ndim > 1]
            shard = max(shards, key=lambda each: each.numel())
            shard.copy_(flipped(shard))
            self.flipped += 1

    def begin_step(self) -> None:
        """A step is about to begin."""
        self._slowness.step(self._orders.get(SLOW), self._orders.get(DEVICE))

    def _before_norm(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return self._came_out(inputs[0]), *inputs[1:]

    def _behind_stage(self, module: nn.Module, inputs: tuple[Any, ...], out: Tensor) -> Tensor:
        return self._came_out(out)

    def _came_out(self, hidden: Tensor) -> Tensor:
        """What comes out of this rank's last block, as the next one gets it."""
        self._slowness.compute(hidden.shape[:2].numel())
        for order in [self._orders[each] for each in (GRADIENTS, ACTIVATIONS) if each in self._orders]:
            if self._dice.random() < order.chance:
                self.flipped += 1
                hidden = _Flip.apply(hidden, order.what == ACTIVATIONS)
        return hidden


def flipping(batches: Iterator[Batch], model: nn.Module) -> Iterator[Batch]:
    """The same batches; before each, this rank does what a drill has ordered, if it is one."""
    folder = os.environ.get(ORDERS)
    if not folder:
        return batches
    flipper, orders = BitFlipper(model), Orders(Path(folder))

    def watched() -> Iterator[Batch]:
        for batch in batches:
            for order in orders.read():
                flipper.obey(order)
            flipper.begin_step()
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
