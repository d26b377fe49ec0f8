"""Folders of files on local disk or in an object store, with the few operations that runs and checkpoints need.

Nothing relies on append or rename: a written file appears whole or not at all. Local paths use the standard library
alone; URIs go through `pyarrow.fs`, and through `fsspec` for schemes that Arrow does not speak. Transient errors of
remote stores are retried with backoff until a deadline, counted from the first of them; what remains is a
StorageUnreachable that names the file.
"""

import contextlib
import math
import os
import re
import secrets
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from regrow.direct_file import DirectFile
from regrow.errors import RegrowError

Item = TypeVar("Item")
Result = TypeVar("Result")
RETRY_DEADLINE_S = 120.0
RETRY_AFTER_S = 0.5  # twice as long each time
GCS_RETRY_S = 4  # that Arrow asks Google's store by itself, by default for 15 minutes
LOOK_S = 0.2  # between looks whether what waits for a store is still wanted
OPEN_ANEW_S = 10.0  # from one time that a store which fails is opened anew to the next
REQUESTS = 16  # to a store at a time, by `in_threads`
PRECONDITION_FAILED, NOT_IMPLEMENTED = 412, 501  # of HTTP
NO_TRAILERS = ("MissingContentLength", "HTTP status 411")  # stores of an older S3, of uploads that end with a checksum
NO_TRAILERS_HELP = (
    "this store does not take checksums at the end of uploads; set AWS_REQUEST_CHECKSUM_CALCULATION=when_required and "
    "AWS_RESPONSE_CHECKSUM_VALIDATION=when_required where the job runs"
)
# in a URI: a user with a password (behind a port is a path), or what an option signs
CREDENTIALS = re.compile(
    r"://[^\s:@/]*:(?!\d+/)[^\s@]+@|[?&](?i:sig|x-amz-signature|x-goog-signature|client_secret|secret_key)="
)
ONE_PUT_BYTES = 4 << 20  # up to which a file is one call: Arrow sends it once it is whole


class StorageError(RegrowError):
    """A storage location cannot be used as given."""


class StorageUnreachable(OSError):
    """A remote store still fails after it was asked again and again; the message names the file."""


class Storage(ABC):
    """One folder. Names are relative to it and use `/`; folders come into being as files are written."""

    @staticmethod
    def at(location: str | os.PathLike[str]) -> "Storage":
        """Open a local path or a URI. Nothing is read or created yet; raises StorageError for an unusable URI."""
        text = os.fspath(location)
        return RemoteStorage.from_uri(text) if is_remote(text) else LocalStorage(text)

    is_local: bool = False
    retry_s: float | None = None  # that a remote store which fails is asked again for, below it too; None:
    # RETRY_DEADLINE_S
    look: Callable[[], None] | None = None  # called before a read, and while one waits to ask again, here and below, by
    # any thread: what it raises is raised

    @property
    def local_path(self) -> Path:
        """The folder as a path; only where `is_local`."""
        raise StorageError(f"{self} is not a local folder")

    def _look(self) -> None:
        if self.look is not None:
            self.look()

    @abstractmethod
    def join(self, *names: str) -> "Storage":
        """A folder below this one."""

    @abstractmethod
    def read_bytes(self, name: str) -> bytes:
        """A file whole. Raises FileNotFoundError."""

    @abstractmethod
    def read_range(self, name: str, offset: int, num_bytes: int) -> bytes:
        """`num_bytes` from `offset`; fewer where the file ends. Raises FileNotFoundError."""

    def read_into(self, name: str, offset: int, buffer: memoryview) -> int:
        """Fill a buffer from `offset` on; how many bytes there were. One request. Raises FileNotFoundError."""
        data = self.read_range(name, offset, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    @abstractmethod
    def read_with(self, name: str, read: Callable[[Any], Result]) -> Result:
        """What `read` returns of a file that is open and seekable. It may be called again where a store fails."""

    @abstractmethod
    def write_chunks(self, name: str, chunks: Iterable[Any]) -> int:
        """Write buffers one after another as one file, durably; returns its bytes. Visible only once complete.

        Each need be valid only until the next one is asked for.
        """

    @abstractmethod
    def exists(self, name: str) -> bool: ...

    @abstractmethod
    def list(self, name: str = "") -> list[str]:
        """Sorted names directly in a folder; empty where there is none."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Delete a file or a whole folder; silent where there is none."""

    @abstractmethod
    def create(self, name: str, data: bytes) -> bool:
        """Write a file durably and atomically where there is none; whether this call did.

        Nothing comes between the look and the write, but in stores without conditional writes: there, of two that
        create a file at once, both may be told that they did.
        """

    def write_bytes(self, name: str, data: bytes) -> None:
        """Write a file durably and atomically, replacing an older one."""
        self.write_chunks(name, [data])

    def __truediv__(self, name: str) -> "Storage":
        return self.join(name)


class LocalStorage(Storage):
    is_local = True

    def __init__(self, root: str | Path) -> None:
        self.root = path_of(root).absolute()

    def __str__(self) -> str:
        return str(self.root)

    @property
    def local_path(self) -> Path:
        return self.root

    def join(self, *names: str) -> "LocalStorage":
        below = LocalStorage(self.root.joinpath(*names))
        below.look = self.look
        return below

    def read_bytes(self, name: str) -> bytes:
        self._look()
        with _named(self.root / name):
            return (self.root / name).read_bytes()

    def read_range(self, name: str, offset: int, num_bytes: int) -> bytes:
        self._look()
        with _named(self.root / name), open(self.root / name, "rb") as file:
            return os.pread(file.fileno(), num_bytes, offset)

    def read_into(self, name: str, offset: int, buffer: memoryview) -> int:
        self._look()
        filled = 0
        with _named(self.root / name), open(self.root / name, "rb", buffering=0) as file:
            file.seek(offset)
            while filled < len(buffer) and (num_bytes := file.readinto(buffer[filled:])):
                filled += num_bytes
        return filled

    def read_with(self, name: str, read: Callable[[Any], Result]) -> Result:
        with open(self.root / name, "rb") as file:
            return read(file)

    def write_chunks(self, name: str, chunks: Iterable[Any]) -> int:
        return self._write(self.root / name, chunks, os.replace)

    def create(self, name: str, data: bytes) -> bool:
        try:
            self._write(self.root / name, [data], _place_new)
        except FileExistsError:
            return False
        return True

    def _write(self, path: Path, chunks: Iterable[Any], place: Callable[[Path, Path], object]) -> int:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")  # pids of other hosts may be the same
        num_bytes = 0
        try:
            with _named(path), DirectFile(temporary) as file:
                for chunk in chunks:
                    num_bytes += file.write(chunk)
            place(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the name itself must survive a power cut
        finally:
            os.close(folder)
        return num_bytes

    def exists(self, name: str) -> bool:
        return (self.root / name).exists()

    def list(self, name: str = "") -> list[str]:
        folder = self.root / name
        return sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []

    def delete(self, name: str) -> None:
        path = self.root / name
        while path.is_dir():
            with contextlib.suppress(FileNotFoundError):  # another one deletes in it too
                shutil.rmtree(path)
        path.unlink(missing_ok=True)


@dataclass
class _Opened:
    """A file system that a folder and those below it share."""

    fs: Any
    again_at: float = -math.inf  # when it was opened anew, of this host's monotonic clock

    def __getstate__(self) -> dict[str, Any]:
        """For another host, which has a clock of its own."""
        return {"fs": self.fs, "again_at": -math.inf}


class RemoteStorage(Storage):
    """An object store through a `pyarrow.fs.FileSystem`."""

    def __init__(self, fs: Any, root: str, uri: str) -> None:
        self._opened, self.root, self.uri = _Opened(fs), root.rstrip("/"), uri.rstrip("/")

    @property
    def fs(self) -> Any:
        return self._opened.fs

    @fs.setter
    def fs(self, fs: Any) -> None:
        self._opened.fs = fs

    @classmethod
    def from_uri(cls, uri: str) -> "RemoteStorage":
        import pyarrow as pa
        from pyarrow import fs as arrow_fs

        if CREDENTIALS.search(uri):
            raise StorageError(
                "a storage URI has a user and a password, or a signature, which logs and reports would show; leave it "
                "out, and set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or what the store's own tools read"
            )
        try:
            try:
                filesystem, path = arrow_fs.FileSystem.from_uri(_impatient(uri))
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
                import fsspec

                inner, path = fsspec.core.url_to_fs(uri)
                filesystem = arrow_fs.PyFileSystem(arrow_fs.FSSpecHandler(inner))
        except (ImportError, ValueError, OSError) as error:  # OSError: Arrow asks the store for its region at once
            raise StorageError(
                f"cannot open storage {uri!r}: {error}; use a local path or s3://, gs:// or hdfs://"
            ) from error
        return cls(filesystem, path, uri)

    def __str__(self) -> str:
        return self.uri

    def join(self, *names: str) -> "RemoteStorage":
        below = RemoteStorage(self.fs, "/".join([self.root, *names]), join_location(self.uri, *names))
        below.retry_s, below.look, below._opened = self.retry_s, self.look, self._opened
        return below

    def read_bytes(self, name: str) -> bytes:
        return self._retry(name, lambda path: self.open_file(path).read())

    def read_range(self, name: str, offset: int, num_bytes: int) -> bytes:
        # past the end some stores raise an OSError
        return self.read_with(name, lambda file: bytes(file.read_at(num_bytes, min(offset, file.size()))))

    def read_with(self, name: str, read: Callable[[Any], Result]) -> Result:
        def opened(path: str) -> Result:
            with self.open_file(path) as file:
                return read(file)

        return self._retry(name, opened)

    def write_chunks(self, name: str, chunks: Iterable[Any]) -> int:
        again = list(chunks) if iter(chunks) is chunks else chunks  # so that a retry can send them again

        def write(path: str) -> int:
            pieces = (memoryview(chunk).cast("B") for chunk in again)
            held: list[memoryview] = []
            while sum(piece.nbytes for piece in held) <= ONE_PUT_BYTES and (piece := next(pieces, None)) is not None:
                held.append(memoryview(bytes(piece)))
            num_bytes = sum(piece.nbytes for piece in held)
            is_one = num_bytes <= ONE_PUT_BYTES
            file = self.fs.open_output_stream(path)
            try:
                for piece in [memoryview(b"".join(held))] if is_one else held:
                    file.write(piece)
                for piece in pieces:
                    file.write(piece)
                    num_bytes += piece.nbytes
            except BaseException:
                if not is_one:
                    self._drop_cut(file, path)
                raise
            file.close()
            return num_bytes

        return self._retry(name, write)

    def _drop_cut(self, file: Any, path: str) -> None:
        """Arrow cannot abort a write: closing its stream completes what there is, under the file's name."""
        with contextlib.suppress(OSError):
            file.close()
            self.fs.delete_file(path)

    def create(self, name: str, data: bytes) -> bool:
        return self._retry(name, lambda path: self._create(path, data))

    def _create(self, path: str, data: bytes) -> bool:
        """As the store offers it; Arrow itself has no conditional writes."""
        from pyarrow.fs import PyFileSystem

        if isinstance(self.fs, PyFileSystem):
            try:
                self.fs.handler.fs.pipe_file(path, data, mode="create")
            except FileExistsError:
                return False
            return True

        def is_there() -> bool:
            return bool(self.fs.get_file_info(path).is_file)

        if self.fs.type_name == "s3" and not _says_how(self.uri) and find_spec("boto3") is not None:
            created = _create_in_s3(path, data, is_there)
            if created is not None:
                return created
        if is_there():
            return False
        with self.fs.open_output_stream(path) as file:
            file.write(data)
        return True

    def exists(self, name: str) -> bool:
        from pyarrow.fs import FileType

        return self._retry(name, lambda path: self.fs.get_file_info(path).type != FileType.NotFound)

    def list(self, name: str = "") -> list[str]:
        from pyarrow.fs import FileSelector

        def names(path: str) -> list[str]:
            return sorted(info.base_name for info in self.fs.get_file_info(FileSelector(path, allow_not_found=True)))

        return self._retry(name, names)

    def delete(self, name: str) -> None:
        from pyarrow.fs import FileType

        def remove(path: str) -> None:
            kind = self.fs.get_file_info(path).type
            if kind == FileType.Directory:
                self.fs.delete_dir(path)
            elif kind == FileType.File:
                self.fs.delete_file(path)

        self._retry(name, remove)

    def open_file(self, path: str) -> Any:
        return self.fs.open_input_file(path)

    def _retry(self, name: str, operation: Callable[[str], Result]) -> Result:
        path = f"{self.root}/{name}".rstrip("/")
        retry_s = RETRY_DEADLINE_S if self.retry_s is None else self.retry_s
        give_up_at, wait_s = math.inf, RETRY_AFTER_S
        while True:
            self._look()
            try:
                return operation(path)
            except FileNotFoundError:
                raise
            except Exception as error:
                if not isinstance(error, OSError) and not self._is_the_stores_own(error):
                    raise
                if any(each in str(error) for each in NO_TRAILERS):
                    raise StorageError(f"{self / name}: {NO_TRAILERS_HELP}: {error}") from error
                self._open_anew()
                give_up_at = min(give_up_at, time.monotonic() + retry_s)  # a large file alone may take longer
                if time.monotonic() + wait_s > give_up_at:
                    raise StorageUnreachable(f"{self / name}: still failing after {retry_s:.0f} s: {error}") from error
                self._wait(wait_s)
                wait_s = min(2 * wait_s, 15.0)

    def _wait(self, seconds: float) -> None:
        while seconds > 0:
            self._look()
            time.sleep(min(seconds, LOOK_S))
            seconds -= LOOK_S

    def _open_anew(self) -> None:
        """S3 is: its clients read a file of credentials once, and what they read may have ended since."""
        opened, now = self._opened, time.monotonic()
        if opened.fs.type_name != "s3" or now - opened.again_at < OPEN_ANEW_S:
            return
        opened.again_at = now
        s3_client.cache_clear()
        with contextlib.suppress(StorageError):
            opened.fs = RemoteStorage.from_uri(self.uri).fs

    def _is_the_stores_own(self, error: Exception) -> bool:
        """Of a client that fsspec uses, as azure.core's, gcsfs' or aiohttp's: these are no OSErrors."""
        from pyarrow.fs import PyFileSystem

        is_of_others = not isinstance(error, RegrowError) and type(error).__module__ != "builtins"
        return isinstance(self.fs, PyFileSystem) and is_of_others


def may_pass(error: OSError) -> bool:
    """Whether the same call may succeed later: it failed for another reason than what it asked for."""
    return not isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError | PermissionError)


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Errors of reading and of writing name no file by themselves."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def _place_new(temporary: Path, path: Path) -> None:
    """Give a file its name unless that is taken. Raises FileExistsError."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without links
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
        os.replace(temporary, path)


def _impatient(uri: str) -> str:
    """A URI with the time for which Arrow asks a store again, where it would do so beyond any deadline of ours. Pure.

    >>> _impatient("gs://b/runs?scheme=https")
    'gs://b/runs?scheme=https&retry_limit_seconds=4'
    """
    path, options = _apart(uri)
    if urlsplit(uri).scheme not in ("gs", "gcs") or "retry_limit_seconds=" in options:
        return uri
    return f"{path}?{'&'.join([*filter(None, [options[1:]]), f'retry_limit_seconds={GCS_RETRY_S}'])}"


def _says_how(uri: str) -> bool:
    """Whether endpoint or credentials are in a URI: boto3 takes them from the environment."""
    parts = urlsplit(uri)
    return bool(parts.query or parts.username)


def _create_in_s3(path: str, data: bytes, is_there: Callable[[], bool]) -> bool | None:
    """Arrow has no conditional writes; boto3 takes endpoint and credentials from the environment, as Arrow does.

    None where it finds no credentials, and where the store has no such writes, or ignores the condition: that shows
    where what was just created can be created again. Until then it is looked at first.
    """
    from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

    bucket, _, key = path.partition("/")
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3"), os.environ.get("AWS_ENDPOINT_URL")

    def put() -> bool:
        try:
            s3_client(*endpoint).put_object(Bucket=bucket, Key=key, Body=data, IfNoneMatch="*")
        except ClientError as error:
            if error.response["ResponseMetadata"]["HTTPStatusCode"] == PRECONDITION_FAILED:
                return False
            raise
        return True

    store = (*endpoint, bucket)
    if not _minds_conditions.get(store, True):
        return None
    if store not in _minds_conditions and is_there():
        return False
    try:
        created = put()
    except ClientError as error:
        if error.response["ResponseMetadata"]["HTTPStatusCode"] == NOT_IMPLEMENTED:
            return None
        raise OSError(str(error)) from error
    except NoCredentialsError:
        return None
    except BotoCoreError as error:
        raise OSError(str(error)) from error
    if store not in _minds_conditions:
        with contextlib.suppress(ClientError, BotoCoreError):  # the next call finds out
            _minds_conditions[store] = not created or not put()
    return created


_minds_conditions: dict[tuple[str | None, ...], bool] = {}  # by endpoint and bucket


@cache
def s3_client(*endpoint: str | None) -> Any:
    """Made once for each: it takes a third of a second. Its session is its own, as sessions keep credentials."""
    import boto3

    return boto3.Session().client("s3")


def in_threads(function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Results in the order of the items. For many small requests to a store, which takes its time to answer each."""
    with ThreadPoolExecutor(REQUESTS) as threads:
        return list(threads.map(function, items))


def make_folder(folder: Path, setting: str) -> None:
    """Make a local folder where there is none. Raises StorageError, with the setting to change, where it cannot be made
    or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        problem = None if os.access(folder, os.W_OK | os.X_OK) else "no right to write, or a read-only file system"
    except OSError as error:
        problem = error.strerror
    if problem is not None:
        raise StorageError(f"{folder} is no folder to write to ({problem}); set {setting} to one")


def is_remote(location: str | None) -> bool:
    """Whether a path or URI leads out of this machine's file system."""
    return location is not None and "://" in location and not location.startswith("file://")


def local_path(location: str) -> str:
    """A place of this machine's file system as a path, also where it is a URI; others as they are."""
    return location.removeprefix("file://")


def path_of(place: str | Path) -> Path:
    """The same as a path, where `~` is this user's home, which no shell has put in what is given as key=value.

    Raises StorageError for the home of a user that there is not, and for a URI that leads elsewhere.
    """
    if is_remote(str(place)):
        shown = "a URI" if CREDENTIALS.search(str(place)) else place
        raise StorageError(f"{shown} is no place of this machine's file system; name a path")
    try:
        return Path(local_path(str(place))).expanduser()
    except RuntimeError as error:
        raise StorageError(f"{place} is below a home that is not known ({error}); name it in full") from error


def join_location(folder: str, *names: str) -> str:
    """A path or URI below another one; a URI's options stay at its end. Pure.

    >>> join_location("s3://b/runs?region=x", "mine")
    's3://b/runs/mine?region=x'
    """
    path, options = _apart(folder)
    return "/".join([path.rstrip("/"), *names]) + options


def split_location(location: str) -> tuple[str, str]:
    """The folder that a path or URI lies in, and its name there: the inverse of `join_location`.

    >>> split_location("s3://b/runs/mine?region=x")
    ('s3://b/runs?region=x', 'mine')
    """
    path, options = _apart(location)
    folder, _, name = path.rstrip("/").rpartition("/")
    return (folder or "/" * path.startswith("/")) + options, name


def _apart(location: str) -> tuple[str, str]:
    """A URI, and its options behind it from the question mark on, which a path has for a letter."""
    path, mark, options = location.partition("?") if is_remote(location) else (location, "", "")
    return path, mark + options
