"""What a run's figures for Prometheus cost: CPU seconds in metric calls over seconds of steps; steps with and without.

    python benchmarks/metrics_overhead.py --out benchmarks/results/FILE.json [--quick]

Both sides are `jobs.pretrain` with the default model on this machine, with one thread, in turn: one with its figures,
asked for every second as a Prometheus would, the other with `observe.metrics=false`. `step_s_fraction` is what the
coordinator itself measures and exports (ray_regrow_metrics_cpu_seconds_total over ray_regrow_step_seconds_total), read
from Ray's agent; `step_s_with_vs_without` compares the medians of the steps but the first 15, in which Ray Data starts.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "platform"), str(ROOT / "tests"), str(ROOT)]

from benchmarks.measure import Result, write_result  # noqa: E402

WARMUP_STEPS = 15
CPU_S, STEP_S = "ray_regrow_metrics_cpu_seconds_total", "ray_regrow_step_seconds_total"
REPORT_MS = "1000"  # ten times as often as Ray does by itself


def run(storage: Path, name: str, *, steps: int, with_metrics: bool) -> tuple[float, dict[str, float]]:
    """The median step of a job, and the newest figures that Ray's agent told while it ran."""
    overrides = [
        f"run.storage_path={storage}",
        f"run.name={name}",
        f"train.steps={steps}",
        "train.validate_every_steps=0",
        "cluster.threads_per_worker=1",
        f"checkpoint.every_steps={steps}",
        f"observe.metrics={str(with_metrics).lower()}",
    ]
    with tempfile.TemporaryDirectory(prefix="rgo", dir="/tmp", ignore_cleanup_errors=True) as ray_folder:
        environment = {**os.environ, "RAY_TMPDIR": ray_folder, "RAY_metrics_report_interval_ms": REPORT_MS}
        command = [sys.executable, "-m", "jobs.pretrain", *overrides]
        told: dict[str, float] = {}
        with subprocess.Popen(command, cwd=ROOT, env=environment) as job:
            while job.poll() is None:
                told |= scrape(Path(ray_folder) / "ray" / "prom_metrics_service_discovery.json")
                time.sleep(1.0)
        if job.returncode:
            raise SystemExit(f"{' '.join(command)} ended with {job.returncode}")
    rows = [json.loads(line) for line in (storage / name / "metrics.jsonl").read_text().splitlines()]
    return statistics.median(row["step_s"] for row in rows[WARMUP_STEPS:]), told


def scrape(discovery: Path) -> dict[str, float]:
    """The two totals, from all addresses that Ray lists; nothing while they are not there."""
    told: dict[str, float] = {}
    try:
        addresses = [address for group in json.loads(discovery.read_text()) for address in group["targets"]]
    except (OSError, ValueError):
        return told
    for address in addresses:
        try:
            with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as answer:
                text = answer.read().decode()
        except OSError:
            continue
        for name, value in re.findall(rf"^({CPU_S}|{STEP_S}){{[^}}]*}} (\S+)$", text, re.MULTILINE):
            told[name] = float(value)
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where to write the JSON")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter runs")
    parser.add_argument("--steps", type=int, help="steps a run")
    parser.add_argument("--pairs", type=int, help="runs of each side")
    options = parser.parse_args()
    steps = options.steps or (60 if options.quick else 120)
    pairs = options.pairs or (2 if options.quick else 5)
    with_s, without_s, fractions, cpu_s = [], [], [], []
    with tempfile.TemporaryDirectory(prefix="metrics-overhead-") as folder:
        for pair in range(pairs):
            median_s, told = run(Path(folder), f"with-{pair}", steps=steps, with_metrics=True)
            with_s.append(median_s)
            cpu_s.append(told[CPU_S])
            fractions.append(told[CPU_S] / told[STEP_S])
            median_s, told = run(Path(folder), f"without-{pair}", steps=steps, with_metrics=False)
            assert not told, f"switched off, and told {told}"
            without_s.append(median_s)
    result = Result()
    result.add("step_s_fraction", fractions)
    result.add_ratio("step_s_with_vs_without", with_s, without_s)
    peers = {"without": {"step_s": without_s}}
    runs = {"with": {"step_s": with_s, "cpu_s": cpu_s}, "steps": steps, "pairs": pairs, "report_ms": int(REPORT_MS)}
    write_result(options.out, result.figures, spread=result.spread, peers=peers, runs=runs)


if __name__ == "__main__":
    main()
