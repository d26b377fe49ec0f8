"""A model that no world size of a test divides."""

from regrow.config.schema import ModelConfig


def ragged_model(*, tied: bool = False) -> ModelConfig:
    """A Llama whose widths 2, 3 and 4 ranks do not all divide, and whose kv projections are smaller than most."""
    return ModelConfig(
        name="ragged", vocab_size=97, dim=20, num_layers=2, num_heads=5, num_kv_heads=1, ffn_dim=37, tied=tied
    )
