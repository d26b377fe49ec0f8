"""Where documents come from: a recipe is a module `data/<name>.py` of the checkout that turns a source into documents."""

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, cast

from regrow.errors import DataError


@dataclass(frozen=True)
class Document:
    """A text and a stable name for it within its source."""

    id: str
    text: str


class Recipe(Protocol):
    """What a recipe module offers."""

    def describe(self) -> dict[str, Any]:
        """What fixes the documents, JSON types only: goes into the manifest and into the cache's name."""

    def documents(self) -> Iterator[Document]:
        """The cleaned documents, the same ones in the same order each time."""


def load_recipe(name: str) -> Recipe:
    """Raises DataError, naming those there are, for an unknown recipe."""
    try:
        return cast(Recipe, importlib.import_module(f"data.{name}"))
    except ModuleNotFoundError as error:
        if error.name not in ("data", f"data.{name}"):
            raise
        raise DataError(
            f"data.recipe={name!r}: there is no data/{name}.py; run from the checkout's root and choose one that is there"
        ) from error
