"""A run that regrow's own Control decides in virtual time: one definition of goodput, and the estimate's figures."""

from dataclasses import replace

import pytest

from regrow.config.check import topologies
from regrow.config.schema import PretrainConfig
from regrow.record.history import History
from regrow.show.report import build_report
from regrow.simulate.estimate import estimate, estimate_given
from regrow.simulate.faults import Fault, drawn
from regrow.simulate.inputs import Figure, Inputs
from regrow.simulate.play import BEGIN, Played, play
from regrow.simulate.report import page_of, sweep
from regrow.simulate.study import compare
from regrow.simulate.world import inputs_of, job_of, settled_for, verify_share
from support.simulating import AT_16K, configured, on_64_nodes, rates, some_faults
from support.simulating import inputs as configured_inputs


def test_rows_and_events_of_two_hours_account_for_the_players_own_figures() -> None:
    inputs, config = on_64_nodes(step_s=10.0)
    faults = some_faults(24, 300.0, 5)
    played = play(inputs, config, faults, wall_s=7200.0)
    report = _report(played, config)
    assert report["goodput"] == pytest.approx(played.goodput, abs=1e-3)
    assert report["wall_s"] == pytest.approx(7200.0)
    for cause in {*report["lost_s"], *played.lost_s}:
        difference = report["lost_s"].get(cause, 0.0) - played.lost_s.get(cause, 0.0)
        assert abs(difference) < 0.005 * 7200, cause
    assert played.productive_s + sum(played.lost_s.values()) == pytest.approx(7200.0, abs=2 * 10.0)  # a step begun
    assert len({row["step"] for row in played.log.rows}) == len(played.log.rows) == played.steps


def test_a_played_group_shrinks_takes_spares_and_grows_only_where_a_step_becomes_shorter() -> None:
    inputs, config = on_64_nodes(step_s=30.0, spares=0)
    played = play(inputs, config, some_faults(12, 1800.0, 2), wall_s=6 * 3600.0)
    groups = [event for event in played.log.events if event.name == "generation"]
    sizes = [event.to_row()["world_size"] for event in groups]
    causes = [event.to_row()["cause"] for event in groups]
    assert sizes[0] == 64
    assert min(sizes) < 64
    passes = [-(-1024 // size) for size in sizes]
    for before, after, cause in zip(passes, passes[1:], causes[1:], strict=False):
        assert cause != "grow" or after < before


@pytest.mark.long
def test_play_and_estimate_agree_within_a_tenth_of_a_point_over_a_thousand_faults_at_64_nodes() -> None:
    inputs, config = on_64_nodes(step_s=30.0)
    faults = some_faults(1000, 900.0, 3)
    wall_s = faults[-1].at + 3600.0
    played, estimated = _both(inputs, config, faults, wall_s)
    assert 100 * played.effective == pytest.approx(100 * estimated.effective[0], abs=0.1)
    assert 100 * played.goodput == pytest.approx(100 * estimated.goodput[0], abs=0.1)
    for cause, seconds in played.lost_s.items():
        assert 100 * seconds / wall_s == pytest.approx(100 * estimated.lost_s.get(cause, 0.0) / wall_s, abs=0.1), cause


def test_play_and_estimate_see_the_same_of_some_faults() -> None:
    """A hundred of them; a step in progress when the run ends, and two nodes of a rack, tell at this length."""
    inputs, config = on_64_nodes(step_s=60.0)
    faults = some_faults(100, 900.0, 4)
    played, estimated = _both(inputs, config, faults, faults[-1].at + 3600.0)
    assert 100 * played.effective == pytest.approx(100 * estimated.effective[0], abs=0.4)
    assert 100 * played.goodput == pytest.approx(100 * estimated.goodput[0], abs=0.4)


@pytest.mark.parametrize(("apart", "lag"), [(8, 0.5), (1, 3.5), (4, 6.0)])
def test_play_and_estimate_lose_as_many_steps_where_snapshots_lie_apart_or_are_committed_late(
    apart: int, lag: float
) -> None:
    """Of a hundred faults; both engines take back half of the steps between snapshots, and the lag."""
    inputs, config = on_64_nodes(step_s=20.0)
    inputs = inputs.with_values(snapshot_every_steps=apart, lost_committed_steps=lag)
    faults = [replace(each, unnoticed_s=0.0, nodes=1) for each in some_faults(100, 900.0, 4)]
    wall_s = faults[-1].at + 3600.0
    played, estimated = _both(inputs, config, faults, wall_s)
    lost = [event.to_row() for event in played.log.events if event.name == "rollback"]
    assert sum(each["seconds"] for each in lost) / wall_s > 0.01
    assert 100 * played.effective == pytest.approx(100 * estimated.effective[0], abs=0.4)
    assert 100 * played.goodput == pytest.approx(100 * estimated.goodput[0], abs=0.4)


def test_faults_that_are_drawn_can_be_played_and_are_those_of_the_estimate() -> None:
    inputs, config = on_64_nodes(step_s=60.0)
    given = {**rates(gpu=0.5, software=0.5, hang=0.1), "away_short_s": 1800.0, "away_short_share": 1.0}
    inputs = replace(inputs.with_values(**given, notice_gpu_s=5.0, notice_hang_s=60.0), days=0.5)
    faults = drawn(inputs, 4)
    assert len(faults) > 20
    assert [each.at for each in faults] == sorted(each.at for each in faults)
    varied = drawn(replace(inputs, spread=0.5).with_values(share_slow=0.2), 4)
    assert len({each.vary for each in varied}) > 20
    assert {each.lasts_s for each in varied if each.kind != "slow"} == {0.0}
    played, estimated = play(inputs, config, faults, wall_s=43200.0), estimate(inputs, 1, 4)
    assert 100 * played.effective == pytest.approx(100 * estimated.effective[0], abs=0.4)


def test_both_engines_count_what_verifications_cost_and_the_settings_decide_it() -> None:
    """Of a step of 16 micro-batches one more in each tenth; nothing else befalls it."""
    inputs, config = on_64_nodes(step_s=30.0)
    inputs = inputs.override({"verify_share": Figure(1 / 160)})
    played, estimated = _both(inputs, config, [], 36000.0)
    assert estimated.effective[0] == pytest.approx(160 / 161)
    assert played.effective == pytest.approx(160 / 161, abs=0.002)
    assert estimated.goodput[0] == pytest.approx(1.0)
    cluster = ("+cluster=h100x16384", "model=405b")  # 16 micro-batches, and 15/4 of one that its pipeline takes to fill
    assert configured_inputs(*cluster)["verify_share"] == 0.0
    found = configured_inputs(*cluster, "cluster.verify_every_steps=100")["verify_share"]
    assert found == pytest.approx(1 / (100 * (16 + 15 / 4)))


def test_what_verifications_cost_is_a_pass_of_the_slices_that_the_run_settles() -> None:
    """All seven of a unit in one, where nothing is said of them: a step is twice as long each tenth time."""
    cluster, verified = ("+cluster=h100x64", "model=1b"), "cluster.verify_every_steps=10"
    assert configured_inputs(*cluster, verified)["verify_share"] == pytest.approx(1 / 10)
    assert configured_inputs(*cluster, verified, "parallel.slices_per_pass=1")["verify_share"] == pytest.approx(1 / 70)
    of_half = configured_inputs(*cluster, verified, "simulate.gpus=32")  # two passes of seven
    assert of_half["verify_share"] == pytest.approx(1 / 20)
    no_such_units = configured_inputs(*cluster, verified, "simulate.unit_gpus=8")  # 8 units have 56 slices each
    assert no_such_units["verify_share"] == pytest.approx(1 / 560)


def test_what_verifications_cost_a_pipeline_is_the_same_whether_its_stages_are_asked_for_or_settled() -> None:
    cluster = ("+cluster=h100x16384", "model=405b", "cluster.verify_every_steps=100")
    asked, left = configured(*cluster), configured(*cluster, "parallel.pp=0", "parallel.least_pp=0")
    assert asked.parallel.pp == 16
    job = job_of(asked)
    shares = [verify_share(each, job, settled_for(each, job)) for each in (asked, left)]
    assert shares == pytest.approx([1 / (100 * (16 + 15 / 4))] * 2)


def test_what_is_assumed_of_communicators_covers_the_longest_axis_of_a_cluster_that_is_shipped() -> None:
    """By NCCL's law for as many ranks: `conf/simulate/scale/axes.yaml` says so."""
    cluster = ("+cluster=h100x98304", "model=405b")
    longest = max(max(each.mesh.axes.values()) for each in topologies(configured(*cluster)).values())
    assert longest == 1535
    assert configured_inputs(*cluster, "simulate/scale=nccl").communicators_s(longest) == pytest.approx(0.7, abs=0.05)
    assert configured_inputs(*cluster).communicators_s(98304) == 1.0


OTHERS = [
    *(Fault(1800.0 + 7200.0 * at, "slow", 0.013 * at, away_s=900.0, lasts_s=2700.0, excess=0.4) for at in range(40)),
    *(Fault(5000.0 + 43000.0 * at, "stop", 0.0) for at in range(6)),
    *(Fault(30000.0 + 90000.0 * at, "head", 0.0) for at in range(3)),
]  # fmt: skip


def _with_others() -> tuple[Inputs, PretrainConfig, list[Fault]]:
    inputs, config = on_64_nodes(step_s=30.0)
    values = {"slow_evict_s": 1800.0, "stop_fixed_s": 300.0, "restart_s": 600.0}
    inputs = inputs.override({name: Figure(value) for name, value in values.items()})
    return inputs, config, sorted([*some_faults(60, 4800.0, 7), *OTHERS], key=lambda each: each.at)


def test_play_and_estimate_see_the_same_of_slow_nodes_planned_stops_and_deaths_of_the_head() -> None:
    inputs, config, faults = _with_others()
    wall_s = 130000.0
    played, estimated = _both(inputs, config, faults, wall_s)
    assert 100 * played.effective == pytest.approx(100 * estimated.effective[0], abs=0.2)
    assert 100 * played.goodput == pytest.approx(100 * estimated.goodput[0], abs=0.2)
    for cause in ("resume", "drain"):
        assert estimated.lost_s[cause] > 300.0
        assert 100 * played.lost_s[cause] / wall_s == pytest.approx(100 * estimated.lost_s[cause] / wall_s, abs=0.2), (
            cause
        )
    slow_s = played.productive_s - played.steps * 30.0
    assert 100 * slow_s / wall_s == pytest.approx(
        100 * sum(float(estimated.idle[state][0]) for state in ("slow", "shrunk")) / wall_s, abs=0.2
    )


def test_the_ledger_of_a_run_that_was_submitted_anew_accounts_for_the_players_own_figures() -> None:
    inputs, config, faults = _with_others()
    played = play(inputs, config, faults, wall_s=60000.0)
    report = _report(played, config)
    assert report["goodput"] == pytest.approx(played.goodput, abs=1e-3)
    for cause in {*report["lost_s"], *played.lost_s}:
        difference = report["lost_s"].get(cause, 0.0) - played.lost_s.get(cause, 0.0)
        assert abs(difference) < 0.005 * 60000, cause
    assert [row["step"] for row in played.log.rows] == list(range(1, played.steps + 1))
    submitted = [event for event in played.log.events if event.name == "submitted"]
    assert len(submitted) == 1 + 2 + 1  # as submitted at first, two stops, a death of the head


def test_a_slow_node_that_stays_is_left_for_a_spare_and_comes_back_as_another_one() -> None:
    inputs, config = on_64_nodes(step_s=30.0, spares=1)
    inputs = inputs.override({"slow_evict_s": Figure(600.0)})
    slow = [Fault(100.0 + 2600.0 * at, "slow", 0.5, away_s=1200.0, lasts_s=9000.0, excess=1.0) for at in range(2)]
    played, estimated = _both(inputs, config, slow, 6000.0)
    steps_s = [(row["time"] - BEGIN, row["step_s"]) for row in played.log.rows]
    assert all(step_s == pytest.approx(60.0) for at, step_s in steps_s if 200.0 < at < 700.0 or 2800.0 < at < 3300.0)
    assert all(step_s == pytest.approx(30.0) for at, step_s in steps_s if 900.0 < at < 2700.0)
    groups = [event.to_row() for event in played.log.events if event.name == "generation"]
    assert [(each["cause"], each["world_size"]) for each in groups] == [("start", 64), ("drain", 64), ("drain", 64)]
    assert steps_s[-1][1] == pytest.approx(30.0)
    assert estimated.generations.tolist() == [2]
    assert 100 * played.effective == pytest.approx(100 * estimated.effective[0], abs=1.0)


def test_a_slow_node_for_which_no_spare_waits_stays_until_it_is_as_fast_as_before() -> None:
    """As in a run, whether there is none or it is away."""
    slow = Fault(100.0, "slow", 0.5, away_s=1200.0, lasts_s=3000.0, excess=1.0)
    lost = Fault(50.0, "gpu", 0.2, away_s=2000.0)
    for spares, faults, changes in ((0, [slow], 0), (1, [lost, slow], 1)):
        given, config = on_64_nodes(step_s=30.0, spares=spares)
        given = given.override({"slow_evict_s": Figure(600.0)})
        played, estimated = _both(given, config, faults, 6000.0)
        assert [event.name for event in played.log.events].count("generation") == 1 + changes
        assert estimated.generations.tolist() == [changes]
        assert float(estimated.idle["slow"][0]) == pytest.approx(1500.0)
        steps_s = [(row["time"] - BEGIN, row["step_s"]) for row in played.log.rows]
        assert all(step_s == pytest.approx(60.0) for at, step_s in steps_s if 200.0 < at < 3000.0)
        assert steps_s[-1][1] == pytest.approx(30.0)


@pytest.mark.parametrize("others", [0.5, 0.7])
def test_nodes_whose_notices_overlap_are_all_left_in_good_order(others: float) -> None:
    """The same one, told of twice, or two."""
    inputs, config = on_64_nodes(step_s=10.0, spares=0)
    drains = [Fault(12.0, "drain", 0.5, away_s=1e6), Fault(13.0, "drain", others, away_s=1e6)]
    played = play(inputs, config, drains, wall_s=300.0)
    events = [event.to_row() for event in played.log.events]
    groups = [(each["cause"], each["world_size"]) for each in events if each["event"] == "generation"]
    assert groups == [("start", 64), ("drain", 63 if others == 0.5 else 62)]
    assert not [each for each in events if each["event"] == "failure"]


def test_the_page_holds_all_parts_in_one_file_that_fetches_nothing() -> None:
    config = configured(*AT_16K, "simulate.days=6", "simulate.replicas=4")
    results = compare(inputs_of(config), 4, 0)
    page = page_of(config, results, sweep(config, results)).render()
    for part in (
        "Policies, under",
        "What in_place loses",
        "Spare nodes",
        "What moves it",
        "leaves each phase",
        "Inputs",
    ):
        assert part in page, part
    assert "arXiv:2407.21783" in page
    assert "improve first: " in page
    assert "<script" not in page
    assert "://" not in page.replace("http://www.w3.org/2000/svg", "")


def _report(played: Played, config: object) -> dict:
    history = History.of_logs(played.log.rows, played.log.events)
    return build_report(history, history.ledger(played.end), config)  # type: ignore[arg-type]


def _both(inputs, config, faults, wall_s):  # type: ignore[no-untyped-def]
    estimated = estimate_given(replace(inputs, days=wall_s / 86400), faults)
    return play(inputs, config, faults, wall_s=wall_s), estimated
