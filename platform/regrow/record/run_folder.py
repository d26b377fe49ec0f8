"""A run folder, `<storage_path>/<run.name>/`, and its record, run.json. Neither hydra nor torch."""

import json
import secrets
import time
from typing import Any

from regrow.config.schema import PretrainConfig
from regrow.errors import ResumeError
from regrow.storage import Storage

RUN_FILE, CONFIG_FILE, CHECKPOINTS = "run.json", "config.yaml", "checkpoints"


def run_folder(config: PretrainConfig) -> Storage:
    return Storage.at(config.run.storage_path) / config.run.name


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
