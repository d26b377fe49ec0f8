"""The run folder's two logs: metrics.jsonl, a row per optimizer step, and events.jsonl, what happened to the run.

`RunLog` is their single writer; `read_metrics` and `read_events` read them back, whatever a crash left behind. On
local disk each line goes out with one `write` at once. Where storage cannot append, lines collect in memory and a
thread uploads them as numbered segments: the training loop never waits for storage. A run that has segments goes on in
segments, wherever it moves to. See docs/file-formats.md.
"""

import contextlib
import errno
import fcntl
import itertools
import json
import math
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from regrow.record.claim import LOOK_EVERY_S, Claim
from regrow.record.events import Event, Rollback, Row, Submitted
from regrow.record.relative import RelativeLists
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
LOGGED = "logged_generation"  # of a late row: the one that wrote it, which a reader fences it by
METRICS, EVENTS = "metrics.jsonl", "events.jsonl"
RANKS = "ranks.json"  # what each rank spent its newest steps on, the slowest first; written anew now and then
SEGMENT_BYTES = 1 << 20  # a segment is uploaded again as it grows to this; then the next number begins
UPLOAD_EVERY_S = 10.0
TAIL_BYTES = 256 << 10  # of metrics.jsonl, read at a time from its end: some 700 steps
SAME_BYTES = 4 << 10  # of what was read before, which show that a file has only grown since
NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOLCK)  # of file systems without
TAIL_SEGMENTS = 2  # up to a megabyte each


class RunLog:
    """The single writer of a run folder's metrics and events. Safe to use from several threads."""

    def __init__(self, storage: Storage, *, claim: Claim | None = None, upload_every_s: float = UPLOAD_EVERY_S) -> None:
        """Open the log; nothing is written yet. A torn last line, left by a crash, is dropped.

        Whatever writes raises Superseded once another one than that of `claim` writes the run; None: no other can.
        """
        self.storage, self._claim = storage, claim
        self.generation: int | None = None
        self._next_step = 1
        self._taken_back: list[Row] | None = None  # by a `begin` that storage has not taken whole yet
        self._lists = RelativeLists()
        self._lock = threading.RLock()
        begun = f"w{claim.number:06d}" if claim else f"{time.time_ns() // 1_000_000:013d}"
        self._session = f"{begun}-{secrets.token_hex(2)}"
        self._has_segments = not storage.is_local or any(_segments(storage, name) for name in (METRICS, EVENTS))
        self._files: _Appender | _Uploader = (
            _Appender(storage, in_segments=self._has_segments)
            if storage.is_local
            else _Uploader(storage, upload_every_s, self._check)
        )
        self._files.open(EVENTS, _segment_name(EVENTS, self._session))

    def begin(self, generation: int, start_step: int) -> Rollback:
        """Start writing rows of `generation`, whose first is step `start_step + 1`.

        Rows past `start_step` are taken back, so that there is one row a step, in order; they are noted as a
        `rollback` event, which the report needs, and returned. Rows of older generations are refused from here on.
        """
        with self._lock:
            self._check()
            if not self.storage.is_local:
                self._files.flush()
            if self._taken_back is None:
                self._taken_back = rows_past(self.storage, start_step)
            taken_back = self._taken_back
            if not self._has_segments:
                self._truncate_metrics(start_step)
            self.generation, self._next_step = generation, start_step + 1
            self._files.open(METRICS, _segment_name(METRICS, self._session, generation))
            if self._has_segments:  # the truncation itself: it stands before this generation's rows
                self._files.append(METRICS, encode({"generation": generation, "start_step": start_step}))
                self._files.flush()
            if not taken_back:
                self._taken_back = None
                return Rollback(generation=generation, steps=0)
            rollback = rollback_of(taken_back, generation, start_step)
            self.event(rollback)
            self._taken_back = None
            return rollback

    @property
    def next_step(self) -> int:
        """The step whose row comes next."""
        return self._next_step

    def row(self, row: Mapping[str, Any], *, is_late: bool = False) -> bool:
        """Append one step's row; keys are METRIC_KEYS and, on some rows, more. `batch_digest` may be an int.

        Returns False, writing nothing, for a row of another generation than the one begun: a late one of a group
        that is gone, unless `is_late` says that it is wanted all the same. Steps must come one by one.
        """
        with self._lock:
            assert self.generation is not None, "RunLog.begin comes before the first row"
            missing = [key for key in METRIC_KEYS if key not in row]
            assert not missing, f"metrics row without {missing}"
            if row["generation"] != self.generation and not (is_late and row["generation"] < self.generation):
                return False
            assert row["step"] == self._next_step, f"row of step {row['step']}, expected {self._next_step}"
            ordered = {key: row[key] for key in METRIC_KEYS} | dict(row)
            if isinstance(ordered["batch_digest"], int):
                ordered["batch_digest"] = f"{ordered['batch_digest']:016x}"
            if row["generation"] != self.generation:
                ordered[LOGGED] = self.generation
            self._append(METRICS, encode(ordered))
            self._next_step += 1
            return True

    def event(self, event: Event) -> Event:
        """Append one event, stamped with the time now where it has none, and make it durable; it is returned.

        A `submitted` says when the run was last heard, as readers of the log's end do not have the rows before it, and
        when it was written, as its time is its command's, which may have prepared a corpus since.
        """
        stamped = event if event.time else replace(event, time=time.time())
        if isinstance(stamped, Submitted):
            newest = newest_row(self.storage) or {}
            stamped = replace(stamped, heard_at=newest.get("time"), logged_at=time.time())
        row = stamped.to_row()
        with self._lock:
            self._append(EVENTS, encode(self._lists.shorten(row)), durable=True)
            self._lists.keep(row)
        return stamped

    def flush(self) -> None:
        """Make every row and event durable now; call it before a checkpoint of the step is committed."""
        with self._lock:
            self._check()
            self._files.flush()

    def close(self) -> None:
        with self._lock:
            self._files.close()

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _append(self, name: str, line: bytes, *, durable: bool = False) -> None:
        if self.storage.is_local:  # elsewhere it is the upload that writes
            self._check(within_s=LOOK_EVERY_S)
        self._files.append(name, line, durable)

    def _check(self, *, within_s: float = 0.0) -> None:
        if self._claim is not None:
            self._claim.check(within_s=within_s)

    def _truncate_metrics(self, start_step: int) -> None:
        """Cut off the rows past `start_step` and a torn tail; reads no more of the file than that."""
        self._files.close(METRICS)
        path = self.storage.local_path / METRICS
        keep = 0
        for line, end in _lines_from_end(path):
            row = decode_row(line)
            if row is not None and row["step"] <= start_step:
                keep = end
                break
        if path.exists() and keep < path.stat().st_size:
            os.truncate(path, keep)  # at the end of a line: whole at whatever instant we die


def rollback_of(taken_back: Sequence[Row], generation: int, start_step: int) -> Rollback:
    """The event of rows, at least one, that a generation takes back."""
    by_generation = itertools.groupby(taken_back, key=lambda row: row.get("generation", 0))
    spans: list[Row] = [{"generation": number, **_times(list(rows))} for number, rows in by_generation]
    return Rollback(
        generation=generation,
        from_step=taken_back[-1]["step"],
        to_step=start_step,
        steps=len(taken_back),
        seconds=math.fsum(row["step_s"] or 0.0 for row in taken_back),
        spans=spans,
        **_times(taken_back),
    )


def _times(rows: Sequence[Row]) -> Row:
    """When the first of these rows' steps began and ended, and when the last of them ended, in unix seconds."""
    first = rows[0]
    return {
        "first_time": first["time"] - (first["step_s"] or 0.0),
        "first_step_end": first["time"],
        "last_time": rows[-1]["time"],
    }


class _Appender:
    """Lines at the end of local files, each with one `write` so that none is interleaved with another."""

    def __init__(self, storage: Storage, *, in_segments: bool) -> None:
        """`in_segments`: of a run that has some from an object store, of which the newest ones sort last."""
        self._folder, self._in_segments = storage.local_path, in_segments
        self._open: dict[str, int] = {}

    def open(self, name: str, segment: str) -> None:
        self.close(name)
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / (_Segment(segment).name if self._in_segments else name)
        file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        with _locked(file):
            num_bytes = os.fstat(file).st_size
            kept = _whole_lines(file, num_bytes)
            if kept < num_bytes:
                os.ftruncate(file, kept)
        self._open[name] = file

    def append(self, name: str, line: bytes, durable: bool = False) -> None:
        file = self._open[name]
        with _locked(file):
            written = os.write(file, line)
            if written < len(line):  # disk full: leave whole lines only
                os.ftruncate(file, os.fstat(file).st_size - written)
                raise OSError(f"{self._folder / name}: wrote {written} of {len(line)} bytes")
            if durable:
                try:
                    os.fsync(file)
                except OSError:  # it is tried again
                    os.ftruncate(file, os.fstat(file).st_size - len(line))
                    raise

    def flush(self) -> None:
        for file in self._open.values():
            os.fsync(file)

    def close(self, *names: str) -> None:
        for name in names or tuple(self._open):
            if name in self._open:
                os.close(self._open.pop(name))


@contextlib.contextmanager
def _locked(file: int) -> Iterator[None]:
    """Against other writers of the file, where its file system has locks: the run's own lock or number fences, too."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        yield
        return
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)


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

    def __init__(self, storage: Storage, every_s: float, check: Callable[[], None]) -> None:
        """`check` comes before each upload, and raises where it is not to be."""
        self._storage, self._every_s, self._check = storage, every_s, check
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
            before = self._segments.get(name)
            number = before.number + 1 if before and before.prefix == segment else 0  # none is written over
            self._segments[name] = _Segment(segment, number)

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
            self._check()
            self._storage.write_bytes(segment.name, data)
            with self._lock:
                segment.num_uploaded = num_lines
                if len(data) >= SEGMENT_BYTES:
                    del segment.lines[:num_lines]
                    segment.number, segment.num_uploaded = segment.number + 1, 0


class Tail:
    """A local file of JSON lines, of which only what is new is read."""

    def __init__(self, path: Path) -> None:
        self.path, self._at, self._last = path, 0, b""

    def read(self) -> tuple[list[Row], bool]:
        """Whole lines since the last look, and whether these are all from the beginning, as lines were taken back."""
        try:
            with open(self.path, "rb") as file:
                file.seek(self._at - len(self._last))
                anew = file.read(len(self._last)) != self._last or not self._at
                if anew:
                    self._at, self._last = file.seek(0), b""
                data = file.read()
        except FileNotFoundError:
            return [], False
        whole = data[: data.rfind(b"\n") + 1]
        self._at += len(whole)
        self._last = (self._last + whole)[-SAME_BYTES:]
        return _decoded(whole), anew


class LogReader:
    """Reads a run's log again and again: what has not changed since is kept, as it is written."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._known: dict[str, bytes] = {}
        self._done: set[str] = set()  # segments that were read while another one stood behind them: they grow no more

    def metrics(self) -> list[Row]:
        """As `read_metrics`."""
        return _counted(self._lines(METRICS))

    def events(self) -> list[Row]:
        """As `read_events`."""
        lists = RelativeLists()
        return [lists.whole(row) for row in self._lines(EVENTS) if "event" in row and "time" in row]

    def _lines(self, name: str) -> Iterator[Row]:
        files = _files(self._storage, name)
        for file in files:
            if file not in self._done:
                with contextlib.suppress(FileNotFoundError):
                    self._known[file] = self._read(file)
                    self._done |= {file} - {name, files[-1]}
            yield from _decoded(self._known.get(file, b""))

    def _read(self, file: str) -> bytes:
        """Of a file that was read before, its end, if all that has changed is behind it."""
        known = self._known.get(file, b"")
        begin = max(0, len(known) - SAME_BYTES)

        def from_begin(opened: Any) -> bytes:
            opened.seek(begin)
            return bytes(opened.read())

        try:
            data = self._storage.read_with(file, from_begin)
        except ValueError:  # the file is shorter
            data = b""
        if data.startswith(known[begin:]):
            return known[:begin] + data
        return self._storage.read_bytes(file)


def read_metrics(storage: Storage, *, tail: bool = False) -> list[Row]:
    """All rows that count, one a step, in order of steps: torn lines skipped, segments joined, later rows supersede.

    Values that JSON cannot hold (NaN, infinities) are floats again. `tail`: only those at the end of long logs; what
    a rollback took back does not count there either, as its generation's rows come behind them.
    """
    if not tail:
        return LogReader(storage).metrics()
    is_one = storage.is_local and not _segments(storage, METRICS)
    pieces = list(itertools.islice(_pieces(storage, METRICS), 1 if is_one else TAIL_SEGMENTS))
    return _counted(itertools.chain.from_iterable(reversed(pieces)))


def rows_past(storage: Storage, step: int) -> list[Row]:
    """The rows that count of later steps than this one; reads no more of the log's end than it takes."""
    lines: list[Row] = []
    for piece in _pieces(storage, METRICS):
        lines = piece + lines
        if any(_first_step(line) <= step + 1 for line in piece):
            break
    return [row for row in _counted(lines) if row["step"] > step]


def newest_row(storage: Storage) -> Row | None:
    """The row of the last step that has one; reads the log's end."""
    lines: list[Row] = []
    for piece in _pieces(storage, METRICS):
        lines = piece + lines
        if rows := _counted(lines):
            return rows[-1]
    return None


def read_events(storage: Storage) -> list[Row]:
    """All events in the order in which they were written, whatever the clocks said; torn lines are skipped."""
    return LogReader(storage).events()


def _counted(lines: Iterable[Row]) -> list[Row]:
    """The rows that count, of lines in their order."""
    rows: list[Row] = []
    newest = None  # generation; an older one's rows after it come from a writer that did not know it was replaced
    for row in lines:
        if "step" not in row and "start_step" not in row:
            continue
        generation, step = row.get(LOGGED, row.get("generation", 0)), _first_step(row)
        if newest is not None and generation < newest:
            continue
        newest = generation
        while rows and rows[-1]["step"] >= step:
            rows.pop()
        if "step" in row:
            rows.append(row)
    return rows


def _first_step(row: Row) -> float:
    """What this line takes back, in lines before it, are the rows of this step and later ones."""
    return row["step"] if "step" in row else row.get("start_step", math.inf) + 1


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


def decode_row(line: bytes) -> Row | None:
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


def _decoded(lines: bytes) -> list[Row]:
    return [row for line in lines.splitlines() if (row := decode_row(line)) is not None]


def _files(storage: Storage, name: str) -> list[str]:
    """Where a log's lines are, in their order: the file that is appended to as long as there are no segments, these."""
    return [name, *_segments(storage, name)]


def _segments(storage: Storage, name: str) -> list[str]:
    stem = name.removesuffix(".jsonl")
    return [entry for entry in storage.list() if entry.startswith(f"{stem}-") and entry.endswith(".jsonl")]


def _pieces(storage: Storage, name: str) -> Iterator[list[Row]]:
    """A log from its end, a segment or some hundred kilobytes at a time; the lines of each piece in order."""
    for file in reversed(_files(storage, name)):
        if storage.is_local:
            yield from (_decoded(data) for data, _ in _blocks_from_end(storage.local_path / file))
        else:
            with contextlib.suppress(FileNotFoundError):
                yield _decoded(storage.read_bytes(file))


def _blocks_from_end(path: Path) -> Iterator[tuple[bytes, int]]:
    """Whole lines of a file and where they begin, the last ones first; a torn tail stands with the last of them."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        end, rest = os.fstat(file).st_size, b""
        while end:
            begin = max(0, end - TAIL_BYTES)
            data = os.pread(file, end - begin, begin) + rest
            cut = data.find(b"\n") + 1 if begin else 0
            if begin and not cut:  # in the middle of a line
                cut = len(data)
            end, rest = begin, data[:cut]
            if data[cut:]:
                yield data[cut:], begin + cut
    finally:
        os.close(file)


def _lines_from_end(path: Path) -> Iterator[tuple[bytes, int]]:
    """Whole lines of a file, the last one first, and where each ends."""
    for data, begin in _blocks_from_end(path):
        end = begin + data.rfind(b"\n") + 1
        for line in reversed(data[: end - begin].splitlines(keepends=True)):
            yield line, end
            end -= len(line)


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
