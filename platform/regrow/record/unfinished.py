"""A folder that an import, an average or an export fills: in it, until all of it is there,

    .unfinished    {"host", "pid", "time", "token"} of the process that fills it

Whatever else would fill it, or train in it, is refused meanwhile, and after that process was killed, too.
"""

import contextlib
import time
from collections.abc import Callable, Iterator

from regrow.errors import CheckpointError
from regrow.record.claim import WRITERS, decoded, signature
from regrow.record.lock import LOCK_FILE
from regrow.storage import Storage, StorageError

UNFINISHED = ".unfinished"
OF_JOBS = (LOCK_FILE, WRITERS)  # which one that is refused may have left there


def unfinished(folder: Storage) -> str:
    """What a folder is refused with that is not complete; empty where it is. Raises OSError."""
    content = _mark_of(folder)
    if content is None:
        return ""
    mark, by = decoded(content), ""
    if {"pid", "host", "time"} <= mark.keys():
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(mark["time"]))
        by = f" (process {mark['pid']} on {mark['host']}, since {since} UTC)"
    return (
        f"{folder} is not complete: an import, an average or an export fills it{by}; wait for that, or, where it was "
        "cut short, delete the folder"
    )


@contextlib.contextmanager
def filling(folder: Storage) -> Iterator[Callable[[], None]]:
    """For filling a folder that is empty, or not there: a failure, an interrupt too, leaves it as it was.

    What is yielded raises CheckpointError where the folder is no longer this process's to fill. Raises the same where
    it is another one's, or not empty; OSError.
    """
    was_there = folder.is_local and folder.local_path.exists()
    mine = signature()

    def check() -> None:
        if _mark_of(folder) != mine:
            raise CheckpointError(
                f"{folder / UNFINISHED} was deleted, or is another process's, since this one began to fill the folder; "
                "it leaves all there as it is"
            )

    try:
        check_empty(folder)
        if not folder.create(UNFINISHED, mine) or _mark_of(folder) != mine:
            raise CheckpointError(unfinished(folder) or _not_empty(folder))
        if any(name[0] != "." for name in folder.list()):  # a run that was begun since
            raise CheckpointError(_not_empty(folder))
        yield check
        check()
        folder.delete(UNFINISHED)
    except BaseException:
        with contextlib.suppress(OSError, StorageError):  # storage that fails: what was first says why
            if _mark_of(folder) == mine:
                for name in folder.list():
                    if name not in (UNFINISHED, *OF_JOBS):
                        folder.delete(name)
                folder.delete(UNFINISHED)
        if folder.is_local and not was_there:
            with contextlib.suppress(OSError):
                folder.local_path.rmdir()
        raise


def check_empty(folder: Storage) -> None:
    """Raises CheckpointError where a folder is not empty, and OSError."""
    if folder.list():
        raise CheckpointError(unfinished(folder) or _not_empty(folder))


def _not_empty(folder: Storage) -> str:
    return f"{folder} is not empty; name a new folder"


def _mark_of(folder: Storage) -> bytes | None:
    try:
        return folder.read_bytes(UNFINISHED)
    except FileNotFoundError:
        return None
