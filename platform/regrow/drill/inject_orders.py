"""Faults that a worker carries out itself, as it was ordered: wrong bits, longer steps, phases that never end."""

import contextlib
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from regrow.drill.faults import FLIP_WEIGHTS, HANGS, SLOW_RANK
from regrow.drill.processes import send
from regrow.train.orders import HANG, SLOW, Order, hangs_since

if TYPE_CHECKING:
    from regrow.drill.inject import Injector, Scene, Victim


class Ordered:
    """Leaves orders, and sees when a worker begins to hang."""

    def __init__(self, injector: "Injector") -> None:
        self._injector = injector
        self._to_hang: dict[int, Path] = {}  # what workers leave as they begin to, by the fault's number
        self.does: dict[str, Callable[[Scene], list[Victim]]] = {
            FLIP_WEIGHTS: self._flip,
            "flip_gradients": self._flip,
            "flip_activations": self._flip,
            SLOW_RANK: self._slow_rank,
            **dict.fromkeys(HANGS, self._hang),
            "hang_first_step": self._hang_first_step,
        }

    def tick(self) -> None:
        for number, path in list(self._to_hang.items()):
            with contextlib.suppress(FileNotFoundError):
                self._injector.note(number, "hangs", since=path.stat().st_mtime)
                del self._to_hang[number]

    def _flip(self, scene: "Scene") -> "list[Victim]":
        what = scene.fault.kind.removeprefix("flip_")
        if scene.fault.kind == FLIP_WEIGHTS:
            return [self._order(scene, Order(what))]
        victim = self._order(scene, Order(what, scene.option("chance")))
        return [victim, {"what": "node", "node": victim["node"]}]  # which goes once it is found

    def _slow_rank(self, scene: "Scene") -> "list[Victim]":
        for_s, wrong, victim = scene.option("for_s"), self._injector.wrong, scene.worker(scene.rank)
        order = Order(SLOW, share=scene.option("share"), until=time.time() + for_s)
        worker = (victim["node"], victim["pid"], SLOW)
        wrong.begin(worker, scene.number, lambda: self._order(scene, order))

        def due() -> None:
            wrong.end(worker, scene.number, lambda: None)  # the order says itself how long it holds
            self._injector.note(scene.number, "as fast as before")

        self._injector.later(for_s, due)
        return [victim]

    def _hang(self, scene: "Scene") -> "list[Victim]":
        victim = scene.worker(scene.rank)
        begun = hangs_since(self._injector.nodes.orders(victim["node"]), victim["pid"])
        begun.unlink(missing_ok=True)
        self._to_hang[scene.number] = begun
        return [self._order(scene, Order(HANG, phase=HANGS[scene.fault.kind]))]

    def _hang_first_step(self, scene: "Scene") -> "list[Victim]":
        """Of the next group, which the death of another brings about."""
        killed = scene.other_worker(scene.workers[scene.rank]["node"], self._injector.pid_of)
        victims = self._hang(scene)
        send(signal.SIGKILL, [self._injector.pid_of(killed)])
        return [*victims, killed]

    def _order(self, scene: "Scene", order: Order) -> "Victim":
        victim = scene.worker(scene.rank)
        order.leave(self._injector.nodes.orders(victim["node"]), victim["pid"])
        return victim
