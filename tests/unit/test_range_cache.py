"""The cache of shards in object stores: fetched once a node, never more than its size, never trusted."""

import json
import multiprocessing
import os
import pickle
import shutil
import signal
from pathlib import Path
from threading import Thread

import numpy as np
import pytest

from regrow.config.schema import DataConfig
from regrow.data.read import range_cache
from regrow.data.read.corpora import Corpora
from regrow.data.read.outage import Patience, PatientReader
from regrow.data.read.range_cache import LOCKS, RangeCache
from regrow.data.read.shards import ShardReader
from regrow.data.stream.dataset import task_reader
from regrow.errors import DataError, GroupOver, UnavailableError
from support.away import TRIES, Away
from support.corpus import write_rows


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("??/*"))


def test_a_range_is_fetched_once_and_again_after_it_was_forgotten(tmp_path: Path) -> None:
    cache, fetched = RangeCache(tmp_path, 1 << 20), []

    def fetch() -> bytes:
        fetched.append(1)
        return b"rows"

    assert [cache.get("a", fetch) for _ in range(3)] == [b"rows"] * 3
    assert RangeCache(tmp_path, 1 << 20).get("a", fetch) == b"rows"
    assert len(fetched) == 1
    cache.forget(["a", "never there"])
    assert cache.get("a", fetch) == b"rows"
    assert len(fetched) == 2
    assert (cache.counts.hits, cache.counts.misses, cache.counts.fetched_bytes) == (2, 2, 8)


def test_the_folder_stays_within_its_size_and_keeps_what_was_used_last(tmp_path: Path) -> None:
    cache = RangeCache(tmp_path, 100_000)
    for k in range(400):
        cache.get(f"range {k}", lambda: bytes(1000))
        cache.get("used all the time", lambda: bytes(1000))
        assert size_of(tmp_path) <= 100_000
    assert size_of(tmp_path) > 80_000
    assert cache.counts.misses == 401
    assert cache.counts.evicted_bytes > 300_000
    cache.get("far too large", lambda: bytes(50_000))
    assert cache.counts.misses == 402
    assert size_of(tmp_path) <= 100_000


def test_what_lies_beside_ranges_is_neither_deleted_nor_in_the_way(tmp_path: Path) -> None:
    """`data.cache_dir=/scratch`: a node's disk, with folders of two letters, as `hf`, or `ab`."""
    for name in ("hf/weights", "ab/notes", "cd/below/data"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_bytes(bytes(200_000))
        os.utime(tmp_path / name, (0, 0))
    cache = RangeCache(tmp_path, 100_000)
    for k in range(200):
        cache.get(f"range {k}", lambda: bytes(1000))
    assert size_of(tmp_path) <= 700_000
    assert cache.counts.evicted_bytes > 90_000
    assert all((tmp_path / name).exists() for name in ("hf/weights", "ab/notes", "cd/below/data"))


def test_what_fails_to_be_fetched_is_not_kept_and_a_broken_disk_only_costs_fetches(tmp_path: Path) -> None:
    cache = RangeCache(tmp_path / "file" / "below", 1 << 20)
    (tmp_path / "file").write_bytes(b"no folder can be made here")
    assert [cache.get("a", lambda: b"rows") for _ in range(2)] == [b"rows"] * 2
    assert cache.counts.misses == 2

    def fail() -> bytes:
        raise OSError("storage is down")

    cache = RangeCache(tmp_path / "cache", 1 << 20)
    with pytest.raises(OSError, match="storage is down"):
        cache.get("a", fail)
    assert cache.get("a", lambda: b"rows") == b"rows"


@pytest.mark.parametrize("how", ["a group may write to it", "it is another user's", "it is a link"])
def test_a_folder_that_another_user_may_have_made_by_the_default_name_is_not_used(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All may make folders in /tmp: links of the locks' names emptied the files that they led to."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder, precious, user = RangeCache.default_folder(), tmp_path / "precious", os.geteuid()
    precious.write_text("a thesis")
    made = tmp_path / "elsewhere" if how == "it is a link" else folder
    made.mkdir(mode=0o700)
    for number in range(LOCKS):
        (made / f"lock-{number:02d}").symlink_to(precious)
    if how == "it is a link":
        folder.symlink_to(made)
    elif how == "it is another user's":
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    else:
        made.chmod(0o770)
    cache = RangeCache(folder, 1 << 20)
    assert [cache.get("a", lambda: b"rows") for _ in range(2)] == [b"rows"] * 2
    assert (cache.counts.hits, cache.counts.misses) == (0, 2)
    assert precious.read_text() == "a thesis"
    assert size_of(made) == 0
    (line,) = caplog.messages
    assert line.endswith("shards are read without it; delete it, or set data.cache_dir")
    monkeypatch.setattr(os, "geteuid", lambda: user)
    shutil.rmtree(made)
    folder.unlink(missing_ok=True)
    assert [cache.get("a", lambda: b"rows") for _ in range(2)] == [b"rows"] * 2
    assert cache.counts.hits == 1


def test_a_folder_that_was_named_may_be_a_groups_and_links_in_it_lead_nowhere(tmp_path: Path) -> None:
    shared, precious = tmp_path / "shared", tmp_path / "precious"
    precious.write_text("a thesis")
    shared.mkdir()
    shared.chmod(0o2775)
    for number in range(LOCKS):
        (shared / f"lock-{number:02d}").symlink_to(precious)
    named = tmp_path / "named"
    named.symlink_to(shared)
    cache = RangeCache(named, 1 << 20)
    assert [cache.get("a", lambda: b"rows") for _ in range(2)] == [b"rows"] * 2
    assert (cache.counts.hits, cache.counts.misses) == (1, 1)
    assert precious.read_text() == "a thesis"


def _get_slowly(folder: Path, log: Path, barrier: "multiprocessing.synchronize.Barrier") -> None:
    def fetch() -> bytes:
        with open(log, "ab") as file:
            file.write(b"x")
        return bytes(5000)

    barrier.wait()
    for k in range(20):
        assert len(RangeCache(folder, 1 << 20).get(f"range {k}", fetch)) == 5000


def test_processes_that_want_a_range_at_once_fetch_it_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(4)
    processes = [
        context.Process(target=_get_slowly, args=(tmp_path / "cache", tmp_path / "log", barrier)) for _ in range(4)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert (tmp_path / "log").read_bytes() == b"x" * 20


def _stop_while_fetching(folder: Path) -> None:
    def fetch() -> bytes:
        os.kill(os.getpid(), signal.SIGSTOP)
        return b"rows"

    RangeCache(folder, 1 << 20).get("a", fetch)


def test_a_process_that_is_stopped_while_it_fetches_does_not_block_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, they waited for its lock without a deadline: the stream's tasks, and ranks that read directly."""
    monkeypatch.setattr(range_cache, "PATIENCE_S", 0.2)
    stopped = multiprocessing.get_context("spawn").Process(target=_stop_while_fetching, args=(tmp_path,))
    stopped.start()
    assert stopped.pid is not None
    assert os.WIFSTOPPED(os.waitpid(stopped.pid, os.WUNTRACED)[1])
    found = list[bytes]()
    reading = Thread(target=lambda: found.append(RangeCache(tmp_path, 1 << 20).get("a", lambda: b"rows")))
    reading.start()
    reading.join(30)
    os.kill(stopped.pid, signal.SIGKILL)
    reading_was_over = list(found)
    reading.join()
    stopped.join()
    assert reading_was_over == [b"rows"]
    again = RangeCache(tmp_path, 1 << 20)
    assert again.get("a", lambda: b"never") == b"rows"
    assert again.counts.hits == 1


def test_a_remote_corpus_is_read_by_ranges_through_the_cache(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "corpus", num_rows=301)
    cache = RangeCache(tmp_path / "cache", 1 << 24)
    reader = ShardReader(f"local://{tmp_path}/corpus", "train", cache)
    wanted = np.random.default_rng(0).permutation(301)
    assert np.array_equal(reader.read(wanted), rows[wanted])
    groups, shards = -(-301 // 8), -(-301 // 64)
    assert cache.counts.misses == groups + shards  # a range for each row group and each footer
    stored = sum(path.stat().st_size for path in (tmp_path / "corpus").glob("*.parquet"))
    assert cache.counts.fetched_bytes <= stored
    again = pickle.loads(pickle.dumps(reader))  # as it travels to another process of the node
    assert np.array_equal(again.read(wanted), rows[wanted])
    assert again.cache.counts.misses == 0


def test_a_damaged_range_in_the_cache_is_fetched_again_and_a_damaged_shard_is_named(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "corpus", num_rows=64)
    cache = RangeCache(tmp_path / "cache", 1 << 24)
    location = f"local://{tmp_path}/corpus"
    ShardReader(location, "train", cache).read(range(64))
    rng = np.random.default_rng(1)
    for path in sorted((tmp_path / "cache").glob("??/*")):
        data = bytearray(path.read_bytes())
        data[rng.integers(len(data))] ^= 1 << rng.integers(8)
        path.write_bytes(data)
        assert np.array_equal(ShardReader(location, "train", cache).read(range(64)), rows)
    shard = tmp_path / "corpus" / "train-00000.parquet"
    data = bytearray(shard.read_bytes())
    data[100] ^= 1
    shard.write_bytes(data)
    assert np.array_equal(ShardReader(location, "train", cache).read(range(64)), rows)  # from the cache
    with pytest.raises(DataError, match=r"train-00000.parquet: row group 0 cannot be read"):
        ShardReader(location, "train", RangeCache(tmp_path / "other", 1 << 24)).read(range(64))


def test_several_corpora_are_one_row_of_rows(tmp_path: Path) -> None:
    first = write_rows(tmp_path / "a", num_rows=70, seed=1)
    second = write_rows(tmp_path / "b", num_rows=30, seed=2, rows_per_group=4)
    folders = {"a": str(tmp_path / "a"), "b": f"local://{tmp_path}/b"}
    config = DataConfig(cache_dir=str(tmp_path / "cache"), cache_gb=0.1)
    corpora = Corpora.of(folders, config)
    reader = corpora.reader("train")
    wanted = np.random.default_rng(0).permutation(100)
    assert np.array_equal(reader.read(wanted), np.concatenate([first, second])[wanted])
    assert reader.first_rows(5).tolist() == [0, 70, 1, 71, 2]
    assert reader.first_rows(1000).tolist()[-1] == 69
    assert sorted(reader.first_rows(1000).tolist()) == list(range(100))
    assert size_of(tmp_path / "cache") > 0
    assert pickle.loads(pickle.dumps(corpora)) == corpora
    moved = Corpora.of({"a": folders["a"], "b": str(tmp_path / "b")}, config)
    assert moved.sha256 == corpora.sha256 != Corpora.of({"b": folders["b"], "a": folders["a"]}, config).sha256


@pytest.mark.parametrize("how", ["pickled", "as JSON"])
def test_each_host_has_the_cache_in_its_own_temporary_folder(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler gives each job and host another one, often by a path that no other host has. The driver's was used
    on all of them: where it cannot be made nothing is kept, and every rank fetches everything."""
    rows = write_rows(tmp_path / "corpus", num_rows=64)

    def on_host(name: str) -> None:
        (tmp_path / name).mkdir()
        monkeypatch.setenv("TMPDIR", str(tmp_path / name))
        monkeypatch.setattr("tempfile.tempdir", None)  # where it has been looked for before

    on_host("driver")
    sent = Corpora.at(f"local://{tmp_path}/corpus")
    as_json = json.dumps(sent.to_plain())
    on_host("worker")
    there = pickle.loads(pickle.dumps(sent)) if how == "pickled" else Corpora.of_plain(json.loads(as_json))
    assert there == sent
    assert np.array_equal(there.reader("train").read(np.arange(8)), rows[:8])
    (made,) = (tmp_path / "worker").iterdir()
    assert made == RangeCache.default_folder()
    assert size_of(made) > 0
    assert list((tmp_path / "driver").iterdir()) == []


def test_a_cache_may_be_below_the_home_of_its_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, in a folder called ~ of whatever directory a worker was in."""
    rows = write_rows(tmp_path / "corpus", num_rows=64)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    reader = Corpora.at(f"local://{tmp_path}/corpus", DataConfig(cache_dir="~/cache")).reader("train")
    assert np.array_equal(reader.read(np.arange(8)), rows[:8])
    assert size_of(tmp_path / "home" / "cache") > 0


def away(folder: Path, refusals: float) -> Corpora:
    """A corpus in a store that is away once its manifest was read."""
    Away.refusals = 0
    corpora = Corpora.at(f"away://{folder}/corpus", DataConfig(cache_dir=str(folder / "cache")))
    assert corpora.manifests
    Away.refusals, Away.asked = refusals, 0
    return corpora


def test_a_rank_does_not_wait_for_an_object_store_in_a_group_that_is_over(tmp_path: Path) -> None:
    """It was deaf for 211 s, for each of two tries, and kept the ranks of its node waiting."""
    rows, told = write_rows(tmp_path / "corpus", num_rows=64), list[str]()
    reader = away(tmp_path, float("inf")).reader("train")
    with pytest.raises(GroupOver):
        PatientReader(reader, Patience(600.0, told.append, is_over=lambda: bool(told))).read(np.arange(4))
    assert (len(told), Away.asked) == (1, TRIES)
    assert "cannot be read here" in told[0]
    assert "the store is away" in told[0]
    with pytest.raises(UnavailableError, match="row group 0 cannot be read here"):
        PatientReader(reader, Patience(0.0)).read(np.arange(4))
    assert Away.asked == 2 * TRIES
    Away.refusals = TRIES + 1
    assert np.array_equal(PatientReader(reader, Patience(600.0)).read(np.arange(4)), rows[:4])


def test_what_was_fetched_stays_while_the_store_is_away(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "corpus", num_rows=64)
    reader = away(tmp_path, 0).reader("train")
    assert np.array_equal(reader.read(np.arange(8)), rows[:8])
    Away.refusals = float("inf")
    with pytest.raises(UnavailableError):
        reader.read(np.arange(16))
    assert np.array_equal(reader.read(np.arange(8)), rows[:8])
    again = away(tmp_path, float("inf")).reader("train")
    assert np.array_equal(again.read(np.arange(8)), rows[:8]), "from the disk, its footer too"
    assert Away.asked == 0


def test_tasks_of_the_stream_are_patient_with_an_object_store(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "corpus", num_rows=64)
    assert np.array_equal(task_reader(away(tmp_path, TRIES + 1)).read(np.arange(4)), rows[:4])
