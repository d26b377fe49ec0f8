"""Checkpoints that ranks write themselves, and storage does not take: training goes on, the last one is tried again."""

from pathlib import Path

import pytest
import torch

from regrow.errors import CheckpointError, NotWrittenError
from regrow.plan.boxes import Box
from regrow.plan.mesh import ALONE
from regrow.state.entries import Entry, Progress
from regrow.state.memory.writer import Snapshots
from regrow.train import saver as saver_module
from regrow.train.saver import Cadence, CheckpointSaver, SnapshotSaver


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
