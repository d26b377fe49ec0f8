"""`jobs.checkpoint` tells what a run's checkpoints hold, and names what is damaged or differs."""

import argparse
import errno
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from regrow.accept.tiny import tiny_model
from regrow.config.schema import Dtype
from regrow.errors import CheckpointError
from regrow.plan.boxes import Box
from regrow.record.run_folder import checkpoints_of
from regrow.state import commands
from regrow.state.disk import catalog as tools
from regrow.state.disk.catalog import open_checkpoint
from regrow.state.disk.format import COMMIT
from regrow.state.disk.store import save_one_by_one
from regrow.state.disk.tensors import CheckpointTensors, differences, statistics
from regrow.state.entries import Entry
from regrow.state.exchange.runs import average_run
from regrow.storage import REQUESTS, LocalStorage, RemoteStorage, Storage
from support.commands import call
from support.counting import Counting
from support.runs import RUN_ID, save_run
from support.s3 import s3_server

ROOT = Path(__file__).parents[2]


def quiet(num_bytes: int) -> None:
    pass


def job(*arguments: object, status: int = 0) -> subprocess.CompletedProcess[str]:
    done = call("checkpoint", *arguments)
    assert done.returncode == status, done.stderr
    return done


def job_alone(*arguments: object) -> subprocess.CompletedProcess[str]:
    """The same as a process, which says what it imports."""
    command = [sys.executable, "-X", "importtime", "-m", "jobs.checkpoint", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done


def imported(done: subprocess.CompletedProcess[str]) -> set[str]:
    return {line.split("|")[-1].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}


def errors(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in done.stderr.splitlines() if line.startswith(("error", "Traceback"))]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 1 and 2, and a leftover of step 3."""
    folder = tmp_path_factory.mktemp("runs") / "mine"
    save_run(folder, tiny_model(), steps=(1, 2))
    shutil.copytree(folder / "checkpoints" / "step-00000002", folder / "checkpoints" / "step-00000003")
    (folder / "checkpoints" / "step-00000003" / COMMIT).unlink()
    return folder


def test_list_is_quick_and_tells_sound_damaged_and_uncommitted_apart(run: Path, tmp_path: Path) -> None:
    done = job_alone("list", run)
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [line[0] for line in lines[1:]] == ["3", "2", "1"]
    assert done.stdout.splitlines()[1].endswith("not committed: it has no COMMIT")
    assert lines[2][-2:] == ["sound,", "newest"]
    assert lines[3][-1] == "sound"
    assert not {"torch", "ray", "hydra", "pyarrow"} & imported(done)

    shutil.copytree(run, tmp_path / "damaged")
    (file,) = (tmp_path / "damaged" / "checkpoints" / "step-00000002").glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1])
    lines_after = job("list", tmp_path / "damaged").stdout.splitlines()
    assert lines_after[2].endswith(f"{file}: has fewer than its {file.stat().st_size + 1:,} bytes; the file is damaged")
    assert lines_after[3].endswith("sound, newest")


def test_inspect_shows_scalars_tensors_files_and_statistics(run: Path) -> None:
    done = job_alone("inspect", run)
    assert "step 2, cursor 24, tokens_seen 192" in done.stdout
    assert f"run {RUN_ID}, generation 1, written " in done.stdout
    line = next(line for line in done.stdout.splitlines() if "optim/exp_avg/layers.1.attention.wk.weight" in line)
    assert line.split() == ["optim/exp_avg/layers.1.attention.wk.weight", "float32", "16", "x", "32"]
    model = tiny_model()
    size = model.dim * (2 * model.dim + 2 * model.dim // 2 + 3 * model.ffn_dim + 2)
    assert f"{2 * size + 2 * model.dim * model.vocab_size + model.dim:,} parameters" in done.stdout
    assert not {"torch", "ray", "hydra"} & imported(done)

    shown = job("inspect", run, "--step", "1", "--stats").stdout.splitlines()
    line = next(line for line in shown if line.startswith("  model/norm.weight "))
    weight = opened(run / "checkpoints", 1).whole("model/norm.weight")
    assert line.split()[3:] == [f"{weight.norm().item():.4g}", f"{weight.abs().max().item():.4g}"]


def test_statistics_are_those_of_the_whole_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regrow.state.disk.tensors.PIECE_BYTES", tools.CHUNK_BYTES)
    values = torch.randn(300, 251, generator=torch.Generator().manual_seed(0))
    values[7, 7], values[299, 250] = float("inf"), float("nan")
    save(tmp_path, {"model/odd": values, "model/even": torch.arange(-3.0, 3.0)})
    found = statistics(opened(tmp_path))
    assert found["model/odd"].not_finite == 2
    assert found["model/even"].norm == pytest.approx(19**0.5)
    assert found["model/even"].largest == 3
    assert torch.equal(opened(tmp_path).whole("model/odd").view(torch.int32), values.view(torch.int32))


def save(folder: Path, tensors: dict[str, torch.Tensor], step: int = 0) -> None:
    entries = [Entry(Box.whole(name, tuple(tensor.shape)), tensor.view(-1)) for name, tensor in tensors.items()]
    save_one_by_one(Storage.at(folder), entries, scalars={"step": step}, run_id=RUN_ID)


def opened(folder: Path, step: int = 0) -> CheckpointTensors:
    return CheckpointTensors(Storage.at(folder), open_checkpoint(Storage.at(folder), step), quiet)


def test_differences_say_how_far_and_see_every_bit(tmp_path: Path) -> None:
    nan = torch.tensor([1.0, float("nan")])
    same = {"model/same": torch.ones(3, 2), "model/nan": nan}
    save(tmp_path, {**same, "model/zero": torch.zeros(2), "model/x": torch.tensor([3.0, 4.0])}, step=1)
    save(tmp_path, {**same, "model/zero": -torch.zeros(2), "model/x": torch.tensor([3.0, 4.5])}, step=2)
    found = differences(opened(tmp_path, 1), opened(tmp_path, 2))
    assert found.keys() == {"model/zero", "model/x"}
    assert found["model/x"].largest == 0.5
    assert found["model/x"].relative == pytest.approx(0.1)
    assert found["model/zero"].largest == 0


@pytest.mark.slow
def test_diff_of_two_steps_two_runs_and_of_a_run_with_itself(run: Path, tmp_path: Path) -> None:
    assert job("diff", run, run, "--step", "1").stdout == "the same state\n"
    done = job("diff", run, "--step", "1", "2", status=1)
    assert "cursor: 12 -> 24" in done.stdout
    num_tensors = len(open_checkpoint(Storage.at(run / "checkpoints"), 1).tensors)
    assert done.stdout.endswith(f"{num_tensors} of {num_tensors} tensors differ\n")
    save_run(tmp_path / "tied", tiny_model(tied=True))
    done = job("diff", run, tmp_path / "tied", status=1)
    assert "model/output.weight: float32[96, 32] -> (absent)" in done.stdout
    assert "two --step" in errors(job("diff", run, status=1))[0]


def test_verify_names_the_first_damaged_file_of_each_checkpoint(run: Path, tmp_path: Path) -> None:
    done = job_alone("verify", run)
    assert done.stdout.splitlines() == ["step 3: not committed: it has no COMMIT", "step 2: sound", "step 1: sound"]
    assert "torch" not in imported(done)
    shutil.copytree(run, tmp_path / "damaged")
    (file,) = (tmp_path / "damaged" / "checkpoints" / "step-00000001").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    lines = job("verify", tmp_path / "damaged", status=1).stdout.splitlines()
    assert lines[1] == "step 2: sound"
    assert lines[2].startswith(f"step 1: {file}: ")
    job("verify", tmp_path / "damaged", "--step", "2")
    job("verify", tmp_path / "damaged", "--step", "3", status=1)


def test_a_file_that_cannot_be_read_is_named_and_the_other_steps_are_looked_at(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "damaged")
    (file,) = (tmp_path / "damaged" / "checkpoints" / "step-00000002").glob("*.safetensors")
    file.unlink()
    file.symlink_to("/proc/self/mem")  # EIO, as from a bad sector
    lines = job("verify", tmp_path / "damaged", status=1).stdout.splitlines()
    assert lines[1:] == [f"step 2: {file}: Input/output error", "step 1: sound"]
    lines = job("list", tmp_path / "damaged").stdout.splitlines()
    assert lines[2].endswith(f"{file}: Input/output error")
    assert lines[3].endswith("sound, newest")


class BadSector(LocalStorage):
    """In the middle of the data of step 2, which no quick look finds."""

    def join(self, *names: str) -> "BadSector":
        return BadSector(self.root.joinpath(*names))

    def read_range(self, name: str, offset: int, num_bytes: int) -> bytes:
        if self.root.name == "step-00000002" and name.endswith(".safetensors") and num_bytes > 2 and offset:
            raise OSError(errno.EIO, "Input/output error", str(self.root / name))
        return super().read_range(name, offset, num_bytes)


def test_a_bad_sector_is_found_where_all_is_read(run: Path) -> None:
    bad, start = BadSector(run / "checkpoints"), lambda num_bytes: quiet
    assert [found.problem for found in tools.survey(bad, RUN_ID)][1:] == ["", ""]
    _, damaged, sound = tools.examine(bad, RUN_ID, None, start)
    assert damaged.problem.endswith(".safetensors: Input/output error")
    assert not sound.problem


class Away(LocalStorage):
    """A store that does not answer for data files of step 2."""

    def join(self, *names: str) -> "Away":
        return Away(self.root.joinpath(*names))

    def read_range(self, name: str, offset: int, num_bytes: int) -> bytes:
        if self.root.name == "step-00000002" and name.endswith(".safetensors"):
            raise OSError("still failing after 120 s: SlowDown")
        return super().read_range(name, offset, num_bytes)


def test_storage_that_does_not_answer_has_no_older_checkpoint_taken_for_the_newest(run: Path) -> None:
    away, start = Away(run / "checkpoints"), lambda num_bytes: quiet
    with pytest.raises(OSError, match="SlowDown"):
        tools.choose(away, RUN_ID)
    with pytest.raises(OSError, match="SlowDown"):
        list(tools.survey(away, RUN_ID))
    with pytest.raises(OSError, match="SlowDown"):
        list(tools.examine(away, RUN_ID, None, start))


def test_verify_finds_every_flipped_bit_truncation_swap_and_missing_file(tmp_path: Path) -> None:
    model = tiny_model(num_layers=1)
    save_run(tmp_path / "run", model, steps=(1, 2))
    checkpoints, step = tmp_path / "run" / "checkpoints", "step-00000002"
    pristine = {path.name: path.read_bytes() for path in (checkpoints / step).iterdir()}
    others = {path.suffix: path.read_bytes() for path in (checkpoints / "step-00000001").iterdir()}
    dice = random.Random(0)
    for trial in range(120):
        name = sorted(pristine)[trial % len(pristine)]
        path, data = checkpoints / step / name, bytearray(pristine[name])
        kind = dice.choice(["flip", "truncate", "extend", "swap", "delete"])
        if kind == "flip":
            data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        elif kind == "truncate":
            del data[dice.randrange(len(data)) :]
        elif kind == "extend":
            data += b" " if name != COMMIT else b"}"
        path.write_bytes(others[path.suffix] if kind == "swap" else data)
        if kind == "delete":
            path.unlink()
        found = {
            each.step: each for each in tools.examine(*checkpoints_of(str(checkpoints.parent)), None, lambda _: quiet)
        }
        assert found[1].problem == ""
        assert found[2].problem, (trial, kind, name)
        if name != COMMIT:  # a damaged COMMIT may name any file
            assert name in found[2].problem, (trial, kind, found[2].problem)
        path.write_bytes(pristine[name])


@pytest.mark.parametrize("at", ["open_checkpoint", "verify"])
def test_what_retention_deletes_meanwhile_is_no_damage(
    at: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    save_run(tmp_path / "run", tiny_model(num_layers=1), steps=(1, 2, 3))
    checkpoints = Storage.at(tmp_path / "run" / "checkpoints")
    looks = getattr(tools, at)

    def look(folder: Storage, what: Any, *more: Any, **options: Any) -> Any:
        if getattr(what, "step", what) == 1:
            monkeypatch.setattr(tools, at, looks)
            assert tools.retain(checkpoints, keep=2) == [1]
        return looks(folder, what, *more, **options)

    monkeypatch.setattr(tools, at, look)
    options = argparse.Namespace(run_folder=str(tmp_path / "run"), step=None)
    assert commands.verify(options, lambda num_bytes: quiet) == 0
    assert capsys.readouterr().out.splitlines() == ["step 3: sound", "step 2: sound", "step 1: deleted meanwhile"]


READS: dict[str, dict[str, Any]] = {
    "export hf": {"format": "hf", "step": 1, "dtype": Dtype.float32},
    "export dcp": {"format": "dcp", "step": 1, "dtype": Dtype.float32},
    "average": {"last": None, "step": [1, 3]},
    "inspect": {"stats": True, "step": 1},
    "diff": {"step": [3, 1], "other": None},
}


@pytest.mark.parametrize("reads", READS)
def test_what_retention_deletes_while_it_is_read_is_said_to_be_deleted(reads: str, tmp_path: Path) -> None:
    save_run(tmp_path / "run", tiny_model(num_layers=1), steps=(1, 2, 3))

    def start(num_bytes: int) -> Callable[[int], None]:
        assert tools.retain(Storage.at(tmp_path / "run" / "checkpoints"), keep=2) == [1]
        return quiet

    command, _ = commands.COMMANDS[reads.split()[0]]
    options = argparse.Namespace(run_folder=str(tmp_path / "run"), to=str(tmp_path / "to"), **READS[reads])
    said = r"checkpoints/step-00000001 was deleted meanwhile, by its run \(checkpoint\.keep\); .* a file KEEP beside"
    with pytest.raises(CheckpointError, match=said):
        command(options, start)
    assert not (tmp_path / "to").exists()


def test_an_object_stores_truncated_file_is_damage_too() -> None:
    with s3_server() as bucket:
        save_run(f"{bucket}/run", tiny_model(num_layers=1), steps=(1, 2))
        checkpoints, run_id = checkpoints_of(f"{bucket}/run")
        step = checkpoints / "step-00000002"
        (name,) = (name for name in step.list() if name.endswith(".safetensors"))
        step.write_bytes(name, step.read_bytes(name)[:1000])
        newest, oldest = tools.examine(checkpoints, run_id, None, lambda _: quiet)
        assert f"{step}/{name}: has fewer than its" in newest.problem
        assert oldest.problem == ""


class CountingMissing(Counting):
    """Counts reads of files that are not there, too."""

    def read_bytes(self, name: str) -> bytes:
        self.requests += 1
        return RemoteStorage.read_bytes(self, name)


def test_which_of_many_checkpoints_an_object_store_holds_is_asked_many_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """300 that were kept took 600 requests, one after another: at 40 ms each 24 s, in which all ranks waited."""
    empty = Counting.empty()
    folder = CountingMissing(empty.fs, empty.root, empty.uri)
    for step in range(1, 201):
        folder.write_bytes(f"{tools.step_folder(step)}/data", b"")
        if step % 10 != 0:  # else a leftover
            folder.write_bytes(f"{tools.step_folder(step)}/{COMMIT}", b"%d" % step)
        if step % 25 == 1:
            tools.note_damaged(folder, step, "a bad sector")
    folder.write_bytes(f"{tools.step_folder(151)}/{COMMIT}", b"another")  # than the one that is noted
    damaged = [176, 126, 101, 76, 51, 26, 1]
    committed = [step for step in range(200, 0, -1) if step % 10 != 0 and step not in damaged]

    def counting(look: Callable[[int], Any], steps: Sequence[int]) -> list[Any]:
        before, each, found = folder.requests, [0], []
        for step in steps:
            begin = folder.requests
            found.append(look(step))
            each.append(folder.requests - begin)
        folder.requests = before - len(steps) // -REQUESTS * max(each)
        return found

    def in_a_row(asked: Callable[[], Any]) -> Any:
        folder.taken()
        found = asked()
        assert folder.taken()[0] < 50
        return found

    assert tools.committed_and_damaged(folder) == (committed, damaged)
    tools.note_damaged(folder, 101, "a rank computed wrong", computed_wrong=True)
    assert tools.computed_wrong(folder, damaged) == [101]
    assert tools.retain(folder, keep=3, keep_every_steps=1) == []  # none is whole; all with a COMMIT are marked
    monkeypatch.setattr(tools, "in_threads", counting)
    assert in_a_row(lambda: tools.committed_steps(folder)) == committed
    assert in_a_row(lambda: tools.committed_and_damaged(folder)) == (committed, damaged)
    assert in_a_row(lambda: tools.retain(folder, keep=3)) == []
    assert [step for step in range(200, 0, -1) if tools.is_kept(folder, step)] == sorted(damaged + committed)[::-1]


@pytest.mark.parametrize("command", ["list", "inspect", "verify", "diff", "export", "average"])
def test_a_folder_without_checkpoints_is_one_line(command: str, tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        more = {
            "diff": [folder],
            "export": ["--to", tmp_path / "out", "--format", "hf"],
            "average": ["--to", tmp_path / "out", "--last", "2"],
        }.get(command, [])
        (line,) = errors(job(command, folder, *more, status=1))
        assert "holds no checkpoints; name the folder of a run" in line


def test_an_average_has_the_mean_of_the_weights_and_all_else_of_the_newest(run: Path, tmp_path: Path) -> None:
    (run / "config.yaml").write_text("data: {corpora: {web: /corpora/web}}\n")
    job("average", run, "--last", 2, "--to", tmp_path / "mean")
    first, second = opened(run / "checkpoints", 1), opened(run / "checkpoints", 2)
    found = opened(tmp_path / "mean" / "checkpoints", 2)
    assert found.index.scalars == second.index.scalars
    assert found.index.tensors == second.index.tensors
    for name in second.index.tensors:
        want = second.whole(name)
        if name.startswith("model/"):
            want = ((first.whole(name).double() + want.double()) / 2).float()
        assert torch.equal(found.whole(name), want), name
    assert all(
        each.problem == "" for each in tools.examine(*checkpoints_of(str(tmp_path / "mean")), None, lambda _: quiet)
    )
    assert (tmp_path / "mean" / "config.yaml").read_bytes() == (run / "config.yaml").read_bytes(), "its corpus"
    ours, theirs = (json.loads((folder / "run.json").read_text()) for folder in (tmp_path / "mean", run))
    assert ours["identity"] == theirs["identity"]
    assert ours["run_id"] != theirs["run_id"]


@pytest.mark.parametrize(
    ("which", "message"),
    [
        (["--step", 2, 2], "an average takes two checkpoints or more, and this is step 2 alone"),
        (["--step", 1, 7], "has no checkpoint of step 7; it has 3, 2, 1"),
        (["--step", 2, 3], "step-00000003 cannot be used: not committed"),
        (["--last", -1], "an average takes two checkpoints or more; --last -1 is fewer"),
        (["--last", 3], "has 2 sound checkpoints, --last 3 asks for more"),
    ],
)
def test_an_average_of_what_is_not_there_is_one_line_and_writes_nothing(
    run: Path, tmp_path: Path, which: list[str | int], message: str
) -> None:
    (line,) = errors(job("average", run, *which, "--to", tmp_path / "mean", status=1))
    assert message in line
    assert not (tmp_path / "mean").exists()


def test_an_average_that_fails_leaves_nothing_in_its_way(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: files of the first tensors, for which the same command was refused once its source was sound."""
    monkeypatch.setattr("regrow.state.disk.store.FILE_BYTES", 1)
    mine, to = shutil.copytree(run, tmp_path / "mine"), str(tmp_path / "mean")
    (file,) = (mine / "checkpoints" / "step-00000001").glob("*.safetensors")
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    indexes = [tools.choose(*checkpoints_of(str(mine)), step)[1] for step in (1, 2)]
    with pytest.raises(CheckpointError, match="step-00000001"):
        average_run(str(mine), indexes, to, start=lambda _: quiet)
    assert not Path(to).exists()
    file.write_bytes(content)
    average_run(str(mine), indexes, to, start=lambda _: quiet)


def test_an_average_does_not_overwrite_a_run(run: Path) -> None:
    (line,) = errors(job("average", run, "--last", 2, "--to", run, status=1))
    assert "is not empty; name a new folder" in line


def test_a_checkpoint_of_another_run_is_refused(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "copy")
    record = tmp_path / "copy" / "run.json"
    record.write_text(record.read_text().replace(RUN_ID, "f" * 16))
    with pytest.raises(CheckpointError, match=f"belongs to run {RUN_ID}"):
        tools.choose(*checkpoints_of(str(tmp_path / "copy")), 2)


def test_tensors_written_one_by_one_fill_files_up_to_a_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regrow.state.disk.store.FILE_BYTES", 4000)
    tensors = {f"model/{k}": torch.full((k, 7), float(k)) for k in range(60)}
    save(tmp_path, tensors)
    index = open_checkpoint(Storage.at(tmp_path), 0)
    assert len(index.files) > 8
    assert max(file.num_bytes - file.header_bytes for file in index.files) < 4000 + 60 * 7 * 4
    tools.verify(Storage.at(tmp_path), index, quiet)
    for name, tensor in tensors.items():
        assert torch.equal(opened(tmp_path).whole(name), tensor)
