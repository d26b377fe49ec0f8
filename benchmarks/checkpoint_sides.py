"""The sides of `checkpoint.py`: each is a process of its own that starts keepers and ranks, and prints JSON.

python benchmarks/checkpoint_sides.py steps|restore|count|durable SETTINGS-AS-JSON
"""

import contextlib
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import checkpoint_ranks as ranks
from benchmarks.checkpoint_dcp import ENV
from benchmarks.checkpoint_keepers import Place, keepers

from support.gloo import run_ranks

NUM_NODES = 2
DEADLINE_S = 1200.0
OURS = ("ours", "ours_without_copies")
RESTORES = ("dcp", "own", "peers", "bare", "storage")


def steps(side: str, *, model: str, world_size: int, memory: str, step_s: float, num_steps: int) -> dict[str, Any]:
    """Steps with and without saving. What the peer writes goes to memory too: its fastest medium."""
    with places_for(side, memory) as places, folder_in(memory) as folder:
        result: dict[str, Any] = run(ranks.steps, world_size, side, model, places, folder, step_s, num_steps)[0]
        return result


def restore(*, model: str, world_size: int, to: int, memory: str, disk: str, rounds: int) -> dict[str, Any]:
    """Restoring on `to` ranks what `world_size` wrote, each side in fresh processes, in turn."""
    with keepers(memory, NUM_NODES) as kept, folder_in(disk) as folder:
        state_bytes = sum(run(ranks.write_checkpoints, world_size, model, folder))
        run(ranks.take_snapshot, world_size, model, kept.places)
        seconds: dict[str, list[float]] = {side: [] for side in RESTORES}
        for _ in range(rounds):
            for side in RESTORES:
                arguments = (side, model, folder, kept.holders(), kept.places[0])
                seconds[side].append(run(ranks.restore, to, *arguments)[0])
        return {"state_bytes": state_bytes, "seconds": seconds}


def count(*, model: str, before: int, after: int, dp_replicate: int, disk: str) -> dict[str, Any]:
    """Bytes read from storage to restore on `after` ranks what `before` wrote, summed over ranks."""
    with folder_in(disk) as folder:
        state_bytes = sum(run(ranks.write_checkpoints, before, model, folder))
        read = run(ranks.count_bytes, after, model, folder, dp_replicate)
        return {"ideal": state_bytes, **{key: sum(each[key] for each in read) for key in read[0]}}


def durable(side: str, *, model: str, world_size: int, memory: str, disk: str, num_saves: int) -> dict[str, Any]:
    with folder_in(disk) as folder, places_for(side, memory, checkpoints=folder) as places:
        result: dict[str, Any] = run(ranks.durable, world_size, side, model, places, folder, num_saves)[0]
        return result


def run(fn: Any, world_size: int, *arguments: Any) -> list[Any]:
    return run_ranks(fn, world_size, *arguments, deadline_s=DEADLINE_S, env=ENV)


@contextlib.contextmanager
def places_for(side: str, memory: str, checkpoints: Path | None = None) -> Iterator[list[Place]]:
    if side not in OURS:
        yield []
        return
    with keepers(memory, NUM_NODES, checkpoints, copies=side == "ours") as kept:
        yield kept.places


@contextlib.contextmanager
def folder_in(parent: str) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="checkpoint-bench-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


PARTS: dict[str, Callable[..., dict[str, Any]]] = {
    "steps": steps,
    "restore": restore,
    "count": count,
    "durable": durable,
}

if __name__ == "__main__":
    part, settings = sys.argv[1], json.loads(sys.argv[2])
    print(json.dumps(PARTS[part](**settings)))
