"""Opening a run: new, to be continued, or refused.

A run whose weights were imported has a record before its first attempt. Its `manifest_sha256` is null, and `identity`
holds what the weights alone tell: the first attempt has to agree with it, and completes it.
"""

import os
from dataclasses import dataclass
from typing import Any

from regrow.config.check import check_new
from regrow.config.plain import to_yaml
from regrow.config.schema import Dtype, PretrainConfig
from regrow.errors import ResumeError
from regrow.record.run_folder import (
    CHECKPOINTS,
    CONFIG_FILE,
    FROM_KEYS,
    MADE_KEYS,
    RUN_FILE,
    data_before,
    differences,
    identity,
    new_run_id,
    read_config,
    read_record,
    run_folder,
    write_record,
)
from regrow.record.unfinished import unfinished
from regrow.state.disk.catalog import committed_steps
from regrow.storage import Storage, StorageError, make_folder

LEFT_OUT = {"optim.moments": str(Dtype.float32)}  # of a run's identity where it is so, but not of an import's


@dataclass(frozen=True)
class Run:
    """A run folder and the random id that all its files carry."""

    folder: Storage
    run_id: str
    resumed_step: int | None  # newest committed step when an existing run goes on; 0: none yet; None: a new run


def check_may_start(config: PretrainConfig) -> None:
    """Refuse, before anything slow happens, to touch an existing run that this config cannot continue.

    The folder that runs are in is made, where it is a local one and the run's own is not there. Raises ResumeError for
    a folder that something else fills, and for settings that the weights depend on, with the difference; ConfigError
    for what no run should begin with; StorageError where the run's folder cannot be written to, or not be made.
    """
    folder = run_folder(config)
    _check_writable(config, folder)
    _check_complete(folder)
    record = read_record(folder)
    if record is None or record["manifest_sha256"] is None:
        check_new(config)
    if record is None:
        return
    if not config.run.resume:
        raise ResumeError(
            f"run {config.run.name!r} exists at {folder} and run.resume=false; "
            "choose another run.name, delete the folder, or leave run.resume=true to continue it"
        )
    old, mine = record["identity"], identity(config)
    if record["manifest_sha256"] is None:
        mine = {key: value for key, value in (LEFT_OUT | mine).items() if key in old}
    elif not config.data.corpora:
        before, now = data_before(folder, config, MADE_KEYS)
        old, mine = old | before, mine | now
    _refuse_changes(config, old, mine)


def write_config(run: Run, config: PretrainConfig) -> None:
    """Only where this job holds the run's lock: another one may be training it, by other settings."""
    run.folder.write_bytes(CONFIG_FILE, to_yaml(config).encode())


def find_or_create(config: PretrainConfig, *, manifest_sha256: str) -> Run:
    """The run, whose lock another job may hold.

    Raises as `check_may_start` does, and ResumeError for other data.
    """
    folder, mine = run_folder(config), identity(config)
    check_may_start(config)
    record = read_record(folder)
    if record is None:
        run = Run(folder, new_run_id(), None)
        if not write_record(folder, run_id=run.run_id, identity=mine, manifest_sha256=manifest_sha256, is_new=True):
            return find_or_create(config, manifest_sha256=manifest_sha256)  # another job has begun it just now
        try:
            _check_complete(folder)  # an import that begins now looks for a run after it has marked the folder
        except ResumeError:
            folder.delete(RUN_FILE)
            raise
    else:
        if record["manifest_sha256"] is None:
            write_record(folder, run_id=record["run_id"], identity=mine, manifest_sha256=manifest_sha256)
        elif record["manifest_sha256"] != manifest_sha256:
            _refuse_corpus(config, folder, record["manifest_sha256"], manifest_sha256)
        steps = committed_steps(folder / CHECKPOINTS)
        run = Run(folder, record["run_id"], steps[0] if steps else 0)
    return run


def _check_writable(config: PretrainConfig, folder: Storage) -> None:
    if not folder.is_local:
        return
    if not folder.local_path.is_dir():
        make_folder(Storage.at(config.run.storage_path).local_path, "run.storage_path")
    elif not os.access(folder.local_path, os.W_OK | os.X_OK):
        raise StorageError(
            f"run folder {folder} may not be written to by this user; start the run as the user that it belongs to, or "
            "choose another run.name"
        )


def _check_complete(folder: Storage) -> None:
    if line := unfinished(folder):
        raise ResumeError(line)


def _refuse_changes(config: PretrainConfig, old: dict[str, Any], new: dict[str, Any]) -> None:
    changed = differences(old, new)
    if changed:
        raise ResumeError(
            f"run {config.run.name!r} exists with other settings ({'; '.join(changed)}); "
            "set them back to continue it, or choose another run.name"
        )


def _refuse_corpus(config: PretrainConfig, folder: Storage, old: str, new: str) -> None:
    before, now = data_before(folder, config, FROM_KEYS)
    if before != now:
        _refuse_changes(config, {"corpus": old, **before}, {"corpus": new, **now})
    named = "what data.source, data.tokenizer or data.corpora name has changed since"
    why = f", by the same settings: {named}" if read_config(folder) else f": settings of data.* are others, or {named}"
    raise ResumeError(
        f"run {config.run.name!r} began with another corpus (corpus: {old} -> {new}){why}; bring that back, or the "
        "corpus that it began with to <run.storage_path>/data, or choose another run.name"
    )
