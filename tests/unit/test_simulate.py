"""The simulator's figures against closed forms that share no code with it, and what must hold whatever the inputs."""

import itertools
import json
import math
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from regrow.config.spares import num_beyond
from regrow.errors import ConfigError
from regrow.forecast.estimate import forecast, forecasts, gpu_of, network_of
from regrow.forecast.settle import settled
from regrow.plan.batch import plan_batch
from regrow.record.events import Generation, Rollback
from regrow.record.ledger import of_kind
from regrow.simulate.estimate import (
    IDLE,
    PARTS,
    Estimate,
    Estimating,
    estimate,
    estimate_given,
    events_of,
    passes_of,
    speeds,
)
from regrow.simulate.faults import DAY, Fault, draw, drawn
from regrow.simulate.inputs import FIGURES, Figure, Inputs, Job, Origin, Policy, mixed, rate_of
from regrow.simulate.profile import Profile
from regrow.simulate.study import assumed_share, compare, interval, losses, spares_curve, to_json
from regrow.simulate.trace import sample
from regrow.simulate.world import inputs_of, job_of, replicas_of
from support.commands import call
from support.simulating import AT_16K, AT_98K, bare, configured, inputs, rates

ROOT = Path(__file__).parents[2]
ALONE = Job(8, 8, 1)
WITHOUT_RAY = {"RAY_ADDRESS": "", "RAY_TMPDIR": "/nowhere-that-matters"}


def simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "jobs.simulate", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300,
        env=os.environ | WITHOUT_RAY,
    )  # fmt: skip


def daly(mtbf_s: float, restart_s: float, interval_s: float, write_s: float) -> float:
    """Useful share with a checkpoint of `write_s` after each `interval_s` of work; a failure also strikes restarts."""
    return interval_s / (mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1((interval_s + write_s) / mtbf_s))


def total(result: Estimate) -> np.ndarray:
    lost = sum(result.lost[part].sum(0) for part in PARTS)
    return np.asarray(result.useful_s + lost + sum(result.idle[state] for state in IDLE))


# closed forms


def test_a_single_kind_of_failure_gives_dalys_share_of_useful_time_through_the_command() -> None:
    rng = random.Random(11)
    mtbf_s = rng.uniform(1000, 8000)
    restart_s, write_s = mtbf_s * rng.uniform(0.02, 0.3), rng.uniform(1, 60)
    interval_s = rng.uniform(5 * write_s, mtbf_s / 2)
    settings = {"mtbf_s": mtbf_s, "restart_s": restart_s, "interval_s": interval_s, "write_s": write_s}
    done = simulate(
        "--json", "simulate/faults=single", *(f"simulate.{name}={value}" for name, value in settings.items())
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["policies"]
    assert [each["name"] for each in found] == ["in_place", "restart", "restart_tuned", "replicas"]
    for each in found:
        difference = abs(each["effective"] - daly(**settings))
        assert difference < max(3 * each["standard_error"], 5e-4)
        assert difference < 3e-3


@pytest.mark.parametrize("seed", range(4))
def test_dalys_share_holds_for_any_failure_rate_restart_interval_and_stall(seed: int) -> None:
    rng = random.Random(seed)
    mtbf_s = rng.uniform(900, 9000)
    restart_s, write_s = mtbf_s * rng.uniform(0.01, 0.3), rng.uniform(1, 60)
    interval_s = rng.uniform(4 * write_s, 0.7 * mtbf_s)
    config = configured(
        "simulate/faults=single", f"simulate.mtbf_s={mtbf_s}", f"simulate.restart_s={restart_s}",
        f"simulate.interval_s={interval_s}", f"simulate.write_s={write_s}",
    )  # fmt: skip
    result = compare(inputs_of(config)[:1], replicas_of(config.simulate), seed)[0]
    error = result.effective.std(ddof=1) / math.sqrt(len(result.effective))
    # the run's two ends, which the formula does not have: it begins formed, and ends with work that is not yet safe
    ends = (restart_s + interval_s) / result.wall_s
    assert abs(result.effective.mean() - daly(mtbf_s, restart_s, interval_s, write_s)) < 3 * error + ends


def test_nodes_that_are_away_are_as_many_as_in_a_queue_with_as_many_servers_as_come() -> None:
    job = Job(16384, 128, 2048, spares=40)
    rate, mean_s = 3.789e-3, 86400.0 * 2
    away = {"away_short_s": mean_s * math.exp(-0.5), "away_short_sigma": 1.0, "away_short_share": 1.0}
    result = estimate(bare(job, **rates(gpu=rate), **away), 64, 3)
    expected = rate * (job.nodes + job.spares) * mean_s / DAY  # M/G/infinity: Poisson, whatever the distribution
    found = to_json(result)["away_nodes"]
    assert found["mean"] == pytest.approx(expected, rel=0.05)
    assert found["variance"] == pytest.approx(expected, rel=0.10)


def test_the_best_number_of_spares_is_the_one_that_enumeration_finds() -> None:
    """A job that waits for all its nodes runs as long as no more are away than spares; each spare is paid for."""
    job, rate, mean_s = Job(8 * 256, 8, 256), 8e-3, 86400.0
    away = {"away_short_s": mean_s, "away_short_sigma": 0.0, "away_short_share": 1.0}
    policy = Policy("waits", shrinks=False, park=False, copies_lost_at=1 << 30)
    counts = range(0, 13)

    def paid(spares: int) -> float:
        busy = rate * (256 + spares)
        holds = sum(math.exp(-busy) * busy**k / math.factorial(k) for k in range(spares + 1))
        return holds * 256 / (256 + spares)

    best = max(counts, key=paid)
    curve = spares_curve(bare(job, policy=policy, **rates(gpu=rate), **away), list(counts), 64, 1)
    found = max(curve, key=lambda each: each["paid"])
    assert abs(found["spares"] - best) <= 1
    assert found["paid"] == pytest.approx(paid(best), abs=0.01)


def test_a_first_order_sum_of_what_each_failure_costs_is_what_is_lost() -> None:
    job, rate = Job(16384, 128, 2048, spares=200), 3.789e-3
    given = bare(job, **rates(gpu=rate), notice_gpu_s=20.0, form_base_s=30.0, step_s=6.0, away_short_s=3600.0,
                 away_short_share=1.0)  # fmt: skip
    lost = 1 - float(estimate(given, 64).effective.mean())
    assert lost == pytest.approx(2048 * rate / DAY * (20 + 30 + 3), rel=0.03)


# what must hold


@pytest.mark.parametrize(("faults", "days"), [("llama3", 20), ("meta100k", 20), ("spot", 1), ("none", 20)])
def test_every_second_of_every_policy_is_in_one_state(faults: str, days: int) -> None:
    config = configured(*AT_16K, f"simulate/faults={faults}", f"simulate.days={days}")
    for result in compare(inputs_of(config), 8, 2):
        assert np.allclose(total(result), result.wall_s, rtol=1e-6)
        for each in (result.useful_s, *result.idle.values(), *(result.lost[part].sum(0) for part in PARTS)):
            assert (each >= -1e-6 * result.wall_s).all()


@pytest.mark.parametrize(
    ("arguments", "replicas"),
    [
        (("+cluster=h200x8", "simulate.faults.per_node_day=0.5", "simulate.figures.share_slow=0.25"), 64),
        (("+cluster=h100x64", "simulate.faults.per_node_day=100", "simulate.days=2"), 32),
    ],
)
def test_nodes_that_are_up_are_never_fewer_than_none(arguments: tuple[str, ...], replicas: int) -> None:
    """Slow ones that are left were taken from those that are away: an index below 0, then past the table."""
    for each in inputs_of(configured(*arguments)):
        draws = draw(each, replicas, 0)
        run = Estimating(each, replicas, len(draws.at) + len(draws.slow_at))
        for event in events_of(each, draws, 0):
            run.step(*event)
            assert run.healthy.min() >= 0
            assert run.healthy.max() <= run.members
            assert (run.speed[run.healthy == 0] == 0).all()


def test_without_failures_all_time_is_useful_but_for_snapshots_stalls() -> None:
    assert estimate(inputs(*AT_16K, "simulate/faults=none", "simulate.figures.rate_head=0"), 4).effective.min() == 1.0
    restart = inputs(*AT_16K, "simulate/faults=none", "simulate.figures.rate_head=0", policy="restart")
    assert estimate(restart, 4).effective.mean() == pytest.approx(1800 / 1830, abs=1e-9)


def test_halving_all_times_and_doubling_all_rates_changes_nothing() -> None:
    given = inputs(*AT_16K, "simulate.days=30")
    halved = {}
    for name, figure in given.figures.items():
        if name.endswith("_s"):
            halved[name] = replace(figure, value=figure.value / 2)
        elif name.startswith("rate_"):
            halved[name] = replace(figure, value=figure.value * 2)
        elif name == "stop_per_gpu_s":
            continue
    other = replace(given.override(halved), days=15.0)
    assert estimate(other, 8).effective == pytest.approx(estimate(given, 8).effective, abs=1e-12)


@pytest.fixture(scope="module")
def given_and_effective() -> tuple[Inputs, np.ndarray]:
    given = inputs(*AT_98K, "simulate.spares=[20]", "simulate.days=15", "simulate/faults=meta100k")
    return given, estimate(given, 8).effective


@pytest.mark.parametrize(
    ("name", "better"),
    [
        ("rate_gpu", 0.5), ("rate_sdc", 0.5), ("notice_hang_s", 0.1), ("communicators_s", 0.1), ("form_base_s", 0.1),
        ("sdc_unnoticed_s", 0.2), ("away_long_s", 0.5), ("share_slow", 0.1), ("stop_per_gpu_s", 0.1),
    ],
)  # fmt: skip
def test_less_of_what_costs_time_never_costs_more(
    given_and_effective: tuple[Inputs, np.ndarray], name: str, better: float
) -> None:
    given, now = given_and_effective
    then = estimate(given.with_values(**{name: given[name] * better}), 8).effective
    error = np.std(then - now, ddof=1) / math.sqrt(8)
    assert (then - now).mean() > -2 * error


def test_more_spares_never_make_it_less_effective() -> None:
    curve = spares_curve(inputs(*AT_16K, "simulate.days=30"), [0, 8, 16, 24, 40], 16, 0)
    effective = [each["effective"] for each in curve]
    assert all(b > a - 5e-4 for a, b in itertools.pairwise(effective))


def test_the_same_seed_gives_the_same_bytes() -> None:
    arguments = ("--json", *AT_16K, "simulate.days=5", "simulate.replicas=4")
    first, second = simulate(*arguments), call("simulate", *arguments, env=WITHOUT_RAY)  # in another process, and here
    assert first.returncode == 0, first.stderr
    assert first.stdout == second.stdout
    assert first.stdout != call("simulate", *arguments, "simulate.seed=1", env=WITHOUT_RAY).stdout


def test_lemons_leave_the_rate_as_it_was_and_replacing_them_takes_their_faults_away() -> None:
    job = Job(16384, 128, 2048, spares=60)
    given = bare(job, days=60.0, **rates(software=4e-3), lemon_share=0.012, lemon_times=200.0, respawn_s=1.0)
    without = estimate(replace(given, figures={**given.figures, "lemon_share": Figure(0.0)}), 16)
    kept = estimate(given, 16)
    replaced = estimate(replace(given, policy=replace(given.policy, retire_after=3)), 16)
    assert kept.generations.mean() == without.generations.mean() == pytest.approx(60 * 4e-3 * 2048, rel=0.05)
    lemons = 0.012 * 200 / (0.012 * 200 + 0.988)
    others = (1 - lemons) * 60 * 4e-3 * 2048
    assert replaced.generations.mean() == pytest.approx(others + 3 * round(0.012 * 2048), rel=0.06)


# the batch stays what it is


def test_at_every_number_of_units_a_step_has_as_many_passes_as_plan_batch_says() -> None:
    job = Job(16384, 128, 2048)
    units = np.arange(1, 129)
    planned = [plan_batch(num_slices=2048, world_size=int(each)) for each in units]
    assert passes_of(job, units).tolist() == [each.num_micro_batches for each in planned]
    idle = 1 - 2048 / (units * passes_of(job, units))
    assert idle == pytest.approx([each.idle_share for each in planned])


def test_one_absent_unit_of_128_costs_a_seventeenth_of_the_speed() -> None:
    speed, _ = speeds(Job(16384, 128, 2048))
    assert speed[2048] == 1.0
    assert 1 - speed[2047] == pytest.approx(1 / 17)


def test_units_that_make_no_step_shorter_are_parked() -> None:
    job = Job(98304, 128, 6144)  # 9 passes for 683 to 767 units
    speed, used = speeds(job)
    assert speed[767 * 16] == speed[683 * 16] == 8 / 9
    assert used[767 * 16] == used[683 * 16] == 683 * 16
    assert used[768 * 16] == 768 * 16


@pytest.mark.parametrize(
    ("settings", "units", "spares"),
    [
        ((), 126, 32),  # 2,016 slices: 16 passes for 126 units as for 128
        (("simulate.spares=[5]",), 126, 5),
        (("cluster.spare_workers=256",), 128, 32),  # beyond the workers of the group
        (("simulate.gpus=16384",), 128, 0),
    ],
)
def test_units_that_save_no_pass_are_spares_as_in_a_run(settings: tuple[str, ...], units: int, spares: int) -> None:
    job = job_of(configured("+cluster=h100x16384", *settings))
    assert (job.units, job.spares) == (units, spares)


@pytest.mark.parametrize(
    "arguments",
    [
        ("+cluster=h100x64", "optim.num_slices=56"),
        ("+cluster=h100x64", "cluster.max_workers=72"),
        ("+cluster=h100x64", "optim.num_slices=420", "optim.global_batch_seqs=420"),  # 60 ranks
        ("+cluster=h100x2048", "optim.num_slices=2024", "optim.global_batch_seqs=2024"),  # two replicas of 256 units
        ("+cluster=h100x16384", "cluster.min_workers=16200"),
        ("+cluster=h100x16384", "cluster.spare_workers=256"),
        ("+cluster=h100x16384", "parallel.pp=0"),
    ],
)
def test_units_and_spares_are_those_that_the_run_forms(arguments: tuple[str, ...]) -> None:
    """As `jobs.plan` has them at full size; a last node that is not full is one too."""
    config = configured(*arguments)
    made, _ = settled(config)
    full = forecasts(made, gpu_of(made, config.plan), network_of(made, config.plan))[-1]
    job, beyond = job_of(config), num_beyond(config.cluster)
    assert (job.gpus, job.unit_gpus) == (full.mesh.world_size, full.mesh.world_size // full.batch.world_size)
    assert job.spares == (full.num_workers + beyond) // 8 - math.ceil(full.mesh.world_size / 8)
    speed, _ = speeds(job)
    assert (speed[-1], speed[job.nodes]) == (1.0, 1.0)
    assert job.min_units == math.ceil(config.cluster.min_workers / job.unit_gpus)


def test_a_group_never_parks_below_its_fewest_workers() -> None:
    job = job_of(configured("+cluster=h100x2048", "cluster.min_workers=2048"))
    assert (job.gpus, job.spares, job.min_units) == (2048, 0, 512)
    job = job_of(configured("+cluster=h100x16384", "cluster.min_workers=16200"))  # 126 units hold 16,128
    assert (job.units, job.spares, job.min_units) == (128, 0, 127)  # two replicas of 64, where 127 units would be one


def test_a_group_of_exactly_the_fewest_units_trains_and_a_smaller_one_does_not() -> None:
    for units in range(1, 141):
        for least in range(1, units + 1):
            speed, _ = speeds(Job(8 * units, 8, 4 * units, min_units=least))
            assert speed[least] > 0, (units, least)
            assert speed[least - 1] == 0, (units, least)
    half, _ = speeds(Job(8 * 25, 8, 100))
    assert (half[12], half[13] > 0) == (0, True)


def test_a_step_and_what_lies_between_snapshots_are_forecast_for_the_size_that_is_given() -> None:
    """They were those of the cluster's file: half of the step that 32 of its 64 GPUs take."""
    for settings, gpus, slices in (
        (("simulate.gpus=32",), 32, 448),
        (("simulate.gpus=128", "simulate.num_slices=448"), 128, 448),
        (("simulate.num_slices=896",), 64, 896),  # twice the batch
    ):
        config = configured("+cluster=h100x64", *settings)
        found = inputs("+cluster=h100x64", *settings)
        made, _ = settled(config)
        sized = replace(made, optim=replace(made.optim, num_slices=slices, global_batch_seqs=slices))
        full = forecast(sized, gpus, gpu_of(sized, config.plan), network_of(sized, config.plan))
        assert found["step_s"] == pytest.approx(full.time.step_s, rel=0.05)
        assert found.figures["step_s"].source == "jobs.plan's forecast"
        assert found["snapshot_every_steps"] == full.commits.every_steps
    half, whole = (inputs("+cluster=h100x64", *each)["step_s"] for each in (("simulate.gpus=32",), ()))
    assert half > 1.8 * whole
    other = inputs("+cluster=h100x64", "simulate.unit_gpus=8")
    assert (other["step_s"], other.figures["step_s"].source[:11]) == (5.0, "no forecast")
    assert other["snapshot_every_steps"] == 4.0


def test_what_lies_between_snapshots_is_what_a_loss_costs_and_none_cost_what_was_trained_since_a_checkpoint() -> None:
    """Every step, the forecast's distance, 100 steps, and checkpoints alone, which come after 500."""
    found = {}
    for said in ("1", "auto", "100", "0"):
        given = inputs("+cluster=h100x98304", "simulate.days=20", f"snapshot.every_steps={said}")
        found[said] = given, float(estimate(given, 8).effective.mean())
    effective = [each for _, each in found.values()]
    assert effective == sorted(effective, reverse=True)
    assert len(set(effective)) == 4
    config = settled(configured("+cluster=h100x98304"))[0]
    full = forecasts(config, gpu_of(config, config.plan), network_of(config, config.plan))[-1]
    figures = {said: given.figures["snapshot_every_steps"] for said, (given, _) in found.items()}
    assert [figures[said].value for said in ("1", "auto", "100")] == [1, full.commits.every_steps, 100]
    assert full.commits.every_steps > 1
    assert (figures["auto"].low, figures["auto"].high) == (1, 16)
    without = found["0"][0]
    assert (without.policy.memory, found["1"][0].policy.memory) == (False, True)
    assert without["snapshot_interval_s"] == pytest.approx(500 * without["step_s"])
    assert "checkpoint.every_steps" in without.figures["snapshot_interval_s"].source
    assert total(estimate(without, 4)) == pytest.approx(without.days * DAY)


def test_snapshots_k_steps_apart_cost_half_of_these_and_their_lag_a_loss_whatever_k_is() -> None:
    job, rate = Job(16384, 128, 2048, spares=200), 3.789e-3
    for apart in (1.0, 8.0):
        given = bare(job, **rates(gpu=rate), step_s=6.0, snapshot_every_steps=apart, lost_committed_steps=0.5,
                     away_short_s=3600.0, away_short_share=1.0)  # fmt: skip
        lost = 1 - float(estimate(given, 64).effective.mean())
        assert lost == pytest.approx(2048 * rate / DAY * 6.0 * (apart / 2 + 0.5), rel=0.03)


def test_a_host_that_computed_wrong_comes_back_unless_a_policy_keeps_it_out() -> None:
    """As in a run, where it is in quarantine for an hour, not for good: verifying took four incidents of five away."""
    given = ("+cluster=h100x64", "simulate.days=20", "simulate.figures.rate_head=0")
    found = {}
    for name, settings in (
        ("noticed", ()),
        ("verified", ("cluster.verify_every_steps=100",)),
        ("kept out", ("cluster.verify_every_steps=100", "simulate.policy.in_place.expels_corrupt=true")),
    ):
        of_one = replace(
            inputs(*given, *settings).with_values(**rates(sdc=0.5), rate_planned=0.0, share_slow=0.0), known=True
        )
        assert of_one.policy.expels_corrupt == (name == "kept out")
        found[name] = float(estimate(of_one, 16).generations.mean())
    assert found["verified"] == found["noticed"] > 20
    assert found["kept out"] < 0.5 * found["verified"]


def test_slow_nodes_that_are_left_are_away_as_long_as_a_run_keeps_them_out() -> None:
    settings = ("simulate.days=5", "simulate.figures.share_slow=0.25", "simulate.faults.per_node_day=0.5")
    for seconds, asked in ((3600.0, ()), (900.0, ("cluster.quarantine_s=900",))):
        given = inputs("+cluster=h100x64", *settings, *asked)
        assert given.figures["slow_away_s"].source == "cluster.quarantine_s"
        slow = [each for each in drawn(given, 0) if each.kind == "slow"]
        assert {each.away_s for each in slow} == {seconds}


def test_reference_worlds_have_a_snapshot_of_each_step_whatever_is_configured() -> None:
    for world in ("today", "next"):
        given = inputs("+cluster=h100x98304", "snapshot.every_steps=0", f"simulate/world={world}")
        assert (given.policy.memory, given["snapshot_every_steps"]) == (True, 1.0)


@pytest.mark.parametrize(("nodes", "spares", "lost_at"), [(1, 0, 1), (1, 1, 2), (2, 0, 2), (4, 0, 4), (64, 0, 20)])
def test_no_more_copies_are_counted_on_than_there_are_nodes_for(nodes: int, spares: int, lost_at: int) -> None:
    """A node that is the only one takes what is in memory with it; a process leaves that where it is."""
    size = f"simulate.gpus={8 * nodes}", "simulate.unit_gpus=1", f"simulate.spares=[{spares}]"
    given = inputs("+cluster=h100x64", *size, "simulate.gpus_per_node=8", "simulate.num_slices=512", "simulate.days=2")
    assert given.policy.copies_lost_at == lost_at

    def redone(kind: str) -> float:
        return estimate_given(given, [Fault(20_000.0, kind, 0.5, notice_s=3.0, away_s=600.0)]).seconds("redo", kind)

    assert given["durable_back_s"] > 10 * given["step_s"]
    more = redone("gpu") - redone("software")
    assert (more > given["durable_back_s"] / 2) == (lost_at == 1)


def test_drained_nodes_cost_work_where_nothing_is_told_before_they_go() -> None:
    """Under `restart` they are losses like those of a GPU, under the others they are left in good order."""
    for each in inputs_of(configured("+cluster=h100x64", "simulate.days=2")):
        taken = [Fault(20_000.0 * number, "drain", 0.5, notice_s=60.0, away_s=600.0) for number in range(1, 8)]
        drains, lost = estimate_given(each, taken), estimate_given(each, [replace(one, kind="gpu") for one in taken])
        told = each.policy.name != "restart"
        assert drains.seconds("redo", "drain") == (0.0 if told else lost.seconds("redo", "gpu"))
        assert lost.seconds("redo", "gpu") > 0


def test_a_stretch_that_is_drawn_says_what_each_group_took_back_of_which_as_a_runs_log_does() -> None:
    """Of several groups at once, as wrong results go unnoticed for longer than a group lasts: what was taken back
    included what lay between the groups, and their steps before the last one's were kept."""
    settings = ("+simulate.figures.rate_sdc=0.05", "simulate.figures.sdc_unnoticed_s=40000")
    of_several = 0
    for seed in range(12):
        rows, events = sample(inputs(*AT_16K, *settings), seed, 1000)
        steps = [row["step"] for row in rows]
        assert steps == sorted(set(steps))
        begun = {event.generation: event.time for event in of_kind(events, Generation)}
        rollbacks = of_kind(events, Rollback)
        for rollback in rollbacks:
            assert rollback.spans is not None
            assert rollback.steps == (rollback.from_step or 0) - (rollback.to_step or 0)
            for span in rollback.spans:
                assert begun[span["generation"]] - 1e-3 <= span["first_time"] < span["last_time"] <= rollback.time
            took = sum(span["last_time"] - span["first_time"] for span in rollback.spans)
            assert rollback.seconds == pytest.approx(took, abs=1.0)
            of_several += len(rollback.spans) > 1
        assert bool(rollbacks) is any(row["generation"] > 1 for row in rows)
    assert of_several


def test_spares_at_16384_gpus_are_worth_what_the_reference_found() -> None:
    """93.0, 95.8, 98.7 and 98.8% at 0, 8, 16 and 24 nodes, by a prototype of another hand."""
    curve = spares_curve(inputs(*AT_16K, "simulate/world=today"), [0, 8, 16, 24], 32, 0)
    assert [100 * each["effective"] for each in curve] == pytest.approx([93.0, 95.8, 98.7, 98.8], abs=0.5)


# where figures are from


def test_every_input_says_where_it_is_from_and_what_is_assumed_has_its_share_of_the_loss() -> None:
    for each in inputs_of(configured(*AT_16K)):
        assert all(figure.source for figure in each.figures.values())
        found = losses(estimate(each, 8))
        assert 0 < assumed_share(found) <= 1
        assert sum(loss.seconds for loss in found) > 0
    known = inputs(*AT_16K).figures
    exact = {name: replace(figure, origin=Origin.published) for name, figure in known.items()}
    assert assumed_share(losses(estimate(inputs(*AT_16K).override(exact), 4))) == 0


def test_a_figure_that_is_given_stands_whatever_the_settings_say_and_others_are_by_the_settings() -> None:
    settings = ("cluster.verify_every_steps=10", "cluster.drain_slow_s=60", "cluster.stuck_s=0")
    names = ("notice_hang_s", "slow_evict_s", "sdc_unnoticed_s", "verify_share")
    by_settings = inputs(*AT_16K, *settings).figures
    assert (by_settings["notice_hang_s"].value, by_settings["slow_evict_s"].value) == (600.0, 90.0)
    assert by_settings["notice_hang_s"].source == "train.collective_timeout_s"
    assert "cluster.stuck_s" in inputs(*AT_16K).figures["notice_hang_s"].source
    for name in names:
        given = f"simulate.policy.in_place.figures.{name}='0.5 (0.1 to 0.9) assumed: our clusters'"
        found = inputs(*AT_16K, *settings, given if name == "notice_hang_s" else "+" + given).figures
        assert found[name] == Figure(0.5, Origin.assumed, "our clusters", low=0.1, high=0.9)
        assert {other: found[other] for other in names if other != name} == {
            other: by_settings[other] for other in names if other != name
        }
    assert inputs(*AT_16K, *settings, "simulate.figures.sdc_unnoticed_s=77")["sdc_unnoticed_s"] == 77.0


def test_a_steps_time_and_rates_of_failures_that_are_given_stand_for_all_policies() -> None:
    """The forecast's and those of simulate.faults replaced them."""
    for name, value in (("step_s", 2.2), ("rate_gpu", 0.0), ("rate_planned", 0.25)):
        for each in inputs_of(configured("+cluster=h100x64", f"+simulate.figures.{name}={value}")):
            assert (each[name], each.figures[name].source) == (value, "given")
    assert inputs("+cluster=h100x64", "+simulate.policy.in_place.figures.step_s=3")["step_s"] == 3.0


def test_what_if_is_asked_of_what_runs_have_measured_and_of_the_range_of_what_is_assumed() -> None:
    asked = ("simulate.repair=3", "simulate.sdc=20")
    profile = Profile(runs=["runs/a"])
    profile.samples["away_short_s", "", 4] += [100.0] * 5
    profile.samples["sdc_unnoticed_s", "corrupted", 4] += [500.0] * 5
    of_runs, found = (inputs_of(configured(*AT_16K, *each), profile)[0] for each in ((), asked))
    assert (of_runs["away_short_s"], of_runs["sdc_unnoticed_s"]) == (100.0, 500.0)
    assert (found["away_short_s"], found["sdc_unnoticed_s"]) == (300.0, 20.0)
    assert found.figures["away_short_s"].samples == (300.0,) * 5
    before, after = (inputs(*AT_16K, *each).figures["away_long_s"] for each in ((), asked))
    assert (after.value, after.low, after.high) == tuple(3 * each for each in (before.value, before.low, before.high))


def test_what_is_lost_by_figure_adds_up_to_all_that_is_lost() -> None:
    for each in inputs_of(configured(*AT_16K, "simulate.days=20")):
        result = estimate(each, 8)
        lost = sum(loss.seconds for loss in losses(result))
        assert lost + float(result.useful_s.mean()) == pytest.approx(result.wall_s, rel=1e-6)
        assert sum(result.lost_s.values()) == pytest.approx(lost, rel=1e-6)


def test_the_interval_from_five_runs_covers_the_mean_of_others_and_shrinks_with_more_runs() -> None:
    """40 worlds of which the truth is known: rates from counts, a delay from samples."""
    base = bare(Job(16384, 128, 2048, spares=60), days=30.0, **rates(gpu=4e-3), notice_gpu_s=10.0, form_base_s=200.0,
                away_short_s=3600.0, away_short_share=1.0)  # fmt: skip
    exposure = 30.0 * base.job.nodes
    truth = estimate(base, 400, 77).effective
    rng = np.random.default_rng(5)

    def learnt(runs: int, seed: int) -> Inputs:
        count = int(rng.poisson(4e-3 * exposure * runs))
        samples = 200.0 * rng.lognormal(-0.125, 0.5, max(5, count))
        rate = rate_of(Figure(4e-3, Origin.published), count, exposure * runs, "runs")
        form = mixed(base.figures["form_base_s"], samples.tolist(), "runs")
        return replace(base.override({"rate_gpu": rate, "form_base_s": form}), known=False)

    covered, widths = 0, []
    for seed in range(40):
        low, high = interval(estimate(learnt(5, seed), 32, seed))
        others = float(rng.choice(truth, 35).mean())
        covered += low <= others <= high
        widths.append(high - low)
    assert 0.80 * 40 <= covered <= 0.99 * 40
    more = [np.subtract(*interval(estimate(learnt(40, seed), 32, seed))[::-1]) for seed in range(4)]
    assert np.mean(more) < 0.6 * np.mean(widths)


# use


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("simulate.gpus=100", "simulate.unit_gpus=8", "simulate.gpus_per_node=4"), "set simulate.gpus=96"),
        (("simulate.gpus=12", "simulate.gpus_per_node=8"), "12 GPUs are not whole nodes of 8"),
        (("simulate.gpus=64", "simulate.num_slices=64", "simulate.spares=[9]"), "simulate.spares=9: 0 to 8"),
        (("simulate.gpus=64", "simulate.num_slices=64", "simulate.spares=[8,-8]"), "simulate.spares=-8: 0 to 8"),
        (
            ("+cluster=h100x2048", "cluster.min_workers=2049"),
            "cluster.min_workers=2049 is above cluster.max_workers=2048",
        ),
        (("+cluster=h100x64", "parallel.tp=8", "plan.workers_per_node=4"), "must be a multiple of parallel.tp=8"),
        (("+cluster=h100x64", "parallel.tp=8", "simulate.gpus_per_node=4"), "must be a multiple of parallel.tp=8"),
        (("+cluster=h100x64", "optim.num_slices=7"), "optim.num_slices=7"),  # what jobs.pretrain refuses
        (("simulate.days=0",), "simulate.days=0.0 must be positive"),
        (("simulate.seed=-1",), "simulate.seed=-1 must be at least 0"),
        (("simulate.goal=98",), "simulate.goal=98.0 must be between 0 and 1, as 0.98"),
        (("simulate.figures.build_s=soon",), "simulate.figures.build_s='soon' is no figure; write a number"),
        (("+simulate.faults.mix.meteor=1",), "simulate.faults.mix.meteor=1.0: kinds are gpu, network"),
        (("simulate/faults=llama4",), "no simulate/faults called 'llama4'; available: llama3"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_fix(arguments: tuple[str, ...], words: str) -> None:
    done = call("simulate", "--json", *arguments, env=WITHOUT_RAY)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1, done.stderr
    assert words in done.stderr


@pytest.mark.parametrize("value", ["inf", "nan"])
@pytest.mark.parametrize("faults", ["llama3", "single"])
def test_numbers_are_finite(faults: str, value: str) -> None:
    """Infinite ones ended in a traceback, or in a run without an end."""
    config = configured("+cluster=h100x64", f"simulate/faults={faults}")
    simulate = config.simulate
    names = ("days", "repair", "evict", "sdc", "goal", "mtbf_s", "restart_s", "interval_s", "write_s")
    for name in names:
        found = replace(config, simulate=replace(simulate, **{name: float(value)}))
        with pytest.raises(ConfigError, match=rf"^simulate\.{name}={value} must be a finite number$"):
            inputs_of(found)
    mixed = replace(simulate, faults=replace(simulate.faults, mix={"gpu": float(value)}))
    with pytest.raises(ConfigError, match=rf"^simulate\.faults\.mix\.gpu={value} must be a finite number$"):
        inputs_of(replace(config, simulate=mixed))
    with pytest.raises(ConfigError, match=rf"^plan\.memory_gib={value} must be a finite number$"):
        inputs_of(replace(config, plan=replace(config.plan, memory_gib=float(value))))
    assert inputs_of(config)


def test_help_and_a_whole_study_import_neither_ray_nor_torch() -> None:
    for arguments in (["--help"], ["--json", "simulate.days=1", "simulate.replicas=2"]):
        code = (
            f"import sys, runpy; sys.argv = {['jobs.simulate', *arguments]!r}\n"
            "try: runpy.run_module('jobs.simulate', run_name='__main__')\n"
            "except SystemExit: pass\n"
            "print('HEAVY', sorted({'torch', 'ray'} & set(sys.modules)))"
        )
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert "HEAVY []" in done.stdout, done.stderr


@pytest.mark.parametrize("where", ["figures", "policy.in_place.figures", "own"])
def test_a_figure_that_there_is_not_is_refused_with_the_nearest_name(where: str) -> None:
    """Before, a mistyped one was taken and changed nothing."""
    said = rf"^simulate\.{where}\.verfiy_share: there is no such figure; did you mean 'verify_share'\?$"
    with pytest.raises(ConfigError, match=said):
        inputs_of(configured("+cluster=h100x64", f"+simulate.{where}.verfiy_share=0.01"))


def test_each_figure_that_may_be_given_is_one_that_a_simulation_has() -> None:
    assert {name for each in inputs_of(configured("+cluster=h100x64")) for name in each.figures} == FIGURES
