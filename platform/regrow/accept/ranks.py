"""Ranks of a check: processes that share a store which outlives them, and are watched as a keeper watches workers.

A rank that dies or is stopped is seen from outside, and the others are told by a word in the store.
"""

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from regrow.accept.child import die_with_parent, provide
from regrow.runtime.hardware.settings import apply_device_settings

WAIT_S = 120.0  # of a store, for a word or a member
LOOK_S = 0.02
TOLD_S = 1.0  # from a death to the word of it: time for a watchdog to see what it would end a survivor for

provide()  # before a process unpickles what a rank is to run


class Member:
    """A rank, and its place in the store. Words are said once and heard by all."""

    def __init__(self, rank: int, world_size: int, port: int, device_type: str) -> None:
        self.rank, self.world_size, self.port = rank, world_size, port
        self.device = torch.device(device_type, rank) if device_type == "cuda" else torch.device(device_type)
        if device_type == "cuda":
            torch.cuda.set_device(self.device)
        self.store = self.connect()

    def connect(self, timeout_s: float = WAIT_S) -> dist.TCPStore:
        """A connection of its own: a wait on one keeps others from using it."""
        return dist.TCPStore("127.0.0.1", self.port, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))

    def say(self, word: str, value: str = "") -> None:
        self.store.set(word, value)

    def hear(self, *words: str) -> None:
        self.store.wait(list(words))


class Ranks:
    """Processes that each run `fn(member, *args)`, a function of a module. Leaving the context ends them."""

    def __init__(
        self,
        fn: Callable[..., Any],
        world_size: int,
        *args: Any,
        device_type: str,
        environment: Mapping[str, str] | None = None,
        outlive: bool = True,
    ) -> None:
        """`outlive`: with the settings of a worker that goes on without lost ranks."""
        self.folder = tempfile.mkdtemp(prefix="ranks-", dir=os.environ.get("REGROW_ACCEPT_FOLDER"))
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        settings: dict[str, str] = {}
        apply_device_settings(settings, in_place=outlive, compile_threads=4)
        settings |= {"GLOO_SOCKET_IFNAME": "lo"} | dict(environment or {})
        # a process that is forked from one that has asked for devices may not use them
        context: Any = multiprocessing.get_context("spawn" if device_type == "cuda" else "forkserver")
        if device_type != "cuda":
            context.set_forkserver_preload(["regrow.accept.preload"])
        self.processes: list[BaseProcess] = []
        self._gone: dict[int, float] = {}  # since when
        self._told: set[int] = set()
        for rank in range(world_size):
            place = (rank, world_size, self.store.port, device_type)
            process = context.Process(
                target=_be_member, args=(fn, args, place, self.folder, settings), daemon=True, name=f"rank {rank}"
            )
            process.start()
            self.processes.append(process)

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def look(self) -> None:
        """Tell the others of ranks that are gone: their generation is over."""
        for rank, process in enumerate(self.processes):
            if rank not in self._gone and (_is_stopped(process.pid) or (process.exitcode or 0) < 0):
                self._gone[rank] = time.monotonic()
        for rank, since in self._gone.items():
            if rank not in self._told and time.monotonic() > since + TOLD_S:
                self._told.add(rank)
                generation = self.store.get("generation").decode() if self.store.check(["generation"]) else "0"
                tell_over(self.store, int(generation))

    def wait(self, done: Callable[[], bool], timeout_s: float) -> bool:
        """Until it is so, watching; whether it was in time."""
        give_up_at = time.monotonic() + timeout_s
        while not done():
            if time.monotonic() > give_up_at:
                return False
            self.look()
            time.sleep(LOOK_S)
        return True

    def failed(self) -> list[int]:
        """Ranks that ended with an exception or otherwise by themselves."""
        return [rank for rank, process in enumerate(self.processes) if (process.exitcode or 0) > 0]

    def finish(self, ranks: list[int], timeout_s: float) -> None:
        """Until these have ended."""
        self.wait(lambda: all(self.processes[rank].exitcode is not None for rank in ranks), timeout_s)

    def is_alive(self, rank: int) -> bool:
        return self.processes[rank].exitcode is None

    def ended_itself(self, rank: int) -> bool:
        """Without an exception, as a process does that does not come out of what was broken off."""
        return self.processes[rank].exitcode == 1 and not Path(self.folder, str(rank)).exists()

    def went_on(self, rank: int) -> bool:
        return self.store.check([f"went on {rank}"])

    def result(self, rank: int) -> Any:
        """What a rank returned. Raises RuntimeError for one that did not, with the last line that it said."""
        with contextlib.suppress(FileNotFoundError):
            returned, value = pickle.loads(Path(self.folder, str(rank)).read_bytes())
            if returned:
                return value
            raise RuntimeError(f"rank {rank}: {value}")
        ended = self.processes[rank].exitcode
        how = "did not end" if ended is None else f"ended with status {ended}"
        if ended is not None and ended < 0:
            how = f"was ended by {signal.Signals(-ended).name}"
        raise RuntimeError(f"rank {rank} {how}")

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    device_type: str,
    timeout_s: float = 240.0,
    environment: Mapping[str, str] | None = None,
) -> list[Any]:
    """What each rank returned. Raises RuntimeError for the first that failed."""
    with Ranks(fn, world_size, *args, device_type=device_type, environment=environment) as ranks:
        all_ranks = list(range(world_size))
        ranks.wait(lambda: bool(ranks.failed()) or not any(map(ranks.is_alive, all_ranks)), timeout_s)
        for rank in ranks.failed():
            ranks.result(rank)
        return [ranks.result(rank) for rank in all_ranks]


def form_group(member: Member, backend: str, generation: int = 0, *, timeout_s: float = 300.0) -> None:
    """The default group of a generation, of all ranks."""
    distributed_c10d._world.group_count = 0
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(f"generation-{generation}", member.connect()),
        rank=member.rank,
        world_size=member.world_size,
        timeout=timedelta(seconds=timeout_s),
        device_id=member.device if backend == "nccl" else None,
    )


def tell_over(store: dist.Store, generation: int) -> None:
    """A generation is over, since now: the first to say so said when."""
    store.compare_set(f"over {generation}", "", str(time.time()))


def _be_member(
    fn: Callable[..., Any], args: tuple[Any, ...], place: tuple[int, int, int, str], folder: str, env: dict[str, str]
) -> None:
    die_with_parent()
    faulthandler.enable()
    os.environ.update(env)
    provide()
    if place[3] == "cpu":
        torch.set_num_threads(1)
    try:
        outcome = (True, fn(Member(*place), *args))
    except BaseException as error:
        traceback.print_exc()
        outcome = (False, f"{type(error).__name__}: {error}".splitlines()[0][:300])
    path = Path(folder, str(place[0]))
    path.with_suffix(".new").write_bytes(pickle.dumps(outcome))
    os.replace(path.with_suffix(".new"), path)
    os._exit(0 if outcome[0] else 1)  # what hangs in a device is not waited for


def _is_stopped(pid: int | None) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False
