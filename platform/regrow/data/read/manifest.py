"""What a prepared corpus is: everything that fixes its content, in `manifest.json` beside the shards.

The manifest is written last. A folder without one is unfinished, whatever else it holds. See docs/file-formats.md.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from regrow.errors import DataError, UnavailableError, first_line
from regrow.storage import Storage, may_pass

FORMAT, VERSION = "regrow-corpus", 3
MANIFEST = "manifest.json"
SPLITS = ("train", "validation")


@dataclass(frozen=True)
class Shard:
    """One parquet file of rows."""

    file: str  # name in the manifest's folder
    num_rows: int
    num_bytes: int
    sha256: str
    footer_bytes: int  # at its end: what parquet calls the footer, its length and the closing magic
    footer_sha256: str
    documents_sha256: str  # of the file beside it that says which documents it holds: `shards.DocumentIndex`


@dataclass(frozen=True)
class Split:
    """Rows 0 .. num_rows - 1, shard after shard; every shard but the last holds `rows_per_shard` of them."""

    num_rows: int
    shards: tuple[Shard, ...]


@dataclass(frozen=True)
class Tokenizer:
    """The tokenizer file, in the format of Hugging Face `tokenizers`."""

    file: str
    sha256: str
    vocab_size: int  # ids it really has; at most the manifest's `vocab_size`
    eot_id: int  # end-of-text, which stands before, between and after documents


@dataclass(frozen=True)
class Manifest:
    """A corpus as rows of `seq_len + 1` token ids, of which the last is also the next row's first."""

    recipe: str
    source: dict[str, Any]  # as the recipe describes it
    filters: tuple[str, ...]  # what was left out, in words
    seq_len: int
    vocab_size: int  # asked for
    validation_fraction: float  # of documents
    rows_per_group: int
    rows_per_shard: int
    order_version: int
    num_tokens: int  # of all splits, end-of-text and dropped tails included
    counts: dict[str, int]  # documents, those skipped by reason, dropped tokens ...: for people
    damaged: dict[str, str]  # parts of the source that could not be read, and why
    tokenizer: Tokenizer
    splits: dict[str, Split]

    def to_json(self) -> bytes:
        """The canonical form: equal manifests give equal bytes."""
        return _to_json({**self._content(), "sha256": self.sha256})

    @property
    def sha256(self) -> str:
        """Identifies the corpus: two with the same one hold the same rows in the same places."""
        return hashlib.sha256(_to_json(self._content())).hexdigest()

    def _content(self) -> dict[str, Any]:
        return {"format": FORMAT, "version": VERSION, **asdict(self)}

    def save(self, folder: Path | str) -> None:
        """Write `manifest.json` durably, whole or not at all."""
        Storage.at(folder).write_bytes(MANIFEST, self.to_json())

    @staticmethod
    def load(folder: Path | str) -> "Manifest":
        """Of the corpus at a path or a URI.

        Raises DataError where there is no complete one of a version that this code reads.
        """
        storage = Storage.at(folder)
        path = str(storage / MANIFEST)
        try:
            content = json.loads(storage.read_bytes(MANIFEST))
            found, version = content["format"], content["version"]
            if found != FORMAT:
                raise DataError(f"{path} is {found}, this code reads {FORMAT}; name a folder of jobs.prepare_data")
            if version != VERSION:
                raise DataError(f"{path} {by_another_version('format version', version, VERSION)}")
            sha256 = content.pop("sha256")
            if hashlib.sha256(_to_json(content)).hexdigest() != sha256:
                raise ValueError("its sha256 is not that of its content")
        except FileNotFoundError as error:
            raise DataError(
                f"{storage} holds no finished corpus; run python -m jobs.prepare_data, or see that it is mounted there"
            ) from error
        except OSError as error:
            raise (UnavailableError if may_pass(error) else DataError)(f"{path} cannot be read: {error}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f"{path} is damaged ({type(error).__name__}: {error}); "
                f"delete {storage} and run python -m jobs.prepare_data"
            ) from error
        try:
            return Manifest._of_plain(content)
        except (KeyError, TypeError, AttributeError) as error:  # whole, as its sha256 says
            raise DataError(f"{path} was prepared by a newer regrow: {first_line(error)}; use that one") from error

    @staticmethod
    def _of_plain(content: dict[str, Any]) -> "Manifest":
        """Of `_content`. Raises KeyError, TypeError or AttributeError for other keys."""
        plain = {key: value for key, value in content.items() if key not in ("format", "version")}
        splits = {
            name: Split(**{**split, "shards": tuple(Shard(**shard) for shard in split["shards"])})
            for name, split in plain["splits"].items()
        }
        tokenizer = Tokenizer(**plain["tokenizer"])
        return Manifest(**{**plain, "filters": tuple(plain["filters"]), "tokenizer": tokenizer, "splits": splits})


def by_another_version(what: str, found: int, mine: int) -> str:
    """What to say, and to do, of a corpus where what it was prepared by does not match this code.

    >>> by_another_version("format version", 4, 3)
    'was prepared by a newer regrow (format version 4, this one has 3); use that one'
    """
    if found > mine:
        return f"was prepared by a newer regrow ({what} {found}, this one has {mine}); use that one"
    return (
        f"was prepared by an older regrow ({what} {found}, this one has {mine}); prepare another by "
        "python -m jobs.prepare_data"
    )


def _to_json(content: dict[str, Any]) -> bytes:
    return json.dumps(content, indent=1, sort_keys=True).encode()
