"""When a group counts as standing still, and which of its processes are to blame."""

from dataclasses import replace

import numpy as np
import pytest

from regrow.control.health import SECONDS, STEPS, STOPPED_S, STUCK_SHARE, Pulse, Stalls, hanging, left_behind
from regrow.control.phases import BEYOND_S, FACTOR, PATIENCE, PHASES, Phase, Usual
from regrow.control.slow import Worker
from support.told import Told


def watching(step_s: float = 0.2) -> Stalls:
    stalls = Stalls(silence_s=30.0, timeout_s=600.0, stuck_s=180.0)
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
    stalls = Stalls(silence_s=30.0, timeout_s=600.0, stuck_s=180.0)
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


def test_who_runs_is_asked_where_it_is_once_no_step_has_come_for_long_and_not_while_a_group_forms() -> None:
    stalls = watching()
    last = 9 * 0.2
    assert not stalls.stuck(last + BEYOND_S - 1)
    assert stalls.stuck(last + BEYOND_S + 1)
    assert not replace(stalls, stuck_s=0.0).stuck(last + 1e9)
    stalls.begin(10.0, forming=True)
    assert not stalls.stuck(1e9)  # meeting, building, restoring: ranks do not do the same
    slow = Stalls(silence_s=30.0, timeout_s=600.0, stuck_s=5.0)
    slow.begin(0.0)
    slow.stepped(100.0, 0.0)
    assert not slow.stuck(STEPS * 100.0)
    assert slow.stuck(STEPS * 100.0 + SECONDS + 0.1)


def test_a_phase_is_too_long_beyond_what_workers_took_for_it_and_what_others_took_to_come_to_their_wait() -> None:
    usual = Usual(unknown_s=180.0, least_s={Phase.data: 25.0})
    assert usual.limit_s(Phase.validation, others_s=0.0) == 180.0  # nothing is known of it
    assert usual.limit_s(Phase.first_step, others_s=300.0) == FACTOR * 300.0 + BEYOND_S  # the others compiled so long
    usual.learn([[3.0 * (each is Phase.validation) for each in PHASES], [0.0] * len(PHASES)])
    assert usual.limit_s(Phase.validation, others_s=0.0) == FACTOR * 3.0 + BEYOND_S
    assert usual.limit_s(Phase.validation, others_s=60.0) == FACTOR * 60.0 + BEYOND_S
    usual.learn([[2.0 * (each is Phase.validation) for each in PHASES]])
    assert usual.longest_s == {Phase.validation: 2.0}  # a longer one was long ago
    usual.learn([[0.1] * len(PHASES), ()])  # of a worker that has said nothing yet
    assert usual.limit_s(Phase.data, others_s=0.0) == 25.0 + BEYOND_S  # the stream has a timeout of its own
    assert usual.limit_s(Phase.data, others_s=60.0) == FACTOR * 60.0 + BEYOND_S


@pytest.mark.parametrize(
    ("phase", "known_s", "hangs_at_s"),
    [(Phase.step, 1.0, 21.5), (Phase.validation, 40.0, 80.0), (Phase.checkpoint, 0.0, 180.0)],
)
def test_who_is_waited_for_hangs_once_its_own_phase_is_too_long(
    phase: Phase, known_s: float, hangs_at_s: float
) -> None:
    """Its peers are in a step, and wait for it for as long."""
    usual = Usual(unknown_s=180.0)
    usual.learn([[known_s * (each is phase) for each in PHASES]])
    for at_s in (hangs_at_s - 1, hangs_at_s + 1):
        waiting = {worker: replace(each, waits_s=at_s) for worker, each in WAITING.items()}
        late = replace(answer(3, 69, waits=False), phase=phase, phase_s=at_s)
        assert hanging([B], waiting | {B: late}, usual) == ([B] if at_s > hangs_at_s else [])


def test_who_waits_for_storage_alone_is_ended_before_the_others_collective_fails() -> None:
    """Before, it waited for 900 s and the others for 600, in each of seven groups; where most wait, all outlive it."""
    told = Told()
    usual, timeout_s = told.control.health.usual, told.control._config.train.collective_timeout_s
    for longest_s in (0.0, 850.0):  # no outage so far, and a long one that all outlived
        usual.learn([[longest_s * (each is Phase.storage) for each in PHASES]])
        at_s = PATIENCE * timeout_s
        late = replace(answer(3, 69, waits=False), phase=Phase.storage, phase_s=at_s)
        waiting = {worker: replace(each, waits_s=at_s) for worker, each in WAITING.items()}
        assert hanging([B], waiting | {B: late}, usual) == [B]
        assert hanging([B], waiting | {B: replace(late, phase_s=at_s / 2)}, usual) == []
        idle = dict.fromkeys([A, B], late)
        assert left_behind({worker: replace(each, asked=2) for worker, each in idle.items()}, idle) == []


def answer(asked: int, collectives: int, *, waits: bool) -> Pulse:
    return replace(pulse(0.0, "R"), asked=asked, collectives=collectives, waits=waits)


A, B, C = (("a", 1), ("a", 2), ("b", 1))  # workers
WAITING = {A: answer(3, 70, waits=True), C: answer(3, 70, waits=True)}


@pytest.mark.parametrize(
    ("before", "now", "found"),
    [
        (answer(2, 69, waits=False), answer(3, 69, waits=False), [B]),
        (answer(2, 68, waits=False), answer(3, 69, waits=False), []),  # it gets on
        (answer(2, 69, waits=True), answer(3, 69, waits=False), []),  # its collective has just ended
        (answer(2, 69, waits=False), answer(3, 70, waits=True), []),  # it has arrived
        (answer(3, 69, waits=False), answer(3, 69, waits=False), []),  # it has not answered again
        (None, answer(3, 69, waits=False), []),
        (answer(2, 69, waits=False), None, []),  # nor can it be asked
    ],
)
def test_who_waits_in_no_collective_and_begins_none_is_left_behind(
    before: Pulse | None, now: Pulse | None, found: list[Worker]
) -> None:
    earlier = {worker: replace(each, asked=2) for worker, each in WAITING.items()}
    first = earlier | ({B: before} if before else {})
    second = WAITING | ({B: now} if now else {})
    assert left_behind(first, second) == found


def test_where_most_are_left_behind_or_nobody_waits_it_is_not_theirs() -> None:
    """But of two, one may be: the other one waits for it."""
    idle = answer(2, 69, waits=False), answer(3, 69, waits=False)
    waiting = answer(2, 70, waits=True), answer(3, 70, waits=True)
    for first, second, third, found in (
        (idle, idle, waiting, []),
        (idle, idle, idle, []),
        (idle, waiting, waiting, [A]),
    ):
        before, now = (dict(zip((A, B, C), each, strict=True)) for each in zip(first, second, third, strict=True))
        assert left_behind(before, now) == found
    assert left_behind({A: idle[0], B: waiting[0]}, {A: idle[1], B: waiting[1]}) == [A]


def test_jittered_steps_are_never_taken_for_a_hang() -> None:
    """10,000 steps of log-normal length, one in a hundred five times as long, processes that are silent as a busy
    machine makes them."""
    random = np.random.default_rng(0)
    stalls, now = Stalls(silence_s=30.0, timeout_s=600.0, stuck_s=180.0), 0.0
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
