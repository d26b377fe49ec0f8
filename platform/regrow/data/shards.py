"""Token shards: parquet files of fixed-width rows in uniform row groups, so that row -> bytes is arithmetic.

A row is `seq_len + 1` token ids, little-endian uint32, as one FixedSizeBinary value: zstd, page checksums, no
dictionary (it would decode every value twice for nothing).
"""

import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from regrow.data.batch import Rows
from regrow.data.manifest import Manifest, Shard
from regrow.errors import DataError, first_line
from regrow.plan.order import ORDER_VERSION

COLUMN = "tokens"
OPEN_SHARDS = 16  # files that a reader keeps open


class ShardReader:
    """Rows of one split by their number. Verifies page checksums as it reads. Threads may share one; it pickles."""

    def __init__(self, folder: Path, split: str) -> None:
        """Raises DataError where the folder holds no finished corpus."""
        self.folder, self.split = Path(folder), split
        self.manifest = Manifest.load(self.folder)
        shards = self.manifest.splits[split].shards
        self.num_rows = self.manifest.splits[split].num_rows
        self.rows_per_group = self.manifest.rows_per_group
        self.row_tokens = self.manifest.seq_len + 1
        self._shards = shards
        self._starts = np.cumsum([0, *(shard.num_rows for shard in shards)])
        self._open: OrderedDict[int, pq.ParquetFile] = OrderedDict()
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardReader, (self.folder, self.split)  # open files do not travel

    def read(self, row_ids: Sequence[int] | NDArray[np.int64]) -> Rows:
        """Rows, uint32[n, seq_len + 1], in the order asked; each row group that they stand in is decoded once.

        Raises DataError naming a shard that is missing or damaged.
        """
        wanted = np.asarray(row_ids, np.int64)
        out = np.empty((len(wanted), self.row_tokens), np.uint32)
        if len(wanted) == 0:
            return out
        low, high = int(wanted.min()), int(wanted.max())
        assert 0 <= low <= high < self.num_rows, f"rows {low}..{high} of {self.num_rows}"
        shard_ids = np.searchsorted(self._starts, wanted, side="right") - 1
        group_ids, offsets = np.divmod(wanted - self._starts[shard_ids], self.rows_per_group)
        keys = (shard_ids << 32) | group_ids
        for key in np.unique(keys):
            here = keys == key
            out[here] = self._read_group(int(key) >> 32, int(key) & 0xFFFFFFFF)[offsets[here]]
        return out

    def check_order(self, global_batch_seqs: int) -> None:
        """Raises DataError if the corpus was prepared for another order, or cannot fill one global batch."""
        manifest = self.manifest
        if manifest.order_version != ORDER_VERSION:
            raise DataError(
                f"{self.folder} was prepared for order version {manifest.order_version}, this code has "
                f"{ORDER_VERSION}; delete it and run python -m jobs.prepare_data"
            )
        if self.num_rows < global_batch_seqs:
            raise DataError(
                f"{manifest.recipe} has {self.num_rows} {self.split} rows of {manifest.seq_len} tokens, fewer than one "
                f"global batch of optim.global_batch_seqs={global_batch_seqs}; lower it to at most {self.num_rows}, "
                "lower data.seq_len, or choose a larger data.recipe"
            )

    def _read_group(self, shard_id: int, group_id: int) -> Rows:
        shard = self._shards[shard_id]
        expected = min(self.rows_per_group, shard.num_rows - group_id * self.rows_per_group)
        try:
            with self._lock:  # a ParquetFile is not for two threads at once
                table = self._file(shard_id).read_row_group(group_id, columns=[COLUMN], use_threads=False)
            rows = _to_rows(table.column(COLUMN), self.row_tokens)
            if len(rows) != expected:
                raise ValueError(f"{len(rows)} rows instead of {expected}")
            return rows
        except (OSError, pa.ArrowException, ValueError, KeyError) as error:
            with self._lock:
                self._open.pop(shard_id, None)
            raise DataError(
                f"{self.folder / shard.file}: row group {group_id} cannot be read ({first_line(error)}); "
                f"delete {self.folder} and run python -m jobs.prepare_data"
            ) from error

    def _file(self, shard_id: int) -> pq.ParquetFile:
        if shard_id not in self._open:
            while len(self._open) >= OPEN_SHARDS:
                self._open.popitem(last=False)[1].close()
            path = self.folder / self._shards[shard_id].file
            self._open[shard_id] = pq.ParquetFile(path, page_checksum_verification=True)
        self._open.move_to_end(shard_id)
        return self._open[shard_id]


def write_shard(path: Path, name: str, rows: Rows, *, rows_per_group: int) -> Shard:
    """Write rows, uint32[n, row_tokens], as the shard that will be called `name`, durably, in uniform row groups."""
    schema = pa.schema([pa.field(COLUMN, pa.binary(rows.shape[1] * 4), nullable=False)])
    with pq.ParquetWriter(
        path,
        schema,
        compression="zstd",
        use_dictionary=False,
        write_statistics=False,
        write_page_checksum=True,
        store_schema=False,
    ) as writer:
        for begin in range(0, len(rows), rows_per_group):
            group = pa.table([_to_column(rows[begin : begin + rows_per_group])], schema=schema)
            writer.write_table(group, row_group_size=rows_per_group)
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    return Shard(name, len(rows), path.stat().st_size, file_sha256(path))


def verify(folder: Path) -> Iterator[tuple[int, int]]:
    """Check every shard and the tokenizer against the manifest, yielding (bytes done, bytes of all) on the way.

    Raises DataError naming the first file that is missing or differs.
    """
    manifest = Manifest.load(folder)
    shards = [shard for split in manifest.splits.values() for shard in split.shards]
    files = [(shard.file, shard.sha256, shard.num_bytes) for shard in shards]
    total, done = sum(num_bytes for _, _, num_bytes in files), 0
    for name, sha256, num_bytes in [(manifest.tokenizer.file, manifest.tokenizer.sha256, 0), *files]:
        path = Path(folder) / name
        if not path.is_file() or file_sha256(path) != sha256:
            raise DataError(
                f"{path} is {'not what its manifest says' if path.exists() else 'missing'}; "
                f"delete {folder} and run python -m jobs.prepare_data"
            )
        done += num_bytes
        yield done, total


def file_sha256(path: Path) -> str:
    """Hex digest of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _to_column(rows: Rows) -> pa.FixedSizeBinaryArray:
    """Rows as an Arrow column that shares their memory."""
    data = np.ascontiguousarray(rows, "<u4")
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(data.shape[1] * 4), len(data), [None, pa.py_buffer(data)])


def _to_rows(column: pa.ChunkedArray, row_tokens: int) -> Rows:
    """A column of one row group as rows that share its memory, read-only."""
    if column.type != pa.binary(row_tokens * 4):
        raise ValueError(f"a column of {column.type} instead of {row_tokens} tokens a row")
    parts = [
        np.frombuffer(chunk.buffers()[1], "<u4").reshape(-1, row_tokens)[chunk.offset : chunk.offset + len(chunk)]
        for chunk in column.chunks
    ]
    return parts[0] if len(parts) == 1 else np.concatenate([np.empty((0, row_tokens), np.uint32), *parts])
