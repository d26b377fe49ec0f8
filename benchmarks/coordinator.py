"""What a step of training costs the coordinator's process at 2,048 nodes of 8 ranks, and a keeper that leads others.

    python benchmarks/coordinator.py --out benchmarks/results/FILE.json [--quick]

Real: the Coordinator (with its Fleet, board, cadence, run log and TensorBoard files) in an actor process of its own on
a Ray of this machine; every message that it gets or sends in a step (the reports of all nodes from the keepers at the
top of the tree, the commit to each of these, a metrics row); the driver's `updates`, 5 a second; the orders for a
checkpoint to these keepers, their answers, the index, which one of them writes, COMMIT, and reading back. For the
leader's figure, a real Keeper at the top of the tree.
Stand-ins: a process for each keeper at the top of the tree, which plays all those below it too, so nothing is trained,
copied or written but the index, COMMIT and the logs; an answer to an order comes after up to WRITE_S seconds and names
8 files of each node, a row of one stack each. All runs on one machine: no network. One worker joins for all, but where
forming is what is measured: there FORM_PROCESSES processes play the keepers of NUM_MEMBERS members, each of which joins
for those of its node and asks until their generation is there, as `runtime.joining` does; no group of torch's is made,
and no connection to a member.

Figures are CPU time, user and system, of all threads of the one process, less what the same process uses when nothing
is asked of it. `..._ms_per_step_...` is for a step a second, with all that a second brings besides;
`..._messages_ms_per_step_...` is the part that comes with the step; `..._asking_ms_per_s_...` comes instead of both
while nothing commits: keepers ask then, now and then, whether the coordinator is there.
"""

import argparse
import asyncio
import dataclasses
import hashlib
import json
import logging
import os
import random
import secrets
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "platform"), str(ROOT / "tests"), str(ROOT)]

from benchmarks.measure import TICKS_PER_S, family, run_side, summary, write_result  # noqa: E402

from regrow.control.peers import FAN_OUT  # noqa: E402
from regrow.control.values import SnapshotAck, Version  # noqa: E402
from regrow.runtime.keeper import ASK_AFTER, KeeperInfo, KeeperSettings, start_keeper  # noqa: E402
from regrow.state.memory.slots import Committed  # noqa: E402

PARTS = [STEPS, FORMING, LEADER] = ["steps", "forming", "leader"]
NUM_NODES = 2048
RANKS_PER_NODE = 8
STEP_S = 1.0
TICK_S = 0.2  # as the driver's
NUM_MEMBERS, FORM_PROCESSES = 16_384, 4
WRITE_S = 5.0
NUM_TENSORS = 900  # of a model of 300 parameters
ROW_ELEMENTS = 82_500  # of each that a rank has: 297 MB in all, as of 405B on 16,384 ranks; checksums alone are sent
RUN_ID = "0123456789abcdef"


class Keepers:
    """Plays a keeper at the top of the tree and all those below it. An actor."""

    def __init__(
        self, coordinator: Any, below: list[list[str]], peers: dict[str, tuple[str, ...]], num_nodes: int
    ) -> None:
        """`below`: itself, then each of its members with all those below it."""
        self.coordinator, self.below, self.peers, self.num_nodes = coordinator, below, peers, num_nodes
        self.heard: Counter[Version] = Counter()
        self.news = asyncio.Event()

    def _sealed(self, nodes: list[str], moment: Version) -> list[SnapshotAck]:
        return [SnapshotAck(node, moment, self.peers[node]) for node in nodes]

    async def step(self, moment: Version) -> float:
        """Report all nodes; the seconds until it has heard that the step is committed."""
        begun = time.perf_counter()
        nodes = [node for each in self.below for node in each]
        self.coordinator.snapshots_sealed.remote(self._sealed(nodes, moment))
        await self._until_heard(moment, 1)
        return time.perf_counter() - begun

    async def step_through(self, leader: Any, moment: Version) -> float:
        """The same through a real keeper at the top: every member reports to it, and hears of the commit from it."""
        begun = time.perf_counter()
        for nodes in self.below:
            leader.relay.remote(self._sealed(nodes, moment))
        await self._until_heard(moment, len(self.below) - 1)
        return time.perf_counter() - begun

    async def _until_heard(self, moment: Version, times: int) -> None:
        while self.heard[moment] < times:
            self.news.clear()
            await self.news.wait()

    async def committed(self, state: Committed) -> None:
        self.heard[state.newest] += 1
        self.news.set()

    async def take_place(self, place: Any) -> None:
        pass

    async def remember(self, generation: int) -> None:
        pass

    async def over(self, generation: int) -> None:
        pass

    async def pulses(self) -> list[Any]:
        """No worker is there: what is made of 16,384 pulses is not in the figures."""
        return []

    async def gpus(self) -> list[Any]:
        return []

    async def ask(self, every_s: float, seconds: float) -> None:
        """The part of the keepers that has its turn in this time asks after the coordinator."""

        async def one() -> None:
            turn_s = random.random() * every_s
            if turn_s < seconds:
                await asyncio.sleep(turn_s)
                await self.coordinator.ready.remote()

        await asyncio.gather(*(one() for nodes in self.below for _ in nodes))

    async def write(self, order: Any) -> Any:
        await asyncio.sleep(random.random() * WRITE_S)
        return self._written(order)

    async def write_all(self, order: Any) -> Any:
        import ray

        from regrow.state.disk.upload import Joined

        await asyncio.sleep(random.random() * WRITE_S)
        joined = Joined.of({node: self._written(order.of(node)) for each in self.below for node in each})
        return dataclasses.replace(joined, files=ray.put(joined.files))

    async def read_back(self, folder: str, files: Any, origin: str) -> str:
        return ""

    async def read_back_all(self, order: Any) -> dict[str, str]:
        return {node: "" for each in self.below for node in each}

    async def put_together(self, order: Any) -> Any:
        from regrow.runtime.writing import fetch
        from regrow.storage import Storage

        return order.carry_out(Storage.at(order.folder), fetch)

    def _written(self, order: Any) -> Any:
        import numpy as np

        from regrow.state.disk.format import SPAN, Content, DataFile
        from regrow.state.disk.metadata import num_chunks
        from regrow.state.disk.stacks import Column, Stack
        from regrow.state.disk.upload import Tensors, Written

        num_files = self.num_nodes * RANKS_PER_NODE
        head, size = 50 * NUM_TENSORS, NUM_TENSORS * ROW_ELEMENTS
        names = [f"optim/exp_avg/layers.{number}.feed_forward.w1.weight" for number in range(NUM_TENSORS)]
        stack = Stack("float32", num_files, tuple(Column(name, 0, ROW_ELEMENTS) for name in names))
        crc = bytes(4 * num_chunks(stack, size))
        first = sorted(self.peers).index(order.origin) * RANKS_PER_NODE
        rows = range(first, first + RANKS_PER_NODE)
        spans = [np.array([(stack.key.encode(), row * size, size, head, 0)], SPAN).tobytes() for row in rows]
        files = tuple(
            DataFile(
                f"g{order.moment.generation:06d}-{order.token}-{number}.safetensors",
                head + size * 4,
                head,
                secrets.token_hex(32),
                Content(spans[number], crc, () if rows[number] else (stack,)),
            )
            for number in range(RANKS_PER_NODE)
        )
        tensors: Tensors = dict.fromkeys(names, ("float32", (num_files, ROW_ELEMENTS)))
        scalars = {"step": order.moment.step, "cursor": 0, "tokens_seen": 0}
        described = {0: tensors} if order.describe else {}
        return Written(files, RANKS_PER_NODE, scalars, {0: hashlib.sha256().hexdigest()}, described)


def row_of(step: int, generation: int, world_size: int) -> dict[str, Any]:
    numbers = ("loss", "grad_norm", "lr", "tokens_per_s", "mfu", "data_wait_s", "snapshot_s")
    row: dict[str, Any] = dict.fromkeys(numbers, 0.123456789)
    row |= {"step": step, "tokens_seen": 10**12, "step_s": STEP_S, "world_size": world_size}
    return row | {"generation": generation, "batch_digest": secrets.randbits(63), "time": time.time()}


class Cluster:
    """A coordinator's process, and what plays `num_nodes` nodes to it."""

    def __init__(self, folder: Path, num_nodes: int, first: str = "") -> None:
        """`first`: the name of the first node, the others' are made up."""
        import ray

        from regrow.config.schema import CheckpointConfig, PretrainConfig
        from regrow.control.peers import plan_peers, plan_tree
        from regrow.runtime.actor import start_coordinator
        from regrow.storage import Storage

        self.num_nodes = num_nodes
        self.coordinator = start_coordinator(
            Storage.at(folder / "run"),
            RUN_ID,
            checkpoints="checkpoints",
            config=PretrainConfig(checkpoint=CheckpointConfig(every_steps=None)),
            submitted={},
        )
        self.pid = process_called("ray::Coordinator")
        nodes = [first or secrets.token_hex(28), *(secrets.token_hex(28) for _ in range(num_nodes - 1))]
        peers = plan_peers([(node, node) for node in nodes])
        tree = plan_tree(nodes, fan_out=FAN_OUT)

        def all_below(node: str) -> list[str]:
            return [node, *(below for member in tree[node].members for below in all_below(member))]

        self.actors: list[Any] = []
        registering = []
        for top in nodes[:FAN_OUT]:
            below = [[top], *(all_below(member) for member in tree[top].members)]
            options = ray.remote(Keepers).options(num_cpus=0, max_concurrency=2 * len(nodes))
            actor = options.remote(self.coordinator, below, peers, num_nodes)
            self.actors.append(actor)
            for node in all_below(top):
                info = KeeperInfo(node, node, f"/dev/shm/regrow-{RUN_ID}-{node[:12]}", ("10.0.0.1", 1), Version(), ())
                registering.append(self.coordinator.register_keeper.remote(actor, info))
        ray.get(registering, timeout=300)
        self.nodes = nodes
        self.updates: list[Any] = []
        self.shown = 0  # the newest update
        self.steps = 0
        self.generation = 0

    def begin(self) -> float:
        """Start a generation; the seconds until the coordinator has."""
        import ray

        from regrow.control.membership import Member

        one = Member("one for all", self.nodes[0], "host", 1, os.getpid())
        ray.get(self.coordinator.join.remote(one, 1))
        while (answer := ray.get(self.coordinator.formation.remote(one.id, self.generation))).seat is None:
            assert not answer.given_up
            time.sleep(answer.wait_s)
        self.generation = answer.seat.generation
        ranks = [(node, rank) for node in self.nodes for rank in range(RANKS_PER_NODE)]
        workers = [{"host": f"host-{node[:8]}", "node": node, "pid": rank, "device": "H100"} for node, rank in ranks]
        begun = time.perf_counter()
        ray.get(self.coordinator.start_training.remote(self.generation, 0, {"workers": workers}), timeout=300)
        took = time.perf_counter() - begun
        ray.get([actor.ask.remote(1.0, 0.0) for actor in self.actors], timeout=300)  # they are all up
        return took

    def step(self, play: Callable[[Version], list[Any]] | None = None) -> float:
        """One step's messages; the seconds until every leader has heard of the commit."""
        import ray

        self.steps += 1
        moment = Version(self.generation, self.steps)
        played = play(moment) if play else [actor.step.remote(moment) for actor in self.actors]
        reply = self.coordinator.row.remote(self.generation, self._row())
        took = ray.get(played, timeout=120)
        ray.get(reply, timeout=120)
        return max(took)

    def _row(self) -> dict[str, Any]:
        return row_of(self.steps, self.generation, self.num_nodes * RANKS_PER_NODE)

    @contextmanager
    def ticking(self) -> Iterator[None]:
        """The driver asks for news, as it does while a job runs."""
        import ray

        over = threading.Event()

        def tick() -> None:
            while not over.wait(TICK_S):
                updates, *_ = ray.get(self.coordinator.updates.remote(self.shown), timeout=60)
                self.shown = updates[-1].number if updates else self.shown
                self.updates += updates

        thread = threading.Thread(target=tick)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def asking(self, seconds: float) -> None:
        """All keepers ask after the coordinator for a while, as often as they do when nothing commits."""
        from regrow.config.schema import SnapshotConfig

        for actor in self.actors:
            actor.ask.remote(ASK_AFTER * SnapshotConfig().abandon_after_s, seconds)

    def checkpoint(self) -> None:
        """One, from the order to its commit."""
        self.updates.clear()
        self.coordinator.want_checkpoint.remote(self.generation, self.steps)
        give_up_at = time.monotonic() + 120
        while not any(update.content.get("event") == "checkpoint" for update in list(self.updates)):
            assert not any(update.content.get("event") == "checkpoint_failed" for update in list(self.updates))
            assert time.monotonic() < give_up_at
            time.sleep(TICK_S)


def process_called(name: str) -> int:
    """The one of this side's processes with that title."""
    found = [pid for pid in family() if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(name.encode())]
    assert len(found) == 1, f"{name}: {found}"
    return found[0]


def cpu_s(pid: int) -> float:
    """CPU seconds so far of a process."""
    return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13])) / TICKS_PER_S


def rate(pid: int, seconds: float) -> float:
    """CPU seconds a second of a process, over some time."""
    before, begun = cpu_s(pid), time.monotonic()
    time.sleep(seconds)
    return (cpu_s(pid) - before) / (time.monotonic() - begun)


def steps(
    cluster: Cluster, pid: int, num_steps: int, play: Callable[[Version], list[Any]] | None = None
) -> tuple[float, float, list[float]]:
    """Some steps, one every STEP_S: (CPU seconds, seconds, seconds from each step's reports to its commit)."""
    before, begun, took = cpu_s(pid), time.monotonic(), []
    for number in range(num_steps):
        took.append(cluster.step(play))
        time.sleep(max(0.0, begun + (number + 1) * STEP_S - time.monotonic()))
    return cpu_s(pid) - before, time.monotonic() - begun, took


def coordinator_side(num_nodes: int, windows: int, num_steps: int, folder: Path) -> dict[str, Any]:
    cluster = Cluster(folder, num_nodes)
    start_training_s = cluster.begin()
    for _ in range(5):
        cluster.step()
    time.sleep(2.0)
    idle_s = 5.0 if windows < 5 else 10.0
    quiet = rate(cluster.pid, idle_s)
    with cluster.ticking():
        ticks = rate(cluster.pid, idle_s) - quiet
        cluster.asking(idle_s)
        asking = rate(cluster.pid, idle_s) - ticks - quiet
        whole, own, commit_s = [], [], []
        for _ in range(windows):
            cpu, seconds, took = steps(cluster, cluster.pid, num_steps)
            whole.append(1e3 * (cpu - quiet * seconds) / num_steps)
            own.append(1e3 * (cpu - (quiet + ticks) * seconds) / num_steps)
            commit_s += took
        checkpoint_ms, checkpoint_s = [], []
        for _ in range(windows):
            cluster.step()
            time.sleep(1.0)
            before, begun = cpu_s(cluster.pid), time.monotonic()
            cluster.checkpoint()
            time.sleep(0.5)  # what follows the commit
            seconds = time.monotonic() - begun
            checkpoint_ms.append(1e3 * (cpu_s(cluster.pid) - before - (quiet + ticks) * seconds))
            checkpoint_s.append(seconds)
    return {
        "ms_per_step": whole,
        "messages_ms_per_step": own,
        "ticks_ms_per_s": 1e3 * ticks,
        "asking_ms_per_s": 1e3 * asking,
        "quiet_ms_per_s": 1e3 * quiet,
        "commit_s": commit_s,
        "ms_per_checkpoint": checkpoint_ms,
        "checkpoint_s": checkpoint_s,
        "start_training_s": start_training_s,
    }


def leader_side(windows: int, num_steps: int, folder: Path) -> dict[str, Any]:
    """A real Keeper at the top of the tree of NUM_NODES, all others stand-ins."""
    import ray

    node = ray.get_runtime_context().get_node_id()
    cluster = Cluster(folder, NUM_NODES, first=node)
    keeper = start_keeper(RUN_ID, node, KeeperSettings(str(folder), None, 600.0))
    info = ray.get(keeper.serve.remote(cluster.coordinator, secrets.token_bytes(16)), timeout=120)
    ray.get(cluster.coordinator.register_keeper.remote(keeper, info))
    cluster.begin()
    pid = process_called("ray::Keeper\0")
    members, *others = cluster.actors

    def play(moment: Version) -> list[Any]:
        return [members.step_through.remote(keeper, moment), *(actor.step.remote(moment) for actor in others)]

    for _ in range(5):
        cluster.step(play)
    time.sleep(2.0)
    quiet = rate(pid, 5.0 if windows < 5 else 10.0)
    found = [steps(cluster, pid, num_steps, play) for _ in range(windows)]
    return {
        "ms_per_step": [1e3 * (cpu - quiet * seconds) / num_steps for cpu, seconds, _ in found],
        "quiet_ms_per_s": 1e3 * quiet,
        "commit_s": [each for _, _, took in found for each in took],
    }


class Members:
    """Plays keepers whose workers join a generation, a list of members each. An actor."""

    def __init__(self, coordinator: Any, nodes: list[list[Any]], expected: int) -> None:
        self.coordinator, self.nodes, self.expected = coordinator, nodes, expected

    async def form(self, after: int) -> tuple[int, int, float]:
        """The generation, how often they asked for it, and the seconds until the last one had it."""
        begun, asked = time.perf_counter(), 0

        async def one(members: list[Any]) -> int:
            nonlocal asked
            await self.coordinator.join_all.remote([(member, self.expected) for member in members])
            while True:
                asked += 1
                answers = await self.coordinator.formations.remote([(member.id, after) for member in members])
                if all(answer.seat is not None for answer in answers):
                    return int(answers[0].seat.generation)
                assert not any(answer.given_up or answer.join_again for answer in answers)
                await asyncio.sleep(max(answer.wait_s for answer in answers))

        (generation,) = set(await asyncio.gather(*map(one, self.nodes)))
        return generation, asked, time.perf_counter() - begun


def forming_side(num_members: int, rounds: int, folder: Path) -> dict[str, Any]:
    import ray

    from regrow.config.schema import CheckpointConfig, ClusterConfig, OptimConfig, PretrainConfig
    from regrow.control.membership import Member
    from regrow.runtime.actor import start_coordinator
    from regrow.storage import Storage

    nodes = [secrets.token_hex(28) for _ in range(num_members // RANKS_PER_NODE)]
    members = [
        Member(
            id=secrets.token_hex(8),
            node=node,
            host=f"10.0.{number // 250}.{number % 250}",
            port=30_000 + rank,
            pid=1000 + rank,
            gpu=rank,
            machine=f"host-{number}",
            started=123_456_789,
        )
        for number, node in enumerate(nodes)
        for rank in range(RANKS_PER_NODE)
    ]
    coordinator = start_coordinator(
        Storage.at(folder / "run"),
        RUN_ID,
        checkpoints="checkpoints",
        config=PretrainConfig(
            cluster=ClusterConfig(min_workers=num_members - RANKS_PER_NODE, max_workers=num_members),
            optim=OptimConfig(global_batch_seqs=num_members, num_slices=num_members),
            checkpoint=CheckpointConfig(every_steps=None),
        ),
        submitted={},
    )
    actor: Any = ray.remote(Members)
    pid, actor = process_called("ray::Coordinator"), actor.options(num_cpus=0)
    on_nodes = [members[at : at + RANKS_PER_NODE] for at in range(0, num_members, RANKS_PER_NODE)]
    some: list[Any] = [
        actor.remote(coordinator, on_nodes[at::FORM_PROCESSES], num_members) for at in range(FORM_PROCESSES)
    ]
    ray.get([each.__ray_ready__.remote() for each in some], timeout=300)
    form_cpu_s, form_s, asks, generation = [], [], [], 0
    for number in range(rounds):
        time.sleep(2.0)
        quiet, before, begun = rate(pid, 3.0), cpu_s(pid), time.monotonic()
        found = ray.get([each.form.remote(generation) for each in some], timeout=300)
        time.sleep(0.5)
        form_cpu_s.append(cpu_s(pid) - before - quiet * (time.monotonic() - begun))
        ((generation,),) = [{each for each, _, _ in found}]
        asks.append(sum(asked for _, asked, _ in found))
        form_s.append(max(seconds for _, _, seconds in found))
        # a run whose groups do no step is given up
        ray.get(coordinator.start_training.remote(generation, number, {"workers": []}))
        ray.get(coordinator.row.remote(generation, row_of(number + 1, generation, num_members)))
    return {"form_cpu_s": form_cpu_s, "form_s": form_s, "asks": asks}


def side(num_nodes: int, windows: int, num_steps: int) -> dict[str, Any]:
    """`num_nodes` 0: the leader's; below: of so many members that form a group."""
    import ray

    os.environ.pop("RAY_ADDRESS", None)
    with tempfile.TemporaryDirectory(prefix="rgc", dir="/tmp", ignore_cleanup_errors=True) as temporary:
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            _temp_dir=f"{temporary}/ray",
            logging_level=logging.ERROR,
        )
        try:
            if num_nodes < 0:
                return forming_side(-num_nodes, windows, Path(temporary))
            if not num_nodes:
                return leader_side(windows, num_steps, Path(temporary))
            return coordinator_side(num_nodes, windows, num_steps, Path(temporary))
        finally:
            ray.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where to write the JSON")
    parser.add_argument("--quick", action="store_true", help="fewer windows, shorter ones")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--side", nargs=3, type=int, metavar=("NODES", "WINDOWS", "STEPS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        load = os.getloadavg()[0]
        print(json.dumps(side(*options.side) | {"load_average": [load, os.getloadavg()[0]]}))
        return
    if options.out is None:
        parser.error("--out is required")
    windows, num_steps = (3, 5) if options.quick else (5, 10)
    figures: dict[str, float] = {}
    spread: dict[str, Any] = {}
    runs: dict[str, Any] = {}

    def take(name: str, values: list[float]) -> None:
        figures[name] = statistics.median(values)
        spread[name] = summary(values)["range"]

    for num_nodes in (64, NUM_NODES) if STEPS in options.only else ():
        run = runs[f"{num_nodes}_nodes"] = run_side(__file__, "--side", *map(str, (num_nodes, windows, num_steps)))
        for name in ("ms_per_step", "messages_ms_per_step", "ms_per_checkpoint", "commit_s"):
            take(f"coordinator_{name}_{num_nodes}_nodes", run[name])
        for name in ("ticks_ms_per_s", "asking_ms_per_s", "start_training_s"):
            figures[f"coordinator_{name}_{num_nodes}_nodes"] = run[name]
        print(f"{num_nodes} nodes: {figures[f'coordinator_ms_per_step_{num_nodes}_nodes']:.1f} ms a step", flush=True)
    if FORMING in options.only:
        forming = runs["forming"] = run_side(__file__, "--side", str(-NUM_MEMBERS), str(windows), str(num_steps))
        take(f"coordinator_form_cpu_s_{NUM_MEMBERS}_members", forming["form_cpu_s"])
        take(f"coordinator_form_s_{NUM_MEMBERS}_members", forming["form_s"])
    if LEADER in options.only:
        runs["leader"] = run_side(__file__, "--side", "0", str(windows), str(num_steps))
        take(f"leader_ms_per_step_{NUM_NODES}_nodes", runs["leader"]["ms_per_step"])
    settings = {"ranks_per_node": RANKS_PER_NODE, "fan_out": FAN_OUT, "form_processes": FORM_PROCESSES}
    settings |= {"windows": windows, "steps_a_window": num_steps}
    write_result(options.out, figures, spread=spread, peers={}, runs=runs, settings=settings)


if __name__ == "__main__":
    main()
