"""The order in which the parallel techniques are applied; each is one file beside this one."""

from contextlib import nullcontext

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import SDPBackend

from regrow.config.schema import AttentionKernel, Float8, ModelConfig, ParallelConfig
from regrow.model.llama import Llama, init_buffers, init_weights
from regrow.parallel.activation_checkpoint import apply_activation_checkpoint
from regrow.parallel.compile import apply_compile
from regrow.parallel.context_parallel import apply_context_parallel
from regrow.parallel.float8 import apply_float8, refresh_float8_scales
from regrow.parallel.fsdp import (
    Connecting,
    apply_fsdp,
    context_group,
    coordinates_of,
    data_parallel_mesh,
    reduce_separately,
    settle_shards,
    tensor_group,
)
from regrow.parallel.tensor_parallel import apply_tensor_parallel
from regrow.plan.pipeline import Stages

KERNELS = {
    AttentionKernel.flash: (SDPBackend.FLASH_ATTENTION,),
    AttentionKernel.cudnn: (SDPBackend.CUDNN_ATTENTION,),
    AttentionKernel.efficient: (SDPBackend.EFFICIENT_ATTENTION,),
}
# torch's own order has FlashAttention 2 first, which does not use what Hopper brought; torchtitan's is this one
ON_HOPPER = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH)


def build_model(
    model_config: ModelConfig,
    parallel_config: ParallelConfig,
    *,
    mesh: DeviceMesh | None,
    device: torch.device | str,
    seed: int | None,
    eot_id: int | None = None,
    stages: Stages | None = None,
    connecting: Connecting = nullcontext,
) -> Llama:
    """A Llama on `device`, its weights drawn from `seed`, ready to train; no rank ever holds more than its shard.

    With `seed=None` its weights are what memory held, for a caller that loads all of them, and calls
    `refresh_float8_scales` then. Without a mesh: whole, on one device, every parameter and all compute in float32.
    `eot_id`, the end-of-text token, is given exactly if the model's attention keeps within documents. In a pipeline it
    is the rank's `stages` of it. Local, but for float8 all-gather and separate reductions, which are collective;
    `connecting` is entered while the latter get a communicator.
    """
    place = coordinates_of(mesh)
    with torch.device("meta"):
        model = Llama(model_config, eot_id, stages, place.along("pp")[0])
    model.place(place)
    model.use_attention_kernels(attention_kernels(parallel_config.attention, torch.device(device)))
    if mesh is not None and (group := tensor_group(mesh)) is not None:
        apply_tensor_parallel(model, group)
    if mesh is not None and (group := context_group(mesh)) is not None:
        apply_context_parallel(model, group)
    if parallel_config.float8 is not Float8.none:
        apply_float8(
            model,
            parallel_config.float8,
            device=torch.device(device),
            gather=mesh is not None,
            power_of_2=parallel_config.float8_power_of_2,
        )
    apply_activation_checkpoint(model, parallel_config.activation_checkpoint)
    if parallel_config.compile:
        apply_compile(model, parallel_config)
    if mesh is not None:
        apply_fsdp(
            model,
            data_parallel_mesh(mesh),
            dtype=parallel_config.dtype,
            reshard_after_forward=parallel_config.reshard_after_forward,
            cpu_offload=parallel_config.cpu_offload,
            prefetch_blocks=parallel_config.prefetch_blocks,
        )
        if parallel_config.separate_reduce:
            reduce_separately(model, mesh, connecting)
    offloads = mesh is not None and parallel_config.cpu_offload
    model.to_empty(device="cpu" if offloads else device)
    if seed is None:
        init_buffers(model)
    else:
        init_weights(model, seed)
    model.rope_Q2 = model.rope_Q2.to(device)
    refresh_float8_scales(model)
    if mesh is not None and parallel_config.float8 is Float8.tensorwise_all_gather:
        settle_shards(model)
    return model


def attention_kernels(chosen: AttentionKernel, device: torch.device) -> tuple[SDPBackend, ...]:
    """The kernels of attention over whole rows, the first that can is used; none: torch's own choice."""
    if chosen is not AttentionKernel.auto:
        return KERNELS[chosen]
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return ON_HOPPER if hopper else ()
