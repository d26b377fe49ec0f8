"""Which files a source names: what both Arrow and a hub's own client list, so without either."""

import fnmatch
import glob
from collections.abc import Callable


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
