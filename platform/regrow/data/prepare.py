"""Documents -> tokenizer -> token shards, once, cached below the storage path.

Deterministic: the same source, settings and library versions give the same bytes. A corpus is built in a folder of its
own beside its final place and renamed into it with its manifest inside, so that it is there whole or not at all,
whoever else prepares it at the same time. Documents are held in memory: this is for corpora that fit.
"""

import fcntl
import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from regrow.config.schema import DataConfig
from regrow.data.batch import Rows
from regrow.data.documents import Document, Recipe, clean_text, content_hash, load_recipe
from regrow.data.manifest import MANIFEST, SPLITS, VERSION, Manifest, Split, Tokenizer
from regrow.data.shards import ShardWriter, file_sha256
from regrow.data.tokenizer import END_OF_TEXT, encode, train_tokenizer
from regrow.errors import DataError
from regrow.plan.order import ORDER_VERSION
from regrow.storage import Storage

TOKENIZER_FILE = "tokenizer.json"
ENCODE_CHARS = 2_000_000  # text encoded at a time
ABANDONED_S = 24 * 3600  # a building folder untouched for so long belongs to nobody any more

Progress = Callable[[str, float, float], None]  # (stage, done, total); a stage ends when done == total


def find_or_prepare(config: DataConfig, storage_path: str, *, progress: Progress) -> tuple[Path, Manifest]:
    """The folder and manifest of the corpus that the config describes; prepared now if it is not there yet.

    Raises DataError for an unknown recipe, a corpus too small for the settings, or storage that is no file system.
    """
    if "://" in storage_path and not storage_path.startswith("file://"):
        raise DataError(
            f"run.storage_path={storage_path}: token shards are read from a file system; "
            "mount one that all nodes share and give its path"
        )
    recipe = load_recipe(config.recipe)
    folder = Storage.at(storage_path).local_path / "data" / cache_name(config, recipe)
    if (folder / MANIFEST).is_file():
        return folder, Manifest.load(folder)
    return folder, prepare(config, recipe, folder, progress=progress)


def cache_name(config: DataConfig, recipe: Recipe | None = None) -> str:
    """A folder name that changes with everything that the prepared content depends on."""
    recipe = recipe or load_recipe(config.recipe)
    keys = ("vocab_size", "seq_len", "validation_fraction", "rows_per_group", "rows_per_shard")
    fixed = {
        **{key: getattr(config, key) for key in keys},
        "source": recipe.describe(),
        "format": VERSION,
        "order": ORDER_VERSION,
    }
    digest = hashlib.sha256(json.dumps(fixed, sort_keys=True).encode()).hexdigest()
    return f"{config.recipe}-v{config.vocab_size}-l{config.seq_len}-{digest[:10]}"


def prepare(config: DataConfig, recipe: Recipe, folder: Path, *, progress: Progress) -> Manifest:
    """Build the corpus at `folder` and return its manifest, which may be another process's that was quicker.

    Raises DataError if a split has too few tokens for one row.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    _sweep(folder)
    building = folder.with_name(f".{folder.name}.{os.getpid()}-{secrets.token_hex(4)}.building")
    building.mkdir()
    try:
        _build(config, recipe, building, progress).save(building)
        _install(building, folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return Manifest.load(folder)


def _build(config: DataConfig, recipe: Recipe, folder: Path, progress: Progress) -> Manifest:
    progress("reading documents", 0, 1)
    documents, counts = collect(recipe.documents())
    by_split = split_documents(documents, config.validation_fraction)
    progress("reading documents", 1, 1)

    stage = "training the tokenizer"
    texts = _counted((d.text for d in by_split["train"]), stage, len(by_split["train"]) + 1, progress)
    tokenizer = train_tokenizer(texts, vocab_size=config.vocab_size)
    tokenizer.save(str(folder / TOKENIZER_FILE))
    progress(stage, 1, 1)
    eot_id = tokenizer.token_to_id(END_OF_TEXT)
    assert eot_id is not None

    splits: dict[str, Split] = {}
    num_chars, num_tokens = 0, 0
    for split in SPLITS:
        writer = ShardWriter(
            folder,
            split,
            row_tokens=config.seq_len + 1,
            rows_per_group=config.rows_per_group,
            rows_per_shard=config.rows_per_shard,
        )
        carry, num_split_tokens = np.array([eot_id], np.uint32), 1
        for batch in _batches(by_split[split]):
            ids = encode(tokenizer, [document.text for document in batch])
            stream = np.concatenate([carry, *(part for text in ids for part in (text, [eot_id]))]).astype(np.uint32)
            num_split_tokens += len(stream) - len(carry)
            rows, carry = cut_rows(stream, config.seq_len)
            writer.write(rows)
            num_chars += sum(len(document.text) for document in batch)
            progress("encoding", num_chars, counts["characters"])
        shards = writer.close()
        if not shards:
            raise DataError(
                f"the {split} split of {config.recipe} has {num_split_tokens:,} tokens, too few for one row of "
                f"data.seq_len={config.seq_len}; lower data.seq_len"
                + (" or raise data.validation_fraction" if split == "validation" else " or choose another data.recipe")
            )
        splits[split] = Split(sum(shard.num_rows for shard in shards), shards)
        num_tokens += num_split_tokens
        counts[f"{split}_documents"] = len(by_split[split])
        counts[f"{split}_tokens"] = num_split_tokens
        counts[f"{split}_tokens_dropped"] = len(carry) - 1

    source = recipe.describe()
    return Manifest(
        recipe=config.recipe,
        filters=(*source.pop("filters", ()), "documents equal to an earlier one but for white space"),
        source=source,
        seq_len=config.seq_len,
        vocab_size=config.vocab_size,
        validation_fraction=config.validation_fraction,
        rows_per_group=config.rows_per_group,
        rows_per_shard=config.rows_per_shard,
        order_version=ORDER_VERSION,
        num_tokens=num_tokens,
        counts=counts,
        tokenizer=Tokenizer(TOKENIZER_FILE, file_sha256(folder / TOKENIZER_FILE), tokenizer.get_vocab_size(), eot_id),
        splits=splits,
    )


def collect(documents: Iterable[Document]) -> tuple[dict[bytes, Document], dict[str, int]]:
    """Clean documents and drop repeats; what is left by content hash, in the order of the hashes, and counts.

    That order is a shuffle that has nothing to do with the source's order.
    """
    kept: dict[bytes, Document] = {}
    counts = {"documents": 0, "duplicates": 0, "characters": 0}
    for document in documents:
        text = clean_text(document.text)
        key = content_hash(text)
        if key in kept:
            counts["duplicates"] += 1
        else:
            kept[key] = Document(document.id, text)
            counts["documents"] += 1
            counts["characters"] += len(text)
    return dict(sorted(kept.items())), counts


def split_documents(documents: dict[bytes, Document], validation_fraction: float) -> dict[str, list[Document]]:
    """Documents by split: those whose hash lies in the lowest `validation_fraction` validate, and at least one does.

    A document keeps its side whatever else the corpus holds.
    """
    limit = int(validation_fraction * 2**64)
    num_validation = sum(int.from_bytes(key[:8], "big") < limit for key in documents)
    in_order = list(documents.values())
    num_validation = max(num_validation, 1)
    return {"validation": in_order[:num_validation], "train": in_order[num_validation:]}


def cut_rows(stream: Rows, seq_len: int) -> tuple[Rows, Rows]:
    """Cut a token stream [n] into rows [m, seq_len + 1] that overlap by one; the rows, and the rest to put in front.

    Every token but the stream's first is thus predicted exactly once. The rest begins with the last row's last token.
    """
    num_rows = (len(stream) - 1) // seq_len
    if num_rows == 0:
        return np.empty((0, seq_len + 1), np.uint32), stream
    rows = np.lib.stride_tricks.sliding_window_view(stream, seq_len + 1)[::seq_len][:num_rows]
    return rows, stream[num_rows * seq_len :]


def _batches(documents: list[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    for document in documents:
        batch.append(document)
        if sum(len(d.text) for d in batch) >= ENCODE_CHARS:
            yield batch
            batch = []
    if batch:
        yield batch


def _counted(texts: Iterable[str], stage: str, total: int, progress: Progress) -> Iterator[str]:
    for number, text in enumerate(texts):
        progress(stage, number, total)
        yield text


def _install(building: Path, folder: Path) -> None:
    """Rename a finished building folder into place, unless a finished corpus is there already."""
    _sync(building)
    with _lock(folder):
        if (folder / MANIFEST).is_file():
            return
        if folder.exists():
            shutil.rmtree(folder)  # left by something that did not finish
        building.rename(folder)
    _sync(folder.parent, files=False)


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Hold the lock that guards what stands at `folder`; the kernel lets go of it with the process."""
    with open(folder.with_name(f".{folder.name}.lock"), "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _sync(folder: Path, *, files: bool = True) -> None:
    for path in [*(folder.iterdir() if files else ()), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _sweep(folder: Path) -> None:
    """Delete building folders of this corpus that were abandoned, by a killed process for example."""
    for path in folder.parent.glob(f".{folder.name}.*.building"):
        newest = max((p.stat().st_mtime for p in [path, *path.iterdir()] if p.exists()), default=0.0)
        if time.time() - newest > ABANDONED_S:
            shutil.rmtree(path, ignore_errors=True)
