"""Float8: which linear layers of a block are worth it, and which steps of a run; it may end in bfloat16. No torch."""

from dataclasses import replace

from regrow.config.schema import Float8, ModelConfig, ParallelConfig
from regrow.model.size import block_shapes
from regrow.plan.boxes import Box
from regrow.plan.mesh import Coordinates, MeshShape
from regrow.plan.placement import placed

LINEARS = ("wq", "wk", "wv", "w1", "w3", "wo", "w2")
FLOAT8_MULTIPLE = 16  # rows and columns of what scaled matrix products multiply


def block_linears(config: ModelConfig, tp: int = 1) -> dict[str, tuple[int, int]]:
    """Rows and columns of each linear's weight, of the block that one of `tp` ranks holds.

    >>> block_linears(ModelConfig(), tp=2)["wo"]
    (256, 128)
    """
    at, shapes = Coordinates(MeshShape(1, 1, tp)), block_shapes(config)
    sizes = {name.split(".")[-2]: placed(Box.whole(name, shape), at).sizes for name, shape in shapes.items()}
    return {name: (sizes[name][0], sizes[name][1]) for name in LINEARS}


def why_not_float8(rows: int, columns: int) -> str:
    """Why a linear of this size stays as it is; empty where it becomes a float8 one.

    >>> why_not_float8(24, 64)
    '24 x 64: not multiples of 16'
    """
    if rows % FLOAT8_MULTIPLE or columns % FLOAT8_MULTIPLE:
        return f"{rows} x {columns}: not multiples of {FLOAT8_MULTIPLE}"
    return ""


def float8_line(config: ModelConfig, recipe: str, tp: int = 1) -> str:
    """Which layers a recipe is for, and why not the others, for a person."""
    linears = block_linears(config, tp)
    reasons = {name: why_not_float8(*shape) for name, shape in linears.items()}
    chosen = [name for name, reason in reasons.items() if not reason]
    left = [f"{name} ({reason})" for name, reason in reasons.items() if reason]
    where = f"in {', '.join(chosen)} of each block" if chosen else "nowhere"
    return f"float8 {recipe} {where}; not in {', '.join([*left, 'embedding', 'output'])}"


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


def phase_end(parallel: ParallelConfig, num_steps: int, step: int) -> int:
    """The last step that is trained as the one after `step` is."""
    end_of_float8 = float8_steps(parallel, num_steps)
    return end_of_float8 if step < end_of_float8 else num_steps
