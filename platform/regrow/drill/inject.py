"""Carrying out faults on this machine's processes and memory. What is stopped is continued, what is filled is freed."""

import os
import random
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from regrow.control.values import Version
from regrow.drill.faults import AT_ITS_SPEED, KINDS, LOOK, NODE, WORKER, Fault, may_befall
from regrow.drill.inject_orders import Ordered
from regrow.drill.nodes import Nodes
from regrow.drill.overlap import Overlapping, Stopped
from regrow.drill.processes import is_alive, send
from regrow.errors import CheckpointError
from regrow.plan.boxes import ITEM_BYTES
from regrow.state.checksums import CHUNK_BYTES
from regrow.state.memory.held import COPY
from regrow.state.memory.slots import SLOT, Committed, SlotHeader, open_slot

MOST_FILLED = 4 << 30  # bytes
SETTLE_S = 0.5  # for keepers to commit what was sealed before everything was stopped
ZOMBIE_S = 5.0  # after a process or a node is continued: is it still there?
FILLER = "drill-filler"
NO_PID = (1 << 22) + 1  # beyond the largest pid
EXPONENT_BIT = 0x02  # of the last byte of a float32 or a bfloat16, little-endian: the number times or by 16

Victim = dict[str, Any]  # {"what": "worker", "rank": 1, "pid": 123, "node": "..."}
Note = Callable[..., None]  # of a fault by its number: what came of it, and fields


class NotNow(Exception):
    """A fault has no victim at this moment; it is tried again."""


@dataclass(frozen=True)
class Scene:
    """A fault that is due, and the processes that are there."""

    number: int
    fault: Fault
    workers: Sequence[Mapping[str, Any]]  # of the current group, in the order of their ranks
    driver: int  # pid
    rank: int = -1  # of the victim, where it is a worker
    node: int = -1  # its number, where it is a node

    def option(self, name: str) -> float:
        value = self.fault.option(name)
        assert value is not None, f"{self.fault.kind} without {name}"
        return value

    @property
    def options(self) -> Mapping[str, float | None]:
        """That the fault's kind has."""
        return KINDS[self.fault.kind].options

    def worker(self, rank: int) -> Victim:
        return {"what": "worker", "rank": rank, "pid": self.workers[rank]["pid"], "node": self.workers[rank]["node"]}

    def other_worker(self, node: str, pid_of: Callable[[Victim], int]) -> Victim:
        """The first one that lives on another node. Raises NotNow where there is none."""
        for rank, worker in enumerate(self.workers):
            if worker["node"] != node and is_alive(pid_of(self.worker(rank))):
                return self.worker(rank)
        raise NotNow("it takes workers on two nodes, both alive")


class Injector:
    """Does what faults say, and later what follows from them. `tick` is called often, `does` has what is possible."""

    def __init__(self, nodes: Nodes, *, seed: int, note: Note) -> None:
        self.nodes, self.seed, self.note = nodes, seed, note
        self._later: list[tuple[float, Callable[[], None]]] = []
        self.stopped = Stopped()
        self.wrong = Overlapping()
        self._newest = 0  # fault, by its number
        self._undo: dict[int, Callable[[], None]] = {}  # what is still wrong, by the fault's number
        self._ordered = Ordered(self)
        self.does = _ways(self) | self._ordered.does

    def inject(self, number: int, fault: Fault, workers: Sequence[Mapping[str, Any]], driver: int) -> list[Victim]:
        """Carry a fault out; its victims. Raises NotNow, having done nothing, where it cannot be at this moment."""
        if not may_befall(fault, len(workers)):
            raise NotNow(f"it is for a group of other ranks than {len(workers)}")
        dice, victim = random.Random(f"{self.seed}/{number}"), KINDS[fault.kind].victim
        rank = self._choose_worker(fault, workers, dice) if victim == WORKER else -1
        node = self._choose_node(fault, workers, dice) if victim == NODE else -1
        victims = self.does[fault.kind](Scene(number, fault, workers, driver, rank, node))
        self._newest = number
        return victims

    def tick(self) -> None:
        """Do what is due of earlier faults."""
        now = time.monotonic()
        due = [action for at, action in self._later if at <= now]
        self._later = [(at, action) for at, action in self._later if at > now]
        for action in due:
            action()
        self._ordered.tick()

    @property
    def busy(self) -> bool:
        """Whether something of an earlier fault is still to come."""
        return bool(self._later)

    def close(self) -> None:
        """Undo what is not undone yet."""
        self._later.clear()
        self.stopped.close()
        for number in list(self._undo):
            self._heal(number)

    def _kill_worker(self, scene: Scene) -> list[Victim]:
        victim = scene.worker(scene.rank)
        send(signal.SIGKILL, [self.pid_of(victim)])
        return [victim]

    def _stop_worker(self, scene: Scene) -> list[Victim]:
        victim = scene.worker(scene.rank)
        pids = [self.pid_of(victim)]
        self.stopped.hold(scene.number, pids)
        continue_after_s = scene.fault.option("continue_after_s")
        if continue_after_s is not None:
            self.later(continue_after_s, lambda: self._wake(scene.number, pids, node=""))
        return [victim]

    def _slow_worker(self, scene: Scene) -> list[Victim]:
        victim, until = scene.worker(scene.rank), time.monotonic() + scene.option("for_s")
        share, period_s, pid = scene.option("share"), scene.option("period_s"), self.pid_of(victim)
        longest_s = 0.0  # that it was stopped at a stretch: other faults may keep the drill from coming back to it

        def stop() -> None:
            since = time.monotonic()
            if since < until and is_alive(pid):
                self.stopped.hold(scene.number, [pid])
                self.later(share * period_s, partial(go_on, since))
            else:
                self.note(scene.number, AT_ITS_SPEED, longest_s=round(longest_s, 3))

        def go_on(since: float) -> None:
            nonlocal longest_s
            self.stopped.let_go(scene.number, [pid])
            longest_s = max(longest_s, time.monotonic() - since)
            self.later((1 - share) * period_s, stop)

        stop()
        return [victim]

    def _kill_node(self, scene: Scene) -> list[Victim]:
        victims = self.on_node(scene)
        self.nodes.kill(scene.node)
        return victims

    def must_reach(self, number: int) -> None:
        """Raises NotNow where the head does not reach this node, so that a drill does not wait for what it has cut."""

    def _drain_node(self, scene: Scene) -> list[Victim]:
        self.must_reach(scene.node)
        victims, deadline_s = self.on_node(scene), scene.option("deadline_s")
        self.nodes.drain(scene.node, deadline_s=deadline_s, message=f"drill, fault {scene.number}")
        self.later(deadline_s, lambda: self.end_node(scene.number, victims[0]["node"]))
        return victims

    def _black_hole_node(self, scene: Scene) -> list[Victim]:
        victims, pids = self.on_node(scene), self.nodes.pids(scene.node)
        self.stopped.hold(scene.number, pids)
        kill_after_s, continue_after_s = scene.fault.option("kill_after_s"), scene.fault.option("continue_after_s")
        if kill_after_s is not None:
            self.later(kill_after_s, lambda: self.end_node(scene.number, victims[0]["node"]))
        elif continue_after_s is not None:
            self.later(continue_after_s, lambda: self._wake(scene.number, pids, node=victims[0]["node"]))
        return victims

    def _kill_controller(self, scene: Scene) -> list[Victim]:
        """Ray ends the actors that a process had started with it: the workers are victims, too."""
        victims = self._kill_actor("Controller", "controller")
        return [*victims, *(scene.worker(rank) for rank in range(len(scene.workers)))]

    def _kill_driver(self, scene: Scene) -> list[Victim]:
        send(signal.SIGKILL, [scene.driver])
        return [{"what": "driver", "pid": scene.driver}]

    def _stop_driver(self, scene: Scene) -> list[Victim]:
        self.stopped.hold(scene.number, [scene.driver])
        self.later(scene.option("for_s"), lambda: self._wake(scene.number, [scene.driver], node=""))
        return [{"what": "driver", "pid": scene.driver}]

    def _interrupt_driver(self, scene: Scene) -> list[Victim]:
        os.killpg(scene.driver, signal.SIGINT)
        return [{"what": "driver", "pid": scene.driver}]

    def _fill_memory(self, scene: Scene) -> list[Victim]:
        folders = self.nodes.memory_folders()
        for folder in folders:
            self.wrong.begin(folder, scene.number, partial(_fill, folder / FILLER, scene))

        def empty() -> None:
            for folder in folders:
                self.wrong.end(folder, scene.number, partial((folder / FILLER).unlink, missing_ok=True))

        self.until_healed(scene, empty, "memory freed")
        return [
            {"what": "memory", "folder": str(folder), "bytes": (folder / FILLER).stat().st_size} for folder in folders
        ]

    def _choose_worker(self, fault: Fault, workers: Sequence[Mapping[str, Any]], dice: random.Random) -> int:
        pids = [self.pid_of(worker) for worker in workers]
        free = [rank for rank, pid in enumerate(pids) if is_alive(pid) and pid not in self.stopped.pids]
        if fault.rank is None and free:
            return free[int(dice.random() * len(free))]
        if fault.rank is None or fault.rank not in free:
            raise NotNow("no worker is there" if fault.rank is None else f"rank {fault.rank} is not there")
        return fault.rank

    def _choose_node(self, fault: Fault, workers: Sequence[Mapping[str, Any]], dice: random.Random) -> int:
        """One that is not being silent; a drawn one has workers where any has."""
        up = [each for each in range(len(self.nodes.nodes)) if self.stopped.pids.isdisjoint(self.nodes.pids(each))]
        chosen = fault.node
        if fault.rank is not None:
            chosen = self.nodes.number_of(workers[self._choose_worker(fault, workers, dice)]["node"])
        elif chosen is None and up:
            used = {worker["node"] for worker in workers}
            drawn = [each for each in up if self._node_id(each) in used] or up
            chosen = drawn[int(dice.random() * len(drawn))]
        if chosen is None or chosen not in up:
            raise NotNow("that node is not up")
        return chosen

    def on_node(self, scene: Scene, number: int | None = None) -> list[Victim]:
        node_id = self._node_id(scene.node if number is None else number)
        ranks = [rank for rank, worker in enumerate(scene.workers) if worker["node"] == node_id]
        return [{"what": "node", "node": node_id}, *map(scene.worker, ranks)]

    def _node_id(self, number: int) -> str:
        return str(self.nodes.nodes[number].node_id)

    def _kill_actor(self, class_name: str, what: str, node: str | None = None) -> list[Victim]:
        victim = self._actor(class_name, what, node)
        if not send(signal.SIGKILL, [self.pid_of(victim)]):
            raise NotNow(f"no {what} is up")
        return [victim]

    def _stop_actor(self, scene: Scene, class_name: str, what: str, node: str | None = None) -> list[Victim]:
        victim = self._actor(class_name, what, node)
        pids = [self.pid_of(victim)]
        self.stopped.hold(scene.number, pids)
        self.later(scene.option("for_s"), lambda: self._wake(scene.number, pids, node=""))
        return [victim]

    def _actor(self, class_name: str, what: str, node: str | None = None) -> Victim:
        for actor in self.nodes.actors():
            here, pid = actor["Address"]["NodeID"], actor["Pid"]
            named = actor["ActorClassName"].rpartition(".")[2].endswith(class_name)
            victim = {"what": what, "pid": pid, "node": here}
            if named and node in (None, here) and actor["State"] == "ALIVE" and is_alive(self.pid_of(victim)):
                return victim
        raise NotNow(f"no {what} is up")

    def pid_of(self, victim: Mapping[str, Any]) -> int:
        """As this process sees it; of one that has ended, a pid that nothing has."""
        return self.nodes.pid(victim["node"], victim["pid"]) or NO_PID

    def _wake(self, number: int, pids: Sequence[int], *, node: str) -> None:
        """Processes run on, and write what they can; a look later at what is still there."""
        woken = self.stopped.let_go(number, pids)
        self.note(number, "continued", processes=len(woken))

        def look() -> None:
            alive = [pid for pid in woken if is_alive(pid)]
            self.note(number, "looked at again", processes=len(alive))
            if node and not is_alive(pids[0]):  # its raylet gave up: the host is given back
                self.end_node(number, node)

        if woken:
            self.later(ZOMBIE_S, look)

    def end_node(self, number: int, node: str) -> None:
        here = self.nodes.number_of(node)
        if here is not None:
            self.stopped.forget(self.nodes.pids(here))
            self.nodes.kill(here)
            self.note(number, "node gone", node=node)

    def until_healed(self, scene: Scene, heal: Callable[[], None], note: str) -> None:
        """Something is wrong for as long as the fault says, or until the drill ends."""
        number = scene.number
        self._undo[number] = heal

        def due() -> None:
            self._heal(number)
            self.note(number, note)

        self.later(scene.option("for_s"), due)

    def _heal(self, number: int) -> None:
        heal = self._undo.pop(number, None)
        if heal is not None:
            heal()

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        self._later.append((time.monotonic() + seconds, action))


def _ways(injector: Injector) -> dict[str, Callable[[Scene], list[Victim]]]:
    """What each kind of fault does; its victims."""
    return {
        "kill_worker": injector._kill_worker,
        "stop_worker": injector._stop_worker,
        "slow_worker": injector._slow_worker,
        "corrupt_snapshot": lambda scene: corrupt_snapshot(injector, scene),
        "kill_node": injector._kill_node,
        "drain_node": injector._drain_node,
        "black_hole_node": injector._black_hole_node,
        "return_node": lambda scene: [{"what": "new node", "node": injector.nodes.add()}],
        LOOK: lambda scene: [],
        "kill_keeper": lambda scene: injector._kill_actor("Keeper", "keeper", injector._node_id(scene.node)),
        "kill_coordinator": lambda scene: injector._kill_actor("Coordinator", "coordinator"),
        "kill_controller": injector._kill_controller,
        "kill_driver": injector._kill_driver,
        "fill_memory": injector._fill_memory,
        "stop_coordinator": lambda scene: injector._stop_actor(scene, "Coordinator", "coordinator"),
        "stop_controller": lambda scene: injector._stop_actor(scene, "Controller", "controller"),
        "stop_keeper": lambda scene: injector._stop_actor(scene, "Keeper", "keeper", injector._node_id(scene.node)),
        "stop_driver": injector._stop_driver,
        "interrupt_driver": injector._interrupt_driver,
        "drain_all": lambda scene: _drain_all(injector, scene),
    }


def _drain_all(injector: Injector, scene: Scene) -> list[Victim]:
    nodes, every_s = injector.nodes, scene.fault.option("replace_every_s")
    for number in range(len(nodes.nodes)):
        injector.must_reach(number)
    for number in range(len(nodes.nodes)):
        nodes.drain(number, deadline_s=scene.option("deadline_s"), message=f"drill, fault {scene.number}")
    drained = [each.node_id for each in nodes.nodes]
    if every_s is not None:
        injector.later(scene.option("deadline_s"), lambda: _replace(injector, scene.number, drained, every_s))
    return [victim for number in range(len(drained)) for victim in injector.on_node(scene, number)]


def _replace(injector: Injector, number: int, nodes: Sequence[str], every_s: float) -> None:
    """Ray starts nothing more on nodes that drain: one after the other goes, once another one has come."""
    here = [node for node in nodes if injector.nodes.number_of(node) is not None]
    if here:
        injector.note(number, "node comes", node=injector.nodes.add())
        injector.later(every_s, lambda: injector.end_node(number, here[0]))
        injector.later(every_s, lambda: _replace(injector, number, here[1:], every_s))


def corrupt_snapshot(injector: Injector, scene: Scene) -> list[Victim]:
    node, pids = scene.workers[scene.rank]["node"], [injector.pid_of(worker) for worker in scene.workers]
    killed = scene.other_worker(node, injector.pid_of)
    if not all(map(is_alive, pids)):
        raise NotNow("it takes workers that are all alive")
    injector.stopped.hold(scene.number, pids)  # nothing newer is to be committed
    try:
        time.sleep(SETTLE_S)
        damaged = [each for folder in injector.nodes.memory_of(node) if (each := damage(folder))]
        if not damaged:
            raise NotNow("no snapshot is committed on that node")
        send(signal.SIGKILL, [injector.pid_of(killed)])
    finally:
        injector.stopped.let_go(scene.number, pids)
    return [*({"what": "snapshot", "node": node} | each for each in damaged), killed]


def free_bytes(folder: str | Path) -> int:
    """Room on the file system of a folder."""
    room = os.statvfs(folder)
    return room.f_bavail * room.f_frsize


def _fill(path: Path, scene: Scene) -> None:
    """Take the room on a file system but for what the fault leaves, be it more or less than is taken already."""
    if not path.parent.is_dir():  # the host is gone
        return
    with open(path, "ab") as file:
        taken = os.fstat(file.fileno()).st_size
        size = max(0, taken + free_bytes(path.parent) - int(scene.option("leave_mb") * 1e6))
        assert size <= MOST_FILLED, "this was to be checked before anything began"
        if size > taken:
            os.posix_fallocate(file.fileno(), taken, size - taken)
        else:
            file.truncate(size)


def damage(folder: Path) -> Victim | None:
    """Flip bits in every snapshot of the newest committed step in a keeper's folder: of one exponent in each piece that
    has a checksum of its own, so that whatever is read is damaged, and tells in the loss where it is taken as good.

    The step, the files, the ranks that wrote them and their mesh; None where the folder has none.
    """
    newest, damaged = Committed.read(folder).newest, dict[str, SlotHeader]()
    for path in sorted(folder.glob(f"*{SLOT}*")):
        try:
            header = open_slot(path) if path.name.endswith((SLOT, COPY)) else None
        except CheckpointError:
            continue
        if header is None or Version(header.generation, header.step) != newest:
            continue
        with open(path, "r+b") as file:
            for box, offset in zip(header.boxes, header.offsets, strict=False):
                for begin in range(0, box.num_bytes, CHUNK_BYTES):
                    num_items = min(CHUNK_BYTES, box.num_bytes - begin) // ITEM_BYTES[box.dtype]
                    at = offset + begin + (num_items // 2 + 1) * ITEM_BYTES[box.dtype] - 1  # the last byte of one
                    (byte,) = os.pread(file.fileno(), 1, at)
                    os.pwrite(file.fileno(), bytes([byte ^ EXPONENT_BIT]), at)
        damaged[path.name] = header
    if not damaged:
        return None
    places = [header.coordinates for header in damaged.values()]
    ranks, axes = [place.rank for place in places], places[0].mesh.sizes
    return {"step": newest.step, "files": list(damaged), "ranks": ranks, "axes": axes}
