"""The status of a run folder, read without reading all of it: runs last for weeks, and are looked at every second."""

import contextlib
import fcntl
import io
import json
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import yaml

from regrow.errors import RegrowError
from regrow.record.log import METRICS, Row, read_events, read_metrics
from regrow.record.status import Status
from regrow.record.status_logs import status_of
from regrow.storage import Storage

TAIL_BYTES = 256 << 10  # of metrics.jsonl: some 700 steps
TAIL_SEGMENTS = 2  # of an object store, up to a megabyte each
LOCK = ".lock"  # held by the run's coordinator for as long as it lives, where storage has locks
STEM = METRICS.removesuffix(".jsonl")


def read_status(storage: Storage, now: float | None = None) -> Status:
    """What the run in this folder does now. Raises RegrowError where the folder holds no run."""
    config, events = run_config(storage), read_events(storage)
    return status_of(
        folder=str(storage),
        rows=read_metrics(NewestRows(storage)),
        events=events,
        config=config,
        now=time.time() if now is None else now,
        held=held(storage, events),
        report=_read_report(storage),
    )


def run_config(storage: Storage) -> dict[str, Any]:
    """A run's config.yaml as plain dictionaries, empty where there is none.

    Raises RegrowError where the folder holds no run, or config.yaml is damaged.
    """
    names = storage.list()
    if not any(name.startswith(("events", STEM)) and name.endswith(".jsonl") for name in names):
        raise RegrowError(
            f"{storage} holds no run that has begun: no events.jsonl; name the folder <run.storage_path>/<run.name>"
        )
    if "config.yaml" not in names:
        return {}
    try:
        content = yaml.safe_load(storage.read_bytes("config.yaml"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RegrowError(f"{storage}/config.yaml is damaged: {str(error).splitlines()[0]}") from error
    if not isinstance(content, Mapping):
        raise RegrowError(f"{storage}/config.yaml is damaged: it holds no settings")
    return dict(content)


def held(storage: Storage, events: Iterable[Row]) -> bool | None:
    """Whether the run's coordinator lives, as its lock says; None where that cannot be known.

    A lock that is free says something only where it would have been taken: on the machine of the newest submission.
    """
    if not storage.is_local:
        return None
    try:
        descriptor = os.open(storage.local_path / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # a coordinator that comes just now tries again
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return None
    finally:
        os.close(descriptor)
    hosts = [event.get("host") for event in events if event["event"] == "submitted"]
    return False if hosts and hosts[-1] == socket.gethostname() else None


class NewestRows(Storage):
    """A run folder of which only the newest rows of metrics can be read; read-only.

    What is left out are the oldest rows: those of a rollback's generation come behind the ones that it took back.
    """

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.is_local = storage.is_local

    def __str__(self) -> str:
        return str(self.storage)

    def list(self, name: str = "") -> list[str]:
        names = self.storage.list(name)
        segments = [each for each in names if each.startswith(f"{STEM}-")]
        left_out = set(segments[:-TAIL_SEGMENTS])
        return [each for each in names if each not in left_out]

    def read_bytes(self, name: str) -> bytes:
        if name != METRICS or not self.is_local:
            return self.storage.read_bytes(name)
        size = (self.storage.local_path / name).stat().st_size
        begin = max(0, size - TAIL_BYTES)
        data = self.storage.read_range(name, begin, TAIL_BYTES)
        return data[data.find(b"\n") + 1 :] if begin else data

    def exists(self, name: str) -> bool:
        return self.storage.exists(name)

    def read_range(self, name: str, offset: int, num_bytes: int) -> bytes:
        return self.storage.read_range(name, offset, num_bytes)

    def read_with(self, name: str, read: Callable[[Any], Any]) -> Any:
        return self.storage.read_with(name, read)

    def join(self, *names: str) -> Storage:
        raise io.UnsupportedOperation("one folder only")

    def write_chunks(self, name: str, chunks: Iterable[Any]) -> int:
        raise io.UnsupportedOperation("read-only")

    def delete(self, name: str) -> None:
        raise io.UnsupportedOperation("read-only")


def _read_report(storage: Storage) -> dict[str, Any] | None:
    with contextlib.suppress(OSError, ValueError):
        content = json.loads(storage.read_bytes("report.json"))
        return content if isinstance(content, dict) else None
    return None
