"""How many parameters a model has, what its training state takes, and how much arithmetic a token. Needs no torch."""

from functools import cache
from math import prod

from regrow.config.schema import Dtype, ModelConfig
from regrow.plan.boxes import Box
from regrow.plan.mesh import Coordinates, MeshShape
from regrow.plan.placement import placed

PARAMETER_BYTES = 4  # float32

Shapes = dict[str, tuple[int, ...]]  # by parameter, in the model's order


def parameter_shapes(config: ModelConfig) -> Shapes:
    """Every parameter's shape; a tied embedding is one parameter."""
    embed, *rest = outer_shapes(config).items()
    blocks = (block_shapes(config, number) for number in range(config.num_layers))
    return dict([embed, *(item for block in blocks for item in block.items()), *rest])


def outer_shapes(config: ModelConfig) -> Shapes:
    """Of what is in no block."""
    table = (config.vocab_size, config.dim)
    return {"embed.weight": table, "norm.weight": (config.dim,)} | ({} if config.tied else {"output.weight": table})


def block_shapes(config: ModelConfig, number: int = 0) -> Shapes:
    """Of one block."""
    dim, ffn, head_dim = config.dim, config.ffn_dim, config.dim // config.num_heads
    heads, kv_heads = config.num_heads * head_dim, config.num_kv_heads * head_dim
    shapes: Shapes = {
        "attention_norm": (dim,),
        "attention.wq": (heads, dim),
        "attention.wk": (kv_heads, dim),
        "attention.wv": (kv_heads, dim),
        "attention.wo": (dim, heads),
        "ffn_norm": (dim,),
        "ffn.w1": (ffn, dim),
        "ffn.w3": (ffn, dim),
        "ffn.w2": (dim, ffn),
    }
    return {f"layers.{number}.{name}.weight": shape for name, shape in shapes.items()}


def num_params(config: ModelConfig) -> int:
    """All parameters; a tied embedding counts once.

    >>> num_params(ModelConfig())
    5048576
    """
    return sum(map(prod, outer_shapes(config).values())) + config.num_layers * sum(
        map(prod, block_shapes(config).values())
    )


def num_matmul_params(config: ModelConfig) -> int:
    """Parameters that a token is multiplied with: without the input embedding, with the output projection."""
    return num_params(config) - (0 if config.tied else config.vocab_size * config.dim)


def num_params_of_block(config: ModelConfig, tp: int) -> int:
    """Parameters of one of `tp` blocks that tensor parallelism cuts the model into; norms are in each.

    >>> num_params_of_block(ModelConfig(), 1) == num_params(ModelConfig())
    True
    """
    outer, block = (_num_elements(frozenset(of.items()), tp) for of in (outer_shapes(config), block_shapes(config)))
    return outer + config.num_layers * block


def moment_bytes(moments: Dtype) -> int:
    """Of AdamW's two moments of a parameter, as they are kept between steps."""
    return 2 * (4 if moments is Dtype.float32 else 2)


def state_bytes(config: ModelConfig, moments: Dtype = Dtype.float32, tp: int = 1) -> int:
    """Bytes of what a snapshot or a checkpoint holds, over all ranks; with `tp`, over those that hold one block."""
    return (PARAMETER_BYTES + moment_bytes(moments)) * num_params_of_block(config, tp)


def rank_state_bytes(config: ModelConfig, moments: Dtype, mesh: MeshShape) -> int:
    """Of the rank of a mesh that holds most: the first of those that share a stage, as rows do not divide evenly; of a
    pipeline, one of the stages with most parameters.

    >>> mesh = MeshShape(dp_replicate=1, dp_shard=2)
    >>> rank_state_bytes(ModelConfig(), Dtype.float32, mesh) == state_bytes(ModelConfig()) // 2
    True
    """
    shapes = (outer_shapes(config), block_shapes(config))
    outer, block = (_num_elements(frozenset(of.items()), mesh.tp, mesh.dp_shard) for of in shapes)
    table = _num_elements(frozenset({("embed.weight", (config.vocab_size, config.dim))}), mesh.tp, mesh.dp_shard)
    counts = [config.num_layers] if mesh.pp == 1 else [sum(mesh.blocks[rank :: mesh.pp]) for rank in range(mesh.pp)]
    ends = [0] * len(counts)
    ends[0], ends[-1] = (table, outer if config.tied else outer - table) if mesh.pp > 1 else (outer, outer)
    most = max(count * block + end for count, end in zip(counts, ends, strict=True))
    return (PARAMETER_BYTES + moment_bytes(moments)) * most


@cache
def _num_elements(shapes: frozenset[tuple[str, tuple[int, ...]]], tp: int, dp_shard: int = 1) -> int:
    """Of the first of `tp` blocks that tensor parallelism cuts parameters into, on the first of `dp_shard` ranks."""
    at = Coordinates(MeshShape(1, dp_shard, tp))
    return sum(placed(Box.whole(*each), at).num_elements for each in shapes)


def flops_per_token(config: ModelConfig, seq_len: int) -> float:
    """6N + 12·L·H·Q·T, forward and backward: N as `num_matmul_params`, L layers, H heads of width Q, T tokens.

    Source: PaLM, arXiv:2204.02311, appendix B.
    """
    return 6.0 * num_matmul_params(config) + 12.0 * config.num_layers * config.dim * seq_len
