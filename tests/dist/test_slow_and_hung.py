"""Of real ranks, the one that is slow or hangs is found by what control makes of their pulses."""

from pathlib import Path

import pytest

from regrow.control.slow import Kind
from support.gloo import run_ranks
from support.suspecting import HUNG, SLOW, hang_in_validation, train_with_a_slow_rank

READ_S = 2.0


def test_a_rank_that_takes_15_percent_longer_is_named(tmp_path: Path) -> None:
    ((named,), _), *_ = run_ranks(train_with_a_slow_rank, 3, str(tmp_path), READ_S, deadline_s=300.0)
    assert (named["kind"], named["rank"], named["node"]) == (Kind.slow_compute, SLOW, f"node {SLOW}")
    assert named["factor"] > 1.08


@pytest.mark.long
def test_a_rank_that_hangs_in_a_validation_is_found_by_what_validations_took_before(tmp_path: Path) -> None:
    told = run_ranks(hang_in_validation, 3, str(tmp_path), deadline_s=300.0)
    (found,) = told[0][1]
    assert found.startswith(f"{told[HUNG][0]} process {told[HUNG][0]} runs, and is not in the collective")
    assert "in validation for" in found
