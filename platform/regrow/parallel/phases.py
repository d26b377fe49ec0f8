"""With which recipe a step is trained: a run with float8 may end in bfloat16. Pure."""

from dataclasses import replace

from regrow.config.schema import Float8, ParallelConfig


def float8_steps(parallel: ParallelConfig, num_steps: int) -> int:
    """How many of a run's steps, its first ones, are trained with float8.

    >>> float8_steps(ParallelConfig(float8=Float8.rowwise, bfloat16_tail=0.1), 1000)
    900
    """
    if parallel.float8 is Float8.none:
        return 0
    return num_steps - round(num_steps * parallel.bfloat16_tail)


def recipe_after(parallel: ParallelConfig, num_steps: int, step: int) -> ParallelConfig:
    """What the step after `step` is trained with, in a run of `num_steps` steps; after the last one, as that one."""
    in_float8 = min(step, num_steps - 1) < float8_steps(parallel, num_steps)
    return parallel if in_float8 else replace(parallel, float8=Float8.none)


def phase_after(parallel: ParallelConfig, steps: int, step: int) -> tuple[ParallelConfig, int]:
    """What the steps after this one are trained with, and the last one of `steps` for which that is so."""
    end_of_float8 = float8_steps(parallel, steps)
    return recipe_after(parallel, steps, step), end_of_float8 if step < end_of_float8 else steps
