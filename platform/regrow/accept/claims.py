"""What acceptance says of a machine: claims, each proved, refused or not tested here, figure beside expectation.

Imports no torch: the command that runs checks holds no device.
"""

import contextlib
import json
import tomllib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from regrow.errors import ConfigError


class State(StrEnum):
    proved = "proved"
    refused = "refused"
    not_tested = "not_tested"


class Part(StrEnum):
    """What a claim is about, in the order of running them; ten minutes each."""

    one_process = "one_process"  # one GPU
    one_node = "one_node"  # all GPUs of this machine
    no_gpu = "no_gpu"  # what a CPU can show of the same
    cluster = "cluster"  # a Ray cluster


@dataclass(frozen=True)
class Claim:
    """A line of the table, before anything was run."""

    name: str
    claim: str
    expected: str  # and where that is from
    advice: str  # what to do where it is refused


@dataclass(frozen=True)
class Check:
    """What one child process runs, and what that may show."""

    function: str  # module:function below this package, called with a Report
    part: Part
    deadline_s: float
    claims: tuple[Claim, ...]
    num_gpus: int = 0
    memory_gib: float = 0.0  # of each GPU


@dataclass(frozen=True)
class Finding:
    """A claim, and what became of it."""

    name: str
    claim: str
    state: State
    figure: str | None  # what was measured; None where nothing was
    expected: str
    reason: str = ""  # for which it was refused or not tested
    advice: str = ""
    part: str = ""
    check_s: float | None = None  # that its check took, with all its claims; None: it was not begun

    @staticmethod
    def of(check: Check, claim: Claim, state: State, figure: str | None = None, reason: str = "") -> "Finding":
        return Finding(claim.name, claim.claim, state, figure, claim.expected, reason, claim.advice, check.part.value)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class NotTested(Exception):
    """A check, or a claim of it, cannot be tested here; says why."""


class Report:
    """A check's own side: a line for each claim, in a file at once, so that it is there whatever happens next."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def found(self, name: str, holds: bool, figure: str, reason: str = "") -> None:
        self._write(name, State.proved if holds else State.refused, figure, "" if holds else reason)

    def begun(self, name: str, reason: str) -> None:
        """To be found; for this it is refused where the check ends before."""
        self._write(name, State.refused, "", reason, provisional=True)

    def not_tested(self, name: str, reason: str) -> None:
        self._write(name, State.not_tested, None, reason)

    @contextlib.contextmanager
    def about(self, *names: str) -> Iterator[None]:
        """What NotTested, or what a missing package raises in here, is said of these claims, and no more."""
        try:
            yield
        except (
            NotTested,
            ConfigError,
        ) as error:  # the machine, or what is installed, cannot do that
            reason = str(error)
        except ModuleNotFoundError as error:
            reason = f"needs the package {error.name}, which is not installed"
        else:
            return
        for name in names:
            self.not_tested(name, reason)

    def _write(self, name: str, state: State, figure: str | None, reason: str, *, provisional: bool = False) -> None:
        entry = {"name": name, "state": state.value, "figure": figure, "reason": reason, "provisional": provisional}
        with open(self._path, "a") as file:
            file.write(json.dumps(entry) + "\n")


def read_report(path: Path) -> dict[str, dict[str, Any]]:
    """The lines of a report by claim; the last one of each counts, and one that was torn does not."""
    found = {}
    with contextlib.suppress(FileNotFoundError):
        for line in path.read_text().splitlines():
            with contextlib.suppress(ValueError):
                entry = json.loads(line)
                found[entry["name"]] = entry
    return found


# all that acceptance looks at, in the order of looking
_FILE = tomllib.loads(Path(__file__).with_name("claims.toml").read_text())

CHECKS: tuple[Check, ...] = tuple(
    Check(
        function=f"regrow.accept.{each['function']}",
        part=Part(each["part"]),
        deadline_s=each["deadline_s"],
        claims=tuple(
            Claim(name, claim, expected, advice.format(**_FILE["advice"]))
            for name, claim, expected, advice in each["claims"]
        ),
        num_gpus=each.get("num_gpus", 0),
        memory_gib=each.get("memory_gib", 0.0),
    )
    for each in _FILE["check"]
)
NEXT: str = _FILE["next"]["text"]  # what no check here shows, and what would
