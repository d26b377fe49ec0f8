"""The function that Ray Train runs in every worker. No torch before that: the driver loads this, too."""

from regrow.runtime.job import Job


def train_fn(job: Job) -> None:
    """Ray Train's entry."""
    from regrow.runtime.worker import run_worker

    run_worker(job)
