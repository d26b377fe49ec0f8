"""What should have been noticed of faults: what hangs, is slow, or computes wrong, what is damaged. Pure, from logs.

A hang is to be found within `BEYOND_S` of what is usual for its phase, times `FACTOR`; a slow rank or link while it is
slow; a wrong unit within a verification and the two more that confirm it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, prod
from typing import Any

from regrow.drill.faults import (
    AT_ITS_SPEED,
    DEAD_MOUNT,
    FLIP_WEIGHTS,
    HANGS,
    SLOW_LINK,
    SLOW_RANK,
    WHOLE_AGAIN,
    WRONG_UNITS,
)

Row = dict[str, Any]

SEEK_S = 200.0  # for what a fault has done to be found, before the next one
FACTOR, BEYOND_S = 1.5, 30.0  # decision 37
ROOM_S = 30.0  # that a rank may wait for room for a snapshot
MOUNT_S = 60.0  # that one may wait for its rows by a timeout of its own
LEAST_SHARE = 0.15  # of a step, by which a rank is slow: less may go unnoticed
LEAST_GROUP_S = 110.0  # that a group lasts with it: sums begin anew with each, and two minutes are promised
LEAST_LINK_S = 90.0  # that a link is slow: collectives are compared with those of the half minute before,
BEFORE_S = 30.0  # that a group of the same size trained before it, therefore
AGAIN = 4  # steps from a verification in which a unit is odd to the event that confirms it
REPLICAS_STEPS = 5  # until snapshots that differ are reported
STOPPED_S, DARK_S = 0.7, 5.0  # that a process may be stopped, and a node not be heard of: decision 13
BESIDE_S = 60.0  # that a keeper may be away after a fault of its own, and damage beside it not be come upon
SOUGHT = {*HANGS, *WRONG_UNITS, SLOW_RANK, SLOW_LINK, DEAD_MOUNT, FLIP_WEIGHTS}


@dataclass(frozen=True)
class Finding:
    """What became of one such fault."""

    number: int
    what: str
    found: bool | None  # None: not to be seen, or not for long enough
    says: str
    seconds: float | None = None  # until it was found
    limit: float | None = None  # that it may take; of wrong units and weights, steps
    steps: int | None = None


def find(fault: Row, records: Sequence[Row], events: Sequence[Row], rows: Sequence[Row], verify_every: int) -> Finding:
    """What became of a fault, by what the run has logged since."""
    kind = fault["kind"]
    if kind in HANGS or kind == DEAD_MOUNT:
        return _hang(fault, records, events, rows)
    if kind in (SLOW_RANK, SLOW_LINK):
        return _slow(fault, events)
    return _wrong(fault, events, verify_every)


def sought(kind: str, what: str) -> bool:
    """Whether a fault is one that something has to find; `what` is it in a plan's words."""
    return kind in SOUGHT and (kind != SLOW_LINK or option(what, "for_s", 20.0) >= LEAST_LINK_S)


def option(what: str, name: str, default: float) -> float:
    """Of a fault in a plan's words: `slow_rank rank=1 share=0.2`."""
    return float(dict(word.split("=") for word in what.split()[1:]).get(name, default))


def _hang(fault: Row, records: Sequence[Row], events: Sequence[Row], rows: Sequence[Row]) -> Finding:
    number, what, victim = fault["number"], fault["what"], _workers(fault)[0] if _workers(fault) else None
    is_mount = fault["kind"] == DEAD_MOUNT
    began = [
        each["since"]
        for each in records
        if each["record"] == "note" and each["number"] == number and each["what"] == "hangs"
    ]
    if is_mount:  # it hangs once it comes to read there, which is after this
        began = [fault["time"]]
        mine = {worker for worker in _workers(fault) if worker[0] == fault["victims"][0]["node"]}
    elif victim is not None:
        mine = {victim}
    if not began or victim is None:
        return Finding(number, what, False, "it never came to that phase")
    phase = HANGS.get(fault["kind"], "")
    usual_s = ROOM_S if phase == "snapshot" else FACTOR * _usual_s(phase, began[0], events, rows)
    limit = usual_s + BEYOND_S
    for event in events:
        is_hung = event["event"] == "suspected" and event["kind"] == "hung" and event["time"] >= began[0]
        if is_hung and (event["node"], event["pid"]) in mine:
            seconds = event["time"] - began[0]
            in_time = seconds <= limit or is_mount
            return Finding(number, what, in_time, event.get("detail", ""), seconds, None if is_mount else limit)
    if is_mount:
        return Finding(number, what, None, "no rank waited for that mount for so long")
    return Finding(number, what, False, "no process was said to hang", None, limit)


def _usual_s(phase: str, at: float, events: Sequence[Row], rows: Sequence[Row]) -> float:
    """How long a phase took at the most, as far as the logs tell."""
    if phase == "validation":
        return max((each["seconds"] for each in events if each["event"] == "validation"), default=0.0)
    groups = [each for each in events if each["event"] == "generation" and each["time"] < at]
    first: dict[int, float] = {}
    for row in rows:
        first.setdefault(row["generation"], row["time"])
    begun = {
        each["generation"]: first[each["generation"]] - each["time"] for each in groups if each["generation"] in first
    }
    if phase == "first_step":
        return max(begun.values(), default=0.0)
    return max((row["step_s"] for row in rows if row["time"] < at), default=0.0)


def _slow(fault: Row, events: Sequence[Row]) -> Finding:
    is_link = fault["kind"] == SLOW_LINK
    for_s, share = option(fault["what"], "for_s", 120.0), option(fault["what"], "share", 0.3)
    kinds = ("slow_link",) if is_link else ("slow_compute",)
    victims = {(victim["node"], victim.get("pid", 0)) for victim in fault["victims"]}
    if is_link and fault["world_size"] == 2:
        victims.add(("", 0))  # the link between two hosts is either's
    named: Row | None = None  # it may be slow by an earlier fault, and named, when this one begins
    for event in events:
        is_about = event["event"] in ("suspected", "cleared") and event["kind"] in kinds
        if event["time"] > fault["time"] + for_s or (named and event["time"] > fault["time"]):
            break
        if is_about and (event["node"], event["pid"]) in victims:
            named = event if event["event"] == "suspected" else None
    if named:
        seconds = max(0.0, named["time"] - fault["time"])
        return Finding(fault["number"], fault["what"], True, named["detail"], seconds, for_s)
    if not is_link and share < LEAST_SHARE:
        return Finding(fault["number"], fault["what"], None, f"below {LEAST_SHARE:.0%} of a step")
    if is_link and _longest_group_s(0.0, fault["time"], events, fault["world_size"]) < BEFORE_S:
        return Finding(fault["number"], fault["what"], None, "no group of that size had trained for long before")
    lasted_s = _longest_group_s(fault["time"], fault["time"] + for_s, events)
    if lasted_s < LEAST_GROUP_S:
        return Finding(fault["number"], fault["what"], None, f"no group lasted longer than {lasted_s:.0f} s with it")
    return Finding(fault["number"], fault["what"], False, f"not named within {for_s:.0f} s", None, for_s)


def _longest_group_s(begin: float, end: float, events: Sequence[Row], size: int | None = None) -> float:
    """That one group trained between two times; of groups of this `size`, where it is given."""
    groups = [each for each in events if each["event"] == "generation" and each["time"] < end]
    ends = [*(each["time"] for each in groups[1:]), end]
    lasted = [
        until - max(begin, each["time"])
        for each, until in zip(groups, ends, strict=True)
        if size in (None, each.get("world_size"))
    ]
    return max(lasted, default=0.0)


def _wrong(fault: Row, events: Sequence[Row], verify_every: int) -> Finding:
    number, what, is_weights = fault["number"], fault["what"], fault["kind"] == FLIP_WEIGHTS
    node = fault["victims"][0]["node"]
    if is_weights and (fault.get("axes") or {}).get("dp_replicate", 1) < 2:
        return Finding(number, what, None, "below what can be seen: its shard has no replica")
    limit = REPLICAS_STEPS if is_weights else verify_every + AGAIN
    for event in events:
        if event["event"] == "corruption" and event["time"] >= fault["time"] and node in event["nodes"]:
            steps = event["step"] - fault["step"]
            seconds = event["time"] - fault["time"]
            return Finding(number, what, steps <= limit, event.get("detail", ""), seconds, limit, steps)
    return Finding(number, what, False, "no corruption was found", None, limit)


def is_borne(fault: Row, records: Sequence[Row]) -> bool:
    """Whether a fault is none for which a process may be given up: it is slow, or away for a moment alone."""
    kind, what = fault["kind"], fault["what"]
    if kind == "slow_worker":
        planned_s = option(what, "share", 0.5) * option(what, "period_s", 0.4)
        noted_s = [each["longest_s"] for each in records if _is_note(each, AT_ITS_SPEED, fault["number"])]
        return max(noted_s, default=planned_s) <= STOPPED_S
    if kind == "blink_node":
        return _away_s(fault, records) <= DARK_S
    return bool(kind == SLOW_RANK)


def _away_s(fault: Row, records: Sequence[Row]) -> float:
    """For how long a node was cut off at a stretch, by this fault and by others of its kind; for good where Ray gave it
    up."""
    node, stretches = fault["victims"][0]["node"], list[tuple[float, float]]()
    for each in records:
        if each["record"] == "note" and each["what"] == "node gone" and each["node"] == node and "another" in each:
            return inf
    for each in records:
        if each["record"] == "fault" and each["kind"] == fault["kind"] and each["victims"][0]["node"] == node:
            healed = [note["time"] for note in records if _is_note(note, WHOLE_AGAIN, each["number"])]
            begin, end = each["time"], max(healed, default=each["time"] + option(each["what"], "for_s", 4.0))
            if stretches and begin <= stretches[-1][1]:
                begin, end = stretches[-1][0], max(end, stretches.pop()[1])
            stretches.append((begin, end))
    return next(end - begin for begin, end in stretches if begin <= fault["time"] <= end)


def _is_note(record: Row, what: str, number: int) -> bool:
    return bool(record["record"] == "note" and record["what"] == what and record["number"] == number)


def refused(fault: Row, faults: Sequence[Row], events: Sequence[Row]) -> bool | None:
    """Whether what a fault damaged in memory was refused by a rank that came upon it; None: none had to, as far as logs
    tell.

    The next group has to where it begins from that very step, out of memory, and a rank of it on that node wants what
    is damaged there: each reads its own node's memory first.
    """
    damage = fault["victims"][0]
    node, step = damage["node"], damage.get("step")
    names = [f"{node[:12]}/{file}: " for file in damage["files"]]
    for event in events:
        is_about = event["event"] in ("snapshot_damaged", "snapshot_unreadable") and event["time"] >= fault["time"]
        is_about = is_about and event["step"] == step and "checksum" in event["detail"]
        if is_about and any(name in event["detail"] for name in names):
            return True
    forming = {each["generation"]: each["time"] for each in events if each["event"] == "forming"}
    later = [
        each
        for each in events
        if each["event"] == "generation" and forming.get(each["generation"], each["time"]) > fault["time"]
    ]
    if not later or later[0].get("start_step") != step or later[0].get("source") != "snapshot":
        return None
    is_wanted = _is_wanted(damage, later[0]) and not _is_keeper_away(node, fault, faults, later[0]["time"])
    return False if is_wanted else None


def _is_wanted(damage: Row, group: Row) -> bool:
    """Whether ranks of a group need elements of what is damaged on their node: of tensors that are sharded alone, each
    rank has its share of all."""
    axes = (damage["axes"], group.get("axes") or {})
    if any(each.get(axis, 1) > 1 for each in axes for axis in ("pp", "dp_replicate", "tp")):
        return False
    before, now = (prod(each.values()) for each in axes)
    here = [rank for rank, worker in enumerate(group["workers"]) if worker["node"] == damage["node"]]
    return any(
        theirs * now < (mine + 1) * before and mine * before < (theirs + 1) * now
        for mine in here
        for theirs in damage["ranks"]
    )


def _is_keeper_away(node: str, fault: Row, faults: Sequence[Row], until: float) -> bool:
    """Whether another fault befell a node's keeper, or all of the node: what it holds may be unknown for a while."""
    return any(
        victim["what"] in ("keeper", "node") and victim.get("node") == node
        for other in faults
        if other["number"] != fault["number"] and fault["time"] - BESIDE_S < other["time"] < until
        for victim in other["victims"]
    )


def _workers(fault: Row) -> list[tuple[str, int]]:
    return [(each["node"], each["pid"]) for each in fault["victims"] if each["what"] == "worker"]
