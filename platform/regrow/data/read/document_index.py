"""Which documents a shard's rows hold: a small parquet file beside it, so that it can be looked up by a search.

A document's tokens are those of its text and the end-of-text behind it: each token of a split's stream but the first is
one document's. The index of a shard has a row for each document that the shard's targets are of, in their order:
`begin`, where its first token stands in the stream, and `id`. A document that is cut by a shard's border is in the
indexes of both.
"""

import hashlib
import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from regrow.data.read.manifest import Shard
from regrow.errors import DataError, first_line
from regrow.storage import Storage

_SCHEMA = pa.schema([pa.field("begin", pa.int64(), nullable=False), pa.field("id", pa.string(), nullable=False)])


@dataclass(frozen=True)
class DocumentIndex:
    """The documents of one shard."""

    begins: NDArray[np.int64]  # ascending
    ids: list[str]

    def of_row(self, row: int, seq_len: int) -> list[str]:
        """The documents of a row of the shard, by its number in the split."""
        first_target = row * seq_len + 1
        first, last = np.searchsorted(self.begins, [first_target, first_target + seq_len - 1], side="right") - 1
        return self.ids[first : last + 1]


def index_name(shard: str) -> str:
    """The file beside `train-00000.parquet` is `train-00000.documents.parquet`."""
    return shard.removesuffix(".parquet") + ".documents.parquet"


def write_index(folder: Storage, shard: str, begins: NDArray[np.int64], ids: pa.Array | Sequence[str]) -> str:
    """Write the index of the shard of this name, durably and whole or not at all; returns its sha256."""
    table, file = pa.table([pa.array(begins), pa.array(ids, pa.string())], schema=_SCHEMA), io.BytesIO()
    pq.write_table(table, file, compression="zstd", use_dictionary=False)  # ids do not repeat
    folder.write_chunks(index_name(shard), [file.getbuffer()])
    return hashlib.sha256(file.getbuffer()).hexdigest()


def read_index(storage: Storage, shard: Shard) -> DocumentIndex:
    """The index of a shard of the corpus at `storage`. Raises DataError if it is missing or damaged."""
    name = index_name(shard.file)
    try:
        data = storage.read_bytes(name)
        if hashlib.sha256(data).hexdigest() != shard.documents_sha256:
            raise ValueError("it is not what its manifest says")
        table = pq.ParquetFile(pa.BufferReader(data)).read(use_threads=False)  # a thread may outlive the interpreter
    except (OSError, ValueError) as error:
        raise DataError(
            f"{storage}/{name} cannot be read ({first_line(error)}); "
            f"delete {storage} and run python -m jobs.prepare_data"
        ) from error
    return DocumentIndex(table["begin"].to_numpy(), table["id"].to_pylist())
