"""torch.compile, one block at a time: all blocks share one graph, so that compile time does not grow with depth."""

import sys

import torch._functorch.config

from regrow.model.llama import Llama


def apply_compile(model: Llama, backend: str, activation_budget: float = 1.0) -> None:
    """Compile each block when it first runs; a graph break is an error. Before FSDP, whose hooks stay outside.

    Below 1, `activation_budget` is the share of its activations that a block may keep: torch.compile looks for what is
    cheapest to compute again in backward until the rest fits. It holds for all that this process compiles from here on.
    """
    torch._functorch.config.activation_memory_budget = activation_budget
    for layer in model.layers:
        layer.compile(fullgraph=True, backend=backend)


def graphs_compiled() -> int:
    """How many graphs this process has traced so far."""
    return _count("stats", "unique_graphs")


def graphs_from_cache() -> int:
    """For how many of them inductor found, on this machine's disk or in a `CompileCache`, what it had made before."""
    return _count("aot_autograd", "autograd_cache_hit") + _count("inductor", "fxgraph_cache_hit")


def _count(group: str, name: str) -> int:
    dynamo = sys.modules.get("torch._dynamo.utils")  # not there before anything was compiled
    return 0 if dynamo is None else int(dynamo.counters[group][name])
