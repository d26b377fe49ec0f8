"""The Ray Data Dataset behind the stream: tickets -> windows -> blocks."""

import functools
import importlib
import logging
import os
import secrets
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from regrow.data.read.batch import BatchLayout, RowReader
from regrow.data.read.corpora import Corpora
from regrow.data.stream.blocks import window_table
from regrow.plan.order import Order


def build_dataset(
    stream: Any, run: int, order: Order, corpora: Corpora, layout: BatchLayout, stream_cpus: float
) -> Any:
    """tickets -> windows -> blocks of slices, each a row of its own, in the order of the tickets. Lazy."""
    # Ray Data waits in ray.get on threads of its own, not on the event loop
    os.environ["RAY_WARN_BLOCKING_GET_INSIDE_ASYNC"] = "0"
    import ray.data

    logging.getLogger("ray.data").setLevel(logging.ERROR)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.execution_options.preserve_order = True
    context.execution_no_progress_timeout_s = -1  # a paused training is no error
    context.target_max_block_size = 1  # byte: every row is a block and leaves at once
    # tickets bound everything; its own policies go by what Ray's coordinator grants a Dataset, which is nothing while
    # Train and Datasets that are gone hold their reservations (180 s), and would stall this one
    context.set_config("backpressure_policies.enabled", [])
    context._max_num_blocks_in_streaming_gen_buffer = layout.num_blocks  # a window leaves its task in one go

    def draw(batch: dict[str, Any]) -> Iterator[dict[str, Any]]:
        source = secrets.token_hex(8)
        while windows := ray.get(stream.tickets.remote(run, source)):
            for window in windows:
                yield {"window": np.array([window])}

    def produce(batch: dict[str, Any]) -> Any:
        return window_table(int(batch["window"][0]), order, _reader(corpora), layout)

    # the source must share the actor's fate, or its tickets would be lost with another node
    here = {"ray.io/node-id": ray.get_runtime_context().get_node_id()}
    seed = ray.data.from_arrow(pa.table({"run": [run]}))  # not read_*: that would be one more task, with a CPU
    source = seed.map_batches(draw, batch_size=1, num_cpus=0, label_selector=here)
    return source.map_batches(produce, batch_size=1, batch_format="numpy", num_cpus=stream_cpus)


def import_what_tasks_need() -> None:
    """In a process that will run the Dataset's tasks."""
    for name in ("ray.data", "regrow.data.read.shards"):
        importlib.import_module(name)


@functools.cache
def _reader(corpora: Corpora) -> RowReader:
    """One reader a process: Ray reuses processes for many windows."""
    return corpora.reader("train")
