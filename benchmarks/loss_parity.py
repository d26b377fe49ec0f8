"""Whether float8 trains as bfloat16 does: the real job on real text, each recipe on the same batches.

    python benchmarks/loss_parity.py --out FILE.json [--quick] [--seeds N] [--folder DIR] [SETTING ..]

Each side is `jobs.pretrain` in bfloat16 on two ranks, alike but for `parallel.float8`; more settings go to all of
them. A smoothed loss is the mean of the last 20 steps. `<recipe>_vs_bf16` is the final smoothed loss over bfloat16's
from the same seed, the median over seeds; `<recipe>_worst_vs_bf16` is of all seeds the one farthest from 1 at any step
past the first quarter. Digests of the batches are compared too. With --folder, runs that are there and finished are not
run again, and the pages of `jobs.report` that compare a seed's runs stay. Off a GPU torchao emulates float8: the
rounding is the same, the speed says nothing.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "platform"), str(ROOT / "tests"), str(ROOT)]

from benchmarks.measure import Result, summary, write_result  # noqa: E402

from regrow.config.schema import Float8  # noqa: E402

SMOOTHED = 20
MODEL = ["model.dim=128", "model.num_layers=4", "model.num_heads=4", "model.num_kv_heads=2", "model.ffn_dim=352"]
GROUP = ["cluster.min_workers=2", "cluster.max_workers=2", "data.seq_len=128", "parallel.dtype=bfloat16"]


def train(storage: Path, name: str, recipe: Float8, settings: list[str]) -> list[dict[str, float]]:
    """The rows of a run, which is made or finished if it has to be."""
    command = [sys.executable, "-m", "jobs.pretrain", f"run.storage_path={storage}", f"run.name={name}"]
    command += [*MODEL, *GROUP, f"parallel.float8={recipe.value}", "train.validate_every_steps=0", *settings]
    subprocess.run(command, cwd=ROOT, check=True)
    return [json.loads(line) for line in (storage / name / "metrics.jsonl").read_text().splitlines()]


def smoothed(rows: list[dict[str, float]]) -> list[float]:
    """After each step from the `SMOOTHED`th on."""
    losses = [row["loss"] for row in rows]
    return [statistics.fmean(losses[end - SMOOTHED : end]) for end in range(SMOOTHED, len(losses) + 1)]


def compare(storage: Path, seed: int, settings: list[str]) -> dict[Float8, list[dict[str, float]]]:
    """All recipes from one seed: their rows. Leaves the page that compares them."""
    names = {recipe: f"seed{seed}-{recipe.value}" for recipe in Float8}
    rows = {recipe: train(storage, name, recipe, [f"run.seed={seed}", *settings]) for recipe, name in names.items()}
    folders = [str(storage / name) for name in names.values()]
    page = str(storage / f"seed{seed}.html")
    subprocess.run([sys.executable, "-m", "jobs.report", *folders, "--out", page], cwd=ROOT, check=True)
    batches = {recipe: [row["batch_digest"] for row in of_recipe] for recipe, of_recipe in rows.items()}
    if other := [recipe.value for recipe in Float8 if batches[recipe] != batches[Float8.none]]:
        raise SystemExit(f"trained on other batches than bfloat16: {', '.join(other)}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", metavar="SETTING=VALUE", help="of jobs.pretrain, for every side")
    parser.add_argument("--out", type=Path, required=True, help="where to write the JSON")
    parser.add_argument("--quick", action="store_true", help="one seed, and 60 steps rather than 300")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="for the runs; by default one that is removed")
    options = parser.parse_args()
    steps, seeds = (60, 1) if options.quick else (300, options.seeds)
    settings = [f"train.steps={steps}", f"checkpoint.every_steps={steps}", *options.settings]
    final: dict[Float8, list[float]] = {recipe: [] for recipe in Float8}
    ratios: dict[Float8, list[list[float]]] = {recipe: [] for recipe in Float8}
    result = Result(runs={"losses": {}})
    with tempfile.TemporaryDirectory(prefix="loss-parity-") as temporary:
        for seed in range(seeds):
            rows = compare(options.folder or Path(temporary), seed, settings)
            result.runs["losses"][seed] = {recipe.value: [row["loss"] for row in rows[recipe]] for recipe in Float8}
            peer = smoothed(rows[Float8.none])
            for recipe in Float8:
                mine = smoothed(rows[recipe])
                final[recipe].append(mine[-1])
                ratios[recipe].append([a / b for a, b in zip(mine, peer, strict=True)])
    result.peers["bf16_final_loss"] = summary(final[Float8.none])
    for recipe in Float8:
        if recipe is not Float8.none:
            result.add(f"{recipe.value}_vs_bf16", [of_seed[-1] for of_seed in ratios[recipe]])
            later = [ratio for of_seed in ratios[recipe] for ratio in of_seed[steps // 4 :]]
            result.figures[f"{recipe.value}_worst_vs_bf16"] = max(later, key=lambda ratio: abs(ratio - 1))
    used = {"steps": steps, "seeds": seeds, "settings": [*MODEL, *GROUP, *settings]}
    write_result(options.out, result.figures, spread=result.spread, peers=result.peers, runs=result.runs, settings=used)


if __name__ == "__main__":
    main()
