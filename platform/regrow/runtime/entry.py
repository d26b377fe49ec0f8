"""The function that Ray Train runs in every worker. No torch before that: the driver loads this, too."""

import ray

from regrow.errors import RegrowError
from regrow.runtime.calls import CALL_TIMEOUT_S
from regrow.runtime.job import Job


def train_fn(settings: dict[str, Job]) -> None:
    """Ray Train's entry. A user's mistake ends the run through the coordinator; anything else restarts the group."""
    from regrow.runtime.worker import run_worker

    job = settings["job"]
    try:
        run_worker(job)
    except RegrowError as error:
        ray.get(job.coordinator.fail.remote(str(error)), timeout=CALL_TIMEOUT_S)
