"""float8 linear layers (torchao): which layers, which recipe, and the scales of parameters that travel as float8.

Only the blocks' linears: embedding and output stay in the compute dtype. Where the device has no float8 arithmetic,
torchao emulates it: the same rounding, multiplied in the compute dtype. torchao is imported only when a recipe asks
for it.
"""

import dataclasses
import importlib
import logging
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from regrow.config.schema import Float8
from regrow.errors import ConfigError
from regrow.model.linears import why_not_float8
from regrow.model.llama import Llama

if TYPE_CHECKING:
    from torchao.float8 import Float8LinearConfig

AMAX_FLOOR = 1e-12  # torchao's EPS: keeps the scale of an all-zero parameter finite


def apply_float8(model: Llama, recipe: Float8, *, device: torch.device, gather: bool, power_of_2: bool = False) -> None:
    """Replace the blocks' linear layers by float8 ones. On meta, before everything else.

    `gather`: FSDP will shard the model, so that tensorwise_all_gather can apply; without it that is tensorwise. Raises
    ConfigError where torchao is missing, or for a GPU that has no float8: there it would be emulated, slowly.
    """
    if device.type == "cuda" and not has_float8(device):
        raise ConfigError(
            f"parallel.float8={recipe.value} needs a GPU of compute capability 8.9 or higher, and "
            f"{torch.cuda.get_device_name(device)} has {'.'.join(map(str, torch.cuda.get_device_capability(device)))}; "
            "set parallel.float8=none"
        )
    try:
        torchao_float8 = import_torchao()
    except ImportError as error:
        raise ConfigError(f"parallel.float8={recipe.value} needs torchao ({error}); install it or set none") from error
    torchao_float8.convert_to_float8_training(
        model.layers,
        config=_torchao_config(recipe, emulate=not has_float8(device), power_of_2=power_of_2),
        module_filter_fn=lambda module, _: not why_not_float8(module.out_features, module.in_features),
    )
    if recipe is Float8.tensorwise_all_gather and gather:
        from regrow.parallel.float8_all_gather import gather_as_float8

        gather_as_float8(model)


def has_float8(device: torch.device) -> bool:
    """Whether the device multiplies float8 matrices: NVIDIA from compute capability 8.9 on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


@torch.no_grad()
def refresh_float8_scales(model: nn.Module) -> None:
    """Recompute the scales with which parameters are gathered as float8, in one all-reduce.

    Call it after every change to the parameters: an optimizer step, a load. A stale scale clips silently. Collective
    over the shards of one copy of the model; does nothing for a model that has no such parameters.
    """
    linears: list[Any] = [module for module in model.modules() if hasattr(module, "float8_gather_scale")]
    if not linears:
        return
    assert all(isinstance(linear.weight, DTensor) for linear in linears), "parameters are gathered: call free_gathered"
    shards = [inner_tensor(linear.weight.to_local()) for linear in linears]
    held = [shard for shard in shards if shard.numel()]  # a small parameter leaves some ranks an empty shard
    maxima = iter(torch._foreach_norm(held, float("inf"))) if held else iter(())
    nothing = torch.zeros((), device=shards[0].device)
    amax = torch.stack([next(maxima) if shard.numel() else nothing for shard in shards])
    dist.all_reduce(amax, dist.ReduceOp.MAX, group=linears[0].weight.device_mesh.get_group("dp_shard"))
    largest = torch.finfo(linears[0].config.cast_config_weight.target_dtype).max
    # float64 as in torchao, where eager and compiled division of float32 disagree
    scales = (largest / amax.clamp(min=AMAX_FLOOR).double()).float()
    if linears[0].config.round_scales_to_power_of_2:
        scales = scales.log2().floor().exp2()
    for linear, scale in zip(linears, scales.unbind(), strict=True):
        linear.float8_gather_scale = scale


def inner_tensor(local: Tensor) -> Tensor:
    """The memory behind a rank's part of a parameter: what checkpoints hold, also where it travels as float8."""
    return getattr(local, "_tensor", local)


def import_torchao() -> ModuleType:
    """torchao.float8, without the warnings that its import logs about kernels that are not used here."""
    noisy = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    levels = [logger.level for logger in noisy]
    try:
        for logger in noisy:
            logger.setLevel(logging.ERROR)
        return importlib.import_module("torchao.float8")
    finally:
        for logger, level in zip(noisy, levels, strict=True):
            logger.setLevel(level)


def _torchao_config(recipe: Float8, *, emulate: bool, power_of_2: bool) -> "Float8LinearConfig":
    from torchao.float8 import Float8LinearConfig

    name = "tensorwise" if recipe is Float8.tensorwise_all_gather else recipe.value
    config = Float8LinearConfig.from_recipe_name(name)
    rounds = power_of_2 or config.round_scales_to_power_of_2
    return dataclasses.replace(config, emulate=emulate, round_scales_to_power_of_2=rounds)
