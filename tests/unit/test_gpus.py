"""What NVML tells is read and judged: by NVIDIA's binding, from a library in the driver's place."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from regrow.runtime.hardware.gpus import HARDWARE_XIDS, XidWatch, read_gpus

SOURCE = Path(__file__).parent / "nvml" / "nvml.c"
READ = """
import dataclasses, json
from regrow.runtime.hardware.gpus import problem, read_gpus
gpus = read_gpus()
print(json.dumps([[dataclasses.asdict(gpu), str(gpu), problem(gpu, gpus)] for gpu in gpus]))
"""
NEAR = """
import json
from regrow.runtime.hardware.gpus import cpus_near
print(json.dumps([sorted(cpus_near(uuid)) for uuid in ("GPU-0", "GPU-1", "GPU-2")]))
"""
NUMBER = """
import json
from regrow.runtime.hardware.gpus import number_of
print(json.dumps([number_of(uuid) for uuid in ("GPU-0", "GPU-1", "GPU-2")]))
"""
WATCH = """
import json, queue
from regrow.runtime.hardware.gpus import XidWatch
seen = queue.Queue()
watch = XidWatch(lambda *told: seen.put(told))
print(json.dumps(seen.get(timeout=30)))
watch.close()
"""


WATCH_ON = """
import json, queue
from regrow.runtime.hardware.gpus import XidWatch
seen = queue.Queue()
watch = XidWatch(lambda *told: seen.put(told))
print(json.dumps([seen.get(timeout=60) for _ in range(2)]))
watch.close()
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    folder = tmp_path_factory.mktemp("driver")
    subprocess.run([compiler, "-shared", "-fPIC", SOURCE, "-o", folder / "libnvidia-ml.so.1"], check=True)
    return folder


def ask(driver: Path, program: str, **tells: str) -> Any:
    """What a process says where this driver is, and the second GPU tells this."""
    environment = {**os.environ, "LD_LIBRARY_PATH": str(driver), **tells}
    said = subprocess.run([sys.executable, "-c", program], env=environment, check=True, capture_output=True, text=True)
    return json.loads(said.stdout)


def test_a_machine_without_a_driver_has_no_gpus(driver: Path) -> None:
    assert ask(driver, READ, NO_DRIVER="1") == []
    assert read_gpus() == [] or Path("/proc/driver/nvidia").exists()
    XidWatch(lambda uuid, xid: None).close()


def test_the_cpus_of_a_gpus_socket_are_known_where_it_tells(driver: Path) -> None:
    assert ask(driver, NEAR, SOCKET="1") == [[], [0, 126], []]
    assert ask(driver, NEAR, NO_DRIVER="1") == [[], [], []]


def test_a_gpus_number_is_its_place_among_those_of_the_machine(driver: Path) -> None:
    assert ask(driver, NUMBER) == [0, 1, None]
    assert ask(driver, NUMBER, NO_DRIVER="1") == [None, None, None]


def test_a_gpu_keeps_its_number_where_one_before_it_is_lost(driver: Path) -> None:
    """The ranks behind it were shown their neighbours' temperature and power."""
    assert ask(driver, NUMBER, LOST="0") == [None, 1, None]
    (lost, text, _), (fields, _, problem) = ask(driver, READ, LOST="0", CELSIUS="84")
    assert (lost["uuid"], lost["temperature_c"], text) == ("", None, "a GPU: tells nothing")
    assert (fields["uuid"], fields["temperature_c"], problem) == ("GPU-1", 84, "")
    assert ask(driver, NEAR, LOST="0", SOCKET="1") == [[], [0, 126], []]
    assert ask(driver, WATCH, LOST="0", XID="79") == ["GPU-1", 79]


def test_what_a_gpu_tells_is_in_its_units(driver: Path) -> None:
    (_, _, nothing), (fields, text, _) = ask(
        driver, READ, CELSIUS="84", MILLIWATTS="698500", SM_MHZ="1755", REASONS="36"
    )
    assert nothing == ""
    assert text == "NVIDIA H100 GPU-1: 84 C, 698 W, 1755 MHz, slowed down by power cap and heat"
    assert fields["slowed_by"] == ["power cap", "heat"]
    assert fields["nvlinks"] == 18


def test_what_a_gpu_does_not_tell_is_left_out(driver: Path) -> None:
    _, (fields, text, problem) = ask(driver, READ, MILLIWATTS="0")
    assert fields["power_w"] is None
    assert text == "NVIDIA H100 GPU-1: 50 C, 1980 MHz"
    assert problem == ""
    assert [fields["uuid"] for fields, *_ in ask(driver, READ, LOST="1")] == ["GPU-0", ""]


@pytest.mark.parametrize(
    ("tells", "expected"),
    [
        ({"UNCORRECTED": "2"}, "2 uncorrected ECC errors"),
        ({"PENDING": "1"}, "waits to be replaced; reset it"),
        ({"FAILED": "1"}, "could not be replaced"),
        ({"NVLINKS": "17"}, "17 of its NVLinks are up, 18 of its neighbours'"),
    ],
)
def test_a_broken_gpu_is_found_and_its_neighbour_is_not(driver: Path, tells: dict[str, str], expected: str) -> None:
    (_, _, neighbour), (_, _, broken) = ask(driver, READ, **tells)
    assert neighbour == ""
    assert broken.startswith("NVIDIA H100 GPU-1: ")
    assert expected in broken


def test_an_error_that_a_driver_reports_is_told(driver: Path) -> None:
    assert 79 in HARDWARE_XIDS
    assert ask(driver, WATCH, XID="79") == ["GPU-1", 79]


def test_the_error_of_a_gpu_that_answers_no_more_is_told(driver: Path) -> None:
    assert ask(driver, WATCH, XID="79", FALLEN="1") == ["GPU-1", 79]


def test_a_gpus_error_is_told_though_its_neighbour_is_lost(driver: Path) -> None:
    """Where each wait for errors of both says that one of them is lost."""
    assert ask(driver, WATCH_ON, FALLEN="1", NEIGHBOUR="48") == [["GPU-1", 79], ["GPU-0", 48]]


def test_a_gpu_that_is_lost_without_a_word_is_told_once(driver: Path) -> None:
    """As having fallen off the bus, however often the driver says that one is lost."""
    assert ask(driver, WATCH_ON, FALLEN="1", LOSING="2", XID="48") == [["GPU-1", 79], ["GPU-1", 48]]
