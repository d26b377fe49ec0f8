"""What the coordinator and keepers ask of Ray, over sockets in a folder.

A dead process costs milliseconds instead of seconds, and its name and address are files.
"""

import contextlib
import itertools
import os
import sys
import threading
import time
import types
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

NAMES, NODES = "names", "nodes"  # folders of a world: actors' addresses, living nodes
ANSWER_S = 30.0


class Reference(Future[Any]):
    """To what a call will come to."""

    def future(self) -> "Reference":
        return self


class RayError(Exception):
    """An actor did not answer."""


class RayTaskError(RayError):
    """An actor answered with an exception."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(f"{type(cause).__name__}: {cause}")
        self.cause = cause


@dataclass(frozen=True)
class Handle:
    """An actor; `handle.method.remote(...)` is a future."""

    address: str  # of its socket

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)
        return types.SimpleNamespace(remote=lambda *args: _call(self.address, method, args))


class _Link:
    """A connection to an actor, and the calls that it has not answered."""

    def __init__(self, address: str) -> None:
        self.connection = Client(address, "AF_UNIX")
        self.lock = threading.Lock()
        self.pending: dict[int, Reference] = {}
        self.numbers = itertools.count()
        self.broken = False
        threading.Thread(target=self._read, daemon=True).start()

    def call(self, method: str, args: tuple[Any, ...]) -> Reference:
        future = Reference()
        with self.lock:
            if self.broken:
                raise ConnectionError
            number = next(self.numbers)
            self.pending[number] = future
            self.connection.send((number, method, args))
        return future

    def _read(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                number, value, error = self.connection.recv()
                future = self.pending.pop(number)
                future.set_exception(RayTaskError(error)) if error is not None else future.set_result(value)
        with self.lock:
            self.broken = True
        for future in self.pending.values():
            future.set_exception(RayError("the actor died"))


_links: dict[str, _Link] = {}
_linking = threading.Lock()


def _call(address: str, method: str, args: tuple[Any, ...]) -> Reference:
    try:
        with _linking:
            link = _links.get(address)
            if link is None or link.broken:
                link = _links[address] = _Link(address)
        return link.call(method, args)
    except OSError:
        dead = Reference()
        dead.set_exception(RayError("the actor is not there"))
        return dead


def get(call: Reference, timeout: float | None = ANSWER_S) -> Any:
    """What a call came to. Raises RayError."""
    try:
        return call.result(timeout)
    except TimeoutError as error:
        raise RayError(f"no answer within {timeout} s") from error


def find(world: Path, name: str) -> Handle:
    """An actor by its name. Raises ValueError where there is none."""
    try:
        return Handle((world / NAMES / name).read_text())
    except FileNotFoundError as error:
        raise ValueError(f"no actor {name}") from error


def call_it(world: Path, name: str, address: str) -> None:
    """Give an actor a name, that of an earlier one perhaps."""
    temporary = world / NAMES / f".{name}"
    temporary.write_text(address)
    os.replace(temporary, world / NAMES / name)


def _wait(calls: list[Reference], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
    end = time.monotonic() + timeout
    while sum(call.done() for call in calls) < num_returns and time.monotonic() < end:
        time.sleep(0.001)
    return [call for call in calls if call.done()], [call for call in calls if not call.done()]


def install(world: Path, node: str, me: Handle | None, *, labels: dict[str, str], restarted: bool) -> None:
    """Put in Ray's place what the coordinator and keepers ask of it. `labels` are the node's; `restarted`: in place of
    an actor that died."""
    assert "ray" not in sys.modules
    context = types.SimpleNamespace(
        get_node_labels=lambda: labels,
        get_node_id=lambda: node,
        current_actor=me,
        was_current_actor_reconstructed=restarted,
    )
    ray, util = types.ModuleType("ray"), types.ModuleType("ray.util")
    strategies, metrics = (types.ModuleType(f"ray.util.{name}") for name in ("scheduling_strategies", "metrics"))
    vars(strategies)["NodeAffinitySchedulingStrategy"] = None

    def named(all_namespaces: bool) -> list[dict[str, str]]:
        return [{"name": p.name, "namespace": "regrow"} for p in (world / NAMES).iterdir() if p.name[0] != "."]

    vars(util).update(
        get_node_ip_address=lambda: "127.0.0.1",
        list_named_actors=named,
        scheduling_strategies=strategies,
        metrics=metrics,
    )
    vars(ray).update(
        util=util,
        exceptions=types.SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError),
        get=get,
        wait=_wait,
        kill=lambda handle, no_restart: handle.end_process.remote(),
        nodes=lambda: [{"NodeID": path.name, "Alive": True} for path in (world / NODES).iterdir()],
        get_actor=lambda name, namespace: find(world, name),
        get_runtime_context=lambda: context,
        is_initialized=lambda: True,
        method=lambda concurrency_group: lambda function: function,
    )
    sys.modules.update({module.__name__: module for module in (ray, util, strategies, metrics)})


class Server:
    """Answers an actor's calls, on `threads` threads."""

    def __init__(self, address: str, threads: int) -> None:
        Path(address).unlink(missing_ok=True)
        self.listener = Listener(address, "AF_UNIX", backlog=64)
        self.pool = ThreadPoolExecutor(threads)

    def serve(self, actor: Any) -> None:
        while True:
            connection = self.listener.accept()
            threading.Thread(target=self._talk, args=(actor, connection), daemon=True).start()

    def _talk(self, actor: Any, connection: Connection) -> None:
        lock = threading.Lock()
        with contextlib.suppress(EOFError, OSError):
            while True:
                self.pool.submit(self._answer, actor, connection, lock, *connection.recv())

    def _answer(
        self, actor: Any, connection: Connection, lock: threading.Lock, number: int, method: str, args: Any
    ) -> None:
        value, error = None, None
        if method == "end_process":
            os._exit(0)
        try:
            value = method == "is_up" or getattr(actor, method)(*args)
        except Exception as raised:
            error = raised
        with contextlib.suppress(OSError), lock:
            connection.send((number, value, error))
