"""A Llama of Megatron-Core's on CPUs: its loss on some rows, and its checkpoint by `dist_checkpointing`.

    mega/bin/python tests/support/megatron_run.py FOLDER [--ranks 2]  # FOLDER/iter_0000000, FOLDER/loss.json

`mega` is an environment of its own: pip install torch==2.13.0 megatron-core==0.16.1 psutil. The model is Megatron's,
of ranks that share its tensors; stood in for are the calls of `torch.cuda` alone, which it makes on a CPU too.
"""

import argparse
import contextlib
import json
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

VOCAB, DIM, LAYERS, HEADS, KV_HEADS, FFN, SEQ_LEN = 40, 16, 2, 4, 2, 24, 12


def rows() -> torch.Tensor:
    """int64 [4, SEQ_LEN + 1]."""
    return (torch.arange(4)[:, None] * 7 + torch.arange(SEQ_LEN + 1) ** 2) % VOCAB


def stand_in_for_cuda() -> None:
    for name, call in {"synchronize": lambda *_: None, "current_device": lambda: "cpu"}.items():
        setattr(torch.cuda, name, call)
    from megatron.core.transformer import dot_product_attention

    class NoTracker:
        @staticmethod
        def fork(*_: object) -> contextlib.AbstractContextManager[None]:
            return contextlib.nullcontext()

    dot_product_attention.tensor_parallel.get_cuda_rng_tracker = lambda *_: NoTracker


def build() -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=DIM,
        num_attention_heads=HEADS,
        num_query_groups=KV_HEADS,
        ffn_hidden_size=FFN,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        layernorm_epsilon=1e-5,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=True,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        tensor_model_parallel_size=dist.get_world_size(),
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=VOCAB,
        max_sequence_length=SEQ_LEN,
        position_embedding_type="rope",
        rotary_base=500000,
        share_embeddings_and_output_weights=False,
    )


def save(rank: int, ranks: int, store: str, folder: Path) -> None:
    warnings.simplefilter("ignore")
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    from megatron.core import dist_checkpointing, parallel_state

    parallel_state.initialize_model_parallel(ranks, 1)
    stand_in_for_cuda()
    torch.manual_seed(0)
    model = build()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # or they were all ones; the same on all ranks
                dice = torch.Generator().manual_seed(len(name))
                parameter.copy_(1 + 0.1 * torch.randn(parameter.shape, generator=dice))
    inputs, targets = rows()[:, :-1], rows()[:, 1:]
    positions = torch.arange(SEQ_LEN).expand_as(inputs)
    mask = torch.triu(torch.ones(1, 1, SEQ_LEN, SEQ_LEN, dtype=torch.bool), diagonal=1)
    loss = model(inputs, positions, mask, labels=targets).mean()
    path = folder / "iter_0000000"
    path.mkdir(exist_ok=True)
    dist_checkpointing.save(model.sharded_state_dict(prefix=""), str(path))
    if rank == 0:
        (folder / "loss.json").write_text(json.dumps({"loss": loss.item(), "rows": rows().tolist()}) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        multiprocessing.spawn(
            save, args=(options.ranks, f"{place}/store", options.folder), nprocs=options.ranks, daemon=False
        )


if __name__ == "__main__":
    main()
