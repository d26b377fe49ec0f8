"""Which code, libraries and machine a figure or a run came from."""

import contextlib
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

PACKAGES = ("regrow", "torch", "torchao", "ray", "pyarrow", "numpy", "tokenizers", "safetensors", "hydra-core")
ROOT = Path(__file__).parents[3]


def git_sha() -> str | None:
    """The checkout's commit, with `-dirty` where tracked files differ; in an image, what it was built from, or None."""
    here = Path(__file__).parent
    try:
        sha = _git(here, "rev-parse", "--short=12", "HEAD")
        return sha + ("-dirty" if _git(here, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return os.environ.get("REGROW_GIT_SHA")  # set by k8s/Dockerfile


def untracked(*folders: str, root: Path = ROOT) -> list[str]:
    """Files below these folders of the checkout that are not in git, nor ignored; none outside a checkout.

    Sites are left out: jobs do without.
    """
    try:
        options = ("--others", "--exclude-standard", "--", *folders, ":(exclude)conf/site")
        return _git(root, "ls-files", *options).splitlines()
    except (OSError, subprocess.SubprocessError):
        return []


def top_of_checkout(root: Path) -> set[str]:
    """The names of the files and folders at its top that git lists; none outside a checkout."""
    try:
        return {path.partition("/")[0] for path in _git(root, "ls-files", "-z").split("\0")} - {""}
    except (OSError, subprocess.SubprocessError):
        return set()


def versions(*more: str) -> dict[str, str]:
    """Versions of Python and of what is installed of PACKAGES, and of more."""
    found = {"python": platform.python_version()}
    for package in (*PACKAGES, *more):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def hardware() -> str:
    """This machine's processor and number of cores."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name)
    return f"{os.cpu_count()} x {name}"


def _git(folder: Path, *arguments: str) -> str:
    result = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10, check=True)
    return result.stdout.strip()
