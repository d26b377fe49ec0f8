"""The bytes of a checkpoint: safetensors files of raw boxes, one JSON index, then COMMIT. See docs/file-formats.md.

A chain of trust from one small file: COMMIT names the index by its sha256, the index names each data file's header by
its sha256, and the header holds the crc32 of every chunk of data. Whatever is torn, swapped or flipped breaks it.
Nothing is pickled; nothing is identified by a rank.
"""

import base64
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np

from regrow.errors import CheckpointError
from regrow.plan.boxes import ITEM_BYTES, Box, Piece, chunk
from regrow.state.checksums import CHUNK_BYTES, Crc

FORMAT, VERSION = "regrow-checkpoint", 4
READABLE = (2, 3, VERSION)
FLAT = f"{FORMAT}-2"  # of files in versions 2 and 3: elements [start, stop) of a tensor, or of its blocks of columns
COMMIT, DAMAGED = "COMMIT", "DAMAGED"
SAFETENSORS_DTYPES = {"float32": "F32", "float64": "F64", "bfloat16": "BF16", "float16": "F16", "int64": "I64"}
TORCH_DTYPES = {code: name for name, code in SAFETENSORS_DTYPES.items()}


@dataclass(frozen=True)
class DataFile:
    """A row of the index: one safetensors file."""

    name: str
    num_bytes: int
    header_bytes: int  # the 8 length bytes and the JSON header
    header_sha256: str


@dataclass(frozen=True)
class Index:
    """What a checkpoint holds, of which run, and in which files."""

    run_id: str
    generation: int
    step: int
    scalars: dict[str, int]
    tensors: dict[str, tuple[str, tuple[int, ...]]]  # name -> dtype, shape
    files: tuple[DataFile, ...]
    information: dict[str, Any] = field(default_factory=dict)  # world size, time: read by people only
    column_blocks: dict[str, int] = field(default_factory=dict)  # version 3: tensors in so many blocks of columns

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)

    @property
    def tensor_bytes(self) -> int:
        """Of all whole tensors."""
        return sum(prod(shape) * ITEM_BYTES[dtype] for dtype, shape in self.tensors.values())

    def to_json(self) -> bytes:
        content = {
            "format": FORMAT,
            "version": VERSION,
            "run_id": self.run_id,
            "generation": self.generation,
            "step": self.step,
            "scalars": self.scalars,
            "tensors": {name: {"dtype": dtype, "shape": list(shape)} for name, (dtype, shape) in self.tensors.items()},
            "files": [vars(file) for file in self.files],
            "information": self.information,
        }
        return json.dumps(content, indent=1).encode()

    @staticmethod
    def from_json(data: bytes, where: str) -> "Index":
        """Raises CheckpointError where `data` is not an index of a version that this code reads."""
        try:
            content = json.loads(data)
            if content["format"] != FORMAT or content["version"] not in READABLE:
                raise CheckpointError(
                    f"{where} is {content['format']} version {content['version']}; this regrow reads {FORMAT} "
                    f"{', '.join(map(str, READABLE))}"
                )
            return Index(
                run_id=content["run_id"],
                generation=content["generation"],
                step=content["step"],
                scalars=content["scalars"],
                tensors={name: (t["dtype"], tuple(t["shape"])) for name, t in content["tensors"].items()},
                files=tuple(DataFile(**file) for file in content["files"]),
                information=content["information"],
                column_blocks=content.get("column_blocks", {}),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{where} is not a checkpoint index: {type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class Stored:
    """A piece of a box inside a data file, and what checks it."""

    piece: Piece
    offset: int  # of its first byte in the file
    crc: Crc  # of each chunk of it


def encode_header(pieces: Iterable[tuple[Piece, Crc]], *, run_id: str, generation: int, step: int) -> bytes:
    """The safetensors header of a file that holds these pieces one after another, padded to 8 bytes."""
    entries: dict[str, Any] = {}
    checks: dict[str, str] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    at = 0
    for piece, crc in pieces:
        key, shape = _key(piece)
        entries[key] = {
            "dtype": SAFETENSORS_DTYPES[piece.box.dtype],
            "shape": shape,
            "data_offsets": [at, at + piece.num_bytes],
        }
        checks[key] = base64.b64encode(crc.tobytes()).decode()
        shapes[piece.box.name] = piece.box.shape
        at += piece.num_bytes
    metadata = {
        "format": f"{FORMAT}-{VERSION}",
        "run_id": run_id,
        "generation": str(generation),
        "step": str(step),
        "chunk_bytes": str(CHUNK_BYTES),
        "shapes": json.dumps(shapes, separators=(",", ":")),
        "crc32": json.dumps(checks, separators=(",", ":")),
    }
    text = json.dumps({"__metadata__": metadata, **entries}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def decode_header(data: bytes, file: DataFile, index: Index, where: str) -> list[Stored]:
    """The pieces in a data file from its header bytes. Raises CheckpointError where the index names other ones."""
    if hashlib.sha256(data).hexdigest() != file.header_sha256:
        raise CheckpointError(
            f"{where}: the header's sha256 is not the one in the index; the file is damaged or swapped"
        )
    content = json.loads(data[8:])
    metadata = content.pop("__metadata__")
    if (metadata["run_id"], int(metadata["step"])) != (index.run_id, index.step):
        raise CheckpointError(f"{where}: belongs to run {metadata['run_id']} step {metadata['step']}")
    assert int(metadata["chunk_bytes"]) == CHUNK_BYTES, "every version has one chunk size"
    shapes, checks = json.loads(metadata["shapes"]), json.loads(metadata["crc32"])
    stored = []
    for key, entry in content.items():
        name, *ranges = key.split("[")
        bounds = [[tuple(map(int, each.split(":"))) for each in r.rstrip("]").split(",") if each] for r in ranges]
        whole = Box.whole(name, tuple(shapes[name]), TORCH_DTYPES[entry["dtype"]])
        if metadata["format"] == FLAT:
            start, stop = bounds[0][0]
            piece = _piece_of_columns(whole, start, stop, index.column_blocks.get(name, 1))
        else:
            offsets, sizes = tuple(a for a, _ in bounds[0]), tuple(b - a for a, b in bounds[0])
            piece = Piece.all_of(replace(whole, offsets=offsets, sizes=sizes))
            for start, stop in bounds[1] if len(bounds) > 1 else ():
                piece = Piece(piece.box, start, stop)
        stored.append(Stored(piece, file.header_bytes + entry["data_offsets"][0], _decode_crc(checks[key])))
    return stored


def _key(piece: Piece) -> tuple[str, tuple[int, ...]]:
    """Names a piece in its file, and its shape there: a box has its sizes, elements [start, stop) of one are flat.

    >>> _key(Piece(Box("w", (8, 8), (2, 0), (3, 8)), 0, 24))
    ('w[2:5,0:8]', (3, 8))
    >>> _key(Piece(Box("w", (8, 8), (2, 0), (3, 8)), 4, 24))
    ('w[2:5,0:8][4:24]', (20,))
    """
    if piece == Piece.all_of(piece.box):
        return str(piece.box), piece.box.sizes
    return f"{piece.box}[{piece.start}:{piece.stop}]", (piece.num_elements,)


def _piece_of_columns(whole: Box, start: int, stop: int, blocks: int) -> Piece:
    """Elements [start, stop) of a tensor as versions 2 and 3 count them: one block of columns after another."""
    if blocks == 1:
        return Piece(whole, start, stop)
    block, first = divmod(start, whole.num_elements // blocks)
    return Piece(whole.narrow(1, chunk(whole.shape[1], block, blocks)), first, first + stop - start)


def _decode_crc(text: str) -> Crc:
    return np.frombuffer(base64.b64decode(text), "<u4")
