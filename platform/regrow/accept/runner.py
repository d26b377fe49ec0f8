"""Runs checks one after the other, each in a process of its own with a deadline, and leaves none of them behind.

A check is a session: it, the ranks that it starts and whatever they start are found by that, and killed together.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from regrow.accept.claims import Check, Finding, Part, State, read_report
from regrow.runtime.hardware.settings import apply_device_settings
from regrow.runtime.interrupts import terminable

FOLDER = "REGROW_ACCEPT_FOLDER"  # in the environment of all that a check starts
PLATFORM = Path(__file__).parents[2]
GONE_S = 20.0  # for killed processes to be gone; a driver may take its time with a device's memory
LEAST_S = 5.0  # no check is begun with less
REASON_CHARS = 240

Tell = Callable[[str, list[Finding]], None]  # what is run now, or was found


@dataclass(frozen=True)
class Machine:
    """What is here, as a child process of its own has found out: this one holds no device."""

    gpus: tuple[str, ...] = ()  # names
    memory_gib: float = 0.0  # of the smallest
    torch: str = ""
    cuda: str | None = None
    reason: str = ""  # why there are no GPUs

    def why_not(self, check: Check) -> str:
        """Why a check cannot be run here; empty where it can."""
        if check.num_gpus and not self.gpus:
            return self.reason or "no GPU here"
        if check.num_gpus > len(self.gpus):
            return f"needs {check.num_gpus} GPUs, {len(self.gpus)} here"
        if check.memory_gib > self.memory_gib:
            return f"needs GPUs of {check.memory_gib:.0f} GiB, {self.memory_gib:.0f} here"
        return ""


@dataclass
class Outcome:
    """All that was found so far."""

    findings: list[Finding] = field(default_factory=list)
    broke: list[str] = field(default_factory=list)  # checks that are to blame themselves
    interrupted: bool = False


def look_at(gpus: int | None = None) -> Machine:
    """What this machine has; of its GPUs at most so many."""
    code = (
        "import json, torch\n"
        "number = torch.cuda.device_count() if torch.cuda.is_available() else 0\n"
        "each = [torch.cuda.get_device_properties(i) for i in range(number)]\n"
        "reason = '' if number else 'no GPU here' if torch.version.cuda else 'no GPU here, nor a torch built for one'\n"
        "print(json.dumps(dict(gpus=[p.name for p in each], torch=torch.__version__, cuda=torch.version.cuda,\n"
        "  memory_gib=min([p.total_memory / 2**30 for p in each], default=0), reason=reason)))\n"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, start_new_session=True
        )
        told: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    except (subprocess.TimeoutExpired, ValueError, IndexError):
        return Machine(reason="torch cannot be imported here, or its devices do not answer")
    return Machine(**{**told, "gpus": tuple(told["gpus"][:gpus])})


def run_checks(
    checks: Sequence[Check],
    machine: Machine,
    *,
    minutes: float,
    tell: Tell,
    environment: Mapping[str, str] | None = None,
    skipped: Mapping[Part, str] | None = None,
    outcome: Outcome | None = None,
) -> Outcome:
    """Run what can be run here, `minutes` a part. `skipped` are parts that are not wanted, with the reason.

    On Ctrl-C, or asked to end, what was found stays and the rest is not tested.
    """
    outcome = outcome or Outcome()
    left_s = dict.fromkeys(Part, minutes * 60)
    with terminable():
        for check in checks:
            why_not = (skipped or {}).get(check.part) or machine.why_not(check)
            if not why_not and outcome.interrupted:
                why_not = "interrupted"
            over = f"the {minutes:g} minutes of its part were over; accept.only={check.claims[0].name} runs it"
            if not why_not and left_s[check.part] < LEAST_S:
                why_not = over
            if why_not:
                found = [Finding.of(check, claim, State.not_tested, None, why_not) for claim in check.claims]
            else:
                tell(f"{check.claims[0].claim} ...", [])
                began = time.monotonic()
                cut = over if left_s[check.part] < check.deadline_s else ""
                found, broke = run_check(check, min(check.deadline_s, left_s[check.part]), environment, cut=cut)
                took_s = time.monotonic() - began
                left_s[check.part] -= took_s
                found = [replace(each, check_s=round(took_s, 1)) for each in found]
                outcome.broke += [f"{check.claims[0].name}: {broke}"] if broke else []
                outcome.interrupted |= any(each.reason == "interrupted" for each in found)
            outcome.findings += found
            tell("", found)
    return outcome


def run_check(
    check: Check, deadline_s: float, environment: Mapping[str, str] | None = None, *, cut: str = ""
) -> tuple[list[Finding], str]:
    """Every claim of a check, and what broke of the check itself, if anything did. `cut`: why the deadline is not the
    check's own, so that what it does not come to is not tested.
    """
    with tempfile.TemporaryDirectory(prefix="regrow-accept-", ignore_cleanup_errors=True) as folder:
        report, error, output = (Path(folder, name) for name in ("report", "error", "output"))
        with open(output, "wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "regrow.accept.child", check.function, str(report), str(error)],
                env=_environment(folder, environment, trains=check.part is Part.one_process),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        how, kind = "", ""
        try:
            status = process.wait(deadline_s)
            if status < 0:
                how, kind = f"its process was ended by {signal.Signals(-status).name}", "failed"
            elif status and not error.exists():
                how, kind = f"its process ended with status {status}", "failed"
        except subprocess.TimeoutExpired:
            how, kind = (cut, "not_tested") if cut else (f"did not end within {deadline_s:.0f} s", "deadline")
        except KeyboardInterrupt:
            how, kind = "interrupted", "interrupted"
        finally:
            end_session(process, folder)
        if not how and error.exists():
            told = json.loads(error.read_text())
            how, kind = told["text"], told["kind"]
        if how and kind == "failed" and (last := last_line(output)) and last not in how:
            how = f"{how}: {last}"
        if os.environ.get("REGROW_ACCEPT_OUTPUT"):  # to mend a check
            sys.stderr.write(output.read_text(errors="replace"))
        return _findings(check, read_report(report), how[:REASON_CHARS], kind), how if kind == "broke" else ""


def _findings(check: Check, told: Mapping[str, Mapping[str, Any]], how: str, kind: str) -> list[Finding]:
    """The first claim that a check which did not come to its end said nothing of is refused; those behind it were
    not come to."""
    found, refused = [], False
    for claim in check.claims:
        entry, left_off = told.get(claim.name), kind in ("not_tested", "interrupted")
        if entry is not None and not (left_off and entry["provisional"]):
            state, figure, reason = State(entry["state"]), entry["figure"], entry["reason"]
        elif left_off:
            state, figure, reason = State.not_tested, None, how
        elif refused:
            state, figure, reason = State.not_tested, None, "the check ended before it came to this"
        else:
            state, figure, reason = State.refused, None, how or "its check said nothing of it"
            refused = True
        found.append(Finding.of(check, claim, state, figure, reason))
    return found


def end_session(process: "subprocess.Popen[bytes]", folder: str) -> None:
    """Kill a process and all that it started, and wait until they are gone: those of its session, and those that left
    it but have its folder in their environment."""
    give_up_at = time.monotonic() + GONE_S
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    while (left := members(process.pid) + strays(folder)) and time.monotonic() < give_up_at:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.poll()
        time.sleep(0.02)
    process.wait()


def members(session: int) -> list[int]:
    """The processes of a session that have not ended."""
    found = []
    for entry in os.scandir("/proc") if os.path.isdir("/proc/self") else ():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                state, _, _, of = Path(entry.path, "stat").read_text().rpartition(")")[2].split()[:4]
                if int(of) == session and state not in "ZX":
                    found.append(int(entry.name))
    return found


def strays(folder: str) -> list[int]:
    """The processes that were started with this folder in their environment, whatever session they are in."""
    word, found = f"{FOLDER}={folder}\0".encode(), []
    for entry in os.scandir("/proc") if os.path.isdir("/proc/self") else ():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # another user's, or gone
                if word in Path(entry.path, "environ").read_bytes() + b"\0":
                    found.append(int(entry.name))
    return found


def last_line(path: Path) -> str:
    """What a process said last."""
    lines = [line.strip() for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _environment(folder: str, more: Mapping[str, str] | None, *, trains: bool) -> dict[str, str]:
    """That of a worker of a job, where the process of the check is one; ranks that it starts have their own."""
    paths = [str(PLATFORM), str(PLATFORM.parent), os.environ.get("PYTHONPATH", "")]
    found = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), FOLDER: folder, **(more or {})}
    if trains:
        apply_device_settings(found, in_place=True, compile_threads=os.cpu_count() or 1)
    return found
