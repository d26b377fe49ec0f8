"""`cluster.in_place=false`: Ray Train ends all processes of a group and starts others, for an error or for none."""

from dataclasses import replace

import pytest

from regrow.config.schema import ParallelConfig
from regrow.control import commands as c
from regrow.control import events as e
from regrow.control.core import Fenced
from regrow.control.past import Past
from regrow.control.states import Answer, GivenUp, Training, Waiting
from regrow.control.too_few import RESTART_S
from regrow.control.verification import Outcome
from support.told import Told, one

DIED = e.GroupFailed("worker_died", "rank 1: the actor died", (1,))


def training(*, nodes: str = "ab", **options: object) -> Told:
    told = Told(in_place=False, **{"min_workers": 2, "max_workers": 3} | options)
    told.form(*(one(pid, node) for pid, node in enumerate(nodes, 1)))
    told.begin(nodes)
    told.row(1)
    told.clear()
    return told


def come(told: Told, *pids: int, expected: int | None = None) -> Answer:
    """Processes of nodes a, b and so on that Ray Train has started; what the first of them hears."""
    members = [one(pid, node) for pid, node in zip(pids, "abcdefgh", strict=False)]
    told.start(*members)
    told.join(*members, expected=expected)
    return told.ask(members[0].id, 0)


@pytest.mark.parametrize("is_told", [True, False])
@pytest.mark.parametrize(("pids", "cause"), [((11, 12, 13), "grow"), ((11, 12), "drain")])
def test_a_group_that_ray_train_starts_anew_without_an_error_goes_on(
    is_told: bool, pids: tuple[int, ...], cause: str
) -> None:
    """For a node that came, or one that is to be taken away; the run stood still for good."""
    told = training(nodes="abc"[: 2 if cause == "grow" else 3])
    if is_told:
        told(e.GroupShutDown())
        assert isinstance(told.control.state, Waiting)
    told.now += 20
    formation = come(told, *pids).formation
    assert formation is not None
    assert [each.pid for each in formation.members] == [*pids]
    assert told.control.group.cause == cause
    assert told.records("failure") == []
    assert told.control.group.num_failures == 0


def test_a_silent_end_counts_as_the_error_that_came_before() -> None:
    told = training()
    told(DIED)
    told(e.GroupShutDown())
    assert come(told, 11, 12, 13).formation is not None
    assert told.control.group.cause == "worker_died"


def test_a_group_that_is_told_of_twice_keeps_those_that_have_joined() -> None:
    told = training()
    told(DIED)
    told.start(one(11, "a"), one(12, "b"))
    told.join(one(11, "a"))
    told.start(one(11, "a"), one(12, "b"))
    told.join(one(12, "b"))
    assert told.ask("m11", 0).formation is not None


@pytest.mark.parametrize("after", ["its failure", "others have started"])
def test_a_process_that_is_about_to_be_ended_takes_no_seat(after: str) -> None:
    """The group that it was in would break."""
    told = Told(in_place=False, min_workers=2, max_workers=2)
    told.start(one(1, "a"), one(2, "b"))
    told.join(one(1, "a"), expected=2)
    told(DIED)
    if after == "others have started":
        told.start(one(11, "a"), one(12, "b"))
    assert told.ask("m1", 0).join_again
    told.join(one(1, "a"), expected=2)
    assert told.ask("m1", 0) == Answer(over=True)
    assert told.of(c.Kill)[-1].pid == 1
    formation = come(told, 11, 12).formation
    assert formation is not None
    assert [each.pid for each in formation.members] == [11, 12]


def test_what_a_group_says_after_its_end_does_not_count() -> None:
    """It raised KeyError in the coordinator."""
    told = training()
    told(DIED)
    with pytest.raises(Fenced):
        told(e.Began(1, 0, ("a", "b"), {"workers": []}))


def test_a_coordinator_that_was_restarted_waits_for_no_process_of_a_group_that_ray_train_has_ended() -> None:
    told = Told(Past(3, 4, restarted=True), in_place=False, min_workers=2, max_workers=2)
    told(e.Restarted((one(1, "a"), one(2, "b")), 4, ("a", "b")))
    assert isinstance(told.control.state, Training)
    told(e.GroupShutDown())
    assert come(told, 11, 12).formation is not None


@pytest.mark.parametrize("start_step", [None, 4])
def test_a_group_that_another_coordinator_takes_up_is_not_waited_for(start_step: int | None) -> None:
    """The run was given up, while it trained."""
    told = Told(Past(3, 4, restarted=True), in_place=False, min_workers=2, max_workers=2, wait_for_workers_s=60)
    told(e.Restarted((one(1, "a"), one(2, "b")), start_step, ("a", "b")))
    if start_step is None:  # it takes its time to restore
        for _ in range(100):
            told.now += 1.0
            told()
        told(e.Began(3, 4, ("a", "b"), {"workers": [{"node": "a"}, {"node": "b"}]}))
    for step in range(5, 105):
        told.now += 1.0
        told()
        told.row(step)
    assert told.control.ending is None
    assert told.records("note") == []


def test_a_run_for_which_ray_train_starts_no_group_says_so_and_ends() -> None:
    told = training(wait_for_workers_s=600)
    told(DIED)
    told.clear()
    told.now += RESTART_S - 1
    told()
    assert told.records("note") == []
    told.now += 2
    told()
    (note,) = told.records("note")
    assert note["text"] == (
        "no group of cluster.min_workers=2 or more was started for 60 s: the run waits for others, up to 600 s"
    )
    told.now += 600
    told()
    assert isinstance(told.control.ending, GivenUp)
    assert "fewer than cluster.min_workers=2 for 600 s" in told.control.ending.message


def test_the_first_group_is_waited_for_as_long() -> None:
    told = Told(in_place=False, min_workers=2, max_workers=2, wait_for_workers_s=600)
    told.now += 601
    told()
    assert isinstance(told.control.ending, GivenUp)


def test_a_group_in_time_ends_the_wait() -> None:
    told = training(wait_for_workers_s=600)
    told(DIED)
    told.now += 599
    assert come(told, 11, 12).formation is not None
    told.now += 10
    told()
    assert told.control.ending is None


def test_units_that_ray_train_has_torn_apart_are_named_and_not_waited_for_without_end() -> None:
    told = Told(in_place=False, min_workers=4, max_workers=4, wait_for_workers_s=600, parallel=ParallelConfig(tp=2))
    members = [one(1, "a"), one(2, "a"), one(3, "a"), one(4, "b")]
    told.start(*members)
    told.join(*members)
    (note,) = told.records("note")
    assert note["text"] == (
        "Ray Train has started 3 on node a, 1 on node b; parallel.tp=2 takes as many of a node at a time, and only 2 "
        "of cluster.min_workers=4 fit"
    )
    assert told.ask("m1").formation is None
    told.now += 601
    told()
    assert isinstance(told.control.ending, GivenUp)


def test_no_host_is_quarantined_as_ray_train_would_start_workers_there_all_the_same() -> None:
    """Each of them ended at once, and all others with it."""
    told = training(quarantine_failures=1, nodes="abc")
    told(e.GpuError("c", "GPU-1", 79, "fell off the bus"))
    told(e.Unfit("c", 3, "cuda:0 does not answer", ""))
    told(DIED)
    assert told.records("quarantine") == []
    assert come(told, 11, 12, 13).formation is not None


def test_a_host_that_computes_wrong_ends_the_run_as_workers_would_start_there_again() -> None:
    nodes = "abc"
    told = Told(in_place=False, min_workers=3, max_workers=3, verify_every_steps=10)
    members = [replace(one(pid, node), machine=f"host-{node}") for pid, node in enumerate(nodes, 1)]
    told.form(*members)
    told.begin(nodes)
    for step in (10, 11):
        told(e.Verified(1, step, Outcome(3, odd=(2,))))
    assert isinstance(told.control.ending, GivenUp)
    assert "take node c out of the cluster" in told.control.ending.message
    assert told.records("quarantine") == []
