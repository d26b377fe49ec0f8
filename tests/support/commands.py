"""Programs of jobs/ called in this process: what one prints and how it ends, where its start is not what is tested."""

import contextlib
import io
import os
import runpy
import subprocess
import sys
import traceback
import warnings
from collections.abc import Mapping
from unittest import mock


def call(job: str, *arguments: object, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """As `python -m jobs.JOB ARGUMENTS` with `env` added to the environment, but for a quarter of a second and more."""
    command = [f"jobs.{job}", *map(str, arguments)]
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", command),
        mock.patch.dict(os.environ, env or {}),
        mock.patch.object(os, "_exit", sys.exit),  # a program ends so beside a call that it left behind, as tests do
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        status = _run(command[0])
    return subprocess.CompletedProcess(command, status, out.getvalue(), err.getvalue())


def _run(module: str) -> int:
    """How the interpreter would end, after what it would print."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "'jobs.* found in sys.modules", RuntimeWarning)  # other tests import it
            runpy.run_module(module, run_name="__main__")
    except SystemExit as ending:
        if isinstance(ending.code, int) or ending.code is None:
            return ending.code or 0
        print(ending.code, file=sys.stderr)
        return 1
    except Exception:
        traceback.print_exc()
        return 1
    finally:
        _end()
    return 0


def _end() -> None:
    """What would end with the process: torch's default group, which a rank leaves as it is after an error."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_initialized():
        dist.destroy_process_group()
