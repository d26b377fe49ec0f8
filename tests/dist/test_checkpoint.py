"""Durable checkpoints: any layout to any other bitwise, committed or invisible, damage always found."""

import contextlib
import errno
import hashlib
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open

from regrow.config.schema import Dtype, OptimConfig, ParallelConfig
from regrow.errors import CheckpointError, ForeignCheckpointError, NotWrittenError
from regrow.optim.adamw import build_optimizer
from regrow.parallel.apply import build_model
from regrow.parallel.float8 import inner_tensor
from regrow.plan.boxes import Box
from regrow.plan.mesh import ALONE
from regrow.state.commands import list_lines
from regrow.state.disk import catalog, store
from regrow.state.disk import format as disk_format
from regrow.state.disk.catalog import survey
from regrow.state.disk.format import COMMIT, DAMAGED
from regrow.state.disk.tensors import CheckpointTensors
from regrow.state.entries import Entry, Progress, training_entries
from regrow.storage import LocalStorage, Storage
from support.gloo import RankError, run_ranks
from support.ragged import ragged_model
from support.state import entries_after, whole

RUN = "0123456789abcdef"
SAME = SimpleNamespace(token_hex=lambda size: "00" * size)  # draws what another rank has drawn


def save_on_ranks(folder: str, replicas: int, tied: bool, float8: bool, tp: int = 1) -> dict[str, torch.Tensor]:
    entries, coordinates, _ = entries_after(2, replicas=replicas, tp=tp, tied=tied, float8=float8, seed=1)
    store.save(
        Storage.at(folder),
        entries,
        scalars={"step": 2, "cursor": 48, "tokens_seen": 96},
        run_id=RUN,
        generation=1,
        coordinates=coordinates,
    )
    return whole(entries)


def restore_on_ranks(
    folder: str, replicas: int, tied: bool, float8: bool, tp: int = 1
) -> tuple[dict[str, torch.Tensor], int]:
    entries, coordinates, group = entries_after(
        1, replicas=replicas, tp=tp, tied=tied, float8=float8, seed=2
    )  # another state, to be overwritten whole
    index = catalog.open_checkpoint(Storage.at(folder), 2, run_id=RUN)
    assert index.scalars == {"step": 2, "cursor": 48, "tokens_seen": 96}
    num_bytes = store.restore(Storage.at(folder), index, entries, coordinates)
    store.share_parts(entries, coordinates, group)
    return whole(entries), num_bytes


@pytest.mark.parametrize(
    ("before", "replicas", "tied"),
    [
        *((1, 1, True), (3, 1, False), (4, 2, True)),
        *(pytest.param(*case, marks=pytest.mark.long) for case in ((1, 1, False), (3, 1, True), (4, 2, False))),
    ],
)
def test_state_restored_into_any_layout_has_the_same_bits(
    tmp_path: Path, before: int, replicas: int, tied: bool
) -> None:
    saved = run_ranks(save_on_ranks, before, str(tmp_path), replicas, tied, False)[0]
    assert all(not tensor.isnan().any() for tensor in saved.values())
    assert len(saved) == 3 * len([name for name in saved if name.startswith("model/")])
    for after, replicas_after in [(1, 1), (2, 1), (3, 1), (4, 2)]:
        restored, _ = run_ranks(restore_on_ranks, after, str(tmp_path), replicas_after, tied, False)[0]
        assert restored.keys() == saved.keys()
        for name, tensor in saved.items():
            assert torch.equal(restored[name], tensor), f"{name} {before}->{after}"


def test_float8_all_gather_weights_are_saved_in_high_precision_and_restored_bitwise(tmp_path: Path) -> None:
    saved = run_ranks(save_on_ranks, 3, str(tmp_path), 1, False, True)[0]
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
    restored, _ = run_ranks(restore_on_ranks, 2, str(tmp_path), 1, False, True)[0]
    for name, tensor in saved.items():
        assert torch.equal(restored[name], tensor), name


def keep_numbers(folder: str, numbers: list[int]) -> str:
    """Each rank's callback its own; what saving says."""
    entries, coordinates, _ = entries_after(1, seed=1)
    scalars = Progress(2, 48, 96, {"n": numbers[dist.get_rank()]}).to_dict()
    try:
        store.save(Storage.at(folder), entries, scalars=scalars, run_id=RUN, generation=1, coordinates=coordinates)
    except CheckpointError as error:
        return str(error)
    return ""


def test_ranks_whose_callbacks_keep_different_numbers_commit_no_checkpoint(tmp_path: Path) -> None:
    """They write it themselves: no keeper compares nodes. Before, rank 0's was committed."""
    said = run_ranks(keep_numbers, 3, str(tmp_path), [7, 7, 8])
    where = f"checkpoint of step 2 at {tmp_path}/step-00000002 was not written"
    differ = "train.callback's state of rank 2 is another than that of rank 0; it has to be a function of the rows"
    assert said == [f"{where}: {differ}"] * 3
    assert catalog.committed_steps(Storage.at(tmp_path)) == []
    assert run_ranks(keep_numbers, 2, str(tmp_path), [7, 7]) == ["", ""]
    assert Progress.of(catalog.open_checkpoint(Storage.at(tmp_path), 2).scalars).user == {"n": 7}


def narrow_moments(folder: str, steps: int, seed: int) -> dict[str, torch.Tensor]:
    """Saved after `steps` steps; with none, restored."""
    entries, coordinates, _ = entries_after(steps, float8=True, moments=Dtype.bfloat16, seed=seed)
    if steps:
        store.save(Storage.at(folder), entries, scalars={"step": 2}, run_id=RUN, generation=1, coordinates=coordinates)
    else:
        store.restore(Storage.at(folder), catalog.open_checkpoint(Storage.at(folder), 2), entries, coordinates)
    return whole(entries)


def test_moments_in_bfloat16_are_saved_as_that_and_restored_bitwise(tmp_path: Path) -> None:
    saved = run_ranks(narrow_moments, 3, str(tmp_path), 2, 1)[0]
    restored = run_ranks(narrow_moments, 2, str(tmp_path), 0, 2)[0]
    for name, tensor in saved.items():
        assert tensor.dtype is (torch.bfloat16 if name.startswith("optim/") else torch.float32)
        assert tensor.any()
        assert torch.equal(restored[name], tensor), name


@pytest.mark.parametrize(("before", "replicas", "tp"), [(6, 1, 2), (8, 2, 2), (1, 1, 1)])
def test_state_cut_by_tensor_parallelism_is_restored_however_it_is_cut(
    tmp_path: Path, before: int, replicas: int, tp: int
) -> None:
    saved = run_ranks(save_on_ranks, before, str(tmp_path), replicas, False, True, tp)[0]
    assert all(not tensor.isnan().any() for tensor in saved.values())
    index = catalog.open_checkpoint(Storage.at(tmp_path), 2)
    assert index.num_bytes - sum(file.header_bytes for file in index.files) == sum(t.nbytes for t in saved.values())
    tensors = CheckpointTensors(Storage.at(tmp_path), index, lambda num_bytes: None)
    for name, tensor in saved.items():
        assert torch.equal(tensors.whole(name), tensor), name
    for after, replicas_after, tp_after in [(3, 1, 1), (4, 1, 2)]:
        restored, _ = run_ranks(restore_on_ranks, after, str(tmp_path), replicas_after, False, True, tp_after)[0]
        assert restored.keys() == saved.keys()
        for name, tensor in saved.items():
            assert torch.equal(restored[name], tensor), f"{name} {before}x{tp} -> {after}x{tp_after}"


def test_each_element_is_stored_once_even_with_replicas(tmp_path: Path) -> None:
    saved = run_ranks(save_on_ranks, 4, str(tmp_path), 2, False, False)[0]
    index = catalog.open_checkpoint(Storage.at(tmp_path), 2)
    payload = index.num_bytes - sum(file.header_bytes for file in index.files)
    assert payload == sum(tensor.numel() * 4 for tensor in saved.values())


def alone(seed: int = 1) -> list[Entry]:
    model = build_model(ragged_model(), ParallelConfig(), mesh=None, device="cpu", seed=seed)
    return training_entries(model, build_optimizer(model, OptimConfig()), inner_tensor=inner_tensor)


def save_alone(folder: Path, step: int, seed: int = 1, generation: int = 1) -> list[Entry]:
    entries = alone(seed)
    scalars = {"step": step, "cursor": step, "tokens_seen": step}
    store.save(Storage.at(folder), entries, scalars=scalars, run_id=RUN, generation=generation)
    return entries


def flip_a_bit(folder: Path, step: int) -> None:
    """Of the last element of a checkpoint."""
    (file,) = (folder / catalog.step_folder(step)).glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def make_unreadable(folder: Path, step: int, pattern: str = "*.safetensors") -> Path:
    """A file of a checkpoint: EIO, as from a bad sector, for all that read it."""
    (file,) = (folder / catalog.step_folder(step)).glob(pattern)
    file.unlink()
    file.symlink_to("/proc/self/mem")
    return file


def restored_step(folder: Path) -> int:
    """As a group that forms does it, and notes what is damaged."""
    storage = Storage.at(folder)

    def damaged(step: int, detail: str) -> None:
        with contextlib.suppress(OSError):  # as the publisher
            catalog.note_damaged(storage, step, detail)

    progress = store.restore_newest(
        storage,
        [step for steps in catalog.committed_and_damaged(storage) for step in steps],
        alone(),
        ALONE,
        None,
        run_id=RUN,
        global_batch_seqs=1,
        damaged=damaged,
    )
    assert progress is not None
    return progress.step


def test_files_are_plain_safetensors_that_other_tools_read(tmp_path: Path) -> None:
    entries = save_alone(tmp_path, 1)
    (file,) = (tmp_path / "step-00000001").glob("*.safetensors")
    with safe_open(file, "pt") as content:
        found: dict[str, list[torch.Tensor]] = {}  # by blocks of columns
        for key in content.keys():  # noqa: SIM118
            stack = json.loads(content.metadata()["stacks"])[key.partition("[")[0]]
            at = 0
            for name, _, size in stack["columns"]:
                found.setdefault(name, []).append(content.get_tensor(key)[:, at : at + size])
                at += size
        for entry in entries:
            assert torch.equal(torch.cat(found[entry.box.name], 1).reshape(-1), entry.memory), entry.box
        assert content.metadata()["run_id"] == RUN


def test_nothing_is_visible_before_commit(tmp_path: Path) -> None:
    def fenced_off(step_folder: str, pointer: bytes) -> None:
        raise RuntimeError("generation 1 is over")

    with pytest.raises(CheckpointError, match="not committed: RuntimeError: generation 1 is over"):
        store.save(Storage.at(tmp_path), alone(), scalars={"step": 5}, run_id=RUN, generation=1, commit=fenced_off)
    assert catalog.committed_steps(Storage.at(tmp_path)) == []
    save_alone(tmp_path, 5)  # the leftovers are in nobody's way
    assert catalog.committed_steps(Storage.at(tmp_path)) == [5]


def fail_on_one_rank(folder: str) -> str:
    entries, _, _ = entries_after(0, seed=1)
    storage = Storage.at(folder)
    if dist.get_rank() == 1:
        storage = Storage.at("/dev/null/full")  # every write fails
    try:
        store.save(storage, entries, scalars={"step": 1}, run_id=RUN, generation=1)
    except NotWrittenError as error:
        return str(error)
    return ""


def test_a_failed_write_on_one_rank_is_an_error_on_all_and_commits_nothing(tmp_path: Path) -> None:
    messages = run_ranks(fail_on_one_rank, 3, str(tmp_path))
    assert all("was not written: NotADirectoryError" in message for message in messages), messages
    assert catalog.committed_steps(Storage.at(tmp_path)) == []
    assert list(tmp_path.rglob("*.safetensors")) == [], "the others' parts would fill the disk, try after try"


def test_what_was_written_goes_where_no_commit_can_name_it_and_stays_where_one_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a last step that was tried every five seconds for half an hour, each try left a file behind."""

    def fails(*_: object) -> bytes:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(store, "write_index", fails)
        with pytest.raises(NotWrittenError, match="not committed: OSError"):
            save_alone(tmp_path, 5)
    assert list(tmp_path.rglob("*.safetensors")) == []
    with pytest.raises(NotWrittenError, match="not committed: OSError"):  # its answer alone may be lost
        store.save(Storage.at(tmp_path), alone(), scalars={"step": 5}, run_id=RUN, generation=1, commit=fails)
    assert len(list(tmp_path.rglob("*.safetensors"))) == 1


def save_under_one_name(folder: str) -> str:
    entries, coordinates, _ = entries_after(0, seed=1)
    store.secrets = SAME  # type: ignore[assignment]
    try:
        store.save(Storage.at(folder), entries, scalars={"step": 1}, run_id=RUN, generation=1, coordinates=coordinates)
    except CheckpointError as error:
        return str(error)
    return ""


def test_files_of_two_ranks_under_one_name_are_an_error_on_all_and_commit_nothing(tmp_path: Path) -> None:
    for message in run_ranks(save_under_one_name, 2, str(tmp_path)):
        assert "g000001-0000000000000000.safetensors is the name of two files" in message
    assert catalog.committed_steps(Storage.at(tmp_path)) == []


def test_a_file_written_over_one_of_the_same_checkpoint_commits_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "FILE_BYTES", 1)
    monkeypatch.setattr(store, "secrets", SAME)
    with pytest.raises(CheckpointError, match="is the name of two files"):
        store.save_one_by_one(Storage.at(tmp_path), alone(), scalars={"step": 1}, run_id=RUN)
    assert catalog.committed_steps(Storage.at(tmp_path)) == []


def test_another_runs_checkpoint_is_refused(tmp_path: Path) -> None:
    save_alone(tmp_path, 1)
    with pytest.raises(CheckpointError, match=f"belongs to run {RUN}, not to another"):
        catalog.open_checkpoint(Storage.at(tmp_path), 1, run_id="another")


def written_as(folder: Path, step: int, **change: object) -> None:
    """What a regrow of another version, or another run, has committed there: whole, as its checksums say."""
    commit = folder / catalog.step_folder(step) / COMMIT
    pointer = json.loads(commit.read_bytes())
    index, size = commit.with_name(pointer["index"]), pointer["bytes"]
    plain, rest = json.loads(index.read_bytes()[:size]), index.read_bytes()[size:]
    text = json.dumps({**plain, **change}).encode()
    index.write_bytes(text + rest)
    commit.write_text(json.dumps({**pointer, "bytes": len(text), "sha256": hashlib.sha256(text).hexdigest()}))


FOREIGN = [
    ({"version": 6}, r"written by a newer regrow \(regrow-checkpoint version 6; this one reads .*5\); use that one"),
    ({"version": 1}, r"written by an older regrow \(regrow-checkpoint version 1; .*move the folder away"),
    ({"format": "regrow-other"}, r"written by a newer regrow \(regrow-other version 5; "),
    ({"run_id": "another"}, f"step-00000020 belongs to run another, not to {RUN}; move it away"),
]


@pytest.mark.parametrize(("change", "message"), FOREIGN, ids=str)
def test_a_checkpoint_of_another_version_or_run_is_refused_and_neither_passed_over_nor_deleted(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    """One node with an older install would train from step 10, and retention delete step 20 as damaged."""
    folder = Storage.at(tmp_path)
    for step in (10, 20):
        save_alone(tmp_path, step)
    written_as(tmp_path, 20, **change)
    with pytest.raises(ForeignCheckpointError, match=message):
        restored_step(tmp_path)
    assert not (tmp_path / "step-00000020" / DAMAGED).exists()
    assert catalog.retain(folder, keep=2, run_id=RUN) == []  # one alone counts
    for step in (30, 40):
        save_alone(tmp_path, step)
    assert catalog.retain(folder, keep=2, run_id=RUN) == [10]
    catalog.note_damaged(folder, 20, "by a node whose install did not know better")
    assert catalog.retain(folder, keep=2, run_id=RUN) == []
    assert (tmp_path / "step-00000020" / COMMIT).exists()


def restore_where_one_is_older(folder: str) -> str:
    """What each rank is told, where the second one does not read the newest version."""
    entries, coordinates, _ = entries_after(0, seed=2)
    if dist.get_rank() == 1:
        disk_format.READABLE = (2, 3, 4)
    heard: list[int] = []
    with pytest.raises(ForeignCheckpointError) as refused:
        store.restore_newest(
            Storage.at(folder),
            [2],
            entries,
            coordinates,
            None,
            run_id=RUN,
            global_batch_seqs=24,
            damaged=lambda step, detail: heard.append(step),
        )
    assert heard == []
    return str(refused.value)


def test_one_rank_that_does_not_read_the_version_has_all_of_them_refuse(tmp_path: Path) -> None:
    run_ranks(save_on_ranks, 2, str(tmp_path), 1, False, False)
    first, second = run_ranks(restore_where_one_is_older, 2, str(tmp_path))
    assert first == second
    assert "regrow (regrow-checkpoint version 5; this one reads regrow-checkpoint 2, 3, 4)" in first


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda e: e[1:], "holds model/embed.weight, which the model does not have"),
        (lambda e: [*e, Entry(Box.whole("model/new", (3,)), torch.zeros(3))], "has no model/new"),
    ],
)
def test_a_missing_or_extra_tensor_is_named(tmp_path: Path, change: object, message: str) -> None:
    entries = save_alone(tmp_path, 1)
    index = catalog.open_checkpoint(Storage.at(tmp_path), 1)
    first = next(i for i, entry in enumerate(entries) if entry.box.name == "model/embed.weight")
    entries = [entries[first], *entries[:first], *entries[first + 1 :]]
    with pytest.raises(CheckpointError, match=message):
        store.restore(Storage.at(tmp_path), index, change(entries))  # type: ignore[operator]


def test_retention_keeps_the_newest_sound_ones_and_sweeps_older_leftovers(tmp_path: Path) -> None:
    folder = Storage.at(tmp_path)
    for step in (1, 2, 3, 4):
        save_alone(tmp_path, step)
    (tmp_path / "step-00000002" / COMMIT).unlink()  # a leftover
    pointer = json.loads((tmp_path / "step-00000004" / COMMIT).read_text())
    (tmp_path / "step-00000004" / pointer["index"]).write_bytes(b"{}")  # damaged: does not count as kept
    assert catalog.retain(folder, keep=2) == []  # only 1 and 3 are sound
    save_alone(tmp_path, 5)
    assert catalog.retain(folder, keep=2) == [1, 2]
    assert catalog.committed_steps(folder) == [5, 4, 3]


@pytest.mark.parametrize("damaged", [(1500, 2000), (2000,)])
def test_damaged_checkpoints_past_the_one_that_was_restored_do_not_count_as_kept(
    tmp_path: Path, damaged: tuple[int, ...]
) -> None:
    """Two of them have made retention delete the two that could be read."""
    folder = Storage.at(tmp_path)
    steps = [500, 1000, *damaged]
    for step in steps:
        save_alone(tmp_path, step)
    for step in damaged:
        flip_a_bit(tmp_path, step)
    assert restored_step(tmp_path) == 1000
    save_alone(tmp_path, 1200, generation=2)
    assert catalog.retain(folder, keep=2) == [500]
    assert catalog.committed_steps(folder) == [1200, 1000]
    problems = {found.step: found.problem for found in survey(folder, RUN)}
    assert all("a run could not read it" in problems.pop(step) for step in damaged)
    assert problems == {1200: "", 1000: ""}
    assert restored_step(tmp_path) == 1200, "not one that is damaged, nor one that was left behind"
    save_alone(tmp_path, 2000, generation=2)  # passed again: this one is sound
    assert catalog.committed_steps(folder) == [2000, 1200, 1000]
    assert catalog.retain(folder, keep=2) == [1000]
    assert restored_step(tmp_path) == 2000


@pytest.mark.parametrize("pattern", ["*.safetensors", "*.metadata", COMMIT])
def test_a_checkpoint_with_a_file_that_cannot_be_read_is_passed_over(tmp_path: Path, pattern: str) -> None:
    for step in (10, 20):
        save_alone(tmp_path, step)
    file = make_unreadable(tmp_path, 20, pattern)
    assert restored_step(tmp_path) == 10
    if pattern != COMMIT:  # which a note would have to name
        assert str(file) in catalog.damage_of(Storage.at(tmp_path), 20)


class Failing(LocalStorage):
    """Storage that fails for this process, where it reads data files."""

    number = errno.EIO

    def join(self, *names: str) -> "Failing":
        return type(self)(self.root.joinpath(*names))

    def read_into(self, name: str, offset: int, buffer: memoryview) -> int:
        raise OSError(self.number, os.strerror(self.number), str(self.root / name))


class Away(Failing):
    def list(self, name: str = "") -> list[str]:
        if name or self.asked:
            raise OSError(self.number, os.strerror(self.number), str(self.root / name))
        type(self).asked = True  # which checkpoints there are, it still said
        return super().list(name)

    asked = False


class Stale(Failing):
    number = errno.ESTALE


@pytest.mark.parametrize("kind", [Away, Stale])
def test_storage_that_fails_is_not_taken_for_damage(tmp_path: Path, kind: type[Failing]) -> None:
    """A rank whose host has lost its storage would have sound checkpoints noted as damaged, and end the run."""
    save_alone(tmp_path, 10)
    failing, folder = kind(tmp_path), Storage.at(tmp_path)
    with pytest.raises(OSError, match=r"safetensors"):
        store.restore_newest(
            failing,
            catalog.committed_steps(failing),
            alone(),
            ALONE,
            None,
            run_id=RUN,
            global_batch_seqs=1,
            damaged=lambda step, detail: catalog.note_damaged(folder, step, detail),
        )
    assert catalog.committed_steps(folder) == [10]


@pytest.mark.parametrize("pattern", ["*.safetensors", "*.metadata", COMMIT])
def test_retention_goes_on_though_a_file_cannot_be_read(tmp_path: Path, pattern: str) -> None:
    folder = Storage.at(tmp_path)
    for step in (10, 20, 30, 40):
        save_alone(tmp_path, step)
    make_unreadable(tmp_path, 30, pattern)
    assert catalog.retain(folder, keep=2) == [10]
    save_alone(tmp_path, 50)
    assert catalog.try_retain(folder, keep=2) == ""
    assert catalog.committed_steps(folder) == [50, 40]


class AwayForData(LocalStorage):
    """Of old checkpoints."""

    def join(self, *names: str) -> "AwayForData":
        return AwayForData(self.root.joinpath(*names))

    def read_range(self, name: str, offset: int, num_bytes: int) -> bytes:
        if self.root.name == catalog.step_folder(1200) and name.endswith(".safetensors"):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(self.root / name))
        return super().read_range(name, offset, num_bytes)


def test_retention_deletes_nothing_while_storage_fails(tmp_path: Path) -> None:
    """What could not be looked at may be the newest of a run that went back: step 1200 would go, and 1000 with it."""
    for step, generation in ((1000, 1), (1500, 1), (2000, 1), (1200, 2)):
        save_alone(tmp_path, step, generation=generation)
    assert "Stale file handle" in catalog.try_retain(AwayForData(tmp_path), keep=2)
    assert set(catalog.committed_steps(Storage.at(tmp_path))) == {1000, 1200, 1500, 2000}


class Listening(LocalStorage):
    """Says what is read, but for small files, which are read whole."""

    def __init__(self, root: Path, read: list[str]) -> None:
        super().__init__(root)
        self.read = read

    def join(self, *names: str) -> "Listening":
        return Listening(self.root.joinpath(*names), self.read)

    def read_range(self, name: str, offset: int, num_bytes: int) -> bytes:
        self.read.append(f"{self.root.name}/{name}")
        return super().read_range(name, offset, num_bytes)


def test_retention_looks_at_no_more_files_than_it_has_to_and_at_none_again(tmp_path: Path) -> None:
    read = list[str]()
    folder = Listening(tmp_path, read)
    for step in (10, 20, 30):
        save_alone(tmp_path, step)

    def looked_at(deleted: list[int]) -> list[str]:
        read.clear()
        assert catalog.retain(folder, keep=2) == deleted
        return sorted(name.partition("/")[0] for name in read if name.endswith(".safetensors"))

    assert looked_at([10]) == ["step-00000020", "step-00000030"]
    assert looked_at([]) == []
    save_alone(tmp_path, 40)
    assert looked_at([20]) == ["step-00000040"]
    save_alone(tmp_path, 40)  # written again
    assert looked_at([]) == ["step-00000040"]


def test_the_newest_checkpoint_is_chosen_without_a_look_at_older_ones(tmp_path: Path) -> None:
    read = list[str]()
    for step in (10, 20, 30):
        save_alone(tmp_path, step)
    catalog.note_damaged(Storage.at(tmp_path), 30, "its checksum fails")
    _, index = catalog.choose(Listening(tmp_path, read), RUN)
    assert index.step == 20
    assert not any(name.startswith("step-00000010/") for name in read)


def test_steps_that_are_being_written_neither_count_nor_go(tmp_path: Path) -> None:
    folder = Storage.at(tmp_path)
    for step in (10, 20, 30, 40):
        save_alone(tmp_path, step)
    assert catalog.retain(folder, keep=3, apart={10, 40}) == []
    assert catalog.retain(folder, keep=1, apart={10, 40}) == [20]


def test_checkpoints_at_multiples_are_kept_for_good_whatever_is_asked_for_later(tmp_path: Path) -> None:
    folder = Storage.at(tmp_path)
    for step in range(1, 10):
        save_alone(tmp_path, step)
        if step == 4:
            (tmp_path / "step-00000003" / COMMIT).unlink()  # a leftover, at a multiple
        catalog.retain(folder, keep=2, keep_every_steps=3 if step < 8 else 0)
    assert catalog.committed_steps(folder) == [9, 8, 6]
    assert [found.step for found in survey(folder, RUN) if found.is_kept] == [6]
    assert next(line for line in list_lines(survey(folder, RUN)) if line.split()[0] == "6").endswith("kept for good")
    assert list(list_lines(survey(folder, RUN)))[1].endswith("sound, newest")


def test_what_was_written_past_the_step_that_a_run_went_back_to_is_never_kept_for_what_is_newer(tmp_path: Path) -> None:
    folder = Storage.at(tmp_path)
    for step, generation in ((1000, 1), (1500, 1), (2000, 1), (1200, 2)):
        save_alone(tmp_path, step, generation=generation)
    assert catalog.retain(folder, keep=2) == []
    assert set(catalog.committed_steps(folder)) >= {1000, 1200}


def test_where_all_checkpoints_are_noted_as_damaged_they_are_tried_again_and_never_taken_for_none(
    tmp_path: Path,
) -> None:
    """It may have been one reader that was wrong; and a run must not begin anew in silence."""
    for step in (1, 2):
        save_alone(tmp_path, step)
        catalog.note_damaged(Storage.at(tmp_path), step, "says a rank whose memory is bad")
    assert catalog.committed_steps(Storage.at(tmp_path)) == []
    assert restored_step(tmp_path) == 2
    for step in (1, 2):
        flip_a_bit(tmp_path, step)
    with pytest.raises(CheckpointError, match="none of the checkpoints"):
        restored_step(tmp_path)


def test_a_rank_error_carries_the_first_traceback() -> None:
    with pytest.raises(RankError):
        run_ranks(save_on_ranks, 2, "/dev/null/nowhere", 1, False, False)
