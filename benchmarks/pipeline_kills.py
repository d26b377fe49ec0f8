"""How soon all others are out of a step of a pipeline in which a rank dies.

    python benchmarks/pipeline_kills.py --out benchmarks/results/FILE.json [--quick]

Gloo ranks of a thread each, float32, 12 rows a step; collectives may take TIMEOUT_S. One rank of each stage is killed
at the first and at the last of each kind of moment of its step: an action, a message, a collective of attention, the
update, the sums behind it, the snapshot. Measured is the last survivor: seconds from the kill until it has left its
groups, so that it can join the next one.

`told_left_s_...`: survivors are told of the death within 20 ms, as a node's keeper tells them.
`alone_left_s_...`: nothing but the network tells them.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "platform"), str(ROOT / "tests"), str(ROOT)]

from benchmarks.measure import Result, write_result  # noqa: E402

from support.pipeline_kills import LAYOUTS, TIMEOUT_S, kill, moments_of, of_each_kind  # noqa: E402

QUICK = "2 x 2"


def measure(layout: str, told: bool, folder: Path, *, victims: int | None = None) -> list[dict[str, Any]]:
    """One sample a kill; `victims`: no more stages than that lose a rank."""
    moments = moments_of(folder / "whole", layout)
    world_size, parallel = LAYOUTS[layout]
    samples = []
    for victim in range(0, world_size, world_size // parallel.pp)[:victims]:
        for fatal in of_each_kind(moments[victim]):
            found = kill(folder / f"{victim}-{fatal}", layout, victim, fatal, told=told)
            errors, seconds = zip(*(said for rank, said in enumerate(found) if rank != victim), strict=True)
            samples.append(
                {
                    "layout": layout,
                    "told": told,
                    "rank": victim,
                    "moment": moments[victim][fatal],
                    "left_s": max(seconds),
                    "errors": errors,
                }
            )
            print(samples[-1], flush=True)
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where to write the JSON")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} alone, and one rank of it")
    options = parser.parse_args()
    result, samples = Result(), []
    for layout in [QUICK] if options.quick else LAYOUTS:
        for told in (True, False):
            with tempfile.TemporaryDirectory(prefix="kills-") as folder:
                taken = measure(layout, told, Path(folder), victims=1 if options.quick else None)
            name = f"{'told' if told else 'alone'}_left_s_{layout.replace(' ', '_')}"
            result.add(name, [each["left_s"] for each in taken])
            result.runs[name] = {"kills": len(taken)}
            samples += taken
    result.runs["collectives_may_take_s"] = TIMEOUT_S
    write_result(options.out, result.figures, spread=result.spread, peers={}, runs=result.runs, samples=samples)


if __name__ == "__main__":
    main()
