"""Token shards: parquet files of fixed-width rows in uniform row groups, so that row -> bytes is arithmetic.

A row is `seq_len + 1` token ids, little-endian uint32, as one FixedSizeBinary value: zstd, no dictionary (it would
decode every value twice for nothing). The footer has a checksum of each row group: parquet's own leave out the headers
of pages, where one flipped byte can turn all rows of a page into others.

Which documents a shard's rows hold is in a small parquet file beside it, so that it can be looked up by a search. A
document's tokens are those of its text and the end-of-text behind it: each token of a split's stream but the first is
one document's. The index has a row for each document that the shard's targets are of, in their order: `begin`, where
its first token stands in the stream, and `id`. A document that is cut by a shard's border is in the indexes of both.
"""

import hashlib
import io
import threading
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from regrow.data.read.batch import Rows
from regrow.data.read.manifest import Manifest, Shard
from regrow.data.read.range_cache import RangeCache
from regrow.data.sized_file import SizedFile
from regrow.errors import DataError, UnavailableError, first_line
from regrow.storage import Storage, may_pass

COLUMN = "tokens"
CHECKSUMS = b"regrow.crc32"  # of the row groups, in the footer's key-value metadata
OPEN_SHARDS = 64  # footers that a reader keeps
DOCUMENTS = pa.schema([pa.field("begin", pa.int64(), nullable=False), pa.field("id", pa.string(), nullable=False)])


class ShardReader:
    """Rows of one split of a corpus by their number, wherever the corpus lies. Threads may share one; it pickles.

    Every byte that it reads is checked: a shard's footer, once it is opened, against the manifest; a row group, each
    time, against the footer. Nothing but the row groups asked for is fetched.
    """

    def __init__(
        self,
        folder: Path | str,
        split: str,
        cache: RangeCache | None = None,
        manifest: Manifest | None = None,
        retry_s: float | None = None,
    ) -> None:
        """`folder` is a path or a URI; `cache` keeps what is fetched of a remote one on this node.

        A store that fails is asked again for `retry_s` seconds, None: as long as storage does. Nothing is read where
        its manifest is given. Raises DataError where the folder holds no finished corpus.
        """
        self.storage, self.split, self.cache = Storage.at(folder), split, cache
        self.storage.retry_s = retry_s
        self.manifest = manifest or Manifest.load(folder)
        shards = self.manifest.splits[split].shards
        self.num_rows = self.manifest.splits[split].num_rows
        self.rows_per_group = self.manifest.rows_per_group
        self.row_tokens = self.manifest.seq_len + 1
        self._shards = shards
        self._starts = np.cumsum([0, *(shard.num_rows for shard in shards)])
        self.footers: OrderedDict[int, pq.FileMetaData] = OrderedDict()
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        cache = self.cache and (self.cache.folder, self.cache.limit_bytes)
        return _open_again, (str(self.storage), self.split, cache, self.storage.retry_s)

    def read(self, row_ids: Sequence[int] | NDArray[np.int64]) -> Rows:
        """Rows, uint32[n, seq_len + 1], in the order asked; each row group that they stand in is decoded once.

        Raises DataError naming a shard that is missing or damaged; UnavailableError where storage fails.
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
            out[here] = self.read_group(int(key) >> 32, int(key) & 0xFFFFFFFF)[offsets[here]]
        return out

    def read_group(self, shard_id: int, group_id: int) -> Rows:
        """A row group; where what the cache holds of it is damaged, fetched anew."""
        where = f"{self.storage / self._shards[shard_id].file}: row group {group_id}"
        for last_try in [True] if self.cache is None else [False, True]:
            ranges: list[str] = []  # that the cache was asked for
            try:
                return self._decode(shard_id, group_id, ranges)
            except OSError as error:  # of storage: bytes are checked before they are decoded
                raise (UnavailableError if may_pass(error) else DataError)(
                    f"{where} cannot be read here ({first_line(error.__cause__ or error)}); is {self.storage} mounted "
                    "on this host, and can it be reached?"
                ) from error
            except (pa.ArrowException, ValueError, KeyError) as error:
                with self._lock:
                    self.footers.pop(shard_id, None)
                if self.cache is not None:
                    self.cache.forget(ranges)
                if last_try:
                    raise DataError(
                        f"{where} cannot be read ({first_line(error)}); look with python -m jobs.inspect_data "
                        f"{self.storage} --verify, and if it is damaged there too, delete it and run python -m "
                        "jobs.prepare_data"
                    ) from error
        raise AssertionError("unreachable")

    def _decode(self, shard_id: int, group_id: int, ranges: list[str]) -> Rows:
        shard = self._shards[shard_id]
        expected = min(self.rows_per_group, shard.num_rows - group_id * self.rows_per_group)
        footer = self._footer(shard_id, ranges)
        chunk = footer.row_group(group_id).column(0)
        begin, num_bytes = chunk.data_page_offset, chunk.total_compressed_size
        data = self._fetch(shard.file, begin, num_bytes, ranges)
        if _checksum(data) != (footer.metadata or {})[CHECKSUMS].split()[group_id]:
            raise ValueError("its bytes are not those that the footer names")
        source = pa.PythonFile(_Range(begin, data, shard.num_bytes))
        with pq.ParquetFile(source, metadata=footer) as file:
            table = file.read_row_group(group_id, columns=[COLUMN], use_threads=False)
        rows = _to_rows(table.column(COLUMN), self.row_tokens)
        if len(rows) != expected:
            raise ValueError(f"{len(rows)} rows instead of {expected}")
        return rows

    def _footer(self, shard_id: int, ranges: list[str]) -> pq.FileMetaData:
        with self._lock:
            if shard_id in self.footers:
                self.footers.move_to_end(shard_id)
                return self.footers[shard_id]
        shard = self._shards[shard_id]
        data = self._fetch(shard.file, shard.num_bytes - shard.footer_bytes, shard.footer_bytes, ranges)
        if hashlib.sha256(data).hexdigest() != shard.footer_sha256:
            raise ValueError("its footer is not the one that the manifest names: another file, or a damaged one")
        footer = pq.read_metadata(pa.BufferReader(data))
        with self._lock:
            while len(self.footers) >= OPEN_SHARDS:
                self.footers.popitem(last=False)
            self.footers[shard_id] = footer
        return footer

    def _fetch(self, name: str, begin: int, num_bytes: int, ranges: list[str]) -> bytes:
        def fetch() -> bytes:
            return self.storage.read_range(name, begin, num_bytes)

        if self.cache is None:
            return fetch()
        ranges.append(f"{self.manifest.sha256}/{name}[{begin}:{begin + num_bytes}]")
        return self.cache.get(ranges[-1], fetch)


def _open_again(folder: str, split: str, cache: tuple[Path, int] | None, retry_s: float | None) -> ShardReader:
    return ShardReader(folder, split, RangeCache(*cache) if cache else None, retry_s=retry_s)


class _Range(SizedFile):
    """A file of which only one range is there."""

    def __init__(self, begin: int, data: bytes, num_bytes: int) -> None:
        super().__init__(num_bytes)
        self._begin, self._data = begin, memoryview(data)

    def read(self, size: int | None = -1) -> bytes:
        begin = self._position - self._begin
        end = len(self._data) if size is None or size < 0 else begin + size
        if begin < 0:
            raise OSError("a read before the range")
        data = bytes(self._data[begin:end])
        self._position += len(data)
        return data


def write_shard(folder: Storage, name: str, rows: Rows, *, rows_per_group: int, documents_sha256: str) -> Shard:
    """Write rows, uint32[n, row_tokens], in uniform row groups, durably and whole or not at all.

    `documents_sha256` is that of its document index, which `write_index` writes.
    """
    schema = pa.schema([pa.field(COLUMN, pa.binary(rows.shape[1] * 4), nullable=False)])
    file, checksums = io.BytesIO(), []
    with pq.ParquetWriter(
        file,
        schema,
        compression="zstd",
        use_dictionary=False,
        write_statistics=False,
        write_page_checksum=True,  # for other readers
        store_schema=False,
    ) as writer:
        for begin in range(0, len(rows), rows_per_group):
            group_begin = file.tell()
            group = pa.table([_to_column(rows[begin : begin + rows_per_group])], schema=schema)
            writer.write_table(group, row_group_size=rows_per_group)
            file.seek(group_begin)
            checksums.append(_checksum(file.read()))
        writer.add_key_value_metadata({CHECKSUMS: b" ".join(checksums)})
    data = file.getvalue()
    footer_bytes = int.from_bytes(data[-8:-4], "little") + 8  # parquet: footer, its length, PAR1
    folder.write_bytes(name, data)
    footer_sha256 = hashlib.sha256(data[-footer_bytes:]).hexdigest()
    return Shard(
        name, len(rows), len(data), hashlib.sha256(data).hexdigest(), footer_bytes, footer_sha256, documents_sha256
    )


def verify(folder: Path | str) -> Iterator[tuple[int, int]]:
    """Check every file against the manifest, yielding (bytes done, bytes of all shards) on the way.

    Raises DataError naming the first file that is missing or differs.
    """
    storage, manifest = Storage.at(folder), Manifest.load(folder)
    shards = [shard for split in manifest.splits.values() for shard in split.shards]
    files = [(manifest.tokenizer.file, manifest.tokenizer.sha256, 0)]
    for shard in shards:
        files += [(index_name(shard.file), shard.documents_sha256, 0), (shard.file, shard.sha256, shard.num_bytes)]
    total, done = sum(num_bytes for _, _, num_bytes in files), 0
    for name, sha256, num_bytes in files:
        try:
            problem = (
                "" if hashlib.sha256(storage.read_bytes(name)).hexdigest() == sha256 else "not what its manifest says"
            )
        except FileNotFoundError:
            problem = "missing"
        if problem:
            raise DataError(f"{storage / name} is {problem}; delete {storage} and run python -m jobs.prepare_data")
        done += num_bytes
        yield done, total


def _checksum(data: bytes) -> bytes:
    """Eight hex digits."""
    return b"%08x" % zlib.crc32(data)


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
    table, file = pa.table([pa.array(begins), pa.array(ids, pa.string())], schema=DOCUMENTS), io.BytesIO()
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
            f"{storage / name} cannot be read ({first_line(error)}); "
            f"delete {storage} and run python -m jobs.prepare_data"
        ) from error
    return DocumentIndex(table["begin"].to_numpy(), table["id"].to_pylist())
