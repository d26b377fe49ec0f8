"""Attention within documents under FSDP, activation checkpointing and torch.compile: the mask goes to every block."""

import dataclasses

import pytest
import torch
from torch._dynamo.utils import counters

from regrow.accept.tiny import tiny_model
from regrow.config.schema import ActivationCheckpoint, OptimConfig, ParallelConfig
from support.gloo import run_ranks
from support.training import Training, plain_losses, train

torch.set_num_threads(1)  # threads that wait for each other cost tiny models more than they save

EOT = 7  # one of 96 tokens that rows count through: about half of the rows hold it
TRAINING = Training(
    dataclasses.replace(tiny_model(), document_attention=True),
    optim=OptimConfig(lr=1e-2, global_batch_seqs=24, num_slices=12),
    num_steps=6,
    seq_len=48,
    noise=0.3,
    eot_id=EOT,
)


def losses_and_graphs(training: Training) -> tuple[list[float], int]:
    return [result.loss for result in train(training)], counters["stats"]["unique_graphs"]


@pytest.fixture(scope="module")
def plain() -> list[float]:
    return plain_losses(TRAINING)


@pytest.mark.parametrize(
    ("mode", "compile_blocks"),
    [
        *((mode, False) for mode in ActivationCheckpoint),
        (ActivationCheckpoint.selective, True),
        pytest.param(ActivationCheckpoint.none, True, marks=pytest.mark.long),
        pytest.param(ActivationCheckpoint.full, True, marks=pytest.mark.long),
    ],
)
def test_losses_over_two_ranks_equal_a_plain_loops(mode, compile_blocks, plain):
    parallel = ParallelConfig(activation_checkpoint=mode, compile=compile_blocks, compile_backend="aot_eager")
    for losses, num_graphs in run_ranks(losses_and_graphs, 2, dataclasses.replace(TRAINING, parallel=parallel)):
        assert losses == pytest.approx(plain, abs=1e-5)
        assert num_graphs == (1 if compile_blocks else 0)  # new documents in every batch, no new graph


def test_three_ranks_with_passes_that_count_for_nothing_train_the_same(plain):
    optim = dataclasses.replace(TRAINING.optim, num_slices=8)  # 3, 3 and 2 slices
    for losses, _ in run_ranks(losses_and_graphs, 3, dataclasses.replace(TRAINING, optim=optim)):
        assert losses == pytest.approx(plain, abs=1e-5)


def test_whole_rows_train_differently(plain):
    whole = dataclasses.replace(TRAINING, model=tiny_model(), eot_id=None)
    assert max(abs(a - b) for a, b in zip(plain_losses(whole), plain, strict=True)) > 1e-3
