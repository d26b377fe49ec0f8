"""Memory of a keeper's folder that nothing will use again, given back. The kernel takes a second for some GB of it."""

import threading
from collections import defaultdict
from pathlib import Path

from regrow.state.memory.arenas import remove_abandoned
from regrow.state.memory.held import COPY
from regrow.state.memory.incoming import Incomings
from regrow.state.memory.slots import Committed, generation_of
from regrow.state.memory.transport import Transport


class Unneeded:
    """By one thread at a time: those that come meanwhile leave their part to it."""

    def __init__(self, folder: Path, transport: Transport, incoming: Incomings) -> None:
        self._folder, self._transport, self._incoming = folder, transport, incoming
        self._lock, self._is_busy, self._is_wanted = threading.Lock(), False, False
        self._state = Committed()

    def give_back(self, state: Committed | None = None) -> None:
        """`state`: what is committed by now."""
        with self._lock:
            self._is_wanted = True
            if state is not None and state.number >= self._state.number:
                self._state = state
            if self._is_busy:
                return
            self._is_busy = True
        while (newest := self._next()) is not None:
            try:
                _drop_older_generations(self._folder, newest)
                self._drop_former_copies(newest)
                remove_abandoned(self._folder)
                self._transport.forget_deleted()
                self._incoming.forget(deleted_only=True)
            except BaseException:
                with self._lock:
                    self._is_busy = False
                raise

    def _next(self) -> Committed | None:
        """What is committed, where something is to be given back; None: it is done."""
        with self._lock:
            self._is_busy, self._is_wanted = self._is_wanted, False
            return self._state if self._is_busy else None

    def _drop_former_copies(self, state: Committed) -> None:
        """Those of nodes that have copied what is committed now to others: this one was their peer before."""
        by_origin = defaultdict[str, list[Path]](list)
        for path in self._folder.glob(f"*{COPY}"):
            by_origin[path.name.removesuffix(COPY).rpartition(".")[2]].append(path)
        for paths in by_origin.values():
            self._incoming.remove(paths, state.lets_go_of)


def _drop_older_generations(folder: Path, state: Committed) -> None:
    """Their snapshots, but for those that are needed; what was never sealed too."""
    needed = {each.generation for each in state.needed}
    for path in folder.glob("g*"):
        generation = generation_of(path.name)
        if generation < state.newest.generation and generation not in needed:
            path.unlink(missing_ok=True)
