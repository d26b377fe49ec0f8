"""A model's weights in the layout of Hugging Face's `LlamaForCausalLM`: config.json and safetensors files.

RoPE's pairs are Hugging Face's already, so going there and back is a renaming: float32 weights keep their bits.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from regrow.config.schema import Dtype, ModelConfig, RopeScaling
from regrow.errors import CheckpointError
from regrow.model.size import parameter_shapes
from regrow.optim.adamw import MOMENTS
from regrow.plan.boxes import ITEM_BYTES, Box
from regrow.state.disk.format import SAFETENSORS_DTYPES, TORCH_DTYPES
from regrow.state.disk.inspect import PIECE_BYTES, Advance
from regrow.state.disk.tensors import CheckpointTensors
from regrow.state.entries import Entry
from regrow.storage import Storage

CONFIG, ONE_FILE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
SHARD_BYTES = 5_000_000_000  # of a file's tensors; more are split over several files
_OUTSIDE_BLOCKS = {"embed": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
_IN_BLOCKS = {
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn.w1": "mlp.gate_proj",
    "ffn.w2": "mlp.down_proj",
    "ffn.w3": "mlp.up_proj",
}
_HEADER_LIMIT = 100_000_000  # bytes, the format's own


def hugging_face_name(parameter: str) -> str:
    """What `LlamaForCausalLM` calls a parameter.

    >>> hugging_face_name("layers.3.attention.wq.weight")
    'model.layers.3.self_attn.q_proj.weight'
    """
    module = parameter.removesuffix(".weight")
    if module in _OUTSIDE_BLOCKS:
        return f"{_OUTSIDE_BLOCKS[module]}.weight"
    _, layer, inner = module.split(".", 2)
    return f"model.layers.{layer}.{_IN_BLOCKS[inner]}.weight"


def export_weights(
    tensors: CheckpointTensors,
    model: ModelConfig,
    target: Storage,
    *,
    dtype: Dtype,
    seq_len: int | None,
    end_of_text_id: int | None,
) -> None:
    """Write config.json and the weights. config.json comes last: a folder without it is unfinished.

    `seq_len` is the context that the model was trained with, `end_of_text_id` begins and ends its documents; either
    may not be known.
    """
    files = _plan_files(model, dtype)
    weight_map = {hugging_face_name(name): file for file, names in files.items() for name in names}
    for file, names in files.items():
        target.write_chunks(file, _file_chunks(tensors, names, dtype))
    if len(files) > 1:
        total = sum(math.prod(shape) for shape in parameter_shapes(model).values()) * ITEM_BYTES[dtype]
        target.write_bytes(INDEX, _to_json({"metadata": {"total_size": total}, "weight_map": weight_map}))
    special = {"bos_token_id": end_of_text_id, "eos_token_id": end_of_text_id}
    target.write_bytes("generation_config.json", _to_json(special))
    context = {} if seq_len is None else {"max_position_embeddings": seq_len}
    target.write_bytes(CONFIG, _to_json({**_describe(model), **context, "torch_dtype": dtype.value, **special}))


def export_tokenizer(target: Storage, tokenizer: bytes, *, end_of_text: str, seq_len: int) -> None:
    """Write the corpus' tokenizer.json, and what `AutoTokenizer` needs beside it."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": end_of_text,
        "eos_token": end_of_text,
        "model_max_length": seq_len,
        "clean_up_tokenization_spaces": False,
    }
    target.write_bytes("tokenizer.json", tokenizer)
    target.write_bytes("tokenizer_config.json", _to_json(config))


def read_model(source: Storage) -> ModelConfig:
    """The model that config.json describes. Raises CheckpointError for one that regrow's Llama cannot be."""
    where = f"{source}/{CONFIG}"
    try:
        config = json.loads(source.read_bytes(CONFIG))
        rope = config.get("rope_parameters") or {}  # where newer versions of transformers keep all of RoPE's settings
        scaling = config.get("rope_scaling") or rope
        heads = config["num_attention_heads"]
        model = ModelConfig(
            vocab_size=config["vocab_size"],
            dim=config["hidden_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            ffn_dim=config["intermediate_size"],
            norm_eps=config.get("rms_norm_eps", 1e-6),
            rope_theta=float(config.get("rope_theta") or rope.get("rope_theta", 10000.0)),
            rope_scaling=_rope_scaling(scaling, where),
            tied=config.get("tie_word_embeddings", False),
        )
    except FileNotFoundError as error:
        raise CheckpointError(f"{where} is not there; name a folder that holds a Hugging Face model") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{where} is not a Llama's config: {type(error).__name__}: {error}") from error
    must_be = {
        "model_type": (config.get("model_type"), "llama"),
        "hidden_act": (config.get("hidden_act", "silu"), "silu"),
        "attention_bias": (config.get("attention_bias", False), False),
        "mlp_bias": (config.get("mlp_bias", False), False),
        "head_dim": (config.get("head_dim") or model.dim // heads, model.dim // heads),
    }
    for key, (found, needed) in must_be.items():
        if found != needed:
            raise CheckpointError(f"{where}: {key} is {found!r}; regrow's Llama has {needed!r}")
    return model


def import_entries(
    source: Storage, model: ModelConfig, advance: Advance, *, moments: Dtype = Dtype.float32
) -> Iterator[Entry]:
    """The weights as float32, one after another, each with AdamW's moments at zero, as `moments`.

    Raises CheckpointError for a tensor that is missing, left over, damaged or of another shape.
    """
    stored, shapes = _read_tables(source), parameter_shapes(model)
    names = {hugging_face_name(name): name for name in shapes}
    if model.tied and "lm_head.weight" in stored:  # some write it again
        if not torch.equal(_load(stored["lm_head.weight"]), _load(stored[hugging_face_name("embed.weight")])):
            raise CheckpointError(f"{source}: tie_word_embeddings is set, but lm_head.weight is not the embedding")
        del stored["lm_head.weight"]
    for name in sorted(names.keys() ^ stored.keys()):
        if name in names:
            raise CheckpointError(f"{source}: has no {name}, which its {CONFIG} calls for")
        raise CheckpointError(f"{source}: holds {name}, which a model of its {CONFIG} does not have")
    for published, name in names.items():
        tensor, shape = stored[published], shapes[name]
        if tensor.shape != shape:
            raise CheckpointError(f"{tensor}: {published} is {list(tensor.shape)}, its {CONFIG} says {list(shape)}")
        weight = _load(tensor)
        advance(tensor.num_bytes)
        zeros = torch.zeros_like(weight, dtype=getattr(torch, moments.value))
        for prefix, memory in (("model", weight), *((f"optim/{moment}", zeros) for moment in MOMENTS)):
            dtype = str(memory.dtype).removeprefix("torch.")
            yield Entry(Box.whole(f"{prefix}/{name}", shape, dtype), memory)


def weight_bytes(source: Storage) -> int:
    """Of all tensors in the folder's files."""
    return sum(tensor.num_bytes for tensor in _read_tables(source).values())


def _describe(model: ModelConfig) -> dict[str, Any]:
    scaling = model.rope_scaling
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": model.vocab_size,
        "hidden_size": model.dim,
        "intermediate_size": model.ffn_dim,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.dim // model.num_heads,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        "rope_scaling": None
        if scaling is None
        else {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_seq_len,
        },
        "tie_word_embeddings": model.tied,
    }


def _rope_scaling(settings: dict[str, Any], where: str) -> RopeScaling | None:
    kind = settings.get("rope_type") or settings.get("type") or "default"
    if kind == "default":
        return None
    if kind != "llama3":
        raise CheckpointError(f"{where}: rope_scaling is of type {kind!r}; regrow's Llama knows 'llama3' alone")
    return RopeScaling(
        factor=float(settings["factor"]),
        low_freq_factor=float(settings["low_freq_factor"]),
        high_freq_factor=float(settings["high_freq_factor"]),
        original_seq_len=settings["original_max_position_embeddings"],
    )


def _plan_files(model: ModelConfig, dtype: Dtype) -> dict[str, list[str]]:
    """Which parameters each file holds: at most SHARD_BYTES of them, or one."""
    shards: list[list[str]] = [[]]
    held = 0
    for name, shape in parameter_shapes(model).items():
        num_bytes = math.prod(shape) * ITEM_BYTES[dtype]
        if shards[-1] and held + num_bytes > SHARD_BYTES:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += num_bytes
    if len(shards) == 1:
        return {ONE_FILE: shards[0]}
    return {f"model-{k:05d}-of-{len(shards):05d}.safetensors": names for k, names in enumerate(shards, start=1)}


def _file_chunks(tensors: CheckpointTensors, names: list[str], dtype: Dtype) -> Iterator[bytes | memoryview]:
    """One safetensors file: its header, then its tensors piece by piece."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name in names:
        shape = tensors.index.tensors[f"model/{name}"][1]
        end = at + math.prod(shape) * ITEM_BYTES[dtype]
        header[hugging_face_name(name)] = {
            "dtype": SAFETENSORS_DTYPES[dtype],
            "shape": list(shape),
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in names:
        for piece in tensors.pieces(f"model/{name}"):
            yield piece.to(getattr(torch, dtype)).view(torch.uint8).numpy().data


@dataclass(frozen=True)
class _Stored:
    """A tensor in a safetensors file."""

    folder: Storage
    file: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int

    def __str__(self) -> str:
        return f"{self.folder}/{self.file}"


def _read_tables(source: Storage) -> dict[str, _Stored]:
    """Every tensor of the folder's safetensors files, by Hugging Face's name."""
    files = [ONE_FILE]
    try:
        if source.exists(INDEX):
            files = sorted(set(json.loads(source.read_bytes(INDEX))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{source}/{INDEX} is damaged: {type(error).__name__}: {error}") from error
    return {name: stored for file in files for name, stored in _read_table(source, file).items()}


def _read_table(source: Storage, file: str) -> dict[str, _Stored]:
    if "/" in file or file.startswith("."):
        raise CheckpointError(f"{source}/{INDEX}: names {file!r}, which is not a file of its folder")
    try:
        length = int.from_bytes(source.read_range(file, 0, 8), "little")
        if not 0 < length <= _HEADER_LIMIT:
            raise ValueError(f"a header of {length} bytes")
        header = json.loads(source.read_range(file, 8, length))
        header.pop("__metadata__", None)
        table = {}
        for name, tensor in header.items():
            (begin, end), shape, dtype = tensor["data_offsets"], tuple(tensor["shape"]), TORCH_DTYPES[tensor["dtype"]]
            if end - begin != math.prod(shape) * ITEM_BYTES[dtype]:
                raise ValueError(f"{name} has {end - begin} bytes")
            if not name.endswith("rotary_emb.inv_freq"):  # old versions saved what is a function of the config
                table[name] = _Stored(source, file, dtype, shape, 8 + length + begin, end - begin)
        return table
    except FileNotFoundError as error:
        raise CheckpointError(f"{source}/{file} is not there; only weights in safetensors can be imported") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{source}/{file} cannot be read: {type(error).__name__}: {error}") from error


def _load(stored: _Stored) -> torch.Tensor:
    """The tensor, flat, as float32. Raises CheckpointError where the file ends before it does."""
    item = ITEM_BYTES[stored.dtype]
    memory = torch.empty(stored.num_bytes // item, dtype=torch.float32)
    for at in range(0, stored.num_bytes, PIECE_BYTES):
        wanted = min(PIECE_BYTES, stored.num_bytes - at)
        data = stored.folder.read_range(stored.file, stored.offset + at, wanted)
        if len(data) != wanted:
            raise CheckpointError(f"{stored} ends too early; the file is damaged")
        piece = torch.frombuffer(bytearray(data), dtype=getattr(torch, stored.dtype))
        memory[at // item : (at + wanted) // item] = piece
    return memory


def _to_json(content: dict[str, Any]) -> bytes:
    return json.dumps(content, indent=2).encode() + b"\n"
