import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

from regrow.runtime.board import Board
from regrow.runtime.log_writer import LogWriter
from regrow.show.tensorboard import SCALARS, TensorBoard
from regrow.storage import Storage


def make_row(step: int, generation: int = 1) -> dict[str, Any]:
    return {
        "step": step,
        "time": 1000.0 + step,
        "loss": 8.0 - step + 100 * generation,
        "grad_norm": 1.0,
        "lr": 1e-3,
        "tokens_per_s": 5.0,
        "mfu": None,
        "world_size": 3,
        "data_wait_s": 0.25,
        "generation": generation,
    }


def read(folder: Path) -> Any:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = event_accumulator.EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return events


def losses(folder: Path) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in read(folder).Scalars("loss")]


def open_board(storage: Storage, start_step: int) -> TensorBoard:
    board = TensorBoard.open(storage, start_step=start_step, note=pytest.fail)
    assert board is not None
    return board


def test_scalars_are_read_back_by_step_with_their_times(tmp_path: Path) -> None:
    board = open_board(Storage.at(tmp_path), 0)
    board.row(make_row(1))
    board.row(make_row(2) | {"validation_loss": 5.5, "loss": float("nan")})
    board.close()
    events = read(tmp_path / "tensorboard")
    assert set(events.Tags()["scalars"]) == set(SCALARS) - {"mfu"}  # unknown: no point
    assert [(e.step, e.value, e.wall_time) for e in events.Scalars("loss")] == [(1, 107.0, 1001.0)]
    assert [(e.step, e.value) for e in events.Scalars("validation_loss")] == [(2, 5.5)]
    assert [e.value for e in events.Scalars("data_wait_s")] == [0.25, 0.25]


def test_a_resumed_run_purges_the_steps_that_the_dead_attempt_lost(tmp_path: Path) -> None:
    first = open_board(Storage.at(tmp_path), 0)
    for step in range(1, 8):
        first.row(make_row(step))
    first.flush()  # and dies
    second = open_board(Storage.at(tmp_path), 4)
    for step in (5, 6):
        second.row(make_row(step, 2))
    second.close()
    assert losses(tmp_path / "tensorboard") == [(s, 108.0 - s) for s in range(1, 5)] + [(5, 203.0), (6, 202.0)]
    first.close()


def test_a_new_generation_in_the_same_process_purges_too(tmp_path: Path) -> None:
    board = open_board(Storage.at(tmp_path), 0)
    for step in range(1, 5):
        board.row(make_row(step))
    board.begin(2)
    board.row(make_row(3, 2))
    board.close()
    assert losses(tmp_path / "tensorboard") == [(1, 107.0), (2, 106.0), (3, 205.0)]


def test_where_storage_cannot_append_it_is_skipped_with_one_line() -> None:
    notes: list[str] = []
    assert TensorBoard.open(Storage.at(f"memory://{uuid.uuid4().hex}/run"), start_step=0, note=notes.append) is None
    assert len(notes) == 1
    assert "\n" not in notes[0]


def test_where_storage_cannot_append_one_line_is_enough_for_all_generations() -> None:
    notes, wrong = list[str](), list[str]()
    writer = LogWriter(wrong.append)
    board = Board(Storage.at(f"memory://{uuid.uuid4().hex}/run"), writer, notes.append, wanted=True)
    for start_step in (0, 1, 2):
        board.begin(start_step)
        board.row(make_row(start_step + 1))
    board.close()
    assert writer.close(60.0) == 0
    assert len(notes) == 1
    assert not wrong


def test_writing_imports_neither_torch_nor_tensorflow(tmp_path: Path) -> None:
    (tmp_path / "tensorflow.py").write_text("raise SystemExit('tensorflow was imported')")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from regrow.show.tensorboard import TensorBoard\n"
        "assert 'tensorboard' not in sys.modules\n"
        "board = TensorBoard(sys.argv[1] + '/tensorboard', 0)\n"
        "board.row({'step': 1, 'time': 1.0, 'loss': 2.0}); board.close()\n"
        "print([name for name in ('torch', 'tensorflow', 'ray', 'pandas') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr
