"""Plans of faults and finished runs played again: by profiles whose every sample is the same, computed by hand here."""

import json
from pathlib import Path
from typing import Any

import pytest
from jobs.simulate import main

from regrow.config.plain import to_yaml
from regrow.config.schema import PretrainConfig
from regrow.drill.faults import DEAD_MOUNT, KINDS, SLOW_RANK, WORKER
from regrow.errors import ConfigError
from regrow.record.events import Generation
from regrow.record.log import encode
from regrow.simulate.profile import Profile
from regrow.simulate.replay import (
    BY_ITS_EVENTS,
    OF_DRILL,
    Compared,
    Outcome,
    Planned,
    PlanPlayer,
    Prediction,
    plan_of_drill,
    plan_of_run,
    planned,
    predict,
    replay,
)
from regrow.simulate.run_logs import RunLogs
from support.rows import T0, event, generation, make_row, run_with_losses, workers, write
from support.simulating import configured


def profile(**samples: float) -> Profile:
    """Steps of 1 s on 4 ranks, 1.2 s on 3, 0.1 s of each for a snapshot."""
    made = Profile(runs=["made up"])
    made.steps.update({4: [(1.0, 0.0, 0.1)], 3: [(1.2, 0.0, 0.1)], 2: [(1.5, 0.0, 0.1)]})
    made.usual_s.update({4: 0.9, 3: 1.1, 2: 1.4})
    given = {"cold_start_s": 10.0, "change_s": 2.0, "respawn_s": 8.0, "start_s": 8.0} | samples
    for name, seconds in given.items():
        cause = "worker_died" if name in ("change_s", "notice_software_s") else ""
        made.samples[name, cause, 4].append(seconds)
    made.samples["change_s", "grow", 4] += [0.5] * 3
    made.samples["change_s", "worker_died", 4] += [given["change_s"]] * 2
    return made


def config() -> PretrainConfig:
    made = PretrainConfig()
    made.cluster.min_workers, made.cluster.max_workers, made.optim.num_slices = 2, 4, 12
    made.cluster.quarantine_failures = 0
    return made


def test_a_run_without_faults_is_its_start_and_its_steps() -> None:
    found = predict(profile(), config(), [], last_step=50, plays=2)
    assert found.mean.wall_s == pytest.approx(10.0 + 50 * 1.0, abs=0.1)
    assert found.mean.ratios["goodput"] == pytest.approx((50 * 1.0 - 49 * 0.1) / 60, abs=0.003)
    assert found.mean.lost == pytest.approx({"start": 10 / 60}, abs=0.003)
    assert found.sd.wall_s == pytest.approx(0.0, abs=0.1)


def test_a_lost_worker_costs_its_notice_the_forming_slower_steps_and_the_growing() -> None:
    """Struck in step 21; 1.5 s unnoticed, 2 s to form; 3 ranks until it is back 8 s after it was noticed, and 2 s for
    control to see that no other comes; at the next step's end the group grows, in 0.5 s."""
    plan = [Planned(20, "software")]
    found = predict(profile(notice_software_s=1.5), config(), plan, last_step=100, plays=30, seed=3)
    small = (8.0 + 2.0 - 2.0) / 1.2  # steps of the small group, and the one in which it is asked to leave
    extra = 0.5 + 1.5 + 2.0 + small * 0.2 + 0.5
    assert found.mean.wall_s == pytest.approx(110.0 + extra, abs=1.0)
    assert found.mean.generations == 3
    assert found.mean.lost["worker_died"] * found.mean.wall_s == pytest.approx(0.5 + 1.5 + 2.0, abs=0.5)
    assert found.mean.lost["grow"] * found.mean.wall_s == pytest.approx(0.5, abs=0.1)
    assert found.mean.ratios["effective"] < found.mean.ratios["goodput"]


def test_a_lost_node_stays_away_until_the_plan_brings_another() -> None:
    away = predict(profile(), config(), [Planned(20, "host")], last_step=60, plays=3)
    after = [Planned(20, "host"), Planned(30, "return_node"), Planned(50, "host"), Planned(55, "software")]
    assert predict(profile(), config(), after, last_step=80, plays=3).mean.generations >= 5
    back = predict(profile(), config(), [Planned(20, "host"), Planned(30, "return_node")], last_step=60, plays=3)
    assert (away.mean.generations, back.mean.generations) == (2, 3)
    assert "grow" not in away.mean.lost
    assert back.mean.ratios["capacity_goodput"] > away.mean.ratios["capacity_goodput"]


def test_results_that_were_wrong_are_done_again_from_as_long_before_as_they_went_unseen() -> None:
    made, plan = profile(), [Planned(40, "sdc")]
    none = predict(made, config(), plan, last_step=60, plays=3).mean
    made.samples["sdc_unnoticed_s", "corrupted", 3] += [20.0] * 3
    found = predict(made, config(), plan, last_step=60, plays=3).mean
    assert found.lost_steps == pytest.approx(none.lost_steps + 20, abs=1)


def test_a_drained_node_is_left_in_good_order_before_it_goes() -> None:
    plan = [Planned(20, "drain", deadline_s=15.0)]
    found = predict(profile(), config(), plan, last_step=60, plays=3).mean
    assert (found.generations, found.lost_steps) == (2, 0)
    assert set(found.lost) == {"start", "drain"}


def test_the_same_seed_plays_the_same_and_another_one_does_not() -> None:
    made = profile(notice_software_s=1.5)
    made.samples["change_s", "worker_died", 4] += [1.0, 5.0, 9.0]
    plan = [Planned(step, "software") for step in (20, 50, 80)]
    one, again, other = (predict(made, config(), plan, last_step=120, plays=3, seed=seed) for seed in (1, 1, 2))
    assert one == again != other
    assert Prediction.of_dict(json.loads(json.dumps(one.to_dict()))) == one


def test_faults_of_drills_are_the_simulators_kinds_and_those_that_take_no_rank_are_left_out(tmp_path: Path) -> None:
    assert planned("kill_node", 5) == Planned(5, "host")
    assert planned("drain_node", 5, {"deadline_s": 12.0}) == Planned(5, "drain", deadline_s=12.0)
    assert planned("kill_coordinator", 5) is None
    lines = [{"record": "job started"}, {"record": "fault", "kind": "kill_worker", "step": 7, "number": 0}]
    lines.append({"record": "fault", "kind": "look", "step": 9, "number": 1})
    (tmp_path / "drill.jsonl").write_bytes(b"".join(map(encode, lines)))
    assert plan_of_drill(tmp_path) == [Planned(7, "software")]
    assert plan_of_drill(tmp_path / "none") == []


def test_faults_of_drills_are_played_with_what_they_say_or_by_what_came_of_them(tmp_path: Path) -> None:
    lines = [
        {"record": "fault", "kind": kind, "step": 7, "number": 0} for kind in ("hang_validation", "partition_node")
    ]
    notice = "drain_node rank=1 deadline_s=60"
    lines.append({"record": "fault", "kind": "drain_node", "what": notice, "step": 9, "number": 2})
    (tmp_path / "drill.jsonl").write_bytes(b"".join(map(encode, lines)))
    assert plan_of_drill(tmp_path) == [
        Planned(7, "hang"),
        Planned(7, "network"),
        Planned(9, "drain", deadline_s=60.0),
    ]
    lines.append({"record": "fault", "kind": "drain_all", "what": "drain_all", "step": 11, "number": 3})
    (tmp_path / "drill.jsonl").write_bytes(b"".join(map(encode, lines)))
    assert plan_of_drill(tmp_path) == []


def test_a_victim_that_went_on_once_it_was_continued_is_no_loss(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = []

    def fault(number: int, what: str, **notes: dict[str, Any]) -> None:
        kind = what.partition(" ")[0]
        lines.append({"record": "fault", "kind": kind, "what": what, "step": 10 * number, "number": number})
        for note, fields in notes.items():
            lines.append({"record": "note", "number": number, "what": note.replace("_", " "), **fields})

    fault(1, "black_hole_node continue_after_s=5", continued={"processes": 4}, looked_at_again={"processes": 4})
    gone = {"looked_at_again": {"processes": 2}, "node_gone": {"node": "a"}}
    fault(2, "black_hole_node continue_after_s=30", continued={"processes": 4}, **gone)
    fault(3, "black_hole_node kill_after_s=5", node_gone={"node": "b"})
    fault(4, "stop_worker continue_after_s=4", continued={"processes": 1}, looked_at_again={"processes": 1})
    fault(5, "stop_worker continue_after_s=60", continued={"processes": 0})
    fault(6, "stop_worker continue_after_s=29", continued={"processes": 1}, looked_at_again={"processes": 0})
    (tmp_path / "drill.jsonl").write_bytes(b"".join(map(encode, lines)))
    expected = [Planned(20, "network"), Planned(30, "network"), Planned(50, "hang"), Planned(60, "hang")]
    assert plan_of_drill(tmp_path) == expected


def with_config(folder: Path) -> str:
    (folder / "config.yaml").write_text(to_yaml(config()))
    return str(folder)


def test_a_finished_run_is_predicted_from_its_own_faults(tmp_path: Path) -> None:
    run_with_losses(tmp_path / "a", losses=6)
    found = replay(str(tmp_path / "a"), config(), plays=10)
    assert found.predicted.faults == 6
    assert abs(found.points["goodput"]) < 3.0
    assert abs(found.points["effective"]) < 3.0
    assert found.was.generations == found.predicted.mean.generations == 13
    assert all(agrees for *_, agrees in found.causes.values()), found.causes
    assert any("goodput" in line for line in found.lines())


def test_a_change_with_few_samples_is_not_drawn_from_restarts_of_all(tmp_path: Path) -> None:
    """Two deaths of 0.6 s each, and a resume of 32 s in between."""
    starts = {1: 10.0, 2: 30.6, 3: 92.0, 4: 112.6}
    rows = [
        make_row(20 * number - 20 + step, T0 + at + step, 1.0, number, world_size=3 if number in (2, 4) else 4)
        for number, at in starts.items()
        for step in range(1, 21)
    ]
    short = {"init_s": 0.4, "restore_s": 0.2, "source": "snapshot", "recomputed_steps": 0}
    events = [
        event("submitted", 0, min_workers=2),
        generation(1, starts[1], 4, 0, "start", workers=workers(*"abcd")),
        event("failure", 30, cause="worker_died", generation=1, ranks=[3], nodes=["d"], kind="software"),
        generation(2, starts[2], 3, 20, "worker_died", workers=workers(*"abc"), **short),
        event("submitted", 60, min_workers=2),
        generation(3, starts[3], 4, 40, "resume", workers=workers(*"abcd")),
        event("failure", 112, cause="worker_died", generation=3, ranks=[3], nodes=["d"], kind="software"),
        generation(4, starts[4], 3, 60, "worker_died", workers=workers(*"abc"), **short),
        event("stopped", 133, step=80, reason="finished"),
    ]
    made = Profile.read([write(tmp_path / "a", rows, events)])
    assert made.of_figure("change_s", cause="resume") == pytest.approx([32.0])
    plan = plan_of_run(RunLogs.read(str(tmp_path / "a")))
    assert len(plan) == 2
    for seed in range(20):
        player = PlanPlayer(made, config(), plan, last_step=80, seed=seed)
        player.outcome()
        later = [each.init_s for each in player.log.events if isinstance(each, Generation)][1:]
        assert later
        assert max(later) < 2.0


@pytest.mark.parametrize("every_steps", [1, 8, "auto"])
def test_a_run_that_lost_several_steps_at_a_time_is_predicted_to_lose_as_many(
    tmp_path: Path, every_steps: int | str
) -> None:
    run_with_losses(tmp_path / "a", losses=6, steps=30, back=6, every_steps=every_steps)
    found = replay(str(tmp_path / "a"), config(), plays=20)
    assert abs(found.points["goodput"]) < 3.0
    assert found.predicted.mean.lost_steps == pytest.approx(found.was.lost_steps, rel=0.2)
    assert found.was.lost_steps == 36


def ready(at: float, node: str) -> dict[str, Any]:
    return event("ready", at, node=node, host=node, ranks=1, start_s=8.0, generation=1)


def test_a_run_that_waited_for_a_node_is_predicted_with_that_node(tmp_path: Path) -> None:
    """Three nodes of four are lost in turn; each time the group waits 60 s for another one, too few without it."""
    rows, now, nodes = [], 10.0, list("abcd")
    events = [event("submitted", 0, min_workers=4), generation(1, now, 4, 0, "start", workers=workers(*nodes))]
    for number in range(1, 5):
        for step in range(20 * number - 19, 20 * number + 1):
            now += 1.0
            rows.append(make_row(step, T0 + now, 1.0, number))
        if number == 4:
            break
        gone, nodes = nodes[0], [*nodes[1:], f"e{number}"]
        failure = event("failure", now + 2, cause="worker_died", detail="", generation=number, ranks=[0], kind="host")
        events += [failure | {"nodes": [gone]}, event("node_lost", now + 2.5, node=gone, host=gone, drained=False)]
        events.append(ready(now + 62, nodes[-1]))
        now += 64.0
        details = {"init_s": 1.0, "restore_s": 1.0, "source": "snapshot", "recomputed_steps": 0}
        events.append(generation(number + 1, now, 4, 20 * number, "worker_died", workers=workers(*nodes), **details))
    events.append(event("stopped", now, step=80, reason="finished"))
    of_run = config()
    of_run.cluster.min_workers = 4
    found = replay(write(tmp_path / "a", rows, events), of_run, plays=3)
    assert found.predicted.mean.generations == found.was.generations == 4
    assert found.predicted.mean.wall_s == pytest.approx(found.was.wall_s, rel=0.05)


def test_nodes_of_another_cluster_that_a_run_goes_on_with_have_not_come_beside_the_first_ones(tmp_path: Path) -> None:
    """A new RayJob's nodes have new ids. Where it has more of them than there were, those came."""
    rows = [make_row(step, T0 + 10 + step, 1.0) for step in range(1, 21)]
    rows += [make_row(step, T0 + 100 + step, 1.0, 2) for step in range(21, 41)]
    events = [event("submitted", 0), generation(1, 10, 3, 0, "start", workers=workers(*"abc"))]
    events += [event("stopped", 31, step=20, reason="interrupted"), event("submitted", 90)]

    def plan(*nodes: str) -> list[str]:
        resumed = generation(2, 119, len(nodes), 20, "resume", workers=workers(*nodes))
        folder = write(tmp_path / "".join(nodes), rows, [*events, resumed])
        return [each.what for each in plan_of_run(RunLogs.read(folder))]

    assert plan("d", "e", "f") == plan("d", "e") == plan("a", "b", "c") == []
    assert plan("d", "e", "f", "g") == ["return_node"]


def test_a_run_that_goes_on_small_on_another_cluster_and_grows_has_no_more_nodes_than_there_were(
    tmp_path: Path,
) -> None:
    """Three nodes, then two others: the third of these is none beside three, a fourth is."""
    rows = [make_row(step, T0 + 10 + step, 1.0, 1 + (step - 1) // 20) for step in range(1, 61)]
    events = [
        event("submitted", 0),
        generation(1, 10, 3, 0, "start", workers=workers(*"abc")),
        event("submitted", 30.2),
    ]

    def group(number: int, at: float, nodes: str) -> dict[str, Any]:
        return generation(number, at, len(nodes), 20 * number - 20, "grow", workers=workers(*nodes))

    def plan(*later: dict[str, Any]) -> list[str]:
        folder = write(tmp_path / f"{len(list(tmp_path.iterdir()))}", rows, [*events, group(2, 30.5, "de"), *later])
        return [each.what for each in plan_of_run(RunLogs.read(folder))]

    assert plan(ready(40, "f"), group(3, 50.5, "def")) == plan(group(3, 50.5, "def")) == []  # earlier versions say none
    assert plan(ready(40, "f"), ready(41, "g"), group(3, 50.5, "defg")) == ["return_node"]
    assert plan(group(3, 50.5, "defg")) == ["return_node"]
    assert plan(event("submitted", 50.2), group(3, 50.5, "def")) == []
    assert plan(event("submitted", 50.2), group(3, 50.5, "defg")) == ["return_node"]


@pytest.mark.parametrize("behind_s", [60.0, 3600.0])
def test_a_profile_has_the_same_from_a_run_whose_second_jobs_clock_is_behind(tmp_path: Path, behind_s: float) -> None:
    """Its steps ended before its groups were ready: only these were moved behind the first job."""

    def profile(name: str, behind_s: float) -> Profile:
        rows = [make_row(step, T0 + 10 + step, 1.0) for step in range(1, 21)]
        rows += [make_row(step, T0 + 50 + step - behind_s, 1.0, 2) for step in range(21, 41)]
        rows += [make_row(step, T0 + 60 + step - behind_s, 1.0, 3, world_size=3) for step in range(41, 61)]
        events = [
            event("submitted", 0),
            generation(1, 10, 4, 0, "start", workers=workers(*"abcd")),
            event("submitted", 40 - behind_s, heard_at=T0 + 30),
            generation(2, 69 - behind_s, 4, 20, "resume", workers=workers(*"abcd")),
            event("failure", 93 - behind_s, cause="worker_died", generation=2, ranks=[3], nodes=["d"], kind="software"),
            generation(3, 99 - behind_s, 3, 40, "worker_died", workers=workers(*"abc")),
            event("stopped", 121 - behind_s, step=60, reason="finished"),
        ]
        return Profile.read([write(tmp_path / name, rows, events)])

    right, found = profile("right", 0.0), profile("behind", behind_s)
    assert sorted(found.samples) == sorted(right.samples)
    for key, values in right.samples.items():
        assert found.samples[key] == pytest.approx(values, abs=1e-5), key
    assert found.usual_s == pytest.approx(right.usual_s, abs=1e-5)


def test_a_run_that_started_small_and_grew_is_predicted_at_the_sizes_that_it_had(tmp_path: Path) -> None:
    rows, nodes, now, step = [], list("ab"), 10.0, 0
    events = [event("submitted", 0, min_workers=2), generation(1, now, 2, 0, "start", workers=workers(*nodes))]
    for number in range(1, 4):
        for _ in range(20):
            step, now = step + 1, now + 4 / len(nodes)
            rows.append(make_row(step, T0 + now, 4 / len(nodes), number, world_size=len(nodes)))
        if number < 3:
            nodes.append("cd"[number - 1])
            events += [
                ready(now - 1.0, nodes[-1]),
                generation(
                    number + 1, now, len(nodes), step, "grow", init_s=0.0, restore_s=0.0, workers=workers(*nodes)
                ),
            ]
    failure = event(
        "failure", now + 2, cause="worker_died", detail="", generation=3, ranks=[1], kind="sdc", nodes=["b"]
    )
    details = {"init_s": 1.0, "restore_s": 1.0, "source": "snapshot", "recomputed_steps": 0}
    nodes.remove("b")
    events += [failure, generation(4, now + 4, 3, step, "worker_died", workers=workers(*nodes), **details)]
    events += [ready(now + 16, "e"), generation(5, now + 17.33, 4, step + 10, "grow", workers=workers(*nodes, "e"))]
    for number, size in ((4, 3), (5, 4)):
        now = events[-2 if number == 4 else -1]["time"] - T0 if number == 5 else now + 4
        for _ in range(10):
            step, now = step + 1, now + 4 / size
            rows.append(make_row(step, T0 + now, 4 / size, number, world_size=size))
    events.append(event("stopped", now, step=step, reason="finished"))
    run = write(tmp_path / "a", rows, events)
    plan = plan_of_run(RunLogs.read(run))
    assert [each.what for each in plan] == ["return_node", "return_node", "sdc", "return_node"]
    found = replay(run, config(), plays=5)
    assert found.predicted.mean.generations == found.was.generations == 5
    assert found.predicted.mean.wall_s == pytest.approx(found.was.wall_s, rel=0.1)


def test_faults_that_leave_too_few_workers_for_good_are_one_line(tmp_path: Path) -> None:
    plan = [Planned(20, "host"), Planned(22, "host"), Planned(24, "host")]
    with pytest.raises(ConfigError, match=r"ends at step 2\d of 60: .*cluster\.min_workers=2.*return_node"):
        predict(profile(), config(), plan, last_step=60, plays=1)


def test_every_fault_that_takes_a_worker_or_a_node_is_played() -> None:
    """A slow worker is not taken."""
    takes = {name for name, kind in KINDS.items() if kind.nodes < 0 or kind.victim == WORKER}
    takes |= {"kill_controller", "partition_peer", DEAD_MOUNT}  # whose victims are workers, too
    assert takes - {SLOW_RANK, "slow_worker"} <= {*OF_DRILL, *BY_ITS_EVENTS}
    assert planned("partition_head", 5) == Planned(5, "network")


def test_restarts_of_the_whole_group_are_told_as_left_out(tmp_path: Path) -> None:
    causes = {12: "controller_died", 13: "controller_died", 14: "corrupted"}  # of which two replicas differ
    of_all = [event("failure", at, cause=cause, detail="", generation=1, ranks=[]) for at, cause in causes.items()]
    folder = run_with_losses(tmp_path / "a", losses=6, more=of_all)
    line = {"record": "fault", "kind": "kill_controller", "what": "kill_controller", "step": 2, "number": 0}
    worker = line | {"kind": "kill_worker", "what": "kill_worker", "step": 10, "number": 1}
    (tmp_path / "a" / "drill.jsonl").write_bytes(encode(line) + encode(worker))
    found = replay(folder, config(), plays=2)
    assert found.predicted.faults == 6  # by its events
    assert found.left_out == found.to_dict()["left_out"] == {"controller_died": 2, "corrupted": 1}
    assert "not played again, of all ranks at once: controller_died 2, corrupted 1" in found.lines()
    rows = [make_row(step, T0 + 10 + step, 1.0, 1 + (step > 5)) for step in range(1, 10)]
    resumed = [event("submitted", 16), generation(2, 16, 4, 5, "resume")]
    write(tmp_path / "b", rows, [event("submitted", 0), generation(1, 10, 4, 0, "start"), *resumed])
    with pytest.raises(ConfigError, match="had no faults but what is not played, resume 1: there is nothing to play"):
        replay(str(tmp_path / "b"), config())


def test_a_run_without_faults_is_refused_in_one_line(tmp_path: Path) -> None:
    rows = [make_row(step, T0 + 10 + step, 1.0) for step in range(1, 10)]
    write(tmp_path / "a", rows, [event("submitted", 0), generation(1, 10, 4, 0, "start")])
    with pytest.raises(ConfigError, match="had no faults: there is nothing to play again"):
        replay(str(tmp_path / "a"), config())


def test_causes_agree_within_a_point_and_a_half_of_wall_time_or_a_third() -> None:
    def outcome(**lost: float) -> Outcome:
        return Outcome(100.0, {"goodput": 0.9}, lost, 3, 0)

    predicted = Prediction(outcome(a=0.02, b=0.13, c=0.001), outcome(), 1, "p")
    found = Compared(predicted, outcome(a=0.03, b=0.10, d=0.02)).causes
    assert {name: agrees for name, (_, _, agrees) in found.items()} == {"a": True, "b": True, "c": True, "d": False}


def test_the_command_takes_run_folders_and_says_what_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, other = run_with_losses(tmp_path / "a", losses=6), run_with_losses(tmp_path / "b", losses=6)
    small = ["simulate.gpus=4", "simulate.gpus_per_node=1", "simulate.num_slices=12", "simulate.replicas=4"]
    small += ["simulate.days=1", "simulate.sweep=false", "simulate/policy=[in_place]", f"simulate.out={tmp_path}/out"]
    main(configured(*small, f"simulate.runs=[{folder},{other}]"), as_json=False)
    figures = json.loads((tmp_path / "out" / "profile.json").read_text())["figures"]
    assert figures["form_base_s"]["provenance"] == "measured (12)"
    assert figures["rate_software"]["provenance"].startswith("measured")
    assert figures["notice_network_s"]["provenance"] == "published"
    assert "effective" in capsys.readouterr().out


def test_what_was_measured_once_is_swept_over_what_it_may_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    folder = run_with_losses(tmp_path / "a", losses=1)
    small = ["simulate.gpus=4", "simulate.gpus_per_node=1", "simulate.num_slices=12", "simulate.replicas=4"]
    small += ["simulate.days=1", "simulate/policy=[in_place]", "simulate.out='~/out'"]
    main(configured(*small, f"simulate.runs=[{folder}]"), as_json=False)
    assert "effective" in capsys.readouterr().out
    assert (tmp_path / "home" / "out" / "simulate.html").exists()


def test_the_command_plays_a_finished_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_with_losses(tmp_path / "a", losses=6)
    folder = with_config(tmp_path / "a")
    main(configured(f"simulate.replay={folder}"), as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert (found["run"], found["predicted"]["faults"]) == (folder, 6)
    assert abs(found["points"]["goodput"]) < 3.0
    main(configured(f"simulate.replay={folder}"), as_json=False)
    assert "6 faults, 20 plays" in capsys.readouterr().out
