"""Call a function on many numbers as Ray tasks, all over the cluster."""

import os
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from regrow.data.prepare.prepare import CallDied
from regrow.errors import RegrowError, first_line

Result = TypeVar("Result")

MOST_SUBMITTED = 2048  # tasks at a time: enough to keep a cluster busy, and to show an autoscaler what is wanted
MOST_DEATHS = 10  # of one call's processes, by a crash, for want of memory, or with their nodes


def on_ray(function: Callable[[int], Result], numbers: Sequence[int]) -> Iterator[Result]:
    """Results in any order; a task with one CPU for each number, wherever the cluster has room.

    What a call raises as RegrowError or OSError is raised here as it is, and the tasks that are left are cancelled. A
    call whose process dies is made again after all others, when most memory is free. Raises CallDied for one whose
    processes went on dying.
    """
    import ray
    from ray.exceptions import NodeDiedError, ObjectLostError, OutOfMemoryError, RaySystemError, WorkerCrashedError

    # Ray's own retries would go on for ever where its memory monitor is what kills
    @ray.remote(num_cpus=1, max_retries=0, scheduling_strategy="SPREAD")
    def call(number: int) -> tuple[Result | None, Exception | None]:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a task has one CPU
        try:
            return function(number), None
        except (RegrowError, OSError) as error:
            return None, error

    left, again = deque(numbers), deque[int]()
    running, deaths = dict[Any, int](), Counter[int]()
    try:
        while left or running or again:
            if not left and not running:
                left, again = again, left
            while left and len(running) < MOST_SUBMITTED:
                number = left.popleft()
                running[call.remote(number)] = number
            (done,), _ = ray.wait(list(running))
            number = running.pop(done)
            outcome: Any
            try:
                outcome, error = ray.get(done)
            except (NodeDiedError, ObjectLostError, OutOfMemoryError, RaySystemError, WorkerCrashedError) as death:
                deaths[number] += 1
                if deaths[number] == MOST_DEATHS:
                    raise CallDied(number, MOST_DEATHS, first_line(death)) from death
                again.append(number)
                continue
            if error is not None:
                raise error
            yield outcome
    finally:
        for task in running:
            ray.cancel(task)
