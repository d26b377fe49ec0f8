"""Whether one drill says what another will come to: a profile of drill A, predictions of drills B before they start.

    python benchmarks/live_prediction.py --out benchmarks/results/FILE.json [--quick]

Drills are `+drill=live` on raylets of this machine: 64 faults, one every 15 to 30 s where it is quiet, each with a seed
of its own; B's also have other weights of the kinds and other gaps than A. A's run folder makes profile.json. Each
prediction is written, with its time, to a file of its own before its drill starts: the plan of B, its configuration and
the profile go through regrow's own Control in virtual time (`simulate.replay.predict`), and what comes out through the
ledger. Compared are goodput, effective, capacity_goodput (to be within 2 points) and each cause of lost time (within
1.5 points of wall time or 30%). All drills are reported, none is left out.

Two cores that other work wants, too, make it another machine from drill to drill: run it alone. --quick: 7 faults in A,
7 in one B, closer together, some ten minutes; so few tell that it works, not how well.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "platform"), str(ROOT)]

import hydra  # noqa: E402
from benchmarks.measure import write_result  # noqa: E402
from hydra.core.config_store import ConfigStore  # noqa: E402

from regrow.config.schema import DrillJobConfig  # noqa: E402
from regrow.config.store import CONF_DIR, to_dataclass  # noqa: E402
from regrow.drill.run import plan_of, with_end  # noqa: E402
from regrow.show.report import build_report  # noqa: E402
from regrow.simulate.profile import Profile  # noqa: E402
from regrow.simulate.replay import Compared, Outcome, Prediction, planned, predict  # noqa: E402
from regrow.simulate.run_logs import RunLogs  # noqa: E402

POINTS = 2.0
JUDGED = ("goodput", "effective", "capacity_goodput")
A_SEED, B_SEEDS = 1, (101, 102, 103)
OTHER = [  # of drills B: other weights, other gaps
    *("drill.kinds.kill_worker=3", "drill.kinds.kill_node=4", "drill.kinds.stop_worker=3"),
    "drill.every_steps=[70,140]",
]


def drill_config(name: str, folder: Path, seed: int, faults: int, more: list[str]) -> tuple[DrillJobConfig, list[str]]:
    """A drill, and the arguments that start it."""
    arguments = [
        "+drill=live", f"drill.seed={seed}", f"drill.faults={faults}", f"run.name={name}", f"run.storage_path={folder}",
        *more,
    ]  # fmt: skip
    ConfigStore.instance().store(name="drill_schema", node=DrillJobConfig)
    with hydra.initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        return to_dataclass(hydra.compose("drill", arguments), DrillJobConfig), arguments


def run_drill(arguments: list[str], folder: Path, name: str) -> int:
    """Its exit status: 0 where every promise held."""
    with open(folder / f"{name}.out", "wb") as out:
        done = subprocess.run(
            [sys.executable, "-m", "jobs.drill", *arguments],
            cwd=ROOT,
            stdout=out,
            stderr=subprocess.STDOUT,
            check=False,
        )
    print((folder / f"{name}.out").read_text(errors="replace")[-1500:], flush=True)
    return done.returncode


def prediction_of(config: DrillJobConfig, profile: Profile, plays: int) -> Prediction:
    """Of a drill that has not begun."""
    faults, seed = plan_of(config)
    config = with_end(config, faults)
    steps, step = [], 0
    for fault in faults:
        step = fault.at_step if fault.at_step is not None else step
        made = planned(fault.kind, step, {name: fault.option(name) for name in fault.options})
        steps += [made] if made else []
    last_step = config.train.stop_at_step or config.train.steps
    return predict(
        profile,
        config,
        steps,
        last_step=last_step,
        plays=plays,
        seed=seed,
        nodes=config.drill.nodes,
        per_node=config.drill.workers_on_node,
    )


def outcome_of(run_folder: Path) -> Outcome:
    run = RunLogs.read(str(run_folder))
    return Outcome.of(build_report(run.history, run.ledger, run.config))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--quick", action="store_true", help="7 faults in A, 7 in one B, 30 to 60 steps apart")
    parser.add_argument(
        "--folder", type=Path, help="where run folders and predictions are kept; a drill that is there goes on"
    )
    options = parser.parse_args()
    faults, seeds = (7, B_SEEDS[:1]) if options.quick else (64, B_SEEDS)
    closer = ["drill.first_step=40", "drill.every_steps=[30,60]"] if options.quick else []
    with tempfile.TemporaryDirectory(prefix="live-", ignore_cleanup_errors=True) as temporary:
        folder = (options.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        _, arguments = drill_config("a", folder, A_SEED, faults, closer)
        prepare = [sys.executable, "-m", "jobs.prepare_data", f"run.storage_path={folder}"]
        subprocess.run(prepare, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)  # else A's start would hold it
        held = {"a": run_drill(arguments, folder, "a") == 0}
        profile = Profile.read([str(folder / "a")])
        profile = replace(profile, runs=["drill a"])
        (folder / "profile.json").write_text(profile.to_json())
        compared: list[dict[str, Any]] = []
        for seed in seeds:
            name = f"b-{seed}"
            config, arguments = drill_config(name, folder, seed, faults, OTHER + closer)
            prediction, path = (
                prediction_of(config, profile, 8 if options.quick else 40),
                folder / f"prediction-{seed}.json",
            )
            made_at = time.time()
            if not path.exists():  # of a drill that goes on it was made before
                path.write_text(json.dumps({"made_at": made_at, "prediction": prediction.to_dict()}, indent=1) + "\n")
            written = json.loads(path.read_text())
            held[name] = run_drill(arguments, folder, name) == 0
            begun = json.loads((folder / name / "drill.jsonl").read_text().splitlines()[0])["time"]
            assert written["made_at"] < begun, f"{path} was made after its drill began"
            found = Compared(Prediction.of_dict(written["prediction"]), outcome_of(folder / name), name)
            print("\n".join(found.lines()), flush=True)
            compared.append(
                found.to_dict() | {"made_at": written["made_at"], "began_at": begun, "promises_held": held[name]}
            )
    figures = {
        f"{ratio}_points_max": max(abs(each["points"].get(ratio, 100.0)) for each in compared) for ratio in JUDGED
    }
    causes = [cause for each in compared for cause in each["causes"].values()]
    figures["causes_agree_share"] = sum(bool(agrees) for *_, agrees in causes) / max(1, len(causes))
    figures["lost_share_max"] = max(1 - each["was"]["ratios"]["goodput"] for each in compared)
    figures["within"] = float(all(figures[f"{ratio}_points_max"] <= POINTS for ratio in JUDGED))
    write_result(
        options.out, figures, spread={}, peers={}, runs={"drills": compared, "promises_held": held, "faults": faults}
    )


if __name__ == "__main__":
    main()
