"""An exclusive lock on a run's folder that ends with the process which holds it: the second job is refused at once.

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
from regrow.record.events import Submitted
from regrow.storage import Storage

LOCK_FILE = ".lock"  # held by the run's writer for as long as it lives, where storage has locks
LOCK_WAIT_S = 30.0  # a killed predecessor takes a moment to be gone


def lock_run(folder: Storage, tell: Callable[[str], object] = print) -> TextIO | None:
    """Hold what is returned for as long as the lock is needed; None where storage has none, which `tell` gets to know.

    Raises ResumeError where another process keeps it, and OSError.
    """
    if not folder.is_local:
        return None
    folder.local_path.mkdir(parents=True, exist_ok=True)
    file = open(folder.local_path / LOCK_FILE, "a")  # noqa: SIM115 (held open for as long as the lock is)
    give_up_at = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > give_up_at:
                raise ResumeError(
                    f"run folder {folder} is in use by another process; wait for it, stop it, or choose another "
                    "run.name"
                ) from None
            time.sleep(0.2)
            continue
        except OSError as error:  # a file system without locks
            tell(
                f"{folder} has no file locks ({error.strerror}): a second job of this run is not refused, it takes "
                "the run over, and this one ends"
            )
            file.close()
            return None
        with contextlib.suppress(OSError):  # for a person to read; a full disk takes nothing
            os.ftruncate(file.fileno(), 0)  # the holder before is gone
            os.write(file.fileno(), str(os.getpid()).encode())
        return file


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
