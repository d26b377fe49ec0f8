"""What a CPU can show: the failure path on a backend with NCCL's manners, snapshot slots, and groups changed often."""

import threading
import time
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from regrow.accept.claims import NotTested, Report
from regrow.accept.generations import (
    SETTLED,
    Snapshotting,
    change_groups,
    device_entries,
    in_memory,
    judge_flat,
    step_alone,
)
from regrow.accept.matrix import Row, run_matrix
from regrow.accept.outlive import Fault, Scenario, Where, stream_for
from regrow.accept.pinning import counting_runtime
from regrow.accept.ranks import Member, run_ranks
from regrow.accept.tiny import tiny_model
from regrow.config.schema import OptimConfig, ParallelConfig
from regrow.parallel.float8 import inner_tensor
from regrow.plan.mesh import ALONE
from regrow.state.entries import training_entries
from regrow.state.memory.slots import SLOT, open_slot
from regrow.state.memory.writer import Snapshots
from regrow.train.certificate import BrokenStep, Certificate

SETTLE_S = 4.0  # the watchdog of the asynchronous backend would end survivors after 3 s
WATCHDOG = {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "750"}
FREE_S, FIRST_STEP_S = 30.0, 60.0  # few cores that others share: whether, not how fast
GENERATIONS = 20
FLAT_MIB = 12.0
NEEDED = "all_gather_single"  # of torch.distributed, which the asynchronous backend is written against


def flag(report: Report) -> None:
    """The flag of the certificate is read when the stream comes to it."""
    stream = _stream()
    certificate, gate = Certificate(1, 1, torch.device("cpu")), threading.Event()
    stream.submit(gate.wait)
    read = stream.submit(partial(certificate.field, 7))
    certificate.clear()
    gate.set()
    value = float(read.result())
    certified = Certificate(1, 1, torch.device("cpu"))
    certified.check(7, float(stream.submit(partial(certified.field, 7)).result()))
    try:
        certificate.check(7, value)
        refuses = False
    except BrokenStep:
        refuses = True
    report.found("cpu_flag", value == 0 and refuses, f"{value:g} was read", "the flag was read before its turn")


def matrix(report: Report) -> None:
    _stream()
    optim = OptimConfig(lr=1e-3, global_batch_seqs=6, num_slices=6)
    small = Scenario(model=tiny_model(num_layers=1), optim=optim, seq_len=16, num_steps=4, num_elements=1 << 16)
    rows = [
        Row("cpu_kill_all_reduce", 2, replace(small, where=Where.all_reduce)),
        Row("cpu_kill_reduce_scatter", 3, replace(small, where=Where.reduce_scatter)),
        Row("cpu_kill_first_backward", 2, replace(small, fatal_step=1)),
        Row("cpu_kill_mid_step", 3, small),
        Row("cpu_kill_init", 3, replace(small, where=Where.init), may_end=True),
        Row("cpu_own_failure", 2, replace(small, fault=Fault.fail)),
        Row("cpu_stopped", 2, replace(small, fault=Fault.stop)),
        Row("cpu_endless_loop", 2, replace(small, fault=Fault.spin, patience_s=3.0)),
        Row("cpu_one_aborts", 2, replace(small, fault=Fault.abort, patience_s=3.0)),
        Row("cpu_late_rank_0", 2, replace(small, fault=Fault.late, late_s=4.0)),
        Row("cpu_hsdp_kill", 4, replace(small, parallel=ParallelConfig(dp_replicate=2))),
        Row("cpu_hsdp_kill_replica", 4, replace(small, parallel=ParallelConfig(dp_replicate=2), num_victims=2)),
        Row("cpu_tp_kill", 4, replace(small, parallel=ParallelConfig(tp=2))),
    ]
    rows = [replace(row, free_s=FREE_S, first_step_s=FIRST_STEP_S) for row in rows]
    run_matrix(report, rows, device_type="cpu", settle_s=SETTLE_S, environment=WATCHDOG)


def two_groups(report: Report) -> None:
    """Abort three groups, of which the first one's collective hangs, in turn and at once."""
    _stream()
    (in_turn, at_once), _ = run_ranks(abort_in_turn_and_at_once, 2, device_type="cpu")
    report.found(
        "cpu_two_groups",
        at_once < 5.0,
        f"{at_once:.1f} s at once, {in_turn:.1f} s one by one",
        "aborts wait for each other",
    )


def abort_in_turn_and_at_once(member: Member) -> tuple[float, float]:
    """Seconds of both; one by one, in the wrong order, takes each group's timeout."""
    took: list[float] = []
    stream: Any = stream_for(member.device)
    for number, side_by_side in enumerate((False, True)):
        timeout = timedelta(seconds=2.0)
        distributed_c10d._world.group_count = 0
        store = dist.PrefixStore(f"generation-{number}", member.connect())
        dist.init_process_group(
            "asynchronous", store=store, rank=member.rank, world_size=member.world_size, timeout=timeout
        )
        groups: list[Any] = [dist.new_group(backend="asynchronous", timeout=timeout) for _ in range(3)]
        for group in groups:
            dist.all_reduce(torch.ones(1), group=group, async_op=True)
        stream.synchronize()
        begun = time.monotonic()
        if member.rank == 0:
            for group in groups:
                dist.all_reduce(torch.ones(1), group=group, async_op=True)
            begun = time.monotonic()
            abort_all(groups[::-1], side_by_side=side_by_side)
            took.append(time.monotonic() - begun)
            member.say(f"aborted {number}")
        member.hear(f"aborted {number}")
        dist.destroy_process_group()
    return (took[0], took[1]) if took else (0.0, 0.0)


def abort_all(backends: list[Any], *, side_by_side: bool) -> None:
    def abort(backend: Any) -> None:
        try:
            backend.abort()
        except dist.DistBackendError as error:  # it waited for another one, in vain
            print(error)

    if not side_by_side:
        for backend in backends:
            abort(backend)
        return
    threads = [threading.Thread(target=abort, args=(backend,)) for backend in backends]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def slots(report: Report) -> None:
    """Snapshots of a model of one process, in memory."""
    with in_memory() as folder:
        step = step_alone()
        entries = training_entries(step.model, step.optimizer, inner_tensor=inner_tensor)
        snapshots = Snapshots(folder, entries, coordinates=ALONE, run_id="accept", generation=1)
        snapshots.begin(1, {"step": 1})
        snapshots.wait()
        time.sleep(0.1)
        files = sorted(folder.glob(f"*{SLOT}"))
        early = [file for file in files if open_slot(file) is not None]
        snapshots.confirm(1)
        time.sleep(0.1)
        sealed = [file for file in files if open_slot(file) is not None]
        report.found(
            "cpu_slots_sealed",
            (len(early), len(sealed)) == (0, 1),
            f"{len(early)} visible before the step was confirmed, {len(sealed)} after",
            "a snapshot is visible before its step is known to have succeeded, or not after",
        )
        same, num_bytes = equal_bytes(sealed[0], entries) if sealed else (False, 0)
        report.found("cpu_slots_equal", same, f"{num_bytes / 1e6:.1f} MB compared", "the slot differs from the state")
        snapshots.close()


def equal_bytes(file: Path, entries: list[Any]) -> tuple[bool, int]:
    """Whether a sealed slot holds these tensors bit for bit, and how many bytes those are."""
    header, data = open_slot(file), file.read_bytes()
    assert header is not None
    same, num_bytes = True, 0
    for entry, offset in zip(entries, header.offsets, strict=False):
        expected = entry.memory.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
        same &= data[offset : offset + len(expected)] == expected
        num_bytes += len(expected)
    return same, num_bytes


def pinned(report: Report, num_generations: int = GENERATIONS) -> None:
    """Snapshots of tensors that say they are on a device, with a runtime that counts what it pins."""
    with in_memory() as folder:
        step = step_alone()
        process, alone, kept = Snapshotting(folder / "node"), [], []
        with counting_runtime(process.runtime) as runtime:
            for generation in range(1, num_generations + 1):
                entries = device_entries(step)
                snapshots = Snapshots(folder, entries, coordinates=ALONE, run_id="accept", generation=generation)
                snapshots.discard() if generation % 2 else snapshots.close()
                alone.append(runtime.num_bytes)
        figure = f"{alone[-1]:,} B pinned after {num_generations} generations, {runtime.ever:,} B in all"
        for generation in range(1, num_generations + 1):
            process.take(step, generation, num_steps=generation % 3)
            kept.append((runtime.num_bytes, runtime.registered))
        process.close()
        report.found("cpu_pinned", not any(alone) and not runtime.pinned, figure, "what is pinned grows")
        anew = kept[-1][1] - kept[SETTLED][1]
        figure = f"{kept[-1][0]:,} B, {anew} times anew from generation {SETTLED + 1} to {num_generations}"
        once = len({num_bytes for num_bytes, _ in kept[SETTLED:]}) == 1 and not anew
        report.found("cpu_pinned_once", once, figure, "a group that was formed anew waits for its slots")


def generations(report: Report) -> None:
    for name, backend in (("cpu_generations_gloo", "gloo"), ("cpu_generations_asynchronous", "asynchronous")):
        with report.about(name):
            if backend == "asynchronous":
                _stream()
            report.found(name, *judge_flat(change_groups(backend, GENERATIONS), FLAT_MIB))


def _stream() -> Any:
    if not hasattr(dist, NEEDED):
        raise NotTested(f"the asynchronous backend needs torch 2.13 or later, this is {torch.__version__}")
    return stream_for(torch.device("cpu"))
