"""Several drills' verdicts in one file: which of them held every promise, and how many faults that were.

    python benchmarks/soaks.py RUN_FOLDER [RUN_FOLDER ...] --out benchmarks/results/FILE.json

Broken verdicts are kept with their details, and what was run: seed, plan, commit, versions; seconds by state; of what
had to be found, after how many seconds it was.
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "platform"), str(ROOT)]

from benchmarks.measure import write_result  # noqa: E402

from regrow.drill.findings import find, sought  # noqa: E402
from regrow.drill.log import Record  # noqa: E402
from regrow.record.log import read_events, read_metrics  # noqa: E402
from regrow.storage import Storage  # noqa: E402


def read(folder: Path) -> dict[str, Any]:
    """One drill: what it was, and every verdict."""
    verdict, plan, report = (
        json.loads((folder / name).read_bytes()) for name in ("verdict.json", "plan.json", "report.json")
    )
    events, rows = read_events(Storage.at(str(folder))), read_metrics(Storage.at(str(folder)))
    begun = [event for event in events if event["event"] == "submitted"]
    records = Record(folder).read()
    verify_every = OmegaConf.load(folder / "config.yaml").cluster.verify_every_steps
    to_find = [each for each in records if each["record"] == "fault" and sought(each["kind"], each["what"])]
    return {
        "seed": plan["seed"],
        "holds": verdict["holds"],
        "faults": len(verdict["faults"]),
        "verdicts": [
            each if not each["holds"] else {key: each[key] for key in ("claim", "holds", "figures")}
            for each in verdict["verdicts"]
        ],
        "found": [asdict(find(each, records, events, rows, verify_every)) for each in to_find],
        "time_s": report["time_s"],
        "plan": plan["plan"],
        "commits": sorted({event["git"] for event in begun}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+", metavar="RUN_FOLDER", help="of a drill that has a verdict")
    parser.add_argument("--out", type=Path, required=True, help="where to write the JSON")
    options = parser.parse_args()
    drills = [read(folder) for folder in options.folders]
    held = [each for each in drills if each["holds"]]
    figures = {
        "drills": float(len(drills)),
        "held": float(len(held)),
        "faults": float(sum(each["faults"] for each in drills)),
        "faults_of_those_that_held": float(sum(each["faults"] for each in held)),
    }
    write_result(options.out, figures, spread={}, peers={}, drills=drills)


if __name__ == "__main__":
    main()
