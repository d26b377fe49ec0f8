"""All GPUs of a node: what NCCL does when a rank is lost, links, and training at several world sizes.

The failure path is that of `outlive`, which tests run on the backend that has NCCL's manners. No GPU was here when this
was written.
"""

import gc
import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from regrow.accept.checks_cpu import abort_at_once_and_in_turn
from regrow.accept.checks_one_gpu import num_gpus, probe_gpu
from regrow.accept.claims import Report
from regrow.accept.generations import Held, in_memory, judge_flat
from regrow.accept.matrix import Row, run_matrix
from regrow.accept.outlive import Fault, Generation, Scenario, Where
from regrow.accept.ranks import Member, form_group, run_ranks
from regrow.accept.timing import Load, Loaded, device_s
from regrow.accept.tiny import off_by
from regrow.config.plain import read_model
from regrow.config.schema import ActivationCheckpoint, Dtype, Float8, ModelConfig, OptimConfig, ParallelConfig
from regrow.control.values import Version
from regrow.parallel.float8 import import_torchao, inner_tensor
from regrow.parallel.fsdp import build_mesh, coordinates_of
from regrow.plan.mesh import plan_mesh
from regrow.state.entries import training_entries
from regrow.state.memory.slots import Committed
from regrow.state.memory.writer import Snapshots

GIB, MIB = 2**30, 2**20
MESSAGE = 256 * MIB
SETTLE_S = 90.0  # torch's watchdog would end survivors after 60 s, its monitor after HEARTBEAT_S
SMALL = Scenario(model=ModelConfig(), num_elements=1 << 26)
BFLOAT16 = ParallelConfig(dtype=Dtype.bfloat16)


def probes(report: Report) -> None:
    found = run_ranks(_probe, num_gpus(), device_type="cuda")
    spread = max(found) / min(found) - 1
    slow = found.index(max(found))
    figure = f"{min(found) * 1e3:.3f} to {max(found) * 1e3:.3f} ms on {len(found)} GPUs at once"
    report.found("probes", spread < 0.05, figure, f"GPU {slow} is slower than the others by {spread:.0%}")


def _probe(member: Member) -> float:
    member.say(f"ready {member.rank}")
    member.hear(*(f"ready {rank}" for rank in range(member.world_size)))
    return probe_gpu(member.device)[0]


def bandwidth(report: Report) -> None:
    """Collectives of 256 MB as nccl-tests counts them, copies to the host from all GPUs at once, and both together."""
    found = run_ranks(_bandwidth, num_gpus(), device_type="cuda")
    eight = num_gpus() == 8 and any(name in torch.cuda.get_device_name(0) for name in ("H100", "H200"))
    for name, least in (("all_gather", 330.0), ("reduce_scatter", 330.0), ("all_reduce", 400.0)):
        rate = min(each[name] for each in found)
        figure = f"{rate:.0f} GB/s bus bandwidth over {num_gpus()} GPUs"
        reason = "NVLink is down, or NVLS is off and the ring slow: NCCL_DEBUG=INFO, nvidia-smi nvlink -s"
        if eight:
            report.found(f"bandwidth_{name}", rate >= least, figure, reason)
        else:
            report.not_tested(f"bandwidth_{name}", f"{figure}; what is expected is of 8 H100s or H200s")
    alone, beside = min(each["copy"] for each in found), min(each["copy_beside"] for each in found)
    figure = f"{alone:.0f} GB/s each at once, {beside:.0f} beside all-gathers"
    report.found("copies_at_once", min(alone, beside) >= 35, figure, "pinned on the other socket, or shared links")


def _bandwidth(member: Member) -> dict[str, float]:
    """GB/s of this rank."""
    form_group(member, "nccl")
    world_size, device = member.world_size, member.device
    part = torch.ones(MESSAGE // 4 // world_size, device=device)
    whole = torch.ones(part.numel() * world_size, device=device)
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    share = (world_size - 1) / world_size  # of nccl-tests' bus bandwidth
    num_bytes = whole.nbytes
    found = {
        "all_gather": num_bytes * share / _seconds(lambda: gather(whole, part)) / 1e9,
        "reduce_scatter": num_bytes * share / _seconds(lambda: scatter(part, whole)) / 1e9,
        "all_reduce": num_bytes * 2 * share / _seconds(lambda: dist.all_reduce(whole)) / 1e9,
    }
    source = torch.ones(GIB // 4, device=device)
    target = torch.empty_like(source, device="cpu", pin_memory=True)
    dist.barrier()
    found["copy"] = GIB / _seconds(lambda: target.copy_(source, non_blocking=True)) / 1e9
    side = torch.cuda.Stream()
    dist.barrier()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(side):
        begin.record()
        for _ in range(4):
            target.copy_(source, non_blocking=True)
        end.record()
    for _ in range(200):
        gather(whole, part)
    torch.cuda.synchronize()
    found["copy_beside"] = 4 * GIB / (begin.elapsed_time(end) / 1e3) / 1e9
    dist.destroy_process_group()
    return found


def _seconds(work: Callable[[], Any]) -> float:
    device_s(work, 3)  # not counted: what loads and connects
    return device_s(work, 20)


def matrix_of_two(report: Report) -> None:
    """One of two ranks is lost in every way there is."""
    rows = [
        Row("kill_all_reduce", 2, replace(SMALL, where=Where.all_reduce), free_s=5.0),
        Row("kill_reduce_scatter", 2, replace(SMALL, where=Where.reduce_scatter), free_s=5.0),
        Row("kill_first_backward", 2, replace(SMALL, fatal_step=1)),
        Row("kill_mid_step", 2, SMALL, free_s=5.0, first_step_s=10.0),
        Row("own_failure", 2, replace(SMALL, fault=Fault.fail)),
        Row("stopped", 2, replace(SMALL, fault=Fault.stop)),
        Row("endless_loop", 2, replace(SMALL, fault=Fault.spin)),
        Row("late_rank_0", 2, replace(SMALL, fault=Fault.late)),
        Row("one_aborts", 2, replace(SMALL, fault=Fault.abort), first_step_s=25.0),
    ]
    run_matrix(report, rows, device_type="cuda", settle_s=SETTLE_S)


def killed_while_forming(report: Report) -> None:
    rows = [Row("kill_init", 2, replace(SMALL, where=Where.init), free_s=30.0, first_step_s=40.0, may_end=True)]
    run_matrix(report, rows, device_type="cuda", settle_s=20.0)


def matrix_of_all(report: Report) -> None:
    """All GPUs of the node, compiled: FSDP, two replicas, tensor and context parallelism."""
    number, medium = num_gpus(), read_model("150m")
    compiled = replace(SMALL, model=medium, seq_len=512, parallel=replace(BFLOAT16, compile=True), patience_s=20.0)
    slices = 8 * number * (number - 1)
    optim = OptimConfig(lr=1e-4, global_batch_seqs=slices, num_slices=slices)
    compiled = replace(compiled, optim=optim, num_steps=4)
    rows = [Row("fsdp_kill", number, compiled, tolerance=5e-3, free_s=5.0, first_step_s=15.0)]
    for name, parallel, num_victims in (
        ("hsdp_kill", ParallelConfig(dp_replicate=2), 1),
        ("hsdp_kill_replica", ParallelConfig(dp_replicate=2), number // 2),
        ("tp_kill", ParallelConfig(tp=2), 1),
        ("cp_kill", ParallelConfig(cp=2), 1),
    ):
        if number < 4 or number % 2:
            report.not_tested(name, f"needs an even number of GPUs, at least 4; {number} here")
        else:
            rows.append(Row(name, number, replace(SMALL, parallel=parallel, num_victims=num_victims)))
    run_matrix(report, rows, device_type="cuda", settle_s=SETTLE_S)


def garbage(report: Report) -> None:
    """One of two aborts in the middle of an all-reduce, the other is told nothing: what does its buffer hold?"""
    found = run_ranks(_abort_alone, 2, device_type="cuda", timeout_s=90.0)
    figure = f"the other's all-reduce {found[0]}"
    # either is what the certificate is there for; that it came out right would be news
    report.found("garbage", found[0] != "came out right", figure, "an abort here does not break what peers compute")


def _abort_alone(member: Member) -> str:
    form_group(member, "nccl")
    tensor = torch.full((1 << 28,), float(member.rank + 1), device=member.device)
    dist.all_reduce(torch.ones(1, device=member.device))
    torch.cuda.synchronize()
    if member.rank == 1:
        member.hear("launched")
        torch.cuda._sleep(1_000_000_000)  # so that its kernel has not run when it is aborted
        dist.all_reduce(tensor)
        group: Any = dist.group.WORLD
        group._get_backend(member.device).abort()
        member.say("aborted")
        member.hear("seen")
        return "was aborted"
    dist.all_reduce(tensor)
    done = torch.cuda.Event()
    done.record()
    member.say("launched")
    member.hear("aborted")
    until = time.monotonic() + 10.0
    while not done.query() and time.monotonic() < until:
        time.sleep(0.05)
    seen = "hangs" if not done.query() else "completed with garbage" if bool((tensor != 3).any()) else "came out right"
    member.say("seen")
    if seen == "hangs":
        group = dist.group.WORLD
        group._get_backend(member.device).abort()
    return seen


def two_groups(report: Report) -> None:
    (at_once, in_turn), _ = run_ranks(abort_at_once_and_in_turn, 2, 2, 30.0, device_type="cuda", timeout_s=110.0)
    figure = f"{at_once:.1f} s at once; one by one, in the wrong order, {in_turn:.1f} s"
    report.found("two_groups", at_once < 10.0, figure, "aborts wait for each other (pytorch#119797)")


def switches(report: Report) -> None:
    """NVLS on, and communicators made without blocking: do a kill and going on work with them, too?"""
    for name, environment in (
        ("nvls_on", {"NCCL_NVLS_ENABLE": "1"}),
        ("nonblocking", {"TORCH_NCCL_USE_COMM_NONBLOCKING": "1", "TORCH_NCCL_NONBLOCKING_TIMEOUT": "60"}),
    ):
        row = Row(name, min(4, num_gpus()), SMALL, free_s=10.0)
        run_matrix(report, [row], device_type="cuda", settle_s=5.0, environment=environment)


def world_sizes(report: Report) -> None:
    """The same ten steps at several world sizes, uneven shards among them."""
    sizes = [size for size in (1, 2, 3, 5, 8) if size <= num_gpus()]
    for name, parallel, most in (
        ("sizes_float32", ParallelConfig(), 1e-4),
        ("sizes_bfloat16", BFLOAT16, 5e-3),
        ("sizes_float8", replace(BFLOAT16, float8=Float8.tensorwise_all_gather), 5e-3),
    ):
        with report.about(name):
            if parallel.float8 is not Float8.none:
                import_torchao()
            scenario = replace(SMALL, fault=Fault.none, parallel=parallel, num_steps=10, patience_s=60.0, stays=False)
            scenario = replace(scenario, optim=OptimConfig(lr=1e-3, global_batch_seqs=120, num_slices=120))
            found = {size: run_ranks(_losses, size, scenario, device_type="cuda")[0] for size in sizes}
            exact = found[sizes[0]]
            worst = max(off_by(got[n], exact[n]) for got in found.values() for n in exact)
            figure = f"losses of 10 steps off by {worst:.4%} at worst over {', '.join(map(str, sizes))} ranks"
            report.found(name, worst <= most, figure, "the loss depends on the world size")


def _losses(member: Member, scenario: Scenario) -> dict[int, float]:
    losses, said = Generation(member, 0, list(range(member.world_size)), scenario, is_victim=False).run()
    if said:
        raise RuntimeError(said)
    return losses


def eight_b(report: Report) -> None:
    """8B at 8,192 tokens a row, as conf/cluster/h100x64 trains it; and the same with a snapshot of every step."""
    timed = {}
    for float8, names, least in (
        (Float8.none, ["eight_b_bfloat16"], 6000),
        (Float8.tensorwise_all_gather, ["eight_b_float8", "eight_b_memory", "eight_b_snapshots"], 7700),
    ):
        with report.about(*names):
            if float8 is not Float8.none:
                import_torchao()
            each = run_ranks(_eight_b, num_gpus(), float8, device_type="cuda", timeout_s=280.0)
            rate, memory, added = min(one[0] for one in each), max(one[1] for one in each), [one[2] for one in each]
            timed[float8] = rate
            figure, gib = f"{rate:,.0f} tokens/s a GPU", f"{memory / GIB:.1f} GiB"
            reason = "slow" if float8 is Float8.none else f"{rate / timed.get(Float8.none, rate):.2f} of bfloat16's"
            report.found(names[0], rate >= least, f"{figure}, {gib}", reason)
            if float8 is Float8.none:
                continue
            report.found("eight_b_memory", memory <= 72 * GIB, gib, "more than was forecast")
            if any(map(math.isnan, added)):
                report.not_tested("eight_b_snapshots", "/dev/shm has no room for two slots a rank")
            else:
                figure = f"{max(added):+.1%} of a step"
                report.found("eight_b_snapshots", max(added) <= 0.02, figure, "snapshots slow it down")


def _eight_b(member: Member, float8: Float8) -> tuple[float, int, float]:
    """Tokens/s of this rank, bytes at most, and what a snapshot of every step adds; NaN where there was no room."""
    form_group(member, "nccl")
    parallel = ParallelConfig(
        dtype=Dtype.bfloat16, float8=float8, compile=True, activation_checkpoint=ActivationCheckpoint.selective
    )
    loaded = Loaded(Load(read_model("8b"), parallel, rows=1, seq_len=8192), member.device)
    loaded.warm_up()
    timed = loaded.time(6)
    added = float("nan")
    if float8 is not Float8.none:
        added = _with_snapshots(member, loaded, timed.step_s)
    dist.destroy_process_group()
    return timed.tokens_per_s, timed.allocated, added


class SnapshotOfEachStep:
    """Begun when its step was launched, and confirmed when the next one was, as a run does: so the copy is beside that
    one. Committed at once: what a keeper does with slots is not timed here."""

    def __init__(self, snapshots: Snapshots) -> None:
        self._snapshots, self._step = snapshots, 0

    def launched(self) -> None:
        """The next step was, and the one before is done."""
        if self._step:
            self.confirm()
        self._step += 1
        assert self._snapshots.begin(self._step, {}), "no slot was free"

    def confirm(self) -> None:
        """The newest one."""
        self._snapshots.confirm(self._step)
        Committed(Version(1, self._step)).write(self._snapshots.folder)


def _with_snapshots(member: Member, loaded: Loaded, step_s: float) -> float:
    entries = training_entries(loaded.step.model, loaded.step.optimizer, inner_tensor=inner_tensor)
    num_bytes = sum(entry.memory.nbytes for entry in entries)
    stat = os.statvfs("/dev/shm")
    room = torch.tensor(stat.f_bavail * stat.f_frsize - 2.2 * num_bytes * member.world_size, device=member.device)
    dist.all_reduce(room, dist.ReduceOp.MIN)  # before any rank takes of it what another one looks at
    if room < 0:
        return float("nan")
    with in_memory() as folder:
        mesh = build_mesh(plan_mesh(member.world_size, 1), "cuda")
        snapshots = Snapshots(folder, entries, coordinates=coordinates_of(mesh), run_id="accept", generation=1)
        loaded.before_update = snapshots.wait
        each = SnapshotOfEachStep(snapshots)
        timed = loaded.time(6, each.launched)
        loaded.before_update = None
        each.confirm()
        snapshots.close()
        return timed.step_s / step_s - 1


def change_often(report: Report) -> None:
    """30 groups in the same processes, each aborted in the middle of a step by all: a false alarm."""
    found = run_ranks(_change_often, num_gpus(), device_type="cuda", timeout_s=280.0)
    report.found("aborts_by_all", *judge_flat([held for held, _ in found], 8.0 * 21, "memory of the device"))
    init_s, abort_s = (statistics.median(x for _, times in found for x in times[i]) for i in (0, 1))
    figure = f"{init_s:.2f} s to make communicators, {abort_s:.2f} s to abort them, the medians of 30"
    report.found("abort_seconds", init_s <= 5 and abort_s <= 5, figure, "a change takes that much longer")


def _change_often(member: Member) -> tuple[list[Held], tuple[list[float], list[float]]]:
    held, inits, aborts = [], list[float](), list[float]()
    scenario = replace(SMALL, fault=Fault.none, num_steps=50, patience_s=60.0)
    for number in range(30):
        generation = Generation(member, number, list(range(member.world_size)), scenario, is_victim=False)
        began = time.time()
        generation.on_first_step = lambda now=number: member.store.compare_set(f"over {now}", "", str(time.time()))
        _, said = generation.run()
        aborts.append(time.time() - float(member.store.get(f"over {number}")))
        inits.append(generation.formed_at - began)
        assert said, "no rank was told that it was over"
        del generation
        gc.collect()
        torch.cuda.empty_cache()
        held.append(Held.on(member.device, inits[-1]))
    return held, (inits, aborts)
