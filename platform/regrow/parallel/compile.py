"""torch.compile, one block at a time: all blocks share one graph, so that compile time does not grow with depth."""

import hashlib
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from regrow.config.schema import CompileMode, Float8, ParallelConfig
from regrow.errors import RegrowError, first_line
from regrow.model.llama import Llama
from regrow.process_log import say
from regrow.storage import Storage

if TYPE_CHECKING:  # torch 2.11 has it in no namespace before something is compiled
    from torch.compiler._cache import CacheInfo

# CUDA graphs are not among them: FSDP gathers parameters to new places, and each would be recorded again
MODES = {CompileMode.default: None, CompileMode.max_autotune: "max-autotune-no-cudagraphs"}

SUFFIX = ".artifacts"  # of a cache's files
GRAPHS = 128  # of one function; torch's limit of 8 would end a run that has had many world sizes


def apply_compile(model: Llama, config: ParallelConfig) -> None:
    """Compile each block when it first runs; a graph break is an error. Before FSDP, whose hooks stay outside.

    Below 1, `activation_budget` is the share of its activations that a block may keep: torch.compile looks for what is
    cheapest to compute again in backward until the rest fits. It holds for all that this process compiles from here on.
    """
    import torch._dynamo.config  # a second, which only a job that compiles has to spend
    import torch._inductor.config

    torch._functorch.config.activation_memory_budget = config.activation_budget
    # a graph for each number of rows of a pass, with gradients and without, by recipe; they add up over groups
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, GRAPHS)
    torch._dynamo.config.accumulated_recompile_limit = max(torch._dynamo.config.accumulated_recompile_limit, 8 * GRAPHS)
    # rowwise scales lose the rounding to bfloat16 between fused operators, to NaN: pytorch#150859, torchtitan#1056
    torch._inductor.config.emulate_precision_casts = config.float8 in (Float8.rowwise, Float8.rowwise_with_gw_hp)
    for layer in model.layers:
        layer.compile(fullgraph=True, backend=config.compile_backend, mode=MODES[config.compile_mode])


def graphs_compiled() -> int:
    """How many graphs this process has traced so far."""
    return _counters()["stats"]["unique_graphs"]


def graphs_lowered() -> int:
    """How often inductor had to compile, forward and backward apart: nothing that was made before could be found."""
    counts = _counters()["inductor"]
    return counts["fxgraph_cache_miss"] + counts["fxgraph_cache_bypass"]


def _counters() -> Mapping[str, Counter[str]]:
    dynamo = sys.modules.get("torch._dynamo.utils")  # not there before anything was compiled
    return defaultdict(Counter) if dynamo is None else dynamo.counters


class CompileCache:
    """What torch.compile made, kept in a folder that outlives nodes: what starts or joins later compiles nothing again.

    These are the files of this torch on this kind of device, in a folder that runs and kinds of machines may share;
    torch keeps the same on each machine's own disk by itself. A file is named by the SHA-256 of its content, which is
    in torch's own format, pickles within: a user who may write there may run code in the workers. Nothing here ends a
    run: without the folder, one compiles. Not for several threads.
    """

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
                    _complain(f"{self._folder / name} is damaged, and left alone")
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


def _keys(found: "CacheInfo") -> set[str]:
    return {f"{kind}/{key}" for kind, keys in found.artifacts.items() for key in keys}


def _kind(device: torch.device) -> str:
    """What compiled code depends on, beyond torch."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()


def _complain(text: str) -> None:
    say(f"compile cache: {text}", sys.stderr)
