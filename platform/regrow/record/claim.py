"""One writer a run, in any storage: each that starts takes the next number, and none writes once a higher one is there.

    writers/000007.json    taken by the coordinator that writes the run now
    writers/000008.json    taken by the next one: from here on the seventh is fenced off, for good

A number is taken by a conditional write where storage has it. Where it has none, the later of two that take a number
at once has overwritten the other's claim, which finds that out before it writes anything else.
"""

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from regrow.errors import RegrowError
from regrow.storage import Storage

WRITERS = "writers"
OWNER = "REGROW_OWNER"  # environment of a driver: what all attempts of one submission have in common, and no other one
LOOK_EVERY_S = 1.0  # before lines of the log


class Superseded(RegrowError):
    """Another process writes this run now."""


@dataclass
class Claim:
    """The right to write a run, until another process takes the next number. Safe to use from several threads."""

    folder: Storage
    number: int  # grows from one writer of the run to the next, whatever their clocks say
    content: bytes
    lost: str = ""  # to which other one, once that is known
    _looked_at: float = field(default_factory=time.monotonic)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @staticmethod
    def take(folder: Storage, *, job: str = "", owner: str = "", restarted: bool = False) -> "Claim":
        """Take the next number.

        `owner`: what this job has in common with those that are started in its place where it fails; empty: none is.
        `restarted`: this process takes the place of one of the same job, which may have ended before it took any.
        Raises Superseded where another owner has taken one after this one, or, if `restarted`, another job.
        """
        content, newest = signature(job=job, owner=owner), 0
        while True:
            newest = max(newest, _newest(folder))
            other = _successor(folder, "owner", owner) if owner else None
            if other is None and restarted:
                other = _successor(folder, "job", job)
            if other is not None:
                raise Superseded(_line(folder, other))
            newest += 1
            if folder.create(_name(newest), content) and folder.read_bytes(_name(newest)) == content:
                return Claim(folder, newest, content)

    @property
    def file(self) -> str:
        """Its name in the folder."""
        return _name(self.number)

    def check(self, *, within_s: float = 0.0) -> None:
        """Raises Superseded if another one has begun to write, as far as was known `within_s` ago; OSError."""
        with self._lock:
            if not self.lost and time.monotonic() - self._looked_at >= within_s:
                begun = time.monotonic()
                self.lost = self._look()
                self._looked_at = begun
            if self.lost:
                raise Superseded(self.lost)

    def _look(self) -> str:
        if self.folder.exists(_name(self.number + 1)):
            return _line(self.folder, _read(self.folder, self.number + 1))
        mine = self.folder.read_bytes(_name(self.number))
        return "" if mine == self.content else _line(self.folder, decoded(mine))


def signature(**more: str) -> bytes:
    """What tells this process, and each call of it, from all others."""
    mine = {"host": socket.gethostname(), "pid": os.getpid(), "time": time.time(), "token": secrets.token_hex(8)}
    return json.dumps(more | mine).encode()


def decoded(content: bytes) -> Mapping[str, Any]:
    """What a signature says; empty where it is damaged."""
    try:
        found = json.loads(content)
    except ValueError:
        return {}
    return found if isinstance(found, Mapping) else {}


def newest_claim(folder: Storage) -> Mapping[str, Any]:
    """What the run's newest writer says of itself: job, host, pid, time; empty where there is none. Raises OSError."""
    number = _newest(folder)
    return _read(folder, number) if number else {}


def is_taken_over(folder: Storage, owner: str) -> bool:
    """Whether another owner's job has begun to write the run after this one's. Raises OSError."""
    return _successor(folder, "owner", owner) is not None


def _newest(folder: Storage) -> int:
    """The highest number that was taken; 0: none."""
    return max(_numbers(folder), default=0)


def _numbers(folder: Storage) -> list[int]:
    """All that were taken."""
    return [int(name[:6]) for name in folder.list(WRITERS) if name[:6].isdigit()]


def _successor(folder: Storage, key: str, mine: str) -> Mapping[str, Any] | None:
    """The newest claim, where it says something else by this key, and one below it says `mine`."""
    claims = (_read(folder, number) for number in sorted(_numbers(folder), reverse=True))
    newest = next(claims, None)
    if newest is None or newest.get(key) == mine:
        return None
    return newest if any(claim.get(key) == mine for claim in claims) else None


def _name(number: int) -> str:
    return f"{WRITERS}/{number:06d}.json"


def _read(folder: Storage, number: int) -> Mapping[str, Any]:
    return decoded(folder.read_bytes(_name(number)))


def _line(folder: Storage, other: Mapping[str, Any]) -> str:
    return (
        f"run folder {folder} is written by another job now (process {other.get('pid')} on {other.get('host')}): this "
        "one ends, and has changed nothing since; if that was not meant, stop the other one, or choose another run.name"
    )
