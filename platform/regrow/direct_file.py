"""Writing files past the page cache, as large as checkpoints are.

Through it they are copied first, which takes a core's time and memory, and reach the disk only when they are synced.
"""

import errno
import fcntl
import mmap
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

BUFFER_BYTES = 8 << 20  # written at once, from pages of its own: direct writes are of whole, aligned blocks
_UNSUPPORTED = (errno.EINVAL, errno.EOPNOTSUPP)


class DirectFile:
    """A new file, written from its beginning to its end. A context manager: after it the content is on disk.

    One buffer is filled while the one before is written. The file's end, less than a buffer, goes through the page
    cache, as all of it does where the file system has no other way. Raises OSError, of a write by the next call.
    """

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        try:
            self._file = os.open(path, flags | os.O_DIRECT, 0o666)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            self._file = os.open(path, flags, 0o666)
        self._buffer, self._filled = mmap.mmap(-1, BUFFER_BYTES), 0
        self._other: mmap.mmap | None = None  # which is being written, or was
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="direct-file")  # has no thread before it has work
        self._writing: Future[None] | None = None

    def write(self, data: bytes | memoryview) -> int:
        """All of the data is taken."""
        with memoryview(data).cast("B") as source:
            at = 0
            while at < len(source):
                piece = min(len(source) - at, BUFFER_BYTES - self._filled)
                self._buffer[self._filled : self._filled + piece] = source[at : at + piece]
                self._filled, at = self._filled + piece, at + piece
                if self._filled == BUFFER_BYTES:
                    self._written()
                    self._writing = self._writer.submit(self._write, self._buffer, BUFFER_BYTES)
                    self._buffer, self._other = self._other or mmap.mmap(-1, BUFFER_BYTES), self._buffer
                    self._filled = 0
            return at

    def _written(self) -> None:
        """The other buffer is."""
        if self._writing is not None:
            self._writing.result()

    def _write(self, buffer: mmap.mmap, num_bytes: int) -> None:
        at = 0
        with memoryview(buffer) as content:
            while at < num_bytes:
                try:
                    at += os.write(self._file, content[at:num_bytes])
                except OSError as error:
                    if error.errno not in _UNSUPPORTED or not self._is_direct:
                        raise
                    self._through_cache()
                else:
                    if at < num_bytes:  # cut short, by a disk that is full or a signal: what is left is not aligned
                        self._through_cache()

    @property
    def _is_direct(self) -> bool:
        return bool(fcntl.fcntl(self._file, fcntl.F_GETFL) & os.O_DIRECT)

    def _through_cache(self) -> None:
        fcntl.fcntl(self._file, fcntl.F_SETFL, fcntl.fcntl(self._file, fcntl.F_GETFL) & ~os.O_DIRECT)

    def __enter__(self) -> "DirectFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._writer.shutdown()  # else a write is left to a descriptor that may be another file's by then
            if error is None:
                self._written()
                self._through_cache()
                self._write(self._buffer, self._filled)
                os.fsync(self._file)
        finally:
            os.close(self._file)
