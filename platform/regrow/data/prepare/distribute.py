"""Call a function on many numbers as Ray tasks, all over the cluster."""

import os
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar

from regrow.errors import RegrowError

Result = TypeVar("Result")

MOST_SUBMITTED = 2048  # tasks at a time: enough to keep a cluster busy, and to show an autoscaler what is wanted


def on_ray(function: Callable[[int], Result], numbers: Sequence[int]) -> Iterator[Result]:
    """Results in any order; a task with one CPU for each number, wherever the cluster has room.

    Ray runs tasks of dead nodes again. What a call raises as RegrowError or OSError is raised here as it is, and the
    tasks that are left are cancelled.
    """
    import ray

    @ray.remote(num_cpus=1, max_retries=-1, scheduling_strategy="SPREAD")
    def call(number: int) -> tuple[Result | None, Exception | None]:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a task has one CPU
        try:
            return function(number), None
        except (RegrowError, OSError) as error:
            return None, error

    left = iter(numbers)
    running = [call.remote(number) for number in islice(left, MOST_SUBMITTED)]
    try:
        while running:
            done, running = ray.wait(running, num_returns=1)
            running += [call.remote(number) for number in islice(left, len(done))]
            outcome: Any
            for outcome, error in ray.get(done):
                if error is not None:
                    raise error
                yield outcome
    finally:
        for task in running:
            ray.cancel(task)
