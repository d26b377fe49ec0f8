"""Looking into a prepared corpus: how long its documents are, what rows say, what a batch holds, what differs."""

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regrow.data.prepare.tokenizer import parse_tokenizer
from regrow.data.read.batch import BatchLayout
from regrow.data.read.corpora import Corpora
from regrow.data.read.manifest import Manifest
from regrow.data.read.shards import DocumentIndex, ShardReader, read_index
from regrow.errors import DataError, first_line
from regrow.plan.order import Order

ROWS_AT_A_TIME = 4096
BAR = 40  # characters of the longest bar
SHOWN_DOCUMENTS = 3  # of each row of a batch


@dataclass(frozen=True)
class Lengths:
    """Tokens of documents, without their end-of-text."""

    bounds: list[int]  # a bin holds lengths in [bounds[i], bounds[i + 1]), powers of two
    counts: list[int]
    documents: int
    mean: float
    longest: int


def document_lengths(reader: ShardReader, *, progress: Callable[[float, float], None]) -> Lengths:
    """Measure every document of a split, but for the last one, which the end of the split may have cut."""
    eot_id, lengths = reader.manifest.tokenizer.eot_id, []
    position, last_end = 0, -1
    for begin in range(0, reader.num_rows, ROWS_AT_A_TIME):
        rows = reader.read(np.arange(begin, min(begin + ROWS_AT_A_TIME, reader.num_rows)))
        stream = rows[:, :-1].ravel()
        ends = np.flatnonzero(stream == eot_id) + position
        lengths.append(np.diff(ends, prepend=last_end) - 1)
        last_end, position = int(ends[-1]) if len(ends) else last_end, position + len(stream)
        progress(begin + len(rows), reader.num_rows)
    found = np.concatenate(lengths)[1:]  # the stream begins with an end-of-text
    longest = int(found.max(initial=0))
    bounds = [0, *(2**k for k in range(longest.bit_length() + 1))]
    counts = np.histogram(found, bounds)[0].tolist() if len(found) else [0]
    mean = float(found.mean()) if len(found) else 0.0
    return Lengths(bounds, counts, len(found), mean, longest)


def decode_rows(reader: ShardReader, row_ids: NDArray[np.int64]) -> list[str]:
    """Rows as text, with the end-of-text token spelled out. Raises DataError if a shard or the tokenizer is damaged."""
    storage, named = reader.storage, reader.manifest.tokenizer
    try:
        data = storage.read_bytes(named.file)
    except OSError as error:
        raise DataError(f"{storage / named.file} cannot be read: {first_line(error)}") from error
    if hashlib.sha256(data).hexdigest() != named.sha256:
        raise DataError(
            f"{storage / named.file} is not what its manifest says; "
            f"delete {storage} and run python -m jobs.prepare_data"
        )
    tokenizer = parse_tokenizer(data, str(storage / named.file))
    return list(tokenizer.decode_batch(reader.read(row_ids).tolist(), skip_special_tokens=False))


@dataclass(frozen=True)
class BatchRow:
    """Where one sequence of a global batch comes from."""

    position: int  # in the run's order
    slice: int
    corpus: str  # its name in the run; empty where there is only one
    row: int  # in the corpus
    shard: str
    row_group: int  # in the shard
    documents: list[str]  # ids of those that it holds a part of
    text: str


def rows_of_batch(corpora: Corpora, layout: BatchLayout, order: Order, step: int) -> list[BatchRow]:
    """The rows of the global batch that makes `step`, counted from 1, in the order of their positions."""
    reader = corpora.reader("train", retry_s=None)
    positions = layout.positions(step - 1, range(layout.num_slices))
    corpus, rows = reader.place(order.locate(positions))
    found: dict[int, BatchRow] = {}
    for number, of_corpus in enumerate(reader.readers):
        here = np.flatnonzero(corpus == number)
        texts = decode_rows(of_corpus, rows[here]) if len(here) else []
        indexes: dict[int, DocumentIndex] = {}
        manifest, shards = of_corpus.manifest, of_corpus.manifest.splits["train"].shards
        for k, row, text in zip(here.tolist(), rows[here].tolist(), texts, strict=True):
            shard, offset = divmod(row, manifest.rows_per_shard)
            if shard not in indexes:
                indexes[shard] = read_index(of_corpus.storage, shards[shard])
            found[k] = BatchRow(
                position=int(positions[k]),
                slice=k // layout.slice_seqs,
                corpus=corpora.names[number],
                row=row,
                shard=shards[shard].file,
                row_group=offset // manifest.rows_per_group,
                documents=indexes[shard].of_row(row, manifest.seq_len),
                text=text,
            )
    return [found[k] for k in range(len(positions))]


def differences(old: Manifest, new: Manifest) -> list[str]:
    """What differs between two corpora, `key: old -> new`, a line each; shards by their sums."""
    flat_old, flat_new = _flat(json.loads(old.to_json())), _flat(json.loads(new.to_json()))
    return [
        f"{key}: {flat_old.get(key, '(absent)')} -> {flat_new.get(key, '(absent)')}"
        for key in sorted((flat_old.keys() | flat_new.keys()) - {"sha256"})
        if flat_old.get(key, ...) != flat_new.get(key, ...)
    ]


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    if isinstance(value, dict) and value:
        parts = list(value.items())
    elif isinstance(value, list) and value:
        parts = [(part.get("file", k) if isinstance(part, dict) else k, part) for k, part in enumerate(value)]
    else:
        return {name: value}
    return {key: leaf for k, part in parts for key, leaf in _flat(part, f"{name}/{k}" if name else k).items()}


def manifest_lines(manifest: Manifest) -> list[str]:
    """What a prepared corpus is."""
    lines = [f"{manifest.recipe}, {manifest.num_tokens:,} tokens in rows of {manifest.seq_len} + 1; {manifest.sha256}"]
    for name, split in manifest.splits.items():
        size = sum(shard.num_bytes for shard in split.shards)
        lines.append(f"{name}: {split.num_rows:,} rows, shards: {len(split.shards)}, {size / 1e6:,.1f} MB")
    lines += [f"  {name}: {count:,}" for name, count in manifest.counts.items()]
    return lines + [f"  left out, cannot be read: {piece}: {why}" for piece, why in manifest.damaged.items()]


def length_lines(lengths: Lengths) -> list[str]:
    """How long documents are, a bar for each bin that has any."""
    lines = [
        f"{lengths.documents:,} documents of {lengths.mean:,.0f} tokens on average, the longest {lengths.longest:,}"
    ]
    for (low, high), count in zip(itertools.pairwise(lengths.bounds), lengths.counts, strict=True):
        if count:
            bar = "#" * -(-BAR * count // max(lengths.counts))
            lines.append(f"  {low:>9,} to {high - 1:>9,}  {count:>9,}  {bar}")
    return lines


def batch_lines(rows: Iterable[BatchRow]) -> list[str]:
    """A line for each row of a batch: where it stands, and of which documents it is."""
    lines = []
    for row in rows:
        more = len(row.documents) - SHOWN_DOCUMENTS
        documents = " + ".join(row.documents[:SHOWN_DOCUMENTS]) + (f" and {more} more" if more > 0 else "")
        place = f"{row.corpus} row {row.row:,}".strip()
        text = repr(" ".join(row.text.split())[:60])
        lines.append(
            f"position {row.position:,} (slice {row.slice}): {place}, {row.shard} group {row.row_group}, of "
            f"{documents}: {text}"
        )
    return lines
