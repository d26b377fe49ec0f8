"""The parts of `snapshot.py`: each is a process of its own that starts hosts, keepers and ranks, and prints JSON.

python benchmarks/snapshot_sides.py cell|link SETTINGS-AS-JSON
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import snapshot_ranks as ranks
from benchmarks.checkpoint_dcp import ENV
from benchmarks.checkpoint_sides import folder_in
from benchmarks.snapshot_apart import apart

from regrow.config.schema import ModelConfig
from support.gloo import run_ranks

DEADLINE_S = 7200.0


def cell(
    side: str, *, world_size: int, memory: str, gbit: float, model: dict[str, Any], seq_len: int, **rest: Any
) -> Any:
    """Windows with and without saving. What the peer writes goes to memory, by no link: its fastest medium."""
    wanted, config = ranks.Cell(**rest), ModelConfig(**model)
    if side != ranks.OURS:
        with folder_in(memory) as folder:
            return _run(ranks.run, world_size, side, config, seq_len, [], folder, wanted, os.getpid())
    with apart(memory) as hosts:
        hosts.shape(gbit)
        return _run(ranks.run, world_size, side, config, seq_len, hosts.kept.places, Path(), wanted, os.getpid())


def link(*, world_size: int, memory: str, gbit: float, model: str, num_commits: int) -> dict[str, Any]:
    """Commits with the trainer idle, and the bare loop before and after them."""
    with apart(memory) as hosts:
        hosts.shape(gbit)
        done = _run(ranks.commit_again_and_again, world_size, model, hosts.kept.places, num_commits)
        carried = hosts.kept.places[0].folder.parent
        bare = []
        for _ in range(3):
            (carried / "bare.out").unlink(missing_ok=True)
            bare.append(hosts.bare_bytes_per_s(carried, done["bytes"]))
        return {**done, "bare_bytes_per_s": bare, "link_bytes_per_s": gbit * 1e9 / 8}


def _run(fn: Any, world_size: int, *arguments: Any) -> Any:
    return run_ranks(fn, world_size, *arguments, deadline_s=DEADLINE_S, env=ENV)[0]


PARTS: dict[str, Callable[..., Any]] = {"cell": cell, "link": link}

if __name__ == "__main__":
    part, settings = sys.argv[1], json.loads(sys.argv[2])
    print(json.dumps(PARTS[part](**settings)))
