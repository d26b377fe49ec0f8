"""What a coordinator that starts knows of its run: from the log, and from what is in storage. Pure."""

import base64
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from regrow.control.events import Restarted
from regrow.control.membership import Member
from regrow.control.troubles import ERROR, LOSS, LOSSES
from regrow.control.values import NOTHING
from regrow.record.events import Cause

Row = Mapping[str, Any]

PORTS = ("port", "control")  # of a member, which are others in each generation


@dataclass
class Rollbacks:
    """For gradients that are not finite, in a row at one place."""

    count: int = 0
    at_step: int = 0

    def again(self, step: int) -> int:
        """One more, and how many that makes: they count as long as the run does not get past the step of the one
        before."""
        self.count = self.count + 1 if step <= self.at_step else 1
        self.at_step = max(step, self.at_step)
        return self.count


@dataclass(frozen=True)
class Past:
    """What is known of a run when a coordinator starts. From `trained` on: of the job that it goes on with."""

    generation: int = 0  # the newest one so far
    logged: int = 0  # the last step that has a row
    stored: tuple[int, ...] = ()  # steps of the checkpoints in storage, without those that are noted as damaged
    restarted: bool = False  # this coordinator takes the place of one that died
    drained: frozenset[str] = frozenset()  # nodes, for maintenance
    trained: int | None = None  # the last step, after which the group left for good
    quarantined_until: Mapping[str, float] = field(default_factory=dict)  # by host
    corrupt: frozenset[str] = frozenset()  # hosts among them that computed wrong
    verified: int | None = None  # the step from which the newest group began, which is taken for right; None: none has
    limit: int | None = None  # the newest step that may be restored, where a corruption was found and no group followed
    rollbacks: Rollbacks = field(default_factory=Rollbacks)
    spares: Mapping[str, int] = field(default_factory=dict)  # by node, ranks that were told of
    failed_groups: int = 0  # in a row, without a step; see `troubles.FirstSteps.failed`
    logged_at: float = 0.0  # when the last step that has a row ended, unix time; 0: none has

    @staticmethod
    def of(
        events: Sequence[Row],
        *,
        generation: int,
        logged: int,
        stored: Iterable[int],
        restarted: bool,
        logged_at: float = 0.0,
    ) -> "Past":
        """From the log's events, oldest first."""
        past = Past(generation, logged, tuple(stored), restarted, _drained(events), logged_at=logged_at)
        if not restarted:
            return past
        events, rollbacks = since_submitted(events), Rollbacks()
        for event in events:
            if event["event"] == "failure" and event.get("cause") == Cause.nonfinite and event.get("step") is not None:
                rollbacks.again(event["step"])
        quarantines = [event for event in events if event["event"] == "quarantine"]
        quarantined = {e.get("host") or e["node"]: e["time"] + e["seconds"] for e in quarantines}
        corrupt = frozenset(e.get("host") or e["node"] for e in quarantines if e.get("reason") == "corrupt")
        trained = next((event["step"] for event in events if event["event"] == "trained"), None)
        spares: Mapping[str, int] = next((e["nodes"] for e in reversed(events) if e["event"] == "spares"), {})
        failed = _failed_in_a_row(events, logged)
        begun = [event["start_step"] for event in events if event["event"] == "generation"]
        return replace(
            past,
            trained=trained,
            quarantined_until=quarantined,
            corrupt=corrupt,
            verified=begun[-1] if begun else None,
            limit=_limit(events),
            rollbacks=rollbacks,
            spares=spares,
            failed_groups=failed,
        )


def formed(generation: int, members: Sequence[Member]) -> dict[str, Any]:
    """The fields of `forming`, by which a coordinator after this one gives members their seats.

    Ports are apart from `members`, as numbers: so a member that stays is the same entry in each generation.
    """
    rows = [{key: value for key, value in vars(member).items() if key not in PORTS} for member in members]
    ports = [getattr(member, name) for name in PORTS for member in members]
    packed = struct.pack(f"<{len(ports)}H", *ports)
    return {"generation": generation, "members": rows, "ports": base64.b64encode(packed).decode()}


def _members_of(forming: Row) -> tuple[Member, ...]:
    rows = forming["members"]
    if forming.get("ports") is None:  # an older log has them in its members
        return tuple(Member(**row) for row in rows)
    packed = base64.b64decode(forming["ports"])
    ports = struct.unpack(f"<{len(packed) // 2}H", packed)
    port, control = ports[: len(rows)], ports[len(rows) : 2 * len(rows)]
    return tuple(Member(**row, port=p, control=c) for row, p, c in zip(rows, port, control, strict=True))


def group_of(events: Sequence[Row], generation: int) -> Restarted:
    """What the log says of the newest generation."""
    newest = [event for event in since_submitted(events) if event.get("generation") == generation]
    forming = next((event for event in newest if event["event"] == "forming"), None)
    if forming is None:
        return Restarted((), None, ())
    begun = next((event for event in newest if event["event"] == "generation"), None)
    failures = [event for event in newest if event["event"] == "failure"]
    lost = {rank for failure in failures for rank in failure["ranks"]}
    if any(failure["cause"] == Cause.controller_died for failure in failures):
        lost = set(range(len(forming["members"])))  # which end with it
    return Restarted(
        _members_of(forming),
        begun["start_step"] if begun is not None else None,
        tuple(dict.fromkeys(worker["node"] for worker in begun["workers"])) if begun is not None else (),
        tuple(sorted(lost)) if failures else None,
        failures[-1]["time"] if failures else 0.0,
    )


def _failed_in_a_row(events: Sequence[Row], logged: int) -> int:
    """What groups without a step count for, the newest included."""
    count, counted, members, start, generation = 0, 0, frozenset[str](), 0, NOTHING
    for event in events:
        if event["event"] == "forming":
            before, members = members, frozenset(member["id"] for member in event["members"])
            counted, generation = 0 if members < before else ERROR, event["generation"]
            count += counted
        elif event["event"] == "failure" and event["generation"] == generation and event["cause"] in LOSSES:
            count, counted = (count - ERROR + LOSS, LOSS) if counted == ERROR else (count, counted)
        elif event["event"] == "generation":
            count = counted if event["start_step"] > start else count
            start = event["start_step"]
    return count if logged <= start else 0


def _limit(events: Sequence[Row]) -> int | None:
    """Of the newest corruption, if no group has begun since."""
    for event in reversed(events):
        if event["event"] == "generation":
            break
        if event["event"] == "corruption":
            return int(event["verified_step"])
    return None


def _drained(events: Sequence[Row]) -> frozenset[str]:
    """Nodes that were asked for and are not back: maintenance goes on when a job ends and another one begins."""
    asked = set()
    for event in events:
        if event["event"] == "drain" and event.get("asked"):
            asked.add(event["node"])
        elif event["event"] == "undrain":
            asked.discard(event["node"])
    return frozenset(asked)


def since_submitted(events: Sequence[Row]) -> Sequence[Row]:
    """Those of the newest job."""
    begins = [number for number, event in enumerate(events) if event["event"] == "submitted"]
    return events[begins[-1] :] if begins else events
