"""A pulse is read while it is written: no reader sees a half of it."""

import os
import subprocess
import sys
from pathlib import Path

import regrow
from regrow.runtime.kept_rows import ROWS
from regrow.runtime.liveness.pulse import SIZE, STACKS, read_pulses

BEAT = """
import sys
from pathlib import Path
from regrow.control.phases import Phase
from regrow.runtime.liveness.pulse import PulseFile
pulse = PulseFile(Path(sys.argv[1]))
pulse.beat(7, 8, 1.0)
print(flush=True)
while True:
    pulse.beat(7, 8, 1.0)
"""


def test_a_process_that_runs_never_seems_to_have_stood_still(tmp_path: Path) -> None:
    """It did, for as long as its machine had been up, to a keeper that read between two stores: it was ended."""
    path = str(Path(regrow.__file__).parents[1])
    command = [sys.executable, "-c", BEAT, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={"PYTHONPATH": path}) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            seen = [read_pulses(tmp_path)[0] for _ in range(20_000)]
        finally:
            process.kill()
    assert {(each.generation, each.step, each.probe_s) for each in seen} == {(7, 8, 1.0)}
    assert max(each.silent_s for each in seen) < 600.0


def test_a_pulse_that_is_just_being_made_says_nothing(tmp_path: Path) -> None:
    """A file of zeros would say that its process has stood still since the machine was started."""
    (tmp_path / f"pulse-{os.getpid()}").write_bytes(bytes(SIZE))
    assert read_pulses(tmp_path) == []


def test_of_a_process_that_is_gone_only_its_rows_stay(tmp_path: Path) -> None:
    """Another process of the node is to have them."""
    path = str(Path(regrow.__file__).parents[1])
    command = [sys.executable, "-c", BEAT, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={"PYTHONPATH": path}) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.kill()
    for name in (STACKS, ROWS.removesuffix("-")):
        (tmp_path / f"{name}-{process.pid}").write_text("")
    assert [each.state for each in read_pulses(tmp_path)] == [""]
    assert [each.name for each in tmp_path.iterdir()] == [f"{ROWS}{process.pid}"]
