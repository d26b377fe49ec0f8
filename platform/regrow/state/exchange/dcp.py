"""A whole state in the format of `torch.distributed.checkpoint`: written by torch, read without unpickling its classes.

The state dict, whose nested keys DCP joins with dots:

    model.<parameter>   optim.state.<parameter>.{step, exp_avg, exp_avg_sq}   scalars.{step, cursor, tokens_seen}   run

`model` and `optim.state` are what `torch.distributed.checkpoint.state_dict` calls them, so that torch trainers load
them; `run` is JSON that says which run it was. One process, without a process group.
"""

import io
import json
import math
import pickle
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as torch_dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex

from regrow.errors import CheckpointError, first_line
from regrow.optim.adamw import MOMENTS
from regrow.plan.boxes import Box
from regrow.state.disk.catalog import Advance
from regrow.state.disk.tensors import CheckpointTensors
from regrow.state.entries import Entry, Progress

METADATA = ".metadata"


def export_state(tensors: CheckpointTensors, target: Path, *, run: dict[str, Any]) -> None:
    """Write the checkpoint, a file for each tensor, so that only one of them is in memory. `run` is JSON.

    Raises CheckpointError where the checkpoint is damaged.
    """
    index = tensors.index
    step = torch.tensor(float(index.step))
    state: dict[str, Any] = {"model": {}, "optim": {"state": {}}, "scalars": index.scalars, "run": json.dumps(run)}
    for name, (dtype, shape) in index.tensors.items():
        placeholder = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
        kind, _, parameter = name.partition("/")
        if kind == "model":
            state["model"][parameter] = placeholder
        else:
            moment, _, parameter = parameter.partition("/")
            state["optim"]["state"].setdefault(parameter, {"step": step})[moment] = placeholder
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        writer = FileSystemWriter(target, single_file_per_rank=False, overwrite=False)
        try:
            torch_dcp.save(state, storage_writer=writer, planner=_ReadWhenWritten(tensors), no_dist=True)
        except torch_dcp.CheckpointException as error:  # wraps what went wrong, and is no Exception
            raise next(cause for cause, _ in error.failures.values()) from None


class _ReadWhenWritten(DefaultSavePlanner):
    """Replaces each placeholder by its tensor when DCP comes to write it."""

    def __init__(self, tensors: CheckpointTensors) -> None:
        super().__init__()
        self._tensors = tensors
        self._names = {_key(name): name for name in tensors.index.tensors}

    def lookup_object(self, index: MetadataIndex) -> Any:
        name = self._names.get(index.fqn)
        return super().lookup_object(index) if name is None else self._tensors.whole(name)


class ExportedState:
    """A folder that `export_state` wrote, or that torch wrote with the same keys in any layout."""

    def __init__(self, folder: Path) -> None:
        """Reads the metadata. Raises CheckpointError where it is not there, damaged, or more than metadata."""
        self._folder, self._metadata = folder, _Metadata.read(folder)
        try:
            self.scalars = {name: int(self._load(f"scalars.{name}")) for name in Progress().to_dict()}
            self.run = dict(json.loads(self._load("run")))
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"{folder}: scalars or run are not what was exported: {first_line(error)}") from error

    @property
    def num_bytes(self) -> int:
        """That `entries` will report."""
        return sum(self._bytes_of(key) for key in self._metadata.tensors if _name(key) is not None)

    def entries(self, advance: Advance) -> Iterator[Entry]:
        """Every tensor of the model and of AdamW's moments, whole, one after another.

        Raises CheckpointError where one is not whole or cannot be read.
        """
        for key, chunks in self._metadata.tensors.items():
            name = _name(key)
            if name is not None:
                tensor = self._assemble(key, chunks)
                advance(self._bytes_of(key))
                box = Box.whole(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
                yield Entry(box, tensor.view(-1))

    def _assemble(self, key: str, chunks: Sequence["_Chunk"]) -> Tensor:
        tensor = None
        for chunk in chunks:
            part = self._load(key, chunk.offsets)
            if not isinstance(part, Tensor) or tuple(part.shape) != chunk.sizes:
                raise CheckpointError(f"{self._folder}: {key} does not have the shape that {METADATA} says")
            if chunk.sizes == chunk.whole:
                return part
            if tensor is None:
                tensor = torch.empty(chunk.whole, dtype=part.dtype)
            tensor[tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))] = part
        assert tensor is not None, "chunks cover the tensor"
        return tensor

    def _bytes_of(self, key: str) -> int:
        places, chunks = self._metadata.places, self._metadata.tensors[key]
        return sum(places[key, chunk.offsets].num_bytes for chunk in chunks if (key, chunk.offsets) in places)

    def _load(self, key: str, offsets: tuple[int, ...] = ()) -> Any:
        """What was saved at one place. Raises CheckpointError where there is nothing, or it cannot be read."""
        place = self._metadata.places.get((key, offsets))
        if place is None:
            raise CheckpointError(f"{self._folder} has no {key}; only what `export --format dcp` wrote can be imported")
        try:
            with open(self._folder / place.file, "rb") as file:
                file.seek(place.offset)
                data = file.read(place.num_bytes)
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception as error:  # of as many kinds as there are ways to be damaged
            raise CheckpointError(f"{self._folder}/{place.file}: {key} cannot be read: {first_line(error)}") from error


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


def _key(name: str) -> str:
    """DCP's key of one of our tensors.

    >>> _key("optim/exp_avg/embed.weight")
    'optim.state.embed.weight.exp_avg'
    """
    kind, _, parameter = name.partition("/")
    if kind == "model":
        return f"model.{parameter}"
    moment, _, parameter = parameter.partition("/")
    return f"optim.state.{parameter}.{moment}"


def _name(key: str) -> str | None:
    """The inverse of `_key`; None where it is not one of our tensors."""
    if key.startswith("model."):
        return f"model/{key.removeprefix('model.')}"
    parameter, _, moment = key.removeprefix("optim.state.").rpartition(".")
    return f"optim/{moment}/{parameter}" if key.startswith("optim.state.") and moment in MOMENTS else None


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
_DTYPES = ("float64", "float32", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")
# Everything that DCP's metadata names, and what is made of it instead. None of it does anything.
_STAND_INS: dict[tuple[str, str], Callable[..., Any]] = {
    **{("torch.distributed.checkpoint.metadata", name): _Record for name in _METADATA_CLASSES},
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
