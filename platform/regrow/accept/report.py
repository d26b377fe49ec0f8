"""What was found, for people a table, for programs accept.json. By rich where it is installed, by hand where not."""

import contextlib
import importlib.metadata
import json
import os
import platform
import shutil
import socket
import sys
import textwrap
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from regrow.accept.claims import Finding, Part, State
from regrow.accept.runner import Machine
from regrow.record.provenance import git_sha, hardware

FILE = "accept.json"
PACKAGES = ("torch", "torchao", "triton", "ray", "torchtitan", "numpy")
TITLES = {
    Part.one_process: "One GPU",
    Part.one_node: "All GPUs of this node",
    Part.no_gpu: "What a CPU can show",
    Part.cluster: "A Ray cluster",
}
COLORS = {State.proved: "green", State.refused: "bold red", State.not_tested: "dim"}
WORDS = {State.proved: "proved", State.refused: "refused", State.not_tested: "not tested here"}
COLUMNS = ("claim", "result", "figure", "expected", "what to do")
WIDTH = 150


def write_json(folder: Path, findings: Sequence[Finding], machine: Machine, *, arguments: Sequence[str]) -> Path:
    """Write accept.json anew, whole or not at all."""
    content = {
        "checks": [each.to_dict() for each in findings],
        "counts": {state.value: count for state, count in Counter(each.state for each in findings).items()},
        "arguments": list(arguments),
        "versions": versions(),
        "hardware": describe(machine),
        "host": socket.gethostname(),
        "git": git_sha(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    path, temporary = folder / FILE, folder / f".{FILE}"
    temporary.write_text(json.dumps(content, indent=2) + "\n")
    os.replace(temporary, path)
    return path


def describe(machine: Machine) -> str:
    gpus = Counter(machine.gpus)
    return ", ".join([hardware(), *(f"{count} x {name}, {machine.memory_gib:.0f} GiB" for name, count in gpus.items())])


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def show(findings: Sequence[Finding], stream: TextIO = sys.stdout) -> None:
    """The table, part by part; what was not tested is listed under it, by the reason."""
    for part in Part:
        rows = [each for each in findings if each.part == part]
        tested = [each for each in rows if each.state is not State.not_tested]
        if tested:
            _table(TITLES[part], tested, stream)
        reasons: dict[str, list[str]] = {}
        for each in rows:
            if each.state is State.not_tested:
                reasons.setdefault(each.reason, []).append(each.claim)
        for reason, claims in reasons.items():
            title = "" if tested else f"{TITLES[part]}: "
            print(f"\n{title}{len(claims)} claim{'s' * (len(claims) > 1)} not tested here, {reason}:", file=stream)
            print(
                textwrap.fill("; ".join(claims) + ".", _width(stream), initial_indent="  ", subsequent_indent="  "),
                file=stream,
            )
    print(f"\n{summary(findings)}", file=stream)


def summary(findings: Sequence[Finding]) -> str:
    counts = Counter(each.state for each in findings)
    return ", ".join(f"{counts[state]} {WORDS[state]}" for state in State)


def cells(finding: Finding) -> tuple[str, str, str, str, str]:
    """A row: what was measured, or why nothing was; and what to do, where there is something."""
    figure = finding.figure or ""
    if finding.reason:
        figure = f"{figure}; {finding.reason}" if figure else finding.reason
    advice = finding.advice if finding.state is State.refused else ""
    return finding.claim, WORDS[finding.state], figure, finding.expected, advice


def _table(title: str, rows: Sequence[Finding], stream: TextIO) -> None:
    try:
        from rich.console import Console
        from rich.table import Table
    except ModuleNotFoundError:
        print(f"\n{title}", file=stream)
        for row in rows:
            claim, state, figure, expected, advice = cells(row)
            print(f"  {state:<15} {claim}\n{'':18}{figure or '-'} (expected: {expected})", file=stream)
            if advice:
                print(f"{'':18}to do: {advice}", file=stream)
        return
    print(f"\n{title}", file=stream)
    table = Table(padding=(0, 1), show_lines=True)
    for column, ratio in zip(COLUMNS, (5, 2, 5, 5, 4), strict=True):
        table.add_column(column, ratio=ratio, overflow="fold")
    for row in rows:
        claim, state, figure, expected, advice = (_plain(cell) for cell in cells(row))
        table.add_row(claim, f"[{COLORS[row.state]}]{state}[/]", figure, expected, advice)
    Console(file=stream, width=_width(stream)).print(table)


def _plain(text: str) -> str:
    return text.replace("[", r"\[")  # not rich's markup


def _width(stream: TextIO) -> int:
    return shutil.get_terminal_size((WIDTH, 24)).columns if stream.isatty() else WIDTH


def to_lines(findings: Sequence[Finding]) -> list[str]:
    """A line each as they are found, for the screen."""
    return [f"  {WORDS[each.state]:<15} {each.claim}: {cells(each)[2] or 'as expected'}" for each in findings]
