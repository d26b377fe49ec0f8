"""Text in files: parquet, JSON lines and plain text, on local disk or wherever pyarrow.fs and fsspec reach.

Files are cut into pieces of about `PIECE_BYTES`, so that a task's memory does not grow with them. Storage that fails
for a while is asked again for each read; what can be fetched but not be read is a `DamagedPiece`.
"""

import contextlib
import gzip
import io
import itertools
import json
import os
import time
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow.fs import FileSelector, FileType, LocalFileSystem

from regrow.config.schema import DataConfig
from regrow.data.prepare.documents import TOO_LONG, DamagedPiece, Document, Piece, Skipped, source_changed
from regrow.data.prepare.listing import local_files, named_by, searched
from regrow.data.sized_file import SizedFile
from regrow.errors import DataError, RegrowError, UnseenError, first_line
from regrow.storage import RemoteStorage, in_threads, is_remote, path_of

PIECE_BYTES = 64 << 20  # of text
SUFFIXES = {".parquet": "parquet", ".jsonl": "jsonl", ".json": "jsonl", ".txt": "text", ".md": "text"}
READ_AHEAD_BYTES = 4 << 20  # of a file that is read bit by bit
RETRIES, FIRST_WAIT_S = 5, 0.5  # of storage that fails: 0.5 + 1 + 2 + 4 + 8 s
EMPTY, INVALID = "empty", "invalid UTF-8"

Result = TypeVar("Result")


class _Unfetched(Exception):
    """A read of storage that went on failing: Arrow, which raises OSError for damaged bytes, hands it back as it is."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.error = error


class _PatientFile(SizedFile):
    """A file as Arrow reads it, each read asked for again while storage fails. Raises _Unfetched at last."""

    def __init__(self, open_file: Callable[[], Any]) -> None:
        self._open, self._file = open_file, None
        super().__init__(self._fetch(lambda file: int(file.size())))

    def read(self, size: int | None = -1) -> bytes:
        begin = min(self._position, self._num_bytes)
        end = self._num_bytes if size is None or size < 0 else min(begin + size, self._num_bytes)

        def read_range(file: Any) -> bytes:
            data = file.read_at(end - begin, begin)
            if len(data) != end - begin:
                raise OSError(f"{len(data)} bytes came of {end - begin} at {begin}")
            return bytes(data)

        data = self._fetch(read_range)
        self._position = end
        return data

    def readinto(self, buffer: Any) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def _fetch(self, operation: Callable[[Any], Result]) -> Result:
        def once() -> Result:
            file, self._file = self._file or self._open(), None  # opened anew after an error
            result = operation(file)
            self._file = file
            return result

        try:
            return patiently(once)
        except OSError as error:
            raise _Unfetched(error) from error


class SourceFiles:
    """The files that a path, a folder, a glob or a URI of either names."""

    def __init__(self, source: str) -> None:
        """Raises DataError if the location cannot be opened."""
        self.source = source
        self.fs: Any = LocalFileSystem()
        self.root = absolute(source)
        if is_remote(source):
            remote = RemoteStorage.from_uri(source)
            self.fs, self.root = remote.fs, remote.root
        self.folder = searched(self.root)  # or the file
        self.is_glob = self.folder != self.root

    def list(self) -> list[tuple[str, int]]:
        """(path, bytes) of every file of a kind that can be read, sorted by path. Raises DataError if there is none.

        A file of a local file system that links name too is there once, by the first of its paths.
        """
        try:
            info = patiently(lambda: self.fs.get_file_info(self.folder))
            if info.type == FileType.Directory and isinstance(self.fs, LocalFileSystem):
                files = patiently(lambda: sorted(self._in_local_folder()))
            else:
                files = patiently(lambda: sorted(self._found(info)))
        except OSError as error:
            raise UnseenError(f"data.source={self.source} cannot be listed: {first_line(error)}") from error
        if info.type == FileType.NotFound:
            missing = UnseenError if isinstance(self.fs, LocalFileSystem) else DataError  # others may have that path
            raise missing(
                f"data.source={self.source}: there is no {self.folder}; give a file, folder, glob or URI that is there"
            )
        if not files:
            kinds = " ".join(f"*{suffix}" for suffix in SUFFIXES)
            raise DataError(f"data.source={self.source} names no file of a kind that can be read: {kinds} (also .gz)")
        return files

    def _found(self, info: Any) -> Iterator[tuple[str, int]]:
        is_folder, is_named = info.type == FileType.Directory, named_by(self.root)
        for each in self.fs.get_file_info(FileSelector(self.folder, recursive=True)) if is_folder else [info]:
            if each.type == FileType.File and kind_of(each.path) and is_named(each.path):
                yield each.path, each.size

    def _in_local_folder(self) -> Iterator[tuple[str, int]]:
        """Raises DataError where a file has a name that cannot stand in a manifest, JSON, or is a link to nothing."""
        is_named, sizes = named_by(self.root), dict[str, tuple[str, int]]()
        for path, place in sorted(local_files(self.folder, by_each_path=self.is_glob), key=lambda each: each[0]):
            is_lost_folder = place is None and not self.is_glob and "." not in Path(path).name  # most likely
            if not (kind_of(path) and is_named(path)) and not is_lost_folder:
                continue
            shown = os.fsencode(path).decode(errors="backslashreplace")
            if place is None:
                raise UnseenError(
                    f"data.source={self.source}: {shown} is a link to {os.readlink(path)}, which is not there; mend or "
                    "remove it, or give a glob without it"
                )
            if shown != path:
                raise DataError(f"data.source={self.source}: the name of {shown} is no UTF-8; rename it")
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                sizes.setdefault(place, (path, os.stat(place).st_size))
        yield from sizes.values()

    def name(self, path: str) -> str:
        """A file's name relative to the source: the same wherever the source is mounted."""
        folder = self.root.rpartition("/")[0] if path == self.root else self.folder
        return path.removeprefix(folder).lstrip("/")

    def path(self, name: str) -> str:
        """Asks the file system, whose OSError it raises, where a file may be the source itself or one of its name."""
        below = f"{self.folder}/{name}"
        if self.is_glob or not self.root.endswith(f"/{name}"):
            return below
        return below if self.fs.get_file_info(self.root).type == FileType.Directory else self.root

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """A range of a file's bytes. Raises SourceChanged where the file ends before, OSError where storage fails."""
        try:
            file = self._open(name, max(start, stop or 0))
            file.seek(start)
            return file.read(-1 if stop is None else stop - start)
        except _Unfetched as error:
            raise error.error from error

    def parquet(self, name: str) -> pq.ParquetFile:
        """Open a parquet file. Raises DamagedPiece if it is none, OSError for storage that goes on failing."""

        def open_file() -> pq.ParquetFile:
            file = pq.ParquetFile(pa.PythonFile(self._open(name), "r"), page_checksum_verification=True)
            rows = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
            if sum(rows) != file.metadata.num_rows:  # Arrow would read as many as each row group claims
                raise ValueError(f"its row groups have {sum(rows)} rows, its footer says {file.metadata.num_rows}")
            return file

        return _parsed(open_file)

    def _open(self, name: str, least_bytes: int = 0) -> _PatientFile:
        file = _PatientFile(lambda: self.fs.open_input_file(self.path(name)))
        if (size := file.seek(0, os.SEEK_END)) < least_bytes:
            raise source_changed(self.source, f"{name} has {size:,} bytes, and had at least {least_bytes:,}")
        file.seek(0)
        return file

    @contextlib.contextmanager
    def _reading(self, name: str, least_bytes: int = 0) -> Iterator[io.BufferedIOBase]:
        """A file to read bit by bit, a `.gz` unpacked: one that cannot be is a DamagedPiece."""
        try:
            file = io.BufferedReader(self._open(name, least_bytes), READ_AHEAD_BYTES)
            if not name.endswith(".gz"):
                yield file
            elif not file.peek(1):
                raise EOFError("no bytes")  # gzip takes them for no text
            else:
                yield gzip.GzipFile(fileobj=file)
        except _Unfetched as error:
            raise error.error from error
        except (OSError, EOFError, ValueError, zlib.error) as error:
            raise DamagedPiece(f"not gzip, or cut short: {first_line(error)}") from error

    def lines(self, piece: Piece) -> Iterator[bytes]:
        """The lines of a text file that begin in [start, stop), some of them held at a time.

        Raises SourceChanged where it ends before the stop, DamagedPiece for a `.gz` that cannot be unpacked, OSError
        for storage that goes on failing.
        """
        with self._reading(piece.file, max(piece.start, piece.stop or 0)) as file:
            if piece.start:
                # a line that began before the start belongs to the piece before; the last one may end behind the stop
                file.seek(piece.start - 1)
                file.readline()
            while (piece.stop is None or file.tell() < piece.stop) and (line := file.readline()):
                yield line

    def text(self, name: str) -> bytes:
        """A text file whole. Raises as `lines`."""
        if not name.endswith(".gz"):
            return self.read(name)
        with self._reading(name) as file:
            return file.read()


def _parsed(parse: Callable[[], Result]) -> Result:
    """Tell what cannot be read, a DamagedPiece, from what a _PatientFile cannot fetch, an OSError."""
    try:
        return parse()
    except _Unfetched as error:
        raise error.error from error
    except (OSError, pa.ArrowException, ValueError) as error:
        raise DamagedPiece(first_line(error)) from error


def absolute(source: str) -> str:
    """The same place for processes with another working directory or another home."""
    return source if is_remote(source) else str(path_of(source).absolute())


def kind_of(path: str) -> str:
    """parquet, jsonl or text by the file's suffix, perhaps before .gz; empty for anything else."""
    return SUFFIXES.get(Path(path.removesuffix(".gz")).suffix, "") if not Path(path).name.startswith(".") else ""


def cut_files(files: SourceFiles) -> list[Piece]:
    """All files as pieces. A parquet file whose footer cannot be read stays one piece, to be named when it is read."""
    return [piece for pieces in in_threads(partial(_cut_file, files), files.list()) for piece in pieces]


def _cut_file(files: SourceFiles, file: tuple[str, int]) -> list[Piece]:
    path, size = file
    name = files.name(path)
    if kind_of(path) == "parquet":
        with contextlib.suppress(DamagedPiece):
            return list(_cut_parquet(name, files.parquet(name).metadata))
    elif kind_of(path) == "jsonl" and not path.endswith(".gz"):
        count = max(1, -(-size // PIECE_BYTES))
        bounds = [size * k // count for k in range(count + 1)]
        return [Piece(name, a, b, max(b - a, 1)) for a, b in itertools.pairwise(bounds)]
    return [Piece(name, num_bytes=max(size, 1))]


def _cut_parquet(name: str, metadata: Any) -> Iterator[Piece]:
    sizes = [metadata.row_group(g).total_byte_size for g in range(metadata.num_row_groups)]
    start = 0
    while start < len(sizes):
        stop, size = start + 1, sizes[start]
        while stop < len(sizes) and size + sizes[stop] <= PIECE_BYTES:
            size, stop = size + sizes[stop], stop + 1
        yield Piece(name, start, stop, max(size, 1))
        start = stop
    if not sizes:
        yield Piece(name, 0, 0)


def parquet_rows(files: SourceFiles, piece: Piece, columns: list[str]) -> Iterator[pa.RecordBatch]:
    """A parquet piece's rows, some at a time, with those of `columns` that the file has.

    Raises DamagedPiece where the file has no text column or a page cannot be decoded, OSError where storage fails.
    """
    file = files.parquet(piece.file)
    have = {field.name: field.type for field in file.schema_arrow}
    text = have.get(columns[0])
    if text is None:
        raise DamagedPiece(f"no column {columns[0]!r}; it has {', '.join(have) or 'none'}")
    if not (pa.types.is_string(text) or pa.types.is_large_string(text) or pa.types.is_string_view(text)):
        raise DamagedPiece(f"column {columns[0]!r} is {text}, not string")
    wanted = [column for column in columns if column in have]
    stop = file.num_row_groups if piece.stop is None else piece.stop
    for group in range(piece.start, stop):
        table = _parsed(partial(file.read_row_group, group, columns=wanted, use_threads=False))
        yield from table.to_batches(max_chunksize=1024)


def json_lines(files: SourceFiles, piece: Piece) -> Iterator[dict[str, Any] | Skipped]:
    """The objects of a JSON lines piece: lines that begin in [start, stop). Raises DamagedPiece if no line is JSON."""
    num_lines = num_parsed = 0
    for line in files.lines(piece):
        if not line.strip():
            continue
        num_lines += 1
        try:
            value = json.loads(line)
        except UnicodeDecodeError:
            yield Skipped(INVALID)
            continue
        except (ValueError, RecursionError):
            yield Skipped("a line that is no JSON")
            continue
        num_parsed += 1
        yield value if isinstance(value, dict) else Skipped("a line that is no JSON object")
    if num_lines and not num_parsed:
        raise DamagedPiece("no line is JSON")


def plain_text(files: SourceFiles, piece: Piece) -> str | Skipped:
    """A text file whole."""
    data = files.text(piece.file)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return Skipped(INVALID)


def filters_of(config: DataConfig) -> list[str]:
    """What `filtered` leaves out by its settings, in words, for a recipe's `describe`."""
    filters = {
        f"score below {config.min_score}, or none": config.min_score,
        f"language other than {config.language}, or none": config.language,
        f"language_score below {config.min_language_score}, or none": config.min_language_score,
        f"documents over {config.max_document_chars} characters": config.max_document_chars,
    }
    return [words for words, value in filters.items() if value is not None]


def filtered(
    config: DataConfig,
    name: str,
    text: object,
    score: object = None,
    language: object = None,
    language_score: object = None,
) -> Document | Skipped:
    """A document, unless it fails a filter or has no value for it, or its text is none that can be trained on."""
    if _fails(score, config.min_score):
        return Skipped("score too low, or none")
    if config.language is not None and language != config.language:
        return Skipped("another language, or none")
    if _fails(language_score, config.min_language_score):
        return Skipped("language_score too low, or none")
    return checked(name, text, max_chars=config.max_document_chars)


def _fails(value: object, least: float | None) -> bool:
    return least is not None and not (isinstance(value, int | float) and value >= least)


def checked(name: str, text: object, *, max_chars: int) -> Document | Skipped:
    """A document, unless its text is none that can be trained on."""
    if isinstance(text, bytes):
        return Skipped(INVALID)
    if not isinstance(text, str) or not text.strip():
        return Skipped(EMPTY)
    if len(text) > max_chars:
        return Skipped(TOO_LONG)
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:  # half of a surrogate pair, as JSON may spell one
            return Skipped(INVALID)
    return Document(name, text)


def patiently(operation: Callable[[], Result]) -> Result:
    """Call, and call again with growing waits while storage fails. FileNotFoundError is final."""
    for wait_s in [FIRST_WAIT_S * 2**k for k in range(RETRIES)]:
        try:
            return _network_as_os(operation)
        except FileNotFoundError:
            raise
        except OSError:
            time.sleep(wait_s)
    return _network_as_os(operation)


def _network_as_os(operation: Callable[[], Result]) -> Result:
    """Clients that fsspec uses, as aiohttp and the hub's, have errors of their own for a network that fails."""
    try:
        return operation()
    except (OSError, RegrowError, pa.ArrowException):
        raise
    except Exception as error:
        if type(error).__module__ == "builtins":
            raise
        raise OSError(first_line(error)) from error


def column(batch: pa.RecordBatch, name: str) -> list[Any]:
    """A column's values: None for nulls and where there is no such column, bytes for a text that is no UTF-8."""
    index = batch.schema.get_field_index(name)
    if index < 0:
        return [None] * len(batch)
    values = batch.column(index)
    try:
        return values.to_pylist()
    except UnicodeDecodeError:
        return [_text(value) for value in values]


def _text(value: Any) -> Any:
    try:
        return value.as_py()
    except UnicodeDecodeError:
        return value.as_buffer().to_pybytes()
