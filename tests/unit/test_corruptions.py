"""Damaged files, more than 200: each is noticed and named, and nothing that it says is taken for what was meant.

Damage to bytes that carry nothing (a statistic in a footer, a gzip file's time stamp) may go unnoticed; then the
content must be exactly the true one. Parquet sources are written with page checksums: without them no one can tell a
flipped byte from another text.
"""

import gzip
import itertools
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from regrow.config.schema import DataConfig
from regrow.data.prepare.documents import load_recipe
from regrow.data.prepare.prepare import prepare
from regrow.data.prepare.tokenizer import load_tokenizer, train_tokenizer
from regrow.data.read.inspect import decode_rows
from regrow.data.read.manifest import MANIFEST, Manifest
from regrow.data.read.shards import ShardReader, index_name, read_index, verify
from regrow.errors import DataError
from regrow.storage import Storage
from support.corpus import WordRecipe

CONFIG = DataConfig(vocab_size=512, seq_len=16, validation_fraction=0.2, rows_per_group=8, rows_per_shard=64)
TEXTS = {f"doc-{n}": f"document {n}: " + " ".join(f"word{(n * 7 + k) % 31}" for k in range(40)) for n in range(24)}
SOUND, OTHERS = dict(itertools.islice(TEXTS.items(), 12)), dict(itertools.islice(TEXTS.items(), 12, None))

Rng = np.random.Generator
Damage = Callable[[Rng, bytes], bytes]


def quiet(stage: object, done: float, total: float) -> None:
    pass


# What happens to a file's bytes.


def truncate(rng: Rng, data: bytes) -> bytes:
    return data[: rng.integers(1, len(data))]


def empty(rng: Rng, data: bytes) -> bytes:
    return b""


def garble(rng: Rng, data: bytes) -> bytes:
    return rng.bytes(len(data))


def zero(rng: Rng, data: bytes) -> bytes:
    return bytes(len(data))


def flip_bit(rng: Rng, data: bytes) -> bytes:
    return _changed(data, int(rng.integers(len(data))), 1 << int(rng.integers(8)))


def flip_bit_of_parquet_footer(rng: Rng, data: bytes) -> bytes:
    footer_bytes = int.from_bytes(data[-8:-4], "little") + 8
    return _changed(data, len(data) - 1 - int(rng.integers(footer_bytes)), 1 << int(rng.integers(8)))


def overwrite_some(rng: Rng, data: bytes) -> bytes:
    begin, size = int(rng.integers(len(data))), int(rng.integers(2, 64))
    return (data[:begin] + rng.bytes(size) + data[begin + size :])[: len(data)]


def zero_some(rng: Rng, data: bytes) -> bytes:
    begin, size = int(rng.integers(len(data) // 2)), len(data) // 4
    return data[:begin] + bytes(size) + data[begin + size :]


def append(rng: Rng, data: bytes) -> bytes:
    return data + rng.bytes(int(rng.integers(1, 100)))


def error_of(action: Callable[[], object]) -> str:
    """What it was refused with; empty if it was not."""
    try:
        action()
    except DataError as error:
        return str(error)
    return ""


def _changed(data: bytes, position: int, bits: int) -> bytes:
    return data[:position] + bytes([data[position] ^ bits]) + data[position + 1 :]


# Sources: one sound file and a damaged one.


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_tokenizer(TEXTS.values(), vocab_size=400).save(str(path))
    return str(path)


def write_parquet(path: Path, texts: dict[str, str]) -> None:
    table = pa.table({"text": list(texts.values()), "id": list(texts)})
    pq.write_table(table, path, row_group_size=4, write_page_checksum=True)


def write_json_lines(path: Path, texts: dict[str, str]) -> None:
    data = "".join(json.dumps({"id": name, "text": text}) + "\n" for name, text in texts.items()).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def documents_of(folder: Path) -> dict[str, str]:
    """The documents of a prepared corpus by their ids, but for those that the end of a split cuts."""
    manifest, found = Manifest.load(folder), {}
    tokenizer = load_tokenizer(folder / manifest.tokenizer.file)
    for name, split in manifest.splits.items():
        rows = ShardReader(folder, name).read(np.arange(split.num_rows))
        stream = np.concatenate([rows[:, :-1].ravel(), rows[-1:, -1]])
        for shard in split.shards:
            index = read_index(Storage.at(folder), shard)
            for document, begin in zip(index.ids, index.begins.tolist(), strict=True):
                ends = np.flatnonzero(stream[begin:] == manifest.tokenizer.eot_id)
                if len(ends):
                    found[document] = tokenizer.decode(stream[begin : begin + ends[0]].tolist())
    return found


def check_prepared(source: Path, recipe: str, tokenizer: str, *, certain: bool) -> None:
    """Prepare sound.* and bad.*: bad.* is named and left out whole, or, unless `certain`, was not hurt."""
    config = replace(CONFIG, recipe=recipe, source=str(source), tokenizer=tokenizer)
    out = source.parent / "out"
    manifest = prepare(config, load_recipe(recipe), out, progress=quiet)
    list(verify(out))
    named = {name.partition("[")[0] for name in manifest.damaged}
    assert named <= {next(source.glob("bad.*")).name}
    assert named or not certain
    expected = SOUND if named else TEXTS
    assert manifest.counts["documents"] == len(expected)
    got = documents_of(out)
    assert got.items() <= expected.items()
    assert len(got) >= len(expected) - len(manifest.splits)


SURE_OF_SOURCES: list[Damage] = [truncate, empty, garble, zero, zero_some]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("damage", [*SURE_OF_SOURCES, flip_bit, flip_bit_of_parquet_footer, overwrite_some, append])
def test_a_damaged_parquet_source_is_named_and_left_out(
    damage: Damage, seed: int, tmp_path: Path, tokenizer: str
) -> None:
    source = tmp_path / "in"
    source.mkdir()
    write_parquet(source / "sound.parquet", SOUND)
    write_parquet(source / "bad.parquet", OTHERS)
    path = source / "bad.parquet"
    path.write_bytes(damage(np.random.default_rng(seed), path.read_bytes()))
    check_prepared(source, "fineweb_edu", tokenizer, certain=damage in SURE_OF_SOURCES)


@pytest.mark.parametrize(
    "columns",
    [
        {"text": list(range(12))},
        {"text": [0.5] * 12},
        {"text": [["a", "list"]] * 12},
        {"text": [{"a": "struct"}] * 12},
        {"text": [None] * 12},
        {"text": [b"bytes"] * 12},
        {"content": list(OTHERS.values())},
        {"id": list(OTHERS)},
    ],
)
def test_a_parquet_source_without_a_column_of_text_is_named_and_left_out(
    columns: dict[str, list[object]], tmp_path: Path, tokenizer: str
) -> None:
    source = tmp_path / "in"
    source.mkdir()
    write_parquet(source / "sound.parquet", SOUND)
    pq.write_table(pa.table(columns), source / "bad.parquet")
    check_prepared(source, "fineweb_edu", tokenizer, certain=True)


def test_scores_of_another_type_are_no_scores(tmp_path: Path, tokenizer: str) -> None:
    pq.write_table(pa.table({"text": list(SOUND.values()), "score": ["5"] * 12}), tmp_path / "a.parquet")
    config = replace(CONFIG, recipe="fineweb_edu", source=str(tmp_path), tokenizer=tokenizer, min_score=1.0)
    with pytest.raises(DataError, match=r"no document left.*12 score too low, or none"):
        prepare(config, load_recipe("fineweb_edu"), tmp_path / "out", progress=quiet)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("damage", [truncate, empty, garble, zero, flip_bit, overwrite_some])
def test_a_damaged_gzip_source_is_named_and_left_out(damage: Damage, seed: int, tmp_path: Path, tokenizer: str) -> None:
    source = tmp_path / "in"
    source.mkdir()
    write_json_lines(source / "sound.jsonl", SOUND)
    write_json_lines(source / "bad.jsonl.gz", OTHERS)
    path = source / "bad.jsonl.gz"
    path.write_bytes(damage(np.random.default_rng(seed), path.read_bytes()))
    check_prepared(source, "text_files", tokenizer, certain=damage in SURE_OF_SOURCES)


@pytest.mark.parametrize("damage", [garble, zero])
def test_json_lines_that_are_none_are_named_and_left_out(damage: Damage, tmp_path: Path, tokenizer: str) -> None:
    source = tmp_path / "in"
    source.mkdir()
    write_json_lines(source / "sound.jsonl", SOUND)
    write_json_lines(source / "bad.jsonl", OTHERS)
    path = source / "bad.jsonl"
    path.write_bytes(damage(np.random.default_rng(0), path.read_bytes()))
    check_prepared(source, "text_files", tokenizer, certain=True)


@pytest.mark.parametrize("seed", range(8))
def test_a_torn_line_of_json_is_counted_and_left_out(seed: int, tmp_path: Path, tokenizer: str) -> None:
    source = tmp_path / "in"
    source.mkdir()
    write_json_lines(source / "torn.jsonl", TEXTS)
    data = (source / "torn.jsonl").read_bytes()
    kept = data[: np.random.default_rng(seed).integers(len(data) // 4, len(data))]
    (source / "torn.jsonl").write_bytes(kept)
    config = replace(CONFIG, recipe="text_files", source=str(source), tokenizer=tokenizer)
    manifest = prepare(config, load_recipe("text_files"), tmp_path / "out", progress=quiet)
    whole = [line for line in kept.splitlines() if line.endswith(b'"}')]
    assert manifest.counts["documents"] == len(whole)
    assert manifest.counts.get("skipped: a line that is no JSON", 0) == len(kept.splitlines()) - len(whole)
    assert documents_of(tmp_path / "out").items() <= TEXTS.items()


# Prepared corpora.


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus") / "words"
    prepare(CONFIG, WordRecipe(), folder, progress=quiet)
    return folder


@pytest.fixture(scope="module")
def other_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus") / "others"
    prepare(CONFIG, WordRecipe(seed=1), folder, progress=quiet)
    return folder


def copy_of(corpus: Path, folder: Path) -> Path:
    return Path(shutil.copytree(corpus, folder / "words"))


def shards_of(folder: Path) -> list[str]:
    """Names of the training shards and of the first that scores."""
    splits = Manifest.load(folder).splits
    return [shard.file for shard in (*splits["train"].shards, *splits["validation"].shards[:1])]


def rows_of(folder: Path, split: str) -> np.ndarray:
    reader = ShardReader(folder, split)
    return reader.read(np.arange(reader.num_rows))


def check_rows(folder: Path, truth: Path, split: str) -> None:
    assert np.array_equal(rows_of(folder, split), rows_of(truth, split))


def check_read(folder: Path, truth: Path, victims: set[str], *, certain: bool) -> None:
    """Every split reads as in `truth` or not at all, naming a victim; `verify` does not let it pass."""
    errors = [error_of(partial(check_rows, folder, truth, split)) for split in ("train", "validation")]
    assert any(errors) or not certain
    assert all(any(f"/{name}: " in error for name in victims) for error in errors if error)
    assert any(f"/{name} is " in error_of(lambda: list(verify(folder))) for name in victims)


SURE_OF_SHARDS: list[Damage] = [truncate, empty, garble, zero, zero_some, flip_bit_of_parquet_footer]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("damage", [*SURE_OF_SHARDS, flip_bit, overwrite_some, append])
def test_a_damaged_shard_is_named_and_none_of_its_rows_is_another(
    damage: Damage, seed: int, corpus: Path, tmp_path: Path
) -> None:
    folder, rng = copy_of(corpus, tmp_path), np.random.default_rng(seed)
    victim = str(rng.choice(shards_of(corpus)))
    (folder / victim).write_bytes(damage(rng, (corpus / victim).read_bytes()))
    check_read(folder, corpus, {victim}, certain=damage in SURE_OF_SHARDS)


@pytest.mark.parametrize("pair", list(itertools.combinations(range(5), 2)))
def test_shards_in_each_others_place_are_named(pair: tuple[int, int], corpus: Path, tmp_path: Path) -> None:
    folder = copy_of(corpus, tmp_path)
    a, b = (shards_of(corpus)[k] for k in pair)
    shutil.copyfile(corpus / a, folder / b)
    shutil.copyfile(corpus / b, folder / a)
    check_read(folder, corpus, {a, b}, certain=True)


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("foreign", [True, False])
def test_a_shard_of_another_corpus_or_none_is_named(
    foreign: bool, number: int, corpus: Path, other_corpus: Path, tmp_path: Path
) -> None:
    folder = copy_of(corpus, tmp_path)
    victim = shards_of(corpus)[number]
    (folder / victim).unlink()
    if foreign:
        shutil.copyfile(other_corpus / victim, folder / victim)
    check_read(folder, corpus, {victim}, certain=True)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("damage", [truncate, empty, garble, zero, flip_bit, append])
def test_a_damaged_document_index_is_named(damage: Damage, seed: int, corpus: Path, tmp_path: Path) -> None:
    folder, rng = copy_of(corpus, tmp_path), np.random.default_rng(seed)
    shard = Manifest.load(corpus).splits["train"].shards[seed % 2]
    victim = index_name(shard.file)
    (folder / victim).write_bytes(damage(rng, (corpus / victim).read_bytes()))
    with pytest.raises(DataError, match=victim):
        read_index(Storage.at(folder), shard)
    with pytest.raises(DataError, match=f"{victim} is not what its manifest says"):
        list(verify(folder))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("damage", [truncate, empty, garble, zero, flip_bit, append])
def test_a_damaged_tokenizer_is_named(damage: Damage, seed: int, corpus: Path, tmp_path: Path) -> None:
    folder = copy_of(corpus, tmp_path)
    path = folder / "tokenizer.json"
    path.write_bytes(damage(np.random.default_rng(seed), path.read_bytes()))
    for use in (lambda: list(verify(folder)), lambda: decode_rows(ShardReader(folder, "train"), np.arange(1))):
        with pytest.raises(DataError, match=r"tokenizer\.json is not what its manifest says"):
            use()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("damage", [truncate, empty, garble, zero, flip_bit, overwrite_some, append])
def test_a_damaged_manifest_is_named_or_says_the_same(damage: Damage, seed: int, corpus: Path, tmp_path: Path) -> None:
    path = tmp_path / MANIFEST
    path.write_bytes(damage(np.random.default_rng(seed), (corpus / MANIFEST).read_bytes()))
    error = error_of(lambda: Manifest.load(tmp_path))
    if error:
        assert str(path) in error
    else:  # a blank for another
        assert damage in (flip_bit, overwrite_some)
        assert Manifest.load(tmp_path) == Manifest.load(corpus)
