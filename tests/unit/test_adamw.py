import pytest
import torch
from torch import nn

from regrow.accept.tiny import tiny_model
from regrow.config.check import BFLOAT16_BETA
from regrow.config.schema import Dtype, ModelConfig, OptimConfig
from regrow.model.llama import Llama, init_weights
from regrow.optim.adamw import MOMENTS, build_optimizer, clip_grad_norm_float64, set_lr, step_unless


def model(config: ModelConfig | None = None) -> Llama:
    built = Llama(config or tiny_model())
    init_weights(built, 0)
    return built


def test_decay_acts_on_every_matrix_and_on_no_norm():
    llama = model()
    optimizer = build_optimizer(llama, OptimConfig(lr=0.5, weight_decay=0.1))
    before = {name: parameter.detach().clone() for name, parameter in llama.named_parameters()}
    for parameter in llama.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in llama.named_parameters():
        factor = 1 - 0.5 * 0.1 if parameter.ndim >= 2 else 1.0
        torch.testing.assert_close(parameter.detach(), before[name] * factor)


def test_the_learning_rate_reaches_every_group():
    optimizer = build_optimizer(model(), OptimConfig())
    set_lr(optimizer, 0.125)
    assert {group["lr"] for group in optimizer.param_groups} == {0.125}


def test_every_parameter_is_in_exactly_one_group():
    llama = model(tiny_model(tied=True))
    grouped = [id(p) for group in build_optimizer(llama, OptimConfig()).param_groups for p in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in llama.parameters())


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_clipping_equals_torchs_to_float32_and_returns_the_norm_in_float64(max_norm):
    generator = torch.Generator().manual_seed(0)
    ours = [torch.zeros(n, 7, requires_grad=True) for n in (3, 50, 0)]
    theirs = [torch.zeros_like(p, requires_grad=True) for p in ours]
    for mine, other in zip(ours, theirs, strict=True):
        mine.grad = torch.randn(mine.shape, generator=generator)
        other.grad = mine.grad.clone()
    exact = torch.cat([p.grad.double().flatten() for p in ours if p.grad is not None]).norm()
    norm = clip_grad_norm_float64(ours, max_norm, ())
    torch.nn.utils.clip_grad_norm_(theirs, max_norm)
    assert norm.dtype is torch.float64
    assert norm.item() == pytest.approx(exact.item(), rel=1e-14)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-6, atol=0.0)


def test_the_norm_of_millions_of_small_values_is_exact_to_float64():
    parameter = torch.zeros(2**22, requires_grad=True)
    parameter.grad = torch.full_like(parameter, 1e-4)
    want = float(torch.tensor(1e-4)) * 2**11
    # one by one, 2**22 additions round by at most 2**22 * 2**-53 = 5e-10; in float32 the sum stalls far below
    assert clip_grad_norm_float64([parameter], 1e9, ()).item() == pytest.approx(want, rel=5e-10)


@pytest.mark.parametrize("moments", Dtype)
def test_a_skipped_step_changes_nothing_but_the_count(moments):
    llama = model()
    optimizer = build_optimizer(llama, OptimConfig(lr=0.1, moments=moments))

    def step(grad: float) -> None:
        for parameter in llama.parameters():
            parameter.grad = torch.full_like(parameter, grad)
        step_unless(optimizer, ~torch.tensor(grad, dtype=torch.float64).isfinite())

    def state() -> list[torch.Tensor]:
        moments = [each[key] for each in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
        return [tensor.detach().clone() for tensor in [*llama.parameters(), *moments]]

    step(1.0)
    before = state()
    step(float("nan"))
    step(float("inf"))
    assert all(torch.equal(now, then) for now, then in zip(state(), before, strict=True))
    assert {float(each["step"]) for each in optimizer.state.values()} == {3.0}
    step(1.0)
    assert not any(torch.equal(now, then) for now, then in zip(state(), before, strict=True))


def test_moments_in_bfloat16_are_those_of_float32_rounded_after_each_step():
    narrow, wide = model(), model()
    ours = build_optimizer(narrow, OptimConfig(lr=0.01, moments=Dtype.bfloat16))
    theirs = build_optimizer(wide, OptimConfig(lr=0.01))
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        for mine, other in zip(narrow.parameters(), wide.parameters(), strict=True):
            mine.grad = torch.randn(mine.shape, generator=generator)
            other.grad = mine.grad.clone()
        ours.step()
        theirs.step()
        for mine, other in zip(narrow.parameters(), wide.parameters(), strict=True):
            assert torch.equal(mine, other)
            for moment in MOMENTS:
                kept, exact = ours.state[mine][moment], theirs.state[other][moment]
                assert kept.dtype is torch.bfloat16
                exact.copy_(exact.bfloat16())
                assert torch.equal(kept.float(), exact)


def root_of_second_moments(beta2: float, moments: Dtype) -> float:
    """After 200 steps with gradients of size 1 and 800 with those of 0.1: what divides an update."""
    layer = nn.Linear(16, 64, bias=False)
    optimizer = build_optimizer(layer, OptimConfig(lr=1e-6, beta2=beta2, moments=moments))
    generator = torch.Generator().manual_seed(0)
    for scale in [1.0] * 200 + [0.1] * 800:
        layer.weight.grad = scale * torch.randn(layer.weight.shape, generator=generator)
        optimizer.step()
    return optimizer.state[layer.weight]["exp_avg_sq"].float().mean().sqrt().item()


def test_second_moments_in_bfloat16_fall_as_in_float32_up_to_the_beta_that_is_allowed():
    """Beyond, they can but rise: a step changes them by less than half of what bfloat16 tells apart."""
    of = {beta2: [root_of_second_moments(beta2, each) for each in Dtype] for beta2 in (BFLOAT16_BETA, 0.998)}
    exact, rounded = of[BFLOAT16_BETA]
    assert rounded == pytest.approx(exact, rel=0.01)
    exact, rounded = of[0.998]
    assert rounded > 2 * exact
