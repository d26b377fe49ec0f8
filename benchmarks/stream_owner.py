"""What the token stream's one actor costs as nodes are added: its CPU time a window, up to 2,048 nodes of 8 ranks.

    python benchmarks/stream_owner.py --out benchmarks/results/FILE.json [--quick]

The real actor, the real Dataset and real calls on a Ray of this machine; only the nodes are simulated, by a few client
processes that make every node's call for each window, hold the references for a window, as ranks do, and drop them.
Rows are tiny, so that what is measured is control, not bytes. Calls are made as nodes make them, one for all of a
node's ranks, and for comparison as ranks without a fetcher would, one each.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "platform"), str(ROOT / "tests"), str(ROOT)]

from benchmarks.measure import run_side, write_result  # noqa: E402

RANKS_PER_NODE = 8
CLIENTS = 2
WINDOW_STEPS = 8  # as configured by default; the actor's cost is one a window
WARM_WINDOWS = 2
MOST_NODES_BY_RANK = 512  # beyond, calls by rank do not fit the actor's concurrency


class Client:
    """Makes the calls of some of the nodes."""

    def __init__(self) -> None:
        self.held: list[Any] = []

    def fetch(self, stream: Any, window: int, groups: list[list[int]], seek: bool) -> float:
        """Ask for each group of blocks; the seconds until the last answer."""
        import ray

        began = time.perf_counter()
        calls = [stream.get.remote(window, slices, seek, 600.0) for slices in groups]
        answers = ray.get(calls, timeout=600)
        assert all(len(answer) == len(blocks) for answer, blocks in zip(answers, groups, strict=True))
        self.held = answers  # those of the window before are dropped
        return time.perf_counter() - began


def side(nodes: int, by_node: bool, windows: int, corpus: Path) -> dict[str, Any]:
    import ray

    from regrow.config.schema import DataConfig, OptimConfig, PretrainConfig
    from regrow.data.read.batch import layout_of
    from regrow.data.read.corpora import Corpora
    from regrow.data.stream.actor import start_stream, stop_stream
    from support.corpus import write_rows

    slices = nodes * RANKS_PER_NODE
    write_rows(corpus, num_rows=max(slices, 4096), seq_len=8, rows_per_group=64, rows_per_shard=4096)
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    config = PretrainConfig(
        data=DataConfig(seq_len=8, window_steps=1, prefetch_windows=1),
        optim=OptimConfig(global_batch_seqs=slices, num_slices=slices),
    )
    corpora = Corpora.at(corpus)
    clients: list[Any] = [ray.remote(Client).options(num_cpus=0).remote() for _ in range(CLIENTS)]
    stream = start_stream(config, corpora, start_step=0, stop_step=WARM_WINDOWS + windows)
    size = RANKS_PER_NODE if by_node else 1
    layout = layout_of(config)
    groups = [list(layout.blocks_of(range(first, first + size))) for first in range(0, slices, size)]
    cpu_s, answered_s = [], []
    before = ray.get(stream.status.remote())["cpu_s"]
    for window in range(WARM_WINDOWS + windows):
        took = ray.get(
            [c.fetch.remote(stream, window, groups[k::CLIENTS], window == 0) for k, c in enumerate(clients)],
            timeout=600,
        )
        time.sleep(0.5)  # references that were dropped are counted down
        after = ray.get(stream.status.remote())["cpu_s"]
        cpu_s.append(after - before)
        answered_s.append(max(took))
        before = after
    stop_stream(stream)
    return {"cpu_s": cpu_s[WARM_WINDOWS:], "answered_s": answered_s[WARM_WINDOWS:]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where to write the JSON")
    parser.add_argument("--quick", action="store_true", help="fewer windows and sizes")
    parser.add_argument("--side", nargs=3, metavar=("NODES", "BY", "WINDOWS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        nodes, by, windows = options.side
        with tempfile.TemporaryDirectory(prefix="stream-owner-") as folder:
            print(json.dumps(side(int(nodes), by == "node", int(windows), Path(folder))))
        return
    if options.out is None:
        parser.error("--out is required")
    figures, spread, runs = {}, {}, {}
    windows = 3 if options.quick else 7
    for nodes in (64, 512) if options.quick else (64, 512, 2048):
        for by in ("node", "rank") if nodes <= MOST_NODES_BY_RANK else ("node",):
            name = f"{nodes}_nodes_call_by_{by}"
            runs[name] = run_side(__file__, "--side", str(nodes), by, str(windows))
            per_step_ms = [1e3 * s / WINDOW_STEPS for s in runs[name]["cpu_s"]]
            figures[f"owner_cpu_ms_per_step_{name}"] = statistics.median(per_step_ms)
            spread[f"owner_cpu_ms_per_step_{name}"] = [min(per_step_ms), max(per_step_ms)]
            figures[f"answered_s_{name}"] = statistics.median(runs[name]["answered_s"])
            print(f"{name}: {figures[f'owner_cpu_ms_per_step_{name}']:.1f} ms of CPU a step", flush=True)
    settings = {"ranks_per_node": RANKS_PER_NODE, "clients": CLIENTS, "window_steps": WINDOW_STEPS, "windows": windows}
    write_result(options.out, figures, spread=spread, peers={}, runs=runs, settings=settings)


if __name__ == "__main__":
    main()
