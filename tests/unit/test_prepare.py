"""Documents -> tokenizer -> shards: what a prepared corpus holds, and what can go wrong on the way."""

import contextlib
import errno
import fcntl
import hashlib
import itertools
import json
import multiprocessing
import os
import pickle
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from ray import cloudpickle
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from regrow.config.schema import DataConfig, OptimConfig, PretrainConfig
from regrow.data.prepare import prepare as prepare_module
from regrow.data.prepare.documents import Document, Piece, Skipped, clean_text, content_hash, load_recipe, unique
from regrow.data.prepare.prepare import cache_name, find_or_prepare, prepare, spool_piece
from regrow.data.prepare.spool import Spool, document_key
from regrow.data.prepare.tokenizer import END_OF_TEXT, encode, end_of_text_id, load_tokenizer
from regrow.data.read import shards
from regrow.data.read.corpora import Corpora, find_corpora, order_of
from regrow.data.read.manifest import MANIFEST, Manifest
from regrow.data.read.shards import ShardReader, verify
from regrow.errors import DataError
from regrow.progress import Task
from regrow.storage import Storage
from support.corpus import WordRecipe, write_rows

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


def texts_in_order(recipe: WordRecipe, validation_fraction: float) -> dict[str, list[str]]:
    """The texts of a corpus of one piece, by split, as they should stand in the stream."""
    texts = [document.text for document in recipe.documents(CONFIG, *recipe.pieces(CONFIG))]
    keys = [document_key(content_hash(text), 0, number) for number, text in enumerate(texts)]
    in_order = [text for _, text in sorted(zip(keys, texts, strict=True))]
    limit = validation_fraction * 2**64
    sides = {text: int.from_bytes(content_hash(text)[:8], "big") < limit for text in texts}
    return {
        "train": [text for text in in_order if not sides[text]],
        "validation": [text for text in in_order if sides[text]],
    }


@pytest.mark.parametrize("split", ["train", "validation"])
def test_rows_are_the_documents_between_end_of_texts_with_only_the_tail_dropped(corpus: Path, split: str) -> None:
    manifest, rows = Manifest.load(corpus), read_all(corpus, split)
    tokenizer, eot_id = load_tokenizer(corpus / manifest.tokenizer.file), manifest.tokenizer.eot_id
    texts = texts_in_order(WordRecipe(), CONFIG.validation_fraction)[split]
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


def signed(content: dict[str, Any]) -> bytes:
    """A manifest of this content, by a regrow to which it is none of another version."""
    plain = {key: value for key, value in content.items() if key != "sha256"}
    sha256 = hashlib.sha256(json.dumps(plain, indent=1, sort_keys=True).encode()).hexdigest()
    return json.dumps({**plain, "sha256": sha256}).encode()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 4}, r"newer regrow \(format version 4, this one has 3\); use that one"),
        ({"version": 2}, r"older regrow \(format version 2, this one has 3\); prepare another by .*jobs\.prepare_data"),
        ({"order_version": 2}, r"newer regrow \(order version 2, this one has 1\); use that one"),
        ({"order_version": 0}, r"older regrow \(order version 0, this one has 1\); prepare another by"),
        ({"language": "de"}, r"newer regrow: .*unexpected keyword argument 'language'; use that one"),
        ({"tokenizer": {"merges": 7}}, r"newer regrow: .*unexpected keyword argument 'merges'; use that one"),
        ({"splits": {"train": {"order": 7}}}, r"newer regrow: .*unexpected keyword argument 'order'; use that one"),
        ({"format": "other-corpus"}, r"is other-corpus, this code reads regrow-corpus"),
    ],
    ids=str,
)
def test_a_corpus_of_another_version_is_not_to_be_deleted(
    change: dict[str, Any], message: str, corpus: Path, tmp_path: Path
) -> None:
    """Before, the line said to delete it, a newer one too, which others may train on."""

    def merged(into: dict[str, Any], tree: dict[str, Any]) -> dict[str, Any]:
        return into | {k: merged(into[k], v) if isinstance(v, dict) else v for k, v in tree.items()}

    content = json.loads((corpus / MANIFEST).read_bytes())
    (tmp_path / MANIFEST).write_bytes(signed(merged(content, change)))
    config = PretrainConfig(data=replace(CONFIG, corpora={"a": str(tmp_path)}))
    with pytest.raises(DataError, match=message) as refused:
        find_corpora(config, progress=quiet)
    assert str(tmp_path) in str(refused.value)
    assert "delete" not in str(refused.value)


def test_preparing_twice_gives_the_same_bytes(corpus: Path, tmp_path: Path) -> None:
    prepare(CONFIG, WordRecipe(), tmp_path / "again", progress=quiet)
    assert read_files(corpus) == read_files(tmp_path / "again")


def test_a_corpus_is_prepared_on_a_file_system_without_locks(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(file: Any, operation: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", unsupported)
    made = prepare(CONFIG, WordRecipe(), tmp_path / "words", progress=quiet)
    assert made.sha256 == Manifest.load(corpus).sha256

    class Overtaken(WordRecipe):
        """Another job builds the same corpus meanwhile."""

        def describe(self, config: DataConfig) -> dict[str, Any]:
            prepare(config, WordRecipe(), tmp_path / "late", progress=quiet)
            return super().describe(config)

    made = prepare(CONFIG, Overtaken(), tmp_path / "late", progress=quiet)
    assert made.sha256 == Manifest.load(corpus).sha256
    assert not (tmp_path / ".late.building").exists()


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
        "min_score": 3.0,
        "language": "en",
        "min_language_score": 0.5,
        "max_document_chars": 1000,
        "end_of_text": "</s>",
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


@dataclass(frozen=True)
class Interrupted(WordRecipe):
    """Reads as many pieces as there are left in `patience`."""

    patience: list[int] = field(default_factory=list)

    def documents(self, config: DataConfig, piece: Piece) -> Any:
        yield from list(super().documents(config, piece))[:3]
        if not self.patience:
            raise KeyboardInterrupt
        self.patience.pop()
        yield from list(super().documents(config, piece))[3:]


def test_an_interrupted_preparation_goes_on_where_it_stopped(corpus: Path, tmp_path: Path) -> None:
    config = replace(CONFIG, tokenizer=str(corpus / "tokenizer.json"))
    whole = prepare(config, WordRecipe(num_pieces=10), tmp_path / "whole", progress=quiet)
    for attempt in range(4):
        with pytest.raises(KeyboardInterrupt):
            prepare(config, Interrupted(num_pieces=10, patience=[1, 1]), tmp_path / "words", progress=quiet)
        assert not (tmp_path / "words").exists(), attempt
    patience = [1, 1]  # two pieces are left, the others may not be read again
    assert prepare(config, Interrupted(num_pieces=10, patience=patience), tmp_path / "words", progress=quiet) == whole
    assert read_files(tmp_path / "words") == read_files(tmp_path / "whole")
    assert not list(tmp_path.glob(".*.building"))


@pytest.mark.parametrize("left", [[], ["plan.json"], ["plan.json", "spool/000000.json", "train-00000.record"]])
def test_killed_while_tidying_up_it_does_nothing_again(corpus: Path, tmp_path: Path, left: list[str]) -> None:
    building = tmp_path / ".words.building"
    shutil.copytree(corpus, building)
    for name in left:
        (building / name).parent.mkdir(exist_ok=True)
        (building / name).write_bytes(plan_of(tmp_path / "words") if name == "plan.json" else b"{}")
    prepare(CONFIG, Interrupted(), tmp_path / "words", progress=quiet)  # would raise if it read a document
    assert read_files(tmp_path / "words") == read_files(corpus)


def test_what_another_version_had_finished_is_not_taken_for_a_preparation_begun_after_it(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed while it tidied up, then, after an upgrade, killed again: the old manifest made the rest finished."""
    building = tmp_path / ".words.building"
    shutil.copytree(corpus, building)
    (building / "plan.json").write_bytes(b"by another tokenizers")
    with pytest.raises(KeyboardInterrupt):
        prepare(CONFIG, Interrupted(), tmp_path / "words", progress=quiet)
    with pytest.raises(KeyboardInterrupt):
        prepare(CONFIG, Interrupted(), tmp_path / "words", progress=quiet)
    prepare(CONFIG, WordRecipe(), tmp_path / "words", progress=quiet)
    list(verify(tmp_path / "words"))
    assert read_files(tmp_path / "words") == read_files(corpus)


def test_what_a_killed_preparation_has_left_of_a_source_that_grew_since_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lay there for good, a folder whose name begins with a dot, as large as all tokens of the source."""
    source, said = tmp_path / "source", list[str]()
    source.mkdir()
    lines = [json.dumps({"text": " ".join(f"word{k} of {number}" for k in range(20))}) + "\n" for number in range(60)]
    (source / "log.jsonl").write_text("".join(lines))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "another.jsonl").write_text("".join(lines[:50]))
    (tmp_path / "sample").mkdir()
    (tmp_path / "sample" / "log.jsonl").write_text("".join(lines[:50]))  # a file of the same name, and shorter
    config = replace(CONFIG, recipe="text_files", source=str(source))

    def prepare_it(config: DataConfig, killed: bool) -> None:
        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            if killed:
                patch.setattr(prepare_module, "_write_shards", interrupt)
            find_or_prepare(config, str(tmp_path), progress=lambda task, done, total: said.append(task.name))

    def interrupt(*arguments: Any) -> Any:
        raise KeyboardInterrupt

    elsewhere = [replace(config, source=str(tmp_path / name)) for name in ("other", "sample")]
    others = [replace(config, max_document_chars=5000), *elsewhere]
    for each in (*others, config):
        prepare_it(each, killed=True)
    (old,) = (path for path in (tmp_path / "data").glob(".*.building") if cache_name(config) in path.name)
    of_older_version = shutil.copytree(old, old.with_name(".older.building"))
    (of_older_version / "source.json").unlink(missing_ok=True)
    with open(source / "log.jsonl", "a") as file:
        file.write(lines[0])
    assert not [name for name in said if "as it was" in name]
    with open(old.with_suffix(".lock"), "a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        prepare_it(config, killed=True)
        assert not [name for name in said if "as it was" in name], "another process is at it"
    prepare_it(config, killed=False)
    assert [name for name in said if "as it was" in name] == [
        f"passing over {old}, which is of data.source as it was (delete it)"
    ]
    assert not (tmp_path / "data" / cache_name(config) / "source.json").exists()


def plan_of(folder: Path) -> bytes:
    return prepare_module.Plan(CONFIG, Interrupted(), folder, quiet, map).content()


def read_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


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


@pytest.mark.parametrize(
    ("holder", "named", "then"),
    [
        (f"process 7 on {socket.gethostname()}", f" (process 7 on {socket.gethostname()})", ""),
        ("process 7 on elsewhere", " (process 7 on elsewhere)", "; where its host is gone for good, delete that file"),
        ("", "", "; where its host is gone for good, delete that file"),
    ],
)
@pytest.mark.parametrize("is_deleted", [False, True])
def test_a_preparation_that_waits_for_another_says_for_which_and_what_to_do_where_that_is_gone(
    holder: str, named: str, then: str, is_deleted: bool, corpus: Path, tmp_path: Path
) -> None:
    """Before, it waited for ever for a host whose lock NFS had kept, and went on waiting once the file was deleted."""
    seen: list[tuple[Task, float, float]] = []
    waits, lock = Event(), tmp_path / ".words.lock"

    def progress(task: Task, done: float, total: float) -> None:
        seen.append((task, done, total))
        waits.set()

    with open(lock, "a") as held:
        held.write(holder)
        held.flush()
        fcntl.flock(held, fcntl.LOCK_EX)
        folder = tmp_path / "words"
        second = Thread(target=lambda: prepare(CONFIG, WordRecipe(), folder, progress=progress), daemon=True)
        second.start()
        assert waits.wait(60)
        shutil.copytree(corpus, folder)
        if is_deleted:
            lock.unlink()
        else:
            fcntl.flock(held, fcntl.LOCK_UN)
        second.join(60)
        assert not second.is_alive()
    waiting = Task(f"waiting for another preparation{named}, which holds {lock}{then}")
    assert seen[-1] == (waiting, 1, 1)
    assert set(seen) == {(waiting, 0, 1), (waiting, 1, 1)}
    assert lock.read_text() == f"process {os.getpid()} on {socket.gethostname()}"


def test_find_or_prepare_prepares_once_and_reports_stages_that_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("regrow.data.prepare.prepare.load_recipe", lambda name: WordRecipe())
    seen: list[tuple[Task, float, float]] = []
    folder, manifest = find_or_prepare(CONFIG, str(tmp_path), progress=lambda *update: seen.append(update))
    assert folder.local_path.parent == tmp_path / "data"
    stages = list(dict.fromkeys(stage for stage, _, _ in seen))
    assert stages == [Task("training the tokenizer"), Task("tokenizing", "B"), Task("writing", "shards")]
    for stage in stages:
        shares = [done / total for name, done, total in seen if name == stage]
        assert shares == sorted(shares)
        assert shares[-1] == 1
        assert shares.count(1) == 1
    seen.clear()
    assert find_or_prepare(CONFIG, str(tmp_path), progress=lambda *update: seen.append(update))[1] == manifest
    assert seen == []


def test_repeats_that_differ_only_in_white_space_are_dropped() -> None:
    texts = ["a b\nc\n", "a  b\r\nc", "a b d\n"]
    kept = list(unique(Document(str(i), text) for i, text in enumerate(texts)))
    assert [document.id if isinstance(document, Document) else "" for document in kept] == ["0", "", "2"]
    assert isinstance(kept[1], Skipped)


def test_clean_text_keeps_what_is_written_and_drops_what_is_not() -> None:
    dirty = "\n\ndef f():  \r\n\tpass\x00\f\r\n\n\n\n\n\nx = 'é'\x1b\r"
    assert clean_text(dirty) == "def f():\n\tpass\n\n\nx = 'é'\n"
    assert clean_text(clean_text(dirty)) == clean_text(dirty)


def test_a_text_that_spells_out_end_of_text_does_not_end_there(corpus: Path) -> None:
    manifest = Manifest.load(corpus)
    tokenizer = load_tokenizer(corpus / manifest.tokenizer.file)
    text = f"before {END_OF_TEXT} after \N{SNOWMAN}"
    (ids,) = encode(tokenizer, [text])
    assert manifest.tokenizer.eot_id not in ids
    assert tokenizer.decode(ids.tolist()) == text


def unigram(texts: Sequence[str]) -> Tokenizer:
    """As Llama 2's and T5's: its own vocabulary has the special tokens, which its model prefers to any others."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def test_a_text_that_spells_out_end_of_text_does_not_end_there_by_a_unigram_either(tmp_path: Path) -> None:
    texts = [document.text for document in WordRecipe().documents(CONFIG, Piece("words", 0, 60))]
    tokenizer = unigram([*texts, "was <s>ten</s> then and now <unk>"])
    tokenizer.save(str(tmp_path / "unigram.json"))
    spelled = "was <s>ten</s> then </s> and <s> now"
    (ids,) = encode(tokenizer, [spelled], eot_id=2)
    assert not {0, 1, 2} & set(ids.tolist())
    assert tokenizer.decode(ids.tolist()) == spelled
    (ids,) = encode(tokenizer, ["ten \N{SNOWMAN} ten"], eot_id=2)
    assert 0 in ids, "what is in no vocabulary"

    class Spelling(WordRecipe):
        def documents(self, config: DataConfig, piece: Piece) -> Iterator[Document]:
            for document in super().documents(config, piece):
                yield replace(document, text=f"{document.text} was <s>ten</s> then")

    config = replace(CONFIG, tokenizer=str(tmp_path / "unigram.json"))
    manifest = prepare(config, Spelling(), tmp_path / "words", progress=quiet)
    for split in manifest.splits:
        ends = np.count_nonzero(read_all(tmp_path / "words", split)[:, :-1] == manifest.tokenizer.eot_id)
        assert 0 <= manifest.counts[f"{split}_documents"] + 1 - ends <= 2, "those of the tail"


def test_an_end_of_text_that_is_no_special_token_does_not_end_a_text_that_spells_it_out(corpus: Path) -> None:
    tokenizer = load_tokenizer(corpus / "tokenizer.json")
    tokenizer.add_tokens(["<end of text>"])
    text, eot_id = "before <end of text> after", end_of_text_id(tokenizer, "<end of text>")
    assert eot_id in encode(tokenizer, [text])[0]
    (ids,) = encode(tokenizer, [text], eot_id=eot_id)
    assert eot_id not in ids
    assert tokenizer.decode(ids.tolist()) == text


def test_a_text_that_the_tokenizer_fails_on_is_counted_and_left_out(corpus: Path, tmp_path: Path) -> None:
    """Before, ten million blanks in a row ended the preparation in a panic of its regex, which is no Exception."""
    blanks = Document("blanks", " " * 10_000_001 + "a")

    class Blanks(WordRecipe):
        def documents(self, config: DataConfig, piece: Piece) -> Iterator[Document]:
            yield from itertools.chain([blanks], super().documents(config, piece))

    manifest = prepare(CONFIG, Blanks(), tmp_path / "words", progress=quiet)
    assert manifest.counts["documents"] == 60
    assert manifest.counts["skipped: the tokenizer fails on it"] == 1
    assert (tmp_path / "words" / "tokenizer.json").read_bytes() == (corpus / "tokenizer.json").read_bytes()


def test_what_ends_a_preparation_from_outside_ends_it_while_it_encodes_too(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupting:
        def __getattr__(self, name: str) -> Any:
            return getattr(load_tokenizer(corpus / "tokenizer.json"), name)

        def encode_batch_fast(self, *arguments: Any, **options: Any) -> Any:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        encode(Interrupting(), ["a text"])


def test_ids_with_holes_between_them_are_counted_by_the_highest(corpus: Path, tmp_path: Path) -> None:
    """Before, they were as many as there are tokens, and the model had no row for the highest."""
    content = json.loads((corpus / "tokenizer.json").read_text())
    content["model"]["vocab"] |= {"far": 700}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    config = replace(CONFIG, tokenizer=str(tmp_path / "tokenizer.json"))
    with pytest.raises(DataError, match=r"has 701 ids, data\.vocab_size=512; set data\.vocab_size=768"):
        prepare(config, WordRecipe(), tmp_path / "words", progress=quiet)
    manifest = prepare(replace(config, vocab_size=768), WordRecipe(), tmp_path / "words", progress=quiet)
    assert manifest.tokenizer.vocab_size == 701


def test_a_tokenizer_that_was_saved_with_truncation_and_padding_does_neither(corpus: Path, tmp_path: Path) -> None:
    """As transformers leaves one that was once called with truncation=True, padding=True."""
    plain, used = corpus / "tokenizer.json", tmp_path / "used.json"
    tokenizer = load_tokenizer(plain)
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(pad_token=END_OF_TEXT)
    tokenizer.save(str(used))
    prepare(replace(CONFIG, tokenizer=str(plain)), WordRecipe(), tmp_path / "plain", progress=quiet)
    manifest = prepare(replace(CONFIG, tokenizer=str(used)), WordRecipe(), tmp_path / "words", progress=quiet)
    for split in manifest.splits:
        assert np.array_equal(read_all(tmp_path / "words", split), read_all(tmp_path / "plain", split))
    assert (tmp_path / "words" / manifest.tokenizer.file).read_bytes() == used.read_bytes()


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
        order_of(config, Corpora.at(corpus))


def test_corpora_whose_documents_end_with_different_tokens_are_not_mixed(corpus: Path, tmp_path: Path) -> None:
    tokenizer, folders = load_tokenizer(corpus / "tokenizer.json"), {}
    tokenizer.add_special_tokens(["<|eot_id|>"])
    tokenizer.save(str(tmp_path / "two.json"))
    data = replace(CONFIG, tokenizer=str(tmp_path / "two.json"), vocab_size=600)
    for name, token in {"a": END_OF_TEXT, "b": "<|eot_id|>", "c": None}.items():
        prepare(replace(data, end_of_text=token), WordRecipe(), tmp_path / name, progress=quiet)
        folders[name] = str(tmp_path / name)
    config = PretrainConfig(data=replace(data, corpora={name: folders[name] for name in "ac"}))
    assert find_corpora(config, progress=quiet).eot_id == 0
    with pytest.raises(
        DataError, match=rf"of {tmp_path}/b end with token 512, those of .*/a with 0; .*data\.end_of_text"
    ):
        find_corpora(replace(config, data=replace(data, corpora=folders)), progress=quiet)


def test_unknown_recipes_and_empty_folders_are_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="python_docs"):
        load_recipe("python_dcos")
    with pytest.raises(DataError, match=r"jobs\.prepare_data"):
        ShardReader(tmp_path, "train")


OWN_RECIPE = """\
from __future__ import annotations

from dataclasses import dataclass

from regrow.data.prepare.documents import Document, Piece


@dataclass(frozen=True)
class Chapter(Piece):
    text: str = "TEXT"


def describe(config):
    return {"corpus": "own"}


def pieces(config):
    return [Chapter("book", 0, 1)]


def documents(config, piece):
    yield Document(piece.file, piece.text)
"""


def test_a_recipe_of_ones_own_has_dataclasses_with_annotations_of_the_future(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, AttributeError: 'NoneType' object has no attribute '__dict__'. Its pieces reach processes without it."""
    modules = set(sys.modules)
    for folder, text in (("one", "first"), ("other", "second")):
        (tmp_path / folder / "data").mkdir(parents=True)
        (tmp_path / folder / "data" / "mine.py").write_text(OWN_RECIPE.replace("TEXT", text))
        monkeypatch.chdir(tmp_path / folder)
        for _ in range(2):
            recipe = pickle.loads(pickle.dumps(load_recipe("mine")))
            pieces = recipe.pieces(CONFIG)
            assert list(recipe.documents(CONFIG, pieces[0])) == [Document("book", text)]
        (tmp_path / folder / "piece").write_bytes(cloudpickle.dumps(pieces[0]))
        code = "import pickle, sys; print(pickle.load(open(sys.argv[1], 'rb')).text)"
        command = [sys.executable, "-c", code, str(tmp_path / folder / "piece")]
        assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == f"{text}\n"
    assert not [name for name in set(sys.modules) - modules if "mine" in name]


def test_a_recipe_that_does_not_load_is_executed_anew_once_it_is_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine.py").write_text("1 / 0\n")
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            load_recipe("mine").describe(CONFIG)
    assert "regrow_recipe_mine" not in sys.modules
    (tmp_path / "data" / "mine.py").write_text(OWN_RECIPE)
    assert load_recipe("mine").describe(CONFIG) == {"corpus": "own"}


def test_a_node_that_does_not_see_the_storage_says_so(tmp_path: Path) -> None:
    recipe, spool = WordRecipe(), Spool(Storage.at(tmp_path / "elsewhere" / "spool"))
    with pytest.raises(DataError, match=rf"is not there on {socket.gethostname()}; set run.storage_path to a folder"):
        spool_piece(spool, recipe.pieces(CONFIG), recipe, CONFIG, (str(tmp_path / "elsewhere"), "0"), 0)
    assert not (tmp_path / "elsewhere").exists()


def test_a_source_that_is_given_from_here_is_found_by_tasks_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare_module, "LOCAL_BYTES", 0)
    (tmp_path / "texts").mkdir()
    for name in "abcdefgh":
        (tmp_path / "texts" / f"{name}.txt").write_text("\n".join(f"{name} {number}" for number in range(200)))
    (tmp_path / "elsewhere").mkdir()

    def elsewhere(function: Callable[[int], Any], numbers: Sequence[int]) -> Iterator[Any]:
        """As a task of Ray has its own working directory and home."""
        with monkeypatch.context() as there:
            there.chdir(tmp_path / "elsewhere")
            there.setenv("HOME", str(tmp_path / "elsewhere"))
            yield from map(function, numbers)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for source in ("texts", "~/texts", "file://texts/*.txt"):
        config = replace(CONFIG, recipe="text_files", source=source, validation_fraction=0.5)
        _, manifest = find_or_prepare(config, f"runs {source[0]}", progress=quiet, distribute=elsewhere)
        assert manifest.counts["documents"] == 8
        again, _ = find_or_prepare(config, f"runs {source[0]}", progress=quiet, distribute=elsewhere)
        assert len(list(again.local_path.parent.glob("[!.]*"))) == 1, "found, not prepared again"


def test_a_node_that_does_not_see_the_source_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare_module, "LOCAL_BYTES", 0)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("text")

    def elsewhere(function: Callable[[int], Any], numbers: Sequence[int]) -> Iterator[Any]:
        (tmp_path / "texts" / "a.txt").unlink()
        return map(function, numbers)

    config = replace(CONFIG, recipe="text_files", source=str(tmp_path / "texts"))
    problem = (
        rf"data\.source={tmp_path}/texts is not there on {socket.gethostname()} \(.*a\.txt.*\); give a folder that"
    )
    with pytest.raises(DataError, match=problem):
        find_or_prepare(config, str(tmp_path), progress=quiet, distribute=elsewhere)


def test_a_manifest_of_another_version_or_a_torn_one_is_refused(corpus: Path, tmp_path: Path) -> None:
    text = (corpus / MANIFEST).read_text()
    (tmp_path / MANIFEST).write_text(text.replace('"version": 3', '"version": 4'))
    with pytest.raises(DataError, match="version 4"):
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


def test_reader_decodes_each_row_group_once_and_keeps_few_footers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = write_rows(tmp_path, num_rows=1200, rows_per_shard=8)
    reader = ShardReader(tmp_path, "train")
    decoded: list[tuple[int, int]] = []
    read_group = reader.read_group
    monkeypatch.setattr(reader, "read_group", lambda *key: (decoded.append(key), read_group(*key))[1])
    wanted = np.random.default_rng(0).permutation(1200)
    assert np.array_equal(reader.read(wanted), rows[wanted])
    assert len(decoded) == len(set(decoded)) == 150
    assert len(reader.footers) == shards.OPEN_SHARDS


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
    tokenizer = replace(manifest.tokenizer, file="tokenizer.json", sha256=hashlib.sha256(b"{}").hexdigest())
    replace(manifest, tokenizer=tokenizer).save(folder)
    return verify(folder)


def test_python_docs_yields_this_pythons_library_without_tables_and_tests() -> None:
    recipe: Any = load_recipe("python_docs")
    config = DataConfig()
    documents = [d for d in recipe.documents(config, *recipe.pieces(config)) if isinstance(d, Document)]
    ids = [document.id for document in documents]
    assert len(set(ids)) == len(ids)
    assert {"json/decoder.py", "inspect.py", "pydoc_data/topics.py#while"} <= set(ids)
    assert not {"html/entities.py", "encodings/cp1252.py", "pydoc_data/topics.py"} & set(ids)
    assert not [name for name in ids if "/test" in name or "site-packages" in name]
    assert 7e6 < sum(len(document.text) for document in documents) < 16e6
    assert max(len(document.text) for document in documents) < 4e5
    python = ".".join(map(str, sys.version_info[:3]))
    assert python in recipe.describe(config)["python"]
    assert recipe.describe(config) == recipe.describe(config)


def test_content_hash_does_not_change_between_versions() -> None:
    """Splits and the order of documents follow from it: a new one needs a new format version."""
    assert content_hash("def f():\n    pass\n").hex() == "0f14aa9b575a1eb30a9feccfbe923ddd"
