"""Ranks of `support.gloo` that count the connections which they hold."""

import contextlib
import os
from pathlib import Path

import torch
import torch.distributed as dist

from regrow.parallel.fsdp import axis_groups, build_mesh, connect
from regrow.plan.mesh import MeshShape
from regrow.runtime.rendezvous import leave_generation
from regrow.state.collective import from_rank_0, gather
from support.world import TIMEOUT_S, form


def count_connections() -> int:
    """Established ones of this process to others."""
    mine = set()
    for entry in os.scandir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the folder's own
            mine.add(os.readlink(entry.path))
    tables = [Path(f"/proc/self/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    lines = [line.split() for table in tables for line in table]
    # IPv4's within IPv6's, in the last eight digits: torch's store listens for both
    ends = {(words[1][-13:], words[2][-13:]) for words in lines if words[3] == "01" and f"socket:[{words[9]}]" in mine}
    return sum((there, here) not in ends for here, there in ends)


def count_in_a_generation(backend: str, shape: MeshShape) -> tuple[list[int], int]:
    """The sizes of this rank's groups, innermost first, and its connections once something has gone over each."""
    form(backend)
    mesh = build_mesh(shape, "cpu", timeout_s=TIMEOUT_S, connect_s=TIMEOUT_S)
    connect(mesh)
    total = torch.ones(1)
    for group in axis_groups(mesh):
        dist.all_reduce(total, group=group)
    assert gather(dist.get_rank()) == list(range(shape.world_size))
    assert from_rank_0("word" if dist.get_rank() == 0 else None) == "word"
    assert total.item() == shape.world_size
    found = count_connections()
    gather(None)  # no rank leaves before all have counted
    sizes = [group.size() for group in axis_groups(mesh)]
    leave_generation()
    return sizes, found


def count_in_one_group() -> int:
    """Of a rank in a group of all, as torch makes it, once the same has gone over it."""
    total = torch.ones(1)
    dist.all_reduce(total)
    gather(dist.get_rank())
    from_rank_0("word" if dist.get_rank() == 0 else None)
    found = count_connections()
    gather(None)
    return found
