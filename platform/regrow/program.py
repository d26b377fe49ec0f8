"""How a program of jobs/ ends, whatever it meets and whatever it prints into."""

import contextlib
import io
import os
import select
import signal
import sys
from collections.abc import Iterator
from typing import TextIO

from regrow.errors import RegrowError

INTERRUPTED = 128 + signal.SIGINT
UNREAD = 128 + signal.SIGPIPE  # what a shell says of a program that ended as its output's reader was gone


@contextlib.contextmanager
def program() -> Iterator[None]:
    """A user's mistake ends it with one line on stderr and status 1, Ctrl-C with INTERRUPTED; and as `output` says."""
    with output():
        try:
            yield
        except KeyboardInterrupt:
            sys.exit(INTERRUPTED)
        except (RegrowError, OSError) as error:
            if is_unread(error):
                raise
            sys.exit(f"error: {error}")


@contextlib.contextmanager
def output() -> Iterator[None]:
    """A reader of the output that goes, such as `head`, ends the program without a word: with a status of its own, or
    UNREAD. What the output's encoding lacks is escaped."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    ending = None
    try:
        yield
    except SystemExit as error:
        ending = error
    except BrokenPipeError as error:
        if not is_unread(error):
            raise
        ending = SystemExit(INTERRUPTED if isinstance(error.__context__, KeyboardInterrupt) else UNREAD)
    _let_go(sys.stderr)
    lost = _let_go(sys.stdout)
    if lost is not None and not (ending and ending.code):
        ending = SystemExit(UNREAD if isinstance(lost, BrokenPipeError) else f"error: stdout: {lost.strerror}")
    if ending is not None:
        raise ending


def is_unread(error: BaseException) -> bool:
    """Whether it is of the program's output, not of a connection."""
    return isinstance(error, BrokenPipeError) and not (_has_reader(sys.stdout) and _has_reader(sys.stderr))


def _has_reader(stream: TextIO | None) -> bool:
    if stream is None:
        return True
    look = select.poll()
    try:
        look.register(stream, 0)  # of errors it tells anyway
    except (OSError, ValueError):  # no file, as in a test
        return True
    return not look.poll(0)


def _let_go(stream: TextIO | None) -> OSError | None:
    """Why what was printed went nowhere, if it did; then the interpreter's last flush says nothing."""
    if stream is None:
        return None
    try:
        stream.flush()
    except OSError as error:
        with open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), stream.fileno())
        return error
    return None
