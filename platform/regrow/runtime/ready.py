"""What a process looks at before it joins a group: a node that lacks something costs the others no stop then."""

import socket

import numpy as np

from regrow.errors import DataError, ResumeError, first_line
from regrow.record.run_folder import RUN_FILE, read_record
from regrow.runtime.job import Job
from regrow.storage import Storage


def check_here(job: Job) -> None:
    """Raises RegrowError, naming this host, where the corpus or the run's folder cannot be read here."""
    host, config = socket.gethostname(), job.config
    for split in ("train", *(["validation"] if config.train.validate_every_steps else [])):
        try:
            reader = job.corpora.reader(split)
            if reader.num_rows:
                reader.read(np.array([0, reader.num_rows - 1]))
        except DataError as error:
            raise DataError(f"on {host}: {error}") from error
    try:
        record = read_record(Storage.at(job.folder))
        problem = "" if record is not None else f"it has no {RUN_FILE} there"
    except OSError as error:
        problem = first_line(error)
    if problem:
        raise ResumeError(
            f"run folder {job.folder} cannot be read on {host}: {problem}; is run.storage_path mounted there, and can "
            "that host reach it?"
        )
