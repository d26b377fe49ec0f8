"""A world of `cluster.in_place=false`: Ray Train ends all workers of a group, and starts others, as many as have room.

It does so for an error of one of them, and without any for a node that came or is to be taken away. What its controller
tells the coordinator it tells in order, and waits for the answer; processes that are to end may say something more.
"""

from collections.abc import Callable, Collection
from typing import Any

from regrow.control import events as e
from regrow.control.core import Control
from regrow.control.past import Past
from support.control_world import NO_TIME, Node, Run, Worker, World

RESIZES_AFTER_S = 4.0  # a node that came


class RestartWorld(World):
    """Each node has a worker."""

    repeats_views = False
    group: Collection[Worker] = ()  # Ray Train's
    is_changing = False  # the group is ended, and another one started
    _in_order = False  # workers leave their group, and come again

    def __init__(self, seed: int, **options: Any) -> None:
        super().__init__(seed, **options | {"num_slices": None})
        self._start_group()

    def _control(self, past: Past) -> Control:
        self.config.cluster.in_place, self.config.cluster.spare_workers = False, 0
        return super()._control(past)

    # Ray Train's controller

    def _tell_in_turn(self, event: e.Event, then: Callable[[], None]) -> None:
        if self.over:
            return
        if self.up:
            self.tell(event)
            then()
        else:
            self.after(0.5, lambda: self._tell_in_turn(event, then))

    def _change_group(self, failure: e.GroupFailed | None = None) -> None:
        """End all workers; they do so one after the other."""
        if self.is_changing or self.over or self.leave_at != NO_TIME:
            return
        self.is_changing = True

        def end() -> None:
            for worker in self.group:
                self.after(self.soon(), lambda worker=worker: self._end_worker(worker))  # type: ignore[misc]
            self.after(1.0 + 7.0 * self.rng.random(), self._start_group)

        def shut_down() -> None:
            if self.rng.random() < 0.9:
                self._tell_in_turn(e.GroupShutDown(), end)
            else:
                end()

        if failure is not None:
            self._tell_in_turn(failure, shut_down)
        else:
            shut_down()

    def _end_worker(self, worker: Worker) -> None:
        node = self.nodes[worker.node]
        if worker.alive and node.alive and node.up:
            self.send(e.Gone(node.name, worker.pid), 0.3)
        worker.alive = False
        if worker.generation:
            self.runs[worker.generation].over = True

    def _start_group(self) -> None:
        nodes = [node for node in self.nodes.values() if node.alive][: self.max_nodes]
        if self.over or self.leave_at != NO_TIME:
            return
        if not nodes:
            self.after(1.0, self._start_group)
            return
        self.group = [Worker(f"w{next(self.numbers)}", node.name, next(self.numbers)) for node in nodes]
        self.workers |= {worker.id: worker for worker in self.group}
        self.is_changing = False
        self._tell_in_turn(e.GroupStarted(tuple((each.node, each.pid) for each in self.group)), self._train)

    def _train(self) -> None:
        for worker in self.group:
            self.after(self.soon(), lambda worker=worker: self._join(worker))  # type: ignore[misc]

    def _fail(self, worker: Worker, cause: str, detail: str) -> None:
        if worker in self.group:
            formation = self.runs[self.newest_generation].formation if self.newest_generation else None
            rank = formation.rank_of(worker.id) if formation is not None else None
            self._change_group(e.GroupFailed(cause, detail, () if rank is None else (rank,)))

    # what happens to nodes and workers

    def add_node(self) -> None:
        node = Node(f"n{next(self.numbers)}")
        self.nodes[node.name] = node
        if self.group:
            self.after(RESIZES_AFTER_S, lambda: self._resize(node))

    def _resize(self, node: Node) -> None:
        """For a node that came, if no worker of it was started since."""
        if node.alive and all(worker.node != node.name for worker in self.group):
            self._change_group()

    def _refill(self, node: Node) -> None:
        pass

    def ray_finds(self, worker: Worker, detail: str) -> None:
        self._fail(worker, "worker_died", detail)

    def drain(self, node: Node) -> None:
        """Ray Train alone has notice; it starts all workers elsewhere once the node is gone."""

        def gone() -> None:
            self.kill_node(node)
            self._change_group()

        self.after(15.0, gone)

    def _leave_in_order(self, run: Run, cause: str, is_begun: bool, until: float) -> None:
        self._in_order = True
        super()._leave_in_order(run, cause, is_begun, until)
        self._in_order = False

    def _come_again(self, worker: Worker) -> None:
        """Only a group that leaves in good order is followed by one of the same processes."""
        if self._in_order or self.control.ending is not None:
            super()._come_again(worker)
        elif worker.alive and worker.generation:
            self.runs[worker.generation].over, worker.generation = True, 0
            self.after(self.soon(), lambda: self._fail(worker, "worker_failed", "its group is over"))
