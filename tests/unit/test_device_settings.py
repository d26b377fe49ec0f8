"""What torch and NCCL are told in a process that is to outlive its groups."""

import logging
import subprocess
import sys

import pytest

from regrow.runtime.hardware.settings import DEFAULTS, OUTLIVES_ITS_GROUPS, apply_device_settings


def test_a_watchdog_never_ends_a_worker_that_goes_on_whatever_the_environment_says(
    caplog: pytest.LogCaptureFixture,
) -> None:
    environment = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1", "NCCL_NVLS_ENABLE": "1"}
    with caplog.at_level(logging.WARNING):
        apply_device_settings(environment, in_place=True, compile_threads=4)
    assert environment == {
        **OUTLIVES_ITS_GROUPS,
        **DEFAULTS,
        "NCCL_NVLS_ENABLE": "1",  # the user's own
        "TORCHINDUCTOR_COMPILE_THREADS": "4",
    }
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING=3 would end workers" in caplog.text
    assert len(caplog.records) == 2


def test_a_worker_that_is_restarted_with_its_group_ends_with_a_collective_that_fails() -> None:
    environment: dict[str, str] = {}
    apply_device_settings(environment, in_place=False, compile_threads=1)
    assert environment["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "1"
    assert "TORCH_NCCL_ENABLE_MONITORING" not in environment


@pytest.mark.slow
def test_a_worker_has_nothing_of_inductor_when_its_settings_are_made() -> None:
    code = (
        "import sys, regrow.runtime.worker; print([each for each in sys.modules if each == 'torch._inductor.config'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
