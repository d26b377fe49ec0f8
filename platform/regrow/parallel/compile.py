"""torch.compile, one block at a time: all blocks share one graph, so that compile time does not grow with depth."""

import sys

from regrow.model.llama import Llama


def apply_compile(model: Llama, backend: str) -> None:
    """Compile each block when it first runs; a graph break is an error. Before FSDP, whose hooks stay outside."""
    for layer in model.layers:
        layer.compile(fullgraph=True, backend=backend)


def graphs_compiled() -> int:
    """How many graphs this process has compiled so far."""
    dynamo = sys.modules.get("torch._dynamo.utils")  # not there before anything was compiled
    return 0 if dynamo is None else int(dynamo.counters["stats"]["unique_graphs"])
