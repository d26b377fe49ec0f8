"""The checkpoint tiers in plain processes that a test can kill at any instant: coordinator, keepers, trainers.

They are the real ones; only Ray is not: `Handle` and `_install` do the few things that they ask of it, over sockets in
a folder, so that a dead process costs milliseconds instead of seconds. Every process keeps a `Beacon`, which says after
its death what it was doing, and which can be told to let it die there. Trainers train a state that is a pure function
of the step, so that a mixture of two steps is seen.
"""

import contextlib
import ctypes
import itertools
import mmap
import os
import signal
import struct
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import regrow.storage
from regrow.storage import LocalStorage, Storage

RUN, SECRET = "0123456789abcdef", b"of this run"
NAMES, NODES, ERRORS = "names", "nodes", "errors"  # folders of a world: actors' addresses, living nodes, complaints
PIECE_BYTES, PIECE_S = 32 << 10, 0.0005  # everything that takes long is done in pieces, with a rest after each
STEP_S, ANSWER_S = 0.002, 30.0
EVERY_STEPS, KEEP = 4, 2  # checkpoints
PR_SET_PDEATHSIG = 1

PHASES = (
    "restore",  # a trainer: from snapshots or from a checkpoint
    "slots",  # makes its slots
    "copy",  # copies its state into one
    "seal",  # makes it visible, and tells the keeper
    "take",  # a keeper: checksums what was sealed, copies it to the peer, reports it
    "push",  # of that, the copying
    "receive",  # the peer's side
    "told",  # hears of a commit, and deletes older generations
    "place",  # hears of a new peer
    "upload",  # writes its node's part to storage
    "begin",  # the coordinator: begins a generation
    "commit",  # takes reports, commits in memory
    "index",  # writes the index
    "COMMIT",  # commits in storage
    "retain",  # deletes old checkpoints
)
_CELL = struct.Struct("<q")
_ARMED, _LINES = len(PHASES), len(PHASES) + 1


class Beacon:
    """What a process is doing, readable after its death; and whether it is to die in a phase, after so many lines."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        if create:
            path.write_bytes(bytes(_CELL.size * (len(PHASES) + 2)))
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self._lock = threading.Lock()

    def doing(self) -> set[str]:
        return {phase for cell, phase in enumerate(PHASES) if self._get(cell)}

    def arm(self, phase: str, lines: int) -> None:
        """Be killed once `lines` lines of Python have run in a phase, of one call or of several."""
        self._set(_LINES, lines)
        self._set(_ARMED, 1 + PHASES.index(phase))

    @contextlib.contextmanager
    def inside(self, phase: str) -> Iterator[None]:
        cell = PHASES.index(phase)
        with self._lock:
            self._set(cell, self._get(cell) + 1)
        outer = sys.gettrace()
        if self._get(_ARMED) == 1 + cell:
            sys.settrace(self._trace)
        try:
            yield
        finally:
            sys.settrace(outer)
            with self._lock:
                self._set(cell, self._get(cell) - 1)

    def mark(self, owner: Any, name: str, phase: str) -> None:
        """All calls of a function are in a phase."""
        inner = getattr(owner, name)

        def marked(*args: Any, **options: Any) -> Any:
            with self.inside(phase):
                return inner(*args, **options)

        setattr(owner, name, marked)

    def _trace(self, frame: types.FrameType, event: str, _: Any) -> Any:
        if event == "line" and frame.f_code.co_filename != __file__:
            left = self._get(_LINES) - 1
            self._set(_LINES, left)
            if left <= 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return self._trace

    def _get(self, cell: int) -> int:
        return int(_CELL.unpack_from(self._map, cell * _CELL.size)[0])

    def _set(self, cell: int, value: int) -> None:
        _CELL.pack_into(self._map, cell * _CELL.size, value)


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
        self.pending: dict[int, Future[Any]] = {}
        self.numbers = itertools.count()
        self.broken = False
        threading.Thread(target=self._read, daemon=True).start()

    def call(self, method: str, args: tuple[Any, ...]) -> "Future[Any]":
        future: Future[Any] = Future()
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


def _call(address: str, method: str, args: tuple[Any, ...]) -> "Future[Any]":
    try:
        with _linking:
            link = _links.get(address)
            if link is None or link.broken:
                link = _links[address] = _Link(address)
        return link.call(method, args)
    except OSError:
        dead: Future[Any] = Future()
        dead.set_exception(RayError("the actor is not there"))
        return dead


def get(call: "Future[Any]", timeout: float | None = ANSWER_S) -> Any:
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


def _wait(calls: "list[Future[Any]]", num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
    end = time.monotonic() + timeout
    while sum(call.done() for call in calls) < num_returns and time.monotonic() < end:
        time.sleep(0.001)
    return [call for call in calls if call.done()], [call for call in calls if not call.done()]


def _install(world: Path, node: str, me: Handle | None) -> None:
    """Put in Ray's place what the coordinator and keepers ask of it."""
    assert "ray" not in sys.modules
    context = types.SimpleNamespace(get_node_labels=dict, get_node_id=lambda: node, current_actor=me)
    ray, util, strategies = (types.ModuleType(name) for name in ("ray", "ray.util", "ray.util.scheduling_strategies"))
    vars(strategies)["NodeAffinitySchedulingStrategy"] = None

    def named(all_namespaces: bool) -> list[dict[str, str]]:
        return [{"name": p.name, "namespace": "regrow"} for p in (world / NAMES).iterdir() if p.name[0] != "."]

    vars(util).update(
        get_node_ip_address=lambda: "127.0.0.1", list_named_actors=named, scheduling_strategies=strategies
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
        is_initialized=lambda: False,
    )
    sys.modules.update({"ray": ray, "ray.util": util, "ray.util.scheduling_strategies": strategies})


class _Server:
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


@dataclass(frozen=True)
class Member:
    """A process of the world: where it lives, what it is called, and where its beacon is."""

    world: Path
    node: str
    address: str  # of its socket; trainers have none
    beacon: Path

    def enter(self) -> Beacon:
        """What every process does first. It does not outlive the process that it was forked from."""
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        log = os.open(self.world / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        _install(self.world, self.node, Handle(self.address) if self.address else None)
        regrow.storage.LocalStorage = _SlowStorage  # type: ignore[misc]
        return Beacon(self.beacon)


class _SlowStorage(LocalStorage):
    """Writes and deletes piece by piece."""

    def write_chunks(self, name: str, chunks: Iterable[Any]) -> int:
        def pieces() -> Iterator[Any]:
            for chunk in chunks:
                for at in range(0, len(chunk), PIECE_BYTES):
                    yield chunk[at : at + PIECE_BYTES]
                    time.sleep(PIECE_S)

        return super().write_chunks(name, pieces())

    def delete(self, name: str) -> None:
        for each in self.list(name):
            super().delete(f"{name}/{each}")
            time.sleep(10 * PIECE_S)
        super().delete(name)


def keeper_main(member: Member) -> None:
    beacon = member.enter()
    from regrow.checkpoint import held, keeper, keeper_node, ranges

    keeper.PING_S = 0.05
    keeper_node.RETRY_S = 0.1
    for name, phase in {
        "_take": "take",
        "_push": "push",
        "_receive": "receive",
        "committed": "told",
        "set_peer": "place",
        "write": "upload",
    }.items():
        beacon.mark(keeper_node.KeeperNode, name, phase)
    _slow_file(ranges.Connection)
    _rest_before(held, "_checksums")
    server = _Server(member.address, 8)
    folder = member.world / f"regrow-{RUN}-{member.node}"
    server.serve(keeper.Keeper(RUN, member.node, str(folder), None, 600.0))


def coordinator_main(member: Member) -> None:
    beacon = member.enter()
    from regrow.checkpoint import coordinator, fleet
    from regrow.config.schema import CheckpointConfig, ClusterConfig, ObserveConfig, PretrainConfig

    fleet.RETRY_S = 0.0
    beacon.mark(coordinator.Coordinator, "start_training", "begin")
    beacon.mark(coordinator.Coordinator, "snapshots_sealed", "commit")
    beacon.mark(coordinator.Coordinator, "_commit", "COMMIT")
    beacon.mark(fleet, "write_index", "index")
    beacon.mark(fleet, "retain", "retain")
    server = _Server(member.address, 1)

    class Numbering(coordinator.Coordinator):
        """Groups are made by the test, not by who joins."""

        def begin_generation(self) -> int:
            self.generation += 1
            return self.generation

    actor = Numbering(
        str(member.world / "run"),
        RUN,
        secret=SECRET,
        checkpoints="checkpoints",
        config=PretrainConfig(
            checkpoint=CheckpointConfig(every_steps=EVERY_STEPS, keep=KEEP, timeout_s=60.0),
            cluster=ClusterConfig(max_workers=3),
            observe=ObserveConfig(tensorboard=False),
        ),
        submitted={},
    )

    def drive() -> None:
        while True:
            time.sleep(0.005)
            server.pool.submit(actor.drain_updates).result()

    threading.Thread(target=drive, daemon=True).start()
    server.serve(actor)


@dataclass(frozen=True)
class Group:
    """The trainers of a generation."""

    nodes: tuple[str, ...]  # of each rank
    num_replicas: int
    store: Path  # where they meet
    stubborn: bool = False  # go on whatever the coordinator says, as only a zombie would


def trainer_main(member: Member, group: Group, rank: int) -> None:
    beacon = member.enter()
    try:
        _train(member, beacon, group, rank)
    except (AssertionError, TypeError, KeyError):  # what a death cannot explain
        (member.world / ERRORS / f"{os.getpid()}").write_text(traceback.format_exc())
    except Exception:
        traceback.print_exc()


SHAPES = {
    "model/embed": ((331, 60), "float32"),
    "model/norm": ((60,), "float32"),
    "model/w": ((7, 12_000), "float32"),
    "optim/exp_avg/w": ((7, 12_000), "int64"),
}


def fill(entries: "list[Any]", step: int) -> None:
    """Make entries what they are after a step: every element differs from that of any other step."""
    import torch

    for number, entry in enumerate(entries):
        index = torch.arange(entry.span.start, entry.span.stop)
        entry.memory.copy_((index + 1_000_003 * number + 7919 * step) % 2**24)  # which float32 holds exactly


def make_entries(shard: int, num_shards: int) -> "list[Any]":
    """A rank's shards, zeros."""
    import torch

    from regrow.checkpoint.layout import Span, shard_span
    from regrow.checkpoint.state import Entry

    spans = [shard_span(Span(name, shape, dtype, 0, 0), shard, num_shards) for name, (shape, dtype) in SHAPES.items()]
    return [Entry(span, torch.zeros(span.num_elements, dtype=getattr(torch, span.dtype))) for span in spans]


def assert_state(entries: "list[Any]", scalars: dict[str, int], step: int) -> None:
    """They are the whole state after a step, and nothing else."""
    import torch

    from regrow.checkpoint.state import Entry

    assert scalars == scalars_of(step)
    expected = [Entry(entry.span, torch.zeros_like(entry.memory)) for entry in entries]
    fill(expected, step)
    for have, want in zip(entries, expected, strict=True):
        assert torch.equal(have.memory, want.memory), f"{have.span} is not that of step {step}"


def scalars_of(step: int) -> dict[str, int]:
    return {"step": step, "cursor": 12 * step, "tokens_seen": 768 * step}


def _train(member: Member, beacon: Beacon, group: Group, rank: int) -> None:
    """As `elastic.worker` does, with a state that needs no model."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from regrow.checkpoint import snapshot
    from regrow.checkpoint.collective import from_rank_0, gather
    from regrow.checkpoint.keeper import COORDINATOR
    from regrow.checkpoint.layout import Part
    from regrow.observe.run_log import METRIC_KEYS

    torch.set_num_threads(1)
    beacon.mark(snapshot.Snapshots, "_seal", "seal")
    _slow_copy(beacon, snapshot)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    num_ranks = len(group.nodes)
    meeting = {"init_method": f"file://{group.store}", "rank": rank, "world_size": num_ranks}
    dist.init_process_group("gloo", timeout=timedelta(seconds=ANSWER_S), **meeting)  # type: ignore[arg-type]
    coordinator = find(member.world, f"{RUN}:{COORDINATOR}")
    keeper = find(member.world, f"{RUN}:{member.node}")
    num_shards = num_ranks // group.num_replicas
    part = Part(rank % num_shards, num_shards, rank // num_shards, group.num_replicas)
    entries = make_entries(part.shard, num_shards)

    generation = from_rank_0(get(coordinator.begin_generation.remote()) if rank == 0 else 0)
    info = get(keeper.serve.remote(coordinator, SECRET))
    get(coordinator.register_keeper.remote(keeper, info))
    gather(None)
    with beacon.inside("restore"):
        step = _restore(member, coordinator, Path(info.folder), entries, part, rank)
    with beacon.inside("slots"):
        snapshots = snapshot.Snapshots(
            Path(info.folder),
            entries,
            part=part,
            run_id=RUN,
            generation=generation,
            writers=group.nodes.count(member.node),
            num_slots=3,
        )
    gather(None)
    if rank == 0:
        details = {"workers": [{"node": node, "pid": os.getpid()} for node in group.nodes]}
        get(coordinator.start_training.remote(generation, step, details))
    while True:
        time.sleep(STEP_S)  # forward and backward, beside the copy
        snapshots.wait()
        room = torch.tensor([snapshots.room()])
        dist.all_reduce(room, dist.ReduceOp.MIN)
        step += 1
        fill(entries, step)
        if rank == 0:
            row = dict.fromkeys(METRIC_KEYS, 0) | {"step": step, "generation": generation, "step_s": STEP_S}
            try:
                get(coordinator.row.remote(generation, row))
            except RayTaskError:
                if not group.stubborn:
                    raise
                _defy(coordinator, generation, step)
        if room > 0:
            assert snapshots.begin(step, scalars_of(step))
            snapshots.confirm(step)


def _defy(coordinator: Handle, generation: int, step: int) -> None:
    """Try everything that a group whose generation is over must not do."""
    for call in (
        coordinator.want_checkpoint.remote(generation, step),
        coordinator.commit.remote(generation, f"step-{step:08d}", b"{}"),
        coordinator.start_training.remote(generation, step, {"workers": []}),
        coordinator.event.remote(generation, "checkpoint", {}),
    ):
        with contextlib.suppress(RayTaskError):
            get(call)
            raise AssertionError("a generation that is over wrote something")


def _restore(member: Member, coordinator: Handle, folder: Path, entries: "list[Any]", part: Any, rank: int) -> int:
    """The step that is gone on from; what was restored is checked."""
    from regrow.checkpoint import store
    from regrow.checkpoint.catalog import committed_steps, open_checkpoint
    from regrow.checkpoint.collective import from_rank_0, gather
    from regrow.checkpoint.layout import Part
    from regrow.checkpoint.memory import Unrestorable, restore_snapshot

    checkpoints = Storage.at(member.world / "run" / "checkpoints")
    steps = from_rank_0(committed_steps(checkpoints))
    newest = from_rank_0(get(coordinator.newest_snapshot.remote()) if rank == 0 else None)
    if newest is not None and (not steps or newest[0] >= steps[0]):
        problem = ""
        try:
            restored = restore_snapshot(entries, newest[1], node=member.node, folder=folder, secret=SECRET, reader=rank)
            assert_state(entries, restored.scalars, newest[0])
        except Unrestorable as error:
            problem = str(error)
        if not any(gather(problem)):
            return int(newest[0])
        (member.world / "unrestorable").write_text(problem)
    if not steps:
        fill(entries, 0)
        return 0
    index = open_checkpoint(checkpoints, steps[0], run_id=RUN)
    store.restore(checkpoints, index, entries, Part(part.shard, part.num_shards))
    assert_state(entries, index.scalars, steps[0])
    return steps[0]


def _slow_copy(beacon: Beacon, module: Any) -> None:
    """Slots are filled piece by piece."""
    import numpy as np

    def copyto(target: Any, source: Any) -> None:
        for at in range(0, len(target), PIECE_BYTES):
            np.copyto(target[at : at + PIECE_BYTES], source[at : at + PIECE_BYTES])
            time.sleep(PIECE_S)

    module.np = types.SimpleNamespace(copyto=copyto)
    beacon.mark(module.np, "copyto", "copy")


def _slow_file(connection: Any) -> None:
    """Files are sent piece by piece."""
    send_file: Callable[..., None] = connection.send_file

    def slowly(self: Any, file: Any, ranges: Any) -> None:
        for offset, size in ranges:
            for at in range(0, size, PIECE_BYTES):
                send_file(self, file, [(offset + at, min(PIECE_BYTES, size - at))])
                time.sleep(PIECE_S)

    connection.send_file = slowly


def _rest_before(module: Any, name: str) -> None:
    inner = getattr(module, name)

    def rested(*args: Any) -> Any:
        time.sleep(PIECE_S)
        return inner(*args)

    setattr(module, name, rested)
