"""When a group counts as standing still, and which of its processes are to blame."""

import numpy as np

from regrow.observe.pulse import Pulse
from regrow.observe.stalls import SECONDS, STEPS, STOPPED_S, STUCK_SHARE, Stalls


def watching(step_s: float = 0.2) -> Stalls:
    stalls = Stalls(silence_s=30.0, timeout_s=600.0)
    stalls.begin(0.0)
    for step in range(10):
        stalls.stepped(step_s, step * step_s)
    return stalls


def pulse(silent_s: float, state: str) -> Pulse:
    return Pulse(pid=1, generation=1, step=9, silent_s=silent_s, probe_s=0.0, state=state)


def test_a_group_stands_still_after_a_few_of_its_own_steps() -> None:
    stalls = watching(step_s=0.2)
    last, patience = 9 * 0.2, STEPS * 0.2 + SECONDS
    assert stalls.stalled_s(last + patience - 0.01) == 0.0
    assert stalls.stalled_s(last + patience + 0.01) > patience
    stalls.stepped(0.2, last + patience + 1.0)
    assert stalls.stalled_s(last + patience + 1.1) == 0.0


def test_nobody_is_asked_about_before_the_first_step_is_overdue_or_after_the_group_has_ended() -> None:
    stalls = Stalls(silence_s=30.0, timeout_s=600.0)
    assert stalls.stalled_s(1e9) == 0.0
    stalls.begin(0.0)
    assert stalls.stalled_s(29.0) == 0.0  # compiling, reading: no step tells how long one takes
    assert stalls.stalled_s(31.0) == 31.0
    stalls.end()
    assert stalls.stalled_s(1e9) == 0.0


def test_a_stopped_process_is_to_blame_at_once_and_a_busy_one_only_after_long_silence() -> None:
    stalls = watching()
    assert stalls.hung([pulse(STOPPED_S + 0.1, "T")])
    assert not stalls.hung([pulse(STOPPED_S - 0.1, "T")])
    for state in "RSD":
        assert not stalls.hung([pulse(29.0, state)])
        assert stalls.hung([pulse(31.0, state)])


def test_a_group_that_forms_is_watched_for_those_that_are_stopped_and_may_take_long() -> None:
    stalls = watching()
    stalls.begin(10.0, forming=True)
    assert stalls.forming
    assert not stalls.training
    assert stalls.stalled_s(11.0) == 1.0
    assert not stalls.wants_a_look(1e9)
    stalls.begin(20.0)
    assert stalls.training
    assert not stalls.forming


def test_a_look_at_where_everyone_is_comes_once_a_stall() -> None:
    stalls = watching()
    late = 9 * 0.2 + STUCK_SHARE * 600.0
    assert not stalls.wants_a_look(late - 1)
    assert stalls.wants_a_look(late + 1)
    assert not stalls.wants_a_look(late + 2)
    stalls.stepped(0.2, late + 3)
    assert stalls.wants_a_look(late + 3 + late)


def test_jittered_steps_are_never_taken_for_a_hang() -> None:
    """10,000 steps of log-normal length, one in a hundred five times as long, processes that are silent as a busy
    machine makes them."""
    random = np.random.default_rng(0)
    stalls, now = Stalls(silence_s=30.0, timeout_s=600.0), 0.0
    stalls.begin(now)
    asked = 0
    for _ in range(10_000):
        step_s = float(0.3 * random.lognormal(0, 0.4) * (5 if random.random() < 0.01 else 1))
        for at in np.arange(now, now + step_s, 0.2):
            if stalls.stalled_s(float(at)):
                asked += 1
                silences = random.exponential(0.3, size=8)
                assert not stalls.hung([pulse(float(silent_s), "R") for silent_s in silences])
        now += step_s
        stalls.stepped(step_s, now)
    assert asked  # it was close at times
