"""Models and batches small enough for tests, with every feature of the large ones."""

import numpy as np
import torch
from torch import Tensor

from regrow.config.schema import ModelConfig, RopeScaling

VOCAB_SIZE = 96


def tiny_model(*, tied: bool = False, num_layers: int = 2, dim: int = 32, ffn_dim: int = 48) -> ModelConfig:
    """A Llama with grouped heads and scaled RoPE; by default every width is a multiple of 16, as float8 wants."""
    return ModelConfig(
        name="tiny",
        vocab_size=VOCAB_SIZE,
        dim=dim,
        num_layers=num_layers,
        num_heads=4,
        num_kv_heads=2,
        ffn_dim=ffn_dim,
        rope_scaling=RopeScaling(original_seq_len=16),
        tied=tied,
    )


def off_by(loss: float, expected: float) -> float:
    """Relative to what is expected; infinite for what is no number, which max() may pass over."""
    error = abs(loss - expected) / expected
    return error if error == error else float("inf")


def count_up_rows(
    step: int, *, num_rows: int, seq_len: int, vocab_size: int = VOCAB_SIZE, noise: float = 0.0
) -> Tensor:
    """Rows of step `step`, int64 [num_rows, seq_len + 1]: each counts up from a random token, which is soon learnt.

    A share `noise` of the tokens is replaced by random ones, which keeps the loss well above zero.
    """
    rng = np.random.default_rng(step)
    rows = (rng.integers(vocab_size, size=(num_rows, 1)) + np.arange(seq_len + 1)) % vocab_size
    replaced = rng.random(rows.shape) < noise
    return torch.from_numpy(np.where(replaced, rng.integers(vocab_size, size=rows.shape), rows))
