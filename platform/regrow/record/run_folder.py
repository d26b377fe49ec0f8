"""A run folder, `<storage_path>/<run.name>/`: its record and what the run in it does. Neither hydra nor torch."""

import contextlib
import json
import os
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

import yaml

from regrow.config.run_yaml import read_yaml
from regrow.config.schema import Dtype, ModelConfig, PretrainConfig, RopeScaling
from regrow.errors import RegrowError, ResumeError, first_line
from regrow.record.events import Submitted
from regrow.record.history import History
from regrow.record.lock import is_held
from regrow.record.log import EVENTS, METRICS, RANKS, LogReader, read_metrics
from regrow.record.status import Status, status_of
from regrow.storage import Storage, join_location, local_path, path_of

RUN_FILE, CONFIG_FILE, CHECKPOINTS = "run.json", "config.yaml", "checkpoints"
LEAST_ROOM = 1 << 20  # bytes: a full file system seldom says 0, and a line of the logs may have as many
DATA_KEYS = ("recipe", "vocab_size", "seq_len", "validation_fraction", "rows_per_group", "window_steps", "mixture")
# beside these, settings by which a recipe makes another corpus, and such as say where a corpus comes from
MADE_KEYS = ("rows_per_shard", "min_score", "language", "min_language_score", "max_document_chars")
FROM_KEYS = ("source", "tokenizer", "end_of_text", "corpora")


def run_folder(config: PretrainConfig) -> Storage:
    return Storage.at(config.run.storage_path) / config.run.name


def run_location(config: PretrainConfig) -> str:
    """The same folder as a path or URI in full; never opened: this machine may have no way to it."""
    path = local_path(config.run.storage_path)
    if "://" in path:
        return join_location(path, config.run.name)
    return str(path_of(path).absolute() / config.run.name)


def find_run(name: str) -> Storage:
    """A run's folder by its path or URI, or by its name below runs/."""
    storage, below = Storage.at(name), Storage.at("runs") / name
    return below if "/" not in name and not storage.list() and below.list() else storage


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
        raise ResumeError(f"{folder / RUN_FILE} is damaged: {error}") from error


def write_record(
    folder: Storage, *, run_id: str, identity: dict[str, Any], manifest_sha256: str | None, is_new: bool = False
) -> bool:
    """Make the folder a run's, or complete the record of one that was imported.

    `is_new`: only where no run has it yet; whether that was so, as of two jobs that begin it at once one is first.
    """
    record = {
        "run_id": run_id,
        "created_at": time.time(),
        "manifest_sha256": manifest_sha256,
        "identity": identity,
    }
    content = json.dumps(record, indent=1).encode()
    if is_new:
        return folder.create(RUN_FILE, content)
    folder.write_bytes(RUN_FILE, content)
    return True


def read_status(storage: Storage, now: float | None = None, *, log: LogReader | None = None) -> Status:
    """What the run in this folder does now; of long logs of steps only the end is read: runs last for weeks.

    `log` is one that is kept for the next look: of events it reads again only what has changed.
    Raises RegrowError where the folder holds no run.
    """
    config = run_config(storage)
    history = History.of_logs(read_metrics(storage, tail=True), (log or LogReader(storage)).events())
    newest, report = history.newest(Submitted), None
    with contextlib.suppress(OSError, ValueError):
        report = json.loads(storage.read_bytes("report.json"))
    return status_of(
        history,
        folder=str(storage),
        config=config,
        now=time.time() if now is None else now,
        held=is_held(storage, newest),
        refusal=why_unwritable(storage, newest),
        report=report if isinstance(report, dict) else None,
        ranks=read_ranks(storage, begun_at(history)),
    )


def why_unwritable(storage: Storage, submitted: Submitted | None) -> str:
    """Why a folder takes no writes; empty where it does, as far as can be seen.

    That it is read-only says something only on the machine of the newest submission: another one may look through a
    mount that is.
    """
    if not storage.is_local:
        return ""
    try:
        found = os.statvfs(storage.local_path)
    except OSError:
        return ""
    bytes_left = found.f_bavail * found.f_frsize
    if (found.f_blocks and bytes_left < LEAST_ROOM) or (found.f_files and not found.f_favail):  # all 0: it does not say
        return "no room"
    is_here = submitted is not None and submitted.host == socket.gethostname()
    return "it is read-only" if is_here and found.f_flag & os.ST_RDONLY else ""


def begun_at(history: History) -> float:
    """When the newest job began, unix time."""
    newest = history.newest(Submitted)
    return newest.time if newest else 0.0


def read_ranks(storage: Storage, since: float) -> list[dict[str, Any]]:
    """What ranks spent their newest steps on, the slowest first; empty where nothing is known.

    What was written before `since`, unix time, is of a job before.
    """
    return [each for each in _shown(storage, "ranks", since) if isinstance(each.get("rank"), int)]


def read_node_snapshots(storage: Storage, since: float) -> list[dict[str, Any]]:
    """The same of what nodes took to make their newest snapshots safe."""
    return [each for each in _shown(storage, "snapshots", since) if isinstance(each.get("node"), str)]


def _shown(storage: Storage, what: str, since: float) -> list[dict[str, Any]]:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        content = json.loads(storage.read_bytes(RANKS))
        return [each for each in content[what] if isinstance(each, dict) and content["time"] >= since]
    return []


def run_config(storage: Storage) -> dict[str, Any]:
    """A run's config.yaml as plain dictionaries, empty where there is none.

    Raises RegrowError where the folder holds no run, or config.yaml is damaged.
    """
    names, stems = storage.list(), tuple(name.removesuffix(".jsonl") for name in (EVENTS, METRICS))
    if not any(name.startswith(stems) and name.endswith(".jsonl") for name in names):
        raise RegrowError(
            f"{storage} holds no run that has begun: no events.jsonl; name the folder <run.storage_path>/<run.name>"
        )
    return read_config(storage)


def read_config(storage: Storage) -> dict[str, Any]:
    """The same, whether the run has begun or not."""
    try:
        content = read_yaml(storage.read_bytes(CONFIG_FILE))
    except FileNotFoundError:
        return {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RegrowError(f"{storage / CONFIG_FILE} is damaged: {first_line(error)}") from error
    if not isinstance(content, Mapping):
        raise RegrowError(f"{storage / CONFIG_FILE} is damaged: it holds no settings")
    return dict(content)


def identity(config: PretrainConfig) -> dict[str, Any]:
    """The settings that fix the weights, flat: `optim.lr` -> 0.003; they may not change between attempts. JSON types.

    Cluster, parallel techniques, checkpointing, logging and `train.steps` are not among them.
    """
    model = {key: value for key, value in asdict(config.model).items() if key != "name"}
    data = {key: value for key, value in asdict(config.data).items() if key in DATA_KEYS}
    data["corpora"] = list(config.data.corpora)  # by name: where they lie may change, what they hold is checked apart
    groups = {"model": model, "data": data, "optim": asdict(config.optim)}
    flat = {f"{group}.{key}": value for group, values in groups.items() for key, value in values.items()}
    flat["optim.schedule"] = config.optim.schedule.value
    if flat.pop("optim.moments") is not Dtype.float32:  # as all were before there was a choice
        flat["optim.moments"] = config.optim.moments.value
    return {"run.seed": config.run.seed, **flat}


def data_before(folder: Storage, config: PretrainConfig, keys: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings of the data, flat: as in a run's config.yaml, and as now; without those that were not there yet then.

    Raises RegrowError where it is damaged.
    """
    before = read_config(folder).get("data") or {}
    known = [key for key in keys if key in before]
    return {f"data.{key}": before[key] for key in known}, {f"data.{key}": getattr(config.data, key) for key in known}


def model_of(settings: Mapping[str, Any]) -> ModelConfig:
    """The model that an identity describes; what it does not say is the schema's default, the name too."""
    names = [field.name for field in fields(ModelConfig) if f"model.{field.name}" in settings]
    given = {name: settings[f"model.{name}"] for name in names}
    if given.get("rope_scaling") is not None:
        given["rope_scaling"] = RopeScaling(**given["rope_scaling"])
    return ModelConfig(**given)


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """What changed between two identities, `key: old -> new`, a line each."""
    return [
        f"{key}: {old.get(key, '(absent)')} -> {new.get(key, '(absent)')}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key, ...) != new.get(key, ...)
    ]
