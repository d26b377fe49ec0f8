"""Will the corpus do? Its source, tokenizer and size, looked at before a cluster is joined or a job rendered.

Exact where the corpus is prepared. Elsewhere rows are estimated from the sizes of files, the footers of some of them
and, on a local disk, a few documents, or all of a small corpus where it is close. What only this machine cannot see is
an UnseenError: another one may. HF_ENDPOINT, HF_TOKEN and HTTPS_PROXY mean what they mean to `huggingface_hub`.
"""

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from regrow.config.schema import DataConfig, PretrainConfig
from regrow.data.prepare.documents import DamagedPiece, Document, Piece, Recipe, load_recipe
from regrow.data.prepare.listing import named_by, searched
from regrow.deadline import within
from regrow.errors import DataError, UnseenError, first_line
from regrow.storage import StorageError, in_threads, is_remote, path_of

if TYPE_CHECKING:
    from regrow.data.prepare.files import SourceFiles


LOOK_S = 20.0  # for each place outside this machine: source, tokenizer, prepared corpora
MARGIN = 1.25  # by which an estimate may be too low before a corpus is refused for it
MOST_FOOTERS, MOST_PIECES = 8, 4  # of a source's parquet files read, of its pieces sampled, evenly over them
SAMPLE_BYTES, SAMPLE_DOCUMENTS = 1 << 20, 1000  # of text that is tokenized, of documents that are filtered
CLOSE, READ_BYTES = 2.0, 64 << 20  # global batches below which all documents are read, of at most so many bytes
# bytes a token where no tokenizer can be asked: of FineWeb-Edu GPT-2's 50k ids make 4.4 and dolma2's 100k 4.5; of the
# default corpus its own 4,096 make 3.65
BYTES_PER_TOKEN, FEW_IDS, BYTES_PER_TOKEN_OF_FEW = 4.5, 16384, 3.65
GZIP_RATIO, PARQUET_RATIO = 2.7, 2.3  # bytes of English text in one of a file: as FineWeb-Edu's parquet has it
BY_SIZES, COUNTED = "estimated from the sizes of its files", "counted"

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Outlook:
    """The training rows that a run draws from, and how often."""

    num_rows: int | None  # None: nothing tells
    seq_len: int
    steps: int  # of the run
    global_batch_seqs: int
    basis: str  # of an estimate, in words; empty where the rows are counted

    @property
    def epochs(self) -> float | None:
        return self.steps * self.global_batch_seqs / self.num_rows if self.num_rows else None

    def line(self) -> str:
        """For a person; empty for a prepared corpus, of which the run itself says more."""
        if not self.basis:
            return ""
        if self.epochs is None:
            return f"data: to be prepared; {self.basis}"
        return (
            f"data: to be prepared; {_about(self.basis)}{self.num_rows:,} rows of {self.seq_len:,} tokens "
            f"({self.basis}), {self.epochs:,.2f} epochs of them in train.steps={self.steps}"
        )


def _about(basis: str) -> str:
    return "" if basis == COUNTED else "about "


def check_corpus(config: PretrainConfig, *, deadline_s: float = LOOK_S, footers: bool = True) -> Outlook:
    """Look at the corpus of a run, prepared or not: source, tokenizer, rows, in this order.

    Raises DataError for what cannot work, its subclass UnseenError for what cannot be reached from here; each place
    outside this machine has `deadline_s` to answer. Without `footers`, what is on a hub is judged by the sizes of its
    files alone, which needs no Arrow.
    """
    data = config.data
    for name, folder in data.corpora.items():
        if not is_remote(folder) and not path_of(folder).exists():
            raise UnseenError(f"data.corpora.{name}={folder} holds no finished corpus: there is no such folder")
    if data.corpora:
        named = ", ".join(data.corpora.values())
        return _look_at("data.corpora", named, lambda: _counted(config, data.corpora), deadline_s)
    if is_hub(data.source) and not footers:
        try:
            return _by_sizes(config, deadline_s)
        except UnseenError:
            raise
        except DataError:  # of which a run that has begun needs nothing; asked only now, as it may take Arrow
            with contextlib.suppress(UnseenError):
                if (begun := _begun(config, deadline_s)) is not None:
                    return begun
            raise
    unseen: UnseenError | None = None
    try:
        if (begun := _begun(config, deadline_s)) is not None:
            return begun
    except UnseenError as error:
        unseen = error  # what can be seen of the source is looked at all the same
    recipe = load_recipe(data.recipe)
    on_hub = _sizes_on_hub("data.source", data.source, deadline_s)
    described = _look_at("data.source", data.source, lambda: recipe.describe(data), deadline_s)
    _sizes_on_hub("data.tokenizer", data.tokenizer, deadline_s)
    tokenizer = None
    if data.tokenizer is not None:
        tokenizer = _look_at("data.tokenizer", data.tokenizer, lambda: _tokenizer(config), deadline_s)
    if unseen is not None:
        raise unseen
    prepared = _look_at("run.storage_path", config.run.storage_path, lambda: _prepared(config, recipe), deadline_s)
    if prepared is not None:
        return prepared
    try:
        num_rows, basis = _look_at(
            "data.source", data.source, lambda: _estimate(config, recipe, described, tokenizer), deadline_s
        )
    except UnseenError:
        if on_hub is None:
            raise
        num_rows, basis = _rows_by_sizes(data, on_hub), BY_SIZES  # it answers, slowly
    return _large_enough(config, num_rows, basis)


def _by_sizes(config: PretrainConfig, deadline_s: float) -> Outlook:
    """Of a source on a hub, by what the hub lists alone."""
    data = config.data
    load_recipe(data.recipe)
    on_hub = _sizes_on_hub("data.source", data.source, deadline_s)
    _sizes_on_hub("data.tokenizer", data.tokenizer, deadline_s)
    return _large_enough(config, _rows_by_sizes(data, on_hub or {}), BY_SIZES)


def _rows_by_sizes(data: DataConfig, files: Mapping[str, int]) -> int:
    return int(PARQUET_RATIO * sum(files.values()) / BYTES_PER_TOKEN / data.seq_len)


def _sizes_on_hub(setting: str, location: str | None, deadline_s: float) -> dict[str, int] | None:
    """The files of a location on a hub, asked before Arrow is, which is patient with one that does not answer."""
    if location is None or not is_hub(location):
        return None
    return _look_at(setting, location, partial(files_on_hub, setting, location), deadline_s)


def _large_enough(config: PretrainConfig, num_rows: int | None, basis: str) -> Outlook:
    """Raises DataError where there are too few rows, by more than an estimate may err."""
    data, least = config.data, config.optim.global_batch_seqs
    if num_rows is not None and num_rows * (1 if basis == COUNTED else MARGIN) < least:
        what, setting = (data.recipe, "recipe") if data.source is None else (f"data.source={data.source}", "source")
        raise DataError(
            f"{what} has {_about(basis)}{num_rows:,} train rows of data.seq_len={data.seq_len} tokens ({basis}), fewer "
            f"than one global batch of optim.global_batch_seqs={least}; choose a larger data.{setting}, or lower "
            "optim.global_batch_seqs or data.seq_len"
        )
    return Outlook(num_rows, data.seq_len, config.train.steps, least, basis)


def _counted(config: PretrainConfig, folders: Mapping[str, str]) -> Outlook:
    """Of finished corpora, by name. Raises DataError where they do not fit each other, or the run."""
    from regrow.data.read.corpora import Corpora, check_corpora

    corpora = Corpora.of(folders, config.data)
    check_corpora(config, corpora)
    rows = sum(manifest.splits["train"].num_rows for manifest in corpora.manifests)
    return Outlook(rows, config.data.seq_len, config.train.steps, config.optim.global_batch_seqs, "")


def _begun(config: PretrainConfig, deadline_s: float) -> Outlook | None:
    """Of a run that goes on with the corpus that it has begun with, whatever became of the source."""
    from regrow.data.read.corpora import begun_with

    def look() -> Outlook | None:
        folder = begun_with(config)
        return _counted(config, {"": folder}) if folder is not None else None

    return _look_at("run.storage_path", config.run.storage_path, look, deadline_s)


def _prepared(config: PretrainConfig, recipe: Recipe) -> Outlook | None:
    """None where the corpus is not finished. Only looks: a preparation would tidy up after one that was killed."""
    from regrow.data.prepare.prepare import corpus_folder
    from regrow.data.read.manifest import MANIFEST

    folder = corpus_folder(config.data, config.run.storage_path, recipe)
    return _counted(config, {"": str(folder)}) if folder.exists(MANIFEST) else None


def _tokenizer(config: PretrainConfig) -> Any:
    """The tokenizer that was asked for. Raises DataError for one that does not fit the run."""
    from regrow.data.prepare.prepare import check_tokenizer, read_tokenizer
    from regrow.data.prepare.tokenizer import parse_tokenizer

    location = str(config.data.tokenizer)
    tokenizer = parse_tokenizer(read_tokenizer(location), f"data.tokenizer={location}")
    check_tokenizer(tokenizer, config.data)
    return tokenizer


def _estimate(
    config: PretrainConfig, recipe: Recipe, described: dict[str, Any], tokenizer: Any
) -> tuple[int | None, str]:
    """About how many training rows the source makes, None where nothing tells; and what that is estimated from."""
    data, pieces = config.data, [] if is_remote(config.data.source) else recipe.pieces(config.data)
    bytes_per_token = BYTES_PER_TOKEN if data.vocab_size > FEW_IDS else BYTES_PER_TOKEN_OF_FEW
    if data.source is not None and isinstance(described.get("files"), dict):
        num_bytes, basis = _text_bytes(data.source, described["files"])
    else:
        num_bytes, basis = float(sum(piece.num_bytes for piece in pieces)), BY_SIZES
        if num_bytes <= len(pieces):  # the recipe does not say
            return None, "its recipe does not tell its size"

    def rows(num_bytes: float, bytes_per_token: float) -> int:
        num_tokens = num_bytes / bytes_per_token * (1 - data.validation_fraction)
        return int(max(num_tokens - 1, 0) // data.seq_len)

    if not pieces:
        return rows(num_bytes, bytes_per_token), basis
    some = _evenly(pieces, MOST_PIECES)
    sample = _read(data, recipe, some, tokenizer, most_documents=SAMPLE_DOCUMENTS // len(some))
    least, bytes_per_token = config.optim.global_batch_seqs, sample.bytes_per_token or bytes_per_token
    about = rows(num_bytes * sample.kept, bytes_per_token)
    if about > CLOSE * least:
        return about, basis
    if num_bytes > READ_BYTES:
        if about * MARGIN < least <= rows(num_bytes, bytes_per_token) * MARGIN:  # sorted by what is filtered, perhaps
            return None, f"the filters keep {sample.kept:.1%} of a sample of its documents, too few to tell its size"
        return about, basis
    if tokenizer is not None:
        return _count(data, recipe, pieces, tokenizer), COUNTED
    whole = _read(data, recipe, pieces, None, most_documents=math.inf)
    return rows(whole.num_bytes, bytes_per_token), "estimated from its documents"


def _text_bytes(source: str, sizes: dict[str, int]) -> tuple[float, str]:
    """Bytes of text in files of these sizes: of parquet by the footers of some of them."""
    from regrow.data.prepare.files import SourceFiles, kind_of

    parquet = [name for name in sizes if kind_of(name) == "parquet"]
    plain = sum(
        size * (GZIP_RATIO if name.endswith(".gz") else 1) for name, size in sizes.items() if name not in parquet
    )
    if not parquet:
        return plain, BY_SIZES
    files = SourceFiles(source)
    footers = in_threads(partial(_in_footer, files), _evenly(parquet, MOST_FOOTERS))
    read = {name: text for name, text in footers if text is not None}
    if not read:
        raise DataError(f"data.source={source}: none of its .parquet files can be read and has a column `text`")
    ratio = sum(read.values()) / max(sum(sizes[name] for name in read), 1)
    return plain + ratio * sum(sizes[name] for name in parquet), "estimated from parquet footers"


def _evenly(items: Sequence[Item], most: int) -> list[Item]:
    """At most so many of them, evenly over all."""
    return [items[k] for k in sorted({k * len(items) // most for k in range(most)})]


def _in_footer(files: "SourceFiles", name: str) -> tuple[str, int | None]:
    """The uncompressed bytes of a parquet file's texts; None for a damaged one, or one without."""
    try:
        footer = files.parquet(name).metadata
    except DamagedPiece:
        return name, None
    columns = [
        group.column(k)
        for group in map(footer.row_group, range(footer.num_row_groups))
        for k in range(footer.num_columns)
    ]
    texts = [column.total_uncompressed_size for column in columns if column.path_in_schema == "text"]
    return name, sum(texts) if texts else None


def _count(data: DataConfig, recipe: Recipe, pieces: Sequence[Piece], tokenizer: Any) -> int:
    """The training rows that a preparation will make."""
    from regrow.data.prepare.spool import tokenized

    num_tokens = 1  # the end-of-text before the first document
    for piece in pieces:
        with contextlib.suppress(DamagedPiece):
            found = tokenized(piece, recipe, data, tokenizer, Counter())
            num_tokens += sum(len(ids) + 1 for _, _, split, ids in found if split == 0)
    return (num_tokens - 1) // data.seq_len


@dataclass(frozen=True)
class _Read:
    """What some documents tell."""

    num_bytes: int  # of text
    kept: float  # share of documents that the filters keep
    bytes_per_token: float | None  # where there is a tokenizer to ask


def _read(data: DataConfig, recipe: Recipe, pieces: Sequence[Piece], tokenizer: Any, *, most_documents: float) -> _Read:
    """At most so many of each piece."""
    texts: list[str] = []
    seen = num_bytes = 0
    for piece in pieces:
        try:
            for number, document in enumerate(recipe.documents(data, piece), 1):
                seen += 1
                if isinstance(document, Document):
                    texts.append(document.text)
                    num_bytes += len(document.text.encode())
                if number >= most_documents:
                    break
        except DamagedPiece:
            continue
    bytes_per_token = None
    if texts and tokenizer is not None:
        from regrow.data.prepare.tokenizer import encode

        sample = texts[:: -(-num_bytes // SAMPLE_BYTES)]
        found = [(text, ids) for text, ids in zip(sample, encode(tokenizer, sample), strict=True) if ids is not None]
        num_tokens = sum(len(ids) + 1 for _, ids in found)
        bytes_per_token = sum(len(text.encode()) for text, _ in found) / num_tokens if found else None
    return _Read(num_bytes, len(texts) / seen if seen else 1.0, bytes_per_token)


def _look_at(setting: str, location: str | None, look: Callable[[], Result], deadline_s: float) -> Result:
    """What `look` returns. A place that cannot be read, or outside this machine is not in time, is an UnseenError."""
    try:
        return within(deadline_s, look) if is_remote(location) else look()
    except StorageError as error:
        raise UnseenError(f"{setting}: {error}") from error
    except TimeoutError as error:
        raise UnseenError(
            f"{setting}={location} did not answer within {deadline_s:g} s; check the network and the credentials of "
            "this machine, or name a copy that it can reach"
        ) from error
    except OSError as error:
        raise UnseenError(
            f"{setting}={location} cannot be read ({first_line(error)}); give this machine the right to read it, or "
            "name a copy that it can read"
        ) from error


def is_hub(location: str | None) -> bool:
    return location is not None and location.startswith("hf://")


def files_on_hub(setting: str, location: str) -> dict[str, int]:
    """Bytes of each file that a file, a folder or a glob on the hub names, by path; `setting` is whose value it is.

    Raises UnseenError where the hub does not answer, DataError where it has nothing there.
    """
    from huggingface_hub import HfFileSystem, constants

    endpoint, path = constants.ENDPOINT, location.removeprefix("hf://")
    hub = HfFileSystem()  # as Arrow makes its own: what this one lists, that one need not ask for again
    found: Any  # by path
    try:
        found = hub.find(searched(path), detail=True)
    except FileNotFoundError as error:
        raise DataError(
            f"{setting}={location} is not on the hub at {endpoint}, or not public (HF_TOKEN): {first_line(error)}"
        ) from error
    except (ValueError, NotImplementedError) as error:  # a location that names no repository
        raise DataError(f"{setting}={location} is no location on a hub: {first_line(error)}") from error
    except Exception as error:  # HTTP clients have classes of their own
        raise UnseenError(
            f"{setting}={location}: the hub at {endpoint} cannot be reached ({first_line(error)}); set HF_ENDPOINT to "
            f"a mirror or HTTPS_PROXY to a proxy, or {setting} to a copy that this machine can reach"
        ) from error
    is_named = named_by(path)
    files = {name: int(info["size"]) for name, info in found.items() if info["type"] == "file" and is_named(name)}
    if not files:
        raise DataError(f"{setting}={location}: the hub at {endpoint} has no file there")
    return files
