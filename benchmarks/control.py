"""What deciding takes the coordinator in runs of 16,384 and 98,304 ranks, and what of it a rank waits for.

    python benchmarks/control.py --out benchmarks/results/FILE.json [--quick]

Real: `control.core.Control` and `control.health.Health` with the configuration of the shipped clusters, told all that
their members, ranks and keepers would say; `runtime.fleet.Fleet.holders`; what a rank makes of its answer. Everything
that another process would send is pickled and unpickled as Ray does it, or JSON where it is. Stand-ins: the processes
themselves, so nothing is trained, sent or restored, and Ray's own part of each call is left out (`coordinator.py` has
that at 2,048 nodes). One process; CPU time of all its threads.

lost_ms_*        A node's eight workers are gone, say its keeper's eight events, until others are told that it is over.
again_ms_*       All nodes left say that it broke; all survivors join and ask for the next group, node by node, one
                 message every MESSAGE_S; it forms when the last of them has come.
notice_ms_*      The same while one node is about to be taken away.
error_ms_*       All ranks say that they have met the same error, which is the run's, until it is given up.
log_ms_*         Writing the two events that name all ranks of that group; log_kb_* is how long they are.
holders_ms_*     All keepers answer what they hold, one after the other, until rank 0 knows the newest whole snapshot.
told_mb_*        What rank 0 is told of it, and passes on to all ranks, as JSON.
plan_ms_*        What a rank makes of that: what to read from which node. All ranks do so at once, eight on a host.
row_ms_*         A step's row.
read_cpu_ms_*    A reading of what all ranks spend their time on (drawn: steps of 2 s, jittered by 5%).
read_most_ms_*   The longest that it holds the coordinator at once: whatever else is due then waits.
named_s_*        From a rank's first step that is 15% longer until it is named: readings, times what lies between two.
"""

import argparse
import hashlib
import json
import pickle
import random
import secrets
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import hydra
import numpy as np
from hydra.core.config_store import ConfigStore

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "platform"), str(ROOT / "tests"), str(ROOT)]

from benchmarks.measure import Result, write_result  # noqa: E402

from regrow.config.check import topologies  # noqa: E402
from regrow.config.schema import PretrainConfig  # noqa: E402
from regrow.config.store import CONF_DIR, to_dataclass  # noqa: E402
from regrow.control import events as e  # noqa: E402
from regrow.control.commands import Ask, Outbox, Record  # noqa: E402
from regrow.control.core import Control  # noqa: E402
from regrow.control.health import Health, Pulse, Stalls  # noqa: E402
from regrow.control.membership import Member  # noqa: E402
from regrow.control.past import formed  # noqa: E402
from regrow.control.phases import PHASES, Phase  # noqa: E402
from regrow.control.silent import SilentKeepers  # noqa: E402
from regrow.control.slow import READ_PER_S, READ_S, Spent  # noqa: E402
from regrow.control.states import GivenUp  # noqa: E402
from regrow.control.values import SnapshotAck, Version  # noqa: E402
from regrow.model.size import parameter_shapes  # noqa: E402
from regrow.plan.boxes import Box  # noqa: E402
from regrow.plan.mesh import Coordinates  # noqa: E402
from regrow.plan.pipeline import Stages  # noqa: E402
from regrow.plan.placement import placed, stage_of  # noqa: E402
from regrow.plan.topology import plan_topology  # noqa: E402
from regrow.record.events import Forming, Generation  # noqa: E402
from regrow.record.log import EVENTS, RunLog  # noqa: E402
from regrow.runtime.fleet import Fleet  # noqa: E402
from regrow.runtime.keeper import KeeperInfo  # noqa: E402
from regrow.state.memory.held import Held, copy_name, is_whole  # noqa: E402
from regrow.state.memory.holders import Holders, Holding  # noqa: E402
from regrow.state.memory.reader import plan_from  # noqa: E402
from regrow.state.memory.slots import SLOT  # noqa: E402
from regrow.storage import Storage  # noqa: E402
from support.told import Told  # noqa: E402

CLUSTERS = {16_384: "h100x16384", 98_304: "h100x98304"}
RANKS_PER_NODE = 8
ROUNDS = 5
MESSAGE_S = 50e-6  # from one message to the next, on the run's clock
MOMENTS = 2  # that keepers hold of the newest steps
KINDS = ("model", "optim/exp_avg", "optim/exp_avg_sq")
PP, STEP_S, JITTER, SLOWER_S = 16, 2.0, 0.05, 0.3  # of readings
READINGS, STEPS = 24, 10  # and steps from one to the next


def config_of(cluster: str) -> PretrainConfig:
    ConfigStore.instance().store(name="pretrain_schema", node=PretrainConfig)
    with hydra.initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        composed = hydra.compose("pretrain", [f"+cluster={cluster}", "run.storage_path=/nowhere"])
    return to_dataclass(composed, PretrainConfig)


def cpu_ms(run: Callable[[], Any]) -> tuple[float, Any]:
    begun = time.process_time()
    found = run()
    return 1e3 * (time.process_time() - begun), found


class Run(Told):
    """A control with a shipped configuration, and all its members."""

    def __init__(self, config: PretrainConfig) -> None:
        self.now, self.commands = 1000.0, []
        self.control = Control(config, is_whole=is_whole, now=self.now, past=None)
        self.port = partial(random.Random(0).randrange, 1 << 15, 1 << 16)  # another one in each generation
        self.nodes = [secrets.token_hex(28) for _ in range(config.cluster.max_workers // RANKS_PER_NODE)]
        self.alive = [
            Member(secrets.token_hex(6), node, "10.0.0.1", 1, 1000 + rank, gpu=rank, machine=f"host-{number}")
            for number, node in enumerate(self.nodes)
            for rank in range(RANKS_PER_NODE)
        ]

    def tell(self, event: e.Event) -> None:
        self(pickle.loads(pickle.dumps(event, 5)))

    def tell_all(self, events: Iterable[e.Event]) -> None:
        for event in events:
            self.tell(event)

    def form_of_all(self, *, broke: bool) -> list[Member]:
        """The members of the group that is formed."""
        generation = self.control.generation
        if broke:
            for _ in dict.fromkeys(member.node for member in self.alive):  # keepers pass the first word on
                self.tell(e.Broke(generation, "a peer is gone"))
        size = len(self.alive)
        for first in range(0, size, RANKS_PER_NODE):
            stays = self.alive[first : first + RANKS_PER_NODE]
            here = [replace(each, port=self.port(), control=self.port()) for each in stays]
            joined = [e.Joined(member, size) for member in here]
            asked = [e.Asked(member.id, generation) for member in here]
            for event in chain[e.Event](joined, asked):
                self.now += MESSAGE_S
                self.tell(event)
        assert self.control.generation == generation + 1
        return list(self.control.group.membership.current)

    def train(self, members: list[Member], step: int) -> list[float]:
        """A few steps of the newest group; what rows take."""
        used = list(dict.fromkeys(member.node for member in members))
        self.clear()
        for node in used:
            self(e.KeeperUp(node, node, ("10.0.0.1", 1)))
        workers = [{"node": member.node, "pid": member.pid} for member in members]
        self.tell(e.Began(self.control.generation, step, tuple(used), {"workers": workers}))
        peers, rows = self.peers, []
        for number in range(step + 1, step + 4):
            self.now += 5.0
            rows.append(cpu_ms(partial(self.row, number, step_s=5.0))[0])
            version = Version(self.control.generation, number)
            self(e.Sealed([SnapshotAck(node, version, peers[node]) for node in used]))
        self.clear()
        return rows

    def lose(self, node: str) -> None:
        for member in [each for each in self.alive if each.node == node]:
            self.tell(e.Gone(node, member.pid))
        self.alive = [each for each in self.alive if each.node != node]
        self()


def of_losses(result: Result, size: int, config: PretrainConfig) -> None:
    run, dice = Run(config), random.Random(0)
    members, step = run.form_of_all(broke=False), 0
    lost, again, rows, logged = [], [], [], []
    with tempfile.TemporaryDirectory() as folder, RunLog(Storage.at(folder)) as log:
        write_group(log, 1, members)
        before = Path(folder, EVENTS).stat().st_size
        for number in range(2, ROUNDS + 2):
            rows += run.train(members, step)
            step += 3
            victim = dice.choice(members).node
            lost.append(cpu_ms(partial(run.lose, victim))[0])
            took, members = cpu_ms(lambda: run.form_of_all(broke=True))
            again.append(took)
            logged.append(cpu_ms(partial(write_group, log, number, members))[0])
        result.figures[f"log_kb_{size}_ranks"] = (Path(folder, EVENTS).stat().st_size - before) / 1e3 / ROUNDS
    noticed, errors = [], []
    for _ in range(ROUNDS):
        rows += run.train(members, step)
        step += 3
        run(e.Notice({members[0].node: run.now + 1e6}))
        run.lose(members[-1].node)
        took, members = cpu_ms(lambda: run.form_of_all(broke=True))
        noticed.append(took)
    for _ in range(ROUNDS):
        other = Run(config)
        other.form_of_all(broke=False)
        troubles = [e.Trouble(other.control.generation, member, size, "no such file") for member in other.alive]
        errors.append(cpu_ms(partial(other.tell_all, troubles))[0])
        assert isinstance(other.control.ending, GivenUp)
    result.add(f"notice_ms_{size}_ranks", noticed)
    result.add(f"error_ms_{size}_ranks", errors)
    result.add(f"lost_ms_{size}_ranks", lost)
    result.add(f"log_ms_{size}_ranks", logged)
    result.add(f"again_ms_{size}_ranks", again)
    result.add(f"row_ms_{size}_ranks", rows)


def write_group(log: RunLog, generation: int, members: list[Member]) -> None:
    """The two events that have all ranks of a group."""
    log.event(Forming(**formed(generation, members)))
    of_workers = {"device": "NVIDIA H100 80GB HBM3", "graphs": 2, "lowered": 4}
    workers = [{"host": each.machine, "node": each.node, "pid": each.pid, **of_workers} for each in members]
    begun = Generation(
        generation=generation, world_size=len(members), start_step=1, cause="worker_died", workers=workers
    )
    log.event(begun)


class Answering:
    """Keepers that answer what they hold, one after the other."""

    def __init__(self, answers: list[bytes]) -> None:
        self._answers, self._asked = iter(answers), list[Future[list[Holding]]]()
        self._count = len(answers)

    def holdings(self, since: Version) -> Future[list[Holding]]:
        self._asked.append(Future())
        if len(self._asked) == self._count:
            threading.Thread(target=self._answer, daemon=True).start()
        return self._asked[-1]

    def _answer(self) -> None:
        for call, answer in zip(self._asked, self._answers, strict=True):
            call.set_result(pickle.loads(answer))


def of_holders(result: Result, size: int, config: PretrainConfig) -> None:
    table = topologies(config)
    mesh = table[max(table)].mesh
    nodes = [secrets.token_hex(28) for _ in range(mesh.world_size // RANKS_PER_NODE)]
    wholes = [
        Box.whole(f"{kind}/{name}", shape) for kind in KINDS for name, shape in parameter_shapes(config.model).items()
    ]
    took, planned = list[float](), list[float]()
    for number in range(ROUNDS):
        fleet = Fleet("run", b"", None)  # type: ignore[arg-type]
        keepers: Any = Answering([pickle.dumps(Holding.all_of(held), 5) for held in _held(mesh, nodes)])
        for node in nodes:
            fleet._known[node] = keepers, KeeperInfo(node, node, "/dev/shm", ("10.0.0.1", 1), Version(), ())
        since = Version(1, 1)

        def ask(fleet: Fleet = fleet, since: Version = since) -> str:
            found = fleet.holders(since, lambda node: True, set(nodes))
            newest = found[max(moment for moment, holders in found.items() if holders.is_whole)]
            assert len(newest) == 2 * mesh.world_size
            return json.dumps(pickle.loads(pickle.dumps(newest, 5)).to_json())  # by Ray to rank 0, and on

        seconds, told = cpu_ms(ask)
        took.append(seconds)
        result.figures[f"told_mb_{size}_ranks"] = len(told) / 1e6
        me = Coordinates(mesh, random.Random(number).randrange(mesh.world_size))
        mine = [placed(box, me) for box in wholes if stage_of(box.name, mesh) == me.along("pp")[0]]

        def plan(told: str = told, mine: list[Box] = mine, me: Coordinates = me) -> Any:
            return plan_from(mine, Holders.of_json(json.loads(told)), "newcomer", me.rank)

        seconds, reads = cpu_ms(plan)
        wanted = {number for number, box in enumerate(mine) if box.num_elements}
        assert {read.want for each in reads.values() for read in each} == wanted
        planned.append(seconds)
    result.add(f"holders_ms_{size}_ranks", took)
    result.add(f"plan_ms_{size}_ranks", planned)


def _held(mesh: Any, nodes: list[str]) -> list[list[Held]]:
    """What each node holds: its own ranks' slots, and copies of those of the node before it."""
    own: list[list[Held]] = []
    for number in range(len(nodes)):
        ranks = range(number * RANKS_PER_NODE, (number + 1) * RANKS_PER_NODE)
        own.append(
            [
                Held(
                    f"g000001-{rank:06d}-{step}{SLOT}",
                    Version(1, step),
                    Coordinates(mesh, rank),
                    RANKS_PER_NODE,
                    hashlib.sha256(f"{rank} {step}".encode()).hexdigest(),
                )
                for rank in ranks
                for step in range(1, MOMENTS + 1)
            ]
        )
    copies = [
        [Held(copy_name(each.file, nodes[number - 1]), each.moment, each.coordinates, each.writers, each.header_sha256)
         for each in own[number - 1]]
        for number in range(len(nodes))
    ]  # fmt: skip
    return [[*mine, *theirs] for mine, theirs in zip(own, copies, strict=True)]


def of_readings(result: Result, size: int) -> None:
    random_, out = np.random.default_rng(0), Outbox()
    nodes = [secrets.token_hex(28) for _ in range(size // RANKS_PER_NODE)]
    members = [
        Member(f"m{rank}", nodes[rank // RANKS_PER_NODE], "host", 1, 1000 + rank, gpu=rank % RANKS_PER_NODE)
        for rank in range(size)
    ]
    stages = Stages(PP, tuple(range(stage, stage + 1) for stage in range(PP)))
    topology = plan_topology(size, num_slices=size // PP * 3 // 2, stages=stages)
    health = Health(Stalls(30.0, 600.0, 60.0), out, SilentKeepers(out), topologies={size: topology})
    totals, now = np.zeros((size, 2)), 0.0
    cpu, most, named = list[float](), list[float](), dict[int, int]()
    for number in range(1, READINGS + 1):
        own = 0.8 * STEP_S * random_.lognormal(0, JITTER, (STEPS, size))
        own[:, 1] += SLOWER_S * (number > READINGS // 2)
        taken = own.max(axis=1, keepdims=True) + 0.2 * STEP_S
        totals += np.stack([np.broadcast_to(taken, own.shape).sum(axis=0), (taken - own).sum(axis=0)], axis=1)
        now += float(taken.sum()) + 100.0  # a reading is always due
        answers = [pickle.dumps(answer, 5) for answer in _pulses(members, totals, number * STEPS)]
        health.look_at_devices(number * STEPS, now, nodes, members)
        ask = next(each for each in out.take() if isinstance(each, Ask))
        begun, longest = time.process_time(), 0.0
        for node, answer in zip(nodes, answers, strict=True):
            called = time.perf_counter()
            health.answered(ask.number, node, pickle.loads(answer), now)
            longest = max(longest, time.perf_counter() - called)
        cpu.append(1e3 * (time.process_time() - begun))
        most.append(1e3 * longest)
        said = [each for each in out.take() if isinstance(each, Record) and each.event == "suspected"]
        named |= {each.fields["rank"]: number - READINGS // 2 for each in said}
    assert named.keys() == {1}, f"of {size} ranks rank 1 alone is to be named, not {list(named)}"
    result.add(f"read_cpu_ms_{size}_ranks", cpu[1:])
    result.add(f"read_most_ms_{size}_ranks", most[1:])
    result.figures[f"named_s_{size}_ranks"] = named[1] * max(READ_S, len(nodes) / READ_PER_S)


def _pulses(members: list[Member], totals: np.ndarray, step: int) -> list[list[Pulse]]:
    longest_s = tuple(2.5 if phase is Phase.step else 0.0 for phase in PHASES)
    pulses = [
        Pulse(
            member.pid, 1, step, 0.01, 0.003, "S", phase=Phase.step, phase_s=0.5, longest_s=longest_s,
            spent=Spent(step, step_s=float(total), shard_s=float(wait)),
        )
        for member, (total, wait) in zip(members, totals, strict=True)
    ]  # fmt: skip
    return [pulses[at : at + RANKS_PER_NODE] for at in range(0, len(pulses), RANKS_PER_NODE)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--quick", action="store_true", help="16,384 ranks alone")
    options = parser.parse_args()
    result = Result()
    for size, cluster in list(CLUSTERS.items())[: 1 if options.quick else None]:
        config = config_of(cluster)
        for part in (of_losses, of_holders):
            part(result, size, config)
            print(size, {name: round(value, 1) for name, value in result.figures.items()}, flush=True)
        of_readings(result, size)
    print({name: round(value, 1) for name, value in result.figures.items()}, flush=True)
    write_result(
        options.out, result.figures, spread=result.spread, peers={}, runs={"rounds": ROUNDS, "readings": READINGS - 1}
    )


if __name__ == "__main__":
    main()
