"""The checkpoint tiers in plain processes that a test can kill at any instant: coordinator, keepers, trainers.

They are the real ones; only Ray is not: see `stand_in_ray`. Every process keeps a `Beacon`. Trainers train a state that
is a pure function of the step, so that a mixture of two steps is seen.
"""

import contextlib
import ctypes
import os
import signal
import time
import traceback
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import regrow.storage
from regrow.storage import LocalStorage, Storage
from support.beacon import Beacon
from support.stand_in_ray import ANSWER_S, Handle, RayTaskError, Server, find, get, install

RUN = "0123456789abcdef"
ERRORS = "errors"  # a folder of a world: complaints
PIECE_BYTES, PIECE_S = 32 << 10, 0.0005  # everything that takes long is done in pieces, with a rest after each
STEP_S = 0.002
EVERY_STEPS, KEEP = 4, 2  # checkpoints
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Member:
    """A process of the world: where it lives, what it is called, and where its beacon is."""

    world: Path
    node: str
    address: str  # of its socket; trainers have none
    beacon: Path
    restarted: bool  # in the place of one that died
    rack: str  # that fails as one; empty: the node fails by itself

    def enter(self) -> Beacon:
        """What every process does first. It does not outlive the process that it was forked from."""
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        log = os.open(self.world / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        labels = {"rack": self.rack} if self.rack else {}
        me = Handle(self.address) if self.address else None
        install(self.world, self.node, me, labels=labels, restarted=self.restarted)
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
    from regrow.runtime import keeper
    from regrow.state.memory import held, incoming, outgoing, ranges
    from regrow.state.memory import node as keeper_node

    keeper.PING_S = 0.05
    keeper_node.RETRY_S = 0.1
    for name, phase in {
        "take": "take",
        "committed": "told",
        "set_peers": "place",
        "write": "upload",
    }.items():
        beacon.mark(keeper_node.KeeperNode, name, phase)
    beacon.mark(outgoing.Outgoing, "_push", "push")
    beacon.mark(incoming.Incomings, "receive", "receive")
    _slow_file(ranges.Connection)
    _rest_before(held, "checksums_of")
    server = Server(member.address, 8)
    folder = member.world / f"regrow-{RUN}-{member.node}"
    server.serve(keeper.Keeper(RUN, member.node, str(folder), keeper.KeeperSettings("", "rack", 600.0)))


def coordinator_main(member: Member, copies: int) -> None:
    beacon = member.enter()
    from regrow.config.schema import CheckpointConfig, ClusterConfig, ObserveConfig, PretrainConfig, SnapshotConfig
    from regrow.control import checkpoints, troubles
    from regrow.control.membership import Member as Worker
    from regrow.runtime import actor as coordinator
    from regrow.runtime import publisher, shell
    from regrow.state.disk import catalog, upload

    checkpoints.RETRY_S, shell.TICK_S = 0.0, 0.005
    troubles.MAX_FAILED_GENERATIONS = 10**9
    beacon.mark(coordinator.Coordinator, "start_training", "begin")
    beacon.mark(coordinator.Coordinator, "snapshots_sealed", "commit")
    beacon.mark(publisher.Publisher, "_commit", "COMMIT")
    beacon.mark(upload, "write_index", "index")
    beacon.mark(catalog, "retain", "retain")
    server = Server(member.address, 1)

    class Numbering(coordinator.Coordinator):
        """Groups are made by the test, not by who joins."""

        def begin_generation(self) -> int:
            self.group_failed("worker_failed", "the test makes another one", [])
            one = Worker(f"group-{time.monotonic_ns()}", "node", "127.0.0.1", 1, 1)
            self.join(one, 1)
            before = self.ready()  # asked again, for as long as the number that was given out is not in the log
            while (answer := self.formation(one.id, before)).seat is None:
                time.sleep(answer.wait_s)
            return answer.seat.generation

    actor = Numbering(
        str(member.world / "run"),
        RUN,
        checkpoints="checkpoints",
        config=PretrainConfig(
            checkpoint=CheckpointConfig(every_steps=EVERY_STEPS, keep=KEEP, timeout_s=60.0),
            cluster=ClusterConfig(max_workers=6),
            snapshot=SnapshotConfig(copies=copies),
            observe=ObserveConfig(tensorboard=False, metrics=False),
        ),
        submitted={},
    )

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
        index = torch.arange(prod(entry.box.shape)).view(entry.box.shape)[entry.box.slices].reshape(-1)
        entry.memory.copy_((index + 1_000_003 * number + 7919 * step) % 2**24)  # which float32 holds exactly


def make_entries(shard: int, num_shards: int) -> "list[Any]":
    """A rank's shards, zeros."""
    import torch

    from regrow.plan.boxes import Box
    from regrow.plan.mesh import Coordinates, MeshShape
    from regrow.plan.placement import placed
    from regrow.state.entries import Entry

    at = Coordinates(MeshShape(1, num_shards), shard)
    boxes = [placed(Box.whole(name, shape, dtype), at) for name, (shape, dtype) in SHAPES.items()]
    return [Entry(box, torch.zeros(box.num_elements, dtype=getattr(torch, box.dtype))) for box in boxes]


def assert_state(entries: "list[Any]", scalars: Mapping[str, int | float | str], step: int) -> None:
    """They are the whole state after a step, and nothing else."""
    import torch

    from regrow.state.entries import Entry

    assert scalars == scalars_of(step)
    expected = [Entry(entry.box, torch.zeros_like(entry.memory)) for entry in entries]
    fill(expected, step)
    for have, want in zip(entries, expected, strict=True):
        assert torch.equal(have.memory, want.memory), f"{have.box} is not that of step {step}"


def scalars_of(step: int) -> dict[str, int]:
    return {"step": step, "cursor": 12 * step, "tokens_seen": 768 * step}


def _train(member: Member, beacon: Beacon, group: Group, rank: int) -> None:
    """As `runtime.worker` does, with a state that needs no model."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from regrow.plan.mesh import Coordinates, MeshShape
    from regrow.record.log import METRIC_KEYS
    from regrow.runtime.keeper import COORDINATOR
    from regrow.runtime.kept_rows import KeptRows
    from regrow.state.collective import from_rank_0, gather
    from regrow.state.memory import writer as snapshot

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
    coordinates = Coordinates(MeshShape(group.num_replicas, num_shards), rank)
    entries = make_entries(rank % num_shards, num_shards)

    generation = from_rank_0(get(coordinator.begin_generation.remote()) if rank == 0 else 0)
    secret = get(coordinator.secret.remote())
    info = get(keeper.serve.remote(coordinator, secret))
    get(coordinator.register_keeper.remote(keeper, info))
    rows = KeptRows()
    rows.keep_in(Path(info.folder))
    gather(None)
    with beacon.inside("restore"):
        step = _restore(member, coordinator, Path(info.folder), secret, entries, coordinates, rank)
    rows.begin(generation, step)
    with beacon.inside("slots"):
        snapshots = snapshot.Snapshots(
            Path(info.folder),
            entries,
            coordinates=coordinates,
            run_id=RUN,
            generation=generation,
            writers=group.nodes.count(member.node),
            num_slots=3,
        )
    gather(None)
    if rank == 0:
        workers = [{"node": node, "pid": os.getpid()} for node in group.nodes]
        details = {"workers": workers, "world_size": num_ranks}
        get(coordinator.start_training.remote(generation, step, details))
    while True:
        time.sleep(STEP_S)  # forward and backward, beside the copy
        snapshots.wait()
        room = torch.tensor([snapshots.room()])
        dist.all_reduce(room, dist.ReduceOp.MIN)
        step += 1
        fill(entries, step)
        row = dict.fromkeys(METRIC_KEYS, 0) | {"step": step, "generation": generation, "step_s": STEP_S}
        rows.add(row)
        if rank == 0:
            try:
                wanted = get(coordinator.row.remote(generation, row)).wanted
                if wanted is not None:
                    get(coordinator.rows_again.remote(generation, wanted, rows.since(wanted)))
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


def _restore(
    member: Member,
    coordinator: Handle,
    folder: Path,
    secret: bytes,
    entries: "list[Any]",
    coordinates: Any,
    rank: int,
) -> int:
    """The step that is gone on from; what was restored is checked."""
    from regrow.plan.mesh import Coordinates, MeshShape
    from regrow.state.collective import from_rank_0, gather
    from regrow.state.disk import store
    from regrow.state.disk.catalog import committed_steps, open_checkpoint
    from regrow.state.memory.holders import Holders
    from regrow.state.memory.reader import Unrestorable, restore_snapshot

    checkpoints = Storage.at(member.world / "run" / "checkpoints")
    steps = from_rank_0(committed_steps(checkpoints))
    found = get(coordinator.newest_snapshot.remote()) if rank == 0 else None
    newest = from_rank_0(found.to_json() if found is not None else None)
    holders = Holders.of_json(newest) if newest is not None else None
    if holders is not None and (not steps or holders.moment.step >= steps[0]):
        problem = ""
        try:
            restored = restore_snapshot(entries, holders, node=member.node, folder=folder, secret=secret, reader=rank)
            assert_state(entries, restored.scalars, holders.moment.step)
        except Unrestorable as error:
            problem = str(error)
        if not any(gather(problem)):
            return holders.moment.step
        (member.world / "unrestorable").write_text(problem)
    if not steps:
        fill(entries, 0)
        return 0
    index = open_checkpoint(checkpoints, steps[0], run_id=RUN)
    alone = Coordinates(MeshShape(1, coordinates.mesh.dp_shard), rank % coordinates.mesh.dp_shard)  # reads all itself
    store.restore(checkpoints, index, entries, alone)
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
