"""FSDP2 and HSDP: parameters, gradients and moments sharded by rows over `dp_shard`, copied over `dp_replicate`."""

import datetime
import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from regrow.config.schema import Backend, Dtype
from regrow.errors import ConfigError
from regrow.model.llama import Llama
from regrow.parallel.world import connect_side_by_side, meeting_at, members, new_group, new_groups
from regrow.plan.mesh import ALONE, Coordinates, MeshShape

Connecting = Callable[[], AbstractContextManager[None]]  # while communicators are made, which nothing can break off

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}  # by device type, for init_process_group
CONTEXT = "regrow_context"  # attribute of a mesh: the group of neighbours along `dp_shard` that share rows
CONNECT_S = 600.0  # for the groups of a mesh, where nothing is said
ASYNCHRONOUS = Backend.asynchronous.value  # the backend of `parallel.asynchronous`


def build_mesh(
    shape: MeshShape, device_type: str, *, timeout_s: float | None = None, connect_s: float | None = None
) -> DeviceMesh:
    """The device mesh over all ranks of the default group. Collective: every rank calls it.

    Collectives of its groups fail after `timeout_s`; where it is None, those of groups that are not the default one
    after torch's default, whatever that one's is. Where the default group has no communicator (`parallel.world`), the
    axes' groups are connected here, side by side, within `connect_s`.
    """
    if members() is None:
        mesh = init_device_mesh(device_type, tuple(shape.axes.values()), mesh_dim_names=tuple(shape.axes))
        if shape.cp > 1:
            setattr(mesh, CONTEXT, new_group("cp", shape.ranks_along("cp", dist.get_rank())))
    else:
        mesh = _mesh_of_axes(shape, device_type, datetime.timedelta(seconds=connect_s or timeout_s or CONNECT_S))
    if timeout_s is not None:
        for group in groups_of(mesh):
            set_timeout(timeout_s, group)
    return mesh


def _mesh_of_axes(shape: MeshShape, device_type: str, timeout: datetime.timedelta) -> DeviceMesh:
    rank, names = dist.get_rank(), [*shape.axes, *(["cp"] if shape.cp > 1 else [])]
    groups = new_groups({name: shape.ranks_along(name, rank) for name in names}, timeout)
    context = groups.pop("cp", None)
    of_axes = list(groups.values())
    grid = torch.arange(shape.world_size).view(*shape.axes.values())
    mesh = DeviceMesh.from_group(
        of_axes if len(of_axes) > 1 else of_axes[0],
        device_type,
        mesh=grid if len(of_axes) > 1 else None,
        mesh_dim_names=tuple(groups),
    )
    if context is not None:
        setattr(mesh, CONTEXT, context)
    return mesh


def groups_of(mesh: DeviceMesh) -> list[dist.ProcessGroup]:
    """All that `build_mesh` made for this rank."""
    context = context_group(mesh)
    return [*mesh.get_all_groups(), *([context] if context is not None else [])]


def connect(mesh: DeviceMesh) -> None:
    """Have the communicators of all groups of the mesh made, which backends for devices put off until they are used.

    Collective: they are made side by side, and a first sum over each is on its way when this returns. A rank that is
    late for the first step, or dies before it, would keep the others waiting for an id in the group's store, with the
    store's timeout.
    """
    groups = [each for each in groups_of(mesh) if dist.get_backend(each) != BACKENDS["cpu"]]  # connected when made
    buffer = torch.zeros(1, device=mesh.device_type)
    connect_side_by_side(groups, buffer.device)
    for group in groups:  # in one order on all ranks: kernels that are in a device's way may wait for each other
        dist.all_reduce(buffer, group=group)


def set_timeout(timeout_s: float, group: dist.ProcessGroup | None = None) -> None:
    """Let later collectives of a group, or the default one, fail after so long."""
    distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=timeout_s), group)


def axis_groups(mesh: DeviceMesh) -> list[dist.ProcessGroup]:
    """This rank's group along each axis of several ranks, innermost first: sums over them in turn are over all ranks,
    and no group has to be of all."""
    return [mesh.get_group(name) for name in reversed(axes_of(mesh)) if mesh[name].size() > 1]


def data_parallel_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The ranks that hold the same stages, and the same blocks of what tensor parallelism cuts."""
    names = axes_of(mesh)
    data = tuple(name for name in names if name not in ("tp", "pp"))
    return mesh if data == names else mesh[data]


def tensor_group(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """The ranks that share each block's arithmetic; None where each does its own."""
    return mesh.get_group("tp") if "tp" in axes_of(mesh) else None


def context_group(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """The ranks that share the tokens of each row, in the order of their chunks; None where each has whole rows."""
    group: dist.ProcessGroup | None = getattr(mesh, CONTEXT, None)
    return group


def pipeline_group(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """The ranks of a pipeline, in the order of their stages; None where each has all blocks."""
    return mesh.get_group("pp") if "pp" in axes_of(mesh) else None


def shard_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """The ranks that hold the different shards of one copy of the model."""
    return mesh.get_group("dp_shard")


def replica_group(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """The ranks that hold the same shard, in the order of their replicas; None where there is one replica."""
    return mesh.get_group("dp_replicate") if "dp_replicate" in axes_of(mesh) else None


def axes_of(mesh: DeviceMesh) -> tuple[str, ...]:
    assert mesh.mesh_dim_names is not None
    return mesh.mesh_dim_names


def coordinates_of(mesh: DeviceMesh | None) -> Coordinates:
    """This rank's place on a mesh that `build_mesh` made; None: it is alone."""
    if mesh is None:
        return ALONE
    size = {name: mesh[name].size() for name in axes_of(mesh)}
    context = context_group(mesh)
    shape = MeshShape(
        size.get("dp_replicate", 1),
        size["dp_shard"],
        size.get("tp", 1),
        size.get("pp", 1),
        cp=context.size() if context is not None else 1,
    )
    rank = 0
    for name in axes_of(mesh):
        rank = rank * size[name] + mesh.get_local_rank(name)
    return Coordinates(shape, rank)


def apply_fsdp(
    model: Llama,
    mesh: DeviceMesh,
    *,
    dtype: Dtype,
    reshard_after_forward: bool,
    cpu_offload: bool = False,
    prefetch_blocks: int = 1,
) -> None:
    """Shard the embedding, each block and the output, each gathered as one; the rest belongs to the root, the model or
    each of its stages.

    While one computes, the next `prefetch_blocks` of them are on their way.
    Compute and all-gathers are in `dtype`, parameters and reductions in float32. Tied, the embedding belongs to the
    root, which gathers it once for both its uses. With `cpu_offload`, shards and their gradients stay on the host: the
    parameters are to be made there.
    """
    precision = MixedPrecisionPolicy()
    if dtype is Dtype.bfloat16:
        precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    home = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if cpu_offload else OffloadPolicy()
    shard = partial(fully_shard, mesh=mesh, mp_policy=precision, offload_policy=home)
    if model.embed is not None and not model.config.tied:
        shard(model.embed, reshard_after_forward=reshard_after_forward)
    if model.norm is not None and model.output is not None:
        # backward begins here: freeing these at the end of forward would only gather them again
        shard([model.norm, model.output], reshard_after_forward=False)
    for layer in model.layers:
        shard(layer, reshard_after_forward=reshard_after_forward)
    for root in roots_of(model):
        shard(root)
    for module in fsdp_modules(model):
        module.set_gradient_divide_factor(1.0)  # the loss is divided by the global token count, so gradients add up
        module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
    if prefetch_blocks > 1:
        for root in roots_of(model):
            _prefetch(root, prefetch_blocks)


def _prefetch(model: Any, num_ahead: int) -> None:
    """While one computes, have the next `num_ahead` on their way, not the next alone."""
    ends = [each if isinstance(each, FSDPModule) else None for each in (model.embed, model.output)]
    order: list[Any] = [each for each in (ends[0], *model.layers, ends[1]) if each is not None]
    for number, module in enumerate(order):
        module.set_modules_to_forward_prefetch(order[number + 1 : number + 1 + num_ahead])
        module.set_modules_to_backward_prefetch(order[max(0, number - num_ahead) : number][::-1])


def roots_of(model: nn.Module) -> list[nn.Module]:
    """What runs as one: the model, or each of the stages that it has."""
    return list(getattr(model, "stages", {}).values()) or [model]


def fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    return [module for root in roots_of(model) for module in root.modules() if isinstance(module, FSDPModule)]


def settle_shards(model: torch.nn.Module) -> None:
    """Gather and free everything once; from here on every shard stays at its place in memory. Collective.

    At its first gather FSDP moves shards that are tensor subclasses and need padding. What holds their memory, as
    checkpoints and snapshots do, would go on reading what no longer trains.
    """
    for module in fsdp_modules(model):
        module.unshard()
        module.reshard()


def prepare_pass(model: nn.Module, *, reduce: bool, free: bool, last: bool = True) -> None:
    """Whether the next backward reduces gradients, or adds them to those that this rank keeps whole; whether it frees
    the full parameters behind it, or leaves them for the next forward; and whether it is the last one of all forwards
    so far: they share an order of prefetching."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(reduce)
        model.set_reshard_after_backward(free)
        model.set_is_last_backward(last)


def free_gathered(model: torch.nn.Module) -> None:
    """Return to shards whatever a forward without a backward has left whole; `model.parameters()` are shards again."""
    for module in fsdp_modules(model):
        module.reshard()


def let_go_of_meshes() -> None:
    """Have every device mesh forget its process groups, for when they are given up.

    DTensor's caches keep meshes for ever, and meshes keep groups (torch 2.13, `_pg_registry`): on gloo, connections
    would stay open, and a peer that waits for this rank would wait until its timeout.
    """
    for thing in gc.get_objects():
        if type(thing) is DeviceMesh:
            getattr(thing, "_pg_registry", {}).clear()
            vars(thing).pop(CONTEXT, None)
    propagator = DTensor._op_dispatcher.sharding_propagator
    propagator.propagate_op_sharding.cache_clear()
    gc.collect()


def reduce_separately(model: nn.Module, mesh: DeviceMesh, connecting: Connecting = nullcontext) -> None:
    """Give the reductions of a model that FSDP has sharded over `dp_shard` a group of their own. Collective.

    One communicator runs one collective at a time: in backward, where the next block is gathered while the last one's
    gradients are reduced, each waits for the other. Whether two are faster is for the network to say: off by default.

    It is connected here, while the others of the group are waited for anyway, and fails after as long as the shards'.
    `connecting` is entered for it.
    It is one of torch's groups like the others: `runtime.abort` finds it, and leaving gives it up. Raises
    ConfigError where torch does not know it yet.
    """
    if mesh.size(axis(mesh)) == 1:
        return
    if not hasattr(FSDPModule, "set_separate_reduce_scatter_group"):
        raise ConfigError(f"parallel.separate_reduce=true needs torch 2.13 or later, this is {torch.__version__}")
    with meeting_at(dist.get_process_group_ranks(shard_group(mesh))[0]):
        fsdp_modules(model)[0].set_separate_reduce_scatter_group()
    (made,) = reduce_groups(model)
    device = torch.device(mesh.device_type)
    deadline = shard_group(mesh)._get_backend(device).options._timeout
    distributed_c10d._set_pg_timeout(deadline, made)
    with connecting():
        dist.all_reduce(torch.zeros((), device=device), group=made)


def reduce_groups(model: nn.Module) -> list[dist.ProcessGroup]:
    """The groups, each once, by which the gradients are reduced over `dp_shard`."""
    found = {}
    for module in fsdp_modules(model):
        for parameters in module._get_fsdp_state()._fsdp_param_groups:
            group = parameters._reduce_scatter_process_group
            found[id(group)] = group
    return list(found.values())


def axis(mesh: DeviceMesh) -> int:
    assert mesh.mesh_dim_names is not None
    return mesh.mesh_dim_names.index("dp_shard")
