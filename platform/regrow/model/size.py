"""How many parameters a model has, what its training state takes, and how much arithmetic a token. Needs no torch."""

from regrow.config.schema import Dtype, ModelConfig

PARAMETER_BYTES = 4  # float32


def num_params(config: ModelConfig) -> int:
    """All parameters; a tied embedding counts once.

    >>> num_params(ModelConfig())
    5048576
    """
    head_dim = config.dim // config.num_heads
    attention = config.dim * head_dim * (2 * config.num_heads + 2 * config.num_kv_heads)
    block = attention + 3 * config.dim * config.ffn_dim + 2 * config.dim
    embeddings = config.vocab_size * config.dim * (1 if config.tied else 2)
    return embeddings + config.num_layers * block + config.dim


def num_matmul_params(config: ModelConfig) -> int:
    """Parameters that a token is multiplied with: without the input embedding, with the output projection."""
    return num_params(config) - (0 if config.tied else config.vocab_size * config.dim)


def num_params_of_block(config: ModelConfig, tp: int) -> int:
    """Parameters of one of `tp` blocks that tensor parallelism cuts the model into; norms are in each.

    >>> num_params_of_block(ModelConfig(), 1) == num_params(ModelConfig())
    True
    """
    norms = (2 * config.num_layers + 1) * config.dim
    return (num_params(config) - norms) // tp + norms


def moment_bytes(moments: Dtype) -> int:
    """Of AdamW's two moments of a parameter, as they are kept between steps."""
    return 2 * (4 if moments is Dtype.float32 else 2)


def state_bytes(config: ModelConfig, moments: Dtype = Dtype.float32, tp: int = 1) -> int:
    """Bytes of what a snapshot or a checkpoint holds, over all ranks; with `tp`, over those that hold one block."""
    return (PARAMETER_BYTES + moment_bytes(moments)) * num_params_of_block(config, tp)


def flops_per_token(config: ModelConfig, seq_len: int) -> float:
    """6N + 12·L·H·Q·T, forward and backward: N as `num_matmul_params`, L layers, H heads of width Q, T tokens.

    Source: PaLM, arXiv:2204.02311, appendix B.
    """
    return 6.0 * num_matmul_params(config) + 12.0 * config.num_layers * config.dim * seq_len
