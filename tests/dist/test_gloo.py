import contextlib
import math
import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from regrow.runtime.abort import listening
from regrow.runtime.hardware.settings import DEFAULTS
from regrow.state.collective import gather
from support.gloo import RankError, run_ranks


def describe(offset: int) -> tuple[int, int, float]:
    total = torch.tensor(float(dist.get_rank() + offset))
    dist.all_reduce(total)
    return dist.get_rank(), os.getpid(), total.item()


def fail_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise ValueError("what went wrong")
    dist.barrier()


def hang() -> None:
    if dist.get_rank() == 0:
        time.sleep(100)


def test_ranks_are_separate_processes_that_talk_and_results_come_in_rank_order():
    results = run_ranks(describe, 3, 10)
    assert [rank for rank, _, _ in results] == [0, 1, 2]
    assert len({pid for _, pid, _ in results} | {os.getpid()}) == 4
    assert {total for _, _, total in results} == {33.0}


def test_the_first_traceback_is_raised():
    with pytest.raises(RankError, match=r"rank 1 of 2(.|\n)*what went wrong"):
        run_ranks(fail_on_rank_1, 2)


def test_a_rank_that_hangs_ends_with_the_deadline():
    with pytest.raises(RankError, match=r"ranks \[0\] of 2 did not finish in time"):
        run_ranks(hang, 2, deadline_s=3.0)


def count_connections() -> int:
    """Of this rank to others, once small values have gone around."""
    ports = {f"{port:04X}" for _, port in set().union(*gather(list(listening())))}
    mine = set()
    for entry in os.scandir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the folder's own
            mine.add(os.readlink(entry.path))
    ends = {}  # by socket: while other processes' come and go, the file shows some twice
    for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, state, *_, inode = line.split()[:10]
        if state == "01" and f"socket:[{inode}]" in mine:
            ends[inode] = {local[-4:], remote[-4:]}
    gather(None)  # no rank leaves before all have counted
    return sum(not ports.isdisjoint(pair) for pair in ends.values())


def test_ranks_on_gpus_connect_to_a_few_others_and_not_to_all() -> None:
    as_used = {name: value for name, value in DEFAULTS.items() if "GLOO" in name}
    assert set(run_ranks(count_connections, 12)) == {11}
    assert max(run_ranks(count_connections, 12, env=as_used)) <= 2 * math.ceil(math.log2(12))
