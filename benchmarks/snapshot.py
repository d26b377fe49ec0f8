"""What snapshots add to training, with everything that competes in it: real steps, real links, the job's own waits.

    python benchmarks/snapshot.py --out benchmarks/results/FILE.json [--quick] [--resume]

Four ranks train by the job's own loop (`train.loop`) on gloo, FSDP2, float32, AdamW: forward and backward of as many
passes as a step of 0.5, 2 or 8 s has, on all cores. Their snapshots go by way of two keepers on hosts apart, network
namespaces whose links `tc` shapes to 1, 10 or 25 Gbit/s (`regrow.drill.hosts`); the ranks' own collectives do not
cross them. Steps beside a snapshot, from its copy to the step after its commit, and as many without one take turns;
each snapshot is compared with the mean of the plain steps before and after it, so that what a shared machine does
within minutes is in both. What one adds is divided by K, which the job's own code (`snapshot.every_steps=auto`) makes
of the same steps. Failures are expected as often as 98,304 GPUs have them at Llama 3's rate, one in half an hour, so
that K is not just the most that is allowed.

added_step_fraction_max   The largest of the cells' medians of what a snapshot adds over K plain steps. `infeasible` are
                          cells in which one snapshot adds so much that not even K=100 would bring it below 2%; they
                          are left out.
added_steps_*             What one snapshot adds, in plain steps, whatever K is.
added_cpu_fraction_*      The same of CPU seconds, of ranks and keepers together: what a step grows by where all cores
                          are at work, also on a machine whose cores others take meanwhile.
blocked_vs_tuned_dcp      Seconds that ours adds to a step over those that DCP's `async_save` adds at the same K, with
                          staging beside the steps, in the faster of its two ways; DCP writes to memory, by no link.
                          Where DCP adds nothing that can be measured there is no ratio.
link_use_25gbit           Bytes/s of commits, the trainer idle, over the smaller of the link and a bare loop that
                          checksums, sends, receives, checksums and keeps, one flow each way, on the same cores.
until_committed_s         From the end of a step to the commit of its snapshot: the largest of the cells' medians.

Parts (the link; a cell of ours; one of DCP's) are kept in FILE as they come, with the load and the commit of each; with
--resume, on the same kind of machine, those that are there count. All of it takes about an hour. Needs root, `ip` and
`tc`. Figures of a machine that does other things are those of both.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "platform"), str(ROOT / "tests"), str(ROOT)]

from benchmarks.measure import Result, run_side, summary, write_result  # noqa: E402

from regrow.record.provenance import git_sha, hardware  # noqa: E402

SIDES = str(Path(__file__).parent / "snapshot_sides.py")
LINKS_GBIT, STEPS_S, LINK_GBIT = (1, 10, 25), (0.5, 2.0, 8.0), 25
WORLD_SIZE = 4
MTBF_S = 1860.0
MOST_STEPS_LOST = 16  # the default
OURS = "ours"
DCP = ("dcp_async_process", "dcp_async_thread")
MODEL = {"name": "12m", "dim": 384, "num_layers": 6, "num_heads": 6, "num_kv_heads": 3, "ffn_dim": 1024}
SEQ_LEN = 32  # passes short enough to make up a step of 0.5 s
FEASIBLE_SHARE, MOST_K = 0.02, 100
LEAST_S = 1e-3  # added to a step: less is not told from nothing
TIMEOUT_S = 7200


@dataclass
class Kept:
    """The parts, in the file as they come: with `--resume` those that are there count."""

    path: Path
    settings: dict[str, Any]
    parts: list[dict[str, Any]] = field(default_factory=list)

    def resume(self) -> None:
        if not self.path.exists():
            return
        before = json.loads(self.path.read_text())
        for name, mine in (("settings", self.settings), ("hardware", hardware())):
            if before[name] != mine:
                sys.exit(f"{self.path} has {name} {before[name]}, these are {mine}: give another --out")
        self.parts = before["parts"]

    def part(self, name: str, options: argparse.Namespace, **more: Any) -> dict[str, Any]:
        """What a part measured, now or before."""
        wanted = {"part": name, **more}
        for each in self.parts:
            if each["wanted"] == wanted:
                return each
        load = os.getloadavg()[0]
        done = run(name, options, **more)
        done = {"wanted": wanted, **done, "load_before": load, "load_after": os.getloadavg()[0], "git": git_sha()}
        self.parts.append(done)
        self.write()
        print(told(done), flush=True)
        return done

    def write(self) -> None:
        result = summarize(self.parts)
        more = {"infeasible": result.runs["infeasible"], "parts": self.parts, "settings": self.settings}
        write_result(self.path, result.figures, spread=result.spread, peers=result.peers, show=False, **more)


def run(name: str, options: argparse.Namespace, **more: Any) -> dict[str, Any]:
    shared = {"world_size": WORLD_SIZE, "memory": options.memory_folder}
    if name == "cell":
        more |= {"snapshots": options.snapshots, "most_steps_lost": MOST_STEPS_LOST, "mtbf_s": MTBF_S}
        more |= {"model": MODEL, "seq_len": SEQ_LEN}
    return run_side(SIDES, name, json.dumps(shared | more), timeout_s=TIMEOUT_S)


def told(done: dict[str, Any]) -> str:
    """A part, in a line."""
    wanted, load = done["wanted"], f"load {done['load_before']:.1f}"
    if wanted["part"] == "link":
        return f"link: {[round(done['bytes'] / seconds / 1e9, 2) for seconds in done['seconds']]} GB/s, {load}"
    added = " ".join(f"{steps:+.2f}" for steps in added_steps(done))
    at = f"{wanted['step_s']:g} s" + (f", {wanted['gbit']:g} Gbit/s" if wanted["side"] == OURS else "")
    chosen = f", K={done['every_steps']}" if wanted["side"] == OURS else ""
    return f"{wanted['side']}, {at}: snapshots add {added} steps{chosen}, {load}"


def added_steps(cell: dict[str, Any]) -> list[float]:
    """What each of its snapshots adds, in plain steps."""
    return [one["added_s"] / one["plain_s"] for one in cell["snapshots"]]


def measure(kept: Kept, options: argparse.Namespace) -> None:
    """Run what is chosen and not there."""
    if "link" in options.only:
        more = {"gbit": LINK_GBIT, "model": "150m", "num_commits": 3 if options.quick else 8}
        kept.part("link", options, **more)
    if "cells" not in options.only:
        return
    for step_s in options.steps or ([0.5, 2.0] if options.quick else STEPS_S):
        for gbit in options.links or ([1, 10] if options.quick else LINKS_GBIT):
            kept.part("cell", options, side=OURS, gbit=gbit, step_s=step_s)
        for side in DCP[:1] if options.quick else DCP:
            kept.part("cell", options, side=side, gbit=0, step_s=step_s)


def summarize(parts: Sequence[dict[str, Any]]) -> Result:
    """The figures, of the parts that are there."""
    result = Result()
    result.runs["infeasible"] = []
    for part in parts:
        if part["wanted"]["part"] == "link":
            add_link(result, part)
    cells = [part for part in parts if part["wanted"]["part"] == "cell"]
    ours = [cell for cell in cells if cell["wanted"]["side"] == OURS]
    for cell in ours:
        add_cell(result, cell)
    for step_s in sorted({cell["wanted"]["step_s"] for cell in cells}):
        of_step = [cell for cell in cells if cell["wanted"]["step_s"] == step_s]
        theirs = [cell for cell in of_step if cell not in ours]
        mine = [cell for cell in of_step if cell in ours]
        if theirs and mine:
            compare(result, f"{step_s:g}s", max(mine, key=lambda cell: cell["wanted"]["gbit"]), theirs)
    return result


def add_link(result: Result, done: dict[str, Any]) -> None:
    limit = min(done["link_bytes_per_s"], statistics.median(done["bare_bytes_per_s"]))
    result.add("link_use_25gbit", [done["bytes"] / seconds / limit for seconds in done["seconds"]])
    result.add("commit_bytes_per_s_25gbit", [done["bytes"] / seconds for seconds in done["seconds"]])
    result.peers["bare_bytes_per_s"] = summary(done["bare_bytes_per_s"])


def add_cell(result: Result, done: dict[str, Any]) -> None:
    every_steps, figures, wanted = done["every_steps"], result.figures, done["wanted"]
    name = f"{wanted['step_s']:g}s_{wanted['gbit']:g}gbit"
    result.add(f"added_steps_{name}", added_steps(done))
    if figures[f"added_steps_{name}"] / MOST_K > FEASIBLE_SHARE:
        result.runs["infeasible"].append(name)
    else:
        result.add(f"added_step_fraction_{name}", [steps / every_steps for steps in added_steps(done)])
        share = figures[f"added_step_fraction_{name}"]
        figures["added_step_fraction_max"] = max(share, figures.get("added_step_fraction_max", share))
    cpu = [one["added_cpu_s"] / one["plain_cpu_s"] / every_steps for one in done["snapshots"]]
    result.add(f"added_cpu_fraction_{name}", cpu)
    figures[f"every_steps_{name}"] = every_steps
    figures["until_committed_s"] = max(done["choices"][-1]["commit_s"], figures.get("until_committed_s", 0.0))


def compare(result: Result, name: str, ours: dict[str, Any], theirs: list[dict[str, Any]]) -> None:
    """With DCP's faster way, at our K by the fastest link."""
    every_steps = ours["every_steps"]
    added = {cell["wanted"]["side"]: added_s(cell, every_steps) for cell in theirs}
    steps = {cell["wanted"]["side"]: added_steps(cell) for cell in theirs}
    best = min(steps, key=lambda side: statistics.median(steps[side]))
    result.peers[f"dcp_added_steps_{name}"] = {**summary(steps[best]), "side": best}
    share = [each / every_steps for each in steps[best]]
    result.peers[f"dcp_added_step_fraction_{name}"] = {**summary(share), "side": best, "every_steps": every_steps}
    if (dcp := statistics.median(added[best])) > LEAST_S:
        ratio = max(statistics.median(added_s(ours, every_steps)), 0.0) / dcp
        result.figures["blocked_vs_tuned_dcp"] = max(ratio, result.figures.get("blocked_vs_tuned_dcp", 0.0))


def added_s(cell: dict[str, Any], every_steps: int) -> list[float]:
    """Seconds a step, by each snapshot."""
    return [one["added_s"] / every_steps for one in cell["snapshots"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where to write the JSON")
    parser.add_argument("--resume", action="store_true", help="the parts that are in --out count")
    parser.add_argument("--quick", action="store_true", help="3 snapshots, 0.5 and 2 s, 1 and 10 Gbit/s")
    parser.add_argument("--memory-folder", default="/dev/shm")
    parser.add_argument("--links", type=float, nargs="*", help="Gbit/s")
    parser.add_argument("--steps", type=float, nargs="*", help="seconds")
    parser.add_argument("--snapshots", type=int, help="that count, in each cell (11)")
    parser.add_argument("--only", nargs="+", choices=("cells", "link"), default=["cells", "link"])
    options = parser.parse_args()
    options.snapshots = options.snapshots or (3 if options.quick else 11)
    of_cells = {"model": MODEL, "seq_len": SEQ_LEN, "snapshots": options.snapshots}
    kept = Kept(options.out, {**of_cells, "mtbf_s": MTBF_S, "most_steps_lost": MOST_STEPS_LOST})
    if options.resume:
        kept.resume()
    measure(kept, options)
    print(json.dumps(summarize(kept.parts).figures))


if __name__ == "__main__":
    main()
