"""What is saved: every tensor of the training state as (box, local memory), and the scalars beside them.

Names: `model/<parameter>`, `optim/exp_avg/<parameter>`, `optim/exp_avg_sq/<parameter>`. Tied weights are one parameter
and so one entry. float8 all-gather weights are saved as their high-precision inner tensor.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from regrow.control.values import Scalar
from regrow.errors import CheckpointError
from regrow.model.llama import Llama
from regrow.optim.adamw import MOMENTS, create_moments
from regrow.plan.boxes import Box, Runs

USER = "user."  # of a callback's scalars


@dataclass
class Progress:
    """Where training stands; all of it functions of the step, and checked on every restore (`restored_progress`)."""

    step: int = 0  # optimizer steps done
    cursor: int = 0  # position of the next sample to train on
    tokens_seen: int = 0  # tokens that contributed to the loss
    user: dict[str, Scalar] = field(default_factory=dict)  # what a callback keeps, see `train.callback`

    def to_dict(self) -> dict[str, Scalar]:
        """Flat, with the callback's as `user.<key>`."""
        own: dict[str, Scalar] = {"step": self.step, "cursor": self.cursor, "tokens_seen": self.tokens_seen}
        return own | user_scalars(self.user)

    @staticmethod
    def of(scalars: Mapping[str, Scalar]) -> "Progress":
        """What `to_dict` gave."""
        user = {key.removeprefix(USER): value for key, value in scalars.items() if key.startswith(USER)}
        return Progress(**{key: int(value) for key, value in scalars.items() if not key.startswith(USER)}, user=user)


def user_scalars(user: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """As they lie beside a run's own."""
    return {f"{USER}{key}": value for key, value in user.items()}


def restored_progress(scalars: Mapping[str, Scalar], *, global_batch_seqs: int) -> Progress:
    """Where a snapshot or checkpoint stands. Raises CheckpointError if that is not where this run would go on."""
    progress = Progress.of(scalars)
    expected = progress.step * global_batch_seqs
    if progress.cursor != expected:
        raise CheckpointError(
            f"the restored state has cursor {progress.cursor} at step {progress.step}; with "
            f"optim.global_batch_seqs={global_batch_seqs} it would be {expected}: samples would be lost or trained on "
            "twice; use the batch that it was trained with, or another run.name"
        )
    return progress


@dataclass(frozen=True)
class Entry:
    """One tensor's box that this rank holds: `memory` is the flat local shard, sharing storage with the live state."""

    box: Box
    memory: Tensor  # [box.num_elements]


def whole_entry(name: str, tensor: Tensor) -> Entry:
    """Of a tensor that is all here, on the host."""
    box = Box.whole(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
    return Entry(box, tensor.contiguous().view(-1))


def training_entries(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, inner_tensor: Callable[[Tensor], Tensor]
) -> list[Entry]:
    """Every tensor of the training state on this rank, in a fixed order. Local; creates moments not there yet.

    `inner_tensor` unwraps float8 parameters. Entries share memory with the live state: writing to them restores it.
    """
    create_moments(optimizer)
    boxes = cast(Llama, model).boxes
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    tensors = [(f"model/{name}", name, parameter) for name, parameter in model.named_parameters()]
    for parameter in _parameters(optimizer):
        name = names[id(parameter)]
        tensors += [(f"optim/{moment}/{name}", name, optimizer.state[parameter][moment]) for moment in MOMENTS]
    entries = [_entry(key, tensor, boxes[name], inner_tensor) for key, name, tensor in tensors]
    return sorted(entries, key=lambda entry: entry.box.name)


def set_optimizer_step(optimizer: torch.optim.Optimizer, step: int) -> None:
    """AdamW's step count, one number for all parameters, which its bias correction needs."""
    create_moments(optimizer)
    for parameter in _parameters(optimizer):
        optimizer.state[parameter]["step"].fill_(float(step))


def reset_moments(optimizer: torch.optim.Optimizer) -> None:
    """Moments as before the first step, in place."""
    for parameter in _parameters(optimizer):
        for moment in MOMENTS:
            optimizer.state[parameter][moment].zero_()


def fill(target: Tensor, runs: Runs, data: memoryview) -> None:
    """Put runs of elements, counted in `data` from its first byte, to their places in a flat tensor on any device."""
    steps = [np.diff(each) for each in (runs.source, runs.target)] if len(runs.length) > 1 else []
    if steps and not any(np.ptp(each) for each in (*steps, runs.length)):  # as columns are
        size = (len(runs.length), int(runs.length[0]))
        to, source = (
            flat.as_strided(size, (int(step[0]), 1), flat.storage_offset() + int(first[0]))
            for flat, first, step in zip(
                (target, _elements(data, target.dtype)), (runs.target, runs.source), steps[::-1], strict=True
            )
        )
        to.copy_(source)
        return
    item = target.element_size()
    for first, at, length in zip(runs.source.tolist(), runs.target.tolist(), runs.length.tolist(), strict=True):
        place, run = target[at : at + length], data[first * item : (first + length) * item]
        if target.is_cpu:
            np.copyto(place.view(torch.uint8).numpy(), np.frombuffer(run, np.uint8))
        else:
            place.copy_(_elements(run, target.dtype))


def bytes_of(tensor: Tensor) -> memoryview | None:
    """Of a flat tensor; None where the host does not have them."""
    memory: memoryview | None = tensor.view(torch.uint8).numpy().data if tensor.is_cpu else None
    return memory


def _elements(data: memoryview, dtype: torch.dtype) -> Tensor:
    with warnings.catch_warnings():  # that they may not be writable
        warnings.simplefilter("ignore")
        return torch.from_numpy(np.frombuffer(data, np.uint8)).view(dtype)


def _entry(name: str, tensor: Tensor, box: Box, inner_tensor: Callable[[Tensor], Tensor]) -> Entry:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    memory = inner_tensor(local.detach())
    box = replace(box, name=name, dtype=str(memory.dtype).removeprefix("torch."))
    assert tuple(memory.shape) == box.sizes, f"{name}: holds {tuple(memory.shape)}, its place is {box}"
    return Entry(box, memory.view(-1))


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
