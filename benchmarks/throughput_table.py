"""The published table of bfloat16 against float8 pretraining, made again on the cluster that is given, by the real job.

    python benchmarks/throughput_table.py --out FILE.json [--quick] +cluster=h100x64 --storage /shared/folder
    python benchmarks/throughput_table.py --out FILE.json --models 405b +cluster=h100x512 --storage /shared/folder

Of each model that fits with its settings below (`jobs.plan` says so; the others are listed with what it says),
`jobs.pretrain` runs in bfloat16 and with `--recipe`, all else alike, in turn, on all workers of the cluster and on
random tokens: no step's time depends on them. More settings go to all runs; without any, they run on this machine.
Figures are per worker, of the steps after the first `WARM_UP`: `<model>_<recipe>_tokens_per_s`, `_mfu` (see
`regrow.model.size`), and `<model>_speedup`, the median over rounds and their range. A model whose run fails is listed
with that, and the others go on.

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
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "platform"), str(ROOT / "tests"), str(ROOT)]

import numpy as np  # noqa: E402
from benchmarks.measure import Result, write_result  # noqa: E402

from regrow.config.schema import Float8, PretrainConfig  # noqa: E402
from regrow.config.store import pretrain_config  # noqa: E402
from regrow.errors import RegrowError  # noqa: E402
from support.corpus import write_corpus  # noqa: E402

PUBLISHED = {"1_8b": (29_000, 35_000), "8b": (8_000, 10_000), "70b": (956, 1_430), "405b": (149, 227)}  # tokens/s
# ours, for the posts do not say theirs: rows of a worker in a step, and what else lets the model fit 64 H100s, or 512
SETTINGS = {
    "1_8b": (4, ["parallel.activation_checkpoint=selective"]),
    "8b": (2, ["parallel.activation_checkpoint=selective"]),
    "70b": (2, ["parallel.activation_checkpoint=full"]),
    "405b": (1, ["parallel.activation_checkpoint=full"]),
}
WARM_UP = 10  # steps that compile, fill caches, and fix clocks
ROUNDS, STEPS = 5, 40
QUICK_ROUNDS, QUICK_STEPS = 1, 20


def settings_of(model: str, given: Sequence[str]) -> list[str]:
    """Arguments of all runs of a model: all workers or none, and rows for each of them. What was given prevails."""
    rows, more = SETTINGS.get(model, (2, []))
    base = [each for each in given if each.startswith("+cluster=")]
    own = [f"model={model}", "parallel.dtype=bfloat16", *more, *(each for each in given if each not in base)]
    workers = pretrain_config([*base, *own]).cluster.max_workers
    batch = [f"optim.global_batch_seqs={rows * workers}", f"optim.num_slices={workers}"]
    alike = [f"cluster.min_workers={workers}", "cluster.spare_workers=0", *batch, "data=python_docs"]
    alike += [f"parallel.{axis}=1" for axis in ("tp", "cp", "pp", "least_pp", "dp_replicate")]  # FSDP, as published
    return [*base, *alike, *own]


def make_corpus(folder: Path, config: PretrainConfig) -> None:
    """Random tokens for two steps, drawn again and again."""
    rows, vocab_size = 2 * config.optim.global_batch_seqs, config.model.vocab_size
    tokens = np.random.default_rng(0).integers(0, vocab_size, (rows, config.data.seq_len + 1), np.uint32)
    write_corpus(folder, tokens, rows_per_group=16, rows_per_shard=1024, vocab_size=vocab_size, validation=tokens[:1])


def what_does_not_fit(settings: Sequence[str]) -> str:
    """Why the group has too little memory for the model; empty where it has enough, or the job will say more."""
    command = [sys.executable, "-m", "jobs.plan", "--json", *settings]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"jobs.plan does not know: {done.stderr.strip()}", flush=True)
        return ""
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
    options.settings += [each for each in options.models if "=" in each]  # argparse takes what follows for models
    options.models = [each for each in options.models if "=" not in each]
    try:
        address = pretrain_config(options.settings).cluster.address
        settings = {model: settings_of(model, options.settings) for model in options.models}
    except RegrowError as error:
        parser.error(str(error))
    if options.storage is None and address is not None:
        parser.error("a running cluster's nodes have to share --storage FOLDER")
    rounds, steps = (QUICK_ROUNDS, QUICK_STEPS) if options.quick else (ROUNDS, STEPS)
    sides = {"bf16": "none", options.recipe: options.recipe}
    result, skipped = Result(), {}
    with tempfile.TemporaryDirectory(prefix="throughput-", dir=options.storage) as folder:
        for model, alike in settings.items():
            reason = next(
                filter(None, (what_does_not_fit([*alike, f"parallel.float8={r}"]) for r in sides.values())), ""
            )
            try:
                if not reason:
                    time_model(result, model, Path(folder), alike, sides, rounds=rounds, steps=steps)
            except subprocess.CalledProcessError as error:
                reason = f"its run ended with status {error.returncode}"
            if reason:
                skipped[model] = reason
                print(f"{model} is left out: {reason}", flush=True)
    used = {"rounds": rounds, "steps": steps, "recipe": options.recipe, "settings": settings}
    write_result(options.out, result.figures, spread=result.spread, peers=result.peers, settings=used, skipped=skipped)


def time_model(
    result: Result,
    model: str,
    folder: Path,
    alike: Sequence[str],
    sides: Mapping[str, str],
    *,
    rounds: int,
    steps: int,
) -> None:
    """Run one model on both sides, in turn. Raises CalledProcessError for a run that fails."""
    make_corpus(folder / model, pretrain_config(alike))
    alike = [*alike, f"+data.corpora.random={folder / model}"]
    found: dict[str, list[float]] = {side: [] for side in sides}
    mfu: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(rounds):
        for side, recipe in sides.items():
            rows = train(folder, f"{model}-{side}-{number}", steps, [*alike, f"parallel.float8={recipe}"])
            per_worker, share = rates(rows)
            found[side].append(per_worker)
            mfu[side] += [share] if share is not None else []
    for side in sides:
        result.add(f"{model}_{side}_tokens_per_s", found[side])
        if mfu[side]:
            result.add(f"{model}_{side}_mfu", mfu[side])
    base, *others = sides
    result.add_ratio(f"{model}_speedup", found[others[0]], found[base])
    if model in PUBLISHED:
        before, after = PUBLISHED[model]
        result.peers[model] = {"bf16": before, "float8": after, "speedup": after / before}


if __name__ == "__main__":
    main()
