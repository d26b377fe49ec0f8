"""Which checkpoints a run may go on from after a corruption, by its log and by their notes."""

import json
from pathlib import Path
from typing import Any

import pytest

from regrow.control.values import NOTHING
from regrow.runtime.trusted import Checkpoints, by_the_log, up_to
from regrow.state.disk import catalog
from regrow.state.disk.format import COMMIT, DAMAGED
from regrow.storage import Storage

Row = dict[str, Any]


@pytest.fixture
def run(tmp_path: Path) -> Storage:
    return Storage.at(tmp_path)


def commit(run: Storage, *steps: int) -> Storage:
    for step in steps:
        (run / "checkpoints").write_bytes(f"{catalog.step_folder(step)}/{COMMIT}", b"{}")
    return run / "checkpoints"


def log(run: Storage, *rows: Row) -> None:
    of_all = {"ranks": [], "units": [], "nodes": [], "is_decided": True}
    rows = tuple(
        {"time": float(at), **(of_all if row["event"] == "corruption" else {}), **row} for at, row in enumerate(rows)
    )
    run.write_bytes("events.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode())


def test_a_note_from_before_it_said_so_apart_keeps_a_spoilt_state_from_being_restored(run: Storage) -> None:
    checkpoints = commit(run, 300, 550)
    catalog.note_damaged(
        checkpoints, 550, "a rank computed wrong; step 300 is the newest whose state is known to be right"
    )
    path = f"{catalog.step_folder(550)}/{DAMAGED}"
    note = json.loads(checkpoints.read_bytes(path))
    del note["computed_wrong"]
    checkpoints.write_bytes(path, json.dumps(note).encode())
    assert up_to(None, Checkpoints.look(checkpoints), NOTHING, checkpoints) == [300]


def test_one_that_could_not_be_read_and_was_computed_wrong_is_not_tried_last_either(run: Storage) -> None:
    checkpoints = commit(run, 20, 60)
    catalog.note_damaged(checkpoints, 60, "a bad sector")
    log(
        run,
        {"event": "generation", "generation": 1, "start_step": 0},
        {"event": "corruption", "verified_step": 20, "step": 70},
    )
    assert by_the_log(run, checkpoints) == [20]
    assert Checkpoints.look(checkpoints).computed_wrong == [60]
    catalog.note_damaged(checkpoints, 60, "a bad sector")  # found once more
    assert Checkpoints.look(checkpoints).computed_wrong == [60]


def test_one_that_was_computed_wrong_is_none_that_is_gone_for_a_later_corruption(run: Storage) -> None:
    checkpoints = commit(run, 60)
    catalog.note_damaged(checkpoints, 60, "a rank computed wrong", computed_wrong=True)
    log(
        run,
        {"event": "checkpoint", "step": 60},
        {"event": "corruption", "step": 70, "verified_step": 20},
        {"event": "generation", "generation": 2, "start_step": 20},
        {"event": "corruption", "step": 110, "verified_step": 100},
    )
    assert by_the_log(run, checkpoints) == []
