"""Parameters that FSDP gathers as float8, half the traffic of bfloat16, at any world size.

torchao has this too, but crashes where the world size does not divide a parameter's rows (pytorch/ao#3982), and keeps
the scale on a tensor object that FSDP replaces on some ranks only, which then wait for the others for ever. Here a
shard is padded with zeros before it travels, the padding is cut off on arrival, and the scale is kept on the module,
where `refresh_float8_scales` puts it.
"""

from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.float8_training_tensor import (
    Float8TrainingTensor,
    GemmInputRole,
    LinearMMConfig,
    hp_tensor_and_scale_to_float8,
)

from regrow.plan.boxes import chunk

# FSDP pads, cuts and moves its shards with these, and must get its own kind of tensor back
_KEEP_WRAPPED = frozenset(
    {
        torch.ops.aten._pin_memory.default,
        torch.ops.aten._to_copy.default,
        torch.ops.aten.as_strided.default,
        torch.ops.aten.clone.default,
        torch.ops.aten.copy_.default,
        torch.ops.aten.detach.default,
        torch.ops.aten.empty_like.default,
        torch.ops.aten.new_zeros.default,
        torch.ops.aten.slice.Tensor,
        torch.ops.aten.split.Tensor,
        torch.ops.aten.view.default,
    }
)


def gather_as_float8(model: nn.Module) -> None:
    """Wrap the weight of every float8 linear, so that FSDP gathers it as float8. On meta, before FSDP."""
    for module in model.modules():
        if isinstance(module, Float8Linear):
            weight = Float8GatheredWeight(
                module.weight.detach(), module.linear_mm_config, module.config.cast_config_weight.target_dtype
            )
            module.weight = nn.Parameter(weight)
            module.float8_gather_scale = None


class Float8GatheredWeight(torch.Tensor):
    """A float32 parameter, or FSDP's shard of one, that is cast to float8 before it is gathered."""

    _tensor: Tensor
    _mm_config: LinearMMConfig
    _float8_dtype: torch.dtype

    @staticmethod
    def __new__(
        cls: type["Float8GatheredWeight"], tensor: Tensor, mm_config: LinearMMConfig, float8_dtype: torch.dtype
    ) -> "Float8GatheredWeight":
        wrapper = torch.Tensor._make_wrapper_subclass(
            cls,
            tensor.size(),
            strides=tensor.stride(),
            storage_offset=tensor.storage_offset(),
            dtype=tensor.dtype,
            layout=tensor.layout,
            device=tensor.device,
            pin_memory=tensor.is_pinned(),
            requires_grad=tensor.requires_grad,
        )
        wrapper._tensor, wrapper._mm_config, wrapper._float8_dtype = tensor, mm_config, float8_dtype
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        first: Float8GatheredWeight | None = None

        def unwrap(weight: Float8GatheredWeight) -> Tensor:
            nonlocal first
            first = first if first is not None else weight
            return weight._tensor

        args, kwargs = pytree.tree_map_only(cls, unwrap, (args, kwargs or {}))
        result = op(*args, **kwargs)
        if op not in _KEEP_WRAPPED or first is None:
            return result
        mm_config, float8_dtype = first._mm_config, first._float8_dtype
        return pytree.tree_map_only(Tensor, lambda tensor: cls(tensor, mm_config, float8_dtype), result)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Float8GatheredWeight({self._tensor})"

    def fsdp_pre_all_gather(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: Any,
    ) -> tuple[tuple[Tensor], tuple[Tensor, torch.Size]]:
        """FSDP's hook before the gather: this rank's rows as float8, padded to as many as every rank sends."""
        scale = module.float8_gather_scale
        assert isinstance(scale, Tensor), "no scale: call refresh_float8_scales once the parameters are set"
        num_rows, shard = len(chunk(outer_size[0], 0, mesh.size())), self._tensor
        if shard.size(0) < num_rows:
            shard = torch.cat([shard, shard.new_zeros((num_rows - shard.size(0), *shard.shape[1:]))])
        cast = hp_tensor_and_scale_to_float8(shard, scale, self._float8_dtype, self._mm_config, GemmInputRole.WEIGHT)
        return (cast._data,), (scale, outer_size)

    def fsdp_post_all_gather(
        self,
        gathered: tuple[Tensor],
        metadata: tuple[Tensor, torch.Size],
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor]] | None:
        """FSDP's hook after the gather: the whole parameter, without padding. `out`: the data is in place already."""
        (data,), (scale, outer_size) = gathered, metadata
        if out is not None:
            whole = out.to_local() if isinstance(out, DTensor) else out
            assert isinstance(whole, Float8TrainingTensor)
            whole._scale = scale
            return None
        rows = data.narrow(0, 0, outer_size[0])
        whole = Float8TrainingTensor(rows, scale, param_dtype, self._mm_config, gemm_input_role=GemmInputRole.WEIGHT)
        return whole, (data,)
