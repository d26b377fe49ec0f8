"""What nodes' parts of snapshots and checkpoints take, phase by phase, and which node the others wait for. Pure.

    snapshot:    copied and sealed by ranks -> checksums -> sent to peers -> reported; committed with the last report
    checkpoint:  ordered -> checked -> written by each node; then index, then COMMIT

A few rows are kept of many: those of the slowest nodes.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from regrow.control.values import CopyTimes, PartTimes, SnapshotAck

SHOWN = 16  # nodes


class SnapshotTimes:
    """Of each node's newest report."""

    def __init__(self) -> None:
        self._newest: dict[str, CopyTimes] = {}

    def begin(self, nodes: Iterable[str]) -> None:
        """A group of these nodes."""
        self._newest = {node: self._newest[node] for node in nodes if node in self._newest}

    def take(self, acks: Iterable[SnapshotAck]) -> None:
        self._newest |= {ack.node: ack.times for ack in acks if ack.times is not None}

    def rows(self) -> tuple[Mapping[str, Any], ...]:
        """The slowest first."""
        slowest = sorted(self._newest.items(), key=lambda item: -item[1].seconds)
        return tuple({"node": node, **times.to_plain()} for node, times in slowest[:SHOWN])


@dataclass
class CheckpointTimes:
    """Of one checkpoint, from its beginning."""

    _parts: dict[str, tuple[float, str, PartTimes]] = field(default_factory=dict)  # by origin: seconds, node
    _stages: list[float] = field(default_factory=list)  # when all parts, and when the index was there

    def wrote(self, origin: str, node: str, times: PartTimes, seconds: float) -> None:
        """A node has written what ranks of `origin` hold, so long after the beginning."""
        self._parts.setdefault(origin, (seconds, node, times))

    def passed(self, now: float) -> None:
        """All parts are there; the index is."""
        self._stages.append(now)

    def to_event(self, now: float) -> dict[str, Any]:
        """Fields of the event `checkpoint`, once COMMIT is there."""
        if not self._parts or len(self._stages) < 2:
            return {}
        seconds = [each for each, *_ in self._parts.values()]
        return {
            "write_s": median(seconds),
            "held_up_s": max(seconds) - median(seconds),
            "index_s": self._stages[1] - self._stages[0],
            "commit_s": now - self._stages[1],
            "nodes": self._rows(),
        }

    def _rows(self) -> list[dict[str, Any]]:
        slowest = sorted(self._parts.items(), key=lambda item: (-item[1][0], item[0]))[:SHOWN]
        return [
            {"node": node, "seconds": seconds, **times.to_plain()} | ({"of": origin} if origin != node else {})
            for origin, (seconds, node, times) in slowest
        ]
