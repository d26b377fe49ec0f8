"""The coordinator's fence and lock, on the class itself: no Ray is needed to refuse a write."""

from pathlib import Path

import pytest

from regrow.checkpoint import coordinator as module
from regrow.checkpoint.catalog import committed_steps
from regrow.checkpoint.coordinator import Coordinator, Fenced
from regrow.config.schema import CheckpointConfig
from regrow.errors import ResumeError
from regrow.storage import Storage


def make(folder: Path) -> Coordinator:
    return Coordinator(
        str(folder),
        "run",
        secret=b"",
        checkpoints="checkpoints",
        checkpoint=CheckpointConfig(),
        sizes=range(1, 9),
        wait_for_workers_s=60,
        tensorboard=False,
        submitted={},
    )


def test_every_write_of_an_older_generation_is_refused(tmp_path: Path) -> None:
    made = make(tmp_path)
    old, _ = made.begin_generation()
    new, _ = made.begin_generation()
    with pytest.raises(Fenced, match=f"generation {old} is over; {new} is current"):
        made.row(old, {})
    with pytest.raises(Fenced):
        made.event(old, "checkpoint", {})
    with pytest.raises(Fenced):
        made.commit(old, "step-00000001", b"{}")
    assert committed_steps(Storage.at(tmp_path) / "checkpoints") == []
    made.commit(new, "step-00000001", b"{}")
    assert committed_steps(Storage.at(tmp_path) / "checkpoints") == [1]


def test_a_run_has_one_writer_and_its_generations_go_on_counting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOCK_WAIT_S", 0.1)
    first = make(tmp_path)
    generation, _ = first.begin_generation()
    first.event(generation, "note", {"text": "alive"})
    with pytest.raises(ResumeError, match="is in use"):
        make(tmp_path)
    first.lock.close()  # as the process' end does
    assert make(tmp_path).begin_generation()[0] > generation


def test_groups_that_keep_failing_before_a_step_give_the_run_up(tmp_path: Path) -> None:
    made = make(tmp_path)
    made.failure("worker_failed", "rank 0: no such thing", [0])
    given_up = [made.begin_generation()[1] for _ in range(module.MAX_FRUITLESS_GENERATIONS + 1)]
    assert given_up[:-1] == [""] * module.MAX_FRUITLESS_GENERATIONS
    assert "no such thing" in given_up[-1]
