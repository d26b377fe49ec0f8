"""What the benchmarks share: sides that run in processes of their own, CPU time of whole families, the JSON."""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from regrow.record.provenance import git_sha, hardware, versions

ROOT = Path(__file__).parents[1]
SHA = git_sha()  # what this process runs, whatever is committed or changed beside it
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass
class Result:
    """What the parts add to the JSON."""

    figures: dict[str, float] = field(default_factory=dict)
    spread: dict[str, Any] = field(default_factory=dict)
    peers: dict[str, Any] = field(default_factory=dict)
    runs: dict[str, Any] = field(default_factory=dict)

    def add(self, name: str, values: list[float]) -> None:
        """A figure: the median of these."""
        self.figures[name] = statistics.median(values)
        self.spread[name] = [min(values), max(values)]

    def add_ratio(self, name: str, above: list[float], below: list[float]) -> None:
        """A figure: the ratio of the medians, for differences so small that single rounds' ratios are noise."""
        self.add(name, [a / b for a, b in zip(above, below, strict=True)])
        self.figures[name] = statistics.median(above) / statistics.median(below)


def run_side(
    script: str, *arguments: str, python: str = sys.executable, timeout_s: float = 1800, tree: Path = ROOT
) -> dict[str, Any]:
    """Run a script with a tree's code and return the JSON object that is the last line it prints."""
    done = subprocess.run(
        [python, script, *arguments],
        cwd=tree,
        env=side_env(tree),
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=timeout_s,
        start_new_session=True,
    )
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def side_env(tree: Path = ROOT) -> dict[str, str]:
    """Environment in which a script of this tree finds the tree's own code, what tests share included."""
    return {**os.environ, "PYTHONPATH": ":".join(str(tree / folder) for folder in ("platform", "tests", "."))}


def family(root: int | None = None) -> list[int]:
    """A process, this one unless said otherwise, and every one that descends from it."""
    parents = {}
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        fields = _stat(pid)
        if fields:
            parents[pid] = int(fields[1])
    found = {root or os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found)


def family_cpu_s(root: int | None = None) -> float:
    """CPU seconds so far of the family, and of children that its members have waited for."""
    return sum(sum(map(int, fields[11:15])) for pid in family(root) if (fields := _stat(pid))) / TICKS_PER_S


def _stat(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def summary(values: Sequence[float]) -> dict[str, Any]:
    return {"median": statistics.median(values), "range": [min(values), max(values)], "all": list(values)}


def write_result(
    path: Path,
    figures: dict[str, float],
    *,
    spread: dict[str, Any],
    peers: dict[str, Any],
    show: bool = True,
    **more: Any,
) -> None:
    """Write a benchmark's JSON and print its figures. `git` is of the start, `git_at_end` where that is another."""
    at_end = git_sha()
    result = {
        "figures": figures,
        "spread": spread,
        "peers": peers,
        **more,
        "versions": versions(),
        "hardware": hardware(),
        "git": SHA,
        **({"git_at_end": at_end} if at_end != SHA else {}),
    }
    path.expanduser().write_text(json.dumps(result, indent=2) + "\n")
    if show:
        print(json.dumps(figures))
