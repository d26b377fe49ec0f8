"""Your own text: plain text files (a document each) and JSON lines (an object with `text` a line), perhaps gzipped.

`data.source` says where: a file, a folder, a glob or a URI. Texts are taken as they are. An object may have id, score,
language and language_score too; a text file has none of them, so a filter of one leaves it out.
"""

from collections.abc import Iterator
from typing import Any

from regrow.config.schema import DataConfig
from regrow.data.prepare.documents import Document, Piece, Skipped
from regrow.data.prepare.files import SourceFiles, cut_files, filtered, filters_of, json_lines, kind_of, plain_text
from regrow.errors import DataError


def describe(config: DataConfig) -> dict[str, Any]:
    """The files with their sizes: where they are mounted does not matter."""
    files = _files(config)
    return {
        "corpus": "text files",
        "files": {files.name(path): size for path, size in files.list() if kind_of(path) != "parquet"},
        "filters": filters_of(config),
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
        yield text if isinstance(text, Skipped) else filtered(config, piece.file, text)
        return
    for number, value in enumerate(json_lines(files, piece)):
        if isinstance(value, Skipped):
            yield value
        elif "text" not in value:
            yield Skipped("a JSON object without text")
        else:
            name = str(value.get("id") or f"{piece.file}[{piece.start}]#{number}")
            fields = (value.get(field) for field in ("score", "language", "language_score"))
            yield filtered(config, name, value["text"], *fields)


def _files(config: DataConfig) -> SourceFiles:
    if config.source is None:
        raise DataError("data.source is not set: give the file, folder, glob or URI of the text files")
    return SourceFiles(config.source)
