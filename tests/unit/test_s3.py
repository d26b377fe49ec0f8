"""Storage, sources and corpora in S3, spoken to through pyarrow.fs at a server on this machine."""

import json
import math
import os
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from botocore.exceptions import ClientError, NoCredentialsError

from regrow import storage as storage_module
from regrow.config.schema import DataConfig, PretrainConfig, RunConfig
from regrow.data.preflight import check_corpus
from regrow.data.prepare.documents import Document, Piece, load_recipe
from regrow.data.prepare.prepare import prepare, read_tokenizer
from regrow.data.prepare.tokenizer import train_tokenizer
from regrow.data.read.corpora import Corpora, find_corpora
from regrow.data.read.manifest import Manifest
from regrow.data.read.shards import verify
from regrow.errors import DataError
from regrow.progress import Task
from regrow.storage import RemoteStorage, Storage, StorageUnreachable
from support.corpus import WordRecipe, write_rows
from support.s3 import Faults, s3_server

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    with s3_server() as uri:
        yield uri


def upload(folder: Path, uri: str) -> None:
    for path in folder.iterdir():
        Storage.at(uri).write_bytes(path.name, path.read_bytes())


def test_a_folder_of_files(bucket: str) -> None:
    storage = Storage.at(f"{bucket}/folder") / "deeper"
    storage.write_bytes("a.bin", b"0123456789")
    storage.write_bytes("b/c.bin", bytes(6_000_000))  # more than one part of a multipart upload
    assert storage.list() == ["a.bin", "b"]
    assert storage.read_range("a.bin", 3, 4) == b"3456"
    assert storage.read_range("a.bin", 8, 4) == b"89"
    assert storage.read_range("a.bin", 20, 4) == b""  # at once: past the end is no failure to be tried again
    assert storage.read_bytes("b/c.bin") == bytes(6_000_000)
    storage.write_bytes("a.bin", b"replaced")
    assert storage.read_bytes("a.bin") == b"replaced"
    assert storage.exists("b/c.bin")
    storage.delete("b")
    assert not storage.exists("b/c.bin")
    with pytest.raises(FileNotFoundError):
        storage.read_bytes("b/c.bin")


def test_a_prepared_corpus_is_read_from_there(bucket: str, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "corpus", num_rows=301)
    upload(tmp_path / "corpus", f"{bucket}/corpus")
    corpora = Corpora.of({"web": f"{bucket}/corpus"}, DataConfig(cache_dir=str(tmp_path / "cache")))
    wanted = np.random.default_rng(0).permutation(301)
    assert np.array_equal(corpora.reader("train").read(wanted), rows[wanted])
    Storage.at(f"{bucket}/corpus").delete("train-00001.parquet")
    assert np.array_equal(corpora.reader("train").read(wanted), rows[wanted])  # the cache has it
    other = Corpora.of({"web": f"{bucket}/corpus"}, DataConfig(cache_dir=str(tmp_path / "empty")))
    with pytest.raises(DataError, match=r"s3://.*/train-00001.parquet: row group 0 cannot be read"):
        other.reader("train").read(wanted)


def test_a_folder_without_a_corpus_says_so(bucket: str) -> None:
    with pytest.raises(DataError, match="holds no finished corpus"):
        Corpora.of({"web": f"{bucket}/nothing"}, DataConfig()).reader("train")


CONFIG = DataConfig(
    recipe="text_files", vocab_size=512, seq_len=16, validation_fraction=0.2, rows_per_group=8, rows_per_shard=64
)


@dataclass(frozen=True)
class Cut(WordRecipe):
    """A recipe whose source fails once at the start of this piece: the file is there from then on."""

    fails_at: int = -1
    failed: str = ""

    def documents(self, config: DataConfig, piece: Piece) -> Iterator[Document]:
        if piece == self.pieces(config)[self.fails_at] and not Path(self.failed).exists():
            Path(self.failed).touch()
            raise OSError("the network is down")
        yield from super().documents(config, piece)


def content(folder: Storage) -> dict[str, bytes]:
    return {name: folder.read_bytes(name) for name in folder.list()}


def travelled(function: Callable[[int], Any], numbers: Sequence[int]) -> Iterator[Any]:
    """Calls it as a task of another process would."""
    yield from map(pickle.loads(pickle.dumps(function)), numbers)


def quiet(*update: object) -> None:
    pass


def test_a_corpus_is_prepared_there_as_on_a_disk_and_goes_on_after_a_failure(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("regrow.data.prepare.prepare.LOCAL_BYTES", 0)
    (tmp_path / "bpe.json").write_text(train_tokenizer(["abcdefgh " * 9], vocab_size=300).to_str())
    config = replace(CONFIG, tokenizer=str(tmp_path / "bpe.json"))
    local = prepare(config, WordRecipe(num_pieces=5), tmp_path / "words", progress=quiet)
    place = Storage.at(f"{bucket}/prepared/words")
    recipe = Cut(num_pieces=5, fails_at=3, failed=str(tmp_path / "failed"))
    with pytest.raises(DataError, match=r"the network is down; run the same command again, it goes on"):
        prepare(config, recipe, place, progress=quiet)
    done = {name for name in (place / "spool").list() if name.endswith(".json")}
    assert len(done) == 3
    assert not place.exists("manifest.json")
    seen: list[tuple[Task, float, float]] = []
    again = prepare(config, recipe, place, progress=lambda *update: seen.append(update), distribute=travelled)
    assert again == local
    assert [done for task, done, _ in seen if task.name == "tokenizing"] == [3, 4, 5]
    assert content(place) == content(Storage.at(tmp_path / "words"))
    assert prepare(config, Cut(fails_at=0, failed="/nowhere/x"), place, progress=quiet) == local  # reads no document


def test_a_job_killed_before_it_tidied_up_leaves_that_to_the_next(bucket: str, tmp_path: Path) -> None:
    place = Storage.at(f"{bucket}/untidy/words")
    manifest = prepare(CONFIG, WordRecipe(), place, progress=quiet)
    whole = content(place)
    for name in ("plan.json", "train-00000.record", "spool/000000.json", "train-00999.parquet"):
        place.write_bytes(name, b"{}")
    assert prepare(CONFIG, WordRecipe(), place, progress=quiet) == manifest
    assert content(place) == whole


def test_two_jobs_may_prepare_the_same_one_there(bucket: str, tmp_path: Path) -> None:
    """The slower one finds its spool taken away, and the corpus that it was making finished."""
    place = Storage.at(f"{bucket}/twice/words")
    finished: list[Manifest] = []

    def other_job(task: Task, done: float, total: float) -> None:
        if task.name == "writing" and not finished:
            finished.append(prepare(CONFIG, WordRecipe(num_pieces=3), place, progress=quiet))

    assert prepare(CONFIG, WordRecipe(num_pieces=3), place, progress=other_job) == finished[0]
    assert not place.exists("plan.json")
    list(verify(str(place)))


def test_an_at_in_a_folders_name_is_no_credential(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it were, files that must be new would be looked for and then written, which two jobs may do at once."""
    conditions = list[str]()
    create = storage_module._create_in_s3

    def noted(path: str, *arguments: Any) -> bool | None:
        conditions.append(path)
        return create(path, *arguments)

    monkeypatch.setattr(storage_module, "_create_in_s3", noted)
    folder = Storage.at(f"{bucket}/me@example/runs")
    assert folder.create("run.json", b"1")
    assert not folder.create("run.json", b"2")
    assert len(conditions) == 2


def test_a_file_is_created_where_the_uri_says_and_not_where_the_environment_does(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = os.environ["AWS_ENDPOINT_URL"].removeprefix("http://")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # where nothing answers
    folder = Storage.at(f"{bucket}/options?endpoint_override={place}&scheme=http&region=us-east-1") / "run"
    assert folder.create("run.json", b"1")
    assert not folder.create("run.json", b"2")
    assert Storage.at(str(folder)).read_bytes("run.json") == b"1"
    assert read_tokenizer(str(folder / "run.json")) == b"1"


def test_a_run_with_its_storage_there_prepares_and_reads_its_corpus_there(bucket: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    texts = [" ".join(f"word{(n * 7 + k) % 31}" for k in range(90)) for n in range(40)]
    lines = [json.dumps({"text": text}) for text in texts]
    (tmp_path / "in" / "a.jsonl").write_text("\n".join(lines))
    config = PretrainConfig(
        run=RunConfig(storage_path=f"{bucket}/runs"),
        data=replace(CONFIG, source=str(tmp_path / "in"), cache_dir=str(tmp_path / "cache")),
    )
    assert check_corpus(config).basis
    corpora = find_corpora(config, progress=quiet)
    assert corpora.folders[0].startswith(f"{bucket}/runs/data/text_files-v512-l16-")
    assert check_corpus(config).num_rows == corpora.manifests[0].splits["train"].num_rows
    assert corpora.reader("train").read([0, 1]).shape == (2, 17)


def test_a_source_there_gives_the_same_corpus_as_a_local_one(bucket: str, tmp_path: Path) -> None:
    texts = [f"document {n}: " + " ".join(f"word{(n * 7 + k) % 31}" for k in range(50)) for n in range(80)]
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"text": texts}), tmp_path / "in" / "a.parquet", row_group_size=10)
    upload(tmp_path / "in", f"{bucket}/source")
    config = DataConfig(
        recipe="fineweb_edu", vocab_size=512, seq_len=16, validation_fraction=0.2, source=str(tmp_path / "in")
    )
    recipe = load_recipe("fineweb_edu")
    local = prepare(config, recipe, tmp_path / "local", progress=lambda *update: None)
    remote = prepare(
        replace(config, source=f"{bucket}/source"), recipe, tmp_path / "remote", progress=lambda *update: None
    )
    assert remote.sha256 == local.sha256


@pytest.mark.parametrize("problem", ["credentials", "unknown"])
def test_a_store_whose_conditional_writes_are_out_of_reach_is_written_without(
    bucket: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Credentials in the URI, which only Arrow has; stores that speak an older S3."""

    class Client:
        def put_object(self, **request: Any) -> None:
            if problem == "credentials":
                raise NoCredentialsError
            response = {"ResponseMetadata": {"HTTPStatusCode": 501}, "Error": {"Code": "NotImplemented"}}
            raise ClientError(response, "PutObject")  # type: ignore[arg-type]

    monkeypatch.setattr("regrow.storage.s3_client", lambda *endpoint: Client())
    storage = Storage.at(f"{bucket}/{problem}")
    assert storage.create("file", b"first")
    assert not storage.create("file", b"second")
    assert storage.read_bytes("file") == b"first"


def test_credentials_that_a_file_has_anew_are_taken_once_the_old_ones_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were read as a folder was opened, and by the client of conditional writes once a process."""
    faults, file = Faults(), tmp_path / "credentials"

    def give(key: str) -> None:
        file.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = x\naws_session_token = {key}\n")

    with s3_server(faults=faults) as uri, monkeypatch.context() as patch:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.delenv(name)
        patch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
        give("OLD")
        patch.setattr(storage_module, "OPEN_ANEW_S", math.inf)
        run = Storage.at(uri) / "run"
        assert run.list() == []  # the buckets of other tests are in this process too
        run.retry_s = 120.0  # a client that is made anew may take seconds beside other work
        log = run / "log"
        run.write_bytes("a", b"old")
        assert run.create("COMMIT-1", b"old")
        give("NEW")
        faults.ended = "OLD"
        log.write_bytes("b", b"new")
        assert run.create("COMMIT-2", b"new")
        assert run.read_bytes("log/b") == b"new"
        assert run.list() == ["COMMIT-1", "COMMIT-2", "a", "log"]
        give("NEXT")
        faults.ended = "NEW"
        run.retry_s = 2.0
        with pytest.raises(StorageUnreachable, match="ExpiredToken"):  # it was opened anew not long ago
            run.create("COMMIT-3", b"next")
        run.retry_s = 120.0
        patch.setattr(storage_module, "OPEN_ANEW_S", 0.0)
        assert run.create("COMMIT-3", b"next")
        assert run.read_bytes("a") == b"old"


def test_a_store_is_opened_anew_whatever_is_done_to_the_clock_and_on_another_host_too(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, not for as long as the clock was set back; hosts' steady clocks differ, so none travels."""
    storage, wall = Storage.at(bucket), time.time
    assert isinstance(storage, RemoteStorage)
    storage._open_anew()
    elsewhere = pickle.loads(pickle.dumps(storage))
    assert elsewhere._opened.again_at == -math.inf
    monkeypatch.setattr(storage_module, "OPEN_ANEW_S", 0.0)
    monkeypatch.setattr(time, "time", lambda: wall() - 3600.0)
    before = storage.fs
    storage._open_anew()
    assert storage.fs is not before


def test_a_write_that_breaks_off_leaves_no_cut_file(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrow's stream, closed by an error on its way out, completed what there was: 12 of 18 MB, under the name."""
    storage, writes = Storage.at(f"{bucket}/cut"), list[int]()
    real = storage.fs  # type: ignore[attr-defined]

    class Breaking:
        """A stream whose third write fails for good."""

        def __init__(self, path: str) -> None:
            self.stream = real.open_output_stream(path)
            writes.clear()

        def write(self, data: Any) -> None:
            writes.append(len(data))
            if len(writes) == 3:
                raise MemoryError("no memory left")
            self.stream.write(data)

        def close(self) -> None:
            self.stream.close()

    class Through:
        open_output_stream = Breaking

        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

    monkeypatch.setattr(storage, "fs", Through())
    with pytest.raises(MemoryError):
        storage.write_chunks("large", [bytes(6_000_000)] * 3)
    assert not storage.exists("large")
    with pytest.raises(TypeError):
        storage.write_chunks("large", [bytes(6_000_000), "text"])
    assert not storage.exists("large")
    assert storage.write_chunks("small", [b"a", b"", b"bc", b"d"]) == 4
    assert writes == [4], "what is small is sent once it is whole"
    assert storage.read_bytes("small") == b"abcd"
