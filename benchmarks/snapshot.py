"""What snapshots add to training, with everything that competes in it: real steps, real links, the job's own waits.

    python benchmarks/snapshot.py --out benchmarks/results/FILE.json [--quick]

Four ranks train by the job's own loop (`train.loop`) on gloo, FSDP2, float32, AdamW: forward and backward of as many
passes as a step of 0.5, 2 or 8 s has, on all cores. Their snapshots go by way of two keepers on hosts apart, network
namespaces whose links `tc` shapes to 1, 10 or 25 Gbit/s (`regrow.drill.hosts`); the ranks' own collectives do not
cross them. `snapshot.every_steps=auto`: K comes from the same code as in a job, is told by the same all-reduce, and
changes while it runs. Windows with and without snapshots take turns, each of at least three commits; means of steps.
Failures are expected as often as 98,304 GPUs have them at Llama 3's rate, one in half an hour, so that K is not just
the most that is allowed.

added_step_fraction_max   The largest of the cells' medians of (step with snapshots / step without - 1). `infeasible`
                          are cells in which one snapshot adds so much that not even K=100 would bring it below 2%; they
                          are left out.
added_cpu_fraction_*      The same of CPU seconds, of ranks and keepers together: what a step grows by where all cores
                          are at work, also on a machine whose cores others take meanwhile.
blocked_vs_tuned_dcp      Seconds that ours adds to a step over those that DCP's `async_save` adds at the same K, with
                          staging beside the steps, in the faster of its two ways; DCP writes to memory, by no link.
                          Where DCP adds nothing that can be measured there is no ratio.
link_use_25gbit           Bytes/s of commits, the trainer idle, over the smaller of the link and a bare loop that
                          checksums, sends, receives, checksums and keeps, one flow each way, on the same cores.
until_committed_s         From the end of a step to the commit of its snapshot: the largest of the cells' medians.

Needs root, `ip` and `tc`. Figures of a machine that does other things are those of both: `load` is what it did.
"""

import argparse
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "platform"), str(ROOT / "tests"), str(ROOT)]

from benchmarks.measure import Result, run_side, summary, write_result  # noqa: E402

SIDES = str(Path(__file__).parent / "snapshot_sides.py")
WORLD_SIZE = 4
MTBF_S = 1860.0
MOST_STEPS_LOST = 16  # the default
DCP = ("dcp_async_process", "dcp_async_thread")
MODEL = {"name": "12m", "dim": 384, "num_layers": 6, "num_heads": 6, "num_kv_heads": 3, "ffn_dim": 1024}
SEQ_LEN = 64
FEASIBLE_SHARE, MOST_K = 0.02, 100
LEAST_S = 1e-3  # added to a step: less is not told from nothing
TIMEOUT_S = 7200


def measure_cells(result: Result, options: argparse.Namespace) -> None:
    links, steps = ([1, 10], [0.5, 2.0]) if options.quick else ([1, 10, 25], [0.5, 2.0, 8.0])
    shares, waits = dict[str, float](), dict[str, float]()
    cells, infeasible = result.runs.setdefault("cells", {}), []
    for step_s in options.steps or steps:
        for gbit in options.links or links:
            name = f"{step_s:g}s_{gbit:g}gbit"
            done = cells[name] = part("cell", options, side="ours", gbit=gbit, step_s=step_s)
            added = [pair["added_s"] / pair["plain_s"] for pair in done["pairs"]]
            every = done["pairs"][-1]["every"]
            of_one = statistics.median(pair["added_s"] * pair["every"] for pair in done["pairs"])
            print(f"{name}: K={every} added={added} load={done['load_before']:.1f}", flush=True)
            if of_one / MOST_K > FEASIBLE_SHARE * step_s:
                infeasible.append(name)
            else:
                shares[name] = statistics.median(added)
                result.spread[f"added_step_fraction_{name}"] = [min(added), max(added)]
            cpu = [pair["added_cpu_s"] / pair["plain_cpu_s"] for pair in done["pairs"]]
            result.add(f"added_cpu_fraction_{name}", cpu)
            waits[name] = done["choices"][-1]["commit_s"]
        compare(result, options, step_s, cells)
    result.figures |= {f"added_step_fraction_{name}": share for name, share in shares.items()}
    result.figures |= {f"every_steps_{name}": done["pairs"][-1]["every"] for name, done in cells.items()}
    if shares:
        result.figures["added_step_fraction_max"] = max(shares.values())
    result.figures["until_committed_s"] = max(waits.values())
    result.runs["infeasible"] = infeasible


def compare(result: Result, options: argparse.Namespace, step_s: float, cells: dict[str, Any]) -> None:
    """DCP at the K of the fastest link."""
    ours = [done for name, done in cells.items() if name.startswith(f"{step_s:g}s_")][-1]
    every = ours["pairs"][-1]["every"]
    sides = DCP[:1] if options.quick else DCP
    runs = {side: part("cell", options, side=side, gbit=0, step_s=step_s, every_steps=every) for side in sides}
    result.runs.setdefault("dcp", {})[f"{step_s:g}s"] = runs
    added = {side: [pair["added_s"] for pair in done["pairs"]] for side, done in runs.items()}
    best = min(added, key=lambda side: statistics.median(added[side]))
    mine = statistics.median(pair["added_s"] for pair in ours["pairs"])
    result.peers[f"dcp_added_s_{step_s:g}s"] = {**summary(added[best]), "side": best, "every_steps": every}
    theirs = statistics.median(added[best])
    print(f"{step_s:g} s, K={every}: ours adds {mine:.4f} s, {best} {theirs:.4f} s", flush=True)
    if theirs > LEAST_S:
        ratio = max(mine, 0.0) / theirs
        result.figures["blocked_vs_tuned_dcp"] = max(ratio, result.figures.get("blocked_vs_tuned_dcp", 0.0))


def measure_link(result: Result, options: argparse.Namespace) -> None:
    shared = {"world_size": WORLD_SIZE, "memory": options.memory_folder}
    more = {"gbit": 25, "model": "150m", "num_commits": 3 if options.quick else 8}
    done = result.runs["link"] = run_side(SIDES, "link", json.dumps(shared | more), timeout_s=TIMEOUT_S)
    limit = min(done["link_bytes_per_s"], statistics.median(done["bare_bytes_per_s"]))
    result.add("link_use_25gbit", [done["bytes"] / seconds / limit for seconds in done["seconds"]])
    result.add("commit_bytes_per_s_25gbit", [done["bytes"] / seconds for seconds in done["seconds"]])
    result.peers["bare_bytes_per_s"] = summary(done["bare_bytes_per_s"])
    print(f"link: {result.figures['link_use_25gbit']:.2f} of {limit / 1e9:.2f} GB/s", flush=True)


def part(name: str, options: argparse.Namespace, **more: Any) -> dict[str, Any]:
    shared = {"world_size": WORLD_SIZE, "memory": options.memory_folder, "model": MODEL, "seq_len": SEQ_LEN}
    cell = {"pairs": options.pairs or (2 if options.quick else 5), "most_steps_lost": MOST_STEPS_LOST, "mtbf_s": MTBF_S}
    load = os.getloadavg()[0]
    done = run_side(SIDES, name, json.dumps({**shared, **cell, **more}), timeout_s=TIMEOUT_S)
    return {**done, "load_before": load, "load_after": os.getloadavg()[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where to write the JSON")
    parser.add_argument("--quick", action="store_true", help="steps of 0.5 and 2 s at 1 and 10 Gbit/s: ten minutes")
    parser.add_argument("--memory-folder", default="/dev/shm")
    parser.add_argument("--links", type=float, nargs="*", help="Gbit/s")
    parser.add_argument("--steps", type=float, nargs="*", help="seconds")
    parser.add_argument("--pairs", type=int, help="of windows with and without, in each cell")
    parser.add_argument("--only", nargs="+", choices=("cells", "link"), default=["cells", "link"])
    options = parser.parse_args()
    result = Result()
    if "link" in options.only:
        measure_link(result, options)
    if "cells" in options.only:
        measure_cells(result, options)
    write_result(
        options.out,
        result.figures,
        spread=result.spread,
        peers=result.peers,
        runs=result.runs,
        infeasible=result.runs.get("infeasible", []),
        settings={"model": MODEL, "seq_len": SEQ_LEN, "mtbf_s": MTBF_S, "most_steps_lost": MOST_STEPS_LOST},
    )


if __name__ == "__main__":
    main()
