"""benchmarks/step.py's part about layers: our step on two ranks of a CPU against the loop that FSDP2's tutorial writes.

Both shard over the same two processes, in float32, with the same rows, one micro-batch a rank and step. The peer
averages over ranks, clips with torch, and reads the loss never; ours counts every token of the global batch once,
clips in float64, and reports loss, norm and digest. Sides are built in turn, so that neither finds the other's memory.
"""

import gc
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from benchmarks.bare_llama import BareLlama
from benchmarks.parts import Part
from torch import Tensor
from torch.distributed.fsdp import fully_shard

from regrow.config.schema import ModelConfig, OptimConfig, ParallelConfig
from regrow.model.size import num_params
from regrow.parallel.fsdp import build_mesh
from regrow.plan.mesh import plan_mesh
from regrow.testing.gloo import run_ranks
from regrow.train.build import build_step

RANKS = 2
WARMUP_STEPS = 2
SEQ_LEN = 128
LR = 1e-4
DEADLINE_S = 1800.0

Run = Callable[[Tensor], None]


def measure_ranks(model: ModelConfig, *, rounds: int, steps: int) -> Part:
    """tokens/s of ours over the peer's."""
    rows = rows_of(model)
    seconds = run_ranks(time_sides, RANKS, model, rows, rounds, steps, deadline_s=DEADLINE_S)[0]
    ours, bare = statistics.median(seconds["ours"]), statistics.median(seconds["bare"])
    ratios = [theirs / mine for mine, theirs in zip(seconds["ours"], seconds["bare"], strict=True)]
    key, tokens = f"cpu/{model.name}/{RANKS}_ranks", RANKS * rows * SEQ_LEN
    return Part(
        figures={f"{key}/tokens_per_s_ratio_fsdp": bare / ours, f"{key}/tokens_per_s": tokens / ours},
        spread={f"{key}/tokens_per_s_ratio_fsdp": [min(ratios), max(ratios)]},
        peers={f"{key}/fsdp/tokens_per_s": tokens / bare},
        settings={
            "num_params": num_params(model),
            "rows": rows,
            "seq_len": SEQ_LEN,
            "rounds": rounds,
            "steps_per_round": steps,
            "threads_per_rank": 1,
        },
    )


def rows_of(model: ModelConfig) -> int:
    """Sequences of a rank's step, which takes a core some seconds."""
    return 8 if num_params(model) < 50e6 else 2


def time_sides(model: ModelConfig, rows: int, rounds: int, steps: int) -> dict[str, list[float]]:
    """Seconds of every timed step of this rank, by side."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    batch = torch.randint(model.vocab_size, (rows, SEQ_LEN + 1), generator=generator)
    seconds: dict[str, list[float]] = {"ours": [], "bare": []}
    for _ in range(rounds):
        for side, build in (("ours", our_step), ("bare", bare_step)):
            run = build(model)
            for number in range(WARMUP_STEPS + steps):
                dist.barrier()
                began = time.perf_counter()
                run(batch)
                if number >= WARMUP_STEPS:
                    seconds[side].append(time.perf_counter() - began)
            del run
            gc.collect()
    return seconds


def our_step(config: ModelConfig) -> Run:
    mesh = build_mesh(plan_mesh(RANKS, 1), "cpu")
    step = build_step(config, ParallelConfig(), OptimConfig(), mesh=mesh, device=torch.device("cpu"), seed=0)

    def run(batch: Tensor) -> None:
        step.run([batch], num_micro_batches=1, lr=LR, digest=1).resolve()

    return run


def bare_step(config: ModelConfig) -> Run:
    model = BareLlama(config, SEQ_LEN)
    model.init_weights()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def run(batch: Tensor) -> None:
        logits = model(batch[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return run
