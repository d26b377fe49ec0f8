"""benchmarks/step.py's part about layers: our step on two ranks of a CPU against two peers, all in the same processes.

`fsdp` is the loop that FSDP2's tutorial writes: it averages over ranks, clips with torch, and reads the loss never.
`torchtitan` is torchtitan's own step (step_titan.py), where it is installed; it reads the loss every tenth step. Ours
counts every token of the global batch once, clips in float64, and reports loss, norm and digest of every step.
All shard over the same two processes, with the same rows and dtype, all logits at once, one micro-batch a rank and
step. Sides take turns step by step, each time in another order, so that whatever else the machine does befalls all; a
ratio is that of steps beside each other. Beside the time of a step, the CPU time of its rank: what a side has to
compute, also where other programs keep it waiting. Each round builds all sides anew.
"""

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from benchmarks.bare_llama import BareLlama
from benchmarks.parts import Part
from benchmarks.step_titan import HOW_TO_GET_IT, NAME, is_installed, titan_step
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from regrow.config.schema import Dtype, ModelConfig, OptimConfig, ParallelConfig
from regrow.model.size import num_params
from regrow.parallel.fsdp import build_mesh
from regrow.plan.mesh import plan_mesh
from regrow.train.build import build_step
from support.gloo import run_ranks

RANKS = 2
WARMUP_STEPS = 2
SEQ_LEN = 128
LR = 1e-4
DEADLINE_S = 3600.0
SIDES = ("ours", "fsdp")

Run = Callable[[Tensor], None]
Rounds = dict[str, list[list[float]]]  # by side: of each round, a value a step


def measure_ranks(model: ModelConfig, *, dtype: Dtype, rounds: int, steps: int) -> Part:
    """tokens/s of ours over each peer's."""
    rows = rows_of(model)
    steps = steps if is_small(model) else -(-steps // 3)
    sides = [*SIDES, NAME] if is_installed() else list(SIDES)
    seconds, cpu_s = run_ranks(time_sides, RANKS, model, dtype, rows, rounds, steps, sides, deadline_s=DEADLINE_S)[0]
    medians = {side: statistics.median(itertools.chain(*times)) for side, times in seconds.items()}
    tokens = RANKS * rows * SEQ_LEN
    key = f"cpu/{model.name}/{RANKS}_ranks" + ("" if dtype is Dtype.float32 else f"/{dtype.value}")
    part = Part(
        figures={f"{key}/tokens_per_s": tokens / medians["ours"]},
        spread={f"{key}/tokens_per_s": between(tokens / statistics.median(each) for each in seconds["ours"])},
        settings={
            "num_params": num_params(model),
            "dtype": dtype.value,
            "rows": rows,
            "seq_len": SEQ_LEN,
            "rounds": rounds,
            "steps_per_round": steps,
            "threads_per_rank": 1,
            "step_s": seconds,
            "step_cpu_s": cpu_s,
        },
    )
    for side in sides[1:]:
        for name, taken in (("tokens_per_s", seconds), ("tokens_per_cpu_s", cpu_s)):
            ratios = [
                [theirs / ours for ours, theirs in zip(*both, strict=True)]
                for both in zip(taken["ours"], taken[side], strict=True)
            ]
            name = f"{key}/{name}_ratio_{side}"
            part.figures[name] = statistics.median(itertools.chain(*ratios))
            part.spread[name] = between(statistics.median(each) for each in ratios)
        part.peers[f"{key}/{side}/tokens_per_s"] = tokens / medians[side]
    if NAME not in sides:
        part.settings["left_out"] = HOW_TO_GET_IT
        print(HOW_TO_GET_IT, flush=True)
    return part


def between(values: Iterable[float]) -> list[float]:
    """The least and the most: of rounds' medians, as a step is at the mercy of whatever else the machine does."""
    found = list(values)
    return [min(found), max(found)]


def is_small(model: ModelConfig) -> bool:
    return num_params(model) < 50e6


def rows_of(model: ModelConfig) -> int:
    """Sequences of a rank's step, which takes a core some seconds."""
    return 8 if is_small(model) else 2


def time_sides(
    model: ModelConfig, dtype: Dtype, rows: int, rounds: int, steps: int, sides: Sequence[str]
) -> tuple[Rounds, Rounds]:
    """Seconds of every timed step of this rank, and the CPU seconds of all its threads, by side and round."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    batch = torch.randint(model.vocab_size, (rows, SEQ_LEN + 1), generator=generator)
    seconds: Rounds = {side: [] for side in sides}
    cpu_s: Rounds = {side: [] for side in sides}
    for _ in range(rounds):
        runs = {side: build(side, model, dtype, rows) for side in sides}
        for taken in (seconds, cpu_s):
            for side in sides:
                taken[side].append([])
        for number in range(WARMUP_STEPS + steps):
            first = number % len(sides)
            for side in [*sides[first:], *sides[:first]]:
                # torchtitan collects when it wants to
                (gc.disable if side == NAME else gc.enable)()
                dist.barrier()
                began, worked = time.perf_counter(), time.process_time()
                runs[side](batch)
                if number >= WARMUP_STEPS:
                    seconds[side][-1].append(time.perf_counter() - began)
                    cpu_s[side][-1].append(time.process_time() - worked)
        runs.clear()
        gc.collect()
    return seconds, cpu_s


def build(side: str, model: ModelConfig, dtype: Dtype, rows: int) -> Run:
    if side == NAME:
        device = torch.device("cpu")
        return titan_step(model, device=device, dtype=dtype, seq_len=SEQ_LEN, micro_batch_seqs=rows, lr=LR)
    return (our_step if side == "ours" else plain_step)(model, dtype)


def our_step(config: ModelConfig, dtype: Dtype) -> Run:
    mesh = build_mesh(plan_mesh(RANKS, 1), "cpu")
    parallel = ParallelConfig(dtype=dtype, loss_chunk_tokens=0)
    step = build_step(config, parallel, OptimConfig(), mesh=mesh, device=torch.device("cpu"), seed=0)

    def run(batch: Tensor) -> None:
        step.run([batch], num_micro_batches=1, lr=LR, digest=1).resolve()

    return run


def plain_step(config: ModelConfig, dtype: Dtype) -> Run:
    model = BareLlama(config, SEQ_LEN)
    model.init_weights()
    precision = MixedPrecisionPolicy()
    if dtype is Dtype.bfloat16:
        precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for block in model.blocks:
        fully_shard(block, mp_policy=precision)
    fully_shard(model, mp_policy=precision)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def run(batch: Tensor) -> None:
        logits = model(batch[:, :-1]).float()
        F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return run
