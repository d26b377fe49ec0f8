"""What a drill says became of faults that kill nothing, from logs alone."""

from typing import Any

import pytest

from regrow.drill.findings import find, sought
from regrow.drill.verdict import Evidence, judge

Row = dict[str, Any]
AT, EVERY = 1000.0, 20
VICTIM = {"what": "worker", "rank": 1, "pid": 102, "node": "node2"}
OTHER = VICTIM | {"rank": 0, "pid": 101, "node": "node1"}
DONE = {
    "loss": 1.0,
    "batch_digest": "",
    "data_wait_s": 0.0,
    "snapshot_s": 0.0,
    "step_s": 1.0,
    "generation": 1,
    "world_size": 2,
}
ROWS: list[Row] = [DONE | {"step": step, "tokens_seen": step, "time": AT - 40 + step} for step in range(1, 41)]
EVENTS: list[Row] = [
    {"event": "generation", "generation": 1, "time": AT - 44.0, "cause": "start", "world_size": 2, "workers": []},
    {"event": "validation", "step": 20, "time": AT - 20, "seconds": 2.0},
]


def fault(what: str, **more: Any) -> Row:
    at = {"number": 0, "time": AT, "step": 40, "world_size": 2, "victims": [VICTIM]}
    return {"record": "fault", "kind": what.split()[0], "what": what} | at | more


def suspected(kind: str, after_s: float, victim: Row = VICTIM, **more: Any) -> Row:
    victim = {"node": victim["node"], "pid": victim["pid"], "rank": victim["rank"]}
    return {"event": "suspected", "kind": kind, "time": AT + after_s, "detail": "so it is", **victim} | more


def cleared(after_s: float) -> Row:
    return suspected("slow_compute", after_s) | {"event": "cleared"}


def hangs(since: float) -> Row:
    return {"record": "note", "number": 0, "what": "hangs", "since": AT + since}


@pytest.mark.parametrize(
    ("what", "records", "events", "found", "seconds"),
    [
        ("hang_step", [hangs(0)], [suspected("hung", 31)], True, 31),  # 1.5 steps and 30 s
        ("hang_step", [hangs(0)], [suspected("hung", 33)], False, 33),
        ("hang_step", [hangs(0)], [suspected("hung", 25, OTHER)], False, None),
        ("hang_step", [], [suspected("hung", 25)], False, None),  # it had not begun to
        ("hang_validation", [hangs(50)], [suspected("hung", 82)], True, 32),
        ("hang_validation", [hangs(50)], [suspected("hung", 84)], False, 34),
        ("hang_first_step", [hangs(2)], [suspected("hung", 39)], True, 37),  # the first took 5 s
        ("hang_snapshot", [hangs(0)], [suspected("hung", 59)], True, 59),  # for room it may wait 30 s
        ("hang_snapshot", [hangs(0)], [suspected("hung", 61)], False, 61),
        ("dead_mount for_s=90", [], [suspected("hung", 80)], True, 80),
        ("dead_mount for_s=90", [], [], None, None),  # no rank came to read there
        ("slow_rank share=0.3 for_s=120", [], [suspected("slow_compute", 90)], True, 90),
        ("slow_rank share=0.3 for_s=120", [], [suspected("slow_compute", 130)], False, None),
        ("slow_rank share=0.3 for_s=120", [], [suspected("slow_compute", -10)], True, 0),  # by an earlier one
        ("slow_rank share=0.3 for_s=120", [], [suspected("slow_compute", -10), cleared(-5)], False, None),
        ("slow_rank share=0.3 for_s=120", [], [suspected("slow_compute", -10), cleared(5)], True, 0),
        ("slow_rank share=0.3 for_s=120", [], [suspected("slow_data", 90)], False, None),
        ("slow_rank share=0.3 for_s=120", [], [suspected("slow_compute", 90, OTHER)], False, None),
        ("slow_rank share=0.1 for_s=120", [], [], None, None),
        ("slow_rank share=0.3 for_s=120", [], [EVENTS[0] | {"time": AT + 60}], None, None),  # sums began anew
        ("slow_rank share=0.3 for_s=120", [], [EVENTS[0] | {"time": AT + 5}], False, None),
        (
            "slow_link for_s=120",
            [],
            [suspected("slow_link", 90, pid=0, rank=None)],
            False,
            None,
        ),  # of a worker, not its node
    ],
)
def test_each_is_found_by_the_event_that_names_its_victim_in_time(
    what: str, records: list[Row], events: list[Row], found: bool | None, seconds: float | None
) -> None:
    finding = find(fault(what), records, [*EVENTS, *events], ROWS, EVERY)
    assert (finding.found, finding.seconds) == (found, seconds)


def test_a_slow_link_is_named_by_its_node_and_told_from_a_slow_rank() -> None:
    befallen = fault("slow_link rate_mbit=20 for_s=120", victims=[{"what": "link", "node": "node2"}])
    for kind, node, found in (
        ("slow_link", "node2", True),
        ("slow_link", "node1", False),
        ("slow_compute", "node2", False),
    ):
        event = suspected(kind, 60, VICTIM | {"node": node, "pid": 0})
        finding = find(befallen, [], [*EVENTS, event], ROWS, EVERY)
        assert (finding.found, finding.seconds) == (found, 60.0 if found else None)


def test_a_link_is_told_to_be_slow_by_what_it_was_before_and_of_two_hosts_neither_is_named() -> None:
    befallen = fault("slow_link rate_mbit=20 for_s=120", victims=[{"what": "link", "node": "node2"}])
    between = suspected("slow_link", 60, VICTIM | {"node": "", "pid": 0})
    assert find(befallen, [], [*EVENTS, between], ROWS, EVERY).found
    assert find(befallen | {"world_size": 3}, [], [*EVENTS, between], ROWS, EVERY).found is None
    late = [EVENTS[0] | {"time": AT - 25.0}]
    assert find(befallen, [], late, ROWS, EVERY).found is None
    assert find(befallen, [], EVENTS, ROWS, EVERY).found is False


@pytest.mark.parametrize(
    ("what", "replicas", "step", "found"),
    [
        ("flip_gradients", 1, 62, True),
        ("flip_gradients", 1, 65, False),
        ("flip_activations", 2, None, False),
        ("flip_weights replicas=2", 2, 43, True),
        ("flip_weights replicas=2", 2, 50, False),
        ("flip_weights", 1, None, None),  # nothing can see that
    ],
)
def test_a_wrong_unit_is_found_within_a_verification_and_weights_by_their_replicas(
    what: str, replicas: int, step: int | None, found: bool | None
) -> None:
    events = [{"event": "corruption", "time": AT + 20, "step": step, "nodes": ["node2"], "detail": ""}] if step else []
    axes = {"dp_replicate": replicas, "dp_shard": 2}
    finding = find(fault(what, axes=axes), [], [*EVENTS, *events], ROWS, EVERY)
    assert finding.found is found
    assert (finding.seconds, finding.steps) == ((20.0, step - 40) if step else (None, None))


def evidence(records: list[Row], events: list[Row]) -> Evidence:
    return Evidence(
        rows=ROWS,
        events=[*EVENTS, *events],
        records=records,
        num_faults=1,
        last_step=40,
        most_lost=1,
        seqs_per_step=1,
        tokens_per_step=1,
        verify_every=EVERY,
    )


def test_the_verdict_says_what_was_not_found_and_whom_nothing_had_befallen() -> None:
    records = [fault("hang_step"), hangs(0)]
    *_, verdict = judge(evidence(records, [suspected("hung", 20)]))
    assert verdict.holds is True
    assert verdict.figures.startswith("1 of 1 found, 0 not to be seen; 1 said to hang or to be wrong")
    *_, verdict = judge(evidence(records, [suspected("hung", 20, OTHER), suspected("slow_compute", 30, OTHER)]))
    assert verdict.holds is False
    assert verdict.details == (
        "fault 0, hang_step: no process was said to hang",
        "hung: process 101 on node node1, which nothing befell",
    )
    assert "1 said to be slow that no fault had befallen" in verdict.figures


def test_plans_without_such_faults_are_judged_as_before() -> None:
    assert not sought("slow_link", "slow_link rank=1 for_s=20")
    assert not sought("kill_worker", "kill_worker")
    *_, verdict = judge(evidence([fault("slow_link for_s=20")], []))
    assert "is found in time" not in verdict.claim


@pytest.mark.parametrize(("steps", "holds"), [(2 * EVERY, True), (3 * EVERY, False)])
def test_a_corruption_takes_back_what_was_not_verified_and_no_more(steps: int, holds: bool) -> None:
    group = {"event": "generation", "generation": 2, "time": AT + 20, "workers": [], "source": "snapshot"}
    corrupted = group | {"cause": "corrupted", "recomputed_steps": steps}
    verdicts = judge(evidence([fault("flip_gradients", axes={"dp_replicate": 1})], [corrupted]))
    (verdict,) = [each for each in verdicts if "a failure costs at most" in each.claim]
    assert verdict.holds is holds
