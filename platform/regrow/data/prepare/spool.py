"""A piece of the source as token ids on disk, grouped so that documents can be shuffled without being held in memory.

Pieces are shuffled in groups. A group of n pieces has n buckets, and a document's key, a hash, says which bucket it
falls into; reading bucket b of all pieces of the group and sorting by key gives part b of the group's shuffle. So any
part of the final token stream can be made from n small reads, by any task, in any order.
"""

import hashlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from regrow.config.schema import DataConfig
from regrow.data.prepare.documents import DamagedPiece, Document, Piece, Recipe, Skipped, content_hash
from regrow.data.prepare.tokenizer import encode, end_of_text_id
from regrow.data.read.manifest import SPLITS
from regrow.storage import Storage, in_threads

if TYPE_CHECKING:
    from tokenizers import Tokenizer as BPE

Tokens = NDArray[np.uint32]
_Entry = tuple[bytes, str, Tokens]  # of a document: key, id, tokens without end-of-text

ENCODE_CHARS = 500_000  # text encoded at a time
KEY_BYTES = 16
UNENCODED = "the tokenizer fails on it"  # why a document is left out
_RECORD = re.compile(r"\d{6,}\.json")
_SCHEMA = pa.schema([("key", pa.binary(KEY_BYTES)), ("id", pa.string()), ("tokens", pa.large_list(pa.uint32()))])


@dataclass(frozen=True)
class Spooled:
    """What one piece came to."""

    documents: int
    characters: int
    skipped: dict[str, int]  # documents left out, by reason
    damaged: str  # why the piece could not be read; empty if it could
    num_tokens: tuple[tuple[int, ...], ...]  # by split and bucket, an end-of-text for each document included
    num_documents: tuple[int, ...]  # by split


@dataclass(frozen=True)
class Bucket:
    """Documents in the order of their keys, an end-of-text behind each."""

    tokens: Tokens
    begins: NDArray[np.int64]  # where each document begins in `tokens`
    ids: pa.StringArray


@dataclass(frozen=True)
class Spool:
    """The folder of a corpus' spooled pieces: of each its data, and then a record that it is done."""

    folder: Storage

    def load(self) -> dict[int, Spooled]:
        """The pieces that are done."""
        indices = [int(name.removesuffix(".json")) for name in self.folder.list() if _RECORD.fullmatch(name)]
        return dict(zip(indices, in_threads(self._load, indices), strict=True))

    def _load(self, index: int) -> Spooled:
        content = json.loads(self.folder.read_bytes(f"{index:06d}.json"))
        content["num_tokens"] = tuple(map(tuple, content["num_tokens"]))
        content["num_documents"] = tuple(content["num_documents"])
        return Spooled(**content)

    def write(
        self, index: int, piece: Piece, recipe: Recipe, config: DataConfig, tokenizer: "BPE", num_buckets: int
    ) -> Spooled:
        """Tokenize a piece. The same bytes however often it is done; there whole or not at all."""
        buckets: dict[int, list[_Entry]] = {}
        skipped: Counter[str] = Counter()
        documents, characters, damaged = 0, 0, ""
        eot = np.array([end_of_text_id(tokenizer, config.end_of_text)], np.uint32)
        try:
            for document, content, split, ids in tokenized(piece, recipe, config, tokenizer, skipped):
                key = document_key(content, index, documents)
                bucket = split * num_buckets + bucket_of(key, num_buckets)
                buckets.setdefault(bucket, []).append((key, document.id, ids))
                documents += 1
                characters += len(document.text)
        except DamagedPiece as error:  # half a piece is none: what was read before the damage may be wrong as well
            buckets, documents, characters, damaged = {}, 0, 0, str(error)
            skipped.clear()
        batches = [_to_batch(sorted(buckets.pop(b, [])), eot) for b in range(len(SPLITS) * num_buckets)]
        spooled = Spooled(
            documents,
            characters,
            dict(sorted(skipped.items())),
            damaged,
            tuple(
                tuple(len(batch.column("tokens").values) for batch in batches[s * num_buckets : (s + 1) * num_buckets])
                for s in range(len(SPLITS))
            ),
            tuple(sum(map(len, batches[s * num_buckets : (s + 1) * num_buckets])) for s in range(len(SPLITS))),
        )
        written = pa.BufferOutputStream()
        with pa.ipc.new_file(written, _SCHEMA, options=pa.ipc.IpcWriteOptions(compression="zstd")) as file:
            for batch in batches:
                file.write_batch(batch)
        self.folder.write_chunks(f"{index:06d}.arrow", [written.getvalue()])
        self.folder.write_bytes(f"{index:06d}.json", json.dumps(asdict(spooled)).encode())
        return spooled

    def read_bucket(self, pieces: Sequence[int], split: int, bucket: int) -> Bucket:
        """One bucket of a group of pieces."""
        keys: list[bytes] = []
        ids: list[pa.StringArray] = []
        documents: list[Tokens] = []
        read = partial(self._read_batch, number=split * len(pieces) + bucket)
        for batch in map(read, pieces) if self.folder.is_local else in_threads(read, pieces):
            keys += batch.column("key").to_pylist()
            ids.append(batch.column("id"))
            tokens = batch.column("tokens")
            values, ends = tokens.values.to_numpy(), tokens.offsets.to_numpy()
            documents += [values[a:b] for a, b in itertools.pairwise(ends)]
        order = sorted(range(len(keys)), key=keys.__getitem__)
        in_order = [documents[k] for k in order]
        begins = np.cumsum([0, *map(len, in_order)], dtype=np.int64)[:-1]
        return Bucket(np.concatenate(in_order), begins, pa.concat_arrays(ids).take(pa.array(order)))

    def _read_batch(self, index: int, *, number: int) -> pa.RecordBatch:
        return self.folder.read_with(f"{index:06d}.arrow", lambda file: pa.ipc.open_file(file).get_batch(number))


def tokenized(
    piece: Piece, recipe: Recipe, config: DataConfig, tokenizer: "BPE", skipped: Counter[str]
) -> Iterator[tuple[Document, bytes, int, Tokens]]:
    """A piece's documents: each with its text's hash, split and tokens without end-of-text. Others are counted."""
    limit = int(config.validation_fraction * 2**64)
    eot_id = end_of_text_id(tokenizer, config.end_of_text)
    for batch in _batches(recipe.documents(config, piece), skipped):
        for document, ids in zip(batch, encode(tokenizer, [d.text for d in batch], eot_id=eot_id), strict=True):
            if ids is None:
                skipped[UNENCODED] += 1
                continue
            content = content_hash(document.text)
            yield document, content, int(int.from_bytes(content[:8], "big") < limit), ids  # 0: train, 1: validation


def document_key(content: bytes, piece: int, number: int) -> bytes:
    """Where a document stands in the shuffle: unrelated to where it came from, another for each copy of a text."""
    place = piece.to_bytes(8, "big") + number.to_bytes(8, "big")
    return hashlib.blake2b(content + place, digest_size=KEY_BYTES).digest()


def bucket_of(key: bytes, num_buckets: int) -> int:
    return int.from_bytes(key[:8], "big") * num_buckets >> 64


def _batches(documents: Iterator[Document | Skipped], skipped: Counter[str]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    size = 0
    for document in documents:
        if isinstance(document, Skipped):
            skipped[document.reason] += 1
            continue
        batch.append(document)
        size += len(document.text)
        if size >= ENCODE_CHARS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _to_batch(documents: Sequence[_Entry], eot: Tokens) -> pa.RecordBatch:
    keys = pa.array([key for key, _, _ in documents], pa.binary(KEY_BYTES))
    # bytes of what is no UTF-8 may stand in a name, as in that of a file
    names = pa.array([name.encode(errors="backslashreplace") for _, name, _ in documents], pa.string())
    ends = np.cumsum([0, *(len(ids) + 1 for _, _, ids in documents)], dtype=np.int64)
    values = np.concatenate([np.empty(0, np.uint32), *(part for _, _, ids in documents for part in (ids, eot))])
    return pa.record_batch([keys, names, pa.LargeListArray.from_arrays(ends, values)], schema=_SCHEMA)
