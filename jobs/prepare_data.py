"""Prepare a corpus for training: `python -m jobs.prepare_data [data=NAME] [data.source=...] [run.storage_path=...]`."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from regrow.config.schema import PretrainConfig
from regrow.config.store import run_job
from regrow.runtime.interrupts import terminable


@terminable()
def main(config: PretrainConfig) -> None:
    from regrow.config.check import check_data
    from regrow.data.prepare.prepare import find_or_prepare
    from regrow.show.console import Console

    check_data(config)
    with ExitStack() as stack:
        console = stack.enter_context(Console(sys.stderr))

        def distribute(function: Callable[[int], Any], numbers: Sequence[int]) -> Iterator[Any]:
            """Only a large source needs Ray, which takes seconds to start."""
            import ray

            from regrow.data.prepare.distribute import on_ray
            from regrow.runtime.cluster import cluster_for

            if not ray.is_initialized():
                task = replace(config.cluster, gpus_per_worker=0, cpus_per_worker=1, min_workers=1, max_workers=1)
                task.local_nodes = 0  # a Ray that starts here has all cores
                connection = stack.enter_context(cluster_for(task))
                console.message(connection.dashboard or "Ray is up")
            return on_ray(function, numbers)

        folder, manifest = find_or_prepare(
            config.data, config.run.storage_path, progress=console.progress, distribute=distribute
        )
    print(folder)
    for name, split in manifest.splits.items():
        print(f"{name}: {split.num_rows:,} rows of {manifest.seq_len} tokens, shards: {len(split.shards)}")
    for name, count in manifest.counts.items():
        if name.startswith("skipped"):
            print(f"{name}: {count:,} documents")
    for piece, why in manifest.damaged.items():
        print(f"left out, cannot be read: {piece}: {why}")


if __name__ == "__main__":
    run_job(main, name="prepare_data")
