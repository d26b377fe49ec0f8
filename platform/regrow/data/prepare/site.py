"""Where a corpus is built: in a folder beside its place, which is renamed; in an object store, in the place itself.

An object store has neither rename nor lock. There the manifest, which is written last, is what makes a corpus, and two
jobs may build the same one at a time: what they write is the same, each file whole or not at all.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from regrow.data.read.document_index import index_name
from regrow.data.read.manifest import MANIFEST, Manifest
from regrow.errors import DataError
from regrow.storage import Storage

PLAN_FILE = "plan.json"  # says of what the files beside it are the beginnings; gone once the corpus is finished


@contextmanager
def building_site(place: Storage) -> Iterator[Storage | None]:
    """The folder to build a corpus in, which is at `place` afterwards; None where a finished one stands there.

    On a file system one process at a time builds, others wait for it.
    """
    if place.is_local:
        with _local_site(place.local_path) as site:
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
def _local_site(folder: Path) -> Iterator[Storage | None]:
    folder.parent.mkdir(parents=True, exist_ok=True)
    building = folder.with_name(f".{folder.name}.building")
    with _lock(folder):
        if (folder / MANIFEST).is_file():
            yield None
            return
        yield Storage.at(building)
        _tidy(Storage.at(building))
        _sync(building)
        if folder.exists():
            shutil.rmtree(folder)  # left by something that did not finish
        building.rename(folder)
        _sync(folder.parent, files=False)


def _tidy(folder: Storage) -> None:
    """Leave what the manifest names; the plan goes last, for it tells whose leftovers the others are."""
    manifest = Manifest.load(str(folder))
    shards = [shard.file for split in manifest.splits.values() for shard in split.shards]
    stays = {MANIFEST, PLAN_FILE, manifest.tokenizer.file, *shards, *map(index_name, shards)}
    for name in folder.list():
        if name not in stays:
            folder.delete(name)
    folder.delete(PLAN_FILE)


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
