"""The one fold over a run: live or from its logs, of whichever version, it says the same."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow.record.events import Cause, Failure, Forming, Generation, Submitted, from_row
from regrow.record.history import History
from regrow.record.status import State, status_of

Row = dict[str, Any]
T0 = 1_700_000_000.0


def row(step: int, at: float, generation: int = 1) -> Row:
    waits = {"data_wait_s": 0.1, "snapshot_s": 0.05}
    return {"step": step, "time": T0 + at, "step_s": 1.0, "generation": generation, "loss": 2.0, **waits}


def a_death(grows: bool = True) -> list[Any]:
    """Three ranks lose one at 14 after three steps; two go on at 20, three again at 24."""
    lines: list[Any] = [
        Submitted(time=T0),
        Forming(time=T0 + 5, generation=1),
        Generation(time=T0 + 10, generation=1, world_size=3, start_step=0, cause=Cause.start, init_s=4.0),
        *(row(step, 10 + step) for step in (1, 2, 3)),
        Failure(time=T0 + 14, cause=Cause.worker_died, detail="rank 2", generation=1),
        Generation(
            time=T0 + 20, generation=2, world_size=2, start_step=3, cause=Cause.worker_died, source="snapshot",
            recomputed_steps=0, init_s=2.0, restore_s=1.0,
        ),
        *(row(step, 17 + step, 2) for step in (4, 5, 6)),
    ]  # fmt: skip
    if grows:
        lines.append(Generation(time=T0 + 24, generation=3, world_size=3, start_step=6, cause=Cause.grow, init_s=0.5))
        lines += [row(step, 18 + step, 3) for step in (7, 8)]
    return lines


@given(st.integers(1, len(a_death())), st.integers(1, 4))
def test_what_is_lived_through_and_what_is_read_afterwards_are_the_same(number: int, kept: int) -> None:
    lines = a_death()[:number]
    live, short = History(), History(newest_rows=kept)
    for line in lines:
        live.on(line)
        short.on(line)
    rows = [line for line in lines if isinstance(line, dict)]
    events = [line for line in lines if not isinstance(line, dict)]
    read = History.of_logs(rows, [from_row(event.to_row()) for event in events])
    assert read.interruptions == live.interruptions == short.interruptions
    assert read.seconds == live.seconds == short.seconds
    assert read.ledger(T0 + 30).time_s == live.ledger(T0 + 30).time_s
    assert read.ledger(T0 + 30).bands == live.ledger(T0 + 30).bands
    assert list(short.rows) == rows[-kept:]


def test_an_interruption_is_known_at_once_and_what_came_of_it_later() -> None:
    history = History()
    for line in a_death(grows=False)[:7]:
        history.on(line)
    (open_one,) = history.interruptions
    assert (open_one.cause, open_one.detail, open_one.ranks_before) == ("worker_died", "rank 2", 3)
    assert open_one.ranks_after is None
    for line in a_death()[7:]:
        history.on(line)
    death, growth = history.interruptions
    assert (death.ranks_after, death.back_s, death.source) == (2, 6.0, "snapshot")
    assert (growth.cause, growth.time, growth.ranks_before, growth.ranks_after) == ("grow", T0 + 23.5, 2, 3)
    assert history.world_size == 3


def test_states_add_up_to_wall_time_live_and_by_hindsight() -> None:
    history, end = History(), T0 + 26
    for line in a_death():
        history.on(line)
    ledger = history.ledger(end)
    assert math.fsum(ledger.time_s.values()) == pytest.approx(end - T0)
    assert math.fsum(history.seconds.values()) == pytest.approx(end - T0)
    assert history.seconds["productive"] == pytest.approx(ledger.time_s["productive"])
    assert history.seconds["restore"] == pytest.approx(ledger.time_s["restore"]) == 1.0


def test_events_of_another_version_change_nothing_but_when_the_run_was_heard() -> None:
    lines = a_death()
    strange = [{"time": T0 + 28, "event": "parade", "generation": 9}, {"time": T0 + 29, "event": "generation"}]
    rows = [line for line in lines if isinstance(line, dict)]
    events = [line.to_row() for line in lines if not isinstance(line, dict)]
    plain, odd = History.of_logs(rows, events), History.of_logs(rows, [*events, *strange])
    assert odd.seconds == plain.seconds
    assert odd.interruptions == plain.interruptions
    status = status_of(odd, folder="runs/mine", config={}, now=T0 + 30)
    assert (status.state, status.generation, status.heard_at) == (State.training, 3, T0 + 29)
