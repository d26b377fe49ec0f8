"""Weights of a dense Llama as Megatron-Core's `dist_checkpointing` saves them (`torch_dist`), in any layout.

Keys of its folders (`iter_0001000`), which are of `torch.distributed.checkpoint`; layers lie in one tensor, or apart:

    embedding.word_embeddings.weight   decoder.final_layernorm.weight   output_layer.weight
    decoder.layers.self_attention.{linear_qkv.layer_norm_weight, linear_qkv.weight, linear_proj.weight}
    decoder.layers.mlp.{linear_fc1.layer_norm_weight, linear_fc1.weight, linear_fc2.weight}

`linear_qkv` is three matrices (`fused`), `linear_fc1` the gate and, below it, the other one. RoPE turns rows half a
head apart, as ours does (`rotary_interleaved` is off). Rows that pad the vocabulary are left out. Of the optimizer
nothing is read, nor is `common.pt`, a pickle.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from regrow.config.schema import ModelConfig
from regrow.errors import CheckpointError
from regrow.model.size import parameter_shapes
from regrow.optim.adamw import MOMENTS
from regrow.state.disk.catalog import Advance
from regrow.state.entries import Entry, whole_entry
from regrow.state.exchange.dcp_folder import DcpFolder
from regrow.state.exchange.fused import PARTS, fused_rows, part_of

_OUTSIDE_BLOCKS = {
    "embed": "embedding.word_embeddings.weight",
    "norm": "decoder.final_layernorm.weight",
    "output": "output_layer.weight",
}
_IN_BLOCKS = {  # the name of Transformer Engine's layers, and that of others
    "attention_norm": ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
    "attention.wo": ("self_attention.linear_proj.weight",),
    "ffn_norm": ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
    "ffn.w2": ("mlp.linear_fc2.weight",),
    **{f"attention.{part}": ("self_attention.linear_qkv.weight",) for part in PARTS},
    **{f"ffn.{part}": ("mlp.linear_fc1.weight",) for part in ("w1", "w3")},
}
LARGEST_MULTIPLE = 128 * 64  # that a vocabulary is filled up to: Megatron-Core's 128, on 64 ranks of tensor parallelism
NO_WEIGHTS = ("optimizer", "chained_", "rng_state", "rerun_state")  # keys of all else begin so


class MegatronFolder:
    """One of Megatron-Core's checkpoints, of a model that has to be known: it names only tensors."""

    def __init__(self, folder: Path, model: ModelConfig) -> None:
        """Reads the metadata. Raises CheckpointError where it is damaged, or of another model."""
        self._folder, self._model, self._shapes = DcpFolder(folder), model, parameter_shapes(model)
        known = {self._place(name)[0] for name in self._shapes}
        left = [key for key in self._folder.tensors if key not in known and not key.startswith(NO_WEIGHTS)]
        if left:
            raise CheckpointError(f"{folder} holds {left[0]}, which the model {model.name} does not have")
        self.padding = self._padding()  # rows by key

    @property
    def num_bytes(self) -> int:
        """That `entries` will report."""
        return sum(self._folder.num_bytes(*self._place(name)) for name in self._shapes)

    def entries(self, advance: Advance, *, moments: torch.dtype) -> Iterator[Entry]:
        """The weights as float32, one after another, each with AdamW's moments at zero.

        Raises CheckpointError for a tensor that is damaged or of another shape.
        """
        for name, shape in self._shapes.items():
            advance(self._folder.num_bytes(*self._place(name)))
            yield whole_entry(f"model/{name}", self._weight(name, shape).float())
            for moment in MOMENTS:
                yield whole_entry(f"optim/{moment}/{name}", torch.zeros(shape, dtype=moments))

    def _place(self, name: str) -> tuple[str, int | None]:
        """The key of a parameter, and its layer where all of them lie in one tensor."""
        module = name.removesuffix(".weight")
        if module in _OUTSIDE_BLOCKS:
            places: list[tuple[str, int | None]] = [(_OUTSIDE_BLOCKS[module], None)]
        else:
            _, layer, inner = module.split(".", 2)
            names = _IN_BLOCKS[inner]
            places = [(f"decoder.layers.{each}", int(layer)) for each in names]
            places += [(f"decoder.layers.{layer}.{each}", None) for each in names]
        found = next((place for place in places if place[0] in self._folder.tensors), None)
        if found is None:
            raise CheckpointError(
                f"{self._folder.folder} has no {places[0][0]}, which the model {self._model.name} has; name a folder "
                "that Megatron-Core's dist_checkpointing wrote (iter_0001000, in the format torch_dist), and its model"
            )
        if found[1] is not None:
            layers = self._folder.tensors[found[0]][0]
            if layers != self._model.num_layers:
                raise CheckpointError(
                    f"{self._folder.folder}: {found[0]} is of {layers} layers, the model {self._model.name} has "
                    f"{self._model.num_layers}"
                )
        return found

    def _padding(self) -> dict[str, int]:
        """How many rows of a tensor pad the vocabulary. Raises CheckpointError where they are more than that takes."""
        size, found = self._model.vocab_size, {}
        most = -(-size // LARGEST_MULTIPLE) * LARGEST_MULTIPLE
        for name in ("embed.weight", *["output.weight"] * (not self._model.tied)):
            key = self._place(name)[0]
            rows = next(iter(self._folder.tensors[key]), 0)
            if rows > most:
                raise CheckpointError(
                    f"{self._folder.folder}: {key} has {rows:,} rows, the model {self._model.name} a vocabulary of "
                    f"{size:,}, which Megatron-Core fills up to at most {most:,}; name the model that it is of"
                )
            if rows > size:
                found[key] = rows - size
        return found

    def _weight(self, name: str, shape: tuple[int, ...]) -> Tensor:
        key, layer = self._place(name)
        part, tensor = name.removesuffix(".weight").rpartition(".")[2], self._folder.tensor(key, layer)
        if part in PARTS:
            self._check(key, tensor, (fused_rows(self._model), self._model.dim))
            return part_of(tensor, part, self._model)
        if part in ("w1", "w3"):
            self._check(key, tensor, (2 * self._model.ffn_dim, self._model.dim))
            return tensor.chunk(2)[part == "w3"]
        if key in self.padding:
            tensor = tensor[: shape[0]]
        self._check(key, tensor, shape)
        return tensor

    def _check(self, key: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
        if tuple(tensor.shape) != shape:
            found, wanted = list(tensor.shape), list(shape)
            raise CheckpointError(f"{self._folder.folder}: {key} is {found}, the model {self._model.name} has {wanted}")
