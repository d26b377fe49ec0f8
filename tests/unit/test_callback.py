"""A callback's state: what may be kept, where it lies, and that it is that of its step."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from regrow.config.schema import Dtype, OptimConfig, ParallelConfig
from regrow.errors import CheckpointError, ConfigError
from regrow.optim.adamw import build_optimizer
from regrow.parallel.apply import build_model
from regrow.parallel.float8 import inner_tensor
from regrow.plan.boxes import Box
from regrow.plan.mesh import ALONE, Coordinates, MeshShape
from regrow.record.run_folder import checkpoints_of
from regrow.state.disk import store
from regrow.state.disk.catalog import choose, committed_steps
from regrow.state.entries import Entry, Progress, restored_progress, training_entries, user_scalars
from regrow.state.exchange.runs import average_run, export_run, import_run
from regrow.state.memory.slots import open_slot
from regrow.state.memory.writer import Snapshots
from regrow.storage import Storage
from regrow.train.callback import CLASS, MOST_BYTES, MOST_NAME_BYTES, Called
from support import keepers
from support.counted import Counted, expected
from support.ragged import ragged_model
from support.runs import save_run

ROW = {"step": 1, "loss": 2.5, "grad_norm": 1.0, "num_tokens": 8, "tokens_seen": 8, "lr": 0.1}
NAME = "support.counted:Counted"


def test_a_state_goes_through_a_progress_and_back_into_another_callback() -> None:
    progress = Progress()
    called = Called(NAME, progress)
    for step in (1, 2, 3):
        called.after_step(ROW | {"step": step, "loss": 3.0 / step})
    assert progress.user == expected(3) | {"best": 1.0}
    scalars = Progress(3, 36, 24, progress.user).to_dict()
    assert scalars["user.seen"] == "up to step 3"
    restored = restored_progress(scalars, global_batch_seqs=12)
    assert (restored.step, restored.cursor, restored.tokens_seen) == (3, 36, 24)
    again = Called(NAME, restored)
    again.after_step(ROW | {"step": 4})
    assert restored.user == expected(4) | {"best": 1.0}
    none = Progress()
    Called(None, none).after_step(ROW)
    assert none.to_dict() == {"step": 0, "cursor": 0, "tokens_seen": 0}


@pytest.mark.parametrize(
    ("name", "note"),
    [
        ("support.counted:Another", "begins without a state: the one that is kept is of support.counted:Counted"),
        (None, "the state of support.counted:Counted is not kept any longer"),
    ],
)
def test_a_state_is_given_to_its_own_class_alone_and_is_not_kept_for_a_job_without_it(
    name: str | None, note: str
) -> None:
    """Before, another class was given it, and raised KeyError or went on with it; without one it was kept, and grew old
    by the time the class came back."""
    kept = expected(3) | {"best": 1.0}
    progress = Progress(3, 36, 24, dict(kept))
    called = Called(name, progress)
    assert called.note == f"train.callback={name or 'null'}: {note}"
    assert progress.user == {}
    called.after_step(ROW)
    assert progress.user.get("steps") == (1 if name else None)
    assert progress.user.get(CLASS) == name
    assert Called(name, progress).note == Called(NAME, Progress(user=kept)).note == Called(None, Progress()).note == ""


def test_a_state_of_an_earlier_version_that_does_not_say_whose_it_is_is_given_to_the_callback() -> None:
    old = {key: value for key, value in expected(3).items() if key != CLASS} | {"best": 1.0}
    progress = Progress(3, 36, 24, dict(old))
    called = Called("support.counted:Another", progress)
    called.after_step(ROW)
    assert called.note == ""
    assert (progress.user["steps"], progress.user[CLASS]) == (4, "support.counted:Another")
    progress = Progress(3, 36, 24, dict(old))
    assert Called(None, progress).note == "train.callback=null: the state of a callback is not kept any longer"
    assert progress.user == {}


@pytest.mark.parametrize(
    ("kept", "says"),
    [
        ({"a": [1]}, r"its state's 'a' is \[1\], no number or text"),
        ({"a": float("nan")}, "its state's 'a' is nan"),
        ({"a": "x" * MOST_BYTES}, f"bytes as JSON; keep {MOST_BYTES}"),
        ({CLASS: "x"}, "its state's 'train.callback' is where the class's name is kept; give it another key"),
    ],
)
def test_what_cannot_be_kept_ends_in_one_line(kept: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counted, "state", lambda self: kept)
    with pytest.raises(ConfigError, match=says):
        Called(NAME, Progress()).after_step(ROW)


@pytest.mark.parametrize("name", ["support.nowhere:Counted", "support.counted:Other", "support.counted", "json:loads"])
def test_a_name_that_leads_nowhere_ends_in_one_line(name: str) -> None:
    with pytest.raises(ConfigError, match=f"train.callback={name}: .*; name a class as package.module:Class"):
        Called(name, Progress())


def test_a_name_that_a_snapshot_has_no_room_for_is_refused() -> None:
    with pytest.raises(ConfigError, match=f"has 257 bytes as JSON, and {MOST_NAME_BYTES} are kept; give it a shorter"):
        Called("x" * (MOST_NAME_BYTES - 1), Progress())


def raise_at(where: str, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Counted, *of: Any) -> Any:
        raise error

    monkeypatch.setattr(Counted, where, fails)


def call_all(is_over: bool = False) -> None:
    """Import, constructor, `restore`, `after_step` and `state` of Counted."""
    Called(NAME, Progress(user=expected(3) | {"best": 1.0}), is_over=lambda: is_over).after_step(ROW)


CALLS = [("__init__", "its constructor"), ("restore", "restore"), ("after_step", "after_step"), ("state", "state")]


@pytest.mark.parametrize(("where", "said"), CALLS)
@pytest.mark.parametrize("error", [KeyError("x"), RuntimeError("first\nsecond"), CheckpointError("no"), SystemExit(3)])
def test_what_a_users_code_raises_is_one_line_and_its_traceback_is_in_the_log(
    where: str, said: str, error: BaseException, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before, it was no RegrowError: the group was formed again, and met it again, for ever."""
    raise_at(where, error, monkeypatch)
    with pytest.raises(ConfigError) as told:
        call_all()
    first = str(error).splitlines()[0]
    assert str(told.value).startswith(f"train.callback={NAME}: {said} raised {type(error).__name__}: {first}")
    assert "second" not in str(told.value)
    printed = capsys.readouterr().err
    assert "in fails" in printed
    assert "raise error" in printed


def test_a_module_that_raises_while_it_is_imported_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "raises_on_import.py").write_text("LEFT = {}['right']\n")
    monkeypatch.syspath_prepend(tmp_path)
    name = "raises_on_import:Class"
    with pytest.raises(ConfigError, match=f"train.callback={name}: its import raised KeyError: 'right'; name a class"):
        Called(name, Progress())
    assert "LEFT = {}['right']" in capsys.readouterr().err


@pytest.mark.parametrize("where", [where for where, _ in CALLS])
def test_what_it_raises_in_a_group_that_is_over_is_not_its_error(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An abort completes a collective of its own with garbage."""
    raise_at(where, error := KeyError("x"), monkeypatch)
    with pytest.raises(KeyError) as raised:
        call_all(is_over=True)
    assert raised.value is error


def test_a_snapshot_is_sealed_with_the_state_of_its_step_though_it_was_begun_before(tmp_path: Path) -> None:
    """Where steps run ahead of the host, a snapshot is begun before its step's results are read."""
    entries = [Entry(Box.whole("model/w", (4,)), torch.ones(4))]
    snapshots = Snapshots(tmp_path, entries, coordinates=Coordinates(MeshShape(1, 1)), run_id="r", generation=1)
    largest: dict[str, Any] = {"user.text": "x" * (MOST_BYTES - len('{"user.text": ""}'))}
    largest |= user_scalars({CLASS: "x" * (MOST_NAME_BYTES - 2)})
    snapshots.begin(5, Progress(5, 10**15, 10**18, {"text": "before", "gone": 1}).to_dict())
    snapshots.wait()
    snapshots.confirm(5, largest)
    (slot,) = [found for path in tmp_path.glob("*.slot") if (found := open_slot(path)) is not None]
    assert slot.scalars == {"step": 5, "cursor": 10**15, "tokens_seen": 10**18} | largest
    snapshots.close()
    assert slot.coordinates == ALONE


def test_checkpoints_hold_it_and_so_do_those_that_are_made_of_them(tmp_path: Path) -> None:
    model = ragged_model()
    save_run(tmp_path / "run", model, steps=(2,))
    built = build_model(model, ParallelConfig(), mesh=None, device="cpu", seed=0)
    entries = training_entries(built, build_optimizer(built, OptimConfig()), inner_tensor=inner_tensor)
    progress = Progress(4, 48, 384, {"seen": "so much", "best": 0.5})
    run = Storage.at(tmp_path / "run")
    run_id = choose(*checkpoints_of(str(run)))[1].run_id
    store.save(run / "checkpoints", entries, scalars=progress.to_dict(), run_id=run_id, generation=1)

    def quiet(total: int) -> Any:
        return lambda num_bytes: None

    indexes = [choose(*checkpoints_of(str(run)), step)[1] for step in (4, 2)]
    assert Progress.of(indexes[0].scalars) == progress
    export_run("dcp", str(run), indexes[0], str(tmp_path / "dcp"), dtype=Dtype.float32, start=quiet)
    import_run("dcp", str(tmp_path / "dcp"), str(tmp_path / "moved"), start=quiet)
    average_run(str(run), indexes, str(tmp_path / "mean"), start=quiet)
    for other in ("moved", "mean"):
        assert Progress.of(choose(*checkpoints_of(str(tmp_path / other)))[1].scalars) == progress


def keep_another_number_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks that take snapshots do."""
    numbers = itertools.count()
    monkeypatch.setattr(
        keepers, "scalars_of", lambda step: Progress(step, 12 * step, 0, {"n": next(numbers)}).to_dict()
    )


def test_nodes_whose_states_differ_make_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_another_number_each(monkeypatch)
    with keepers.cluster(tmp_path / "memory", 2) as nodes:
        keepers.snapshot(nodes, 3, 2)
        with pytest.raises(CheckpointError, match="node node-1 holds another state than node-0"):
            keepers.write_checkpoint(nodes, Storage.at(tmp_path / "checkpoints"), 3)
    assert committed_steps(Storage.at(tmp_path / "checkpoints")) == []


def test_ranks_of_one_node_whose_states_differ_make_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, the first one's was written."""
    keep_another_number_each(monkeypatch)
    with keepers.cluster(tmp_path / "memory", 1) as nodes:
        keepers.snapshot(nodes, 3, 2)
        with pytest.raises(
            CheckpointError, match=r"rank \d keeps other numbers of step 3 than rank \d: train.callback"
        ):
            keepers.write_checkpoint(nodes, Storage.at(tmp_path / "checkpoints"), 3)
    assert committed_steps(Storage.at(tmp_path / "checkpoints")) == []
