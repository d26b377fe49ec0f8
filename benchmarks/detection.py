"""How soon a slow rank is named and a hanging one is found.

    python benchmarks/detection.py --out benchmarks/results/FILE.json [--quick]

Virtual time: `control.slow`, read every READ_S seconds, in made-up groups in which every step ends with its slowest
rank and computing jitters (log-normal); rank 1 computes longer, by 15% of a step. Beside it, false alarms in 10,000
steps of such groups without it, and with one step in a hundred five times as long on some rank.
Real: three gloo ranks of this machine, their heartbeats' files and control's own classes in the place of keepers and
coordinator; work is a sleep, which one rank takes 15% longer, or once does not end in a validation.

Whole jobs, with Ray, ours and stock Ray Train: `detection_jobs.py`. Partitions and slow links: `detection_apart.py`.
A round of each takes minutes: --add takes samples over from earlier results, so that rounds add up over calls.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "platform"), str(ROOT / "tests"), str(ROOT)]

from benchmarks.detection_apart import HOSTS_APART, on_hosts_apart  # noqa: E402
from benchmarks.detection_jobs import WHOLE_JOBS, of_whole_jobs  # noqa: E402
from benchmarks.measure import Result, write_result  # noqa: E402
from benchmarks.recovery_samples import DEFAULT, OURS, TUNED  # noqa: E402

from regrow.control.phases import Phase  # noqa: E402
from regrow.control.slow import READ_S, SlowRanks  # noqa: E402
from support.gloo import run_ranks  # noqa: E402
from support.slow_world import World  # noqa: E402
from support.suspecting import hang, train_with_a_slow_rank  # noqa: E402

PARTS = [VIRTUAL, REAL, JOBS, APART] = ["virtual", "real", "jobs", "apart"]
STEPS_S, JITTERS, SIZES = (0.5, 2.0, 10.0), (0.02, 0.05, 0.1, 0.3), (3, 64)
BEGINS_S, GIVEN_UP_S = 200.0, 3600.0
FALSE_STEPS = 10_000


def named_after_s(seed: int, size: int, step_s: float, jitter: float) -> float:
    """From the first slow step; GIVEN_UP_S where it is not named by then."""
    begins = int(BEGINS_S / step_s)
    world = World(seed, size, step_s, jitter, slow_s=0.15 * step_s, slow_from=begins)
    ranks, began_at = SlowRanks(), 0.0
    for step, now, spent in world.readings(begins + int(GIVEN_UP_S / step_s)):
        began_at = began_at if step >= begins else now
        ranks.read(spent, now)
        if ("node 1", 1) in ranks.judge() and step >= begins:
            return now - began_at
    return GIVEN_UP_S


def false_alarms(seed: int, size: int, step_s: float, jitter: float, *, tails: bool) -> int:
    ranks, alarms = SlowRanks(), 0
    for _, now, spent in World(seed, size, step_s, jitter, tails).readings(FALSE_STEPS):
        ranks.read(spent, now)
        alarms += sum(ranks.is_slow(worker) for worker in ranks.judge())
    return alarms


def in_virtual_time(result: Result, rounds: int) -> None:
    for size in SIZES:
        for step_s in STEPS_S:
            for jitter in JITTERS:
                name = f"{size}_ranks_{step_s:g}_s_jitter_{jitter:.0%}".replace("%", "_percent")
                result.add(f"named_s_{name}", [named_after_s(seed, size, step_s, jitter) for seed in range(rounds)])
    alarms = [
        false_alarms(seed, 8, step_s, jitter, tails=tails)
        for seed in range(max(1, rounds // 5))
        for step_s in STEPS_S
        for jitter in JITTERS
        for tails in (False, True)
    ]
    result.figures["false_alarms"] = float(sum(alarms))
    result.runs["false_alarm_worlds"] = {"worlds": len(alarms), "steps_each": FALSE_STEPS, "ranks": 8}


def on_real_ranks(result: Result, rounds: int) -> None:
    named, hung = [], []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(prefix="detection-") as folder:
            (_, seconds), *_ = run_ranks(train_with_a_slow_rank, 3, folder, READ_S, deadline_s=600.0)
            named.append(seconds)
        with tempfile.TemporaryDirectory(prefix="detection-") as folder:
            (_, _, seconds), *_ = run_ranks(hang, 3, folder, Phase.validation, deadline_s=600.0)
            hung.append(seconds)
    result.add("real_ranks_slow_named_s", named)
    result.add("real_ranks_hang_in_validation_found_s", hung)


def samples_of(earlier: Sequence[dict[str, Any]], part: str) -> list[dict[str, Any]]:
    """What a part of earlier results measured."""
    return [sample for result in earlier for sample in result["runs"].get(part, {}).get("samples", [])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--quick", action="store_true", help="3 rounds instead of 20, of stock one instead of three")
    parser.add_argument("--rounds", type=int, metavar="N", help="rounds of ours, in place of these")
    parser.add_argument("--stock-rounds", type=int, metavar="N", help="rounds of each stock side, likewise")
    parser.add_argument(
        "--add",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="results whose whole jobs and hosts apart count too",
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--sides", nargs="+", choices=[OURS, DEFAULT, TUNED], default=[OURS, DEFAULT, TUNED])
    options = parser.parse_args()
    rounds = (3 if options.quick else 20) if options.rounds is None else options.rounds
    stock_rounds = (1 if options.quick else 3) if options.stock_rounds is None else options.stock_rounds
    earlier = [json.loads(path.read_bytes()) for path in options.add]
    result = Result()
    failures: list[str] = [failure for each in earlier for failure in each["failures"]]
    if VIRTUAL in options.only:
        in_virtual_time(result, rounds)
        slow = [value for name, value in result.figures.items() if name.startswith("named_s_")]
        median_s = statistics.median(slow)
        result.runs["named"] = {"rounds": rounds, "median_of_medians_s": median_s, "given_up_s": GIVEN_UP_S}
    if REAL in options.only:
        on_real_ranks(result, min(rounds, 5))
    if JOBS in options.only:
        with tempfile.TemporaryDirectory(prefix="detection-", ignore_cleanup_errors=True) as folder:
            done = samples_of(earlier, WHOLE_JOBS)
            failures += of_whole_jobs(result, Path(folder), rounds, stock_rounds, options.sides, done)
    if APART in options.only:
        with tempfile.TemporaryDirectory(prefix="detection-", ignore_cleanup_errors=True) as folder:
            failures += on_hosts_apart(result, Path(folder), rounds, samples_of(earlier, HOSTS_APART))
    write_result(
        options.out,
        result.figures,
        spread=result.spread,
        peers=result.peers,
        runs=result.runs,
        failures=list(dict.fromkeys(failures)),
        added=[{"file": path.name, "git": each["git"]} for path, each in zip(options.add, earlier, strict=True)],
    )


if __name__ == "__main__":
    main()
