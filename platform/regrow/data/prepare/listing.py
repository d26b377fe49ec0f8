"""Which files a source names: what both Arrow and a hub's own client list, so without either."""

import fnmatch
import glob
import os
from collections.abc import Callable, Iterator


def searched(path: str) -> str:
    """The folder that a glob is looked for in, before its first `*`; any other path as it is. Pure.

    >>> searched("web/sample/1*"), searched("web/sample")
    ('web/sample', 'web/sample')
    """
    head = path.partition("*")[0]
    return head if head == path else head.rpartition("/")[0]


def named_by(path: str) -> Callable[[str], bool]:
    """Whether a file in the folder `searched` is one that the path names: for a glob, whose `*` stops at nothing. Pure.

    >>> list(map(named_by("web/[v1]/*.txt"), ["web/[v1]/a.txt", "web/[v1]/deeper/b.txt", "web/[v1]/c.md"]))
    [True, True, False]
    """
    folder = searched(path)
    if folder == path:
        return lambda file: True
    pattern = glob.escape(folder) + path[len(folder) :]  # nothing else is special in the name of a folder
    return lambda file: fnmatch.fnmatch(file, pattern)


def local_files(folder: str, *, by_each_path: bool) -> Iterator[tuple[str, str | None]]:
    """The files below a local folder, linked folders too, each with where it really is; None for a link to nothing.

    A folder that several paths lead to is searched by the first of them; or by each of them, though never within
    itself. Raises OSError for one that cannot be read.
    """
    left = [(folder, os.path.realpath(folder), set[str]())]
    while left:
        path, real, seen = left.pop()
        if real in seen:
            continue
        seen.add(real)
        below: list[tuple[str, str, set[str]]] = []
        with os.scandir(path) as entries:
            for entry in entries:
                place = os.path.join(real, entry.name)
                if entry.is_symlink():
                    place = os.path.realpath(place)
                    if not os.path.exists(place):
                        yield entry.path, None
                        continue
                if entry.is_dir():
                    below.append((entry.path, place, set(seen) if by_each_path else seen))
                elif entry.is_file():
                    yield entry.path, place
        left += sorted(below, key=lambda each: each[0] + "/", reverse=True)
