"""Run commands as a user without rights, where a test has them all."""

import os
import shutil
import sys
from functools import cache
from pathlib import Path

from support.cluster import ROOT

NOBODY = 65534
# $1: a folder that nobody else may enter, $2: one below it that is to be seen all the same, $3: an empty folder.
# In a mount namespace of its own: nothing changes for anybody else.
_SHOW = """
set -e
mount --bind "$1" "$3"
mount -t tmpfs -o mode=755 none "$1"
mkdir -p "$2"
mount --bind "$3/${2#"$1"/}" "$2"
shift 3
exec "$@"
"""


@cache
def why_not() -> str:
    """Why commands cannot be run as nobody here; empty where they can, or where we are nobody much ourselves."""
    if os.geteuid() != 0:
        return ""
    missing = [each for each in ("setpriv", "unshare", "mount") if shutil.which(each) is None]
    if missing:
        return f"{missing[0]} is not installed"
    for needed in (ROOT, Path(sys.prefix)):
        if _closed(needed) is not None:
            return f"{_closed(needed)} is closed to other users"
    return ""


def unprivileged(command: list[str], empty: Path) -> list[str]:
    """A command line that runs `command` as nobody; as it is where we are not root. `empty` is a folder for mounts."""
    if os.geteuid() != 0:
        return command
    command = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--no-new-privs", *command]
    python = Path(sys.base_prefix).resolve()
    closed = _closed(python)
    if closed is None:
        return command
    return ["unshare", "--mount", "sh", "-c", _SHOW, "sh", str(closed), str(python), str(empty), *command]


def _closed(path: Path) -> Path | None:
    """The topmost folder on the way to `path` that others may not enter."""
    for folder in [*reversed(path.parents), path]:
        if not folder.stat().st_mode & 0o001:
            return folder
    return None
