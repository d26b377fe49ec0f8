"""Pipelines: the bubble, measured and as arithmetic has it; against torch's own schedules, and against FSDP.

    python benchmarks/pipeline.py --out benchmarks/results/FILE.json [--quick]

Two gloo ranks of a thread each, float32, a Llama of 8 blocks and a vocabulary so small that both stages take as long.

`vs_torch_...`: tokens/s of `parallel.pipeline` over those of torch.distributed.pipelining (Schedule1F1B, and with two
stages a rank ScheduleInterleaved1F1B), the same stages, rows and weights, without FSDP or an optimizer, in turn. Losses
and gradients of both are compared first.
`bubble_...`: share of these steps in which a rank does not compute, all it waits for included, over (p-1)/(m v + p-1).
`replayed_...`: the same ratio for more ranks than this machine has cores: every action takes as long as one that was
measured, drawn anew, and messages take no time. What it is above 1 is what unequal actions cost.
`pp_vs_fsdp_...`: tokens/s of a whole training step as two stages over those as two shards, in turn.
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "platform"), str(ROOT / "tests"), str(ROOT)]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from benchmarks.measure import Result, write_result  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B  # noqa: E402

from regrow.accept.tiny import count_up_rows  # noqa: E402
from regrow.config.schema import ModelConfig, OptimConfig, ParallelConfig  # noqa: E402
from regrow.model.llama import Llama, Stage, init_weights  # noqa: E402
from regrow.parallel.fsdp import build_mesh  # noqa: E402
from regrow.parallel.pipeline import Pipeline  # noqa: E402
from regrow.parallel.waits import Waits  # noqa: E402
from regrow.plan.mesh import plan_mesh  # noqa: E402
from regrow.plan.pipeline import Action, Orders, Stages, bubble_share, cut_blocks, orders_of  # noqa: E402
from regrow.train.step import split_rows, whole_loss  # noqa: E402
from support.gloo import run_ranks  # noqa: E402
from support.training import Training, build, micro_batches  # noqa: E402

PP = 2
MODEL = ModelConfig(vocab_size=64, dim=256, num_layers=8, num_heads=4, num_kv_heads=4, ffn_dim=704)
SEQ_LEN, ROWS = 128, 4  # of a micro-batch
SHAPES = [(4, 1), (8, 1), (16, 1), (8, 2)]  # micro-batches, stages of a rank
REPLAYED = [(4, 1, 16), (8, 1, 64), (8, 2, 32), (16, 1, 128)]  # ranks, stages of each, micro-batches


@dataclass
class Engine:
    """One side: a step's forward and backward, on this rank."""

    model: Llama
    run: Callable[[list[Tensor]], Tensor]  # micro-batches [m, T+1]; the sum of the loss, 0 but on the last rank

    def step(self, rows: list[Tensor]) -> tuple[float, Tensor]:
        """Seconds from when both ranks begin until both are done."""
        for parameter in self.model.parameters():
            parameter.grad = None
        dist.barrier()
        begun = time.perf_counter()
        loss = self.run(rows)
        dist.barrier()
        return time.perf_counter() - begun, loss


@dataclass
class Clock:
    """How long each action of this rank took, and the step all of them."""

    forward_s: list[float] = field(default_factory=list)
    backward_s: list[float] = field(default_factory=list)
    counts: bool = False

    @contextmanager
    def action(self, taken: list[float]) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        if self.counts:
            taken.append(time.perf_counter() - begun)


def stages_of(per_rank: int) -> Stages:
    return cut_blocks(MODEL.num_layers, PP, per_rank, before=0.0, behind=0.0)


def bare_model(stages: Stages) -> Llama:
    """This rank's stages: no FSDP, float32."""
    with torch.device("meta"):
        model = Llama(MODEL, None, stages, dist.get_rank())
    model.to_empty(device="cpu")
    init_weights(model, 0)
    return model


def ours(stages: Stages, waits: Waits) -> Engine:
    model = bare_model(stages)
    mesh = build_mesh(plan_mesh(PP, 1, pp=PP), "cpu")
    pipeline = Pipeline(model, stages, mesh, dtype=torch.float32, waits=waits)

    def run(rows: list[Tensor]) -> Tensor:
        loss, pairs = torch.zeros(()), [split_rows(each) for each in rows]

        def score(forward: Callable[..., Tensor], index: int) -> Tensor:
            share = whole_loss(forward, *pairs[index]) / len(rows)
            loss.add_(share.detach())
            return share

        pipeline.run([inputs for inputs, _ in pairs], score, prepare=lambda stage, last: None)
        return loss

    return Engine(model, run)


class _OfTorch(nn.Module):
    """A stage as torch's schedules call it: tokens come by name, to each stage."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage, self.is_first = stage, stage.is_first

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        out: Tensor = self.stage(None if self.is_first else x, tokens)
        return out


def torchs(stages: Stages, num_micro_batches: int) -> Engine:
    model, rank = bare_model(stages), dist.get_rank()
    parts = [
        PipelineStage(_OfTorch(model.stages[number]), number, len(stages.blocks), torch.device("cpu"))
        for number in stages.of_rank(rank)
    ]

    def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
        return whole_loss(lambda tokens: logits, logits, targets) / num_micro_batches

    kind: Any = Schedule1F1B if stages.per_rank == 1 else ScheduleInterleaved1F1B
    schedule = kind(parts[0] if stages.per_rank == 1 else parts, num_micro_batches, loss_fn=loss_fn, scale_grads=False)

    def run(rows: list[Tensor]) -> Tensor:
        losses: list[Tensor] = []
        inputs, targets = split_rows(torch.cat(rows))
        first = [inputs] if rank == 0 else []
        last = {"target": targets, "losses": losses} if rank == PP - 1 else {}
        schedule.step(*first, tokens=inputs, **last)
        return torch.stack(losses).sum() if losses else torch.zeros(())

    return Engine(model, run)


def time_actions(model: Llama, clock: Clock) -> None:
    """Note how long a stage's forwards and backwards take."""

    def timed(whole: Any, taken: list[float]) -> Any:
        def inside(*arguments: Any, **options: Any) -> Any:
            with clock.action(taken):
                return whole(*arguments, **options)

        return inside

    for stage in model.stages.values():
        setattr(stage, "forward", timed(stage.forward, clock.forward_s))  # noqa: B010
    setattr(Tensor, "backward", timed(Tensor.backward, clock.backward_s))  # noqa: B010


@dataclass
class Measured:
    """Of one rank and shape: seconds of steps, ours and torch's in turn; what it waited for in ours; its actions'."""

    ours_s: list[float]
    torchs_s: list[float]
    computing_s: list[float]
    clock: Clock


def measure(num_micro_batches: int, per_rank: int, rounds: int) -> Measured:
    stages, waits, clock = stages_of(per_rank), Waits(torch.device("cpu")), Clock()
    mine, other = ours(stages, waits), torchs(stages, num_micro_batches)
    rows = count_up_rows(0, num_rows=ROWS * num_micro_batches, seq_len=SEQ_LEN, vocab_size=MODEL.vocab_size)
    batches = list(rows.split(ROWS))
    (_, loss), (_, other_loss) = mine.step(batches), other.step(batches)
    torch.testing.assert_close(loss, other_loss, rtol=1e-5, atol=1e-5)
    for (name, one), two in zip(mine.model.named_parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad, rtol=1e-4, atol=1e-6, msg=f"gradients of {name} differ")
    time_actions(mine.model, clock)
    measured = Measured([], [], [], clock)
    for number in range(rounds):
        for side in (mine, other) if number % 2 else (other, mine):
            waits.take()
            clock.counts = side is mine
            before = len(clock.forward_s), len(clock.backward_s)
            seconds, _ = side.step(batches)
            if side is mine:
                measured.ours_s.append(seconds)
                taken = clock.forward_s[before[0] :] + clock.backward_s[before[1] :]
                measured.computing_s.append(sum(taken))
            else:
                measured.torchs_s.append(seconds)
    return measured


def replay(orders: Orders, per_rank: int, took: Callable[[Action], float]) -> float:
    """Share of the ranks' time in which they wait, where messages take no time and no sender waits."""
    last = len(orders) * per_rank - 1
    done: dict[Action, float] = {}
    at, free, busy = [0] * len(orders), [0.0] * len(orders), 0.0
    while at != [len(order) for order in orders]:
        for rank, order in enumerate(orders):
            while at[rank] < len(order) and (ready := _ready(order[at[rank]], last, done)) is not None:
                action, at[rank] = order[at[rank]], at[rank] + 1
                seconds = took(action)
                busy += seconds
                free[rank] = done[action] = max(free[rank], ready) + seconds
    return 1.0 - busy / (len(orders) * max(free))


def _ready(action: Action, last: int, done: dict[Action, float]) -> float | None:
    """When what an action needs is done; None: not yet."""
    if action.is_forward:
        needed = action._replace(stage=action.stage - 1) if action.stage else None
    else:
        needed = action._replace(stage=action.stage + 1) if action.stage < last else action._replace(is_forward=True)
    return 0.0 if needed is None else done.get(needed)


def train_in_turn(rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of whole steps as two stages, and as two shards."""
    optim = OptimConfig(global_batch_seqs=16 * ROWS, num_slices=16)
    sides = [Training(MODEL, ParallelConfig(pp=pp), optim, seq_len=SEQ_LEN) for pp in (PP, 1)]
    steps = [build(each) for each in sides]
    taken: tuple[list[float], list[float]] = [], []
    for number in range(rounds + 1):
        for side in (0, 1) if number % 2 else (1, 0):
            mine, num_micro_batches = micro_batches(sides[side], number)
            dist.barrier()
            begun = time.perf_counter()
            steps[side].run(mine, num_micro_batches=num_micro_batches, lr=1e-3).resolve()
            dist.barrier()
            if number:
                taken[side].append(time.perf_counter() - begun)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where to write the JSON")
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    options = parser.parse_args()
    result, rounds = Result(), 3 if options.quick else 15
    forward_s: list[float] = []
    backward_s: list[float] = []
    for num_micro_batches, per_rank in SHAPES:
        ranks = run_ranks(measure, PP, num_micro_batches, per_rank, rounds, deadline_s=900.0)
        name, bubble = f"m{num_micro_batches}_v{per_rank}", bubble_share(PP, per_rank, num_micro_batches)
        first = ranks[0]
        result.add(f"vs_torch_{name}", [b / a for a, b in zip(first.ours_s, first.torchs_s, strict=True)])
        tokens = num_micro_batches * ROWS * SEQ_LEN
        result.peers[f"torch_tokens_per_s_{name}"] = tokens / statistics.median(first.torchs_s)
        idle = [
            1.0 - statistics.fmean(busy) / seconds
            for seconds, *busy in zip(first.ours_s, *(rank.computing_s for rank in ranks), strict=True)
        ]
        result.add(f"bubble_{name}", [each / bubble for each in idle])
        result.add(f"bubble_share_{name}", idle)
        if per_rank == 1:
            forward_s += [seconds for rank in ranks for seconds in rank.clock.forward_s]
            backward_s += [seconds for rank in ranks for seconds in rank.clock.backward_s]
    for pp, per_rank, num_micro_batches in REPLAYED:
        ratios = []
        for seed in range(rounds):
            dice = random.Random(seed)
            took = lambda action, dice=dice: dice.choice(forward_s if action.is_forward else backward_s)  # noqa: E731
            share = replay(orders_of(pp, per_rank, num_micro_batches), per_rank, took)
            ratios.append(share / bubble_share(pp, per_rank, num_micro_batches))
        result.add(f"replayed_pp{pp}_v{per_rank}_m{num_micro_batches}", ratios)
    stages_s, shards_s = run_ranks(train_in_turn, PP, rounds, deadline_s=900.0)[0]
    result.add("pp_vs_fsdp_m16", [shards / stages for stages, shards in zip(stages_s, shards_s, strict=True)])
    write_result(options.out, result.figures, spread=result.spread, peers=result.peers)


if __name__ == "__main__":
    main()
