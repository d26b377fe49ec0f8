"""The folder `platform/` must never shadow the standard library's module of that name."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.durations import slow_tests

ROOT = Path(__file__).parents[2]
TOPS = ("platform", "jobs", "data", "tests", "benchmarks")


def test_platform_is_a_namespace_folder_with_regrow_alone() -> None:
    assert not (ROOT / "platform" / "__init__.py").exists()
    entries = {path.name for path in (ROOT / "platform").iterdir()} - {"__pycache__"}
    assert entries == {"regrow"}


def test_no_init_file_below_tests() -> None:
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_every_file_that_the_documents_name_exists() -> None:
    """Paths below platform/, and *.py by their path or the end of it."""
    modules = [f"/{path.relative_to(ROOT).as_posix()}" for top in TOPS for path in (ROOT / top).rglob("*.py")]
    missing = []
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "k8s/README.md", *(ROOT / "docs").rglob("*.md")):
        text = page.read_text()
        named = [each for each in re.findall(r"\bplatform/[\w./-]*\w", text) if not (ROOT / each).exists()]
        named += [
            each for each in re.findall(r"[\w./-]*\w\.py\b", text) if not any(m.endswith(f"/{each}") for m in modules)
        ]
        missing += [f"{page.relative_to(ROOT)}: {each}" for each in named]
    assert missing == []


def test_every_test_that_is_said_to_be_slow_exists() -> None:
    for name in slow_tests():
        path, *_, function = name.split("::")
        assert f"def {function}(" in (ROOT / path).read_text(), name


def test_no_function_is_longer_than_70_lines_and_no_class_than_250() -> None:
    """From `def` or `class` to the last line."""
    long = []
    for path in (ROOT / "platform/regrow").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                if lines > (250 if isinstance(node, ast.ClassDef) else 70):
                    long.append(f"{path.relative_to(ROOT)}: {node.name} has {lines}")
    assert long == []


def test_what_runs_in_rays_processes_prints_nothing_that_a_full_disk_makes_an_error() -> None:
    """Their output is a file: `process_log` writes it, and what handles a failure goes on."""
    found = []
    for folder in ("runtime", "parallel", "train"):
        for path in (ROOT / "platform/regrow" / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
                if name == "print" or name.startswith(("traceback.print", "sys.stdout.", "sys.stderr.")):
                    found.append(f"{path.relative_to(ROOT)}: {name}")
    assert found == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["-c", "import platform, uuid; print(platform.system(), uuid.uuid4())"],
        ["-m", "pytest", "--version"],
        ["-c", "import sys; sys.path.insert(0, ''); import platform; assert platform.system()"],
        ["-c", "import torch, ray, regrow, platform; assert platform.python_version()"],
    ],
)
def test_the_standard_librarys_platform_is_imported_from_the_checkouts_root(arguments: list[str]) -> None:
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
