"""Processes of this machine by what `/proc` tells: whose child, of which Ray, alive or not."""

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

_PROC = Path("/proc")


def of_ray(folder: str) -> list[int]:
    """Live processes of the Ray that was started with RAY_TMPDIR=`folder`, and of the jobs started with it.

    They have it in their environment, or a file below it open: Ray's agents write their titles over the environment,
    and outlive a killed raylet by up to a minute.
    """
    return [pid for pid in _pids() if is_alive(pid) and (_was_told(pid, folder) or _has_open(pid, folder))]


def _was_told(pid: int, folder: str) -> bool:
    try:
        return f"RAY_TMPDIR={folder}".encode() in (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:  # gone, or not ours
        return False


def _has_open(pid: int, folder: str) -> bool:
    below = folder.rstrip("/") + "/"
    with contextlib.suppress(OSError):
        for each in (_PROC / str(pid) / "fd").iterdir():
            with contextlib.suppress(OSError):  # closed since
                if os.readlink(each).startswith(below):
                    return True
    return False


def tree(pid: int) -> list[int]:
    """A process and all that descend from it, itself first."""
    children: dict[int, list[int]] = {}
    for each in _pids():
        with contextlib.suppress(OSError, ValueError, IndexError):
            parent = int((_PROC / str(each) / "stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(each)
    found = [pid]
    for each in found:
        found += children.get(each, [])
    return found


def title(pid: int) -> str:
    """What it calls itself, as `ps` shows it; empty where it is gone."""
    try:
        return (_PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def is_alive(pid: int) -> bool:
    """Whether it runs or is stopped; one that has ended and was not waited for is not alive."""
    try:
        state = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state not in "ZX"


def send(number: signal.Signals, pids: Iterable[int]) -> list[int]:
    """Send a signal to each; those that were there to get it."""
    reached = []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            reached.append(pid)
    return reached


def wait_until_gone(pids: Iterable[int], timeout_s: float) -> list[int]:
    """Wait for processes to end; those that have not."""
    give_up_at, left = time.monotonic() + timeout_s, list(pids)
    while (left := [pid for pid in left if is_alive(pid)]) and time.monotonic() < give_up_at:
        time.sleep(0.02)
    return left


def _pids() -> list[int]:
    return [int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit()]
