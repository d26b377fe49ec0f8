"""torch's functional collectives, which compile with the block around them, over groups by names that stay."""

import contextlib
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _register_process_group, _unregister_process_group
from torch.distributed import _functional_collectives as collectives

# their names from torch 2.13 on, which warns of the old ones
_all_gather = getattr(collectives, "all_gather_single", None) or collectives.all_gather_tensor
_reduce_scatter = getattr(collectives, "reduce_scatter_single", None) or collectives.reduce_scatter_tensor


def give_name(name: Any, group: dist.ProcessGroup) -> None:
    """Have collectives find the group by a name that is the same in every generation: compiled code holds on to it."""
    with contextlib.suppress(RuntimeError):  # there was none before
        _unregister_process_group(name)
    _register_process_group(name, group)


def all_gather(tensor: Tensor, dim: int, name: Any) -> Tensor:
    """The ranks' tensors, one behind the other along `dim`."""
    return collectives.wait_tensor(_all_gather(tensor, dim, name))


def reduce_scatter(tensor: Tensor, dim: int, name: Any) -> Tensor:
    """This rank's part along `dim` of the sum over the ranks."""
    return collectives.wait_tensor(_reduce_scatter(tensor, "sum", dim, name))
