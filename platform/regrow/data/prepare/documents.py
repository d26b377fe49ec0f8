"""Where documents come from: a recipe, `data/<name>.py` of the checkout, turns a source into documents."""

import functools
import hashlib
import re
import sys
import threading
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from regrow.config.schema import DataConfig
from regrow.errors import DataError

TOO_LONG = "longer than data.max_document_chars"


@dataclass(frozen=True)
class Document:
    """A text and a stable name for it within its source."""

    id: str
    text: str


@dataclass(frozen=True)
class Skipped:
    """A document that was left out, and why, in a few words that are the same for all of its kind."""

    reason: str


@dataclass(frozen=True)
class Piece:
    """A part of a source that one task reads: a file, or a range of it."""

    file: str
    start: int = 0  # first of the units (bytes, row groups) that the recipe cuts files into
    stop: int | None = None  # one past the last; None: to the end of the file
    num_bytes: int = 1  # about how much work it is, for progress


class DamagedPiece(Exception):
    """A piece that can be fetched but not be read, today or tomorrow; it is counted, named and left out."""


class SourceChanged(DataError):
    """A source is not what it was when its corpus was given a name."""


class Recipe(Protocol):
    """What a recipe module offers; a class or an object with the same functions is one too."""

    def describe(self, config: DataConfig) -> dict[str, Any]:
        """What fixes the documents, JSON types only; goes into the manifest and, hashed, into the cache's name.

        Cheap: it is asked at every start. Under `filters` it says in words what was left out.
        """

    def pieces(self, config: DataConfig) -> list[Piece]:
        """The parts of the source, the same ones in the same order each time. Raises DataError where there is none."""

    def documents(self, config: DataConfig, piece: Piece) -> Iterator[Document | Skipped]:
        """The documents of a piece, the same ones in the same order each time. May be large: yield, do not collect.

        Raises DamagedPiece for one that cannot be read, OSError for storage that fails.
        """


def source_changed(source: str | None, what: str) -> SourceChanged:
    where = "the source" if source is None else f"data.source={source}"
    return SourceChanged(
        f"{where} changed while it was prepared: {what}; run the same command again, or name a copy where it is "
        "written to all the time"
    )


@dataclass(frozen=True)
class RecipeFile:
    """A recipe that is a file; to other processes it travels as its text, for they may have no checkout."""

    name: str
    path: str
    code: str

    def describe(self, config: DataConfig) -> dict[str, Any]:
        return cast(Recipe, _execute(self)).describe(config)

    def pieces(self, config: DataConfig) -> list[Piece]:
        return cast(Recipe, _execute(self)).pieces(config)

    def documents(self, config: DataConfig, piece: Piece) -> Iterator[Document | Skipped]:
        return cast(Recipe, _execute(self)).documents(config, piece)


_executing = threading.Lock()


@functools.cache
def _execute(recipe: RecipeFile) -> types.ModuleType:
    """The module, known to others while it is executed alone, as dataclasses want it.

    Ray pickles what a module that is not known defines, as pieces of a recipe's own class, whole.
    """
    module = types.ModuleType(f"regrow_recipe_{recipe.name}")
    module.__file__ = recipe.path
    with _executing:
        sys.modules[module.__name__] = module
        try:
            exec(compile(recipe.code, recipe.path, "exec"), module.__dict__)
        finally:
            del sys.modules[module.__name__]
    return module


def load_recipe(name: str) -> RecipeFile:
    """The recipe `data/<name>.py` of the checkout: the current folder, else the one that this package is run from.

    Raises DataError, naming those there are, for an unknown one.
    """
    folders = [Path.cwd() / "data", Path(__file__).parents[4] / "data"]
    for folder in folders:
        path = folder / f"{name}.py"
        if name.isidentifier() and path.is_file():
            return RecipeFile(name, str(path), path.read_text())
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


def unique(documents: Iterable[Document | Skipped]) -> Iterator[Document | Skipped]:
    """Cleaned documents, without those that repeat an earlier one but for white space. Remembers a hash of each."""
    seen: set[bytes] = set()
    for document in documents:
        if isinstance(document, Skipped):
            yield document
            continue
        text = clean_text(document.text)
        key = content_hash(" ".join(text.split()))
        if key in seen:
            yield Skipped("equal to an earlier one but for white space")
        else:
            seen.add(key)
            yield Document(document.id, text)


def refuse_fields(config: DataConfig) -> None:
    """For a recipe whose documents are texts alone. Raises DataError where a filter asks for a field beside them."""
    for setting in ("min_score", "language", "min_language_score"):
        if getattr(config, setting) is not None:
            raise DataError(
                f"data.{setting} is set, and documents of {config.recipe} have no such field; leave it unset, or "
                "choose another data.recipe"
            )


def content_hash(text: str) -> bytes:
    """16 bytes that name a text: its side of the split and its place in the shuffle follow from them."""
    return hashlib.blake2b(text.encode(), digest_size=16).digest()
