import re
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from torch import Tensor
from torch._inductor.utils import run_and_get_code
from torch.utils._python_dispatch import TorchDispatchMode

from regrow.accept.tiny import count_up_rows, tiny_model
from regrow.config.schema import OptimConfig, ParallelConfig
from regrow.model.loss import IGNORE_INDEX, chunked_cross_entropy, loss_and_gradient, sum_cross_entropy
from regrow.optim.adamw import build_optimizer
from regrow.parallel.apply import build_model
from regrow.train.step import TrainStep, build_loss, evaluate
from support.peak_memory import peak_bytes
from support.ragged import ragged_model

torch.set_num_threads(1)  # threads that wait for each other cost tiny models more than they save

CPU = torch.device("cpu")


def problem(
    num_tokens: int, dim: int, vocab_size: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """The last norm's output [1, N, D], output weights [V, D], targets [1, N], some of them ignored."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, num_tokens, dim, generator=generator).to(dtype)
    weight = torch.randn(vocab_size, dim, generator=generator).div(dim**0.5).to(dtype)
    targets = torch.randint(vocab_size, (1, num_tokens), generator=generator)
    targets[0, ::5] = IGNORE_INDEX
    return x.requires_grad_(), weight.requires_grad_(), targets


def gradients(loss: Tensor, *inputs: Tensor) -> list[Tensor]:
    return [gradient.double() for gradient in torch.autograd.grad(loss / 7, inputs)]


def exact(x: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, list[Tensor]]:
    """By way of all logits, in float64."""
    inputs = [tensor.detach().double().requires_grad_() for tensor in (x, weight)]
    logits = F.linear(*inputs).flatten(0, 1)
    loss = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
    return loss, gradients(loss, *inputs)


def error(got: Tensor, want: Tensor) -> float:
    return ((got - want).norm() / want.norm()).item()


@pytest.mark.parametrize("chunk_tokens", [1, 7, 16, 50, 1000])
def test_loss_and_gradients_equal_the_unchunked_ones_within_the_rounding_of_float32(chunk_tokens):
    x, weight, targets = problem(50, 24, 97)
    want, want_grads = exact(x, weight, targets)
    whole = sum_cross_entropy(F.linear(x, weight), targets)
    chunked = chunked_cross_entropy(x, weight, targets, chunk_tokens=chunk_tokens)
    for loss in (whole, chunked):
        assert loss.item() == pytest.approx(want.item(), rel=1e-6)
        for got, gradient in zip(gradients(loss, x, weight), want_grads, strict=True):
            assert error(got, gradient) <= 5e-7  # four units in float32's last place


class Factors(TorchDispatchMode):
    """Notes the dimensions of what tensors are multiplied by in place."""

    def __init__(self) -> None:
        super().__init__()
        self.dims: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mul_.Tensor:
            self.dims.append(args[1].dim())
        return func(*args, **(kwargs or {}))


def test_bfloat16_gradients_are_multiplied_by_the_token_count_in_float32():
    """A GPU rounds a factor without dimensions to what it multiplies: 1/7 of a power of two was 0.2% off."""
    loss = chunked_cross_entropy(*problem(64, 32, 97, torch.bfloat16), chunk_tokens=16) / 7
    with Factors() as factors:
        loss.backward()
    assert factors.dims == [1, 1]


def test_bfloat16_gradients_of_many_chunks_are_as_exact_as_those_of_one_pass():
    x, weight, targets = problem(512, 32, 97, torch.bfloat16)
    want, want_grads = exact(x, weight, targets)
    whole = sum_cross_entropy(F.linear(x, weight), targets)
    chunked = chunked_cross_entropy(x, weight, targets, chunk_tokens=8)
    assert chunked.item() == pytest.approx(want.item(), rel=5e-3)
    errors = [
        [error(got, gradient) for got, gradient in zip(gradients(loss, x, weight), want_grads, strict=True)]
        for loss in (whole, chunked)
    ]
    for of_whole, of_chunked in zip(*errors, strict=True):
        assert of_chunked <= 1.5 * of_whole  # one rounding more, of the product with 1/7
    grads = torch.autograd.grad(chunked_cross_entropy(x, weight, targets, chunk_tokens=8), (x, weight))
    assert [gradient.dtype for gradient in grads] == [torch.bfloat16, torch.bfloat16]


def test_tokens_that_are_ignored_give_exactly_nothing():
    x, weight, targets = problem(20, 16, 40)
    targets[:] = IGNORE_INDEX
    loss = chunked_cross_entropy(x, weight, targets, chunk_tokens=6)
    assert loss.item() == 0.0
    for gradient in gradients(loss, x, weight):
        assert torch.equal(gradient, torch.zeros_like(gradient))


def test_a_chunks_gradient_is_that_of_the_plain_loss():
    x, weight, targets = problem(20, 16, 40)
    logits = F.linear(x[0], weight).detach().requires_grad_()
    loss, gradient = loss_and_gradient(logits.detach(), targets[0])
    want = F.cross_entropy(logits, targets[0], ignore_index=IGNORE_INDEX, reduction="sum")
    want.backward()
    torch.testing.assert_close(loss, want.detach())
    torch.testing.assert_close(gradient, logits.grad)


def test_a_second_backward_is_refused_and_not_wrong():
    x, weight, targets = problem(20, 16, 40)
    loss = chunked_cross_entropy(x, weight, targets, chunk_tokens=6)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("model", [tiny_model(), tiny_model(tied=True), ragged_model()], ids=["tiny", "tied", "ragged"])
def test_a_model_trains_the_same_however_its_loss_is_computed(model):
    rows = count_up_rows(0, num_rows=6, seq_len=13, vocab_size=model.vocab_size)
    seen = []
    for chunk_tokens in (0, 1, 10, 2048):
        parallel = ParallelConfig(loss_chunk_tokens=chunk_tokens)
        built = build_model(model, parallel, mesh=None, device="cpu", seed=0)
        step = TrainStep(
            built,
            build_optimizer(built, OptimConfig()),
            max_grad_norm=1.0,
            groups=(),
            shard_group=None,
            loss_function=build_loss(parallel, CPU),
        )
        loss, _ = step.accumulate(list(rows.split(4)), 3)
        seen.append((loss, {name: p.grad for name, p in built.named_parameters() if p.grad is not None}))
    (want, grads), *others = seen
    for loss, other in others:
        assert loss.item() == pytest.approx(want.item(), rel=1e-6)
        assert other.keys() == grads.keys()
        for name, gradient in grads.items():
            assert error(other[name], gradient) <= 2e-6, name


@pytest.mark.slow
@pytest.mark.parametrize("vocab_size", [128, 640])
def test_the_compiled_loss_is_the_same_and_holds_no_float32_copy_of_the_logits(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(48, vocab_size, generator=generator).bfloat16()
    targets = torch.randint(vocab_size, (48,), generator=generator)
    targets[::5] = IGNORE_INDEX
    compiled = torch.compile(loss_and_gradient, dynamic=False)
    with inductor_config.patch(compile_threads=1, fx_graph_cache=False):
        (loss, gradient), codes = run_and_get_code(compiled, logits, targets)
    want, wanted_gradient = loss_and_gradient(logits, targets)
    assert loss.item() == pytest.approx(want.item(), rel=1e-6)
    # in bfloat16, whose last bit another order of additions may flip
    assert torch.allclose(gradient.float(), wanted_gradient.float(), atol=2**-9, rtol=2**-7)
    (code,) = codes
    made = re.findall(r"empty_strided\w*\(\((.*?)\), .*?, (torch\.\w+)\)", code)
    assert (f"48, {vocab_size}", "torch.bfloat16") in made
    assert (f"48, {vocab_size}", "torch.float32") not in made


def test_evaluation_in_chunks_computes_no_gradient(monkeypatch):
    built = build_model(tiny_model(), ParallelConfig(), mesh=None, device="cpu", seed=0)
    rows = count_up_rows(0, num_rows=6, seq_len=12)
    scores = [
        evaluate(
            built,
            list(rows.split(4)),
            num_batches=3,
            groups=(),
            loss_function=build_loss(ParallelConfig(loss_chunk_tokens=chunk_tokens), CPU),
        )
        for chunk_tokens in (0, 10)
    ]
    assert scores[0][1] == scores[1][1] == 72
    assert scores[1][0] == pytest.approx(scores[0][0], rel=1e-6)
    x, weight, targets = problem(20, 16, 40)
    monkeypatch.setattr(torch, "mm", None)  # what gradients are computed with
    with torch.no_grad():
        assert not chunked_cross_entropy(x, weight, targets, chunk_tokens=6).requires_grad


def test_chunks_cut_peak_memory_at_a_vocabulary_of_32k_by_more_than_all_logits_take():
    num_tokens, dim, vocab_size = 512, 64, 32768
    logits_bytes = 4 * num_tokens * vocab_size
    x, weight, targets = problem(num_tokens, dim, vocab_size)

    def whole() -> None:
        sum_cross_entropy(F.linear(x, weight), targets).backward()

    def chunked() -> None:
        chunked_cross_entropy(x, weight, targets, chunk_tokens=64).backward()

    peaks = []
    for run in (whole, chunked):
        x.grad = weight.grad = None
        peaks.append(peak_bytes(run))
    assert peaks[0] >= 2 * logits_bytes  # the meter works
    assert peaks[1] < logits_bytes / 2
    assert peaks[0] - peaks[1] >= 2 * logits_bytes
