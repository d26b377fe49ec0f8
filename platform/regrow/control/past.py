"""What a coordinator that starts knows of its run: from the log, and from what is in storage. Pure."""

import base64
import struct
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from regrow.control.events import Restarted
from regrow.control.membership import Member
from regrow.control.troubles import ERROR, LOSS, LOSSES
from regrow.control.values import NOTHING, Version
from regrow.record.events import Cause, Corruption, from_row
from regrow.record.log import positive

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
    limit: int | None = None  # the newest step that may be restored, where a corruption was found and no group followed
    began: tuple[Version, ...] = ()  # newest first, groups that trained, by the step from which each did; see `_began`
    discarded: int = NOTHING  # the newest group whose state went wrong in memory, too: nothing up to it counts
    trained: int | None = None  # the last step, after which the group left for good
    undrained: frozenset[str] = frozenset()  # nodes that were drained, and are no more
    quarantined_until: Mapping[str, float] = field(default_factory=dict)  # by host
    corrupt: frozenset[str] = frozenset()  # hosts among them that computed wrong
    verified: int | None = None  # the newest step whose state was, as the log has it; None: no group was formed
    undecided: Corruption | None = None  # for which a third unit is waited for, and no group has followed
    rollbacks: Rollbacks = field(default_factory=Rollbacks)
    spares: Mapping[str, int] = field(default_factory=dict)  # by node, ranks that were told of
    failed_groups: int = 0  # in a row, without a step; see `troubles.FirstSteps.failed`
    last_failure: str = ""  # its detail
    logged_at: float = 0.0  # when the last step that has a row ended, unix time; 0: none has
    stored_at: float = 0.0  # when the newest of `stored` was begun, else the first group; unix time; 0: not known

    def counts(self, version: Version) -> bool:
        """Whether a snapshot that keepers hold, of whatever group, may be gone on from, as far as the log tells."""
        if version.generation > self.generation:
            return True
        is_right = version.generation > self.discarded and (self.limit is None or version.step <= self.limit)
        return is_right and self.successor(version) is None

    def successor(self, version: Version) -> Version | None:
        """The newest group after that of a snapshot, if it went on from an earlier step: another one's way since."""
        later = (each for each in self.began if each.generation > version.generation)
        return next((each for each in later if each.step < version.step), None)

    @staticmethod
    def of(
        events: Sequence[Row],
        *,
        generation: int,
        logged: int,
        stored: Iterable[int],
        restarted: bool,
        job: str = "",
        logged_at: float = 0.0,
    ) -> "Past":
        """From the log's events, oldest first. `job` is this coordinator's, see `of_job`."""
        (drained, undrained), limit = _drained(events), _limit(events)
        steps, began = _known(stored, events, limit), _began(events)
        past = Past(
            generation, logged, steps, restarted, drained, limit, began, _discarded(events), logged_at=logged_at
        )
        past = replace(past, stored_at=_stored_at(events, steps))
        if not restarted:
            return past
        events, rollbacks = of_job(events, job), Rollbacks()
        for event in events:
            if event["event"] == "failure" and event.get("cause") == Cause.nonfinite and event.get("step") is not None:
                rollbacks.again(event["step"])
        quarantines = [event for event in events if event["event"] == "quarantine"]
        quarantined = {e.get("host") or e["node"]: e["time"] + e["seconds"] for e in quarantines}
        corrupt = frozenset(e.get("host") or e["node"] for e in quarantines if e.get("reason") == "corrupt")
        trained = next((event["step"] for event in events if event["event"] == "trained"), None)
        spares: Mapping[str, int] = next((e["nodes"] for e in reversed(events) if e["event"] == "spares"), {})
        failed = _failed_in_a_row(events, logged)
        return replace(
            past,
            undrained=undrained,
            trained=trained,
            quarantined_until=quarantined,
            corrupt=corrupt,
            verified=_verified(events, steps),
            undecided=_undecided(events),
            rollbacks=rollbacks,
            spares=spares,
            failed_groups=failed,
            last_failure=next((e.get("detail", "") for e in reversed(events) if e["event"] == "failure"), ""),
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


def group_of(events: Sequence[Row], generation: int, job: str = "") -> Restarted:
    """What the log says of the newest generation, if it is this job's."""
    events = of_job(events, job)
    newest = [event for event in events if event.get("generation") == generation]
    forming = next((event for event in newest if event["event"] == "forming"), None)
    if forming is None:
        return Restarted((), None, ())
    begun = next((event for event in newest if event["event"] == "generation"), None)
    over = [event for event in events[events.index(forming) :] if event["event"] == "corruption"]  # it is, after one
    failures = [event for event in newest if event["event"] == "failure"]
    lost = {rank for each in [*over, *failures] if each.get("is_decided", True) for rank in each["ranks"]}
    if any(failure["cause"] == Cause.controller_died for failure in failures):
        lost = set(range(len(forming["members"])))  # which end with it
    return Restarted(
        _members_of(forming),
        begun["start_step"] if begun is not None else None,
        tuple(dict.fromkeys(worker["node"] for worker in begun["workers"])) if begun is not None else (),
        tuple(sorted(lost)) if over or failures else None,
        max((each["time"] for each in [*over, *failures]), default=0.0),
    )


def _failed_in_a_row(events: Sequence[Row], logged: int) -> int:
    """What groups without a step count for, the newest included."""
    count, counted, members, start, generation = 0, 0, frozenset[str](), 0, NOTHING
    for event in events:
        if event["event"] == "forming":
            before, members = members, frozenset(member["id"] for member in event["members"])
            counted, generation = 0 if members < before else ERROR, event["generation"]
            count += counted
        elif event["event"] == "failure" and event["generation"] == generation and _is_loss(event):
            count, counted = (count - ERROR + LOSS, LOSS) if counted == ERROR else (count, counted)
        elif event["event"] == "generation":
            has_trained = event["start_step"] > start or event.get("recomputed_steps")  # one before, though in vain
            count = counted if has_trained else count
            start = event["start_step"]
    return count if logged <= start else 0


def _is_loss(failure: Row) -> bool:
    """Older logs have its cause alone."""
    return bool(failure["cause"] in LOSSES or failure.get("is_loss"))


def _began(events: Sequence[Row]) -> tuple[Version, ...]:
    """Of those that began from a later step than one after them, none is left: the other says more."""
    found: list[Version] = []
    for event in reversed(events):
        if event["event"] == "generation" and (not found or event["start_step"] < found[-1].step):
            found.append(Version(event["generation"], event["start_step"]))
    return tuple(found)


def _verified(events: Sequence[Row], stored: Collection[int]) -> int | None:
    """By an older log, what the newest group began from. Without a beginning, which the log may have lost, what the job
    could begin from in storage: what a group has made since nothing vouches for."""
    for event in reversed(events):
        if event["event"] in ("generation", "checkpoint") and event.get("verified_step") is not None:
            return int(event["verified_step"])
        if event["event"] == "generation":
            return int(event["start_step"])
    was_formed = any(event["event"] == "forming" for event in events)
    return max(stored, default=0) if was_formed else None


def _discarded(events: Sequence[Row]) -> int:
    """Whatever has begun since: that may have begun from the very step that keepers still hold of it."""
    for event in reversed(events):
        if event["event"] == "failure" and event.get("cause") == Cause.nonfinite:
            return int(event.get("generation") or 0)  # an older log may not say
    return NOTHING


def _corruption(events: Sequence[Row]) -> Row | None:
    """The newest, if no group has begun since."""
    newest = next((event for event in reversed(events) if event["event"] in ("generation", "corruption")), None)
    return newest if newest is not None and newest["event"] == "corruption" else None


def _limit(events: Sequence[Row]) -> int | None:
    found = _corruption(events)
    return int(found["verified_step"]) if found is not None else None


def _undecided(events: Sequence[Row]) -> Corruption | None:
    event = from_row(dict(_corruption(events) or {"event": ""}))
    return event if isinstance(event, Corruption) and event.waits_for is not None else None


def _known(stored: Iterable[int], events: Sequence[Row], limit: int | None) -> tuple[int, ...]:
    """Steps in storage; and where none of them may be restored, those that were there once, whole, and might be."""
    steps = tuple(stored)
    if limit is None or any(step <= limit for step in steps):
        return steps
    there = dict[int, None]()
    for event in events:
        if event["event"] == "checkpoint":
            there[event["step"]] = None
        elif event["event"] == "checkpoint_failed":
            there.pop(event["step"], None)
        elif event["event"] == "corruption":
            there = {step: None for step in there if step <= event["verified_step"]}
    return (*steps, *there)


def _stored_at(events: Sequence[Row], steps: Collection[int]) -> float:
    """Of those checkpoints that the log has, and without one when the first group was ready."""
    written = {event["step"]: event for event in events if event["event"] == "checkpoint"}
    begun = {step: positive(each.get("time")) - positive(each.get("seconds")) for step, each in written.items()}
    ready = (positive(event.get("time")) for event in events if event["event"] == "generation")
    return begun[max(there)] if (there := begun.keys() & steps) else next(ready, 0.0)


def _drained(events: Sequence[Row]) -> tuple[frozenset[str], frozenset[str]]:
    """Nodes that were asked for and are not back: maintenance goes on when a job ends and another one begins. And those
    that are back."""
    is_out = dict[str, bool]()
    for event in events:
        if event["event"] == "undrain" or (event["event"] == "drain" and event.get("asked")):
            is_out[event["node"]] = event["event"] == "drain"
    drained = frozenset(node for node, out in is_out.items() if out)
    return drained, frozenset(is_out.keys() - drained)


def is_submitted(events: Sequence[Row], job: str) -> bool:
    """Whether this job is the newest of which the log knows."""
    newest = next((event for event in reversed(events) if event["event"] == "submitted"), None)
    return newest is not None and newest.get("job", "") == job


def of_job(events: Sequence[Row], job: str = "") -> Sequence[Row]:
    """Those of this job, the newest. None are where its first coordinator died before the log knew of the job.

    `job` is what its `submitted` has; older logs have none, and "" here.
    """
    begins = [number for number, event in enumerate(events) if event["event"] == "submitted"]
    if not begins:
        return events
    return events[begins[-1] :] if is_submitted(events, job) else []
