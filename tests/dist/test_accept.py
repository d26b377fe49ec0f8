"""Acceptance refuses what it should: with NCCL's manners and guards taken away; and what lasts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from regrow.accept.checks_cpu import FLAT_MIB, WATCHDOG
from regrow.accept.claims import Report, read_report
from regrow.accept.generations import change_groups, judge_flat
from regrow.accept.matrix import Row, run_matrix
from regrow.accept.outlive import Fault, Scenario
from regrow.accept.tiny import tiny_model
from regrow.config.schema import OptimConfig, ParallelConfig

SMALL = Scenario(
    model=tiny_model(num_layers=1),
    optim=OptimConfig(lr=1e-3, global_batch_seqs=6, num_slices=6),
    seq_len=16,
    num_steps=4,
)


@pytest.fixture
def found(tmp_path: Path, request: pytest.FixtureRequest) -> dict[str, Any]:
    row, environment = request.param
    path = tmp_path / "report"
    run_matrix(Report(path), [row], device_type="cpu", settle_s=4.0, environment=WATCHDOG | environment)
    return read_report(path)[row.name]


HSDP = replace(SMALL, parallel=ParallelConfig(dp_replicate=2))


@pytest.mark.parametrize("found", [(Row("row", 4, HSDP, 1e-4, 30, 60), {})], indirect=True)
def test_a_rank_of_two_replicas_is_outlived(found: dict[str, Any]) -> None:
    assert (found["state"], found["reason"]) == ("proved", "")


@pytest.mark.long
@pytest.mark.parametrize("found", [(Row("row", 4, replace(HSDP, certified=False), 1e-4, 30, 60), {})], indirect=True)
def test_without_the_certificate_the_broken_step_is_believed_and_the_claim_refused(found: dict[str, Any]) -> None:
    assert found["state"] == "refused"
    assert "believed" in found["reason"] or "did not notice" in found["reason"]


@pytest.mark.long
@pytest.mark.parametrize(
    "found",
    [(Row("row", 2, replace(SMALL, fault=Fault.kill), 1e-4, 30, 60), {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"})],
    indirect=True,
)
def test_a_watchdog_that_ends_survivors_later_is_seen(found: dict[str, Any]) -> None:
    assert found["state"] == "refused"
    assert found["figure"].startswith("0 of 1 alive")


@pytest.mark.long
@pytest.mark.parametrize("backend", ["gloo", "asynchronous"])
def test_a_hundred_groups_in_one_process_keep_nothing(backend: str) -> None:
    """Memory, threads, descriptors, pinned pages, registrations and compiled graphs are those of the ninth."""
    parallel = ParallelConfig(compile=True, compile_backend="eager")
    flat, figure, reason = judge_flat(change_groups(backend, 100, parallel, timeout_s=1200.0), FLAT_MIB)
    print(figure)
    assert flat, f"{reason}: {figure}"
