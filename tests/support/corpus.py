"""Small corpora for tests: documents of made-up words, or shards of made-up rows without a tokenizer."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from regrow.config.schema import DataConfig
from regrow.data.prepare.documents import Document, Piece
from regrow.data.read.manifest import Manifest, Shard, Split, Tokenizer
from regrow.data.read.shards import write_index, write_shard
from regrow.plan.order import ORDER_VERSION
from regrow.storage import Storage


@dataclass(frozen=True)
class WordRecipe:
    """A recipe of `num_documents` texts, the same for the same numbers."""

    num_documents: int = 60
    seed: int = 0
    num_pieces: int = 1

    def describe(self, config: DataConfig) -> dict[str, Any]:
        return {"corpus": "words", "num_documents": self.num_documents, "seed": self.seed, "filters": ["none"]}

    def pieces(self, config: DataConfig) -> list[Piece]:
        cuts = [self.num_documents * k // self.num_pieces for k in range(self.num_pieces + 1)]
        return [Piece("words", a, b) for a, b in itertools.pairwise(cuts)]

    def documents(self, config: DataConfig, piece: Piece) -> Iterator[Document]:
        assert piece.stop is not None
        yield from itertools.islice(self._all(), piece.start, piece.stop)

    def _all(self) -> Iterator[Document]:
        rng = np.random.default_rng(self.seed)
        words = ["".join(rng.choice(list("abcdefgh"), rng.integers(2, 9))) for _ in range(300)]
        for number in range(self.num_documents):
            chosen = rng.choice(words, rng.integers(40, 200))
            yield Document(f"words/{number}", f"document {number}\n\n" + " ".join(chosen) + ".\n")


def write_rows(
    folder: Path, *, num_rows: int, seq_len: int = 16, rows_per_group: int = 8, rows_per_shard: int = 64, seed: int = 0
) -> np.ndarray:
    """Write a train split of random rows, of no documents, with its manifest; the rows, uint32[num_rows, seq_len + 1].

    A row begins with its number, so that content proves identity.
    """
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, 2**32, (num_rows, seq_len + 1), dtype=np.uint32)
    rows[:, 0] = np.arange(num_rows)
    write_corpus(folder, rows, rows_per_group=rows_per_group, rows_per_shard=rows_per_shard)
    return rows


def write_corpus(
    folder: Path,
    rows: np.ndarray,
    *,
    rows_per_group: int,
    rows_per_shard: int,
    vocab_size: int = 2**32,
    validation: np.ndarray | None = None,
) -> None:
    """Write rows, uint32[n, seq_len + 1], as splits of no documents, with their manifest."""
    storage, splits = Storage.at(folder), {}
    for split, its_rows in {"train": rows, "validation": validation}.items():
        if its_rows is None:
            continue
        shards: list[Shard] = []
        for begin in range(0, len(its_rows), rows_per_shard):
            name, part = f"{split}-{len(shards):05d}.parquet", its_rows[begin : begin + rows_per_shard]
            sha256 = write_index(storage, name, np.empty(0, np.int64), [])
            shards.append(write_shard(storage, name, part, rows_per_group=rows_per_group, documents_sha256=sha256))
        splits[split] = Split(len(its_rows), tuple(shards))
    Manifest(
        recipe="rows",
        source={},
        filters=(),
        seq_len=rows.shape[1] - 1,
        vocab_size=vocab_size,
        validation_fraction=0.0,
        rows_per_group=rows_per_group,
        rows_per_shard=rows_per_shard,
        order_version=ORDER_VERSION,
        num_tokens=rows.size,
        counts={},
        damaged={},
        tokenizer=Tokenizer("", "", vocab_size, 0),
        splits=splits,
    ).save(folder)
