"""Real ranks of which one is slow, or hangs, and what control makes of their pulses, read as keepers read them.

For tests and benchmarks: functions for `gloo.run_ranks`.
"""

import os
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from regrow.config.schema import ModelConfig
from regrow.control.commands import Ask, Outbox, Question, Record
from regrow.control.health import Health, Pulse, Stalls
from regrow.control.membership import Member
from regrow.control.phases import Phase
from regrow.control.silent import SilentKeepers
from regrow.control.suspects import Suspects
from regrow.runtime.abort import Breaker
from regrow.runtime.liveness.heartbeat import Heartbeat
from regrow.runtime.liveness.pulse import read_pulses, where
from regrow.state.memory.control_word import ControlWord
from regrow.train.metrics import Meter
from support.training import Training, build, micro_batches

MODEL = ModelConfig(vocab_size=64, dim=32, num_layers=2, num_heads=2, num_kv_heads=1, ffn_dim=64)
OTHERS_S, LATE_S = 0.4, 0.07  # of a step's stand-in for work; what the slow rank takes more
SLOW, HUNG = 1, 2  # ranks


def mine(folder: str) -> Path:
    """This rank's own node's memory."""
    path = Path(folder) / f"node {dist.get_rank()}"
    path.mkdir()
    return path


def pulses_of_all(folder: str) -> dict[tuple[str, int], Pulse]:
    found = {}
    for rank in range(dist.get_world_size()):
        for pulse in read_pulses(Path(folder) / f"node {rank}"):
            found[f"node {rank}", pulse.pid] = pulse
    return found


def train_with_a_slow_rank(folder: str, read_s: float) -> tuple[list[dict[str, Any]], float]:
    """Until one is named; on rank 0, what was said of which, and after how many seconds of training."""
    training, rank = Training(MODEL), dist.get_rank()
    step, heartbeat = build(training), Heartbeat(mine(folder))
    dist.barrier()
    heartbeat.enter(1, Breaker())
    heartbeat.trains(step.waits.at_a_collective, step.waits.at_a_message)
    out = Outbox()
    suspects, named = Suspects(out), threading.Event()

    def read() -> None:
        while not named.is_set():
            spent = {worker: pulse.spent for worker, pulse in pulses_of_all(folder).items()}
            suspects.read(spent, {worker: int(worker[0][-1]) for worker in spent}, time.time())
            if suspects.found:
                named.set()
            time.sleep(read_s)

    if rank == 0:
        threading.Thread(target=read, daemon=True).start()
    began = time.monotonic()
    meter, number, leaving = Meter(1, 1.0, 1.0, world_size=dist.get_world_size(), generation=1), 0, False
    while not leaving:
        number += 1
        rows, passes = micro_batches(training, number)
        time.sleep(OTHERS_S + LATE_S * (rank == SLOW))
        stats = step.run(rows, num_micro_batches=passes, lr=1e-3, flag=named.is_set())
        result = stats.resolve()
        heartbeat.timed(meter.finish({"step": number}, result, stats.waits()))
        heartbeat.stepped(number)
        leaving = result.flag
    return [dict(command.fields) for command in out if isinstance(command, Record)], time.monotonic() - began


def hang(folder: str, phase: Phase, mount: str = "") -> tuple[int, list[str], float]:
    """This process' pid; on rank 0, which is to be given up and why, while one does not come; how long it hung.

    It does not come out of the fourth such phase before one is found, or reads a file of `mount`, which answers then.
    """
    own, over, rank = mine(folder), Path(folder) / "over", dist.get_rank()
    heartbeat = Heartbeat(own)
    pids: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    found: list[str] = []
    if rank == 0:
        threading.Thread(target=watcher(folder, pids, found), daemon=True).start()
    for number in range(1, 5):
        if number == 1 or phase is Phase.first_step:
            heartbeat.enter(number, Breaker())
            heartbeat.trains(lambda: True, lambda: (0, 0))
        if phase is not Phase.first_step:
            heartbeat.stepped(number)
        hung_at = time.monotonic()
        with nullcontext() if phase in (Phase.first_step, Phase.step) else heartbeat.phase(phase):
            if number == 4 and rank == HUNG and mount:
                Path(mount, "rows").read_bytes()
            while number == 4 and rank == HUNG and not over.exists():
                time.sleep(0.1)
            dist.all_reduce(torch.zeros(3))
        heartbeat.stepped(number)
    return os.getpid(), found, time.monotonic() - hung_at


def watcher(folder: str, pids: list[int], found: list[str]) -> Callable[[], None]:
    """As the coordinator does, with keepers that are asked in this process."""
    out, asked = Outbox(), [0]
    health = Health(Stalls(30.0, 600.0, 180.0), out, SilentKeepers(out))
    members = [Member(f"m{rank}", f"node {rank}", "", 0, pid) for rank, pid in enumerate(pids)]

    def answer(command: Ask, node: str) -> Any:
        path = Path(folder) / node
        if command.question is Question.POSITIONS:
            ControlWord(traces=asked[0]).write(path)
            return where(path, asked[0])
        return read_pulses(path) if command.question is Question.HEARTBEATS else "stacks"

    def watch() -> None:
        health.stalls.begin(time.monotonic())
        for _ in range(3):
            health.stalls.stepped(0.1, time.monotonic())
        while not found:
            suspects = health.tick(time.monotonic(), members, [member.node for member in members])
            found.extend(f"{each.member.pid} {each.detail}" for each in suspects)
            for command in [each for each in out.take() if isinstance(each, Ask)]:
                asked[0] += 1
                for node in command.nodes:
                    health.answered(command.number, node, answer(command, node), time.monotonic())
            time.sleep(0.2)
        (Path(folder) / "over").touch()

    return watch
