"""Ranges of remote files, kept on this node's disk up to a size: what several processes of a node need is fetched once.

Plain files in a folder that all processes of the node share. The first one to need a range fetches it, the others wait
for that, for a while; the ranges used longest ago are deleted. Content is not checked here: readers have checksums of
their own, and forget a range that turned out damaged.
"""

import contextlib
import fcntl
import hashlib
import logging
import os
import re
import secrets
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

LOCKS = 64  # ranges that a node can be fetching at a time
PATIENCE_S, LOOK_S = 5.0, 0.05  # for a range that another process fetches, before it is fetched twice; between looks
SCAN_SHARE = 64  # the folder is measured each time this part of the limit was written
KEPT = re.compile(r"[0-9a-f]{30}|\.[0-9a-f]{16}")  # names of ranges, and of what is being written
KEEP_SHARE = 0.9  # of the limit is left by an eviction

log = logging.getLogger(__name__)


@dataclass
class CacheCounts:
    """What one process asked for, and what came of it."""

    hits: int = 0
    misses: int = 0
    fetched_bytes: int = 0
    evicted_bytes: int = 0


class RangeCache:
    """The cache of one node. Threads and processes may share the folder; a broken or full disk only costs fetches."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self.folder, self.limit_bytes = folder, limit_bytes
        self.counts = CacheCounts()
        self._unmeasured = limit_bytes  # bytes written since the folder was measured; measure at the first write
        self._is_told = False  # that the folder is not used

    @staticmethod
    def default_folder() -> Path:
        return Path(tempfile.gettempdir()) / f"regrow-shards-{os.getuid()}"

    def get(self, key: str, fetch: Callable[[], bytes]) -> bytes:
        """The range that `key` names for ever, from the folder or else from `fetch`, whose errors pass through."""
        if not self._is_usable():
            return self._fetched(fetch)
        path = self._path(key)
        data = _read(path)
        if data is None:
            with self._only_one(path):
                data = _read(path)
                if data is None:
                    data = self._fetched(fetch)
                    self._keep(path, data)
                    return data
        self.counts.hits += 1
        return data

    def forget(self, keys: Iterable[str]) -> None:
        """Fetch these ranges again the next time."""
        for key in keys:
            with contextlib.suppress(OSError):
                self._path(key).unlink()

    def _fetched(self, fetch: Callable[[], bytes]) -> bytes:
        data = fetch()
        self.counts.misses += 1
        self.counts.fetched_bytes += len(data)
        return data

    def _is_usable(self) -> bool:
        """Whether the folder is there, or is made here.

        A temporary folder lets all users make one by the default name, with links in it to files that are not theirs:
        it is to be this user's alone. A folder that the configuration names may be a group's; its owner says so.
        """
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = self.folder.lstat()
        except OSError:
            return False
        if self.folder != self.default_folder():
            return True
        is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022
        if not is_ours and not self._is_told:
            self._is_told = True
            found = f"{stat.filemode(status.st_mode)} of user {status.st_uid}"
            log.warning("%s is %s: shards are read without it; delete it, or set data.cache_dir", self.folder, found)
        return is_ours

    def _path(self, key: str) -> Path:
        name = hashlib.blake2b(key.encode(), digest_size=16).hexdigest()
        return self.folder / name[:2] / name[2:]

    @contextlib.contextmanager
    def _only_one(self, path: Path) -> Iterator[None]:
        """Hold one of the node's locks, by the range's name; do without where the disk does not let us, and where the
        process that has it is stopped, or takes longer than PATIENCE_S."""
        name = self.folder / f"lock-{int(path.name[:8], 16) % LOCKS:02d}"
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):
                lock = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
                stack.callback(os.close, lock)
                give_up_at = time.monotonic() + PATIENCE_S
                while not _try_lock(lock) and time.monotonic() < give_up_at and not path.exists():
                    time.sleep(LOOK_S)
            yield

    def _keep(self, path: Path, data: bytes) -> None:
        if len(data) > self.limit_bytes // SCAN_SHARE:
            return
        temporary = path.with_name(f".{secrets.token_hex(8)}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(data)
            os.replace(temporary, path)
            self._unmeasured += len(data)
            if self._unmeasured * SCAN_SHARE >= self.limit_bytes:
                self._unmeasured = 0
                self._evict()
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()

    def _evict(self) -> None:
        """Delete what was used longest ago, if there is too much."""
        found = []
        for path in self.folder.glob("[0-9a-f][0-9a-f]/*"):
            if not KEPT.fullmatch(path.name):
                continue  # of a folder that others use, too
            with contextlib.suppress(FileNotFoundError):  # another process evicts as well
                status = path.stat()
                found.append((status.st_mtime_ns, status.st_size, path))
        size = sum(num_bytes for _, num_bytes, _ in found)
        if size <= self.limit_bytes * (1 - 1 / SCAN_SHARE):
            return
        for _, num_bytes, path in sorted(found):
            if size <= self.limit_bytes * KEEP_SHARE:
                return
            path.unlink(missing_ok=True)
            size -= num_bytes
            self.counts.evicted_bytes += num_bytes


def _try_lock(descriptor: int) -> bool:
    """Raises OSError where there are no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read(path: Path) -> bytes | None:
    try:
        data = path.read_bytes()
        os.utime(path)  # used now: the newest are evicted last
        return data
    except OSError:
        return None
