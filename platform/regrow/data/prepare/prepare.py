"""Documents -> tokenizer -> token shards, once, cached below the storage path.

    source -> pieces --tokenize--> spool --shuffle, cut into rows--> shards -> manifest.json

Deterministic: the same source, settings and library versions give the same bytes, on one process or a cluster. Every
piece and every shard is there whole or not at all, so that a preparation that was killed goes on where it stopped.
"""

import contextlib
import hashlib
import importlib.metadata
import json
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from regrow.config.schema import DataConfig
from regrow.data.prepare.assemble import (
    PLAN_FILE,
    Layout,
    assemble_shard,
    building_site,
    finished_shards,
    lay_out,
    shard_name,
)
from regrow.data.prepare.changes import SOURCE_FILE, as_read, check_unchanged, left_of_shorter_sources, tails
from regrow.data.prepare.documents import (
    DamagedPiece,
    Document,
    Piece,
    Recipe,
    SourceChanged,
    content_hash,
    load_recipe,
)
from regrow.data.prepare.files import SourceFiles, absolute
from regrow.data.prepare.spool import Spool, Spooled
from regrow.data.prepare.tokenizer import end_of_text_id, num_ids, parse_tokenizer, train_tokenizer
from regrow.data.read.manifest import MANIFEST, SPLITS, VERSION, Manifest, Shard, Split, Tokenizer
from regrow.errors import DataError, UnseenError, first_line
from regrow.plan.order import ORDER_VERSION, derive_keys, permute
from regrow.progress import Progress, Task
from regrow.storage import Storage, is_remote, join_location

if TYPE_CHECKING:
    from tokenizers import Tokenizer as BPE

TOKENIZER_FILE, SPOOL = "tokenizer.json", "spool"
SHUFFLED_PIECES = 64  # whose documents are shuffled with each other
LOCAL_BYTES = 64 << 20  # a source of less is prepared by this process: tasks would take longer to start
TRAINING_CHARS = 200_000_000  # of text that a tokenizer is trained on
_PIECES = 3  # domain of the shuffle of pieces, beside those of plan.order

# what the prepared content depends on, beside the recipe's own description of its source
PREPARED = "data"  # the folder of corpora below run.storage_path
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


class CallDied(Exception):
    """A process that made a call of a distributed function died, and so did those that made it again."""

    def __init__(self, number: int, times: int, reason: str) -> None:
        super().__init__(reason)
        self.number, self.times = number, times


Distribute = Callable[[Callable[[int], Any], Sequence[int]], Iterator[Any]]  # calls it on each; results in any order
# what fixes a corpus' content, JSON types only: settings, and the recipe's description of its source
Fixed = dict[str, Any]
LOOKING, TRAINING = Task("looking at the source"), Task("training the tokenizer")
TOKENIZING, WRITING = Task("tokenizing", "B"), Task("writing", "shards")


def find_or_prepare(
    config: DataConfig, storage_path: str, *, progress: Progress, distribute: Distribute = map
) -> tuple[Storage, Manifest]:
    """The folder and manifest of the corpus that the config describes; prepared now if it is not there yet.

    Raises DataError for an unknown recipe, or a corpus too small for the settings.
    """
    recipe = load_recipe(config.recipe)
    fixed = fixed_by(config, recipe)
    folder = Storage.at(storage_path) / PREPARED / _name(config, fixed)
    if folder.is_local and folder.exists(MANIFEST):  # perhaps of others, to be read only
        return folder, Manifest.load(str(folder))
    for left in left_of_shorter_sources(folder, fixed, config.source and absolute(config.source)):
        progress(Task(f"passing over {left}, which is of data.source as it was (delete it)"), 1, 1)
    return folder, prepare(config, recipe, folder, progress=progress, distribute=distribute, fixed=fixed)


def corpus_folder(config: DataConfig, storage_path: str, recipe: Recipe) -> Storage:
    """Where the corpus that the config describes is, or will be."""
    return Storage.at(storage_path) / PREPARED / cache_name(config, recipe)


def cache_name(config: DataConfig, recipe: Recipe | None = None) -> str:
    """A folder name that changes with everything that the prepared content depends on."""
    return _name(config, fixed_by(config, recipe or load_recipe(config.recipe)))


def _name(config: DataConfig, fixed: Fixed) -> str:
    digest = hashlib.sha256(json.dumps(fixed, sort_keys=True).encode()).hexdigest()
    return f"{config.recipe}-v{config.vocab_size}-l{config.seq_len}-{digest[:10]}"


def prepare(
    config: DataConfig,
    recipe: Recipe,
    folder: Path | Storage,
    *,
    progress: Progress,
    distribute: Distribute = map,
    fixed: Fixed | None = None,
) -> Manifest:
    """Build the corpus at `folder` and return its manifest; goes on with what an earlier attempt left.

    `fixed` is what the folder's name stands for; what there is now by default. Raises DataError if a split has too few
    tokens for one row, or if storage goes on failing; SourceChanged where the source is, or becomes, another one.
    """
    place = folder if isinstance(folder, Storage) else Storage.at(folder)
    with building_site(place, progress) as site:
        if site is not None:
            try:
                plan = Plan(config, recipe, site, progress, distribute, fixed)
                if not plan.is_built():
                    try:
                        _build(plan).save(str(site))
                    except SourceChanged:
                        plan.give_up()
                        raise
            except OSError as error:
                raise DataError(
                    f"preparing {config.recipe} stopped: {error}; run the same command again, it goes on where it "
                    "stopped"
                ) from error
    return Manifest.load(str(place))


class Plan:
    """What one preparation works on."""

    def __init__(
        self,
        config: DataConfig,
        recipe: Recipe,
        folder: Storage,
        progress: Progress,
        distribute: Distribute,
        fixed: Fixed | None = None,
    ) -> None:
        """Raises SourceChanged where the source is not what is `fixed`."""
        source = config.source and absolute(config.source)  # tasks have another working directory
        self.config, self.recipe, self.folder = replace(config, source=source), recipe, folder
        self.progress = progress
        if is_remote(config.source):  # which may take a minute
            progress(LOOKING, 0, 1)
        self.fixed = fixed or fixed_by(self.config, recipe)
        self.pieces = recipe.pieces(self.config)
        check_unchanged(self.config, self.fixed["source"], recipe.describe(self.config))
        self.tails = tails(self.config, self.fixed["source"], self.pieces)
        if is_remote(config.source):
            progress(LOOKING, 1, 1)
        self.distribute = distribute if sum(piece.num_bytes for piece in self.pieces) > LOCAL_BYTES else map
        self.spool = Spool(folder / SPOOL)
        self.groups = shuffle_groups(len(self.pieces))

    def content(self) -> bytes:
        """What is prepared, and how it is cut."""
        return json.dumps(
            {
                **self.fixed,
                "pieces": [asdict(piece) for piece in self.pieces],
                "tokenizers": importlib.metadata.version("tokenizers"),
            },
            sort_keys=True,
        ).encode()

    def check_read(self) -> None:
        """Raises SourceChanged where what was read may be another source than what is `fixed`."""
        before, after = self.fixed["source"], self.recipe.describe(self.config)
        check_unchanged(self.config, before, as_read(self.config, before, after, self.tails))

    def give_up(self) -> None:
        """Delete what another attempt would go on with."""
        self.folder.delete(PLAN_FILE)  # without which the others are deleted then
        with contextlib.suppress(OSError):  # tasks that are not over yet may write there
            self.folder.delete(SPOOL)

    def is_built(self) -> bool:
        """Was an earlier attempt killed when only tidying up was left?"""
        return self.folder.exists(MANIFEST) and self._kept() in (None, self.content())

    def _kept(self) -> bytes | None:
        """The content of an earlier attempt."""
        try:
            return self.folder.read_bytes(PLAN_FILE)
        except FileNotFoundError:
            return None

    def open_folder(self) -> None:
        """Keep what an earlier attempt at the same corpus left there, and nothing else that would be taken for ours.

        Shards stay: they are written anew, and another job may have finished them a moment ago.
        """
        if self._kept() != self.content():
            records = [name for name in self.folder.list() if name.endswith(".record")]
            for name in [MANIFEST, SPOOL, TOKENIZER_FILE, *records]:  # without the first it is not finished
                self.folder.delete(name)
            self.folder.write_bytes(PLAN_FILE, self.content())
        self.folder.write_bytes(SOURCE_FILE, json.dumps(self.config.source).encode())


def shuffle_groups(num_pieces: int) -> list[list[int]]:
    """Pieces in an order that has nothing to do with the source's, in groups that are shuffled together."""
    key = derive_keys(0, _PIECES, np.zeros(1, np.int64))
    order = permute(np.arange(num_pieces), num_pieces, key).tolist()
    return [order[k : k + SHUFFLED_PIECES] for k in range(0, num_pieces, SHUFFLED_PIECES)]


def spool_piece(
    spool: Spool, pieces: Sequence[Piece], recipe: Recipe, config: DataConfig, tokenizer: tuple[str, str], index: int
) -> Spooled:
    """The task of one piece; `tokenizer` is the folder that has it, and the file's sha256."""
    group = next(group for group in shuffle_groups(len(pieces)) if index in group)
    bpe = _tokenizer(*tokenizer)
    try:
        return spool.write(index, pieces[index], recipe, config, bpe, num_buckets=len(group))
    except FileNotFoundError as error:
        raise DataError(
            f"data.source={config.source} is not there on {socket.gethostname()} ({first_line(error)}); give a folder "
            "that all nodes share, or a URI"
        ) from error


def make_shard(layout: Layout, spool: Spool, folder: Storage, names: Sequence[tuple[int, int]], index: int) -> Shard:
    """The task of one shard."""
    return assemble_shard(layout, spool, folder, *names[index])


@lru_cache(1)
def _tokenizer(folder: str, sha256: str) -> "BPE":
    try:
        data = Storage.at(folder).read_bytes(TOKENIZER_FILE)
    except FileNotFoundError as error:
        raise DataError(
            f"{folder} is being prepared and is not there on {socket.gethostname()}; set run.storage_path to a folder "
            "that all nodes share, or to a URI"
        ) from error
    return parse_tokenizer(data, join_location(folder, TOKENIZER_FILE))


def _build(plan: Plan) -> Manifest:
    config = plan.config
    plan.open_folder()
    tokenizer, sha256 = _make_tokenizer(plan)
    eot_id = end_of_text_id(tokenizer, config.end_of_text)
    spooled = _tokenize(plan, sha256)
    plan.check_read()
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
    source = dict(plan.fixed["source"])
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
        tokenizer=Tokenizer(TOKENIZER_FILE, sha256, num_ids(tokenizer), eot_id),
        splits={
            name: Split(layout.num_rows(split), tuple(shards[split, k] for k in range(layout.num_shards(split))))
            for split, name in enumerate(SPLITS)
        },
    )


def _make_tokenizer(plan: Plan) -> tuple["BPE", str]:
    """The tokenizer that was asked for, or one trained on the documents that are trained on, kept in the folder.

    With the file's sha256.
    """
    config = plan.config
    if not plan.folder.exists(TOKENIZER_FILE):
        if config.tokenizer is not None:
            plan.folder.write_bytes(TOKENIZER_FILE, read_tokenizer(config.tokenizer))
        else:
            plan.progress(TRAINING, 0, 1)
            trained = train_tokenizer(_training_texts(plan), vocab_size=config.vocab_size)
            plan.folder.write_bytes(TOKENIZER_FILE, trained.to_str(pretty=True).encode())
            plan.progress(TRAINING, 1, 1)
    data = plan.folder.read_bytes(TOKENIZER_FILE)
    tokenizer = parse_tokenizer(data, config.tokenizer or str(plan.folder / TOKENIZER_FILE))
    check_tokenizer(tokenizer, config)
    sha256 = hashlib.sha256(data).hexdigest()
    if config.tokenizer is not None and sha256 != plan.fixed["tokenizer"]:
        raise SourceChanged(
            f"data.tokenizer={config.tokenizer} changed since it was looked at; run the same command again"
        )
    return tokenizer, sha256


def check_tokenizer(tokenizer: "BPE", config: DataConfig) -> None:
    """Raises DataError for one with more ids than `data.vocab_size`, or without an end-of-text token."""
    found = num_ids(tokenizer)
    if found > config.vocab_size:
        raise DataError(
            f"the tokenizer {config.tokenizer} has {found} ids, data.vocab_size={config.vocab_size}; set "
            f"data.vocab_size={-(-found // 128) * 128} and model.vocab_size to at least that"
        )
    end_of_text_id(tokenizer, config.end_of_text)


def read_tokenizer(location: str) -> bytes:
    """A tokenizer file's bytes. Raises DataError where there is none."""
    files = SourceFiles(location)
    try:
        return files.read(files.name(files.root))
    except FileNotFoundError as error:
        raise UnseenError(
            f"data.tokenizer={location}: there is no {files.root}; give the path or URI of a tokenizer.json"
        ) from error
    except OSError as error:
        raise UnseenError(
            f"data.tokenizer={location} cannot be read ({first_line(error)}); give the path or URI of a tokenizer.json"
        ) from error


def _training_texts(plan: Plan) -> Iterator[str]:
    limit, num_chars = int(plan.config.validation_fraction * 2**64), 0
    for piece in plan.pieces:
        with contextlib.suppress(DamagedPiece):  # it is named once it is tokenized
            for document in plan.recipe.documents(plan.config, piece):
                if isinstance(document, Document):
                    if int.from_bytes(content_hash(document.text)[:8], "big") >= limit:
                        yield document.text
                        num_chars += len(document.text)
                    if num_chars >= TRAINING_CHARS:
                        return


def _tokenize(plan: Plan, tokenizer_sha256: str) -> list[Spooled]:
    spooled = plan.spool.load()
    todo = [index for index in range(len(plan.pieces)) if index not in spooled]
    total = sum(piece.num_bytes for piece in plan.pieces)
    done = total - sum(plan.pieces[index].num_bytes for index in todo)
    if todo:
        plan.progress(TOKENIZING, done, total)
    tokenizer = str(plan.folder), tokenizer_sha256
    task = partial(spool_piece, plan.spool, plan.pieces, plan.recipe, plan.config, tokenizer)
    for index, result in _distributed(plan, task, todo, lambda index: _span(plan.pieces[index])):
        spooled[index] = result
        done += plan.pieces[index].num_bytes
        plan.progress(TOKENIZING, done, total)
    return [spooled[index] for index in range(len(plan.pieces))]


def _write_shards(plan: Plan, layout: Layout) -> dict[tuple[int, int], Shard]:
    names = [(split, number) for split in range(len(SPLITS)) for number in range(layout.num_shards(split))]
    shards = finished_shards(plan.folder, names)
    todo = [index for index, name in enumerate(names) if name not in shards]
    plan.progress(WRITING, len(shards), len(names))
    task = partial(make_shard, layout, plan.spool, plan.folder, names)
    for index, shard in _distributed(plan, task, todo, lambda index: shard_name(*names[index])):
        shards[names[index]] = shard
        plan.progress(WRITING, len(shards), len(names))
    return shards


def _distributed(
    plan: Plan, task: Callable[[int], Any], todo: Sequence[int], name: Callable[[int], str]
) -> Iterator[tuple[int, Any]]:
    """Each number with what the task makes of it. Raises DataError, with its name, for one that no process survives."""
    try:
        yield from plan.distribute(partial(_numbered, task), todo)
    except CallDied as error:
        raise DataError(
            f"preparing {plan.config.recipe} stopped at {name(error.number)}: {error.times} processes died of it, or "
            f"beside it (the last: {error}); a file that cannot be cut is one task, which holds its tokens in memory: "
            "make several of it, or give nodes more memory, and run the same command again, it goes on where it stopped"
        ) from error


def _numbered(function: Callable[[int], Any], index: int) -> tuple[int, Any]:
    return index, function(index)


def _check_size(plan: Plan, layout: Layout, spooled: Sequence[Spooled]) -> None:
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


def fixed_by(config: DataConfig, recipe: Recipe) -> Fixed:
    """What fixes a corpus' content, by what its source and tokenizer are now."""
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
