"""Storage, sources and corpora in S3, spoken to through pyarrow.fs at a server on this machine."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from regrow.config.schema import DataConfig
from regrow.data.corpora import Corpora
from regrow.data.documents import load_recipe
from regrow.data.prepare import prepare
from regrow.errors import DataError
from regrow.storage import Storage
from regrow.testing.corpus import write_rows
from regrow.testing.s3 import s3_server


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
