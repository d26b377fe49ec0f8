"""How soon training goes on after a fault: ours against Ray Train's own elasticity, as it comes and tuned.

    python benchmarks/recovery.py --out benchmarks/results/FILE.json [--quick] [--only ours asynchronous ours_default
                                  tuned default recompiles]

All sides train the default model of `jobs.pretrain` with the same step, batch and threads, on three ranks of which two
may go on, each run on a cluster of its own: a head, and three raylets with room for a worker each. Rounds go from side
to side. In each run, at random instants and to random ranks, the same for all sides:

worker_kill  kill -9 of a worker.
node_kill    kill -9 of a raylet and everything below it, and what it held in memory is removed.
regrow       another node comes.
hang         SIGSTOP of a worker. A stock side that has not gone on after a while gives a lower bound.

ours     `python -m jobs.pretrain` with a snapshot of every step (`snapshot.every_steps=1`); all else as it comes.
asynchronous  The same with `cluster.backend=asynchronous`: on CPU, NCCL's behaviour where a rank is lost.
ours_default  Ours on a Ray that looks after its nodes as it comes, as default's does.
default  Ray Train's settings as they come: `ScalingConfig(num_workers=(2, 3))`, `FailureConfig(max_failures=-1)`. The
         training function saves a distributed checkpoint every 5 steps, reports it, and begins from the newest.
tuned    The same with shorter health checks and timeouts, and decisions by current reservations: `recovery_stock.py`.

On the clusters of ours, asynchronous and tuned, Ray looks after its nodes every 0.25 s, and knows in a second of one
that is killed; as it comes, under default and ours_default, it takes some 15. Tuned cannot place anything before; ours
goes on after a few seconds where Ray says nothing.

Seconds are from the fault to the end of the first step past all that had been finished before: what had to be trained
again is within. Each side writes a line for every step that has ended; nothing else is asked of it.

node_kill_s, worker_kill_s, hang_s     Of ours; `hang_minus_5_steps_s` is less five of the group's median steps.
*_vs_tuned_stock, *_vs_default_stock   Ratios of medians; the spread is from best over worst to worst over best.
asynchronous_vs_gloo_*                 Asynchronous' medians over ours.
ours_default_vs_ours_*, _vs_default_stock_*  Its medians over ours, and over default's.
first_step_after_death_visible_s       From when Ray's GCS knows of the node's death, looked at every 20 ms.
regrow_stall_steps                     From the last step of two ranks to the first of three, less one of their median
                                       steps, in those; `regrow_stall_but_restore_steps` leaves out what the new group
                                       took to get its state. `regrow_s` is from when the node was there.
lost_steps_max                         Steps trained again, over all faults of ours.
recompiles                             Graphs that a surviving process compiles in two resizes (`parallel.compile`).

Samples are kept in FILE as they come. With --resume, those that are there count, and what is missing is run.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "platform"), str(ROOT / "tests"), str(ROOT)]

from benchmarks.measure import write_result  # noqa: E402
from benchmarks.recovery_cluster import Cluster  # noqa: E402
from benchmarks.recovery_faults import RESUME_S, Trial, wait_until_settled  # noqa: E402
from benchmarks.recovery_samples import (  # noqa: E402
    ASYNCHRONOUS,
    DEFAULT,
    FAULTS,
    HANG,
    NODE,
    OF_OURS,
    OURS,
    OURS_DEFAULT,
    RECOMPILES,
    REGROW,
    SIDES,
    TUNED,
    WORKER,
    Sample,
    describe,
    graphs_compiled,
    summarize,
)
from benchmarks.recovery_sides import (  # noqa: E402
    MOST_WORKERS,
    Ours,
    Side,
    SideFailed,
    Stock,
    environment_of,
    prepare_corpus,
    wait_for,
    write_config,
)
from benchmarks.recovery_steps import resumption  # noqa: E402

from regrow.drill.processes import send  # noqa: E402

ROUNDS = 5
QUICK_ROUNDS = {DEFAULT: 1, TUNED: 3, OURS: 5, ASYNCHRONOUS: 5, OURS_DEFAULT: 5}
QUICK_FAULTS = {
    DEFAULT: (NODE,),
    TUNED: (WORKER, NODE),
    OURS: (WORKER, NODE, REGROW),
    ASYNCHRONOUS: (WORKER, NODE, REGROW),
    OURS_DEFAULT: (WORKER, NODE, REGROW),
}
QUICK_ROUNDS_TOGETHER = 3  # rounds of ours in one run, which ends with a hang
SETTLED_STEPS, QUICK_SETTLED_STEPS = 10, 6  # of a group, before something is done to it
HANG_WAIT_S = 60.0
COMPILE = ["parallel.compile=true", "parallel.compile_backend=aot_eager", "parallel.slices_per_pass=1"]


@dataclass(frozen=True)
class Run:
    """One run of a side, and what is done to it: rounds, each with a fault."""

    side: str
    faults: tuple[tuple[int, str], ...]


@dataclass(frozen=True)
class Place:
    """What is the same for all runs: where they write, what they read, how long a group runs before a fault."""

    storage: Path
    config: Path
    corpus: Path
    settled_steps: int

    @classmethod
    def prepare(cls, folder: str, settled_steps: int) -> "Place":
        storage = Path(tempfile.mkdtemp(prefix="recovery-", dir=folder))
        config = write_config(storage / "config")
        return cls(storage, config, prepare_corpus(config, storage), settled_steps)


def plan_runs(rounds: dict[str, int], samples: Sequence[Sample], *, quick: bool) -> list[Run]:
    """The runs by which each side gets so many rounds, from side to side in turn. Rounds that are whole stay."""
    left: dict[str, list[int]] = {}
    for side in SIDES:
        met = {(sample.round, sample.fault) for sample in samples if sample.side == side}
        faults = QUICK_FAULTS[side] if quick else FAULTS
        left[side] = [number for number in range(rounds.get(side, 0)) if not met.issuperset(each(number, faults))]
    runs = []
    while any(left.values()):
        for side in SIDES:
            together = QUICK_ROUNDS_TOGETHER if quick and side in OF_OURS else 1
            numbers, left[side] = left[side][:together], left[side][together:]
            planned = [pair for number in numbers for pair in each(number, QUICK_FAULTS[side] if quick else FAULTS)]
            if quick and side in OF_OURS and numbers:
                planned.append((numbers[-1], HANG))
            if planned:
                runs.append(Run(side, tuple(planned)))
    return runs


def each(number: int, faults: Sequence[str]) -> list[tuple[int, str]]:
    return [(number, fault) for fault in faults]


def make_run(run: Run, place: Place, keep: Callable[[Sample], None]) -> None:
    """Do its faults to a side. Raises SideFailed, with what there is to know; Ray's logs stay then."""
    with start_cluster(run.side) as cluster, start(run, cluster, place) as side:
        try:
            trial = Trial(side, settled_steps=place.settled_steps, hang_wait_s=HANG_WAIT_S)
            for number, fault in run.faults:
                sample = trial.meet(fault, number, random.Random(f"{number} {fault}"))
                print(describe(sample), flush=True)
                keep(sample)
        except Exception:
            keep_logs(cluster)
            raise


def start_cluster(side: str) -> Cluster:
    try:
        return Cluster(MOST_WORKERS, environment_of(side))
    except Exception as error:  # Ray raises many kinds, on a machine that does too much else
        raise SideFailed(f"{side}: the cluster did not start: {type(error).__name__}: {error}") from error


def start(run: Run, cluster: Cluster, place: Place) -> Side:
    name = f"{run.side}-{run.faults[0][0]}-{os.urandom(2).hex()}"
    if run.side in OF_OURS:
        backend = "asynchronous" if run.side == ASYNCHRONOUS else "auto"
        return Ours(cluster, place.storage, name, [f"cluster.backend={backend}"], side=run.side)
    return Stock(cluster, place.storage, name, corpus=place.corpus, config=place.config, tuned=run.side == TUNED)


def count_recompiles(place: Place) -> list[int]:
    """Graphs that each surviving process compiles while a group shrinks and grows back."""
    name = f"{RECOMPILES}-{os.urandom(2).hex()}"
    with start_cluster(OURS) as cluster, Ours(cluster, place.storage, name, COMPILE) as side:
        try:
            for _ in range(2):
                group = wait_until_settled(side, place.settled_steps, world_size=MOST_WORKERS)
                send(signal.SIGKILL, [side.workers()[-1].pid])
                wait_for(partial(goes_on, side, group), side, RESUME_S, "a step on two ranks")
        except Exception:
            keep_logs(cluster)
            raise
        return graphs_compiled(side.groups())


def goes_on(side: Side, group: int) -> bool:
    return resumption(side.trail.look(), group) is not None


def keep_logs(cluster: Cluster) -> None:
    cluster.keep = True
    print(f"Ray's logs stay in {cluster.folder}", flush=True)


class File:
    """The JSON, written after each run."""

    def __init__(self, path: Path, quick: bool) -> None:
        self.path, self.quick = path, quick
        self.samples: list[Sample] = []
        self.recompiles: list[int] = []
        self.failures: list[str] = []
        self.commits: set[str] = set()

    def resume(self) -> None:
        """Take over what is there."""
        if self.path.exists():
            before = json.loads(self.path.read_bytes())
            self.samples = [Sample.of(row) for side in SIDES for row in before["runs"].get(side, [])]
            self.recompiles, self.failures = before["runs"][RECOMPILES], before["failures"]
            self.commits = set(before["settings"]["commits"])

    def write(self) -> None:
        from regrow.record.provenance import git_sha

        self.commits.add(git_sha() or "")
        result = summarize(self.samples, self.recompiles)
        write_result(
            self.path,
            result.figures,
            spread=result.spread,
            peers=result.peers,
            runs=result.runs,
            failures=self.failures,
            settings={"quick": self.quick, "hang_wait_s": HANG_WAIT_S, "commits": sorted(self.commits)},
        )


def attempt(do: Callable[[], Any], what: str, file: File) -> None:
    """Do it; a side that fails is reported, kept in the file, and does not keep the others from theirs."""
    try:
        do()
    except SideFailed as failure:
        print(f"FAILED {what}: {failure}", flush=True)
        file.failures.append(f"{what}: {failure}")
    file.write()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where to write the JSON")
    parser.add_argument("--quick", action="store_true", help="fewer rounds and faults of the stock sides")
    parser.add_argument("--only", nargs="+", choices=[*SIDES, RECOMPILES], default=[*SIDES, RECOMPILES])
    parser.add_argument("--rounds", type=int, help=f"of each side; {ROUNDS}, with --quick {QUICK_ROUNDS}")
    parser.add_argument("--resume", action="store_true", help="the samples that are in --out count")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="runs are written below it, and removed")
    options = parser.parse_args()
    rounds = dict.fromkeys(SIDES, options.rounds) if options.rounds else None
    rounds = rounds or (QUICK_ROUNDS if options.quick else dict.fromkeys(SIDES, ROUNDS))
    file = File(options.out, options.quick)
    if options.resume:
        file.resume()
    failed_before = len(file.failures)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that what was started is ended
    place = Place.prepare(options.folder, QUICK_SETTLED_STEPS if options.quick else SETTLED_STEPS)
    keep = True
    try:
        chosen = {side: rounds[side] for side in options.only if side in SIDES}
        for run in plan_runs(chosen, file.samples, quick=options.quick):
            attempt(partial(make_run, run, place, file.samples.append), f"{run.side}, {run.faults}", file)
        if RECOMPILES in options.only and not file.recompiles:
            attempt(lambda: file.recompiles.extend(count_recompiles(place)), RECOMPILES, file)
        keep = len(file.failures) > failed_before
    except (KeyboardInterrupt, SystemExit):
        keep = False
        raise
    finally:
        if keep:
            print(f"what the runs wrote stays in {place.storage}")
        else:
            shutil.rmtree(place.storage, ignore_errors=True)
    sys.exit(1 if keep else 0)


if __name__ == "__main__":
    main()
