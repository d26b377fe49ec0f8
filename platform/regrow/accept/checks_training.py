"""One GPU that trains: throughput and memory of a model of 1.8B, snapshot slots, and groups changed often."""

import gc
import importlib
import os
import time
import traceback
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from regrow.accept.checks_cpu import judge_equal
from regrow.accept.checks_one_gpu import SLEEP_CYCLES
from regrow.accept.claims import NotTested, Report
from regrow.accept.generations import Held, Runtime, in_memory, judge_flat
from regrow.accept.timing import Load, Loaded, Timed, busy, device_s, group_alone, rows_that_fit
from regrow.accept.tiny import count_up_rows
from regrow.config.plain import read_model
from regrow.config.schema import Dtype, Float8, ModelConfig, OptimConfig, ParallelConfig
from regrow.control.values import Version
from regrow.parallel.compile import graphs_compiled
from regrow.parallel.fsdp import build_mesh, let_go_of_meshes
from regrow.plan.boxes import Box
from regrow.plan.mesh import ALONE, plan_mesh
from regrow.runtime.abort import Breaker
from regrow.state.entries import Entry
from regrow.state.memory.arenas import Arenas
from regrow.state.memory.slots import SLOT, Committed
from regrow.state.memory.writer import Snapshots
from regrow.train.build import build_step
from regrow.train.certificate import Certificate
from regrow.train.step import evaluate

GIB, MIB = 2**30, 2**20
SEQ_LEN = 4096
STEPS = 8
FEW_TOKENS = 256  # of a row
KNOWN = {  # tokens/s that IBM's post has of 1.8B on an H100, 29k, less what one GPU's smaller batch costs
    "1_8b": 24_000.0
}
SLOT_GIB = 12.0  # an eighth of 8B's state
COMPILED = ParallelConfig(dtype=Dtype.bfloat16, compile=True, reshard_after_forward=False)


def throughput(report: Report) -> None:
    """A model in bfloat16, compiled: speed, memory against its forecast, host and device; then float8, then peers."""
    device, model = group_alone(), read_model(os.environ.get("REGROW_ACCEPT_MODEL", "1_8b"))
    name = torch.cuda.get_device_name(device)
    load = Load(model, COMPILED, 1, SEQ_LEN)
    load = replace(load, rows=rows_that_fit(load, device))
    loaded = Loaded(load, device)
    loaded.warm_up()
    timed = loaded.time(STEPS)
    figure = f"{timed.tokens_per_s:,.0f} tokens/s of {load.rows} x {SEQ_LEN}, MFU {timed.mfu:.1%}"
    least = KNOWN.get(model.name) if "H100" in name or "H200" in name else None
    reason = "slower than others have published; jobs.pretrain observe.profile_at_step=20 says where the time goes"
    if least is None:
        report.not_tested("throughput", f"{figure}; no published figure says what a {name} does with {model.name}")
    else:
        report.found("throughput", timed.tokens_per_s >= least, figure, reason)
    report.found("mfu", timed.mfu >= 0.45, figure, reason)
    forecast = load.forecast_bytes()
    ratio = timed.allocated / forecast
    report.found(
        "memory_forecast",
        abs(ratio - 1) <= 0.05,
        f"{timed.allocated / GIB:.1f} GiB allocated, {forecast / GIB:.1f} forecast",
        f"jobs.plan is off by {ratio - 1:+.0%}",
    )
    figure = (
        f"{timed.retries} in {STEPS} steps; {timed.reserved / timed.allocated:.2f} of what is allocated is reserved"
    )
    report.found("fragmentation", timed.retries == 0, figure, "steps wait for memory")
    no_sync(report, loaded)
    share = busy(loaded)
    report.found("gpu_busy", share >= 0.97, f"{share:.1%} of three steps", "the device waits for the host")
    certificate_cost(report, loaded)
    del loaded
    _forget()
    host_ahead(report, load, timed, device)
    with report.about("float8_speedup"):
        float8(report, load, timed, device)
    with report.about("torchtitan"):
        torchtitan(report, load, timed, device)


def no_sync(report: Report, loaded: Loaded) -> None:
    """torch raises where the host would wait for the device; the read of an earlier step's result is meant to."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        stats = [
            loaded.step.run(loaded.rows, num_micro_batches=len(loaded.rows), lr=1e-4, number=number)
            for number in range(3)
        ]
        found = ""
    except RuntimeError as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        found, stats = f"{str(error).splitlines()[0]}, at {Path(at.filename).name}:{at.lineno}: {at.line}", []
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for each in stats:
        each.resolve()
    report.found("no_sync", not found, "none in three steps" if not found else "one", found)


def host_ahead(report: Report, load: Load, timed: Timed, device: torch.device) -> None:
    """How long a step takes that leaves the device little to do: all but its update is the host's time."""
    loaded = Loaded(replace(load, rows=1, seq_len=FEW_TOKENS), device)
    loaded.warm_up()
    share = loaded.time(STEPS).step_s / timed.step_s
    figure = f"{share:.0%} of a step's time, of which a part is the update's"
    report.found("host_ahead", share < 0.6, figure, "the host is too slow")
    del loaded
    _forget()


def certificate_cost(report: Report, loaded: Loaded) -> None:
    """Steps with and without the certificate, in turns."""
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(3):
        for certified in (False, True):
            loaded.settle()
            loaded.step.certificate = Certificate(1, 1, loaded.device) if certified else None
            seconds[certified].append(loaded.time(4).step_s)
    loaded.step.certificate = None
    added = min(seconds[True]) / min(seconds[False]) - 1
    report.found("certificate_cost", added < 0.01, f"{added:+.2%} of a step", "more than eight bytes should cost")


def float8(report: Report, load: Load, plain: Timed, device: torch.device) -> None:
    loaded = Loaded(replace(load, parallel=replace(load.parallel, float8=Float8.tensorwise)), device)
    loaded.warm_up()
    timed = loaded.time(STEPS)
    speedup = timed.tokens_per_s / plain.tokens_per_s
    figure = f"{speedup:.2f} times, {timed.tokens_per_s:,.0f} tokens/s"
    report.found("float8_speedup", speedup >= 1.15, figure, "float8 is not worth it here")
    del loaded
    _forget()


def torchtitan(report: Report, load: Load, ours: Timed, device: torch.device) -> None:
    """The same model, batch and recipe by torchtitan, where it is installed, in this process."""
    try:
        peer: Any = importlib.import_module("benchmarks.step_titan")
    except ModuleNotFoundError as error:
        raise NotTested(
            f"needs {error.name}; benchmarks/step.py compares with it in an environment of its own"
        ) from error
    if not peer.is_installed():
        raise NotTested("needs torchtitan, which is not installed")
    rows = torch.randint(0, load.model.vocab_size, (load.rows, load.seq_len + 1)).pin_memory()  # it brings them over
    try:
        run = peer.titan_step(
            load.model,
            device=device,
            dtype=Dtype.bfloat16,
            seq_len=load.seq_len,
            micro_batch_seqs=load.rows,
            lr=1e-4,
            compiled=True,
        )
        for _ in range(4):
            run(rows)
    except torch.OutOfMemoryError as error:
        raise NotTested(f"torchtitan runs out of memory with {load.rows} rows, which we hold") from error
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(STEPS):
        run(rows)
    torch.cuda.synchronize()
    theirs = load.tokens * STEPS / (time.perf_counter() - began)
    ratio = ours.tokens_per_s / theirs
    report.found(
        "torchtitan", ratio >= 1.0, f"{ratio:.2f} of its {theirs:,.0f} tokens/s", "benchmarks/step.py says where"
    )


def slots(report: Report) -> None:
    """Snapshot slots of an eighth of 8B's state: made, pinned, copied into beside a step, equal, and let go of."""
    device = group_alone()
    free_gib = os.statvfs("/dev/shm").f_bavail * os.statvfs("/dev/shm").f_frsize / GIB
    size_gib = min(SLOT_GIB, free_gib / 3)
    if size_gib < 1:
        raise NotTested(f"/dev/shm has {free_gib:.1f} GiB free, two slots of 1 GiB need 3")
    with in_memory() as folder:
        entries = state_of(int(size_gib * GIB), device)
        cuda: Any = torch.cuda
        counted = Runtime(cuda.cudart())
        cuda.cudart = lambda: counted
        began = time.perf_counter()
        arenas = Arenas(folder)
        snapshots = Snapshots(folder, entries, coordinates=ALONE, run_id="accept", generation=1, arenas=arenas)
        made_s = time.perf_counter() - began
        rate = 2 * size_gib * GIB / made_s / 1e9
        figure = f"{rate:.1f} GB/s, two of {size_gib:.1f} GiB in {made_s:.1f} s"
        report.found("slots_made", rate >= 0.85, figure, "a new group waits that long for its slots")
        copy_s = slots_copied(report, snapshots, entries)
        snapshots.confirm(1)
        report.found("slots_equal", *judge_equal(folder, entries))
        slots_beside(report, snapshots, device, copy_s)
        slots_closed(report, snapshots)
        slots_kept(report, folder, entries, arenas, counted)
        arenas.close()
        report.found("slots_let_go", not counted.pinned, f"{counted.num_bytes:,} B are pinned still", "memory leaks")


def slots_kept(report: Report, folder: Path, entries: list[Entry], arenas: Arenas, counted: Runtime) -> None:
    """Slots of the generations after the first, as if it had committed nothing that they start from."""
    for path in folder.glob(f"*{SLOT}"):
        path.unlink()
    before, began = counted.registered, time.perf_counter()
    for generation in range(2, 5):
        again = Snapshots(folder, entries, coordinates=ALONE, run_id="accept", generation=generation, arenas=arenas)
        again.discard()
    took_s, anew = (time.perf_counter() - began) / 3, counted.registered - before
    figure = f"{took_s:.3f} s a generation, {anew} times pinned anew"
    report.found("slots_kept", anew == 0 and took_s < 1.0, figure, "every new group waits for its slots")


def state_of(num_bytes: int, device: torch.device) -> list[Entry]:
    """Tensors of 256 MiB, as a sharded state's are."""
    count = 64 * MIB
    entries = []
    for number in range(max(1, num_bytes // (4 * count))):
        entries.append(Entry(Box.whole(f"model/{number}", (count,)), torch.randn(count, device=device)))
    return entries


def slots_copied(report: Report, snapshots: Snapshots, entries: list[Entry]) -> float:
    """The seconds that it took, too."""
    num_bytes = sum(entry.memory.nbytes for entry in entries)
    torch.cuda.synchronize()
    began = time.perf_counter()
    snapshots.begin(1, {"step": 1})
    snapshots.wait()
    torch.cuda.synchronize()
    copy_s = time.perf_counter() - began
    rate = num_bytes / copy_s / 1e9
    report.found(
        "slots_copied", rate >= 45, f"{rate:.1f} GB/s to the host", "not pinned, the other socket, or a slow link"
    )
    return copy_s


def slots_beside(report: Report, snapshots: Snapshots, device: torch.device, copy_s: float) -> None:
    """Matrix products, which suffer most, with and without a copy on its way, which took `copy_s` alone.

    As many as begin while it lasts; products that ran after it, if any, are taken to have run as alone.
    """
    x = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    products = partial(torch.mm, x, x)
    device_s(products)
    count = max(1, int(0.75 * copy_s / device_s(products, 20)))
    alone_s = min(device_s(products, count) for _ in range(3)) * count
    begun, copied = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if not snapshots.begin(2, {"step": 2}):
        raise NotTested("no slot was free")
    begun.record()
    with torch.cuda.stream(torch.cuda.Stream(device)):
        snapshots.wait()
        copied.record()
    span_s = device_s(products, count) * count
    snapshots.confirm(2)
    copied.synchronize()
    beside_s = min(begun.elapsed_time(copied) / 1e3, span_s)
    if beside_s < span_s / 2:
        report.not_tested("slots_beside", f"the copy took {beside_s:.3f} s of the {span_s:.3f} s of {count} products")
        return
    done_s = alone_s - (span_s - beside_s)  # that products beside the copy take alone
    added = beside_s / done_s - 1 if done_s > 0 else float("inf")
    figure = f"{added:+.1%} of the time of {count} matrix products"
    report.found("slots_beside", added <= 0.12, figure, "the copy slows the step down")


def slots_closed(report: Report, snapshots: Snapshots) -> None:
    """With a copy on its way and a kernel behind it: closing waits for the copy, and not for the kernel."""
    Committed(Version(snapshots.generation, snapshots.begun)).write(snapshots.folder)  # or no slot is free
    if not snapshots.begin(snapshots.begun + 1, {}):
        raise NotTested("no slot was free")
    torch.cuda._sleep(3 * SLEEP_CYCLES)
    behind = torch.cuda.Event()
    behind.record()
    began = time.perf_counter()
    snapshots.close()
    took_s, waited = time.perf_counter() - began, behind.query()
    torch.cuda.synchronize()
    figure = f"{took_s:.2f} s, the kernel {'done' if waited else 'running'} then"
    report.found("slots_closed", not waited, figure, "closing waits for the stream")


def generations(report: Report) -> None:
    """20 groups in one process: formed, trained in, aborted every other time, left."""
    held, graphs = [], []
    for number in range(20):
        held.append(_generation(number))
        graphs.append(graphs_compiled())
    report.found("generations", *judge_flat([held], 64.0, "memory of the device"))
    new = graphs[-1] - graphs[1]
    report.found("generations_compiled", new == 0, f"{new} graphs after the second group", "blocks are compiled again")


def _generation(number: int) -> Held:
    began = time.monotonic()
    device = group_alone()
    mesh = build_mesh(plan_mesh(1, 1), "cuda")
    model, optim = ModelConfig(), OptimConfig(lr=1e-3)
    parallel = ParallelConfig(dtype=Dtype.bfloat16, compile=True)
    step = build_step(model, parallel, optim, mesh=mesh, device=device, seed=0)
    form_s = time.monotonic() - began
    rows = [count_up_rows(i, num_rows=8, seq_len=128, vocab_size=model.vocab_size).to(device) for i in range(2)]
    for index in range(2):
        step.run(rows, num_micro_batches=2, lr=1e-3, number=index).resolve()
    evaluate(step.model, rows, num_batches=2, groups=step.groups, loss_function=step.loss_function)
    torch.cuda.synchronize()
    if number % 2:
        breaker = Breaker()
        breaker.start()
        time.sleep(0.3)
        breaker.left()
    del step, mesh, rows
    dist.destroy_process_group()
    let_go_of_meshes()
    _forget()
    return Held.on(device, form_s)


def abort_often(report: Report) -> None:
    """NCCL alone, a group of one: made, used, aborted, 50 times."""
    held = []
    for _ in range(50):
        began = time.monotonic()
        device = group_alone("nccl")
        form_s = time.monotonic() - began
        tensor = torch.ones(1 << 20, device=device)
        dist.all_reduce(tensor)
        torch.cuda.synchronize()
        group: Any = dist.group.WORLD
        group._get_backend(device).abort()
        dist.destroy_process_group()
        del tensor, group
        _forget()
        held.append(Held.on(device, form_s))
    report.found("abort_often", *judge_flat([held], 64.0, "memory of the device"))


def _forget() -> None:
    gc.collect()
    torch.cuda.empty_cache()
