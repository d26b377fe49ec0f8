"""What is told of nodes and failures beyond what is decided: control alone, in virtual time."""

from dataclasses import replace

import pytest

from regrow.control import events as e
from regrow.control.past import Past
from regrow.control.slow import Kind
from regrow.control.states import StartedAnswer
from regrow.control.unheard import AGAIN_S, COMES_S
from regrow.control.values import Version
from regrow.record.events import from_row
from support.told import Told, one


def training(*nodes: str, **cluster: object) -> Told:
    """A worker on each node, and the last step committed in memory."""
    told = Told(**cluster)
    told(e.NodesAlive(frozenset(nodes)))
    told.form(*(one(pid, node) for pid, node in enumerate(nodes, start=1)))
    told.begin(nodes)
    told.seal(Version(1, 5), told.peers)
    return told


def died(told: Told, pid: int, node: str, cause: str = "worker_died", detail: str = "gone") -> None:
    told(e.Died(((node, pid),), len(told.control.group.membership.survivors) - 1, cause, detail))


@pytest.mark.parametrize(
    ("befalls", "cause", "detail", "kind"),
    [
        (None, "worker_died", "gone", "software"),
        (None, "worker_failed", "RuntimeError: no such key", "software"),
        (None, "worker_failed", "RuntimeError: CUDA error: device-side assert", "gpu"),
        (None, "worker_hung", "30 s without a word", "hang"),
        (e.GpuError("b", "GPU-1", 79, "fallen off the bus"), "worker_died", "gone", "gpu"),
        (e.GpuError("b", "GPU-1", 13, ""), "worker_died", "gone", "software"),  # an Xid that a program may cause
        (e.NodesAlive(frozenset("ac")), "worker_died", "gone", "host"),
        (None, "worker_died", "the actor's node was terminated unexpectedly", "host"),
        (None, "node_silent", "says nothing", "host"),
    ],
)
def test_a_failure_says_what_failed_as_far_as_is_known(
    befalls: e.Event | None, cause: str, detail: str, kind: str
) -> None:
    told = training("a", "b", "c")
    if befalls is not None:
        told(befalls)
    died(told, 2, "b", cause, detail)
    (failure,) = told.records("failure")
    assert (failure["kind"], failure["nodes"], failure["ranks"]) == (kind, ["b"], [1])


def test_an_error_of_a_gpu_that_another_run_uses_is_told_and_counts_against_none_of_this_ones_nodes() -> None:
    """It quarantined the node, and a process' own death there was the GPU's."""
    told = Told(copies=1, quarantine_failures=1)
    mine = replace(one(2, "b"), gpu_uuid="GPU-1")
    told.form(one(1, "a"), mine, one(3, "c"))
    told.begin("abc")
    told(e.GpuError("b", "GPU-2", 79, "fallen off the bus"))
    told(e.GpuError("elsewhere", "GPU-2", 79, "fallen off the bus"))
    assert len(told.records("gpu_error")) == 2
    assert told.records("quarantine") == []
    told(e.GpuError("b", "GPU-1", 79, "fallen off the bus"))
    assert [each["node"] for each in told.records("quarantine")] == ["b"]


def test_a_gpu_error_of_an_earlier_group_explains_no_later_death() -> None:
    told = training("a", "b", "c")
    told(e.GpuError("b", "GPU-1", 79, "fallen off the bus"))
    told.form(*(one(pid, node) for pid, node in enumerate("abc", start=1)))
    told.begin("abc", 5)
    died(told, 2, "b")
    assert told.records("failure")[-1]["kind"] == "software"


def test_a_node_that_falls_silent_behind_a_slow_link_is_the_networks() -> None:
    told = training("a", "b", "c")
    told.control.health.suspects.hung("b", 0, None, told.now, "")  # puts a suspicion there; its kind is what matters
    (key,) = told.control.health.suspects.found
    suspicion = told.control.health.suspects.found.pop(key)
    object.__setattr__(suspicion, "kind", Kind.slow_link)
    told.control.health.suspects.found[suspicion.key] = suspicion
    died(told, 2, "b", "node_silent")
    assert told.records("failure")[0]["kind"] == "network"


def test_a_node_that_is_lost_after_its_worker_is_told_of_with_its_host_once() -> None:
    told = training("a", "b", "c")
    died(told, 2, "b")
    for _ in range(2):
        told(e.NodesAlive(frozenset("ac")))
    assert told.records("node_lost") == [{"node": "b", "host": "b", "drained": False, "generation": 1}]
    told(e.Notice({"c": told.now + 100.0}))
    told(e.NodesAlive(frozenset("a")))
    assert told.records("node_lost")[-1]["drained"] is True


def test_newcomers_are_told_of_once_when_they_are_ready_with_what_their_start_took() -> None:
    told = training("a", "b")
    assert told.records("ready") == []  # all started together
    told.now += 7.0
    told(e.NodesAlive(frozenset("abd")))
    told.now += 12.0
    told.join(one(7, "d"), expected=1)
    assert [told.row(step) for step in (1, 2)] == ["", ""]
    assert told.records("ready") == [{"node": "d", "ranks": 1, "host": "d", "start_s": 12.0, "generation": 1}]
    told.now += 10.0
    assert told.row(3) == "grow"
    told.form(one(1, "a"), one(2, "b"), one(7, "d"))
    told.begin("abd", 3)
    assert len(told.records("ready")) == 1


@pytest.mark.parametrize("keeper_first", [True, False])
def test_a_node_has_come_when_it_did_not_when_ray_was_asked_again(keeper_first: bool) -> None:
    """As a drill had it: 0.5 s for newcomers that took 14, as Ray is asked about nodes once a keeper is up."""
    told = training("a", "b")
    told.now += 60.0
    up, asked = e.KeeperUp("d", "d", ("d", 1), node_up_s=13.0), e.NodesAlive(frozenset("abd"))
    for event in (up, asked) if keeper_first else (asked, up):
        told(event)
    told(e.KeeperUp("b", "b", ("b", 1), restarted=True, node_up_s=500.0))  # before this run
    told.now += 1.0
    told.join(one(7, "d"), expected=1)
    told.join(one(8, "b"), expected=1)
    told.row(1)
    assert {each["node"]: each["start_s"] for each in told.records("ready")} == {"d": 14.0, "b": None}


def test_a_worker_that_is_started_anew_is_told_of_with_the_time_since_its_death() -> None:
    told = training("a", "b", "c")
    died(told, 2, "b")
    told.form(one(1, "a"), one(3, "c"))
    told.begin("ac")
    told.now += 9.0
    told.join(one(22, "b"), expected=1)
    told.row(1)
    (ready,) = told.records("ready")
    assert (ready["node"], ready["start_s"]) == ("b", pytest.approx(9.0, abs=0.1))


def began_from_storage(told: Told, nodes: str, step: int, source: str = "checkpoint") -> object:
    told(e.Began(told.control.generation, step, tuple(nodes), {"source": source}))
    return told.records("generation")[-1].get("source_reason")


def test_a_group_from_storage_says_why_it_was_not_memory() -> None:
    told = training("a", "b", "c", min_workers=1)
    told(e.NodesAlive(frozenset("c")))  # a and b have each other's, or c's holder is gone with it
    for pid, node in ((1, "a"), (2, "b")):
        died(told, pid, node)
    told.form(one(3, "c"))
    lost = [node for node, peers in told.peers.items() if "c" not in {node, *peers}]
    assert began_from_storage(told, "c", 3) == ("copies_lost" if lost else "unreadable")

    told = training("a", "b", "c")
    told.form(*(one(pid, node) for pid, node in enumerate("abc", start=1)))
    assert began_from_storage(told, "abc", 3) == "unreadable"

    told = training("a", "b", "c")
    told.form(*(one(pid, node) for pid, node in enumerate("abc", start=1)))
    assert began_from_storage(told, "abc", 8) == "older"

    told = training("a", "b", "c")
    told(e.NotFinite(1, 6, "gradients"))
    told.form(*(one(pid, node) for pid, node in enumerate("abc", start=1)))
    assert began_from_storage(told, "abc", 3) == "discarded"

    told = Told()
    told.form(one(1))
    assert began_from_storage(told, "n", 3) == "started"
    died(told, 1, "node")
    told.now += 10.0
    told.join(one(2))
    told.now += 10.0
    assert told.ask("m2", 1).formation is not None
    assert began_from_storage(told, "n", 3) == "none_committed"
    assert began_from_storage(told, "n", 3, source="snapshot") is None


def test_lines_of_earlier_versions_lack_what_is_new() -> None:
    failure = from_row({"time": 1.0, "event": "failure", "cause": "worker_died", "ranks": [1]})
    cleared = from_row({"time": 1.0, "event": "cleared", "kind": "slow_compute", "node": "n", "pid": 7})
    assert (failure.kind, failure.nodes, cleared.recovered) == (None, None, None)  # type: ignore[attr-defined]


def started(told: Told, *processes: tuple[str, int], seconds: float) -> StartedAnswer:
    """As Ray Train tells every two seconds; the last answer."""
    answer = StartedAnswer(frozenset(), frozenset())
    for _ in range(int(seconds / 2.0)):
        told.now += 2.0
        answer = told(e.Started([(*each, 300.0) for each in processes]))
    return answer


def test_a_process_that_joins_late_or_says_why_it_does_not_is_heard_of() -> None:
    told = training("a", "b")
    late = [("new", 7), ("new", 8)]
    assert started(told, *late, seconds=COMES_S - 10.0) == StartedAnswer(frozenset(), frozenset())
    told.join(one(7, "new"))
    told(e.Trouble(0, one(8, "new"), 2, "data holds no corpus"))
    answer = started(told, *late, ("a", 1), seconds=4 * COMES_S)
    assert answer == StartedAnswer(frozenset([*late, ("a", 1)]), frozenset())
    assert len(told.records("note")) == 2


def test_a_host_on_which_processes_hang_before_they_join_again_and_again_is_left_alone() -> None:
    told = training("a", "b", quarantine_failures=3)
    for attempt in range(3):
        assert told.control.excluded_nodes(told.now) == set()
        hung = ("new", 10 + attempt)
        for _ in range(2):  # an answer may be lost
            assert started(told, hung, seconds=COMES_S + 10.0).to_end == {hung}
    assert told.control.excluded_nodes(told.now) == {"new"}
    assert len(told.records("note")) == len(told.records("unfit")) == 3


@pytest.mark.parametrize("others", [(), (("new", 9),)])
def test_a_pid_that_comes_round_again_is_another_process(others: tuple[tuple[str, int], ...]) -> None:
    """What had been so of the one before held for it at once: that it had been heard of, was late, or was to end."""
    told, late = training("a", "b"), [("new", 6), ("new", 7), ("new", 8)]
    started(told, *late, seconds=COMES_S - 10.0)
    told.join(one(6, "new"))  # late, and then heard of
    died(told, 7, "new")  # late, and dead before it joined
    assert started(told, late[2], seconds=20.0).to_end == {late[2]}
    died(told, 6, "new")
    died(told, 8, "new", "worker_hung", "it hung before it joined")
    told.join(one(9, "new"))
    if others:  # that are late
        started(told, *others, seconds=20.0)
    told.now += 40 * 86400.0
    if others:
        started(told, *others, seconds=20.0)
    told.clear()
    assert started(told, *late, seconds=AGAIN_S) == StartedAnswer(frozenset(), frozenset())
    assert started(told, *late, seconds=4.0) == StartedAnswer(frozenset(), frozenset())
    assert len(told.records("note")) == 3
    assert started(told, *late, seconds=COMES_S).to_end == {*late}


@pytest.mark.parametrize("anew", [False, True])
def test_a_process_that_hangs_is_told_of_and_ended_where_the_others_wait_for_it_to_form_a_group(anew: bool) -> None:
    """No group can be formed without it, and the run waited for ever, without a word."""
    told = Told(min_workers=3, max_workers=3)
    members = [one(1, "a"), one(2, "b"), one(3, "c")]
    if anew:
        told.form(*members)
        told.begin("abc")
        told(e.GroupFailed("controller_died", "Ray Train's controller", ()))
        members = [one(11, "a"), one(12, "b")]
    told.join(*members[:2], expected=3)
    assert started(told, ("c", 99), seconds=COMES_S - 10.0).to_end == set()
    assert "process 99 on node c was started" in told.records("note")[-1]["text"]
    assert started(told, ("c", 99), seconds=20.0).to_end == {("c", 99)}


def test_while_all_start_none_is_too_late_and_from_the_first_that_joins_the_others_have_their_time() -> None:
    """Storage may be slow for all, or compiling."""
    told = Told(max_workers=8)
    assert started(told, ("c", 3), seconds=10 * COMES_S).to_end == set()
    told.form(one(1, "a"), one(2, "b"))
    told.begin("ab")
    assert started(told, ("c", 3), seconds=COMES_S - 10.0).to_end == set()
    assert started(told, ("c", 3), seconds=20.0).to_end == {("c", 3)}


def test_a_spare_that_a_restarted_coordinator_does_not_know_yet_is_not_told_of() -> None:
    told = Told(Past(4, 10, restarted=True))
    told(e.Restarted((one(1, "a"), one(2, "b")), 7, ("a", "b")))
    assert started(told, ("new", 7), ("b", 2), seconds=AGAIN_S).heard == {("b", 2)}
    told.join(one(7, "new"))
    assert started(told, ("new", 7), seconds=2.0).heard == {("new", 7)}
    assert told.records("note") == []


def test_at_the_end_of_a_run_no_process_is_ended_for_saying_nothing() -> None:
    told = training("a", "b")
    told(e.StopAsked("interrupted"))
    assert started(told, ("new", 7), seconds=4 * COMES_S).to_end == set()
    assert told.records("unfit") == []
