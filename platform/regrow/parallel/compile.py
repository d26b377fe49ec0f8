"""torch.compile, one block at a time: all blocks share one graph, so that compile time does not grow with depth."""

import sys
from collections import Counter, defaultdict
from collections.abc import Mapping

import torch._functorch.config

from regrow.config.schema import CompileMode, ParallelConfig
from regrow.model.llama import Llama

# CUDA graphs are not among them: FSDP gathers parameters to new places, and each would be recorded again
MODES = {CompileMode.default: None, CompileMode.max_autotune: "max-autotune-no-cudagraphs"}


def apply_compile(model: Llama, config: ParallelConfig) -> None:
    """Compile each block when it first runs; a graph break is an error. Before FSDP, whose hooks stay outside.

    Below 1, `activation_budget` is the share of its activations that a block may keep: torch.compile looks for what is
    cheapest to compute again in backward until the rest fits. It holds for all that this process compiles from here on.
    """
    torch._functorch.config.activation_memory_budget = config.activation_budget
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
