"""What the job costs over a bare PyTorch loop: tokens/s of `jobs.pretrain` on one worker against a plain loop.

    python benchmarks/loop_overhead.py --out benchmarks/results/FILE.json [--quick]

Both train the default model on the same rows with the same batch, passes, optimizer and number of threads, in turn, in
processes of their own. The bare loop has no Ray, no FSDP, no stream, no metrics, no checkpoints. A run's figure is the
median over its steps but the first 15, in which Ray Data starts; the claim is the median of the pairs' ratios.

It is measured twice. With one thread there are cores to spare, as on a GPU's host: this is what the loop costs. With a
thread for every core, Ray's own processes (some 20, a core's tenth together) take their time from training.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "platform"), str(ROOT / "tests"), str(ROOT)]

WARMUP_STEPS = 15


@dataclass(frozen=True)
class Case:
    """What both sides run."""

    steps: int
    threads: int


def job_tokens_per_s(storage: Path, name: str, case: Case) -> float:
    """Median tokens/s of the real job, from its metrics.jsonl."""
    overrides = [
        f"run.storage_path={storage}",
        f"run.name={name}",
        f"train.steps={case.steps}",
        "train.validate_every_steps=0",
        f"cluster.threads_per_worker={case.threads}",
        f"checkpoint.every_steps={case.steps}",
    ]
    subprocess.run([sys.executable, "-m", "jobs.pretrain", *overrides], cwd=ROOT, check=True, timeout=1800)
    rows = [json.loads(line) for line in (storage / name / "metrics.jsonl").read_text().splitlines()]
    return statistics.median(row["tokens_per_s"] for row in rows[WARMUP_STEPS:])


def bare_tokens_per_s(storage: Path, case: Case) -> float:
    """Median tokens/s of the bare loop, run by this script in a process of its own."""
    command = [sys.executable, __file__, "--bare", str(storage)]
    command += ["--steps", str(case.steps), "--threads", str(case.threads)]
    done = subprocess.run(command, cwd=ROOT, check=True, timeout=1800, stdout=subprocess.PIPE, text=True)
    return float(done.stdout.strip().splitlines()[-1])


def bare_loop(storage: Path, case: Case) -> float:
    """The loop that anyone would write first."""
    import numpy as np
    import torch
    import torch.nn.functional as F

    from regrow.config.schema import PretrainConfig
    from regrow.data.prepare.prepare import find_or_prepare
    from regrow.data.read.shards import ShardReader
    from regrow.model.llama import Llama, init_weights

    torch.set_num_threads(case.threads)
    config = PretrainConfig()
    config.data.rows_per_group = 16  # as conf/data/python_docs.yaml, so that both read the same shards
    config.data.validation_fraction = 0.03
    folder, _ = find_or_prepare(config.data, str(storage), progress=lambda stage, done, total: None)
    reader = ShardReader(folder.local_path, "train")
    model = Llama(config.model)
    init_weights(model, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    num_seqs = config.optim.global_batch_seqs  # one pass, as the job's on one worker: conf/model/debug.yaml
    tokens_per_step = num_seqs * config.data.seq_len
    rates = []
    for step in range(case.steps):
        begun = time.perf_counter()
        rows = torch.from_numpy(reader.read(np.arange(step * num_seqs, (step + 1) * num_seqs)).astype("int64"))
        logits = model(rows[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        rates.append(tokens_per_step / (time.perf_counter() - begun))
    return statistics.median(rates[WARMUP_STEPS:])


def compare(storage: Path, case: Case, pairs: int) -> dict[str, dict[str, float | list[float]]]:
    """Medians and ranges of both sides and of their ratio, each pair one after the other."""
    measured: dict[str, list[float]] = {"bare_tokens_per_s": [], "job_tokens_per_s": [], "ratio": []}
    for pair in range(pairs):
        bare = bare_tokens_per_s(storage, case)
        job = job_tokens_per_s(storage, f"threads-{case.threads}-pair-{pair}", case)
        for values, value in zip(measured.values(), (bare, job, job / bare), strict=True):
            values.append(value)
        print(f"{case.threads} threads, pair {pair}: bare {bare:,.0f} tokens/s, job {job:,.0f}, ratio {job / bare:.3f}")
    return {
        key: {"median": statistics.median(values), "range": [min(values), max(values)], "all": values}
        for key, values in measured.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where to write the JSON")
    parser.add_argument("--quick", action="store_true", help="fewer steps a run; still five pairs")
    parser.add_argument("--steps", type=int, help="steps a run")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--threads", type=int, action="append", help="only these; may be given again")
    parser.add_argument("--bare", type=Path, metavar="STORAGE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    steps = options.steps or (25 if options.quick else 45)
    if steps <= WARMUP_STEPS:
        parser.error(f"--steps {steps} must be above {WARMUP_STEPS}, which are not counted")
    cases = [Case(steps, threads) for threads in options.threads or sorted({1, os.cpu_count() or 1})]
    if options.bare:
        print(bare_loop(options.bare, cases[0]))
        return
    if options.out is None:
        parser.error("--out is required")

    from regrow.record.provenance import git_sha, hardware, versions

    with tempfile.TemporaryDirectory(prefix="loop-overhead-") as folder:
        compared = {case.threads: compare(Path(folder), case, options.pairs) for case in cases}
    result = {
        "figures": {f"ratio_{threads}_threads": sides["ratio"]["median"] for threads, sides in compared.items()},
        "sides": {f"{threads}_threads": sides for threads, sides in compared.items()},
        "settings": {"pairs": options.pairs, "steps": steps, "warmup_steps": WARMUP_STEPS},
        "versions": versions(),
        "hardware": hardware(),
        "git": git_sha(),
    }
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result["figures"]))


if __name__ == "__main__":
    main()
