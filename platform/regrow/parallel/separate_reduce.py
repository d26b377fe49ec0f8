"""Gradients that are reduced by a communicator of their own, beside the one that gathers parameters.

One communicator runs one collective at a time: in backward, where the next block is gathered while the last one's
gradients are reduced, each waits for the other. Whether two are faster is for the network to say: off by default.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from regrow.errors import ConfigError
from regrow.parallel.fsdp import fsdp_modules, shard_group


def reduce_separately(model: nn.Module, mesh: DeviceMesh) -> None:
    """Give the reductions of a model that FSDP has sharded over `dp_shard` a group of their own. Collective.

    It is connected here, while the others of the group are waited for anyway, and fails after as long as the shards'.
    It is one of torch's groups like the others: `parallel.break_off` finds it, and leaving gives it up. Raises
    ConfigError where torch does not know it yet.
    """
    if mesh.size(axis(mesh)) == 1:
        return
    if not hasattr(FSDPModule, "set_separate_reduce_scatter_group"):
        raise ConfigError(f"parallel.separate_reduce=true needs torch 2.13 or later, this is {torch.__version__}")
    fsdp_modules(model)[0].set_separate_reduce_scatter_group()
    (made,) = reduce_groups(model)
    device = torch.device(mesh.device_type)
    deadline = shard_group(mesh)._get_backend(device).options._timeout
    distributed_c10d._set_pg_timeout(deadline, made)
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
