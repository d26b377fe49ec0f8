"""Checkpoints that ranks write themselves, and storage does not take: training goes on, the last one is tried again."""

import random
import time
from collections import deque
from pathlib import Path

import pytest
import torch

from regrow.config.schema import SnapshotConfig
from regrow.control.values import Version
from regrow.errors import CheckpointError, NotWrittenError
from regrow.plan.boxes import Box
from regrow.plan.mesh import ALONE
from regrow.state.entries import Entry, Progress
from regrow.state.memory import writer as writer_module
from regrow.state.memory.slots import Committed
from regrow.state.memory.writer import Snapshots
from regrow.train import saver as saver_module
from regrow.train.saver import Cadence, CheckpointSaver, SnapshotSaver
from support.keepers import RUN, cluster


class Store:
    """Storage that fails so many times."""

    def __init__(self, failures: int, kind: type[CheckpointError] = NotWrittenError) -> None:
        self.failures, self.kind = failures, kind
        self.steps: list[int] = []

    def write(self, progress: Progress) -> None:
        if self.failures:
            self.failures -= 1
            raise self.kind("storage is away")
        self.steps.append(progress.step)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saver_module, "RETRY_S", 0.0)


def saver_of(store: Store, *, timeout_s: float = 60.0) -> CheckpointSaver:
    return CheckpointSaver(Cadence(6, checkpoint_every_steps=2), store.write, timeout_s=timeout_s)


def train(saver: CheckpointSaver, until: int) -> None:
    for step in range(1, until + 1):
        saver.after_step(Progress(step, 0, 0), blocked=False, read=True)


def test_training_goes_on_past_a_checkpoint_that_storage_does_not_take() -> None:
    store = Store(1)
    train(saver_of(store), 5)
    assert store.steps == [4]


def test_the_checkpoint_of_the_last_step_is_tried_again() -> None:
    store = Store(5)
    train(saver_of(store), 6)
    assert store.steps == [6]


def test_so_is_the_one_of_a_group_that_leaves() -> None:
    store = Store(4)
    saver = saver_of(store)
    train(saver, 3)
    saver.finish(Progress(3, 0, 0), blocked=False)
    assert store.steps == [3]


def test_after_its_time_the_last_checkpoint_is_an_error() -> None:
    with pytest.raises(NotWrittenError, match="storage is away"):
        train(saver_of(Store(10**9), timeout_s=0.0), 6)


def test_what_is_not_storages_fault_is_raised_at_once() -> None:
    with pytest.raises(CheckpointError) as raised:
        train(saver_of(Store(1, CheckpointError)), 2)
    assert not isinstance(raised.value, NotWrittenError)


@pytest.mark.parametrize("step", [199, 200])
def test_the_last_step_of_a_group_that_leaves_is_kept_also_where_a_checkpoint_was_due_and_no_slot_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    for name in ("SAFE_S", "LAST_ROOM_S"):
        monkeypatch.setattr(saver_module, name, 0.05)
    entries = [Entry(Box.whole("w", (4,)), torch.zeros(4))]
    snapshots = Snapshots(tmp_path, entries, coordinates=ALONE, run_id="0" * 16, generation=1)
    store, wanted = Store(0), list[int]()
    cadence = Cadence(1000, snapshot_every_steps=1, checkpoint_every_steps=200)
    saver = SnapshotSaver(
        cadence, snapshots, start_step=300, num_ahead=0, want_checkpoint=wanted.append, write=store.write, timeout_s=5.0
    )
    for each in (1, 2):  # no keeper is there to have them committed
        saver.after_step(Progress(each, 0, 0), blocked=False, read=True)
        saver.before_update()
    saver.after_step(Progress(step, 0, 0), blocked=True, read=True)
    saver.finish(Progress(step, 0, 0), blocked=True)
    assert store.steps == [step]
    snapshots.close()


class Ahead:
    """A loop that reads what ranks say of a step so many steps later, on one rank."""

    def __init__(self, folder: Path, *, every_steps: int | None, num_ahead: int, checkpoint_every_steps: int) -> None:
        entries = [Entry(Box.whole("w", (4,)), torch.zeros(4))]
        self.snapshots = Snapshots(
            folder, entries, coordinates=ALONE, run_id=RUN, generation=1, num_slots=SnapshotConfig().slots
        )
        self.saver = SnapshotSaver(
            Cadence(10**6, every_steps, checkpoint_every_steps),
            self.snapshots,
            start_step=0,
            num_ahead=num_ahead,
            want_checkpoint=lambda step: None,
            write=lambda progress: None,
            timeout_s=1.0,
        )
        self.num_ahead, self.in_flight, self.blocked = num_ahead, deque[tuple[int, bool, bool]](), False

    def step(self, number: int, *, others_have_room: bool = True, spacing: int = 0, read_at_once: bool = False) -> None:
        blocked = not (self.saver.has_room(number) and others_have_room)
        self.in_flight.append((number, blocked, self.saver.is_held(number)))
        self.saver.before_update()
        is_read = self.saver.is_checkpoint_due(number) or not self.num_ahead or read_at_once
        while len(self.in_flight) > (0 if is_read else self.num_ahead):
            read, self.blocked, held = self.in_flight.popleft()
            self.saver.space(spacing)
            self.saver.held_by_all(read, held)
            self.saver.confirm(read)
        self.saver.after_step(Progress(number, 0, 0), blocked=self.blocked, read=is_read)


def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SAFE_S", "LAST_ROOM_S"):
        monkeypatch.setattr(saver_module, name, 0.0)


@pytest.mark.parametrize("num_ahead", [0, 1])
@pytest.mark.parametrize("every_steps", [1, 2, 3, None])
@pytest.mark.parametrize("seed", range(3))
def test_no_snapshot_is_begun_without_a_slot_however_late_commits_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_ahead: int, every_steps: int | None, seed: int
) -> None:
    no_waits(monkeypatch)
    rng, number = random.Random(seed), 0
    ahead = Ahead(tmp_path, every_steps=every_steps, num_ahead=num_ahead, checkpoint_every_steps=7)
    begun = set[int]()
    for step in range(1, 1500):
        others, spacing = rng.random() < 0.9, rng.choice([0, 0, 0, 1, 2, 4])
        ahead.step(step, others_have_room=others, spacing=spacing, read_at_once=rng.random() < 0.05)
        begun.add(ahead.snapshots.begun)
        if rng.random() < (0.6 if step // 100 % 2 else 0.1):
            ahead.snapshots.wait()
            number += 1
            done = max((each for each in begun if each <= step - num_ahead), default=0)
            Committed(newest=Version(1, done), number=number).write(tmp_path)
    assert len(begun) > 100
    ahead.snapshots.close()


@pytest.mark.parametrize("num_ahead", [0, 1])
@pytest.mark.parametrize("every_steps", [1, 2, None])
def test_snapshots_go_on_where_nothing_is_committed_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_ahead: int, every_steps: int | None
) -> None:
    """Nodes hold them, which ranks tell each other: also where what they tell is read a step later."""
    no_waits(monkeypatch)
    monkeypatch.setattr(writer_module, "UNCOMMITTED_S", 0.1)
    with cluster(tmp_path, 1) as nodes:
        folder = nodes[0].keeper.folder
        ahead = Ahead(folder, every_steps=every_steps, num_ahead=num_ahead, checkpoint_every_steps=10**6)
        step = 0
        while ahead.snapshots.begun < 60:  # three slots are full after three snapshots
            step += 1
            ahead.step(step, spacing=4)
            assert step < 4000, f"none after that of step {ahead.snapshots.begun}"
            time.sleep(0.005)
        ahead.snapshots.close()
