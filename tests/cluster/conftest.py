"""Corpora are prepared once for all tests here: half a minute each on two cores."""

import atexit
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory, corpora: Path) -> Path:
    """For the runs of a module, over the corpora of all."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "data").symlink_to(corpora)
    return folder


@pytest.fixture
def ray_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where a Ray that a test starts keeps all it writes, its address too: short, as sockets have their names below."""
    with tempfile.TemporaryDirectory(prefix="rgc", dir="/tmp", ignore_cleanup_errors=True) as folder:
        monkeypatch.setenv("RAY_TMPDIR", folder)
        yield Path(folder) / "ray"


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Threads of Ray's native code outlive `ray.shutdown`, and may run into what the interpreter's end has destroyed.

    A session that had passed ended with a segmentation fault so. Hence it ends without that end once all is reported.
    """
    session.config.add_cleanup(lambda: leave(session.exitstatus))


def leave(status: int) -> None:
    if "ray" not in sys.modules:
        return
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
