"""How programs end whose output is cut short, cannot be encoded, or that are interrupted."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from regrow.program import INTERRUPTED, UNREAD

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "platform"), "PYTHONUNBUFFERED": ""}
IN_MAIN = """
import sys, signal, os
from regrow.program import output, program
signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores it
"""


def run(*command: str, both: bool = False, **environment: str) -> tuple[int, str]:
    """The status, and what is on stderr; stdout has no reader, nor has stderr with `both`."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, *command],
        stdout=writer,
        stderr=writer if both else subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**ENVIRONMENT, **environment},
    )
    os.close(writer)
    return done.returncode, done.stderr or ""


def heard(code: str, **environment: str) -> tuple[int, str, str]:
    """The status, stdout and stderr, both read."""
    done = subprocess.run(
        [sys.executable, "-c", IN_MAIN + code], capture_output=True, text=True, env={**ENVIRONMENT, **environment}
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("context", ["output", "program"])
def test_a_full_disk_behind_the_output_is_one_line(context: str) -> None:
    with open("/dev/full", "w") as full:
        code = f"{IN_MAIN}with {context}(): print('text')"
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
        )
    assert (done.returncode, done.stderr) == (1, "error: stdout: No space left on device\n")


FOLLOWED = """
from types import SimpleNamespace
from ray.job_submission import JobStatus
from regrow.submit.ray_jobs import FOLDER, RUN, RayJobs

class Client:
    def list_jobs(self):
        return [SimpleNamespace(metadata={RUN: "mine", FOLDER: "/s/mine"}, start_time=1, submission_id="raysubmit_1",
                                status=JobStatus.RUNNING, message="")]
    def get_job_status(self, job):
        return JobStatus.RUNNING
    async def tail_job_logs(self, job):
        for step in range(100_000):
            yield f"step {step} " + "x" * 200 + "\\n"

jobs = RayJobs.__new__(RayJobs)
jobs.run, jobs.folder, jobs.client, jobs.elsewhere = "mine", "/s/mine", Client(), ""
with output():
    sys.exit(jobs.follow())
"""


def test_a_jobs_logs_that_nobody_reads_any_more_are_not_out_of_sight() -> None:
    """Before: "lost sight of raysubmit_1 ([Errno 32] Broken pipe)", and status 3."""
    assert run("-c", IN_MAIN + FOLLOWED) == (UNREAD, "")


@pytest.mark.parametrize("context", ["output", "program"])
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    ("does", "status"),
    [
        ("print('text')", UNREAD),
        ("print('text'); sys.exit(0)", UNREAD),
        ("print('text'); sys.exit(3)", 3),
        ("print('text', flush=True)", UNREAD),
        ("pass", 0),
    ],
)
def test_output_that_nobody_reads_ends_a_program_without_a_word(
    does: str, status: int, unbuffered: str, context: str
) -> None:
    """Before, a traceback, or "error: [Errno 32] Broken pipe", or status 120 where it was interrupted."""
    if unbuffered and "exit(3)" in does:
        status = UNREAD  # it got no further than to print
    done = run("-c", f"{IN_MAIN}with {context}(): {does}", PYTHONUNBUFFERED=unbuffered)
    assert done == (status, "")


def test_an_interrupted_program_says_so_by_its_status_also_where_nobody_reads() -> None:
    interrupted = "os.kill(os.getpid(), signal.SIGINT)"
    assert heard(f"with program(): {interrupted}") == (INTERRUPTED, "", "")
    for streams in ({}, {"both": True}):
        code = f"{IN_MAIN}with program():\n print('text')\n {interrupted}"
        assert run("-c", code, **streams) == (INTERRUPTED, "")
    said = f"""
with output():
    try:
        {interrupted}
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit({INTERRUPTED:d})
"""
    assert heard(said) == (INTERRUPTED, "", "interrupted\n")
    assert run("-c", IN_MAIN + said, both=True) == (INTERRUPTED, "")


def test_a_connection_that_breaks_is_no_reader_that_has_gone() -> None:
    code = "with program(): raise BrokenPipeError(32, 'Broken pipe')"
    assert heard(code) == (1, "", "error: [Errno 32] Broken pipe\n")


def test_what_the_outputs_encoding_lacks_is_escaped() -> None:
    code = "with output(): print('the world\\u2019s')"
    assert heard(code, PYTHONIOENCODING="ascii") == (0, "the world\\u2019s\n", "")


@pytest.mark.parametrize(
    "command",
    [
        "jobs.plan",
        "jobs.plan --help",
        "jobs.accept --help",
        "jobs.evaluate --list",
        "jobs.status --help",
        "jobs.simulate --cfg job",
        "jobs.pretrain_torchrun --help",
    ],
)
def test_a_job_whose_output_nobody_reads_ends_without_a_word(command: str) -> None:
    assert run("-m", *command.split()) == (UNREAD, "")


@pytest.mark.parametrize("name", ["checkpoint", "drain", "evaluate", "inspect_data", "report", "status"])
def test_every_job_without_a_config_ends_so(name: str) -> None:
    assert "@program()\ndef main() -> None:" in (ROOT / f"jobs/{name}.py").read_text()
