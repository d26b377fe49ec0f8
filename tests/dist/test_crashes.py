"""kill -9 at random instants of everything that holds or writes snapshots and checkpoints, whole racks too; a zombie.

Real keepers, a real coordinator and trainers that take real snapshots, each a process (`support.crashing`).
Instants come two ways: a random time after a victim was seen in a phase, and a random line of Python within it.
`CRASH_KILLS` says how many in each setting (12), `CRASH_SEED` which. With two copies one takes three to five seconds.
"""

import contextlib
import itertools
import multiprocessing
import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from regrow.control.values import Version
from regrow.errors import CheckpointError
from regrow.plan.mesh import Coordinates, MeshShape
from regrow.record.log import read_events, read_metrics
from regrow.state.disk import store
from regrow.state.disk.catalog import committed_steps, open_checkpoint, verify
from regrow.state.memory.holders import Holders
from regrow.state.memory.reader import restore_snapshot
from regrow.state.memory.slots import Committed
from regrow.state.memory.writer import Snapshots
from regrow.storage import Storage
from support.beacon import PHASES, Beacon
from support.crashing import (
    ERRORS,
    EVERY_STEPS,
    KEEP,
    RUN,
    Group,
    Member,
    assert_state,
    coordinator_main,
    keeper_main,
    make_entries,
    scalars_of,
    trainer_main,
)
from support.gloo import PRELOAD
from support.stand_in_ray import NAMES, NODES, Handle, RayError, call_it, get

NUM_KILLS = int(os.environ.get("CRASH_KILLS", "12"))
SEED = int(os.environ.get("CRASH_SEED", "1"))
DEADLINE_S = 120.0  # a machine may be ten times slower for a while
LATER_S = (0.001, 0.005, 0.03)  # at most one of these, from when a phase is seen to the kill
MOST_TRIES = 3  # to read checkpoints while a group trains
MOST_LINES = 400  # of Python, from a phase's begin to the kill
PATIENCE_S = 3.0  # with a phase that does not come, or ends too soon
ANYTIME = "anytime"
ONCE = ("restore", "slots", "begin", "place")  # phases that a generation has at its beginning

TIMED = {
    "trainer": ["restore", "copy", ANYTIME],
    "keeper": ["take", "push", "receive", "upload", "upload", ANYTIME],
    "coordinator": ["index", "retain", ANYTIME],
}
TRACED = {
    "trainer": ["slots", "seal", "seal"],
    "keeper": ["take", "push", "receive", "told", "place", "upload"],
    "coordinator": ["begin", "commit", "commit", "index", "COMMIT", "COMMIT", "retain"],
}


@dataclass(frozen=True)
class Setting:
    """Of a world. As many racks as there are copies are lost at once, and a group is in all of them."""

    copies: int
    racks: int
    nodes: int  # in each rack
    layouts: tuple[tuple[int, int], ...]  # ranks, replicas


ONE_COPY = Setting(1, racks=2, nodes=1, layouts=((2, 1), (3, 1), (2, 2)))
TWO_COPIES = Setting(2, racks=3, nodes=2, layouts=((6, 1), (6, 2), (6, 3)))


@dataclass(frozen=True)
class Kill:
    """How one process is to die."""

    role: str
    phase: str
    lines: int  # 0: at a random time instead


def kills(rng: random.Random, number: int) -> list[Kill]:
    """Every way to die about equally often, in random order."""
    timed = [(role, phase, False) for role, phases in TIMED.items() for phase in phases]
    traced = [(role, phase, True) for role, phases in TRACED.items() for phase in phases]
    ways = list(itertools.islice(itertools.cycle(rng.sample(timed + traced, len(timed + traced))), number))
    rng.shuffle(ways)
    most = lambda: int(MOST_LINES ** rng.random())  # noqa: E731 (the first lines as often as the many later ones)
    return [Kill(role, phase, most() if by_line else 0) for role, phase, by_line in ways]


@dataclass
class Process:
    process: BaseProcess
    beacon: Beacon
    node: str

    @property
    def alive(self) -> bool:
        return self.process.is_alive()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def kill(self) -> None:
        self.process.kill()
        self.process.join(DEADLINE_S)
        assert not self.alive


@dataclass
class World:
    """Nodes, a coordinator, and the trainers of the moment. A context manager: nothing outlives it."""

    folder: Path
    rng: random.Random
    setting: Setting
    racks: dict[str, str] = field(default_factory=dict)  # by node
    keepers: dict[str, Process] = field(default_factory=dict)
    trainers: list[Process] = field(default_factory=list)
    coordinator: Process | None = None
    started: list[Process] = field(default_factory=list)
    num: Iterator[int] = field(default_factory=itertools.count)
    seen: set[int] = field(default_factory=set)  # steps of checkpoints

    def __enter__(self) -> "World":
        for name in (NAMES, NODES, ERRORS):
            (self.folder / name).mkdir()
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(PRELOAD)
        return self

    def __exit__(self, *exception: object) -> None:
        for each in self.started:
            each.process.kill()
        for each in self.started:
            each.process.join(DEADLINE_S)

    def start(self, main: Callable[..., None], node: str, address: str, *args: Any, restarted: bool = False) -> Process:
        beacon_file = self.folder / f"beacon-{next(self.num)}"
        member = Member(self.folder, node, address, beacon_file, restarted, self.racks.get(node, ""))
        beacon = Beacon(member.beacon, create=True)
        process = self.context.Process(target=main, args=(member, *args), daemon=True)
        made = Process(process, beacon, node)
        process.start()
        self.started = [*(each for each in self.started if each.alive), made]  # the others keep files open
        return made

    def start_coordinator(self) -> None:
        address = str(self.folder / f"coordinator-{next(self.num)}")
        restarted = self.coordinator is not None
        self.coordinator = self.start(coordinator_main, "head", address, self.setting.copies, restarted=restarted)
        self.actor = Handle(address)
        wait_for_actor(self.actor)
        call_it(self.folder, f"{RUN}:coordinator", address)
        get(self.actor.adopt_keepers.remote())

    def start_nodes(self) -> None:
        """All of the setting, each with its keeper."""
        for rack in range(self.setting.racks):
            for number in range(self.setting.nodes):
                self.start_keeper(f"node-{rack}-{number}", rack=f"rack-{rack}")

    def start_keeper(self, node: str, *, rack: str = "") -> None:
        """A node's first keeper, or another one in the place of one that died."""
        self.racks.setdefault(node, rack)
        address = str(self.folder / f"keeper-{node}")
        (self.folder / NODES / node).touch()
        self.keepers[node] = self.start(keeper_main, node, address, restarted=node in self.keepers)
        wait_for_actor(Handle(address))
        call_it(self.folder, f"{RUN}:{node}", address)

    def start_group(self, num_ranks: int, num_replicas: int, *, stubborn: bool = False) -> None:
        names = self._in_turn()
        nodes = tuple(names[rank % len(names)] for rank in range(num_ranks))
        group = Group(nodes, num_replicas, self.folder / f"store-{next(self.num)}", stubborn)
        self.trainers = [self.start(trainer_main, node, "", group, rank) for rank, node in enumerate(nodes)]

    def kill_group(self) -> None:
        for each in self.trainers:
            each.process.kill()
        for each in self.trainers:
            each.kill()
        self.trainers = []

    @contextlib.contextmanager
    def standing_still(self) -> Iterator[None]:
        """No trainer goes on meanwhile."""
        stopped = [each for each in self.trainers if each.alive]
        for each in stopped:
            os.kill(each.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for each in stopped:
                os.kill(each.pid, signal.SIGCONT)

    def join_keepers(self) -> None:
        """As the ranks of the next group do before they restore."""
        secret = get(self.actor.secret.remote())
        for node in self.keepers:
            keeper = Handle(str(self.folder / f"keeper-{node}"))
            get(self.actor.register_keeper.remote(keeper, get(keeper.serve.remote(self.actor, secret))))

    def lose_racks(self, node: str) -> None:
        """A node's rack and as many others as there are more copies, at once: keepers, trainers, memory. Others come in
        the place of their nodes."""
        racks = sorted({self.racks[each] for each in self.keepers} - {self.racks[node]})
        lost = {self.racks[node], *self.rng.sample(racks, self.setting.copies - 1)}
        nodes = [each for each in self.keepers if self.racks[each] in lost]
        for each in nodes:
            self.keepers[each].process.kill()
        for each in nodes:
            self.keepers.pop(each).kill()
            (self.folder / NODES / each).unlink()
            (self.folder / NAMES / f"{RUN}:{each}").unlink()
            shutil.rmtree(self.memory(each))
        for each in nodes:
            self.start_keeper(f"node-{next(self.num)}", rack=self.racks[each])

    def losable(self) -> list[set[str]]:
        """All nodes of as many racks as there are copies, for each choice of these."""
        racks = sorted({self.racks[each] for each in self.keepers})
        chosen = itertools.combinations(racks, self.setting.copies)
        return [{each for each in self.keepers if self.racks[each] in some} for some in chosen]

    def _in_turn(self) -> list[str]:
        """Nodes in random order, one of each rack before the next of any."""
        by_rack: dict[str, list[str]] = {}
        for each in self.rng.sample(sorted(self.keepers), len(self.keepers)):
            by_rack.setdefault(self.racks[each], []).append(each)
        return [each for some in itertools.zip_longest(*by_rack.values()) for each in some if each is not None]

    def memory(self, node: str) -> Path:
        return self.folder / f"regrow-{RUN}-{node}"

    def known(self) -> Version:
        """The newest committed snapshot that any node knows."""
        return max((Committed.read(self.memory(node)).newest for node in self.keepers), default=Version())

    @property
    def checkpoints(self) -> Storage:
        return Storage.at(self.folder / "run" / "checkpoints")

    def victims(self, role: str) -> list[Process]:
        found = {"trainer": self.trainers, "keeper": list(self.keepers.values()), "coordinator": [self.coordinator]}
        return [each for each in found[role] if each is not None and each.alive]


@contextlib.contextmanager
def world(seed: int, setting: Setting = ONE_COPY) -> Iterator[World]:
    with tempfile.TemporaryDirectory(prefix="crashes-", dir="/dev/shm", ignore_cleanup_errors=True) as folder:
        try:
            with World(Path(folder), random.Random(seed), setting) as made:
                yield made
        except BaseException:
            log = Path(folder, "log")
            print(log.read_text(errors="replace")[-6000:] if log.exists() else "")
            raise


def wait_until(condition: Callable[[], object], deadline_s: float = DEADLINE_S, poll_s: float = 0.001) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"not within {deadline_s} s")
        time.sleep(poll_s)


def wait_for_actor(handle: Handle) -> None:
    def is_up() -> bool:
        with contextlib.suppress(RayError):
            return bool(get(handle.is_up.remote()))
        return False

    wait_until(is_up, poll_s=0.005)


def strike(made: World, kill: Kill, victim: Process) -> set[str]:
    """Kill a process as planned; what it was doing."""
    rng = made.rng
    with contextlib.suppress(TimeoutError):
        if kill.lines:
            wait_until(lambda: not victim.alive, PATIENCE_S, poll_s=0.005)
        elif kill.phase == ANYTIME:
            time.sleep(rng.uniform(0, 0.2))
        else:
            wait_until(lambda: kill.phase in victim.beacon.doing(), PATIENCE_S, poll_s=0.0002)
            time.sleep(rng.uniform(0, rng.choice(LATER_S)))
    victim.kill()
    return victim.beacon.doing()


def check_memory(made: World, floor: Version, *, without: Collection[str] = ()) -> None:
    """The newest snapshot is whole, of one step, not before `floor`, in another layout, also without some nodes."""
    get(made.actor.begin_generation.remote())  # as the next group does: late reports of the one before count no more
    found = get(made.actor.committed_snapshot.remote())
    if floor == Version() and found is None:
        return
    assert found is not None, f"nothing is left of {floor}"
    step = found.moment.step
    assert found.moment >= floor, f"gone back from {floor} to {step}"
    holders = Holders.of([holder for holder in found if holder.node not in without])
    secret, num_shards = get(made.actor.secret.remote()), made.rng.choice([1, 2, 3])
    for shard in range(num_shards):
        entries = make_entries(shard, num_shards)
        where = made.rng.choice(sorted(made.keepers.keys() - set(without)))
        restored = restore_snapshot(
            entries, holders, node=where, folder=made.memory(where), secret=secret, reader=shard
        )
        assert_state(entries, restored.scalars, step)


def check_storage(made: World) -> None:
    """The newest checkpoint is whole, of one step, not older than before; so is the one before it."""
    with contextlib.ExitStack() as stack:
        for tries in itertools.count():
            if tries == MOST_TRIES:  # checkpoints are retired as quickly as they are read
                stack.enter_context(made.standing_still())
            steps = committed_steps(made.checkpoints)
            try:
                for step in steps[:KEEP]:
                    check_checkpoint(made, step)
                break
            except (CheckpointError, FileNotFoundError):
                if committed_steps(made.checkpoints)[:1] == steps[:1]:  # else the last of them is retired by now
                    raise
    assert max(steps, default=0) >= max(made.seen, default=0), f"gone back from {max(made.seen)} to {steps}"
    made.seen.update(steps)
    assert len(steps) >= min(KEEP, len(made.seen))


def check_checkpoint(made: World, step: int) -> None:
    index = open_checkpoint(made.checkpoints, step, run_id=RUN)
    verify(made.checkpoints, index, lambda num_bytes: None)
    num_shards = made.rng.choice([1, 2, 3])
    for shard in range(num_shards):
        entries = make_entries(shard, num_shards)
        store.restore(made.checkpoints, index, entries)
        assert_state(entries, index.scalars, step)


def check_errors(made: World) -> None:
    """No trainer met anything that a death does not explain."""
    errors = [path.read_text() for path in (made.folder / ERRORS).iterdir()]
    assert not errors, errors[0]
    unreadable = made.folder / "unrestorable"
    assert not unreadable.exists(), unreadable.read_text()


def wait_for_commit(made: World, after: Version) -> None:
    """The group commits snapshots: the run has not come to a halt."""
    wait_until(lambda: made.known() > after)


def settle(made: World) -> None:
    """What is on its way to storage is there."""
    wait_until(lambda: not get(made.actor.settling.remote()).busy, poll_s=0.01)


def prepare(made: World, kill: Kill) -> Process:
    """A group that trains, or begins to where that is when the victim is to die; the victim, which knows how."""
    before = made.known()
    if not made.trainers and (kill.phase not in ONCE or made.rng.random() < 0.5):
        made.start_group(*made.rng.choice(made.setting.layouts))
        wait_for_commit(made, before)
    if kill.phase in ONCE:
        made.kill_group()
    if kill.role == "trainer" and not made.trainers:
        made.start_group(*made.rng.choice(made.setting.layouts))
    victim = made.rng.choice(made.victims(kill.role))
    if kill.lines:
        victim.beacon.arm(kill.phase, kill.lines)
    if not made.trainers:
        made.start_group(*made.rng.choice(made.setting.layouts))
    return victim


def clean_up_after(made: World, kill: Kill, victim: Process, redundant: bool) -> bool:
    """Deal with a death as Ray and the driver would; whether nodes were lost with their memory."""
    rng, floor = made.rng, made.known()
    if kill.role == "keeper":
        lost = redundant and rng.random() < 0.3
        if lost:
            made.kill_group()
            made.lose_racks(victim.node)
            check_memory(made, floor)
            return True
        made.start_keeper(victim.node)
        if made.trainers and rng.random() < 0.5:
            wait_for_commit(made, made.known())  # the group never noticed
            wait_for_commit(made, made.known())
            return False
    time.sleep(rng.choice([0, rng.uniform(0, 0.03)]))  # survivors go on for a moment
    made.kill_group()
    lost = kill.role == "coordinator" and redundant and rng.random() < 0.3  # it was on one of the nodes
    if lost:
        made.lose_racks(rng.choice(sorted(made.keepers)))
    floor = made.known()
    if kill.role == "coordinator":
        made.start_coordinator()
    made.join_keepers()
    check_memory(made, floor, without=rng.choice([set(), *made.losable()]) if redundant and not lost else ())
    return lost


@pytest.mark.timeout(1200 + 12 * NUM_KILLS)
@pytest.mark.parametrize("setting", [ONE_COPY, TWO_COPIES], ids=["one copy", "two copies"])
def test_whatever_dies_whenever_the_newest_committed_state_loads_whole(setting: Setting) -> None:
    begun, lost_at, num_lost = time.monotonic(), Version(), 0
    hits: Counter[str] = Counter()
    with world(SEED, setting) as made:
        print(f"{NUM_KILLS} kills, CRASH_SEED={SEED}")
        made.start_coordinator()
        made.start_nodes()
        plan, again, number = kills(made.rng, NUM_KILLS), NUM_KILLS // 3, 0
        while plan:
            kill, number = plan.pop(0), number + 1
            victim = prepare(made, kill)
            doing = strike(made, kill, victim)
            hits.update(doing or {"nothing"})
            print(f"{number}: {kill} while {', '.join(sorted(doing))}; {made.known()}", flush=True)
            if kill.phase not in (ANYTIME, *doing) and again:  # too late, or the phase was too short
                plan.append(replace(kill, lines=1 + kill.lines // 2))
                again -= 1
            if clean_up_after(made, kill, victim, redundant=made.known() > lost_at):
                lost_at, num_lost = made.known(), num_lost + 1
            if not made.trainers and made.rng.random() < 0.5:
                settle(made)
            check_storage(made)
            check_errors(made)
        if not made.trainers:  # what the last death took along is asked for by the next group
            made.start_group(*made.rng.choice(made.setting.layouts))
            wait_for_commit(made, made.known())
        end(made)
    print(f"{number} kills in {time.monotonic() - begun:.0f} s, CRASH_SEED={SEED}: {dict(hits.most_common())}")
    print(f"{setting.copies} of {setting.racks} racks were lost at once {num_lost} times")
    for phase in PHASES:
        assert hits[phase] >= NUM_KILLS // 30, phase


def logged_steps(made: World) -> set[int]:
    return {row["step"] for row in read_metrics(Storage.at(made.folder / "run"))}


def untold(made: World, steps: Collection[int]) -> list[int]:
    """Those without a row, but where an event says that rows before the next one's went with those that had them."""
    logged = logged_steps(made)
    told = {event.get("text") for event in read_events(Storage.at(made.folder / "run"))}
    lost = sorted(set(steps) - logged)
    after = [min((each for each in logged if each > step), default=None) for step in lost]
    gone = "rows before step {} went with the processes that had them"
    return [step for step, first in zip(lost, after, strict=True) if gone.format(first) not in told]


def end(made: World, *, logged: int | None = None) -> None:
    """The run ends in good order: rows of all checkpoints, no more of these than are kept, nothing in memory.

    `logged`: a coordinator died when that was the last row in its log, and so did the ranks, and no group came to send
    it those again that were on their way.
    """
    made.kill_group()
    wait_until(lambda: not get(made.actor.settle.remote()).busy, poll_s=0.01)  # memory's newest step, too
    wait_until(lambda: len(committed_steps(made.checkpoints)) <= KEEP)
    lost = untold(made, committed_steps(made.checkpoints))
    assert not lost or (logged is not None and min(lost) > logged), f"no rows of {lost}"
    get(made.actor.close.remote(0, "finished", "", True))
    assert not list(made.folder.glob("regrow-*"))


@pytest.mark.timeout(600)
def test_what_a_coordinator_died_deleting_is_deleted_though_no_checkpoint_follows() -> None:
    with world(SEED) as made:
        made.start_coordinator()
        made.start_keeper("node-a")
        made.start_group(2, 1)
        wait_until(lambda: committed_steps(made.checkpoints))
        first = committed_steps(made.checkpoints)[-1]
        wait_until(lambda: first not in committed_steps(made.checkpoints))  # from here on each new one retires another
        kill = Kill("coordinator", "retain", 1)
        victim = prepare(made, kill)
        wait_until(lambda: not victim.alive, poll_s=0.005)
        assert "retain" in victim.beacon.doing()
        assert len(committed_steps(made.checkpoints)) > KEEP
        logged = max(logged_steps(made))
        clean_up_after(made, kill, victim, redundant=False)
        end(made, logged=logged)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("stopped", [pytest.param("the group", marks=pytest.mark.long), "one in the middle of a copy"])
def test_what_was_stopped_and_goes_on_after_its_generation_writes_nothing(stopped: str) -> None:
    with world(SEED) as made:
        made.start_coordinator()
        made.start_nodes()
        made.start_group(3, 1, stubborn=True)
        wait_until(lambda: committed_steps(made.checkpoints))
        zombies = made.trainers
        if stopped != "the group":
            zombies = [made.rng.choice(made.trainers)]
            wait_until(lambda: "copy" in zombies[0].beacon.doing(), poll_s=0.0002)
        for each in zombies:
            os.kill(each.pid, signal.SIGSTOP)
        made.trainers = [each for each in made.trainers if each not in zombies]
        made.kill_group()
        old = made.known()
        made.join_keepers()
        made.start_group(2, 1)
        wait_until(lambda: made.known().generation > old.generation)
        settled, known = committed_steps(made.checkpoints)[0], made.known()
        for each in zombies:
            os.kill(each.pid, signal.SIGCONT)
        until = time.monotonic() + 2.0
        while time.monotonic() < until or committed_steps(made.checkpoints)[0] < settled + 4 * EVERY_STEPS:
            assert time.monotonic() < until + DEADLINE_S
            assert made.known() >= known, "gone back"
            known = made.known()
            time.sleep(0.002)
        check_errors(made)
        made.kill_group()
        assert all(each.alive for each in zombies) == (stopped == "the group")  # one alone has no one to go on with
        check_memory(made, known)
        settle(made)
        check_storage(made)
        newest = open_checkpoint(made.checkpoints, committed_steps(made.checkpoints)[0], run_id=RUN)
        assert newest.generation == known.generation > old.generation
        made.trainers = zombies
        check_errors(made)
        end(made)


def test_ranks_that_hear_of_a_commit_at_different_times_snapshot_the_same_steps(tmp_path: Path) -> None:
    """Each by itself they would fill their slots with different steps, of which none can ever be committed."""
    ranks = []
    for rank in range(2):
        folder = tmp_path / str(rank)
        folder.mkdir()
        at = Coordinates(MeshShape(1, 2), rank)
        ranks.append(Snapshots(folder, make_entries(rank, 2), coordinates=at, run_id=RUN, generation=1))
    for step in (1, 2):
        assert [rank.room() for rank in ranks] == [3 - step] * 2
        for rank in ranks:
            assert rank.begin(step, scalars_of(step))
            rank.wait()
            rank.confirm(step)
    Committed(Version(1, 2)).write(ranks[0].folder)
    assert [rank.room() for rank in ranks] == [1, 0]  # at step 3: left out by both
    Committed(Version(1, 2)).write(ranks[1].folder)
    assert [rank.room() for rank in ranks] == [1, 1]
    assert all(rank.begin(4, scalars_of(4)) for rank in ranks)
    for rank in ranks:
        rank.close()
