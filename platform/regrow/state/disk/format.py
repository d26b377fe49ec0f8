"""The bytes of a checkpoint: safetensors files of stacked tensors, one metadata file, COMMIT. See docs/file-formats.md.

A chain of trust from one small file: COMMIT names the metadata file and the sha256 of the JSON that it begins with;
that JSON holds the crc32 of each block of the rest (`metadata`), and the rest the crc32 of every chunk of data. Of
versions 2 to 4, which are read, the JSON was all, and the checksums stood in the headers of the data files. Whatever is
torn, swapped or flipped breaks it. Nothing is pickled; nothing is identified by a rank.
"""

import base64
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np

from regrow.control.values import Scalar
from regrow.errors import CheckpointError, ForeignCheckpointError
from regrow.plan.boxes import ITEM_BYTES, Box, Piece, chunk
from regrow.state.checksums import CHUNK_BYTES, Crc
from regrow.state.disk.stacks import Part, Stack

FORMAT, VERSION = "regrow-checkpoint", 5
READABLE = (2, 3, 4, VERSION)
STORED_CHUNK_BYTES = 128 << 10  # of data that one checksum covers; in versions 2 to 4, CHUNK_BYTES
FLAT = f"{FORMAT}-2"  # of files in versions 2 and 3: elements [start, stop) of a tensor, or of its blocks of columns
COMMIT, DAMAGED, KEEP = "COMMIT", "DAMAGED", "KEEP"
SAFETENSORS_DTYPES = {"float32": "F32", "float64": "F64", "bfloat16": "BF16", "float16": "F16", "int64": "I64"}
TORCH_DTYPES = {code: name for name, code in SAFETENSORS_DTYPES.items()}


SPAN = np.dtype([("stack", "S16"), ("first", "<i8"), ("count", "<i8"), ("offset", "<i8"), ("crc", "<i8")])
# of a data file: elements [first, first + count) of a stack; their first byte there; their first checksum of the file's


@dataclass(frozen=True)
class Content:
    """What is in a data file, as its writer tells: packed, for there may be 100,000 of them in a checkpoint."""

    spans: bytes  # of SPAN
    crc: bytes  # of each chunk of each span: little-endian uint32
    stacks: tuple[Stack, ...]  # those whose first element is in it

    def to_plain(self) -> dict[str, Any]:
        """What JSON can hold."""
        texts = {key: base64.b64encode(data).decode() for key, data in (("spans", self.spans), ("crc", self.crc))}
        return {**texts, "stacks": [stack.to_plain() for stack in self.stacks]}

    @staticmethod
    def of_plain(plain: Any) -> "Content":
        """What `to_plain` gave."""
        spans, crc = (base64.b64decode(plain[key]) for key in ("spans", "crc"))
        return Content(spans, crc, tuple(map(Stack.of_plain, plain["stacks"])))


@dataclass(frozen=True)
class DataFile:
    """One safetensors file."""

    name: str
    num_bytes: int
    header_bytes: int  # the 8 length bytes and the JSON header
    header_sha256: str
    content: Content | None = None  # where it was just written

    def to_plain(self) -> dict[str, Any]:
        """What JSON can hold."""
        return {**vars(self), "content": self.content and self.content.to_plain()}

    @staticmethod
    def of_plain(plain: Any) -> "DataFile":
        """What `to_plain` gave."""
        return DataFile(**{**plain, "content": plain["content"] and Content.of_plain(plain["content"])})


@dataclass(frozen=True)
class Spans:
    """The spans of one stack among all, and the first element of every FENCE-th of them."""

    stack: Stack
    begin: int
    end: int
    fences: tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """What is where in the metadata file, behind its JSON."""

    name: str  # of the file
    begin: int  # of what is not JSON
    num_bytes: int  # of the file
    stacks: tuple[Spans, ...]
    num_files: int
    num_chunks: int  # that have a checksum
    blocks: Crc  # of each block behind the JSON


@dataclass(frozen=True)
class Index:
    """What a checkpoint holds, of which run, and in which files."""

    run_id: str
    generation: int
    step: int
    scalars: dict[str, Scalar]
    tensors: dict[str, tuple[str, tuple[int, ...]]]  # name -> dtype, shape
    files: tuple[DataFile, ...]  # from version 5 on, only where they were asked for
    information: dict[str, Any] = field(default_factory=dict)  # world size, time: read by people only
    column_blocks: dict[str, int] = field(default_factory=dict)  # version 3: tensors in so many blocks of columns
    layout: Layout | None = None  # None where the headers of the data files say it: before version 5

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)

    @property
    def tensor_bytes(self) -> int:
        """Of all whole tensors."""
        return sum(prod(shape) * ITEM_BYTES[dtype] for dtype, shape in self.tensors.values())

    def to_plain(self) -> dict[str, Any]:
        """What JSON can hold of it, without the files."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "run_id": self.run_id,
            "generation": self.generation,
            "step": self.step,
            "scalars": self.scalars,
            "tensors": {name: {"dtype": dtype, "shape": list(shape)} for name, (dtype, shape) in self.tensors.items()},
            "information": self.information,
        }

    @staticmethod
    def from_json(data: bytes, where: str, name: str = "") -> "Index":
        """Raises ForeignCheckpointError for a version that this code does not read, CheckpointError where `data` is no
        index. `name`: the file's."""
        try:
            content = json.loads(data)
            found, version = content["format"], content["version"]
            if found != FORMAT or version not in READABLE:
                writer = "an older" if found == FORMAT and version < VERSION else "a newer"
                raise ForeignCheckpointError(
                    f"{where} was written by {writer} regrow ({found} version {version}; this one reads {FORMAT} "
                    f"{', '.join(map(str, READABLE))}); use that one, or move the folder away"
                )
            return Index(
                run_id=content["run_id"],
                generation=content["generation"],
                step=content["step"],
                scalars=content["scalars"],
                tensors={name: (t["dtype"], tuple(t["shape"])) for name, t in content["tensors"].items()},
                files=tuple(DataFile(**file) for file in content.get("files", ())),
                information=content["information"],
                column_blocks=content.get("column_blocks", {}),
                layout=_layout(content["layout"], name, len(data)) if content["version"] >= 5 else None,
            )
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{where} is not a checkpoint index: {type(error).__name__}: {error}") from error


def _layout(plain: Any, name: str, begin: int) -> Layout:
    assert plain["chunk_bytes"] == STORED_CHUNK_BYTES, "this version has one chunk size"
    stacks = tuple(
        Spans(Stack.of_plain(each), each["spans"][0], each["spans"][1], tuple(each["fences"]))
        for each in plain["stacks"]
    )
    blocks = _decode_crc(plain["blocks"])
    return Layout(name, begin, begin + plain["num_bytes"], stacks, plain["num_files"], plain["num_chunks"], blocks)


@dataclass(frozen=True)
class Stored:
    """A piece of a box inside a data file, and what checks it."""

    piece: Piece
    offset: int  # of its first byte in the file
    crc: Crc  # of each chunk of it


def encode_header(parts: Iterable[Part], *, run_id: str, generation: int, step: int) -> bytes:
    """The safetensors header of a file that holds these parts one after another, padded to 8 bytes.

    For other tools alone: what a restore needs is in the metadata file.
    """
    entries: dict[str, Any] = {}
    stacks: dict[str, Any] = {}
    at = 0
    for part in parts:
        key, shape = _key(part)
        entries[key] = {
            "dtype": SAFETENSORS_DTYPES[part.stack.dtype],
            "shape": shape,
            "data_offsets": [at, at + part.num_bytes],
        }
        stacks[part.stack.key] = part.stack.to_plain()
        at += part.num_bytes
    metadata = {
        "format": f"{FORMAT}-{VERSION}",
        "run_id": run_id,
        "generation": str(generation),
        "step": str(step),
        "stacks": json.dumps(stacks, separators=(",", ":")),
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


def _key(part: Part) -> tuple[str, tuple[int, ...]]:
    """Names a part in its file, and its shape there: whole rows of a stack, or elements of it, row by row.

    >>> from regrow.state.disk.stacks import Column
    >>> stack = Stack("float32", 8, (Column("w", 0, 3),))
    >>> [_key(Part(stack, (0,), range(2, 4), start, 12))[1] for start in (6, 7)]
    [(2, 3), (5,)]
    """
    width = part.stack.width
    if part.start % width or part.stop % width:
        return f"{part.stack.key}[{part.start}:{part.stop}]", (part.stop - part.start,)
    return f"{part.stack.key}[{part.start // width}:{part.stop // width},:]", ((part.stop - part.start) // width, width)


def _piece_of_columns(whole: Box, start: int, stop: int, blocks: int) -> Piece:
    """Elements [start, stop) of a tensor as versions 2 and 3 count them: one block of columns after another."""
    if blocks == 1:
        return Piece(whole, start, stop)
    block, first = divmod(start, whole.num_elements // blocks)
    return Piece(whole.narrow(1, chunk(whole.shape[1], block, blocks)), first, first + stop - start)


def _decode_crc(text: str) -> Crc:
    return np.frombuffer(base64.b64decode(text), "<u4")
