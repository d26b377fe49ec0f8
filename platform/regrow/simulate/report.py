"""What jobs.simulate says: lines, JSON and the page."""

from typing import Any

from regrow.config.schema import SimulateConfig
from regrow.show.units import percent
from regrow.simulate.estimate import Estimate
from regrow.simulate.study import mtbf_s, spares_curve, to_json


def line_of(result: Estimate) -> str:
    """One policy."""
    figures = to_json(result)
    low, high = figures["interval"]
    least, most = figures["runs"]
    lost = sorted(result.lost_s.items(), key=lambda item: -item[1])[:3]
    return (
        f"{figures['name']:14} effective {percent(figures['effective'])} ({percent(low)} to {percent(high)}; runs "
        f"{percent(least)} to {percent(most)}), goodput {percent(figures['goodput'])}, "
        f"paid {percent(figures['paid'])}; "
        f"lost most to {', '.join(f'{cause} {percent(seconds / result.wall_s)}' for cause, seconds in lost)}; "
        f"{figures['assumed_share']:.0%} of the loss rests on assumptions"
    )


def figures_of(simulate: SimulateConfig, results: list[Estimate]) -> dict[str, Any]:
    """The content of simulate.json without what a sweep adds."""
    first = results[0].inputs
    job = first.job
    found = {
        "gpus": job.gpus,
        "nodes": job.nodes,
        "units": job.units,
        "num_slices": job.num_slices,
        "spares": job.spares,
        "days": simulate.days,
        "replicas": len(results[0].effective),
        "seed": simulate.seed,
        "faults": simulate.faults.name,
        "mtbf_s": mtbf_s(first),
        "policies": [to_json(each) for each in results],
    }
    if len(simulate.spares) > 1:
        found["spares_curve"] = spares_curve(first, simulate.spares, simulate.replicas, simulate.seed)
    return found
