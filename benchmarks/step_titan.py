"""torchtitan as a peer of benchmarks/step.py: its own Trainer and train_step, on our dims, rows and recipe.

On a GPU as it comes, CUDA graphs included. On a CPU by a shim of its device module and of two calls that gloo does not
know; nothing of what it computes is changed. Both sides attend over whole rows: torchtitan's language models come with
FlexAttention over documents, so its own module around torch's attention takes that one's place. Its data loader,
tokenizer and checkpoints are left out of its time, as ours are. tests/dist/test_step_benchmark.py takes the same steps
with both, from the same weights.

    python -m venv titan && titan/bin/pip install -e '.[benchmark]'  # its own: it wants older datasets than ours
"""

import importlib.util
import logging
import os
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from regrow.config.schema import ActivationCheckpoint, Dtype, ModelConfig
from regrow.model.size import num_params

NAME = "torchtitan"
HOW_TO_GET_IT = "torchtitan is not installed: in an environment of its own, pip install -e '.[benchmark]'"

Run = Callable[[Tensor], None]  # a step on this rank's rows [m, T+1], which are on the host


def is_installed() -> bool:
    return importlib.util.find_spec("torchtitan") is not None


def titan_step(
    model: ModelConfig,
    *,
    device: torch.device,
    dtype: Dtype,
    seq_len: int,
    micro_batch_seqs: int,
    num_micro_batches: int = 1,
    lr: float,
    compiled: bool = False,
    compile_backend: str = "inductor",
    activation_checkpoint: ActivationCheckpoint = ActivationCheckpoint.none,
) -> Run:
    """A step of all ranks of the default group, which there is already, as its loop takes them."""
    trainer = build_trainer(
        model,
        device=device,
        dtype=dtype,
        seq_len=seq_len,
        micro_batch_seqs=micro_batch_seqs,
        num_micro_batches=num_micro_batches,
        lr=lr,
        compiled=compiled,
        compile_backend=compile_backend,
        activation_checkpoint=activation_checkpoint,
    )

    def run(rows: Tensor) -> None:
        trainer.step += 1
        trainer.gc_handler.run(trainer.step)
        trainer.train_step(trainer.batch_generator(micro_batches(rows, micro_batch_seqs)))

    return run


def build_trainer(
    model: ModelConfig,
    *,
    device: torch.device,
    dtype: Dtype,
    seq_len: int,
    micro_batch_seqs: int,
    num_micro_batches: int,
    lr: float,
    compiled: bool,
    compile_backend: str,
    activation_checkpoint: ActivationCheckpoint,
    **settings: Any,
) -> Any:
    """Its Trainer; `settings` are more of its configuration's. Raises AssertionError where the models' sizes differ."""
    name_what_is_new()
    if device.type == "cpu":
        stand_in_for_cuda()
    os.environ.setdefault("LOCAL_RANK", str(device.index or 0))
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
    from torchtitan.tools.logging import logger
    from torchtitan.trainer import Trainer

    logger.setLevel(logging.ERROR)
    checkpointing = {
        ActivationCheckpoint.none: None,
        ActivationCheckpoint.selective: SelectiveAC.Config(),
        ActivationCheckpoint.full: FullAC.Config(),
    }
    settings.setdefault("checkpoint", CheckpointManager.Config(enable=False))
    settings.setdefault("lr_scheduler", LRSchedulersContainer.Config(warmup_steps=0))
    trainer = Trainer(
        Trainer.Config(
            model_spec=model_spec(model, seq_len),
            loss=CrossEntropyLoss.Config(global_vocab_size=model.vocab_size),
            optimizer=OptimizersContainer.Config(
                param_groups=[
                    ParamGroupConfig(
                        pattern=r".*norm\.weight", optimizer_name="AdamW", optimizer_kwargs=adamw(lr, 0.0)
                    ),
                    ParamGroupConfig(pattern=r".*", optimizer_name="AdamW", optimizer_kwargs=adamw(lr, 0.1)),
                ]
            ),
            training=TrainingConfig(
                local_batch_size=micro_batch_seqs,
                global_batch_size=micro_batch_seqs * num_micro_batches * dist.get_world_size(),
                seq_len=seq_len,
                mixed_precision_param=dtype.value,
                disable_cuda_graphs=device.type == "cpu",
            ),
            parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
            activation_checkpoint=checkpointing[activation_checkpoint],
            compile=CompileConfig(enable=compiled, backend=compile_backend),
            dataloader=built_as(None),  # rows are handed in
            tokenizer=built_as(None),
            **settings,
        )
    )
    theirs = sum(parameter.numel() for part in trainer.model_parts for parameter in part.parameters())
    assert theirs == num_params(model), f"{model.name} has {theirs:,} parameters there, {num_params(model):,} here"
    return trainer


def micro_batches(rows: Tensor, micro_batch_seqs: int) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
    """As its data loader gives them, without positions: there is one document a row."""
    for part in rows.split(micro_batch_seqs):
        yield {"input": part[:, :-1]}, part[:, 1:]


def adamw(lr: float, weight_decay: float) -> dict[str, Any]:
    """As OptimConfig has it, which decays matrices alone."""
    return {"lr": lr, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": weight_decay}


def model_spec(model: ModelConfig, seq_len: int) -> Any:
    """Our dims in its Llama 3."""
    from torchtitan.models import llama3
    from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
    from torchtitan.models.common.attention import ScaledDotProductAttention

    spec = llama3.model_registry("debugmodel")
    scaling = model.rope_scaling
    layers = llama3._build_llama3_layers(
        n_layers=model.num_layers,
        dim=model.dim,
        n_heads=model.num_heads,
        n_kv_heads=model.num_kv_heads,
        hidden_dim=model.ffn_dim,
        rope=ComplexRoPE.Config(
            dim=model.dim // model.num_heads,
            max_seq_len=seq_len,
            theta=model.rope_theta,
            scaling="none" if scaling is None else "llama",
            **({} if scaling is None else {"scaling_factor": scaling.factor}),
        ),
        attn_backend="flex",
    )
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    spec.model = llama3.Llama3Model.Config(
        dim=model.dim,
        vocab_size=model.vocab_size,
        enable_weight_tying=model.tied,
        tok_embeddings=Embedding.Config(
            num_embeddings=model.vocab_size,
            embedding_dim=model.dim,
            param_init=llama3._EMBEDDING_SKIP_INIT if model.tied else llama3._EMBEDDING_INIT,
        ),
        norm=RMSNorm.Config(normalized_shape=model.dim, eps=model.norm_eps, param_init=llama3._NORM_INIT),
        lm_head=Linear.Config(
            in_features=model.dim,
            out_features=model.vocab_size,
            param_init=llama3._output_linear_init(model.dim),
        ),
        layers=layers,
    )
    return spec


def built_as(thing: object) -> Any:
    """A configuration that builds this, whatever it is told."""
    return types.SimpleNamespace(build=lambda **_: thing)


def name_what_is_new() -> None:
    """Let torchtitan be imported with torch 2.11, which lacks a name that it annotates with and does not use here."""
    fsdp: Any = importlib.import_module("torch.distributed.fsdp")
    if not hasattr(fsdp, "DataParallelMeshDims"):
        fsdp.DataParallelMeshDims = object


def stand_in_for_cuda() -> None:
    """Have torchtitan, which this process has not imported yet, take the CPU for its device; again is nothing."""
    from torchtitan.tools import utils

    if utils.device_type == "cpu":
        return
    module = types.ModuleType("cpu")
    for name, value in {
        "set_device": lambda device: None,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
        "reset_peak_memory_stats": lambda *_: None,
        "memory_stats": lambda *_: {},
        "get_device_name": lambda *_: "cpu",
        "get_device_properties": lambda *_: types.SimpleNamespace(total_memory=1 << 30),
    }.items():
        setattr(module, name, value)
    utils.device_type, utils.device_module = "cpu", module
    utils.get_local_device = lambda: torch.device("cpu")
    from torch.distributed.fsdp import FSDPModule
    from torchtitan.distributed import fsdp

    undivided = fsdp.disable_fsdp_gradient_division

    def summed(model: torch.nn.Module) -> None:
        undivided(model)
        for each in model.modules():
            if isinstance(each, FSDPModule):
                each.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM

    fsdp.disable_fsdp_gradient_division = summed
