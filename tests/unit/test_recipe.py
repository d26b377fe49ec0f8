"""Which steps of a run are trained with float8."""

import pytest

from regrow.config.schema import Float8, ParallelConfig
from regrow.model.linears import float8_steps, recipe_after


@pytest.mark.parametrize(("tail", "steps"), [(0.0, 10), (0.3, 7), (0.34, 7), (0.04, 10), (1.0, 0)])
def test_a_tail_is_so_many_of_the_last_steps(tail: float, steps: int) -> None:
    parallel = ParallelConfig(float8=Float8.rowwise, bfloat16_tail=tail)
    assert float8_steps(parallel, 10) == steps
    recipes = [recipe_after(parallel, 10, step).float8 for step in range(10)]
    assert recipes == [Float8.rowwise] * steps + [Float8.none] * (10 - steps)
    assert recipe_after(parallel, 10, 10).float8 is recipes[-1]


def test_without_float8_a_tail_changes_nothing() -> None:
    parallel = ParallelConfig(bfloat16_tail=0.5)
    assert float8_steps(parallel, 10) == 0
    assert all(recipe_after(parallel, 10, step) == parallel for step in range(11))
