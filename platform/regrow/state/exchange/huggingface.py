"""A model's weights in the layout of Hugging Face's `LlamaForCausalLM`: config.json and safetensors files.

RoPE's pairs are Hugging Face's already, so going there and back is a renaming: float32 weights keep their bits.
"""

import json
import math
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from regrow.config.schema import Dtype, ModelConfig, RopeScaling
from regrow.errors import CheckpointError, first_line
from regrow.model.size import parameter_shapes
from regrow.optim.adamw import MOMENTS
from regrow.plan.boxes import ITEM_BYTES
from regrow.state.disk.catalog import PIECE_BYTES, Advance
from regrow.state.disk.format import TORCH_DTYPES
from regrow.state.disk.tensors import CheckpointTensors
from regrow.state.entries import Entry, whole_entry
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
ADD_TOKENS = ("TemplateProcessing", "BertProcessing", "RobertaProcessing")
TIED = ("model.embed_tokens.weight", "lm_head.weight")


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
    """Write config.json and the weights, of which a file's tensors, once, and what is read beside them are in memory.

    config.json comes last: a folder without it is unfinished.

    `seq_len` is the context that the model was trained with, `end_of_text_id` begins and ends its documents; either
    may not be known.
    """
    files = _plan_files(model, dtype)
    weight_map = {hugging_face_name(name): file for file, names in files.items() for name in names}
    for file, names in files.items():
        _write(target, file, tensors, names, dtype)
    if len(files) > 1:
        total = sum(math.prod(shape) for shape in parameter_shapes(model).values()) * ITEM_BYTES[dtype]
        target.write_bytes(INDEX, _to_json({"metadata": {"total_size": total}, "weight_map": weight_map}))
    special = {"bos_token_id": end_of_text_id, "eos_token_id": end_of_text_id}
    target.write_bytes("generation_config.json", _to_json(special))
    context = {} if seq_len is None else {"max_position_embeddings": seq_len}
    target.write_bytes(CONFIG, _to_json({**_describe(model), **context, "torch_dtype": dtype.value, **special}))


def _write(target: Storage, file: str, tensors: CheckpointTensors, names: list[str], dtype: Dtype) -> None:
    """A file of these weights, complete or not there; one of a store by way of local disk. Raises CheckpointError."""
    shard = {hugging_face_name(name): tensors.whole(f"model/{name}").to(getattr(torch, dtype)) for name in names}
    beside = target.local_path if target.is_local else None
    if beside is not None:
        beside.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".regrow-export-", dir=beside) as folder:
        path = Path(folder, file)
        path.touch()
        mode = path.stat().st_mode
        try:
            save_file(shard, path, {"format": "pt"})
        except SafetensorError as error:  # as where the disk is full
            raise CheckpointError(f"{target / file} cannot be written to {folder}: {first_line(error)}") from error
        if beside is None:
            memory = np.memmap(path, np.uint8, "r").data
            target.write_chunks(file, [memory[at : at + PIECE_BYTES] for at in range(0, len(memory), PIECE_BYTES)])
            return
        path.chmod(mode)  # safetensors makes it its user's alone
        with open(path, "rb") as written:
            os.fsync(written.fileno())  # its name is on disk with config.json's
        path.replace(beside / file)


def export_tokenizer(target: Storage, tokenizer: bytes, *, end_of_text: str, seq_len: int) -> None:
    """Write the corpus' tokenizer.json, and what `AutoTokenizer` needs beside it.

    Without what preparation leaves out too: tokens put around a text, truncation, padding.
    """
    content = json.loads(tokenizer)
    prepared = content | {
        "truncation": None,
        "padding": None,
        "post_processor": _adds_none(content.get("post_processor")),
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": end_of_text,
        "eos_token": end_of_text,
        "model_max_length": seq_len,
        "clean_up_tokenization_spaces": False,
    }
    unchanged = prepared == content
    target.write_bytes("tokenizer.json", tokenizer if unchanged else json.dumps(prepared, ensure_ascii=False).encode())
    target.write_bytes("tokenizer_config.json", _to_json(config))


def _adds_none(processor: dict[str, Any] | None) -> dict[str, Any] | None:
    """A tokenizer's post-processor without those of its parts that put tokens around a text."""
    if processor is None or processor["type"] in ADD_TOKENS:
        return None
    if processor["type"] == "Sequence":
        kept = [each for each in map(_adds_none, processor["processors"]) if each]
        return {**processor, "processors": kept} if kept else None
    return processor


def read_model(source: Storage) -> ModelConfig:
    """The model that config.json describes. Raises CheckpointError for one that regrow's Llama cannot be."""
    where = str(source / CONFIG)
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
    shapes = parameter_shapes(model)
    missing, tied = {hugging_face_name(name): name for name in shapes}, dict[str, torch.Tensor]()
    for file, size in _files_of(source).items():
        for published, weight in _tensors_of(source, file, size):
            advance(weight.nbytes)
            if model.tied and published in TIED:
                tied[published] = weight
                if published not in missing:  # some write the output again
                    continue
            name = missing.pop(published, None)
            if name is None:
                raise CheckpointError(
                    f"{source}: holds {published}, which a model of its {CONFIG} does not have, or holds it twice"
                )
            if weight.shape != shapes[name]:
                found, wanted = list(weight.shape), list(shapes[name])
                raise CheckpointError(f"{source / file}: {published} is {found}, its {CONFIG} says {wanted}")
            yield from _entries_of(name, weight, moments)
    if missing:
        raise CheckpointError(f"{source}: has no {min(missing)}, which its {CONFIG} calls for")
    if len(tied) == len(TIED) and not torch.equal(*(weight.float() for weight in tied.values())):
        raise CheckpointError(f"{source}: tie_word_embeddings is set, but lm_head.weight is not the embedding")


def _entries_of(name: str, weight: torch.Tensor, moments: Dtype) -> Iterator[Entry]:
    zeros = torch.zeros_like(weight, dtype=getattr(torch, moments.value))
    for prefix, tensor in (("model", weight.float()), *((f"optim/{moment}", zeros) for moment in MOMENTS)):
        yield whole_entry(f"{prefix}/{name}", tensor)


def weight_bytes(source: Storage) -> int:
    """Of the folder's safetensors files."""
    return sum(_files_of(source).values())


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


def _files_of(source: Storage) -> dict[str, int]:
    """The folder's safetensors files and their sizes."""
    files = [ONE_FILE]
    try:
        if source.exists(INDEX):
            files = sorted(set(json.loads(source.read_bytes(INDEX))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{source / INDEX} is damaged: {type(error).__name__}: {error}") from error
    for file in files:
        if "/" in file or file.startswith("."):
            raise CheckpointError(f"{source / INDEX}: names {file!r}, which is not a file of its folder")
        if not source.exists(file):
            raise CheckpointError(f"{source / file} is not there; only weights in safetensors can be imported")
    return {file: source.read_with(file, lambda opened: opened.seek(0, os.SEEK_END)) for file in files}


def _tensors_of(source: Storage, file: str, size: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a file, by Hugging Face's name. Raises CheckpointError where it is damaged."""
    try:
        with _on_disk(source, file, size) as path, safe_open(path, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118, it is no mapping
                if name.endswith("rotary_emb.inv_freq"):  # old versions saved what is a function of the config
                    continue
                tensor = opened.get_tensor(name)
                if str(tensor.dtype).removeprefix("torch.") not in TORCH_DTYPES.values():
                    raise CheckpointError(f"{source / file}: {name} is {tensor.dtype}, which no Llama's weights are")
                yield name, tensor
    except SafetensorError as error:
        raise CheckpointError(f"{source / file} cannot be read: {first_line(error)}") from error


@contextmanager
def _on_disk(source: Storage, file: str, size: int) -> Iterator[Path]:
    """The file, or a copy of a remote one for the while."""
    if source.is_local:
        yield source.local_path / file
        return
    with tempfile.TemporaryDirectory(prefix="regrow-import-") as folder:
        path = Path(folder, file)
        with open(path, "wb") as copy:
            for at in range(0, size, PIECE_BYTES):
                copy.write(source.read_range(file, at, min(PIECE_BYTES, size - at)))
        yield path


def _to_json(content: dict[str, Any]) -> bytes:
    return json.dumps(content, indent=2).encode() + b"\n"
