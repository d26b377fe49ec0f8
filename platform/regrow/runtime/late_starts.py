"""Workers that were started long ago: the coordinator says of which it has heard, and which are to end.

One that hangs before it joins answers Ray Train, which runs its train function in another thread.
"""

import contextlib
import time
from collections.abc import Mapping
from typing import Any

import ray

from regrow.runtime.calls import CoordinatorClient

LATELY_S = 300.0  # that a worker may take from its start to the moment at which it joins


class LateStarts:
    """Of one worker group, from when it starts."""

    def __init__(self, coordinator: CoordinatorClient) -> None:
        self._coordinator, self._began = coordinator, time.monotonic()
        self._heard: set[tuple[str, int]] = set()  # by node and pid; they are not asked about again
        self._asked: Any = None  # an answer of the coordinator's, on its way

    def to_end(self, workers: Mapping[int, Any], started_at: Mapping[int, float]) -> list[int]:
        """Places whose worker the coordinator wants ended, as it last said. `workers` are those that live, by place;
        `started_at` (monotonic) is of those that did not start with the group."""
        processes = {(each.metadata.node_id, each.metadata.pid): place for place, each in workers.items()}
        found: list[int] = []
        if self._asked is not None and ray.wait([self._asked], timeout=0)[0]:
            with contextlib.suppress(ray.exceptions.RayError):
                answer = ray.get(self._asked)
                self._heard |= answer.heard
                found = [processes[each] for each in answer.to_end if each in processes]
            self._asked = None
        self._heard &= processes.keys()
        now = time.monotonic()
        ages = {each: now - started_at.get(place, self._began) for each, place in processes.items()}
        late = [(*each, age_s) for each, age_s in ages.items() if age_s > LATELY_S and each not in self._heard]
        if late and self._asked is None:
            self._asked = self._coordinator.handle.started.remote(late)
        return found
