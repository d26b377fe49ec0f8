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
BEFORE_STEPS = (WEIGHTS, GRADIENTS, ACTIVATIONS, SLOW, DEVICE)
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
        """For a process, which looks before each step, or phase. In place of the one before it to do the same."""
        path = _path(folder, pid, self.what)
        temporary = path.with_name(f".{path.name}")
        temporary.write_text(json.dumps(vars(self)))
        os.replace(temporary, path)


class Orders:
    """Those to this process to compute otherwise than it should."""

    def __init__(self, folder: Path) -> None:
        own, of_all = ([_path(folder, each, what) for what in BEFORE_STEPS] for each in (os.getpid(), ALL))
        self._paths = list(zip(own, of_all, strict=True))

    def read(self) -> list[Order]:
        """One of each kind that is there; what happens once is taken away."""
        found = [path for paths in self._paths for path in [each for each in paths if each.exists()][:1]]
        orders = [Order(**json.loads(path.read_text())) for path in found]
        for path, order in zip(found, orders, strict=True):
            if order.what == WEIGHTS:
                path.unlink()
        return orders


class Slowness:
    """Makes steps longer by a share of what they took lately without it. To be told of each, before it."""

    def __init__(self) -> None:
        self._took_s: deque[float] = deque(maxlen=KEPT)
        self._stepped_at = self._slept_s = self._owed_s = self._token_s = 0.0

    def step(self, slow: Order | None, device: Order | None = None) -> None:
        """A step is about to begin; these make it longer."""
        now = time.monotonic()
        if self._stepped_at:
            self._took_s.append(now - self._stepped_at - self._slept_s)
        self._stepped_at, self._slept_s = now, 0.0
        is_slow = slow is not None and time.time() < slow.until and self._took_s
        self._owed_s = slow.share * median(self._took_s) if slow is not None and is_slow else 0.0
        self._token_s = device.token_s if device is not None else 0.0

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
    path = _path(Path(folder), os.getpid(), HANG) if folder else None
    if path is None or not path.exists() or Order(**json.loads(path.read_text())).phase != phase:
        return
    hangs_since(path.parent, os.getpid()).touch()
    path.unlink()
    while True:
        time.sleep(ASLEEP_S)


def hangs_since(folder: Path, pid: int) -> Path:
    """The file that a process leaves as it begins to hang."""
    return folder / f"{pid}.hangs"


def _path(folder: Path, pid: int | str, what: str) -> Path:
    return folder / f"{pid}.{what}.json"
