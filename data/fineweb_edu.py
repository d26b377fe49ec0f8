"""FineWeb-Edu and anything in its schema: parquet files with a column `text`, and perhaps id, score and language.

Source: https://huggingface.co/datasets/HuggingFaceFW/fineweb-edu (ODC-By 1.0). `data.source` says where: a file, a
folder, a glob, or a URI such as hf://datasets/HuggingFaceFW/fineweb-edu/sample/10BT. Texts are taken as they are.
"""

from collections.abc import Iterator
from typing import Any

from regrow.config.schema import DataConfig
from regrow.data.prepare.documents import Document, Piece, Skipped
from regrow.data.prepare.files import SourceFiles, checked, column, cut_files, kind_of, parquet_rows
from regrow.errors import DataError

COLUMNS = ["text", "id", "score", "language", "language_score"]


def describe(config: DataConfig) -> dict[str, Any]:
    """The files with their sizes: where they are mounted does not matter."""
    files = _files(config)
    filters = {
        f"score below {config.min_score}, or none": config.min_score,
        f"language other than {config.language}, or none": config.language,
        f"language_score below {config.min_language_score}, or none": config.min_language_score,
        f"documents over {config.max_document_chars} characters": config.max_document_chars,
    }
    return {
        "corpus": "documents in FineWeb-Edu's schema",
        "files": {files.name(path): size for path, size in files.list() if kind_of(path) == "parquet"},
        "filters": [words for words, value in filters.items() if value is not None],
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
            if _fails(score, config.min_score):
                yield Skipped("score too low, or none")
            elif config.language is not None and language != config.language:
                yield Skipped("another language, or none")
            elif _fails(language_score, config.min_language_score):
                yield Skipped("language_score too low, or none")
            else:
                place = f"{piece.file}[{piece.start}]#{number}"
                yield checked(str(name or place), text, max_chars=config.max_document_chars)


def _fails(value: object, least: float | None) -> bool:
    return least is not None and not (isinstance(value, int | float) and value >= least)


def _files(config: DataConfig) -> SourceFiles:
    if config.source is None:
        raise DataError("data.source is not set: give the file, folder, glob or URI of the parquet files")
    return SourceFiles(config.source)
