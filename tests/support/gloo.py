"""Run a function on several gloo ranks, in real processes of this machine, for tests and benchmarks."""

import faulthandler
import importlib
import importlib.util
import inspect
import multiprocessing
import multiprocessing.connection
import operator
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

PRELOAD = ["regrow.accept.preload"]
GRACE_S = 1.0  # after a failure, for the others to say what they saw; after a success, for them to end


class RankError(Exception):
    """A rank failed, died or did not finish in time; the message holds its traceback."""


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    deadline_s: float = 120.0,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Call `fn(*args)` on `world_size` ranks of a gloo group; what each returned, in rank order.

    Each rank is a fresh process with one torch thread, forked from a server that has torch loaded, so a call costs a
    fraction of a second beyond `fn`. `fn` is a module-level function, of a test file too; arguments and results are
    pickled. `env` is set in the ranks. Raises RankError with the first traceback; no process outlives the call.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    call = (fn.__module__, inspect.getsourcefile(fn), fn.__qualname__, pickle.dumps(args))
    pipes: list[Connection] = []
    processes: list[BaseProcess] = []
    with tempfile.TemporaryDirectory(prefix="gloo-") as folder:
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe(duplex=False)
                pipes.append(ours)
                ranks = (rank, world_size, f"{folder}/store", deadline_s)
                process = context.Process(target=_rank_main, args=(theirs, ranks, dict(env or {}), call), daemon=True)
                process.start()
                processes.append(process)
                theirs.close()
            results = _collect(pipes, time.monotonic() + deadline_s)
            for ended in processes:
                ended.join(timeout=GRACE_S)
            return results
        finally:
            for started in processes:
                started.kill()
                started.join()
            for pipe in pipes:
                pipe.close()


def _rank_main(
    pipe: Connection,
    ranks: tuple[int, int, str, float],
    env: dict[str, str],
    call: tuple[str, str | None, str, bytes],
) -> None:
    rank, world_size, store, deadline_s = ranks
    faulthandler.enable()  # a crash in C says where
    try:
        os.environ.update(env)
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # 127.0.0.1, whatever the host name resolves to
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        fn, args = _load(*call)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=deadline_s),
        )
        dist.barrier()  # `fn` may end at once, and a peer be still about to connect
        outcome = (True, fn(*args))
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException:
        outcome = (False, traceback.format_exc())
    pipe.send_bytes(pickle.dumps(outcome))


def _load(module_name: str, file: str | None, qualname: str, pickled_args: bytes) -> tuple[Callable[..., Any], Any]:
    """The function and its arguments; a test file is no importable module, so it is loaded from where it is."""
    if module_name not in sys.modules and file is not None and _not_importable(module_name):
        spec = importlib.util.spec_from_file_location(module_name, file)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[module_name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    fn = operator.attrgetter(qualname)(importlib.import_module(module_name))
    return fn, pickle.loads(pickled_args)


def _not_importable(module_name: str) -> bool:
    try:
        importlib.import_module(module_name)
    except ImportError:
        return True
    return False


def _collect(pipes: list[Connection], deadline: float) -> list[Any]:
    """Every rank's result in rank order; raises RankError for the rank that failed first."""
    results: dict[int, Any] = {}
    failures: list[str] = []
    while len(results) < len(pipes):
        left = deadline - time.monotonic()
        waiting = {id(pipe): rank for rank, pipe in enumerate(pipes) if rank not in results}
        ready = multiprocessing.connection.wait([pipes[rank] for rank in waiting.values()], timeout=max(left, 0.0))
        if not ready:
            late = sorted(waiting.values())
            raise RankError("\n".join(failures) or f"ranks {late} of {len(pipes)} did not finish in time")
        for pipe in ready:
            rank = waiting[id(pipe)]
            try:
                succeeded, results[rank] = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                succeeded, results[rank] = False, "died without a word"
            if not succeeded:
                failures.append(f"rank {rank} of {len(pipes)}: {results[rank]}")
                deadline = min(deadline, time.monotonic() + GRACE_S)
    if failures:
        raise RankError("\n".join(failures))
    return [results[rank] for rank in range(len(pipes))]
