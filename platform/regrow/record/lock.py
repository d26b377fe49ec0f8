"""One writer a run: an exclusive lock on its folder that ends with the process which holds it."""

import fcntl
import os
import time
from typing import TextIO

from regrow.errors import ResumeError
from regrow.record.run_folder import LOCK_FILE
from regrow.storage import Storage

LOCK_WAIT_S = 30.0  # a killed predecessor takes a moment to be gone


def lock_run(folder: Storage) -> TextIO | None:
    """Hold what is returned for as long as the lock is needed; None where storage has none (generations fence there).

    Raises ResumeError where another process keeps it.
    """
    if not folder.is_local:
        return None
    folder.local_path.mkdir(parents=True, exist_ok=True)
    file = open(folder.local_path / LOCK_FILE, "w")  # noqa: SIM115 (held open for as long as the lock is)
    give_up_at = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.write(str(os.getpid()))
            file.flush()
            return file
        except BlockingIOError:
            if time.monotonic() > give_up_at:
                raise ResumeError(
                    f"run folder {folder} is in use by another process; wait for it, stop it, or choose another "
                    "run.name"
                ) from None
            time.sleep(0.2)
        except OSError:  # a file system without locks
            return None
