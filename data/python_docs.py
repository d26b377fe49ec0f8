"""The default corpus: source and documentation of the running Python's standard library. Real text, no network.

About 11 MB: the library's modules, the text files beside them, and the language reference that `help()` shows. The test
suite is left out: half of the installations lack it, and it would be two thirds of the text where it is there.
"""

import ast
import hashlib
import os
import platform
import re
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from regrow.config.schema import DataConfig
from regrow.data.prepare.documents import TOO_LONG, Document, Piece, Skipped, refuse_fields, unique
from regrow.errors import DataError

SUFFIXES = (".py", ".rst", ".txt", ".md")
SKIPPED_FOLDERS = re.compile(r"site-packages|dist-packages|__pycache__|lib-dynload|config-.*|tests?|idle_test")
SKIPPED_FILES = re.compile(r"_sysconfigdata.*")  # this machine's build flags
TOPICS = "pydoc_data/topics.py"  # the language reference as one dict of texts

MIN_CHARS, LONGER_THAN_ANY = 200, 20_000_000
TABLE_MIN_CHARS, TABLE_SHARE = 4096, 0.5
_TABLE_LINE = re.compile(r"""\s*[\[({]*\s*(?:[bru]{0,2}(?!'''|\"\"\")['"]|[-+]?\d)""", re.IGNORECASE)

FILTERS = [
    "folders of installed packages, caches, compiled modules and tests",
    "files that are not UTF-8",
    f"documents under {MIN_CHARS} characters",
    f"tables: .py files over {TABLE_MIN_CHARS} characters with over {TABLE_SHARE:.0%} of them in lines that begin "
    "with a string or a number (character maps, entity names, locale aliases)",
    "documents equal to an earlier one but for white space",
]


def describe(config: DataConfig) -> dict[str, Any]:
    """The Python, and a fingerprint of the names and sizes of its files: distributions differ in what they install."""
    refuse_fields(config)
    root, longest = _root(), config.max_document_chars
    sizes = hashlib.sha256()
    for name in _files(root):
        sizes.update(f"{name}\0{(root / name).stat().st_size}\0".encode())
    return {
        "corpus": "the Python standard library's source and documentation",
        "licence": "PSF-2.0",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "files_sha256": sizes.hexdigest(),
        "rules": 2,  # raise with any change to what documents() yields
        "filters": FILTERS + [f"documents over {longest} characters"] * (longest < LONGER_THAN_ANY),
    }


def pieces(config: DataConfig) -> list[Piece]:
    """One: it is read in seconds. Raises DataError where the library is installed without source."""
    root = _root()
    num_bytes = sum((root / name).stat().st_size for name in _files(root))
    if not any(name.endswith(".py") for name in _files(root)):
        raise DataError(
            f"no source under {root}: this Python {sys.version.split()[0]} comes without its library's .py files; "
            "use another Python or another data.recipe"
        )
    return [Piece(root.name, num_bytes=num_bytes)]


def documents(config: DataConfig, piece: Piece) -> Iterator[Document | Skipped]:
    """The files in the order of their names, cleaned, without repeats."""
    for document in unique(_documents(_root())):
        if isinstance(document, Document) and len(document.text) > config.max_document_chars:
            document = Skipped(TOO_LONG)
        yield document


def _documents(root: Path) -> Iterator[Document]:
    for name in _files(root):
        try:
            text = (root / name).read_bytes().decode("utf-8-sig")
        except UnicodeDecodeError:
            continue
        if name == TOPICS:
            pieces = {f"{name}#{topic}": words for topic, words in sorted(_topics(text).items())}
        elif name.endswith(".py") and is_table(text):
            continue
        else:
            pieces = {name: text}
        for piece, words in pieces.items():
            if len(words) >= MIN_CHARS:
                yield Document(piece, words)


def is_table(source: str) -> bool:
    """Whether a module is mostly one big literal."""
    lines = [line for line in source.splitlines() if line.strip()]
    num_chars = sum(map(len, lines))
    in_table = sum(len(line) for line in lines if _TABLE_LINE.match(line))
    return num_chars > TABLE_MIN_CHARS and in_table > TABLE_SHARE * num_chars


def _topics(source: str) -> dict[str, str]:
    """The texts of `topics = {name: text, ...}`, without running it."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign):
            return dict(ast.literal_eval(node.value))
    return {}


def _root() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def _files(root: Path) -> Iterator[str]:
    """Names relative to the root, with `/`, sorted."""
    names = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if not SKIPPED_FOLDERS.fullmatch(name)]
        names += [
            (Path(folder) / name).relative_to(root).as_posix()
            for name in files
            if name.endswith(SUFFIXES) and not SKIPPED_FILES.fullmatch(name)
        ]
    return iter(sorted(names))
