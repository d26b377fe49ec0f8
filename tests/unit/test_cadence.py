"""When a committed snapshot becomes a durable checkpoint."""

import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow.control.cadence import Cadence, daly_interval

HOUR = 3600.0


def cadence(
    *,
    every_steps: int | None = None,
    every_minutes: float | None = None,
    automatic: bool = False,
    mtbf_hours: float = 24.0,
    start_step: int = 0,
    keep_every_steps: int = 0,
) -> Cadence:
    """One that began to train at `start_step`, at second 0."""
    made = Cadence(
        every_steps=every_steps,
        every_minutes=every_minutes,
        automatic=automatic,
        mtbf_hours=mtbf_hours,
        now=0.0,
        keep_every_steps=keep_every_steps,
    )
    made.resumed(start_step, 0.0)
    return made


def write(made: Cadence, step: int, now: float, *, took_s: float, stall_s: float = 0.0, slower: float = 1.0) -> None:
    """One checkpoint, with steps of a second before it, and `slower` ones beside it."""
    for _ in range(8):
        made.stepped(1.0, writing=False)
    made.begun(step, now)
    for _ in range(8):
        made.stepped(slower, writing=True)
    made.written(took_s=took_s, stall_s=stall_s)


def test_none_is_begun_by_time_that_may_still_be_written_when_one_is_due_that_is_kept_for_good() -> None:
    """The one of step 96 was, and 100 was never in storage."""
    made = cadence(every_steps=100, every_minutes=1.0, keep_every_steps=100)
    write(made, 10, 10.0, took_s=8.0)
    assert made.due(87, 87.0) == "every 1 minutes"
    assert made.due(88, 88.0) == "every 1 minutes"
    assert made.due(89, 89.0) == "", "11 steps of a second are left for what took 8 s, and may take 12"
    assert made.due(100, 100.0) == "every 100 steps"


# Daly's estimate


@pytest.mark.parametrize(("mtbf_minutes", "interval_minutes"), [(24 * 60, 117), (6 * 60, 57), (15, 9.1)])
def test_dalys_interval_is_what_his_paper_gives_for_a_dump_of_five_minutes(
    mtbf_minutes: float, interval_minutes: float
) -> None:
    assert daly_interval(5 * 60, mtbf_minutes * 60) / 60 == pytest.approx(interval_minutes, rel=0.006)


def wasted(interval_s: float, lifetimes_s: Sequence[float], *, cost_s: float, writing_s: float) -> float:
    """The share of time lost or spent where training fails after each of these times and goes back to a checkpoint.

    One is begun every `interval_s`, and is there `writing_s` later.
    """
    written = sum(max(0, int((lifetime_s - writing_s) // interval_s)) for lifetime_s in lifetimes_s)
    return 1 - written * (interval_s - cost_s) / sum(lifetimes_s)


@pytest.mark.parametrize(("cost_s", "writing_s"), [(0.2, 20.0), (5.0, 60.0), (60.0, 60.0), (600.0, 600.0)])
def test_dalys_interval_is_within_three_percent_of_the_best_of_all_tried(cost_s: float, writing_s: float) -> None:
    mtbf_s, number = 6 * HOUR, 20_000
    # the exponential distribution's quantiles: a sample of it without a sample's noise
    lifetimes_s = [-mtbf_s * math.log((k + 0.5) / number) for k in range(number)]
    ours_s = daly_interval(cost_s, mtbf_s) + cost_s
    tried = [ours_s * 1.015**k for k in range(-12, 13)]
    waste = [wasted(each, lifetimes_s, cost_s=cost_s, writing_s=writing_s) for each in tried]
    assert abs(waste.index(min(waste)) - 12) <= 2
    assert waste[12] <= min(waste) * 1.001


@given(cost_s=st.floats(1e-3, 1e5), mtbf_s=st.floats(1.0, 1e8))
def test_dalys_interval_is_positive_never_above_the_mtbf_and_grows_with_it(cost_s: float, mtbf_s: float) -> None:
    interval_s = daly_interval(cost_s, mtbf_s)
    assert 0 < interval_s <= mtbf_s * (1 + 1e-9)
    assert daly_interval(cost_s, 2 * mtbf_s) > interval_s


def test_a_checkpoint_that_costs_twice_the_mtbf_is_followed_by_one_mtbf_of_training() -> None:
    assert daly_interval(200.0, 100.0) == daly_interval(900.0, 100.0) == 100.0
    assert daly_interval(0.0, 100.0) == 0.0


# Automatic, as it learns


def train(
    made: Cadence, lifetimes_s: Sequence[float], *, writing_s: float, slower: float, noise: random.Random
) -> float:
    """The share of time lost or spent as in `wasted`, where `made` decides when; it sees noisy steps of 10 s."""
    now, kept_s = 0.0, 0.0
    for lifetime_s in lifetimes_s:
        fails_at = now + lifetime_s
        made.resumed(0, now)
        while True:
            for _ in range(4):
                made.stepped(noise.gauss(10.0, 0.2), writing=False)
            begin = now + (made.interval_s(now) or 600.0)  # begun to begun, but for the first
            if begin + writing_s > fails_at:
                break
            made.begun(0, begin)
            for _ in range(4):
                made.stepped(noise.gauss(10.0 * slower, 0.2), writing=True)
            made.written(took_s=writing_s)
            kept_s += begin - now - writing_s * (1 - 1 / slower)
            now = begin
        now = fails_at
        made.failed()
    return 1 - kept_s / now


@pytest.mark.parametrize("mtbf_hours", [1.0, 3.0])
def test_automatic_wastes_at_most_two_percent_more_than_the_best_fixed_interval(mtbf_hours: float) -> None:
    noise = random.Random(5)
    lifetimes_s = [noise.expovariate(1 / (mtbf_hours * HOUR)) for _ in range(2500)]
    automatic = cadence(automatic=True, mtbf_hours=24.0)  # far from what it will find
    ours = train(automatic, lifetimes_s, writing_s=50.0, slower=1.25, noise=noise)
    cost_s = 50.0 * (1 - 1 / 1.25)
    tried = [60 * 1.1**k for k in range(40)]
    waste = [wasted(each, lifetimes_s, cost_s=cost_s, writing_s=50.0) for each in tried]
    assert ours <= min(waste) * 1.02
    assert ours < 0.8 * waste[0]  # it matters which
    assert ours < 0.8 * waste[-1]
    found_s = automatic.interval_s(sum(lifetimes_s))
    assert found_s == pytest.approx(daly_interval(cost_s, mtbf_hours * HOUR) + cost_s, rel=0.1)


def test_the_cost_is_the_stall_and_the_work_that_slower_steps_left_undone() -> None:
    made = cadence(automatic=True)
    assert made.cost_s() is None
    assert made.interval_s(10.0) is None
    write(made, 1, 10.0, took_s=60.0, stall_s=2.0, slower=1.25)
    assert made.cost_s() == pytest.approx(2.0 + 60.0 * 0.2)  # 60 s at 4/5 of the speed


def test_a_checkpoint_that_seems_to_cost_nothing_is_still_not_written_all_the_time() -> None:
    made = cadence(automatic=True, mtbf_hours=24.0)
    write(made, 1, 0.0, took_s=60.0, slower=0.9)
    assert made.cost_s() == pytest.approx(0.6)
    assert made.interval_s(0.0) == pytest.approx(math.sqrt(2 * 0.6 * 24 * HOUR), rel=0.01)


def test_automatic_never_asks_for_more_than_one_checkpoint_at_a_time() -> None:
    made = cadence(automatic=True, mtbf_hours=0.1)
    write(made, 1, 0.0, took_s=500.0)
    assert made.interval_s(0.0) == 500.0


def test_one_odd_checkpoint_does_not_change_the_interval() -> None:
    made = cadence(automatic=True)
    for step in range(1, 6):
        write(made, step, 0.0, took_s=60.0, stall_s=900.0 if step == 3 else 0.0, slower=1.25)
    assert made.cost_s() == pytest.approx(12.0)


def test_steps_of_another_world_size_are_not_compared() -> None:
    made = cadence(automatic=True)
    made.stepped(1.0, writing=False)
    made.resumed(0, 5.0)  # on half of the ranks
    made.begun(1, 10.0)
    made.stepped(2.0, writing=True)
    made.written(took_s=60.0, stall_s=1.0)
    assert made.cost_s() == 1.0


@given(hours=st.floats(0, 1e4), failures=st.integers(0, 1000), prior=st.floats(0.1, 1e4))
def test_the_expected_mtbf_gives_way_to_what_is_seen(hours: float, failures: int, prior: float) -> None:
    made = cadence(automatic=True, mtbf_hours=prior)
    for _ in range(failures):
        made.failed()
    assert made.mtbf_s(hours * HOUR) == pytest.approx((hours + prior) * HOUR / (failures + 1))


def test_failures_shorten_the_interval_and_quiet_hours_lengthen_it() -> None:
    made = cadence(automatic=True)
    write(made, 1, 0.0, took_s=10.0, slower=2.0)
    calm_s = made.interval_s(HOUR) or 0.0
    assert (made.interval_s(48 * HOUR) or 0.0) > calm_s
    for _ in range(24):
        made.failed()
    assert (made.interval_s(HOUR) or 0.0) == pytest.approx(calm_s / 5, rel=0.05)


# Due


@given(
    every=st.integers(1, 50),
    start=st.integers(0, 200),
    gaps=st.lists(st.integers(1, 40), min_size=1, max_size=60),
)
def test_by_steps_there_is_one_checkpoint_for_every_multiple_reached_or_passed(
    every: int, start: int, gaps: list[int]
) -> None:
    made = cadence(every_steps=every, start_step=start)
    step, multiple = start, start // every
    for gap in gaps:  # snapshots do not exist at each step
        step += gap
        due = made.due(step, 0.0)
        assert due == (f"every {every} steps" if step // every > multiple else "")
        if due:
            write(made, step, 0.0, took_s=1.0)
            multiple = step // every


def test_by_minutes_time_counts_from_the_beginning_of_the_last_one() -> None:
    made = cadence(every_minutes=30)
    assert made.due(1, 1799.0) == ""
    assert made.due(2, 1800.0) == "every 30 minutes"
    made.begun(2, 1800.0)
    made.written(took_s=600.0)
    assert made.due(3, 3599.0) == ""
    assert made.due(3, 3600.0) == "every 30 minutes"


def test_automatic_measures_a_first_checkpoint_and_then_keeps_its_interval() -> None:
    made = cadence(automatic=True, start_step=100)
    assert made.due(119, 1e6) == ""
    assert made.due(120, 50.0) == "automatic: the first one, to measure what it costs"
    write(made, 120, 50.0, took_s=10.0, slower=2.0)
    interval_s = made.interval_s(900.0) or 0.0
    assert interval_s == pytest.approx(935, rel=0.01)
    assert made.due(200, 50.0 + interval_s - 10.0) == ""
    assert made.due(200, 50.0 + interval_s + 10.0) == "automatic: every 937 s"


def test_whichever_way_is_due_first_counts_for_all() -> None:
    made = cadence(every_steps=100, every_minutes=10)
    assert made.due(100, 60.0) == "every 100 steps"
    write(made, 100, 60.0, took_s=1.0)
    assert made.due(199, 659.0) == ""
    assert made.due(199, 660.0) == "every 10 minutes"
    write(made, 199, 660.0, took_s=1.0)
    assert made.due(200, 661.0) == "every 100 steps"


def test_none_is_due_while_one_is_written_and_a_failed_write_is_made_up_for() -> None:
    made = cadence(every_steps=10)
    made.begun(10, 0.0)
    assert made.due(25, 0.0) == ""
    made.abandoned()
    assert made.due(26, 0.0) == "every 10 steps"


def test_a_step_that_has_its_checkpoint_gets_no_other() -> None:
    made = cadence(every_steps=1, every_minutes=1)
    write(made, 7, 0.0, took_s=1.0)
    made.resumed(7, 1e4)
    assert made.due(7, 2e4) == ""
    assert made.due(8, 2e4) == "every 1 steps"


def test_failures_that_memory_survives_do_not_put_off_the_next_checkpoint() -> None:
    made = cadence(every_minutes=30)
    write(made, 100, 0.0, took_s=1.0)
    for minute in (10, 20, 29):
        made.failed()
        made.resumed(100 + minute, minute * 60.0)
    assert made.due(131, 1800.0) == "every 30 minutes"


def test_after_going_back_to_a_checkpoint_time_counts_from_there() -> None:
    made = cadence(every_steps=100, every_minutes=30)
    write(made, 100, 0.0, took_s=1.0)
    made.begun(200, 100.0)
    made.failed()
    made.abandoned()
    made.resumed(100, 1700.0)
    assert made.due(150, 1900.0) == ""
    assert made.due(200, 2000.0) == "every 100 steps"
    assert made.due(150, 3500.0) == "every 30 minutes"


def test_nothing_is_due_where_no_way_is_on() -> None:
    assert cadence().due(1000, 1e9) == ""
