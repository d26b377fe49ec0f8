"""torch.compile, one block at a time: all blocks share one graph, so that compile time does not grow with depth."""

import sys
from collections import Counter, defaultdict
from collections.abc import Mapping

from regrow.config.schema import CompileMode, Float8, ParallelConfig
from regrow.model.llama import Llama

# CUDA graphs are not among them: FSDP gathers parameters to new places, and each would be recorded again
MODES = {CompileMode.default: None, CompileMode.max_autotune: "max-autotune-no-cudagraphs"}

GRAPHS = 128  # of one function; torch's limit of 8 would end a run that has had many world sizes


def apply_compile(model: Llama, config: ParallelConfig) -> None:
    """Compile each block when it first runs; a graph break is an error. Before FSDP, whose hooks stay outside.

    Below 1, `activation_budget` is the share of its activations that a block may keep: torch.compile looks for what is
    cheapest to compute again in backward until the rest fits. It holds for all that this process compiles from here on.
    """
    import torch._dynamo.config  # a second, which only those who compile have to spend
    import torch._inductor.config

    torch._functorch.config.activation_memory_budget = config.activation_budget
    # a graph for each number of rows of a pass, with gradients and without, by recipe; they add up over groups
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, GRAPHS)
    torch._dynamo.config.accumulated_recompile_limit = max(torch._dynamo.config.accumulated_recompile_limit, 8 * GRAPHS)
    if config.float8 in (Float8.rowwise, Float8.rowwise_with_gw_hp):
        # rowwise scales lose the rounding to bfloat16 between fused operators, to NaN: pytorch#150859, torchtitan#1056
        torch._inductor.config.emulate_precision_casts = True
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
