"""Spooled pieces -> token shards. Which tokens a shard holds is arithmetic, so any task can make any shard alone.

A split is one stream of tokens: an end-of-text, then every document and an end-of-text behind it, group after group of
pieces, bucket after bucket, in the order of the documents' keys. Rows of `seq_len + 1` tokens overlap by one; what is
left of the stream behind the last row is dropped and counted.

A corpus is built in a folder beside its place, which is renamed; in an object store, in the place itself, which has
neither rename nor lock. There the manifest, which is written last, is what makes a corpus, and two jobs may build the
same one at a time: what they write is the same, each file whole or not at all.
"""

import json
import os
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from regrow.data.prepare.spool import Spool, Spooled
from regrow.data.read.manifest import MANIFEST, SPLITS, Manifest, Shard
from regrow.data.read.shards import index_name, write_index, write_shard
from regrow.errors import DataError
from regrow.progress import Progress, Task
from regrow.record.lock import take_lock
from regrow.record.log import NO_LOCKS
from regrow.storage import Storage, in_threads, make_folder

PLAN_FILE = "plan.json"  # says of what the files beside it are the beginnings; gone once the corpus is finished
LOOK_S = 1.0  # between two tries to have a lock that another preparation holds
Section = tuple[int, int, int, int]  # first token of it in the stream, its tokens, group, bucket


@dataclass(frozen=True)
class Layout:
    """The token stream of every split, laid out over the buckets of the groups of pieces."""

    groups: tuple[tuple[int, ...], ...]  # pieces that are shuffled with each other
    sections: tuple[tuple[Section, ...], ...]  # of each split, in the order of the stream; empty ones left out
    num_tokens: tuple[int, ...]  # of each split, the leading end-of-text included
    seq_len: int
    rows_per_group: int
    rows_per_shard: int
    eot_id: int

    def num_rows(self, split: int) -> int:
        return (self.num_tokens[split] - 1) // self.seq_len

    def num_shards(self, split: int) -> int:
        return -(-self.num_rows(split) // self.rows_per_shard)


def lay_out(
    groups: Sequence[Sequence[int]],
    spooled: Sequence[Spooled],
    *,
    seq_len: int,
    rows_per_group: int,
    rows_per_shard: int,
    eot_id: int,
) -> Layout:
    """Add up what the pieces hold."""
    sections, totals = [], []
    for split in range(len(SPLITS)):
        mine: list[Section] = []
        position = 1
        for number, group in enumerate(groups):
            counts = np.array([spooled[piece].num_tokens[split] for piece in group]).sum(axis=0)
            for bucket, count in enumerate(counts.tolist()):
                if count:
                    mine.append((position, count, number, bucket))
                    position += count
        sections.append(tuple(mine))
        totals.append(position)
    return Layout(
        tuple(map(tuple, groups)), tuple(sections), tuple(totals), seq_len, rows_per_group, rows_per_shard, eot_id
    )


def assemble_shard(layout: Layout, spool: Spool, folder: Storage, split: int, number: int) -> Shard:
    """Write one shard and its document index. The same bytes however often it is done; done once there is a record."""
    first_row = number * layout.rows_per_shard
    num_rows = min(layout.rows_per_shard, layout.num_rows(split) - first_row)
    begin = first_row * layout.seq_len
    end = begin + num_rows * layout.seq_len + 1
    stream = np.full(end - begin, layout.eot_id, np.uint32)  # token 0 of the stream is an end-of-text
    begins: list[NDArray[np.int64]] = []  # of the documents that the targets are of: tokens begin + 1 to end - 1
    ids: list[pa.StringArray] = []
    for position, count, group, bucket in layout.sections[split]:
        a, b = max(position, begin), min(position + count, end)
        if a < b:
            part = spool.read_bucket(layout.groups[group], split, bucket)
            found = len(part.tokens)
            assert found == count, f"bucket {bucket} of group {group}: {found} tokens instead of {count}"
            stream[a - begin : b - begin] = part.tokens[a - position : b - position]
            starts = position + part.begins
            here = (starts < end) & (np.append(starts[1:], position + count) > begin + 1)
            begins.append(starts[here])
            ids.append(part.ids.filter(pa.array(here)))
    rows = np.lib.stride_tricks.sliding_window_view(stream, layout.seq_len + 1)[:: layout.seq_len]
    name = shard_name(split, number)
    documents_sha256 = write_index(folder, name, np.concatenate(begins), pa.concat_arrays(ids))
    shard = write_shard(folder, name, rows, rows_per_group=layout.rows_per_group, documents_sha256=documents_sha256)
    folder.write_bytes(record_name(split, number), json.dumps(asdict(shard)).encode())
    return shard


def finished_shards(folder: Storage, names: Sequence[tuple[int, int]]) -> dict[tuple[int, int], Shard]:
    """Those of the shards, by split and number, that an earlier attempt finished."""
    there = set(folder.list())

    def load(name: tuple[int, int]) -> Shard | None:
        shard = Shard(**json.loads(folder.read_bytes(record_name(*name))))
        last = folder.read_range(shard.file, shard.num_bytes - 1, 2) if shard.file in there else b""
        return shard if len(last) == 1 else None  # neither cut short nor another one

    recorded = [name for name in names if record_name(*name) in there]
    found = zip(recorded, in_threads(load, recorded), strict=True)
    return {name: shard for name, shard in found if shard is not None}


def shard_name(split: int, number: int) -> str:
    return f"{SPLITS[split]}-{number:05d}.parquet"


def record_name(split: int, number: int) -> str:
    return f"{SPLITS[split]}-{number:05d}.record"


@contextmanager
def building_site(place: Storage, progress: Progress) -> Iterator[Storage | None]:
    """The folder to build a corpus in, which is at `place` afterwards; None where a finished one stands there.

    On a file system with locks one process at a time builds, others wait for it and say so. Raises StorageError for a
    local place that cannot be written to.
    """
    if place.is_local:
        with _local_site(place.local_path, progress) as site:
            yield site
        return
    try:
        yield None if place.exists(MANIFEST) else place
    except DataError:
        if not place.exists(MANIFEST):
            raise  # else another job has finished it, and tidied away what this one was working on
    if place.exists(PLAN_FILE):
        _tidy(place)


@contextmanager
def _local_site(folder: Path, progress: Progress) -> Iterator[Storage | None]:
    make_folder(folder.parent, "run.storage_path")
    building = folder.with_name(f".{folder.name}.building")
    with _lock(folder, progress):
        if (folder / MANIFEST).is_file():
            yield None
            return
        try:
            yield Storage.at(building)
            _tidy(Storage.at(building))
            _sync(building)
            if folder.exists() and not (folder / MANIFEST).is_file():
                shutil.rmtree(folder)  # left by something that did not finish
            building.rename(folder)
        except (DataError, OSError):
            if not (folder / MANIFEST).is_file():
                raise  # else another job was first, where no lock keeps it out
            shutil.rmtree(building, ignore_errors=True)
        _sync(folder.parent, files=False)


def _tidy(folder: Storage) -> None:
    """Leave what the manifest names; the plan goes last, for it tells whose leftovers the others are."""
    manifest = Manifest.load(str(folder))
    shards = [shard.file for split in manifest.splits.values() for shard in split.shards]
    stays = {MANIFEST, PLAN_FILE, manifest.tokenizer.file, *shards, *map(index_name, shards)}
    in_threads(folder.delete, [name for name in folder.list() if name not in stays])
    folder.delete(PLAN_FILE)


@contextmanager
def _lock(folder: Path, progress: Progress) -> Iterator[None]:
    """Hold the lock that guards what stands at `folder`; the kernel lets go of it with the process. None is held on a
    file system without locks: there, as in an object store, two jobs may build the same corpus at a time.

    A preparation may take hours, and another one is waited for as long. The file is opened anew at each look: one that
    a host which is gone has left locked at a file server may be deleted meanwhile.
    """
    path, waiting = folder.with_name(f".{folder.name}.lock"), None
    while True:
        with open(path, "a+") as file:
            try:
                is_mine = take_lock(file)
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
                is_mine = True
            if is_mine:
                if waiting is not None:
                    progress(waiting, 1, 1)
                yield
                return
            file.seek(0)
            waiting = _waiting(path, file.read())
            progress(waiting, 0, 1)
        time.sleep(LOOK_S)


def _waiting(path: Path, holder: str) -> Task:
    """For a preparation that holds the lock at `path`, and has written there which process it is."""
    text = f"waiting for another preparation{f' ({holder})' if holder else ''}, which holds {path}"
    is_here = holder.endswith(f" on {socket.gethostname()}")
    return Task(text if is_here else f"{text}; where its host is gone for good, delete that file")


def _sync(folder: Path, *, files: bool = True) -> None:
    for path in [*(folder.iterdir() if files else ()), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
