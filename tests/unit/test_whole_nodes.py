"""What befalls a node of several ranks is one failure, whether they are told of one by one or control ends them."""

from dataclasses import replace
from typing import Any

import pytest

from regrow.control import commands as c
from regrow.control import events as e
from regrow.control.health import Suspect
from regrow.control.membership import LAST_CALL_S, Member
from regrow.control.states import Waiting
from regrow.record.events import Cause, from_row
from regrow.simulate.run_logs import faults_of
from support.told import Told, log_of, one

RANKS = 8
HUNG = "process 103 runs, and is not in the collective that others wait in"


def node(number: int) -> list[Member]:
    return [replace(one(100 * number + gpu, "abc"[number]), gpu=gpu) for gpu in range(RANKS)]


def training(**cluster: Any) -> tuple[Told, list[Member]]:
    """Eight ranks on each of three nodes."""
    told = Told(max_workers=3 * RANKS, **{"min_workers": RANKS} | cluster)
    members = [*node(0), *node(1), *node(2)]
    told.form(*members)
    told.begin("abc")
    told.row(1)
    return told, members


def ended(told: Told) -> list[int]:
    """Those that were to be, of which their keeper tells then."""
    kills = told.of(c.Kill)
    for each in kills:
        told(e.Gone(each.node, each.pid))
    return sorted(each.pid for each in kills)


@pytest.mark.parametrize("by", ["its keeper", "Ray"])
def test_ranks_of_a_node_that_are_told_of_one_by_one_are_one_failure(by: str) -> None:
    told, members = training()
    before = told.control.cadence.mtbf_s(told.now)
    for left, each in enumerate(reversed(node(1)), 2 * RANKS):
        gone = e.Died(((each.node, each.pid),), left, Cause.worker_died, f"process {each.pid}: its node died")
        told(e.Gone(each.node, each.pid) if by == "its keeper" else gone)
    assert told.control.group.num_failures == 1
    assert told.control.cadence.mtbf_s(told.now) == before / 2
    assert [rank for each in told.records("failure") for rank in each["ranks"]] == [*range(15, 7, -1)]
    assert told.control.group.last_failure == told.records("failure")[0]["detail"]
    assert len(faults_of([from_row(row) for row in log_of(told)])) == 1
    told.form(*(each for each in members if each.node != "b"))
    told.begin("ac", 1)
    told(e.Gone("a", 0))
    assert told.control.group.num_failures == 2, "of another generation"


def test_the_healthy_ranks_of_a_host_in_quarantine_go_with_the_one_that_hung() -> None:
    told, members = training(quarantine_failures=1)
    told.control.group.suspected([Suspect(members[11], False, HUNG)], told.now)
    told()
    assert ended(told) == [*range(100, 108)]
    (failure,) = told.records("failure")
    assert (failure["cause"], failure["ranks"], failure["nodes"]) == ("worker_hung", [*range(8, 16)], ["b"])
    assert told.control.group.num_failures == 1
    assert HUNG in told.control.group.last_failure
    assert all(told.ask(each.id).unfit for each in node(1) if each.pid != 103)
    told.form(*(each for each in members if each.node != "b"))
    told.begin("ac", 1)
    assert told.records("generation")[-1]["cause"] == "worker_hung"


@pytest.mark.parametrize(
    ("befalls", "why"),
    [
        (e.GpuError("b", "GPU-3", 79, "fell off the bus"), "Xid 79 of GPU-3, fell off the bus"),
        (e.Unfit("b", 990, "cuda:3 does not answer", "b"), "cuda:3 does not answer"),
    ],
)
def test_ranks_on_a_host_that_is_in_quarantine_for_no_failure_of_theirs_are_one_failure(
    befalls: e.Event, why: str
) -> None:
    told, _ = training(quarantine_failures=1)
    told(befalls)
    assert isinstance(told.control.state, Waiting)
    assert ended(told) == [*range(100, 108)]
    (failure,) = told.records("failure")
    assert (failure["cause"], failure["ranks"]) == ("worker_died", [*range(8, 16)])
    assert failure["detail"] == f"node b is in quarantine: {why}"
    assert told.control.group.num_failures == 1


@pytest.mark.parametrize("num_left_out", [1, RANKS])
def test_ranks_that_do_not_come_again_are_one_failure(num_left_out: int) -> None:
    told, members = training(quarantine_failures=1)
    told(e.Broke(told.control.generation, "a peer is gone", None))
    told.join(*members[: 2 * RANKS - num_left_out], *members[2 * RANKS :])
    told.now += told.control.group.membership.patience_s
    told.ask("m0", 1)
    told.now += LAST_CALL_S
    told.ask("m0", 1)
    assert ended(told) == [*range(100, 108)]
    first, *others = told.records("failure")
    assert (first["cause"], first["generation"]) == ("worker_hung", 1)
    assert first["ranks"] == [*range(16 - num_left_out, 16)]
    assert [(each["cause"], each["generation"]) for each in others] == [("worker_hung", 2)] * (num_left_out < RANKS)
    assert told.control.group.num_failures == 1
    assert told.control.group.cause == "worker_hung"


@pytest.mark.parametrize(
    ("later", "cause"),
    [
        (lambda generation: e.GroupFailed("worker_failed", "rank 0: KeyError: 7", (0,)), "worker_failed"),
        (lambda generation: e.GroupFailed("worker_died", "rank 0: the actor died", (0,)), "worker_hung"),
        (lambda generation: e.NotFinite(generation, 2, "the loss of step 2 is not finite"), "nonfinite"),
        (lambda generation: e.Broke(generation, "a peer is gone", None), "worker_hung"),
    ],
)
def test_what_is_told_later_of_a_broken_group_counts_where_it_explains_more(later: Any, cause: str) -> None:
    told, members = training()
    told.control.group.suspected([Suspect(members[11], False, HUNG)], told.now)
    told(later(told.control.generation))
    assert told.control.group.cause == cause
    assert (HUNG in told.control.group.last_failure) == (cause == "worker_hung")
    assert told.control.group.num_failures == 1
