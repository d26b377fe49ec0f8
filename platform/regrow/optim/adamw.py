"""AdamW with decoupled decay on matrices, and gradient clipping by a norm that does not depend on the sharding."""

from collections.abc import Callable, Iterable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from regrow.config.schema import Dtype, OptimConfig

MOMENTS = ("exp_avg", "exp_avg_sq")


def build_optimizer(model: nn.Module, config: OptimConfig) -> AdamW:
    """Fused AdamW in two groups: matrices, the embedding among them, decay; norms do not. Set `lr` each step."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    kind = AdamW if config.moments is Dtype.float32 else AdamWInBfloat16
    return kind(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True)


class AdamWInBfloat16(AdamW):
    """Fused AdamW whose moments are bfloat16 between steps; a step computes with float32, a parameter at a time.

    Rounded to nearest, as DeepSeek-V3's are (arXiv:2412.19437). A moment that would change by less than one part in
    256 to 512 stands still, and a step takes at most 1 - beta of it: with a beta2 above 0.996 it can but rise,
    which makes later updates too small for good. `config.check.check_new` has the most that a run may begin with.
    """

    moments_dtype = torch.bfloat16

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        assert closure is None
        create_moments(self)
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state, local = self.state[parameter], _local(parameter.detach())
                kept = [_local(state[moment]) for moment in MOMENTS]
                exp_avg, exp_avg_sq = (moment.float() for moment in kept)
                state["step"] += 1 if found_inf is None else 1 - found_inf.to(state["step"].device)
                torch._fused_adamw_(
                    [getattr(local, "_tensor", local)],  # float8 all-gather wraps it
                    [_local(parameter.grad)],
                    [exp_avg],
                    [exp_avg_sq],
                    [],
                    [state["step"]],
                    lr=group["lr"],
                    beta1=beta1,
                    beta2=beta2,
                    weight_decay=group["weight_decay"],
                    eps=group["eps"],
                    amsgrad=False,
                    maximize=False,
                    grad_scale=None,
                    found_inf=found_inf,
                )
                for target, moment in zip(kept, (exp_avg, exp_avg_sq), strict=True):
                    target.copy_(moment)


def create_moments(optimizer: torch.optim.Optimizer) -> None:
    """Make the zero state that the first step would make, where it is not there yet: something to restore into."""
    dtype: torch.dtype | None = getattr(optimizer, "moments_dtype", None)  # None: the parameter's
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                zeros = partial(torch.zeros_like, parameter, dtype=dtype, memory_format=torch.preserve_format)
                step = torch.zeros((), dtype=torch.float32, device=parameter.device)
                optimizer.state[parameter] = {"step": step, **{moment: zeros() for moment in MOMENTS}}


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def step_unless(optimizer: torch.optim.Optimizer, skip: Tensor) -> None:
    """One step; none where `skip` is true, a bool scalar on the device: parameters and moments stay as they are.

    The optimizer's count of steps goes on either way, as the run's does. The host waits for nothing.
    """
    found = skip.float()
    optimizer.found_inf = found  # type: ignore[attr-defined]  # fused AdamW looks for it, as GradScaler's
    optimizer.step()
    counts = [state["step"] for state in optimizer.state.values()]
    torch._foreach_add_(counts, [found] * len(counts))  # one tensor for all would be read on the host, which waits


@torch.no_grad()
def clip_grad_norm_float64(
    parameters: Iterable[Tensor],
    max_norm: float,
    groups: Iterable[dist.ProcessGroup],
    *,
    counted_elsewhere: Iterable[Tensor] = (),
    all_reduce: Callable[[Tensor, dist.ProcessGroup], object] | None = None,
) -> Tensor:
    """Scale the gradients in place so that their global L2 norm is at most `max_norm`; return the norm before that.

    Collective over `groups`, along each of which ranks hold different parts of the gradients; replicas of HSDP are left
    out, as they hold the same. `counted_elsewhere` are parameters that another rank along them has as well, and counts.
    Accumulated in float64, so it agrees over shardings to float64 rounding where a float32 norm does to 1e-4. Returns a
    float64 scalar where the gradients are; the host waits for nothing. `all_reduce` sums over a group, in place.
    """
    elsewhere = {id(parameter) for parameter in counted_elsewhere}
    grads = [(_local(parameter.grad), id(parameter)) for parameter in parameters if parameter.grad is not None]
    assert grads, "no gradient to clip: run backward first"
    held = [(grad, of) for grad, of in grads if grad.numel()]  # a small parameter leaves some ranks an empty shard
    square = torch.zeros((), dtype=torch.float64, device=grads[0][0].device)
    if counted := [grad for grad, of in held if of not in elsewhere]:
        square = torch.stack(torch._foreach_norm(counted, 2, dtype=torch.float64)).square().sum()
    for group in groups:
        (all_reduce or _sum)(square, group)
    norm = square.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    if held:
        torch._foreach_mul_([grad for grad, _ in held], scale.to(held[0][0].dtype))
    return norm


def _sum(tensor: Tensor, group: dist.ProcessGroup) -> None:
    dist.all_reduce(tensor, group=group)


def _local(grad: Tensor) -> Tensor:
    return grad.to_local() if isinstance(grad, DTensor) else grad
