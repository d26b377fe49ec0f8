"""A worker that fails by itself, once, as one that runs out of memory."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

FAILS_ONCE = """
import importlib.abc, importlib.util, os, pathlib, sys

class Hook(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "regrow.train.step":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module
        def exec_module(module):
            load(module)
            accumulate, victim = module.TrainStep.accumulate, pathlib.Path(__file__).parent / "victim"
            def fail_once(self, *arguments):
                if victim.exists() and victim.read_text() == str(os.getpid()):
                    victim.unlink()
                    raise module.torch.OutOfMemoryError("of this rank alone, says its test")
                return accumulate(self, *arguments)
            module.TrainStep.accumulate = fail_once
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Hook())
"""


def can_fail_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Make processes that start from here on fail in their next forward pass when their pid is given to the result."""
    (folder / "sitecustomize.py").write_text(FAILS_ONCE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]))

    def fail(pid: int) -> None:
        (folder / "victim.new").write_text(str(pid))
        (folder / "victim.new").rename(folder / "victim")

    return fail
