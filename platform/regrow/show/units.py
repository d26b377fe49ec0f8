"""Durations, shares, sizes and times as people read them. Pure."""

import re
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

# escape sequences and control characters but line ends, which a text from elsewhere may carry
CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def percent(share: float) -> str:
    return f"{share:.1%}"


def duration(seconds: float) -> str:
    """Two units at most: `0.42 s`, `12.3 s`, `3 min 5 s`, `2 h 3 min`, `4 d 2 h`."""
    if seconds < 59.95:
        return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.1f} s"
    whole = round(seconds)
    for unit, size, smaller, part in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= size:
            rest = whole % size // part
            return f"{whole // size} {unit}" + (f" {rest} {smaller}" if rest else "")
    raise AssertionError("a minute is the least here")


def when(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def ranks(world_size: int) -> str:
    return counted(world_size, "rank")


def size(num_bytes: float) -> str:
    """As `812 B`, `17.1 MB` or `1.61 TB`."""
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if num_bytes >= factor * 0.9995:
            return f"{num_bytes / factor:.3g} {prefix}B"
    return f"{num_bytes:.0f} B"


def si(value: float) -> str:
    """Three significant digits with k, M, G, T: `1.5k`, `614k`."""
    for factor, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor * 0.9995:
            return f"{value / factor:.3g}{suffix}"
    return f"{value:.3g}"


def or_dash(value: Any, show: Callable[[Any], str] = str) -> str:
    return "-" if value is None else show(value)


def counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' if number != 1 else ''}"
