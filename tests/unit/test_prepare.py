"""Documents -> tokenizer -> shards: what a prepared corpus holds, and what can go wrong on the way."""

import multiprocessing
import pickle
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from regrow.config.schema import DataConfig, OptimConfig, PretrainConfig
from regrow.data import shards
from regrow.data.batch import order_of
from regrow.data.documents import Document, clean_text, content_hash, load_recipe
from regrow.data.manifest import MANIFEST, Manifest
from regrow.data.prepare import cache_name, collect, cut_rows, find_or_prepare, prepare, split_documents
from regrow.data.shards import ShardReader, verify
from regrow.data.tokenizer import END_OF_TEXT, encode, load_tokenizer
from regrow.errors import DataError
from regrow.testing.corpus import WordRecipe, write_rows

CONFIG = DataConfig(vocab_size=512, seq_len=16, validation_fraction=0.2, rows_per_group=8, rows_per_shard=64)


def quiet(stage: str, done: float, total: float) -> None:
    pass


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus") / "words"
    prepare(CONFIG, WordRecipe(), folder, progress=quiet)
    return folder


def read_all(folder: Path, split: str) -> np.ndarray:
    reader = ShardReader(folder, split)
    return reader.read(np.arange(reader.num_rows))


@pytest.mark.parametrize("split", ["train", "validation"])
def test_rows_are_the_documents_between_end_of_texts_with_only_the_tail_dropped(corpus: Path, split: str) -> None:
    manifest, rows = Manifest.load(corpus), read_all(corpus, split)
    tokenizer, eot_id = load_tokenizer(corpus / manifest.tokenizer.file), manifest.tokenizer.eot_id
    documents, _ = collect(WordRecipe().documents())
    texts = [document.text for document in split_documents(documents, CONFIG.validation_fraction)[split]]
    stream = np.concatenate([[eot_id], *(part for ids in encode(tokenizer, texts) for part in (ids, [eot_id]))])
    assert np.array_equal(rows[:-1, -1], rows[1:, 0])  # rows overlap by one token
    targets = rows[:, 1:].ravel()
    assert np.array_equal(targets, stream[1 : 1 + len(targets)])  # every token but the first is a target once
    dropped = len(stream) - 1 - len(targets)
    assert dropped == manifest.counts[f"{split}_tokens_dropped"] < CONFIG.seq_len
    assert len(stream) == manifest.counts[f"{split}_tokens"]
    assert tokenizer.decode(stream[1:].tolist()) == "".join(texts)  # end-of-text is special: decoding leaves it out


def test_manifest_says_what_was_prepared_and_survives_the_round_trip(corpus: Path) -> None:
    manifest = Manifest.load(corpus)
    assert (manifest.recipe, manifest.seq_len, manifest.vocab_size) == (CONFIG.recipe, 16, 512)
    assert manifest.source == {"corpus": "words", "num_documents": 60, "seed": 0}
    assert manifest.filters[0] == "none"
    assert manifest.tokenizer.vocab_size == 512
    assert manifest.counts["documents"] == 60
    assert manifest.num_tokens == manifest.counts["train_tokens"] + manifest.counts["validation_tokens"]
    assert manifest.to_json() == (corpus / MANIFEST).read_bytes()
    assert replace(manifest, seq_len=17).sha256 != manifest.sha256


def test_preparing_twice_gives_the_same_bytes(corpus: Path, tmp_path: Path) -> None:
    prepare(CONFIG, WordRecipe(), tmp_path / "again", progress=quiet)
    assert {p.name: p.read_bytes() for p in corpus.iterdir()} == {
        p.name: p.read_bytes() for p in (tmp_path / "again").iterdir()
    }


def test_shards_have_uniform_row_groups_and_only_the_last_is_short(corpus: Path) -> None:
    split = Manifest.load(corpus).splits["train"]
    assert len(split.shards) > 2
    assert [shard.num_rows for shard in split.shards[:-1]] == [64] * (len(split.shards) - 1)
    for shard in split.shards:
        metadata = pq.ParquetFile(corpus / shard.file).metadata
        groups = [metadata.row_group(g).num_rows for g in range(metadata.num_row_groups)]
        assert groups[:-1] == [8] * (len(groups) - 1)
        assert sum(groups) == shard.num_rows
        column = metadata.row_group(0).column(0)
        assert column.compression == "ZSTD"
        assert not column.has_dictionary_page


def test_cache_name_changes_with_all_that_fixes_the_content_and_with_nothing_else() -> None:
    recipe = WordRecipe()
    name = cache_name(CONFIG, recipe)
    for key, value in {
        "vocab_size": 600,
        "seq_len": 32,
        "validation_fraction": 0.1,
        "rows_per_group": 4,
        "rows_per_shard": 128,
        "recipe": "other",
    }.items():
        assert cache_name(replace(CONFIG, **{key: value}), recipe) != name, key
    assert cache_name(CONFIG, WordRecipe(seed=1)) != name
    assert cache_name(replace(CONFIG, window_steps=3, prefetch_windows=9, stream_cpus=2.0), recipe) == name


def test_an_unfinished_folder_is_redone_and_a_finished_one_is_not(tmp_path: Path) -> None:
    folder = tmp_path / "words"
    folder.mkdir()
    (folder / "train-00000.parquet").write_bytes(b"torn")
    manifest = prepare(CONFIG, WordRecipe(), folder, progress=quiet)
    list(verify(folder))
    before = (folder / MANIFEST).stat()
    assert prepare(CONFIG, WordRecipe(), folder, progress=quiet) == manifest
    assert (folder / MANIFEST).stat().st_ino == before.st_ino


class Broken(WordRecipe):
    def documents(self) -> Any:
        yield from list(super().documents())[:5]
        raise KeyboardInterrupt


def test_an_interrupted_preparation_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        prepare(CONFIG, Broken(), tmp_path / "words", progress=quiet)
    assert list(tmp_path.iterdir()) == []


def _prepare_in_process(folder: Path) -> None:
    prepare(CONFIG, WordRecipe(), folder, progress=quiet)
    list(verify(folder))


def test_processes_that_prepare_at_once_all_find_a_whole_corpus(corpus: Path, tmp_path: Path) -> None:
    folder = tmp_path / "words"
    folder.mkdir()
    (folder / "leftover").write_bytes(b"of an unfinished one")
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_prepare_in_process, args=(folder,)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert Manifest.load(folder) == Manifest.load(corpus)
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".building")] == []


def test_find_or_prepare_prepares_once_and_reports_stages_that_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("regrow.data.prepare.load_recipe", lambda name: WordRecipe())
    seen: list[tuple[str, float, float]] = []
    folder, manifest = find_or_prepare(CONFIG, str(tmp_path), progress=lambda *update: seen.append(update))
    assert folder.parent == tmp_path / "data"
    stages = list(dict.fromkeys(stage for stage, _, _ in seen))
    assert stages == ["reading documents", "training the tokenizer", "encoding"]
    for stage in stages:
        shares = [done / total for name, done, total in seen if name == stage]
        assert shares == sorted(shares)
        assert shares[-1] == 1
        assert shares.count(1) == 1
    seen.clear()
    assert find_or_prepare(CONFIG, str(tmp_path), progress=lambda *update: seen.append(update)) == (folder, manifest)
    assert seen == []


def test_repeats_that_differ_only_in_white_space_are_dropped() -> None:
    texts = ["a b\nc\n", "a  b\r\nc", "a b d\n"]
    kept, counts = collect(Document(str(i), text) for i, text in enumerate(texts))
    assert [document.id for document in kept.values() if document.id != "2"] == ["0"]
    assert (counts["documents"], counts["duplicates"]) == (2, 1)
    assert list(kept) == sorted(kept)


def test_clean_text_keeps_what_is_written_and_drops_what_is_not() -> None:
    dirty = "\n\ndef f():  \r\n\tpass\x00\f\r\n\n\n\n\n\nx = 'é'\x1b\r"
    assert clean_text(dirty) == "def f():\n\tpass\n\n\nx = 'é'\n"
    assert clean_text(clean_text(dirty)) == clean_text(dirty)


def test_a_document_keeps_its_split_when_others_come_and_go() -> None:
    documents, _ = collect(WordRecipe(200).documents())
    some = dict(list(documents.items())[::3])
    whole, part = split_documents(documents, 0.2), split_documents(some, 0.2)
    assert {d.id for d in part["validation"]} <= {d.id for d in whole["validation"]}
    assert {d.id for d in part["train"]} <= {d.id for d in whole["train"]}
    assert 20 <= len(whole["validation"]) <= 60
    assert len(split_documents(some, 1e-12)["validation"]) == 1  # one at least


def test_a_text_that_spells_out_end_of_text_does_not_end_there(corpus: Path) -> None:
    manifest = Manifest.load(corpus)
    tokenizer = load_tokenizer(corpus / manifest.tokenizer.file)
    text = f"before {END_OF_TEXT} after \N{SNOWMAN}"
    (ids,) = encode(tokenizer, [text])
    assert manifest.tokenizer.eot_id not in ids
    assert tokenizer.decode(ids.tolist()) == text


def test_cut_rows_carries_the_rest_over_any_pieces() -> None:
    stream = np.arange(103, dtype=np.uint32)
    whole, rest = cut_rows(stream, 7)
    pieces, carry = [], stream[:1]
    for piece in np.array_split(stream[1:], [1, 2, 9, 40, 41]):
        rows, carry = cut_rows(np.concatenate([carry, piece]), 7)
        pieces.append(rows)
    assert np.array_equal(np.concatenate(pieces), whole)
    assert np.array_equal(carry, rest)
    assert len(rest) - 1 == 102 % 7


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seq_len": 100_000}, "lower data.seq_len"),
        ({"seq_len": 5_000, "validation_fraction": 0.01}, "raise data.validation_fraction"),
    ],
)
def test_a_corpus_too_small_says_what_to_change(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        prepare(replace(CONFIG, **change), WordRecipe(), tmp_path / "words", progress=quiet)
    assert list(tmp_path.glob("words*")) == []


def test_fewer_rows_than_a_global_batch_say_what_to_change(corpus: Path) -> None:
    config = PretrainConfig(data=CONFIG, optim=OptimConfig(global_batch_seqs=12_000, num_slices=12))
    with pytest.raises(DataError, match=r"fewer than one global batch.*lower it to at most \d+"):
        order_of(config, ShardReader(corpus, "train"))


def test_unknown_recipes_and_remote_storage_are_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="python_docs"):
        load_recipe("python_dcos")
    with pytest.raises(DataError, match="file system"):
        find_or_prepare(CONFIG, "s3://bucket/runs", progress=quiet)
    with pytest.raises(DataError, match=r"jobs\.prepare_data"):
        ShardReader(tmp_path, "train")


def test_a_manifest_of_another_version_or_a_torn_one_is_refused(corpus: Path, tmp_path: Path) -> None:
    text = (corpus / MANIFEST).read_text()
    (tmp_path / MANIFEST).write_text(text.replace('"version": 1', '"version": 2'))
    with pytest.raises(DataError, match="version 2"):
        Manifest.load(tmp_path)
    (tmp_path / MANIFEST).write_text(text[: len(text) // 2])
    with pytest.raises(DataError, match="damaged"):
        Manifest.load(tmp_path)


def test_reader_gives_any_rows_in_the_order_asked(tmp_path: Path) -> None:
    rows = write_rows(tmp_path, num_rows=301)  # 5 shards, the last row group of 5 rows
    reader = ShardReader(tmp_path, "train")
    wanted = np.random.default_rng(0).integers(0, 301, 500)
    assert np.array_equal(reader.read(wanted), rows[wanted])
    assert np.array_equal(reader.read(range(290, 301)), rows[290:])
    assert reader.read([]).shape == (0, 17)
    for outside in (-1, 301):
        with pytest.raises(AssertionError, match="301"):
            reader.read([0, outside])


def test_reader_decodes_each_row_group_once_and_keeps_few_files_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = write_rows(tmp_path, num_rows=300, rows_per_shard=8)
    reader = ShardReader(tmp_path, "train")
    decoded: list[tuple[int, int]] = []
    read_group = reader._read_group
    monkeypatch.setattr(reader, "_read_group", lambda *key: (decoded.append(key), read_group(*key))[1])
    wanted = np.random.default_rng(0).permutation(300)
    assert np.array_equal(reader.read(wanted), rows[wanted])
    assert len(decoded) == len(set(decoded)) == 38
    assert len(reader._open) == shards.OPEN_SHARDS


def test_reader_travels_to_other_processes(tmp_path: Path) -> None:
    rows = write_rows(tmp_path, num_rows=20)
    reader = ShardReader(tmp_path, "train")
    reader.read([0])
    assert np.array_equal(pickle.loads(pickle.dumps(reader)).read([19, 3]), rows[[19, 3]])


def test_a_flipped_bit_is_found_when_reading_and_when_verifying(tmp_path: Path) -> None:
    write_rows(tmp_path, num_rows=200)
    victim = tmp_path / "train-00001.parquet"
    data = bytearray(victim.read_bytes())
    data[200] ^= 1
    victim.write_bytes(data)
    reader = ShardReader(tmp_path, "train")
    reader.read(range(64))
    with pytest.raises(DataError, match=r"train-00001.parquet.*row group 0.*jobs.prepare_data"):
        reader.read(range(64, 128))
    with pytest.raises(DataError, match=r"train-00001.parquet is not what its manifest says"):
        list(verify_shards(tmp_path))


@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_a_missing_or_truncated_shard_is_named(damage: str, tmp_path: Path) -> None:
    write_rows(tmp_path, num_rows=200)
    victim = tmp_path / "train-00002.parquet"
    if damage == "missing":
        victim.unlink()
    else:
        victim.write_bytes(victim.read_bytes()[:-100])
    with pytest.raises(DataError, match=r"train-00002.parquet"):
        ShardReader(tmp_path, "train").read([130])
    with pytest.raises(DataError, match=r"train-00002.parquet"):
        list(verify_shards(tmp_path))


def verify_shards(folder: Path) -> Any:
    """`verify` for corpora of `write_rows`, which have no tokenizer."""
    manifest = Manifest.load(folder)
    (folder / "tokenizer.json").write_text("{}")
    tokenizer = replace(manifest.tokenizer, file="tokenizer.json", sha256=shards.file_sha256(folder / "tokenizer.json"))
    replace(manifest, tokenizer=tokenizer).save(folder)
    return verify(folder)


def test_python_docs_yields_this_pythons_library_without_tables_and_tests() -> None:
    recipe: Any = load_recipe("python_docs")
    documents = list(recipe.documents())
    ids = [document.id for document in documents]
    assert len(set(ids)) == len(ids)
    assert {"json/decoder.py", "inspect.py", "pydoc_data/topics.py#while"} <= set(ids)
    assert not {"html/entities.py", "encodings/cp1252.py", "pydoc_data/topics.py"} & set(ids)
    assert not [name for name in ids if "/test" in name or "site-packages" in name]
    assert 7e6 < sum(len(document.text) for document in documents) < 16e6
    assert max(len(document.text) for document in documents) < 4e5
    python = ".".join(map(str, sys.version_info[:3]))
    assert python in recipe.describe()["python"]
    assert recipe.describe() == recipe.describe()


def test_content_hash_does_not_change_between_versions() -> None:
    """Splits and the order of documents follow from it: a new one needs a new format version."""
    assert content_hash("def f():\n    pass\n").hex() == "1642a359605eca96234cdf83b1fea730"
