"""This process' own output, which in Ray's processes is a file: what a full disk does not take is left out.

For all that runs in a worker, a keeper, the coordinator or a controller, where `print` would raise OSError out of what
handles a failure.
"""

import contextlib
import traceback
from typing import TextIO


def say(text: str, stream: TextIO | None = None) -> None:
    """One line to a stream, standard output where none is given."""
    with contextlib.suppress(OSError, ValueError):  # no room; it is closed
        print(text, file=stream, flush=True)


def say_error(error: BaseException) -> None:
    """An error with its traceback, to standard error."""
    with contextlib.suppress(OSError, ValueError):
        traceback.print_exception(error)
