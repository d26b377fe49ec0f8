"""What the driver hands to Ray Train, for a run that nothing trains."""

import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

from regrow.config.check import check
from regrow.config.schema import PretrainConfig
from regrow.data.read.corpora import Corpora
from regrow.runtime.entry import train_fn
from regrow.runtime.job import Job
from regrow.runtime.trainer import build_trainer


def trainer_of(folder: Path, corpora: Corpora, config: PretrainConfig, *, run_id: str, coordinator: Any = None) -> Any:
    """The trainer of a job of two workers."""
    job = Job(
        config=config,
        topologies=check(config),
        run_id=run_id,
        folder=str(folder),
        checkpoints=str(folder / "checkpoints"),
        compile_cache=None,
        corpora=corpora,
        coordinator=coordinator,
        stream=None,
        first_generation=1,
        fit_at=0.0,
        driver_s={},
    )
    with patch.dict(os.environ):
        return build_trainer(job, num_workers=2, train_fn=train_fn, storage=str(folder), name="run")
