"""What the job costs over a bare PyTorch loop: tokens/s of `jobs.pretrain` on one worker against a plain loop.

    python benchmarks/loop_overhead.py --out benchmarks/results/FILE.json [--quick]

Both train the same model on the same rows with the same batch, micro-batches, optimizer and number of threads, in turn,
in processes of their own. The bare loop has no Ray, no FSDP, no stream, no metrics, no checkpoints. A run's figure is
the median over its steps but the first five; the claim is the median of the pairs' ratios. Micro-batches have 512
tokens (`--seqs` 48): FSDP's hooks cost a fixed time a pass, which shows in the 128-token passes of the default job.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "platform"), str(ROOT)]

WARMUP_STEPS = 5


def job_tokens_per_s(storage: Path, name: str, steps: int, seqs: int) -> float:
    """Median tokens/s of the real job, from its metrics.jsonl."""
    overrides = [
        f"run.storage_path={storage}",
        f"run.name={name}",
        f"train.steps={steps}",
        "train.validate_every_steps=0",
        "cluster.max_workers=1",
        f"checkpoint.every_steps={steps}",
        f"optim.global_batch_seqs={seqs}",
    ]
    subprocess.run([sys.executable, "-m", "jobs.pretrain", *overrides], cwd=ROOT, check=True, timeout=1800)
    rows = [json.loads(line) for line in (storage / name / "metrics.jsonl").read_text().splitlines()]
    return statistics.median(row["tokens_per_s"] for row in rows[WARMUP_STEPS:])


def bare_tokens_per_s(storage: Path, steps: int, seqs: int) -> float:
    """Median tokens/s of the bare loop, run by this script in a process of its own."""
    command = [sys.executable, __file__, "--bare", str(storage), "--steps", str(steps), "--seqs", str(seqs)]
    done = subprocess.run(command, cwd=ROOT, check=True, timeout=1800, stdout=subprocess.PIPE, text=True)
    return float(done.stdout.strip().splitlines()[-1])


def bare_loop(storage: Path, steps: int, seqs: int) -> float:
    """The loop that anyone would write first."""
    import numpy as np
    import torch
    import torch.nn.functional as F

    from regrow.config.schema import PretrainConfig
    from regrow.data.prepare import find_or_prepare
    from regrow.data.shards import ShardReader
    from regrow.model.llama import Llama, init_weights

    torch.set_num_threads(os.cpu_count() or 1)
    config = PretrainConfig()
    config.data.rows_per_group = 16  # as conf/data/python_docs.yaml, so that both read the same shards
    config.data.validation_fraction = 0.03
    folder, _ = find_or_prepare(config.data, str(storage), progress=lambda stage, done, total: None)
    reader = ShardReader(folder, "train")
    model = Llama(config.model)
    init_weights(model, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    micro_seqs = seqs // config.optim.num_slices
    tokens_per_step = seqs * config.data.seq_len
    rates = []
    for step in range(steps):
        begun = time.perf_counter()
        rows = torch.from_numpy(reader.read(np.arange(step * seqs, (step + 1) * seqs)).astype("int64"))
        for micro_batch in rows.split(micro_seqs):
            logits = model(micro_batch[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), micro_batch[:, 1:].flatten(), reduction="sum")
            (loss / tokens_per_step).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        rates.append(tokens_per_step / (time.perf_counter() - begun))
    return statistics.median(rates[WARMUP_STEPS:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where to write the JSON")
    parser.add_argument("--quick", action="store_true", help="fewer steps a run; still five pairs")
    parser.add_argument("--steps", type=int, help="steps a run")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--seqs", type=int, default=48, help="sequences of a global batch of 12 micro-batches")
    parser.add_argument("--bare", type=Path, metavar="STORAGE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    steps = options.steps or (12 if options.quick else 40)
    if options.bare:
        print(bare_loop(options.bare, steps, options.seqs))
        return
    if options.out is None:
        parser.error("--out is required")

    from regrow.observe.provenance import git_sha, hardware, versions

    job, bare = [], []
    with tempfile.TemporaryDirectory(prefix="loop-overhead-") as folder:
        for pair in range(options.pairs):
            bare.append(bare_tokens_per_s(Path(folder), steps, options.seqs))
            job.append(job_tokens_per_s(Path(folder), f"pair-{pair}", steps, options.seqs))
            print(f"pair {pair}: bare {bare[-1]:,.0f} tokens/s, job {job[-1]:,.0f}, ratio {job[-1] / bare[-1]:.3f}")
    ratios = [ours / theirs for ours, theirs in zip(job, bare, strict=True)]
    result = {
        "figures": {
            "tokens_per_s_ratio": statistics.median(ratios),
            "job_tokens_per_s": statistics.median(job),
        },
        "spread": {"tokens_per_s_ratio": [min(ratios), max(ratios)], "job_tokens_per_s": [min(job), max(job)]},
        "peers": {"bare_tokens_per_s": statistics.median(bare), "bare_spread": [min(bare), max(bare)]},
        "settings": {
            "pairs": options.pairs,
            "steps": steps,
            "warmup_steps": WARMUP_STEPS,
            "global_batch_seqs": options.seqs,
        },
        "versions": versions(),
        "hardware": hardware(),
        "git": git_sha(),
    }
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result["figures"]))


if __name__ == "__main__":
    main()
