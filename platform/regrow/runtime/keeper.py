"""Keepers as Ray actors: one a node, detached, so that they outlive workers, the coordinator and the driver.

Ray carries control alone; bytes go through shared memory and the keepers' own sockets. What keepers report of a step
goes up a tree of them, and what is said to them goes down it: no keeper, nor the coordinator at its root, hears from or
speaks to more than `control.peers.FAN_OUT` of them, however many nodes there are; but the coordinator tells those that
a group does not use of its first commit. A keeper whose coordinator and workers are gone for long deletes what it holds
and ends: an abandoned run leaves nothing in memory.
"""

import contextlib
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from regrow.config.schema import SnapshotConfig, SnapshotTransport
from regrow.control.health import Pulse
from regrow.control.membership import NODE_NAME
from regrow.control.values import NOTHING, GpuReading, Peer, SnapshotAck, Version
from regrow.errors import CheckpointError
from regrow.runtime.calls import CoordinatorClient, KeeperCalls
from regrow.runtime.hardware.gpus import XidWatch, read_gpus
from regrow.runtime.hardware.settings import allow_descriptors
from regrow.runtime.joining import Joins, Speaking
from regrow.runtime.liveness.deaths import Deaths
from regrow.runtime.liveness.probe import Lifeline
from regrow.runtime.liveness.pulse import last_beat, look, read_pulses, started_at, where
from regrow.runtime.writing import DEVICES, GROUPS, Own, Writing, on_threads_of
from regrow.state.memory.arenas import remove_abandoned
from regrow.state.memory.control_word import ControlWord
from regrow.state.memory.held import Held, claim, is_mine
from regrow.state.memory.holders import Holding
from regrow.state.memory.link import Damaged, Link, measure
from regrow.state.memory.node import KeeperNode, delete_run, is_served, last_used, take_over_leftovers
from regrow.state.memory.ranges import Address
from regrow.state.memory.rdma import NixlTransport
from regrow.state.memory.slots import Committed
from regrow.storage import path_of

NAMESPACE = "regrow"
COORDINATOR = "coordinator"  # its name is this after the run's id, a keeper's the node's id
PING_S = 5.0
ASK_AFTER = 0.25  # of the time after which a silent coordinator is given up
CLOSE_S = 10.0  # for a keeper to delete what it holds, or to answer where that takes longer
FREE_S = 120.0  # for one that answers: 300 GB of a node's memory, of which a kernel gives back some 4 to 10 GB/s
SHARED_MEMORY = "/dev/shm"  # where Ray's object store is, unless it was told otherwise
A_KEEPERS = re.compile(r"regrow-[0-9a-f]{16}-[0-9a-f]{12}")  # folders, by run and node; see `start_keeper`
STORE_OPTION = b"--object_store_memory="  # of a raylet, in bytes


@dataclass(frozen=True)
class KeeperSettings:
    """What a keeper goes by until it ends, by the names that the settings have in a config's `snapshot`."""

    folder: str
    domain_label: str | None
    abandon_after_s: float
    transport: SnapshotTransport = SnapshotTransport.tcp

    @staticmethod
    def of(config: SnapshotConfig) -> "KeeperSettings":
        return KeeperSettings(config.folder, config.domain_label, config.abandon_after_s, config.transport)

    @property
    def by_rdma(self) -> bool:
        return self.transport is SnapshotTransport.nixl

    def in_place(self, other: "KeeperSettings") -> list[str]:
        """What another keeper goes by in place of these, as `snapshot.folder=/dev/shm`; it may be of other code."""
        theirs = {name: getattr(other, name, mine) for name, mine in vars(self).items()}
        return [f"snapshot.{name}={value}" for name, value in theirs.items() if value != getattr(self, name)]


@dataclass(frozen=True)
class KeeperInfo:
    """What others need to know of a keeper."""

    node: str
    domain: str  # that fails as one
    folder: str
    address: Address
    newest: Version  # the newest commit that it knows
    held: tuple[Held, ...]
    lifeline: int = 0  # the port at which it listens while its process lives; 0: nowhere
    newest_generation: int = NOTHING  # of which it has heard
    object_store_bytes: int = 0  # that Ray's object store may take of the folder's file system
    node_up_s: float | None = None  # since its node's raylet began; None: not known
    settings: KeeperSettings | None = None  # None: its code is of before they were told


@dataclass(frozen=True)
class Place:
    """A keeper's place in a generation."""

    peers: tuple[Peer, ...] = ()
    leader: Any = None  # the keeper that speaks for this one; None: it speaks for itself
    members: tuple[Any, ...] = ()  # those that this one speaks for
    num_nodes: int = 1  # itself, its members, theirs and so on
    number: int = 0  # of the coordinator's message: an older one may come later, and counts for nothing


class Keeper(Speaking, Writing):
    """The actor. Starts its node's keeper in `folder`, or takes up what an earlier one left there."""

    def __init__(self, run_id: str, node: str, folder: str, settings: KeeperSettings) -> None:
        allow_descriptors()
        self.run_id, self.node_id, self.settings = run_id, node, settings
        labels: dict[str, str] = ray.get_runtime_context().get_node_labels() or {}  # type: ignore[assignment]
        self.domain = domain_of(node, labels, settings.domain_label, os.environ)
        self.folder = Path(folder)
        self.object_store_bytes = _object_store_bytes(self.folder)
        self.keeper: KeeperNode | None = None
        self.me = ray.get_runtime_context().current_actor
        self.lock, self.placing = threading.Lock(), threading.Lock()
        self.word = ControlWord()
        self.coordinator: Any = None
        self.place, self._own = Place(), dict[str, Own]()
        self.reports: dict[Version, list[SnapshotAck]] = {}  # of the nodes that this keeper speaks for
        self.passed_on = Version()  # the newest of which all have reported
        self.heard_at = time.monotonic()
        self.checking_link = threading.Lock()
        self.link: Link | None = None  # to one other node
        restarted = bool(ray.get_runtime_context().was_current_actor_reconstructed)
        threading.Thread(target=self._watch, args=(0.0 if restarted else PING_S,), name="watch", daemon=True).start()
        self.xids = XidWatch(self._tell_xid)
        self.joins = Joins(lambda: CoordinatorClient(self.coordinator))
        self.broken = NOTHING  # the newest generation of which a worker of this node has said that it broke
        self.deaths = Deaths(self.folder, self._tell_gone)
        self.lifeline = Lifeline(ray.util.get_node_ip_address())

    def serve(self, coordinator: Any, secret: bytes) -> KeeperInfo:
        """Work for this coordinator from now on; the same again, or another one after the first was lost.

        Raises TransportError where the node has not what its transport needs.
        """
        with self.lock:  # every rank of the node asks
            take_over_leftovers(self.folder, f"regrow-{self.run_id}-*", _nodes_alive)
            if self.keeper is None:
                claim(self.folder)
                self.word = ControlWord.read(self.folder)
            self.coordinator = coordinator
            self.heard_at = time.monotonic()
            if self.keeper is None:
                delete_abandoned(self.folder, self.settings.abandon_after_s)
                self.keeper = KeeperNode(
                    self.folder,
                    node=self.node_id,
                    host=ray.util.get_node_ip_address(),
                    secret=secret,
                    run_id=self.run_id,
                    report=lambda sealed: self.relay([sealed]),
                    complain=lambda *what: CoordinatorClient(self.coordinator).complaint(self.node_id, *what),
                    transport=NixlTransport(self.node_id) if self.settings.by_rdma else None,
                )
                self.keeper.start()
            self.keeper.secret = secret
        newest = Committed.read(self.folder).newest
        held = tuple(self.keeper.holdings())
        heard_of = max([self.word.newest, newest.generation, *(each.moment.generation for each in held)])
        return KeeperInfo(
            self.node_id,
            self.domain,
            str(self.folder),
            self.keeper.address,
            newest,
            held,
            self.lifeline.port,
            heard_of,
            self.object_store_bytes,
            _node_up_s(),
            self.settings,
        )

    def secret(self) -> bytes:
        """That this keeper goes by, for a coordinator that was restarted."""
        return self._keeper.secret

    def take_place(self, place: Place) -> None:
        """A generation begins, or others hold copies from here on."""
        with self.placing:  # not `lock`, which `relay` takes: known peers are reported to in here
            if place.number >= self.place.number:
                with self.lock:
                    self.place = place
                self._keeper.set_peers(place.peers)

    def relay(self, reports: Sequence[SnapshotAck]) -> None:
        """Reports of this keeper and of those that it speaks for: passed on once all have reported a step.

        One that is late is passed on by itself: its node may have heard before this one that others hold its copies.
        """
        with self.lock:
            place, size = self.place, self.place.num_nodes
            late = [report for report in reports if report.version <= self.passed_on]
            for report in (each for each in reports if each.version > self.passed_on):
                self.reports.setdefault(report.version, []).append(report)
            whole = [moment for moment, of_moment in self.reports.items() if len({r.node for r in of_moment}) >= size]
            sending = late + [report for moment in whole for report in self.reports[moment]]
            if whole:
                self.passed_on = max(whole)
                self.reports = {moment: r for moment, r in self.reports.items() if moment > max(whole)}
        if sending:
            if place.leader is None:
                CoordinatorClient(self.coordinator).snapshots_sealed(sending)
            else:
                place.leader.relay.remote(sending)

    def committed(self, state: Committed) -> None:
        """What is committed now; messages are numbered, as they may overtake one another."""
        self.heard_at = time.monotonic()
        with self.lock:
            members = self.place.members
        for member in members:
            member.committed.remote(state)
        self._keeper.committed(state)  # may give back a lot of memory, while others are told that a generation is over

    def holdings(self, since: Version) -> list[Holding]:
        """What this keeper holds of a step and of later ones."""
        return Holding.all_of(held for held in self._keeper.holdings() if held.moment >= since)

    def pulses(self) -> list[Pulse]:
        """Of the workers of this node."""
        return read_pulses(self.folder)

    def where(self) -> list[Pulse]:
        """The same, once they have said whether they wait for others."""
        return where(self.folder, self._ask_where())

    def check_link(self, neighbours: Sequence[Peer], least_bytes_per_s: float) -> str:
        """Why workers of this node should not join a group for what joins it to one of these, or empty.

        Measured once. A neighbour that does not answer says nothing of this node.
        """
        with self.checking_link:  # every rank of the node asks
            for peer in neighbours if self.link is None else ():
                try:
                    self.link = measure(peer.node, peer.address, self._keeper.secret)
                except Damaged as error:
                    return f"its link to node {peer.node[:12]}: {error}"
                except CheckpointError as error:
                    self._note("link_failed", to=peer.node, detail=str(error))
                    continue
                self._note("link", to=peer.node, sent=self.link.sent, received=self.link.received)
                break
            if self.link is None or min(self.link.sent, self.link.received) >= least_bytes_per_s:
                return ""
            return (
                f"its link to node {self.link.node[:12]} carries {self.link.sent / 1e9:.2g} GB/s there and "
                f"{self.link.received / 1e9:.2g} back; cluster.least_link_gb_per_s={least_bytes_per_s / 1e9:g}"
            )

    @on_threads_of(DEVICES)
    def gpus(self) -> list[GpuReading]:
        """What the GPUs of this node tell of themselves."""
        return [GpuReading(str(gpu), gpu.temperature_c, gpu.power_w) for gpu in read_gpus()]

    @on_threads_of(DEVICES)
    def links(self) -> dict[str, float]:
        """Bytes/s to each node that holds copies of this one's snapshots, the slower way; one that does not answer says
        nothing."""
        rates = {}
        for peer in self.place.peers:
            with contextlib.suppress(CheckpointError):
                link = measure(peer.node, peer.address, self._keeper.secret)
                rates[peer.node] = min(link.sent, link.received)
        return rates

    @on_threads_of(DEVICES)
    def look(self) -> str:
        """Where each worker of this node is, and what its GPUs tell."""
        self._ask_where()
        return look(self.folder) + "".join(f"{gpu}\n" for gpu in self.gpus())

    def remember(self, generation: int) -> None:
        """This generation gets its number, which a coordinator that storage has not told of it must not give again."""
        with self.lock:
            self.word = replace(self.word, newest=max(generation, self.word.newest))
            self.word.write(self.folder)
        self.joins.formed()

    def over(self, generation: int) -> None:
        """Tell the workers of this node that a generation is over, also those that wait in one of its collectives."""
        with self.lock:
            self.word = replace(self.word, over=max(generation, self.word.over))
            self.word.write(self.folder)

    def end_process(self, pid: int, started: int) -> None:
        """Kill a worker of this node that hangs; one that is stopped, too. Not another process that has its pid now.

        `started` is when the worker did, as its kernel counts; 0: not known.
        """
        with contextlib.suppress(ProcessLookupError):
            if started in (0, started_at(pid)):
                os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        """Delete everything, what an earlier keeper left there too."""
        self.xids.close()
        self.deaths.close()
        self.lifeline.close()
        if self.keeper is not None:
            self.keeper.close(delete=True)
            self.keeper = None
        delete_run(self.folder, f"regrow-{self.run_id}-*")

    def _ask_where(self) -> int:
        with self.lock:
            self.word = replace(self.word, traces=self.word.traces + 1)
            self.word.write(self.folder)
            return self.word.traces

    @property
    def _keeper(self) -> KeeperNode:
        assert self.keeper is not None, "it serves no run yet"
        return self.keeper

    def _note(self, event: str, **fields: Any) -> None:
        CoordinatorClient(self.coordinator).note(event, {"node": self.node_id} | fields)

    def _tell_xid(self, uuid: str, xid: int) -> None:
        if self.coordinator is not None:
            CoordinatorClient(self.coordinator).gpu_error(self.node_id, uuid, xid)

    def _tell_gone(self, pid: int) -> None:
        remove_abandoned(self.folder)
        if self.coordinator is not None:
            CoordinatorClient(self.coordinator).gone(self.node_id, pid)

    def _watch(self, pause_s: float) -> None:
        """Find the coordinator again after this actor was restarted; end once it and this node's workers are gone.

        It is asked only after a while without a word of it: thousands that ask cost it more than training does. One
        that was restarted asks at once: until it is known again, others' copies have no place, and they look for one.
        """
        abandon_after_s, beaten_at = self.settings.abandon_after_s, 0.0
        while True:
            time.sleep(pause_s)
            pause_s, silent_s = PING_S, time.monotonic() - self.heard_at
            is_silent = silent_s > ASK_AFTER * abandon_after_s
            if is_silent:  # else pulses are the coordinator's to read: a death shows in them once
                beaten_at = max(beaten_at, last_beat(self.folder))
            with contextlib.suppress(ray.exceptions.RayError, ValueError):  # ValueError: there is none now
                if self.coordinator is None:
                    coordinator = ray.get_actor(f"{self.run_id}:{COORDINATOR}", namespace=NAMESPACE)
                    ray.get(coordinator.greet.remote(self.node_id, self.me), timeout=4 * PING_S)
                elif is_silent:
                    ray.get(self.coordinator.ready.remote(), timeout=PING_S)
                    self.heard_at = time.monotonic()
            if time.monotonic() - max(self.heard_at, beaten_at) > abandon_after_s:
                break
        self.close()
        ray.kill(self.me, no_restart=True)


_offers: type[KeeperCalls] = Keeper  # mypy holds it to that


def domain_of(node: str, labels: Mapping[str, str], label: str | None, environment: Mapping[str, str]) -> str:
    """What fails with a Ray node: what it is labelled as, else the machine that the environment names, as a pod's does,
    for several pods may be on one. Else the node alone: those of `cluster.local_nodes` and of drills fail one by one.
    """
    return labels.get(label or "") or environment.get(NODE_NAME) or node


def _object_store_bytes(folder: Path) -> int:
    """Of Ray's object store, where that is in the same file system; it never says how much it takes by now.

    As this process' raylet was told: Ray's own list is of all nodes. 0 where another process started this one.
    """
    with contextlib.suppress(OSError):  # a folder that is none is for `serve` to tell
        if (raylet := _raylet()) and os.stat(SHARED_MEMORY).st_dev == os.stat(folder.parent).st_dev:
            options = Path(f"/proc/{raylet}/cmdline").read_bytes().split(b"\0")
            return sum(int(each.removeprefix(STORE_OPTION)) for each in options if each.startswith(STORE_OPTION))
    return 0


def _nodes_alive() -> set[str]:
    """The ends of their keepers' folders."""
    return {str(node["NodeID"])[:12] for node in ray.nodes() if node["Alive"]}


def delete_abandoned(mine: Path, abandon_after_s: float) -> None:
    """Other runs' folders beside this one that no keeper serves any more, as after a power cut of Ray alone.

    Nothing else, whatever it is called: `snapshot.folder` may be /tmp, and have a checkout and the shard cache."""
    for folder in mine.parent.glob("regrow-*"):
        with contextlib.suppress(OSError):
            if not A_KEEPERS.fullmatch(folder.name) or folder == mine or not is_mine(folder) or is_served(folder):
                continue
            if time.time() - last_used(folder) > abandon_after_s:
                shutil.rmtree(folder, ignore_errors=True)


def _node_up_s() -> float | None:
    """How long this process' raylet has been there."""
    with contextlib.suppress(OSError):
        if raylet := _raylet():
            began_s = started_at(raylet) / os.sysconf("SC_CLK_TCK")
            return time.clock_gettime(time.CLOCK_BOOTTIME) - began_s
    return None


def _raylet() -> int | None:
    """The pid of this process' raylet, whose child it is; None: another process started it."""
    raylet = os.getppid()
    return raylet if Path(f"/proc/{raylet}/comm").read_text().strip() == "raylet" else None


def start_keeper(run_id: str, node: str, settings: KeeperSettings) -> Any:
    """The keeper of a node; started where there is none. Returns at once.

    One that a job before this one has left goes on by that one's settings, and has its snapshots.
    """
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    folder = str(path_of(settings.folder) / f"regrow-{run_id}-{node[:12]}")
    actor: Any = ray.remote(concurrency_groups=GROUPS)(Keeper)  # type: ignore[call-overload]
    return actor.options(
        name=f"{run_id}:{node}",
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        scheduling_strategy=there,
        max_restarts=-1,
        max_concurrency=8,
    ).remote(run_id, node, folder, settings)


def end_keepers(handles: Mapping[str, Any]) -> list[str]:
    """Have keepers, by node, delete what they hold, and end them; the nodes where that was not done in time."""
    closing = {handle.close.remote(): node for node, handle in handles.items()}
    answering = {handles[closing[call]].secret.remote(): call for call in _not_done(closing, CLOSE_S)}
    silent = _not_done(answering, CLOSE_S)
    _not_done([call for question, call in answering.items() if question not in silent], FREE_S)
    left = _not_done(answering.values(), 0.0)
    for handle in handles.values():
        ray.kill(handle, no_restart=True)
    return [closing[call] for call in left]


def _not_done(calls: Iterable[Any], within_s: float) -> list[Any]:
    """Those of these that have neither been answered within so long, nor failed."""
    calls = list(calls)
    return list(ray.wait(calls, num_returns=len(calls), timeout=within_s)[1]) if calls else []


def running_keepers(run_id: str) -> dict[str, Any]:
    """All keepers of a run that are up, by node."""
    found = {}
    for entry in ray.util.list_named_actors(all_namespaces=True):
        run, _, node = entry["name"].partition(":")
        if entry["namespace"] == NAMESPACE and run == run_id and node != COORDINATOR:
            with contextlib.suppress(ValueError):  # it ended just now
                found[node] = ray.get_actor(entry["name"], namespace=NAMESPACE)
    return found
