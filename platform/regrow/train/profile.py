"""A few steps under torch's profiler: a trace for perfetto.dev, a page that says where the time went, and on GPUs where
the memory is.

    profiles/step-00000100/{trace.json.gz, summary.md, memory.pickle}

`memory.pickle` is torch's own format, for pytorch.org/memory_viz; nothing here reads it.
"""

import re
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from regrow.config.schema import PretrainConfig
from regrow.storage import Storage

FOLDER = "profiles"
KINDS = (  # the first that matches an operator's or a kernel's name
    ("fused by torch.compile", r"^triton_(poi|red|per|for|spl)_|cpp_fused"),  # names of operators follow
    ("collectives", r"nccl|gloo|c10d|all_?gather|reduce_?scatter|all_?reduce|wait_tensor"),
    ("attention", r"attention|flash|fmha|sdpa|flex"),
    ("matrix products", r"\bmm\b|addmm|bmm|matmul|linear|gemm|_scaled_mm|cutlass|xmma|nvjet"),
    ("optimizer and clipping", r"adamw?|foreach|multi_tensor"),
    ("copies and casts", r"copy|memcpy|memset|\bto\b|_to_copy|\bcat\b|chunk_cat|split|clone|fill"),
    ("fused by torch.compile", r"triton|compiled"),
)
REST = "everything else"
MOST_ROWS = 25
MEMORY_EVENTS = 100_000


@dataclass(frozen=True)
class Spent:
    """Of one operator, or kernel, in all steps of the window."""

    name: str
    seconds: float  # by itself
    calls: int


def profiled_steps(config: PretrainConfig) -> range:
    """Those that are asked for, up to the run's last one; none where no profile is."""
    observe, train = config.observe, config.train
    if (first := observe.profile_at_step) is None:
        return range(0)
    return range(first, min(first + observe.profile_steps, (train.stop_at_step or train.steps) + 1))


class ProfileWindow:
    """Profiles steps of this process, if it trains through all of them."""

    def __init__(self, folder: Storage, device: torch.device, steps: range) -> None:
        """`folder` is the run's; there is at least one step."""
        self.steps, self.device = steps, device
        self.folder = folder.join(FOLDER, f"step-{steps.start:08d}")
        self._profile: profile | None = None

    def after(self, step: int) -> str | None:
        """A step has ended, or training begins after it; where the profile is, once it is there. The window's edges are
        steps behind which none is in flight (`LoopSettings.read_at_once`)."""
        if step == self.steps.start - 1:
            self._begin()
        if step == self.steps[-1] and self._profile is not None:
            return self._end(self._profile)
        return None

    def abandon(self) -> None:
        """The group is over: what is half is nothing."""
        if self._profile is not None:
            self._profile.stop()
            self._profile = None
        if self.device.type == "cuda":
            torch.cuda.memory._record_memory_history(enabled=None)

    def _begin(self) -> None:
        activities = [ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)
        running = profile(activities=activities)
        running.start()
        self._profile = running

    def _end(self, running: profile) -> str:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        running.stop()
        self._profile = None
        with tempfile.TemporaryDirectory(prefix="profile-") as temporary:
            trace = Path(temporary) / "trace.json.gz"
            running.export_chrome_trace(str(trace))
            self.folder.write_bytes(trace.name, trace.read_bytes())
            if self.device.type == "cuda":
                memory = Path(temporary) / "memory.pickle"
                torch.cuda.memory._dump_snapshot(str(memory))
                torch.cuda.memory._record_memory_history(enabled=None)
                self.folder.write_bytes(memory.name, memory.read_bytes())
        title = f"steps {self.steps.start} to {self.steps[-1]}, one rank on {self.device.type}"
        page = summary(spent(running.key_averages(), self.device.type), title=title, num_steps=len(self.steps))
        self.folder.write_bytes("summary.md", page.encode())
        return str(self.folder)


def spent(averages: Iterable[Any], device_type: str) -> list[Spent]:
    """What the profiler saw: kernels on a GPU, of which operators and annotations have the time once more; operators on
    CPU."""
    key = "self_device_time_total" if device_type == "cuda" else "self_cpu_time_total"
    if device_type == "cuda":
        averages = [each for each in averages if each.device_type == DeviceType.CUDA and not each.is_user_annotation]
    found = [Spent(each.key, getattr(each, key) / 1e6, each.count) for each in averages]
    return sorted((each for each in found if each.seconds > 0), key=lambda each: -each.seconds)


def kind_of(name: str) -> str:
    """Of an operator or a kernel.

    >>> kind_of("aten::mm"), kind_of("ncclDevKernel_AllGather_RING_LL"), kind_of("aten::silu")
    ('matrix products', 'collectives', 'everything else')
    """
    return next((kind for kind, pattern in KINDS if re.search(pattern, name, re.IGNORECASE)), REST)


def by_kind(found: Iterable[Spent]) -> Counter[str]:
    """Seconds of each kind."""
    kinds: Counter[str] = Counter()
    for each in found:
        kinds[kind_of(each.name)] += each.seconds  # type: ignore[assignment]
    return kinds


def summary(found: list[Spent], *, title: str, num_steps: int) -> str:
    """One page, Markdown: time by kind and by operator, milliseconds of a step."""
    total = sum(each.seconds for each in found) or 1.0
    lines = [f"# {title}", "", "| kind | ms a step | share |", "|---|---:|---:|"]
    for kind, seconds in by_kind(found).most_common():
        lines.append(f"| {kind} | {1e3 * seconds / num_steps:,.2f} | {seconds / total:.1%} |")
    lines.append(f"| all | {1e3 * total / num_steps:,.2f} | |")
    lines += ["", "| by itself | kind | ms a step | share | calls a step |", "|---|---|---:|---:|---:|"]
    for each in found[:MOST_ROWS]:
        name = each.name.replace("|", "\\|")[:80]
        cells = f"{1e3 * each.seconds / num_steps:,.2f} | {each.seconds / total:.1%} | {each.calls / num_steps:,.1f}"
        lines.append(f"| `{name}` | {kind_of(each.name)} | {cells} |")
    if len(found) > MOST_ROWS:
        rest = sum(each.seconds for each in found[MOST_ROWS:])
        lines.append(f"| {len(found) - MOST_ROWS} others | | {1e3 * rest / num_steps:,.2f} | {rest / total:.1%} | |")
    return "\n".join([*lines, "", "The trace beside this page opens in ui.perfetto.dev.", ""])
