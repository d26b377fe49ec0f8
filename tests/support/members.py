"""Processes whose ends matter as much as what they return, on the asynchronous backend, for tests and `jobs.accept`."""

import multiprocessing
import os
import pickle
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from regrow.accept import ranks
from regrow.parallel.asynchronous import NAME, Work, default_stream
from support.gloo import PRELOAD

DEADLINE_S = 90.0  # of what has hung for good
OFF, ON = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}, {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "750"}


class Member(ranks.Member):
    """A rank of a test: its default group, and a store that outlives every rank."""

    def __init__(self, rank: int, world_size: int, port: int) -> None:
        super().__init__(rank, world_size, port, "cpu")
        self.stream = default_stream()

    def form(
        self,
        generation: int = 0,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        timeout_s: float = DEADLINE_S,
        store_s: float = DEADLINE_S,
    ) -> Any:
        """The default group of a generation, of all ranks where nothing else is said."""
        dist.init_process_group(
            NAME,
            store=dist.PrefixStore(f"generation-{generation}", self.connect(store_s)),
            timeout=timedelta(seconds=timeout_s),
            rank=self.rank if rank is None else rank,
            world_size=world_size or self.world_size,
        )
        assert dist.group.WORLD is not None
        return dist.group.WORLD._get_backend(torch.device("cpu"))

    def hold(self) -> Callable[[], None]:
        """Stop the stream until what is returned is called."""
        gate = threading.Event()
        self.stream.submit(gate.wait)
        return gate.set


def run_members(fn: Callable[[Member], Any], world_size: int, folder: Path, env: dict[str, str]) -> tuple[list, list]:
    """How each of the processes ended, and what those returned that came to their end."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    members = [
        context.Process(target=be_member, args=(fn, (rank, world_size, store.port), str(folder), env), daemon=True)
        for rank in range(world_size)
    ]
    try:
        for member in members:
            member.start()
        for member in members:
            member.join(DEADLINE_S)
        ends = [member.exitcode for member in members]
    finally:
        for member in members:
            member.kill()
            member.join()
    files = [folder / str(rank) for rank in range(world_size)]
    return ends, [pickle.loads(file.read_bytes()) if file.exists() else None for file in files]


def be_member(fn: Callable[[Member], Any], place: tuple[int, int, int], folder: str, env: dict[str, str]) -> None:
    os.environ.update(env)
    torch.set_num_threads(1)
    result = pickle.dumps(fn(Member(*place)))
    Path(folder, str(place[0])).write_bytes(result)
    os._exit(0)


def launch(group: Any, tensor: torch.Tensor, **options: Any) -> Work:
    """An all-reduce that the host does not wait for."""
    work: Any = dist.all_reduce(tensor, group=group, async_op=True, **options)
    assert work.wait()
    return work


def until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.01)
