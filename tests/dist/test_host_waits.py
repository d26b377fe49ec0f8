"""The host runs a step ahead of its device: whatever a step is made of, it asks for no number before it is resolved.

On a CPU nothing waits, but what would is called all the same. On an H100 one such call cost each step its lead.
"""

import pytest
import torch

from regrow.config.schema import ActivationCheckpoint, Dtype, Float8, ModelConfig, OptimConfig, ParallelConfig
from regrow.train.certificate import Certificate
from support.gloo import run_ranks
from support.operators import Operators
from support.training import Training, build, micro_batches

MODEL = ModelConfig(vocab_size=64, dim=32, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=48)
DOCUMENTS = ModelConfig(**{**vars(MODEL), "document_attention": True})
TIED = ModelConfig(**{**vars(MODEL), "tied": True})
CASES = {
    "FSDP": (2, MODEL, ParallelConfig(), OptimConfig()),
    "HSDP, each pass reduced": (4, MODEL, ParallelConfig(dp_replicate=2, sync_every_micro_batch=True), OptimConfig()),
    "documents": (2, DOCUMENTS, ParallelConfig(), OptimConfig()),
    "checkpointed, tied, moments in bfloat16": (
        2,
        TIED,
        ParallelConfig(dtype=Dtype.bfloat16, activation_checkpoint=ActivationCheckpoint.selective),
        OptimConfig(moments=Dtype.bfloat16),
    ),
    "all logits": (2, MODEL, ParallelConfig(loss_chunk_tokens=0), OptimConfig()),
    "float8": (2, MODEL, ParallelConfig(dtype=Dtype.bfloat16, float8=Float8.rowwise), OptimConfig()),
    "gathered as float8": (
        2,
        MODEL,
        ParallelConfig(dtype=Dtype.bfloat16, float8=Float8.tensorwise_all_gather),
        OptimConfig(),
    ),
    "ranks share arithmetic": (2, MODEL, ParallelConfig(tp=2), OptimConfig()),
    "ranks share rows": (2, MODEL, ParallelConfig(cp=2), OptimConfig()),
    "a pipeline": (2, MODEL, ParallelConfig(pp=2), OptimConfig()),
}


def asked(training: Training) -> tuple[set[str], int]:
    """What waits of two steps, and how many kinds of operators they called."""
    step = build(training)
    step.certificate = Certificate(1, torch.distributed.get_world_size(), torch.device("cpu"))
    results = []
    with Operators() as operators:
        for number in range(1, 3):
            rows, num_passes = micro_batches(training, number)
            results.append(step.run(rows, num_micro_batches=num_passes, lr=1e-3, digest=1, number=number))
    for each in results:
        assert each.resolve().loss > 0
    return operators.waiting, len(operators.names)


@pytest.mark.parametrize("case", CASES)
def test_a_step_asks_for_no_number_before_it_is_resolved(case: str) -> None:
    world_size, model, parallel, optim = CASES[case]
    optim = OptimConfig(**{**vars(optim), "global_batch_seqs": 8, "num_slices": 4})
    training = Training(model, parallel, optim, seq_len=32, eot_id=0 if model.document_attention else None)
    for waiting, num_operators in run_ranks(asked, world_size, training):
        assert not waiting
        assert num_operators > 20
