"""What docstrings show is what the code gives."""

import doctest
import importlib
from pathlib import Path

import pytest

import regrow

PACKAGE = Path(regrow.__file__).parent
WITH_EXAMPLES = sorted(path for path in PACKAGE.rglob("*.py") if ">>> " in path.read_text())


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_the_examples_in_docstrings_give_what_they_show(path: Path) -> None:
    name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    found = doctest.testmod(importlib.import_module(name))
    assert found.attempted
    assert not found.failed
