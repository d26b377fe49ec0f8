"""A rank's dealings with its node's keeper: find it, restore from what keepers hold, take snapshots."""

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import ray
import torch.distributed as dist

from regrow.control.peers import plan_peers
from regrow.control.phases import Phase
from regrow.errors import CheckpointError, first_line
from regrow.forecast.estimate import rank_bytes, topologies_of_groups
from regrow.forecast.memory import SnapshotMemory, plan_snapshot_memory, ranks_copied
from regrow.parallel.stream import Stream
from regrow.plan.mesh import Coordinates, MeshShape
from regrow.runtime.abort import Address, Breaker
from regrow.runtime.calls import CALL_TIMEOUT_S, CoordinatorClient
from regrow.runtime.job import Job
from regrow.runtime.keeper import KeeperInfo, KeeperSettings, start_keeper
from regrow.runtime.liveness.heartbeat import Heartbeat
from regrow.state.collective import PeerError, from_rank_0, gather
from regrow.state.entries import Entry, Progress, restored_progress
from regrow.state.memory.arenas import Arenas
from regrow.state.memory.held import bytes_held
from regrow.state.memory.holders import Holders
from regrow.state.memory.reader import Restored, restore_snapshot
from regrow.state.memory.transport import TransportError
from regrow.state.memory.writer import Snapshots

ROOM_S, LOOK_S = 20.0, 0.5  # that a group waits for room in the memory of some of its nodes; between looks
NO_ROOM_S = 120.0  # and in that of all of them: no group could go on without these


def may_wait(problems: Sequence[str], known: Sequence[bool], waited_s: float) -> bool:
    """Whether ranks that have no room for snapshots may get it yet, by each rank's problem, and whether it has held
    snapshots before: what has taken a newcomer's room will not go."""
    full = [has_held for problem, has_held in zip(problems, known, strict=True) if problem]
    return all(full) and waited_s <= (NO_ROOM_S if len(full) == len(problems) else ROOM_S)


def ranks_at(node: str, group: Sequence[tuple[str, str]], *, copies: int) -> tuple[int, int]:
    """How many of a group's ranks, each by its (node, failure domain), are on a node, and how many copies are kept
    there of other nodes' ranks."""
    nodes, peers = [each for each, _ in group], plan_peers(list(dict(group).items()), copies=copies)
    return nodes.count(node), ranks_copied(peers, nodes)[node]


def cannot_serve(node: str, folder: str, error: Exception) -> str:
    """What to do where a node's keeper cannot work, for this."""
    if isinstance(error, TransportError):
        return f"node {node[:12]}: {first_line(error)}"
    return (
        f"snapshot.folder={folder} cannot hold snapshots on node {node[:12]} ({first_line(error)}); name a folder in "
        "every node's memory, or take no snapshots: snapshot.every_steps=0"
    )


def _heartbeat_of(folder: Path, job: Job) -> Heartbeat:
    return Heartbeat(folder, collective_timeout_s=job.config.train.collective_timeout_s)


class MemoryTier:
    """The snapshots of a run, from one rank's side. Every method but `__init__` is collective unless it says not."""

    def __init__(self, job: Job) -> None:
        """Ask for this node's keeper, which starts while the rank builds its model."""
        self.job, self.config, self.folder = job, job.config.snapshot, Path()
        self.domain = self.node = ray.get_runtime_context().get_node_id()
        self._start_keeper = partial(start_keeper, job.run_id, self.node, KeeperSettings.of(self.config))
        self.keeper = self._start_keeper()
        self.coordinator = CoordinatorClient(job.coordinator)
        self._store_bytes = 0  # that Ray's object store may take of the folder's file system; 0: once told of
        self.snapshots: Snapshots | None = None  # of the current generation
        self._arenas: Arenas | None = None  # of all
        self._has_held = False  # snapshots, in a generation before
        self._serving = self._serve()
        self._heartbeat: Heartbeat | None = None

    def check_room(self) -> None:
        """Raises CheckpointError where this node's memory cannot hold this rank's snapshots in any group. Local.

        Waits for the keeper, which watches this rank from here on; one that is gone is for `join` to tell.
        """
        with contextlib.suppress(ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
            self._serving = self._serve()  # again: it may have been restarted since this process began
            info = self._info(self._serving)
            self.folder, self.domain, self._store_bytes = Path(info.folder), info.domain, info.object_store_bytes
            need = self.config.slots * max(self._rank_bytes().values())
            if need > (have := self._room()):
                raise CheckpointError(
                    f"{self.config.folder} on node {self.node[:12]} has {have / 1e9:.2f} GB for snapshots; one rank's "
                    f"snapshot.slots={self.config.slots} take {need / 1e9:.2f} GB: give the node more memory (on "
                    "Kubernetes, a larger memory volume), lower snapshot.slots, raise "
                    "cluster.min_workers, or take no snapshots: snapshot.every_steps=0"
                )
            self.coordinator.register_keeper(self.keeper, info)
            self._heartbeat = _heartbeat_of(self.folder, self.job)

    def why_unfit(self) -> str:
        """What this node is joined to the others by should not be trained with, and why; or empty. Local.

        Waits for the keeper. One that does not come, or cannot work, is for `join` to tell.
        """
        least, serving = self.job.config.cluster.least_link_gb_per_s, self._serving
        with contextlib.suppress(ray.exceptions.RayError):
            info: KeeperInfo = ray.get(serving, timeout=CALL_TIMEOUT_S)
            neighbours = self.coordinator.neighbours(info)
            problem: str = ray.get(self.keeper.check_link.remote(neighbours, least * 1e9), timeout=CALL_TIMEOUT_S)
            return problem
        return ""

    def waiting(self, generation: int, breaker: Breaker) -> None:
        """This process is about to form a generation, and is to be broken off if that is over. Local.

        One whose keeper did not come, in its first generation, waits until the deadline.
        """
        if self._heartbeat is not None:
            self._heartbeat.enter(generation, breaker)

    def join(self, generation: int, gloo: set[Address], breaker: Breaker, *, speaks: bool) -> None:
        """Wait for the keepers of all nodes to be up and known to the coordinator.

        `gloo` is where this rank's gloo listens; one of a node `speaks`. Raises CheckpointError where no keeper works.
        """
        is_known = self._heartbeat is not None  # to the coordinator; it may be another one by now
        serving = self._serve() if speaks else None if is_known else self._serving
        if serving is not None:
            info = self._info(serving)
            self.folder, self.domain, self._store_bytes = Path(info.folder), info.domain, info.object_store_bytes
            self.coordinator.register_keeper(self.keeper, info)
        breaker.watch(set().union(*gather(list(gloo))))  # all keepers serve by then
        if serving is None:
            self.secret = self._answer(self.keeper.secret.remote(), lambda: self.keeper.secret.remote())
        self._arenas = self._arenas or Arenas(self.folder)
        self._heartbeat = self._heartbeat or _heartbeat_of(self.folder, self.job)
        self._heartbeat.enter(generation, breaker)

    def restore(self, entries: Sequence[Entry], place: Coordinates, *, at_least: int) -> Progress | None:
        """Fill the entries of a rank at this place from the newest snapshot that is whole.

        None where there is no snapshot of step `at_least` or later, and where some rank could not read it: what the
        entries hold then is nothing to go by.
        """
        step, problem, told = 0, "", set[str]()
        for ask in (self.coordinator.newest_snapshot, self.coordinator.committed_snapshot):
            newest = ask() if dist.get_rank() == 0 else None
            found = from_rank_0(newest.to_json() if newest is not None else None)
            if found is None or (holders := Holders.of_json(found)).moment.step < at_least:
                return None
            step = holders.moment.step
            restored, mine = self._read(entries, place, holders)
            for refused in restored.problems if restored is not None else ():  # whatever becomes of the others
                if (file := refused.partition(": ")[0]) not in told:
                    self.coordinator.note("snapshot_damaged", {"step": step, "detail": refused})
                    told.add(file)
            problem = next(filter(None, gather(mine)), "")
            if restored is not None and not problem:
                return restored_progress(restored.scalars, global_batch_seqs=self.job.config.optim.global_batch_seqs)
        if dist.get_rank() == 0:
            self.coordinator.note("snapshot_unreadable", {"step": step, "detail": problem})
        return None

    def _read(self, entries: Sequence[Entry], place: Coordinates, holders: Holders) -> tuple[Restored | None, str]:
        """What this rank needs, or why it cannot be had. Local."""
        try:
            read = partial(restore_snapshot, entries, holders, node=self.node, folder=self.folder, secret=self.secret)
            with self.phase(Phase.restore):
                restored = read(reader=place.rank, place=place)
            restored_progress(restored.scalars, global_batch_seqs=self.job.config.optim.global_batch_seqs)
        except CheckpointError as error:  # no copies of it are sound, or it is not where this run would go on
            return None, str(error)
        return restored, ""

    def start(self, entries: Sequence[Entry], coordinates: Coordinates, generation: int, stream: Stream) -> Snapshots:
        """Make this rank's slots for a generation whose steps run on `stream`.

        Raises CheckpointError where this node's memory is too small, PeerError where another one's is: at once for a
        newcomer's, and where the run begins; else once what has taken the memory did not go for a while. PeerError also
        where this node's would do without newcomers, which are to go first.
        """
        group = gather((self.node, self.domain))
        here = partial(ranks_at, self.node, copies=self.config.copies)
        on_node, copied = here(group)
        begun = time.monotonic()
        while True:
            shortage, snapshots = self._shortage(coordinates.mesh, on_node, copied), None
            problem = shortage
            if not problem:
                try:
                    with self.phase(Phase.restore):  # a new process makes its memory
                        snapshots = Snapshots(
                            self.folder,
                            entries,
                            coordinates=coordinates,
                            run_id=self.job.run_id,
                            generation=generation,
                            writers=on_node,
                            num_slots=self.config.slots,
                            submit=stream.submit if stream.num_ahead else None,
                            arenas=self._arenas,
                        )
                except CheckpointError as error:
                    problem = str(error)
            problems, known, waited_s = zip(*gather((problem, self._has_held, time.monotonic() - begun)), strict=True)
            if snapshots is not None and not any(problems):
                break
            if snapshots is not None:
                snapshots.discard()
            if not may_wait(problems, known, waited_s[0]):
                proven = [each for each, has_held in zip(group, known, strict=True) if has_held]
                is_newcomers = shortage and self._has_held and not self._shortage(coordinates.mesh, *here(proven))
                if problem and not is_newcomers:
                    raise CheckpointError(f"{problem}; or take no snapshots: snapshot.every_steps=0")
                raise PeerError(next(filter(None, problems)))
            if problem:
                self.coordinator.complaint(self.node, problem)
            time.sleep(LOOK_S)
        self.snapshots, self._has_held = snapshots, True
        return snapshots

    @property
    def heartbeat(self) -> Heartbeat:
        """This rank's, once it has joined a group. Local."""
        assert self._heartbeat is not None
        return self._heartbeat

    def phase(self, phase: Phase) -> contextlib.AbstractContextManager[None]:
        """What this rank does now, while the others may wait for it. Local."""
        return self._heartbeat.phase(phase) if self._heartbeat is not None else contextlib.nullcontext()

    def close_snapshots(self) -> None:
        """The generation is over, however it ended: nothing that is not sealed will be. Local."""
        if self.snapshots is not None:
            with contextlib.suppress(Exception):  # of a device that cannot be trusted
                self.snapshots.close()
            self.snapshots = None

    def leave(self) -> None:
        """This process has left its group, and is in none. Local."""
        if self._heartbeat is not None:
            self._heartbeat.leave()

    def close(self) -> None:
        """This process trains no more. Local."""
        if self._arenas is not None:
            self._arenas.close()

    def _info(self, serving: Any) -> KeeperInfo:
        """What the keeper says of itself. Raises CheckpointError where it cannot work on its node."""
        try:
            return cast(KeeperInfo, self._answer(serving, self._serve))
        except ray.exceptions.RayTaskError as error:
            raise CheckpointError(cannot_serve(self.node, self.config.folder, error.cause or error)) from error

    def _answer(self, asked: Any, ask_again: Callable[[], Any]) -> Any:
        """What the keeper says; where it has ended, as one that no coordinator spoke to for long, another one."""
        with contextlib.suppress(ray.exceptions.RayActorError):
            return ray.get(asked, timeout=CALL_TIMEOUT_S)
        self.keeper = self._start_keeper()
        return ray.get(ask_again(), timeout=CALL_TIMEOUT_S)

    def _serve(self) -> Any:
        self.secret = self.coordinator.secret()  # anew each time: a coordinator that finds no keeper makes another
        return self.keeper.serve.remote(self.job.coordinator, self.secret)

    def _room(self) -> int:
        """Bytes that snapshots may take on this node, those included that they take."""
        room = os.statvfs(self.folder)
        return room.f_bavail * room.f_frsize + bytes_held(self.folder)

    def _tell_of_store(self, need: SnapshotMemory, have: int) -> None:
        """Ray's object store may take as much of the same memory as it was given: of that nothing is seen before."""
        room = os.statvfs(self.folder)
        taken = (room.f_blocks - room.f_bfree) * room.f_frsize - bytes_held(self.folder)  # by it, at the most
        store, self._store_bytes = max(0, self._store_bytes - taken), 0
        if need.total > have - store:
            text = (
                f"node {self.node[:12]}: snapshots may take {need.total / 1e9:.2f} of {have / 1e9:.2f} GB in "
                f"{self.config.folder}, of which Ray's object store may still take {store / 1e9:.2f}; give it less "
                "(ray start --object-store-memory=BYTES), or the node more"
            )
            self.coordinator.note("note", {"text": text})

    def _rank_bytes(self, *sizes: int) -> dict[int, int]:
        """Of the state of a rank, by each world size that a group may have, and by these."""
        config, table = self.job.config, self.job.topologies
        return rank_bytes(config, topologies_of_groups(config, table) | {size: table[size] for size in sizes})

    def _shortage(self, mesh: MeshShape, ranks_on_node: int, copied: int) -> str:
        """Why this node's memory does not do for a group of any size allowed, and for the one before it; or empty."""
        need = plan_snapshot_memory(
            mesh.world_size,
            self._rank_bytes(mesh.world_size),
            slots=self.config.slots,
            ranks_on_node=ranks_on_node,
            ranks_copied=copied,
        )
        if need.total <= (have := self._room()):
            self._tell_of_store(need, have)
            return ""
        return (
            f"{self.config.folder} on node {self.node[:12]} has {have / 1e9:.2f} GB for snapshots; "
            f"{need.total / 1e9:.2f} GB are needed: {need.at_most / 1e9:.2f}, for {ranks_on_node} ranks, copies of "
            f"{copied} of other nodes and snapshot.slots={self.config.slots}, of which a group of {need.world_size} "
            f"workers takes most, and {need.of_before / 1e9:.2f} of the group before it; raise "
            "cluster.min_workers, lower snapshot.slots or snapshot.copies, or give the nodes more memory "
            "(on Kubernetes, a larger memory volume)"
        )
