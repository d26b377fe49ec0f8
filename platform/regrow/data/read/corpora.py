"""The prepared corpora that a run trains on: the one that its recipe makes, or several that it mixes."""

import contextlib
import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regrow.config.schema import DataConfig, PretrainConfig
from regrow.data.prepare.documents import load_recipe
from regrow.data.prepare.files import filters_of
from regrow.data.prepare.prepare import (
    CONTENT_KEYS,
    PREPARED,
    Distribute,
    Progress,
    find_or_prepare,
    read_tokenizer,
)
from regrow.data.read.batch import Rows, layout_of
from regrow.data.read.manifest import Manifest, by_another_version
from regrow.data.read.range_cache import RangeCache
from regrow.data.read.shards import ShardReader
from regrow.deadline import within
from regrow.errors import DataError, RegrowError, UnavailableError
from regrow.plan.mixture import Mixture, plan_mixture
from regrow.plan.order import ORDER_VERSION, CorpusOrder, Order
from regrow.record.run_folder import read_config, read_record, run_folder
from regrow.storage import Storage, is_remote, path_of, split_location

MADE_BY = ("recipe", "source", "tokenizer", "end_of_text", *CONTENT_KEYS)  # settings of a corpus that a recipe makes
ELSEWHERE_S = 4.0  # for the place where a run was before: less than a look before a cluster is joined may take
RETRY_S = 1.0  # that a store is asked again for, while its node's other ranks wait: what is patient looks about between


@dataclass(frozen=True)
class Corpora:
    """Where they lie, in the order in which their rows are numbered. Travels to every process of a run."""

    names: tuple[str, ...]
    folders: tuple[str, ...]  # paths or URIs
    cache_folder: str  # on each node, for those in object stores; empty: in that node's own temporary folder
    cache_bytes: int

    @staticmethod
    def at(folder: Path | str, config: DataConfig | None = None) -> "Corpora":
        """One corpus alone."""
        return Corpora.of({"": str(folder)}, config or DataConfig())

    @staticmethod
    def of(folders: Mapping[str, str], config: DataConfig) -> "Corpora":
        """Corpora by name."""
        places = tuple(str(Storage.at(folder)) for folder in folders.values())  # workers have another working directory
        return Corpora(tuple(folders), places, config.cache_dir or "", int(config.cache_gb * 1e9))

    def to_plain(self) -> list[Any]:
        """What JSON can hold."""
        return [list(self.names), list(self.folders), self.cache_folder, self.cache_bytes]

    @staticmethod
    def of_plain(plain: Sequence[Any]) -> "Corpora":
        """What `to_plain` gave."""
        names, folders, *cache = plain
        return Corpora(tuple(names), tuple(folders), *cache)

    @cached_property
    def manifests(self) -> tuple[Manifest, ...]:
        return tuple(Manifest.load(folder) for folder in self.folders)

    @property
    def sha256(self) -> str:
        """Identifies their content, wherever they lie."""
        if len(self.manifests) == 1:
            return self.manifests[0].sha256
        content = [[name, manifest.sha256] for name, manifest in zip(self.names, self.manifests, strict=True)]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    @property
    def eot_id(self) -> int:
        return self.manifests[0].tokenizer.eot_id

    def left_out(self) -> list[str]:
        """A sentence for each corpus of which not all of its source could be read."""
        found = []
        for name, folder, manifest in zip(self.names, self.folders, self.manifests, strict=True):
            for piece, why in itertools.islice(manifest.damaged.items(), 1):
                found.append(
                    f"{name or manifest.recipe}: {len(manifest.damaged):,} pieces of its source could not be read and "
                    f"are left out, the first: {piece}: {why}; python -m jobs.inspect_data {folder} names them"
                )
        return found

    def reader(self, split: str, *, retry_s: float | None = RETRY_S) -> "CorporaReader":
        """A reader of the rows of all corpora; what is not patient itself gives `retry_s` as `ShardReader` has it.

        Raises DataError where one of them is not there.
        """
        cache_folder = path_of(self.cache_folder) if self.cache_folder else RangeCache.default_folder()
        cache = RangeCache(cache_folder, self.cache_bytes)
        return CorporaReader(
            [
                ShardReader(folder, split, None if Storage.at(folder).is_local else cache, manifest, retry_s)
                for folder, manifest in zip(self.folders, self.manifests, strict=True)
            ]
        )


class CorporaReader:
    """Rows of one split of some corpora, numbered through, one corpus after another. Threads may share one."""

    def __init__(self, readers: Sequence[ShardReader]) -> None:
        self.readers = readers
        self._starts = np.cumsum([0, *(reader.num_rows for reader in readers)])
        self.num_rows = int(self._starts[-1])

    def read(self, row_ids: NDArray[np.int64]) -> Rows:
        """Rows, uint32[n, seq_len + 1], in the order asked. Raises DataError as `ShardReader.read` does."""
        if len(self.readers) == 1:
            return self.readers[0].read(row_ids)
        corpus, rows = self.place(row_ids)
        out = np.empty((len(rows), self.readers[0].row_tokens), np.uint32)
        for k in np.unique(corpus):
            out[corpus == k] = self.readers[k].read(rows[corpus == k])
        return out

    def place(self, row_ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The corpus that each row is of, and its number there."""
        corpus = np.searchsorted(self._starts, row_ids, side="right") - 1
        return corpus, row_ids - self._starts[corpus]

    def first_rows(self, num_rows: int) -> NDArray[np.int64]:
        """At most so many rows: the first ones of every corpus, of each as many where it has them."""
        turns = itertools.zip_longest(
            *(range(a, min(b, a + num_rows)) for a, b in itertools.pairwise(self._starts.tolist()))
        )
        rows = [row for turn in turns for row in turn if row is not None]
        return np.array(rows[:num_rows], np.int64)


def find_corpora(config: PretrainConfig, *, progress: Progress, distribute: Distribute = map) -> Corpora:
    """The corpora of a run; prepared now, if it names none that are, and has begun with none.

    Raises DataError for those that do not fit each other, or the run.
    """
    if config.data.corpora:
        corpora = Corpora.of(config.data.corpora, config.data)
    elif (begun := begun_with(config)) is not None:
        corpora = Corpora.at(begun, config.data)
    else:
        folder, _ = find_or_prepare(config.data, config.run.storage_path, progress=progress, distribute=distribute)
        corpora = Corpora.at(str(folder), config.data)
    check_corpora(config, corpora)
    return corpora


def begun_with(config: PretrainConfig) -> str | None:
    """The folder of the corpus that a run has begun with, and that its recipe made: its source may have grown since, or
    be gone. It is looked for below run.storage_path, and where the run was when its config.yaml was written. None for a
    run that has not begun, or by other settings, and where that corpus is not there. Where there is no config.yaml, the
    corpus' own manifest tells what settings it was made by.

    Raises RegrowError for a damaged record, and where run.storage_path does not answer, or OSError.
    """
    run, data = run_folder(config), config.data
    record = read_record(run)
    if data.corpora or record is None or record["manifest_sha256"] is None:
        return None
    written = read_config(run)
    before = written.get("data") or {}
    # an imported run has no config.yaml before its first job, and its record says less
    known = [(key, before.get(key, ...)) for key in MADE_BY] if written else _data_of(record["identity"])
    if any(value != getattr(data, key) for key, value in known):
        return None
    look = partial(_prepared_as, data.recipe, record["manifest_sha256"])
    here, there = config.run.storage_path, (written.get("run") or {}).get("storage_path")
    found = look(here)
    if found is None and there not in (None, here):
        with contextlib.suppress(RegrowError, OSError):  # out of reach from here, perhaps for good
            found = within(ELSEWHERE_S, partial(look, there))
    if found is not None and not written and not _may_make(data, Manifest.load(found)):
        return None
    return found


def _data_of(identity: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Those settings in a run's record that say how its recipe makes a corpus."""
    return [(key, identity[f"data.{key}"]) for key in MADE_BY if f"data.{key}" in identity]


def _may_make(data: DataConfig, manifest: Manifest) -> bool:
    """Whether these settings may have made a corpus, as far as its manifest tells, which does not say where its source
    is: of a local one some file's name is the same. What is gone, or out of reach, is not compared."""
    described: dict[str, Any] = {}
    if not is_remote(data.source):  # which may take minutes
        with contextlib.suppress(DataError, OSError):
            described = load_recipe(data.recipe).describe(data)
    had, has = manifest.source.get("files"), described.get("files")
    is_elsewhere = isinstance(had, dict) and isinstance(has, dict) and had.keys().isdisjoint(has)
    is_filtered_so = list(manifest.filters) == list(described.get("filters", ()) if described else filters_of(data))
    if is_elsewhere or not is_filtered_so or manifest.rows_per_shard != data.rows_per_shard:
        return False
    if data.tokenizer is not None:
        with contextlib.suppress(RegrowError, OSError):
            tokenizer = within(ELSEWHERE_S, partial(read_tokenizer, data.tokenizer))
            return hashlib.sha256(tokenizer).hexdigest() == manifest.tokenizer.sha256
    return True


def _prepared_as(recipe: str, manifest_sha256: str, storage_path: str) -> str | None:
    """The folder of this corpus of a recipe below a run.storage_path. Raises UnavailableError, and OSError of it."""
    for folder in prepared_in(storage_path):
        if split_location(folder)[1].startswith(f"{recipe}-"):
            try:
                if Manifest.load(folder).sha256 == manifest_sha256:
                    return folder
            except UnavailableError:
                raise
            except DataError:
                continue  # an unfinished one
    return None


def prepared_in(storage_path: str) -> Iterator[str]:
    """The folders of corpora below a run.storage_path. Raises OSError of storage."""
    folder = Storage.at(storage_path) / PREPARED
    yield from (str(folder / name) for name in folder.list() if name[0] != ".")


def order_of(config: PretrainConfig, corpora: Corpora) -> Order:
    """The order of a run over the training rows. Raises DataError if they cannot fill one global batch."""
    rows = [manifest.splits["train"].num_rows for manifest in corpora.manifests]
    least = config.optim.global_batch_seqs
    if sum(rows) < least:
        raise DataError(
            f"{corpora.manifests[0].recipe} has {sum(rows)} train rows of {config.data.seq_len} tokens, fewer than one "
            f"global batch of optim.global_batch_seqs={least}; lower it to at most {sum(rows)}, "
            "lower data.seq_len, or choose a larger data.recipe"
        )
    shapes = [CorpusOrder(n, m.rows_per_group) for n, m in zip(rows, corpora.manifests, strict=True)]
    return Order(tuple(shapes), mixture_of(config, corpora), layout_of(config).window_rows, config.run.seed)


def mixture_of(config: PretrainConfig, corpora: Corpora) -> Mixture:
    """The mixture of a run; where it says nothing, each corpus by its number of rows. Raises ConfigError."""
    if len(corpora.names) == 1 and not config.data.mixture:
        return Mixture.of_one()
    sizes = {name: float(m.splits["train"].num_rows) for name, m in zip(corpora.names, corpora.manifests, strict=True)}
    stages = [(stage.from_tokens, stage.weights) for stage in config.data.mixture] or [(0, sizes)]
    return plan_mixture(stages, corpora.names, seq_len=config.data.seq_len)


def check_corpora(config: PretrainConfig, corpora: Corpora) -> None:
    """Raises DataError for corpora that do not fit each other, or the run, whose batch they must fill."""
    first = corpora.manifests[0]
    for folder, manifest in zip(corpora.folders, corpora.manifests, strict=True):
        if manifest.order_version != ORDER_VERSION:
            raise DataError(f"{folder} {by_another_version('order version', manifest.order_version, ORDER_VERSION)}")
        if manifest.seq_len != config.data.seq_len:
            raise DataError(
                f"{folder} has rows of {manifest.seq_len} tokens; set data.seq_len={manifest.seq_len}, "
                f"or prepare it again with data.seq_len={config.data.seq_len}"
            )
        if manifest.tokenizer.vocab_size > config.model.vocab_size:
            raise DataError(
                f"{folder} has token ids up to {manifest.tokenizer.vocab_size}, model.vocab_size="
                f"{config.model.vocab_size} is fewer; raise it"
            )
        if manifest.tokenizer.sha256 != first.tokenizer.sha256:
            raise DataError(
                f"{folder} and {corpora.folders[0]} were prepared with different tokenizers; "
                "prepare one of them again with data.tokenizer of the other"
            )
        if manifest.tokenizer.eot_id != first.tokenizer.eot_id:
            raise DataError(
                f"documents of {folder} end with token {manifest.tokenizer.eot_id}, those of {corpora.folders[0]} with "
                f"{first.tokenizer.eot_id}; prepare one of them again with data.end_of_text of the other"
            )
    order_of(config, corpora)  # raises where they cannot fill a batch; once the run is open, that is fixed
