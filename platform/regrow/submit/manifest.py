"""Reading manifests that may be wrong anywhere, and saying where."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

Manifest = dict[str, Any]
Value = TypeVar("Value")

NAMES = {dict: "a mapping", list: "a list", str: "a string", int: "a whole number", bool: "true or false"}


@dataclass(frozen=True)
class Finding:
    """What is wrong with a manifest, where, and what to do about it."""

    path: str  # as spec.rayClusterSpec.workerGroupSpecs[0].maxReplicas
    problem: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}" + (f"; {self.fix}" if self.fix else "")


class Reader:
    """A node of a manifest and its path. What has another type than expected is a finding and reads as absent."""

    def __init__(self, value: Any, path: str, findings: list[Finding]) -> None:
        self.value, self.path, self.findings = value, path, findings

    def at(self, *keys: str) -> "Reader":
        """The node below; a Reader of None where there is none."""
        node = self
        for key in keys:
            mapping = node.get(dict)
            node = Reader(mapping.get(key) if mapping else None, join(node.path, key), self.findings)
        return node

    def get(self, kind: type[Value]) -> Value | None:
        """The value, if it is of this type."""
        if self.value is None:
            return None
        if not isinstance(self.value, kind) or (kind is int and isinstance(self.value, bool)):
            self.refuse(f"must be {NAMES[kind]}, not {self.value!r}")
            self.value = None
            return None
        return self.value

    def items(self) -> Iterator["Reader"]:
        """The elements of a list."""
        for number, value in enumerate(self.get(list) or []):
            yield Reader(value, f"{self.path}[{number}]", self.findings)

    def entries(self) -> Iterator[tuple[str, "Reader"]]:
        """The entries of a mapping."""
        for key, value in (self.get(dict) or {}).items():
            yield str(key), Reader(value, join(self.path, str(key)), self.findings)

    def named(self, name: str) -> "Reader":
        """The element of a list of named things."""
        for item in self.items():
            if item.at("name").value == name:
                return item
        return Reader(None, f"{self.path}[name={name}]", self.findings)

    def refuse(self, problem: str, fix: str = "") -> None:
        finding = Finding(self.path, problem, fix)
        if finding not in self.findings:
            self.findings.append(finding)


def join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def decimal_quantity(thousandths: int) -> str:
    """A Kubernetes quantity with decimal units, as KubeRay's typed decoding and encoding leaves it.

    >>> decimal_quantity(16_000), decimal_quantity(17_500), decimal_quantity(200 * 10**12)
    ('16', '17500m', '200G')
    """
    units = ["m", "", "k", "M", "G", "T", "P", "E"]
    while thousandths and thousandths % 1000 == 0 and len(units) > 1:
        thousandths //= 1000
        units.pop(0)
    return f"{thousandths}{units[0] if thousandths else ''}"


def binary_quantity(num_bytes: int) -> str:
    """The same with binary units.

    >>> binary_quantity(512 * 2**30), binary_quantity(2048 * 2**30), binary_quantity(1536 * 2**20)
    ('512Gi', '2Ti', '1536Mi')
    """
    units = ["", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"]
    while num_bytes and num_bytes % 1024 == 0 and len(units) > 1:
        num_bytes //= 1024
        units.pop(0)
    return f"{num_bytes}{units[0]}"


UNITS = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "m": 1e-3}


def quantity(text: str | int | float | None) -> float | None:
    """A Kubernetes quantity as a number; None where it is none.

    >>> quantity("1.5Gi"), quantity("500m"), quantity(8), quantity("much")
    (1610612736.0, 0.5, 8.0, None)
    """
    text = "" if text is None or isinstance(text, bool) else str(text)
    digits = text.rstrip("kKMGTim")
    try:
        return float(digits) * UNITS[text[len(digits) :]]
    except (ValueError, KeyError):
        return None
