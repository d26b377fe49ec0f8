"""FineWeb-Edu and anything in its schema: parquet files with a column `text`, and perhaps id, score and language.

Source: https://huggingface.co/datasets/HuggingFaceFW/fineweb-edu (ODC-By 1.0). `data.source` says where: a file, a
folder, a glob, or a URI such as hf://datasets/HuggingFaceFW/fineweb-edu/sample/10BT. Texts are taken as they are.
"""

from collections.abc import Iterator
from typing import Any

from regrow.config.schema import DataConfig
from regrow.data.prepare.documents import Document, Piece, Skipped
from regrow.data.prepare.files import SourceFiles, column, cut_files, filtered, filters_of, kind_of, parquet_rows
from regrow.errors import DataError

COLUMNS = ["text", "id", "score", "language", "language_score"]


def describe(config: DataConfig) -> dict[str, Any]:
    """The files with their sizes: where they are mounted does not matter."""
    files = _files(config)
    return {
        "corpus": "documents in FineWeb-Edu's schema",
        "files": {files.name(path): size for path, size in files.list() if kind_of(path) == "parquet"},
        "filters": filters_of(config),
    }


def pieces(config: DataConfig) -> list[Piece]:
    """Runs of row groups."""
    found = [piece for piece in cut_files(_files(config)) if kind_of(piece.file) == "parquet"]
    if not found:
        raise DataError(f"data.source={config.source} has no .parquet file; data=text_files reads other kinds")
    return found


def documents(config: DataConfig, piece: Piece) -> Iterator[Document | Skipped]:
    number = 0
    for batch in parquet_rows(_files(config), piece, COLUMNS):
        values = zip(*(column(batch, name) for name in COLUMNS), strict=True)
        for text, name, score, language, language_score in values:
            number += 1
            place = f"{piece.file}[{piece.start}]#{number}"
            yield filtered(config, str(name or place), text, score, language, language_score)


def _files(config: DataConfig) -> SourceFiles:
    if config.source is None:
        raise DataError("data.source is not set: give the file, folder, glob or URI of the parquet files")
    return SourceFiles(config.source)
