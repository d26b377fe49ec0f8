"""The Ray Data Dataset behind the stream: tickets -> windows -> blocks."""

import functools
import importlib
import logging
import os
import secrets
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from regrow.data.read.batch import BatchLayout, Positions, RowReader, Rows
from regrow.data.read.corpora import Corpora
from regrow.data.read.outage import Patience, PatientReader
from regrow.plan.order import Order
from regrow.storage import RETRY_DEADLINE_S, is_remote

Block = tuple[Positions, Rows]  # of one window: slice after slice, each of them step after step


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
        return window_table(int(batch["window"][0]), order, task_reader(corpora), layout)

    # the source must share the actor's fate, or its tickets would be lost with another node
    here = {"ray.io/node-id": ray.get_runtime_context().get_node_id()}
    seed = ray.data.from_arrow(pa.table({"run": [run]}))  # not read_*: that would be one more task, with a CPU
    source = seed.map_batches(draw, batch_size=1, num_cpus=0, label_selector=here)
    return source.map_batches(produce, batch_size=1, batch_format="numpy", num_cpus=stream_cpus)


def end_executions() -> None:
    """End the Datasets that run in this process, also one whose tasks hang: what iterates over it goes on. Returns at
    once; their processes are killed, which gives back the CPUs of all but those that no signal reaches."""
    from ray.data._internal.execution.streaming_executor import StreamingExecutor

    for thread in threading.enumerate():
        if isinstance(thread, StreamingExecutor):
            ending = threading.Thread(target=thread.shutdown, kwargs={"force": True}, name="end-dataset", daemon=True)
            ending.start()


def import_what_tasks_need() -> None:
    """In a process that will run the Dataset's tasks."""
    for name in ("ray.data", "regrow.data.read.shards"):
        importlib.import_module(name)


@functools.cache
def task_reader(corpora: Corpora) -> RowReader:
    """One reader a process: Ray reuses processes for many windows.

    It is patient with an object store: a task that fails ends the Dataset. A mount may be broken on one node alone.
    """
    is_far = any(is_remote(folder) for folder in corpora.folders)
    return PatientReader(corpora.reader("train"), Patience(RETRY_DEADLINE_S if is_far else 0.0))


def window_table(window: int, order: Order, reader: RowReader, layout: BatchLayout) -> pa.Table:
    """A window as an Arrow table with a row for each block: the bytes of its positions and of its tokens.

    Within a block slice after slice, each of them step after step. Each row group is decoded once.
    """
    first = window * layout.window_rows
    shape = (layout.window_steps, layout.num_slices, layout.slice_seqs)
    positions = np.arange(first, first + layout.window_rows).reshape(shape).swapaxes(0, 1).ravel()
    rows = reader.read(order.locate(positions))

    def column(values: np.ndarray) -> Any:
        data = np.ascontiguousarray(values, values.dtype.newbyteorder("<"))
        firsts = [layout.slices_of_block(block).start for block in range(layout.num_blocks)]
        ends = np.array([*firsts, layout.num_slices], np.int64) * (data.nbytes // layout.num_slices)
        buffers = [None, pa.py_buffer(ends), pa.py_buffer(data)]
        return pa.LargeBinaryArray.from_buffers(pa.large_binary(), layout.num_blocks, buffers)

    return pa.table({"positions": column(positions), "rows": column(rows)})


def block_of(table: pa.Table) -> Block:
    """A block as it comes from the object store: positions and rows that share its memory."""
    positions = np.frombuffer(table["positions"][0].as_buffer(), "<i8")
    return positions, np.frombuffer(table["rows"][0].as_buffer(), "<u4").reshape(len(positions), -1)
