"""Work, not time: the three ratios of hand-made runs, computed here from their seconds alone."""

import random
from typing import Any

import pytest

from regrow.config.schema import PipelineSchedule, PretrainConfig
from regrow.plan.pipeline import Stages
from regrow.plan.topology import plan_topology
from regrow.record.history import History
from regrow.record.work import slow_times, work_of
from regrow.show.report import as_mapping, build_report
from support.rows import T0, event, generation, make_row


def config(max_workers: int = 4, num_slices: int = 12, **parallel: Any) -> PretrainConfig:
    made = PretrainConfig()
    made.cluster.max_workers, made.optim.num_slices, made.cluster.spare_workers = max_workers, num_slices, 0
    for axis, ranks in parallel.items():
        setattr(made.parallel, axis, ranks)
    return made


def steps(first: int, last: int, begin: float, step_s: float, generation: int, **changes: Any) -> list[dict[str, Any]]:
    """Rows one after the other from `begin` seconds on."""
    return [
        make_row(step, T0 + begin + (step - first + 1) * step_s, step_s, generation, **changes)
        for step in range(first, last + 1)
    ]


def report(rows: list[Any], events: list[Any], made: PretrainConfig) -> dict[str, Any]:
    history = History.of_logs(rows, events)
    found = build_report(history, history.ledger(T0 + 1e6), made)
    work = found["work"]
    worth = work["useful_s"] + sum(work["slower_s"].values())
    assert worth == pytest.approx(found["time_s"]["productive"], abs=1e-5)  # productive time closes
    return found


def test_an_undisturbed_run_has_as_much_effective_time_as_productive_time() -> None:
    events = [event("submitted", 0, max_workers=4), generation(1, 10, 4, 0, "start"), event("stopped", 60, step=20)]
    found = report(steps(1, 20, 10, 2.0, 1, data_wait_s=0.5), events, config())
    assert found["goodput"] == found["effective"] == found["paid"] == pytest.approx(20 * 1.5 / 60)
    assert found["work"] == {
        "full_step_s": 1.5,
        "is_measured": True,
        "useful_s": 30.0,
        "slower_s": {"shrunk": 0.0, "first_step": 0.0, "slow": 0.0},
    }


def test_steps_are_of_the_size_that_their_own_job_asked_for_though_the_next_one_already_waited() -> None:
    events = [
        event("submitted", 0, max_workers=2),
        generation(1, 10, 2, 0, "start"),
        event("stopped", 31, step=10, reason="interrupted"),
        event("submitted", 15, max_workers=4),  # the time of its command
        generation(2, 50, 4, 10, "resume"),
        event("stopped", 60, step=20, reason="finished"),
    ]
    rows = [*steps(1, 10, 10, 2.0, 1, world_size=2), *steps(11, 20, 50, 1.0, 2, world_size=4)]
    found = report(rows, events, config())
    assert found["work"]["slower_s"] == pytest.approx({"shrunk": 0.0, "first_step": 0.0, "slow": 0.0})


def test_shrunk_slow_first_and_repeated_steps_count_for_less() -> None:
    """4 ranks, 12 slices: ten steps of 3 s, the first of 8; then a slow rank makes ten of 4.5 s, a node goes with the
    last two of them, three ranks do twelve of 4 s, the first of 6. Two spares wait. 200 s in all."""
    rows = [make_row(1, T0 + 18, 8.0), *steps(2, 10, 18, 3.0, 1), *steps(11, 18, 45, 4.5, 1)]
    rows += [make_row(19, T0 + 106, 6.0, 2, world_size=3), *steps(20, 30, 106, 4.0, 2, world_size=3)]
    events = [
        event("submitted", 0, max_workers=4),
        generation(1, 10, 4, 0, "start"),
        event("suspected", 63, kind="slow_compute", node="n1", pid=7, since=T0 + 45, factor=1.5),
        event("failure", 92, cause="node_silent", detail="n1", generation=1),
        event("rollback", 95, generation=2, from_step=20, to_step=18, steps=2, seconds=9.0,
              first_time=T0 + 81, first_step_end=T0 + 85.5, last_time=T0 + 90),
        generation(2, 100, 3, 18, "node_silent", recomputed_steps=2),
        event("stopped", 200, step=30, reason="finished"),
    ]  # fmt: skip
    made = config()
    made.cluster.spare_workers = 2
    found = report(rows, events, made)
    assert found["time_s"]["productive"] == pytest.approx(8 + 9 * 3 + 8 * 4.5 + 6 + 11 * 4)
    assert found["goodput"] == pytest.approx(121 / 200)
    assert found["effective"] == pytest.approx(30 * 3 / 200)  # what 4 ranks do in 90 s, undisturbed
    assert found["paid"] == pytest.approx(30 * 3 / 200 * 4 / 6)
    assert found["work"]["slower_s"] == pytest.approx({"shrunk": 12 * 1.0, "first_step": 5.0 + 2.0, "slow": 8 * 1.5})


def test_a_run_that_never_was_at_full_size_is_measured_by_the_batch_plan() -> None:
    """12 slices: 3 ranks run 4 passes each, 4 would run 3."""
    events = [event("submitted", 0, max_workers=4), generation(1, 10, 3, 0, "start"), event("stopped", 60, step=20)]
    found = report(steps(1, 20, 10, 2.0, 1, world_size=3), events, config())
    assert (found["work"]["full_step_s"], found["work"]["is_measured"]) == (1.5, False)
    assert found["effective"] == pytest.approx(20 * 2.0 * 3 / 4 / 60)


def test_one_unit_away_of_128_costs_a_17th_and_parked_units_nothing() -> None:
    events = [event("submitted", 0, max_workers=128), event("stopped", 60, step=20)]
    found = report(steps(1, 20, 0, 3.0, 1, world_size=127), events, config(max_workers=128, num_slices=2048))
    assert found["effective"] == pytest.approx(16 / 17, abs=1e-6)
    events = [event("submitted", 0, max_workers=767), event("stopped", 60, step=20)]
    found = report(steps(1, 20, 0, 3.0, 1, world_size=683), events, config(max_workers=767, num_slices=6144))
    assert (found["effective"], found["paid"]) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("parallel", "size", "full", "share"),
    [
        ({"tp": 2}, 6, 8, 3 / 4),  # 4 units to 3: 3 slices each to 4
        ({"tp": 2, "cp": 2}, 12, 16, 3 / 4),
        ({"pp": 2}, 6, 8, (3 + 1) / (4 + 1)),  # the bubble's one slot, beside 3 and 4 micro-batches
    ],
)
def test_units_are_what_shares_a_slice(parallel: dict[str, int], size: int, full: int, share: float) -> None:
    events = [event("submitted", 0, max_workers=full), event("stopped", 60, step=20)]
    found = report(steps(1, 20, 0, 3.0, 1, world_size=size), events, config(full, 12, **parallel))
    assert found["effective"] == pytest.approx(share, abs=1e-6)


@pytest.mark.parametrize("per_rank", [1, 2])
@pytest.mark.parametrize("slices_per_pass", [0, 1, 4])
@pytest.mark.parametrize("pp", [1, 2, 4])
def test_a_size_that_never_trained_is_measured_as_the_plan_has_it(pp: int, slices_per_pass: int, per_rank: int) -> None:
    """The micro-batches that fill a pipeline are passes: 64 slices are 8 of 32 ranks in four stages, in two passes."""
    stages = Stages(pp, tuple(range(stage, stage + 1) for stage in range(pp * per_rank))) if pp > 1 else None
    full, shrunk = (
        plan_topology(size, num_slices=64, slices_per_pass=slices_per_pass, stages=stages).step_cost
        for size in (32, 28)
    )
    made = config(32, 64, pp=pp, slices_per_pass=slices_per_pass)
    if per_rank > 1:
        made.parallel.schedule, made.parallel.stages_per_rank = PipelineSchedule.interleaved, per_rank
    events = [event("submitted", 0, max_workers=32), event("stopped", 60, step=20)]
    found = report(steps(1, 20, 0, 3.0, 1, world_size=28), events, made)
    assert found["effective"] == pytest.approx(full / shrunk, abs=1e-6)


def test_each_job_of_a_run_is_measured_by_what_it_asked_for() -> None:
    """Resumed with half as many ranks: what it did before and since was all that it could."""
    events = [
        event("submitted", 0, max_workers=4),
        generation(1, 0, 4, 0, "start", init_s=0.0, restore_s=0.0),
        event("stopped", 30, step=10, reason="interrupted"),
        event("submitted", 30, max_workers=2),
        generation(2, 30, 2, 10, "resume", init_s=0.0, restore_s=0.0),
        event("stopped", 90, step=20, reason="finished"),
    ]
    rows = steps(1, 10, 0, 3.0, 1) + steps(11, 20, 30, 6.0, 2, world_size=2)
    found = report(rows, events, config(max_workers=2))
    assert found["effective"] == pytest.approx(1.0)
    assert found["capacity_goodput"] == pytest.approx(1.0)


def test_ranks_that_only_a_later_job_asked_for_were_not_absent_before() -> None:
    """The first of two jobs counted for an eighth, and its own absent ranks for next to nothing."""
    events = [
        event("submitted", 0, max_workers=8),
        generation(1, 0, 8, 0, "start", init_s=0.0, restore_s=0.0),
        event("stopped", 100, step=100, reason="stop_at_step"),
        event("submitted", 100, max_workers=64),
        generation(2, 100, 64, 100, "resume", init_s=0.0, restore_s=0.0),
        event("stopped", 200, step=200, reason="finished"),
    ]
    second = steps(101, 200, 100, 1.0, 2, world_size=64)
    for first, capacity in ((8, 1.0), (4, 0.75)):
        rows = steps(1, 100, 0, 1.0, 1, world_size=first) + second
        assert report(rows, events, config(64, 64))["capacity_goodput"] == pytest.approx(capacity)


AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


def two_jobs(
    first: tuple[int, int, float], asked: int, second: tuple[int, int, float], num_slices: int
) -> dict[str, Any]:
    """100 steps by each of two jobs, one (world size, tp, seconds) after the other; `asked` by the first one, of the
    second all that it asked for. config.yaml is the second one's."""
    events, rows, now = [], [], 0.0
    for number, (size, tp, step_s) in enumerate((first, second), 1):
        axes = dict.fromkeys(AXES, 1) | {"dp_shard": size // tp, "tp": tp}
        events.append(event("submitted", now, max_workers=asked if number == 1 else size))
        start = {"start_step": 100 * (number - 1), "cause": "start" if number == 1 else "resume"}
        events.append(generation(number, now, size, **start, axes=axes, init_s=0.0, restore_s=0.0))
        rows += steps(100 * number - 99, 100 * number, now, step_s, number, world_size=size)
        now += 100 * step_s
        events.append(event("stopped", now, step=100 * number, reason="finished"))
    return report(rows, events, config(second[0], num_slices, tp=second[1]))


def test_a_job_with_another_tp_is_measured_by_its_own_units() -> None:
    """Before, by those of the newest config.yaml: 16 ranks in four units counted as 16, of which twelve had nothing."""
    found = two_jobs((16, 4, 1.0), 16, (4, 1, 1.0), num_slices=4)
    assert found["capacity_goodput"] == found["effective"] == found["goodput"] == pytest.approx(1.0)
    found = two_jobs((12, 4, 1.0), 16, (4, 1, 1.0), num_slices=12)  # three units have 4 slices each, four had 3
    assert found["capacity_goodput"] == pytest.approx((12 / 16 + 1) / 2)
    assert found["effective"] == pytest.approx((3 / 4 + 1) / 2)
    found = two_jobs((5, 1, 1.0), 6, (8, 4, 1.0), num_slices=30)  # of six ranks none is beyond whole units
    assert found["effective"] == pytest.approx((5 / 6 + 1) / 2)


def test_steps_of_another_tp_do_not_say_what_is_usual_for_as_many_ranks() -> None:
    found = two_jobs((8, 4, 1.0), 8, (8, 1, 2.0), num_slices=24)
    assert found["effective"] == pytest.approx(1.0)
    assert found["work"]["full_step_s"] == 2.0


def test_a_slow_half_of_a_run_does_not_become_what_is_usual() -> None:
    rows = steps(1, 10, 0, 3.0, 1) + steps(11, 40, 30, 4.0, 1)
    events = [
        event("submitted", 0, max_workers=4),
        event("suspected", 40, kind="slow_link", node="n2", pid=0, since=T0 + 30.5, factor=1.3),
        event("cleared", 149, kind="slow_link", node="n2", pid=0),
        event("stopped", 150, step=40),
    ]
    found = report(rows, events, config())
    assert found["work"]["full_step_s"] == 3.0
    assert found["effective"] == pytest.approx(40 * 3 / 150)
    assert slow_times(History.of_logs(rows, events).events) == [(T0 + 30.5, T0 + 149)]


def test_run_folders_of_earlier_versions_are_read() -> None:
    """No max_workers in their submission, no axes, a configuration that lacks groups, none at all."""
    rows, events = steps(1, 10, 10, 2.0, 1), [event("submitted", 0), event("stopped", 30, step=10)]
    history = History.of_logs(rows, events)
    ledger = history.ledger(T0)
    for old in (as_mapping(config()), {"cluster": {"max_workers": 4}}, {}, {"optim": None, "cluster": None}):
        assert work_of(ledger, rows, history.events, old).effective == pytest.approx(20 / 30)
    assert work_of(History().ledger(T0), [], history.events, {}).effective is None


def test_effective_is_the_undisturbed_jobs_time_for_the_steps_that_count_whatever_befell_it() -> None:
    """Runs of random groups, drawn with what each step takes; the ratio is counted here while they are drawn."""
    drawn = random.Random(7)
    for _ in range(20):
        now, step, useful, rows = 5.0, 0, 0.0, list[dict[str, Any]]()
        events = [event("submitted", 0, max_workers=4)]
        for number in range(1, drawn.randint(2, 6)):
            size = 4 if number == 1 else drawn.choice([2, 3, 4])
            events.append(generation(number, now, size, step, "start" if number == 1 else "worker_died"))
            for _ in range(drawn.randint(4, 12)):
                step, now, useful = step + 1, now + 6.0 / size, useful + 1.5
                rows.append(make_row(step, T0 + now, 6.0 / size, number, world_size=size))
            now += drawn.uniform(1.0, 9.0)
        events.append(event("stopped", now, step=step))
        assert report(rows, events, config())["effective"] == pytest.approx(useful / now, abs=1e-6)
