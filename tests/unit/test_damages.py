"""1,000 bit flips, truncations, lost and swapped files over snapshots and checkpoints: all found, the bad file named.

Half of them in the memory of three nodes that hold two steps, half in a folder of three checkpoints written by keepers;
often several at once, so that sometimes nothing is left of the newest step, and the one before it must do. Bytes that
carry nothing (the padding between a slot's spans) may change unnoticed: then the state must be exact.
"""

import errno
import shutil
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from regrow.errors import CheckpointError
from regrow.plan.mesh import Coordinates, MeshShape
from regrow.state.disk import catalog, gather, store
from regrow.state.disk import catalog as tools
from regrow.state.disk.format import COMMIT, STORED_CHUNK_BYTES
from regrow.state.disk.gather import read_back
from regrow.state.memory.held import CHECKSUMS, COPY
from regrow.state.memory.holders import Holder, Holders
from regrow.state.memory.reader import restore_snapshot
from regrow.state.memory.slots import MAGIC, SLOT, open_slot
from regrow.storage import LocalStorage, Storage
from support.keepers import (
    RUN,
    SECRET,
    Node,
    assert_state,
    cluster,
    entries_of,
    holders,
    scalars_of,
    snapshot,
    state,
    wait_until,
    write_checkpoint,
)

DAMAGES = 50  # of each seed; with several seeds of either kind, 1,000
KINDS = ["flip", "flip", "flip", "truncate", "truncate", "grow", "delete", "empty", "zero", "swap", "exchange"]

Rng = np.random.Generator
Contents = dict[Path, bytes]


def damage(rng: Rng, victim: Path, others: Sequence[Path]) -> str:
    """One thing that happens to a file; which."""
    kind = str(rng.choice(KINDS))
    sound = victim.read_bytes() if victim.exists() else b""
    if kind in ("flip", "zero") and sound:
        data, at = bytearray(sound), int(rng.integers(len(sound)))
        if kind == "flip":
            data[at] ^= 1 << int(rng.integers(8))
        else:
            data[at : at + 512] = bytes(len(data[at : at + 512]))
        victim.write_bytes(data)
    elif kind == "truncate":
        victim.write_bytes(sound[: rng.integers(len(sound))] if sound else b"")
    elif kind == "grow":
        victim.write_bytes(sound + b"?" * int(rng.integers(1, 64)))
    elif kind == "delete":
        victim.unlink(missing_ok=True)
    elif kind in ("swap", "exchange"):
        other = others[rng.integers(len(others))]
        found = other.read_bytes() if other.exists() else b""
        victim.write_bytes(found)
        if kind == "exchange":
            other.write_bytes(sound)
    else:
        victim.write_bytes(b"")
    return kind


def changed(sound: Contents) -> set[Path]:
    return {path for path, data in sound.items() if not path.exists() or path.read_bytes() != data}


@contextmanager
def mended(sound: Contents) -> Iterator[None]:
    """What is damaged within is whole again after it."""
    try:
        yield
    finally:
        for path in changed(sound):
            path.write_bytes(sound[path])


def num_at_once(rng: Rng) -> int:
    return int(rng.choice([1, 1, 1, 2, 3, 6]))


class Memory:
    """Two steps' snapshots in the memory of some nodes, and which of them are still good for something."""

    def __init__(self, nodes: list[Node], steps: Sequence[int]) -> None:
        self.nodes = nodes
        self.holders = {step: holders(nodes, step) for step in steps}  # as the coordinator knows them
        self.folders = {node.keeper.node: node.keeper.folder for node in nodes}
        self.sound: Contents = {}  # in the same order each time, whatever the random names
        for node in nodes:
            files = sorted(node.keeper.folder.iterdir(), key=lambda path: (COPY in path.name, path.name))
            self.sound |= {path: path.read_bytes() for path in files if path.name.endswith((SLOT, COPY, CHECKSUMS))}
        self._used = {path: self._used_bytes(path) for path in self.sound if not path.name.endswith(CHECKSUMS)}

    def files(self, holder: Holder) -> list[Path]:
        slot = self.folders[holder.node] / holder.held.file
        return [slot, slot.with_name(slot.name + CHECKSUMS)]

    def spoiled(self) -> set[Path]:
        """Files that are not what they were where it matters."""
        found = set()
        for path in changed(self.sound):
            now, used = path.read_bytes() if path.exists() else b"", self._used.get(path)
            if used is None or any(now[part] != self.sound[path][part] for part in used):
                found.add(path)
        return found

    def restore(
        self, step: int, known: list[Holder], shard: int, num_shards: int, where: str, reader: int
    ) -> tuple[Sequence[str], str]:
        """Restore a rank's part, and look at every element: (holders that were left out, why it is impossible)."""
        entries = entries_of(shard, num_shards)
        try:
            found = restore_snapshot(
                entries, Holders.of(known), node=where, folder=self.folders[where], secret=SECRET, reader=reader
            )
        except CheckpointError as error:
            return (), str(error)
        assert found.scalars == scalars_of(step)
        assert_state(entries, step)
        return found.problems, ""

    @staticmethod
    def _used_bytes(path: Path) -> list[slice]:
        header = open_slot(path)
        assert header is not None
        prefix = len(MAGIC) + 8 + 32
        boxes = zip(header.offsets, header.boxes, strict=False)
        return [slice(prefix + len(header.encode())), *(slice(at, at + box.num_bytes) for at, box in boxes)]


@pytest.mark.parametrize("seed", range(10))
def test_damaged_snapshots_are_named_and_their_copies_or_the_step_before_used(tmp_path: Path, seed: int) -> None:
    rng, outcomes = np.random.default_rng(seed), Counter[str]()
    with cluster(tmp_path, 3) as nodes:
        snapshot(nodes, 8, 3, also=[9])
        memory = Memory(nodes, [8, 9])
        of_newest = {path for holder in memory.holders[9] for path in memory.files(holder)}
        newest = [path for path in memory.sound if path in of_newest]
        done = 0
        while done < DAMAGES:
            with mended(memory.sound):
                for _ in range(num_at_once(rng)):
                    damage(rng, newest[rng.integers(len(newest))], list(memory.sound))
                    done += 1
                spoiled = memory.spoiled()
                for holder in memory.holders[9]:
                    if not set(memory.files(holder)).isdisjoint(changed(memory.sound)):
                        read_alone(memory, holder, bad=not spoiled.isdisjoint(memory.files(holder)))
                step = next((step for step in (9, 8) if read_whole(memory, step, spoiled, rng)), None)
                outcomes[str(step)] += 1
    assert min(outcomes["9"], outcomes["8"]) > 0, outcomes


def read_alone(memory: Memory, holder: Holder, *, bad: bool) -> None:
    """Where only this holder has a part, it is given exactly, or refused by the holder's name; here and from afar."""
    shard, num_shards = holder.held.coordinates.along("dp_shard")
    for where in (holder.node, next(node for node in memory.folders if node != holder.node)):
        _, problem = memory.restore(holder.held.moment.step, [holder], shard, num_shards, where, 0)
        assert problem or not bad, f"{holder.name}: its damage went unnoticed"
        assert not problem or holder.name in problem


def read_whole(memory: Memory, step: int, spoiled: set[Path], rng: Rng) -> bool:
    """Restore a step into some ranks; whether that worked. It must, where of every shard one file is sound."""
    bad = [holder for holder in memory.holders[step] if not spoiled.isdisjoint(memory.files(holder))]
    good = {holder.held.coordinates.along("dp_shard")[0] for holder in memory.holders[step] if holder not in bad}
    touched = {path.name.removesuffix(CHECKSUMS) for path in changed(memory.sound)}
    num_shards, works = int(rng.integers(1, 4)), True
    for known in (memory.holders[step], holders(memory.nodes, step)):  # asked before the damage, and after it
        for shard in range(num_shards):
            where, reader = str(rng.choice(list(memory.folders))), int(rng.integers(4))
            left_out, problem = memory.restore(step, known, shard, num_shards, where, reader)
            assert all(any(name in each for name in touched) for each in left_out)
            if problem:
                assert len(good) < 3, f"a sound copy of everything is there, but: {problem}"
                assert "no file holds elements" in problem or "no node holds one" in problem
                assert known is not memory.holders[step] or any(holder.name in problem for holder in bad), problem
                works = False
    return works


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three checkpoints written by keepers from different groups, and beside them another attempt at the newest."""
    folder = tmp_path_factory.mktemp("written")
    layouts = [("checkpoints", 10, 1, 2, 1), ("checkpoints", 20, 2, 2, 2), ("checkpoints", 30, 3, 3, 1)]
    for name, step, generation, num_shards, replicas in [*layouts, ("again", 30, 4, 3, 1)]:
        with cluster(folder / f"memory-{generation}", 3) as nodes:
            snapshot(nodes, step, num_shards, generation=generation, replicas=replicas)
            write_checkpoint(nodes, Storage.at(folder / name), step, generation)
    return folder


def restore_newest(checkpoints: Storage, num_shards: int) -> tuple[int | None, dict[int, list[str]]]:
    """As a group of workers does: (the step that all ranks could restore, why not those after it)."""
    problems: dict[int, list[str]] = {}
    for step in catalog.committed_steps(checkpoints):
        problems[step] = []
        for shard in range(num_shards):
            try:
                entries = entries_of(shard, num_shards)
                index = catalog.open_checkpoint(checkpoints, step, run_id=RUN)
                store.restore(checkpoints, index, entries, Coordinates(MeshShape(1, num_shards), shard))
                assert index.scalars == scalars_of(step)
                assert_state(entries, step)
            except CheckpointError as error:
                problems[step].append(str(error))
        if not problems[step]:
            return step, problems
    return None, problems


@pytest.mark.parametrize("seed", range(10))
def test_damaged_checkpoints_are_named_and_the_one_before_used(written: Path, seed: int) -> None:
    rng, outcomes = np.random.default_rng(100 + seed), Counter[int | None]()
    checkpoints = Storage.at(written / "checkpoints")
    folders = {step: written / "checkpoints" / catalog.step_folder(step) for step in (30, 20, 10)}
    sound = {path: path.read_bytes() for name in ("checkpoints", "again") for path in files_below(written / name)}
    assert restore_newest(checkpoints, 2) == (30, {30: []})
    done = 0
    while done < DAMAGES:
        with mended(sound):
            for _ in range(num_at_once(rng)):
                folder = folders[int(rng.choice([30, 30, 30, 20]))]
                victims = [path for path in sound if path.parent == folder]
                victim = victims[rng.integers(len(victims))]
                alike = [path for path in sound if path.suffix == victim.suffix or path.parent == victim.parent]
                damage(rng, victim, alike)
                done += 1
            harmed = changed(sound)
            step, problems = restore_newest(checkpoints, int(rng.integers(1, 4)))
            outcomes[step] += 1
            found = {
                each.step: each.problem for each in tools.examine(checkpoints, RUN, None, lambda _: lambda _: None)
            }
            for at, folder in folders.items():
                names = [path.name for path in harmed if path.parent == folder]
                fatal = [path for path in harmed if path.parent == folder and not has_only_grown(path, sound[path])]
                assert bool(found[at]) == bool(names), (at, names, found[at])
                # what a restore does not read, headers and the list of files, may be damaged: the state was compared
                assert fatal or not problems.get(at), (at, fatal, problems)
                assert at in problems or (step is not None and step > at) or not (folder / COMMIT).exists()
                for problem in filter(None, [found[at], *problems.get(at, [])]):
                    says = (f"{folder}/", "is not the one in ", "it has no ")
                    assert any(before + name in problem for before in says for name in names), problem
    assert min(outcomes[20], outcomes[10]) > 0, outcomes


@pytest.mark.parametrize("is_remote", [False, True])
@pytest.mark.parametrize("at", [0.0, 0.5, 1.0], ids=["header", "middle", "end"])
def test_that_storage_does_not_give_back_what_was_written_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: float, is_remote: bool
) -> None:
    """Older ones would be deleted for it."""
    inner = LocalStorage.write_chunks
    monkeypatch.setattr(gather, "PIECE_BYTES", 2 * STORED_CHUNK_BYTES)

    def write_chunks(self: LocalStorage, name: str, chunks: Any) -> int:
        data = bytearray(b"".join(bytes(chunk) for chunk in chunks))
        data[int(at * (len(data) - 1))] ^= 1
        return inner(self, name, [data])

    with cluster(tmp_path, 2) as nodes:
        snapshot(nodes, 3, 2)
        monkeypatch.setattr(LocalStorage, "write_chunks", write_chunks)
        storage = Storage.at(tmp_path / "checkpoints")
        for file in write_checkpoint(nodes, storage, 3):
            step = storage / catalog.step_folder(3)
            data = bytearray(step.read_bytes(file.name))
            if is_remote:
                step = Storage.at(f"memory://{uuid.uuid4().hex}")
                step.write_bytes(file.name, bytes(data))
            with pytest.raises(CheckpointError, match="what was written is not what is read"):
                read_back(step, file)
            if is_remote:
                data[int(at * (len(data) - 1))] ^= 1
                step.write_bytes(file.name, bytes(data))
                read_back(step, file)


def test_reading_back_from_a_remote_store_keeps_no_piece_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It kept all of them to its end, up to 64 GB beside a node's snapshots."""
    in_threads, kept = gather.in_threads, list[Any]()

    def watched(function: Any, pieces: Any) -> Any:
        kept.extend(in_threads(function, pieces))

    monkeypatch.setattr(gather, "PIECE_BYTES", STORED_CHUNK_BYTES)
    monkeypatch.setattr(gather, "in_threads", watched)
    with cluster(tmp_path, 2) as nodes:
        snapshot(nodes, 3, 2)
        storage, remote = Storage.at(tmp_path / "checkpoints"), Storage.at(f"memory://{uuid.uuid4().hex}")
        for file in write_checkpoint(nodes, storage, 3):
            remote.write_bytes(file.name, (storage / catalog.step_folder(3)).read_bytes(file.name))
            read_back(remote, file)
    assert kept
    assert {*kept} == {None}


@pytest.mark.parametrize("is_by_keepers", [True, False])
def test_a_rank_s_part_is_in_files_that_s3_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_by_keepers: bool
) -> None:
    """70B on 8 ranks is 105.8 GB each: no checkpoint of it could be written there."""
    monkeypatch.setattr(gather, "FILE_BYTES", 301)
    storage = Storage.at(tmp_path / "checkpoints")
    if is_by_keepers:
        with cluster(tmp_path, 2) as nodes:
            snapshot(nodes, 3, 2)
            files = write_checkpoint(nodes, storage, 3)
            for file in files:
                read_back(storage / catalog.step_folder(3), file)
    else:
        files = list(
            store.save(storage, entries_of(0, 1, state(3)), scalars=scalars_of(3), run_id=RUN, generation=1).files
        )
    assert {file.num_bytes - file.header_bytes for file in files} > {300}
    assert max(file.num_bytes - file.header_bytes for file in files) == 300
    index = catalog.open_checkpoint(storage, 3, run_id=RUN)
    catalog.verify(storage, index, lambda num_bytes: None)
    assert {file.name for file in index.files} == {file.name for file in files}
    assert restore_newest(storage, 2) == restore_newest(storage, 3) == (3, {3: []})


def test_an_order_that_fails_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four ranks on a disk that is full for the last one, which waits for the others'."""
    inner, written = LocalStorage.write_chunks, list[str]()

    def write_chunks(self: LocalStorage, name: str, chunks: Any) -> int:
        if name.endswith("-3.safetensors"):
            wait_until(lambda: len(written) == 3)
            raise OSError(errno.ENOSPC, "No space left on device")
        num_bytes = inner(self, name, chunks)
        written.append(name)
        return num_bytes

    with cluster(tmp_path, 1) as nodes:
        snapshot(nodes, 3, 4)
        monkeypatch.setattr(LocalStorage, "write_chunks", write_chunks)
        storage = Storage.at(tmp_path / "checkpoints")
        with pytest.raises(OSError, match="No space left"):
            write_checkpoint(nodes, storage, 3)
        assert len(written) == 3
        assert storage.list(catalog.step_folder(3)) == []


def files_below(folder: Path) -> list[Path]:
    """In the same order each time, whatever the random names."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return sorted(files, key=lambda path: (path.parent, path.suffix, path.read_bytes()))


def has_only_grown(path: Path, sound: bytes) -> bool:
    """A data file with something at its end: what it is to hold is there."""
    return path.suffix == ".safetensors" and path.exists() and path.read_bytes().startswith(sound)


def test_a_whole_checkpoint_in_the_folder_of_another_is_named(written: Path, tmp_path: Path) -> None:
    shutil.copytree(written / "checkpoints", tmp_path, dirs_exist_ok=True)
    older, newest = (tmp_path / catalog.step_folder(step) for step in (20, 30))
    shutil.rmtree(newest)
    shutil.copytree(older, newest)
    assert restore_newest(Storage.at(tmp_path), 2)[0] == 20
    (found, *_) = tools.survey(Storage.at(tmp_path), RUN)
    assert (found.step, found.problem) == (30, f"{newest} holds a checkpoint of step 20")
