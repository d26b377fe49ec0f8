"""One GPU: what the failure path takes for granted of CUDA, and whether this machine is one that regrow can train on.

Written from CUDA's and torch's documentation; an H100 has run it (decision 54).
"""

import contextlib
import os
import re
import resource
import socket
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from regrow.accept.child import has_nvml
from regrow.accept.claims import NotTested, Report
from regrow.runtime.hardware.gpus import problem, read_gpus
from regrow.runtime.hardware.probe import Prober
from regrow.runtime.hardware.settings import OUTLIVES_ITS_GROUPS, apply_device_settings
from regrow.train.certificate import BrokenStep, Certificate

GIB = 2**30
SLEEP_CYCLES = 2_000_000_000  # of torch.cuda._sleep: about a second at the clocks of an H100
STEP = 7
LAUNCHES = 5_000  # more than a device's queue holds, some 1,024
LEAST_NCCL = (2, 27)
LEAST_DESCRIPTORS = 65_536
LEAST_SHM_GIB = 36.0  # three slots of an eighth of 8B's state, 12 bytes a parameter (docs/decisions/0009)


def num_gpus() -> int:
    """That are used."""
    given = int(os.environ.get("REGROW_ACCEPT_GPUS", "0"))
    return min(given, torch.cuda.device_count()) if given else torch.cuda.device_count()


def certificate_premise(report: Report) -> None:
    """Enqueue the reading of a pinned flag behind a sleeping kernel, clear it, and see what was read."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    certificate = Certificate(1, 1, device)
    _warm(certificate.field(STEP))
    still, value, refuses = premise(certificate, device)
    if not still:
        raise NotTested("the sleeping kernel had ended before the flag was cleared, three times: a busy host")
    report.found(
        "certificate_premise",
        value == 0 and refuses,
        f"{value:g} was read of a pinned flag cleared before the device came to it",
        "the flag was read when it was enqueued: an abort could not be told from success",
    )
    certified = Certificate(1, 1, device)
    torch.cuda._sleep(SLEEP_CYCLES // 8)
    held = float(certified.field(STEP).item())
    with contextlib.suppress(BrokenStep):
        certified.check(STEP, held)
        report.found("certificate_holds", True, f"{held:g} for an undisturbed step")
        return
    report.found("certificate_holds", False, f"{held:g} for an undisturbed step", "a sound step is refused")


def premise(certificate: Certificate, device: torch.device) -> tuple[bool, float, bool]:
    """Whether the kernel slept when the flag was cleared, what was read, and whether the certificate refuses it."""
    for _ in range(3):
        torch.cuda._sleep(SLEEP_CYCLES)
        asleep = torch.cuda.Event()
        asleep.record()
        field = certificate.field(STEP)
        certificate.clear()
        still = not asleep.query()
        value = float(field.item())
        if still:
            try:
                certificate.check(STEP, value)
                return True, value, False
            except BrokenStep:
                return True, value, True
        certificate = Certificate(1, 1, device)
    return False, 1.0, False


def pageable_is_not(report: Report) -> None:
    """The same with pageable memory, and how long the host is held."""
    device = torch.device("cuda", 0)
    flag = torch.ones(1, dtype=torch.float64)
    _warm(flag.to(device, non_blocking=True))
    torch.cuda._sleep(SLEEP_CYCLES)
    began = time.perf_counter()
    read = flag.to(device, non_blocking=True)
    enqueued_s = time.perf_counter() - began
    flag.zero_()
    value = float(read.item())
    report.found(
        "pageable_is_not",
        value == 1,
        f"{value:g} was read; the host was held for {enqueued_s * 1e3:.1f} ms",
        "pageable memory is read in stream order here: harmless, the certificate's memory is pinned",
    )


def threads_run(report: Report) -> None:
    """A thread beats while the main thread waits in an event, and while it launches into a full queue."""
    device = torch.device("cuda", 0)
    settings: dict[str, str] = {}
    apply_device_settings(settings, in_place=True, compile_threads=2)
    os.environ.update(settings)  # before anything is compiled

    def wait() -> None:
        torch.cuda._sleep(SLEEP_CYCLES)
        event = torch.cuda.Event()
        event.record()
        event.synchronize()

    report.found("event_wait_lets_run", *_gap(wait, 0.2))
    x = torch.zeros(1 << 12, device=device)

    def launch() -> None:
        torch.cuda._sleep(3 * SLEEP_CYCLES)
        for _ in range(LAUNCHES):
            x.add_(1)
        torch.cuda.synchronize()

    report.found("full_queue_eager", *_gap(launch, 1.0))
    compiled = torch.compile(lambda a: (a * 2 + 1).relu())
    _warm(compiled(x))

    def launch_compiled() -> None:
        torch.cuda._sleep(3 * SLEEP_CYCLES)
        for _ in range(LAUNCHES):
            compiled(x)
        torch.cuda.synchronize()

    report.found("full_queue_compiled", *_gap(launch_compiled, 1.0))


def _gap(work: Any, most_s: float) -> tuple[bool, str, str]:
    """How long a thread that wants to run every 10 ms was kept from it at worst."""
    gaps, over = [0.0], threading.Event()

    def beat() -> None:
        last = time.perf_counter()
        while not over.wait(0.01):
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    began = time.perf_counter()
    work()
    took_s = time.perf_counter() - began
    over.set()
    thread.join()
    figure = f"at most {max(gaps):.2f} s without the interpreter, of {took_s:.1f} s"
    return max(gaps) <= most_s, figure, "the heartbeat would stop, and nothing be aborted (pytorch#109074)"


def settings_are_read(report: Report) -> None:
    """What torch's process group logs of its environment."""
    code = (
        "import torch, torch.distributed as dist\n"
        "torch.cuda.set_device(0)\n"
        "dist.init_process_group('nccl', store=dist.HashStore(), rank=0, world_size=1)\n"
        "x = torch.ones(1, device='cuda'); dist.all_reduce(x); torch.cuda.synchronize(); dist.destroy_process_group()\n"
    )
    environment = dict(os.environ)
    apply_device_settings(environment, in_place=True, compile_threads=2)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**environment, "TORCH_CPP_LOG_LEVEL": "INFO"},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise RuntimeError(f"a group of one process on NCCL failed: {lines[-1] if lines else done.returncode}")
    said = dict(re.findall(r"(TORCH_[A-Z_]+): (\w+)", done.stderr + done.stdout))
    known = {name: said[name] for name in OUTLIVES_ITS_GROUPS if name in said}
    if not known:
        raise NotTested("torch's process group did not log its settings")
    wrong = [
        f"{name}={value}"
        for name, value in known.items()
        if {"false": "0", "true": "1"}.get(value.lower(), value) != OUTLIVES_ITS_GROUPS[name]
    ]
    figure = f"{len(known) - len(wrong)} of {len(known)} settings that torch names are ours"
    report.found("settings_are_read", not wrong, figure, ", ".join(wrong))


def host(report: Report) -> None:
    """What the host offers, GPU or not."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    limit = limit if limit != resource.RLIM_INFINITY else 1 << 30
    report.found(
        "host_descriptors", limit >= LEAST_DESCRIPTORS, f"{limit:,}", "512 ranks hold over a thousand connections each"
    )
    with report.about("host_name"):
        name = socket.gethostname()
        try:
            address = socket.gethostbyname(name)
        except OSError as error:
            report.found("host_name", False, name, f"has no address: {error}")
        else:
            reason = "ranks would be told an address that only their own host can reach"
            report.found("host_name", not address.startswith("127."), f"{name} is {address}", reason)
    with report.about("host_shm"):
        if not Path("/dev/shm").is_dir():
            raise NotTested("there is no /dev/shm")
        stat = os.statvfs("/dev/shm")
        free_gib = stat.f_bavail * stat.f_frsize / GIB
        wanted = LEAST_SHM_GIB * max(1, num_gpus())
        figure = f"{free_gib:.0f} GiB free of {wanted:.0f}"
        report.found("host_shm", free_gib >= wanted, figure, "snapshots of 8B would not fit")


def gpu_host(report: Report) -> None:
    """Driver, NCCL, Triton and memory of the GPUs."""
    number = num_gpus()
    capabilities = sorted({torch.cuda.get_device_capability(i) for i in range(number)})
    version: Any = torch.cuda.nccl.version() if dist.is_nccl_available() else (0,)
    held = min(version, default=0) if not isinstance(version, tuple) else version
    nccl = tuple(held) if isinstance(held, tuple) else (held // 1000, held % 1000 // 100)
    text = ".".join(map(str, nccl))
    report.found("host_nccl", nccl >= LEAST_NCCL, f"NCCL {text}, CUDA {torch.version.cuda}", f"NCCL {text} is too old")
    report.found(
        "host_capability",
        capabilities[0] >= (8, 9),
        ", ".join(".".join(map(str, each)) for each in capabilities),
        "no float8 on this GPU: bfloat16 only",
    )
    with report.about("host_memory"):
        shares = []
        for index in range(number):
            free, total = torch.cuda.mem_get_info(index)
            shares.append(free / total)
        figure = f"{min(shares):.1%} of GPU {shares.index(min(shares))} free, the fullest"
        report.found("host_memory", min(shares) >= 0.95, figure, "another process holds memory there")
    with report.about("host_nvml"):
        nvml(report, number)
    x = torch.arange(1024, device="cuda", dtype=torch.float32)
    y = torch.compile(lambda a: a.sin() + 1)(x)
    error = float((y - (x.sin() + 1)).abs().max())
    report.found("host_triton", error < 1e-5, f"compiled, off by {error:.1g}", "what Triton compiles is wrong")


def nvml(report: Report, number: int) -> None:
    if not has_nvml():
        raise NotTested("needs the package nvidia-ml-py, which is not installed")
    gpus = read_gpus()
    known = {gpu.uuid for gpu in gpus}
    uuids = {f"GPU-{torch.cuda.get_device_properties(index).uuid}" for index in range(number)}
    problems = [found for gpu in gpus if (found := problem(gpu, gpus))]
    reason = "; ".join(problems) or "NVML and torch name different GPUs"
    report.found(
        "host_nvml", uuids <= known and not problems, f"{len(uuids & known)} of {number} GPUs known, no error", reason
    )


def probe(report: Report) -> None:
    """The product that every rank repeats while it trains."""
    best_s, spread = probe_gpu(torch.device("cuda", 0))
    name = torch.cuda.get_device_name(0)
    figure = f"{best_s * 1e3:.3f} ms, spread {spread:.1%} of 20; exact"
    if "H100" not in name and "H200" not in name and "GH200" not in name:
        report.found("probe", spread < 0.05, figure, "unsteady")
        return
    report.found("probe", best_s <= 0.35e-3 and spread < 0.05, figure, "slow, or unsteady: clocks, heat, neighbours")


def probe_gpu(device: torch.device) -> tuple[float, float]:
    """Seconds of one product, and how far 20 probes lie apart, the outermost left out. Raises Unfit for a wrong one."""
    prober = Prober(device)
    for _ in range(5):
        prober.probe()
    seconds = sorted(prober.probe() for _ in range(20))
    return seconds[0], (seconds[-2] - seconds[1]) / statistics.median(seconds)


def _warm(tensor: Tensor) -> None:
    """First calls load kernels, which waits for the device."""
    tensor.sum().item()
    torch.cuda._sleep(1000)
    torch.cuda.synchronize()
