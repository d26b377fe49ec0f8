"""Goodput before the bill: `python -m jobs.simulate [--json] [+cluster=NAME] [model=NAME] [key=value ...]`.

What share of a cluster's time will be useful work under failures, by policy: from published rates, or those of runs.
Starts nothing.
"""

import json
import sys
from functools import partial

from regrow.config.schema import SimulateJobConfig
from regrow.config.store import run_job
from regrow.simulate.report import figures_of, line_of
from regrow.simulate.study import compare
from regrow.simulate.world import inputs_of, replicas_of


def main(config: SimulateJobConfig, *, as_json: bool) -> None:
    simulate = config.simulate
    all_inputs = inputs_of(config)
    results = compare(all_inputs, replicas_of(simulate), simulate.seed)
    if as_json:
        print(json.dumps(figures_of(simulate, results), indent=2, allow_nan=False))
        return
    for result in results:
        print(line_of(result))


if __name__ == "__main__":
    wants_json = "--json" in sys.argv  # not a flag of Hydra's
    sys.argv = [argument for argument in sys.argv if argument != "--json"]
    run_job(partial(main, as_json=wants_json), name="simulate", schema=SimulateJobConfig)
