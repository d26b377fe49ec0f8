"""The published table of bfloat16 against float8 pretraining, made again on the cluster that is given, by the real job.

    python benchmarks/throughput_table.py --out FILE.json [--quick] [--models 8b 70b] +cluster=h100x64 [SETTING ..]

Of each model that fits (`jobs.plan` says so; the others are listed with what it says), `jobs.pretrain` runs in bfloat16
and with `--recipe`, all else alike, in turn, on the offline corpus. More settings go to all runs; without any, they run
on this machine. Figures are per worker, of the steps after the first `WARM_UP`: `<model>_<recipe>_tokens_per_s`,
`_mfu` (see `regrow.model.flops`), and `<model>_speedup`, the median over rounds and their range.

Peers are the figures that PyTorch and IBM published, tokens/s of a GPU. A run writes one checkpoint, at its end: the
storage has to hold that of the largest model, three values a parameter.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "platform"), str(ROOT)]

from benchmarks.measure import Result, write_result  # noqa: E402

from regrow.config.schema import Float8  # noqa: E402

PUBLISHED = {"1_8b": (29_000, 35_000), "8b": (8_000, 10_000), "70b": (956, 1_430), "405b": (149, 227)}  # tokens/s
WARM_UP = 10  # steps that compile, fill caches, and fix clocks
ROUNDS, STEPS = 5, 40
QUICK_ROUNDS, QUICK_STEPS = 1, 20


def what_does_not_fit(settings: Sequence[str]) -> str:
    """Why the largest group of the configuration has too little memory for the model; or empty."""
    command = [sys.executable, "-m", "jobs.plan", "--json", *settings]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.returncode)  # it has said why
    largest = json.loads(done.stdout)["world_sizes"][-1]
    if largest["fits"]:
        return ""
    need, have = largest["bytes"]["total"] / 2**30, largest["usable_bytes"] / 2**30
    return f"{need:.1f} GiB of a device's {have:.1f} at {largest['world_size']} workers"


def train(storage: Path, name: str, steps: int, settings: Sequence[str]) -> list[dict[str, float]]:
    """The rows of a run, of which nothing else stays."""
    command = [sys.executable, "-m", "jobs.pretrain", f"run.storage_path={storage}", f"run.name={name}", *settings]
    command += [f"train.steps={steps}", f"checkpoint.every_steps={steps}", "train.validate_every_steps=0"]
    try:
        subprocess.run(command, cwd=ROOT, check=True)
        return [json.loads(line) for line in (storage / name / "metrics.jsonl").read_text().splitlines()]
    finally:
        shutil.rmtree(storage / name, ignore_errors=True)


def rates(rows: Sequence[dict[str, float]]) -> tuple[float, float | None]:
    """(tokens/s of a worker, MFU), medians of the steps after the first ones."""
    later = rows[WARM_UP:]
    mfu = [row["mfu"] for row in later if row["mfu"] is not None]
    per_worker = statistics.median(row["tokens_per_s"] / row["world_size"] for row in later)
    return per_worker, statistics.median(mfu) if mfu else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", metavar="SETTING", help="of jobs.pretrain, +cluster=NAME above all")
    parser.add_argument("--out", type=Path, required=True, help="where to write the JSON")
    parser.add_argument("--quick", action="store_true", help="one round of 20 steps rather than five of 40")
    parser.add_argument("--models", nargs="+", default=list(PUBLISHED), help="of conf/model")
    parser.add_argument("--recipe", choices=[r.value for r in Float8][1:], default="tensorwise_all_gather")
    parser.add_argument("--storage", type=Path, help="a folder that all nodes share; by default a temporary one here")
    options = parser.parse_intermixed_args()
    rounds, steps = (QUICK_ROUNDS, QUICK_STEPS) if options.quick else (ROUNDS, STEPS)
    sides = {"bf16": "none", options.recipe: options.recipe}
    result, skipped = Result(), {}
    with tempfile.TemporaryDirectory(prefix="throughput-") as temporary:
        for model in options.models:
            alike = [*options.settings, f"model={model}", "parallel.dtype=bfloat16"]
            if reason := what_does_not_fit(alike):
                skipped[model] = reason
                print(f"{model} is left out: {reason}", flush=True)
                continue
            found: dict[str, list[float]] = {side: [] for side in sides}
            mfu: dict[str, list[float]] = {side: [] for side in sides}
            for number in range(rounds):
                for side, recipe in sides.items():
                    name = f"{model}-{side}-{number}"
                    rows = train(options.storage or Path(temporary), name, steps, [*alike, f"parallel.float8={recipe}"])
                    per_worker, share = rates(rows)
                    found[side].append(per_worker)
                    mfu[side] += [share] if share is not None else []
            for side in sides:
                result.add(f"{model}_{side}_tokens_per_s", found[side])
                if mfu[side]:
                    result.add(f"{model}_{side}_mfu", mfu[side])
            result.add_ratio(f"{model}_speedup", found[options.recipe], found["bf16"])
            if model in PUBLISHED:
                before, after = PUBLISHED[model]
                result.peers[model] = {"bf16": before, "float8": after, "speedup": after / before}
    used = {"rounds": rounds, "steps": steps, "recipe": options.recipe, "settings": options.settings}
    write_result(options.out, result.figures, spread=result.spread, peers=result.peers, settings=used, skipped=skipped)


if __name__ == "__main__":
    main()
