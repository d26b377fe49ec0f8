"""Holding a thread of another process in the middle of what it does, while the process' other threads run on."""

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

SEIZE, INTERRUPT, DETACH = 0x4206, 0x4207, 17  # of ptrace(2)


@contextlib.contextmanager
def held(thread: int) -> Iterator[None]:
    """A thread by its kernel's number. Raises OSError where this process may not trace that one."""
    _ptrace(SEIZE, thread)
    _ptrace(INTERRUPT, thread)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # its process was killed
            os.waitpid(thread, 0x40000000)  # __WALL: the thread has stopped, as letting go takes
            _ptrace(DETACH, thread)


def busiest_thread(pid: int) -> int:
    """That of a process which has had the most CPU time."""
    return max(map(int, os.listdir(f"/proc/{pid}/task")), key=lambda thread: _cpu_ticks(pid, thread))


def _cpu_ticks(pid: int, thread: int) -> int:
    fields = Path(f"/proc/{pid}/task/{thread}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def _ptrace(request: int, thread: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    libc.ptrace.restype = ctypes.c_long
    if libc.ptrace(request, thread, None, None) < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"ptrace: {os.strerror(code)}")
