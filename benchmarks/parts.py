"""What a part of benchmarks/step.py adds to the JSON."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Part:
    figures: dict[str, float] = field(default_factory=dict)
    spread: dict[str, list[float]] = field(default_factory=dict)
    peers: dict[str, float] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
