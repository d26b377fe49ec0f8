"""A deadline for calls that know none, as name resolution and Arrow's clients of object stores.

The call is left behind in a thread. One inside C++ would then hold up the interpreter's end, by minutes for Arrow's S3,
so that a program ends through `leaving`.
"""

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn, TypeVar

Result = TypeVar("Result")
_left_behind: list[threading.Thread] = []


def within(deadline_s: float, call: Callable[[], Result]) -> Result:
    """What `call` returns or raises. Raises TimeoutError where it does neither in time."""
    outcome: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(call())
        except BaseException as error:  # carried over to the caller
            errors.append(error)

    thread = threading.Thread(target=run, name="within-a-deadline", daemon=True)
    thread.start()
    thread.join(deadline_s)
    if errors:
        raise errors[0]
    if not outcome:
        _left_behind.append(thread)
        raise TimeoutError(f"no answer within {deadline_s:g} s")
    return outcome[0]


@contextmanager
def leaving() -> Iterator[None]:
    """Have what ends the program inside this context end it at once where a call is still left behind."""
    try:
        yield
    except SystemExit as ending:
        if any(thread.is_alive() for thread in _left_behind):
            leave(ending.code)
        raise


def leave(code: str | int | None) -> NoReturn:
    """End this process as sys.exit(code) does, but at once: without the interpreter's finalization."""
    if isinstance(code, str):
        with contextlib.suppress(OSError):  # what it is piped to has ended
            print(code, file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))
