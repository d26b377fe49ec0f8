"""What is evaluated: a checkpoint of a run, exported for the while, or a model that was exported before."""

import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regrow.config.schema import DataConfig, Dtype
from regrow.data.read.corpora import Corpora
from regrow.data.read.manifest import Manifest
from regrow.errors import DataError, EvaluationError
from regrow.evaluate.catalog import CONFIG, TOKENIZER_CONFIG
from regrow.record.run_folder import CHECKPOINTS, checkpoints_of, read_record
from regrow.runtime.interrupts import terminable
from regrow.state.disk import catalog as tools
from regrow.state.disk.catalog import step_folder
from regrow.state.disk.format import Index
from regrow.state.exchange.runs import corpora_of, export_run, named_corpora
from regrow.storage import Storage, StorageError, join_location, split_location

EVALUATIONS = "evaluations"
NEITHER = (
    "is neither a run's folder (<run.storage_path>/<run.name>, with checkpoints/) nor an exported model's (config.json "
    "and *.safetensors)"
)


@dataclass(frozen=True)
class Source:
    """A model."""

    folder: Storage  # the run's, or that of the exported model
    corpora: Corpora | None  # that it trained on, where they were found
    run_id: str | None = None  # null for an exported model, whose run is not known
    index: Index | None = None  # of the run's checkpoint

    @property
    def step(self) -> int | None:
        return None if self.index is None else self.index.step

    def results(self, limit: int | None) -> Storage:
        """Where its results go unless asked otherwise; a quick look must not replace those of all examples."""
        parts = [] if self.step is None else [step_folder(self.step)]
        parts += [] if limit is None else [f"limit-{limit}"]
        return self.folder / EVALUATIONS / "-".join(parts) if parts else self.folder / EVALUATIONS

    def describe(self) -> dict[str, Any]:
        """Which model this is, for the file of its results."""
        return {"folder": str(self.folder), "run_id": self.run_id, "step": self.step}

    @contextmanager
    def model_folder(self, dtype: Dtype | None, start: tools.Start) -> Iterator[Path]:
        """A folder that holds the exported model; one that is made for this is removed at the end, whatever ends it."""
        if self.index is None:
            yield self.folder.local_path
            return
        with (  # a copy of the weights must not be left behind
            terminable(SystemExit, 128 + signal.SIGTERM),
            tempfile.TemporaryDirectory(prefix="regrow-evaluate-") as folder,
        ):
            export_run("hf", str(self.folder), self.index, folder, dtype=dtype or Dtype.float32, start=start)
            yield Path(folder)


def find_source(location: str, *, step: int | None = None, corpus: str | None = None) -> Source:
    """What lies at a path or a URI; of a run, the checkpoint of a step or the newest sound one.

    `corpus` names a prepared corpus whose validation documents to use; by default it is the run's own. Raises
    RegrowError where nothing can be evaluated there.
    """
    folder = Storage.at(location)
    names = set(folder.list())
    chosen = Corpora.at(corpus, DataConfig()) if corpus is not None else None
    if chosen is not None:
        assert chosen.manifests  # read now: a mistake must not show after minutes
    if CONFIG in names:
        if step is not None:
            raise EvaluationError(f"--step chooses among a run's checkpoints; {folder} holds an exported model")
        _check_exported(folder, names)
        return Source(folder, chosen)
    if CHECKPOINTS not in names:
        raise EvaluationError(f"{folder} {NEITHER if names else 'is not there, or empty'}")
    _, index = tools.choose(*checkpoints_of(location), step)
    record = read_record(folder)
    if record is None:
        raise EvaluationError(f"{folder} has no run.json, so its model is not known; name a run's folder")
    trained_on = corpora_of(folder, record)
    if trained_on is None:
        raise EvaluationError(
            f"the corpus that {folder} trained on was not found, so there is no tokenizer; {_what_lacks(folder)}, or "
            "export the checkpoint (python -m jobs.checkpoint export), add "
            f"tokenizer.json and {TOKENIZER_CONFIG}, and name that folder"
        )
    return Source(folder, chosen or trained_on, record["run_id"], index)


def _what_lacks(run: Storage) -> str:
    """Of a run whose corpus was not found."""
    named = named_corpora(run)
    if len(named) <= 1:
        return f"put it into {join_location(split_location(str(run))[0], 'data')}"
    missing = {name: folder for name, folder in named.items() if not _is_corpus(folder)}
    if not missing:
        return f"those at {' and '.join(named.values())} are not what it trained on"
    return " and ".join(f"put data.corpora.{name} back to {folder}" for name, folder in missing.items())


def _is_corpus(folder: str) -> bool:
    try:
        Manifest.load(folder)
    except (DataError, StorageError):
        return False
    return True


def _check_exported(folder: Storage, names: set[str]) -> None:
    if not folder.is_local:
        raise EvaluationError(f"{folder}: copy the exported model to a local folder first, and name that")
    if not any(name.endswith(".safetensors") for name in names):
        raise EvaluationError(f"{folder} has {CONFIG} but no *.safetensors; other files of weights are not read")
    if TOKENIZER_CONFIG not in names:
        raise EvaluationError(
            f"{folder} has no {TOKENIZER_CONFIG}, so its tokenizer is not known; copy tokenizer.json and "
            f"{TOKENIZER_CONFIG} of the model's tokenizer there"
        )
