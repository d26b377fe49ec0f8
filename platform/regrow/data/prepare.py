"""Documents -> tokenizer -> token shards, once, cached below the storage path.

Deterministic: the same source, settings and library versions give the same bytes. A corpus is built in a folder of its
own beside its final place and renamed into it with its manifest inside, so that it is there whole or not at all.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from regrow.config.schema import DataConfig
from regrow.data.documents import Document, Recipe, load_recipe
from regrow.data.manifest import MANIFEST, SPLITS, VERSION, Manifest, Shard, Split, Tokenizer
from regrow.data.shards import Rows, file_sha256, write_shard
from regrow.errors import DataError
from regrow.plan.order import ORDER_VERSION
from regrow.storage import Storage

END_OF_TEXT = "<|endoftext|>"
TOKENIZER_FILE = "tokenizer.json"
ENCODE_DOCUMENTS = 256  # at a time

Progress = Callable[[str, float, float], None]  # (stage, done, total)


def find_or_prepare(config: DataConfig, storage_path: str, *, progress: Progress) -> tuple[Path, Manifest]:
    """The folder and manifest of the corpus that the config describes; prepared now if it is not there yet.

    Raises DataError for an unknown recipe, a corpus too small for the settings, or storage that is not local.
    """
    storage = Storage.at(storage_path)
    if not storage.is_local:
        raise DataError(
            f"run.storage_path={storage_path}: token shards are read from a file system; "
            "mount one that all nodes share and give its path"
        )
    recipe = load_recipe(config.recipe)
    folder = storage.local_path / "data" / cache_name(config, recipe)
    if not (folder / MANIFEST).is_file():
        prepare(config, recipe, folder, progress=progress)
    return folder, Manifest.load(folder)


def cache_name(config: DataConfig, recipe: Recipe) -> str:
    """A folder name that changes with everything the prepared content depends on."""
    fixed = {**_settings(config), "source": recipe.describe(), "format": VERSION, "order": ORDER_VERSION}
    digest = hashlib.sha256(json.dumps(fixed, sort_keys=True).encode()).hexdigest()
    return f"{config.recipe}-{config.seq_len}-{digest[:10]}"


def prepare(config: DataConfig, recipe: Recipe, folder: Path, *, progress: Progress) -> Manifest:
    """Build the corpus at `folder`. Raises DataError if it has too few tokens for a row in each split."""
    building = folder.with_name(f".{folder.name}.{os.getpid()}.building")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    try:
        documents = _read(recipe, progress)
        by_split = {
            split: [d for d in documents if split_of(d, config.validation_fraction) == split] for split in SPLITS
        }
        progress("training the tokenizer", 0, 1)
        tokenizer = train_tokenizer((d.text for d in by_split["train"]), config.vocab_size)
        tokenizer.save(str(building / TOKENIZER_FILE))
        progress("training the tokenizer", 1, 1)
        splits, counts, num_tokens = {}, {"documents": len(documents)}, 0
        num_done, total = 0, sum(len(d.text) for d in documents)
        for split in SPLITS:
            tokens = []
            for encoded, num_characters in _encode(tokenizer, shuffled(by_split[split])):
                tokens.append(encoded)
                num_done += num_characters
                progress("encoding", num_done, total)
            stream = np.concatenate(tokens) if tokens else np.empty(0, np.uint32)
            rows = cut_rows(stream, config.seq_len)
            if len(rows) == 0:
                raise DataError(
                    f"the {split} split of {config.recipe} has {len(stream):,} tokens, fewer than a row of "
                    f"data.seq_len={config.seq_len} needs; lower data.seq_len or raise data.validation_fraction"
                )
            splits[split] = Split(len(rows), tuple(_write(building, split, rows, config)))
            counts |= {
                f"{split}_documents": len(by_split[split]),
                f"{split}_tokens": len(stream),
                f"{split}_tokens_dropped": len(stream) - (len(rows) * config.seq_len + 1),
            }
            num_tokens += len(stream)
        manifest = Manifest(
            recipe=config.recipe,
            source={**recipe.describe(), **_settings(config)},
            seq_len=config.seq_len,
            rows_per_group=config.rows_per_group,
            order_version=ORDER_VERSION,
            tokenizer=Tokenizer(
                TOKENIZER_FILE,
                file_sha256(building / TOKENIZER_FILE),
                tokenizer.get_vocab_size(),
                tokenizer.token_to_id(END_OF_TEXT),
            ),
            splits=splits,
            counts=counts,
            num_tokens=num_tokens,
        )
        (building / MANIFEST).write_bytes(manifest.to_json())
        try:
            building.rename(folder)
        except OSError:  # somebody else finished it first, or an incomplete folder is in the way
            if not (folder / MANIFEST).is_file():
                shutil.rmtree(folder)
                building.rename(folder)
        return Manifest.load(folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def split_of(document: Document, validation_fraction: float) -> str:
    """The split a document belongs to: by a hash of its text, so that it never changes sides."""
    return "validation" if _hash(document.text, "split") < validation_fraction * 2**64 else "train"


def shuffled(documents: list[Document]) -> list[Document]:
    """Documents in an order that has nothing to do with the source's."""
    return sorted(documents, key=lambda document: (_hash(document.text, "order"), document.id))


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Any:
    """A byte-level BPE (`tokenizers.Tokenizer`) with end-of-text as its only special token."""
    from tokenizers import Tokenizer as BPETokenizer
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = BPETokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def cut_rows(stream: Rows, seq_len: int) -> Rows:
    """A token stream [n] as rows [m, seq_len + 1] that overlap by one: each token but the first is a target once.

    Only the tail that fills no row is left out.
    """
    num_rows = max(0, (len(stream) - 1) // seq_len)
    starts = np.arange(num_rows)[:, None] * seq_len
    return stream[starts + np.arange(seq_len + 1)[None, :]]


def _settings(config: DataConfig) -> dict[str, Any]:
    keys = ("vocab_size", "seq_len", "validation_fraction", "rows_per_group", "rows_per_shard")
    return {key: getattr(config, key) for key in keys}


def _read(recipe: Recipe, progress: Progress) -> list[Document]:
    documents = []
    progress("reading documents", 0, 1)
    for document in recipe.documents():
        documents.append(document)
    progress("reading documents", 1, 1)
    return documents


def _encode(tokenizer: Any, documents: list[Document]) -> Iterator[tuple[Rows, int]]:
    """Tokens of some documents, each followed by end-of-text, and how many characters they were."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    for begin in range(0, len(documents), ENCODE_DOCUMENTS):
        some = documents[begin : begin + ENCODE_DOCUMENTS]
        encodings = tokenizer.encode_batch([document.text for document in some], add_special_tokens=False)
        tokens = [token for encoding in encodings for token in (*encoding.ids, end)]
        yield np.array(tokens, np.uint32), sum(len(document.text) for document in some)


def _write(folder: Path, split: str, rows: Rows, config: DataConfig) -> Iterator[Shard]:
    for number, begin in enumerate(range(0, len(rows), config.rows_per_shard)):
        path = folder / f"{split}-{number:05d}.parquet"
        yield write_shard(path, rows[begin : begin + config.rows_per_shard], rows_per_group=config.rows_per_group)


def _hash(text: str, purpose: str) -> int:
    digest = hashlib.blake2b(text.encode(), digest_size=8, person=purpose.encode()).digest()
    return int.from_bytes(digest, "little")
