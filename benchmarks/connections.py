"""How many connections a rank holds in a generation, and what a value of all ranks costs, by the number of ranks.

    python benchmarks/connections.py --out benchmarks/results/FILE.json [--quick]

Three parts. The tree of small values (`parallel.tree`) at 16 to 4,096 ranks: stand-ins, all in one process and on one
thread, with real connections on this machine; they gather a value of VALUE_BYTES from each. CPU is that of all ranks
together, over their number. Groups along axes (`parallel.world`) at LAYOUTS: real processes, each a rank of gloo, that
form a generation, sum over each axis and gather; established connections are counted in /proc, those that gloo makes at
once to all of an axis, and as it uses them (TORCH_GLOO_LAZY_INIT, as where GPUs train). `one group` is the same with a
group of all ranks, as torch makes by default. A rank that is first along an axis has a connection of each of its ranks
to its store: `rank_0` and `others` are apart. Nothing here is a network, nor NCCL.

And what a coordinator spends on seating 2,048 members: the real one, called in this process by all of them, joins and
answers pickled as Ray does it; Ray's own part of a call is not in it (`coordinator.py` has that). CPU of the process.
"""

import argparse
import math
import resource
import secrets
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "platform"), str(ROOT / "tests"), str(ROOT)]

from benchmarks.measure import write_result  # noqa: E402

from regrow.plan.mesh import MeshShape  # noqa: E402

SIZES = (16, 64, 256, 1024, 4096)
VALUE_BYTES = 16
NUM_MEMBERS = 2048
LAYOUTS = {
    "8 = 2 replicas x 2 shards x tp 2": MeshShape(dp_replicate=2, dp_shard=2, tp=2),
    "16 = pp 2 x 2 replicas x 2 shards x tp 2": MeshShape(dp_replicate=2, dp_shard=2, tp=2, pp=2, blocks=(1, 1)),
    "16 = 16 shards": MeshShape(dp_replicate=1, dp_shard=16),
}


def tree_of(size: int) -> dict[str, float]:
    from regrow.parallel.tree import Tree
    from regrow.plan.tree import parent_of

    made: list[Tree] = []
    begun = time.process_time()
    try:
        for rank in range(size):
            listener = socket.create_server(("127.0.0.1", 0), backlog=16)
            made.append(Tree(listener, rank=rank, size=size, secret=b"s" * 32, timeout_s=60.0))
            if rank:
                made[rank].call(made[parent_of(rank)].address)
        for each in made:
            each.take()
        connect_s, begun = time.process_time() - begun, time.process_time()
        for each in reversed(made):
            each.up(each.rank.to_bytes(VALUE_BYTES))
        values = [each.down() for each in made]
        gather_s = time.process_time() - begun
        assert all(each == values[0] for each in values)
        assert values[0] == [rank.to_bytes(VALUE_BYTES) for rank in range(size)]
        most = max(len(each.connections) for each in made)
    finally:
        for each in made:
            each.close()
    return {"connections_max": most, "connect_cpu_ms": 1e3 * connect_s / size, "gather_cpu_ms": 1e3 * gather_s / size}


def of_axes(shape: MeshShape, env: dict[str, str], *, one_group: bool) -> list[int]:
    from support.counting_connections import count_in_a_generation, count_in_one_group
    from support.gloo import run_ranks

    if one_group:
        return run_ranks(count_in_one_group, shape.world_size, env=env, deadline_s=300.0)
    found = run_ranks(count_in_a_generation, shape.world_size, "gloo", shape, env=env, deadline_s=300.0)
    return [connections for _, connections in found]


def seating(num_members: int, folder: Path) -> dict[str, float]:
    """CPU seconds until all members of a generation have their seats, and bytes that they are told."""
    from ray import cloudpickle

    from regrow.config.schema import ClusterConfig, ObserveConfig, OptimConfig, PretrainConfig
    from regrow.control.membership import Member
    from regrow.runtime.actor import Coordinator

    config = PretrainConfig(
        cluster=ClusterConfig(min_workers=num_members // 2, max_workers=num_members),
        optim=OptimConfig(global_batch_seqs=num_members, num_slices=num_members),
        observe=ObserveConfig(tensorboard=False, metrics=False),
    )
    coordinator = Coordinator(str(folder), "run", checkpoints="checkpoints", config=config, submitted={"time": 0.0})
    members = [
        Member(
            id=secrets.token_hex(8),
            node=f"{number // 8:056d}",
            host=f"10.0.{number // 2000}.{number // 8 % 250}",
            port=30_000 + number % 8,
            pid=1000 + number,
            lifeline=40_000,
            gpu=number % 8,
            machine=f"host-{number // 8}",
            started=123_456_789,
            control=50_000 + number % 8,
        )
        for number in range(num_members)
    ]
    begun = time.process_time()
    for member in members:
        coordinator.join(cloudpickle.loads(cloudpickle.dumps(member)), num_members)
    left, num_bytes, asks = members, 0, 0
    while left:
        answers = [(member, coordinator.formation(member.id, 0)) for member in left]
        asks += len(answers)
        num_bytes += sum(len(cloudpickle.dumps(answer)) for _, answer in answers)
        left = [member for member, answer in answers if answer.seat is None]
        time.sleep(max((answer.wait_s for _, answer in answers if answer.seat is None), default=0.0))
    spent_s = time.process_time() - begun
    coordinator.shell.close()
    return {"cpu_s": spent_s, "bytes": num_bytes, "asks": asks}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where to write the JSON")
    parser.add_argument("--quick", action="store_true", help="the smallest layout alone")
    options = parser.parse_args()
    from regrow.runtime.hardware.settings import DEFAULTS

    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    figures: dict[str, float] = {}
    runs: dict[str, Any] = {"trees": {}, "layouts": {}}
    for size in SIZES:
        found = runs["trees"][size] = tree_of(size)
        figures |= {f"tree_{name}_{size}_ranks": value for name, value in found.items()}
        print(f"{size} ranks: {found}", flush=True)
    for _ in range(3):
        with tempfile.TemporaryDirectory(prefix="rgc") as temporary:
            runs["seating"] = [*runs.get("seating", []), seating(NUM_MEMBERS, Path(temporary))]
    own = [each["cpu_s"] for each in runs["seating"]]
    figures[f"seating_cpu_s_{NUM_MEMBERS}_members"] = statistics.median(own)
    print(f"seating: {runs['seating']}", flush=True)
    lazy = {name: value for name, value in DEFAULTS.items() if "GLOO" in name}
    for name, shape in list(LAYOUTS.items())[: 1 if options.quick else None]:
        ways = {"at once": {}, "as used": lazy}
        counted = runs["layouts"][name] = {}
        for way, env in ways.items():
            for what, one_group in (("axes", False), ("one group", True)):
                found_by_rank = of_axes(shape, env, one_group=one_group)
                counted[f"{what}, {way}"] = {"rank_0": found_by_rank[0], "others": max(found_by_rank[1:])}
        key = f"{shape.world_size}_ranks_" + "x".join(str(size) for size in shape.axes.values())
        figures[f"connections_{key}_axes"] = counted["axes, at once"]["others"]
        figures[f"connections_{key}_axes_as_used"] = counted["axes, as used"]["others"]
        figures[f"connections_{key}_one_group"] = counted["one group, at once"]["others"]
        print(name, counted, flush=True)
    settings = {"value_bytes": VALUE_BYTES, "log2": {size: math.log2(size) for size in SIZES}}
    spread = {f"seating_cpu_s_{NUM_MEMBERS}_members": [min(own), max(own)]}
    write_result(options.out, figures, spread=spread, peers={}, runs=runs, settings=settings)


if __name__ == "__main__":
    main()
