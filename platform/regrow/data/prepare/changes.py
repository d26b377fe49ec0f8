"""Is a source still what it was when its corpus was given a name?

A recipe's description says so, with the sizes of files under `files`. What is appended to a file that is read to where
it ended, as to a log of JSON lines, is none of the corpus, nor are files that come.
"""

import contextlib
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from regrow.config.schema import DataConfig
from regrow.data.prepare.assemble import PLAN_FILE
from regrow.data.prepare.documents import Piece, source_changed
from regrow.data.prepare.files import SourceFiles
from regrow.record.lock import take_lock
from regrow.storage import Storage, is_remote

SOURCE_FILE = "source.json"  # beside the plan: where the source is, which a corpus' name does not depend on
TAIL_BYTES = 1024  # that tell a file which was appended to from one that was written anew


def check_unchanged(config: DataConfig, before: dict[str, Any], after: dict[str, Any]) -> None:
    """Raises SourceChanged, with the name of a file, where a source is described differently than before."""
    had, has = _sizes(before), _sizes(after)
    for name in sorted(had.keys() | has.keys()):
        if name not in had or name not in has:
            raise source_changed(config.source, f"{name} {'came' if name in has else 'is gone'}")
        if had[name] != has[name]:
            raise source_changed(config.source, f"{name} has {has[name]:,} bytes, and had {had[name]:,}")
    if {**before, "files": had or before.get("files")} != {**after, "files": had or after.get("files")}:
        raise source_changed(config.source, "its recipe describes another one")


def tails(config: DataConfig, described: dict[str, Any], pieces: Iterable[Piece]) -> dict[str, bytes]:
    """The last bytes of those local files that these pieces read to where they end now, by name."""
    ends: dict[str, float] = {}
    for piece in pieces:
        ends[piece.file] = max(ends.get(piece.file, 0), math.inf if piece.stop is None else piece.stop)
    if config.source is None or is_remote(config.source):  # where nothing is appended to
        return {}
    files, found = SourceFiles(config.source), {}
    for name, size in _sizes(described).items():
        if ends.get(name) == size:
            with contextlib.suppress(FileNotFoundError):  # a recipe may have names of its own
                found[name] = _tail(files, name, size)
    return found


def as_read(
    config: DataConfig, before: dict[str, Any], after: dict[str, Any], tails_before: Mapping[str, bytes]
) -> dict[str, Any]:
    """The description `after` pieces were read without what came meanwhile and is in none of them."""
    had, has = _sizes(before), _sizes(after)
    if not had:
        return after
    files = SourceFiles(str(config.source))
    for name, tail in tails_before.items():
        if has.get(name, 0) > had[name] and _tail(files, name, had[name]) == tail:
            has = {**has, name: had[name]}
    return {**after, "files": {name: size for name, size in has.items() if name in had}}


def left_of_shorter_sources(place: Storage, fixed: dict[str, Any], source: str | None) -> list[Path]:
    """What killed preparations have left beside a corpus' local place that none goes on with: by the same settings, as
    `fixed`, and of its `source`, an absolute one, before that grew. Not what another process is at."""
    found = []
    for plan in sorted(place.local_path.parent.glob(f".*.building/{PLAN_FILE}")) if place.is_local else ():
        with contextlib.suppress(OSError, ValueError, KeyError):  # it is gone meanwhile, or an older version's
            before, of = json.loads(plan.read_bytes()), json.loads(plan.with_name(SOURCE_FILE).read_bytes())
            if of == source and _has_grown({key: before[key] for key in fixed}, fixed):
                with open(plan.parent.with_suffix(".lock"), "a+") as file:
                    if take_lock(file):
                        found.append(plan.parent)
    return found


def _has_grown(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Whether nothing but sizes and further files tells two preparations apart."""
    had, has = _sizes(before["source"]), _sizes(after["source"])
    alike = [{**each, "source": {**each["source"], "files": None}} for each in (before, after)]
    is_longer = had != has and all(has.get(name, -1) >= size for name, size in had.items())
    return bool(had) and is_longer and alike[0] == alike[1]


def _tail(files: SourceFiles, name: str, end: int) -> bytes:
    return files.read(name, max(end - TAIL_BYTES, 0), end)


def _sizes(described: dict[str, Any]) -> dict[str, int]:
    files = described.get("files")
    return files if isinstance(files, dict) and all(isinstance(size, int) for size in files.values()) else {}
