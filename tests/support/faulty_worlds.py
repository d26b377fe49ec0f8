"""Runs in virtual time in which more goes wrong than in `control_world.play`. They raise Broken as that does."""

import random
from typing import Any

from regrow.control import events as e
from regrow.control.states import Answer
from support.control_world import POLL_S, Broken, Worker, World, play

DIES_IN = {  # how often the coordinator does, by the call, once it has done what it was told and before it answers
    **dict.fromkeys((e.Asked, e.Sealed), 0.003),
    e.Row: 0.01,
    **dict.fromkeys((e.Joined, e.KeeperUp, e.CheckpointWanted, e.Done, e.Complaint, e.Gone, e.Broke, e.Logged), 0.03),
    **dict.fromkeys((e.Began, e.Leaving, e.NotFinite, e.DrainAsked, e.UndrainAsked), 0.3),
}
MOST_DEATHS = 2  # of coordinators within a call


class AgainWorld(World):
    """Ray makes a call again whose coordinator died in it: what was told is told to the next one, too."""

    def __init__(self, seed: int, **options: Any) -> None:
        self.chance, self.made_again = random.Random(seed), list[e.Event]()
        self._takes_up = False
        super().__init__(seed, **options)

    def tell(self, event: e.Event, *, zombie: bool = False) -> Any:
        reply = super().tell(event, zombie=zombie)
        if self._takes_up or not self.up or self.over or len(self.made_again) == MOST_DEATHS:
            return reply
        if self.chance.random() >= DIES_IN.get(type(event), 0.0):
            return reply
        self.made_again.append(event)
        self._lose_coordinator(self._unwritten())
        self._take_up(restarted=True)
        return super().tell(event, zombie=zombie)

    def _take_up(self, *, restarted: bool) -> None:
        self._takes_up = True
        super()._take_up(restarted=restarted)
        self._takes_up = False


def play_again(seed: int) -> AgainWorld:
    world = play(seed, world_class=AgainWorld)
    assert isinstance(world, AgainWorld)
    return world


class TroubledWorld(World):
    """Ranks meet errors that they would meet again, and devices compute wrong or fall off the bus, too."""

    def fault(self) -> None:
        kind, workers = self.rng.random(), [worker for worker in self.workers.values() if worker.alive]
        if kind >= 0.36 or not workers or self.over:
            super().fault()
            return
        worker = self.rng.choice(workers)
        if kind < 0.25:
            self._err(worker)
        elif kind >= 0.32:
            self.send(e.GpuError(worker.node, "GPU-1", 79, "fell off the bus"))
        elif self.up:
            self.tell(e.Unfit(worker.node, worker.pid, "wrong numbers", worker.node))
            self.kill_worker(worker)

    def _err(self, worker: Worker) -> None:
        if not worker.stopped and worker.generation and self.runs[worker.generation].began:
            generation, worker.generation = worker.generation, 0
            self.runs[generation].over = True
            self.after(self.soon(), lambda: self._tell_trouble(worker, generation, is_told=False))

    def _tell_trouble(self, worker: Worker, generation: int, *, is_told: bool) -> None:
        """And ask what came of it, until that is known."""
        if not worker.alive or self.over:
            return
        wait_s = POLL_S
        if self.up and not worker.stopped:
            if not is_told:
                self.tell(e.Trouble(generation, self._member(worker), self.max_nodes, "KeyError: 7"))
            answer: Answer = self.tell(e.Asked(worker.id, generation))
            if answer.over or answer.given_up:
                worker.alive = False
            elif answer.unfit:
                self.kill_worker(worker)
            is_told, wait_s = not answer.join_again, max(answer.wait_s, 0.1)
        self.after(wait_s, lambda: self._tell_trouble(worker, generation, is_told=is_told))


def play_troubled(seed: int) -> World:
    """Faults come two or three at a time, often with the coordinator's death."""
    rng = random.Random(seed)
    sizes = {"num_nodes": rng.choice((1, 2, 3, 3, 4)), "last_step": rng.choice((6, 10, 14))}
    world = TroubledWorld(seed, **sizes, copies=rng.choice((1, 1, 2)), num_slices=rng.choice((None, None, 2, 5)))
    for _ in range(rng.choice((1, 2))):
        at = 20.0 * rng.random()
        for _ in range(rng.choice((2, 3))):
            world.after(at + rng.choice((0.2, 1.5)) * rng.random(), world.fault)
        if rng.random() < 0.6:
            world.after(at + rng.random(), lambda: world.restart_coordinator(lost_events=world._unwritten()))
    world.run(2000.0)
    world.check_log()
    if not world.done and not world.given_up:
        raise Broken("the run ended, and did not say why")
    return world


def play_corrupt_without_storage(seed: int, *, is_logged: bool) -> World | None:
    """A node begins to compute wrong while storage, and the log, is away since the run's first group was formed, or
    has begun where `is_logged`; then the coordinator is started anew. None: the corruption was confirmed before, which
    is in the log alone."""
    rng = random.Random(seed)
    options = {"num_nodes": rng.choice((3, 4, 5)), "last_step": rng.choice((20, 26))}
    world = World(seed, **options, verify_every_steps=3)
    victim = rng.choice([*world.nodes])
    world.after(4.0 + 6.0 * rng.random(), lambda: world.corrupt.add(victim))
    while not any(name == ("generation" if is_logged else "forming") for _, name, _ in world.events):
        world.run_for(0.05)
    world.take_storage_away()
    world.run_for(5.0 + 8.0 * rng.random())
    if any(name == "corruption" for _, name, _ in world.events):
        return None
    world.restart_coordinator()
    world.run(2000.0)
    world.check_log(right_until=world.known_right)
    return world
