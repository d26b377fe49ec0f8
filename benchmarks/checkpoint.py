"""What checkpoints cost: bytes and seconds of restores, a durable save end to end. Snapshots: `snapshot.py`.

    python benchmarks/checkpoint.py --out benchmarks/results/FILE.json [--quick] [--only bytes restore durable]

The peer is torch.distributed.checkpoint (DCP), as fast as its settings make it on CPU (`checkpoint_dcp.py`); where it
can be run in more than one way, the best median counts. Both sides save and restore the same FSDP2 state, parameters
and AdamW moments in float32 on four gloo ranks, in turn, each in processes of its own; figures are medians over rounds.

bytes     Bytes read from storage over those needed, over all ranks: 4 -> 3 ranks, 3 -> 4, and 4 -> HSDP of 2 x 2,
          where the whole state once is needed. Headers and indexes count. Ours are counted where storage is read,
          DCP's below its reader's streams, as what is asked of the operating system.
restore   DCP's seconds over ours, 4 -> 3 ranks, in fresh processes, all of it from memory: DCP's files are in the page
          cache; ours are the node's own snapshots, which its memory has, peers' over sockets (every byte), and the
          files of our own checkpoint. Beside it a bare loop: the same bytes over the same sockets, checksummed, with
          no plan, header or place of theirs.
durable   Seconds from the beginning of the copy until a checkpoint is whole on disk, fsync and all, over those of
          `async_save` until its future resolves. Ours include checksums and copies to the peer; beside it without
          these copies, of which DCP makes none, and the disk alone: the same bytes by the same writes, from where they
          lie.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "platform"), str(ROOT / "tests"), str(ROOT)]

from benchmarks.measure import Result, run_side, summary, write_result  # noqa: E402

SIDES = str(Path(__file__).parent / "checkpoint_sides.py")
PARTS = ("bytes", "restore", "durable")
WORLD_SIZE = 4
ASYNC = ("dcp_async_process", "dcp_async_thread")
LAYOUTS = {"4to3": (4, 3, 1), "3to4": (3, 4, 1), "hsdp": (4, 4, 2)}  # ranks before, after, replicas after
TIMEOUT_S = 3600


@dataclass(frozen=True)
class Settings:
    """Of all parts."""

    model: str
    memory: str  # a folder in memory
    disk: str  # a folder on disk
    rounds: int
    num_saves: int  # timed durable ones, in each round


def bytes_part(result: Result, settings: Settings) -> None:
    result.runs["bytes"] = {}
    for name, (before, after, dp_replicate) in LAYOUTS.items():
        layout = {"before": before, "after": after, "dp_replicate": dp_replicate}
        read = run_part("count", settings, **layout, disk=settings.disk)
        assert min(read["ours"], read["dcp"]) >= read["ideal"], f"not all bytes were counted: {read}"
        result.figures[f"bytes_over_ideal_{name}"] = read["ours"] / read["ideal"]
        result.peers[f"dcp_bytes_over_ideal_{name}"] = read["dcp"] / read["ideal"]
        result.runs["bytes"][name] = read
        print(f"{name}: {read}", flush=True)


def restore_part(result: Result, settings: Settings) -> None:
    folders = {"memory": settings.memory, "disk": settings.disk}
    done = run_part("restore", settings, world_size=WORLD_SIZE, to=3, rounds=settings.rounds, **folders)
    seconds = done["seconds"]
    print(f"restore: {seconds}", flush=True)
    result.runs["restore"] = done
    for side in ("own", "peers", "storage"):
        result.add(f"restore_speedup_{side}", ratios(seconds["dcp"], seconds[side]))
        result.add(f"restore_{side}_s", seconds[side])
    result.add("restore_peers_over_bare", ratios(seconds["peers"], seconds["bare"]))
    result.peers["bare_restore_s"] = summary(seconds["bare"])
    result.peers["dcp_restore_s"] = summary(seconds["dcp"])


def durable_part(result: Result, settings: Settings) -> None:
    sides = ("ours", "ours_without_copies", *ASYNC, "bare")
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    for _ in range(settings.rounds):
        for side in sides:
            more = {"world_size": WORLD_SIZE, "memory": settings.memory, "disk": settings.disk}
            done = run_part("durable", settings, side=side, num_saves=settings.num_saves, **more)
            runs[side].append(done)
            print(f"{side}: {json.dumps(done)}", flush=True)
    result.runs["durable"] = runs
    seconds = {side: [statistics.median(done["seconds"]) for done in of_side] for side, of_side in runs.items()}
    tuned = best(seconds, ASYNC)
    result.add("durable_save_vs_dcp", ratios(seconds["ours"], seconds[tuned]))
    result.add("durable_save_s", seconds["ours"])
    alone = seconds["ours_without_copies"]
    result.add("durable_save_without_copies_vs_dcp", ratios(alone, seconds[tuned]))
    result.add("durable_save_without_copies_s", alone)
    result.add("durable_save_over_bare", ratios(seconds["ours"], seconds["bare"]))
    result.peers["durable_dcp"] = tuned
    for side in (*ASYNC, "bare"):
        result.peers[f"{side}_durable_s"] = summary(seconds[side])


def run_part(part: str, settings: Settings, **more: Any) -> dict[str, Any]:
    load = os.getloadavg()[0]  # of the minute before: what else the machine was doing
    done = run_side(SIDES, part, json.dumps({"model": settings.model, **more}), timeout_s=TIMEOUT_S)
    return {**done, "load_before": load}


def ratios(above: list[float], below: list[float]) -> list[float]:
    """Of each round."""
    return [a / b for a, b in zip(above, below, strict=True)]


def best(seconds: dict[str, list[float]], sides: tuple[str, ...]) -> str:
    """The side with the least median."""
    return min(sides, key=lambda side: statistics.median(seconds[side]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where to write the JSON")
    parser.add_argument("--quick", action="store_true", help="one round, shorter: about ten minutes")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--model", default="150m", help="a file of conf/model")
    parser.add_argument("--memory-folder", default="/dev/shm")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="on disk: both sides' checkpoints go below it")
    parser.add_argument("--rounds", type=int, help="of each comparison; 5 without --quick")
    options = parser.parse_args()
    settings = Settings(
        model=options.model,
        memory=options.memory_folder,
        disk=options.folder,
        rounds=options.rounds or (1 if options.quick else 5),
        num_saves=1 if options.quick else 3,
    )
    result = Result()
    parts = {"bytes": bytes_part, "restore": restore_part, "durable": durable_part}
    for name in PARTS:
        if name in options.only:
            parts[name](result, settings)
    write_result(
        options.out,
        result.figures,
        spread=result.spread,
        peers=result.peers,
        runs=result.runs,
        settings={**vars(settings), "quick": options.quick},
    )


if __name__ == "__main__":
    main()
