"""Whose trouble it is: what all ranks have ends the run, what one has costs that one."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
import torch.distributed as dist

from regrow.config.schema import ClusterConfig, ParallelConfig, PretrainConfig
from regrow.control import commands as c
from regrow.control import events as e
from regrow.control.group import DRAINING_S
from regrow.control.health import WHERE_AGAIN_S, Pulse
from regrow.control.membership import Member
from regrow.control.nodes import UNTRIED_S
from regrow.control.past import Past
from regrow.control.past import group_of as group_in
from regrow.control.phases import FORM_S, PHASES, Phase, form_s
from regrow.control.states import Answer, GivenUp, Training
from regrow.control.troubles import ERROR, LOSS, MAX_FAILED_GENERATIONS, MAX_REPEATED, MAX_UNEXPLAINED, OTHERS_S
from regrow.errors import DataError, GroupOver
from regrow.record.events import Cause
from regrow.runtime import rendezvous, worker
from regrow.state.collective import PeerError
from regrow.train.certificate import BrokenStep
from support.full_disk import full_disk
from support.told import Told, log_of, one

NO_CORPUS = "data holds no finished corpus on host-3"


def trouble(told: Told, member: Member, message: str = NO_CORPUS, *, generation: int | None = None) -> None:
    number = told.control.generation if generation is None else generation
    told(e.Trouble(number, replace(member, port=0), 3, message))  # its port is known once it joins


def training(told: Told, *members: Member, step: int = 0) -> int:
    """They train, and have done a step."""
    told.form(*members)
    told.begin(dict.fromkeys(member.node for member in members), step)
    told.row(step + 1)
    return told.control.generation


def messages(told: Told) -> list[str]:
    return [command.message for command in told.of(c.GiveUp)]


def wait(told: Told, seconds: float, pulses: Mapping[str, Mapping[str, Any]] | None = None) -> None:
    """With the ticks that a coordinator has, and keepers that answer: every process runs. `pulses`: fields, by node."""
    pids = {each.node: each.pid for each in (A, B, NEW, FIT, *told.control.group.membership.current)}
    for _ in range(int(seconds / 0.5)):
        told.now += 0.5
        told()
        for command in told.of(c.Ask):
            for node in command.nodes:
                alive = Pulse(pids[node], told.control.generation, 0, 0.0, 0.0, "S", asked=command.number)
                alive = replace(alive, **(pulses or {}).get(node, {}))
                told(e.Answered(command.number, node, "" if command.question is c.Question.STACKS else [alive]))
        told.commands = [command for command in told.commands if not isinstance(command, c.Ask)]


def wait_for_an_end(told: Told, pulses: Mapping[str, Mapping[str, Any]]) -> float:
    """How long it took until a process was to be ended, or 300 s."""
    began = told.now
    while not told.of(c.Kill) and told.now < began + 300.0:
        wait(told, 0.5, pulses)
    return told.now - began


A, B, NEW, FIT = one(1, "a"), one(2, "b"), one(3, "new"), one(4, "fit")


def test_what_a_newcomer_finds_before_it_joins_costs_the_others_nothing() -> None:
    told = Told()
    generation = training(told, A, B)
    told.clear()
    trouble(told, NEW, generation=0)
    assert told.ask("m3") == Answer(unfit=True)
    assert told.control.state == Training(generation)
    assert told.row(2) == ""
    assert [(each["node"], each["detail"]) for each in told.records("unfit")] == [("new", NO_CORPUS)]
    assert told.records("failure") == []
    assert told.control.ending is None


def test_a_newcomer_with_too_little_room_is_left_out_at_once_and_the_others_go_on() -> None:
    """In a group with it, which all of them had joined."""
    told = Told()
    training(told, A, B)
    group = told.form(A, B, NEW).generation
    told.clear()
    trouble(told, NEW, "/dev/shm on node new has 0.01 GB")
    assert [command.generation for command in told.of(c.TellOver)] == [group]
    told.join(A)
    assert told.ask("m1", group).formation is None
    told.join(B)
    told()
    formed = told.ask("m2", group).formation
    assert formed is not None
    assert [member.id for member in formed.members] == ["m1", "m2"]
    assert told.ask("m3", group) == Answer(unfit=True)
    (failure,) = told.records("failure")
    assert (failure["cause"], failure["ranks"]) == (Cause.worker_failed, [2])
    assert told.control.ending is None


def test_others_that_neither_come_nor_have_it_are_not_waited_for_longer_than_a_moment() -> None:
    told = Told()
    group = training(told, A, B, NEW)
    trouble(told, NEW)
    told.join(A)
    wait(told, OTHERS_S - 0.5)
    assert told.records("failure") == []
    wait(told, 1.0)
    assert [failure["ranks"] for failure in told.records("failure")] == [[2]]
    told.join(B)
    assert told.ask("m2", group).formation is not None


def test_what_all_ranks_of_a_group_have_is_the_runs() -> None:
    told = Told()
    told.form(A, B, NEW)
    for member in (A, B, NEW):
        assert messages(told) == []
        trouble(told, member, "num_slices=12 is wrong")
    assert messages(told) == ["num_slices=12 is wrong"]
    assert [told.ask(each.id).given_up for each in (A, B, NEW)] == ["num_slices=12 is wrong"] * 3


def test_what_one_rank_of_the_first_group_has_is_its_own_once_the_others_have_come_again() -> None:
    told = Told()
    first = told.form(A, B, NEW).generation
    trouble(told, A)
    told.join(B, NEW)
    told()
    formed = told.ask("m2", first).formation
    assert formed is not None
    assert [member.id for member in formed.members] == ["m2", "m3"]
    assert told.control.ending is None


def test_a_rank_that_dies_has_not_said_that_it_has_it_too() -> None:
    told = Told()
    told.form(A, B)
    trouble(told, A)
    told(e.Died((("b", 2),), 1, Cause.worker_died, "gone"))
    wait(told, OTHERS_S + 1.0)
    assert messages(told) == []
    assert told.ask("m1") == Answer(unfit=True)


def test_what_all_find_before_they_join_at_the_start_is_the_runs_and_what_one_finds_is_not() -> None:
    everyone = Told()
    for member in (A, B, NEW):
        assert messages(everyone) == []
        trouble(everyone, member, generation=0)
    assert messages(everyone) == [NO_CORPUS]
    told = Told()
    trouble(told, NEW, generation=0)
    assert told.ask("m3") == Answer(wait_s=0.1), "the others may have it, too"
    told.join(A, expected=3)
    told()
    assert told.ask("m3") == Answer(unfit=True)
    told.join(B, expected=3)
    formed = told.ask("m2").formation
    assert formed is not None, "of those that are left nobody is waited for"
    assert [member.id for member in formed.members] == ["m1", "m2"]


def test_one_that_never_says_anything_at_the_start_does_not_keep_the_others_errors_from_the_user() -> None:
    told = Told()
    trouble(told, A, generation=0)
    trouble(told, B, generation=0)
    wait(told, told.control.group.membership.patience_s + 1.0)
    assert messages(told) == [NO_CORPUS]


def test_storage_that_is_away_for_all_while_they_are_started_anew_does_not_end_the_run() -> None:
    """It is waited for as for nodes: `cluster.wait_for_workers_s`."""
    told = Told(wait_for_workers_s=600.0)
    training(told, A, B)
    told(e.Died((("a", 1), ("b", 2)), 0, Cause.worker_died, "gone"))
    for number in (4, 5):
        trouble(told, one(number, "a"), "storage is away", generation=0)
        told()
        assert told.ask(f"m{number}") == Answer(unfit=True)
    assert told.control.ending is None
    wait(told, 601.0)
    assert isinstance(told.control.ending, GivenUp)


def test_a_process_whose_coordinator_was_restarted_tells_its_trouble_again() -> None:
    told = Told(Past(4, 10, restarted=True))
    told(e.Restarted((A, B), 7, ("a", "b")))
    assert told.ask("m3").join_again
    trouble(told, NEW, generation=0)
    assert told.ask("m3") == Answer(unfit=True)


def test_a_host_whose_processes_have_the_same_trouble_again_and_again_is_left_alone() -> None:
    told = Told(quarantine_failures=3)
    training(told, A, B)
    for attempt in range(3):
        assert told.control.excluded_nodes(told.now) == set()
        for rank in range(8):  # all of the node's say so, which counts once
            trouble(told, one(10 * attempt + 10 + rank, "new"), generation=0)
        told.now += 15.0
    assert told.control.excluded_nodes(told.now) == {"new"}


def dies_before_it_joins(told: Told, node: str, *pids: int, left: int = 2, detail: str = "the OOM killer") -> None:
    """As Ray Train tells it, again and again."""
    for _ in range(2):
        for pid in pids:
            detail = f"process {pid} on node {node}: {detail}"
            told(e.Died(((node, pid),), left, Cause.worker_died, detail))
        told(e.Placed({node: 1}))


def test_a_host_whose_processes_die_before_they_join_again_and_again_is_left_alone() -> None:
    """They say nothing before, as one that is killed where memory is short."""
    told = Told(quarantine_failures=3)
    training(told, A, B)
    told(e.Placed({}))
    told.clear()
    for attempt in range(3):
        assert told.control.excluded_nodes(told.now) == set()
        dies_before_it_joins(told, "new", *range(10 * attempt + 10, 10 * attempt + 18))  # eight count once
        told.now += 15.0
    assert told.control.excluded_nodes(told.now) == {"new"}
    said = told.records("unfit")
    assert [each["pid"] for each in said] == [pid for ten in (10, 20, 30) for pid in range(ten, ten + 8)]
    assert said[0]["detail"] == "it died before it joined: the OOM killer"


@pytest.mark.parametrize("why", ["told by Ray", "its node", "its node, says Ray", "to go", "known", "over", "earlier"])
def test_what_ends_a_process_that_has_not_joined_and_is_not_its_hosts_fault_counts_for_nothing(why: str) -> None:
    told, detail = Told(Past(1, 10, restarted=True), quarantine_failures=1), "it died"
    training(told, A, B, step=10)
    if why != "earlier":  # a coordinator that is restarted hears first of what another one knew
        told(e.Placed({}))
    told.clear()
    if why == "its node":
        told(e.NodesAlive(frozenset("ab")))
    elif why == "its node, says Ray":
        detail = "the actor's node was terminated unexpectedly: health check failed"
    elif why == "to go":
        told(e.Notice({"new": told.now + 100.0}))
    elif why == "known":
        told.join(NEW)
    elif why == "over":
        told(e.StopAsked("interrupted"))
    dies_before_it_joins(told, "new", 3, detail=detail)
    counts = why == "told by Ray"
    assert (told.records("quarantine") != []) == (told.records("unfit") != []) == counts


def test_a_process_that_said_why_it_ends_counts_once() -> None:
    told = Told(quarantine_failures=2)
    training(told, A, B)
    told(e.Placed({}))
    told(e.Unfit("new", 3, "its GPU computes wrong"))
    trouble(told, FIT, generation=0)
    told.now += 20.0
    dies_before_it_joins(told, "new", 3)
    dies_before_it_joins(told, "fit", 4)
    assert told.control.excluded_nodes(told.now) == set()
    assert len(told.records("unfit")) == 2


# a process, and what it makes of it


class Coordinator:
    """As a worker calls it. Its next calls come to these errors."""

    def __init__(self, told: Told, *errors: Exception) -> None:
        self.told, self.errors = told, list(errors)

    def trouble(self, generation: int, member: Member, expected: int, message: str) -> None:
        if self.errors:
            raise self.errors.pop()
        self.told(e.Trouble(generation, member, expected, message))

    def formation(self, member_id: str, after: int) -> Answer:
        if self.errors:
            raise self.errors.pop()
        self.told.now += 1.0
        self.told()
        return self.told.ask(member_id, after)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """A worker that fails before it joins: how it ends."""

    def end(how: str) -> None:
        raise SystemExit(how)

    monkeypatch.setattr(rendezvous, "expelled", lambda: end("expelled"))
    monkeypatch.setattr(worker, "end_process", lambda job, problem: end(problem))
    monkeypatch.setattr(worker, "meet_at", lambda *_: None)
    monkeypatch.setattr(worker, "Lifeline", lambda host: SimpleNamespace(port=1))
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setattr(ray.train, "get_context", lambda: SimpleNamespace(get_world_size=lambda: 3))

    def run(error: BaseException, coordinator: Coordinator, me: Member = NEW, *, in_place: bool = True) -> str:
        def prepare(job: Any) -> Any:
            raise error

        monkeypatch.setattr(worker, "_prepare", prepare)
        monkeypatch.setattr(worker, "this_process", lambda *_, **__: me)
        monkeypatch.setattr(worker, "CoordinatorClient", lambda handle: coordinator)
        config = PretrainConfig(cluster=ClusterConfig(in_place=in_place))
        job: Any = SimpleNamespace(config=config, coordinator=None)
        try:
            worker.run_worker(job)
        except SystemExit as ended:
            return str(ended.code)
        return "returned"

    return run


CUDA = "CUDA error: no CUDA-capable device is detected\nCompile with TORCH_USE_CUDA_DSA"
SAID = "RuntimeError: CUDA error: no CUDA-capable device is detected"


def test_whatever_one_process_fails_with_is_its_own_trouble_and_nothing_leaves_it(run: Callable[..., str]) -> None:
    """Ray Train would answer an exception of a train function by workers of its own."""
    told = Told()
    training(told, A, B)
    told.clear()
    assert run(RuntimeError(CUDA), Coordinator(told)) == "expelled"
    assert [(each["node"], each["detail"]) for each in told.records("unfit")] == [("new", SAID)]
    assert told.control.ending is None
    assert run(DataError(NO_CORPUS), Coordinator(told), one(4, "newer")) == "expelled"
    assert [each["detail"] for each in told.records("unfit")] == [SAID, NO_CORPUS]


def test_what_broke_a_group_is_told_though_the_workers_log_disk_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """Survivors of a lost rank died with it: the print raised out of what was to keep them."""
    said = list[str]()
    client = SimpleNamespace(broke=lambda detail, rank: said.append(detail))
    monkeypatch.setattr(worker, "CoordinatorClient", lambda *_: client)
    job: Any = SimpleNamespace(coordinator=None)
    with full_disk():
        worker._report(job, None, SimpleNamespace(rank=3, generation=7), RuntimeError("Connection closed by peer"))  # type: ignore[arg-type]
    assert said == ["rank 3: RuntimeError: Connection closed by peer"]


def over(error: Exception, by: Exception) -> Exception:
    error.__cause__ = by
    return error


CLOSED = "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.1]:5"


@pytest.mark.parametrize(
    ("error", "rank"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), 3),
        (RuntimeError(CUDA), 3),
        (DataError(NO_CORPUS), 3),
        (RuntimeError(CLOSED), None),
        (dist.DistBackendError("NCCL error: remote process exited"), None),
        (over(ValueError("its callback's"), dist.DistNetworkError("a peer")), None),
        (ConnectionError("the peer's end of the connection has ended"), None),
        (PeerError("rank 0: no room"), None),
        (BrokenStep("generation 7 is over"), None),
        (GroupOver("generation 7"), None),
        (ray.exceptions.GetTimeoutError("120 s"), None),
    ],
)
def test_a_rank_says_whether_the_error_that_broke_its_group_is_its_own(
    error: Exception, rank: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = list[tuple[str, int | None]]()
    client = SimpleNamespace(broke=lambda detail, rank: said.append((detail, rank)))
    monkeypatch.setattr(worker, "CoordinatorClient", lambda *_: client)
    worker._report(SimpleNamespace(coordinator=None), None, SimpleNamespace(rank=3, generation=7), error)  # type: ignore[arg-type]
    assert [each[1] for each in said] == [rank]


def test_a_process_that_fails_on_a_full_log_disk_is_told_of_all_the_same(run: Callable[..., str]) -> None:
    told = Told()
    training(told, A, B)
    with full_disk():
        assert run(RuntimeError(CUDA), Coordinator(told)) == "expelled"
    assert [each["detail"] for each in told.records("unfit")] == [SAID]


def test_what_all_processes_fail_with_ends_the_run_with_its_message(run: Callable[..., str]) -> None:
    told = Told()
    trouble(told, A, SAID, generation=0)
    trouble(told, B, SAID, generation=0)
    assert run(RuntimeError(CUDA), Coordinator(told)) == "returned"
    assert messages(told) == [SAID]


def test_a_coordinator_that_does_not_answer_in_time_is_asked_again(run: Callable[..., str]) -> None:
    """One that was started anew waits for storage."""
    late = ray.exceptions.GetTimeoutError("120 s")
    told = Told()
    training(told, A, B)
    coordinator = Coordinator(told, late, late)
    assert run(RuntimeError(CUDA), coordinator) == "expelled"
    assert coordinator.errors == []
    assert [each["detail"] for each in told.records("unfit")] == [SAID]


@pytest.mark.parametrize("in_place", [True, False])
def test_a_coordinator_that_says_nothing_to_those_that_start_ends_no_run(
    run: Callable[..., str], monkeypatch: pytest.MonkeyPatch, in_place: bool
) -> None:
    def end(status: int) -> None:
        raise SystemExit(f"status {status}")

    monkeypatch.setattr(worker.os, "_exit", end)
    told = Told()
    for each in (A, B, NEW):
        late = ray.exceptions.GetTimeoutError("120 s")
        assert run(late, Coordinator(told), each, in_place=in_place) == "status 1"
    assert told.control.ending is None


def test_a_process_with_trouble_ends_where_no_coordinator_is_left(run: Callable[..., str]) -> None:
    gone = ray.exceptions.ActorDiedError()
    assert run(RuntimeError(CUDA), Coordinator(Told(), gone)).startswith(SAID)


def test_what_ends_a_process_and_what_restarts_all_is_raised(run: Callable[..., str]) -> None:
    assert run(SystemExit("by Ray"), Coordinator(Told())) == "by Ray"
    with pytest.raises(KeyboardInterrupt):
        run(KeyboardInterrupt(), Coordinator(Told()))
    with pytest.raises(RuntimeError, match="no CUDA-capable"):
        run(RuntimeError(CUDA), Coordinator(Told()), in_place=False)


# groups that break without a word


def test_bad_nodes_that_go_one_after_the_other_at_the_start_do_not_end_the_run() -> None:
    """Of 32 nodes, 5: each breaks the group's first steps and is removed."""
    told = Told(max_workers=32)
    nodes = [one(pid, f"n{pid}") for pid in range(32)]
    told.form(*nodes)
    for bad in range(5):
        told(e.Died(((f"n{bad}", bad),), 31 - bad, Cause.worker_died, "gone"))
        formation = told.form(*nodes[bad + 1 :])
        assert len(formation.members) == 31 - bad
    assert told.control.ending is None


def broken_with(told: Told, *members: Member, ranks: Iterable[int | None] = (None,)) -> list[str]:
    """The newest group broke, all of it lives, and all come again; those that are in the next one. `ranks` say that
    they cannot go on, None one whose connection closed."""
    for rank in ranks:
        detail = "rank 2: RuntimeError: connection closed" if rank is None else f"rank {rank}: OutOfMemoryError"
        told(e.Broke(told.control.generation, detail, rank))
    return [member.id for member in told.form(*members).members]


def test_a_newcomer_whose_first_collective_fails_is_left_out_first() -> None:
    told = Told()
    training(told, A, B)
    told.form(A, B, NEW)
    assert broken_with(told, A, B, NEW) == ["m1", "m2"]
    told.begin("ab", 1)
    assert told.ask("m3", 2).wait_s > 0
    told.row(2)
    assert told.ask("m3", 2) == Answer(unfit=True)
    assert ["its first group broke" in each["detail"] for each in told.records("unfit")] == [True]
    assert told.control.ending is None


def test_a_newcomer_is_taken_back_where_the_group_breaks_without_it_too() -> None:
    told = Told()
    training(told, A, B)
    told.form(A, B, NEW)
    assert broken_with(told, A, B, NEW) == ["m1", "m2"]
    assert broken_with(told, A, B) == ["m1", "m2", "m3"]
    told.begin(["a", "b", "new"], 1)
    told.row(2)
    assert told.records("unfit") == []


def test_a_newcomer_is_left_out_first_by_a_coordinator_that_took_up_a_group_as_it_formed() -> None:
    """It did not know that these had done steps, and the newcomer's error ended the run."""
    told = Told(Past(generation=1, restarted=True))
    told(e.KeepersFound((), 1))
    told(e.Restarted((A, B), None, ()))
    told.begin("ab", 0)
    told.row(1)
    bad = one(9, "bad")
    told.form(A, B, bad)
    assert broken_with(told, A, B, bad, ranks=[2]) == ["m1", "m2"]
    assert step_without(told, 1, bad) == {"bad": True}


def newcomers(first: int, *nodes: str) -> list[Member]:
    return [one(first + number, node) for number, node in enumerate(nodes)]


def step_without(told: Told, step: int, *members: Member) -> dict[str, bool]:
    """A and B do one; which of these are to end then, by node."""
    told.begin("ab", step)
    told.row(step + 1)
    return {each.node: told.ask(each.id, told.control.generation).unfit for each in members}


def test_of_several_newcomers_the_host_alone_is_left_out_whose_rank_has_an_error_of_its_own() -> None:
    """The others' hosts went into quarantine with it, for an hour."""
    told = Told(quarantine_failures=3)
    training(told, A, B)
    fine, bad = newcomers(10, "n0", "n1"), newcomers(20, "bad", "bad")
    for attempt in range(3):
        assert told.control.excluded_nodes(told.now) == set()
        told.form(A, B, fine[0], *bad, fine[1])
        told.now += 15.0
        assert broken_with(told, A, B, *fine, *bad, ranks=[3]) == ["m1", "m2", "m10", "m11"]
        told.begin(["a", "b", "n0", "n1"], attempt + 1)
        told.row(attempt + 2)
        assert [told.ask(each.id, told.control.generation).unfit for each in bad] == [True, True]
        bad = newcomers(30 + 10 * attempt, "bad", "bad")
    assert told.control.excluded_nodes(told.now) == {"bad"}


def test_an_error_of_a_rank_that_this_coordinator_does_not_know_is_no_members_own() -> None:
    """A group was formed while storage was away, by a coordinator that died, and its number is taken."""
    told = Told()
    training(told, A, B)
    told(e.KeepersFound((), newest_generation=7))
    told(e.Broke(7, "rank 2: OutOfMemoryError", 2))
    assert told.control.group.last_failure == "rank 2: OutOfMemoryError"


def test_newcomers_without_an_error_of_their_own_come_again_where_two_have_one() -> None:
    """What breaks a second time before a step costs all of them their places first: no group is tried for each."""
    told = Told(quarantine_failures=1)
    training(told, A, B)
    new = newcomers(10, "n0", "n1", "n2")
    told.form(A, B, *new)
    assert broken_with(told, A, B, *new, ranks=[3]) == ["m1", "m2", "m10", "m12"]
    assert broken_with(told, A, B, *new, ranks=[2]) == ["m1", "m2"]
    assert step_without(told, 1, *new) == {"n0": True, "n1": True, "n2": False}
    assert told.control.excluded_nodes(told.now) == {"n0", "n1"}
    told.now += 3.0
    assert told.row(3) == "grow"


@pytest.mark.parametrize("ranks", [[None], [], [0], [2, 1]])
def test_where_no_newcomer_alone_has_an_error_half_of_their_hosts_start_anew_until_one_is_left(
    ranks: list[int | None],
) -> None:
    """A connection closed, or nothing was said, or a rank that had trained has an error as well."""
    told = Told(quarantine_failures=1, max_workers=16)
    training(told, A, B)
    new, step = newcomers(10, "n0", "n1", "n2", "n3", "n4"), 1
    for left in (3, 2, 1):
        told.form(A, B, *new)
        assert broken_with(told, A, B, *new, ranks=ranks) == ["m1", "m2"]
        going = step_without(told, step, *new)
        step += 1
        assert list(going.values()) == [False] * left + [True] * (len(new) - left)
        assert told.control.excluded_nodes(told.now) == {f"n{number}" for number in range(left, 5)}, "not tried now"
        assert told.records("quarantine") == []
        new = new[:left]
    told.form(A, B, *new)
    assert broken_with(told, A, B, *new, ranks=ranks) == ["m1", "m2"]
    assert step_without(told, step, *new) == {"n0": True}
    assert told.control.excluded_nodes(told.now) == {"n0"}


@pytest.mark.parametrize(("bad", "broken"), [("n0", 5), ("n1", 6), ("n2", 5), ("n3", 5)])
@pytest.mark.parametrize("start_s", [10.0, 60.0])
def test_of_newcomers_that_start_anew_at_once_the_one_host_is_found_with_which_groups_break(
    bad: str, broken: int, start_s: float
) -> None:
    """The other half's processes started at once on the same hosts, and all were tried together again: thirteen groups
    broke, and then four hosts were in quarantine. `start_s` is from a process' start until it joins."""
    told = Told(quarantine_failures=3, max_workers=36)  # each rank more makes a step shorter
    training(told, A, B)
    empty = {f"n{number}": told.now for number in range(4)}  # places, and since when
    joins, living, dying = dict[str, float](), dict[str, Member](), dict[str, float]()
    step, pid, nodes, tried = 1, 10, ["a", "b"], list[list[str]]()
    while told.now < 3000.0 and not (told.records("quarantine") and len(nodes) == 5):
        told.now += 1.0
        told()
        for node in [node for node, at in dying.items() if told.now > at]:  # Ray sees it a second later
            told(e.Died(((node, living.pop(node).pid),), 9, Cause.worker_died, "it exited"))
            empty[node] = dying.pop(node) + 4.0
        out = told.control.excluded_nodes(told.now)
        for node in [node for node, at in empty.items() if told.now > at and node not in out]:
            joins[node] = empty.pop(node) + start_s
        told(e.Placed(dict.fromkeys(["a", "b", *joins, *living], 1)))
        for node in [node for node, at in joins.items() if told.now > at]:
            del joins[node]
            pid, living[node] = pid + 1, one(pid, node)
            told(e.Joined(living[node], 1))
        step += 1
        leaves = told.row(step)
        waiting = [each for node, each in living.items() if node not in nodes]
        going = [each.node for each in waiting if told.ask(each.id, told.control.generation).unfit]
        dying = dict.fromkeys(going, told.now) | dying
        if leaves == "grow":
            told(e.Leaving(told.control.generation, step, "grow"))
            told.now += 6.0
            nodes = [each.node for each in told.form(A, B, *living.values()).members]
            if bad in nodes:
                tried.append(nodes)
                told.now += 15.0
                broken_with(told, A, B, *living.values())
                nodes = [each.node for each in told.control.group.membership.current]
            told.begin(nodes, step)
    assert {fields["node"] for fields in told.records("quarantine")} == {bad}
    assert len(tried) == broken
    assert set(nodes) == {"a", "b", "n0", "n1", "n2", "n3"} - {bad}


def test_no_host_is_left_untried_where_none_is_to_be_left_alone_nor_one_on_which_the_group_trains() -> None:
    for failures, nodes in ((0, ["n0", "n1"]), (3, ["a", "b"])):
        told = Told(quarantine_failures=failures)
        training(told, A, B)
        new = newcomers(10, *nodes)
        told.form(A, B, *new)
        broken_with(told, A, B, *new)
        assert list(step_without(told, 1, *new).values()) == [False, True]
        assert told.control.excluded_nodes(told.now) == set()


def test_newcomers_that_break_groups_again_and_again_count_in_the_end_though_none_has_an_error_of_its_own() -> None:
    """No size has a place for one of them alone."""
    told = Told(quarantine_failures=1)
    training(told, A, B)
    n0 = one(10, "n0")
    for attempt in range(MAX_UNEXPLAINED + 1):
        assert told.control.excluded_nodes(told.now) == set()
        new = [n0, one(11 + attempt, "n1")]
        told.form(A, B, *new)
        broken_with(told, A, B, *new)
        step_without(told, attempt + 1, *new)
        told.now += UNTRIED_S
    assert told.control.excluded_nodes(told.now) == {"n0", "n1"}


def test_newcomers_that_fail_one_after_the_other_end_no_run_whose_others_do_steps_anew() -> None:
    """It resumed 900 steps behind its log; each of these steps was done between two failures."""
    told = Told(Past(generation=1, logged=1000, stored=(100,)), max_workers=8)
    training(told, A, B, step=100)
    for number in range(3, 12):
        told.row(98 + number)
        told.join(A, B, new := one(number, f"n{number}"))
        told.now += 3.0
        answer = told.ask(A.id, told.control.generation)
        assert answer.formation is not None, answer.given_up
        assert len(answer.formation.members) == 3
        trouble(told, new)
        told.join(A, B)
        told.now += OTHERS_S + 1.0
        told()
        assert told.ask(A.id, told.control.generation).formation is not None
        told.begin([A.node, B.node], 98 + number)


UPLOAD = "train.callback=my:Upload: after_step raised OSError: no token"


def group_of(told: Told, *members: Member, start: int, steps: int) -> str:
    """The next group, in a moment, does so many steps; why the run is given up, if it is."""
    told.join(*members)
    told.now += 3.0
    answer = told.ask(members[0].id, told.control.generation)
    if answer.formation is not None:
        assert len(answer.formation.members) == len(members)
        told.begin(dict.fromkeys(each.node for each in members), start)
        for step in range(start + 1, start + steps + 1):
            told.row(step)
    return answer.given_up


@pytest.mark.parametrize("others", ["come", "say so first", "have it too"])
def test_an_error_that_one_rank_of_each_group_meets_at_a_certain_step_ends_the_run(others: str) -> None:
    """Rank 0 alone uploads, whichever process that is; each group does the steps before anew. `others` that raise a
    moment later find the group over, and come again."""
    told = Told(Past(generation=1, logged=2, stored=(2,)), quarantine_failures=0)
    members = [one(pid, f"n{pid}") for pid in range(1, 4)]
    for number in range(4, 4 + MAX_REPEATED):
        assert group_of(told, *members, start=2, steps=4) == ""
        if others == "say so first":
            told(e.Broke(told.control.generation, "rank 2: OSError: no token"))
        for member in members[: 2 if others == "have it too" else 1]:
            trouble(told, member, UPLOAD)
        told.join(*members[2 if others == "have it too" else 1 :])
        told()
        assert told.ask(members[0].id, told.control.generation) == Answer(unfit=True)
        members = [*members[1:], one(number, f"n{number}")]
        if others == "have it too":
            members[0] = one(100 + number, members[0].node)
    assert UPLOAD in group_of(told, *members, start=2, steps=4)


def test_one_host_that_errs_again_and_again_ends_no_run_that_others_get_on_with() -> None:
    """It comes back with each group, as none is allowed without it, and its disk fails; the log is further."""
    told = Told(Past(generation=1, logged=1000, stored=(0,)), min_workers=3, max_workers=3, quarantine_failures=0)
    for number in range(3 * MAX_REPEATED):
        bad = one(10 + number, "bad")
        assert group_of(told, A, B, bad, start=0, steps=10 + number) == ""
        trouble(told, bad, "a damaged disk")
        told.join(A, B)
        told()
    assert told.control.ending is None


def test_errors_before_a_step_are_as_many_after_one_that_came_behind_steps() -> None:
    """A host in place of the bad one is tried as late as where nothing had been done before."""
    told = Told(min_workers=3, max_workers=3)
    for number in range(MAX_FAILED_GENERATIONS):
        bad = one(10 + number, "bad")
        assert group_of(told, A, B, bad, start=0, steps=0 if number else 3) == ""
        trouble(told, bad, "a damaged disk")
        told.join(A, B)
        told()
    assert group_of(told, A, B, FIT, start=0, steps=4) == ""


def test_a_newcomer_is_not_blamed_for_a_death_of_another_rank() -> None:
    told = Told()
    training(told, A, B)
    told.form(A, B, NEW)
    told(e.Died((("b", 2),), 2, Cause.worker_died, "gone"))
    assert [member.id for member in told.form(A, NEW).members] == ["m1", "m3"]


def test_a_group_that_cannot_do_without_its_newcomer_takes_it_and_is_given_up_in_the_end() -> None:
    told = Told(min_workers=3)
    training(told, A, B, one(4, "c"))
    told(e.Died((("c", 4),), 2, Cause.worker_died, "gone"))
    told.form(A, B, NEW)
    for _ in range(2):
        assert broken_with(told, A, B, NEW) == ["m1", "m2", "m3"]
    told(e.Broke(told.control.generation, "rank 2: it is broken"))
    told.join(A, B, NEW)
    assert "it is broken" in told.ask("m1", told.control.generation).given_up


def bad_ones(told: Told) -> Iterator[tuple[int, str]]:
    """In C's place, processes of the host `bad` are tried one after the other, of which each has an error of its own.
    How many have been; why the run is given up, if it is."""
    training(told, A, B, one(3, "c"))
    told(e.Died((("c", 3),), 2, Cause.worker_died, "its node is gone"))
    for number in range(1, 100):
        bad = one(10 + number, "bad")
        told.join(A, B, bad)
        told.now += 3.0
        answer = told.ask("m1", told.control.generation)
        if answer.formation is None:
            yield number, answer.given_up
            return
        told.begin(["a", "b", "bad"], 1)
        told(e.Broke(told.control.generation, "rank 2: OutOfMemoryError", 2))
        for _ in range(2):  # the bad one's first call may be made again
            told.join(A, B, bad)
            assert told.ask("m1", told.control.generation).wait_s > 0
        assert told.ask(bad.id, told.control.generation) == Answer(unfit=True)
        told(e.Died((("bad", bad.pid),), 2, Cause.worker_died, "it exited"))
        told.now += 15.0
        yield number, ""


def test_a_host_that_alone_breaks_groups_which_none_may_be_without_is_found_and_another_one_takes_its_place() -> None:
    """Three groups broke with the same process, and that ended the run."""
    told = Told(quarantine_failures=3, min_workers=3, max_workers=3)
    for number, given_up in bad_ones(told):
        assert (given_up, told.control.ending) == ("", None)
        found = [fields["host"] for fields in told.records("quarantine")]
        assert found == (["bad"] if number == 3 else [])
        if found:
            break
    told.join(A, B)
    assert told.control.excluded_nodes(told.now - 15.0) == {"bad"}
    assert told.control.excluded_nodes(told.now) == set(), "it may be tried again where no other place is found"
    assert len(told.form(A, B, FIT).members) == 3
    told.begin(["a", "b", "fit"], 1)
    told.row(2)
    assert told.control.ending is None


def test_a_host_without_another_in_its_place_that_alone_breaks_all_groups_ends_the_run() -> None:
    told = Told(quarantine_failures=3, min_workers=3, max_workers=3)
    *_, (number, given_up) = bad_ones(told)
    assert number == 1 + (MAX_FAILED_GENERATIONS - 1) * ERROR // LOSS + 1
    assert "OutOfMemoryError" in given_up


def test_a_coordinator_that_is_restarted_counts_groups_that_a_bad_host_broke_alone_as_the_one_before() -> None:
    """It counted each as one that failed, and gave the run up with the next group."""
    told = Told(quarantine_failures=3, min_workers=3, max_workers=3)
    for number, _ in bad_ones(told):
        past = Past.of(log_of(told), generation=told.control.generation, logged=1, stored=(), restarted=True)
        assert past.failed_groups == told.control.group.first_steps.failed == number * LOSS
        if number == 3:
            break


def test_newcomers_that_err_and_then_hang_are_ended_where_no_group_may_be_without_them() -> None:
    """They were unfit, and did not hear of it: their places stayed theirs, and the run ended for too few workers."""
    told = Told(quarantine_failures=3, min_workers=4, max_workers=4)
    training(told, A, B, one(3, "c"), one(4, "c"))
    told(e.Died((("c", 3), ("c", 4)), 2, Cause.worker_died, "its node is gone"))
    told.form(A, B, *newcomers(11, "bad", "bad"))
    told(e.Broke(told.control.generation, "rank 2: OutOfMemoryError", 2))
    told.clear()
    told.join(A, B)
    told.now += told.control.group.membership.patience_s
    assert told.ask("m1", told.control.generation).wait_s > 0
    assert told.of(c.Kill) == [c.Kill("bad", 11), c.Kill("bad", 12)]
    told(e.Died((("bad", 11), ("bad", 12)), 2, Cause.worker_died, "they were killed"))
    assert len(told.form(A, B, *newcomers(21, "fit", "fit")).members) == 4


def test_a_bad_host_of_eight_ranks_interrupts_training_once() -> None:
    """Each of its processes counted, and the time between failures that checkpoints go by fell to a tenth."""
    told = Told(quarantine_failures=3, min_workers=16, max_workers=16)
    fine, bad = newcomers(100, *"a" * 8), newcomers(300, *["bad"] * 8)
    training(told, *fine, *newcomers(200, *"b" * 8))
    told(e.Died(tuple(("b", 200 + gpu) for gpu in range(8)), 8, Cause.worker_died, "its node is gone"))
    told.form(*fine, *bad)
    told(e.Broke(told.control.generation, "rank 8: OutOfMemoryError", 8))
    told.clear()
    told.join(*fine, *bad)
    assert told.ask(fine[0].id, told.control.generation).wait_s > 0
    assert told.ask(bad[0].id, told.control.generation) == Answer(unfit=True)
    assert [each["pid"] for each in told.records("unfit")] == [each.pid for each in bad]
    assert [each["ranks"] for each in told.records("failure")] == [list(range(8, 16))]
    assert told.control.group.num_failures == 2


def test_ranks_that_have_troubles_of_their_own_at_once_interrupt_training_once() -> None:
    told = Told()
    group = training(told, A, B, NEW, FIT)
    told.clear()
    trouble(told, NEW, "no room")
    trouble(told, FIT, "no corpus")
    told.join(A, B)
    told()
    (failure,) = told.records("failure")
    assert (failure["ranks"], failure["detail"]) == ([2, 3], "no room; no corpus")
    assert [each["detail"] for each in told.records("unfit")] == ["no room", "no corpus"]
    assert told.control.group.num_failures == 1
    assert told.ask("m1", group).formation is not None


def tried(told: Told, *spares: Member, has_error: bool = True) -> list[list[str]]:
    """A group of four has lost one, and these wait; one with a process of the host `bad` breaks, by an error of that if
    it `has_error`. One that is unfit ends, and another one starts in its place. The nodes of each group, until one is
    without `bad`, a host is in quarantine, or none forms."""
    training(told, A, B, FIT, one(5, "d"))
    told.join(*spares)
    told.now += 5.0
    told.row(2)
    told(e.Died((("d", 5),), 3, Cause.worker_died, "its node is gone"))
    told.join(A, B, FIT)
    bad, groups, newest = [each for each in spares if each.node == "bad"], list[list[str]](), told.control.generation
    while not told.records("quarantine") and told.ask("m1", newest).formation is not None:
        newest, current = told.control.generation, told.control.group.membership.current
        groups.append([each.node for each in current])
        if "bad" not in groups[-1]:
            break
        rank = groups[-1].index("bad")
        told(e.Broke(newest, f"rank {rank}: CUDA error", rank if has_error else None))
        told.now += 10.0
        told.join(*current)
        told.ask("m1", newest)
        for each in [each for each in bad if told.ask(each.id, newest).unfit]:
            told(e.Died((("bad", each.pid),), 3, Cause.worker_died, "it exited"))
            told.now += 20.0
            bad[bad.index(each)] = another = one(each.pid + 100, "bad")
            told.join(another)
    return groups


WITH_BAD = ["a", "b", "fit", "bad"]


@pytest.mark.parametrize("spares", [2, 3, 4])
def test_a_bad_host_with_spares_is_found_though_another_of_its_processes_is_at_hand(spares: int) -> None:
    """A group of that was allowed, so that none was to blame, and the fourth one ended the run."""
    told = Told(quarantine_failures=3, min_workers=4, max_workers=4, spare_workers=spares)
    assert tried(told, *newcomers(20, *["bad"] * spares)) == [WITH_BAD] * 3
    assert [each["host"] for each in told.records("quarantine")] == ["bad"]
    assert len(told.records("unfit")) == 3
    assert told.control.ending is None


def test_processes_that_a_quarantine_ended_are_in_no_group_after_it() -> None:
    """They were seated again, where the others alone were too few, until the run was given up."""
    told = Told(quarantine_failures=3, min_workers=4, max_workers=4, spare_workers=4)
    broken = 1 + len(tried(told, *newcomers(20, *["bad"] * 4)))
    ended = {each.pid for each in told.of(c.Kill)}
    assert len(ended) == 4
    formed = told.ask("m1", broken).formation
    assert formed is not None
    assert ended.isdisjoint(each.pid for each in formed.members)
    assert formed.members[-1].node == "bad", "one that was started since, as no other is at hand"


@pytest.mark.parametrize("has_error", [True, False])
@pytest.mark.parametrize(("least", "fine"), [(2, 0), (2, 2), (4, 2)])
def test_what_waits_on_the_host_of_a_newcomer_that_broke_a_group_is_not_tried_in_its_place(
    least: int, fine: int, has_error: bool
) -> None:
    """One process of it after the other was, until the run was given up, with spares of other hosts behind them."""
    told = Told(min_workers=least, max_workers=4, spare_workers=6)
    second = ["a", "b", "fit", "good"][: 4 if fine else 3]
    bad = newcomers(20, *["bad"] * 4)
    assert tried(told, *bad, *newcomers(60, *["good"] * fine), has_error=has_error) == [WITH_BAD, second]
    assert told.records("unfit") == []
    told.begin(dict.fromkeys(second), 2)
    told.row(3)
    assert [told.ask(each.id, told.control.generation).unfit for each in bad] == [True, False, False, False]
    assert told.control.ending is None


def test_what_waits_on_a_newcomers_host_is_tried_where_no_group_may_be_without_it_and_none_is_to_blame() -> None:
    """The newcomers were tried again and again, though one of another host broke all groups."""
    told = Told(min_workers=4, max_workers=4)
    training(told, A, B, one(5, "c"), one(6, "d"))
    told(e.Died((("c", 5), ("d", 6)), 2, Cause.worker_died, "gone"))
    new = newcomers(10, "bad", "n0", "n0", "n0")
    assert [each.id for each in told.form(A, B, *new).members] == ["m1", "m2", "m10", "m11"]
    assert broken_with(told, A, B, *new) == ["m1", "m2", "m12", "m13"]


def test_what_waits_on_a_host_that_trains_is_tried_in_place_of_one_that_broke_a_group() -> None:
    told = Told(max_workers=3)
    training(told, A, B)
    told.form(A, B, one(10, "a"))
    told.join(one(11, "a"))
    assert broken_with(told, A, B, one(10, "a"), ranks=[2]) == ["m1", "m11", "m2"]


def test_a_newcomer_is_not_to_blame_before_the_others_have_had_their_last_call() -> None:
    """A coordinator had stood still, and heard them only after that; these were enough."""
    told = Told(min_workers=3, max_workers=4, quarantine_failures=1)
    training(told, A, B, FIT)
    group = told.form(A, B, FIT, NEW).generation
    told(e.Broke(group, "rank 3: RuntimeError", 3))
    told.join(A)
    told.now += told.control.group.membership.patience_s + 1.0
    assert told.ask("m1", group).formation is None
    told.join(B, FIT, NEW)
    formed = told.ask("m1", group).formation
    assert formed is not None
    assert [each.id for each in formed.members] == ["m1", "m2", "m4"]
    assert (told.of(c.Kill), told.records("quarantine")) == ([], [])


def test_no_process_is_held_back_for_newcomers_that_have_ended_since_as_all_were_started_anew() -> None:
    """All that were started on the host of one were, and the group was of two."""
    told = Told(min_workers=2)
    first = newcomers(1, "a", "a", "b", "b")
    training(told, *first)
    told.join(*first, one(9, "a"))
    told.now += 5.0
    group = told.ask("m1", 1).formation
    assert group is not None
    assert len(group.members) == 5
    told(e.GroupFailed(Cause.controller_died, "the controller is gone", ()))
    told.now += 20.0
    again = newcomers(101, "a", "a", "a", "b", "b")
    told.join(*again)
    told.now += 5.0
    told.ask("m101", group.generation)
    assert {each.id for each in told.control.group.membership.current} == {each.id for each in again}


def test_a_newcomer_that_breaks_groups_alone_is_unfit_where_only_a_node_to_be_drained_could_take_its_place() -> None:
    """The node is left for as long as a group can do without it, and the newcomer was taken again and again."""
    told = Told(min_workers=3, max_workers=3)
    training(told, A, B, FIT)
    told.join(NEW)
    told.now += 5.0
    told(e.DrainAsked("fit", 0.0))
    assert told.row(2) == "drain"
    told(e.Leaving(told.control.generation, 2, "drain"))
    told.now += DRAINING_S
    assert [each.node for each in told.form(A, B, FIT).members] == ["a", "b", "new"]
    told(e.Broke(told.control.generation, "rank 2: OutOfMemoryError", 2))
    assert [each.node for each in told.form(A, B, NEW).members] == ["a", "b", "fit"]
    assert told.ask("m3", told.control.generation).unfit


def test_a_newcomer_is_not_blamed_alone_for_an_error_that_one_of_the_others_has_too() -> None:
    told = Told(min_workers=3, max_workers=3)
    training(told, A, B, one(3, "c"))
    told(e.Died((("c", 3),), 2, Cause.worker_died, "its node is gone"))
    told.form(A, B, FIT)
    assert broken_with(told, A, B, FIT, ranks=[2, 1]) == ["m1", "m2", "m4"]
    assert told.records("unfit") == []


@pytest.mark.parametrize("known", [True, False])
def test_a_newcomer_that_hangs_before_its_first_step_is_dropped_long_before_a_collectives_timeout(known: bool) -> None:
    """Nothing is known of how long a first step takes after the coordinator was restarted: then it is waited for."""
    told = Told() if known else Told(Past(4, 10, restarted=True))
    if known:
        training(told, A, B)
    else:
        told(e.Restarted((A, B), 10, ("a", "b")))
    told.form(A, B, NEW)
    told.clear()
    wait(told, FORM_S - 1.0)
    assert told.of(c.Kill) == []
    wait(told, 2.0)
    assert told.of(c.Kill) == ([c.Kill("new", 3)] if known else [])
    if known:
        (failure,) = told.records("failure")
        assert (failure["cause"], failure["ranks"]) == (Cause.worker_hung, [2])


WAITS = {"collectives": 7, "waits": True}
READS = {"phase": Phase.restore}


def with_two_newcomers(told: Told | None = None) -> Told:
    """A group of four that forms."""
    told = told or Told()
    training(told, A, B)
    told.form(A, B, NEW, FIT)
    for node in ("new", "fit"):
        told(e.KeeperUp(node, node, (node, 1)))
    told.clear()
    return told


def test_of_several_newcomers_the_one_that_is_in_no_collective_is_dropped_alone() -> None:
    """Keepers say which process it is, from half of the time on."""
    told = with_two_newcomers()
    assert wait_for_an_end(told, dict.fromkeys(["a", "b", "fit"], WAITS)) < FORM_S
    assert told.of(c.Kill) == [c.Kill("new", 3)]
    (failure,) = told.records("failure")
    assert "is not in the collective that others wait in" in failure["detail"]


def test_a_group_that_reads_a_checkpoint_for_long_keeps_its_newcomers_and_has_all_of_their_time_then() -> None:
    told = with_two_newcomers()
    wait(told, 300.0, dict.fromkeys(["a", "b", "new", "fit"], READS))
    wait(told, FORM_S - 2.0)
    assert told.of(c.Kill) == []
    told.begin(["a", "b", "new", "fit"], 1)
    wait(told, FORM_S - 1.0)
    assert told.of(c.Kill) == []
    wait(told, 2.0)
    assert told.of(c.Kill) == [c.Kill("new", 3), c.Kill("fit", 4)]


def test_a_newcomer_that_hangs_after_a_checkpoint_was_read_is_found_as_soon_as_one_before() -> None:
    told = with_two_newcomers()
    wait(told, 300.0, dict.fromkeys(["a", "b", "new", "fit"], READS))
    assert wait_for_an_end(told, dict.fromkeys(["a", "b", "fit"], WAITS)) < FORM_S
    assert told.of(c.Kill) == [c.Kill("new", 3)]


def test_steps_that_take_long_keep_no_reading_rank_from_being_seen() -> None:
    told = Told()
    told.form(A, B)
    told.begin("ab")
    for step in (1, 2):
        told.row(step, step_s=300.0)
    told.form(A, B, NEW)
    told.clear()
    wait(told, 200.0, dict.fromkeys(["a", "b", "new"], READS))
    assert told.of(c.Kill) == []
    wait(told, FORM_S + 1.0)
    assert told.of(c.Kill) == [c.Kill("new", 3)]


def test_where_no_keeper_says_whether_ranks_read_a_checkpoint_they_may() -> None:
    told = Told()
    told.form(A, B)
    told(e.Began(1, 0, ("a", "b"), {"workers": [{"node": "a"}, {"node": "b"}]}))
    told.row(1)
    told.form(A, B, NEW)
    told.clear()
    wait(told, 300.0)
    assert told.of(c.Kill) == []


@pytest.mark.parametrize("late", ["a", "new"])
def test_who_still_reads_its_part_of_a_checkpoint_while_the_others_wait_is_no_suspect(late: str) -> None:
    told = with_two_newcomers()
    wait(told, 300.0, dict.fromkeys(["a", "b", "new", "fit"], WAITS) | {late: READS})
    assert told.of(c.Kill) == []


def test_a_rank_that_has_trained_is_not_taken_for_a_newcomer_that_hangs_while_a_group_forms() -> None:
    told = with_two_newcomers()
    wait(told, FORM_S - 1.0, dict.fromkeys(["b", "new", "fit"], WAITS))
    assert told.of(c.Kill) == []


def hang_in_their_first_step(told: Told, *late: Member) -> int:
    """These ranks do, and the others wait for them; after how many seconds they are ended. First steps took 8 s."""
    members = told.control.group.membership.current
    told.begin([member.node for member in members], told.control.next_step - 1)
    told.clear()
    longest_s = tuple(8.0 if each is Phase.first_step else 0.0 for each in PHASES)
    for second in range(300):
        in_it = {"phase": Phase.first_step, "phase_s": float(second)}
        waits = in_it | WAITS | {"waits_s": second - 1.0, "longest_s": longest_s}
        wait(told, 1.0, {each.node: in_it if each.pid in {other.pid for other in late} else waits for each in members})
        if told.of(c.Kill):
            break
    assert [(each.node, each.pid) for each in told.of(c.Kill)] == [(each.node, each.pid) for each in late]
    assert all("in first_step for" in failure["detail"] for failure in told.records("failure"))
    return second


@pytest.mark.parametrize(
    ("parallel", "cluster"),
    [
        (ParallelConfig(cp=2, compile=True), {}),
        (ParallelConfig(compile=True), {"verify_every_steps": 10, "gpus_per_worker": 1}),
    ],
)
def test_a_newcomer_that_compiles_in_its_first_step_has_the_time_of_a_phase_that_is_not_known(
    parallel: ParallelConfig, cluster: Mapping[str, int]
) -> None:
    """With parallel.cp above 1 the warm-up does not compile, nor for deterministic kernels, which verify; survivors'
    first steps say nothing of it."""
    told = with_two_newcomers(Told(parallel=parallel, stuck_s=180.0, **cluster))
    assert 180 < hang_in_their_first_step(told, NEW) < 200


@pytest.mark.parametrize(
    ("parallel", "cluster"),
    [
        (ParallelConfig(cp=2), {}),
        (ParallelConfig(compile=True), {"verify_every_steps": 10}),
        (ParallelConfig(), {"verify_every_steps": 10, "gpus_per_worker": 1}),
    ],
)
def test_a_newcomer_that_has_compiled_before_or_has_nothing_to_compile_has_no_more_time_than_is_usual(
    parallel: ParallelConfig, cluster: Mapping[str, int]
) -> None:
    told = Told(parallel=parallel, stuck_s=180.0, **cluster)
    training(told, A, B, NEW, FIT)
    told(e.Died((("fit", 4), ("new", 3)), 2, Cause.worker_died, "gone"))
    told.form(A, B)
    told.begin("ab", 1)
    told.row(2)
    new = one(5, "new")
    told.form(A, B, new, one(6, "fit"))
    assert 20 < hang_in_their_first_step(told, new) < 60


def test_ranks_that_alone_have_passes_of_another_size_than_so_far_are_not_ended_as_they_compile() -> None:
    """Twelve slices: six ranks have two each, in a pass; of five, ranks 2 and 4 have three, and the others wait."""
    told = Told(parallel=ParallelConfig(compile=True, slices_per_pass=4), stuck_s=180.0)
    six = [one(10 + number, f"n{number}") for number in range(6)]
    training(told, *six)
    told(e.Died((("n5", 15),), 5, Cause.worker_died, "gone"))
    five = told.form(*six[:5]).members
    assert 180 < hang_in_their_first_step(told, five[2], five[4]) < 200


@pytest.mark.parametrize(("lost", "least_s", "most_s"), [(5, 20, 60), (0, 180, 200)])
def test_each_process_compiles_by_itself_whatever_others_have_had_at_its_rank(
    lost: int, least_s: int, most_s: int
) -> None:
    """Of five ranks, as above, the third and the fifth have compiled; then another one may be the third."""
    told = Told(parallel=ParallelConfig(compile=True, slices_per_pass=4), stuck_s=180.0)
    members = [one(10 + number, f"n{number}") for number in range(6)]
    training(told, *members)
    told(e.Died((("n5", 15),), 5, Cause.worker_died, "gone"))
    training(told, *members[:5], step=1)
    members[5] = one(16, "n6")
    training(told, *members, step=2)
    gone = members.pop(lost)
    told(e.Died(((gone.node, gone.pid),), 5, Cause.worker_died, "gone"))
    five = told.form(*members).members
    assert least_s < hang_in_their_first_step(told, five[2], five[4]) < most_s


def test_a_coordinator_that_took_up_a_group_in_its_first_step_ends_no_rank_that_compiles() -> None:
    """What a process has compiled is not in the log."""
    told = Told(parallel=ParallelConfig(compile=True), stuck_s=180.0)
    training(told, A, B, FIT)
    told.form(A, B, FIT)
    told.begin(["a", "b", "fit"], 1)
    past = Past.of(log_of(told), generation=2, logged=1, stored=[], restarted=True)
    again = Told(past, parallel=ParallelConfig(compile=True), stuck_s=180.0)
    again(group_in(log_of(told), 2))
    assert 180 < hang_in_their_first_step(again, B) < 200


def at_its_first_step(*, step_s: float = 0.5) -> Told:
    """A group with a newcomer, whose others have done one step after the other."""
    told = Told()
    training(told, A, B)
    for step in range(2, 6):
        told.row(step, step_s=step_s)
    told.form(A, B, NEW)
    told.begin(["a", "b", "new"], 5)
    told.clear()
    return told


def wait_in(told: Told, until: int, phase: Phase, late: str, *, since: int = 0) -> None:
    """This node's rank is in that phase, from a second of the first step until another, and the others wait for it."""
    for second in range(since, until):
        waits = {"phase": Phase.first_step, "phase_s": second + 1.0, "waits_s": float(second)} | WAITS
        does = {"phase": phase, "phase_s": float(second), "collectives": 6}
        wait(told, 1.0, dict.fromkeys(["a", "b", "new"], waits) | {late: does})


@pytest.mark.parametrize("phase", [Phase.callback, Phase.storage, Phase.checkpoint])
@pytest.mark.parametrize("late", ["a", "new"])
def test_one_rank_in_a_phase_with_a_timeout_of_its_own_keeps_newcomers_from_no_first_step(
    phase: Phase, late: str
) -> None:
    """Rank 0 evaluates after the step, which has no row before; or the newcomer waits for storage."""
    told = at_its_first_step()
    wait_in(told, 400, phase, late)
    assert told.of(c.Kill) == []
    told.row(6)
    assert told.control.ending is None


def test_a_rank_that_hangs_in_its_callback_is_ended_alone_in_a_groups_first_step_too() -> None:
    told = at_its_first_step()
    timeout_s = int(PretrainConfig().train.collective_timeout_s)
    wait_in(told, timeout_s - 1, Phase.callback, "a")
    assert told.of(c.Kill) == []
    wait_in(told, timeout_s + 10, Phase.callback, "a", since=timeout_s - 1)
    assert told.of(c.Kill) == [c.Kill("a", 1)]


def test_a_validation_that_is_due_at_a_groups_first_step_costs_no_newcomer_where_no_rank_can_be_missed() -> None:
    """Seven groups were ended by their first step's own deadline, and then the run."""
    told = Told(min_workers=3, max_workers=3)
    training(told, A, B, FIT)
    told(e.Died((("fit", 4),), 2, Cause.worker_died, "gone"))
    told.form(A, B, NEW)
    told.begin(["a", "b", "new"], 1)
    told.clear()
    for second in range(90):
        pulse = {"phase": Phase.validation, "phase_s": float(second), "collectives": second} | {"waits": True}
        wait(told, 1.0, dict.fromkeys(["a", "b", "new"], pulse))
    assert told.of(c.Kill) == []
    wait(told, FORM_S - WHERE_AGAIN_S - 1.0)
    assert told.of(c.Kill) == []
    wait(told, WHERE_AGAIN_S + 2.0)
    assert told.of(c.Kill) == [c.Kill("new", 3)], "it hangs after that, and has all of its time then"


def test_where_no_keeper_says_what_ranks_do_a_first_step_has_the_time_of_a_collective() -> None:
    told = Told(every_steps=0)
    told.form(A, B)
    told.begin("")
    told.row(1)
    told.form(A, B, NEW)
    told.begin("", 1)
    told.clear()
    wait(told, PretrainConfig().train.collective_timeout_s - 1.0)
    assert told.of(c.Kill) == []
    wait(told, 2.0)
    assert told.of(c.Kill) == [c.Kill("new", 3)]


def test_what_keepers_say_first_is_heard_before_a_first_step_counts_as_overdue() -> None:
    """With steps of 100 s no keeper is asked for 200 s, and first steps took less than that."""
    told = at_its_first_step(step_s=100.0)
    wait(told, 300.0, {"a": {"phase": Phase.callback}, "b": WAITS, "new": WAITS})
    assert told.of(c.Kill) == []


def test_first_steps_that_take_long_anyway_give_newcomers_as_much_time() -> None:
    told = Told()
    told.form(A, B)
    wait(told, 50.0)  # all compile
    told.begin("ab")
    told.row(1)
    told.form(A, B, NEW)
    told.clear()
    wait(told, 190.0)
    assert told.of(c.Kill) == []
    wait(told, 20.0)
    assert told.of(c.Kill) == [c.Kill("new", 3)]


def test_newcomers_of_a_large_group_have_the_time_that_so_many_ranks_may_take_to_meet() -> None:
    told = Told(max_workers=1024)
    training(told, A, B)
    many = [one(100 + number, f"n{number}") for number in range(600)]
    told.form(A, B, *many)
    for member in many:
        told(e.KeeperUp(member.node, member.node, (member.node, 1)))
    told.clear()
    pulses = {member.node: WAITS for member in (A, B, *many)}
    allowed_s = form_s(602, 600.0)
    assert allowed_s > 90.0
    wait(told, allowed_s - 1.0, pulses)
    assert told.of(c.Kill) == []
    wait(told, 2.0, pulses)
    assert len(told.of(c.Kill)) == 600


@pytest.mark.parametrize(("compile", "is_known", "has_time"), [(1, 0, True), (1, 1, False), (0, 0, False)])
def test_newcomers_have_all_the_time_there_is_where_all_ranks_compile_in_their_first_step(
    compile: int, is_known: int, has_time: bool
) -> None:
    """Four ranks have passes of two slices where two have four: all compile for these."""
    told = Told(parallel=ParallelConfig(compile=bool(compile), slices_per_pass=8))
    if is_known:
        training(told, A, B, one(5, "c"), one(6, "d"))
        told(e.Died((("c", 5), ("d", 6)), 2, Cause.worker_died, "gone"))
        told.form(A, B)
        told.begin("ab", 1)
        told.row(2)
    else:
        training(told, A, B)
    told.form(A, B, NEW, FIT)
    told.begin(["a", "b", "new", "fit"], 2)
    told.clear()
    limit_s = PretrainConfig().train.collective_timeout_s if has_time else FORM_S
    wait(told, limit_s - 1.0)
    assert told.of(c.Kill) == []
    wait(told, 2.0)
    assert told.of(c.Kill) == [c.Kill("new", 3), c.Kill("fit", 4)]
