"""Context parallelism as Llama 3 has it (arXiv:2407.21783, 3.3.2): ranks share the tokens of each row.

To everything but attention such a rank is a data-parallel one with other tokens: parameters are sharded over it, its
loss and its gradients add up. In attention it gathers keys and values of whole rows, which are few where query heads
share them, and computes what its own queries see; backward adds up the gradients of keys and values, and leaves each
rank its own.

Which tokens are whose is `plan.share`'s: a chunk from the head and one from the tail of each row. All ranks are given
whole rows of token ids, as documents begin where others' tokens are.

Shape suffixes as in `model.llama`; P is T over the group's size, C half of that.
"""

from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from regrow.model.llama import Gather, Llama
from regrow.parallel.functional import all_gather, give_name, reduce_scatter
from regrow.parallel.waits import SHARD, Waits
from regrow.plan.share import Share

GROUP = "regrow_cp"  # the name by which collectives find this rank's group


def apply_context_parallel(model: Llama, group: dist.ProcessGroup) -> None:
    """Have the model compute this rank's tokens of each row. Local.

    Rows are of a multiple of twice the group's size of tokens.
    """
    give_name(GROUP, group)
    model.share_rows(Share(group.rank(), group.size()), gather_of(group.size()))


def time_gathers(model: Llama, waits: Waits) -> None:
    """Have `waits` know the collectives of attention, of a model whose blocks are not compiled: in those nothing can be
    timed, and what they wait counts as computing, on all ranks that share rows."""
    model.share_rows(model.share, _gather_of(model.share.cp, waits))


@cache
def gather_of(cp: int) -> Gather:
    """The same function at every call: compiled code holds on to it."""
    return _gather_of(cp, None)


def _gather_of(cp: int, waits: Waits | None) -> Gather:
    def gather(k_BPKQ: Tensor, v_BPKQ: Tensor) -> tuple[Tensor, Tensor]:
        gathered: tuple[Tensor, Tensor] = _Gather.apply(k_BPKQ, v_BPKQ, cp, waits)
        return gathered

    return gather


class _Gather(torch.autograd.Function):
    """Keys and values [B, P, K, Q] of this rank's two chunks to [B, T, K, Q] of whole rows, in one all-gather."""

    @staticmethod
    def forward(ctx: Any, k_BPKQ: Tensor, v_BPKQ: Tensor, cp: int, waits: Waits | None) -> tuple[Tensor, Tensor]:
        ctx.cp, ctx.waits = cp, waits
        (k_head, k_tail), (v_head, v_tail) = k_BPKQ.chunk(2, dim=1), v_BPKQ.chunk(2, dim=1)
        mine = torch.stack([k_head, v_head, k_tail, v_tail])  # [4, B, C, K, Q]
        with _timed(waits):
            parts = all_gather(mine, 0, GROUP).unflatten(0, (cp, 2, 2))
        # heads of the first rank to the last, then tails of the last to the first
        order = [(rank, 0) for rank in range(cp)] + [(rank, 1) for rank in reversed(range(cp))]
        k_BTKQ, v_BTKQ = (torch.cat([parts[rank, end, each] for rank, end in order], dim=1) for each in (0, 1))
        return k_BTKQ, v_BTKQ

    @staticmethod
    def backward(ctx: Any, k_BTKQ: Tensor, v_BTKQ: Tensor) -> tuple[Tensor | None, ...]:
        chunks = list(zip(*(each.chunk(2 * ctx.cp, dim=1) for each in (k_BTKQ, v_BTKQ)), strict=True))
        parts = [each for rank in range(ctx.cp) for at in (rank, -1 - rank) for each in chunks[at]]
        with _timed(ctx.waits):
            mine = reduce_scatter(torch.stack(parts), 0, GROUP)  # [4, B, C, K, Q]
        k_head, v_head, k_tail, v_tail = mine.unbind()
        return torch.cat([k_head, k_tail], dim=1), torch.cat([v_head, v_tail], dim=1), None, None


def _timed(waits: Waits | None) -> Any:
    return nullcontext() if waits is None else waits.inside(SHARD)
