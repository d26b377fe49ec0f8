"""What a step that verifies costs: its time over that of a plain one, in turn, on two gloo ranks of a thread each.

    python benchmarks/verification.py --out benchmarks/results/FILE.json [--quick]

The default model (5.0M parameters), float32, FSDP; a step is of one and of eight micro-batches a rank. A
verification is one more forward and backward with a reduction, and the checksums of what is reduced: expected are 1
and an eighth of a step more. `..._pipeline`: the same of two stages with eight micro-batches, of which it is the first:
a ninth is expected, as filling and draining take as long as one. `checksum_share` is what the checksums alone take of
a pass.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "platform"), str(ROOT / "tests"), str(ROOT)]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from benchmarks.measure import Result, write_result  # noqa: E402

from regrow.config.schema import ModelConfig, OptimConfig, ParallelConfig  # noqa: E402
from regrow.parallel.checksums import checksum  # noqa: E402
from regrow.parallel.fsdp import build_mesh  # noqa: E402
from regrow.train.build import build_step  # noqa: E402
from regrow.train.verify import VerifiedRows  # noqa: E402
from support.gloo import run_ranks  # noqa: E402
from support.training import Training, micro_batches, topology_of  # noqa: E402

RANKS, SEQ_LEN = 2, 128
SHAPES = {"1": (1, 1), "8": (8, 1), "8_pipeline": (8, 2)}  # micro-batches of a rank, ranks of a pipeline


def measure(passes: int, pp: int, pairs: int) -> tuple[list[float], float]:
    """Of this rank: what each verifying step took over the plain one before it; what checksums take of a pass."""
    num_slices = RANKS // pp * passes
    optim = OptimConfig(global_batch_seqs=num_slices, num_slices=num_slices)
    training = Training(ModelConfig(), ParallelConfig(pp=pp), optim, seq_len=SEQ_LEN)
    topology = topology_of(training)
    mesh, rows = build_mesh(topology.mesh, "cpu"), VerifiedRows(topology.batch.most_slices_of_a_pass, SEQ_LEN)
    step = build_step(
        training.model,
        training.parallel,
        optim,
        mesh=mesh,
        device=torch.device("cpu"),
        seed=0,
        stages=topology.stages,
        verified=rows,
    )
    taken: list[float] = []
    for number in range(2 * (pairs + 1)):
        mine, num_micro_batches = micro_batches(training, number)
        dist.barrier()
        begun = time.perf_counter()
        step.run(mine, num_micro_batches=num_micro_batches, lr=1e-3, number=number, verifies=number % 2 == 1).resolve()
        taken.append(time.perf_counter() - begun)
    gradients = [torch.empty(parameter.shape).fill_(1.5) for parameter in step.model.parameters()]
    begun = time.perf_counter()
    for gradient in gradients:
        checksum(gradient)
    plain = taken[2::2]
    share = (time.perf_counter() - begun) / (statistics.median(plain) / passes)
    return [verifying / each for each, verifying in zip(plain, taken[3::2], strict=True)], share


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where to write the JSON")
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    options = parser.parse_args()
    result = Result()
    for name, (passes, pp) in SHAPES.items():
        ratios, share = run_ranks(measure, RANKS, passes, pp, 5 if options.quick else 20, deadline_s=600.0)[0]
        result.add(f"step_s_verifying_vs_plain_{name}", ratios)
        result.add(f"checksum_share_{name}", [share])
    write_result(options.out, result.figures, spread=result.spread, peers=result.peers)


if __name__ == "__main__":
    main()
