"""The bytes of a checkpoint: safetensors files of raw spans, one JSON index, then COMMIT. See docs/file-formats.md.

A chain of trust from one small file: COMMIT names the index by its sha256, the index names each data file's header by
its sha256, and the header holds the crc32 of every chunk of data. Whatever is torn, swapped or flipped breaks it.
Nothing is pickled; nothing is identified by a rank.
"""

import base64
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from regrow.errors import CheckpointError
from regrow.state.checksums import CHUNK_BYTES, Crc
from regrow.state.layout import ITEM_BYTES, Span

FORMAT, VERSION = "regrow-checkpoint", 2
VERSION_WITH_BLOCKS = 3  # of an index that has `column_blocks`, and is otherwise the same
COMMIT = "COMMIT"
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
    column_blocks: dict[str, int] = field(default_factory=dict)  # tensors stored as so many blocks of columns, by name

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
            "version": VERSION_WITH_BLOCKS if self.column_blocks else VERSION,
            "run_id": self.run_id,
            "generation": self.generation,
            "step": self.step,
            "scalars": self.scalars,
            "tensors": {name: {"dtype": dtype, "shape": list(shape)} for name, (dtype, shape) in self.tensors.items()},
            "files": [vars(file) for file in self.files],
            "information": self.information,
        } | ({"column_blocks": self.column_blocks} if self.column_blocks else {})
        return json.dumps(content, indent=1).encode()

    @staticmethod
    def from_json(data: bytes, where: str) -> "Index":
        """Raises CheckpointError where `data` is not an index of a version that this code reads."""
        try:
            content = json.loads(data)
            if content["format"] != FORMAT or content["version"] not in (VERSION, VERSION_WITH_BLOCKS):
                raise CheckpointError(
                    f"{where} is {content['format']} version {content['version']}; this regrow reads {FORMAT} "
                    f"{VERSION} and {VERSION_WITH_BLOCKS}"
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
    """A span inside a data file, and what checks it."""

    span: Span
    offset: int  # of its first byte in the file
    crc: Crc  # of each chunk of it


def encode_header(spans: Iterable[tuple[Span, Crc]], *, run_id: str, generation: int, step: int) -> bytes:
    """The safetensors header of a file that holds these spans one after another, padded to 8 bytes."""
    entries: dict[str, Any] = {}
    checks: dict[str, str] = {}
    shapes: dict[str, list[int]] = {}
    at = 0
    for span, crc in spans:
        key = f"{span.name}[{span.start}:{span.stop}]"
        entries[key] = {
            "dtype": SAFETENSORS_DTYPES[span.dtype],
            "shape": [span.num_elements],
            "data_offsets": [at, at + span.num_bytes],
        }
        checks[key] = base64.b64encode(crc.tobytes()).decode()
        shapes[span.name] = list(span.shape)
        at += span.num_bytes
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
    """The spans of a data file from its header bytes. Raises CheckpointError where the index names other ones."""
    if hashlib.sha256(data).hexdigest() != file.header_sha256:
        raise CheckpointError(
            f"{where}: the header's sha256 is not the one in the index; the file is damaged or swapped"
        )
    content = json.loads(data[8:])
    metadata = content.pop("__metadata__")
    if (metadata["run_id"], int(metadata["step"])) != (index.run_id, index.step):
        raise CheckpointError(f"{where}: belongs to run {metadata['run_id']} step {metadata['step']}")
    assert int(metadata["chunk_bytes"]) == CHUNK_BYTES, "version 2 has one chunk size"
    shapes, checks = json.loads(metadata["shapes"]), json.loads(metadata["crc32"])
    stored = []
    for key, entry in content.items():
        name, _, bounds = key.rpartition("[")
        start, stop = (int(bound) for bound in bounds.rstrip("]").split(":"))
        span = Span(name, tuple(shapes[name]), TORCH_DTYPES[entry["dtype"]], start, stop)
        stored.append(Stored(span, file.header_bytes + entry["data_offsets"][0], _decode_crc(checks[key])))
    return stored


def _decode_crc(text: str) -> Crc:
    return np.frombuffer(base64.b64decode(text), "<u4")
