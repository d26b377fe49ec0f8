"""How a keeper speaks for its node's workers that are to join a generation: one call of the coordinator for all.

A worker asks its keeper, which answers at once with what it knows; a thread of the keeper's tells the coordinator of
those that ask, and asks for their seats. A worker that has not asked for a while, as it died or went to the coordinator
itself, is not spoken for any more.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray

from regrow.control.membership import Member
from regrow.control.states import Answer
from regrow.runtime.calls import CoordinatorClient
from regrow.state.memory.control_word import ControlWord

SPOKEN_FOR_S = 1.0  # after a worker's newest question; it asks many times in that
GATHER_S = 0.01  # for others of the node to ask, after the first one has
AGAIN_S = 0.5  # after the coordinator did not answer


@dataclass
class _Asking:
    """A worker that wants a seat."""

    member: Member
    expected: int
    after: int
    asked_at: float
    is_told: bool = False  # the coordinator knows that it is ready
    unknown_at: float = 0.0  # when that had forgotten it: a process that is dead by now does not ask again
    answer: Answer | None = None  # that ends its asking


class Joins:
    """Of one node."""

    def __init__(self, coordinator: Callable[[], CoordinatorClient]) -> None:
        self._coordinator = coordinator
        self._asking: dict[str, _Asking] = {}  # by the member's id
        self._lock, self._wake = threading.Lock(), threading.Event()
        self._running = False
        self._dead: Any = None  # a coordinator that does not come back

    def seat(self, member: Member, expected: int, after: int) -> Answer | None:
        """The answer to a worker that is ready for the first generation after `after`, once there is one; at once.

        Raises RuntimeError where the coordinator is dead, which the worker finds, too, once it asks itself.
        """
        with self._lock:
            if self._dead is not None and self._dead == self._coordinator().handle:
                raise RuntimeError("the coordinator is dead")
            known, now = self._asking.get(member.id), time.monotonic()
            if known is None or (known.member, known.after) != (member, after):
                known = self._asking[member.id] = _Asking(member, expected, after, now)
                self._wake.set()
            elif not known.is_told and known.unknown_at:  # the coordinator has forgotten it, and it lives
                self._wake.set()
            known.asked_at = now
            if known.answer is not None:
                del self._asking[member.id]
            elif not self._running:
                self._running = True
                threading.Thread(target=self._run, name="joins", daemon=True).start()
            return known.answer

    def formed(self) -> None:
        """A generation has a number: its seats are there, or will be soon."""
        self._wake.set()

    def _run(self) -> None:
        time.sleep(GATHER_S)
        while asking := self._open():
            self._wake.clear()
            try:
                wait_s = self._speak(asking)
            except ray.exceptions.ActorDiedError:
                with self._lock:
                    self._asking, self._running, self._dead = {}, False, self._coordinator().handle
                return
            except ray.exceptions.RayError:
                wait_s = AGAIN_S
            self._wake.wait(wait_s)

    def _open(self) -> list[_Asking]:
        """Those that still ask; none: this thread is to end."""
        with self._lock:
            late = time.monotonic() - SPOKEN_FOR_S
            self._asking = {name: each for name, each in self._asking.items() if each.asked_at > late}
            found = [each for each in self._asking.values() if each.answer is None]
            self._running = bool(found)
            return found

    def _speak(self, asking: list[_Asking]) -> float:
        """For these; the seconds until it is worth asking again."""
        coordinator = self._coordinator()
        if new := [each for each in asking if not each.is_told and each.asked_at > each.unknown_at]:
            coordinator.join_all([(each.member, each.expected) for each in new])
            for each in new:
                each.is_told = True
        told = [each for each in asking if each.is_told]
        answers = coordinator.formations([(each.member.id, each.after) for each in told]) if told else []
        for each, answer in zip(told, answers, strict=True):
            if answer.join_again:
                each.is_told, each.unknown_at = False, time.monotonic()
            elif answer.seat is not None or answer.over or answer.given_up or answer.unfit:
                each.answer = answer
        return max((answer.wait_s for answer in answers), default=GATHER_S)


class Speaking:
    """The part of a keeper that its node's workers go to with what is for the coordinator."""

    coordinator: Any
    lock: threading.Lock
    word: ControlWord
    joins: Joins
    broken: int

    def seat(self, member: Member, expected: int, after: int) -> Answer | None:
        """See `Joins.seat`."""
        assert self.coordinator is not None, "it serves no run yet"
        return self.joins.seat(member, expected, after)

    def broke(self, generation: int, detail: str, rank: int | None = None) -> None:
        """A worker of this node could not go on. What the coordinator knows already is not passed on."""
        with self.lock:
            is_known, self.broken = generation <= max(self.broken, self.word.over), max(self.broken, generation)
        if not is_known:
            self.coordinator.broke.remote(generation, detail, rank)
