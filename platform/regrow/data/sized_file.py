"""What Arrow asks of a file in Python beside its reads."""

import io
import os


class SizedFile(io.RawIOBase):
    """A place in so many bytes; `read` is a subclass'."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes, self._position = num_bytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._num_bytes}[whence]
        return self._position

    def tell(self) -> int:
        return self._position
