"""A run's folder as the first rank of a group without Ray opens it: locked, claimed, never a live job's by mistake."""

import contextlib
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TextIO

from regrow.config.schema import PretrainConfig
from regrow.errors import ConfigError
from regrow.record.claim import Claim, newest_claim
from regrow.record.lock import lock_run
from regrow.record.run_folder import run_folder
from regrow.runtime.ended import end_again
from regrow.runtime.liveness.pulse import started_at
from regrow.runtime.run_folder import Run, check_may_start, find_or_create, write_config
from regrow.state.collective import gather
from regrow.storage import Storage

SEEN_WITHIN_S = 5.0  # on other hosts: NFS keeps for a while what it knows of a folder


@dataclass(frozen=True)
class Opened:
    """What the first rank holds for as long as it writes the run."""

    run: Run
    lock: TextIO | None  # None: storage has none
    claim: Claim | None  # None: nothing is left to train, and the run may be another job's


def last_step(config: PretrainConfig) -> int:
    """Where this attempt ends."""
    return min(config.train.steps, config.train.stop_at_step or config.train.steps)


def check_start(config: PretrainConfig) -> None:
    """As `check_may_start`, of a process whose agent may have started it anew."""
    check_may_start(_resumed(config))


def open_folder(config: PretrainConfig, manifest_sha256: str, tell: Callable[[str], object]) -> Opened:
    """The run is taken over once nothing refuses it and there is something to train: a claim ends the job before, where
    storage has no locks. One that was ended so and that its agent starts anew does not take the run back. Raises
    RegrowError and OSError."""
    lock = lock_run(run_folder(config), tell)
    run = find_or_create(_resumed(config), manifest_sha256=manifest_sha256)
    if (run.resumed_step or 0) >= last_step(config):
        if lock is not None:
            lock.close()
        end_again(config, run, tell)
        tell(
            f"step {run.resumed_step} is already committed: nothing to do; "
            "raise train.steps or train.stop_at_step to go on, or choose another run.name"
        )
        return Opened(run, None, None)
    job = _agent()
    claim = Claim.take(run.folder, job=job, restarted=bool(job))  # not by the count: a host that joins adds nothing
    write_config(run, config)
    return Opened(run, lock, claim)


def check_is_shared(config: PretrainConfig, file: str, content: str) -> None:
    """Whether each rank finds in the run's folder what the first one has just written there, a file's name and content.

    Collective; raises ConfigError on all ranks where one does not, as its checkpoints could never be restored.
    """
    folder, host = run_folder(config), socket.gethostname()
    found = not folder.is_local or _is_found(folder, file, content.encode())
    hosts = gather((host, found))
    for name, is_there in hosts:
        if not is_there:
            raise ConfigError(
                f"run.storage_path={config.run.storage_path} on {name} is another folder than on {hosts[0][0]}; "
                "give one that all hosts share, or a URI"
            )


def _is_found(folder: Storage, file: str, content: bytes) -> bool:
    give_up_at = time.monotonic() + SEEN_WITHIN_S
    while True:
        with contextlib.suppress(OSError):
            if folder.read_bytes(file) == content:
                return True
        if time.monotonic() >= give_up_at:
            return False
        time.sleep(0.1)


def _resumed(config: PretrainConfig) -> PretrainConfig:
    """With what its own agent's processes have begun gone on with, though run.resume=false."""
    job = _agent()
    if config.run.resume or not job or newest_claim(run_folder(config)).get("job") != job:
        return config
    return replace(config, run=replace(config.run, resume=True))


def _agent() -> str:
    """What outlives restarts by torchrun --max-restarts, and is no other job's; empty without torchrun.

    TORCHELASTIC_RUN_ID is whatever the user says, and "none" where nothing is said.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return ""
    return f"torchrun {os.getppid()}, of {started_at(os.getppid())}, on {socket.gethostname()}"
