"""Documents -> tokenizer -> token shards, once, cached below the storage path.

    source -> pieces --tokenize--> spool --shuffle, cut into rows--> shards -> manifest.json

Deterministic: the same source, settings and library versions give the same bytes, on one process or a cluster. Every
piece and every shard is there whole or not at all, so that a preparation that was killed goes on where it stopped. It
happens in a folder beside the final place, which is renamed with its manifest inside.
"""

import fcntl
import hashlib
import importlib.metadata
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from regrow.config.schema import DataConfig
from regrow.data.assemble import Layout, assemble_shard, finished_shard, lay_out
from regrow.data.documents import Document, Piece, Recipe, content_hash, load_recipe
from regrow.data.files import SourceFiles
from regrow.data.manifest import MANIFEST, SPLITS, VERSION, Manifest, Shard, Split, Tokenizer
from regrow.data.shards import file_sha256
from regrow.data.spool import Spool, Spooled
from regrow.data.tokenizer import end_of_text_id, load_tokenizer, train_tokenizer
from regrow.errors import DataError, UnseenError, first_line
from regrow.observe.console import Stage
from regrow.plan.order import ORDER_VERSION, derive_keys, permute
from regrow.storage import Storage

if TYPE_CHECKING:
    from tokenizers import Tokenizer as BPE

TOKENIZER_FILE, PLAN_FILE, SPOOL = "tokenizer.json", "plan.json", "spool"
SHUFFLED_PIECES = 64  # whose documents are shuffled with each other
LOCAL_BYTES = 64 << 20  # a source of less is prepared by this process: tasks would take longer to start
TRAINING_CHARS = 200_000_000  # of text that a tokenizer is trained on
_PIECES = 3  # domain of the shuffle of pieces, beside those of plan.order

# what the prepared content depends on, beside the recipe's own description of its source
CONTENT_KEYS = (
    "vocab_size",
    "seq_len",
    "validation_fraction",
    "rows_per_group",
    "rows_per_shard",
    "min_score",
    "language",
    "min_language_score",
    "max_document_chars",
)

Distribute = Callable[[Callable[[int], Any], Sequence[int]], Iterator[Any]]  # calls it on each; results in any order
Progress = Callable[[Stage, float, float], None]  # (stage, done, total); a stage ends when done == total
TRAINING, TOKENIZING, WRITING = Stage("training the tokenizer"), Stage("tokenizing", "B"), Stage("writing", "shards")


def find_or_prepare(
    config: DataConfig, storage_path: str, *, progress: Progress, distribute: Distribute = map
) -> tuple[Path, Manifest]:
    """The folder and manifest of the corpus that the config describes; prepared now if it is not there yet.

    Raises DataError for an unknown recipe, a corpus too small for the settings, or storage that is no file system.
    """
    recipe = load_recipe(config.recipe)
    folder = corpus_folder(config, storage_path, recipe)
    if (folder / MANIFEST).is_file():
        return folder, Manifest.load(folder)
    return folder, prepare(config, recipe, folder, progress=progress, distribute=distribute)


def corpus_folder(config: DataConfig, storage_path: str, recipe: Recipe) -> Path:
    """Where the corpus that the config describes is, or will be. Raises DataError where that is no file system."""
    if "://" in storage_path and not storage_path.startswith("file://"):
        raise DataError(
            f"run.storage_path={storage_path}: token shards are read from a file system; "
            "mount one that all nodes share and give its path"
        )
    return Storage.at(storage_path).local_path / "data" / cache_name(config, recipe)


def cache_name(config: DataConfig, recipe: Recipe | None = None) -> str:
    """A folder name that changes with everything that the prepared content depends on."""
    fixed = _fixed(config, recipe or load_recipe(config.recipe))
    digest = hashlib.sha256(json.dumps(fixed, sort_keys=True).encode()).hexdigest()
    return f"{config.recipe}-v{config.vocab_size}-l{config.seq_len}-{digest[:10]}"


def prepare(
    config: DataConfig, recipe: Recipe, folder: Path, *, progress: Progress, distribute: Distribute = map
) -> Manifest:
    """Build the corpus at `folder` and return its manifest; goes on with what an earlier attempt left.

    One process at a time builds, others wait for it. Raises DataError if a split has too few tokens for one row, or
    if storage goes on failing.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    building = folder.with_name(f".{folder.name}.building")
    with _lock(folder):
        if not (folder / MANIFEST).is_file():
            plan = _Plan(config, recipe, building, progress, distribute)
            if not plan.is_built():
                _build(plan).save(building)
            plan.tidy()
            _sync(building)
            if folder.exists():
                shutil.rmtree(folder)  # left by something that did not finish
            building.rename(folder)
            _sync(folder.parent, files=False)
    return Manifest.load(folder)


class _Plan:
    """What one preparation works on."""

    def __init__(
        self, config: DataConfig, recipe: Recipe, folder: Path, progress: Progress, distribute: Distribute
    ) -> None:
        self.config, self.recipe, self.folder = config, recipe, folder
        self.progress, self.pieces = progress, recipe.pieces(config)
        self.distribute = distribute if sum(piece.num_bytes for piece in self.pieces) > LOCAL_BYTES else map
        self.spool = Spool(folder / SPOOL)
        self.groups = shuffle_groups(len(self.pieces))

    def content(self) -> bytes:
        """What is prepared, and how it is cut."""
        return json.dumps(
            {
                **_fixed(self.config, self.recipe),
                "pieces": [asdict(piece) for piece in self.pieces],
                "tokenizers": importlib.metadata.version("tokenizers"),
            },
            sort_keys=True,
        ).encode()

    def is_built(self) -> bool:
        """Was an earlier attempt killed when only tidying up was left?"""
        path = self.folder / PLAN_FILE
        return (self.folder / MANIFEST).is_file() and (not path.is_file() or path.read_bytes() == self.content())

    def open_folder(self) -> None:
        """Keep what an earlier attempt at the same corpus left there, and nothing else."""
        path = self.folder / PLAN_FILE
        if not path.is_file() or path.read_bytes() != self.content():
            shutil.rmtree(self.folder, ignore_errors=True)
        self.spool.folder.mkdir(parents=True, exist_ok=True)
        Storage.at(self.folder).write_bytes(PLAN_FILE, self.content())
        for left in [*self.folder.glob(".*.tmp"), *self.spool.folder.glob("*.tmp")]:
            left.unlink(missing_ok=True)

    def tidy(self) -> None:
        """Leave what a finished corpus consists of; the plan goes last, for it tells whose leftovers these are."""
        shutil.rmtree(self.spool.folder, ignore_errors=True)
        for record in self.folder.glob("*.record"):
            record.unlink()
        (self.folder / PLAN_FILE).unlink(missing_ok=True)


def shuffle_groups(num_pieces: int) -> list[list[int]]:
    """Pieces in an order that has nothing to do with the source's, in groups that are shuffled together."""
    key = derive_keys(0, _PIECES, np.zeros(1, np.int64))
    order = permute(np.arange(num_pieces), num_pieces, key).tolist()
    return [order[k : k + SHUFFLED_PIECES] for k in range(0, num_pieces, SHUFFLED_PIECES)]


def spool_piece(spool: Spool, pieces: Sequence[Piece], recipe: Recipe, config: DataConfig, index: int) -> Spooled:
    """The task of one piece."""
    group = next(group for group in shuffle_groups(len(pieces)) if index in group)
    path = spool.folder.parent / TOKENIZER_FILE
    tokenizer = _tokenizer(path, file_sha256(path))
    return spool.write(index, pieces[index], recipe, config, tokenizer, num_buckets=len(group))


def make_shard(layout: Layout, spool: Spool, names: Sequence[tuple[int, int]], index: int) -> Shard:
    """The task of one shard."""
    return assemble_shard(layout, spool, spool.folder.parent, *names[index])


@lru_cache(1)
def _tokenizer(path: Path, sha256: str) -> "BPE":
    return load_tokenizer(path)


def _build(plan: _Plan) -> Manifest:
    config = plan.config
    try:
        plan.open_folder()
        tokenizer = _make_tokenizer(plan)
        eot_id = end_of_text_id(tokenizer, config.end_of_text)
        spooled = _tokenize(plan)
        layout = lay_out(
            plan.groups,
            spooled,
            seq_len=config.seq_len,
            rows_per_group=config.rows_per_group,
            rows_per_shard=config.rows_per_shard,
            eot_id=eot_id,
        )
        _check_size(plan, layout, spooled)
        shards = _write_shards(plan, layout)
    except OSError as error:
        raise DataError(
            f"preparing {config.recipe} stopped: {error}; run the same command again, it goes on where it stopped"
        ) from error
    source = plan.recipe.describe(config)
    return Manifest(
        recipe=config.recipe,
        filters=tuple(source.pop("filters", ())),
        source=source,
        seq_len=config.seq_len,
        vocab_size=config.vocab_size,
        validation_fraction=config.validation_fraction,
        rows_per_group=config.rows_per_group,
        rows_per_shard=config.rows_per_shard,
        order_version=ORDER_VERSION,
        num_tokens=sum(layout.num_tokens),
        counts=_counts(layout, spooled),
        damaged={_span(piece): s.damaged for piece, s in zip(plan.pieces, spooled, strict=True) if s.damaged},
        tokenizer=Tokenizer(
            TOKENIZER_FILE, file_sha256(plan.folder / TOKENIZER_FILE), tokenizer.get_vocab_size(), eot_id
        ),
        splits={
            name: Split(layout.num_rows(split), tuple(shards[split, k] for k in range(layout.num_shards(split))))
            for split, name in enumerate(SPLITS)
        },
    )


def _make_tokenizer(plan: _Plan) -> "BPE":
    """The tokenizer that was asked for, or one trained on the documents that are trained on; kept in the folder."""
    path, config = plan.folder / TOKENIZER_FILE, plan.config
    if not path.is_file():
        if config.tokenizer is not None:
            Storage.at(plan.folder).write_bytes(TOKENIZER_FILE, read_tokenizer(config.tokenizer))
        else:
            plan.progress(TRAINING, 0, 1)
            tokenizer = train_tokenizer(_training_texts(plan), vocab_size=config.vocab_size)
            Storage.at(plan.folder).write_bytes(TOKENIZER_FILE, tokenizer.to_str(pretty=True).encode())
            plan.progress(TRAINING, 1, 1)
    tokenizer = load_tokenizer(path)
    check_tokenizer(tokenizer, config)
    return tokenizer


def check_tokenizer(tokenizer: "BPE", config: DataConfig) -> None:
    """Raises DataError for one with more ids than `data.vocab_size`, or without an end-of-text token."""
    if tokenizer.get_vocab_size() > config.vocab_size:
        raise DataError(
            f"the tokenizer {config.tokenizer} has {tokenizer.get_vocab_size()} ids, data.vocab_size="
            f"{config.vocab_size}; set data.vocab_size={-(-tokenizer.get_vocab_size() // 128) * 128} and "
            "model.vocab_size to at least that"
        )
    end_of_text_id(tokenizer, config.end_of_text)


def read_tokenizer(location: str) -> bytes:
    """A tokenizer file's bytes. Raises DataError where there is none."""
    files = SourceFiles(location)
    try:
        return files.read(location.rpartition("/")[2])
    except OSError as error:
        raise UnseenError(
            f"data.tokenizer={location} cannot be read ({first_line(error)}); give the path or URI of a tokenizer.json"
        ) from error


def _training_texts(plan: _Plan) -> Iterator[str]:
    limit, num_chars = int(plan.config.validation_fraction * 2**64), 0
    for piece in plan.pieces:
        for document in plan.recipe.documents(plan.config, piece):
            if isinstance(document, Document):
                if int.from_bytes(content_hash(document.text)[:8], "big") >= limit:
                    yield document.text
                    num_chars += len(document.text)
                if num_chars >= TRAINING_CHARS:
                    return


def _tokenize(plan: _Plan) -> list[Spooled]:
    total = sum(piece.num_bytes for piece in plan.pieces)
    todo = [index for index in range(len(plan.pieces)) if plan.spool.load(index) is None]
    done = total - sum(plan.pieces[index].num_bytes for index in todo)
    if not todo:
        return _all_spooled(plan)
    plan.progress(TOKENIZING, done, total)
    task = partial(_numbered, partial(spool_piece, plan.spool, plan.pieces, plan.recipe, plan.config))
    for index, _ in plan.distribute(task, todo):
        done += plan.pieces[index].num_bytes
        plan.progress(TOKENIZING, done, total)
    return _all_spooled(plan)


def _all_spooled(plan: _Plan) -> list[Spooled]:
    spooled = [plan.spool.load(index) for index in range(len(plan.pieces))]
    assert None not in spooled
    return [s for s in spooled if s is not None]


def _write_shards(plan: _Plan, layout: Layout) -> dict[tuple[int, int], Shard]:
    names = [(split, number) for split in range(len(SPLITS)) for number in range(layout.num_shards(split))]
    shards = {name: finished_shard(plan.folder, *name) for name in names}
    todo = [index for index, name in enumerate(names) if shards[name] is None]
    done = len(names) - len(todo)
    plan.progress(WRITING, done, len(names))
    for index, shard in plan.distribute(partial(_numbered, partial(make_shard, layout, plan.spool, names)), todo):
        shards[names[index]] = shard
        done += 1
        plan.progress(WRITING, done, len(names))
    return {name: shard for name, shard in shards.items() if shard is not None}


def _numbered(function: Callable[[int], Any], index: int) -> tuple[int, Any]:
    return index, function(index)


def _check_size(plan: _Plan, layout: Layout, spooled: Sequence[Spooled]) -> None:
    """Raises DataError if nothing is left of the source, or a split is smaller than a row."""
    config = plan.config
    if not sum(s.documents for s in spooled):
        damaged = [f"{_span(piece)}: {s.damaged}" for piece, s in zip(plan.pieces, spooled, strict=True) if s.damaged]
        skipped = [f"{count:,} {reason}" for s in spooled for reason, count in s.skipped.items()]
        why = "; ".join([*damaged[:3], *skipped[:5]]) or "it is empty"
        raise DataError(f"{config.recipe} has no document left to train on ({why}); check data.source and the filters")
    for split, name in enumerate(SPLITS):
        if not layout.num_rows(split):
            raise DataError(
                f"the {name} split of {config.recipe} has {layout.num_tokens[split]:,} tokens, too few for one row of "
                f"data.seq_len={config.seq_len}; lower data.seq_len"
                + (" or raise data.validation_fraction" if name == "validation" else " or choose another data.recipe")
            )


def _counts(layout: Layout, spooled: Sequence[Spooled]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for s in spooled:
        counts.update({"documents": s.documents, "characters": s.characters})
        counts.update({f"skipped: {reason}": number for reason, number in s.skipped.items()})
    for split, name in enumerate(SPLITS):
        num_tokens = layout.num_tokens[split]
        counts[f"{name}_documents"] = sum(s.num_documents[split] for s in spooled)
        counts[f"{name}_tokens"] = num_tokens
        counts[f"{name}_tokens_dropped"] = num_tokens - 1 - layout.num_rows(split) * layout.seq_len
    return dict(counts)


def _fixed(config: DataConfig, recipe: Recipe) -> dict[str, Any]:
    tokenizer = config.tokenizer and hashlib.sha256(read_tokenizer(config.tokenizer)).hexdigest()
    return {
        **{key: getattr(config, key) for key in CONTENT_KEYS},
        "tokenizer": tokenizer,
        "end_of_text": config.end_of_text,
        "source": recipe.describe(config),
        "format": VERSION,
        "order": ORDER_VERSION,
    }


def _span(piece: Piece) -> str:
    return piece.file if piece.stop is None else f"{piece.file}[{piece.start}:{piece.stop}]"


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Hold the lock that guards what stands at `folder`; the kernel lets go of it with the process."""
    with open(folder.with_name(f".{folder.name}.lock"), "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _sync(folder: Path, *, files: bool = True) -> None:
    for path in [*(folder.iterdir() if files else ()), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
