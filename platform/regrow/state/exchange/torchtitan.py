"""A training state as torchtitan's checkpoints have it: read from versions 0.2 and 0.3, written for 0.3.

The keys of its `step-N` folders, which are of `torch.distributed.checkpoint`:

    <parameter>   optimizer.state.<parameter>.{step, exp_avg, exp_avg_sq}   optimizer.param_groups.<parameter>.<setting>
    train_state.{step, ntokens_seen}   lr_scheduler.last_epoch   dataloader.<rank>

Two things are arranged otherwise. Its RoPE turns neighbouring rows of `wq` and `wk`, ours, as Hugging Face's, rows half
a head apart: weights and moments are permuted by head. And 0.3 trains `wq`, `wk` and `wv` as one matrix, `wqkv`
(`fused`): weights are saved apart, moments as they are.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regrow.config.schema import ModelConfig, OptimConfig
from regrow.errors import CheckpointError, first_line
from regrow.model.size import parameter_shapes
from regrow.optim.adamw import MOMENTS
from regrow.plan.boxes import ITEM_BYTES
from regrow.state.disk.catalog import Advance
from regrow.state.disk.format import Index
from regrow.state.disk.tensors import CheckpointTensors
from regrow.state.entries import Entry, whole_entry
from regrow.state.exchange.dcp_folder import DcpFolder, write_dcp
from regrow.state.exchange.fused import PARTS, fuse, fused_rows, part_of

STEP, TOKENS = "train_state.step", "train_state.ntokens_seen"
STATE, GROUPS = "optimizer.state", "optimizer.param_groups"
NO_WEIGHTS = ("optimizer.", "train_state.", "lr_scheduler.", "dataloader")  # keys of all else

# names of modules, the newest version's first
_OUTSIDE_BLOCKS = {"embed": ("tok_embeddings",), "norm": ("norm",), "output": ("lm_head", "output")}
_IN_BLOCKS = {
    "attention_norm": ("attention_norm",),
    "attention.wq": ("attention.qkv_linear.wq", "attention.wq"),
    "attention.wk": ("attention.qkv_linear.wk", "attention.wk"),
    "attention.wv": ("attention.qkv_linear.wv", "attention.wv"),
    "attention.wo": ("attention.wo",),
    "ffn_norm": ("ffn_norm",),
    "ffn.w1": ("feed_forward.w1",),
    "ffn.w2": ("feed_forward.w2",),
    "ffn.w3": ("feed_forward.w3",),
}
_FUSED = "attention.qkv_linear.wqkv"
# what torch's AdamW has among a group's settings, and a checkpoint must, for it is taken from there
_ADAMW = {
    "amsgrad": False,
    "foreach": False,
    "maximize": False,
    "capturable": False,
    "differentiable": False,
    "fused": True,
    "decoupled_weight_decay": True,
}


def torchtitan_names(parameter: str) -> tuple[str, ...]:
    """What versions of torchtitan call a parameter, the newest first.

    >>> torchtitan_names("layers.3.attention.wq.weight")
    ('layers.3.attention.qkv_linear.wq.weight', 'layers.3.attention.wq.weight')
    """
    module = parameter.removesuffix(".weight")
    if module in _OUTSIDE_BLOCKS:
        return tuple(f"{name}.weight" for name in _OUTSIDE_BLOCKS[module])
    _, layer, inner = module.split(".", 2)
    return tuple(f"layers.{layer}.{name}.weight" for name in _IN_BLOCKS[inner])


def _trained_names(parameter: str) -> list[str]:
    """The same of the optimizer, which may train three of them as one matrix."""
    names = list(torchtitan_names(parameter))
    prefix, _, part = parameter.removesuffix(".weight").rpartition(".")
    return names + [f"{prefix.removesuffix('attention')}{_FUSED}.weight"] * (part in PARTS)


@dataclass(frozen=True)
class AdamWSettings:
    """As the optimizer of a checkpoint had them."""

    lr: float  # the peak
    betas: tuple[float, float]
    eps: float
    weight_decay: float  # of matrices
    decays_norms: bool  # vectors too


class TitanFolder:
    """One of torchtitan's `step-N` folders, of any layout, of a model that has to be known: it names only tensors."""

    def __init__(self, folder: Path, model: ModelConfig) -> None:
        """Reads the metadata. Raises CheckpointError where it is damaged, or of another model."""
        self._folder, self._model, self._shapes = DcpFolder(folder), model, parameter_shapes(model)
        tensors = self._folder.tensors
        self.has_optimizer = any(key.startswith(f"{STATE}.") for key in tensors)
        known = {self._weight(name) for name in self._shapes}
        known |= {each for each in torchtitan_names("output.weight") if model.tied}
        left = [key for key in tensors if key not in known and not key.startswith(NO_WEIGHTS)]
        if left:
            raise CheckpointError(f"{folder} holds {left[0]}, which the model {model.name} does not have")
        try:
            self.step = int(self._folder.value(STEP)) if self.has_optimizer else 0
            # that one rank has trained on; all of them up to where our export was trained on
            self.rank_tokens = int(self._folder.value(TOKENS)) if self.has_optimizer else 0
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"{folder}: {STEP} or {TOKENS} is no number: {first_line(error)}") from error

    @property
    def num_bytes(self) -> int:
        """That `entries` will report: a matrix of three parameters is read for each of them."""
        keys = [self._weight(name) for name in self._shapes]
        keys += [self._moment_key(name, moment) for name in self._shapes for moment in MOMENTS if self.has_optimizer]
        return sum(self._folder.num_bytes(key) for key in keys)

    def adamw(self) -> AdamWSettings:
        """The settings of the optimizer. Raises CheckpointError where it is not one AdamW of all parameters."""
        groups = {name: self._group(name) for name in self._shapes}
        (named, first), *_ = groups.values()
        vectors = [name for name, shape in self._shapes.items() if len(shape) == 1]
        for name, (key, group) in groups.items():
            for setting in {**first, **group}:
                found, wanted = group.get(setting), first.get(setting)
                if found != wanted and not (setting == "weight_decay" and name in vectors):
                    raise CheckpointError(
                        f"{self._folder.folder}: {key}.{setting} is {found}, that of {named} {wanted}; here one AdamW, "
                        "with the same settings, trains all parameters"
                    )
        return AdamWSettings(
            first.get("initial_lr", first["lr"]),
            first["betas"],
            first["eps"],
            first["weight_decay"],
            any(groups[name][1]["weight_decay"] for name in vectors),
        )

    def _group(self, name: str) -> tuple[str, dict[str, Any]]:
        """What the optimizer calls a parameter, and its settings for it."""
        keys = _trained_names(name)
        key = next((each for each in keys if self._folder.has(f"{GROUPS}.{each}.lr")), keys[0])

        def of(setting: str) -> Any:
            return self._folder.value(f"{GROUPS}.{key}.{setting}")

        for setting in ("decoupled_weight_decay", "amsgrad", "maximize"):
            if self._folder.has(f"{GROUPS}.{key}.{setting}") and bool(of(setting)) is not _ADAMW[setting]:
                raise CheckpointError(
                    f"{self._folder.folder}: its optimizer is not AdamW as it is here: {key}.{setting} is "
                    f"{of(setting)}, here it is {_ADAMW[setting]}"
                )
        rates = ("lr", *["initial_lr"] * self._folder.has(f"{GROUPS}.{key}.initial_lr"))  # of a schedule: the peak
        try:
            beta1, beta2 = of("betas")
            settings = {setting: float(of(setting)) for setting in (*rates, "eps", "weight_decay")}
            return key, {**settings, "betas": (float(beta1), float(beta2))}
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"{self._folder.folder}: its optimizer is not AdamW: {first_line(error)}") from error

    def entries(self, advance: Advance, *, moments: torch.dtype) -> Iterator[Entry]:
        """The weights as float32, one after another, each with AdamW's moments: as they are, or zeros where there is no
        optimizer's state.

        Raises CheckpointError for a tensor that is missing, damaged or of another shape.
        """
        if self._model.tied:
            self._check_tied()
        for name, shape in self._shapes.items():
            key = self._weight(name)
            weight = self._arranged(name, self._read(key, shape, advance)).float()
            yield whole_entry(f"model/{name}", weight)
            for moment in MOMENTS:
                tensor = torch.zeros(shape, dtype=moments)
                if self.has_optimizer:
                    tensor = self._arranged(name, self._moment(name, moment, shape, advance))
                yield whole_entry(f"optim/{moment}/{name}", tensor)

    def _weight(self, name: str) -> str:
        """The key of a parameter."""
        names = torchtitan_names(name)
        key = next((each for each in names if each in self._folder.tensors), None)
        if key is None:
            raise CheckpointError(
                f"{self._folder.folder} has no {names[0]}, which the model {self._model.name} has; name a "
                "folder step-N that torchtitan wrote, and its model"
            )
        return key

    def _moment_key(self, name: str, moment: str) -> str:
        """The key of a parameter's, or of that of a matrix which three of them are."""
        keys = [f"{STATE}.{each}" for each in _trained_names(name)]
        return next(
            (f"{key}.{moment}" for key in keys if f"{key}.{moment}" in self._folder.tensors), f"{keys[0]}.{moment}"
        )

    def _moment(self, name: str, moment: str, shape: tuple[int, ...], advance: Advance) -> Tensor:
        key = self._moment_key(name, moment)
        self._check_step(key.removesuffix(f".{moment}"))
        if f".{_FUSED}." not in key:
            return self._read(key, shape, advance)
        part = name.removesuffix(".weight").rpartition(".")[2]
        return part_of(self._read(key, (fused_rows(self._model), self._model.dim), advance), part, self._model)

    def _check_step(self, key: str) -> None:
        step = int(self._folder.tensor(f"{key}.step"))
        if step != self.step:
            raise CheckpointError(
                f"{self._folder.folder}: AdamW has taken {step} steps with {key.removeprefix(STATE + '.')}, training "
                f"{self.step}; here all parameters are at the run's step"
            )

    def _read(self, key: str, shape: tuple[int, ...], advance: Advance) -> Tensor:
        tensor = self._folder.tensor(key)
        if tuple(tensor.shape) != shape:
            found, wanted = list(tensor.shape), list(shape)
            raise CheckpointError(f"{self._folder.folder}: {key} is {found}, the model {self._model.name} has {wanted}")
        advance(self._folder.num_bytes(key))
        return tensor

    def _arranged(self, name: str, tensor: Tensor) -> Tensor:
        heads = _rotated_heads(name, self._model)
        return tensor if heads is None else _halves(tensor, heads)

    def _check_tied(self) -> None:
        embed = self._weight("embed.weight")
        for key in torchtitan_names("output.weight"):
            if key in self._folder.tensors and not torch.equal(self._folder.tensor(key), self._folder.tensor(embed)):
                raise CheckpointError(
                    f"{self._folder.folder}: {key} is not the embedding, but the model {self._model.name} is tied"
                )


def bytes_read(index: Index, model: ModelConfig) -> int:
    """By `export_for_torchtitan`: all tensors, those that it writes in two places twice."""

    def twice(name: str) -> bool:
        kind, _, parameter = name.partition("/")
        is_part = kind == "optim" and parameter.removesuffix(".weight").endswith(tuple(f"attention.{p}" for p in PARTS))
        return is_part or (model.tied and name == "model/embed.weight")

    again = ((ITEM_BYTES[dtype], shape) for name, (dtype, shape) in index.tensors.items() if twice(name))
    return index.tensor_bytes + sum(item * prod(shape) for item, shape in again)


def export_for_torchtitan(
    tensors: CheckpointTensors, target: Path, *, model: ModelConfig, optim: OptimConfig, next_lr: float
) -> None:
    """Write a checkpoint as torchtitan 0.3 writes its own, all but its data loader's. `next_lr` is the next step's.

    Moments are written for a fused `wqkv` and for its three parts. Raises CheckpointError where it is damaged.
    """
    index = tensors.index
    step = torch.tensor(float(index.step))
    state: dict[str, Any] = {
        STEP: index.step,
        TOKENS: index.scalars["tokens_seen"],
        "lr_scheduler.last_epoch": index.step,
    }
    makers = {}

    def add(name: str, parts: list[str], kinds: tuple[str, ...]) -> None:
        """A tensor of one of ours, or of three of them."""
        for kind in kinds:
            key = name if kind == "model" else f"{STATE}.{name}.{kind.removeprefix('optim/')}"
            dtype, shape = index.tensors[f"{kind}/{parts[0]}"]
            rows = sum(index.tensors[f"{kind}/{part}"][1][0] for part in parts)
            state[key] = torch.empty((rows, *shape[1:]), dtype=getattr(torch, dtype), device="meta")
            makers[key] = partial(_titan_tensor, tensors, kind, parts, model)

    moments = tuple(f"optim/{moment}" for moment in MOMENTS)
    for parameter, shape in parameter_shapes(model).items():
        (name, *_) = torchtitan_names(parameter)
        add(name, [parameter], ("model",))
        trained = {name: [parameter]}
        if parameter.endswith("attention.wq.weight"):
            layer = parameter.removesuffix("attention.wq.weight")
            trained[f"{layer}{_FUSED}.weight"] = [f"{layer}attention.{part}.weight" for part in PARTS]
        for each, parts in trained.items():
            add(each, parts, moments)
            decay = optim.weight_decay if len(shape) > 1 else 0.0
            betas = (optim.beta1, optim.beta2)
            group = _ADAMW | {"lr": next_lr, "initial_lr": optim.lr, "betas": betas, "eps": optim.eps}
            state[f"{STATE}.{each}.step"] = step
            state |= {f"{GROUPS}.{each}.{key}": value for key, value in (group | {"weight_decay": decay}).items()}
    if model.tied:
        add("lm_head.weight", ["embed.weight"], ("model",))
    write_dcp(target, state, makers, one_file=True)  # or each setting of each parameter had one


def _titan_tensor(tensors: CheckpointTensors, kind: str, parts: list[str], model: ModelConfig) -> Tensor:
    """One of ours as torchtitan arranges it; three as it arranges them in one."""
    found = []
    for part in parts:
        heads, tensor = _rotated_heads(part, model), tensors.whole(f"{kind}/{part}")
        found.append(tensor if heads is None else _pairs(tensor, heads))
    return found[0] if len(found) == 1 else fuse(found, model)


def _rotated_heads(name: str, model: ModelConfig) -> int | None:
    """How many heads of this parameter RoPE turns; None: it is not turned."""
    if name.endswith("attention.wq.weight"):
        return model.num_heads
    return model.num_kv_heads if name.endswith("attention.wk.weight") else None


def _halves(tensor: Tensor, heads: int) -> Tensor:
    """Rows that RoPE turns together, neighbours before, half a head apart."""
    return tensor.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def _pairs(tensor: Tensor, heads: int) -> Tensor:
    """The inverse of `_halves`."""
    return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
