"""A device that computes wrong numbers is found out, and one that is slow is named."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from regrow.config.schema import ClusterConfig, PretrainConfig
from regrow.forecast.devices import GIB
from regrow.runtime import worker
from regrow.runtime.hardware import probe
from regrow.runtime.hardware.probe import SIZE, Prober, Unfit, check_gpu
from regrow.state.memory.arenas import Arenas
from support.peak_memory import peak_bytes


def test_a_sound_device_passes_and_is_timed() -> None:
    assert 0 < Prober(torch.device("cpu")).probe() < 60


@pytest.mark.parametrize("seed", range(20))
def test_one_wrong_element_is_found(seed: int) -> None:
    """A product that differs in one place, as a broken unit's would."""
    prober = Prober(torch.device("cpu"))
    generator = torch.Generator().manual_seed(seed)
    row, column = torch.randint(0, SIZE["cpu"], (2,), generator=generator).tolist()
    product = prober.left @ prober.right
    prober.check(product)
    product[row, column] += 1
    with pytest.raises(Unfit, match="1 of 384 rows of a matrix product are wrong on cpu"):
        prober.check(product)


@pytest.mark.parametrize("error", [Unfit("wrong"), RuntimeError("CUDA error: an illegal memory access\nCompile with")])
def test_a_process_whose_device_fails_it_ends(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of CUDA's stays with the process: every later call fails, and so would every group that it joins."""
    ended: list[str] = []
    monkeypatch.setattr(worker, "end_process", lambda job, problem: ended.append(problem))
    prober = Prober(torch.device("cpu"))
    job: Any = None
    worker.probe_or_end(job, prober)
    assert ended == []

    def fail(product: torch.Tensor) -> None:
        raise error

    monkeypatch.setattr(prober, "check", fail)
    worker.probe_or_end(job, prober)
    assert ended in (["wrong"], ["cpu does not answer: CUDA error: an illegal memory access"])


def test_a_process_whose_device_does_not_even_take_the_matrices_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that fell off the bus."""

    def fail(tensor: torch.Tensor, *to: Any) -> None:
        raise torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered\nCompile with")

    def end(job: Any, problem: str) -> None:
        raise SystemExit(problem)

    monkeypatch.setattr(torch.Tensor, "to", fail)
    monkeypatch.setattr(worker, "end_process", end)
    job: Any = SimpleNamespace(config=SimpleNamespace(cluster=SimpleNamespace(check_hardware=True)))
    with pytest.raises(SystemExit, match=r"^cpu does not answer: CUDA error: uncorrectable ECC error encountered$"):
        worker._fit(job, torch.device("cpu"))


def test_a_worker_runs_near_its_gpu_and_so_does_what_it_starts_and_touches_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("ray.train.torch.get_device", lambda: torch.device("cuda:0"))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1"))
    near, allocate = {max(os.sched_getaffinity(0))}, os.posix_fallocate
    monkeypatch.setattr(worker, "cpus_near", lambda uuid: near | {100_000} if uuid == "GPU-1" else set())
    ran_on: list[set[int]] = []

    def touch(*arguments: int) -> None:
        ran_on.append(os.sched_getaffinity(0))
        allocate(*arguments)

    monkeypatch.setattr(os, "posix_fallocate", touch)

    def run() -> None:
        worker.device_of(PretrainConfig(cluster=ClusterConfig(gpus_per_worker=1)))
        started = threading.Thread(target=lambda: ran_on.append(os.sched_getaffinity(0)))
        started.start()
        started.join()
        Arenas(tmp_path).take([tmp_path / "slot"], 4096)

    with ThreadPoolExecutor(1) as threads:  # this test's own thread stays where it is
        threads.submit(run).result()
    assert ran_on == [near, near]


class Memory:
    """A GPU's, of which this much is free at one look after the other; the last one stays so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *free_gib: float) -> None:
        self.free, self.looks = list(free_gib), 0
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1"))
        monkeypatch.setattr(torch.cuda, "mem_get_info", self.info)
        monkeypatch.setattr(probe, "LOOK_S", 0.0)
        monkeypatch.setattr(probe, "FREE_S", 0.05)

    def info(self, device: torch.device) -> tuple[int, int]:
        free = self.free[min(self.looks, len(self.free) - 1)]
        self.looks += 1
        return int(free * GIB), 79 * GIB


def test_the_memory_of_a_killed_process_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory(monkeypatch, 9.0, 9.0, 60.0, 78.4)
    check_gpu(torch.device("cuda:0"))
    assert memory.looks == 4


def test_memory_that_others_keep_ends_this_process_with_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    Memory(monkeypatch, 9.0)
    ended: list[str] = []

    def end(job: Any, problem: str) -> None:
        ended.append(problem)
        raise SystemExit

    monkeypatch.setattr(worker, "end_process", end)
    job: Any = SimpleNamespace(config=SimpleNamespace(cluster=SimpleNamespace(check_hardware=True)))
    with pytest.raises(SystemExit):
        worker._fit(job, torch.device("cuda:0"))
    assert ended == [
        "70.0 of 79.0 GiB of cuda:0 are in use, and were for 0 s; end the processes that nvidia-smi shows there, or "
        "set cluster.check_hardware=false"
    ]


@pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.float32), ("cuda", torch.bfloat16)])
def test_every_sum_is_exact_in_the_dtype_it_is_taken_in(device: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randint(-1, 2, (SIZE[device],) * 2, generator=generator).float() for _ in range(2))
    product = left @ right
    assert torch.equal(product.to(dtype).float(), product)


def test_where_memory_is_full_a_probe_is_left_out_and_nothing_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    prober = Prober(torch.device("cpu"))
    seconds = prober.probe()

    def full(product: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(prober, "check", full)
    assert prober.probe() == seconds
    ended: list[str] = []
    monkeypatch.setattr(worker, "end_process", lambda job, problem: ended.append(problem))
    job: Any = None
    worker.probe_or_end(job, prober)
    assert ended == []


def test_a_check_takes_little_memory_beside_the_product() -> None:
    prober = Prober(torch.device("cpu"))
    prober.left, prober.right = (torch.ones(2048, 64) for _ in range(2))
    prober._expected = torch.zeros(2048, prober._vectors.size(1), dtype=torch.float64)
    product = torch.zeros(2048, SIZE["cpu"])
    assert peak_bytes(lambda: prober.check(product), torch.device("cpu")) < product.nbytes
