"""What torch.compile made, kept in a folder that outlives nodes: who starts or joins later compiles nothing again.

torch keeps the same on each machine's own disk by itself. The folder may be shared by runs and by kinds of machines.
A file is named by the SHA-256 of its content, which is in torch's own format, pickles within: whoever may write there
may run code in the workers. Nothing here ends a run: without the folder, one compiles.
"""

import hashlib
import re
import sys

import torch

from regrow.errors import RegrowError, first_line
from regrow.storage import Storage

SUFFIX = ".artifacts"


class CompileCache:
    """The files of this torch on this kind of device. Not for several threads."""

    def __init__(self, folder: Storage, device: torch.device) -> None:
        kind = f"torch-{torch.__version__}-{_kind(device)}"
        self._folder = folder / re.sub(r"[^A-Za-z0-9.+-]+", "-", kind)
        self._kept: set[str] = set()  # keys of artifacts that the folder has

    def load(self) -> int:
        """Hand what is kept to torch, before anything is compiled; how many artifacts there were."""
        try:
            names = [name for name in self._folder.list() if name.endswith(SUFFIX)]
            for name in names:
                content = self._folder.read_bytes(name)
                if hashlib.sha256(content).hexdigest() != name.removesuffix(SUFFIX):
                    _complain(f"{self._folder}/{name} is damaged, and left alone")
                elif (found := torch.compiler.load_cache_artifacts(content)) is not None:
                    self._kept.update(_keys(found))
        except (OSError, RegrowError) as error:
            _complain(f"{self._folder} cannot be read: {first_line(error)}")
        return len(self._kept)

    def keep_new(self) -> int:
        """Write what this process has compiled or taken from torch's caches, if there is more than is kept already.

        How many artifacts were written.
        """
        saved = torch.compiler.save_cache_artifacts()
        if saved is None or not (keys := _keys(saved[1])) - self._kept:
            return 0
        try:
            self._folder.write_bytes(hashlib.sha256(saved[0]).hexdigest() + SUFFIX, saved[0])
        except (OSError, RegrowError) as error:
            _complain(f"{self._folder} cannot be written: {first_line(error)}")
            return 0
        self._kept |= keys
        return len(keys)


def _keys(found: torch.compiler._cache.CacheInfo) -> set[str]:
    return {f"{kind}/{key}" for kind, keys in found.artifacts.items() for key in keys}


def _kind(device: torch.device) -> str:
    """What compiled code depends on, beyond torch."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()


def _complain(text: str) -> None:
    print(f"compile cache: {text}", file=sys.stderr)
