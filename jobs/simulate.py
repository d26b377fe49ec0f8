"""Goodput before the bill: `python -m jobs.simulate [--json] [+cluster=NAME] [model=NAME] [key=value ...]`.

What share of a cluster's time will be useful work under failures, by policy: from published rates, or those of runs.
Starts nothing.
"""

import json
import sys
from functools import partial
from pathlib import Path

from regrow.config.schema import SimulateJobConfig
from regrow.config.store import run_job
from regrow.simulate.report import figures_of, goal_lines, line_of, write_page
from regrow.simulate.study import compare
from regrow.simulate.world import inputs_of, replicas_of


def main(config: SimulateJobConfig, *, as_json: bool) -> None:
    simulate = config.simulate
    results = compare(inputs_of(config), replicas_of(simulate), simulate.seed)
    if as_json:
        print(json.dumps(figures_of(config, results), indent=2, allow_nan=False))
        return
    for result in results:
        print(line_of(result))
    folder = Path(simulate.out or "runs/simulate")
    found = write_page(folder, config, results)
    for line in goal_lines(found, results[0]) if found else ():
        print(line)
    print(folder / "simulate.html")


if __name__ == "__main__":
    wants_json = "--json" in sys.argv  # not a flag of Hydra's
    sys.argv = [argument for argument in sys.argv if argument != "--json"]
    run_job(partial(main, as_json=wants_json), name="simulate", schema=SimulateJobConfig)
