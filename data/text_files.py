"""Your own text: plain text files (a document each) and JSON lines (an object with `text` a line), perhaps gzipped.

`data.source` says where: a file, a folder, a glob or a URI. Texts are taken as they are.
"""

from collections.abc import Iterator
from typing import Any

from regrow.config.schema import DataConfig
from regrow.data.prepare.documents import Document, Piece, Skipped
from regrow.data.prepare.files import SourceFiles, checked, cut_files, json_lines, kind_of, plain_text
from regrow.errors import DataError


def describe(config: DataConfig) -> dict[str, Any]:
    """The files with their sizes: where they are mounted does not matter."""
    files = _files(config)
    return {
        "corpus": "text files",
        "files": {files.name(path): size for path, size in files.list() if kind_of(path) != "parquet"},
        "filters": [f"documents over {config.max_document_chars} characters"],
    }


def pieces(config: DataConfig) -> list[Piece]:
    """Text files whole, JSON lines in ranges of bytes."""
    found = [piece for piece in cut_files(_files(config)) if kind_of(piece.file) != "parquet"]
    if not found:
        raise DataError(f"data.source={config.source} has only .parquet files; data=fineweb_edu reads those")
    return found


def documents(config: DataConfig, piece: Piece) -> Iterator[Document | Skipped]:
    files = _files(config)
    if kind_of(piece.file) == "text":
        text = plain_text(files, piece)
        yield text if isinstance(text, Skipped) else checked(piece.file, text, max_chars=config.max_document_chars)
        return
    for number, value in enumerate(json_lines(files, piece)):
        if isinstance(value, Skipped):
            yield value
        elif "text" not in value:
            yield Skipped("a JSON object without text")
        else:
            name = str(value.get("id") or f"{piece.file}[{piece.start}]#{number}")
            yield checked(name, value["text"], max_chars=config.max_document_chars)


def _files(config: DataConfig) -> SourceFiles:
    if config.source is None:
        raise DataError("data.source is not set: give the file, folder, glob or URI of the text files")
    return SourceFiles(config.source)
