"""The token stream on a Ray of its own; a side of `benchmarks/data.py`. Prints one JSON object.

    python benchmarks/data_stream.py CORPUS

Ranks are processes that are up and have imported what they need, as a trainer's have, before any clock runs.
"""

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

from benchmarks.measure import family, family_cpu_s

SEQS, SLICES, WINDOW_STEPS = 64, 16, 8
RESIZES = (3, 1, 4, 2, 3, 1)
WARM_STEPS = 4 * WINDOW_STEPS
RESIZE_STEPS = 2 * WINDOW_STEPS


class Rank:
    """A rank's process."""

    def __init__(self, corpora: Any, config: Any) -> None:
        import torch

        from regrow.data.read.batch import layout_of
        from regrow.data.read.corpora import order_of

        torch.set_num_threads(1)
        self.reader, self.order, self.layout = corpora.reader("train"), order_of(config, corpora), layout_of(config)

    def ready(self) -> None:
        pass

    def train(self, stream: Any, slices: range, start: int, stop: int, step_s: float) -> dict[str, Any]:
        """Take this rank's batches as a trainer does, as int64 tensors."""
        import torch

        from regrow.data.stream.client import rank_batches

        began, first_s, tokens, direct = time.perf_counter(), 0.0, 0, []
        for batch in rank_batches(
            [stream.get.remote],
            self.order,
            self.reader,
            self.layout,
            slices=slices,
            start_step=start,
            stop_step=stop,
            stall_timeout_s=60.0,
            on_fallback=lambda window, reason: direct.append(window),
        ):
            first_s = first_s or time.perf_counter() - began
            rows = torch.from_numpy(batch.rows.astype("int64"))
            tokens += rows.shape[0] * (rows.shape[1] - 1)
            time.sleep(step_s)
        return {"tokens": tokens, "first_batch_s": first_s, "direct": len(direct)}


def read_bytes() -> int:
    """Bytes that the family's Ray tasks and actors have read from files so far."""
    total = 0
    for pid in family():
        try:
            if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::"):
                lines = Path(f"/proc/{pid}/io").read_text().splitlines()
                total += int(lines[0].removeprefix("rchar: "))
        except OSError:
            continue
    return total


def run(corpus: Path) -> dict[str, Any]:
    import ray

    from regrow.config.schema import DataConfig, OptimConfig, PretrainConfig
    from regrow.data.read.corpora import Corpora
    from regrow.data.stream.actor import start_stream, stop_stream
    from regrow.plan.batch import plan_batch

    ray.init(address="local", num_cpus=os.cpu_count(), include_dashboard=False, log_to_driver=False)
    corpora = Corpora.at(corpus)
    manifest = corpora.manifests[0]
    config = PretrainConfig(
        data=DataConfig(seq_len=manifest.seq_len, window_steps=WINDOW_STEPS),
        optim=OptimConfig(global_batch_seqs=SEQS, num_slices=SLICES),
    )
    ranks: list[Any] = [ray.remote(Rank).options(num_cpus=0).remote(corpora, config) for _ in range(max(RESIZES))]
    ray.get([rank.ready.remote() for rank in ranks])
    steps = manifest.splits["train"].num_rows // SEQS  # of an epoch

    def train(world_size: int, start: int, stop: int, step_s: float = 0.0) -> list[dict[str, Any]]:
        parts = plan_batch(num_slices=SLICES, world_size=world_size).ranges
        calls = zip(ranks, parts, strict=False)
        return list(ray.get([rank.train.remote(stream, part, start, stop, step_s) for rank, part in calls]))

    began = time.perf_counter()
    stream = start_stream(config, corpora, start_step=0, stop_step=10 * steps)
    started_s = time.perf_counter() - began
    cold = train(2, 0, WARM_STEPS)
    cold_s = started_s + max(rank["first_batch_s"] for rank in cold)

    cpu_began, read_began, began = family_cpu_s(), read_bytes(), time.perf_counter()
    flat_out = train(2, WARM_STEPS, steps)
    cpu_s, wall_s = family_cpu_s() - cpu_began, time.perf_counter() - began
    read = read_bytes() - read_began
    stored = sum(shard.num_bytes for shard in manifest.splits["train"].shards) * (steps - WARM_STEPS) / steps

    step, first_s, direct = steps, [], 0
    for world_size in RESIZES:
        time.sleep(1.0)  # the ranks of the new group build their model
        group = train(world_size, step, step + RESIZE_STEPS, step_s=0.05)
        first_s.append(max(rank["first_batch_s"] for rank in group))
        direct += sum(rank["direct"] for rank in group)
        step += RESIZE_STEPS
    stop_stream(stream)
    tokens = sum(rank["tokens"] for rank in flat_out)
    return {
        "first_batch_cold_s": cold_s,
        "tokens": tokens,
        "cpu_s": cpu_s,
        "wall_s": wall_s,
        "mtok_per_cpu_s": tokens / cpu_s / 1e6,
        "read_amplification": read / stored,
        "first_batch_after_resize_s": first_s,
        "windows_read_directly": direct + sum(rank["direct"] for rank in [*cold, *flat_out]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path)
    print(json.dumps(run(parser.parse_args().corpus)))


if __name__ == "__main__":
    main()
