"""Opening a run: new, continued, or refused with the reason."""

import json
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from regrow.accept.tiny import tiny_model
from regrow.config.schema import ActivationCheckpoint, ModelConfig, PretrainConfig, Schedule
from regrow.errors import ResumeError
from regrow.record.lock import lock_run
from regrow.record.run_folder import identity, model_of, read_config, write_record
from regrow.record.unfinished import filling
from regrow.runtime import run_folder as module
from regrow.runtime.run_folder import check_may_start, find_or_create, write_config
from regrow.storage import Storage, StorageError
from support.opened import open_run


def config(tmp_path: Path) -> PretrainConfig:
    made = PretrainConfig()
    made.run.storage_path, made.run.name = str(tmp_path), "mine"
    return made


def test_a_run_is_created_once_and_then_continued_under_the_same_id(tmp_path: Path) -> None:
    first = open_run(config(tmp_path), manifest_sha256="aa")
    again = open_run(config(tmp_path), manifest_sha256="aa")
    assert first.resumed_step is None
    assert again.resumed_step == 0
    assert again.run_id == first.run_id
    assert (tmp_path / "mine" / "config.yaml").read_text().startswith("run:")


def test_a_job_that_does_not_hold_the_lock_leaves_the_settings_of_the_one_that_trains(tmp_path: Path) -> None:
    """Before, those of a second job were in config.yaml by the time that it was refused."""
    run = open_run(config(tmp_path), manifest_sha256="aa")
    held, other = lock_run(run.folder), config(tmp_path)
    assert held is not None
    other.train.steps, other.cluster.name = 200, "other"
    before = read_config(run.folder)
    again = find_or_create(other, manifest_sha256="aa")
    assert again.run_id == run.run_id
    assert read_config(run.folder) == before
    assert before["train"]["steps"] != 200
    held.close()
    write_config(again, other)
    assert read_config(run.folder)["train"]["steps"] == 200


def test_settings_that_do_not_touch_the_weights_may_change(tmp_path: Path) -> None:
    open_run(config(tmp_path), manifest_sha256="aa")
    changed = config(tmp_path)
    changed.train.steps = 500
    changed.cluster.max_workers = 4
    changed.checkpoint.every_steps = 7
    changed.parallel.activation_checkpoint = ActivationCheckpoint.full
    changed.data.prefetch_windows = 5
    changed.observe.tensorboard = False
    changed.model.name = "other words for the same model"
    open_run(changed, manifest_sha256="aa")


@pytest.mark.parametrize(
    ("group", "key", "value", "line"),
    [
        ("model", "num_layers", 5, "model.num_layers: 4 -> 5"),
        ("optim", "lr", 0.1, "optim.lr: 0.003 -> 0.1"),
        ("optim", "schedule", Schedule.cosine, "optim.schedule: wsd -> cosine"),
        ("optim", "global_batch_seqs", 48, "optim.global_batch_seqs: 12 -> 48"),
        ("data", "window_steps", 4, "data.window_steps: 8 -> 4"),
        ("data", "seq_len", 64, "data.seq_len: 128 -> 64"),
        ("run", "seed", 1, "run.seed: 0 -> 1"),
    ],
)
def test_settings_that_the_weights_depend_on_are_refused_with_the_difference(
    tmp_path: Path, group: str, key: str, value: object, line: str
) -> None:
    open_run(config(tmp_path), manifest_sha256="aa")
    changed = config(tmp_path)
    setattr(getattr(changed, group), key, value)
    with pytest.raises(ResumeError) as error:
        check_may_start(changed)
    assert line in str(error.value)
    with pytest.raises(ResumeError):
        open_run(changed, manifest_sha256="aa")


def test_two_jobs_that_begin_a_run_at_once_are_of_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else one's checkpoints would be another run's to the next attempt: the later record had replaced the first."""
    read, first = module.read_record, list[Any]()

    def nothing_yet(folder: Storage) -> Any:
        if first:
            return read(folder)
        first.append(None)  # before anything else is read: the other job is faster
        first[0] = open_run(config(tmp_path), manifest_sha256="aa")
        return None

    monkeypatch.setattr(module, "check_may_start", lambda config: None)
    monkeypatch.setattr(module, "read_record", nothing_yet)
    second = open_run(config(tmp_path), manifest_sha256="aa")
    assert (second.run_id, second.resumed_step) == (first[0].run_id, 0)
    assert read(second.folder)["run_id"] == second.run_id


def test_another_corpus_is_refused(tmp_path: Path) -> None:
    open_run(config(tmp_path), manifest_sha256="aa")
    with pytest.raises(ResumeError, match="corpus: aa -> bb"):
        open_run(config(tmp_path), manifest_sha256="bb")


def test_another_filter_is_refused_before_a_corpus_is_prepared_by_it(tmp_path: Path) -> None:
    """Before, a cluster was joined and a whole corpus made, and then two hashes named no setting."""
    first = config(tmp_path)
    first.data.min_score, first.data.language = 3.0, "en"
    open_run(first, manifest_sha256="aa")
    check_may_start(first)
    with pytest.raises(ResumeError, match=r"\(data\.language: en -> None; data\.min_score: 3\.0 -> None\)"):
        check_may_start(config(tmp_path))
    again = config(tmp_path)
    again.data.min_score, again.data.language, again.data.rows_per_shard = 3, "en", 64
    with pytest.raises(ResumeError, match=r"\(data\.rows_per_shard: 8192 -> 64\)"):
        check_may_start(again)


def test_a_setting_that_an_older_run_did_not_have_refuses_nothing(tmp_path: Path) -> None:
    run = open_run(config(tmp_path), manifest_sha256="aa")
    written = read_config(run.folder)
    del written["data"]["language"]
    run.folder.write_bytes("config.yaml", json.dumps(written).encode())
    changed = config(tmp_path)
    changed.data.language, changed.data.source, changed.data.end_of_text = "en", "a copy", "<|endoftext|>"
    check_may_start(changed)
    run.folder.delete("config.yaml")
    check_may_start(changed)


def test_another_corpus_is_refused_with_the_settings_that_it_may_come_of(tmp_path: Path) -> None:
    open_run(config(tmp_path), manifest_sha256="aa")
    changed = config(tmp_path)
    changed.data.source, changed.data.tokenizer = "text", "tokenizer.json"
    named = r"corpus: aa -> bb; data\.source: None -> text; data\.tokenizer: None -> tokenizer\.json"
    with pytest.raises(ResumeError, match=named):
        find_or_create(changed, manifest_sha256="bb")
    with pytest.raises(ResumeError, match=r"\(corpus: aa -> bb\), by the same settings: what data\.source"):
        find_or_create(config(tmp_path), manifest_sha256="bb")
    (tmp_path / "mine" / "config.yaml").unlink()  # nothing tells by which
    with pytest.raises(
        ResumeError, match=r"\(corpus: aa -> bb\): settings of data\.\* are others, or what data\.source"
    ):
        find_or_create(config(tmp_path), manifest_sha256="bb")
    changed = config(tmp_path)
    changed.run.name, changed.data.corpora = "mixed", {"web": "/here"}
    open_run(changed, manifest_sha256="aa")
    changed.data.corpora = {"web": "/there"}
    with pytest.raises(ResumeError, match=r"data\.corpora: \{'web': '/here'\} -> \{'web': '/there'\}"):
        find_or_create(changed, manifest_sha256="bb")
    changed.data.min_score = 3.0  # of a recipe that makes nothing
    check_may_start(changed)


def test_resume_false_refuses_an_existing_run_and_leaves_it_alone(tmp_path: Path) -> None:
    open_run(config(tmp_path), manifest_sha256="aa")
    before = (tmp_path / "mine" / "run.json").read_bytes()
    fresh = config(tmp_path)
    fresh.run.resume = False
    with pytest.raises(ResumeError, match=r"run\.resume=false"):
        open_run(fresh, manifest_sha256="aa")
    assert (tmp_path / "mine" / "run.json").read_bytes() == before


def test_a_run_of_imported_weights_is_completed_by_its_first_attempt(tmp_path: Path) -> None:
    folder = Storage.at(tmp_path / "mine")
    write_record(folder, run_id="abc", identity={"model.rope_theta": 1e4, "model.dim": 256}, manifest_sha256=None)
    with pytest.raises(ResumeError, match=r"other settings \(model\.rope_theta: 10000\.0 -> 500000\.0\)"):
        check_may_start(config(tmp_path))
    first = config(tmp_path)
    first.model.rope_theta, first.optim.lr = 1e4, 0.5
    run = open_run(first, manifest_sha256="aa")
    assert (run.run_id, run.resumed_step) == ("abc", 0)
    assert open_run(first, manifest_sha256="aa").run_id == "abc"
    with pytest.raises(ResumeError, match="corpus: aa -> bb"):
        open_run(first, manifest_sha256="bb")
    first.optim.lr = 0.1
    with pytest.raises(ResumeError, match=r"optim\.lr: 0\.5 -> 0\.1"):
        check_may_start(first)


KILLED = """
import os, signal, sys
from regrow.record.unfinished import filling
from regrow.storage import Storage
folder = Storage.at(sys.argv[1])
with filling(folder):
    folder.write_bytes("checkpoints/step-00000000/a.safetensors", b"a")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_folder_that_a_killed_import_has_left_begins_no_run_until_it_is_deleted(tmp_path: Path) -> None:
    """Before, the next job of that name trained from its seed, without a word."""
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path / "mine")])
    assert process.wait() < 0
    whose = rf"\(process {process.pid} on {socket.gethostname()}, since 20"
    for refused in (check_may_start, lambda config: find_or_create(config, manifest_sha256="aa")):
        with pytest.raises(ResumeError, match=rf"^{tmp_path}/mine is not complete: .*{whose}.* delete the folder$"):
            refused(config(tmp_path))
    assert sorted(path.name for path in (tmp_path / "mine").iterdir()) == [".unfinished", "checkpoints"]
    shutil.rmtree(tmp_path / "mine")
    assert find_or_create(config(tmp_path), manifest_sha256="aa").resumed_step is None


def test_of_an_import_and_a_job_that_begin_at_once_the_job_takes_its_record_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither saw what the other one writes when it looked."""
    write, being_filled = module.write_record, filling(Storage.at(tmp_path / "mine"))

    def meanwhile(*arguments: Any, **options: Any) -> bool:
        being_filled.__enter__()
        return write(*arguments, **options)

    monkeypatch.setattr(module, "write_record", meanwhile)
    with pytest.raises(ResumeError, match="mine is not complete"):
        find_or_create(config(tmp_path), manifest_sha256="aa")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == [".unfinished"]
    being_filled.__exit__(None, None, None)
    assert list((tmp_path / "mine").iterdir()) == []


def test_a_model_is_found_back_in_its_identity(tmp_path: Path) -> None:
    made = config(tmp_path)
    made.model = tiny_model(tied=True)
    record = json.loads(json.dumps(identity(made)))
    assert model_of(record) == replace(made.model, name="debug")
    assert model_of({"model.dim": 64}) == ModelConfig(dim=64)


@pytest.mark.parametrize("place", ["a-file", "a-file/below", "read-only"])
def test_a_folder_that_cannot_be_written_to_is_refused_with_its_setting(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a-file").touch()
    monkeypatch.setattr("os.access", lambda path, mode: False)  # what is read-only is not so to root
    with pytest.raises(StorageError, match=rf"^{tmp_path / place} is no folder to write to \(.*; set run.storage_path"):
        check_may_start(config(tmp_path / place))


def test_a_run_of_another_user_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_run(config(tmp_path), manifest_sha256="aa")
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != tmp_path / "mine")  # root may do all
    with pytest.raises(StorageError, match=rf"^run folder {tmp_path}/mine may not be written to by this user; "):
        check_may_start(config(tmp_path))


def test_a_run_folder_of_our_own_is_enough_where_the_folder_of_runs_is_not_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an administrator makes them, or where the run's is a mount by itself."""
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != tmp_path)
    with pytest.raises(StorageError, match=rf"^{tmp_path} is no folder to write to \(.*; set run.storage_path"):
        check_may_start(config(tmp_path))
    (tmp_path / "mine").mkdir()
    check_may_start(config(tmp_path))
    assert open_run(config(tmp_path), manifest_sha256="aa").resumed_step is None


def test_the_folder_of_runs_is_made_and_nothing_in_it(tmp_path: Path) -> None:
    check_may_start(config(tmp_path / "new" / "runs"))
    assert list((tmp_path / "new" / "runs").iterdir()) == []
