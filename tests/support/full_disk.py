"""Standard streams as a Ray actor has them, on a disk that is full."""

import contextlib
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """Nothing that is printed meanwhile can be written: it raises OSError."""
    stream = Path("/dev/full").open("w", buffering=1)  # noqa: SIM115
    try:
        with contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
            yield
    finally:
        with contextlib.suppress(OSError):  # what is left in its buffer
            stream.close()
