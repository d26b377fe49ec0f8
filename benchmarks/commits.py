"""Whether a change made it slower: an older commit beside the newest of this checkout, in turn, on the same machine.

    python benchmarks/commits.py --old REV --out benchmarks/results/FILE.json [--rounds 5] [--only recovery ...]

Both are checked out into folders of their own, removed at the end: what is not committed is not measured. Each commit
measures itself, with its own scripts, in processes of their own; which one begins changes from round to round. The
installed packages are the same.

recovery        `recovery.py --only ours --rounds 1`: node kill, worker kill, stopped worker, regrow; three ranks.
asynchronous    The same with `--only asynchronous`, where the commit has it.
checkpoint      `checkpoint_sides.py`, our side: a step with a snapshot, a durable save, restores from the
                own memory, from peers and from storage; 150M parameters, four ranks.
loop_overhead   `loop_overhead.py --pairs 1`: tokens/s of the job over those of a bare loop, with one thread and with
                one for every core.

*_vs_old   The new commit's median over the old one's; the spread is from best over worst to worst over best. Of seconds
           and steps, below 1 is faster; of `loop_overhead`, above 1.

Rounds are kept in FILE as they come; with --resume, those that are there count, and what is missing is run.
"""

import argparse
import json
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "platform"), str(ROOT / "tests"), str(ROOT)]

from benchmarks.measure import run_side, side_env, summary  # noqa: E402

OLD, NEW = "old", "new"
RECOVERY = ("node_kill_s", "worker_kill_s", "hang_s", "regrow_s", "regrow_stall_steps", "lost_steps_max")
TIMEOUT_S, TIDY_S = 3600, 120
Figures = dict[str, float]


def written_by(tree: Path, folder: Path, script: str, *arguments: str) -> Figures:
    """Figures of the JSON that a benchmark of this tree writes."""
    out = folder / "figures.json"
    command = [sys.executable, f"benchmarks/{script}", "--out", str(out), *arguments]
    process = subprocess.Popen(command, cwd=tree, env=side_env(tree), start_new_session=True)
    try:
        if process.wait(TIMEOUT_S):
            sys.exit(f"{script} of {tree} ended with status {process.returncode}")
    except BaseException:
        process.terminate()  # so that it ends what it has started
        process.wait(TIDY_S)
        raise
    figures: Figures = json.loads(out.read_text())["figures"]
    out.unlink()
    return figures


def recovery_figures(tree: Path, folder: Path, side: str) -> Figures:
    found = written_by(tree, folder, "recovery.py", "--only", side, "--rounds", "1", "--folder", str(folder))
    return {name: value for name, value in found.items() if "_vs_" not in name}


def recovery(tree: Path, folder: Path) -> Figures:
    found = recovery_figures(tree, folder, "ours")
    return {name: found[name] for name in RECOVERY if name in found}


def asynchronous(tree: Path, folder: Path) -> Figures:
    found = recovery_figures(tree, folder, "asynchronous")
    return {name.removeprefix("asynchronous_"): value for name, value in found.items()}


def checkpoint(tree: Path, folder: Path) -> Figures:
    with tempfile.TemporaryDirectory(prefix="commits-", dir="/dev/shm") as memory:

        def run_part(part: str, **settings: Any) -> dict[str, Any]:
            script = str(tree / "benchmarks/checkpoint_sides.py")
            return run_side(script, part, json.dumps({"model": "150m", "memory": memory, **settings}), tree=tree)

        steps = run_part("steps", side="ours", world_size=4, step_s=6.0, num_steps=3)
        durable = run_part("durable", side="ours", world_size=4, disk=str(folder), num_saves=1)
        seconds = run_part("restore", world_size=4, to=3, rounds=1, disk=str(folder))["seconds"]
    return {
        "snapshot_step_s": statistics.median(steps["saved_s"]),
        "snapshot_until_committed_s": steps["whole_s"],
        "durable_save_s": statistics.median(durable["seconds"]),
        "restore_own_s": statistics.median(seconds["own"] if "own" in seconds else seconds["mmap"]),  # its older name
        **{f"restore_{way}_s": statistics.median(seconds[way]) for way in ("peers", "storage")},
    }


def loop_overhead(tree: Path, folder: Path) -> Figures:
    return written_by(tree, folder, "loop_overhead.py", "--pairs", "1")


BENCHMARKS: dict[str, Callable[[Path, Path], Figures]] = {
    "recovery": recovery,
    "asynchronous": asynchronous,
    "checkpoint": checkpoint,
    "loop_overhead": loop_overhead,
}


class File:
    """The rounds so far, as JSON, and the figures that follow from them."""

    def __init__(self, path: Path, commits: dict[str, str]) -> None:
        self.path = path
        self.commits = commits
        self.rounds: dict[str, dict[str, list[Figures]]] = {}

    def resume(self) -> None:
        if not self.path.exists():
            return
        before = json.loads(self.path.read_text())
        if before["commits"] != self.commits:
            sys.exit(f"{self.path} compares {before['commits']}, not {self.commits}: give another --out")
        self.rounds = before["rounds"]

    def has(self, benchmark: str, side: str, number: int) -> bool:
        return len(self.rounds.get(benchmark, {}).get(side, [])) > number

    def add(self, benchmark: str, side: str, figures: Figures) -> None:
        self.rounds.setdefault(benchmark, {}).setdefault(side, []).append(figures)
        self.write()

    def write(self) -> None:
        from regrow.record.provenance import hardware, versions

        figures, spread, sides = summarize(self.rounds)
        result = {
            "figures": figures,
            "spread": spread,
            "sides": sides,
            "rounds": self.rounds,
            "commits": self.commits,
            "versions": versions(),
            "hardware": hardware(),
        }
        self.path.write_text(json.dumps(result, indent=2) + "\n")


def summarize(rounds: dict[str, dict[str, list[Figures]]]) -> tuple[Figures, dict[str, list[float]], dict[str, Any]]:
    """Ratios of medians, their spread, and each side's median and range, of every figure that both commits have."""
    ratios: Figures = {}
    spread: dict[str, list[float]] = {}
    sides: dict[str, Any] = {}
    for benchmark, of_side in rounds.items():
        for name in sorted({name for done in of_side.values() for figures in done for name in figures}):
            values = {
                side: [figures[name] for figures in of_side.get(side, []) if name in figures] for side in (OLD, NEW)
            }
            key = f"{benchmark}_{name}"
            sides[key] = {side: summary(found) for side, found in values.items() if found}
            old, new = values[OLD], values[NEW]
            if not old or not new or min(old) <= 0:
                continue
            ratios[f"{key}_vs_old"] = statistics.median(new) / statistics.median(old)
            spread[f"{key}_vs_old"] = [min(new) / max(old), max(new) / min(old)]
    return ratios, spread, sides


@contextmanager
def checked_out(commit: str, folder: Path) -> Iterator[Path]:
    subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(folder), commit], cwd=ROOT, check=True)
    try:
        yield folder
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", str(folder)], cwd=ROOT, check=False)


def resolve(commit: str) -> str:
    command = ["git", "rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"--old {commit}: there is no such commit here")
    return done.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", required=True, metavar="REV", help="the commit to compare with")
    parser.add_argument("--out", type=Path, required=True, help="where to write the JSON")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=[*BENCHMARKS], default=[*BENCHMARKS])
    parser.add_argument("--resume", action="store_true", help="the rounds that are in --out count")
    options = parser.parse_args()
    file = File(options.out, {OLD: resolve(options.old), NEW: resolve("HEAD")})
    if options.resume:
        file.resume()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that both trees are removed
    folder = Path(tempfile.mkdtemp(prefix="commits-"))
    try:
        with ExitStack() as stack:
            trees = {side: stack.enter_context(checked_out(file.commits[side], folder / side)) for side in (OLD, NEW)}
            for number in range(options.rounds):
                for benchmark in options.only:
                    for side in (OLD, NEW) if number % 2 == 0 else (NEW, OLD):
                        if not file.has(benchmark, side, number):
                            figures = BENCHMARKS[benchmark](trees[side], folder)
                            file.add(benchmark, side, figures)
                            print(f"{benchmark} {number} {side}: {json.dumps(figures)}", flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
