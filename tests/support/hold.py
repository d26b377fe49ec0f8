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


def thread_named(pid: int, name: str) -> int:
    """The thread of a process that has this name in the kernel."""
    tasks = (task for task in Path(f"/proc/{pid}/task").iterdir() if (task / "comm").read_text().strip() == name)
    thread = min(tasks, key=lambda task: int(task.name))  # threads that it starts, as OpenMP's, inherit the name
    return int(thread.name)


def _ptrace(request: int, thread: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    libc.ptrace.restype = ctypes.c_long
    if libc.ptrace(request, thread, None, None) < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"ptrace: {os.strerror(code)}")
