"""Which blocks are a stage of which rank, by what the configuration says that each costs."""

from functools import cache

from regrow.config.schema import ModelConfig, ParallelConfig, PipelineSchedule
from regrow.plan.pipeline import Stages, cut_blocks
from regrow.plan.topology import Pipelines

EMBEDDING = 0.05  # of a block's time: looking up and adding up move a twentieth of what a block's norms and sums do


def stages_of(model: ModelConfig, parallel: ParallelConfig, seq_len: int) -> Stages | None:
    """The stages of a pipeline, none slower than it has to be; None without one."""
    pipelines = pipelines_of(model, parallel, seq_len)
    return pipelines.cut(parallel.pp) if pipelines else None


def pipelines_of(model: ModelConfig, parallel: ParallelConfig, seq_len: int) -> Pipelines | None:
    """What a group of any size may cut a model into; None without a pipeline."""
    if parallel.pp == 1:
        return None
    per_rank, output = stages_per_rank(parallel), output_blocks(model, seq_len)

    @cache
    def cut(pp: int) -> Stages:
        return cut_blocks(model.num_layers, pp, per_rank, before=EMBEDDING, behind=output)

    return Pipelines(parallel.pp, max(1, parallel.least_pp), model.num_layers // per_rank, cut)


def slowest_share(model: ModelConfig, stages: Stages, seq_len: int) -> float:
    """Of a model's arithmetic, what the slowest rank of a pipeline has."""
    ends = [0.0] * stages.pp
    ends[0], ends[-1] = EMBEDDING, output_blocks(model, seq_len)
    costs = [stages.num_blocks_of(rank) + end for rank, end in enumerate(ends)]
    return max(costs) / sum(costs)


def stages_per_rank(parallel: ParallelConfig) -> int:
    return parallel.stages_per_rank if parallel.schedule is PipelineSchedule.interleaved else 1


def output_blocks(model: ModelConfig, seq_len: int) -> float:
    """Blocks that take as many multiplications as the output.

    >>> eight_b = ModelConfig(vocab_size=128256, dim=4096, num_heads=32, num_kv_heads=8, ffn_dim=14336)
    >>> round(output_blocks(eight_b, seq_len=8192), 2)
    2.09
    """
    kv_dim = model.dim // model.num_heads * model.num_kv_heads
    linears = 2 * model.dim * (model.dim + kv_dim) + 3 * model.dim * model.ffn_dim
    return model.vocab_size * model.dim / (linears + seq_len * model.dim)  # attention sees half of all pairs
