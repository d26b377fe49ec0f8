"""Attention, float8 and the compiled loss on one GPU against references; a small model against a CPU's."""

import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend

from regrow.accept.claims import NotTested, Report
from regrow.accept.timing import device_s, group_alone
from regrow.accept.tiny import count_up_rows, off_by
from regrow.config.schema import AttentionKernel, Dtype, Float8, ModelConfig, OptimConfig, ParallelConfig
from regrow.model.attention import attend, block_mask, document_starts_BT, mask_B1PT, take_BP
from regrow.model.loss import IGNORE_INDEX
from regrow.parallel.apply import attention_kernels
from regrow.parallel.float8 import import_torchao, inner_tensor
from regrow.parallel.fsdp import build_mesh
from regrow.plan.mesh import plan_mesh
from regrow.plan.share import Share
from regrow.train.build import build_step
from regrow.train.step import build_loss

RTOL = 2e-2  # of bfloat16, eight bits of it, over sums of a few thousand
VOCAB = 128_256  # Llama 3's
CUDA = torch.device("cuda", 0)


def attention(report: Report) -> None:
    """Each kernel against float32, forward and backward, also where the length is odd."""
    for name, kernel, lengths in (
        ("attention_flash", AttentionKernel.flash, (1024, 4096, 1000)),
        ("attention_cudnn", AttentionKernel.cudnn, (1024, 4096, 1000)),
        ("attention_auto_runs", AttentionKernel.auto, (4096, 1000)),
        ("attention_documents", None, (2048,)),
        ("attention_shares", None, (2048,)),
    ):
        cp = 2 if name == "attention_shares" else 1
        with report.about(name):
            worst = max(_attention_error(kernel, length, cp) for length in lengths)
            report.found(name, worst <= RTOL, f"off by {worst:.2%} at worst", "wrong numbers, or NaN")


def attention_speed(report: Report) -> None:
    """What `auto` takes, against each kernel alone."""
    q, k, v = _heads(4, 4096)
    seconds: dict[str, float] = {}
    for kernel in (AttentionKernel.auto, AttentionKernel.flash, AttentionKernel.cudnn):
        try:
            work = partial(_forward_and_backward, q, k, v, attention_kernels(kernel, CUDA))
            seconds[kernel.value] = statistics.median([device_s(work) for _ in range(12)][3:])
        except RuntimeError as error:
            print(f"{kernel}: {error}")
    if len(seconds) < 2:
        raise NotTested("there is only one kernel to choose from")
    best = min(value for name, value in seconds.items() if name != "auto")
    figure = ", ".join(f"{name} {value * 1e3:.2f} ms" for name, value in seconds.items())
    report.found("attention_auto", seconds["auto"] <= 1.05 * best, figure, "a faster kernel is there")


def _forward_and_backward(q: Tensor, k: Tensor, v: Tensor, kernels: Sequence[SDPBackend]) -> None:
    attend(q, k, v, None, kernels).sum().backward()


def _heads(rows: int, length: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of an 8B's block, grouped."""
    torch.manual_seed(0)
    shapes = ((rows, 32, length, 128), (rows, 8, length, 128), (rows, 8, length, 128))
    q, k, v = (torch.randn(shape, device=CUDA, dtype=dtype, requires_grad=True) for shape in shapes)
    return q, k, v


def _attention_error(kernel: AttentionKernel | None, length: int, cp: int = 1) -> float:
    """Of a kernel over whole rows; with None, of flex_attention within documents, by `cp` ranks that share rows, one
    after another, against the whole mask."""
    q, k, v = _heads(1 if kernel else 2, length)
    exact = [each.detach().float().requires_grad_() for each in (q, k, v)]
    if kernel:
        mask, out = None, attend(q, k, v, None, attention_kernels(kernel, CUDA))
    else:
        tokens = torch.randint(0, 300, (2, length), device=CUDA)  # 0 ends a document, some seven a row
        starts, index = document_starts_BT(tokens, eot_id=0), torch.arange(length, device=CUDA)
        mask, outs, order = mask_B1PT(starts, index, length), [], []
        for share in (Share(rank, cp) for rank in range(cp)):
            at = take_BP(index[None], share)[0]
            outs.append(attend(q[:, :, at], k, v, block_mask(take_BP(starts, share), at, length)))
            order.append(at)
        out = torch.cat(outs, dim=2)[:, :, torch.cat(order).argsort()]
    weight = torch.randn_like(out)
    out.backward(weight)
    expected = attend(exact[0], exact[1], exact[2], mask, (SDPBackend.MATH,))
    expected.backward(weight.float())
    pairs = [(out, expected)] + [(got.grad, want.grad) for got, want in zip((q, k, v), exact, strict=True)]
    return max(distance(got, want) for got, want in pairs)


def distance(got: Tensor | None, want: Tensor | None) -> float:
    """Relative to the norm of what is wanted; infinite for what is not finite."""
    assert got is not None
    assert want is not None
    error = float(((got.float() - want.float()).norm() / want.float().norm()).item())
    return error if error == error else float("inf")


def float8(report: Report) -> None:
    """A linear layer of each recipe against torchao's own emulation of it; and training with rowwise compiled."""
    for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp"):
        name = f"float8_{recipe}"
        with report.about(name):
            error, plain = _float8_error(recipe)
            # the same rounding: only the order of sums differs
            figure = f"off by {error:.2%} from emulation, {plain:.2%} from bfloat16"
            report.found(name, error <= RTOL, figure, "the device rounds otherwise than emulation")
    with report.about("float8_rowwise_compiled"):
        losses = train_small(ParallelConfig(dtype=Dtype.bfloat16, float8=Float8.rowwise, compile=True), 20)
        finite = all(loss == loss and abs(loss) != float("inf") for loss in losses)
        figure = f"loss {losses[0]:.3f} to {losses[-1]:.3f} in 20 steps"
        report.found("float8_rowwise_compiled", finite and losses[-1] < losses[0], figure, "NaN (pytorch#150859)")


def _float8_error(recipe: str) -> tuple[float, float]:
    torchao: Any = import_torchao()
    config = torchao.Float8LinearConfig.from_recipe_name(recipe)
    torch.manual_seed(0)
    plain = torch.nn.Linear(1024, 2048, bias=False, device=CUDA, dtype=torch.bfloat16)
    x = torch.randn(512, 1024, device=CUDA, dtype=torch.bfloat16)
    weight = torch.randn(512, 2048, device=CUDA, dtype=torch.bfloat16)
    found = []
    for emulate in (False, True, None):
        model = torch.nn.Sequential(torch.nn.Linear(1024, 2048, bias=False, device=CUDA, dtype=torch.bfloat16))
        model[0].load_state_dict(plain.state_dict())
        if emulate is not None:
            torchao.convert_to_float8_training(model, config=replace(config, emulate=emulate))
        given = x.clone().requires_grad_()
        out = model(given)
        out.backward(weight)
        found.append((out.detach(), given.grad, model[0].weight.grad))
    real, emulated, bfloat16 = found
    return (
        max(distance(got, want) for got, want in zip(real, emulated, strict=True)),
        max(distance(got, want) for got, want in zip(real, bfloat16, strict=True)),
    )


def loss(report: Report) -> None:
    """The loss compiled against eager, in chunks against whole, at Llama 3's vocabulary."""
    torch.manual_seed(0)
    x = torch.randn(2, 1000, 256, device=CUDA, dtype=torch.bfloat16)
    weight = torch.randn(VOCAB, 256, device=CUDA, dtype=torch.bfloat16) / 16
    targets = torch.randint(0, VOCAB, (2, 1000), device=CUDA)
    targets[0, :100] = IGNORE_INDEX

    class Head(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.x, self.weight = torch.nn.Parameter(x.clone()), torch.nn.Parameter(weight.clone())

        def forward(self, tokens: Tensor, head: Any = F.linear) -> Tensor:
            out: Tensor = head(self.x, self.weight)
            return out

    found = {}
    for compiled in (False, True):
        for chunk in (0, 512):
            head = Head()
            function = build_loss(ParallelConfig(compile=compiled, loss_chunk_tokens=chunk), CUDA)
            value = function(head, targets, targets)
            value.backward()
            found[compiled, chunk] = (value.detach(), head.x.grad, head.weight.grad)
    exact = found[False, 0]
    for name, key in (
        ("loss_compiled", (True, 0)),
        ("loss_chunked", (False, 512)),
        ("loss_compiled_chunked", (True, 512)),
    ):
        error = max(distance(got, want) for got, want in zip(found[key], exact, strict=True))
        report.found(
            name, error <= RTOL, f"off by {error:.3%} from eager and whole", "the loss or its gradient differs"
        )


def small_model(report: Report) -> None:
    """30 steps of the debug model: a CPU's float32, this GPU's float32, bfloat16 and float8."""
    cpu = train_small(ParallelConfig(), 30, torch.device("cpu"))
    for name, parallel, most in (
        ("debug_float32", ParallelConfig(), 1e-4),
        ("debug_bfloat16", ParallelConfig(dtype=Dtype.bfloat16), 5e-3),
        ("debug_float8", ParallelConfig(dtype=Dtype.bfloat16, float8=Float8.tensorwise), 1e-2),
    ):
        with report.about(name):
            losses = train_small(parallel, 30)
            worst = max(off_by(got, want) for got, want in zip(losses, cpu, strict=True))
            figure = f"loss off by {worst:.4%} at worst in 30 steps"
            report.found(name, worst <= most, figure, "trains otherwise than a CPU")


def train_small(parallel: ParallelConfig, num_steps: int, device: torch.device = CUDA) -> list[float]:
    """Losses of the debug model in this process alone, on rows that count up with some noise; weights drawn on a CPU,
    as devices draw others."""
    if not dist.is_initialized():
        group_alone()
    torch.backends.cuda.matmul.allow_tf32 = False
    model, optim, cpu = ModelConfig(), OptimConfig(lr=1e-3), torch.device("cpu")
    meshes = {each: build_mesh(plan_mesh(1, 1), each.type) for each in {cpu, device}}
    step = build_step(model, parallel, optim, mesh=meshes[device], device=device, seed=0)
    drawn = build_step(model, ParallelConfig(), optim, mesh=meshes[cpu], device=cpu, seed=0)
    with torch.no_grad():
        for got, want in zip(step.model.parameters(), drawn.model.parameters(), strict=True):
            inner_tensor(_local(got)).copy_(_local(want))
    losses = []
    for number in range(num_steps):
        rows = count_up_rows(number, num_rows=8, seq_len=128, vocab_size=model.vocab_size, noise=0.2).to(device)
        losses.append(step.run([rows], num_micro_batches=1, lr=optim.lr, number=number).resolve().loss)
    return losses


def _local(parameter: Tensor) -> Tensor:
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return local.detach()
