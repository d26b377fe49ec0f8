"""Opening a run: new, to be continued, or refused. The run folder is `<storage_path>/<run.name>/`.

A run whose weights were imported has a record before its first attempt. Its `manifest_sha256` is null, and `identity`
holds what the weights alone tell: the first attempt has to agree with it, and completes it.
"""

import json
import secrets
import time
from dataclasses import dataclass
from typing import Any

from regrow.checkpoint.catalog import committed_steps
from regrow.config.identity import differences, identity
from regrow.config.schema import PretrainConfig
from regrow.errors import ResumeError
from regrow.storage import Storage

RUN_FILE, CONFIG_FILE, CHECKPOINTS = "run.json", "config.yaml", "checkpoints"


@dataclass(frozen=True)
class Run:
    """A run folder and the random id that all its files carry."""

    folder: Storage
    run_id: str
    resumed_step: int | None  # newest committed step when an existing run goes on; 0: none yet; None: a new run


def run_folder(config: PretrainConfig) -> Storage:
    return Storage.at(config.run.storage_path) / config.run.name


def check_may_start(config: PretrainConfig) -> None:
    """Refuse, before anything slow happens, to touch an existing run that this config cannot continue.

    Raises ResumeError, showing the difference where settings that the weights depend on changed.
    """
    folder = run_folder(config)
    record = read_record(folder)
    if record is None:
        return
    if not config.run.resume:
        raise ResumeError(
            f"run {config.run.name!r} exists at {folder} and run.resume=false; "
            "choose another run.name, delete the folder, or leave run.resume=true to continue it"
        )
    mine = identity(config)
    if record["manifest_sha256"] is None:
        mine = {key: value for key, value in mine.items() if key in record["identity"]}
    _refuse_changes(config, record["identity"], mine)


def open_run(config: PretrainConfig, *, manifest_sha256: str) -> Run:
    """Create the run's folder, or open it to go on. Raises ResumeError as `check_may_start` does, or for other data."""
    from regrow.config.store import to_yaml  # hydra, which reading a record can do without

    folder, mine = run_folder(config), identity(config)
    check_may_start(config)
    record = read_record(folder)
    if record is None:
        run = Run(folder, new_run_id(), None)
        write_record(folder, run_id=run.run_id, identity=mine, manifest_sha256=manifest_sha256)
    else:
        if record["manifest_sha256"] is None:
            write_record(folder, run_id=record["run_id"], identity=mine, manifest_sha256=manifest_sha256)
        else:
            _refuse_changes(config, {"corpus": record["manifest_sha256"]}, {"corpus": manifest_sha256})
        steps = committed_steps(folder / CHECKPOINTS)
        run = Run(folder, record["run_id"], steps[0] if steps else 0)
    folder.write_bytes(CONFIG_FILE, to_yaml(config).encode())
    return run


def checkpoints_of(run_folder: str) -> tuple[Storage, str | None]:
    """A run's folder of checkpoints, and the run's id where it says so."""
    folder = Storage.at(run_folder)
    record = read_record(folder)
    return folder / CHECKPOINTS, None if record is None else record["run_id"]


def new_run_id() -> str:
    return secrets.token_hex(8)


def read_record(folder: Storage) -> dict[str, Any] | None:
    """A run's run.json; None where there is none. Raises ResumeError where it is damaged."""
    try:
        return dict(json.loads(folder.read_bytes(RUN_FILE)))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise ResumeError(f"{folder}/{RUN_FILE} is damaged: {error}") from error


def write_record(folder: Storage, *, run_id: str, identity: dict[str, Any], manifest_sha256: str | None) -> None:
    """Make the folder a run's, or complete the record of one that was imported."""
    record = {
        "run_id": run_id,
        "created_at": time.time(),
        "manifest_sha256": manifest_sha256,
        "identity": identity,
    }
    folder.write_bytes(RUN_FILE, json.dumps(record, indent=1).encode())


def _refuse_changes(config: PretrainConfig, old: dict[str, Any], new: dict[str, Any]) -> None:
    changed = differences(old, new)
    if changed:
        raise ResumeError(
            f"run {config.run.name!r} exists with other settings ({'; '.join(changed)}); "
            "set them back to continue it, or choose another run.name"
        )
