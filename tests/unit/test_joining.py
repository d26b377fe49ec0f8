"""A keeper that speaks for its node's workers: how often the coordinator is called, and for which of them."""

import threading
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import ray

from regrow.control.membership import Formation, Member, Seat
from regrow.control.states import Answer
from regrow.control.values import NOTHING
from regrow.runtime import joining, rendezvous
from regrow.runtime.joining import Joins, Speaking
from regrow.state.memory.control_word import ControlWord
from support.keepers import wait_until

WORKERS = [Member(f"m{number}", "node", "127.0.0.1", 1, number) for number in range(8)]


class Coordinator:
    """Gives seats once a generation is formed."""

    def __init__(self) -> None:
        self.joins: list[list[str]] = []
        self.asks: list[list[str]] = []
        self.known: set[str] = set()
        self.generation, self.fails, self.wait_s = 0, 0, 0.0
        self.is_dead, self.handle = False, object()

    def join_all(self, told: Sequence[tuple[Member, int]]) -> None:
        if self.is_dead:
            raise ray.exceptions.ActorDiedError()
        if self.fails:
            self.fails -= 1
            raise ray.exceptions.ActorUnavailableError("it is restarted", b"0" * 16)
        self.joins.append([member.id for member, _ in told])
        self.known |= {member.id for member, _ in told}

    def formations(self, asking: Sequence[tuple[str, int]]) -> list[Answer]:
        self.asks.append([name for name, _ in asking])
        return [self._answer(name, after) for name, after in asking]

    def _answer(self, name: str, after: int) -> Answer:
        if name not in self.known:
            return Answer(join_again=True)
        if self.generation <= after:
            return Answer(wait_s=self.wait_s)
        return Answer(seat=Seat(self.generation, int(name[1:]), len(WORKERS), b"", None))


@pytest.fixture
def coordinator() -> Coordinator:
    return Coordinator()


@pytest.fixture
def joins(coordinator: Coordinator) -> Joins:
    return Joins(lambda: cast(Any, coordinator))


def seat_of(joins: Joins, worker: Member, after: int = 0) -> Answer:
    """As a worker asks."""
    found: list[Answer] = []

    def asked() -> bool:
        if (answer := joins.seat(worker, len(WORKERS), after)) is not None:
            found.append(answer)
        return bool(found)

    wait_until(asked)
    return found[0]


def test_all_workers_of_a_node_are_one_call_and_each_gets_its_own_seat(
    joins: Joins, coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "GATHER_S", 0.3)
    coordinator.generation = 1
    seats: dict[str, Answer] = {}

    def ask(worker: Member) -> None:
        seats[worker.id] = seat_of(joins, worker)

    threads = [threading.Thread(target=ask, args=(worker,)) for worker in WORKERS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {name: answer.seat.rank for name, answer in seats.items() if answer.seat} == {
        worker.id: worker.pid for worker in WORKERS
    }
    assert [sorted(each) for each in coordinator.joins] == [[worker.id for worker in WORKERS]]
    assert [sorted(each) for each in coordinator.asks] == [[worker.id for worker in WORKERS]]


def test_workers_wait_for_a_generation_and_hear_of_it_as_the_keeper_does(
    joins: Joins, coordinator: Coordinator
) -> None:
    coordinator.wait_s = 60.0
    worker = WORKERS[0]
    assert joins.seat(worker, 8, 0) is None
    wait_until(lambda: coordinator.asks)
    assert joins.seat(worker, 8, 0) is None
    coordinator.generation = 1
    joins.formed()
    assert seat_of(joins, worker).seat is not None
    assert len(coordinator.joins) == 1
    coordinator.wait_s = 0.0
    assert joins.seat(worker, 8, 1) is None, "it wants the next one"
    coordinator.generation = 2
    assert seat_of(joins, worker, after=1).seat is not None
    assert len(coordinator.joins) == 2


def test_a_keeper_asks_for_all_of_its_workers_once_in_the_time_that_the_coordinator_tells_it_to_wait(
    joins: Joins, coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asked as many times in that as it has workers: of parked ones, for as long as a run lasted."""
    now, until, coordinator.wait_s = 1000.0, 1030.0, 0.5

    def pass_time(seconds: float) -> None:
        nonlocal now
        now += seconds
        for worker in WORKERS if now < until else ():
            assert joins.seat(worker, 8, 0) is None

    monkeypatch.setattr(joining, "time", SimpleNamespace(monotonic=lambda: now, sleep=pass_time))
    monkeypatch.setattr(joins._wake, "wait", pass_time)
    joins._running = True  # by this thread
    pass_time(0.0)
    joins._run()
    assert len(coordinator.joins) == 1
    assert 60 <= len(coordinator.asks) <= 64


def test_a_worker_that_the_coordinator_has_forgotten_is_told_of_as_soon_as_it_asks(
    joins: Joins, coordinator: Coordinator
) -> None:
    """And not after the wait of another one, which is long where many wait."""
    coordinator.wait_s = 60.0
    for worker in WORKERS[:2]:
        joins.seat(worker, 8, 0)
    wait_until(lambda: coordinator.asks)
    coordinator.known.remove("m0")
    joins.formed()
    wait_until(lambda: joins.seat(WORKERS[0], 8, 0) is not None or coordinator.joins[1:] == [["m0"]])


def test_a_worker_that_asks_no_more_is_not_joined_again(
    joins: Joins, coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator holds it for dead, and it is: nothing but its own question says that it lives."""
    monkeypatch.setattr(joining, "SPOKEN_FOR_S", 0.5)
    coordinator.wait_s = 0.01
    joins.seat(WORKERS[0], 8, 0)
    wait_until(lambda: coordinator.asks)
    coordinator.known.clear()
    wait_until(lambda: not joins._running)
    assert coordinator.joins == [["m0"]]
    coordinator.generation = 1
    assert seat_of(joins, WORKERS[0]).seat is not None, "it had only been slow"
    assert coordinator.joins == [["m0"], ["m0"]]


def test_a_coordinator_that_is_restarted_is_told_again(
    joins: Joins, coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "AGAIN_S", 0.01)
    coordinator.fails, coordinator.generation = 2, 1
    assert seat_of(joins, WORKERS[1]).seat is not None
    assert coordinator.joins == [["m1"]]


def test_workers_are_sent_to_a_coordinator_that_is_dead_themselves_and_asked_for_at_the_next_one(
    joins: Joins, coordinator: Coordinator
) -> None:
    coordinator.is_dead = True
    with pytest.raises(RuntimeError, match="dead"):
        seat_of(joins, WORKERS[0])
    coordinator.is_dead, coordinator.handle, coordinator.generation = False, object(), 1
    assert seat_of(joins, WORKERS[0]).seat is not None


def test_the_first_word_of_a_node_that_a_generation_broke_is_passed_on_and_none_once_that_is_known() -> None:
    passed: list[tuple[int, int | None]] = []
    keeper = Speaking()
    keeper.lock, keeper.word, keeper.broken = threading.Lock(), ControlWord(over=3), NOTHING
    broke = SimpleNamespace(remote=lambda generation, detail, rank: passed.append((generation, rank)))
    keeper.coordinator = SimpleNamespace(broke=broke)
    for generation in (3, 4, 4, 3, 5):
        keeper.broke(generation, "its memory is full", generation - 3)
    assert passed == [(4, 1), (5, 2)]


def test_a_worker_whose_keeper_is_gone_or_silent_is_sent_to_the_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(reference: object, timeout: float) -> None:
        raise ray.exceptions.GetTimeoutError(f"not within {timeout} s")

    monkeypatch.setattr(rendezvous.ray, "get", get)
    keeper = SimpleNamespace(seat=SimpleNamespace(remote=lambda *of: None))
    assert rendezvous._asked_of_keeper(keeper, WORKERS[0], 8, 0) is None


@pytest.mark.parametrize("is_well_again", [True, False])
def test_a_worker_that_waits_for_a_place_goes_back_to_its_keeper(
    is_well_again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After one answer that was late it asked the coordinator itself, ten times a second for as long as it waited."""
    now, late_s, kept, asked, joined = 0.0, list[float](), list[float](), list[float](), list[str]()
    day_s, late_at = 86_400.0, 0.1

    def pass_time(seconds: float) -> None:
        nonlocal now
        now += seconds

    def get(reference: object, timeout: float) -> Answer | None:
        kept.append(now)
        if now >= late_at and not (is_well_again and late_s):
            pass_time(timeout)
            late_s.append(timeout)
            raise ray.exceptions.GetTimeoutError(f"not within {timeout} s")
        return Answer(over=True) if now >= day_s else None

    def formation(member_id: str, after: int) -> Answer:
        asked.append(now)
        return Answer(over=True) if now >= day_s else Answer(wait_s=0.1)

    monkeypatch.setattr(rendezvous.ray, "get", get)
    monkeypatch.setattr(rendezvous, "time", SimpleNamespace(monotonic=lambda: now, sleep=pass_time))
    keeper = SimpleNamespace(seat=SimpleNamespace(remote=lambda *of: None))
    coordinator = SimpleNamespace(join=lambda member, expected: joined.append(member.id), formation=formation)
    answer = rendezvous._answered(cast(Any, coordinator), keeper, WORKERS[0], 8, 0)
    assert answer.over
    assert joined == ["m0"], "itself, however often it asks"
    if is_well_again:
        assert len(asked) < 200
        assert asked[-1] < 60 <= kept[-1]
    else:
        assert sum(late_s) < 0.01 * day_s, "a keeper that stays away costs little of the time"


def test_one_rank_of_each_node_speaks_for_it() -> None:
    members = tuple(replace(worker, node=f"node-{worker.pid // 3}") for worker in WORKERS)
    joined = [rendezvous.Joined(Formation(1, members), rank, frozenset()) for rank in range(len(members))]
    assert [each.rank for each in joined if each.speaks] == [0, 3, 6]
