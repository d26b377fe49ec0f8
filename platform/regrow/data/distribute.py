"""Call a function on many numbers as Ray Data tasks, all over the cluster."""

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from regrow.errors import RegrowError

Result = TypeVar("Result")


def on_ray(function: Callable[[int], Result], numbers: Sequence[int]) -> Iterator[Result]:
    """Results in any order; a task with one CPU for each number, wherever the cluster has room.

    Ray runs tasks of dead nodes again. What a call raises as RegrowError or OSError is raised here as it is.
    """
    import logging

    import pyarrow as pa
    import ray.data
    from ray import cloudpickle

    if not numbers:
        return
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False

    def call(batch: dict[str, Any]) -> dict[str, Any]:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a task has one CPU
        try:
            outcome: Any = function(int(batch["number"][0]))
        except (RegrowError, OSError) as error:
            outcome = error
        return {"outcome": [cloudpickle.dumps(outcome)]}

    tables = [pa.table({"number": [number]}) for number in numbers]
    dataset = ray.data.from_arrow(tables).map_batches(call, batch_size=1, num_cpus=1)
    for row in dataset.iter_rows():
        outcome = cloudpickle.loads(row["outcome"])
        if isinstance(outcome, Exception):
            raise outcome
        yield outcome
