"""A device that computes wrong numbers is found out, and one that is slow is named."""

from typing import Any

import pytest
import torch

from regrow.control.health import SLOW_FACTOR, Pulse, Stragglers
from regrow.runtime import worker
from regrow.runtime.hardware.probe import SIZE, Prober, Unfit
from support.peak_memory import peak_bytes


def test_a_sound_device_passes_and_is_timed() -> None:
    assert 0 < Prober(torch.device("cpu")).probe() < 60


@pytest.mark.parametrize("seed", range(20))
def test_one_wrong_element_is_found(seed: int) -> None:
    """A product that differs in one place, as a broken unit's would."""
    prober = Prober(torch.device("cpu"))
    generator = torch.Generator().manual_seed(seed)
    row, column = torch.randint(0, SIZE["cpu"], (2,), generator=generator).tolist()
    product = prober._left @ prober._right
    prober._check(product)
    product[row, column] += 1
    with pytest.raises(Unfit, match="1 of 384 rows of a matrix product are wrong on cpu"):
        prober._check(product)


@pytest.mark.parametrize("error", [Unfit("wrong"), RuntimeError("CUDA error: an illegal memory access\nCompile with")])
def test_a_process_whose_device_fails_it_ends(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of CUDA's stays with the process: every later call fails, and so would every group that it joins."""
    ended: list[str] = []
    monkeypatch.setattr(worker, "_end", lambda job, problem: ended.append(problem))
    prober = Prober(torch.device("cpu"))
    job: Any = None
    worker._probe(job, prober)
    assert ended == []

    def fail(product: torch.Tensor) -> None:
        raise error

    monkeypatch.setattr(prober, "_check", fail)
    worker._probe(job, prober)
    assert ended in (["wrong"], ["cpu does not answer: CUDA error: an illegal memory access"])


@pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.float32), ("cuda", torch.bfloat16)])
def test_every_sum_is_exact_in_the_dtype_it_is_taken_in(device: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randint(-1, 2, (SIZE[device],) * 2, generator=generator).float() for _ in range(2))
    product = left @ right
    assert torch.equal(product.to(dtype).float(), product)


def pulses(*probes_s: float) -> list[tuple[str, Pulse]]:
    return [
        (f"node {pid // 2}", Pulse(pid, generation=1, step=9, silent_s=0.0, probe_s=probe_s, state="R"))
        for pid, probe_s in enumerate(probes_s)
    ]


def test_a_straggler_is_named_once_after_two_check_ups_in_a_row() -> None:
    stragglers, slow = Stragglers(), SLOW_FACTOR * 1.2
    assert stragglers.found(pulses(1, 1, slow, 1.2)) == []
    assert stragglers.found(pulses(1, 1, 1, 1.2)) == []  # it was busy with something else for a moment
    assert stragglers.found(pulses(1, 1, slow, 1.2)) == []
    ((node, pulse, factor),) = stragglers.found(pulses(1, 1, slow, 1.2))
    assert (node, pulse.pid) == ("node 1", 2)
    assert factor == pytest.approx(slow / 1.1)
    assert stragglers.found(pulses(1, 1, slow, 1.2)) == []


def test_a_group_that_is_slow_as_a_whole_has_no_straggler() -> None:
    stragglers = Stragglers()
    for seconds in (1.0, 5.0, 5.0, 5.0):
        assert stragglers.found(pulses(*[seconds] * 4)) == []
    for _ in range(5):
        assert stragglers.found(pulses(1.0, 9.0)) == []  # of two, neither
        assert stragglers.found(pulses(1.0, 1.0, 0.0)) == []  # the third has not been probed


def test_where_memory_is_full_a_probe_is_left_out_and_nothing_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    prober = Prober(torch.device("cpu"))
    seconds = prober.probe()

    def full(product: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(prober, "_check", full)
    assert prober.probe() == seconds
    ended: list[str] = []
    monkeypatch.setattr(worker, "_end", lambda job, problem: ended.append(problem))
    job: Any = None
    worker._probe(job, prober)
    assert ended == []


def test_a_check_takes_little_memory_beside_the_product() -> None:
    prober = Prober(torch.device("cpu"))
    prober._left, prober._right = (torch.ones(2048, 64) for _ in range(2))
    prober._expected = torch.zeros(2048, prober._vectors.size(1), dtype=torch.float64)
    product = torch.zeros(2048, SIZE["cpu"])
    assert peak_bytes(lambda: prober._check(product), torch.device("cpu")) < product.nbytes
