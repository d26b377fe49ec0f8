"""What is saved: every tensor of the training state as (span, local memory), and the scalars beside them.

Names: `model/<parameter>`, `optim/exp_avg/<parameter>`, `optim/exp_avg_sq/<parameter>`. Tied weights are one parameter
and so one entry. float8 all-gather weights are saved as their high-precision inner tensor.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from regrow.errors import CheckpointError
from regrow.model.cut import WHOLE as NOT_CUT
from regrow.model.cut import Cut
from regrow.optim.adamw import MOMENTS, create_moments
from regrow.state.layout import WHOLE, Part, Span, shard_span


@dataclass
class Progress:
    """Where training stands; all of it functions of the step, and checked on every restore (`restored_progress`)."""

    step: int = 0  # optimizer steps done
    cursor: int = 0  # position of the next sample to train on
    tokens_seen: int = 0  # tokens that contributed to the loss

    def to_dict(self) -> dict[str, int]:
        return asdict(self)


def restored_progress(scalars: Mapping[str, int], *, global_batch_seqs: int) -> Progress:
    """Where a snapshot or checkpoint stands. Raises CheckpointError if that is not where this run would go on."""
    progress = Progress(**scalars)
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
    """One tensor's part that this rank holds: `memory` is the flat local shard, sharing storage with the live state."""

    span: Span
    memory: Tensor  # [span.num_elements]


def training_entries(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, inner_tensor: Callable[[Tensor], Tensor]
) -> list[Entry]:
    """Every tensor of the training state on this rank, in a fixed order. Local; creates moments not there yet.

    `inner_tensor` unwraps float8 parameters. Entries share memory with the live state: writing to them restores it.
    """
    create_moments(optimizer)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    cuts: dict[str, Cut] = getattr(model, "cuts", {})
    tensors = [(f"model/{name}", name, parameter) for name, parameter in model.named_parameters()]
    for parameter in _parameters(optimizer):
        name = names[id(parameter)]
        tensors += [(f"optim/{moment}/{name}", name, optimizer.state[parameter][moment]) for moment in MOMENTS]
    entries = [_entry(key, tensor, cuts.get(name, NOT_CUT), inner_tensor) for key, name, tensor in tensors]
    return sorted(entries, key=lambda entry: entry.span.name)


def part_of(mesh: DeviceMesh | None) -> Part:
    """The part of the state that this rank of a mesh holds, a mesh as `parallel.fsdp.build_mesh` makes it."""
    if mesh is None:
        return WHOLE
    assert mesh.mesh_dim_names is not None
    axes = {name: (mesh.get_local_rank(name), mesh[name].size()) for name in mesh.mesh_dim_names}
    return Part(*axes["dp_shard"], *axes.get("dp_replicate", (0, 1)), *axes.get("tp", (0, 1)))


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


def fill(target: Tensor, data: memoryview) -> None:
    """Make these bytes the elements of a flat tensor, on whatever device it is."""
    source = np.frombuffer(data, np.uint8)
    if target.is_cpu:
        np.copyto(target.view(torch.uint8).numpy(), source)
        return
    with warnings.catch_warnings():  # that they may not be writable
        warnings.simplefilter("ignore")
        target.view(torch.uint8).copy_(torch.from_numpy(source))


def _entry(name: str, tensor: Tensor, cut: Cut, inner_tensor: Callable[[Tensor], Tensor]) -> Entry:
    local, shard, num_shards = tensor, 0, 1
    if isinstance(tensor, DTensor):
        local, shards = tensor.to_local(), [p for p in tensor.placements if isinstance(p, Shard)]
        axis = next((i for i, placement in enumerate(tensor.placements) if isinstance(placement, Shard)), None)
        assert [each.dim for each in shards] in ([], [0]), f"{name}: only dim 0 may be sharded, and once"
        if axis is not None:
            shard, num_shards = tensor.device_mesh.get_local_rank(axis), tensor.device_mesh.size(axis)
    memory = inner_tensor(local.detach())
    dtype = str(memory.dtype).removeprefix("torch.")
    whole = Span(name, cut.whole_shape(tuple(tensor.shape)), dtype, 0, 0, cut.blocks)
    span = shard_span(whole, Part(shard, num_shards, block=cut.block, num_blocks=cut.num_blocks))
    assert memory.numel() == span.num_elements, f"{name}: holds {memory.numel()} elements, expected {span}"
    return Entry(span, memory.view(-1))


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
