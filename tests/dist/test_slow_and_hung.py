"""Of real ranks, the one that is slow or hangs is found by what control makes of their pulses."""

import threading
import time
from pathlib import Path

import pytest

from regrow.control.phases import Phase
from regrow.control.slow import Kind
from regrow.drill.hosts import why_impossible
from support.breaking import Mounted
from support.gloo import run_ranks
from support.suspecting import HUNG, SLOW, hang, train_with_a_slow_rank

READ_S = 2.0


def test_a_rank_that_takes_15_percent_longer_is_named(tmp_path: Path) -> None:
    ((named,), _), *_ = run_ranks(train_with_a_slow_rank, 3, str(tmp_path), READ_S, deadline_s=300.0)
    assert (named["kind"], named["rank"], named["node"]) == (Kind.slow_compute, SLOW, f"node {SLOW}")
    assert named["factor"] > 1.08


@pytest.mark.long
@pytest.mark.parametrize("phase", [Phase.first_step, Phase.step, Phase.validation, Phase.checkpoint])
def test_a_rank_that_hangs_is_found_by_what_its_phase_took_before(tmp_path: Path, phase: Phase) -> None:
    told = run_ranks(hang, 3, str(tmp_path), phase, deadline_s=300.0)
    (found,) = told[0][1]
    assert found.startswith(f"{told[HUNG][0]} process {told[HUNG][0]} runs, and is not in the collective")
    assert f"in {phase} for" in found
    assert "is the longest so far" in found


@pytest.mark.long
@pytest.mark.skipif(bool(why_impossible()), reason=f"no breakable file system: {why_impossible()}")
def test_a_rank_whose_mount_is_dead_hangs_in_the_validation_that_reads_there(tmp_path: Path) -> None:
    mounted, ranks = Mounted(tmp_path), tmp_path / "ranks"
    ranks.mkdir()
    (mounted.real / "rows").write_bytes(b"rows")

    def heal() -> None:
        while not (ranks / "over").exists():
            time.sleep(0.1)
        mounted.breaks()

    try:
        mounted.breaks(kind="hung")
        threading.Thread(target=heal, daemon=True).start()
        told = run_ranks(hang, 3, str(ranks), Phase.validation, str(mounted.folder), deadline_s=300.0)
    finally:
        mounted.close()
    (found,) = told[0][1]
    assert found.startswith(f"{told[HUNG][0]} process {told[HUNG][0]} runs, and is not in the collective")
    assert "in validation for" in found
