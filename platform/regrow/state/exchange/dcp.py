"""A whole state in the format of `torch.distributed.checkpoint`.

The state dict, whose nested keys DCP joins with dots:

    model.<parameter>   optim.state.<parameter>.{step, exp_avg, exp_avg_sq}   scalars.{step, cursor, tokens_seen}   run

`model` and `optim.state` are what `torch.distributed.checkpoint.state_dict` calls them, so that torch trainers load
them; `run` is JSON that says which run it was.
"""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from regrow.errors import CheckpointError, first_line
from regrow.optim.adamw import MOMENTS
from regrow.state.disk.catalog import Advance
from regrow.state.disk.tensors import CheckpointTensors
from regrow.state.entries import USER, Entry, Progress, whole_entry
from regrow.state.exchange.dcp_folder import DcpFolder, write_dcp


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
    write_dcp(target, state, {_key(name): partial(tensors.whole, name) for name in index.tensors})


class ExportedState:
    """A folder that `export_state` wrote, or that torch wrote with the same keys in any layout."""

    def __init__(self, folder: Path) -> None:
        """Reads the metadata. Raises CheckpointError where it is not there, damaged, or more than metadata."""
        self._folder = DcpFolder(folder)
        if not self._folder.has("run"):
            raise CheckpointError(f"{folder} has no run; only what `export --format dcp` wrote can be imported as dcp")
        try:
            self.scalars = {name: int(self._folder.value(f"scalars.{name}")) for name in Progress().to_dict()}
            user = [key for key in self._folder.values if key.startswith(f"scalars.{USER}")]
            self.scalars |= {key.removeprefix("scalars."): self._folder.value(key) for key in user}
            self.run = dict(json.loads(self._folder.value("run")))
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"{folder}: scalars or run are not what was exported: {first_line(error)}") from error

    @property
    def num_bytes(self) -> int:
        """That `entries` will report."""
        return sum(self._folder.num_bytes(key) for key in self._folder.tensors if _name(key) is not None)

    def entries(self, advance: Advance) -> Iterator[Entry]:
        """Every tensor of the model and of AdamW's moments, whole, one after another.

        Raises CheckpointError where one is not whole or cannot be read.
        """
        for key in self._folder.tensors:
            name = _name(key)
            if name is not None:
                tensor = self._folder.tensor(key)
                advance(self._folder.num_bytes(key))
                yield whole_entry(name, tensor)


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
