"""Where documents come from: a recipe, `data/<name>.py` of the checkout, turns a source into documents."""

import hashlib
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from regrow.errors import DataError


@dataclass(frozen=True)
class Document:
    """A text and a stable name for it within its source."""

    id: str
    text: str


class Recipe(Protocol):
    """What a recipe module offers; a class or an object with the same two functions is one too."""

    def describe(self) -> dict[str, Any]:
        """What fixes the documents, JSON types only; goes into the manifest and, hashed, into the cache's name.

        Cheap: it is asked at every start. Under `filters` it says in words what was left out.
        """

    def documents(self) -> Iterator[Document]:
        """The documents, the same ones in the same order each time. May be large: yield, do not collect."""


def load_recipe(name: str) -> Recipe:
    """The recipe `data/<name>.py` of the checkout: the current folder, else the one that this package is run from.

    Raises DataError, naming those there are, for an unknown one.
    """
    folders = [Path.cwd() / "data", Path(__file__).parents[3] / "data"]
    for folder in folders:
        path = folder / f"{name}.py"
        if name.isidentifier() and path.is_file():
            spec = importlib.util.spec_from_file_location(f"data.{name}", path)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return cast(Recipe, module)
    there_are = sorted({path.stem for folder in folders for path in folder.glob("*.py")} - {"__init__"})
    raise DataError(
        f"data.recipe={name!r}: there is no data/{name}.py here; run from the root of the checkout "
        f"and choose one of: {', '.join(there_are) or '(none found)'}"
    )


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")  # all but tab and newline, after line ends are unified
_BLANK_LINES = re.compile(r"\n{4,}")


def clean_text(text: str) -> str:
    """Unify line ends, drop control characters and trailing blanks, keep at most two blank lines in a row.

    >>> clean_text("def f():\\r\\n    pass  \\r\\n\\f\\r\\n")
    'def f():\\n    pass\\n'
    """
    text = _CONTROL.sub("", text.replace("\r\n", "\n").replace("\r", "\n"))
    text = "\n".join(line.rstrip() for line in text.split("\n")).strip("\n")
    return _BLANK_LINES.sub("\n\n\n", text) + "\n"


def content_hash(text: str) -> bytes:
    """16 bytes that name a document by its words: texts that differ only in white space share it."""
    return hashlib.blake2b(" ".join(text.split()).encode(), digest_size=16).digest()
