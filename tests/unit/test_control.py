"""What control decides, event by event, in virtual time."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any

import pytest

from regrow.config.schema import CheckpointConfig, ParallelConfig, PretrainConfig
from regrow.control import commands as c
from regrow.control import events as e
from regrow.control.checkpoints import ARRIVE_WANTED_S, ASK_AGAIN_S, IN_VAIN, RETRY_S
from regrow.control.core import DEVICE_PATIENCE_S, Fenced
from regrow.control.deletions import AWAITED_S
from regrow.control.group import FORM_POLL_S, LEAVING_S
from regrow.control.health import KNOCK_S, LOOK_S, WHERE_AGAIN_S, Pulse
from regrow.control.links import AGAIN_S, AT_MOST_S, REFUSED_S, Links
from regrow.control.membership import LAST_CALL_S, Formation, Member
from regrow.control.past import Past, Rollbacks, group_of, is_submitted
from regrow.control.phases import BEYOND_S, FACTOR, Phase
from regrow.control.silent import DARK_S, HAIL_S, HANGS, LATE_S
from regrow.control.snapshots import COPIES, SILENT_S, UNHEARD_S, UNSAFE_S
from regrow.control.states import (
    Answer,
    Finished,
    Forming,
    GivenUp,
    LeavingGroup,
    RowAnswer,
    Settling,
    Stopping,
    Training,
    Waiting,
)
from regrow.control.too_few import YIELD_S
from regrow.control.troubles import ERROR, LOSS, MAX_FAILED_GENERATIONS, MAX_REPEATED, OTHERS_S
from regrow.control.values import NEVER, NOTHING, PartTimes, Peer, Version
from regrow.plan.mesh import ALONE
from regrow.record.events import Cause, Checkpoint, from_row
from regrow.record.log import METRIC_KEYS
from regrow.runtime.abort import LEAVE_S
from regrow.state.memory.held import Held, copy_name
from regrow.state.memory.node import RETRY_S as RETRY_S_OF_KEEPERS
from support.control_world import Shard, is_whole
from support.told import Told, log_of, one


def test_every_write_of_a_generation_that_is_over_is_refused_and_changes_nothing() -> None:
    told = Told()
    old = told.form(one(1)).generation
    told.begin(["node"])
    new = told.form(one(1)).generation
    told.clear()
    row = dict.fromkeys(METRIC_KEYS, 0.5) | {"step": 1, "generation": old}
    for event in (
        e.Row(old, row),
        e.Began(old, 0, (), {}),
        e.CheckpointWanted(old, 1),
        e.Leaving(old, 1, ""),
        e.NotFinite(old, 1, "nan"),
        e.Logged(old, "checkpoint", {}),
    ):
        with pytest.raises(Fenced, match=f"generation {old} is over; {new} is current"):
            told(event)
    assert told.commands == []
    assert told.control.state == Forming(new)


def test_a_runs_states_have_names() -> None:
    told = Told()
    assert told.control.state == Waiting()
    generation = told.form(one(1)).generation
    assert told.control.state == Forming(generation)
    told.begin(["node"])
    assert told.control.state == Training(generation)
    told(e.Leaving(generation, 4, "end_of_float8"))
    assert told.control.state == LeavingGroup(4, told.now + LEAVING_S)
    told(e.Done())
    assert told.control.ending == Finished()


def test_groups_that_keep_failing_before_a_step_give_the_run_up() -> None:
    told = Told()
    told(e.GroupFailed("worker_failed", "rank 0: no such thing", (0,)))
    for _ in range(MAX_FAILED_GENERATIONS):
        told.form(one(1))
    told.join(one(1))
    assert "no such thing" in told.ask("m1", told.control.generation).given_up
    assert len(told.of(c.GiveUp)) == 1


def test_an_error_that_every_process_ends_with_before_a_group_is_formed_gives_the_run_up() -> None:
    """A library of torch's does not load: no process gets as far as to tell its trouble, nor to join."""
    told, no_library = Told(), e.GroupFailed("worker_failed", "rank 0: ImportError: no libcudart", (0,))
    for _ in range(MAX_FAILED_GENERATIONS - 1):
        told(no_library)
        told(e.GroupFailed("worker_died", "rank 0: out of memory", (0,)))
    told.form(one(1))
    for _ in range(MAX_FAILED_GENERATIONS):
        told(no_library)
        assert told.control.ending is None, "a group was formed in between"
    told(no_library)
    assert isinstance(told.control.ending, GivenUp)
    assert told.control.ending.message.endswith("last failure: rank 0: ImportError: no libcudart")
    assert len(told.of(c.GiveUp)) == 1


def test_a_group_that_leaves_for_good_as_it_was_asked_to_says_so_in_the_log() -> None:
    told = training("ab")
    told.row(1)
    told(e.Leaving(1, 1, "grow"))
    assert told.records("trained") == [], "another one forms"
    told.now += LEAVING_S + 0.1
    told.form(one(0, "a"), one(1, "b"))
    told.begin("ab", step=1)
    told(e.StopAsked("interrupted"))
    assert told.row(2) == "interrupted"
    told(e.Leaving(2, 2, ""))
    assert told.records("trained") == [{"step": 2}]
    past = Past.of(log_of(told), generation=2, logged=2, stored=(), restarted=True)
    assert past.trained == 2


def test_a_group_that_forms_when_the_run_is_asked_to_stop_is_over_at_once() -> None:
    """One has its seat and waits for the other, which asks for its own and is told that the run is over."""
    told = Told()
    group = told.form(one(1, "a"), one(2, "b")).generation
    told.clear()
    told(e.StopAsked("interrupted"))
    assert [command.generation for command in told.of(c.TellOver)] == [group]
    assert told.control.is_over
    with pytest.raises(Fenced):
        told.begin("ab")
    told(e.StopAsked("interrupted"))
    assert told.ask("m2") == told.ask("m1", group) == Answer(over=True)
    assert told.control.is_over


def test_a_group_that_trains_leaves_in_good_order_though_its_beginning_is_not_in_the_log() -> None:
    """The driver asks again and again, at once where the coordinator is another one: before any row has come."""
    told = Told(Past(5, 95, (90,), restarted=True))
    told(e.Restarted((one(1, "a"), one(2, "b")), None, ()))
    told(e.StopAsked("interrupted"))
    assert told.row(96) == "interrupted"
    assert told.control.state == Training(5)
    assert told.of(c.TellOver) == []
    told(e.Leaving(5, 96, ""))
    assert told.control.is_over


def test_a_group_of_another_coordinator_that_still_forms_at_a_stop_is_over_once_a_rank_asks_for_a_seat() -> None:
    told = Told(Past(5, 95, (90,), restarted=True))
    told(e.Restarted((one(1, "a"), one(2, "b")), None, ()))
    told(e.StopAsked("interrupted"))
    told.join(one(9, "spare"))
    assert told.ask("m9", 4) == Answer(over=True)
    assert not told.control.is_over
    assert told.ask("m2", 4) == Answer(over=True)
    assert told.control.is_over
    assert [command.generation for command in told.of(c.TellOver)] == [5]


def test_a_run_that_is_asked_to_stop_is_not_given_up_for_workers_that_do_not_start() -> None:
    told = Told()
    told(e.StopAsked("interrupted"))
    for _ in range(MAX_FAILED_GENERATIONS):
        told(e.GroupFailed("worker_failed", "rank 0: ImportError: no libcudart", (0,)))
    assert told.control.ending == Stopping("interrupted")


def test_workers_that_make_no_step_faster_wait_as_spares_and_one_line_says_so() -> None:
    """Twelve slices: the busiest of four ranks has three of them, and so has the busiest of five."""
    told = Told()
    told.form(*map(one, range(1, 5)))
    told.begin(["node"])
    told.join(one(5))
    told.now += 10.0
    assert [told.row(step) for step in (1, 2)] == ["", ""]
    (spares,) = told.records("spares")
    assert from_row({"event": "spares", **spares}).sentence() == (
        "1 rank waits as a spare on node node: a step with more would take as long"
    )
    told.join(one(6))
    told.now += 10.0
    assert told.row(3) == "grow", "two slices each"


def test_a_death_is_recorded_once_and_the_others_form_the_next_generation() -> None:
    told = Told()
    first = told.form(one(1), one(2), one(3)).generation
    for _ in range(2):
        told(e.Died((("node", 2),), 2, "worker_died", "gone"))
    assert len(told.records("failure")) == 1
    told.join(one(1))
    assert told.ask("m1", first).formation is None  # m3 is alive, and has not come yet
    told.join(one(3))
    answer = told.ask("m3", first)
    assert answer.formation is not None
    assert [member.id for member in answer.formation.members] == ["m1", "m3"]
    told.begin(["node"])
    assert told.records("generation")[-1]["cause"] == "worker_died"


def test_a_node_whose_workers_die_one_by_one_has_failed_once_in_each_generation() -> None:
    told = Told()
    survivors = [one(pid, "node 0") for pid in range(3)]
    for first in range(3, 3 + 3 * PretrainConfig().cluster.quarantine_failures, 3):
        assert told.control.excluded_nodes(told.now) == set()
        told.form(*survivors, *(one(first + at, "node 1") for at in range(3)))
        for at in range(3):
            told(e.Died((("node 1", first + at),), 5, "worker_died", "gone"))
    assert told.control.excluded_nodes(told.now) == {"node 1"}
    assert [fields["node"] for fields in told.records("quarantine")] == ["node 1"]


def test_a_failure_says_how_the_gpus_of_its_nodes_were() -> None:
    told = Told(gpus_per_worker=1)
    nodes = [f"node {number}" for number in range(4)]
    told.form(*(one(pid, node) for pid, node in enumerate(nodes)))
    told.begin(nodes)
    told.row(1)
    asked = next(command for command in told.of(c.Ask) if command.question is c.Question.GPUS)
    assert asked.nodes == tuple(nodes)
    for number in (1, 2):
        told(e.Answered(asked.number, f"node {number}", [f"H100 GPU-{number}: 90 C"]))
    told(e.Answered(asked.number, "node 3", None))
    told(e.Died((("node 1", 1), ("node 3", 3)), 2, "worker_died", "gone"))
    (failure,) = told.records("failure")
    assert failure["gpus"] == {"node 1": ["H100 GPU-1: 90 C"]}
    assert failure["ranks"] == [1, 3]


def test_errors_of_a_gpu_count_as_failures_of_its_node_once_a_generation_and_programs_faults_do_not() -> None:
    told = Told(quarantine_failures=2)
    for _ in range(2):
        told.form(*(one(pid, f"node {pid}") for pid in range(4)))
        for meaning in ("", "", "fell off the bus", "fell off the bus"):
            told(e.GpuError("node 2", "GPU-2", 79 if meaning else 13, meaning))
    assert [fields["meaning"] for fields in told.records("gpu_error")] == ["", "", *["fell off the bus"] * 2] * 2
    assert [fields["node"] for fields in told.records("quarantine")] == ["node 2"]


def test_gpus_are_asked_with_a_groups_first_step_and_at_every_check_up() -> None:
    told, asked_at = Told(gpus_per_worker=1, probe_every_steps=4), list[int]()
    for steps in (range(1, 8), range(8, 12)):
        told.form(one(1))
        told.begin(["node"], steps.start - 1)
        for step in steps:
            told.clear()
            told.row(step)
            asked_at += [step for command in told.of(c.Ask) if command.question is c.Question.GPUS]
    assert asked_at == [1, 5, 8, 9]


def test_a_node_that_failed_again_and_again_is_used_where_too_few_are_left() -> None:
    told = Told(quarantine_failures=1)
    told.form(one(1), one(2, "barred"))
    told(e.Died((("barred", 2),), 1, "worker_died", "gone"))
    told(e.Notice({"leaving": told.now}))
    told.form(one(1))
    assert told.control.excluded_nodes(told.now) == {"barred", "leaving"}
    told(e.Died((("node", 1),), 0, "worker_died", "gone"))
    assert told.control.excluded_nodes(told.now) == {"barred", "leaving"}  # others may come yet
    told.now += YIELD_S + 0.1
    assert told.control.excluded_nodes(told.now) == {"leaving"}
    told.join(one(3, "barred"), expected=1)
    told.now += 10.0
    assert told.ask("m3").formation is not None
    assert told.control.excluded_nodes(told.now) == {"barred", "leaving"}


def test_a_run_that_waits_for_workers_says_what_it_waits_for() -> None:
    told = Told(min_workers=2)
    told.form(one(1, "a"), one(2, "b"))
    told.begin("ab")
    told(e.Notice({"b": told.now + 600.0}))
    told(e.Died((("b", 2),), 1, "worker_died", "gone"))
    for _ in range(5):
        told.now += YIELD_S / 2
        told()
    (note,) = told.records("note")
    assert note["text"].startswith("1 of cluster.min_workers=2 workers are left: the run waits for others, up to ")
    assert note["text"].endswith("; Ray starts none on nodes that drain: b")


def test_a_run_whose_smallest_group_is_larger_than_cluster_min_workers_says_both() -> None:
    """Three are no whole units of two ranks."""
    told = Told(min_workers=3, parallel=ParallelConfig(cp=2), wait_for_workers_s=60.0)
    members = [one(number, node) for number, node in enumerate("abcd")]
    told.form(*members)
    told.begin("abcd")
    told(e.Died((("d", 3),), 3, "worker_died", "gone"))
    told.join(*members[:3])
    for _ in range(7):
        told.now += 10.0
        told()
    (note,) = told.records("note")
    assert note["text"].startswith("3 of 4 (the smallest group with cluster.min_workers=3) workers are left: ")
    assert isinstance(told.control.ending, GivenUp)
    assert "fewer than 4 (the smallest group with cluster.min_workers=3) for 60 s" in told.control.ending.message


def test_a_process_that_dies_at_the_start_leaves_those_that_start_with_it() -> None:
    told = Told(min_workers=2)
    told.join(one(1), expected=3)
    told(e.Died((("c", 9),), 2, "worker_died", "gone"))
    told.now += YIELD_S + 1.0
    told()
    assert told.records("note") == []
    told(e.Died((("b", 8),), 1, "worker_died", "gone"))
    told.now += YIELD_S + 1.0
    told()
    assert [note["text"].partition(":")[0] for note in told.records("note")] == [
        "1 of cluster.min_workers=2 workers are left"
    ]


def test_a_worker_with_the_pid_of_one_that_was_replaced_weeks_before_is_another_one() -> None:
    """It was ended as it joined, and would have been as it joined again, and so on."""
    told = Told(min_workers=2)
    told.form(one(1, "a"), one(2, "b"), one(3, "c"))
    told.begin("abc")
    for _ in range(300):  # as Ray Train tells of it
        told(e.Died((("c", 3),), 2, "worker_died", "gone"))
        told.now += 2.0
    assert len(told.records("failure")) == 1
    assert [member.id for member in told.form(one(1, "a"), one(2, "b")).members] == ["m1", "m2"]
    told.join(replace(one(3, "c"), id="back", started=1))
    assert told.ask("back").over, "its node was cut off, and is back"
    assert told.of(c.Kill) == [c.Kill("c", 3, 1)]
    told.clear()
    told.now += 40 * 86400.0
    told.join(replace(one(3, "c"), id="new", started=2))
    told.form(one(1, "a"), one(2, "b"))
    assert [member.id for member in told.control.group.membership.current] == ["m1", "m2", "new"]
    assert not told.of(c.Kill)
    told.begin("abc")
    told(e.Died((("c", 3),), 2, "worker_died", "it exited"))
    assert [failure["detail"] for failure in told.records("failure")] == ["it exited"]


def test_a_process_that_its_node_finds_gone_has_died_and_did_not_hang() -> None:
    """Where the group stands still for it before its keeper has told of that."""
    told = training("ab")
    for step in range(1, 4):
        told.now += 0.1
        told.row(step, step_s=0.1)
    for _ in range(8):
        told.now += 0.5
        told()
        answering(told, {"a": lambda: [Pulse(0, 1, 3, 0.0, 0.0, "S")], "b": lambda: [Pulse(1, 1, 3, 1.0, 0.0, "")]})
    (failure,) = told.records("failure")
    assert failure["cause"] == "worker_died"
    assert "process 1 gone" in failure["detail"]
    assert told.records("suspected") == []


def test_no_process_hangs_that_ends_as_the_run_is_given_up() -> None:
    told = training("ab")
    for step in range(1, 4):
        told.now += 0.1
        told.row(step, step_s=0.1)
    told(e.Superseded("another process writes this run"))
    told.clear()
    for _ in range(40):
        told.now += 0.5
        told()
        answering(told, {node: lambda pid=pid: [Pulse(pid, 1, 3, 1.0, 0.0, "")] for pid, node in enumerate("ab")})
    assert told.records("stalled") == told.records("failure") == []


def test_no_process_hangs_of_a_group_that_was_one_too_many() -> None:
    """Its members were given a number, hear that the run is given up, and end."""
    told = training("ab")
    for step in range(1, 4):
        told.now += 0.1
        told.row(step, step_s=0.1)
    for _ in range(MAX_FAILED_GENERATIONS):
        told.form(one(0, "a"), one(1, "b"))
        told(e.Broke(told.control.generation, "a peer is gone"))
    told.join(one(0, "a"), one(1, "b"))
    assert told.ask("m0", told.control.generation).given_up
    told.now += 60.0
    assert told.control.health.stalls.stalled_s(told.now) == 0.0


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("trains", [False, True])
def test_an_offer_that_has_its_place_and_is_told_again_breaks_no_group(trains: bool, restarted: bool) -> None:
    """By its keeper, which stood for a while, or by the worker itself, which had no answer from that."""
    told = Told()
    offers = [
        replace(one(pid, node), gpu=pid, lifeline=7, machine="host", control=9) for pid, node in ((1, "a"), (2, "b"))
    ]
    for offer in offers:
        told(e.Joined(offer, 2))
    assert told.ask("m1").formation is not None
    if restarted:
        log = log_of(told)
        told = Told(Past.of(log, generation=1, logged=0, stored=(), restarted=True))
        told(group_of(log, 1))
    if trains:
        told.begin("ab")
    state = told.control.state
    told.clear()
    for offer in offers:
        told(e.Joined(offer, 2))
    assert (told.control.state, told.of(c.TellOver)) == (state, [])
    assert told.ask("m2").formation is not None, "it has not had its seat yet"
    told(e.Broke(1, "a peer is gone"))
    told(e.Joined(replace(offers[0], port=8), 2))
    told(e.Joined(offers[1], 2))  # late
    assert told.ask("m1", 1).formation is None, "the other one has not come again"
    told(e.Joined(replace(offers[1], port=8), 2))
    assert told.ask("m1", 1).formation == Formation(2, tuple(replace(offer, port=8) for offer in offers))


def test_rows_that_went_with_a_coordinator_are_asked_for() -> None:
    again = Told(Past(1, 0, restarted=True))
    again(e.Restarted((one(1),), 0, ("node",)))
    assert again(e.Row(1, again.metrics(4))) == RowAnswer(wanted=1)
    assert again(e.Row(1, again.metrics(5))) == RowAnswer(wanted=1)  # it was on its way
    assert again.of(c.LogRow) == []
    assert again.control.next_step == 6, "they are trained"
    assert again(e.RowsAgain(1, 1, [again.metrics(step) for step in (3, 4, 5)])) == RowAnswer()
    again.row(6)
    assert [command.row["step"] for command in again.of(c.LogRow)] == [3, 4, 5, 6]
    assert again.records("note") == [{"text": "rows before step 3 went with the processes that had them"}]
    again.clear()
    again.row(4)  # sent again
    assert again.of(c.LogRow) == []


def test_rows_that_come_out_of_order_are_asked_for_from_the_first_one_on() -> None:
    """Ray makes calls to an actor that died again in any order: rank 0 got an AssertionError, and broke its group."""
    again = Told(Past(1, 20, restarted=True))
    again(e.Restarted((one(1),), 0, ("node",)))
    again.row(21)
    assert again(e.Row(1, again.metrics(23))) == RowAnswer(wanted=22)
    assert again(e.Row(1, again.metrics(22))).wanted is None
    assert again(e.Row(1, again.metrics(24))) == RowAnswer(wanted=23)
    again(e.RowsAgain(1, 22, [again.metrics(step) for step in (22, 23, 24, 25)]))
    again.row(26)
    assert [command.row["step"] for command in again.of(c.LogRow)] == [*range(21, 27)]
    assert again.records("note") == []


def test_rows_that_another_coordinator_asked_for_do_not_hide_those_before() -> None:
    """It had row 21, and died before that was written."""
    again = Told(Past(1, 20, restarted=True))
    again(e.Restarted((one(1),), 0, ("node",)))
    assert again(e.RowsAgain(1, 22, [again.metrics(step) for step in (22, 23)])) == RowAnswer(wanted=21)
    again(e.RowsAgain(1, 21, [again.metrics(step) for step in (21, 22, 23)]))
    assert [command.row["step"] for command in again.of(c.LogRow)] == [21, 22, 23]
    assert again.records("note") == []


def test_rows_that_died_with_a_coordinator_are_logged_once_the_next_group_sends_them() -> None:
    """A rank was lost, too: they are of the generation before, and nothing is said of them."""
    told = Told(Past(1, 2, restarted=True))
    told(e.Restarted((one(1), one(2)), 0, ("node",), (1,), 0.0))
    told.form(one(1))
    told.begin(["node"], step=5)
    assert told(e.Row(2, told.metrics(6))) == RowAnswer(wanted=3)
    late = [told.metrics(step, generation=1) for step in (3, 4, 5)]
    told(e.RowsAgain(2, 3, [*late, told.metrics(6)]))
    assert [(row.row["generation"], row.row["step"]) for row in told.of(c.LogRow)] == [(1, 3), (1, 4), (1, 5), (2, 6)]
    assert told.records("note") == []
    assert told.records("generation")[-1]["recomputed_steps"] == 0


def test_the_last_row_of_a_group_that_is_gone_is_logged_where_nothing_is_left_to_train() -> None:
    told = Told(Past(1, 2, restarted=True))
    told(e.Restarted((one(1), one(2)), 0, ("node",), (1,), 0.0))
    told.form(one(1))
    told.begin(["node"], step=3)
    told(e.Row(2, told.metrics(3, generation=1)))
    assert [(row.row["step"], row.is_late) for row in told.of(c.LogRow)] == [(3, True)]


def test_rows_that_rank_0_could_not_send_before_it_was_lost_are_sent_by_another_rank() -> None:
    """Rank 0 was cut off from the head while it trained: steps are known by what other nodes hold of them."""
    told = Told()
    told.form(one(1), one(2))
    told.begin(["node"])
    told.row(1)
    told(e.Died((("node", 1),), 1, "node_silent", "rank 0 was cut off"))
    told.form(one(2))
    told.begin(["node"], step=3)
    assert told.control.next_step == 4, "they are trained"
    assert told(e.Row(2, told.metrics(4))) == RowAnswer(wanted=2)
    told(e.RowsAgain(2, 2, [*(told.metrics(step, generation=1) for step in (2, 3)), told.metrics(4)]))
    told.row(5)
    assert [command.row["step"] for command in told.of(c.LogRow)] == [1, 2, 3, 4, 5]
    assert told.records("note") == []


def test_a_coordinator_that_was_restarted_knows_of_the_deaths_that_the_one_before_was_told_of() -> None:
    """Ray tells of them once: the run would wait for the dead for ever."""
    told = Told(Past(4, 10, restarted=True))
    told(e.Restarted((one(1), one(2, "gone")), 7, ("node", "gone"), lost=(1,)))
    assert told.control.state == Waiting()
    told.join(one(1))
    answer = told.ask("m1", 4)
    assert answer.formation is not None
    assert answer.formation.generation == 5
    assert [member.id for member in answer.formation.members] == ["m1"]


def test_a_worker_that_ray_train_has_replaced_is_turned_away_when_its_node_is_back() -> None:
    """Cut off by the network for so long that Ray gave its node up; then it is healed, and joins with what it has."""
    told = Told()
    told.form(one(1, "a"), one(2, "b"), one(3, "c"))
    told.begin("abc")
    told(e.Died((("b", 2),), 2, Cause.worker_died, "node b is dead"))
    assert [member.id for member in told.form(one(1, "a"), one(3, "c")).members] == ["m1", "m3"]
    told.begin("ac")
    told.row(1)
    told.clear()
    told(e.Joined(one(2, "b"), 2))
    assert told.ask("m2", 1) == Answer(over=True)
    assert told.of(c.Kill) == [c.Kill("b", 2)]
    told.now += 60.0
    assert told.row(2) == "", "nobody is asked to leave for it"


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize(("first", "every_steps"), [("a", 0), ("ab", "auto")])
def test_a_newcomers_node_that_ray_was_not_asked_about_is_not_dead(
    first: str, every_steps: int | str, trains: bool
) -> None:
    """A healthy one was killed, and the group formed anew, where Ray had been asked once, before it came."""
    told = Told(every_steps=every_steps)
    members = [one(pid, node) for pid, node in enumerate(first, start=1)]
    told.form(*members)
    told(e.NodesAlive(frozenset(first)))
    told.begin(first if every_steps else "")
    if every_steps:
        told(e.KeeperUp("new", "new", ("new", 1)))
        assert told.control.can_ask("new")
    told.form(*members, one(9, "new"))
    if trains:
        told.begin([*first, "new"] if every_steps else "")
        told.row(1)
    told.now += told.control.health.stalls.patience_s + 0.1  # the group stands still
    told()
    assert told.of(c.Kill) == told.records("failure") == []
    told(e.NodesAlive(frozenset(first)))
    told()
    assert [failure["nodes"] for failure in told.records("failure")] == [["new"]]
    told(e.Joined(one(10, "new"), 1))
    assert told.control.snapshots.keepers.is_dead("new"), "what it had sent before"


@pytest.mark.parametrize("with_keeper", [True, False])
def test_a_newcomers_node_that_goes_silent_while_the_group_forms_is_given_up(with_keeper: bool) -> None:
    """Its keeper, which no group has had yet, is asked too; without one, Ray finds its node dead."""
    told = Told(silence_s=30.0)
    told.form(one(1, "a"), one(2, "b"))
    told.begin("ab")
    told.row(1)
    if with_keeper:
        told(e.KeeperUp("new", "new", ("new", 1)))
    told.form(one(1, "a"), one(2, "b"), one(3, "new"))
    told(e.NodesAlive(frozenset("ab")))
    told.clear()
    for _ in range(300):
        told.now += 0.2
        for command in (told(), *told.of(c.Ask))[1:]:
            for node in set(command.nodes) & {"a", "b"}:
                alive = [Pulse(1 if node == "a" else 2, 2, 0, 0.0, 0.0, "S")]
                told(e.Answered(command.number, node, "stacks" if command.question is c.Question.STACKS else alive))
        told.commands = [command for command in told.commands if not isinstance(command, c.Ask)]
        if told.records("failure"):
            break
    (failure,) = told.records("failure")
    assert (failure["cause"], failure["ranks"]) == ("node_silent", [2])
    assert told.now - 1000.0 < 40.0


def test_members_whose_keeper_is_gone_for_long_are_given_up_though_nobody_tells_of_them() -> None:
    told = Told(Past(4, 10, restarted=True), silence_s=30.0)
    told(e.KeeperUp("node", "node", ("node", 1)))
    told(e.KeeperUp("gone", "gone", ("gone", 1)))
    told(e.Restarted((one(1), one(2, "gone")), 10, ("node", "gone")))
    lost_at = None
    for _ in range(700):
        told.now += 0.2
        for command in (told(), *told.of(c.Ask))[1:]:
            for node in command.nodes:
                alive = [Pulse(1, 4, 10, 0.0, 0.0, "S")] if command.question is not c.Question.STACKS else "stacks"
                told(e.Answered(command.number, node, alive if node == "node" else None))
        told.commands = [command for command in told.commands if not isinstance(command, c.Ask)]
        if told.records("failure") and lost_at is None:
            lost_at = told.now
    assert lost_at is not None
    assert 60.0 < lost_at - 1000.0 < 75.0  # silence_s for the first step, silence_s for a keeper to come back
    (failure,) = told.records("failure")
    assert (failure["cause"], failure["ranks"]) == ("node_silent", [1])


@pytest.mark.parametrize("restarted", [True, False])
def test_old_checkpoints_are_deleted_by_a_coordinator_that_was_restarted_not_by_a_new_jobs(restarted: bool) -> None:
    """The one before may have died doing so; a new job may need what `checkpoint.keep` would now delete."""
    told = Told(Past(3, 10, restarted=restarted))
    if restarted:
        told(e.Restarted((), None, ()))
    told()
    assert len(told.of(c.Delete)) == restarted


def test_a_coordinator_that_is_restarted_deletes_none_for_one_that_may_not_have_been_read_back() -> None:
    """COMMIT of 10 was there and its read-back under way: the oldest went at once, and 10 was never read."""
    told = uploading()
    all_written(told, 1, "abc", read_back=False)
    again = restarted(told, stored=[10, 6, 3])
    assert again.of(c.Delete) == [c.Delete(unread=(10,))]


def test_whoever_waits_is_told_when_the_run_is_over() -> None:
    told = Told()
    told(e.Done())
    told.join(one(1))
    assert told.ask("m1").over


def test_too_few_for_too_long_end_the_run() -> None:
    told = Told(wait_for_workers_s=5)
    told.form(one(1))
    told(e.Died((("node", 1),), 0, "worker_died", "gone"))
    told.now += 4.9
    told()
    assert told.control.ending is None
    told.now += 0.2
    told()
    assert isinstance(told.control.ending, GivenUp)
    assert "fewer than cluster.min_workers=1 for 5 s" in told.control.ending.message
    assert told.of(c.GiveUp) == [c.GiveUp(told.control.ending.message)]


def test_a_group_that_is_restarted_as_a_whole_waits_for_none_of_the_one_before() -> None:
    told = Told()
    first = told.form(one(1), one(2), one(3)).generation
    told(e.GroupFailed("worker_died", "gone", (1,)))
    told.join(one(4), one(5))  # a smaller one
    answer = told.ask("m4", first)
    assert answer.formation is not None
    assert [member.id for member in answer.formation.members] == ["m4", "m5"]
    assert [fields["cause"] for fields in told.records("failure")] == ["worker_died"]


def test_a_group_that_could_not_be_formed_is_not_given_out_again() -> None:
    told = Told()
    first = told.form(one(1), one(2), one(3)).generation
    answer = told.ask("m2")
    assert answer.formation is not None
    assert answer.formation.generation == first  # as often as it is asked for
    told.join(one(1), expected=3)  # it waited for the others in vain, and did not learn which generation that was
    assert [command.generation for command in told.of(c.TellOver)] == [first]  # nor will the others
    assert told.ask("m1").formation is None  # they have not come back yet
    told(e.Died((("node", 3),), 2, "worker_died", "gone"))
    told.join(one(2), expected=3)
    answer = told.ask("m2")
    assert answer.formation is not None
    assert answer.formation.generation > first
    assert [member.id for member in answer.formation.members] == ["m1", "m2"]
    told.begin(["node"])  # it trains
    told.join(one(1), expected=2)
    # once, though one of it died then; a rank that trains finds out by itself
    assert [command.generation for command in told.of(c.TellOver)] == [first]


def test_a_keeper_that_comes_after_a_group_was_over_hears_of_it() -> None:
    told = training("ab")
    told(e.KeeperUp("c", "c", ("c", 1)))
    assert told.of(c.TellOver) == []
    told(e.Died((("b", 1),), 1, "worker_died", "gone"))
    told.clear()
    told(e.KeeperUp("a", "a", ("a", 2), restarted=True))
    assert told.of(c.TellOver) == [c.TellOver(1, ("a",))]


def test_a_rank_that_fails_by_itself_has_the_others_told_once() -> None:
    """On NCCL they wait for it in a kernel, and hear nothing."""
    told = Told()
    old, new = told.form(one(1)).generation, told.form(one(1)).generation
    told.clear()  # that it came back while the first was forming
    told(e.Broke(old, "rank 0: of a group that is over"))
    assert told.of(c.TellOver) == []
    told(e.Broke(new, "rank 3: OutOfMemoryError: CUDA out of memory"))
    told(e.Broke(new, "rank 0: BrokenStep: broken off"))
    assert [command.generation for command in told.of(c.TellOver)] == [new]
    third = told.form(one(1)).generation
    told(e.Broke(third, "rank 1: DataError: a damaged shard"))
    assert told.of(c.TellOver)[-1].generation == third


def test_a_worker_that_its_node_saw_end_is_lost_at_once_and_once() -> None:
    told = Told()
    generation = told.form(one(1)).generation
    told(e.Gone("node", 99))  # of an earlier group
    assert told.of(c.TellOver) == []
    told(e.Gone("node", 1))
    told(e.Gone("node", 1))
    told(e.Died((("node", 1),), 0, "worker_died", "says Ray, a second later"))
    assert [command.generation for command in told.of(c.TellOver)] == [generation]
    assert [(fields["cause"], fields["ranks"]) for fields in told.records("failure")] == [("worker_died", [0])]


def test_members_whose_ports_refuse_connections_are_not_waited_for() -> None:
    told = Told()
    first = told.form(one(1), one(2)).generation
    told.begin(["node"])
    assert told.of(c.Connect)[-1].members == (one(1), one(2))
    told.join(one(1))
    assert told.ask("m1", first).formation is None
    assert told.of(c.Probe)[-1].members == (one(2),)
    told(e.PortRefused(("m2",)))
    assert told.ask("m1", first).formation is not None
    told(e.Died((("node", 2),), 1, "worker_died", "Ray says it too"))
    assert [(fields["cause"], fields["ranks"]) for fields in told.records("failure")] == [("worker_died", [1])]


@pytest.mark.parametrize("trains", [True, False], ids=["trains", "forms"])
def test_a_node_whose_connection_ends_is_knocked_at_while_nobody_comes_back(trains: bool) -> None:
    told = Told()
    one, other = Member("m1", "x", "h", 1, 1), Member("m2", "y", "h", 1, 2)
    generation = told.form(one, other).generation
    if trains:
        told.begin("xy")
    assert told.of(c.Connect)[-1].members == (one, other)
    told()
    assert told.of(c.Probe) == [], "nobody is asked for nothing"
    told(e.ConnectionLost("y"))
    told()
    assert told.of(c.Probe)[-1].members == (other,)
    assert told.of(c.TellOver) == [], "it proves nothing"
    told(e.PortRefused(("m2",)))
    assert [command.generation for command in told.of(c.TellOver)] == [generation]
    assert [(fields["cause"], fields["ranks"]) for fields in told.records("failure")] == [("worker_died", [1])]


def test_a_keeper_that_died_alone_is_no_dead_node() -> None:
    told = Told()
    told.form(one(1))
    told.begin(["node"])
    told(e.ConnectionLost("node"))
    told()
    assert told.of(c.Probe), "its workers' ports answer"
    told.now += KNOCK_S
    told.clear()
    told()
    assert told.of(c.Probe) == [], "for a while"
    assert told.records("failure") == []


def test_a_coordinator_that_was_restarted_knows_whom_it_can_reach() -> None:
    for start_step in (None, 4):
        told = Told(Past(3, 4, restarted=True))
        told(e.Restarted((one(1), one(2)), start_step, ("node",)))
        assert told.of(c.Connect)[-1].members == (one(1), one(2))


def test_where_all_are_restarted_nobody_is_lost_by_a_knock() -> None:
    told = Told(in_place=False)
    told.form(one(1), one(2))
    told.begin(["node"])
    told(e.ConnectionLost("node"))
    told(e.PortRefused(("m2",)))
    assert told.records("failure") == []


def test_who_ends_itself_because_its_device_hangs_does_so_before_it_is_ended() -> None:
    assert LEAVE_S < DEVICE_PATIENCE_S


# checkpoints


def uploading(nodes: str = "abc", *, copies: bool = False) -> Told:
    """A checkpoint of step 10 has begun; without copies nobody else can write what one node could not."""
    told = Told()
    told.form(*(one(pid, node) for pid, node in enumerate(nodes)))
    told.begin(nodes)
    told.seal(Version(1, 10), told.peers)
    assert [(order.node, order.copies) for order in told.of(c.Write)] == [(node, False) for node in nodes]
    assert [order.describe for order in told.of(c.Write)] == [True, *[False] * (len(nodes) - 1)]
    return told


def test_a_checkpoint_is_parts_then_index_then_commit_then_retention() -> None:
    told = uploading()
    assert told.of(c.Announce)[-1].pinned == Version(1, 10)
    for seconds, node in enumerate("abc"):
        assert told.of(c.PublishIndex) == []
        told.now += seconds
        told(e.Written(1, node, PartTimes(0.25, seconds, 100)))
    assert told.of(c.PublishIndex) == [c.PublishIndex(1, Version(1, 10), ("a", "b", "c"))]
    assert told.of(c.PublishCommit) == []
    told.now += 0.5
    told(e.IndexWritten(1))
    assert told.of(c.PublishCommit) == [c.PublishCommit(1, Version(1, 10))]
    assert told.control.settling == Settling(True, "", 10, tuple("abc"))
    told.now += 2.0
    told(e.CheckpointCommitted(1, 10, 1234))
    (recorded,) = told.records("checkpoint")
    assert recorded == {
        "step": 10,
        "seconds": 5.5,
        "bytes": 1234,
        "reason": "every 10 steps",
        "write_s": 1.0,
        "held_up_s": 2.0,
        "index_s": 0.5,
        "commit_s": 2.0,
        "nodes": [  # the slowest first
            {"node": node, "seconds": since, "check_s": 0.25, "write_s": took, "bytes": 100}
            for node, since, took in (("c", 3.0, 2), ("b", 1.0, 1), ("a", 0.0, 0))
        ],
    }
    sentence = Checkpoint(time=1.0, **recorded).sentence()
    assert sentence.endswith("in 5.50 s, 2.0 s of that waiting for node c to write its part")
    assert told.of(c.Announce)[-1].pinned == NEVER
    assert told.of(c.ReadBack) == [c.ReadBack(1, node, node) for node in "abc"]
    for node in "abc":
        assert told.of(c.Delete) == []
        assert told.control.settling == Settling(True, "", None, ())
        told(e.HasReadBack(1, node, ""))
    assert len(told.of(c.Delete)) == 1
    assert told.control.settling == Settling(False, "", None, ())


def test_a_checkpoint_that_is_not_read_as_it_was_written_costs_no_older_one_and_is_made_anew() -> None:
    told = uploading()
    all_written(told, 1, "abc", read_back=False)
    told(e.HasReadBack(1, "a", ""))
    told(e.HasReadBack(1, "b", "its data fails its checksum"))
    told(e.HasReadBack(1, "c", ""))
    assert told.of(c.NoteDamaged) == [c.NoteDamaged(10, "its data fails its checksum")]
    assert told.of(c.Delete) == []
    assert [fields["detail"] for fields in told.records("checkpoint_failed")] == ["its data fails its checksum"]
    peers = told.peers
    told.clear()
    told.now += ASK_AGAIN_S + 1.0
    told.seal(Version(1, 11), peers)
    assert {order.version.step for order in told.of(c.Write)} == {11}
    told(e.HasReadBack(1, "a", ""))  # comes twice
    all_written(told, 2, "abc")
    assert len(told.of(c.Delete)) == 1


@pytest.mark.parametrize("has_gone_dark", [True, False])
def test_what_a_node_cannot_read_back_any_more_another_one_does(has_gone_dark: bool) -> None:
    told = uploading()
    all_written(told, 1, "abc", read_back=False)
    told(e.HasReadBack(1, "a", ""))
    told.clear()
    if has_gone_dark:
        told.control.snapshots.gone_dark({"b"}, told.now)
        told()
    else:
        told(e.HasReadBack(1, "b", None))
    assert told.of(c.ReadBack) == [c.ReadBack(1, "a", "b")]
    told(e.HasReadBack(1, "b", ""))
    told(e.HasReadBack(1, "c", ""))
    assert len(told.of(c.Delete)) == 1
    assert told.control.settling == Settling(False, "", None, ())


def test_a_checkpoint_that_no_node_can_read_back_any_more_counts_and_costs_no_older_one() -> None:
    told = uploading()
    all_written(told, 1, "abc", read_back=False)
    for _ in "abc":
        told(e.HasReadBack(1, "a", None))
    assert [order.node for order in told.of(c.ReadBack) if order.origin == "a"] == ["a", "b", "c"]
    assert told.control.settling == Settling(False, "", None, ())
    told(e.HasReadBack(1, "b", ""))
    told(e.HasReadBack(1, "c", ""))
    assert (told.of(c.Delete), told.of(c.NoteDamaged)) == ([], [])


def reading(*committed: int) -> Told:
    """Of nodes a and b, with COMMITs of these steps; the first one is being read back, node a has."""
    told = Told(checkpoint=CheckpointConfig(every_steps=10), min_workers=2)
    told.form(one(1, "a"), one(2, "b"))
    told.begin("ab")
    for upload, step in enumerate(committed, start=1):
        told.now += 600.0
        told.seal(Version(1, step), PEERS)
        all_written(told, upload, "ab", read_back=False)
        if upload == 1:
            told(e.HasReadBack(1, "a", ""))
    return told


def test_at_a_runs_end_no_reading_back_of_an_earlier_checkpoint_is_waited_for_beside_the_last_ones() -> None:
    """It took twice checkpoint.timeout_s, for which no driver was given the time."""
    told = reading(10, 20)
    begun = told.now
    told(e.StopAsked("interrupted"))
    told(e.Leaving(1, 20, ""))
    while told.control.settling.busy or told.now == begun:
        assert told.now - begun <= told.control.snapshots.checkpoints.timeout_s + 1.0
        told.now += 1.0
        told(e.Settle())
        told()
    assert told.of(c.ReadBack)[2:] == [c.ReadBack(2, "a", "a"), c.ReadBack(2, "b", "b")], "the last one"
    assert told.records("note")[-1]["text"].endswith("(not before the run ended): older ones stay")


def test_a_checkpoint_that_comes_while_another_is_read_back_waits_for_it() -> None:
    """Each dropped what was being read: where that took longer than a checkpoint, none was ever deleted."""
    told = reading(10, 20, 30)
    assert told.of(c.ReadBack) == [c.ReadBack(1, "a", "a"), c.ReadBack(1, "b", "b")]
    assert told.of(c.Delete) == []
    (said,) = told.records("note")
    assert said["text"].startswith("the checkpoint of step 10 is still being read back, and that of step 20 is there: ")
    told(e.HasReadBack(1, "b", ""))
    assert told.of(c.Delete) == [c.Delete(unread=(20, 30))]
    assert told.of(c.ReadBack)[2:] == [c.ReadBack(3, "a", "a"), c.ReadBack(3, "b", "b")], "the newest"
    for node in "ab":
        assert told.control.settling.busy
        told(e.HasReadBack(3, node, ""))
    assert told.of(c.Delete)[1:] == [c.Delete()]
    assert not told.control.settling.busy


def test_a_checkpoint_that_waits_for_one_that_cannot_be_read_back_is_next() -> None:
    told = reading(10, 20)
    told.now += 1201.0  # of checkpoint.timeout_s
    told()
    assert told.of(c.ReadBack)[2:] == [c.ReadBack(2, "a", "a"), c.ReadBack(2, "b", "b")]
    told(e.HasReadBack(2, "a", ""))
    told(e.HasReadBack(2, "b", ""))
    assert told.of(c.Delete) == [c.Delete()]


def test_what_waits_for_a_checkpoint_that_is_damaged_has_none_before_it() -> None:
    told = reading(10, 20)
    told(e.HasReadBack(1, "b", "its data fails its checksum"))
    assert told.of(c.NoteDamaged) == [c.NoteDamaged(10, "its data fails its checksum")]
    assert told.control.settling.unstored is None, "step 20 is in storage"
    told(e.HasReadBack(2, "a", "its data fails its checksum"))
    checkpoints = told.control.snapshots.checkpoints
    assert (checkpoints.stored, told.of(c.Delete)) == (NOTHING, [])


def test_a_checkpoint_of_a_run_that_went_back_does_not_wait_for_one_that_counts_no_more() -> None:
    told = reading(20)
    told.form(one(1, "a"), one(2, "b"))
    told.begin("ab", 5)
    told.seal(Version(2, 10), PEERS)
    all_written(told, 2, "ab")
    assert told.of(c.Delete) == [c.Delete(unread=(20,))]


def not_read_back(told: Told) -> list[str]:
    return [each["text"] for each in told.records("note") if "could not be read back" in each["text"]]


def test_why_a_checkpoint_cannot_be_read_back_is_told_once() -> None:
    """Older ones stayed, up to the next checkpoint that can, and nothing said so."""
    told = uploading()
    all_written(told, 1, "abc", read_back=False)
    for _ in "abc":
        assert not_read_back(told) == []
        told(e.HasReadBack(1, "a", None, "AccessDenied"))
    told(e.HasReadBack(1, "b", None, "AccessDenied"))
    said = "the checkpoint of step 10 could not be read back (node c AccessDenied): older ones stay"
    assert not_read_back(told) == [said]


@pytest.mark.parametrize(
    ("failed", "why"),
    [(False, "not within 1800 s"), (True, "not within 1800 s; node a AccessDenied")],
)
def test_a_checkpoint_that_is_not_read_back_in_time_is_told_of(failed: bool, why: str) -> None:
    told = uploading()
    all_written(told, 1, "abc", read_back=False)
    if failed:
        told(e.HasReadBack(1, "a", None, "AccessDenied"))
    for _ in range(2):
        told.now += 1801.0
        told()
        assert not_read_back(told) == [f"the checkpoint of step 10 could not be read back ({why}): older ones stay"]


def test_the_one_node_of_a_run_is_asked_again_to_read_back_and_no_node_that_does_not_answer() -> None:
    told = uploading("a")
    all_written(told, 1, "a", read_back=False)
    told(e.HasReadBack(1, "a", None))
    assert told.of(c.ReadBack) == 2 * [c.ReadBack(1, "a", "a")]
    told.control.snapshots.gone_dark({"a"}, told.now)
    told()
    assert told.control.settling == Settling(False, "", None, ())
    assert (len(told.of(c.ReadBack)), told.of(c.Delete)) == (2, [])
    assert not_read_back(told) == [
        "the checkpoint of step 10 could not be read back (node a says nothing): older ones stay"
    ]


def test_what_a_node_cannot_write_the_one_with_its_copies_does_and_nodes_that_fail_both_cost_the_checkpoint() -> None:
    told = uploading()
    told.clear()
    told(e.WriteFailed(1, "a", "a", "is gone"))
    (order,) = told.of(c.Write)
    assert (order.origin, order.copies, order.describe) == ("a", True, True)
    told(e.WriteFailed(1, "a", order.node, "is gone too"))
    told(e.WriteFailed(1, "b", "b", "is gone"))  # of a checkpoint that was given up
    assert [fields["step"] for fields in told.records("checkpoint_failed")] == [10]
    failure = f"the checkpoint of step 10 was not written: node {order.node} is gone too"
    assert told.control.settling == Settling(False, failure, 10, tuple("abc"))
    told.now += RETRY_S + 1.0
    told.seal(Version(1, 11), {"a": "b", "b": "c", "c": "a"})
    assert [order.version.step for order in told.of(c.Write)][1:] == [11, 11, 11]


def test_a_checkpoint_is_tried_again_once_what_the_one_before_has_left_is_deleted() -> None:
    """What its keepers had written stayed for good: a disk with room for three was full for ever after a failure."""
    told = uploading("a")
    told.cleans_up = False
    told(e.CheckpointWanted(1, 10))
    told(e.WriteFailed(1, "a", "a", "is full"))
    assert told.of(c.CleanUp) == [c.CleanUp(1, Version(1, 10))]
    told.now += ASK_AGAIN_S + 1.0
    told()
    assert [order.upload for order in told.of(c.Write)] == [1]
    told(e.Deleted("step-00000010 was not all deleted", 1))
    told()
    assert [order.upload for order in told.of(c.Write)] == [1, 2]
    assert told.records("note")[-1]["text"] == "step-00000010 was not all deleted"
    told(e.WriteFailed(2, "a", "a", "is full"))
    told.now += AWAITED_S + 1.0
    told()
    assert [order.upload for order in told.of(c.Write)] == [1, 2, 3], "it is not waited for without end"
    told(e.Deleted("", 2))
    told(e.Written(3, "a"))
    told(e.IndexWritten(3))
    told(e.PublishFailed(3, "COMMIT may be there"))
    assert [command.upload for command in told.of(c.CleanUp)] == [1, 2]


def test_a_checkpoint_that_takes_too_long_is_given_up_and_says_what_it_waits_for() -> None:
    told = Told(checkpoint=CheckpointConfig(every_steps=10, timeout_s=60.0))
    told.form(one(1, "a"))
    told.begin("a")
    told.seal(Version(1, 10), {"a": ""})
    told.now += 61.0
    told()
    (failed,) = told.records("checkpoint_failed")
    assert failed["detail"] == "after 60 s node a writes still; checkpoint.timeout_s allows more"


def test_a_checkpoint_that_was_to_be_kept_for_good_and_is_passed_over_is_told_of() -> None:
    """It was missing from storage for good, without a word."""
    told = Told(checkpoint=CheckpointConfig(every_steps=5, keep_every_steps=10))
    told.form(one(1, "a"))
    told.begin("a")
    alone = {"a": ()}

    def notes() -> list[str]:
        return [each["text"] for each in told.records("note") if "for good" in each["text"]]

    told.seal(Version(1, 5), alone)
    told.seal(Version(1, 10), alone)
    assert notes() == []
    told.seal(Version(1, 12), alone)
    said = "the checkpoint of step {} was to be kept for good, and is not in storage: {}"
    known = [said.format(10, "that of step 5 was still being written")]
    assert notes() == known
    all_written(told, 1, "a")
    told.seal(Version(1, 20), alone)  # 12 is being written
    all_written(told, 2, "a")
    told.seal(Version(1, 22), alone)
    assert notes() == known, "20 is being written"
    told(e.WriteFailed(3, "a", "a", "is full"))
    known.append(said.format(20, "the checkpoint of step 20 was not written: node a is full"))
    assert notes() == known
    told.now += RETRY_S + 1.0
    told.seal(Version(1, 31), alone)
    known.append(said.format(30, "the checkpoint of step 20 was not written: node a is full"))
    assert notes() == known
    all_written(told, 4, "a")
    told.seal(Version(1, 41), alone)
    known.append(said.format(40, "its snapshot was not committed in memory"))
    assert notes() == known
    told.form(one(1, "a"))
    told.begin("a", 38)
    told.now += RETRY_S + 1.0
    told.seal(Version(2, 39), alone)
    told.seal(Version(2, 40), alone)
    all_written(told, 6, "a")
    told.seal(Version(2, 42), alone)
    all_written(told, 7, "a")
    assert notes() == known


def test_a_commit_that_arrives_after_the_run_went_back_before_it_is_withdrawn() -> None:
    told = uploading()
    for node in "abc":
        told(e.Written(1, node))
    told(e.IndexWritten(1))  # COMMIT is on its way, and storage is slow
    told.form(*(one(pid, node) for pid, node in enumerate("abc")))
    told(e.Began(2, 8, ("a", "b", "c"), {}))
    assert [fields["step"] for fields in told.records("checkpoint_failed")] == [10]
    told(e.CheckpointCommitted(1, 10, 1))
    assert told.of(c.Withdraw) == [c.Withdraw(10)]
    assert told.records("checkpoint") == []


def test_a_commit_that_only_took_too_long_counts_once_it_is_there() -> None:
    told = uploading()
    for node in "abc":
        told(e.Written(1, node))
    told(e.IndexWritten(1))
    told.now += 1e5
    told()
    assert len(told.records("checkpoint_failed")) == 1
    told(e.CheckpointCommitted(1, 10, 1))
    assert told.of(c.Withdraw) == []
    assert [fields["step"] for fields in told.records("checkpoint")] == [10]


def test_a_step_whose_commit_came_twice_is_not_in_storage_where_it_is_damaged() -> None:
    """The first one was given up, and only took too long."""
    told = uploading()
    for node in "abc":
        told(e.Written(1, node))
    told(e.IndexWritten(1))
    told.now += told.control.snapshots.checkpoints.timeout_s + 1.0
    told()
    told.now += ASK_AGAIN_S + 1.0
    told(e.CheckpointWanted(1, 10))
    for node in "abc":
        told(e.Written(2, node))
    told(e.IndexWritten(2))
    for upload in (1, 2):
        told(e.CheckpointCommitted(upload, 10, 1))
    told(e.HasReadBack(2, "a", "its data fails its checksum"))
    assert told.control.settling.unstored == 10


# what ends a run in good order


PEERS = {"a": ("b",), "b": ("a",)}


def all_written(told: Told, upload: int, nodes: str, *, read_back: bool = True) -> None:
    for node in nodes:
        told(e.Written(upload, node))
    told(e.IndexWritten(upload))
    told(e.CheckpointCommitted(upload, told.of(c.PublishCommit)[-1].version.step, 1))
    for order in told.of(c.ReadBack) if read_back else ():
        told(e.HasReadBack(upload, order.origin, ""))


def committed_in_memory(step: int = 15, **cluster: Any) -> Told:
    """Two nodes train; step 10 is in storage, `step` in memory alone."""
    told = Told(checkpoint=CheckpointConfig(every_steps=10, timeout_s=100.0), min_workers=2, **cluster)
    told.form(one(1, "a"), one(2, "b"))
    told.begin("ab")
    for number in range(1, step + 1):
        told.row(number)
    told.seal(Version(1, 10), PEERS)
    all_written(told, 1, "ab")
    told.seal(Version(1, step), PEERS)
    told.clear()
    assert told.control.settling.unstored == step
    return told


def orders(told: Told) -> list[tuple[str, str, int]]:
    """Which node is to write whose part of which step."""
    return [(order.node, order.origin, order.version.step) for order in told.of(c.Write)]


def lose_b(told: Told) -> None:
    told(e.NodesAlive(frozenset("a")))
    told(e.Died((("b", 2),), 1, "worker_died", "its node is dead"))


@pytest.mark.parametrize(
    "how",
    ["too few", "stopped while waiting", "stopped as it forms", "given up", "user's mistake", "workers have left"],
)
def test_whatever_ends_a_run_its_newest_snapshot_is_ordered_into_storage_without_any_trainer(how: str) -> None:
    told = committed_in_memory()
    if how == "too few":
        lose_b(told)
    elif how == "stopped while waiting":
        told(e.GroupFailed("worker_failed", "all restart", (0,)))
        assert orders(told) == []
        told(e.StopAsked("interrupted"))
    elif how == "stopped as it forms":
        told.form(one(1, "a"), one(2, "b"))
        assert orders(told) == []
        told(e.StopAsked("interrupted"))
    elif how == "given up":
        for _ in range(MAX_FAILED_GENERATIONS):
            told.form(one(1, "a"), one(2, "b"))
        told.join(one(1, "a"), one(2, "b"))
        assert orders(told) == []
        assert told.ask("m1", told.control.generation).given_up
    elif how == "user's mistake":
        told(e.Failed("the corpus is not there"))
    else:
        told(e.Settle())
    lost = how == "too few"  # then the one with its copies writes both
    assert orders(told) == [("a", "a", 15), ("a" if lost else "b", "b", 15)]
    told.clear()
    told(e.Settle())
    assert orders(told) == []
    assert told.control.settling.busy
    all_written(told, 2, "ab")
    assert told.control.settling == Settling(False, "", None, ())


def test_the_last_checkpoint_is_tried_again_after_an_error_of_storage_until_it_is_there() -> None:
    told = committed_in_memory()
    told(e.Done())
    told(e.Settle())
    for number in range(2, 6):
        told(e.WriteFailed(number, "a", "a", "Input/output error"))
        told(e.WriteFailed(number, "a", "b", "Input/output error"))
        assert told.control.settling.busy
        told.now += ASK_AGAIN_S + 0.1
        told.clear()
        told(e.Settle())
        told()
        assert orders(told) == [("a", "a", 15), ("b", "b", 15)]
    all_written(told, 6, "ab")
    assert told.control.settling == Settling(False, "", None, ())


def test_a_storage_that_stays_away_is_given_up_after_timeout_s_and_what_is_missing_is_known() -> None:
    told, begun = committed_in_memory(), 0.0
    begun = told.now
    told(e.Settle())
    number = 2
    while told.control.settling.busy:
        told(e.WriteFailed(number, "a", "a", "Input/output error"))
        told(e.WriteFailed(number, "a", "b", "Input/output error"))
        told.now += 1.0
        told.clear()
        told(e.Settle())
        told()
        number += bool(told.of(c.Write))
        assert told.now - begun < 110.0
    assert told.now - begun > 99.0
    settling = told.control.settling
    assert "the checkpoint of step 15 was not written: node" in settling.failure
    assert (settling.unstored, settling.nodes) == (15, ("a", "b"))


def test_a_part_that_no_node_has_is_not_tried_until_the_end_of_time() -> None:
    told = committed_in_memory()
    told(e.Settle())
    for number in range(2, 2 + IN_VAIN):
        told(e.WriteFailed(number, "b", "b", "is gone", has_none=True))
        told(e.WriteFailed(number, "b", "a", "has 0 of the 1 snapshots", has_none=True))
        told.now += ASK_AGAIN_S + 0.1
        told()
    assert not told.control.settling.busy
    assert told.control.settling.unstored == 15


def test_the_end_waits_a_moment_for_the_last_snapshot_to_be_committed() -> None:
    told = committed_in_memory()
    told.row(16)
    told(e.Done())
    told.clear()
    told(e.Settle())
    told.now += 1.0
    told.seal(Version(1, 16), PEERS)
    assert told.control.settling.unstored == 16
    told()
    all_written(told, 2, "ab")
    told(e.Settle())
    all_written(told, 3, "ab")
    assert told.control.settling == Settling(False, "", None, ())


def test_a_last_snapshot_that_does_not_come_is_not_waited_for_and_the_one_before_it_is_written() -> None:
    told = committed_in_memory()
    told.row(16)
    told(e.CheckpointWanted(1, 16))
    told(e.Settle())
    assert orders(told) == []
    told.now += ARRIVE_WANTED_S + 0.1
    told()
    told(e.Settle())
    assert orders(told) == [("a", "a", 15), ("b", "b", 15)]
    all_written(told, 2, "ab")
    assert told.control.settling.unstored is None
    assert [fields["step"] for fields in told.records("checkpoint_failed")] == [16]
    lost = "step 16 is neither committed in memory nor in storage: its snapshot was not committed in time"
    assert told.control.settling.lost == lost, "whatever was written since"


def test_a_last_step_that_the_ranks_cannot_write_themselves_is_lost_and_the_run_says_so() -> None:
    """Before, a run that was stopped with a full storage was told of as one whose checkpoint is committed."""
    told = Told(every_steps=0, checkpoint=CheckpointConfig(every_steps=10), min_workers=2)
    told.form(one(1, "a"), one(2, "b"))
    told(e.Began(1, 10, ("a", "b"), {}))
    for step in range(11, 16):
        told.row(step)
    told(e.StopAsked("interrupted"))
    told(e.Logged(1, "checkpoint_failed", {"step": 15, "detail": "No space left on device"}))
    told(e.Settle())
    settling = told.control.settling
    assert not settling.busy
    assert settling.lost == "step 15 is neither committed in memory nor in storage: No space left on device"
    told(e.Logged(1, "checkpoint", {"step": 15, "seconds": 1.0, "bytes": 1}))
    assert told.control.settling.lost == ""
    told(e.Logged(1, "checkpoint_failed", {"step": 20, "detail": "No space left on device"}))
    told(e.Began(1, 15, ("a", "b"), {}))
    assert told.control.settling.lost == "", "what comes after that is trained again"


def test_a_run_that_another_process_writes_puts_nothing_more_into_storage_and_ends_at_once() -> None:
    told = committed_in_memory()
    told(e.Superseded("is written by another job now"))
    told(e.Settle())
    assert orders(told) == []
    assert told.control.settling == Settling(False, "", None, ())
    assert told.control.is_superseded
    assert isinstance(told.control.ending, GivenUp)


def test_state_that_went_wrong_is_not_put_into_storage_by_the_end() -> None:
    told = committed_in_memory()
    for _ in range(14):
        told(e.NotFinite(told.control.generation, 15, "loss is nan"))
        if isinstance(told.control.ending, GivenUp):
            break
        told.form(one(1, "a"), one(2, "b"))
        told(e.Began(told.control.generation, 10, ("a", "b"), {}))
        told.seal(Version(told.control.generation, 11), PEERS)
    assert isinstance(told.control.ending, GivenUp)
    told.seal(Version(told.control.generation, 12), PEERS)  # late
    told(e.Settle())
    assert orders(told) == []
    assert told.control.settling == Settling(False, "", None, ())
    generation, held = told.control.generation, Version(told.control.generation, 11)
    again = Told(Past.of(log_of(told), generation=generation, logged=15, stored=[10], restarted=True))
    again(e.KeepersFound(tuple((node, held, [Shard(held, node, 2, 11)]) for node in "ab"), generation))
    assert again.control.newest_snapshot is None, "nor by one that is restarted before it has ended"


@pytest.mark.parametrize("notice", [("a", "b"), ("a",), ()])
def test_a_notice_that_leaves_too_few_orders_a_checkpoint_at_once_and_again_while_it_stands(
    notice: tuple[str, ...],
) -> None:
    told = committed_in_memory()
    told(e.Notice(dict.fromkeys(notice, told.now + 120.0)))
    assert bool(orders(told)) == bool(notice)
    if not notice:
        return
    told.row(16)
    told.seal(Version(1, 16), PEERS)
    told.clear()
    all_written(told, 2, "ab")
    assert orders(told) == [("a", "a", 16), ("b", "b", 16)]
    told(e.Notice({}))  # withdrawn
    told.row(17)
    told.seal(Version(1, 17), PEERS)
    told.clear()
    all_written(told, 3, "ab")
    assert orders(told) == []


def test_a_notice_to_both_holders_of_a_part_orders_a_checkpoint_and_one_to_either_does_not() -> None:
    told = Told(checkpoint=CheckpointConfig(every_steps=1000))
    told.form(*(one(pid, node) for pid, node in enumerate("abcd")))
    told.begin("abcd")
    told.row(1)
    peers = told.peers
    told.seal(Version(1, 1), peers)
    (peer,) = peers["a"]
    (other,) = {"b", "c", "d"} - {peer} - {node for node, of in peers.items() if "a" in of}
    told(e.Notice({"a": told.now + 60.0, other: told.now + 60.0}))
    assert orders(told) == []
    told(e.Notice({"a": told.now + 60.0, peer: told.now + 60.0}))
    assert len(orders(told)) == 4


# a coordinator that takes the place of one that died


def restarted(told: Told, *, stored: Iterable[int] = (), **cluster: Any) -> Told:
    """The coordinator dies; another one reads its log, and finds its keepers."""
    events = log_of(told)
    past = Past.of(
        events, generation=told.control.generation, logged=told.control.next_step - 1, stored=stored, restarted=True
    )
    again = Told(past, **cluster)
    again.now = told.now
    again(group_of(events, past.generation))
    return again


def first_order(told: Told, step: int) -> int:
    """The first step after this one, a minute each, that is to be a checkpoint."""
    while not told.of(c.Write):
        step, told.now = step + 1, told.now + 60.0
        told.row(step)
        told.seal(Version(told.control.generation, step), told.peers)
    return int(told.of(c.Write)[0].version.step)


@pytest.mark.parametrize(
    ("checkpoint", "stored", "step"),
    [
        (CheckpointConfig(every_steps=10), (), 11),
        (CheckpointConfig(every_steps=10), (3,), 11),
        (CheckpointConfig(every_steps=None, every_minutes=10), (), 11),
        (CheckpointConfig(every_steps=None, every_minutes=12), (), 12),
        (CheckpointConfig(every_steps=None, every_minutes=12), (3,), 14),  # of which the log says that it took 30 s
    ],
)
def test_a_coordinator_that_is_restarted_during_a_checkpoint_orders_it_again_at_once(
    checkpoint: CheckpointConfig, stored: tuple[int, ...], step: int
) -> None:
    """With none in storage it waited for a whole interval, and by time always."""
    told = training("ab", checkpoint=checkpoint)
    for each in range(1, 11):
        told.row(each)
        told.now += 60.0
        told.seal(Version(1, each), told.peers)
    began = 1000.0 - 10 * 60.0
    events = [{**event, "time": began} for event in log_of(told)]
    events += [{"event": "checkpoint", "step": each, "time": began + 150.0, "seconds": 30.0} for each in stored]
    again = Told(Past.of(events, generation=1, logged=10, stored=stored, restarted=True), checkpoint=checkpoint)
    for node in "ab":
        again(e.KeeperUp(node, node, (node, 1)))
    held = tuple((node, Version(1, 10), [Shard(Version(1, 10), node, 2, 10)]) for node in "ab")
    again(e.KeepersFound(held, 1))
    again(group_of(events, 1))
    assert first_order(again, 10) == step


@pytest.mark.parametrize(
    ("stored", "at", "step"),
    [((100,), 205, 206), ((200,), 205, 300), ((), 105, 106), ((), 95, 100), ((100,), 100, 200)],
)
def test_a_job_that_goes_on_from_memory_orders_the_checkpoint_that_the_one_before_had_begun(
    stored: tuple[int, ...], at: int, step: int
) -> None:
    """The next one was that of a whole interval later: of step 300, with 100 in storage."""
    checkpoint, submitted = CheckpointConfig(every_steps=100), {"event": "submitted", "time": 1000.0}
    began = {"event": "generation", "generation": 1, "start_step": 0, "time": 1000.0, "workers": []}
    past = Past.of([submitted, began, submitted], generation=1, logged=at, stored=stored, restarted=False)
    told = Told(past, checkpoint=checkpoint)
    for node in "ab":
        told(e.KeeperUp(node, node, (node, 1)))
    held = Version(1, at)
    told(e.KeepersFound(tuple((node, held, [Shard(held, node, 2, at)]) for node in "ab"), 1))
    told.form(one(0, "a"), one(1, "b"))
    told.begin("ab", at)
    assert first_order(told, at) == step


@pytest.mark.parametrize("is_old", [False, True], ids=["new log", "old log"])
def test_a_coordinator_that_was_restarted_gives_the_seats_of_a_group_that_still_meets(is_old: bool) -> None:
    """Some of its members have theirs and wait for the rest, where they listen in this generation."""
    told = Told()
    members = [replace(one(pid, f"n{pid}"), port=40_000 + pid, control=65_535 - pid, gpu=pid) for pid in (1, 2, 3)]
    seats = told.form(*members)
    events = log_of(told)
    if is_old:
        events[-1] = {"event": "forming", "generation": 1, "members": [asdict(member) for member in members]}
    again = Told(Past.of(events, generation=1, logged=0, stored=(), restarted=True))
    again(group_of(events, 1))
    assert [again.ask(f"m{pid}").formation for pid in (1, 2, 3)] == [seats] * 3


def test_a_coordinator_that_was_restarted_knows_that_the_last_step_is_trained() -> None:
    """Spares would poll for ever, and the driver would wait for them."""
    told = Told()
    told.form(one(1))
    told.begin(["node"])
    told.row(1)
    told(e.Done())
    again = restarted(told)
    assert again.control.is_over
    again.join(one(9, "spare"))
    assert again.ask("m9").over
    assert again.control.settling.busy, "step 1 is to be in storage"


def test_the_keeper_of_a_node_that_is_dead_is_not_started_anew() -> None:
    """Once a minute, for as long as a run with too few workers waited."""
    told = training("ab", min_workers=2)
    told(e.Died((("b", 1),), 1, "worker_died", "gone"))
    again = Told(Past.of(log_of(told), generation=1, logged=0, stored=(), restarted=True), min_workers=2)
    again.now = told.now
    again(e.KeeperUp("a", "a", ("a", 1)))
    again(e.KeepersFound((), 1))
    again(e.NodesAlive(frozenset("a")))
    again(group_of(log_of(told), 1))
    for _ in range(5):
        again.now += 61.0
        again()
    assert again.of(c.RestartKeeper) == again.records("keeper_restarted") == []


@pytest.mark.parametrize("commits", [True, False])
def test_a_run_whose_steps_are_long_is_told_unsafe_only_where_snapshots_do_not_come(commits: bool) -> None:
    """Four steps of 35 s from one snapshot to the next are more than two minutes."""
    told = training("abc", every_steps=4)
    for step in range(1, 13):
        told.now += 35.0
        told.row(step, step_s=35.0)
        if step % 4 == 0 and commits:
            told.seal(Version(1, step), told.peers)
    assert bool(told.records("snapshot_failed")) != commits


def test_a_keeper_that_is_late_for_a_coordinator_that_was_restarted_takes_its_place_once_it_is_there() -> None:
    """Without it nothing would be committed until the group changes, and no line would say so."""
    told = training("abc")
    events = log_of(told)
    again = Told(Past.of(events, generation=1, logged=0, stored=(), restarted=True))
    again.now = told.now
    for node in "ac":
        again(e.KeeperUp(node, node, (node, 1)))
    again(e.KeepersFound((), 1))
    again(group_of(events, 1))
    assert again.peers == {}
    again.now += UNSAFE_S + 1.0
    again.row(1)
    assert "no snapshot has been committed" in again.records("snapshot_failed")[0]["detail"]
    again()
    assert again.of(c.RestartKeeper) == [c.RestartKeeper("b")]
    again(e.KeeperUp("b", "b", ("b", 2), restarted=True))
    assert again.peers == told.peers
    again.seal(Version(1, 5), again.peers)
    assert again.control.newest_snapshot == Version(1, 5)


def test_what_a_late_keeper_knows_counts_where_all_of_it_is_known() -> None:
    """What the others hold was asked before it, and is another step's by now: their reports are to come yet."""

    def found(*nodes: str) -> Version | None:
        told = training("ab")
        again = restarted(told)
        again(e.KeepersFound(tuple((node, Version(1, 9), [Shard(Version(1, 9), node, 2, 0)]) for node in nodes)))
        return again.control.newest_snapshot

    assert found("a", "b") == Version(1, 9)
    assert found("b") is None


def test_a_last_checkpoint_that_a_coordinator_died_over_is_written_by_the_next_one() -> None:
    told = Told()
    told.form(one(1, "a"))
    told.begin("a")
    told.row(1)
    told.seal(Version(1, 1), {"a": ()})
    told(e.CheckpointWanted(1, 1))
    told(e.Done())
    assert orders(told) == [("a", "a", 1)]
    again = restarted(told)
    again(e.KeeperUp("a", "a", ("a", 1)))
    again(e.KeepersFound((("a", Version(1, 1), [Shard(Version(1, 1), "a", 1, 0)]),)))
    again(e.Settle())
    assert orders(again) == [("a", "a", 1)]
    assert again.control.settling.busy
    all_written(again, 1, "a")
    again(e.Settle())
    assert again.control.settling == Settling(False, "", None, ())
    later = restarted(told, stored=[1])
    later(e.KeeperUp("a", "a", ("a", 1)))
    later(e.KeepersFound((("a", Version(1, 1), [Shard(Version(1, 1), "a", 1, 0)]),)))
    later(e.Settle())
    assert orders(later) == [], "it is in storage"


def test_a_last_step_that_is_newer_than_what_keepers_know_is_waited_for_by_the_next_coordinator() -> None:
    """With nothing in storage yet: what is due, it asked itself, and nothing had begun to train."""
    told = Told()
    told.form(one(1, "a"))
    told.begin("a")
    told.row(1)
    told.row(2)
    told(e.Done())
    events = log_of(told)
    again = Told(Past.of(events, generation=1, logged=2, stored=(), restarted=True))
    again(e.KeeperUp("a", "a", ("a", 1)))
    again(e.KeepersFound((("a", Version(1, 1), [Shard(Version(1, 1), "a", 1, 0)]),)))
    again(group_of(events, 1))
    again(e.Settle())
    assert orders(again) == []
    again.now += ARRIVE_WANTED_S + 0.1
    again()
    again(e.Settle())
    assert orders(again) == [("a", "a", 1)]


@pytest.mark.parametrize("is_restarted", [False, True])
def test_hosts_that_die_one_after_the_other_before_a_step_end_a_run_later_than_errors_do(is_restarted: bool) -> None:
    """A soak lost a process of another host to each of three groups in a row, 0.1 s after they had formed."""
    told, pids = Told(max_workers=2), [1, 2]
    most = MAX_FAILED_GENERATIONS * ERROR // LOSS - ERROR // LOSS + 1
    for number in range(most):
        told.form(*(one(pid, f"node {pid}") for pid in pids))
        assert told.control.ending is None, number
        told(e.Died(((f"node {pids[0]}", pids[0]),), 1, "worker_died", "gone"))
        pids = [pids[1], pids[1] + 1]
    told = restarted(told) if is_restarted else told
    told.join(*(one(pid, f"node {pid}") for pid in pids))
    assert "failed before a new step; last failure: " in told.ask(f"m{pids[0]}", told.control.generation).given_up


@pytest.mark.parametrize("loses", [False, True])
def test_an_error_that_all_groups_meet_at_one_step_ends_the_run_unless_processes_were_lost(loses: bool) -> None:
    """Each group does steps, those since its snapshot, and no new one: a callback raised at the third."""
    told, pids, most = Told(max_workers=2), [1, 2], MAX_FAILED_GENERATIONS * ERROR - ERROR + 1
    for number in range(most):
        told.form(*(one(pid, f"node {pid}") for pid in pids))
        assert told.control.ending is None, number
        told.begin([f"node {pid}" for pid in pids])
        told.row(1)
        told.row(2)
        for rank in (0, 1):
            told(e.Broke(told.control.generation, f"rank {rank}: KeyError: 'x'"))
        if loses:
            told(e.Died(((f"node {pids[0]}", pids[0]),), told.control.generation, "worker_died", "gone"))
            pids = [pids[1], pids[1] + 1]
    told.join(*(one(pid, f"node {pid}") for pid in pids))
    given_up = told.ask(f"m{pids[0]}", told.control.generation).given_up
    failures = [(each["cause"], each["detail"], each["generation"]) for each in told.records("failure")]
    cause, detail = ("worker_died", "gone") if loses else ("worker_failed", "rank 0: KeyError: 'x'")
    assert [each[:2] for each in failures] == [(cause, detail)] * most
    assert [each[2] for each in failures] == list(range(1, most + 1))
    assert bool(given_up) is not loses
    assert loses or "KeyError: 'x'" in given_up


def test_an_error_after_a_new_step_counts_no_group_before() -> None:
    told = Told(max_workers=1)
    for step in range(1, 20):
        told.form(one(1))
        assert told.control.ending is None
        told.begin(["node"], step - 1)
        told.row(step)
        told(e.Broke(told.control.generation, "rank 0: ConnectionError"))


def errs_in_turn(told: Told, groups: Iterable[tuple[int, int]]) -> int:
    """How many groups there are, which all break by an error: of each from which step it goes on, and how far."""
    for number, (start, reached) in enumerate(groups):
        told.join(one(1, "a"), one(2, "b"))
        if told.ask("m1", told.control.generation).formation is None:
            return number
        told.begin("ab", start)
        for step in range(start + 1, reached + 1):
            told.row(step)
        told(e.Broke(told.control.generation, "rank 0: RuntimeError: NCCL: link flap"))
    return number + 1


@pytest.mark.parametrize(
    "groups",
    [
        [(10 * number, 10 * number + 12) for number in range(20)],
        [(0, 5 + number) for number in range(20)],
        [(0, 100), *[(0, 12)] * (MAX_REPEATED - 2), *((10 * number, 10 * number + 12) for number in range(1, 20))],
    ],
    ids=["each goes on from the one before", "each gets beyond the one before", "memory was lost"],
)
def test_groups_that_get_beyond_those_before_end_no_run_whose_log_is_further(groups: list[tuple[int, int]]) -> None:
    """It resumed behind its log, or had gone back; a link flaps again and again."""
    told = Told(Past(generation=3, logged=2000, stored=(0,)), min_workers=2, max_workers=2)
    assert errs_in_turn(told, groups) == len(groups)
    assert told.control.ending is None


def test_an_error_at_one_step_is_the_same_where_the_row_of_that_step_came_in_time_or_not() -> None:
    told = Told(Past(generation=3, logged=2000, stored=(0,)), min_workers=2, max_workers=2)
    assert errs_in_turn(told, [(90, 100 + number % 2) for number in range(20)]) <= MAX_REPEATED + 1
    assert isinstance(told.control.ending, GivenUp)


@pytest.mark.parametrize("starts", [(105, 106), (106, 105), (103, 106, 104)])
def test_an_error_at_one_step_is_the_same_whichever_snapshot_before_it_was_committed_in_time(
    starts: tuple[int, ...],
) -> None:
    told = Told(Past(generation=3, logged=2000, stored=(0,)), min_workers=2, max_workers=2)
    groups = [(starts[number % len(starts)], 107) for number in range(20)]
    assert errs_in_turn(told, groups) <= MAX_REPEATED + 1
    assert isinstance(told.control.ending, GivenUp)


@pytest.mark.parametrize("groups", [[(105, 106), (106, 106)], [(105, 107), (106, 107), (107, 107)]])
def test_a_group_without_a_step_makes_no_error_at_one_step_a_new_one(groups: list[tuple[int, int]]) -> None:
    """It began from later than those before, and met the error at once."""
    told = Told(Past(generation=3, logged=2000, stored=(0,)), min_workers=2, max_workers=2)
    assert errs_in_turn(told, groups * 20) <= len(groups) * (MAX_REPEATED + 1)
    assert isinstance(told.control.ending, GivenUp)


@pytest.mark.parametrize("is_own", [True, False])
def test_an_error_at_one_step_ends_the_run_where_its_process_ends_itself_too(is_own: bool) -> None:
    """A CUDA process whose device answers no more does. What survivors say first of a peer that died is no error."""
    told = Told(Past(generation=3, logged=2000, stored=(0,)), min_workers=2, quarantine_failures=0)
    for pid in range(1, 21):
        a, b = one(pid, "a"), one(99, "b")
        told.join(a, b)
        answer = told.ask("m99", told.control.generation)
        if answer.formation is None:
            break
        told.begin("ab", 100)
        for step in range(101, 107):
            told.row(step)
        rank = answer.formation.rank_of(a.id) if is_own else None
        told(e.Broke(told.control.generation, "rank 0: AcceleratorError: CUDA error", rank))
        told(e.Unfit("a", pid, "cuda:0 does not answer"))
        told(e.Gone("a", pid))
    assert isinstance(told.control.ending, GivenUp) is is_own
    if is_own:
        assert pid <= MAX_REPEATED + 1
        assert "rank 0: AcceleratorError: CUDA error" in answer.given_up


def test_a_state_that_computed_wrong_and_is_taken_back_counts_no_error_before() -> None:
    told = Told(min_workers=2, max_workers=2)
    errors = [(0, 100), *((95, 100) for _ in range(MAX_REPEATED - 2))]
    assert errs_in_turn(told, [*errors, *((number, number + 2) for number in range(20))]) == len(errors) + 20


@pytest.mark.parametrize("num_steps", [0, 6])
@pytest.mark.parametrize("how", ["an exception", "one rank's trouble"])
def test_an_error_that_all_groups_meet_at_one_step_ends_a_run_whose_processes_all_start_anew(
    how: str, num_steps: int
) -> None:
    told = Told(in_place=False, min_workers=2, max_workers=2, quarantine_failures=0)
    for number in range(MAX_REPEATED if num_steps else MAX_FAILED_GENERATIONS):
        a, b = one(2 * number + 1, "a"), one(2 * number + 2, "b")
        told.form(a, b)
        told.begin("ab")
        for step in range(1, num_steps + 1):
            told.row(step)
        if how == "an exception":
            told(e.GroupFailed("worker_failed", "rank 0: KeyError: 7", (0, 1)))
        else:
            told(e.Trouble(told.control.generation, a, 2, "KeyError: 7"))
            told.now += OTHERS_S + 1.0
            told()
            assert told.ask(a.id, told.control.generation).unfit
            told(e.GroupFailed("worker_died", "rank 0: the actor died", (0,)))
    assert told.control.ending is None
    told.start(one(101, "a"), one(102, "b"))
    told.join(one(101, "a"), one(102, "b"))
    given_up = told.ask("m101", told.control.generation).given_up
    assert "group after group failed before a new step" in given_up
    assert "KeyError: 7" in given_up


def test_starts_in_vain_are_one_interruption_of_training_and_not_one_each() -> None:
    """Snapshots and automatic checkpoints came three times as often for the rest of the job."""
    told = Told()
    told.form(one(1))
    told.begin(["node"])
    told.row(1)
    told(e.GroupFailed("controller_died", "Ray Train's controller", ()))
    once = told.control.cadence.mtbf_s(600.0)
    for _ in range(9):
        told.now += 60.0
        told(e.GroupFailed("worker_died", "no group of workers starts: too little memory", ()))
    assert told.control.cadence.mtbf_s(600.0) >= once
    assert told.control.group.num_failures == 1


def test_groups_that_fail_in_a_row_are_counted_on_by_the_next_coordinator() -> None:
    """A coordinator that dies with each of them would let them fail for ever."""
    told = Told()
    for _ in range(MAX_FAILED_GENERATIONS - 1):
        told.form(one(1))
    again = restarted(told)
    again.form(one(1))
    assert again.control.ending is None
    again.join(one(1))
    assert again.ask("m1", again.control.generation).given_up


def test_a_group_that_has_done_a_step_has_not_failed_for_the_next_coordinator_either() -> None:
    told = Told()
    for step in (0, 0, 1):
        told.form(one(1))
        told.begin(["node"], step)
    past = Past.of(log_of(told), generation=3, logged=1, stored=(), restarted=True)
    assert past.failed_groups == ERROR, "the newest, which goes on from step 1"
    told.row(2)
    assert Past.of(log_of(told), generation=3, logged=2, stored=(), restarted=True).failed_groups == 0


def test_a_group_that_trained_and_went_back_has_not_failed_for_the_next_coordinator_either() -> None:
    """To the step from which it had begun, each time: the next one counted all of them, and ended the run."""
    told = Told(Past(logged=1000))
    for step in (1000, 1500, 1300):
        told.form(one(1))
        told.begin(["node"], 1000)
        for later in range(1001, step + 1):
            told.row(later)
    past = Past.of(log_of(told), generation=3, logged=1000, stored=(1000,), restarted=True)
    assert past.failed_groups == ERROR, "the newest"


def test_why_group_after_group_failed_is_known_to_the_next_coordinator() -> None:
    told = Told()
    for _ in range(MAX_FAILED_GENERATIONS):
        told.form(one(1))
        told(e.Broke(told.control.generation, "rank 0: KeyError: 7"))
    again = restarted(told)
    again.join(one(1))
    assert "last failure: rank 0: KeyError: 7" in again.ask("m1", again.control.generation).given_up


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_group_begins_once_though_the_coordinator_dies_before_it_answers_and_is_told_again(is_lost: bool) -> None:
    told = Told()
    told.form(one(1, "a"), one(2, "b"))
    told.begin("ab", step=3)
    if is_lost:
        told(e.Died((("b", 2),), 1, "worker_died", "gone"))
    again = restarted(told)
    again.begin("ab", step=3)
    assert again.records("generation") == []
    assert again.control.state == (Waiting() if is_lost else Training(1)), "it was over before"


def test_a_coordinator_that_was_restarted_counts_how_long_too_few_are_there_from_when_they_were() -> None:
    told = Told(wait_for_workers_s=50.0, min_workers=2)
    told.form(one(1, "a"), one(2, "b"))
    told.begin("ab")
    told(e.Died((("b", 2),), 1, "worker_died", "gone"))
    events = log_of(told)
    told.now += 40.0
    again = Told(
        Past.of(events, generation=1, logged=0, stored=(), restarted=True), wait_for_workers_s=50.0, min_workers=2
    )
    again.now = told.now
    again(group_of(events, 1))
    again()
    assert again.control.ending is None
    again.now += 11.0
    again()
    assert isinstance(again.control.ending, GivenUp)


def test_a_coordinator_that_was_restarted_leaves_a_quarantined_node_alone() -> None:
    told = Told(quarantine_failures=1)
    told.form(one(1), one(2, "bad"))
    told(e.Died((("bad", 2),), 1, "worker_died", "gone"))
    assert told.control.excluded_nodes(told.now) == {"bad"}
    again = restarted(told, quarantine_failures=1)
    assert again.control.excluded_nodes(again.now) == {"bad"}
    assert again.control.excluded_nodes(again.now + PretrainConfig().cluster.quarantine_s + 1.0) == set()
    fresh = Past.of(log_of(told), generation=1, logged=0, stored=(), restarted=False)
    assert fresh.quarantined_until == {}, "a new job tries it"


def test_a_coordinator_that_was_restarted_allows_no_more_rollbacks_than_one_that_was_not() -> None:
    told = Told()
    told.form(one(1))
    told.begin(["node"])
    told(e.NotFinite(1, 5, "loss is nan"))
    assert told.control.ending is None
    again = restarted(told)
    again.form(one(1))
    again(e.NotFinite(again.control.generation, 5, "loss is nan"))
    assert isinstance(again.control.ending, GivenUp)
    assert Past.of(log_of(told), generation=1, logged=0, stored=(), restarted=True).rollbacks == Rollbacks(1, 5)


def test_a_rollback_that_a_coordinator_is_told_of_again_counts_once() -> None:
    """The one before had it in the log and died before it answered: Ray makes the call again."""
    told = training("a")
    told.row(1)
    told(e.NotFinite(1, 2, "loss is nan"))
    again = restarted(told)
    again(e.NotFinite(1, 2, "loss is nan"))
    assert (again.control.ending, again.records("failure")) == (None, [])
    assert again.form(one(0, "a")).generation == 2
    again.begin("a")
    again.row(1)
    again(e.NotFinite(2, 2, "loss is nan"))
    assert isinstance(again.control.ending, GivenUp)


def test_a_run_that_is_given_up_for_its_last_rollback_is_by_a_coordinator_that_is_told_of_that_again() -> None:
    """The one before died before the driver had heard that it gave the run up."""
    told = training("a")
    for allowed in (True, False):
        told.row(1)
        told(e.NotFinite(told.control.generation, 2, "loss is nan"))
        assert (told.control.ending is None) is allowed
        if allowed:
            told.form(one(0, "a"))
            told.begin("a")
    again = restarted(told)
    again(e.NotFinite(2, 2, "loss is nan"))
    assert again.control.ending == told.control.ending
    assert again.records("failure") == []


def test_what_keepers_hold_does_not_count_where_a_group_after_it_went_another_way() -> None:
    """Of another door, or another cluster, which knew nothing of these keepers; the log has all groups."""
    told = training("ab")
    told.row(1)
    events = [
        *log_of(told),
        {"event": "generation", "generation": 2, "start_step": 0, "time": told.now, "workers": []},
        {"event": "generation", "generation": 3, "start_step": 200, "time": told.now, "workers": []},
        {"event": "submitted", "time": told.now},
    ]
    for generation, step, counts in ((1, 290, False), (2, 290, False), (2, 200, True), (3, 250, True), (4, 1, True)):
        again = Told(Past.of(events, generation=3, logged=250, stored=[200], restarted=False))
        version = Version(generation, step)
        known = tuple((node, version, [Shard(version, node, 2, step)]) for node in "ab")
        again(e.KeepersFound(known, generation))
        assert again.control.newest_snapshot == (version if counts else None)
        notes = [each["text"] for each in again.records("note")]
        assert [each.endswith("generation 3 went on from step 200") for each in notes] == [True] * (not counts)


@pytest.mark.parametrize("is_restarted", [True, False], ids=["coordinator", "job"])
def test_what_is_in_memory_of_a_state_that_went_wrong_counts_for_no_coordinator_after_that_either(
    is_restarted: bool,
) -> None:
    """Each would have begun from the same state again, for as many rollbacks as are allowed."""
    told = training("ab")
    for step in range(1, 16):
        told.row(step)
    told.seal(Version(1, 14), told.peers)
    told(e.NotFinite(1, 15, "loss is nan"))
    events = log_of(told)
    again = Told(Past.of(events, generation=1, logged=15, stored=[10], restarted=is_restarted))
    for node in "ab":
        again(e.KeeperUp(node, node, (node, 1)))
    held = {node: [Shard(Version(1, step), node, 2, step) for step in (13, 14, 15)] for node in "ab"}
    found = e.KeepersFound(tuple((node, Version(1, 14), held[node]) for node in "ab"), 1)
    again(found)
    if is_restarted:
        again(group_of(events, 1))
        assert isinstance(again.control.state, Waiting)
    assert again.control.newest_snapshot is None
    again.seal(Version(1, 15), told.peers)
    again(found)
    assert again.control.newest_snapshot is None
    again.form(one(0, "a"), one(1, "b"))
    again.begin("ab", step=10)
    later = [*events, *log_of(again, submitted=False)]
    for generation, step in ((1, 10), (2, 11)):  # the first is of the step from which the other group began
        third = Told(Past.of(later, generation=2, logged=10, stored=[10], restarted=is_restarted))
        version = Version(generation, step)
        third(e.KeepersFound(tuple((node, version, [Shard(version, node, 2, step)]) for node in "ab"), 2))
        assert third.control.newest_snapshot == (version if generation == 2 else None)
    again.seal(Version(2, 11), again.peers)
    assert again.control.newest_snapshot == Version(2, 11)


def test_a_group_of_which_the_log_does_not_know_is_over_and_its_ranks_have_the_rows_of_it() -> None:
    """Storage went away before it was formed: the next one's number was two above, and ranks took that for a group
    without them."""
    told = training("ab")
    for step in (1, 2, 3):
        told.row(step)
    again = Told(Past.of(log_of(told), generation=1, logged=3, stored=[], restarted=True))
    for node in "ab":
        again(e.KeeperUp(node, node, (node, 1)))
    held = Version(2, 9)
    found = e.KeepersFound(tuple((node, held, [Shard(held, node, 2, 9)]) for node in "ab"), 2)
    again(found)
    again(group_of(log_of(told), again.control.generation))
    assert again.of(c.TellOver) == [c.TellOver(2, ("a", "b"))]
    for event in (e.Row(2, again.metrics(10)), e.Leaving(2, 10, ""), e.CheckpointWanted(2, 10)):
        with pytest.raises(Fenced, match="generation 2 is over; none is current"):
            again(event)
    again.seal(Version(2, 10), {"a": "b", "b": "a"})
    assert again.control.newest_snapshot == held
    assert again.form(one(0, "a"), one(1, "b")).generation == 3
    again.begin("ab", step=9)
    assert again(e.Row(3, again.metrics(10))).wanted == 4
    again(e.RowsAgain(3, 4, [again.metrics(step, generation=2 if step < 10 else 3) for step in range(4, 11)]))
    assert [command.row["step"] for command in again.of(c.LogRow)] == list(range(4, 11))
    assert again.records("note") == []


def test_a_group_whose_beginning_is_not_in_the_log_is_gone_on_with_by_its_first_row() -> None:
    """The coordinator died after it had answered, and before that was written: nothing was committed ever after."""
    told = training("ab")
    told.row(1)
    events = [event for event in log_of(told) if event["event"] != "generation"]
    again = Told(Past.of(events, generation=1, logged=0, stored=[], restarted=True), every_steps=1)
    for node in "ab":
        again(e.KeeperUp(node, node, (node, 1)))
    again(group_of(events, 1))
    assert isinstance(again.control.state, Forming)
    assert again(e.Row(1, again.metrics(3))).wanted == 1
    assert isinstance(again.control.state, Training)
    again(e.RowsAgain(1, 1, [again.metrics(step) for step in (1, 2, 3)]))
    assert [command.row["step"] for command in again.of(c.LogRow)] == [1, 2, 3]
    again.seal(Version(1, 4), again.peers)
    assert again.control.newest_snapshot == Version(1, 4)
    (begun,) = again.records("generation")
    assert (begun["generation"], begun["start_step"], begun["world_size"]) == (1, 2, 2)
    later = group_of([*events, *log_of(again, submitted=False)], 1)
    assert (later.start_step, later.nodes) == (2, ("a", "b"))


def test_a_row_that_is_sent_again_of_a_group_whose_beginning_is_not_in_the_log_gives_no_snapshot_up() -> None:
    """Schedule 1326: what was committed after that row's step did not count any more."""
    told, newest = training("ab"), Version(1, 2)
    told.row(1)
    events = [event for event in log_of(told) if event["event"] != "generation"]
    again = Told(Past.of(events, generation=1, logged=0, stored=[], restarted=True), every_steps=1)
    for node in "ab":
        again(e.KeeperUp(node, node, (node, 1)))
    again(e.KeepersFound(tuple((node, newest, [Shard(newest, node, 2, 2)]) for node in "ab"), 1))
    again(group_of(events, 1))
    again.row(1)
    assert isinstance(again.control.state, Training)
    assert again.control.newest_snapshot == newest


def test_rows_that_come_again_first_of_a_group_whose_beginning_is_not_in_the_log_are_logged() -> None:
    """The coordinator before had asked for them; the log's thread threw, and none of them was in it."""
    again = Told(Past(5, 95, (90,), restarted=True))
    again(e.Restarted((one(1, "a"), one(2, "b")), None, ()))
    again(e.RowsAgain(5, 96, [again.metrics(step) for step in range(96, 102)]))
    again.row(102)
    wanted = [command for command in again.commands if isinstance(command, c.BeginRows | c.LogRow)]
    steps = [command.row["step"] if isinstance(command, c.LogRow) else command for command in wanted]
    assert steps == [c.BeginRows(5, 95), *range(96, 102), c.BeginRows(5, 101), 102]


def test_what_an_earlier_job_did_is_not_taken_for_what_this_one_does() -> None:
    told = Told()
    told.form(one(1))
    told.begin(["node"])
    told(e.Done())
    events = [*log_of(told), {"event": "submitted", "time": told.now}]
    assert Past.of(events, generation=1, logged=0, stored=(), restarted=True).trained is None
    assert group_of(events, 1) == e.Restarted((), None, ())


@pytest.mark.parametrize("is_done", [True, False], ids=["ended", "was killed"])
def test_a_coordinator_that_died_before_its_job_was_in_the_log_begins_that_job(is_done: bool) -> None:
    """It took the job before for its own: all workers ended at once, or the dead were waited for without end."""
    told = Told()
    told.form(one(1, "a"), one(2, "b"))
    told.begin("ab")
    for step in (1, 2, 3):
        told.row(step)
    if is_done:
        told(e.Done())
    events = [event | ({"job": "first"} if event["event"] == "submitted" else {}) for event in log_of(told)]
    past = Past.of(events, generation=1, logged=3, stored=[3], restarted=True, job="second")
    assert past.trained is None
    again = Told(past)
    again(group_of(events, 1, "second"))
    assert again.control.ending is None
    assert isinstance(again.control.state, Waiting)
    formation = again.form(one(11, "a"), one(12, "b"))
    assert [member.id for member in formation.members] == ["m11", "m12"]
    assert is_submitted(events, "first")
    assert not is_submitted(events, "second")
    assert (Past.of(events, generation=1, logged=3, stored=[3], restarted=True, job="first").trained is None) != is_done
    assert len(group_of(events, 1, "first").members) == 2


def test_checkpoints_that_cannot_be_deleted_are_told_of() -> None:
    told = Told()
    told(e.Deleted("old checkpoints were not all deleted"))
    told(e.Deleted(""))
    assert told.records("note") == [{"text": "old checkpoints were not all deleted"}]


# keepers


def test_keepers_outside_the_group_hear_of_its_first_commit_which_frees_what_they_hold() -> None:
    """A job at eight nodes was killed, and resumed at two: six held its snapshots until the run ended."""
    told = Told(fan_out=2)
    up = [e.KeeperUp(node, node, (node, 1)) for node in "abcdef"]
    for event in up:
        told(event)
    told(e.NodesAlive(frozenset("abcdef")))

    def announced(version: Version) -> set[str]:
        told.clear()
        told.seal(version, {"a": "b", "b": "a"})
        return set(told.of(c.Announce)[-1].nodes)

    told.form(one(1, "a"), one(2, "b"))
    told(e.Began(1, 0, ("a", "b"), {}))
    told(e.NodesAlive(frozenset("abcdeg")))
    assert announced(Version(1, 5)) == set("abcde"), "one of them is dead"
    assert announced(Version(1, 6)) == set("ab"), "once"
    told(e.KeeperUp("g", "g", ("g", 1)))  # late
    assert announced(Version(1, 7)) == set("abg")
    told.control.snapshots.keeper_up(replace(up[2], restarted=True), told.now)  # with what its folder has
    assert announced(Version(1, 8)) == set("abc")
    told.form(one(1, "a"), one(2, "b"))
    told(e.Began(2, 8, ("a", "b"), {}))
    assert announced(Version(2, 9)) == set("abcdeg")


def test_a_group_on_one_node_has_its_copies_on_another_that_is_up_until_that_is_gone() -> None:
    told = Told()
    told.form(one(1, "a"))
    for node, domain in {"a": "rack 1", "b": "rack 1", "c": "rack 2"}.items():
        told(e.KeeperUp(node, domain, (node, 1)))

    told(e.Began(1, 0, ("a",), {}))
    assert told.peers == {"a": ("c",)}  # of another rack
    told.seal(Version(1, 5), {"a": "c"})
    assert told.of(c.Announce)[-1].nodes == ("a", "c", "b")  # the last once
    told.clear()
    told(e.NodesAlive(frozenset("abc")))
    told(e.Complaint("a", "slow"))
    assert told.of(c.SendPlaces) == []
    told(e.NodesAlive(frozenset("ab")))
    told(e.Complaint("a", "its peer is gone"))
    assert told.peers == {"a": ("b",)}
    told.seal(Version(1, 6), {"a": "c"})  # these copies went with it
    assert told.control.newest_snapshot == Version(1, 5)
    told.seal(Version(1, 6), {"a": "b"})
    assert told.control.newest_snapshot == Version(1, 6)
    told(e.NodesAlive(frozenset("a")))
    told(e.Complaint("a", "its peer is gone"))
    told.seal(Version(1, 7), {"a": ""})
    assert told.control.newest_snapshot == Version(1, 7)
    assert len(told.records("snapshot_failed")) == 1  # once a generation


def refuse(told: Told, node: str, peer: str, seconds: float = REFUSED_S + RETRY_S_OF_KEEPERS) -> None:
    """Its keeper tries again and again, for so long."""
    until = told.now + seconds
    while told.now < until:
        told(e.Complaint(node, "No space left on device", peer))
        told()
        told.now += RETRY_S_OF_KEEPERS


def training(nodes: Sequence[str], **options: Any) -> Told:
    told = Told(**options)
    told.form(*(one(pid, node) for pid, node in enumerate(nodes)))
    told.begin(nodes)
    return told


def test_a_keeper_that_took_long_to_be_back_holds_the_copies_again_that_it_held() -> None:
    """Nobody else could: for half a minute the other node would have had none."""
    told = training("ab")
    refuse(told, "a", "b")
    assert told.peers == {"a": (), "b": ("a",)}
    told(e.KeeperUp("b", "b", ("b", 2), restarted=True))
    assert told.peers == {"a": ("b",), "b": ("a",)}
    told.seal(Version(1, 5), {"a": (), "b": ("a",)})
    assert told.control.newest_snapshot is None, "that copy is still to be made"
    told.seal(Version(1, 5), told.peers)
    assert told.control.newest_snapshot == Version(1, 5)


def test_a_node_that_cannot_copy_to_its_peer_gets_another_one_and_steps_commit_again() -> None:
    told = training("abc")
    assert told.peers == {"a": ("b",), "b": ("c",), "c": ("a",)}
    told.clear()
    refuse(told, "a", "b", REFUSED_S - 1.0)
    assert told.of(c.SendPlaces) == [], "a keeper that is restarted is there again by then"
    refuse(told, "a", "b")
    assert told.peers == {"a": ("c",), "b": ("a",), "c": ("b",)}
    (moved,) = told.records("copies_moved")
    assert moved["detail"] == "node a cannot copy its snapshots to node b: its copies are on c from here on"
    told.seal(Version(1, 5), told.peers)
    assert told.control.newest_snapshot == Version(1, 5)


def test_a_peer_that_says_nothing_is_given_up_at_its_first_timeout() -> None:
    told = training("abc")
    told(e.Complaint("a", "timed out", "b", tried_s=20.0))
    told()
    assert told.peers["a"] == ("c",)


def test_nothing_moves_for_a_peer_that_died_with_its_group() -> None:
    """The next group has other places, and says nothing of copies that are none."""
    told = training("ab")
    told(e.Broke(1, "its peer died"))
    told(e.Died((("b", 1),), 1, "worker_died", "gone"))
    told.clear()
    refuse(told, "a", "b")
    assert told.of(c.SendPlaces) == []
    assert told.records("copies_moved") == []


def test_copies_of_the_last_step_move_too() -> None:
    told = training("abc")
    told(e.Done())
    refuse(told, "a", "b")
    assert told.peers["a"] == ("c",)


def test_a_copy_that_arrives_between_two_refusals_makes_the_link_good() -> None:
    told = training("abc")
    for _ in range(10):
        told(e.Complaint("a", "Connection refused", "b"))
        told.now += REFUSED_S - 1.0
        told.seal(Version(1, 5), {"a": ("b",)})
    assert told.peers["a"] == ("b",)


def test_a_refusal_in_an_earlier_generation_does_not_give_a_link_up() -> None:
    """The two met again weeks later, and the first word of a link that was good for all that time was the last."""
    told = training("abc")
    told(e.Complaint("a", "Connection refused", "b"))
    told.form(*(one(pid, node) for pid, node in enumerate("abc")))
    told.begin("abc", 1)
    told.now += 1e6
    told(e.Complaint("a", "Connection refused", "b"))
    told()
    assert told.peers["a"] == ("b",)
    refuse(told, "a", "b")
    assert told.peers["a"] == ("c",)


def test_a_node_without_room_holds_nobodys_copies_and_costs_no_round_of_all_the_others() -> None:
    told = training("abcdef", copies=1)
    full = "b"
    for _ in range(2):
        (victim,) = [node for node, holders in told.peers.items() if full in holders]
        refuse(told, victim, full)
    assert all(full not in holders for holders in told.peers.values())
    assert all(len(holders) == 1 for holders in told.peers.values()), "one node holds two's instead"
    assert len(told.records("copies_moved")) == 2


def test_steps_commit_without_the_copies_of_a_node_that_no_other_takes_and_one_is_tried_again_later() -> None:
    told = training("ab")
    refuse(told, "a", "b")
    assert told.peers == {"a": (), "b": ("a",)}
    (moved,) = told.records("copies_moved")
    assert moved["peers"] == []
    assert "it has no copies" in moved["detail"]
    told.seal(Version(1, 10), told.peers)
    assert told.control.newest_snapshot == Version(1, 10)
    assert [order.node for order in told.of(c.Write)] == ["a", "b"], "and so do checkpoints"
    told.now += AGAIN_S
    told()
    assert told.peers == {"a": ("b",), "b": ("a",)}
    refuse(told, "a", "b")
    told.now += AGAIN_S
    told()
    assert told.peers == {"a": (), "b": ("a",)}, "twice as long the next time"
    told.now += AGAIN_S
    told()
    assert told.peers == {"a": ("b",), "b": ("a",)}


def test_a_link_may_be_given_up_any_number_of_times() -> None:
    links, now = Links(), 0.0
    for _ in range(1100):
        assert links.refused("a", "b", REFUSED_S, now)
        now += AT_MOST_S + 1.0
        assert links.try_again(now)


def test_a_link_that_was_whole_for_long_is_given_up_for_as_long_as_the_first_time() -> None:
    """Before, blips of 6 s ten days apart gave it up for 30, 60, 120, 240 and 480 s."""
    links, now = Links(), 0.0
    for whole_s in (0.0, AT_MOST_S + 1.0, 864_000.0):
        assert not links.refused("a", "b", 0.0, now + whole_s)
        assert links.refused("a", "b", 0.0, now := now + whole_s + REFUSED_S)
        assert not links.try_again(now + AGAIN_S - 1.0)
        assert links.try_again(now := now + AGAIN_S + 1.0)
    assert links.refused("a", "b", REFUSED_S, now := now + AT_MOST_S - 1.0)
    assert not links.try_again(now + 2 * AGAIN_S - 1.0), "twice as long, as it was not whole for long"


def test_links_that_are_given_up_together_move_all_copies_once() -> None:
    told = training([f"n{number}" for number in range(8)])
    peers = dict(told.peers)
    told.clear()
    for _ in range(4):
        for node, (peer,) in peers.items():
            told(e.Complaint(node, "No space left on device", peer))
        told.now += RETRY_S_OF_KEEPERS
    assert told.of(c.SendPlaces) == []
    told()
    assert len(told.of(c.SendPlaces)) == 1
    assert all(told.peers[node] != holders and len(told.peers[node]) == 1 for node, holders in peers.items())


def test_with_two_copies_a_step_commits_once_both_are_there_and_either_writes_a_checkpoint() -> None:
    told = training("abcd", copies=2)
    assert told.peers == {"a": ("b", "c"), "b": ("c", "d"), "c": ("d", "a"), "d": ("a", "b")}
    told.seal(Version(1, 10), {**told.peers, "a": ("b",)})
    assert told.control.newest_snapshot is None
    told.seal(Version(1, 10), told.peers)
    assert told.control.newest_snapshot == Version(1, 10)
    told.clear()
    for node in "abc":
        assert told.of(c.Write)[-1:] == [] or told.of(c.Write)[-1].node == node
        told(e.WriteFailed(1, "a", node, "is gone"))
    assert [(order.node, order.copies) for order in told.of(c.Write)] == [("b", True), ("c", True)]
    assert len(told.records("checkpoint_failed")) == 1


def test_a_group_of_fewer_nodes_than_copies_uses_nodes_outside_of_other_racks_first() -> None:
    told = Told(copies=2)
    told.form(one(1, "a"), one(2, "b"))
    for node, rack in {"a": "1", "b": "1", "c": "1", "d": "2"}.items():
        told(e.KeeperUp(node, rack, (node, 1)))
    told(e.Began(1, 0, ("a", "b"), {}))
    assert told.peers == {"a": ("b", "d"), "b": ("a", "d")}
    assert told.control.copies_are_outside


def test_a_node_outside_the_group_that_held_copies_and_is_dead_is_done_without_at_once() -> None:
    """Until others hold its copies nothing is committed."""
    told = Told(copies=2)
    told.form(one(1, "a"), one(2, "b"))
    for node in "abcd":
        told(e.KeeperUp(node, node, (node, 1)))
    told(e.Began(1, 0, ("a", "b"), {}))
    assert "c" in {each for holders in told.peers.values() for each in holders}
    told(e.NodesAlive(frozenset("abd")))
    assert told.peers == {"a": ("b", "d"), "b": ("a", "d")}
    told.seal(Version(1, 5), told.peers)
    assert told.control.newest_snapshot == Version(1, 5)


def test_a_keeper_that_hangs_keeps_no_others_report_back_and_is_started_anew() -> None:
    nodes = [f"n{number:02}" for number in range(30)]
    told = training(nodes, max_workers=30)
    places = told.of(c.SendPlaces)[-1].places
    hung = next(node for node in nodes if len(places[node].members) > 1)
    below = {hung, *places[hung].members}
    told.clear()

    def reported(but: set[str]) -> None:
        told.seal(Version(1, 5), {node: holders for node, holders in peers.items() if node not in but})

    peers = {node: tuple(peer.node for peer in place.peers) for node, place in places.items()}
    reported(below)
    for _ in range(2):
        told()
        told.now += SILENT_S + 1.0
    places = told.of(c.SendPlaces)[-1].places
    assert all(places[node].leader == "" and not places[node].members for node in below)
    assert sum(place.num_nodes for place in places.values() if not place.leader) == len(nodes)
    (asked,) = [ask for ask in told.of(c.Ask) if ask.number == HANGS]
    assert set(asked.nodes) == below
    for node in below - {hung}:
        told(e.Answered(HANGS, node, []))
    reported({hung})
    for _ in range(2):
        told()
        told.now += SILENT_S + 1.0
    assert told.of(c.RestartKeeper) == [c.RestartKeeper(hung)]
    assert [fields["node"] for fields in told.records("keeper_restarted")] == [hung]
    told(e.KeeperUp(hung, hung, (hung, 2), restarted=True))
    reported(set())
    assert told.control.newest_snapshot == Version(1, 5)


def test_keepers_that_are_slow_and_answer_are_left_alone() -> None:
    told = training("abc")
    told.seal(Version(1, 5), {"a": ("b",)})
    for _ in range(5):
        told()
        told.now += SILENT_S + 1.0
        for ask in told.of(c.Ask):
            for node in ask.nodes:
                told(e.Answered(ask.number, node, []))
    assert told.of(c.RestartKeeper) == []


def test_a_step_that_survivors_have_all_of_needs_no_commit() -> None:
    told = Told()
    nodes = "abc"
    told.form(*(one(pid, node) for pid, node in enumerate(nodes)))
    told.begin(nodes, 9)
    for step in range(10, 14):
        told.row(step)
        if step == 10:
            told.seal(Version(1, 10), {"a": "b", "b": "c", "c": "a"})
    held = [Shard(Version(1, step), node, 3, 0) for step in (10, 11, 13) for node in nodes]
    held += [Shard(Version(1, 12), "a", 3, 0), Shard(Version(1, 14), "a", 1, 0)]  # torn; and without a row
    whole = {version for version in {shard.moment for shard in held} if is_whole(version, held)}
    assert whole == {Version(1, step) for step in (10, 11, 13, 14)}
    assert told.control.newest_of(whole) == Version(1, 13)
    assert told.control.newest_of({Version(1, 10), Version(1, 11)}) == Version(1, 11)
    assert told.control.newest_of([Version(2, 13)]) == Version(1, 10), "of a generation that has not begun"
    assert told.control.newest_of([]) == Version(1, 10)


def test_a_newcomer_is_given_nodes_that_train_else_those_that_came_before_it() -> None:
    told = Told()

    def given(node: str) -> list[str]:
        peers: list[Peer] = told(e.NeighboursAsked(node, (node, 1)))
        assert all(peer.address == (peer.node, 1) for peer in peers)
        return [peer.node for peer in peers]

    assert given("a") == []
    assert given("b") == ["a"]
    assert given("a") == ["b"]  # another rank of it asks
    assert given("c") == ["a", "b"]
    told(e.NodesAlive(frozenset("abdef")))
    assert given("d") == ["a", "b"]
    told.form(one(1, "a"), one(2, "b"))
    told.begin("ab")
    found = given("e")
    assert sorted(found[:2]) == ["a", "b"]
    assert found[2:] == ["d"]
    assert given("a") == ["b", "e", "d"]
    assert "g" not in given("a")
    given("g")
    assert "g" in given("a"), "Ray has not been asked since it came"


# members that do not get on


def answering(told: Told, here: dict[str, Callable[[], Any]]) -> None:
    """Keepers answer what they were asked."""
    asked = told.of(c.Ask)
    told.commands = [command for command in told.commands if not isinstance(command, c.Ask)]
    for command in asked:
        for node in command.nodes:
            answer = f"the stacks of {node}" if command.question is c.Question.STACKS else here[node]()
            told(e.Answered(command.number, node, answer))


def test_who_runs_and_never_arrives_is_given_up_after_two_questions_and_a_look() -> None:
    """On node b, where a process that is no member is idle, too."""
    told = Told(silence_s=30.0, stuck_s=60.0)
    told.control.health.usual.longest_s[Phase.step] = 20.0  # the longest step so far
    told.form(one(11, "a"), one(22, "b"))
    told.begin("ab")
    told.row(1, step_s=1.0)
    told.clear()
    begun, asked = told.now, [0]

    def state() -> Pulse:
        return Pulse(0, 1, 9, 0.0, 0.0, "S", collectives=40, phase=Phase.step, phase_s=told.now - begun)

    def of_a() -> list[Pulse]:
        asked[0] += 1
        return [replace(state(), pid=11, collectives=41, waits=True, waits_s=told.now - begun, asked=asked[0])]

    here = {
        "a": of_a,
        "b": lambda: [replace(state(), pid=22, asked=asked[0]), replace(state(), pid=33, asked=asked[0])],
    }
    for at in (2.5, 10.0, 19.0):
        told.now = begun + at
        told()
        assert {command.question for command in told.of(c.Ask)} <= {c.Question.HEARTBEATS}
        answering(told, here)
        told()
    limit_s = FACTOR * 20.0 + BEYOND_S
    for at in (BEYOND_S + 1, BEYOND_S + 10, limit_s - 1, limit_s + 1):
        told.now = begun + at
        told()
        answering(told, here)
        told()
        assert told.of(c.Kill) == []
    for at in (limit_s + 1.5 + WHERE_AGAIN_S, limit_s + 1.6 + WHERE_AGAIN_S):
        told.now = begun + at
        told()
        answering(told, here)
        told()
        answering(told, here)
    told()
    (saved,) = told.of(c.SaveStacks)
    assert saved.found == {"b": "the stacks of b", "a": "the stacks of a"}
    assert told.of(c.Kill) == [c.Kill("b", 22)]
    (failure,) = told.records("failure")
    assert failure["cause"] == "worker_hung"
    assert "process 22 runs, and is not in the collective that others wait in: in step for 5" in failure["detail"]
    assert "20.0 s is the longest so far" in failure["detail"]
    (suspected,) = told.records("suspected")
    assert (suspected["kind"], suspected["node"], suspected["pid"], suspected["rank"]) == ("hung", "b", 22, 1)


def test_who_is_in_the_users_code_alone_hangs_once_collectives_have_timed_out_and_not_before() -> None:
    """Rank 1 evaluates for longer than 20 s, where steps take one, and rank 0 waits for it; before, it was ended."""
    told = Told(silence_s=30.0, stuck_s=60.0)
    told.control.health.usual.longest_s |= {Phase.step: 1.0, Phase.callback: 0.1}
    timeout_s = told.control._config.train.collective_timeout_s
    told.form(one(11, "a"), one(22, "b"))
    told.begin("ab")
    for step in (1, 2, 3):
        told.row(step, step_s=1.0)
    told.clear()
    begun, asked = told.now, [0]

    def there(pid: int) -> list[Pulse]:
        asked[0] += 1
        waits, waited_s = pid == 11, told.now - begun
        phase = Phase.step if waits else Phase.callback
        pulse = Pulse(pid, 1, 3, 0.0, 0.0, "S", asked[0], 40 + waits, waits, waited_s * waits, phase, waited_s)
        return [pulse]

    given_up_at = None
    while given_up_at is None:
        told.now += 1.0
        assert told.now - begun < 2 * timeout_s
        told()
        answering(told, {"a": lambda: there(11), "b": lambda: there(22)})
        given_up_at = told.now - begun if told.of(c.Kill) else None
    assert asked[0] > 100, "they are asked where they are all the while"
    assert told.of(c.Kill) == [c.Kill("b", 22)]
    assert timeout_s < given_up_at < timeout_s + 3 * WHERE_AGAIN_S
    (failure,) = told.records("failure")
    assert f"in callback for {timeout_s // 100:.0f}" in failure["detail"]


def test_what_gpus_told_last_is_kept_also_of_nodes_that_answer_no_more() -> None:
    told = Told(gpus_per_worker=1, probe_every_steps=1)
    told.form(*(one(pid, node) for pid, node in enumerate("abc")))
    told.begin("abc")

    def asked() -> int:
        number: int = [command.number for command in told.of(c.Ask) if command.question is c.Question.GPUS][-1]
        return number

    told.row(1)
    told(e.Answered(asked(), "a", ["50 C"]))
    told(e.Answered(asked(), "c", []))
    told(e.Answered(asked(), "b", ["60 C"]))
    told.row(2)
    told(e.Answered(asked(), "b", ["70 C"]))
    told(e.Answered(asked(), "a", None))
    told(e.Died((("a", 0), ("b", 1), ("c", 2)), 0, "worker_died", "gone"))
    assert told.records("failure")[0]["gpus"] == {"a": ["50 C"], "b": ["70 C"]}


def copies_of(node: str, version: Version, *, writers: int = 1, found: int = 1) -> list[Held]:
    """What a keeper holds of another node's."""
    files = [copy_name(f"{version}-{number}.slot", node) for number in range(found)]
    return [Held(file, version, ALONE, writers, "") for file in files]


def test_a_node_that_cannot_report_is_heard_by_way_of_those_with_its_copies() -> None:
    """A head that does not hear a node, whose peers do: its snapshots were never committed, and 21 steps were lost."""
    told = training("abc", copies=2)
    peers = {node: tuple(peer.node for peer in place.peers) for node, place in told.of(c.SendPlaces)[-1].places.items()}
    version = Version(1, 5)
    told.seal(version, {node: holders for node, holders in peers.items() if node != "b"})
    told()
    told.clear()
    told.now += UNHEARD_S + 0.1
    told()
    assert told.of(c.Ask) == [c.Ask(COPIES, c.Question.HOLDINGS, ("a", "c"), version)]
    told(e.Answered(COPIES, "a", copies_of("b", version, writers=2)))  # of one of its two ranks
    told(e.Answered(COPIES, "c", copies_of("b", version, writers=2, found=2)))
    told(e.Answered(COPIES, "a", copies_of("b", Version(1, 4), writers=2, found=2)))
    told(e.Answered(COPIES, "a", None))
    assert told.control.newest_snapshot is None
    told(e.Answered(COPIES, "a", copies_of("b", version, writers=2, found=2)))
    assert told.control.newest_snapshot == version


def test_what_a_node_with_copies_says_counts_for_nothing_once_the_generation_is_over() -> None:
    told = training("abc")
    peers = {node: tuple(peer.node for peer in place.peers) for node, place in told.of(c.SendPlaces)[-1].places.items()}
    version = Version(1, 5)
    told.seal(version, {node: holders for node, holders in peers.items() if node != "b"})
    told(e.Closed())
    told(e.Answered(COPIES, peers["b"][0], copies_of("b", version)))
    assert told.control.newest_snapshot is None


def test_a_node_that_is_heard_by_way_of_others_for_long_is_asked_itself() -> None:
    """Its reports may be lost in a leader that hangs."""
    told = training("abc")
    peers = {node: tuple(peer.node for peer in place.peers) for node, place in told.of(c.SendPlaces)[-1].places.items()}
    for step in range(5, 5 + int(SILENT_S / UNHEARD_S) + 2):
        told.seal(Version(1, step), {node: holders for node, holders in peers.items() if node != "b"})
        told()
        told.now += UNHEARD_S + 0.1
        told()
        told(e.Answered(COPIES, peers["b"][0], copies_of("b", Version(1, step))))
        assert told.control.newest_snapshot == Version(1, step)
    assert [set(ask.nodes) for ask in told.of(c.Ask) if ask.number == HANGS] == [{"b"}]


def test_a_member_that_a_group_was_formed_without_was_lost_by_the_one_before() -> None:
    """Else a coordinator that is restarted then takes the rank of that number in the new group for dead."""
    told = Told()
    before = told.form(one(1), one(2), one(3)).generation
    told.begin(["node"])
    told(e.Died((("node", 3),), 2, "worker_died", "gone"))
    told.join(one(2))
    told.now += told.control.group.membership.patience_s + 1.0
    assert told.ask("m2", before).formation is None
    told.now += LAST_CALL_S
    answer = told.ask("m2", before)
    assert answer.formation is not None
    assert [member.id for member in answer.formation.members] == ["m2"]
    left_out = told.records("failure")[-1]
    assert (left_out["cause"], left_out["ranks"], left_out["generation"]) == ("worker_hung", [0], before)
    forming = {"event": "forming", "generation": before + 1, "members": [asdict(one(2))]}
    assert group_of([{"event": "failure", "time": 1.0, **left_out}, forming], before + 1).lost is None


@pytest.mark.parametrize("blocked_s", [0.0, 12.0, 60.0])
def test_survivors_whose_joins_are_queued_behind_the_first_ones_question_are_not_left_out(blocked_s: float) -> None:
    """The coordinator answered no call for a while: the group was formed of the first, and healthy ones were ended."""
    told = Told(max_workers=4, min_workers=1)
    told.form(*(one(pid, f"n{pid}") for pid in (1, 2, 3, 4)))
    told.begin(["n1", "n2", "n3", "n4"])
    told.row(1)
    told(e.Gone("n4", 4))
    told.join(one(1, "n1"))
    assert told.ask("m1", 1).formation is None
    told.now += blocked_s
    assert told.ask("m1", 1).formation is None
    told.join(one(2, "n2"), one(3, "n3"))
    formation = told.ask("m2", 1).formation
    assert formation is not None
    assert [member.id for member in formation.members] == ["m1", "m2", "m3"]
    assert told.of(c.Kill) == []


@pytest.mark.parametrize("lost", [(1,), (0, 1)])
def test_newcomers_do_not_wait_for_ever_for_survivors_that_died_while_the_coordinator_was_away(
    lost: tuple[int, ...],
) -> None:
    told = Told(Past(7, 10, restarted=True), max_workers=2, min_workers=2)
    told(e.Restarted((one(1), one(2)), 7, ("node",), lost=lost))
    told.join(one(3), one(4))
    told.now += told.control.group.membership.patience_s - 1.0
    assert (told.ask("m3").formation is None) == (lost == (1,))
    told.now += 2.0
    told.ask("m3")
    told.now += LAST_CALL_S
    answer = told.ask("m3")
    assert answer.formation is not None
    assert [member.id for member in answer.formation.members] == ["m3", "m4"]


def test_with_ray_trains_controller_all_processes_of_a_group_are_gone() -> None:
    """Its failure names no ranks, and a coordinator that was restarted then waited for one of them for ever."""
    forming = {"event": "forming", "generation": 7, "members": [asdict(one(1)), asdict(one(2))]}
    failures = [
        {"event": "failure", "generation": 7, "time": 1.0, "cause": "worker_died", "ranks": [1]},
        {"event": "failure", "generation": 7, "time": 2.0, "cause": "controller_died", "ranks": []},
    ]
    assert group_of([forming, failures[0]], 7).lost == (1,)
    assert group_of([forming, *failures], 7).lost == (0, 1)


def silent_but_a(*, stored: bool = False, dp_replicate: int = 1) -> Told:
    """Two of three nodes fall silent in the 40th of steps of a second, which has been committed in memory."""
    told = Told(silence_s=5.0, parallel=ParallelConfig(dp_replicate=dp_replicate))
    told.form(*(one(pid, node) for pid, node in enumerate("abc")))
    told.begin("abc")
    for step in range(1, 41):
        told.now += 1.0
        told.row(step, step_s=1.0)
    told.seal(Version(1, 40), {"a": "b", "b": "c", "c": "a"})
    if stored:
        told(e.Logged(1, "checkpoint", {"step": 40, "seconds": 1.0, "stall_s": 1.0, "bytes": 1}))
    told.clear()
    for _ in range(300):
        told.now += 0.2
        for command in (told(), *told.of(c.Ask))[1:]:
            if "a" in command.nodes:
                alive = [Pulse(0, 1, 40, 0.0, 0.0, "S")]
                told(e.Answered(command.number, "a", "stacks" if command.question is c.Question.STACKS else alive))
        told.commands = [command for command in told.commands if not isinstance(command, c.Ask)]
        if told.records("failure"):
            break
    assert told.records("failure")[0]["ranks"] == [1, 2]
    told.clear()
    told.join(one(0, "a"), expected=1)
    return told


@pytest.mark.parametrize("dp_replicate", [1, 2])
def test_silent_nodes_without_which_memory_is_not_whole_are_waited_for(dp_replicate: int) -> None:
    """For as long as what a group without them would train again. Three nodes are one replica, where four are two."""
    told = silent_but_a(dp_replicate=dp_replicate)
    told.now += 2.0
    assert told.ask("m0", 1) == Answer(wait_s=FORM_POLL_S)
    (note,) = told.records("note")
    assert "step 40 is in the memory of nodes that do not answer (b, c): waiting up to 40 s" in note["text"]
    asked = told.of(c.Ask)[-1]
    assert (asked.question, asked.nodes) == (c.Question.HEARTBEATS, ("b", "c"))
    told(e.Answered(asked.number, "b", None))
    assert told.ask("m0", 1).formation is None
    told(e.Answered(asked.number, "c", []))
    assert told.ask("m0", 1).formation is not None, "a has its own and c's, and c has b's"


@pytest.mark.parametrize("why", ["long", "dead", "stored", "replicas"])
def test_silent_nodes_are_not_waited_for_in_vain(why: str) -> None:
    told = silent_but_a(stored=why == "stored", dp_replicate=3 if why == "replicas" else 1)
    told.now += 50.0 if why == "long" else 2.0
    if why == "dead":
        told(e.NodesAlive(frozenset("a")))
    assert told.ask("m0", 1).formation is not None


# keepers that hang alone


def test_a_keeper_that_hangs_alone_while_the_group_stands_still_is_started_anew_and_its_workers_stay() -> None:
    """Another node died meanwhile: only this node's workers can say that it is there."""
    told = training("ab")
    told.row(1)
    told.now += told.control.health.stalls.patience_s + 0.1
    told()
    asked = told.of(c.Ask)[-1]
    assert set(asked.nodes) == {"a", "b"}
    told(e.Answered(asked.number, "a", []))
    told.now += DARK_S - HAIL_S + 0.1
    told()
    assert told.of(c.Hail) == [c.Hail(("b",))]
    told(e.Running(("b",)))
    told.now += HAIL_S
    told()
    told.now += 0.1
    told()
    assert told.of(c.RestartKeeper) == [c.RestartKeeper("b")]
    assert [fields["node"] for fields in told.records("keeper_restarted")] == ["b"]
    assert told.of(c.Kill) == []
    assert told.records("failure") == []


def test_a_node_whose_workers_do_not_answer_either_is_dark() -> None:
    told = training("ab")
    told.row(1)
    told.now += told.control.health.stalls.patience_s + 0.1
    told()
    told(e.Running(("b",)))  # before its keeper was found silent
    told(e.Answered(told.of(c.Ask)[-1].number, "a", []))
    told.now += DARK_S + 0.1
    told()  # what each does is looked at first
    told.now += LOOK_S
    told()
    assert told.of(c.RestartKeeper) == []
    assert [fields["cause"] for fields in told.records("failure")] == ["node_silent"]


def test_a_keeper_without_which_nothing_is_committed_is_started_anew_within_seconds() -> None:
    told = training("abc")
    peers = told.peers
    told.seal(Version(1, 5), {node: holders for node, holders in peers.items() if node != "b"})
    told()
    told.now += LATE_S + 0.1
    told()
    assert [ask.nodes for ask in told.of(c.Ask) if ask.number == HANGS] == [("b",)]
    told.now += DARK_S + 0.1
    told(e.Running(("b",)))
    told()
    assert told.of(c.RestartKeeper) == [c.RestartKeeper("b")]
    told(e.KeeperUp("b", "b", ("b", 2), restarted=True))
    told.seal(Version(1, 5), {"b": peers["b"]})
    assert told.control.newest_snapshot == Version(1, 5)


def test_a_keeper_that_is_late_and_answers_is_not_started_anew() -> None:
    told = training("abc")
    told.seal(Version(1, 5), {node: holders for node, holders in told.peers.items() if node != "b"})
    for _ in range(20):
        told.now += 1.0
        told(e.Running(("a", "b", "c")))
        for ask in told.of(c.Ask):
            for node in ask.nodes:
                told(e.Answered(ask.number, node, []))
        told.clear()
        told()
        assert told.of(c.RestartKeeper) == []


def test_a_group_without_enough_whole_units_has_too_few_workers_though_as_many_are_left() -> None:
    """Of eight nodes of eight two have lost a rank: 62 are left, and 48 of them in units of tp=8."""
    told = Told(min_workers=56, max_workers=64, parallel=ParallelConfig(tp=8), wait_for_workers_s=60.0)
    members = [Member(f"m{rank}", f"node {rank // 8}", "h", 1, rank, gpu=rank % 8) for rank in range(64)]
    told.form(*members)
    told.begin([f"node {number}" for number in range(8)])
    told.row(1)
    told.seal(Version(1, 1), told.peers)
    told.clear()
    dead = members[0], members[8]
    told(e.Died(tuple((each.node, each.pid) for each in dead), 62, "worker_died", "CUDA error"))
    told.join(*(each for each in members if each not in dead), expected=62)
    for _ in range(70):
        told.now += 1.0
        told()
    assert isinstance(told.control.ending, GivenUp)
    (note,) = told.records("note")
    assert note["text"].startswith("48 of cluster.min_workers=56 workers are left")
    assert [*told.of(c.Write), *told.of(c.WriteAll)], "the newest step goes to storage"


def test_a_row_that_comes_after_its_group_broke_does_not_have_those_asked_that_wait_for_the_next() -> None:
    told = Told(min_workers=4, max_workers=4)
    members = [one(number, f"node {number}") for number in range(4)]
    told.form(*members)
    told.begin([member.node for member in members])
    for step in range(1, 6):
        told.now += 0.5
        told.row(step, step_s=0.5)
    told(e.PortRefused(("m3",)))
    told.row(6, step_s=0.5)
    told.clear()
    told.join(*members[:3], expected=4)
    for _ in range(600):
        told.now += 0.1
        told()
    assert not told.of(c.Ask)
