"""Opening a run: new, to be continued, or refused. The run folder is `<storage_path>/<run.name>/`."""

import json
import secrets
import time
from dataclasses import dataclass
from typing import Any

from regrow.checkpoint.catalog import committed_steps
from regrow.config.identity import differences, identity
from regrow.config.schema import PretrainConfig
from regrow.config.store import to_yaml
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
    if not folder.exists(RUN_FILE):
        return
    if not config.run.resume:
        raise ResumeError(
            f"run {config.run.name!r} exists at {folder} and run.resume=false; "
            "choose another run.name, delete the folder, or leave run.resume=true to continue it"
        )
    _refuse_changes(config, json.loads(folder.read_bytes(RUN_FILE))["identity"], identity(config))


def open_run(config: PretrainConfig, *, manifest_sha256: str) -> Run:
    """Create the run's folder, or open it to go on. Raises ResumeError as `check_may_start` does, or for other data."""
    folder, mine = run_folder(config), identity(config)
    check_may_start(config)
    if folder.exists(RUN_FILE):
        record = json.loads(folder.read_bytes(RUN_FILE))
        _refuse_changes(config, {"corpus": record["manifest_sha256"]}, {"corpus": manifest_sha256})
        run_id = record["run_id"]
        steps = committed_steps(folder / CHECKPOINTS)
        run = Run(folder, run_id, steps[0] if steps else 0)
    else:
        run = Run(folder, secrets.token_hex(8), None)
        record = {
            "run_id": run.run_id,
            "created_at": time.time(),
            "manifest_sha256": manifest_sha256,
            "identity": mine,
        }
        folder.write_bytes(RUN_FILE, json.dumps(record, indent=1).encode())
    folder.write_bytes(CONFIG_FILE, to_yaml(config).encode())
    return run


def _refuse_changes(config: PretrainConfig, old: dict[str, Any], new: dict[str, Any]) -> None:
    changed = differences(old, new)
    if changed:
        raise ResumeError(
            f"run {config.run.name!r} exists with other settings ({'; '.join(changed)}); "
            "set them back to continue it, or choose another run.name"
        )
