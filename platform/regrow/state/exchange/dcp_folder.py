"""Folders of `torch.distributed.checkpoint`: written by torch, read without unpickling what they name.

Keys are those of a state dict, nested ones joined with dots. One process, without a process group.
"""

import errno
import io
import math
import pickle
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as torch_dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex

from regrow.errors import CheckpointError, first_line

METADATA = ".metadata"
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}  # of a file that is written, not of one that is read

Make = Callable[[], Tensor]  # a tensor that is to be written


def write_dcp(target: Path, state: dict[str, Any], tensors: Mapping[str, Make], *, one_file: bool = False) -> None:
    """Write a state dict, a file for each value or one for all. Tensors on the meta device are made when torch comes to
    write them, one after another, by what `tensors` has of their keys.

    Raises what making one raises, CheckpointError where there is no room.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        writer = FileSystemWriter(target, single_file_per_rank=one_file, overwrite=False)
        try:
            torch_dcp.save(state, storage_writer=writer, planner=_MadeWhenWritten(tensors), no_dist=True)
        except torch_dcp.CheckpointException as error:  # wraps what went wrong, and is no Exception
            cause = next(cause for cause, _ in error.failures.values())
            found = cause.__context__ if isinstance(cause, RuntimeError) else cause  # torch's own, over the disk's
            if isinstance(found, OSError) and found.errno in FULL:
                raise CheckpointError(f"{target} cannot be written: {first_line(found)}") from error
            raise cause from None


class _MadeWhenWritten(DefaultSavePlanner):
    """Replaces each placeholder by its tensor when torch comes to write it."""

    def __init__(self, tensors: Mapping[str, Make]) -> None:
        super().__init__()
        self._tensors = tensors

    def lookup_object(self, index: MetadataIndex) -> Any:
        make = self._tensors.get(index.fqn)
        return super().lookup_object(index) if make is None else make()


class DcpFolder:
    """What torch wrote, in any layout."""

    def __init__(self, folder: Path) -> None:
        """Reads the metadata. Raises CheckpointError where it is not there, damaged, or more than metadata."""
        self.folder, self._metadata = folder, _Metadata.read(folder)

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Shapes by key."""
        return {key: chunks[0].whole for key, chunks in self._metadata.tensors.items()}

    @property
    def values(self) -> list[str]:
        """Keys of what is no tensor."""
        return [key for key, offsets in self._metadata.places if not offsets and key not in self._metadata.tensors]

    def has(self, key: str) -> bool:
        """Whether there is such a value that is no tensor."""
        return (key, ()) in self._metadata.places

    def num_bytes(self, key: str, index: int | None = None) -> int:
        """That a tensor, or its part at an index of the first dimension, takes in its files."""
        places, chunks = self._metadata.places, self._chunks(key, index)
        return sum(places[key, chunk.offsets].num_bytes for chunk in chunks if (key, chunk.offsets) in places)

    def tensor(self, key: str, index: int | None = None) -> Tensor:
        """A tensor, whole, or what of it is at an index of the first dimension.

        Raises CheckpointError where it is not whole, or cannot be read.
        """
        tensor = None
        for chunk in self._chunks(key, index):
            part, offsets, shape = self._load(key, chunk.offsets), chunk.offsets, chunk.whole
            if not isinstance(part, Tensor) or tuple(part.shape) != chunk.sizes:
                raise CheckpointError(f"{self.folder}: {key} does not have the shape that {METADATA} says")
            if index is not None:
                part, offsets, shape = part[index - offsets[0]], offsets[1:], shape[1:]
            if tuple(part.shape) == shape:
                return part
            if tensor is None:
                tensor = torch.empty(shape, dtype=part.dtype)
            tensor[tuple(slice(at, at + size) for at, size in zip(offsets, part.shape, strict=True))] = part
        assert tensor is not None, "chunks cover the tensor"
        return tensor

    def value(self, key: str) -> Any:
        """A value that is no tensor. Raises CheckpointError where there is none, or it cannot be read."""
        return self._load(key)

    def _chunks(self, key: str, index: int | None) -> Sequence["_Chunk"]:
        chunks = self._metadata.tensors.get(key)
        if chunks is None:
            raise CheckpointError(f"{self.folder} has no {key}")
        return [each for each in chunks if index is None or 0 <= index - each.offsets[0] < each.sizes[0]]

    def _load(self, key: str, offsets: tuple[int, ...] = ()) -> Any:
        """What was saved at one place. Raises CheckpointError where there is nothing, or it cannot be read."""
        place = self._metadata.places.get((key, offsets))
        if place is None:
            raise CheckpointError(f"{self.folder} has no {key}")
        try:
            with open(self.folder / place.file, "rb") as file:
                file.seek(place.offset)
                data = file.read(place.num_bytes)
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception as error:  # of as many kinds as there are ways to be damaged
            raise CheckpointError(f"{self.folder / place.file}: {key} cannot be read: {first_line(error)}") from error


@dataclass(frozen=True)
class _Place:
    file: str
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class _Chunk:
    """A box of a tensor that was saved as one."""

    whole: tuple[int, ...]  # shape of the tensor
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class _Metadata:
    """What DCP's `.metadata` says: where everything is, and how tensors were cut."""

    places: dict[tuple[str, tuple[int, ...]], _Place]  # by key and offsets
    tensors: dict[str, tuple[_Chunk, ...]]

    @staticmethod
    def read(folder: Path) -> "_Metadata":
        path = folder / METADATA
        try:
            content = _MetadataUnpickler(io.BytesIO(path.read_bytes())).load()
            places, tensors = {}, {}
            for index, info in content.storage_data.items():
                if getattr(info, "transform_descriptors", None) or Path(info.relative_path).name != info.relative_path:
                    raise ValueError(f"{index.fqn} lies in {info.relative_path!r}, which is not a plain file beside it")
                offsets = tuple(getattr(index, "offset", None) or ())
                places[index.fqn, offsets] = _Place(info.relative_path, int(info.offset), int(info.length))
            for key, described in content.state_dict_metadata.items():
                if hasattr(described, "chunks"):
                    whole = tuple(described.size)
                    tensors[key] = tuple(_Chunk(whole, tuple(c.offsets), tuple(c.sizes)) for c in described.chunks)
                    if sum(math.prod(chunk.sizes) for chunk in tensors[key]) != math.prod(whole) or not tensors[key]:
                        raise ValueError(f"the parts of {key} do not make up the whole")
            return _Metadata(places, tensors)
        except FileNotFoundError as error:
            raise CheckpointError(f"{path} is not there; name a folder of torch.distributed.checkpoint") from error
        except Exception as error:  # of as many kinds as there are ways to be damaged
            raise CheckpointError(f"{path} cannot be read: {first_line(error)}") from error


class _Record:
    """Stands in for any of DCP's classes: takes what is given to it and does nothing."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {"state": state})


def _first(*arguments: Any) -> Any:
    return arguments[0] if arguments else None


_METADATA_CLASSES = (
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
    "_MEM_FORMAT_ENCODING",
)
_PLAN_CLASSES = ("SavePlan", "TensorWriteData", "WriteItem", "WriteItemType")  # which Megatron-Core keeps there
_DTYPES = ("float64", "float32", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")
# Everything that DCP's metadata names, and what is made of it instead. None of it does anything.
_STAND_INS: dict[tuple[str, str], Callable[..., Any]] = {
    **{("torch.distributed.checkpoint.metadata", name): _Record for name in _METADATA_CLASSES},
    **{("torch.distributed.checkpoint.planner", name): _Record for name in _PLAN_CLASSES},
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreSavePlan"): _Record,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _Record,
    ("torch", "Size"): tuple,
    **{("torch", name): _Record for name in _DTYPES},
    ("torch.serialization", "_get_layout"): _first,
    **{(module, name): _Record for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")},
    ("builtins", "getattr"): _first,  # by which some versions of Python name a member of an enumeration
    ("collections", "OrderedDict"): dict,
}


class _MetadataUnpickler(pickle.Unpickler):
    """Reads the structure of DCP's `.metadata`; whatever else it names is refused, and nothing it names is run."""

    def find_class(self, module: str, name: str) -> Any:
        stand_in = _STAND_INS.get((module, name))
        if stand_in is None:
            raise CheckpointError(
                f"it names {module}.{name}, which is no part of DCP's metadata; do not trust this folder"
            )
        return stand_in
