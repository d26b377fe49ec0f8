"""Faults that take hosts apart: networks that part, storage that breaks, hosts that come back wrong."""

import signal
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

from regrow.drill.faults import DEAD_MOUNT, SLOW_LINK, WHOLE_AGAIN
from regrow.drill.hosts import Host
from regrow.drill.inject import ZOMBIE_S, Injector, Note, NotNow, Scene, Victim
from regrow.drill.nodes_apart import NodesApart
from regrow.drill.processes import send

RAYLET_BACK_S = 30.0  # from a raylet's own end to the next one on its host: as a supervisor would start it


class InjectorApart(Injector):
    """On nodes whose hosts are apart."""

    nodes: NodesApart

    def __init__(self, nodes: NodesApart, *, seed: int, note: Note) -> None:
        super().__init__(nodes, seed=seed, note=note)
        self._ended_at: dict[str, float] = {}  # raylets that no fault has ended, by the node's id
        self._away: Counter[str] = Counter()  # hosts parted from the head: no raylet can join there
        self.does |= {
            "partition_node": lambda scene: self._part(scene, self._others(scene), gone=True),
            "partition_head": lambda scene: self._part(scene, [self.nodes.head], gone=True),
            "blink_node": lambda scene: self._part(scene, self._others(scene)),
            "partition_peer": self._partition_peer,
            "partition_storage": lambda scene: self._break_storage(scene, "hung", self.nodes.nodes[scene.node].host),
            DEAD_MOUNT: self._dead_mount,
            SLOW_LINK: self._shape,
            "bad_link": self._shape,
            "full_storage": lambda scene: self._break_storage(scene, "full"),
            "read_only_storage": lambda scene: self._break_storage(scene, "read_only"),
            "failing_storage": lambda scene: self._break_storage(scene, "failing"),
            "slow_storage": lambda scene: self._break_storage(scene, "slow"),
            "hung_storage": lambda scene: self._break_storage(scene, "hung"),
            "restart_raylet": self._restart_raylet,
            "return_small_node": lambda scene: self._add(scene, shm_mb=int(scene.option("memory_mb"))),
            "return_node_without_storage": self._add_without_storage,
        }

    def tick(self) -> None:
        """Beside that: a raylet that ended because Ray had given its node up is started again, as another node."""
        super().tick()
        now = time.monotonic()
        for number, node in enumerate(self.nodes.nodes):
            ended = node.ray.poll() is not None and now - self._ended_at.setdefault(node.node_id, now) > RAYLET_BACK_S
            if ended and not self._away[node.host.name]:
                self.note(self._newest, "node gone", node=node.node_id, another=self.nodes.restart_raylet(number))
                return

    def _partition_peer(self, scene: Scene) -> list[Victim]:
        """The next node by number: with three, the one that is left reaches both."""
        count = len(self.nodes.nodes)
        if count < 2:
            raise NotNow("it takes two nodes")
        other = (scene.node + 1) % count
        victims = self._part(scene, [self.nodes.nodes[other].host])
        return [*victims, *self.on_node(scene, other)]

    def _part(self, scene: Scene, others: Sequence[Host], *, gone: bool = False) -> list[Victim]:
        """Part a node from others; one that Ray has given up goes some time after it is back."""
        node = self.nodes.nodes[scene.node]
        host, one_way = node.host, bool(scene.fault.options.get("one_way"))
        self.nodes.hosts.partition(host, others, one_way=one_way)
        from_head = self.nodes.head in others
        self._away[host.name] += from_head

        def heal() -> None:
            self._away[host.name] -= from_head
            there = [each for each in others if each.up]  # a host that was powered off has no link any more
            if host.up:
                self.nodes.hosts.partition(host, there, on=False, one_way=one_way)
            if gone:
                self.later(ZOMBIE_S, lambda: self.end_node(scene.number, node.node_id))

        self.until_healed(scene, heal, WHOLE_AGAIN)
        return self.on_node(scene)

    def _shape(self, scene: Scene) -> list[Victim]:
        host = self.nodes.nodes[scene.node].host
        link = (host.name, "link")

        def shape(**wanted: float) -> None:
            if host.up:
                self.nodes.hosts.shape(host, **wanted)

        slow = {key: scene.option(key) for key in scene.options if key != "for_s"}
        self.wrong.begin(link, scene.number, lambda: shape(**slow))
        self.until_healed(scene, lambda: self.wrong.end(link, scene.number, shape), "the link is as before")
        return [{"what": "link", "node": self.nodes.nodes[scene.node].node_id}]

    def _break_storage(self, scene: Scene, kind: str, host: Host | None = None) -> list[Victim]:
        hosts = self._all() if host is None else [host]
        delay_s = scene.option("delay_s") if kind == "slow" else 0.0
        for each in hosts:
            self.wrong.begin(storage_of(each), scene.number, partial(self._let_storage_be, each, kind, delay_s))

        def heal() -> None:
            for each in hosts:
                self.wrong.end(storage_of(each), scene.number, partial(self._let_storage_be, each))

        self.until_healed(scene, heal, "storage works again")
        return [{"what": "storage", "kind": kind, "hosts": [each.name for each in hosts]}]

    def _let_storage_be(self, host: Host, kind: str = "", delay_s: float = 0.0) -> None:
        """Nothing is to be done for a host that was powered off."""
        if host.up:
            self.nodes.hosts.break_storage(host, kind, delay_s)

    def _dead_mount(self, scene: Scene) -> list[Victim]:
        """Of a host; its workers are victims, which wait for it in the next group at the latest: another's death
        brings that about, and each reads its rows of the validation anew."""
        node = self.nodes.nodes[scene.node]
        killed = scene.other_worker(node.node_id, self.pid_of)
        broken = self._break_storage(scene, "hung", node.host)
        send(signal.SIGKILL, [self.pid_of(killed)])
        return [*self.on_node(scene), *broken, killed]

    def must_reach(self, number: int) -> None:
        name = self.nodes.nodes[number].host.name
        if self._away[name]:
            raise NotNow(f"{name} is cut off from the head")

    def _restart_raylet(self, scene: Scene) -> list[Victim]:
        self.must_reach(scene.node)
        victims = self.on_node(scene)
        return [*victims, {"what": "new node", "node": self.nodes.restart_raylet(scene.node)}]

    def _add(self, scene: Scene, **wrong: Any) -> list[Victim]:
        node_id = self.nodes.add(**wrong)
        self.until_healed(scene, lambda: self.end_node(scene.number, node_id), "it went")
        return [{"what": "new node", "node": node_id}]

    def _add_without_storage(self, scene: Scene) -> list[Victim]:
        victims = self._add(scene, broken="failing")
        host = self.nodes.nodes[-1].host
        self.wrong.begin(storage_of(host), scene.number, partial(self._let_storage_be, host, "failing"))
        return victims

    def _others(self, scene: Scene) -> list[Host]:
        own = self.nodes.nodes[scene.node].host
        return [each for each in self._all() if each is not own]

    def _all(self) -> list[Host]:
        return [self.nodes.head, *(node.host for node in self.nodes.nodes)]


def storage_of(host: Host) -> tuple[str, str]:
    return host.name, "storage"
