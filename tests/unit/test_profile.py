"""What runs' own logs say of a simulation's figures, each with its provenance; by hand-made run folders."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from regrow.errors import ConfigError
from regrow.simulate.faults import delays
from regrow.simulate.inputs import KINDS, Figure, Inputs, Job, Origin, Policy, mixed
from regrow.simulate.profile import MOST_SAMPLES, Profile, kept
from regrow.simulate.run_logs import RunLogs, faults_of
from support.rows import T0, event, generation, make_row, run_with_losses, workers, write

DAY = 86400.0
RATES = {f"rate_{kind}": Figure(0.002, Origin.published, "a paper", 100) for kind in KINDS}
PRIOR = {
    **RATES,
    "rate_planned": Figure(0.5, Origin.published, "a paper", 40),
    **{f"notice_{kind}_s": Figure(30.0, Origin.published, "a paper") for kind in KINDS},
    **{
        name: Figure(10.0, Origin.assumed, "a guess")
        for name in ("form_base_s", "build_s", "restore_s", "first_step_s", "join_s", "respawn_s", "away_short_s")
    },
    "restart_s": Figure(600.0, Origin.published, "a paper"),
    "communicators_s": Figure(17.0, Origin.published, "a paper"),
    "lost_committed_steps": Figure(0.2, Origin.assumed, "a guess"),
    "share_slow": Figure(0.05, Origin.assumed, "a guess"),
    "slow_factor": Figure(1.25, Origin.assumed, "a guess"),
    "slow_lasts_s": Figure(3600.0, Origin.assumed, "a guess"),
    "step_s": Figure(5.0, Origin.assumed, "a forecast"),
    "durable_back_s": Figure(1020.0, Origin.assumed, "a guess"),
}


def inputs(gpus: int = 4, **policy: Any) -> Inputs:
    return Inputs(Job(gpus, 1, max(12, gpus), 1), Policy("in_place", **policy), PRIOR)


def test_every_delay_is_there_by_its_cause_and_the_size_that_came_of_it(tmp_path: Path) -> None:
    found = Profile.read([run_with_losses(tmp_path / "a")])
    assert dict(found.counts) == {"software": 3, "planned": 0, "head": 0, "losses": 3, "lost_steps": 0, "slow": 0}
    assert found.usual_s == pytest.approx({4: 1.0, 3: 1.2})
    expected = {
        ("notice_software_s", "worker_died", 3): 2.5 - 0.5,  # half a step was done when it was struck
        ("form_base_s", "worker_died", 3): 3.0 - 1.0 - 0.5,
        ("build_s", "worker_died", 3): 0.5,
        ("restore_s", "worker_died", 3): 1.0,
        ("first_step_s", "worker_died", 3): 2.0 - 1.2,
        ("join_s", "grow", 4): 1.0,
        ("change_s", "worker_died", 3): 3.0,
        ("change_s", "grow", 4): 1.0,
        ("first_excess_s", "worker_died", 3): 0.8,
        ("respawn_s", "", 3): 8.0,
    }
    for key, seconds in expected.items():
        assert found.samples[key] == pytest.approx([seconds] * 3), key
    assert found.days == pytest.approx((found_wall(tmp_path / "a")) / DAY)
    gone_s = 3 * (6 + 5 * 1.2 + 2 - 6 + 1.0)  # three nodes, from each small group's beginning to the next one's
    whole_s = found.days * DAY - 10.0
    assert found.node_days * DAY == pytest.approx(4 * whole_s - gone_s)


def found_wall(folder: Path) -> float:
    run = RunLogs.read(str(folder))
    return run.ledger.end - run.ledger.begin


def test_what_was_measured_says_so_with_its_number_and_what_was_not_stays_what_it_was(tmp_path: Path) -> None:
    folder = run_with_losses(tmp_path / "a", losses=6)
    before = inputs()
    after = Profile.read([folder]).applied(before)
    form = after.figures["form_base_s"]
    assert (form.value, form.origin, form.n, form.source) == (pytest.approx(1.5), Origin.measured, 6, folder)
    assert form.samples == pytest.approx((1.5,) * 6)
    assert (after["step_s"], after.figures["step_s"].origin) == (1.0, Origin.measured)
    assert after["communicators_s"] == 0.0  # within form_base_s at a size that was measured
    assert after["lost_committed_steps"] == 0.0
    assert after.figures["lost_committed_steps"].n == 6
    software = after.figures["rate_software"]
    exposure = Profile.read([folder]).node_days
    assert software.value == pytest.approx((3 + 6) / (3 / 0.002 + exposure))
    assert after.figures["rate_gpu"] == before.figures["rate_gpu"]  # none is no news in so short a time
    for_long = Profile(days=100.0, node_days=6000.0).applied(before).figures["rate_gpu"]
    assert (for_long.value, for_long.origin) == (pytest.approx(3 / (3 / 0.002 + 6000.0)), Origin.measured)
    assert "6 in" in software.source
    assert "a paper" in software.source
    for name in ("notice_gpu_s", "durable_back_s", "away_short_s", "slow_factor"):
        assert after.figures[name] == before.figures[name]


def group_again(folder: Path, cause: str, *, at: float, back: int = 0, source: str = "checkpoint") -> str:
    """4 ranks, steps of 1 s: all end after step 120, at 130, and are ready `at`, with `back` steps to do again."""
    rows = [make_row(step, T0 + 10 + step, 1.0) for step in range(1, 121 - back)]
    rows += [make_row(step, T0 + at + step - 120 + back, 1.0, 2) for step in range(121 - back, 141)]
    span = {"from_step": 120, "to_step": 120 - back, "steps": back, "seconds": float(back)}
    events = [
        event("submitted", 0, min_workers=2, max_workers=4),
        generation(1, 10, 4, 0, "start", workers=workers(*"abcd")),
        event("failure", 130, cause=cause, detail="", generation=1),
        *([event("rollback", at - 1, generation=2, **span)] if back else []),
        generation(2, at, 4, 120 - back, cause, workers=workers(*"abcd"), source=source, recomputed_steps=back),
    ]
    return write(folder, rows, events)


def test_a_death_of_the_controller_is_a_restart_of_all_and_says_nothing_of_how_survivors_form(tmp_path: Path) -> None:
    folders = [run_with_losses(tmp_path / "a", losses=6), group_again(tmp_path / "b", "controller_died", at=156)]
    profile = Profile.read(folders)
    assert profile.of_figure("restart_s") == pytest.approx([26.0])
    assert profile.of_figure("change_s", cause="controller_died") == pytest.approx([26.0])
    found = profile.figures(PRIOR, 4)
    assert found["form_base_s"].value <= mixed(PRIOR["form_base_s"], [1.5] * 6, "").value
    assert found["restart_s"].value == pytest.approx((26.0 + 4 * 600.0) / 5)
    alone = Profile.read(folders[:1])
    for name in ("form_base_s", "build_s", "restore_s", "first_step_s"):
        assert profile.of_figure(name) == alone.of_figure(name)


@pytest.mark.parametrize("source", ["snapshot", "checkpoint"])
def test_work_that_was_wrong_is_no_loss_wherever_the_state_before_it_is_from(tmp_path: Path, source: str) -> None:
    deaths = run_with_losses(tmp_path / "a", losses=3)
    for cause, unnoticed in (("corrupted", [100.0]), ("nonfinite", [])):
        profile = Profile.read([deaths, group_again(tmp_path / cause, cause, at=133, back=100, source=source)])
        assert profile.of_figure("sdc_unnoticed_s") == unnoticed
        assert profile.of_figure("durable_back_s") == []
        assert (profile.counts["losses"], profile.counts["lost_steps"]) == (3, 0)
        assert profile.figures(PRIOR, 4)["lost_committed_steps"].value == 0.0


def test_without_a_run_folder_inputs_are_what_was_published_again(tmp_path: Path) -> None:
    folder = run_with_losses(tmp_path / "a")
    assert Profile.read([folder]).applied(inputs()) != inputs()
    assert Profile.read([]).applied(inputs()) == inputs()


def test_below_five_samples_what_was_published_is_mixed_in(tmp_path: Path) -> None:
    after = Profile.read([run_with_losses(tmp_path / "a", losses=3)]).applied(inputs())
    form = after.figures["form_base_s"]
    assert form.value == pytest.approx((3 * 1.5 + 2 * 10.0) / 5)
    assert (form.n, "2 of 5 from a guess" in form.source) == (3, True)


def test_below_five_samples_of_the_jobs_size_delays_are_drawn_with_the_mean_that_was_published() -> None:
    """Of 64 ranks one sample of 3 s, of 32 many: a mean of 24.6 s is what is drawn, and what a sweep stretches."""
    profile = Profile(runs=["runs/a"], usual_s={64: 6.0, 32: 6.0})
    profile.samples["notice_hang_s", "worker_hung", 64].append(3.0)
    profile.samples["notice_hang_s", "worker_hung", 32] += [1.0] * 9
    found = profile.applied(inputs(gpus=64))
    assert found["notice_hang_s"] == pytest.approx((3.0 + 4 * 30.0) / 5)
    uniform = np.linspace(0, 1, 1000, endpoint=False)
    for told, mean in ((found, found["notice_hang_s"]), (found.with_values(notice_hang_s=7.0), 7.0)):
        drawn = delays(told.figures["notice_hang_s"], told, np.zeros(1000), uniform)
        assert drawn.mean() == pytest.approx(mean)


def test_steps_that_losses_cost_are_counted_and_what_lies_between_snapshots_is_told_apart(tmp_path: Path) -> None:
    """Each loss took six steps back. With eight steps between snapshots 3.5 of them are these; with one, none."""
    told = {"before": 0, "commit_s": 2.0, "step_s": 1.0, "mtbf_s": 100.0, "steps_lost": 16}
    spacing = [event("snapshot_spacing", 0.5, every_steps=8, **told)]
    for name, every_steps, events, beyond in (
        ("a", 1, [], 6.0), ("b", 8, [], 2.5), ("c", "auto", spacing, 2.5), ("d", "auto", [], 6.0 - 1.5),
        ("e", 32, [], 0.0),
    ):  # fmt: skip
        folder = run_with_losses(tmp_path / name, losses=6, back=6, every_steps=every_steps, more=events)
        profile = Profile.read([folder])
        assert (profile.counts["losses"], profile.counts["lost_steps"]) == (6, 36)
        lost = profile.applied(inputs()).figures["lost_committed_steps"]
        assert (lost.value, lost.n) == (pytest.approx(beyond), 6), name
        again = Profile.of_json(profile.to_json())
        assert again.applied(inputs()).figures["lost_committed_steps"].value == lost.value


def test_at_another_size_a_delay_is_an_assumption_by_a_named_law_and_what_grows_stays(tmp_path: Path) -> None:
    profile = Profile.read([run_with_losses(tmp_path / "a", losses=6)])
    after = profile.applied(inputs(gpus=16_384))
    form = after.figures["form_base_s"]
    assert (form.origin, form.value) == (Origin.assumed, pytest.approx(1.5))
    assert "measured (6) on 3 and 4 ranks; law flat" in form.source
    assert (after["communicators_s"], after["step_s"]) == (17.0, 5.0)
    assert after.figures["rate_software"].origin == Origin.measured
    assert after.figures["respawn_s"].origin == Origin.measured  # of a node, however many there are


def test_other_policies_take_what_befalls_a_cluster_and_nothing_of_what_regrow_did(tmp_path: Path) -> None:
    profile = Profile.read([run_with_losses(tmp_path / "a", losses=6)])
    after = profile.applied(inputs(in_place=False, memory=False))
    assert after.figures["form_base_s"] == PRIOR["form_base_s"]
    assert after.figures["respawn_s"].origin == Origin.measured
    assert after.figures["rate_software"] == profile.applied(inputs()).figures["rate_software"]


def test_a_second_run_adds_to_the_first(tmp_path: Path) -> None:
    one, two = run_with_losses(tmp_path / "a", losses=2), run_with_losses(tmp_path / "b", losses=3, detect_s=3.5)
    both = Profile.read([one, two])
    assert both.counts["software"] == 5
    assert both.samples["notice_software_s", "worker_died", 3] == pytest.approx([2.0] * 2 + [3.0] * 3)
    assert both.node_days == pytest.approx(Profile.read([one]).node_days + Profile.read([two]).node_days)


def test_a_step_of_several_runs_is_weighted_by_their_steps_however_many_and_in_whatever_order(tmp_path: Path) -> None:
    """More of them than samples are kept; a profile that was read from its file goes on as the one that wrote it."""
    folders = [
        write(
            tmp_path / name,
            [make_row(step, T0 + step * step_s, step_s) for step in range(1, count + 1)],
            [event("submitted", 0), generation(1, 0, 4, 0, "start")],
        )
        for name, count, step_s in (("a", 1200, 1.0), ("b", 400, 2.0))
    ]
    for order in (folders, folders[::-1]):
        assert Profile.read(order).usual_s == pytest.approx({4: 1.25})
    again = Profile.of_json(Profile.read(folders).to_json())
    assert again.rows == Profile.read(folders).rows == {4: 1600}
    content = json.loads(again.to_json())
    del content["rows"]  # as an earlier version wrote it
    assert Profile.of_json(json.dumps(content)).rows == {4: MOST_SAMPLES}


def test_run_folders_of_earlier_versions_are_read_by_their_causes(tmp_path: Path) -> None:
    found = Profile.read([run_with_losses(tmp_path / "a", losses=2, new=False)])
    assert found.counts["software"] == 2
    assert len(found.samples["respawn_s", "", 4]) == 2  # to where the group grew again


def test_a_process_whose_node_is_found_dead_soon_after_was_its_host(tmp_path: Path) -> None:
    failure = event(
        "failure", 20, cause="worker_died", detail="", generation=1, ranks=[1], nodes=["b"], kind="software"
    )
    told_again = event("failure", 21, cause="worker_died", detail="", generation=1, ranks=[1], nodes=["b"])
    lost = event("node_lost", 25, node="b", host="b", drained=False)
    rows = [make_row(step, T0 + step, 1.0) for step in range(1, 10)]
    write(tmp_path / "a", rows, [event("submitted", 0), failure, told_again, lost])
    assert [kind for _, kind in faults_of(RunLogs.read(str(tmp_path / "a")).history.events)] == ["host"]


def test_a_process_whose_node_lived_on_was_not_its_host_though_that_is_dead_soon_after(tmp_path: Path) -> None:
    def failure(at: float, number: int, rank: int = 1) -> dict[str, Any]:
        what = {"cause": "worker_died", "detail": "", "generation": number, "ranks": [rank], "kind": "software"}
        return event("failure", at, nodes=["b"], **what)

    lost = event("node_lost", 75, node="b", host="b", drained=False)
    ready = event("ready", 30, node="b", host="b", ranks=1, start_s=8.0, generation=2)
    rows = [make_row(step, T0 + step, 1.0) for step in range(1, 10)]
    for name, events, kinds in (
        ("a", [failure(20, 1), ready, failure(55, 2), lost], ["software", "host"]),
        ("b", [failure(20, 1), failure(55, 2), lost], ["software", "host"]),
        ("c", [failure(20, 1), ready, lost], ["software"]),
        ("d", [failure(54, 1), failure(55, 1, rank=2), lost], ["host"]),  # both processes of a dead node
    ):
        run = RunLogs.read(write(tmp_path / name, rows, [event("submitted", 0), *events]))
        assert [kind for _, kind in faults_of(run.history.events)] == kinds, name


def test_a_slow_rank_that_recovered_says_how_much_and_how_long(tmp_path: Path) -> None:
    rows = [make_row(step, T0 + step, 1.0) for step in range(1, 200)]
    slow = {"kind": "slow_compute", "node": "b", "pid": 7, "rank": 1, "since": T0 + 30.0}
    events = [
        event("submitted", 0),
        event("suspected", 50, factor=1.4, detail="", **slow),
        event("cleared", 110, recovered=True, **slow),
        event("suspected", 150, factor=1.6, detail="", **slow),
        event("cleared", 160, recovered=False, **slow),  # its group was over: it may have lasted longer
    ]
    found = Profile.read([write(tmp_path / "a", rows, events)])
    assert found.of_figure("slow_lasts_s") == [80.0]
    assert found.of_figure("slow_factor") == [1.4, 1.6]
    assert found.counts["slow"] == 2


def test_a_profile_is_a_file_and_keeps_at_most_256_samples_of_a_key(tmp_path: Path) -> None:
    profile = Profile.read([run_with_losses(tmp_path / "a")])
    profile.samples["form_base_s", "worker_died", 3] = [float(n) for n in range(1000)]
    again = Profile.of_json(profile.to_json())
    assert len(again.samples["form_base_s", "worker_died", 3]) == MOST_SAMPLES == 256
    assert again.to_json() == profile.to_json()
    assert kept(list(range(1000)))[:2] == [0, 3]
    assert '"provenance": "measured (256)"' in profile.to_json(PRIOR, 4)
    with pytest.raises(ConfigError, match=r"no profile\.json"):
        Profile.of_json("{}")


def test_a_folder_without_a_step_ends_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no step in its log: give the folder of a run that trained"):
        Profile.read([write(tmp_path / "a", [], [event("submitted", 0)])])


def test_a_folder_without_events_ends_in_one_line_that_names_them(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no event in its log: copy its events\.jsonl beside metrics\.jsonl"):
        Profile.read([write(tmp_path / "a", [make_row(1, T0 + 1, 1.0)], [])])


def test_a_profile_is_made_without_ray_and_torch() -> None:
    code = "import sys, regrow.simulate.profile; sys.exit(len({'ray', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
