"""A rank that outlives its group: as a worker does it, without Ray, so that what a backend does to it can be seen.

It trains, certified, is told that its generation is over, breaks it off, and trains again in a group of those that are
left. Runs on NCCL and, on a CPU, on the backend that has NCCL's manners.
"""

import contextlib
import gc
import os
import signal
import threading
import time
import traceback
from dataclasses import dataclass, field, replace
from datetime import timedelta
from enum import StrEnum
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from regrow.accept.ranks import Member, tell_over
from regrow.accept.tiny import count_up_rows
from regrow.config.schema import ModelConfig, OptimConfig, ParallelConfig
from regrow.parallel.fsdp import build_mesh, let_go_of_meshes
from regrow.parallel.stream import Stream, stream_of
from regrow.plan.topology import Topology, plan_topology
from regrow.runtime.abort import Breaker
from regrow.train.build import build_step
from regrow.train.certificate import Certificate
from regrow.train.step import TrainStep

LOOK_S = 0.05
DRAIN_S = 60.0
FORM_S = 60.0
HANGS_S = 600.0  # a collective's own timeout, which no rank is to wait for
PIECES = 16  # of a raw collective that is repeated


class Fault(StrEnum):
    """What happens to the last rank, or ranks (`late`: the first), in the middle of what `where` says."""

    none = "none"
    kill = "kill"
    fail = "fail"  # an exception in its own code
    stop = "stop"
    spin = "spin"  # a loop on the host that does not end
    abort = "abort"  # it aborts, and tells no peer
    late = "late"  # it comes late to the first collective


class Where(StrEnum):
    all_reduce = "all_reduce"  # of large tensors, one after the other
    reduce_scatter = "reduce_scatter"
    init = "init"  # while communicators are made
    backward = "backward"  # of the fatal step


@dataclass(frozen=True)
class Scenario:
    """What ranks do, and what happens to one."""

    fault: Fault = Fault.kill
    where: Where = Where.backward
    fatal_step: int = 3
    num_steps: int = 5
    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    num_victims: int = 1
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-3, global_batch_seqs=24, num_slices=24))
    seq_len: int = 32
    patience_s: float = 5.0  # without a step, once there was one: then the generation is over
    late_s: float = 15.0
    num_elements: int = 1 << 24  # of a raw collective
    stays: bool = True  # until it is released
    certified: bool = True  # without, to see what would be believed


@dataclass
class Outlived:
    """What a survivor saw."""

    pid: int
    losses: dict[int, float]  # by step: those of the first generation that were certified
    said: str  # by the exception that ended the first generation
    free_s: float = 0.0  # from the word to a device at rest
    first_step_s: float = 0.0  # from the word to the first step of the next generation
    after: dict[int, float] = field(default_factory=dict)  # losses of the next generation, from the seed
    form_s: float = 0.0


def outlive(member: Member, scenario: Scenario) -> Outlived:
    """Two generations of a rank, or for the victim as long as it lives."""
    all_ranks = list(range(member.world_size))
    is_victim = member.rank in (all_ranks[:1] if scenario.fault is Fault.late else all_ranks[-scenario.num_victims :])
    survivors = who_goes_on(member.world_size, scenario)
    first = Generation(member, 0, all_ranks, scenario, is_victim=is_victim)
    losses, said = first.run()
    over_at = float(member.store.get("over 0")) if said else time.time()
    result = Outlived(os.getpid(), losses, said, time.time() - over_at)
    if said and member.rank in survivors:
        begun = time.time()
        again = replace(scenario, fault=Fault.none, where=Where.backward)
        second = Generation(member, 1, survivors, again, is_victim=False)
        second.on_first_step = lambda: setattr(result, "first_step_s", time.time() - over_at)
        result.form_s = begun
        result.after, complaint = second.run()
        result.form_s = second.formed_at - begun
        if complaint:
            raise RuntimeError(f"the next group failed, too: {complaint}")
    member.say(f"went on {member.rank}")
    if scenario.stays:
        with contextlib.suppress(RuntimeError):  # the store's timeout
            member.connect(HANGS_S).wait(["release"])
    return result


# its name from torch 2.13 on, and before
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class Generation:
    """A rank in one group: formed, trained in, and left, however it ends."""

    def __init__(self, member: Member, number: int, ranks: list[int], scenario: Scenario, *, is_victim: bool) -> None:
        self.member, self.number, self.ranks, self.scenario = member, number, ranks, scenario
        self.is_victim, self.device = is_victim, member.device
        self.breaker, self.stream = Breaker(), stream_for(self.device)
        self.certificate = Certificate(number, len(ranks), self.device)
        self.breaker.first(self.certificate.clear)
        self.progress_at: float | None = None
        self.formed_at = 0.0
        self.on_first_step: Any = lambda: None
        self._left = threading.Event()

    def run(self) -> tuple[dict[int, float], str]:
        """Certified losses by step, and what ended it, empty where it came to its end."""
        losses: dict[int, float] = {}
        said = ""
        if self.ranks[0] == self.member.rank:
            self.member.say("generation", str(self.number))
        threading.Thread(target=self._listen, daemon=True, name="listen").start()
        try:
            self._form()
            if self.scenario.where in (Where.all_reduce, Where.reduce_scatter):
                self._repeat()
            else:
                self._train(losses)
        except Exception as error:
            traceback.clear_frames(error.__traceback__)  # they hold the model
            said = f"{type(error).__name__}: {error}".splitlines()[0]
            if not (self.is_victim and self.scenario.fault is Fault.abort):
                tell_over(self.member.store, self.number)
        if said or self.breaker.begun:
            said = said or "the device completed what was aborted"
            self.breaker.start()
            if not self.stream.drain(DRAIN_S):
                raise RuntimeError(f"{self.device} does not come to rest {DRAIN_S:.0f} s after its group was aborted")
            self.member.store.wait([f"over {self.number}"])
        self._leave()
        return losses, said

    def _form(self) -> None:
        if self.scenario.where is Where.init:
            if self.is_victim:
                befall(self.scenario)
            self.progress_at = time.monotonic() + FORM_S
        if self.scenario.fault is Fault.late and self.is_victim:
            time.sleep(self.scenario.late_s)
        store = dist.PrefixStore(f"generation-{self.number}", self._store())
        distributed_c10d._world.group_count = 0
        options: dict[str, Any] = {"device_id": self.device} if self.device.type == "cuda" else {}
        with self.breaker.connecting(FORM_S):
            dist.init_process_group(
                backend_for(self.device),
                store=store,
                rank=self.ranks.index(self.member.rank),
                world_size=len(self.ranks),
                timeout=timedelta(seconds=HANGS_S),
                **options,
            )
            tensor = torch.ones(1, device=self.device)
            dist.all_reduce(tensor)
            assert self.stream.drain(FORM_S), "the first collective did not end"
        if self.breaker.begun or tensor.item() != len(self.ranks):
            raise RuntimeError("the group was over before it was formed")
        self.formed_at = time.time()

    def _store(self) -> dist.TCPStore:
        """The group's own, the first rank's as a worker's is, which is broken off with it."""
        word, seconds = f"store {self.number}", timedelta(seconds=FORM_S)
        if self.ranks[0] == self.member.rank:
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=seconds)
            self.member.say(word, str(store.port))
            self.breaker.watch({("127.0.0.1", store.port)})
            return store
        port = int(self.member.store.get(word))
        self.breaker.watch({("127.0.0.1", port)})
        return dist.TCPStore("127.0.0.1", port, wait_for_workers=False, timeout=seconds)

    def _train(self, losses: dict[int, float]) -> None:
        scenario = self.scenario
        step = self.stream.submit(self._build).result()
        step.certificate = self.certificate if scenario.certified else None
        launched: list[tuple[int, Any]] = []

        def settle(left: int) -> None:
            while len(launched) > left:
                number, stats = launched.pop(0)
                losses[number] = stats.result().resolve().loss
                if not self.progress_at:
                    self.on_first_step()
                self.progress_at = time.monotonic()

        for number in range(1, scenario.num_steps + 1):
            rows, num_micro_batches = self._rows(number)
            if self.is_victim and number == scenario.fatal_step and scenario.fault not in (Fault.none, Fault.late):
                # in its forward: the others wait for it in the backward
                step.loss_function = partial(self._loss, step.loss_function)
            run = partial(
                step.run, rows, num_micro_batches=num_micro_batches, lr=scenario.optim.lr, digest=number, number=number
            )
            launched.append((number, self.stream.submit(run)))
            settle(self.stream.num_ahead)
        settle(0)

    def _loss(self, loss_function: Any, *args: Any) -> Tensor:
        loss: Tensor = loss_function(*args)
        if self.scenario.fault is Fault.abort:
            self.breaker.start()  # its own, and no peer is told
            time.sleep(0.5)
        else:
            befall(self.scenario)
        return loss

    def _repeat(self) -> None:
        """One large collective after the other, more than a device can be through with."""
        self.progress_at = time.monotonic() + self.scenario.patience_s
        world_size = len(self.ranks)
        part = torch.empty(self.scenario.num_elements // world_size, device=self.device)
        whole = torch.ones(len(part) * world_size, device=self.device)

        def launch() -> None:
            if self.scenario.where is Where.all_reduce:
                dist.all_reduce(whole)
            else:
                reduce_scatter(part, whole)

        if self.is_victim:
            threading.Timer(0.5, befall, (self.scenario,)).start()
        pending: list[Any] = []
        while True:
            pending.append(self.stream.submit(launch))
            if len(pending) >= PIECES:
                pending.pop(0).result()
                if self.device.type == "cuda":
                    event = torch.cuda.Event()
                    event.record()
                    event.synchronize()
            if self.breaker.begun:
                raise RuntimeError("told that it is over")

    def _build(self) -> TrainStep:
        scenario = self.scenario
        mesh = build_mesh(self._topology().mesh, self.device.type)
        return build_step(scenario.model, scenario.parallel, scenario.optim, mesh=mesh, device=self.device, seed=0)

    def _topology(self) -> Topology:
        scenario, parallel = self.scenario, self.scenario.parallel
        return plan_topology(
            len(self.ranks),
            num_slices=scenario.optim.num_slices,
            dp_replicate=parallel.dp_replicate,
            tp=parallel.tp,
            cp=parallel.cp,
        )

    def _rows(self, number: int) -> tuple[list[Tensor], int]:
        optim, topology = self.scenario.optim, self._topology()
        rows = count_up_rows(
            number,
            num_rows=optim.global_batch_seqs,
            seq_len=self.scenario.seq_len,
            vocab_size=self.scenario.model.vocab_size,
            noise=0.1,
        ).to(self.device)
        slices = rows.split(optim.global_batch_seqs // optim.num_slices)
        mine = topology.slices_of(self.ranks.index(self.member.rank))
        return [slices[index] for index in mine], topology.batch.num_micro_batches

    def _listen(self) -> None:
        """As a worker's heartbeat: told from outside, or out of patience."""
        store, word = self.member.connect(), f"over {self.number}"
        while not self._left.wait(LOOK_S):
            waited_s = time.monotonic() - self.progress_at if self.progress_at else 0.0
            if waited_s > self.scenario.patience_s and not (self.is_victim and self.scenario.fault is Fault.abort):
                tell_over(store, self.number)
            if store.check([word]):
                self.breaker.start()
                return

    def _leave(self) -> None:
        self.breaker.settle()
        with contextlib.suppress(Exception):  # it may be broken
            if dist.is_initialized():
                dist.destroy_process_group()
        let_go_of_meshes()
        self.breaker.left()
        self._left.set()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def who_goes_on(world_size: int, scenario: Scenario) -> list[int]:
    """All but the victims; under tensor and context parallelism, whole units."""
    if scenario.fault in (Fault.none, Fault.late, Fault.abort):
        return list(range(world_size))
    unit = scenario.parallel.tp * scenario.parallel.cp
    return list(range((world_size - scenario.num_victims) // unit * unit))


def befall(scenario: Scenario) -> None:
    """Carry out the scenario's fault on this process."""
    if scenario.fault is Fault.kill:
        os.kill(os.getpid(), signal.SIGKILL)
    if scenario.fault is Fault.stop:
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(HANGS_S)
    if scenario.fault is Fault.spin:
        while True:
            pass
    if scenario.fault is Fault.fail:
        raise RuntimeError("a fault of its own")


def backend_for(device: torch.device) -> str:
    if device.type == "cuda":
        return "nccl"
    return str(_asynchronous().NAME)


def stream_for(device: torch.device) -> Stream:
    if device.type == "cuda":
        return stream_of(device)
    stream: Stream = _asynchronous().default_stream()
    return stream


def _asynchronous() -> Any:
    """Written against torch 2.13; a GPU is looked at with older ones, too."""
    from regrow.parallel import asynchronous

    return asynchronous
