"""torch.compile, one block at a time: all blocks share one graph, so that compile time does not grow with depth."""

from regrow.model.llama import Llama


def apply_compile(model: Llama, backend: str) -> None:
    """Compile each block when it first runs; a graph break is an error. Before FSDP, whose hooks stay outside."""
    for layer in model.layers:
        layer.compile(fullgraph=True, backend=backend)
