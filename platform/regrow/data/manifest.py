"""What a prepared corpus is: everything that fixes its content, beside the shards. See docs/file-formats.md."""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from regrow.errors import DataError

FORMAT, VERSION = "regrow-corpus", 1
MANIFEST = "manifest.json"
SPLITS = ("train", "validation")


@dataclass(frozen=True)
class Shard:
    """One parquet file of rows."""

    file: str
    num_rows: int
    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class Split:
    num_rows: int
    shards: tuple[Shard, ...]


@dataclass(frozen=True)
class Tokenizer:
    file: str
    sha256: str
    vocab_size: int
    eot_id: int  # end-of-text, which follows every document


@dataclass(frozen=True)
class Manifest:
    """A corpus as rows of `seq_len + 1` token ids that overlap by one."""

    recipe: str
    source: dict[str, Any]  # as the recipe describes it
    seq_len: int
    rows_per_group: int
    order_version: int
    tokenizer: Tokenizer
    splits: dict[str, Split]
    counts: dict[str, int] = field(default_factory=dict)  # documents and tokens, for people
    num_tokens: int = 0  # of all splits, end-of-text and dropped tails included

    def to_json(self) -> bytes:
        return json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}, indent=1, sort_keys=True).encode()

    @property
    def sha256(self) -> str:
        """Identifies the corpus: two with the same one hold the same rows in the same places."""
        return hashlib.sha256(self.to_json()).hexdigest()

    @staticmethod
    def load(folder: Path) -> "Manifest":
        """Raises DataError where the folder holds no complete corpus of a version this code reads."""
        path = folder / MANIFEST
        try:
            content = json.loads(path.read_bytes())
            if (content.pop("format"), content.pop("version")) != (FORMAT, VERSION):
                raise DataError(f"{path} is not {FORMAT} version {VERSION}; prepare the corpus again in another folder")
            content["tokenizer"] = Tokenizer(**content["tokenizer"])
            content["splits"] = {
                name: Split(split["num_rows"], tuple(Shard(**shard) for shard in split["shards"]))
                for name, split in content["splits"].items()
            }
            return Manifest(**content)
        except FileNotFoundError as error:
            raise DataError(f"{folder} holds no prepared corpus; run python -m jobs.prepare_data") from error
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{path} is damaged ({type(error).__name__}: {error}); delete {folder} to redo it"
            ) from error
