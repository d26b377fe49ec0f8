"""Corpora from files: what the recipes read, what they leave out and say so, and that nothing is lost on the way."""

import gzip
import io
import itertools
import json
import os
import re
import shutil
import tracemalloc
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.local import LocalFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st

from regrow.config.schema import DataConfig
from regrow.data.prepare import files
from regrow.data.prepare import prepare as prepare_module
from regrow.data.prepare.documents import DamagedPiece, Document, Piece, Skipped, load_recipe
from regrow.data.prepare.files import SourceFiles, cut_files, json_lines, plain_text
from regrow.data.prepare.prepare import prepare
from regrow.data.prepare.spool import Spool
from regrow.data.prepare.tokenizer import END_OF_TEXT, load_tokenizer, train_tokenizer
from regrow.data.read.manifest import Manifest
from regrow.data.read.shards import ShardReader, verify
from regrow.errors import DataError, UnseenError
from regrow.progress import Task
from regrow.storage import Storage

SHARED = Path(__file__).parents[3] / "shared"
CONFIG = DataConfig(
    recipe="fineweb_edu", vocab_size=512, seq_len=16, validation_fraction=0.2, rows_per_group=8, rows_per_shard=64
)


def quiet(stage: str, done: float, total: float) -> None:
    pass


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_tokenizer(TEXTS, vocab_size=400).save(str(path))
    return str(path)


TEXTS = [f"document {n}: " + " ".join(f"word{(n * 7 + k) % 31}" for k in range(40 + n % 9)) for n in range(90)]


def write_parquet(path: Path, texts: list[str | None], **columns: list[object]) -> None:
    pq.write_table(pa.table({"text": pa.array(texts, pa.string()), **columns}), path, row_group_size=10)


def test_a_name_that_is_no_utf_8_is_passed_over_or_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.bin")).touch()
    assert [size for _, size in SourceFiles(str(tmp_path)).list()] == [4]
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.txt")).touch()
    with pytest.raises(DataError, match=r"caf\\xe9\.txt is no UTF-8; rename it"):
        SourceFiles(str(tmp_path)).list()


def names_in(source: Path | str) -> list[str]:
    files = SourceFiles(str(source))
    names = [files.name(path) for path, _ in files.list()]
    assert [files.read(name) for name in names] == [Path(path).read_bytes() for path, _ in files.list()]
    return names


def test_a_file_that_links_name_too_is_there_once(tmp_path: Path) -> None:
    """Before, it was there by each name, and links in a circle made of it as many as the system's limit allows."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "d.txt").write_text("text")
    (tmp_path / "latest").symlink_to("a")
    assert names_in(tmp_path) == ["a/d.txt"]
    (tmp_path / "a" / "up").symlink_to("..")
    (tmp_path / "a" / "e.txt").symlink_to("d.txt")
    assert names_in(tmp_path) == ["a/d.txt"]
    assert names_in(f"{tmp_path}/lat*/d.txt") == ["latest/d.txt"], "though a comes first"
    assert names_in(f"{tmp_path}/*/d.txt") == ["a/d.txt"]
    assert names_in(tmp_path / "latest") == ["d.txt"]


def test_linked_folders_and_files_elsewhere_are_read_as_in_the_hubs_cache(tmp_path: Path) -> None:
    for name in ("blobs", "more", "source/snapshots/1", "source/snapshots/2"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("blobs/123", "blobs/456", "more/c.txt"):
        (tmp_path / name).write_text(name)
    for revision, names in {"1": ["a.txt", "b.txt"], "2": ["a.txt"]}.items():
        for name, blob in zip(names, ["123", "456"], strict=False):
            (tmp_path / "source" / "snapshots" / revision / name).symlink_to(tmp_path / "blobs" / blob)
    (tmp_path / "source" / "more").symlink_to(tmp_path / "more")
    assert names_in(tmp_path / "source") == ["more/c.txt", "snapshots/1/a.txt", "snapshots/1/b.txt"]
    assert names_in(tmp_path / "source" / "snapshots" / "2") == ["a.txt"]


def test_a_folder_may_have_a_file_of_its_own_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, such a file was taken for the folder, and could not be opened."""
    monkeypatch.setattr(files, "FIRST_WAIT_S", 0.001)
    (tmp_path / "x.txt" / "y" / "x.txt" / "y").mkdir(parents=True)
    (tmp_path / "x.txt" / "x.txt").mkdir()
    for name in ("y/x.txt/y/x.txt", "x.txt/x.txt", "y/a.txt"):
        (tmp_path / "x.txt" / name).write_text(name)
    assert names_in(tmp_path / "x.txt") == ["x.txt/x.txt", "y/a.txt", "y/x.txt/y/x.txt"]
    assert names_in(tmp_path / "x.txt" / "x.txt") == ["x.txt"]
    assert names_in(tmp_path / "x.txt" / "x.txt" / "x.txt") == ["x.txt"]
    assert names_in(tmp_path / "x.txt" / "y" / "x.txt") == ["y/x.txt"]


@pytest.mark.parametrize("name", ["b.txt", "2024"])
def test_a_link_to_nothing_is_named(name: str, tmp_path: Path) -> None:
    """Before, what it should lead to was missing in silence, as all of a folder that is not mounted."""
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / name).symlink_to("/of/another/host")
    for passed_over in (".#a.txt", "image.png", "circle.png"):
        (tmp_path / passed_over).symlink_to("circle.png")
    with pytest.raises(UnseenError, match=rf"/{name} is a link to /of/another/host, which is not there; mend or"):
        SourceFiles(str(tmp_path)).list()
    assert names_in(f"{tmp_path}/a*.txt") == ["a.txt"]


def texts_of(folder: Path) -> list[str]:
    """The documents of a prepared corpus in the order of its stream, decoded; those cut off at the end are left out."""
    manifest, texts = Manifest.load(folder), []
    tokenizer = load_tokenizer(folder / manifest.tokenizer.file)
    for split in manifest.splits:
        reader = ShardReader(folder, split)
        rows = reader.read(np.arange(reader.num_rows))
        stream = np.concatenate([rows[:, :-1].ravel(), rows[-1:, -1]])
        assert stream[0] == manifest.tokenizer.eot_id
        ends = np.flatnonzero(stream == manifest.tokenizer.eot_id)
        documents = [stream[a + 1 : b].tolist() for a, b in itertools.pairwise(ends)]
        texts += tokenizer.decode_batch(documents, skip_special_tokens=False)
    return texts


def prepared(source: Path | str, tokenizer: str, folder: Path, config: DataConfig = CONFIG) -> Manifest:
    config = replace(config, source=str(source), tokenizer=tokenizer)
    manifest = prepare(config, load_recipe(config.recipe), folder, progress=quiet)
    list(verify(folder))
    return manifest


def test_every_document_of_every_file_is_in_the_shards(
    tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "PIECE_BYTES", 1500)  # some pieces a file
    (tmp_path / "in" / "deeper").mkdir(parents=True)
    write_parquet(tmp_path / "in" / "a.parquet", list(TEXTS[:35]))
    write_parquet(tmp_path / "in" / "deeper" / "b.parquet", list(TEXTS[35:]), date=["2024"] * 55)
    assert len(cut_files(SourceFiles(str(tmp_path / "in")))) > 4
    manifest = prepared(tmp_path / "in", tokenizer, tmp_path / "out")
    assert manifest.counts["documents"] == 90
    assert manifest.damaged == {}
    got = texts_of(tmp_path / "out")
    assert set(got) <= set(TEXTS)
    assert len(set(got)) == len(got) >= 88  # the last document of a split may be cut
    places = np.array([TEXTS.index(text) for text in got])
    assert np.mean(np.abs(np.diff(places)) == 1) < 0.2  # neighbours of the source are neighbours no more


def test_gzip_and_json_lines_and_text_files_are_read_and_what_is_wrong_in_them_is_counted(
    tmp_path: Path, tokenizer: str
) -> None:
    source = tmp_path / "in"
    source.mkdir()
    lines = [json.dumps({"text": text, "id": f"id-{n}\ud800"}) for n, text in enumerate(TEXTS[:40])]
    lines += ["{broken", '["a list"]', '{"words": "no text"}']
    lines += ['{"text": null}', '{"text": "  "}', '{"text": "\\ud800"}']
    (source / "a.jsonl").write_text("\n".join(lines))
    more = "\n".join(json.dumps({"text": text}) for text in TEXTS[40:60])
    (source / "b.jsonl.gz").write_bytes(gzip.compress(more.encode()))
    (source / "c.txt").write_text(TEXTS[60])
    (source / "d.txt").write_bytes(b"\xff\xfe\xfa not UTF-8")
    (source / "e.txt").write_text("x" * 5000)
    (source / "f.jsonl.gz").write_bytes(gzip.compress(b"some text" * 99)[:-20])
    (source / "g.png").write_bytes(b"not text at all")
    config = replace(CONFIG, recipe="text_files", max_document_chars=4000)
    manifest = prepared(source, tokenizer, tmp_path / "out", config)
    assert manifest.counts["documents"] == 61
    skipped = {key.removeprefix("skipped: "): n for key, n in manifest.counts.items() if key.startswith("skipped")}
    assert skipped == {
        "a line that is no JSON": 1,
        "a line that is no JSON object": 1,
        "a JSON object without text": 1,
        files.EMPTY: 2,
        files.INVALID: 2,
        files.TOO_LONG: 1,
    }
    assert list(manifest.damaged) == ["f.jsonl.gz"]
    assert set(texts_of(tmp_path / "out")) <= set(TEXTS)


@settings(max_examples=60)
@given(
    st.lists(st.text(st.characters(codec="utf-8"), max_size=12), max_size=12),
    st.integers(1, 40),
    st.integers(1, 40),
    st.booleans(),
)
def test_json_lines_are_the_same_however_the_file_is_cut_and_read(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], size: int, read_ahead: int, ends: bool
) -> None:
    folder = tmp_path_factory.mktemp("jsonl")
    data = "\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in texts).encode() + b"\n" * ends
    (folder / "a.jsonl").write_bytes(data)
    source = SourceFiles(str(folder))
    bounds = [*range(0, len(data), size), len(data)]
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(data[:size]) + gzip.compress(data[size:]))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(files, "READ_AHEAD_BYTES", read_ahead)
        got = [value for a, b in itertools.pairwise(bounds) for value in json_lines(source, Piece("a.jsonl", a, b))]
        unpacked = list(json_lines(source, Piece("b.jsonl.gz")))
    assert got == unpacked == [{"text": text} for text in texts]


def test_a_gzip_is_not_held_whole(tmp_path: Path) -> None:
    """Before, it was held twice over, packed and unpacked, for its first document too."""
    line = json.dumps({"text": "one two three " * 1000}).encode() + b"\n"
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(line * 3000, 1))  # 42 MB
    source, piece = SourceFiles(str(tmp_path)), Piece("a.jsonl.gz")
    tracemalloc.start()
    try:
        assert sum(1 for _ in json_lines(source, piece)) == 3000
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2 * files.READ_AHEAD_BYTES


def test_the_first_documents_of_a_gzip_are_read_without_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a sample before a run does; Python 3.13 decompresses 128 KiB at a time."""
    monkeypatch.setattr(files, "FIRST_WAIT_S", 0.001)
    monkeypatch.setattr(files, "READ_AHEAD_BYTES", 1000)
    rng = np.random.default_rng(0)
    texts = [rng.bytes(300).hex() for _ in range(1000)]
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress("\n".join(json.dumps({"text": t}) for t in texts).encode()))
    Hiccups.failing = staticmethod(lambda name, position: position > 200_000)
    found = json_lines(SourceFiles(f"hiccups://{tmp_path}"), Piece("a.jsonl.gz"))
    assert [value["text"] for value in itertools.islice(found, 10)] == texts[:10]
    with pytest.raises(OSError, match="did not answer in time"):
        list(found)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.txt.gz"])
@pytest.mark.parametrize("damage", ["cut short", "empty", "of another kind", "followed by another kind", "flipped"])
def test_a_gzip_that_is_damaged_anywhere_is_named(name: str, damage: str, tmp_path: Path) -> None:
    data = gzip.compress(b'{"text": "words"}\n' * 50)
    flipped = data[:-6] + bytes([data[-6] ^ 1]) + data[-5:]  # its checksum
    damaged = {"cut short": data[:-9], "empty": b"", "of another kind": b"PK" + data, "flipped": flipped}
    (tmp_path / name).write_bytes(damaged.get(damage, data + b"PK"))
    source = SourceFiles(str(tmp_path))
    with pytest.raises(DamagedPiece, match=r"^not gzip, or cut short: "):
        list(json_lines(source, Piece(name))) if "jsonl" in name else plain_text(source, Piece(name))


def test_filters_leave_out_what_fails_them_or_has_no_value(tmp_path: Path, tokenizer: str) -> None:
    (tmp_path / "in").mkdir()
    scores = [None if n % 10 == 0 else n % 5 + 0.5 for n in range(90)]
    languages = ["de" if n % 6 == 0 else "en" for n in range(90)]
    write_parquet(tmp_path / "in" / "a.parquet", list(TEXTS), score=scores, language=languages)
    config = replace(CONFIG, min_score=2.0, language="en")
    manifest = prepared(tmp_path / "in", tokenizer, tmp_path / "out", config)
    kept = [n for n in range(90) if n % 10 and n % 5 + 0.5 >= 2.0 and n % 6]
    assert manifest.counts["documents"] == len(kept)
    assert set(texts_of(tmp_path / "out")) <= {TEXTS[n] for n in kept}
    assert "score below 2.0, or none" in manifest.filters


def test_filters_are_the_same_for_json_lines(tmp_path: Path, tokenizer: str) -> None:
    (tmp_path / "in").mkdir()
    fields = [
        {"score": n % 5 + 0.5, "language": "de" if n % 6 == 0 else "en", "language_score": 0.9} for n in range(90)
    ]
    fields[1].pop("score")
    fields[3]["language_score"] = 0.2
    lines = [json.dumps({"text": text} | of) for text, of in zip(TEXTS, fields, strict=True)]
    (tmp_path / "in" / "a.jsonl").write_text("\n".join(lines))
    (tmp_path / "in" / "b.txt").write_text("a text has no score")
    config = replace(CONFIG, recipe="text_files", min_score=1.0, language="en", min_language_score=0.5)
    manifest = prepared(tmp_path / "in", tokenizer, tmp_path / "out", config)
    kept = [n for n in range(90) if n % 5 and n % 6 and n not in (1, 3)]
    assert manifest.counts["documents"] == len(kept)
    assert set(texts_of(tmp_path / "out")) <= {TEXTS[n] for n in kept}
    skipped = {key.removeprefix("skipped: "): n for key, n in manifest.counts.items() if key.startswith("skipped")}
    assert skipped == {
        "score too low, or none": 18 + 1 + 1,
        "another language, or none": len([n for n in range(90) if n % 5 and not n % 6]),
        "language_score too low, or none": 1,
    }
    assert manifest.filters == (
        "score below 1.0, or none",
        "language other than en, or none",
        "language_score below 0.5, or none",
        "documents over 20000000 characters",
    )


@pytest.mark.parametrize("setting", [{"min_score": 3.0}, {"language": "en"}, {"min_language_score": 0.5}])
def test_a_filter_of_a_field_that_a_recipe_does_not_have_is_refused(setting: dict[str, Any]) -> None:
    config = DataConfig(**setting)
    with pytest.raises(
        DataError, match=rf"data\.{next(iter(setting))} is set, and documents of python_docs have no such field"
    ):
        load_recipe("python_docs").describe(config)


def test_long_documents_of_the_standard_library_are_left_out() -> None:
    recipe, few = load_recipe("python_docs"), DataConfig(max_document_chars=5_000)
    assert "documents over 5000 characters" in recipe.describe(few)["filters"]
    found = list(recipe.documents(few, *recipe.pieces(few)))
    kept = [document for document in found if isinstance(document, Document)]
    assert kept
    assert max(len(document.text) for document in kept) <= 5_000
    assert Skipped(files.TOO_LONG) in found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "dolma2"])
def test_fineweb_edu_decodes_to_its_source_document_by_document(name: str, tmp_path: Path) -> None:
    path = SHARED / "tokenizers" / name / "tokenizer.json"
    if not path.is_file():
        pytest.skip(f"needs {path}, a tokenizer that is not part of the repository")
    source = SHARED / "corpus" / "fineweb_200docs.parquet"
    config = replace(CONFIG, vocab_size=100_352, seq_len=64, validation_fraction=0.05, rows_per_shard=512)
    manifest = prepared(source, str(path), tmp_path / "out", config)
    texts = pq.read_table(source, columns=["text"])["text"].to_pylist()
    got = texts_of(tmp_path / "out")
    assert set(got) <= set(texts)
    assert len(got) >= len(texts) - len(manifest.splits)
    bpe = load_tokenizer(path)
    bpe.encode_special_tokens = True
    straight = sum(len(bpe.encode(text, add_special_tokens=False).ids) + 1 for text in texts)
    assert manifest.num_tokens == straight + len(manifest.splits)  # and an end-of-text in front of each split


def test_a_remote_source_gives_the_same_corpus_as_a_local_one(tmp_path: Path, tokenizer: str) -> None:
    (tmp_path / "in" / "deeper").mkdir(parents=True)
    write_parquet(tmp_path / "in" / "a.parquet", list(TEXTS[:50]))
    write_parquet(tmp_path / "in" / "deeper" / "b.parquet", list(TEXTS[50:]))
    remote = f"memory://{tmp_path.name}"
    for path in (tmp_path / "in").rglob("*.parquet"):
        Storage.at(remote).write_bytes(str(path.relative_to(tmp_path / "in")), path.read_bytes())
    local = prepared(tmp_path / "in", tokenizer, tmp_path / "local")
    assert prepared(remote, tokenizer, tmp_path / "remote") == local
    only_b = replace(CONFIG, source=f"{remote}/*/b.parquet", tokenizer=tokenizer)
    assert prepare(only_b, load_recipe("fineweb_edu"), tmp_path / "b", progress=quiet).counts["documents"] == 40


def test_a_source_with_nothing_left_is_an_error_that_says_why(tmp_path: Path, tokenizer: str) -> None:
    (tmp_path / "in").mkdir()
    write_parquet(tmp_path / "in" / "a.parquet", [None, "", "  "])
    (tmp_path / "in" / "b.parquet").write_bytes(b"PAR1 torn")
    with pytest.raises(DataError, match=r"no document left.*b\.parquet.*3 empty"):
        prepared(tmp_path / "in", tokenizer, tmp_path / "out")
    with pytest.raises(DataError, match=r"there is no .*/nowhere"):
        prepared(tmp_path / "nowhere", tokenizer, tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"no file of a kind"):
        prepared(tmp_path / "empty", tokenizer, tmp_path / "out")
    with pytest.raises(DataError, match=r"data=fineweb_edu"):
        prepared(tmp_path / "in", tokenizer, tmp_path / "out", replace(CONFIG, recipe="text_files"))
    with pytest.raises(DataError, match=r"data\.source is not set"):
        prepare(CONFIG, load_recipe("fineweb_edu"), tmp_path / "out", progress=quiet)


def test_a_tokenizer_that_does_not_fit_is_refused(tmp_path: Path, tokenizer: str) -> None:
    (tmp_path / "in").mkdir()
    write_parquet(tmp_path / "in" / "a.parquet", list(TEXTS))
    with pytest.raises(DataError, match=r"348 ids, data\.vocab_size=300; set data\.vocab_size=384"):
        prepared(tmp_path / "in", tokenizer, tmp_path / "out", replace(CONFIG, vocab_size=300))
    with pytest.raises(DataError, match=r"has no </nothing>; name its"):
        prepared(tmp_path / "in", tokenizer, tmp_path / "out", replace(CONFIG, end_of_text="</nothing>"))
    with pytest.raises(DataError, match=r"data\.tokenizer=.*missing\.json: there is no .*missing\.json; give the path"):
        prepared(tmp_path / "in", str(tmp_path / "missing.json"), tmp_path / "out")


DAMAGES = ["truncated", "emptied", "no parquet", "other type", "missing column", "flipped footer", "flipped magic"]


@pytest.mark.parametrize("seed", range(28))
def test_a_damaged_source_file_is_named_and_nothing_of_it_is_used(seed: int, tmp_path: Path, tokenizer: str) -> None:
    rng, damage = np.random.default_rng(seed), DAMAGES[seed % len(DAMAGES)]
    (tmp_path / "in").mkdir()
    write_parquet(tmp_path / "in" / "good.parquet", list(TEXTS[:60]))
    victim = tmp_path / "in" / "bad.parquet"
    write_parquet(victim, list(TEXTS[60:]))
    data = bytearray(victim.read_bytes())
    if damage == "truncated":
        victim.write_bytes(data[: rng.integers(1, len(data))])
    elif damage == "emptied":
        victim.write_bytes(b"")
    elif damage == "no parquet":
        victim.write_bytes(rng.bytes(len(data)))
    elif damage == "other type":
        pq.write_table(pa.table({"text": [1, 2, 3]}), victim)
    elif damage == "missing column":
        pq.write_table(pa.table({"content": TEXTS[60:]}), victim)
    elif damage == "flipped footer":
        data[-8:-4] = rng.bytes(4)  # its length
        victim.write_bytes(data)
    else:
        data[-int(rng.integers(1, 5))] ^= 1 << int(rng.integers(0, 8))
        victim.write_bytes(data)
    manifest = prepared(tmp_path / "in", tokenizer, tmp_path / "out")
    assert [name.partition("[")[0] for name in manifest.damaged] == ["bad.parquet"]
    assert set(texts_of(tmp_path / "out")) <= set(TEXTS[:60])
    assert manifest.counts["documents"] == 60


def test_a_damaged_source_file_is_named_where_the_tokenizer_is_trained_here_too(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for number, text in enumerate(TEXTS):
        (tmp_path / "in" / f"{number}.txt").write_text(text)
    (tmp_path / "in" / "package.json").write_text('{\n "name": 1\n}\n')
    config = replace(CONFIG, recipe="text_files", source=str(tmp_path / "in"))
    manifest = prepare(config, load_recipe("text_files"), tmp_path / "out", progress=quiet)
    assert [name.partition("[")[0] for name in manifest.damaged] == ["package.json"]
    assert manifest.counts["documents"] == len(TEXTS)


def test_storage_that_fails_for_a_while_is_asked_again_and_then_said_so(
    tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "FIRST_WAIT_S", 0.001)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("\n".join(TEXTS))
    calls = 0

    def flaky(failures: int) -> str:
        nonlocal calls
        calls += 1
        if calls <= failures:
            raise OSError("connection reset")
        return "bytes"

    assert files.patiently(lambda: flaky(3)) == "bytes"
    calls = 0
    with pytest.raises(OSError, match="connection reset"):
        files.patiently(lambda: flaky(99))
    assert calls == files.RETRIES + 1


class Hiccups(LocalFileSystem):
    """`failing(file, position)` says whether a read there fails now."""

    protocol = "hiccups"
    failing: ClassVar[Callable[[str, int], bool]]

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(path.removeprefix("hiccups://") if isinstance(path, str) else path)

    def _open(self, path: str, *args: Any, **options: Any) -> Any:
        class Opened(io.BytesIO):
            def read(self, size: int | None = -1) -> bytes:
                if size and Hiccups.failing(Path(path).name, self.tell()):
                    raise TimeoutError("the store did not answer in time")
                return super().read(size)

        return Opened(Path(path).read_bytes())


fsspec.register_implementation("hiccups", Hiccups)


def test_reads_that_fail_for_a_while_cost_no_document(
    tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "FIRST_WAIT_S", 0.001)
    (tmp_path / "in").mkdir()
    write_parquet(tmp_path / "in" / "a.parquet", list(TEXTS))
    tries: Counter[tuple[str, int]] = Counter()

    def failing(name: str, position: int) -> bool:
        tries[name, position] += 1
        return tries[name, position] <= 3

    Hiccups.failing = staticmethod(failing)
    manifest = prepared(f"hiccups://{tmp_path}/in", tokenizer, tmp_path / "out")
    assert (manifest.counts["documents"], manifest.damaged) == (90, {})
    assert len(tries) > 9, "the footer, and a row group of each ten documents"


@pytest.mark.parametrize("lost", ["a footer", "a row group"])
def test_storage_that_goes_on_failing_stops_a_preparation_which_then_goes_on(
    lost: str, tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "FIRST_WAIT_S", 0.001)
    monkeypatch.setattr(files, "PIECE_BYTES", 1500)  # some pieces a file
    (tmp_path / "in").mkdir()
    for name, texts in {"a": TEXTS[:45], "b": TEXTS[45:]}.items():
        write_parquet(tmp_path / "in" / f"{name}.parquet", list(texts))
    source, written = f"hiccups://{tmp_path}/in", []
    write = Spool.write
    monkeypatch.setattr(
        Spool, "write", lambda self, index, *rest, **key: written.append(index) or write(self, index, *rest, **key)
    )
    Hiccups.failing = staticmethod(lambda name, position: False)
    whole = prepared(source, tokenizer, tmp_path / "whole")
    pieces, last = len(written), written[-1]
    written.clear()
    piece = cut_files(SourceFiles(source))[last]
    at = pq.read_metadata(tmp_path / "in" / piece.file).row_group(piece.start).column(0).dictionary_page_offset
    Hiccups.failing = staticmethod(lambda name, position: (name, position) == (piece.file, at))
    with pytest.raises(DataError, match=r"stopped: .*did not answer in time; run the same command again"):
        prepared(source, tokenizer, tmp_path / "out")
    if lost == "a footer":
        Hiccups.failing = staticmethod(lambda name, position: name == piece.file)
        with pytest.raises(DataError, match=r"stopped: .*did not answer in time; run the same command again"):
            prepared(source, tokenizer, tmp_path / "out")
    assert len(written) == pieces
    Hiccups.failing = staticmethod(lambda name, position: False)
    assert prepared(source, tokenizer, tmp_path / "out") == whole
    assert written[pieces:] == [last], "no other piece is tokenized again"


def test_only_an_asterisk_is_special_in_the_folder_of_a_glob(tmp_path: Path) -> None:
    folder = tmp_path / "run [v1] why?"
    (folder / "deeper").mkdir(parents=True)
    for name in ("a.txt", "deeper/b.txt", "c.md"):
        (folder / name).write_text("text")
    source = SourceFiles(f"{folder}/*.txt")
    assert [source.name(path) for path, _ in source.list()] == ["a.txt", "deeper/b.txt"]
    assert source.read("a.txt") == b"text"


def test_a_web_server_that_cuts_its_answers_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """aiohttp's ClientPayloadError is no OSError."""
    monkeypatch.setattr(files, "FIRST_WAIT_S", 0.001)
    body, cuts = b"some text\n" * 2000, [2]

    class Server(BaseHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            pass

        def do_HEAD(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Accept-Ranges", "bytes")
            self.end_headers()

        def do_GET(self) -> None:
            begin, end = map(int, self.headers.get("Range", f"bytes=0-{len(body) - 1}").split("=")[1].split("-"))
            part = body[begin : end + 1]
            self.send_response(206)
            self.send_header("Content-Length", str(len(part)))
            self.send_header("Content-Range", f"bytes {begin}-{end}/{len(body)}")
            self.end_headers()
            cuts[0] -= 1
            self.wfile.write(part[: len(part) // 2] if cuts[0] >= 0 else part)

    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        source = SourceFiles(f"http://127.0.0.1:{server.server_port}/a.txt")
        assert source.read("a.txt") == body
        assert cuts[0] < 0
        server.shutdown()


def rewrite(path: Path) -> None:
    path.write_text(path.read_text().replace("document", "other document"))


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize(
    ("change", "suffix", "at"),
    [
        (truncate, "jsonl", "the beginning"),
        (truncate, "jsonl.gz", "a piece"),
        (truncate, "parquet", "the end"),
        (rewrite, "jsonl", "a piece"),
        (rewrite, "txt", "the beginning"),
        (Path.unlink, "jsonl", "the end"),
    ],
)
def test_a_source_that_changes_while_it_is_tokenized_is_refused_and_none_of_it_is_kept(
    change: Callable[[Path], None],
    suffix: str,
    at: str,
    tmp_path: Path,
    tokenizer: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before, a corpus of both was kept under the name of the first."""
    monkeypatch.setattr(files, "PIECE_BYTES", 1500)
    source = tmp_path / "in"
    source.mkdir()
    for name, texts in {"a": TEXTS[:45], "b": TEXTS[45:]}.items():
        path = source / f"{name}.{suffix}"
        data = "\n".join(json.dumps({"text": text}) for text in texts).encode()
        if suffix == "parquet":
            write_parquet(path, list(texts))
        else:
            path.write_bytes(gzip.compress(data) if suffix.endswith("gz") else data)
    whole = {path: path.read_bytes() for path in source.iterdir()}
    recipe = load_recipe("fineweb_edu" if suffix == "parquet" else "text_files")
    config = replace(CONFIG, recipe=recipe.name, source=str(source), tokenizer=tokenizer, validation_fraction=0.5)
    expected = prepare(config, recipe, tmp_path / "expected", progress=quiet)

    def progress(task: Task, done: float, total: float) -> None:
        reached = {"the beginning": done == 0, "a piece": 0 < done < total, "the end": done == total}[at]
        if task.name == "tokenizing" and reached and {path: path.read_bytes() for path in source.iterdir()} == whole:
            for path in whole:
                change(path)

    with pytest.raises(DataError) as refused:
        prepare(config, recipe, tmp_path / "out", progress=progress)
    if change is not Path.unlink:  # of which the listing says that there is nothing
        assert re.search(
            rf"{source} changed while it was prepared: [ab]\.{suffix} has .* bytes, and had .*; run the same",
            str(refused.value),
        )
    assert not (tmp_path / "out").exists()
    for path, data in whole.items():
        path.write_bytes(data)
    assert prepare(config, recipe, tmp_path / "out", progress=quiet) == expected
    assert read_files(tmp_path / "out") == read_files(tmp_path / "expected")
    assert not list(tmp_path.glob(".*.building"))


def test_a_log_that_grows_all_the_time_is_prepared_as_it_was_when_it_was_looked_at(
    tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "PIECE_BYTES", 1500)
    source, lines = tmp_path / "in", [json.dumps({"text": text}) + "\n" for text in TEXTS]
    source.mkdir()
    (source / "a.jsonl").write_text("".join(lines))
    config = replace(CONFIG, recipe="text_files", source=str(source), tokenizer=tokenizer)
    recipe = load_recipe("text_files")
    expected = prepare(config, recipe, tmp_path / "expected", progress=quiet)

    def progress(task: Task, done: float, total: float) -> None:
        with (source / "a.jsonl").open("a") as log:
            log.write(lines[int(done) % len(lines)])
        (source / f"{done:.0f}.txt").write_text("another day")

    assert prepare(config, recipe, tmp_path / "out", progress=progress) == expected
    assert read_files(tmp_path / "out") == read_files(tmp_path / "expected")

    with pytest.raises(
        DataError, match=r"changed .*: 0\.txt has 17 bytes, and had 11; .* or name a copy where it is writ"
    ):
        prepare(
            config,
            recipe,
            tmp_path / "again",
            progress=lambda *update: (source / "0.txt").write_text("a text that grows"),
        )


def test_a_source_that_changes_before_its_preparation_begins_is_refused(tmp_path: Path, tokenizer: str) -> None:
    """As while another preparation is waited for: the folder has its name already."""
    (tmp_path / "in").mkdir()
    write_parquet(tmp_path / "in" / "a.parquet", list(TEXTS))
    shutil.copy(tokenizer, tmp_path / "tokenizer.json")
    config = replace(CONFIG, source=str(tmp_path / "in"), tokenizer=str(tmp_path / "tokenizer.json"))
    recipe = load_recipe("fineweb_edu")
    fixed = prepare_module.fixed_by(config, recipe)
    shutil.copy(tmp_path / "in" / "a.parquet", tmp_path / "in" / "b.parquet")
    with pytest.raises(DataError, match=r"changed while it was prepared: b\.parquet came; run the same"):
        prepare(config, recipe, tmp_path / "out", progress=quiet, fixed=fixed)
    (tmp_path / "in" / "b.parquet").unlink()
    train_tokenizer(TEXTS[:5], vocab_size=400).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(DataError, match=r"data\.tokenizer=.* changed since it was looked at; run the same"):
        prepare(config, recipe, tmp_path / "out", progress=quiet, fixed=fixed)
    shutil.copy(tokenizer, tmp_path / "tokenizer.json")
    assert prepare(config, recipe, tmp_path / "out", progress=quiet, fixed=fixed).counts["documents"] == len(TEXTS)


def test_a_range_behind_the_end_of_a_file_is_no_empty_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": 1}\n')
    source = SourceFiles(str(tmp_path))
    assert source.read("a.jsonl", 8, 12) == b": 1}\n"[-4:]
    for start, stop in ((0, 13), (13, None), (13, 14)):
        with pytest.raises(DataError, match=r"a\.jsonl has 12 bytes, and had at least 1[34]"):
            source.read("a.jsonl", start, stop)
        with pytest.raises(DataError, match=r"a\.jsonl has 12 bytes, and had at least 1[34]"):
            list(json_lines(source, Piece("a.jsonl", start, stop)))


def read_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_document_that_is_left_out_has_a_reason() -> None:
    assert files.checked("a", "text", max_chars=4) == Document("a", "text")
    assert files.checked("a", "texts", max_chars=4) == Skipped(files.TOO_LONG)
    assert files.checked("a", 5, max_chars=4) == Skipped(files.EMPTY)
    assert files.checked("a", b"\xff", max_chars=4) == Skipped(files.INVALID)
    assert END_OF_TEXT not in TEXTS[0]
