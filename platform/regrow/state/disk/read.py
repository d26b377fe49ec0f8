"""Reading the files of a committed checkpoint, every byte checked. No torch, so that every process can."""

import numpy as np

from regrow.errors import CheckpointError
from regrow.state.checksums import checksums, whole_chunks
from regrow.state.disk.format import DataFile, Index, Stored, decode_header
from regrow.state.layout import ITEM_BYTES
from regrow.state.reshard import Read, Source
from regrow.storage import Storage


def read_headers(source: Storage, index: Index) -> dict[Source, Stored]:
    """What every data file in the step's folder `source` holds, and where. Raises CheckpointError as `read_header`."""
    return {
        Source(file.name, stored.span): stored for file in index.files for stored in read_header(source, file, index)
    }


def read_header(source: Storage, file: DataFile, index: Index) -> list[Stored]:
    """What one data file holds. Raises CheckpointError where it is missing, or not the one that the index means."""
    try:
        data = source.read_range(file.name, 0, file.header_bytes)
    except FileNotFoundError as error:
        raise CheckpointError(f"{source}/{file.name}: named by the index but not there") from error
    return decode_header(data, file, index, f"{source}/{file.name}")


def read_elements(source: Storage, read: Read, stored: Stored) -> memoryview:
    """The bytes of a read, from whole chunks whose checksums hold. Raises CheckpointError where one does not."""
    item = ITEM_BYTES[stored.span.dtype]
    begin, end = (read.start - stored.span.start) * item, (read.stop - stored.span.start) * item
    aligned_begin, aligned_end, chunks = whole_chunks(begin, end, stored.span.num_bytes)
    try:
        content = source.read_range(read.source.file, stored.offset + aligned_begin, aligned_end - aligned_begin)
    except FileNotFoundError as error:
        raise CheckpointError(f"{source}/{read.source.file}: it was there, and is not any more") from error
    data = memoryview(content)
    if data.nbytes != aligned_end - aligned_begin or not np.array_equal(checksums(data), stored.crc[chunks]):
        raise CheckpointError(
            f"{source}/{read.source.file}: {stored.span.name} fails its checksum; the file is damaged"
        )
    return data[begin - aligned_begin : end - aligned_begin]


def check_size(source: Storage, file: DataFile) -> None:
    """Raises CheckpointError where a file is not there or does not have the bytes that the index says."""
    try:
        end = source.read_range(file.name, file.num_bytes - 1, 2)
    except FileNotFoundError as error:
        raise CheckpointError(f"{source}/{file.name}: named by the index but not there") from error
    if len(end) != 1:
        size = "more" if end else "fewer"
        raise CheckpointError(
            f"{source}/{file.name}: has {size} than its {file.num_bytes:,} bytes; the file is damaged"
        )
