"""Reading the files of a committed checkpoint, every byte checked. No torch, so that every process can."""

import numpy as np

from regrow.errors import CheckpointError
from regrow.state.checksums import CHUNK_BYTES, checksums
from regrow.state.disk.format import DataFile, Index, Stored, decode_header
from regrow.state.reshard import Source
from regrow.storage import Storage


def read_headers(source: Storage, index: Index) -> dict[Source, Stored]:
    """What every data file in the step's folder `source` holds, and where. Raises CheckpointError as `read_header`."""
    return {
        Source(file.name, stored.piece): stored for file in index.files for stored in read_header(source, file, index)
    }


def read_header(source: Storage, file: DataFile, index: Index) -> list[Stored]:
    """What one data file holds. Raises CheckpointError where it is missing, or not the one that the index means."""
    try:
        data = source.read_range(file.name, 0, file.header_bytes)
    except FileNotFoundError as error:
        raise CheckpointError(f"{source}/{file.name}: named by the index but not there") from error
    return decode_header(data, file, index, f"{source}/{file.name}")


def read_chunks(source: Storage, file: str, stored: Stored, begin: int, end: int) -> memoryview:
    """Bytes [begin, end) of what is stored, whole chunks whose checksums hold. Raises CheckpointError where one does
    not."""
    try:
        data = memoryview(source.read_range(file, stored.offset + begin, end - begin))
    except FileNotFoundError as error:
        raise CheckpointError(f"{source}/{file}: it was there, and is not any more") from error
    first = begin // CHUNK_BYTES
    if data.nbytes != end - begin or not np.array_equal(
        checksums(data), stored.crc[first : first - (begin - end) // CHUNK_BYTES]
    ):
        raise CheckpointError(f"{source}/{file}: {stored.piece.box.name} fails its checksum; the file is damaged")
    return data


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
