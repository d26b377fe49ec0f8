"""The run folder's two logs: metrics.jsonl, a row per optimizer step, and events.jsonl, what happened to the run.

`RunLog` is their single writer; `read_metrics` and `read_events` read them back, whatever a crash left behind. On
local disk each line goes out with one `write` at once. Where storage cannot append, lines collect in memory and a
thread uploads them as numbered segments: the training loop never waits for storage. See docs/file-formats.md.
"""

import contextlib
import fcntl
import json
import math
import os
import secrets
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

from regrow.record.events import Event, Rollback, Row
from regrow.storage import Storage

METRIC_KEYS = (
    "step",
    "tokens_seen",
    "loss",
    "grad_norm",
    "lr",
    "tokens_per_s",
    "mfu",
    "step_s",
    "data_wait_s",
    "snapshot_s",
    "world_size",
    "generation",
    "batch_digest",
    "time",
)
METRICS, EVENTS = "metrics.jsonl", "events.jsonl"
SEGMENT_BYTES = 1 << 20  # a segment is uploaded again as it grows to this; then the next number begins
UPLOAD_EVERY_S = 10.0
TAIL_BYTES = 256 << 10  # of metrics.jsonl, where only its end is read: some 700 steps
TAIL_SEGMENTS = 2  # of an object store, up to a megabyte each


class RunLog:
    """The single writer of a run folder's metrics and events. Safe to use from several threads."""

    def __init__(self, storage: Storage, *, upload_every_s: float = UPLOAD_EVERY_S) -> None:
        """Open the log; nothing is written yet. A torn last line, left by a crash, is dropped."""
        self.storage = storage
        self.generation: int | None = None
        self._next_step = 1
        self._lock = threading.RLock()
        self._session = f"{time.time_ns() // 1_000_000:013d}-{secrets.token_hex(2)}"
        self._files: _Appender | _Uploader = (
            _Appender(storage) if storage.is_local else _Uploader(storage, upload_every_s)
        )
        self._files.open(EVENTS, _segment_name(EVENTS, self._session))

    def begin(self, generation: int, start_step: int) -> Rollback:
        """Start writing rows of `generation`, whose first is step `start_step + 1`.

        Rows past `start_step` are taken back, so that there is one row a step, in order; they are noted as a
        `rollback` event, which the report needs, and returned. Rows of older generations are refused from here on.
        """
        with self._lock:
            if self.storage.is_local:
                taken_back = self._truncate_metrics(start_step)
            else:
                self._files.flush()
                taken_back = [row for row in read_metrics(self.storage) if row["step"] > start_step]
            self.generation, self._next_step = generation, start_step + 1
            self._files.open(METRICS, _segment_name(METRICS, self._session, generation))
            if not self.storage.is_local:  # the truncation itself: it stands before this generation's rows
                self._files.append(METRICS, encode({"generation": generation, "start_step": start_step}))
                self._files.flush()
            if not taken_back:
                return Rollback(generation=generation, steps=0)
            first, last = taken_back[0], taken_back[-1]
            rollback = Rollback(
                generation=generation,
                from_step=last["step"],
                to_step=start_step,
                steps=len(taken_back),
                seconds=math.fsum(row["step_s"] or 0.0 for row in taken_back),
                first_time=first["time"] - (first["step_s"] or 0.0),
                first_step_end=first["time"],
                last_time=last["time"],
            )
            self.event(rollback)
            return rollback

    @property
    def next_step(self) -> int:
        """The step whose row comes next."""
        return self._next_step

    def row(self, row: Mapping[str, Any]) -> bool:
        """Append one step's row; keys are METRIC_KEYS and, on some rows, more. `batch_digest` may be an int.

        Returns False, writing nothing, for a row of another generation than the one begun: a late one of a group
        that is gone. Steps must come one by one.
        """
        with self._lock:
            assert self.generation is not None, "RunLog.begin comes before the first row"
            missing = [key for key in METRIC_KEYS if key not in row]
            assert not missing, f"metrics row without {missing}"
            if row["generation"] != self.generation:
                return False
            assert row["step"] == self._next_step, f"row of step {row['step']}, expected {self._next_step}"
            ordered = {key: row[key] for key in METRIC_KEYS} | dict(row)
            if isinstance(ordered["batch_digest"], int):
                ordered["batch_digest"] = f"{ordered['batch_digest']:016x}"
            self._files.append(METRICS, encode(ordered))
            self._next_step += 1
            return True

    def event(self, event: Event) -> Event:
        """Append one event, stamped with the time now where it has none, and make it durable; it is returned."""
        stamped = event if event.time else replace(event, time=time.time())
        with self._lock:
            self._files.append(EVENTS, encode(stamped.to_row()), durable=True)
        return stamped

    def flush(self) -> None:
        """Make every row and event durable now; call it before a checkpoint of the step is committed."""
        with self._lock:
            self._files.flush()

    def close(self) -> None:
        with self._lock:
            self._files.close()

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _truncate_metrics(self, start_step: int) -> list[Row]:
        """Drop the rows past `start_step` and a torn tail by an atomic rewrite; reads no more of the file than that."""
        self._files.close(METRICS)
        if not self.storage.exists(METRICS):
            return []
        data = self.storage.read_bytes(METRICS)
        keep, taken_back = data.rfind(b"\n") + 1, []
        while keep:
            begin = data.rfind(b"\n", 0, keep - 1) + 1
            row = _decode(data[begin:keep])
            if row is not None and row["step"] <= start_step:
                break
            if row is not None:
                taken_back.append(row)
            keep = begin
        if keep < len(data):
            self.storage.write_bytes(METRICS, data[:keep])  # renamed into place: whole at whatever instant we die
        return taken_back[::-1]


class _Appender:
    """Lines at the end of local files, each with one `write` so that none is interleaved with another."""

    def __init__(self, storage: Storage) -> None:
        self._folder = storage.local_path
        self._open: dict[str, int] = {}

    def open(self, name: str, segment: str) -> None:
        self.close(name)
        self._folder.mkdir(parents=True, exist_ok=True)
        file = os.open(self._folder / name, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            num_bytes = os.fstat(file).st_size
            kept = _whole_lines(file, num_bytes)
            if kept < num_bytes:
                os.ftruncate(file, kept)
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)
        self._open[name] = file

    def append(self, name: str, line: bytes, durable: bool = False) -> None:
        file = self._open[name]
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            written = os.write(file, line)
            if written < len(line):  # disk full: leave whole lines only
                os.ftruncate(file, os.fstat(file).st_size - written)
                raise OSError(f"{self._folder / name}: wrote {written} of {len(line)} bytes")
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)
        if durable:
            os.fsync(file)

    def flush(self) -> None:
        for file in self._open.values():
            os.fsync(file)

    def close(self, *names: str) -> None:
        for name in names or tuple(self._open):
            if name in self._open:
                os.close(self._open.pop(name))


@dataclass
class _Segment:
    prefix: str
    number: int = 0
    lines: list[bytes] = field(default_factory=list)
    num_uploaded: int = 0

    @property
    def name(self) -> str:
        return f"{self.prefix}-{self.number:05d}.jsonl"


class _Uploader:
    """Lines in segments that a thread uploads. Failed uploads are tried again with the next ones."""

    def __init__(self, storage: Storage, every_s: float) -> None:
        self._storage, self._every_s = storage, every_s
        self._segments: dict[str, _Segment] = {}
        self._lock = threading.Lock()  # of the segments
        self._uploading = threading.Lock()  # one upload at a time, so that an older content cannot overwrite a newer
        self._wake, self._closed = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="run-log-upload", daemon=True)
        self._thread.start()

    def open(self, name: str, segment: str) -> None:
        if name in self._segments:
            self._upload(name)
        with self._lock:
            self._segments[name] = _Segment(segment)

    def append(self, name: str, line: bytes, durable: bool = False) -> None:
        with self._lock:
            self._segments[name].lines.append(line)
        if durable:
            self._wake.set()

    def flush(self) -> None:
        for name in tuple(self._segments):
            self._upload(name)

    def close(self, *names: str) -> None:
        self._closed = True
        self._wake.set()
        self._thread.join()
        self.flush()

    def _run(self) -> None:
        while not self._closed:
            self._wake.wait(self._every_s)
            self._wake.clear()
            with contextlib.suppress(Exception):  # the lines stay; `flush` and `close` raise if storage is still away
                self.flush()

    def _upload(self, name: str) -> None:
        with self._uploading:
            with self._lock:
                segment = self._segments[name]
                num_lines = len(segment.lines)
                if num_lines == segment.num_uploaded:
                    return
                data = b"".join(segment.lines[:num_lines])
            self._storage.write_bytes(segment.name, data)
            with self._lock:
                segment.num_uploaded = num_lines
                if len(data) >= SEGMENT_BYTES:
                    del segment.lines[:num_lines]
                    segment.number, segment.num_uploaded = segment.number + 1, 0


class Tail:
    """A local file of JSON lines, of which only what is new is read."""

    def __init__(self, path: Path) -> None:
        self.path, self._inode, self._at = path, 0, 0

    def read(self) -> tuple[list[Row], bool]:
        """Whole lines since the last look, and whether these are all from the beginning, as the file was replaced."""
        try:
            with open(self.path, "rb") as file:
                status = os.fstat(file.fileno())
                anew = status.st_ino != self._inode or status.st_size < self._at
                if anew:
                    self._inode, self._at = status.st_ino, 0
                file.seek(self._at)
                data = file.read()
        except FileNotFoundError:
            return [], False
        whole = data[: data.rfind(b"\n") + 1]
        self._at += len(whole)
        return [row for line in whole.splitlines() if (row := _decode(line)) is not None], anew


def read_metrics(storage: Storage, *, tail: bool = False) -> list[Row]:
    """All rows that count, one a step, in order of steps: torn lines skipped, segments joined, later rows supersede.

    Values that JSON cannot hold (NaN, infinities) are floats again. `tail`: only those at the end of long logs; what
    a rollback took back does not count there either, as its generation's rows come behind them.
    """
    rows: list[Row] = []
    newest = None  # generation; an older one's rows after it come from a writer that did not know it was replaced
    for row in _lines(storage, METRICS, tail=tail):
        if "step" not in row and "start_step" not in row:
            continue
        generation, step = row.get("generation", 0), row["step"] if "step" in row else row["start_step"] + 1
        if newest is not None and generation < newest:
            continue
        newest = generation
        while rows and rows[-1]["step"] >= step:
            rows.pop()
        if "step" in row:
            rows.append(row)
    return rows


def read_events(storage: Storage) -> list[Row]:
    """All events in order of time; lines that a crash tore are skipped."""
    return sorted((row for row in _lines(storage, EVENTS) if "event" in row and "time" in row), key=itemgetter("time"))


def is_number(value: Any) -> bool:
    """Whether a row's value is there and finite."""
    return isinstance(value, int | float) and math.isfinite(value)


def positive(value: Any) -> float:
    """A duration in seconds; 0 where it is missing, null, negative or not finite."""
    return float(value) if is_number(value) and value > 0 else 0.0


def next_generation(events: Iterable[Mapping[str, Any]]) -> int:
    """A generation number that no earlier group of this run had; 1 for a new run."""
    return 1 + max((event.get("generation", 0) for event in events), default=0)


def encode(record: Mapping[str, Any]) -> bytes:
    """One line of JSON. NaN and infinities become null and are named under `nonfinite`: {"loss": "nan"}."""
    nonfinite: dict[str, str] = {}
    plain = _plain(record, "", nonfinite)
    if nonfinite:
        plain["nonfinite"] = nonfinite
    return json.dumps(plain, allow_nan=False, separators=(", ", ": ")).encode() + b"\n"


def _plain(value: Any, path: str, nonfinite: dict[str, str]) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v, f"{path}/{k}" if path else str(k), nonfinite) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v, f"{path}/{i}", nonfinite) for i, v in enumerate(value)]
    if hasattr(value, "item"):  # a NumPy or torch scalar
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        nonfinite[path] = str(value)
        return None
    return value if isinstance(value, str | int | float | None) else str(value)


def _decode(line: bytes) -> Row | None:
    try:
        row = json.loads(line)
    except ValueError:  # torn, or not UTF-8
        return None
    if not isinstance(row, dict):
        return None
    for path, text in row.pop("nonfinite", {}).items():  # {"startup_s/import": "inf"} names what stands deeper
        with contextlib.suppress(LookupError, TypeError, ValueError):
            *parents, last = path.split("/")
            target = row
            for key in parents:
                target = target[int(key)] if isinstance(target, list) else target[key]
            target[int(last) if isinstance(target, list) else last] = float(text)
    return row


def _lines(storage: Storage, name: str, *, tail: bool = False) -> Iterable[Row]:
    """Every readable line: of the appended file, then of the segments in order of their names."""
    stem = name.removesuffix(".jsonl")
    segments = [entry for entry in storage.list() if entry.startswith(f"{stem}-") and entry.endswith(".jsonl")]
    for file in [name, *segments[-TAIL_SEGMENTS if tail else 0 :]]:
        try:
            if tail and storage.is_local:
                begin = max(0, (storage.local_path / file).stat().st_size - TAIL_BYTES)
                data = storage.read_range(file, begin, TAIL_BYTES)
                data = data[data.find(b"\n") + 1 :] if begin else data
            else:
                data = storage.read_bytes(file)
        except FileNotFoundError:
            continue
        for line in data.splitlines():
            row = _decode(line)
            if row is not None:
                yield row


def _segment_name(name: str, session: str, generation: int | None = None) -> str:
    """Names sort as they should be read: by generation, then by the writer's start; no two writers share one."""
    stem = name.removesuffix(".jsonl")
    return f"{stem}-{session}" if generation is None else f"{stem}-{generation:06d}-{session}"


def _whole_lines(file: int, num_bytes: int) -> int:
    """Bytes up to and with the last line end."""
    chunk = 1 << 16
    end = num_bytes
    while end > 0:
        begin = max(0, end - chunk)
        at = os.pread(file, end - begin, begin).rfind(b"\n")
        if at >= 0:
            return begin + at + 1
        end = begin
    return 0
