"""Speed and memory of the training step: tokens/s, MFU and peak bytes of each dtype and float8 recipe, on one device.

    python benchmarks/step.py --out FILE [--quick] [--device cpu|cuda] [--models 1_8b 8b-layers4] [--recipes ...]

One process, FSDP over a group of one: what is measured is the compute path, with none of the traffic between ranks.
Peers in the same run: `bare`, a plain `torch.nn` Llama of the same dims with AdamW in a plain loop, and `torchtitan`,
its own step at the default dtype, where it is installed (step_titan.py says how). Two more parts: our layers on FSDP2
against FSDP2 alone and against torchtitan, on two ranks of a CPU (step_ranks.py), and the loss in chunks against all
logits at once, at a vocabulary of 32k (step_loss.py). Needs torch alone, torchao for float8; runs from a checkout that
is not installed.
"""

import argparse
import contextlib
import dataclasses
import gc
import importlib.metadata
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "platform"), str(ROOT / "tests"), str(ROOT)]

from benchmarks.bare_llama import BareLlama  # noqa: E402
from benchmarks.parts import Part  # noqa: E402
from benchmarks.step_loss import measure_loss  # noqa: E402
from benchmarks.step_ranks import measure_ranks  # noqa: E402
from benchmarks.step_titan import HOW_TO_GET_IT, is_installed, titan_step  # noqa: E402
from benchmarks.step_titan import NAME as TORCHTITAN  # noqa: E402

from regrow.accept.timing import Load  # noqa: E402
from regrow.config import plain  # noqa: E402
from regrow.config.schema import (  # noqa: E402
    ActivationCheckpoint,
    Dtype,
    Float8,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
)
from regrow.errors import ConfigError  # noqa: E402
from regrow.model.size import flops_per_token, num_params  # noqa: E402
from regrow.parallel.fsdp import BACKENDS, build_mesh  # noqa: E402
from regrow.plan.mesh import plan_mesh  # noqa: E402
from regrow.runtime.hardware.peak import Peak, peak_flops  # noqa: E402
from regrow.runtime.hardware.settings import apply_device_settings  # noqa: E402
from regrow.train.build import build_step  # noqa: E402
from regrow.train.profile import by_kind, spent  # noqa: E402

GIB = 2**30
LR = 1e-4
COMPILED = "+compile"
PEERS = ("bare", TORCHTITAN)
MOST_KERNELS = 20  # of a profile, that are named
DEFAULTS: dict[str, dict[str, list[str]]] = {
    "cpu": {"models": ["debug"], "recipes": ["bare", "float32"], "rank_models": ["debug", "150m"]},
    "cuda": {
        "rank_models": [],
        "models": ["1_8b", "8b-layers4"],
        "recipes": [
            "bare+compile",
            "torchtitan+compile",
            "bfloat16",
            "bfloat16+compile",
            "tensorwise+compile",
            "tensorwise_all_gather+compile",
            "rowwise+compile",
            "rowwise_with_gw_hp+compile",
        ],
    },
}

RunStep = Callable[[int], None]  # launches step number n; does not wait for the device


@dataclass(frozen=True)
class Case:
    """One thing that is timed: a model under a recipe: a peer, a dtype or a float8 recipe, perhaps compiled."""

    model: ModelConfig
    recipe: str
    dtype: Dtype  # of peers; other recipes name theirs
    micro_batch_seqs: int
    num_micro_batches: int
    seq_len: int
    activation_checkpoint: ActivationCheckpoint
    compile_backend: str

    @property
    def name(self) -> str:
        return f"{self.model.name}/{self.recipe}"

    @property
    def tokens(self) -> int:
        return self.micro_batch_seqs * self.num_micro_batches * self.seq_len

    @property
    def parallel(self) -> ParallelConfig:
        name = self.recipe.removesuffix(COMPILED)
        is_dtype = name in Dtype.__members__
        return ParallelConfig(
            dtype=Dtype(name) if is_dtype else Dtype.bfloat16,
            float8=Float8.none if is_dtype else Float8(name),
            compile=self.recipe.endswith(COMPILED),
            compile_backend=self.compile_backend,
            activation_checkpoint=self.activation_checkpoint,
            reshard_after_forward=False,  # there is no peer to gather from again
        )


@dataclass
class Timings:
    """What the rounds of one case gave."""

    case: Case
    step_s: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    warmup_s: float = 0.0  # building, compiling and the first steps, of the slowest round
    profile: dict[str, Any] = field(default_factory=dict)  # of the last round


def main() -> None:
    options = parse_options()
    device = torch.device(options.device, 0)
    began = time.monotonic()
    if device.type == "cuda":  # as a worker has it
        apply_device_settings(os.environ, in_place=True, compile_threads=os.cpu_count() or 1)
    torch.manual_seed(0)
    report = Report(options, device)
    with process_group(device):
        peak = peak_flops(device, Dtype.bfloat16 if device.type == "cuda" else Dtype.float32)
        cases = {name: list(cases_of(name, options, device)) for name in options.models}
        report.start(peak, [case for of_model in cases.values() for case in of_model])
        for of_model in cases.values():
            for _ in range(options.rounds):
                for case in of_model:
                    if time.monotonic() - began < options.budget_s:
                        measure(case, options, device, report)
                    elif case.name not in report.timings:
                        report.skip(case, f"not started within --budget-s {options.budget_s:.0f}")
        if options.loss and time.monotonic() - began < options.budget_s:
            report.add_part("loss", measure_loss(device, rounds=options.steps))
    for name, dtype in itertools.product(options.rank_models, options.rank_dtypes):
        if time.monotonic() - began < options.budget_s:
            part = measure_ranks(read_model(name), dtype=Dtype(dtype), rounds=options.rank_rounds, steps=options.steps)
            report.add_part(f"{name} on two ranks, {dtype}", part)
    report.finish()


def measure(case: Case, options: argparse.Namespace, device: torch.device, report: "Report") -> None:
    """Build one case, time its steps, free it; a case that cannot run is reported with the reason."""
    try:
        if device.type == "cuda" and case.recipe.endswith(COMPILED):
            launch_as_it_comes(case.recipe.startswith(PEERS))
        timings = time_case(
            case, device, num_warmup=options.warmup, num_steps=options.steps, num_profiled=options.profile
        )
    except Exception as error:  # out of memory, no torchao, no kernel: the other cases still count
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        print(f"{case.name}: skipped, {reason}", flush=True)
        report.skip(case, reason)
    else:
        report.add(timings)
        median = statistics.median(timings.step_s)
        print(
            f"{case.name}: {case.tokens / median:,.0f} tokens/s, step {median:.3f} s, "
            f"peak {timings.peak_bytes / GIB:.1f} GiB, ready after {timings.warmup_s:.0f} s",
            flush=True,
        )
    finally:
        torch._dynamo.reset()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def launch_as_it_comes(static: bool) -> None:
    """Launch kernels as torch does by default, which is faster and can hold the interpreter; a worker's own way if not.

    All cases share a process, so that the environment of a worker is the peers', too.
    """
    import torch._inductor.config

    torch._inductor.config.use_static_cuda_launcher = static


def time_case(case: Case, device: torch.device, *, num_warmup: int, num_steps: int, num_profiled: int = 0) -> Timings:
    began = time.perf_counter()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    batches = [token_rows(case, seed, device) for seed in range(4)]
    build = {"bare": bare_step, TORCHTITAN: their_step}.get(case.recipe.removesuffix(COMPILED), our_step)
    run = build(case, batches, device)
    for number in range(num_warmup):
        run(number)
    synchronize(device)
    timings = Timings(case, warmup_s=time.perf_counter() - began)
    timings.step_s = clock(run, num_steps, device)
    if device.type == "cuda":
        timings.peak_bytes = torch.cuda.max_memory_allocated(device)
    if num_profiled:
        timings.profile = profile_steps(run, num_profiled, device)
    return timings


def profile_steps(run: RunStep, num_steps: int, device: torch.device) -> dict[str, Any]:
    """Where a step's time goes: milliseconds by kind of kernel, on a CPU of operator, and of those that take most."""
    activity = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU  # alone: noting both takes time
    synchronize(device)
    with torch.profiler.profile(activities=[activity]) as running:
        for number in range(num_steps):
            run(number)
        synchronize(device)
    found = spent(running.key_averages(), device.type)
    return {
        "ms_by_kind": {kind: round(1e3 * seconds / num_steps, 3) for kind, seconds in by_kind(found).most_common()},
        "calls": sum(each.calls for each in found) / num_steps,
        "most": [
            {"name": each.name[:120], "ms": round(1e3 * each.seconds / num_steps, 3), "calls": each.calls / num_steps}
            for each in found[:MOST_KERNELS]
        ],
    }


def clock(run: RunStep, num_steps: int, device: torch.device) -> list[float]:
    """Seconds of each step; on a GPU by events in its stream, so that the host may run ahead as it does in training."""
    if device.type == "cpu":
        seconds = []
        for number in range(num_steps):
            began = time.perf_counter()
            run(number)
            seconds.append(time.perf_counter() - began)
        return seconds
    events = [torch.cuda.Event(enable_timing=True) for _ in range(num_steps + 1)]
    events[0].record()
    for number in range(num_steps):
        run(number)
        events[number + 1].record()
    synchronize(device)
    return [before.elapsed_time(after) / 1e3 for before, after in itertools.pairwise(events)]


def our_step(case: Case, batches: Sequence[Tensor], device: torch.device) -> RunStep:
    """The step as the job runs it: FSDP over one rank, every pass and reduction in place."""
    mesh = build_mesh(plan_mesh(1, 1), device.type)
    step = build_step(case.model, case.parallel, OptimConfig(), mesh=mesh, device=device, seed=0)
    launched = []

    def run(number: int) -> None:
        micro_batches = batches[number % len(batches)].split(case.micro_batch_seqs)
        launched.append(step.run(micro_batches, num_micro_batches=len(micro_batches), lr=LR, digest=number))
        if len(launched) > 1:
            launched.pop(0).resolve()  # as the loop does: step N is read after step N+1 was launched

    return run


def bare_step(case: Case, batches: Sequence[Tensor], device: torch.device) -> RunStep:
    """The peer: plain modules, autocast, torch's clipping, the loss read never."""
    torch.manual_seed(0)
    with device:
        model = BareLlama(case.model, case.seq_len)
    model.init_weights()
    if case.recipe.endswith(COMPILED):
        for block in model.blocks:
            block.compile(backend=case.compile_backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=case.dtype is Dtype.bfloat16)

    def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()) / case.num_micro_batches

    compiled_loss = case.recipe.endswith(COMPILED) and device.type == "cuda"
    compute_loss = torch.compile(loss_of, backend=case.compile_backend) if compiled_loss else loss_of

    def run(number: int) -> None:
        for rows in batches[number % len(batches)].split(case.micro_batch_seqs):
            with autocast:
                logits = model(rows[:, :-1])
            compute_loss(logits, rows[:, 1:]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return run


def their_step(case: Case, batches: Sequence[Tensor], device: torch.device) -> RunStep:
    """torchtitan's, of the group of one."""
    if not is_installed():
        raise ModuleNotFoundError(HOW_TO_GET_IT)
    run = titan_step(
        case.model,
        device=device,
        dtype=case.dtype,
        seq_len=case.seq_len,
        micro_batch_seqs=case.micro_batch_seqs,
        num_micro_batches=case.num_micro_batches,
        lr=LR,
        compiled=case.recipe.endswith(COMPILED),
        compile_backend=case.compile_backend,
        activation_checkpoint=case.activation_checkpoint,
    )
    hosts = [batch.cpu().pin_memory() if batch.is_cuda else batch for batch in batches]  # as its data loader's are
    return lambda number: run(hosts[number % len(hosts)])


class Report:
    """The JSON file, rewritten after every case so that an interrupted run leaves what it has."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self.options, self.device = options, device
        self.timings: dict[str, Timings] = {}  # by case
        self.skipped: dict[str, str] = {}
        self.peak = Peak(1.0, "not measured")
        self.cases: list[Case] = []
        self.parts: dict[str, Part] = {}

    def start(self, peak: Peak, cases: list[Case]) -> None:
        self.peak, self.cases = peak, cases
        print(f"{hardware(self.device)}; peak {peak.flops / 1e12:.3g} TFLOP/s ({peak.source})", flush=True)

    def add(self, timings: Timings) -> None:
        sofar = self.timings.setdefault(timings.case.name, Timings(timings.case))
        sofar.step_s += timings.step_s
        sofar.peak_bytes = max(sofar.peak_bytes, timings.peak_bytes)
        sofar.warmup_s = max(sofar.warmup_s, timings.warmup_s)
        sofar.profile = timings.profile
        self.write()

    def add_part(self, name: str, part: Part) -> None:
        self.parts[name] = part
        print(f"{name}: {json.dumps(part.figures)}", flush=True)
        self.write()

    def skip(self, case: Case, reason: str) -> None:
        self.skipped[case.name] = reason
        self.write()

    def finish(self) -> None:
        self.write()
        print(f"wrote {self.options.out}", flush=True)
        if not self.timings and not self.parts:
            sys.exit("nothing could be measured")

    def write(self) -> None:
        path = Path(self.options.out)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.to_dict(), indent=2) + "\n")

    def to_dict(self) -> dict[str, Any]:
        figures: dict[str, float] = {}
        spread: dict[str, list[float]] = {}
        peers: dict[str, float] = {}
        for name, timings in self.timings.items():
            case = timings.case
            median = statistics.median(timings.step_s)
            slow, fast = max(timings.step_s), min(timings.step_s)
            target = peers if case.recipe.startswith(PEERS) else figures
            key = f"{self.device.type}/{name}"
            target[f"{key}/tokens_per_s"] = case.tokens / median
            target[f"{key}/step_s"] = median
            spread[f"{key}/step_s"] = [fast, slow]
            spread[f"{key}/tokens_per_s"] = [case.tokens / slow, case.tokens / fast]
            target[f"{key}/mfu"] = case.tokens / median * flops_per_token(case.model, case.seq_len) / self.peak.flops
            if timings.peak_bytes:
                target[f"{key}/peak_bytes"] = timings.peak_bytes
                if target is figures:
                    target[f"{key}/forecast_bytes"] = forecast_bytes(case)
            target[f"{key}/warmup_s"] = timings.warmup_s
        for model_name in dict.fromkeys(timings.case.model.name for timings in self.timings.values()):
            figures.update(self.ratios(model_name))
        ratios = [value for key, value in figures.items() if key.endswith("/tokens_per_s_ratio_bare")]
        if ratios:
            figures["tokens_per_s_ratio_bare"] = ratios[0]  # of the first model
        for part in self.parts.values():
            figures |= part.figures
            spread |= part.spread
            peers |= part.peers
        return {
            "figures": figures,
            "spread": spread,
            "peers": peers,
            "skipped": self.skipped,
            "profiles": {name: each.profile for name, each in self.timings.items() if each.profile},
            "settings": self.settings(),
            "versions": versions(),
            "hardware": hardware(self.device),
            "git": git_sha(),
        }

    def ratios(self, model_name: str) -> dict[str, float]:
        """Our speed over each peer's at the same dtype, compiled if both are; float8's over bfloat16's."""
        speed = {
            timings.case.recipe: timings.case.tokens / statistics.median(timings.step_s)
            for timings in self.timings.values()
            if timings.case.model.name == model_name
        }
        prefix, found = f"{self.device.type}/{model_name}", {}
        dtype = default_dtype(self.device).value
        for suffix in ("", COMPILED):
            for peer in PEERS:
                if f"{peer}{suffix}" in speed and f"{dtype}{suffix}" in speed:
                    found[f"{prefix}/tokens_per_s_ratio_{peer}"] = speed[f"{dtype}{suffix}"] / speed[f"{peer}{suffix}"]
            base = speed.get(f"{Dtype.bfloat16.value}{suffix}")
            for recipe in Float8:
                name = f"{recipe.value}{suffix}"
                if base and name in speed:
                    found[f"{prefix}/{name}/float8_speedup"] = speed[name] / base
        return found

    def settings(self) -> dict[str, Any]:
        return {
            "peak_flops": self.peak.flops,
            "peak_source": self.peak.source,
            "mfu": "tokens/s * (6N + 12*L*H*Q*T) / peak_flops, N without the input embedding, whole attention matrix",
            "models": {
                case.model.name: {
                    "num_params": num_params(case.model),
                    "flops_per_token": flops_per_token(case.model, case.seq_len),
                    "seq_len": case.seq_len,
                    "micro_batch_seqs": case.micro_batch_seqs,
                    "num_micro_batches": case.num_micro_batches,
                }
                for case in self.cases
            },
            "rounds": self.options.rounds,
            "steps_per_round": self.options.steps,
            "warmup_steps": self.options.warmup,
            "activation_checkpoint": self.options.activation_checkpoint,
            "compile_backend": self.options.compile_backend,
            "peers_dtype": default_dtype(self.device).value,
            "torch_threads": torch.get_num_threads(),
            **{name: part.settings for name, part in self.parts.items()},
        }


def cases_of(model_name: str, options: argparse.Namespace, device: torch.device) -> Iterator[Case]:
    """Every recipe of a model. Raises SystemExit for a recipe that there is not."""
    model = read_model(model_name)
    seq_len, micro_batch_seqs = batch_shape(model, options, device)
    known = {*PEERS, *Dtype.__members__, *(recipe.value for recipe in Float8 if recipe is not Float8.none)}
    for recipe in options.recipes:
        if recipe.removesuffix(COMPILED) not in known:
            sys.exit(f"unknown recipe {recipe!r}; one of {', '.join(sorted(known))}, perhaps with {COMPILED}")
        yield Case(
            model=model,
            recipe=recipe,
            dtype=default_dtype(device),
            micro_batch_seqs=micro_batch_seqs,
            num_micro_batches=options.micro_batches,
            seq_len=seq_len,
            activation_checkpoint=ActivationCheckpoint(options.activation_checkpoint),
            compile_backend=options.compile_backend,
        )


def default_dtype(device: torch.device) -> Dtype:
    return Dtype.bfloat16 if device.type == "cuda" else Dtype.float32


def forecast_bytes(case: Case) -> int:
    """What `jobs.plan` says that our step allocates at most."""
    load = Load(case.model, case.parallel, case.micro_batch_seqs, case.seq_len, case.num_micro_batches)
    return load.forecast_bytes()


def batch_shape(model: ModelConfig, options: argparse.Namespace, device: torch.device) -> tuple[int, int]:
    """Tokens of a sequence and sequences of a micro-batch that should fit the device's memory."""
    if device.type == "cpu":
        return options.seq_len or 256, options.micro_batch_seqs or 8
    memory = (options.memory_gib or torch.cuda.get_device_properties(device).total_memory / GIB) * GIB
    seq_len = options.seq_len or 4096
    if options.micro_batch_seqs:
        return seq_len, options.micro_batch_seqs
    # a parameter: float32 value, gradient and two moments, bfloat16 copy; a token: logits in bfloat16 and float32,
    # their logarithms and gradients; in each block about 12 tensors of width D and 4 of width F
    fixed = 18 * num_params(model)
    per_seq = seq_len * (16 * model.vocab_size + 2 * model.num_layers * (12 * model.dim + 4 * model.ffn_dim))
    fits = int((0.85 * memory - fixed) // per_seq)
    return seq_len, 2 ** min(3, max(0, fits.bit_length() - 1))


def read_model(name: str) -> ModelConfig:
    """A model of conf/model by name; `8b-layers4` is 8b with 4 layers. Raises SystemExit for one that there is not."""
    base, _, layers = name.partition("-layers")
    try:
        config = plain.read_model(base)
    except ConfigError as error:
        sys.exit(f"{error}, perhaps with -layersN")
    return dataclasses.replace(config, name=name, num_layers=int(layers)) if layers else config


def token_rows(case: Case, seed: int, device: torch.device) -> Tensor:
    """Rows of tokens as frequent as words are: the k-th most common in proportion to 1/(k + 2.7) (Zipf, Mandelbrot)."""
    generator = torch.Generator().manual_seed(seed)
    weights = 1.0 / (torch.arange(case.model.vocab_size, dtype=torch.float64) + 2.7)
    shape = (case.micro_batch_seqs * case.num_micro_batches, case.seq_len + 1)
    uniform = torch.rand(shape, dtype=torch.float64, generator=generator)
    edges = weights.cumsum(0) / weights.sum()
    return torch.searchsorted(edges, uniform).clamp(max=case.model.vocab_size - 1).to(device)


@contextlib.contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    """A group of this process alone."""
    with tempfile.TemporaryDirectory() as folder:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            BACKENDS[device.type],
            init_method=f"file://{folder}/store",
            rank=0,
            world_size=1,
        )
        try:
            yield
        finally:
            dist.destroy_process_group()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def hardware(device: torch.device) -> str:
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return f"{properties.name}, {properties.total_memory / GIB:.0f} GiB"
    return f"{os.cpu_count()} x {cpu_name()}"


def cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__, "cuda": str(torch.version.cuda)}
    for name in ("torchao", TORCHTITAN):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def git_sha() -> str:
    """The commit, marked where files differ from it."""
    try:
        sha = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return sha.stdout.strip()


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, help="JSON file, rewritten after every case")
    parser.add_argument("--quick", action="store_true", help="one round of few steps: minutes on 2 cores")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--models", nargs="*", help="names of conf/model, perhaps with -layersN (8b-layers4); may be none"
    )
    parser.add_argument("--recipes", nargs="+", help="a peer, a dtype or a float8 recipe, perhaps with +compile")
    parser.add_argument("--rounds", type=int, help="times each case is built and timed, round-robin")
    parser.add_argument("--steps", type=int, help="timed steps of a case in a round, at least 5")
    parser.add_argument("--warmup", type=int, default=3, help="steps before that, in which compiling happens")
    parser.add_argument("--seq-len", type=int, help="tokens of a sequence")
    parser.add_argument("--micro-batch-seqs", type=int, help="sequences of a micro-batch; by default what should fit")
    parser.add_argument("--micro-batches", type=int, default=1, help="micro-batches of a step")
    parser.add_argument("--memory-gib", type=float, help="choose the micro-batch as if the GPU had this much memory")
    parser.add_argument("--activation-checkpoint", choices=list(ActivationCheckpoint.__members__), default="none")
    parser.add_argument("--compile-backend", default="inductor")
    parser.add_argument("--loss", action=argparse.BooleanOptionalAction, default=True, help="measure the chunked loss")
    parser.add_argument("--profile", type=int, default=0, metavar="STEPS", help="profile so many steps of each case")
    parser.add_argument("--rank-models", nargs="*", help="models to run on two ranks of a CPU; may be none")
    parser.add_argument("--rank-dtypes", nargs="+", choices=list(Dtype.__members__), default=["float32"])
    parser.add_argument("--rank-rounds", type=int, default=5, help="times each side of these is built and timed")
    parser.add_argument("--budget-s", type=float, default=540.0, help="start no further case after this long")
    options = parser.parse_args()
    defaults = DEFAULTS[options.device]
    options.models = defaults["models"] if options.models is None else options.models
    options.recipes = options.recipes or defaults["recipes"]
    if options.rank_models is None:
        options.rank_models = defaults["rank_models"] if not options.quick else defaults["rank_models"][:1]
    options.rounds = options.rounds or (1 if options.quick else 2)
    options.steps = options.steps or (5 if options.quick else 10)
    return options


if __name__ == "__main__":
    main()
