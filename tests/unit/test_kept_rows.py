"""Rows of metrics that a coordinator took along, and rank 0 sends again."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from regrow.control.states import RowAnswer
from regrow.runtime import hooks as hooks_module
from regrow.runtime import kept_rows, worker
from regrow.runtime.abort import Breaker
from regrow.runtime.hooks import GenerationHooks
from regrow.runtime.kept_rows import KeptRows
from regrow.state.entries import Progress
from regrow.train.certificate import BrokenStep


def steps(rows: Sequence[Mapping[str, Any]]) -> list[tuple[int, int]]:
    return [(row["generation"], row["step"]) for row in rows]


def add(kept: KeptRows, generation: int, *numbers: int) -> None:
    for step in numbers:
        kept.add({"generation": generation, "step": step})


def test_rows_are_kept_over_generations_but_for_those_that_were_taken_back() -> None:
    kept = KeptRows(most=4)
    kept.begin(1, 0)
    add(kept, 1, 1, 2, 3)
    kept.begin(2, 2)
    add(kept, 2, 3, 4, 5)
    assert steps(kept.since(0)) == [(1, 2), (2, 3), (2, 4), (2, 5)], "no more than that"
    assert steps(kept.since(4)) == [(2, 4), (2, 5)]
    assert steps(kept.newest()) == [(2, 5)]


@pytest.fixture
def died(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KeptRows:
    """Of a process of this node that is gone, which was in generation 4 last."""
    monkeypatch.setattr(kept_rows.os, "getpid", lambda: 1 << 30)
    kept = KeptRows()
    kept.keep_in(tmp_path)
    kept.begin(3, 0)
    add(kept, 3, 1, 2, 3, 4)
    kept.begin(4, 2)
    add(kept, 4, 3, 4, 5)
    monkeypatch.undo()
    return kept


def test_rows_of_a_process_that_is_gone_are_in_its_nodes_memory(died: KeptRows, tmp_path: Path) -> None:
    """Soak seed 2452: driver and workers died while the coordinator stood, and training went on from memory; of 77
    steps no process had the rows any more."""
    for _ in range(2):  # both that are new on the node may be the ones that are asked
        kept = KeptRows()
        kept.keep_in(tmp_path)
        kept.begin(5, 5)
        assert steps(kept.since(1)) == [(3, 1), (3, 2), (4, 3), (4, 4), (4, 5)]
    late = KeptRows()
    late.keep_in(tmp_path)
    late.begin(7, 5)  # others were in one between
    assert late.since(1) == []


def test_rows_outlive_a_generation_that_broke_before_it_trained() -> None:
    """Before, a rank of it threw away what a coordinator that was started anew had not in its log."""
    kept = KeptRows()
    kept.begin(1, 0)
    add(kept, 1, *range(1, 8))
    kept.was_in(2)
    kept.begin(3, 7)
    assert steps(kept.since(1)) == [(1, step) for step in range(1, 8)]


def test_a_process_notes_its_seat_before_it_waits_for_the_others_of_its_group(breaker: Breaker) -> None:
    kept, waits = KeptRows(), list[int]()
    kept.begin(1, 0)
    add(kept, 1, 1, 2)
    memory = SimpleNamespace(waiting=lambda generation, breaker: waits.append(generation))
    for generation, each in enumerate((memory, None), start=2):
        worker._has_seat(cast(Any, SimpleNamespace(rows=kept, memory=each)), generation, breaker)
    kept.begin(4, 2)
    assert (waits, len(kept.since(1))) == ([2], 2)


@pytest.mark.parametrize(("seat", "is_kept"), [(5, True), (6, False)])
def test_rows_that_a_process_finds_once_it_has_a_seat_outlive_that_generation_too(
    died: KeptRows, tmp_path: Path, seat: int, is_kept: bool
) -> None:
    kept = KeptRows()
    kept.was_in(seat)
    kept.keep_in(tmp_path)
    kept.was_in(seat + 1)
    kept.begin(seat + 2, 5)
    assert bool(kept.since(1)) == is_kept


def test_a_row_that_was_cut_short_and_what_is_old_count_for_nothing(died: KeptRows, tmp_path: Path) -> None:
    (path,) = tmp_path.iterdir()
    path.write_text(path.read_text()[:-10])
    older = tmp_path / f"{path.name}1"
    older.write_text('{"step": 9, "generation": 2}\n')
    kept = KeptRows()
    kept.keep_in(tmp_path)
    assert steps(kept.newest()) == [(4, 4)]
    assert not older.exists()


def test_the_file_has_the_newest_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_rows, "MOST_IN_FILE", 4)
    kept = KeptRows()
    folder = tmp_path / "keeper"
    folder.mkdir()
    kept.keep_in(folder)
    found = []
    for step in range(1, 8):
        add(kept, 1, step)
        (path,) = folder.iterdir()
        found.append([json.loads(line)["step"] for line in path.read_text().splitlines()])
    assert found == [[1], [1, 2], [1, 2, 3], [1, 2, 3, 4], [4, 5], [4, 5, 6], [4, 5, 6, 7]]
    shutil.rmtree(folder)
    add(kept, 1, 8)  # the node's memory may be gone, or full
    assert steps(kept.newest()) == [(1, 8)]


def test_rows_of_steps_that_others_may_have_trained_again_are_not_kept() -> None:
    kept = KeptRows()
    kept.begin(1, 0)
    add(kept, 1, 1, 2, 3)
    kept.begin(3, 3)  # in generation 2 it was a spare
    assert kept.since(0) == kept.newest() == []
    add(kept, 3, 4, 5)
    kept.begin(4, 7)  # it was restored from memory that is ahead of it
    add(kept, 4, 8)
    assert steps(kept.since(0)) == [(4, 8)]


def test_rows_are_sent_by_the_clock_of_the_coordinator_that_is_known_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept by rank 1 of a host whose clock is two minutes ahead, and sent as it is rank 0; again at no other time."""
    now = [100.0]
    wrong = SimpleNamespace(time=lambda: now[0] + 120.0, monotonic=lambda: now[0] - 77.0)
    monkeypatch.setattr(kept_rows, "time", wrong)
    kept = KeptRows()
    kept.begin(1, 0)
    for step in (1, 2):
        now[0] += 10.0
        kept.add({"generation": 1, "step": step, "time": wrong.time()})
    now[0] += 10.0
    kept.begin(2, 2)
    kept.clock = lambda: now[0]
    for _ in range(2):
        assert [row["time"] for row in kept.since(1)] == [110.0, 120.0]
        assert kept.newest()[0]["time"] == 120.0
        now[0] += 50.0


def test_rows_of_before_that_have_their_time_keep_it(tmp_path: Path) -> None:
    """Left by a process of the version that kept the coordinator's time: it was taken for `time.monotonic()`."""
    (tmp_path / "rows-999999999").write_text(json.dumps({"generation": 1, "step": 1, "time": 100.5}) + "\n")
    kept = KeptRows()
    kept.keep_in(tmp_path)
    assert kept.since(0) == [{"generation": 1, "step": 1, "time": 100.5}]


class Coordinator:
    """Answers when it is asked for answers, and forgets rows when it dies."""

    def __init__(self) -> None:
        self.rows: list[Mapping[str, Any]] = []
        self.sent: list[list[int]] = []

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *arguments: [getattr(self, f"_{name}"), *arguments])

    def die(self, *, stored: int) -> None:
        del self.rows[stored:]

    def _row(self, generation: int, row: Mapping[str, Any]) -> RowAnswer:
        if row["step"] > len(self.rows) + 1:
            return RowAnswer(wanted=len(self.rows) + 1)
        self.rows.extend([row] if row["step"] == len(self.rows) + 1 else [])
        return RowAnswer()

    def _rows_again(self, generation: int, since: int, rows: Sequence[Mapping[str, Any]]) -> RowAnswer:
        if since > len(self.rows) + 1:
            return RowAnswer(wanted=len(self.rows) + 1)
        self.sent.append([row["step"] for row in rows])
        self.rows.extend(row for row in rows if row["step"] > len(self.rows))
        return RowAnswer()

    def _done(self) -> None: ...

    def _event(self, generation: int, event: str, fields: Mapping[str, Any]) -> None: ...


@pytest.fixture
def breaker() -> Breaker:
    return Breaker()


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch, breaker: Breaker) -> GenerationHooks:
    """Calls are answered in their order, when they are waited for."""
    get = lambda call, timeout=None: call[0](*call[1:])  # noqa: E731
    fake = SimpleNamespace(get=get, wait=lambda calls, num_returns, timeout: (calls, []))
    monkeypatch.setattr(hooks_module, "ray", fake)
    observe = SimpleNamespace(profile_at_step=None)
    job = SimpleNamespace(
        coordinator=Coordinator(), config=SimpleNamespace(observe=observe, train=SimpleNamespace(callback=None))
    )
    process = SimpleNamespace(job=job, memory=None, compiled=None, rows=KeptRows())
    process.rows.begin(1, 0)
    return GenerationHooks(cast(Any, process), 1, *[cast(Any, None)] * 3, breaker, Progress())


def train(hooks: GenerationHooks, *numbers: int) -> None:
    for step in numbers:
        hooks.log({"generation": 1, "step": step})


def coordinator_of(hooks: GenerationHooks) -> Coordinator:
    return cast(Coordinator, hooks._coordinator.handle)  # a test double stands there


def test_rows_that_went_with_a_coordinator_are_sent_again_once(hooks: GenerationHooks) -> None:
    coordinator = coordinator_of(hooks)
    train(hooks, 1, 2, 3, 4)
    assert not hooks.wants_to_leave()
    coordinator.die(stored=2)
    train(hooks, 5, 6, 7)  # on their way while it is away
    assert not hooks.wants_to_leave()
    train(hooks, 8)
    assert not hooks.wants_to_leave()
    assert not hooks.wants_to_leave()
    assert [row["step"] for row in coordinator.rows] == list(range(1, 9))
    assert coordinator.sent == [[3, 4, 5, 6, 7]]


def test_rows_that_one_coordinator_asked_for_and_another_one_gets_are_sent_with_those_before(
    hooks: GenerationHooks,
) -> None:
    coordinator = coordinator_of(hooks)
    train(hooks, 1, 2)
    assert not hooks.wants_to_leave()
    coordinator.die(stored=1)
    train(hooks, 3)
    assert not hooks.wants_to_leave()  # it wants row 2
    coordinator.die(stored=0)
    assert not hooks.wants_to_leave()  # another one has the answer, and wants row 1
    assert not hooks.wants_to_leave()
    assert [row["step"] for row in coordinator.rows] == [1, 2, 3]
    assert coordinator.sent == [[1, 2, 3]]


def test_rows_are_missed_at_the_end_too(hooks: GenerationHooks) -> None:
    coordinator = coordinator_of(hooks)
    train(hooks, 1, 2, 3)
    assert not hooks.wants_to_leave()
    coordinator.die(stored=1)
    hooks.close(left_at=None, cause="")
    assert [row["step"] for row in coordinator.rows] == [1, 2, 3]


def test_no_step_begins_once_the_generation_is_over(hooks: GenerationHooks, breaker: Breaker) -> None:
    """A rank that had waited for a commit began its next collective on connections that were shut down; it hung."""
    assert not hooks.wants_to_leave()
    breaker.start()
    with pytest.raises(BrokenStep, match="generation 1 is over"):
        hooks.wants_to_leave()
    breaker.left()
