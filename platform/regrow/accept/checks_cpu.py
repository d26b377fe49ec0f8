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

from regrow.accept.claims import NotTested, Report
from regrow.accept.generations import (
    SETTLED,
    Snapshotting,
    change_groups,
    counting_runtime,
    device_entries,
    in_memory,
    judge_flat,
    step_alone,
)
from regrow.accept.matrix import Row, run_matrix
from regrow.accept.outlive import Fault, Scenario, Where, backend_for, stream_for
from regrow.accept.ranks import Member, form_group, run_ranks
from regrow.accept.tiny import tiny_model
from regrow.config.schema import OptimConfig, ParallelConfig
from regrow.parallel.float8 import inner_tensor
from regrow.plan.mesh import ALONE
from regrow.state.entries import Entry, training_entries
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
    """Abort three groups, of which the first one's collective hangs, at once and in turn."""
    _stream()
    (at_once, in_turn), _ = run_ranks(abort_at_once_and_in_turn, 2, 3, 2.0, device_type="cpu")
    figure = f"{at_once:.1f} s at once, {in_turn:.1f} s one by one"
    report.found("cpu_two_groups", at_once < 5.0, figure, "aborts wait for each other")


def abort_at_once_and_in_turn(member: Member, num_groups: int, timeout_s: float) -> tuple[float, float]:
    """Seconds of both; one by one, in the wrong order, takes each group's timeout."""
    took: list[float] = []
    backend, stream = backend_for(member.device), stream_for(member.device)
    for number, side_by_side in enumerate((True, False)):
        form_group(member, backend, number, timeout_s=timeout_s)
        groups: list[Any] = [
            dist.new_group(backend=backend, timeout=timedelta(seconds=timeout_s)) for _ in range(num_groups)
        ]
        tensor = torch.ones(1 << 20, device=member.device)
        for group in groups:
            dist.all_reduce(tensor, group=group, async_op=True)
        stream.drain(timeout_s)
        if member.rank == 0:  # the other never comes: all but the first hang behind it
            for group in groups:
                dist.all_reduce(tensor, group=group, async_op=True)
            began = time.monotonic()
            abort_all([group._get_backend(member.device) for group in groups[::-1]], side_by_side=side_by_side)
            stream.drain(timeout_s)
            took.append(time.monotonic() - began)
            member.say(f"aborted {number}")
        member.hear(f"aborted {number}")
        world: Any = dist.group.WORLD
        world._get_backend(member.device).abort()
        dist.destroy_process_group()
    return (took[0], took[1]) if took else (0.0, 0.0)


def abort_all(backends: list[Any], *, side_by_side: bool) -> None:
    def abort(backend: Any) -> None:
        try:
            backend.abort()
        except dist.DistBackendError as error:  # it waited for another one, in vain
            print(error)

    threads = [threading.Thread(target=abort, args=(backend,)) for backend in backends]
    for thread in threads:
        thread.start()
        if not side_by_side:
            thread.join()
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
        early = sealed_slots(folder)
        snapshots.confirm(1)
        time.sleep(0.1)
        sealed = sealed_slots(folder)
        figure = f"{len(early)} visible before the step was confirmed, {len(sealed)} after"
        reason = "a snapshot is visible before its step is known to have succeeded, or not after"
        report.found("cpu_slots_sealed", (len(early), len(sealed)) == (0, 1), figure, reason)
        report.found("cpu_slots_equal", *judge_equal(folder, entries))
        snapshots.close()


def sealed_slots(folder: Path) -> list[Path]:
    return [file for file in sorted(folder.glob(f"*{SLOT}")) if open_slot(file) is not None]


def judge_equal(folder: Path, entries: list[Entry]) -> tuple[bool, str, str]:
    """Whether the first sealed slot holds these tensors bit for bit; how many bytes those are."""
    same, num_bytes = False, 0
    for file in sealed_slots(folder)[:1]:
        header, data, same = open_slot(file), file.read_bytes(), True
        assert header is not None
        for entry, offset in zip(entries, header.offsets, strict=False):
            expected = entry.memory.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
            same &= data[offset : offset + len(expected)] == expected
            num_bytes += len(expected)
    return same, f"{num_bytes / 1e6:,.1f} MB compared", "the slot differs from the state"


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
