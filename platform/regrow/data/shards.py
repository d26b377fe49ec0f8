"""Token shards: parquet files of fixed-width rows in uniform row groups, so that row -> bytes is arithmetic.

A row is `seq_len + 1` token ids, uint32, as one FixedSizeBinary value: zstd, page checksums, no dictionary.
"""

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from regrow.data.manifest import Manifest, Shard
from regrow.errors import DataError

COLUMN = "tokens"
OPEN_SHARDS = 16  # kept open by a reader

Rows = NDArray[np.uint32]


class ShardReader:
    """Reads rows of one split by number. Verifies page checksums as it reads; one reader a process and thread."""

    def __init__(self, folder: Path, split: str) -> None:
        """Raises DataError where the folder holds no complete corpus."""
        self.folder, self.manifest = folder, Manifest.load(folder)
        self.rows_per_group = self.manifest.rows_per_group
        self.row_tokens = self.manifest.seq_len + 1
        shards = self.manifest.splits[split].shards
        self.num_rows = self.manifest.splits[split].num_rows
        self._files = [shard.file for shard in shards]
        self._starts = np.cumsum([0, *(shard.num_rows for shard in shards)])
        self._open = lru_cache(OPEN_SHARDS)(self._open_shard)

    def read(self, rows: Sequence[int] | NDArray[np.int64]) -> Rows:
        """uint32 [n, seq_len + 1] in the order asked; each row group they stand in is read once.

        Raises DataError naming the shard that is missing or damaged.
        """
        wanted = np.asarray(rows, np.int64)
        out = np.empty((len(wanted), self.row_tokens), np.uint32)
        if len(wanted) == 0:
            return out
        assert 0 <= wanted.min() <= wanted.max() < self.num_rows, f"rows {wanted.min()}..{wanted.max()}"
        shards = np.searchsorted(self._starts, wanted, side="right") - 1
        groups, offsets = np.divmod(wanted - self._starts[shards], self.rows_per_group)
        for shard, group in np.unique(np.stack([shards, groups]), axis=1).T.tolist():
            here = (shards == shard) & (groups == group)
            out[here] = self._read_group(shard, group)[offsets[here]]
        return out

    def _read_group(self, shard: int, group: int) -> Rows:
        try:
            table = self._open(shard).read_row_group(group, columns=[COLUMN], use_threads=False)
            return to_rows(table.column(COLUMN), self.row_tokens)
        except (OSError, pa.ArrowException, ValueError) as error:
            self._open.cache_clear()
            raise DataError(
                f"{self.folder / self._files[shard]}: row group {group} cannot be read ({_first_line(error)}); "
                f"delete {self.folder} and run python -m jobs.prepare_data again"
            ) from error

    def _open_shard(self, shard: int) -> pq.ParquetFile:
        return pq.ParquetFile(self.folder / self._files[shard], page_checksum_verification=True, memory_map=True)


def write_shard(path: Path, rows: Rows, *, rows_per_group: int) -> Shard:
    """Write rows, uint32 [n, seq_len + 1], as one shard; bit-identical for the same rows and versions."""
    table = pa.table({COLUMN: to_column(rows)})
    pq.write_table(
        table,
        path,
        row_group_size=rows_per_group,
        compression="zstd",
        use_dictionary=False,
        write_statistics=False,
        write_page_checksum=True,
        store_schema=False,
    )
    return Shard(path.name, len(rows), path.stat().st_size, file_sha256(path))


def to_column(rows: Rows) -> pa.FixedSizeBinaryArray:
    """Rows, uint32 [n, tokens], as an Arrow column that shares their memory."""
    data = np.ascontiguousarray(rows, dtype="<u4")
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(data.shape[1] * 4), len(data), [None, pa.py_buffer(data)])


def to_rows(column: Any, row_tokens: int) -> Rows:
    """An Arrow column of `to_column` as uint32 [n, row_tokens], sharing memory where it is in one piece."""
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
        if isinstance(column, pa.ChunkedArray):
            column = column.chunk(0)
    if column.type != pa.binary(row_tokens * 4):
        raise ValueError(f"column of {column.type}, expected {row_tokens} tokens a row")
    tokens = np.frombuffer(column.buffers()[1], "<u4")
    begin = column.offset * row_tokens
    return tokens[begin : begin + len(column) * row_tokens].reshape(len(column), row_tokens)


def verify(folder: Path) -> None:
    """Check every shard's size and sha256 against the manifest. Raises DataError naming the first that differs."""
    for split in Manifest.load(folder).splits.values():
        for shard in split.shards:
            path = folder / shard.file
            if not path.is_file() or path.stat().st_size != shard.num_bytes or file_sha256(path) != shard.sha256:
                raise DataError(f"{path} is missing or not what its manifest says; delete {folder} to redo it")


def file_sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
