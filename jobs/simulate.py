"""Goodput before the bill: `python -m jobs.simulate [--json] [+cluster=NAME] [model=NAME] [key=value ...]`.

What share of a cluster's time will be useful work under failures, by policy: from published rates, or those of runs.
Starts nothing.
"""

import json
import sys
from functools import partial

from regrow.config.schema import SimulateJobConfig
from regrow.config.store import load_run_config, run_job
from regrow.simulate.profile import Profile
from regrow.simulate.replay import local_folder, replay
from regrow.simulate.report import figures_of, goal_lines, line_of, write_page
from regrow.simulate.study import compare
from regrow.simulate.world import inputs_of, replicas_of
from regrow.storage import make_folder, path_of


def main(config: SimulateJobConfig, *, as_json: bool) -> None:
    simulate = config.simulate
    if simulate.replay is not None:
        of_run = load_run_config(local_folder(simulate.replay))
        found = replay(simulate.replay, of_run, simulate.runs, seed=simulate.seed)
        print(json.dumps(found.to_dict(), indent=2, allow_nan=False) if as_json else "\n".join(found.lines()))
        return
    profile = Profile.read(simulate.runs) if simulate.runs else None
    inputs, folder = inputs_of(config, profile), path_of(simulate.out or "runs/simulate")
    if not as_json:
        make_folder(folder, "simulate.out")
    results = compare(inputs, replicas_of(simulate), simulate.seed)
    if as_json:
        print(json.dumps(figures_of(config, results), indent=2, allow_nan=False))
        return
    for result in results:
        print(line_of(result))
    sweep = write_page(folder, config, results)
    if profile is not None:
        own = inputs_of(config)[0]  # with what was published
        (folder / "profile.json").write_text(profile.to_json(own.figures, own.job.gpus))
    for line in goal_lines(sweep, results[0]) if sweep else ():
        print(line)
    print(folder / "simulate.html")


if __name__ == "__main__":
    wants_json = "--json" in sys.argv  # not a flag of Hydra's
    sys.argv = [argument for argument in sys.argv if argument != "--json"]
    run_job(partial(main, as_json=wants_json), name="simulate", schema=SimulateJobConfig)
