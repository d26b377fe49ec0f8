"""benchmarks/step.py's part about the loss: peak memory and time of a step with all logits at once, and in chunks.

Both sides are the same step of the same model with a vocabulary of 32k, in turns. On CPU, memory is what torch's
allocator handed out, by its profiler, in steps that are not timed.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from benchmarks.parts import Part
from torch import Tensor

from regrow.config.schema import Dtype, ModelConfig, OptimConfig, ParallelConfig
from regrow.parallel.fsdp import build_mesh
from regrow.plan.mesh import plan_mesh
from regrow.train.build import build_step
from support.peak_memory import peak_bytes

VOCAB_SIZE = 32768
SHAPES = {"cpu": (8, 256, 256), "cuda": (4, 4096, 2048)}  # rows, tokens of a row, tokens of a chunk


def measure_loss(device: torch.device, *, rounds: int) -> Part:
    """Bytes saved, and time over time. Needs a process group."""
    rows, seq_len, chunk_tokens = SHAPES[device.type]
    model, dtype = ModelConfig(name="loss-32k", vocab_size=VOCAB_SIZE), Dtype.float32
    if device.type == "cuda":
        model = dataclasses.replace(model, dim=2048, num_heads=16, num_kv_heads=8, ffn_dim=7168)
        dtype = Dtype.bfloat16
    batch = torch.randint(VOCAB_SIZE, (rows, seq_len + 1), generator=torch.Generator().manual_seed(0)).to(device)
    sides = {
        chunk: step_of(model, ParallelConfig(dtype=dtype, loss_chunk_tokens=chunk), device)
        for chunk in (0, chunk_tokens)
    }
    peaks: dict[int, int] = {}
    seconds: dict[int, list[float]] = {chunk: [] for chunk in sides}
    for chunk, run in sides.items():
        run(batch)  # moments are allocated
        peaks[chunk] = peak_bytes(partial(run, batch), device)
    for _ in range(rounds):
        for chunk, run in sides.items():
            began = time.perf_counter()
            run(batch)
            seconds[chunk].append(time.perf_counter() - began)
    logits_bytes = rows * seq_len * VOCAB_SIZE * (4 if dtype is Dtype.float32 else 2)
    saved = peaks[0] - peaks[chunk_tokens]
    ratios = [chunked / whole for whole, chunked in zip(seconds[0], seconds[chunk_tokens], strict=True)]
    return Part(
        figures={
            "chunked_loss_bytes_saved": float(saved),
            "chunked_loss_saved_over_logits": saved / logits_bytes,
            "chunked_loss_step_s_ratio": statistics.median(seconds[chunk_tokens]) / statistics.median(seconds[0]),
        },
        spread={"chunked_loss_step_s_ratio": [min(ratios), max(ratios)]},
        settings={
            "model": dataclasses.asdict(model),
            "dtype": dtype.value,
            "rows": rows,
            "seq_len": seq_len,
            "chunk_tokens": chunk_tokens,
            "logits_bytes": logits_bytes,
            "peak_bytes": {"all at once": peaks[0], "in chunks": peaks[chunk_tokens]},
            "rounds": rounds,
        },
    )


def step_of(model_config: ModelConfig, parallel: ParallelConfig, device: torch.device) -> Callable[[Tensor], None]:
    """A step over a group of one that waits until it is done."""
    mesh = build_mesh(plan_mesh(1, 1), device.type)
    step = build_step(model_config, parallel, OptimConfig(), mesh=mesh, device=device, seed=0)

    def run(batch: Tensor) -> None:
        step.run([batch], num_micro_batches=1, lr=1e-4).resolve()

    return run
