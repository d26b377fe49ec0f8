"""What a drill has ordered this process to suffer: bits that flip, steps that take longer, a phase in which it hangs.

A drill leaves an order for a process in the folder that `ORDERS` names, in the environment. Without it nothing is here.
"""

import json
import os
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from statistics import median

ORDERS = "REGROW_DRILL_ORDERS"
WEIGHTS, GRADIENTS, ACTIVATIONS = "weights", "gradients", "activations"
SLOW, HANG, DEVICE = "slow", "hang", "device"
ALL = "all"  # processes, in the place of a pid
KEPT = 9  # steps whose median a slow one is longer than
ASLEEP_S = 0.1


@dataclass(frozen=True)
class Order:
    """What a process is to suffer, until it ends where nothing else is said, in this group and later ones."""

    what: str  # WEIGHTS: one bit, once; GRADIENTS, ACTIVATIONS: one bit in each pass, by `chance`; SLOW; HANG; DEVICE
    chance: float = 1.0
    share: float = 0.0  # of a step, by which a SLOW one is longer
    until: float = 0.0  # unix time, of SLOW
    phase: str = ""  # `control.phases.Phase`, of HANG: the next one of these that begins never ends

    token_s: float = 0.0  # of DEVICE: a pass takes so long for each of its tokens, as on a device of its own

    def leave(self, folder: Path, pid: int | str) -> None:
        """For a process, which looks before each step, or phase. In place of the order before it."""
        path = _path(folder, pid, hangs=self.what == HANG)
        temporary = path.with_name(f".{path.name}")
        temporary.write_text(json.dumps(vars(self)))
        os.replace(temporary, path)


class Orders:
    """Those to this process to compute otherwise than it should."""

    def __init__(self, folder: Path) -> None:
        self._paths = [_path(folder, each, hangs=False) for each in (os.getpid(), ALL)]
        self._read_at = 0

    def new(self) -> Order | None:
        """One that was not read before, by this object; what happens once is taken away."""
        path = next((each for each in self._paths if each.exists()), None)
        if path is None or (written_at := path.stat().st_mtime_ns) == self._read_at:
            return None
        self._read_at, order = written_at, Order(**json.loads(path.read_text()))
        if order.what == WEIGHTS:
            path.unlink()
        return order


class Slowness:
    """Makes steps longer by a share of what they took lately without it. To be told of each, before it."""

    def __init__(self) -> None:
        self._took_s: deque[float] = deque(maxlen=KEPT)
        self._stepped_at = self._slept_s = self._owed_s = self._token_s = 0.0

    def step(self, order: Order | None) -> None:
        """A step is about to begin; `order` is one that makes it longer."""
        now = time.monotonic()
        if self._stepped_at:
            self._took_s.append(now - self._stepped_at - self._slept_s)
        self._stepped_at, self._slept_s = now, 0.0
        is_slow = order is not None and time.time() < order.until and self._took_s
        self._owed_s = order.share * median(self._took_s) if order is not None and is_slow else 0.0
        self._token_s = order.token_s if order is not None else 0.0

    def compute(self, num_tokens: int) -> None:
        """A pass of the step computes: as slowly as it is to."""
        if self._token_s:
            time.sleep(self._token_s * num_tokens)
        if self._owed_s:
            self._slept_s, self._owed_s = self._owed_s, 0.0
            time.sleep(self._slept_s)


def hang_where_ordered(phase: str) -> None:
    """A phase begins. Where this process was ordered to hang in it, this never returns; its other threads run on."""
    folder = os.environ.get(ORDERS)
    path = _path(Path(folder), os.getpid(), hangs=True) if folder else None
    if path is None or not path.exists() or Order(**json.loads(path.read_text())).phase != phase:
        return
    hangs_since(path.parent, os.getpid()).touch()
    path.unlink()
    while True:
        time.sleep(ASLEEP_S)


def hangs_since(folder: Path, pid: int) -> Path:
    """The file that a process leaves as it begins to hang."""
    return folder / f"{pid}.hangs"


def _path(folder: Path, pid: int | str, *, hangs: bool) -> Path:
    return folder / f"{pid}{'.hang' * hangs}.json"
