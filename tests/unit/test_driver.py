"""The driver and a coordinator that is busy, or gone: on a real Ray, the calls alone."""

from collections.abc import Iterator
from typing import Any

import pytest
import ray

from regrow.config.schema import PretrainConfig
from regrow.errors import RegrowError
from regrow.runtime import driver
from regrow.runtime.driver import Session


class Lines:
    def __init__(self) -> None:
        self.said: list[str] = []

    def message(self, text: str) -> None:
        self.said.append(text)


class Reference:
    """Of a call that is answered at the third look, or never: as `ray.get` tells of it."""

    def __init__(self, *outcomes: Any) -> None:
        self.outcomes: Iterator[Any] = iter(outcomes)

    def get(self) -> Any:
        outcome = next(self.outcomes)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Session:
    monkeypatch.setattr(ray, "get", lambda reference, timeout: reference.get())
    made = object.__new__(Session)
    made.console, made.config = Lines(), PretrainConfig()  # type: ignore[assignment]
    return made


def test_a_coordinator_that_is_busy_for_minutes_is_waited_for_and_told_of_once(session: Session) -> None:
    """Started anew while storage is away, it answers nothing: before, the driver ended the run after a minute."""
    late = ray.exceptions.GetTimeoutError("timed out")
    assert session.answer(Reference(late, late, late, "answer")) == "answer"
    assert session.console.said == ["the run's coordinator has not answered for 60 s: waiting for it"]  # type: ignore[attr-defined]


def test_a_coordinator_that_is_gone_for_good_ends_the_job_in_one_line(session: Session) -> None:
    gone = ray.exceptions.ActorDiedError()
    with pytest.raises(RegrowError, match=r"^the run's coordinator has ended: [^\n]+$"):
        session.answer(Reference(gone))


def test_a_coordinator_that_does_not_end_in_time_does_not_fail_a_job_that_is_done(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Coordinator:
        class close:
            remote = staticmethod(lambda *arguments, keep: Reference(ray.exceptions.GetTimeoutError("timed out")))

    session.coordinator = Coordinator()
    assert "has not ended within" in session.close(4, "finished", "")
    assert driver.END_S > 60
