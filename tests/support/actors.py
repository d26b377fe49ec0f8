"""Actors of this process in the place of Ray's handles: a call is made at once, and its reference has the outcome."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Reference:
    """What `.remote(...)` returns."""

    outcome: "Future[Any]"

    def future(self) -> "Future[Any]":
        return self.outcome


@dataclass(frozen=True)
class _Method:
    call: Callable[..., Any]

    def remote(self, *arguments: Any, **options: Any) -> Reference:
        outcome: Future[Any] = Future()
        try:
            answer = self.call(*arguments, **options)
        except Exception as error:
            outcome.set_exception(error)
        else:
            if isinstance(answer, Future):  # one that comes later
                return Reference(answer)
            outcome.set_result(answer)
        return Reference(outcome)


class Handle:
    """`handle.method.remote(...)` of an object's methods."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> _Method:
        if name.startswith("_"):
            raise AttributeError(name)
        return _Method(getattr(self._actor, name))
