"""Corpora are prepared once for all tests here: half a minute each on two cores."""

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
