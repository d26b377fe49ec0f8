"""The README's two commands, run as a newcomer would."""

import re
import subprocess
from pathlib import Path

import pytest

from support.cluster import SMALL

ROOT = Path(__file__).parents[2]


def readme_commands() -> list[str]:
    first_block = re.search(r"(?:^    .*\n)+", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert first_block is not None
    return re.findall(r"^    (make \w+)", first_block[0], re.MULTILINE)


def test_the_readme_begins_with_two_commands_that_the_makefile_knows() -> None:
    assert readme_commands() == ["make pretrain", "make test"]
    for command in readme_commands():
        planned = subprocess.run([*command.split(), "--dry-run"], cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert planned.returncode == 0, planned.stderr


def test_ci_runs_the_readmes_test_command() -> None:
    assert "make test" in (ROOT / ".ci" / "run").read_text().splitlines()


def test_make_pretrain_trains_a_model(storage: Path) -> None:
    if not (ROOT / ".venv" / ".ready").exists():
        pytest.skip(".venv was not made by `make setup`: making it here would download everything again")
    arguments = " ".join([*SMALL, f"run.storage_path={storage}", "train.steps=5"])
    done = subprocess.run(
        ["make", "pretrain", f"ARGS={arguments}"], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert "finished 5 steps" in done.stderr
    assert (storage / "debug" / "report.html").stat().st_size > 1000


def test_make_alone_lists_the_targets() -> None:
    done = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    for target in ("setup", "pretrain", "test", "check"):
        assert f"make {target} " in done.stdout
