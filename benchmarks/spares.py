"""What a lost unit costs with a spare ready and without one, on raylets of this machine, and what jobs.plan said of it.

    python benchmarks/spares.py --out FILE [--quick] [--units N]

Two runs, one unit to a node: with one node more than units and cluster.spare_workers=auto, and with none. Each trains,
one node that trains is killed, and the speed is read again once SETTLE_S have passed. Forward and backward take
DEVICE_S of a step of the full group, by the tokens of a micro-batch and asleep, as for a host whose device computes (an
order to all workers, `train.orders`), beside what a small model takes on the host. Where they computed instead, units
shared the machine's cores: on two of them, two units were no faster than one. All else is the job's own.

Figures: `full_vs_with_spare`, tokens/s before the fault over those after it; `forecast_vs_without_spare`, the same
ratio without a spare as jobs.plan --json has it, over the one measured; `spare_first_step_s` after the kill.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "platform"), str(ROOT / "tests"), str(ROOT)]

from benchmarks.measure import Result, side_env, write_result  # noqa: E402
from benchmarks.recovery_cluster import Cluster  # noqa: E402
from benchmarks.recovery_faults import wait_until_settled  # noqa: E402
from benchmarks.recovery_sides import OURS, Ours, environment_of, wait_for  # noqa: E402

from regrow.train.orders import ALL, DEVICE, ORDERS, Order  # noqa: E402

SETTLE_S = 20.0  # from the fault to the steps that count
STEPS, QUICK_STEPS = 12, 8  # whose median counts, before and after
ROUNDS, QUICK_ROUNDS = 5, 1
TIMEOUT_S = 600.0
SEQ_LEN = 128
DEVICE_S = 4.0  # of a step of the full group; all of them share this host's cores, which takes 0.6 s more of eight
SETTINGS = [
    "model.dim=64",
    "model.num_layers=2",
    "model.num_heads=4",
    "model.num_kv_heads=2",
    f"data.seq_len={SEQ_LEN}",
    "train.steps=100000",
    "train.validate_every_steps=0",
    "cluster.threads_per_worker=1",
]


def settings_of(units: int, spares: int) -> list[str]:
    """Of both runs the same, but for the spare."""
    batch = units * (units - 1)  # shared evenly by all units, and by one less; one more makes no step faster
    how = "auto" if spares else "0"
    return [
        *SETTINGS,
        f"optim.num_slices={batch}",
        f"optim.global_batch_seqs={batch}",
        f"cluster.min_workers={units - 1}",
        f"cluster.max_workers={units + spares}",
        f"cluster.spare_workers={how}",
    ]


def forecast_ratio(units: int) -> float:
    """Full speed over that with one unit less, as jobs.plan says beforehand."""
    command = [sys.executable, "-m", "jobs.plan", "--json", *settings_of(units, 0)]
    done = subprocess.run(command, cwd=ROOT, env=side_env(), check=True, capture_output=True, text=True)
    speeds = {each["world_size"]: each["tokens_per_s"] for each in json.loads(done.stdout)["world_sizes"]}
    return float(speeds[units] / speeds[units - 1])


def median_tokens_per_s(side: Ours, generation: int, steps: int, after: float) -> float:
    """Of the next steps of a group that end after a time. Raises SideFailed."""

    def rows() -> list[float]:
        found = [row for row in side.job.metrics() if row["generation"] == generation and row["time"] > after]
        return [row["tokens_per_s"] for row in found[:steps]]

    wait_for(lambda: len(rows()) >= steps, side, TIMEOUT_S, f"{steps} steps of generation {generation}")
    return statistics.median(rows())


def lose_a_unit(
    storage: Path, name: str, units: int, spares: int, steps: int, dice: random.Random
) -> tuple[float, ...]:
    """Tokens/s before a node is killed and after, and the seconds to the first step of the group without it."""
    orders = storage / "orders"
    orders.mkdir(exist_ok=True)
    Order(DEVICE, token_s=DEVICE_S / SEQ_LEN / (units - 1)).leave(orders, ALL)
    with (
        Cluster(units + spares, environment_of(OURS) | {ORDERS: str(orders)}) as cluster,
        Ours(cluster, storage, name, settings_of(units, spares)) as side,
    ):
        generation = wait_until_settled(side, steps, world_size=units)
        if spares:  # ready, not on its way
            wait_for(lambda: side.job.events("spares")[-1:], side, TIMEOUT_S, "the spare")
        before = median_tokens_per_s(side, generation, steps, time.time())
        killed_at = cluster.kill_node(dice.choice(side.workers()).node)
        left = wait_until_settled(side, 1, world_size=units if spares else units - 1)
        while left == generation:
            left = wait_until_settled(side, 1, world_size=units if spares else units - 1)
        first = next(row["time"] for row in side.job.metrics() if row["generation"] == left)
        after = median_tokens_per_s(side, left, steps, killed_at + SETTLE_S)
    return before, after, first - killed_at


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("spares.json"))
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--units", type=int, default=8, help="of the full group [8]")
    options = parser.parse_args()
    units = options.units
    if units < 2:
        parser.error(f"--units={units} must be 2 or more: one of them is lost")
    result, dice = Result(), random.Random(0)
    rounds, steps = (QUICK_ROUNDS, QUICK_STEPS) if options.quick else (ROUNDS, STEPS)
    forecast = forecast_ratio(units)
    with tempfile.TemporaryDirectory(prefix="spares") as folder:
        runs: dict[int, list[tuple[float, ...]]] = {1: [], 0: []}
        for number in range(rounds):
            for spares in runs:
                name = f"{number}-{spares}"
                runs[spares].append(lose_a_unit(Path(folder), name, units, spares, steps, dice))
                print(f"round {number}, {spares} spares: {runs[spares][-1]}", flush=True)
    result.add("full_vs_with_spare", [before / after for before, after, _ in runs[1]])
    result.add("full_vs_without_spare", [before / after for before, after, _ in runs[0]])
    result.add("forecast_vs_without_spare", [forecast / (before / after) for before, after, _ in runs[0]])
    result.add("spare_first_step_s", [first_s for *_, first_s in runs[1]])
    result.figures["forecast"] = forecast
    write_result(
        options.out,
        result.figures,
        spread=result.spread,
        peers={"forecast": "jobs.plan --json"},
        units=units,
        device_s=DEVICE_S,
        runs={str(spares): found for spares, found in runs.items()},
    )


if __name__ == "__main__":
    main()
