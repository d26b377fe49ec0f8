"""What `python -m jobs.accept` checks on GPUs, as tests: each skipped, with the reason, where it cannot run."""

import os
import shutil
from functools import cache

import pytest

from regrow.accept.claims import CHECKS, Check, Part, State
from regrow.accept.runner import Machine, look_at, run_check

GPU_CHECKS = [check for check in CHECKS if check.part in (Part.one_process, Part.one_node)]
HAS_DRIVER = os.path.exists("/dev/nvidiactl") or shutil.which("nvidia-smi") is not None


@cache
def machine() -> Machine:
    return look_at() if HAS_DRIVER else Machine(reason="no GPU here")


@pytest.mark.timeout(700)
@pytest.mark.parametrize("check", GPU_CHECKS, ids=[check.function.rpartition(".")[2] for check in GPU_CHECKS])
def test_claims_hold(check: Check) -> None:
    if why_not := machine().why_not(check):
        pytest.skip(why_not)
    found, broke = run_check(check, check.deadline_s)
    assert not broke
    refused = [f"{each.claim}: {each.figure} {each.reason}" for each in found if each.state is State.refused]
    assert not refused, "\n".join(refused)
    not_tested = [f"{each.claim}: {each.reason}" for each in found if each.state is State.not_tested]
    if len(not_tested) == len(found):
        pytest.skip("; ".join(not_tested))
