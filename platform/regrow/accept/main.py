"""What `jobs.accept` does: find out what is here, run what can be run, show the table, write accept.json.

Its command line is read here, as the parts for one machine know nothing of Hydra, nor of rich.
"""

import difflib
import json
import os
import shutil
import socket
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from regrow.accept.claims import CHECKS, NEXT, Check, Finding, Part, State
from regrow.accept.runner import Machine, Outcome, look_at, run_checks
from regrow.config.plain import models
from regrow.errors import ConfigError
from regrow.record.provenance import git_sha, hardware, versions
from regrow.storage import make_folder, path_of

FILE = "accept.json"
TITLES = {
    Part.one_process: "One GPU",
    Part.one_node: "All GPUs of this node",
    Part.no_gpu: "What a CPU can show",
    Part.cluster: "A Ray cluster",
}
WORDS = {State.proved: "proved", State.refused: "refused", State.not_tested: "not tested here"}
WIDTH = 150
SPARE_MINUTES = 0.5  # of a part, for looking at the machine and for the last check to be ended
CLUSTER = "+cluster="
PREFIX = "accept."
HELP = """\
What of regrow holds on this machine: python -m jobs.accept [accept.KEY=VALUE ...] [+cluster=NAME [KEY=VALUE ...]]

  python -m jobs.accept                                  one GPU, then all of this node; without, what a CPU can show
  python -m jobs.accept accept.only=certificate_premise  one claim
  python -m jobs.accept +cluster=h100x64                 a running Ray cluster, as jobs.pretrain would use it; any
                                                         setting of jobs.pretrain may follow

Each check runs in a process of its own with a deadline. A table says of each claim whether it was proved, refused or
not tested here, with what was measured, what is expected, and what to do; accept.json says the same to programs. A
refused claim is a result: the exit status is 0 unless a check itself broke. docs/acceptance.md has the claims.

  accept.out       folder that accept.json is written into [runs/accept]
  accept.only      names of claims, with commas, as accept.json has them; all where none is given [null]
  accept.parts     of one_process, one_node, no_gpu, cluster, with commas; null: what this machine has [null]
  accept.gpus      most GPUs to use; null: all [null]
  accept.model     of conf/model, that one GPU is timed with [1_8b]
  accept.minutes   most that a part may take [10.0]
"""


@dataclass(frozen=True)
class Options:
    """What may be said; HELP has what it means."""

    out: Path = Path("runs/accept")
    only: tuple[str, ...] = ()
    parts: tuple[Part, ...] = ()
    gpus: int | None = None
    model: str = "1_8b"
    minutes: float = 10.0
    pretrain: tuple[str, ...] = ()  # +cluster=NAME and any setting of jobs.pretrain with it


def parse(arguments: Sequence[str]) -> Options:
    """Raises ConfigError for what is no argument of this command."""
    options, rest = Options(), []
    has_cluster = any(argument.startswith(CLUSTER) for argument in arguments)
    for argument in arguments:
        key, equals, value = argument.partition("=")
        name = key.removeprefix(PREFIX)
        if not equals:
            raise ConfigError(f"{argument!r} is no key=value; --help lists what there is")
        if key.startswith(PREFIX) and name in READ:
            try:
                options = replace(options, **{name: READ[name](value)})
            except ValueError as error:
                known = f"; one of {', '.join(Part)}" if name == "parts" else ""
                raise ConfigError(f"{argument}: {error}{known}") from error
        elif has_cluster and not key.startswith(PREFIX):
            rest.append(argument)
        else:
            raise ConfigError(f"unknown setting {key!r}{_near(key)}")
    if has_cluster and not options.parts:
        options = replace(options, parts=(Part.cluster,))
    if Part.cluster in options.parts and not has_cluster:
        raise ConfigError(f"accept.parts=cluster needs {CLUSTER}NAME, as jobs.pretrain takes it")
    return replace(options, pretrain=tuple(rest))


def _model(name: str) -> str:
    if name not in models():
        raise ValueError(f"one of {', '.join(models())}")
    return name


def _names(value: str) -> list[str]:
    return [] if value == "null" else value.split(",")


def _gpus(value: str) -> int | None:
    gpus = None if value == "null" else int(value)
    if gpus is not None and gpus < 1:
        raise ValueError("must be at least 1, or null for all")
    return gpus


READ: dict[str, Callable[[str], Any]] = {
    "out": path_of,
    "only": lambda value: tuple(_names(value)),
    "parts": lambda value: tuple(map(Part, _names(value))),
    "gpus": _gpus,
    "model": _model,
    "minutes": lambda value: max(1.0, float(value)),
}


def _near(key: str) -> str:
    own = key if key.startswith(PREFIX) else PREFIX + key
    known = [] if "." in key and own != key else [PREFIX + name for name in READ]
    if nearest := difflib.get_close_matches(own, known, n=1, cutoff=0.75):
        return f"; did you mean {nearest[0]!r}?"
    return f"; settings of jobs.pretrain go with {CLUSTER}NAME only, --help lists what there is"


def accept(options: Options, arguments: Sequence[str]) -> int:
    """Run the checks; the exit status. Raises ConfigError for a claim that there is not, and StorageError where there
    is no folder to write to."""
    checks = chosen(options)
    make_folder(options.out, "accept.out")
    began, machine = time.monotonic(), look_at(options.gpus)
    print(f"{describe(machine)}; torch {machine.torch or 'none'}", flush=True)
    outcome, running = Outcome(), False

    def tell(now: str, found: list[Finding]) -> None:
        nonlocal running
        if found:
            write_json(options.out, outcome.findings, machine, arguments=arguments)
        lines = [now] if now else to_lines(found) if running else []
        print("".join(f"{line}\n" for line in lines), end="", flush=True)
        running = bool(now)

    environment = {
        "REGROW_ACCEPT_MODEL": options.model,
        "REGROW_ACCEPT_PRETRAIN": json.dumps(options.pretrain),
        "REGROW_ACCEPT_GPUS": str(options.gpus or 0),
    }
    run_checks(
        checks,
        machine,
        minutes=options.minutes - SPARE_MINUTES,
        tell=tell,
        environment=environment,
        skipped={part: why_skipped(part, options, machine) for part in Part},
        outcome=outcome,
    )
    path = write_json(options.out, outcome.findings, machine, arguments=arguments)
    show(outcome.findings)
    print(NEXT)
    print(f"{path}; {time.monotonic() - began:.0f} s")
    for broke in outcome.broke:
        print(f"a check itself broke, {broke}", file=sys.stderr)
    return 1 if outcome.broke else 0


def chosen(options: Options) -> list[Check]:
    """The checks of the claims that are wanted, with the claims of theirs that are. Raises ConfigError."""
    known = [claim.name for check in CHECKS for claim in check.claims]
    for name in options.only:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else f"; there are {', '.join(known)}"
            raise ConfigError(f"accept.only={name} is no claim{hint}")
    return [check for check in CHECKS if not options.only or any(each.name in options.only for each in check.claims)]


def why_skipped(part: Part, options: Options, machine: Machine) -> str:
    """Why a part is not run; empty where it is. What one machine shows is not asked for where a cluster is."""
    if options.parts:
        return "" if part in options.parts else f"not among accept.parts={','.join(options.parts)}"
    if part is Part.cluster:
        return f"needs a Ray cluster: {CLUSTER}NAME"
    if part is Part.no_gpu and machine.gpus and not options.only:
        return "there are GPUs here; accept.parts=no_gpu runs it"
    return ""


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
