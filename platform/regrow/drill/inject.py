"""Carrying out faults on this machine's processes and memory. What is stopped is continued, what is filled is freed."""

import os
import random
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regrow.control.values import Version
from regrow.drill.faults import KINDS, NODE, WORKER, Fault
from regrow.drill.nodes import LocalNodes
from regrow.drill.processes import is_alive, send
from regrow.errors import CheckpointError
from regrow.state.memory.held import COPY
from regrow.state.memory.slots import SLOT, Committed, open_slot

MOST_FILLED = 4 << 30  # bytes
SETTLE_S = 0.5  # for keepers to commit what was sealed before everything was stopped
ZOMBIE_S = 5.0  # after a process or a node is continued: is it still there?
FILLER = "drill-filler"

Victim = dict[str, Any]  # {"what": "worker", "rank": 1, "pid": 123, "node": "..."}
Note = Callable[..., None]  # of a fault by its number: what came of it, and fields


class NotNow(Exception):
    """A fault has nobody to befall at this moment; it is tried again."""


@dataclass(frozen=True)
class Scene:
    """A fault that is due, and who is there."""

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

    def worker(self, rank: int) -> Victim:
        return {"what": "worker", "rank": rank, "pid": self.workers[rank]["pid"], "node": self.workers[rank]["node"]}


class Injector:
    """Does what faults say, and later what follows from them. `tick` is called often."""

    def __init__(self, nodes: LocalNodes, *, seed: int, note: Note) -> None:
        self.nodes, self.seed, self.note = nodes, seed, note
        self._later: list[tuple[float, Callable[[], None]]] = []
        self._stopped: set[int] = set()
        self._filler = Path(nodes.memory_folder) / FILLER
        self._does: dict[str, Callable[[Scene], list[Victim]]] = {
            "kill_worker": self._kill_worker,
            "stop_worker": self._stop_worker,
            "slow_worker": self._slow_worker,
            "corrupt_snapshot": self._corrupt_snapshot,
            "kill_node": self._kill_node,
            "drain_node": self._drain_node,
            "black_hole_node": self._black_hole_node,
            "return_node": lambda scene: [{"what": "new node", "node": nodes.add()}],
            "kill_keeper": lambda scene: self._kill_actor("Keeper", "keeper", self._node_id(scene.node)),
            "kill_coordinator": lambda scene: self._kill_actor("Coordinator", "coordinator"),
            "kill_controller": self._kill_controller,
            "kill_driver": self._kill_driver,
            "fill_memory": self._fill_memory,
        }

    def inject(self, number: int, fault: Fault, workers: Sequence[Mapping[str, Any]], driver: int) -> list[Victim]:
        """Carry a fault out; whom it befell. Raises NotNow, having done nothing, where it cannot be at this moment."""
        dice, victim = random.Random(f"{self.seed}/{number}"), KINDS[fault.kind].victim
        rank = self._choose_worker(fault, workers, dice) if victim == WORKER else -1
        node = self._choose_node(fault, workers, dice) if victim == NODE else -1
        return self._does[fault.kind](Scene(number, fault, workers, driver, rank, node))

    def tick(self) -> None:
        """Do what is due of earlier faults."""
        now = time.monotonic()
        due = [action for at, action in self._later if at <= now]
        self._later = [(at, action) for at, action in self._later if at > now]
        for action in due:
            action()

    @property
    def busy(self) -> bool:
        """Whether something of an earlier fault is still to come."""
        return bool(self._later)

    def close(self) -> None:
        """Undo what is not undone yet."""
        self._later.clear()
        send(signal.SIGCONT, self._stopped)
        self._filler.unlink(missing_ok=True)

    def _kill_worker(self, scene: Scene) -> list[Victim]:
        victim = scene.worker(scene.rank)
        send(signal.SIGKILL, [victim["pid"]])
        return [victim]

    def _stop_worker(self, scene: Scene) -> list[Victim]:
        victim = scene.worker(scene.rank)
        self._stop([victim["pid"]])
        continue_after_s = scene.fault.option("continue_after_s")
        if continue_after_s is not None:
            self._after(continue_after_s, lambda: self._wake(scene.number, [victim["pid"]], node=""))
        return [victim]

    def _slow_worker(self, scene: Scene) -> list[Victim]:
        victim, until = scene.worker(scene.rank), time.monotonic() + scene.option("for_s")
        share, period_s, pid = scene.option("share"), scene.option("period_s"), victim["pid"]

        def stop() -> None:
            if time.monotonic() < until and is_alive(pid):
                self._stop([pid])
                self._after(share * period_s, go_on)

        def go_on() -> None:
            self._continue([pid])
            self._after((1 - share) * period_s, stop)

        stop()
        return [victim]

    def _corrupt_snapshot(self, scene: Scene) -> list[Victim]:
        node, pids = scene.workers[scene.rank]["node"], [worker["pid"] for worker in scene.workers]
        other = next((rank for rank, worker in enumerate(scene.workers) if worker["node"] != node), None)
        if other is None or not all(map(is_alive, pids)):
            raise NotNow("it takes workers on two nodes, all of them alive")
        send(signal.SIGSTOP, pids)  # nothing newer is to be committed
        try:
            time.sleep(SETTLE_S)
            damaged = [name for folder in self.nodes.memory_of(node) for name in _damage(folder)]
            if not damaged:
                raise NotNow("no snapshot is committed on that node")
            send(signal.SIGKILL, [pids[other]])
        finally:
            send(signal.SIGCONT, pids)
        return [{"what": "snapshot", "node": node, "files": damaged}, scene.worker(other)]

    def _kill_node(self, scene: Scene) -> list[Victim]:
        victims = self._on_node(scene)
        self.nodes.kill(scene.node)
        return victims

    def _drain_node(self, scene: Scene) -> list[Victim]:
        victims, deadline_s = self._on_node(scene), scene.option("deadline_s")
        self.nodes.drain(scene.node, deadline_s=deadline_s, message=f"drill, fault {scene.number}")
        self._after(deadline_s, lambda: self._end_node(scene.number, victims[0]["node"]))
        return victims

    def _black_hole_node(self, scene: Scene) -> list[Victim]:
        victims, pids = self._on_node(scene), self.nodes.pids(scene.node)
        self._stop(pids)
        kill_after_s, continue_after_s = scene.fault.option("kill_after_s"), scene.fault.option("continue_after_s")
        if kill_after_s is not None:
            self._after(kill_after_s, lambda: self._end_node(scene.number, victims[0]["node"]))
        elif continue_after_s is not None:
            self._after(continue_after_s, lambda: self._wake(scene.number, pids, node=victims[0]["node"]))
        return victims

    def _kill_controller(self, scene: Scene) -> list[Victim]:
        """Ray ends the actors that a process had started with it: the workers are victims, too."""
        victims = self._kill_actor("Controller", "controller")
        return [*victims, *(scene.worker(rank) for rank in range(len(scene.workers)))]

    def _kill_driver(self, scene: Scene) -> list[Victim]:
        send(signal.SIGKILL, [scene.driver])
        return [{"what": "driver", "pid": scene.driver}]

    def _fill_memory(self, scene: Scene) -> list[Victim]:
        size = max(0, free_bytes(self.nodes.memory_folder) - int(scene.option("leave_mb") * 1e6))
        assert size <= MOST_FILLED, "this was to be checked before anything began"
        with open(self._filler, "wb") as file:
            if size:
                os.posix_fallocate(file.fileno(), 0, size)
        self._after(scene.option("for_s"), lambda: self._empty(scene.number))
        return [{"what": "memory", "folder": self.nodes.memory_folder, "bytes": size}]

    def _choose_worker(self, fault: Fault, workers: Sequence[Mapping[str, Any]], dice: random.Random) -> int:
        free = [rank for rank, each in enumerate(workers) if is_alive(each["pid"]) and each["pid"] not in self._stopped]
        if fault.rank is None and free:
            return free[int(dice.random() * len(free))]
        if fault.rank is None or fault.rank not in free:
            raise NotNow("no worker is there" if fault.rank is None else f"rank {fault.rank} is not there")
        return fault.rank

    def _choose_node(self, fault: Fault, workers: Sequence[Mapping[str, Any]], dice: random.Random) -> int:
        """One that is not being silent; a drawn one has workers where any has."""
        up = [each for each in range(len(self.nodes.nodes)) if self._stopped.isdisjoint(self.nodes.pids(each))]
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

    def _on_node(self, scene: Scene) -> list[Victim]:
        node_id = self._node_id(scene.node)
        ranks = [rank for rank, worker in enumerate(scene.workers) if worker["node"] == node_id]
        return [{"what": "node", "node": node_id}, *map(scene.worker, ranks)]

    def _node_id(self, number: int) -> str:
        return str(self.nodes.nodes[number].node_id)

    def _kill_actor(self, class_name: str, what: str, node: str | None = None) -> list[Victim]:
        for actor in self.nodes.actors():
            here, pid = actor["Address"]["NodeID"], actor["Pid"]
            named = actor["ActorClassName"].rpartition(".")[2].endswith(class_name)
            if named and node in (None, here) and actor["State"] == "ALIVE" and send(signal.SIGKILL, [pid]):
                return [{"what": what, "pid": pid, "node": here}]
        raise NotNow(f"no {what} is up")

    def _stop(self, pids: Sequence[int]) -> None:
        self._stopped |= set(send(signal.SIGSTOP, pids))

    def _continue(self, pids: Sequence[int]) -> list[int]:
        """Those that run on."""
        self._stopped -= set(pids)
        return [pid for pid in send(signal.SIGCONT, pids) if is_alive(pid)]

    def _wake(self, number: int, pids: Sequence[int], *, node: str) -> None:
        """Processes run on, and write what they can; a look later at who is still there."""
        woken = self._continue(pids)
        self.note(number, "continued", processes=len(woken))

        def look() -> None:
            alive = [pid for pid in woken if is_alive(pid)]
            self.note(number, "looked at again", processes=len(alive))
            if node and pids[0] not in alive:  # its raylet gave up: the host is given back
                self._end_node(number, node)

        if woken:
            self._after(ZOMBIE_S, look)

    def _end_node(self, number: int, node: str) -> None:
        here = self.nodes.number_of(node)
        if here is not None:
            self._stopped -= set(self.nodes.pids(here))
            self.nodes.kill(here)
            self.note(number, "node gone", node=node)

    def _empty(self, number: int) -> None:
        self._filler.unlink(missing_ok=True)
        self.note(number, "memory freed")

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        self._later.append((time.monotonic() + seconds, action))


def free_bytes(folder: str) -> int:
    """Room on the file system of a folder."""
    room = os.statvfs(folder)
    return room.f_bavail * room.f_frsize


def _damage(folder: Path) -> list[str]:
    """Flip a bit in every snapshot of the newest committed step in a keeper's folder; which files."""
    newest, damaged = Committed.read(folder).newest, []
    for path in sorted(folder.glob(f"*{SLOT}*")):
        try:
            header = open_slot(path) if path.name.endswith((SLOT, COPY)) else None
        except CheckpointError:
            continue
        if header is None or Version(header.generation, header.step) != newest:
            continue
        longest, offset = max(zip(header.boxes, header.offsets, strict=False), key=lambda each: each[0].num_bytes)
        with open(path, "r+b") as file:
            at = offset + longest.num_bytes // 2
            (byte,) = os.pread(file.fileno(), 1, at)
            os.pwrite(file.fileno(), bytes([byte ^ 0x10]), at)
        damaged.append(path.name)
    return damaged
