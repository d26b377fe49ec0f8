"""The verdict of a drill: a run that kept every promise passes, and each promise broken by itself is found."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from regrow.drill.verdict import AGAIN, Checkpoint, Evidence, Verdict, judge, outcomes

Row = dict[str, Any]

STEPS, BORN, STEP_S = 60, 1000.0, 0.5  # the job is submitted at 1000
KILLED_AT, BACK_AT, GROWN_AT = 20, 24.0, 40  # step of the fault; seconds after submission; step of the regrowth


def workers(*pids: int) -> list[Row]:
    return [{"node": f"node{pid % 100}", "pid": pid, "host": "here"} for pid in pids]


def row(step: int, generation: int, time: float) -> Row:
    return {
        "step": step,
        "tokens_seen": step * 1536,
        "loss": 8.0 - step / 20,
        "step_s": STEP_S,
        "data_wait_s": 0.01,
        "snapshot_s": 0.02,
        "world_size": 2 if generation == 2 else 3,
        "generation": generation,
        "batch_digest": f"{step:016x}",
        "time": time,
    }


def evidence() -> Evidence:
    """Three ranks; one is killed after step 20, which is lost with it; from step 40 on there are three again."""
    rows, time = [], BORN + 10.0
    for step in range(1, STEPS + 1):
        if step == KILLED_AT:
            time = BORN + BACK_AT  # step 20 was done twice
        if step == GROWN_AT + 1:
            time += 2.0
        time += STEP_S
        rows.append(row(step, 1 if step < KILLED_AT else 2 if step <= GROWN_AT else 3, time))
    generation: Row = {"event": "generation", "source": "snapshot", "recomputed_steps": 0}
    events: list[Row] = [
        {"event": "submitted", "time": BORN, "max_workers": 3},
        {"event": "forming", "generation": 1, "time": BORN + 8, "members": workers(101, 102, 103)},
        generation
        | {"generation": 1, "time": BORN + 10, "cause": "start", "workers": workers(101, 102, 103), "world_size": 3},
        {"event": "failure", "generation": 1, "time": BORN + 21.5, "cause": "worker_died", "ranks": [1], "detail": ""},
        {"event": "rollback", "generation": 2, "time": BORN + 23, "steps": 1, "first_time": BORN + 20, "last_time": 1},
        generation
        | {"generation": 2, "time": BORN + BACK_AT, "cause": "worker_died", "workers": workers(101, 103)}
        | {"world_size": 2, "recomputed_steps": 1},
        generation
        | {"generation": 3, "time": rows[GROWN_AT]["time"] - 0.5, "cause": "grow", "workers": workers(101, 103, 204)}
        | {"world_size": 3},
        {"event": "stopped", "time": rows[-1]["time"] + 1.0, "step": STEPS, "reason": "finished"},
    ]
    useful, wall_s = STEPS * (STEP_S - 0.03), events[-1]["time"] - BORN
    fault = {
        "record": "fault",
        "number": 0,
        "kind": "kill_worker",
        "what": "kill_worker rank=1",
        "time": BORN + 21,
        "step": KILLED_AT,
        "world_size": 3,
        "victims": [{"what": "worker", "rank": 1, "pid": 102, "node": "node2"}],
    }
    return Evidence(
        rows=rows,
        events=events,
        records=[
            {"record": "job started", "time": BORN, "why": "start"},
            fault,
            {"record": "job ended", "time": events[-1]["time"], "status": 0, "unexpected": False, "detail": ""},
            {"record": "left", "where": "", "found": []},
        ],
        num_faults=1,
        last_step=STEPS,
        most_lost=1,
        seqs_per_step=12,
        tokens_per_step=1536,
        digests=[f"{step:016x}" for step in range(1, STEPS + 1)],
        reference=[row(step, 1, 0.0) for step in range(1, STEPS + 1)],
        compared_steps=50,
        names=[
            "metrics.jsonl",
            "checkpoints/step-00000060/COMMIT",
            "checkpoints/step-00000060/g000003-25770fc1-0.safetensors",
            "checkpoints/step-00000060/g000003-25770fc1.metadata",
        ],
        keys=["model/layers.0.attention.wq.weight"],
        checkpoints=[Checkpoint(60, 720, "")],
        bands=[(BORN, BORN + 20, "productive"), (BORN + 20, BORN + 24, "down"), (BORN + 24, BORN + 60, "productive")],
        report={
            "goodput": useful / wall_s,
            "effective": useful / wall_s,
            "time_s": {"productive": useful, "init": wall_s - useful},
        },
    )


def broken(verdicts: list[Verdict]) -> list[Verdict]:
    return [verdict for verdict in verdicts if verdict.holds is False]


def test_a_run_that_kept_every_promise_is_said_to_have() -> None:
    verdicts = judge(evidence())
    assert [verdict.holds for verdict in verdicts] == [True] * len(verdicts), broken(verdicts)
    assert [verdict.promise for verdict in verdicts if verdict.promise] == [
        "1",
        "1",
        "2",
        "3",
        "4",
        "5",
        "6",
        "8",
        "8",
        "8",
        "8",
    ]
    figures = " ".join(verdict.figures for verdict in verdicts)
    assert "60 of 60 digests equal" in figures
    assert "50 compared" in figures
    assert "1 steps lost over 1 failures" in figures
    assert "4 times a rank kept its process" in figures


def test_a_host_that_is_named_after_a_worker_breaks_no_promise() -> None:
    """TensorBoard has the host's name in its files'; a folder of regrow's would still be found."""
    for host, holds in (("worker-3", True), ("rank1.rack-2", True), ("here", True)):
        given = evidence()
        names = [*given.names, f"tensorboard/events.out.tfevents.1700000000.{host}.4711.0"]
        assert [each.holds for each in judge(replace(given, names=names)) if each.promise == "3"] == [holds]
    names = [*given.names, "tensorboard/rank-3/events.out.tfevents.1700000000.here.4711.0"]
    assert [each.holds for each in judge(replace(given, names=names)) if each.promise == "3"] == [False]


def test_what_came_of_a_fault_is_told() -> None:
    given = evidence()
    (outcome,) = outcomes(given.records, given.rows, given.events)
    assert (outcome.ranks_before, outcome.ranks_after, outcome.lost_steps, outcome.source) == (3, 2, 1, "snapshot")
    assert outcome.seconds == pytest.approx(BACK_AT + STEP_S - 21)


def test_a_fault_that_nobody_noticed_brought_about_nothing() -> None:
    given = evidence()
    fault = next(line for line in given.records if line["record"] == "fault") | {"time": BORN + 30, "number": 1}
    outcome = outcomes([*given.records, fault], given.rows, given.events)[1]
    assert (outcome.ranks_after, outcome.seconds, outcome.generation) == (None, None, None)


def test_faults_at_once_bring_about_one_group() -> None:
    given = evidence()
    (fault,) = (line for line in given.records if line["record"] == "fault")
    other = fault | {"number": 1, "what": "kill_worker rank=2", "time": fault["time"] + 0.1, "when": "at once"}
    found = outcomes([*given.records, other], given.rows, given.events)
    assert [(each.generation, each.lost_steps) for each in found] == [(2, 1)] * 2


def test_what_came_of_a_fault_is_known_when_its_rows_are_taken_back_later() -> None:
    given = evidence()
    rows = [row for row in given.rows if row["generation"] != 2]
    assert outcomes(given.records, rows, given.events)[0].seconds is None
    recorded = {"record": "outcome", "number": 0, "seconds": 3.5}
    assert outcomes([*given.records, recorded], rows, given.events)[0].seconds == 3.5


def test_a_node_that_comes_is_answered_by_the_group_that_grows() -> None:
    given = evidence()
    came = {"record": "fault", "number": 1, "kind": "return_node", "what": "return_node", "time": BORN + 25}
    came |= {"step": 25, "world_size": 2, "victims": []}
    outcome = outcomes([*given.records, came], given.rows, given.events)[1]
    assert outcome.ranks_after == 3
    assert outcome.seconds == pytest.approx(given.rows[GROWN_AT]["time"] - BORN - 25)


@pytest.mark.parametrize(
    ("stopped_at", "woken_at", "start_step", "holds"),
    [
        (9, None, 9, True),  # 11 steps were trained without a snapshot
        (9, 21.2, 9, True),  # before the death was noticed
        (9, 20.5, 9, True),
        (9, 19.5, 9, False),  # it ran again before the worker died
        (9, None, 6, False),  # older than what it had
        (15, None, 9, False),
    ],
)
def test_steps_that_were_trained_while_a_keeper_was_stopped_are_not_held_against_snapshots(
    stopped_at: int, woken_at: float | None, start_step: int, holds: bool
) -> None:
    """A drill on a busy machine had a worker killed in the tenth second of a stopped keeper: 17 steps, as promised."""
    given = events_with("generation", 1, recomputed_steps=20 - start_step, start_step=start_step)(evidence())
    stop = {"record": "fault", "number": 1, "kind": "stop_keeper", "what": "stop_keeper", "step": stopped_at}
    records = [
        *given.records,
        stop | {"time": BORN + 15, "world_size": 3, "victims": [{"what": "keeper", "node": "node3", "pid": 9}]},
    ]
    if woken_at is not None:
        records.append({"record": "note", "number": 1, "what": "continued", "time": BORN + woken_at, "processes": 1})
    (found,) = (each for each in judge(replace(given, records=records)) if "costs at most" in each.claim)
    assert found.holds is holds, found.details


Change = Callable[[Evidence], Evidence]


def rows_with(index: int, **changes: Any) -> Change:
    def change(given: Evidence) -> Evidence:
        rows = [dict(each) for each in given.rows]
        rows[index] |= changes
        return replace(given, rows=rows)

    return change


def events_with(name: str, number: int, **changes: Any) -> Change:
    def change(given: Evidence) -> Evidence:
        events = copy.deepcopy(list(given.events))
        [event for event in events if event["event"] == name][number].update(changes)
        return replace(given, events=events)

    return change


def report_with(**changes: Any) -> Change:
    return lambda given: replace(given, report={**given.report, **changes})


def unnamed_standstill(given: Evidence) -> Evidence:
    return replace(given, bands=[(BORN, BORN + 21, "productive"), (BORN + 21, BORN + 24, "other")])


def without(field: str, index: int) -> Change:
    return lambda given: replace(
        given, **{field: [each for number, each in enumerate(getattr(given, field)) if number != index]}
    )


def adding(field: str, *what: Any) -> Change:
    return lambda given: replace(given, **{field: [*getattr(given, field), *what]})


FALSE_EVICTION = {
    "event": "failure",
    "generation": 2,
    "time": 1030.0,
    "cause": "worker_hung",
    "ranks": [1],
    "detail": "silent",
}


@pytest.mark.parametrize(
    ("change", "claim", "case"),
    [
        (rows_with(30, batch_digest="0" * 16), "batches are those of an undisturbed run", "step 31: 0000"),
        (rows_with(30, loss=6.4501), "fp32 losses", "step 31: differs by 1.00e-04"),
        (rows_with(30, loss=None), "fp32 losses", "step 31: differs by inf"),
        (without("rows", 30), "each step is there once", "line 31: step 32"),
        (rows_with(30, step=30), "each step is there once", "line 31: step 30"),
        (rows_with(30, tokens_seen=1), "each step is there once", "step 31 with 1 tokens"),
        (adding("checkpoints", Checkpoint(48, 575, "")), "each step is there once", "cursor 575"),
        (adding("names", "state/rank_3.json"), "named after a rank", "rank_3.json"),
        (adding("names", "shard-0-of-4.bin"), "named after a rank", "shard-0-of-4.bin"),
        (adding("names", "checkpoints/step-00000060/part-3.safetensors"), "named after a rank", "part-3"),
        (adding("keys", "model/wq.world2"), "named after a rank", "wq.world2"),
        (adding("checkpoints", Checkpoint(40, None, "header damaged")), "can be restored", "step 40: header damaged"),
        (events_with("generation", 1, workers=workers(101, 999)), "survivors keep", "pid 103, is gone"),
        (rows_with(59, generation=2), "older generation", "row of step 60 of generation 2 behind one of 3"),
        (events_with("rollback", 0, generation=0), "older generation", "rollback of generation 0 behind one of 1"),
        (report_with(time_s={"productive": 20.0}), "add up to wall time", "20.00 s"),
        (report_with(goodput=0.9), "goodput is the one", "reported 0.9000"),
        (report_with(effective=0.9), "effective is the one", "reported 0.9000"),
        (unnamed_standstill, "stands still for is named", "3.0 s of them are in 'other'"),
        (events_with("generation", 1, recomputed_steps=2), "costs at most", "generation 2 took back 2 steps"),
        (adding("events", FALSE_EVICTION), "no living process is taken for dead", "generation 2: worker_hung, silent"),
        (adding("records", {"record": "left", "found": ["memory regrow-x"]}), "left behind", "memory regrow-x"),
        (adding("records", {"record": "job ended", "unexpected": True, "detail": "boom"}), "goes on after", "boom"),
        (without("rows", 59), "goes on after", "step 59 of 60"),
        (lambda given: replace(given, num_faults=2), "goes on after", "1 of 2 faults so far"),
    ],
)  # fmt: skip
def test_a_broken_promise_is_found_by_its_own_rule(change: Change, claim: str, case: str) -> None:
    changed = change(evidence())
    found = [verdict for verdict in broken(judge(changed)) if claim in verdict.claim]
    assert len(found) == 1
    assert case in " ".join([found[0].figures, *found[0].details])


SLOW = {"event": "suspected", "kind": "slow_compute", "node": "node1", "pid": 101}


@pytest.mark.parametrize(
    ("calm", "change", "events"),
    [
        (range(21), {"world_size": 2}, []),
        (range(21), {}, []),  # each is a group's first one
        (range(21), {}, [SLOW | {"time": BORN + 60, "since": BORN + 21.5}]),
        (range(21), {}, [SLOW | {"time": BORN + 21.5}, SLOW | {"event": "cleared", "time": BORN + 60}]),
        (range(39, 60), {}, [SLOW | {"time": BORN}, SLOW | {"event": "cleared", "time": BORN + 39.5}]),
        (range(39, 60), {}, [SLOW | {"time": BORN}, {"event": "coordinator_restarted", "time": BORN + 39.5}]),
    ],
)
def test_steps_of_fewer_ranks_first_ones_and_slow_ones_are_no_measure_of_what_steps_are_worth(
    calm: range, change: Row, events: list[Row]
) -> None:
    """They are most of the run, and each takes four times as long."""
    rows = [row(step, 1, BORN + step) for step in range(1, STEPS + 1)]
    for number, each in enumerate(rows):
        if number not in calm:
            each |= change or ({} if events else {"generation": number})
            each["step_s"] = 4 * STEP_S
    submitted, stopped = ({"event": name, "time": at} for name, at in (("submitted", BORN), ("stopped", BORN + 61)))
    given = replace(
        evidence(),
        rows=rows,
        events=[submitted | {"max_workers": 3}, *events, stopped | {"step": STEPS, "reason": "finished"}],
        report={"goodput": 0.5, "effective": STEPS * (STEP_S - 0.03) / 61, "time_s": {}},
    )
    (verdict,) = [each for each in judge(given) if "effective is the one" in each.claim]
    assert verdict.holds, verdict


def test_a_rank_of_a_quarantined_node_may_leave_for_another_one() -> None:
    changed = events_with("generation", 1, workers=workers(101, 999))(evidence())
    events = list(changed.events)
    first, second, *_ = (number for number, event in enumerate(events) if event["event"] == "generation")
    left = next(worker for worker in events[first]["workers"] if worker["pid"] == 103)
    events.insert(
        second, {"event": "quarantine", "node": left["node"], "seconds": 3600.0, "time": events[second]["time"]}
    )
    details = [each for verdict in judge(replace(changed, events=events)) for each in verdict.details]
    assert not any("pid 103, is gone" in each for each in details), details


def test_losses_beyond_what_reduction_order_allows_are_reported_and_not_judged() -> None:
    verdicts = judge(rows_with(58, loss=1.05)(evidence()))
    assert broken(verdicts) == []
    assert "of the 10 beyond, which reduction order tells apart, 4.0e+00" in verdicts[1].figures


def test_what_has_no_reference_is_not_judged() -> None:
    verdicts = judge(replace(evidence(), reference=[]))
    assert [verdict.holds for verdict in verdicts].count(None) == 1
    assert broken(verdicts) == []


def test_nothing_to_judge_is_no_proof() -> None:
    nothing = replace(evidence(), rows=[], names=[], checkpoints=[], records=[])
    claims = {verdict.claim for verdict in broken(judge(nothing))}
    assert any("batches" in claim for claim in claims)
    assert any("left behind" in claim for claim in claims)
    assert any("can be restored" in claim for claim in claims)


def test_losing_both_copies_at_once_may_cost_more_steps() -> None:
    given = evidence()
    nodes = [
        {"record": "fault", "number": number, "kind": "kill_node", "what": "kill_node", "time": BORN + 21, "step": 20}
        | {"world_size": 3, "victims": []}
        for number in (1, 2)
    ]
    changed = events_with("generation", 1, recomputed_steps=15, source="checkpoint")(adding("records", *nodes)(given))
    claims = [verdict.claim for verdict in broken(judge(changed))]
    assert not any("costs at most" in claim for claim in claims)


@pytest.mark.parametrize("took_back", [15, 45])
def test_a_death_while_the_run_goes_back_for_a_corruption_does_not_make_that_cost_too_much(took_back: int) -> None:
    """The group is named after what came last, and goes back to what was verified for what came before."""
    changed = events_with("generation", 1, recomputed_steps=took_back)(replace(evidence(), verify_every=10))
    died = next(event for event in changed.events if event["event"] == "failure")
    corrupted = {**died, "cause": "corrupted", "time": died["time"] - 0.1}
    found = adding("events", corrupted)(changed)
    found = replace(found, events=sorted(found.events, key=lambda each: each["time"]))
    claims = [verdict.claim for verdict in broken(judge(found))]
    assert any("costs at most" in claim for claim in claims) == (took_back > 2 * 10 + AGAIN)


def test_a_death_in_a_group_that_never_trained_is_put_down_to_its_members() -> None:
    forming = {"event": "forming", "generation": 2, "time": BORN + 22, "members": workers(101, 103)}
    died = {"event": "failure", "generation": 2, "time": BORN + 23, "cause": "worker_died", "ranks": [1], "detail": ""}
    given = evidence()
    events = [each for each in given.events if each.get("generation") != 2]
    found = judge(replace(given, events=sorted([*events, forming, died], key=lambda each: each["time"])))
    assert any("no living process is taken for dead" in verdict.claim for verdict in broken(found))


@pytest.mark.parametrize("cause", ["worker_died", "worker_hung", "node_silent"])
@pytest.mark.parametrize(
    ("kind", "victims", "is_explained"),
    [
        (None, [], False),
        ("kill_node", [{"what": "node", "node": "new"}], True),
        ("restart_raylet", [{"what": "node", "node": "new"}, {"what": "new node", "node": "newer"}], True),
        ("restart_raylet", [{"what": "node", "node": "node3"}, {"what": "new node", "node": "new"}], False),
    ],
)
def test_a_newcomer_is_lost_with_a_node_that_was_killed_or_restarted_and_for_nothing_else(
    kind: str | None, victims: list[Row], is_explained: bool, cause: str
) -> None:
    """It was in no group when its node went, and in the one that formed before its death was known."""
    members = [*workers(101, 103), {"pid": 104, "node": "new"}]
    fault = {"record": "fault", "number": 1, "kind": kind, "what": kind, "time": BORN + 21.5, "step": 20}
    fault |= {"world_size": 2, "victims": victims}
    forming = {"event": "forming", "generation": 2, "time": BORN + 22, "members": members}
    lost = {"event": "failure", "generation": 2, "time": BORN + 23, "cause": cause, "ranks": [2], "detail": ""}
    given = evidence()
    events = [each for each in given.events if each.get("generation") != 2]
    events = sorted([*events, forming, lost], key=lambda each: each["time"])
    found = judge(replace(given, events=events, records=[*given.records, *([fault] if kind else [])]))
    wrong = [each for each in broken(found) if "no living process is taken for dead" in each.claim]
    assert (not wrong) == is_explained


def test_a_rank_on_a_node_that_went_is_gone_with_it() -> None:
    """A node that came wrong, or that drained, goes later: the fault's victims were other processes, or none yet."""
    kept = evidence()
    fault = next(each for each in kept.records if each["record"] == "fault")
    fault["victims"] = [{"what": "new node", "node": "node9"}]
    fault["kind"] = "return_node_without_storage"
    assert {verdict.claim for verdict in broken(judge(kept))} == {
        "survivors keep their processes",
        "no living process is taken for dead",
    }
    gone = {"record": "note", "number": 0, "what": "node gone", "node": "node2"}
    late = replace(kept, records=[*kept.records, gone | {"time": BORN + 50}])
    assert len(broken(judge(late))) == 2, "it went after its rank was gone"
    assert broken(judge(replace(kept, records=[*kept.records, gone | {"time": BORN + 21}]))) == []


def test_a_keeper_that_stands_while_the_other_node_is_lost_is_both_copies_at_once() -> None:
    """Of a group on two nodes, whatever `snapshot.copies` asks for."""
    given = replace(evidence(), copies=2)
    stopped = {"record": "fault", "number": 1, "kind": "stop_keeper", "what": "stop_keeper", "time": BORN + 29}
    stopped |= {"step": 40, "world_size": 2, "victims": [{"what": "keeper", "pid": 5, "node": "node1"}]}
    killed = stopped | {"number": 2, "kind": "kill_node", "what": "kill_node", "time": BORN + 30}
    killed |= {"victims": [{"what": "node", "node": "node3"}]}
    lost = events_with("generation", 2, recomputed_steps=9)
    for faults, is_wrong in (((stopped, killed), False), ((killed,), True)):
        changed = lost(adding("records", *faults)(given))
        assert any("costs at most" in verdict.claim for verdict in broken(judge(changed))) == is_wrong


def test_a_raylet_that_comes_back_as_another_node_is_one_that_held_copies_and_not_two() -> None:
    """Its steps come from the other copy: more than one is too many, as for a node that dies."""
    given = evidence()
    fault = next(each for each in given.records if each["record"] == "fault")
    node, new = ({"what": what, "node": name} for what, name in (("node", "node2"), ("new node", "node9")))
    for kind, victims in (("restart_raylet", [node, *fault["victims"], new]), ("kill_node", [node, *fault["victims"]])):
        restarted = fault | {"kind": kind, "what": f"{kind} rank=1", "victims": victims}
        changed = replace(given, records=[restarted if each is fault else each for each in given.records])
        for steps, is_wrong in ((1, False), (2, True), (19, True)):
            found = broken(judge(events_with("generation", 1, recomputed_steps=steps, source="checkpoint")(changed)))
            assert any("costs at most" in verdict.claim for verdict in found) == is_wrong, (kind, steps)


def note(what: str, after_s: float, number: int = 0, **more: Any) -> Row:
    return {"record": "note", "number": number, "what": what, "time": BORN + 21 + after_s} | more


def healed(after_s: float) -> Row:
    return note("the network is whole again", after_s)


AGAIN_BLINKS = {"record": "fault", "number": 1, "kind": "blink_node", "what": "blink_node rank=1", "time": BORN + 24.5}
AGAIN_BLINKS |= {"step": 20, "world_size": 3, "victims": [{"what": "node", "node": "node2"}]}


@pytest.mark.parametrize(
    ("what", "records", "is_excused"),
    [
        ("slow_rank rank=1", [], False),
        ("slow_worker rank=1 for_s=15 share=0.66", [], False),
        ("slow_worker rank=1 for_s=15 share=0.66", [note("at its own speed", 15, longest_s=0.31)], False),
        ("slow_worker rank=1 for_s=15 share=0.66", [note("at its own speed", 40, longest_s=25.0)], True),
        ("slow_worker rank=1 for_s=15 period_s=4", [], True),
        ("blink_node rank=1", [], False),
        ("blink_node rank=1", [healed(4.1)], False),
        ("blink_node rank=1", [healed(25)], True),  # the drill itself was late
        ("blink_node rank=1 for_s=8", [], True),
        ("blink_node rank=1", [healed(4.1), AGAIN_BLINKS], True),  # for eight seconds at a stretch
        ("blink_node rank=1", [healed(2), AGAIN_BLINKS], False),
        ("blink_node rank=1", [healed(4.1), note("node gone", 60, node="node2", another="node8")], True),  # says Ray
        ("stop_worker rank=1 continue_after_s=4", [], True),
        ("kill_worker rank=1", [], True),
    ],
)
@pytest.mark.parametrize("cause", ["worker_died", "worker_hung", "node_silent"])
def test_a_worker_that_was_slow_or_away_for_a_moment_is_not_to_be_given_up(
    what: str, records: list[Row], is_excused: bool, cause: str
) -> None:
    given = events_with("failure", 0, cause=cause)(evidence())
    fault = next(each for each in given.records if each["record"] == "fault")
    fault |= {"kind": what.split()[0], "what": what}
    if fault["kind"] == "blink_node":
        fault["victims"] = [{"what": "node", "node": "node2"}, *fault["victims"]]
    claims = {verdict.claim for verdict in broken(judge(replace(given, records=[*given.records, *records])))}
    for claim in ("survivors keep their processes", "no living process is taken for dead"):
        assert (claim not in claims) == is_excused, claims


def test_a_failure_of_a_group_that_never_trained_is_not_put_down_to_a_rank_that_was_slow() -> None:
    for kind, is_excused in (("slow_worker", False), ("kill_worker", True)):
        given = events_with("failure", 0, ranks=[])(evidence())
        next(each for each in given.records if each["record"] == "fault").update(kind=kind, what=kind)
        claims = {verdict.claim for verdict in broken(judge(given))}
        assert ("no living process is taken for dead" not in claims) == is_excused


def damaged(rank: int, *others: Row) -> Evidence:
    """What rank 0's node holds of step 19 is damaged, its own part and a copy of rank 2's, and rank 1 killed; two are
    left and go on from step 19, the one on that node as this rank."""
    given = evidence()
    fault = next(each for each in given.records if each["record"] == "fault")
    axes = {"pp": 1, "dp_replicate": 1, "dp_shard": 3, "cp": 1, "tp": 1}
    files = ["g000001-a-1.slot", "g000001-c-1.slot.node3.copy"]
    snapshot = {"what": "snapshot", "node": "node1", "step": 19, "files": files, "ranks": [0, 2], "axes": axes}
    fault |= {"kind": "corrupt_snapshot", "what": "corrupt_snapshot rank=0", "victims": [snapshot, *fault["victims"]]}
    forming = {"event": "forming", "generation": 2, "time": BORN + 22, "members": workers(101, 103)}
    places = workers(*((101, 103) if rank == 0 else (103, 101)))
    group = {"start_step": 19, "axes": axes | {"dp_shard": 2}, "workers": places}
    given = adding("events", forming)(events_with("generation", 1, **group)(given))
    given = replace(given, records=[*given.records, *others])
    return replace(given, events=sorted(given.events, key=lambda each: each["time"]))


def refusal(name: str, **more: Any) -> Row:
    detail = f"node1/{name}: model/w fails its checksum"
    return {"event": "snapshot_damaged", "time": BORN + 23, "step": 19, "detail": detail} | more


def of_damage(given: Evidence) -> Verdict:
    (verdict,) = [each for each in judge(given) if "damaged in memory" in each.claim]
    return verdict


@pytest.mark.parametrize("name", ["g000001-a-1.slot", "g000001-c-1.slot.node3.copy"])
def test_damage_that_is_needed_and_refused_is_a_promise_kept(name: str) -> None:
    verdict = of_damage(adding("events", refusal(name))(damaged(0)))
    assert (verdict.holds, verdict.figures) == (True, "1 of 1 refused, 0 not come upon")
    assert broken(judge(evidence())) == []


@pytest.mark.parametrize(
    "events",
    [
        [],
        [refusal("g000001-a-1.slot", time=BORN + 20)],  # of damage before
        [refusal("g000001-a-1.slot", step=18)],
        [refusal("g000001-b-1.slot")],
        [refusal("a", detail="node1/g000001-a-1.slot: its keeper is gone")],
    ],
)
def test_damage_that_is_needed_and_taken_as_good_is_a_promise_broken(events: list[Row]) -> None:
    verdict = of_damage(adding("events", *events)(damaged(0)))
    assert (verdict.holds, verdict.details) == (False, ("fault 0: no rank said so",))


STOPPED = {"record": "fault", "number": 1, "kind": "stop_keeper", "what": "stop_keeper", "time": BORN + 15, "step": 9}
STOPPED |= {"world_size": 3, "victims": [{"what": "keeper", "pid": 7, "node": "node1"}]}


@pytest.mark.parametrize(
    "given",
    [
        events_with("generation", 1, start_step=20)(damaged(0)),  # a newer one was committed all the same
        events_with("generation", 1, source="checkpoint")(damaged(0)),  # what that costs, another rule judges
        events_with("generation", 1, workers=workers(103, 104))(damaged(0)),  # that node is not in the group
        events_with("generation", 1, axes={"pp": 2, "dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1})(damaged(0)),
        damaged(0, STOPPED),  # what its keeper holds may not be known
        events_with("forming", 1, time=BORN + 20)(damaged(0)),  # it had read all before
    ],
)
def test_damage_that_no_rank_has_to_come_upon_is_not_judged(given: Evidence) -> None:
    verdict = of_damage(given)
    assert (verdict.holds, verdict.figures) == (None, "0 of 0 refused, 1 not come upon")


def test_damage_is_needed_by_a_rank_whose_share_it_has_a_part_of() -> None:
    """Of three thirds the last, by the second of two ranks, and by the first alone not."""
    for rank, ranks, holds in ((0, [0], False), (0, [1], False), (0, [2], None), (1, [0], None), (1, [1], False)):
        given = damaged(rank)
        fault = next(each for each in given.records if each["record"] == "fault")
        fault["victims"][0]["ranks"] = ranks
        assert of_damage(given).holds is holds, (rank, ranks)
