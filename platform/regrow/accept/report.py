"""What was found, for people a list, for programs accept.json. Needs nothing that is not Python's own."""

import json
import os
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
from regrow.record.provenance import git_sha, hardware, versions

FILE = "accept.json"
TITLES = {
    Part.one_process: "One GPU",
    Part.one_node: "All GPUs of this node",
    Part.no_gpu: "What a CPU can show",
    Part.cluster: "A Ray cluster",
}
WORDS = {State.proved: "proved", State.refused: "refused", State.not_tested: "not tested here"}
WIDTH = 150


def write_json(folder: Path, findings: Sequence[Finding], machine: Machine, *, arguments: Sequence[str]) -> Path:
    """Write accept.json anew, whole or not at all."""
    content = {
        "checks": [each.to_dict() for each in findings],
        "counts": {state.value: count for state, count in Counter(each.state for each in findings).items()},
        "arguments": list(arguments),
        "versions": versions("triton", "torchtitan"),
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


def show(findings: Sequence[Finding], stream: TextIO = sys.stdout) -> None:
    """Claim by claim in their parts; what was not tested is listed under them, by the reason."""
    for part in Part:
        rows = [each for each in findings if each.part == part]
        tested = [each for each in rows if each.state is not State.not_tested]
        if tested:
            print(f"\n{TITLES[part]}", *map(entry, tested), sep="\n", file=stream)
        reasons: dict[str, list[str]] = {}
        for each in rows:
            if each.state is State.not_tested:
                reasons.setdefault(each.reason, []).append(each.claim)
        for reason, claims in reasons.items():
            title = "" if tested else f"{TITLES[part]}: "
            print(f"\n{title}{len(claims)} claim{'s' * (len(claims) > 1)} not tested here, {reason}:", file=stream)
            print(wrapped("; ".join(claims) + ".", 2), file=stream)
    counts = Counter(each.state for each in findings)
    print(f"\n{', '.join(f'{counts[state]} {WORDS[state]}' for state in State)}", file=stream)


def entry(finding: Finding) -> str:
    """A claim, what was measured beside what is expected, and what to do where it is refused."""
    advice = f"\n{'':18}to do: {finding.advice}" if finding.state is State.refused else ""
    figure = f"{measured(finding) or '-'} (expected: {finding.expected})"
    return f"  {WORDS[finding.state]:<15} {finding.claim}\n{wrapped(figure, 18)}{advice}"


def measured(finding: Finding) -> str:
    """The figure, and why it will not do, or why there is none."""
    return "; ".join(filter(None, (finding.figure, finding.reason)))


def to_lines(findings: Sequence[Finding]) -> list[str]:
    """A line each as they are found, for the screen."""
    return [f"  {WORDS[each.state]:<15} {each.claim}: {measured(each) or 'as expected'}" for each in findings]


def wrapped(text: str, indent: int) -> str:
    width = shutil.get_terminal_size((WIDTH, 24)).columns if sys.stdout.isatty() else WIDTH
    return textwrap.fill(text, width, initial_indent=" " * indent, subsequent_indent=" " * indent)
