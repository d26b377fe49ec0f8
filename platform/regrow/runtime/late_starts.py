"""Workers that were started long ago: what hangs before its actor is made, and what the coordinator has not heard of.

One that hangs before it joins answers Ray Train, which runs its train function in another thread.
"""

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.exceptions import GetTimeoutError
from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError

from regrow.runtime.calls import CoordinatorClient

LATELY_S = 300.0  # that a worker may take from its start to the moment at which it joins
ACTOR_S = 900.0  # for its actor to be made: of these Ray may take 600 s for what `ray.runtime_env` has to install


def metadata_of(actor: Any, node: Callable[[], str], tell: Callable[[str], None]) -> Any:
    """What Ray Train keeps of a worker that was started just now (its `ActorMetadata`), once the actor is made.

    `tell` is given a line on one that is late. One that fails is killed; raises what it failed with, or
    WorkerGroupStartupFailedError where it is not made within ACTOR_S: Ray would wait for good.
    """
    asked, hint = actor.get_metadata.remote(), "an import, a mount or its runtime_env may hang there"
    try:
        if not ray.wait([asked], timeout=LATELY_S)[0]:
            tell(f"a worker was started on node {node()[:12]} {LATELY_S:.0f} s ago, and has no actor yet: {hint}")
        return ray.get(asked, timeout=ACTOR_S - LATELY_S)
    except BaseException as error:
        with contextlib.suppress(Exception):
            ray.kill(actor)
        if isinstance(error, GetTimeoutError):
            said = f"a worker on node {node()[:12]} had no actor within {ACTOR_S:.0f} s: {hint}"
            raise WorkerGroupStartupFailedError(said) from None
        raise


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
