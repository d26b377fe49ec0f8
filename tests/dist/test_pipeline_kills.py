"""A rank of pipelines that dies at any action of a step: all others come out of it, none waits in a receive."""

from pathlib import Path
from typing import Any

import pytest

from regrow.parallel.asynchronous import NAME
from support.pipeline_kills import LAYOUTS, TIMEOUT_S, kill, moments_of, of_each_kind


def assert_all_came_out(found: list[Any], victim: int) -> None:
    for name, seconds in [said for rank, said in enumerate(found) if rank != victim]:
        assert name in ("RuntimeError", "DistBackendError", "DistNetworkError", "BrokenStep"), name
        assert seconds < TIMEOUT_S / 2


@pytest.mark.parametrize(
    ("layout", "victim", "which"),
    [
        ("2 x 2", 3, "backward"),
        ("2 x 2", 0, "send"),
        ("rows shared", 1, "gather of keys and values"),
        pytest.param("rows shared", 2, "sum of their gradients", marks=pytest.mark.long),
    ],
)
def test_a_rank_that_dies_in_a_pipeline_keeps_no_other_waiting(
    layout: str, victim: int, which: str, tmp_path: Path
) -> None:
    moments = moments_of(tmp_path / "whole", layout)[victim]
    found = kill(tmp_path / "killed", layout, victim, len(moments) - 1 - moments[::-1].index(which))
    assert_all_came_out(found, victim)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("told", [True, False], ids=["told", "by the network alone"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_that_dies_at_any_action_keeps_no_other_waiting(layout: str, told: bool, tmp_path: Path) -> None:
    moments = moments_of(tmp_path / "whole", layout)
    world_size, parallel = LAYOUTS[layout]
    for victim in range(0, world_size, world_size // parallel.pp):  # of each stage one
        for fatal in of_each_kind(moments[victim]):
            found = kill(tmp_path / f"{victim}-{fatal}", layout, victim, fatal, told=told)
            assert_all_came_out(found, victim)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_same_where_a_dead_peer_raises_nothing(tmp_path: Path) -> None:
    """As on NCCL."""
    moments = moments_of(tmp_path / "whole", "2 x 2")
    for victim in (0, 3):
        for fatal in of_each_kind(moments[victim]):
            assert_all_came_out(kill(tmp_path / f"{victim}-{fatal}", "2 x 2", victim, fatal, backend=NAME), victim)
