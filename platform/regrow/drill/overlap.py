"""Faults that overlap: the end of one takes back what it did, and nothing of another's."""

import signal
from collections.abc import Callable, Hashable, KeysView, Sequence

from regrow.drill.processes import is_alive, send


class Overlapping:
    """What is wrong with each thing: of the faults that are not over, the newest has its way."""

    def __init__(self) -> None:
        self._faults: dict[Hashable, dict[int, Callable[[], object]]] = {}  # by thing and fault's number, in order

    def begin(self, thing: Hashable, number: int, do: Callable[[], object]) -> None:
        """A fault is there; its way is done once more where a newer one ends before it."""
        do()
        self._faults.setdefault(thing, {})[number] = do

    def end(self, thing: Hashable, number: int, heal: Callable[[], object]) -> None:
        """A fault is over: the newest that is left has its way, or the thing is healed."""
        faults = self._faults[thing]
        was_newest = number == list(faults)[-1]
        del faults[number]
        if was_newest:
            [heal, *faults.values()][-1]()


class Stopped:
    """Processes that faults have stopped: each goes on once no fault holds it any more."""

    def __init__(self) -> None:
        self._holding: dict[int, set[int]] = {}  # pid -> faults, by their numbers

    @property
    def pids(self) -> KeysView[int]:
        return self._holding.keys()

    def hold(self, number: int, pids: Sequence[int]) -> None:
        for pid in send(signal.SIGSTOP, pids):
            self._holding.setdefault(pid, set()).add(number)

    def let_go(self, number: int, pids: Sequence[int]) -> list[int]:
        """Those that run on."""
        for pid in pids:
            self._holding.get(pid, set()).discard(number)
        free = [pid for pid in pids if not self._holding.get(pid)]
        self.forget(free)
        return [pid for pid in send(signal.SIGCONT, free) if is_alive(pid)]

    def forget(self, pids: Sequence[int]) -> None:
        """They are gone, or run on."""
        for pid in pids:
            self._holding.pop(pid, None)

    def close(self) -> None:
        """All go on."""
        send(signal.SIGCONT, self._holding)
        self._holding.clear()
