"""An exclusive lock on a run's folder that ends with the process which holds it: the second job is refused at once.

A file server keeps the lock of a host that has died: NFSv4's for a lease, NFSv3's until that host is up again. The file
may be deleted then, at any time: a lock is on the file itself, and the next job makes another one.

Where there are no locks, as in object stores, the second one takes the run over: see `record.claim`.
"""

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Callable
from typing import TextIO

from regrow.errors import ResumeError
from regrow.record.claim import newest_claim
from regrow.record.events import Submitted
from regrow.storage import Storage

LOCK_FILE = ".lock"  # held by the run's writer for as long as it lives, where storage has locks
LOCK_WAIT_S = 30.0  # a killed predecessor takes a moment to be gone
LEASE_WAIT_S = 120.0  # one on another host, too: NFSv4 keeps a dead host's lock for a lease, 90 s as servers come
LOOK_S = 0.2


def lock_run(folder: Storage, tell: Callable[[str], object] = print) -> TextIO | None:
    """Hold what is returned for as long as the lock is needed; None where storage has none, which `tell` gets to know.

    Raises ResumeError where another process keeps it, and OSError.
    """
    if not folder.is_local:
        return None
    folder.local_path.mkdir(parents=True, exist_ok=True)
    began, patience_s = time.monotonic(), None
    while True:
        file = open(folder.local_path / LOCK_FILE, "a")  # noqa: SIM115 (held open for as long as the lock is)
        try:
            if take_lock(file):
                return file
        except OSError as error:  # a file system without locks
            tell(
                f"{folder} has no file locks ({error.strerror}): a second job of this run is not refused, it takes "
                "the run over, and this one ends"
            )
            file.close()
            return None
        file.close()
        if patience_s is None:
            patience_s = LOCK_WAIT_S
            if elsewhere := lock_elsewhere(folder):
                patience_s = max(LOCK_WAIT_S, LEASE_WAIT_S)
                tell(elsewhere)
        if time.monotonic() - began > patience_s:
            raise ResumeError(in_use(folder))
        time.sleep(LOOK_S)


def take_lock(file: TextIO) -> bool:
    """Lock a file that is open for appending, and write into it which process has it; False where another process has
    it, or the file was deleted since it was opened. Raises OSError, where the file system has no locks above all."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    try:
        if not os.path.samestat(os.fstat(file.fileno()), os.stat(file.name)):
            return False
    except FileNotFoundError:
        return False
    with contextlib.suppress(OSError):  # for a person to read; a full disk takes nothing
        os.ftruncate(file.fileno(), 0)  # the holder before is gone
        os.write(file.fileno(), f"process {os.getpid()} on {socket.gethostname()}".encode())
        os.fsync(file.fileno())  # what a host that dies has not sent to its file server, no other one reads
    return True


def in_use(folder: Storage) -> str:
    """What a job is refused with whose run's lock another process keeps. Raises OSError."""
    claim = newest_claim(folder)
    holder = f" (process {claim['pid']} on {claim['host']})" if {"pid", "host"} <= claim.keys() else ""
    text = f"run folder {folder} is in use by another process{holder}; wait for it, stop it, or choose another run.name"
    if _is_elsewhere(claim.get("host")):
        path = folder.local_path / LOCK_FILE
        text += f"; where {claim['host']} is gone for good, delete {path}"
    return text


def lock_elsewhere(folder: Storage) -> str:
    """What to say while a lock is waited for that another host may have left behind; empty where the run's newest
    writer was on this one. Raises OSError."""
    claim = newest_claim(folder)
    if not _is_elsewhere(claim.get("host")):
        return ""
    return (
        f"run folder {folder} is locked (process {claim.get('pid')} on {claim['host']}): waiting up to "
        f"{LEASE_WAIT_S:.0f} s, as a file server keeps the lock of a host that died for a while"
    )


def _is_elsewhere(host: str | None) -> bool:
    return host is not None and host != socket.gethostname()


def is_held(storage: Storage, submitted: Submitted | None) -> bool | None:
    """Whether the run's writer lives, as its lock says; None where that cannot be known.

    A lock that is free says something only where it would have been taken: on the machine of the newest submission.
    """
    if not storage.is_local:
        return None
    try:
        descriptor = os.open(storage.local_path / LOCK_FILE, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # a coordinator that comes just now tries again
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return None
    finally:
        os.close(descriptor)
    return False if submitted is not None and submitted.host == socket.gethostname() else None
