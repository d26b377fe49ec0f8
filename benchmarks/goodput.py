"""What the simulator says next to what others published, next to a prototype of another hand, and next to the goals.

    python benchmarks/goodput.py --out benchmarks/results/FILE.json [--quick]

No cluster, no GPU: figures of `jobs.simulate`'s engines. No input was tuned to its own target; each row says which
inputs are from the paper that it is held against. `--quick`: without the sweep of each input over its range.
"""

import argparse
import math
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "platform"), str(ROOT / "tests"), str(ROOT)]

from benchmarks.measure import write_result  # noqa: E402

from regrow.simulate.estimate import Bools, Estimating, estimate, events_of  # noqa: E402
from regrow.simulate.faults import DAY, Floats, draw  # noqa: E402
from regrow.simulate.inputs import KINDS, Inputs, Job, Policy  # noqa: E402
from regrow.simulate.study import assumed_share, interval, losses, tornado  # noqa: E402
from support.simulating import AT_16K, AT_98K, bare, inputs, rates  # noqa: E402

PRODUCT_16K = ("+cluster=h100x16384", "model=405b")
PRODUCT_98K = ("+cluster=h100x98304", "model=405b")
VERIFIED = "cluster.verify_every_steps=100"
META = ("simulate/faults=meta100k", "simulate.spares=[230]")
SCALES = {
    "16384": (*AT_16K, "simulate/faults=llama3"),
    "98304": (*AT_98K, "simulate.spares=[150]", "simulate/faults=llama3"),
    "98304_meta": (*AT_98K, "simulate.spares=[230]", "simulate/faults=meta100k"),
}
PROTOTYPE = {  # review of 2026, section 5: stock restart, tuned restart, regrow today, regrow next
    "16384": (82.2, 96.6, 98.8, 99.6),
    "98304": (14.9, 64.9, 84.2, 97.1),
    "98304_meta": (0.0, 40.6, 64.8, 92.9),
}


def effective(given: Inputs, replicas: int) -> float:
    return float(estimate(given, replicas).effective.mean())


def as_the_prototype(given: Inputs) -> Inputs:
    """Its conventions where they are others: a burst adds to the nodes that fail, and nodes that are away fail too."""
    burst = 1 + 0.01 * (2 - 1) + 0.001 * (20 - 1)
    result = estimate(given, 8)
    members = given.job.nodes + given.job.spares
    away = members / (members - float(result.away_mean.mean()))
    taking = ("gpu", "network", "host", "sdc")
    values = {f"rate_{kind}": given[f"rate_{kind}"] * away * (burst if kind in taking else 1) for kind in KINDS}
    return given.with_values(**values)


class Longer(Estimating):
    """As the prototype has it, where a group that forms loses another rank: it takes what is longer, the first forming
    or the second. Here the second counts, as in `play`, where Control forms anew.
    """

    def _stand(self, now: Floats, change: Bools, *rest: Any) -> None:
        before = self.end.copy()
        super()._stand(now, change, *rest)
        longer = np.where(change & (before > self.end), before - self.end, 0.0)
        self.end = self.end + longer
        self.lost["form"][rest[3], self.columns] += longer


def in_its_conventions(given: Inputs, replicas: int) -> float:
    """What comes out with all three, in percent."""
    given = as_the_prototype(given)
    draws = draw(given, replicas, 0)
    run = Longer(given, replicas, len(draws.at) + len(draws.slow_at))
    for event in events_of(given, draws, 0):
        run.step(*event)
    return 100 * float(run.result().effective.mean())


def references(replicas: int) -> dict[str, float]:
    """The reference worlds; the prototype's figures beside them, and with its conventions."""
    found: dict[str, float] = {}
    for scale, arguments in SCALES.items():
        columns = (("restart", "today"), ("restart_tuned", "today"), ("in_place", "today"), ("in_place", "next"))
        for (policy, world), theirs in zip(columns, PROTOTYPE[scale], strict=True):
            name = f"{scale}_{policy}" + (f"_{world}" if policy == "in_place" else "")
            given = inputs(*arguments, f"simulate/world={world}", policy=policy)
            ours = 100 * effective(given, replicas)
            found |= {name: ours, f"{name}_minus_prototype": ours - theirs}
            found[f"{name}_in_its_conventions_minus_prototype"] = in_its_conventions(given, replicas) - theirs
    return found


def published(replicas: int) -> dict[str, dict[str, object]]:
    """Runs that were published: what is said of them, the band that is asked for, and what comes out."""
    tuned = inputs(*AT_16K, "simulate.days=54", policy="restart_tuned")
    slower = tuned.with_values(notice_gpu_s=60, notice_network_s=600, notice_host_s=60, notice_software_s=60,
                               notice_hang_s=600, notice_sdc_s=60, snapshot_interval_s=600)  # fmt: skip
    slower = replace(slower, policy=replace(slower.policy, automatic=False))
    draws = draw(replace(inputs(*AT_16K, "simulate.spares=[0]", "simulate.days=54"), known=True), 256, 0)
    counts = np.isfinite(draws.at).sum(0) + np.isfinite(draws.planned).sum(0)
    one = Job(8, 8, 1)

    def single(mtbf_s: float, restart_s: float, interval_s: float) -> float:
        policy = Policy("single", in_place=False, memory=False, park=False, copies_lost_at=1 << 30)
        given = bare(one, policy=policy, **rates(software=DAY / mtbf_s), form_base_s=restart_s,
                     snapshot_interval_s=interval_s)  # fmt: skip
        return effective(given, 256)

    replica_wise = Policy("replicas", shrinks=False, replicas=12, park=False, copies_lost_at=1 << 30)
    in_place = bare(Job(98304, 8192, 6144), policy=replica_wise, **rates(software=DAY / 1080 / 12288),
                    notice_software_s=60, form_base_s=120, restart_s=420)  # fmt: skip
    robust = inputs(
        *("simulate.gpus=9600", "simulate.unit_gpus=64", "simulate.num_slices=2400", "simulate.spares=[12]"),
        *("simulate.days=90", "simulate/scale=nccl"),
    ).with_values(notice_gpu_s=10, notice_host_s=2, notice_hang_s=600)
    large = estimate(inputs("simulate.gpus=10240", "simulate.unit_gpus=128", "simulate.num_slices=1280",
                            "simulate.spares=[16]", policy="restart_tuned"), replicas)  # fmt: skip
    down = sum(float(large.lost[part].sum(0).mean()) for part in ("notice", "form")) / large.wall_s
    paper = "rate, restart and interval of the paper"
    rows: list[tuple[str, str, str, tuple[float, float], float]] = [
        ("llama3_54_days", "its rate and stops, a tuned restart", "> 0.90", (0.90, 0.98), effective(tuned, replicas)),
        (
            "llama3_54_days_slow_notice",
            "the same; network faults and hangs take 10 min, and so does an interval",
            "> 0.90",
            (0.90, 0.98),
            effective(slower, replicas),
        ),
        ("llama3_count_5_percent", "its rate: by construction", "466", (400, 466), float(np.quantile(counts, 0.05))),
        ("llama3_count_95_percent", "its rate: by construction", "466", (466, 530), float(np.quantile(counts, 0.95))),
        ("rsc1_16384", f"{paper}, 5 min", "0.93", (0.925, 0.940), single(DAY / 6.5e-3 / 2048, 300, 300)),
        ("rsc2_100000", f"{paper}, 2 min", "about 0.9", (0.90, 0.95), single(DAY / 2.34e-3 / 12500, 120, 120)),
        (
            "ft_hsdp_restart",
            "its 18 and 10 min; failures at any time, where its sum of 1 - 10/18 = 0.44 lets them queue",
            "0.44",
            (0.55, 0.60),
            single(1080, 600, 1),
        ),
        (
            "ft_hsdp_in_place",
            "its 18 min, 3 min for all, 7 more at 11 of 12; its sum is 0.80",
            "0.80",
            (0.77, 0.84),
            effective(in_place, replicas),
        ),
        (
            "byterobust_9600",
            "its notice times, NCCL's communicators; Llama 3's rate, as its own is not per node",
            "0.97",
            (0.95, 0.995),
            effective(robust, replicas),
        ),
        ("dgx_cloud_downtime", "Llama 3's rate, a tuned restart, 10,240 GPUs", "< 0.01", (0.0, 0.01), down),
    ]
    return {
        name: {"inputs": what, "published": said, "band": [*band], "simulated": x, "in_band": band[0] <= x <= band[1]}
        for name, what, said, band, x in rows
    }


def goals(replicas: int, *, sweeps: bool) -> tuple[dict[str, float], dict[str, object]]:
    """The product with its own settings against 98% and 95%: what it reaches, and what that rests on."""
    figures, spread = dict[str, float](), dict[str, object]()
    for name, arguments, goal in (
        ("16384", PRODUCT_16K, 0.98),
        ("16384_verified", (*PRODUCT_16K, VERIFIED), 0.98),
        ("98304", PRODUCT_98K, 0.95),
        ("98304_verified", (*PRODUCT_98K, VERIFIED), 0.95),
        ("98304_nccl", (*PRODUCT_98K, "simulate/scale=nccl"), 0.95),
        ("98304_meta", (*PRODUCT_98K, *META), 0.95),
        ("98304_meta_verified", (*PRODUCT_98K, *META, VERIFIED), 0.95),
        ("98304_meta_nccl", (*PRODUCT_98K, *META, "simulate/scale=nccl"), 0.95),
    ):
        given = inputs(*arguments)
        result = estimate(given, replicas)
        value = float(result.effective.mean())
        figures |= {f"product_{name}": value, f"product_{name}_minus_goal": value - goal}
        said: dict[str, object] = {"interval": interval(result), "assumed_share": assumed_share(losses(result))}
        if sweeps:
            middle, swings = tornado(given, 16, 0)
            said["sweep_middle"] = middle
            said["swings"] = {
                each.name: {"from": str(each.figure.origin), "range": [each.low, each.high],
                            "effective": [each.at_low, each.at_high]}
                for each in swings[:12]
            }  # fmt: skip
        spread[f"product_{name}"] = said
    return figures, spread


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    replicas = 32
    figures: dict[str, float] = {}
    given = inputs(*SCALES["98304_meta"])
    began = time.process_time()
    estimate(given, 32)
    figures["cpu_s_98304_60_days_32_runs_18_min"] = time.process_time() - began
    figures |= references(replicas)
    reached, spread = goals(replicas, sweeps=not options.quick)
    figures |= reached
    rows = published(replicas)
    figures["published_in_band"] = sum(bool(row["in_band"]) for row in rows.values())
    figures["published_rows"] = len(rows)
    assert all(math.isfinite(value) for value in figures.values())
    write_result(options.out, figures, spread=spread, peers={"published": rows, "prototype": PROTOTYPE})


if __name__ == "__main__":
    main()
