"""What a process looks at before it joins a group: a node that lacks something costs the others no stop then."""

import socket
import time
from collections.abc import Callable

import numpy as np

from regrow.errors import ConfigError, DataError, RegrowError, ResumeError, UnavailableError, first_line
from regrow.record.run_folder import RUN_FILE, read_record
from regrow.runtime.job import Job
from regrow.storage import Storage, may_pass
from regrow.train.callback import look_up

STORAGE_S = 120.0  # for storage that fails: it may fail everywhere, and then this host is not the one to leave alone
RETRY_S = 1.0


def check_here(job: Job, on_wait: Callable[[str], None] = lambda problem: None) -> None:
    """Raises RegrowError, naming this host, where the corpus or the run's folder cannot be read here, or the module
    of `train.callback` cannot be imported.

    What fails and may pass is tried again for STORAGE_S, for `data.storage_timeout_s` where that is less; `on_wait` is
    told of it once.
    """
    give_up_at, told = time.monotonic() + min(STORAGE_S, job.config.data.storage_timeout_s), False
    while True:
        try:
            _check(job)
            return
        except (UnavailableError, ResumeError) as error:
            if not _may_pass(error) or time.monotonic() > give_up_at:
                raise
            if not told:
                on_wait(first_line(error))
                told = True
        time.sleep(RETRY_S)


def _may_pass(error: RegrowError) -> bool:
    cause = error.__cause__
    return isinstance(error, UnavailableError) or (isinstance(cause, OSError) and may_pass(cause))


def _check(job: Job) -> None:
    host, config = socket.gethostname(), job.config
    if config.train.callback is not None:
        try:
            look_up(config.train.callback)
        except ConfigError as error:
            raise ConfigError(f"on {host}: {error}") from error
    for split in ("train", *(["validation"] if config.train.validate_every_steps else [])):
        try:
            reader = job.corpora.reader(split)
            if reader.num_rows:
                reader.read(np.array([0, reader.num_rows - 1]))
        except DataError as error:
            raise type(error)(f"on {host}: {error}") from error
    failed: OSError | None = None
    try:
        record = read_record(Storage.at(job.folder))
        problem = "" if record is not None else f"it has no {RUN_FILE} there"
        if record is not None and record["run_id"] != job.run_id:
            problem = "it has another run of this name there"
    except OSError as error:
        problem, failed = first_line(error), error
    if problem:
        raise ResumeError(
            f"run folder {job.folder} cannot be read on {host}: {problem}; is run.storage_path mounted there, and can "
            "that host reach it?"
        ) from failed
