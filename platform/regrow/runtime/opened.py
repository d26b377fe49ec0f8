"""A run's folder as the first rank of a group without Ray opens it: locked, claimed, and never a live job's by mistake."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO

from regrow.config.schema import PretrainConfig
from regrow.record.claim import Claim
from regrow.record.lock import lock_run
from regrow.record.run_folder import run_folder
from regrow.runtime.ended import end_again
from regrow.runtime.run_folder import Run, find_or_create, write_config


@dataclass(frozen=True)
class Opened:
    """What the first rank holds for as long as it writes the run."""

    run: Run
    lock: TextIO | None  # None: storage has none
    claim: Claim | None  # None: nothing is left to train, and the run may be another job's


def last_step(config: PretrainConfig) -> int:
    """Where this attempt ends."""
    return min(config.train.steps, config.train.stop_at_step or config.train.steps)


def open_folder(config: PretrainConfig, manifest_sha256: str, tell: Callable[[str], object]) -> Opened:
    """The run is taken over once nothing refuses it and there is something to train: a claim ends the job before, where
    storage has no locks. Raises RegrowError and OSError."""
    lock = lock_run(run_folder(config), tell)
    run = find_or_create(config, manifest_sha256=manifest_sha256)
    if (run.resumed_step or 0) >= last_step(config):
        if lock is not None:
            lock.close()
        end_again(config, run, tell)
        tell(
            f"step {run.resumed_step} is already committed: nothing to do; "
            "raise train.steps or train.stop_at_step to go on, or choose another run.name"
        )
        return Opened(run, None, None)
    claim = Claim.take(run.folder)
    write_config(run, config)
    return Opened(run, lock, claim)
