"""A group that changes its layout again and again in the same processes: nothing grows, nothing is compiled twice."""

import gc
import os
import threading

import pytest
import torch.distributed as dist

from regrow.accept.tiny import tiny_model
from regrow.config.schema import OptimConfig, ParallelConfig
from regrow.parallel.compile import graphs_compiled
from regrow.runtime.rendezvous import leave_generation
from support.gloo import run_ranks
from support.training import Training, build, micro_batches
from support.world import TIMEOUT_S, form

COMPILED = {"compile": True, "compile_backend": "aot_eager"}
LAYOUTS = (
    ParallelConfig(**COMPILED),
    ParallelConfig(dp_replicate=2, **COMPILED),
    ParallelConfig(pp=2, **COMPILED),
    ParallelConfig(pp=4, **COMPILED),
    ParallelConfig(tp=2, pp=2, **COMPILED),
    ParallelConfig(cp=2, dp_replicate=2, **COMPILED),
)
GROWN_BYTES = 24 << 20  # what allocators keep apart may come to


def change_layouts(changes: int) -> list[tuple[int, int, int, int, float]]:
    """After each: open files, threads, resident bytes and graphs of this process, and the loss of a first step."""
    found = []
    for generation in range(1, changes + 1):
        form("gloo", generation)
        parallel = LAYOUTS[generation % len(LAYOUTS)]
        training = Training(tiny_model(num_layers=4), parallel, OptimConfig(global_batch_seqs=4, num_slices=4))
        step = build(training, timeout_s=TIMEOUT_S)
        mine, num_micro_batches = micro_batches(training, 0)
        loss = step.run(mine, num_micro_batches=num_micro_batches, lr=1e-3).resolve().loss
        del step
        gc.collect()
        with open("/proc/self/statm") as pages:
            resident = int(pages.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        found.append((len(os.listdir("/proc/self/fd")), threading.active_count(), resident, graphs_compiled(), loss))
    assert dist.is_initialized()
    leave_generation()
    return found


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_hundred_changes_of_layout_leave_nothing_behind_and_compile_nothing_twice() -> None:
    changes, settled = int(os.environ.get("CHANGES", "100")), 2 * len(LAYOUTS)
    for rank, found in enumerate(run_ranks(change_layouts, 4, changes, deadline_s=1500.0)):
        assert len(found) == changes
        of_layout = [found[at :: len(LAYOUTS)] for at in range(len(LAYOUTS))]
        for seen in of_layout:
            _, second, *later = seen
            assert max(files for files, *_ in later) <= second[0] + 2, f"open files of rank {rank}"  # some still close
            assert max(each[1] for each in later) <= second[1], f"threads of rank {rank}"
            assert {each[4] for each in seen} == {seen[0][4]}, f"losses of rank {rank}"
        graphs = [each[3] for each in found]
        assert graphs[settled:] == [graphs[len(LAYOUTS) - 1]] * (changes - settled), f"graphs of rank {rank}"
        grown = found[-1][2] - found[settled][2]
        print(f"rank {rank}: {graphs[-1]} graphs, {grown / 2**20:.1f} MiB after {changes} changes")
        assert grown < GROWN_BYTES, f"rank {rank} has grown by {grown} bytes"
