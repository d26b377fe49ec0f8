"""The process of one check: `python -m regrow.accept.child MODULE:FUNCTION REPORT ERROR`. Ends with its parent.

Whatever the check raises is written to the file ERROR: one line of what, and whether the check itself is to blame.
"""

import ctypes
import importlib
import json
import operator
import os
import signal
import sys
import traceback
from pathlib import Path

from regrow.accept.claims import NotTested, Report
from regrow.accept.stand_ins import provide

PR_SET_PDEATHSIG = 1
# what a device, a driver or the network does wrong is raised as RuntimeError or OSError; these are ours
OURS = (AssertionError, AttributeError, LookupError, NameError, TypeError)


def die_with_parent() -> None:
    """Be killed when the process that started this one ends, however it does."""
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended meanwhile
        os._exit(1)


def main(function: str, report: str, error_file: str) -> None:
    die_with_parent()
    provide()
    module, _, name = function.partition(":")
    error: dict[str, object]
    try:
        operator.attrgetter(name)(importlib.import_module(module))(Report(Path(report)))
        return
    except NotTested as why:
        error = {"kind": "not_tested", "text": str(why)}
    except ModuleNotFoundError as missing:
        error = {"kind": "not_tested", "text": f"needs the package {missing.name}, which is not installed"}
    except BaseException as raised:
        traceback.print_exc()
        text = next((line.strip() for line in str(raised).splitlines() if line.strip()), "")
        kind = "broke" if isinstance(raised, OURS) else "failed"
        error = {"kind": kind, "text": f"{type(raised).__name__}: {text}"[:300]}
    Path(error_file).write_text(json.dumps(error))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)  # nothing of a broken device is waited for


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # neither
