"""What a drill has shown: a verdict for each promise, from logs alone. Pure.

Each rule recomputes what it judges from the rows, the events and the drill's own record, with code that shares nothing
with what it judges.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from regrow.drill.faults import DEAD_MOUNT, KINDS, LOOK
from regrow.drill.findings import AGAIN, Finding, find, is_borne, refused, sought

Row = dict[str, Any]

LOSS_TOLERANCE = 1e-5  # in fp32, where reduction order alone may tell
LEDGER_TOLERANCE = 0.01  # of wall time
FEW_STEPS = 20  # of the full size, below which their median is not judged
HOLD_NOTHING = ("stop_keeper", "restart_raylet")  # and lose no node
AWAKE_S = 1.0  # of a keeper that was stopped, to take in the snapshots that wait for it
EXPLAINS_S = 120.0  # a failure of a group that never trained is put down to a fault of so long before
EVICTIONS = ("worker_died", "worker_hung", "node_silent")
_NAMES_A_RANK = re.compile(r"(?i)(?:^|[^a-z])(?:rank|world|worker|replica|shard|peer)s?[-_.=]?\d|\d[-_]of[-_]\d")
_TENSORBOARDS = re.compile(r"events\.out\.tfevents\.[^/]*$")  # the host's name stands in it
# g<generation>-<random token>, and a number where one writer has several files
_IN_A_STEP = re.compile(
    r"COMMIT|g\d{6,}-[0-9a-f]{8,}(?:-\d+)?\.safetensors|g\d{6,}-[0-9a-f]{8,}\.(?:index\.json|metadata)"
)


@dataclass(frozen=True)
class Verdict:
    """Whether something that was promised held; None: it could not be judged."""

    promise: str  # its number in the design, or empty
    claim: str
    holds: bool | None
    figures: str
    details: tuple[str, ...] = ()  # the first few cases against it


@dataclass(frozen=True)
class Outcome:
    """What came of one fault."""

    number: int
    what: str
    time: float
    step: int
    ranks_before: int
    ranks_after: int | None = None  # of the next generation that it brought about; None: it brought about none
    seconds: float | None = None  # from the fault to the first step of that generation
    generation: int | None = None  # its number; several faults may have one together
    lost_steps: int = 0  # by it, whatever brought it about
    source: str = ""  # of that generation's state
    grows: bool = False  # a node came: training goes on until it joins


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint of the run, read whole."""

    step: int
    cursor: int | None
    problem: str
    committed: bool = True


@dataclass(frozen=True)
class Evidence:
    """All that a verdict is made of. Rows and events stand as in their files, `records` as in drill.jsonl."""

    rows: Sequence[Row]
    events: Sequence[Row]
    records: Sequence[Row]
    num_faults: int  # of the plan
    last_step: int  # at which the run was to end
    most_lost: int  # steps, by one failure
    seqs_per_step: int
    tokens_per_step: int
    digests: Sequence[str] = ()  # what they must be, of step 1, 2, ...
    reference: Sequence[Row] = ()  # rows of an undisturbed run
    compared_steps: int = 100
    bound: str = "snapshot.every_steps"  # the setting that says so
    copies: int = 1  # snapshot.copies
    verify_every: int = 0  # cluster.verify_every_steps
    names: Sequence[str] = ()  # of every file in the run folder, and of every file in the nodes' memory
    keys: Sequence[str] = ()  # in the checkpoints' indexes
    checkpoints: Sequence[Checkpoint] = ()
    report: Row = field(default_factory=dict)
    bands: Sequence[tuple[float, float, str]] = ()  # the ledger's: from, to, state


def judge(evidence: Evidence) -> list[Verdict]:
    """Every verdict, in the order of the promises."""
    rules: list[Callable[[Evidence], Verdict]] = [
        _same_batches,
        _same_loss,
        _each_sample_once,
        _no_ranks_in_names,
        _committed_is_whole,
        _survivors_stay,
        _old_generations_cannot_write,
        _every_second_is_accounted,
        _goodput_by_hand,
        _effective_by_hand,
        _standstills_are_named,
        _few_steps_lost,
        _no_false_eviction,
        _nothing_left,
        _by_itself,
    ]
    if any(sought(fault["kind"], fault["what"]) for fault in _named(evidence.records, "fault")):
        rules.append(_all_is_found)
    if any(fault["kind"] == "corrupt_snapshot" for fault in _named(evidence.records, "fault")):
        rules.append(_damage_is_refused)
    return [rule(evidence) for rule in rules]


def outcomes(records: Sequence[Row], rows: Sequence[Row], events: Sequence[Row]) -> list[Outcome]:
    """What came of each fault, in order; where later faults took its rows back, as it was recorded then."""
    faults = _named(records, "fault")
    recorded = {line["number"]: line["seconds"] for line in _named(records, "outcome")}
    generations = _named(events, "generation", key="event")
    found = []
    for fault in faults:
        after = [later for later in faults if later["number"] > fault["number"] and later.get("when") != "at once"]
        until = after[0]["time"] if after else math.inf
        grows = KINDS[fault["kind"]].nodes > 0
        broken = [
            event["time"]
            for event in events
            if event["event"] in ("failure", "submitted") and fault["time"] <= event["time"] < until
        ]
        begun = min(broken, default=math.inf)
        if grows or (fault["kind"] == "drain_node" and not broken):  # a rank that leaves in good order is no failure
            begun = fault["time"]
        later = [g for g in generations if g["time"] > begun and (g["cause"] == "grow") == grows]
        outcome = Outcome(
            fault["number"], fault["what"], fault["time"], fault["step"], fault["world_size"], grows=grows
        )
        if later:
            first = next((row["time"] for row in rows if row["generation"] == later[0]["generation"]), None)
            outcome = replace(
                outcome,
                ranks_after=later[0]["world_size"],
                seconds=recorded.get(fault["number"]) if first is None else first - fault["time"],
                generation=later[0]["generation"],
                lost_steps=later[0].get("recomputed_steps", 0),
                source=later[0].get("source", ""),
            )
        found.append(outcome)
    return found


def _same_batches(evidence: Evidence) -> Verdict:
    claim = "the batches are those of an undisturbed run, step by step"
    if not evidence.digests:
        return Verdict("1", claim, None, "the order was not computed")
    expected = dict(enumerate(evidence.digests, start=1))
    wrong = [
        f"step {row['step']}: {row['batch_digest']}, not {expected.get(row['step'])}"
        for row in evidence.rows
        if row["batch_digest"] != expected.get(row["step"])
    ]
    figures = f"{len(evidence.rows) - len(wrong):,} of {len(evidence.rows):,} digests equal"
    return _verdict("1", claim, wrong, figures, seen=len(evidence.rows))


def _same_loss(evidence: Evidence) -> Verdict:
    claim = f"fp32 losses within {LOSS_TOLERANCE:g} of an undisturbed run's over {evidence.compared_steps} steps"
    if not evidence.reference:
        return Verdict("1", claim, None, "there is no undisturbed run to compare with (drill.reference=false)")
    reference = {row["step"]: row["loss"] for row in evidence.reference}
    differences = {
        row["step"]: _distance(row["loss"], reference[row["step"]]) for row in evidence.rows if row["step"] in reference
    }
    near = {step: each for step, each in differences.items() if step <= evidence.compared_steps}
    far = {step: each for step, each in differences.items() if step > evidence.compared_steps}
    wrong = [f"step {step}: differs by {each:.2e}" for step, each in near.items() if not each <= LOSS_TOLERANCE]
    figures = f"{len(near)} compared, largest difference {max(near.values(), default=0.0):.1e}"
    if far:
        figures += f"; of the {len(far)} beyond, which reduction order tells apart, {max(far.values()):.1e}"
    return _verdict("1", claim, wrong, figures, seen=len(near))


def _each_sample_once(evidence: Evidence) -> Verdict:
    claim = "each step is there once, in order, and the cursor is contiguous"
    wrong = [
        f"line {number}: step {row['step']} with {row['tokens_seen']} tokens"
        for number, row in enumerate(evidence.rows, start=1)
        if row["step"] != number or row["tokens_seen"] != number * evidence.tokens_per_step
    ]
    wrong += [
        f"checkpoint of step {each.step}: cursor {each.cursor}"
        for each in evidence.checkpoints
        if each.cursor is not None and each.cursor != each.step * evidence.seqs_per_step
    ]
    redone = sum(event["steps"] for event in _named(evidence.events, "rollback", key="event"))
    figures = (
        f"{len(evidence.rows):,} steps, cursor {len(evidence.rows) * evidence.seqs_per_step:,}; {redone} steps redone"
    )
    return _verdict("2", claim, wrong, figures, seen=len(evidence.rows))


def _no_ranks_in_names(evidence: Evidence) -> Verdict:
    claim = "nothing that is stored is named after a rank or their number"
    ours = [_TENSORBOARDS.sub("", name) for name in [*evidence.names, *evidence.keys]]
    wrong = [name for name in ours if _NAMES_A_RANK.search(name)]
    for name in evidence.names:
        parts = name.split("/")
        if parts[0] == "checkpoints" and len(parts) == 3 and not _IN_A_STEP.fullmatch(parts[2]):
            wrong.append(name)
    figures = f"{len(evidence.names):,} files, {len(set(evidence.keys)):,} keys"
    return _verdict("3", claim, wrong, figures, seen=len(evidence.names))


def _committed_is_whole(evidence: Evidence) -> Verdict:
    committed = [each for each in evidence.checkpoints if each.committed]
    wrong = [f"step {each.step}: {each.problem}" for each in committed if each.problem]
    figures = f"{len(committed) - len(wrong)} of {len(committed)} checkpoints sound, every byte checked"
    return _verdict("4", "every committed checkpoint can be restored", wrong, figures, seen=len(committed))


def _survivors_stay(evidence: Evidence) -> Verdict:
    befallen = {process for fault in _excusing(evidence.records) for process in _processes(fault)}
    went = {note["node"]: note["time"] for note in reversed(_notes(evidence.records, "node gone"))}  # its first
    quarantined_until = dict[str, float]()  # by node, whose ranks leave as soon as others take their places
    wrong, kept, changes = [], 0, 0
    before: Row | None = None
    for event in evidence.events:
        if event["event"] == "submitted":
            before = None
        elif event["event"] == "quarantine":
            quarantined_until[event["node"]] = event["time"] + event["seconds"]
        elif event["event"] == "generation":
            if before is not None:
                changes += 1
                here = {(worker["node"], worker["pid"]) for worker in event["workers"]}
                for rank, worker in enumerate(before["workers"]):
                    if (worker["node"], worker["pid"]) in here:
                        kept += 1
                    elif (worker["node"], worker["pid"]) in befallen or event["time"] <= quarantined_until.get(
                        worker["node"], -math.inf
                    ):
                        continue
                    elif went.get(worker["node"], event["time"]) >= event["time"]:
                        wrong.append(
                            f"generation {before['generation']} -> {event['generation']}: rank {rank}, pid "
                            f"{worker['pid']}, is gone, and nothing had befallen it"
                        )
            before = event
    figures = f"{changes} changes of the group, {kept} times a rank kept its process, {len(wrong)} times one lost it"
    return _verdict("5", "survivors keep their processes", wrong, figures)


def _old_generations_cannot_write(evidence: Evidence) -> Verdict:
    wrong = []
    for name, lines in (("row", evidence.rows), ("event", evidence.events)):
        newest = 0
        for line in lines:
            generation = line.get("generation")
            if generation is None:
                continue
            if generation < newest:
                what = f"of step {line['step']}" if name == "row" else line["event"]
                wrong.append(f"{name} {what} of generation {generation} behind one of {newest}")
            newest = max(newest, generation)
    woken = sum(note.get("processes", 0) for note in _notes(evidence.records, "continued"))
    figures = f"{len(evidence.rows):,} rows, {len(evidence.events):,} events; {woken} processes that woke up late"
    return _verdict("6", "no row or event of an older generation after a newer one's", wrong, figures)


def _every_second_is_accounted(evidence: Evidence) -> Verdict:
    claim = f"the ledger's states add up to wall time, to {LEDGER_TOLERANCE:.0%}"
    begin, end = _wall(evidence.events)
    wall_s, states = end - begin, evidence.report.get("time_s", {})
    total = math.fsum(states.values())
    off = abs(total - wall_s) / wall_s if wall_s > 0 else math.inf
    unexplained = states.get("other", 0.0) / wall_s if wall_s > 0 else 0.0
    figures = f"{total:,.2f} s in states, {wall_s:,.2f} s of wall time; {unexplained:.1%} in 'other'"
    unnamed = [event for event in _named(evidence.events, "failure", key="event") if not event.get("cause")]
    wrong = [figures] if not off <= LEDGER_TOLERANCE else []
    wrong += [f"a failure at {event['time']:.1f} has no cause" for event in unnamed]
    return _verdict("8", claim, wrong, figures)


def _goodput_by_hand(evidence: Evidence) -> Verdict:
    """Sum over the rows that count of what a step did not wait, over the time from the submission to the end."""
    begin, end = _wall(evidence.events)
    useful, last = 0.0, begin
    for row in evidence.rows:
        step_s = min(row["step_s"], row["time"] - last)
        useful += max(0.0, step_s - row["data_wait_s"] - row["snapshot_s"])
        last = row["time"]
    by_hand = useful / (end - begin) if end > begin else math.nan
    reported = evidence.report.get("goodput") or math.nan
    figures = f"reported {reported:.4f}, by hand {by_hand:.4f}"
    wrong = [] if abs(reported - by_hand) <= LEDGER_TOLERANCE else [figures]
    return _verdict("8", "the goodput is the one recomputed from the rows", wrong, figures)


def _effective_by_hand(evidence: Evidence) -> Verdict:
    """Each row that counts is worth the median step of the full size: no group's first, and none while slow."""
    claim = "effective is the one recomputed from the rows"
    begin, end = _wall(evidence.events)
    jobs = [event for event in _named(evidence.events, "submitted", key="event") if event.get("max_workers")]
    asked = {event["max_workers"] for event in jobs}
    reported = evidence.report.get("effective")
    slow, since = [], {}
    for event in evidence.events:
        key = event.get("kind"), event.get("node"), event.get("pid")
        if event["event"] == "suspected" and str(event.get("kind")).startswith("slow"):
            since[key] = event.get("since") or event["time"]
        elif event["event"] == "cleared" and key in since:
            slow.append((since.pop(key), event["time"]))
        elif event["event"] in ("submitted", "coordinator_restarted"):
            slow += [(at, event["time"]) for at in since.values()]
            since = {}
    slow += [(at, math.inf) for at in since.values()]
    took, before = [], None
    for row in evidence.rows:
        quick = not any(first <= row["time"] <= last for first, last in slow)
        if row["world_size"] in asked and row["generation"] == before and quick:
            took.append(max(0.0, row["step_s"] - row["data_wait_s"] - row["snapshot_s"]))
        before = row["generation"]
    if len(asked) != 1 or len(took) < FEW_STEPS or reported is None or end <= begin:
        figures = f"{len(took)} undisturbed steps of the full size"
        return Verdict("8", claim, None, figures)
    by_hand = median(took) * len(evidence.rows) / (end - begin)
    figures = f"reported {reported:.4f}, by hand {by_hand:.4f}"
    wrong = [] if abs(reported - by_hand) <= LEDGER_TOLERANCE else [figures]
    return _verdict("8", claim, wrong, figures)


def _standstills_are_named(evidence: Evidence) -> Verdict:
    """Between a fault and the first step of the group that it brought about, the ledger knows what it waits for."""
    begin, end = _wall(evidence.events)
    standing, unnamed = 0.0, 0.0
    for outcome in outcomes(evidence.records, evidence.rows, evidence.events):
        if outcome.seconds is None or outcome.grows:
            continue
        standing += outcome.seconds
        for since, until, state in evidence.bands:
            overlap = min(until, outcome.time + outcome.seconds) - max(since, outcome.time)
            unnamed += max(0.0, overlap) if state == "other" else 0.0
    wrong = [f"{unnamed:.1f} s of them are in 'other'"] if unnamed > LEDGER_TOLERANCE * (end - begin) else []
    figures = f"{standing:.1f} s from faults to first steps, {unnamed:.1f} s of them in 'other'"
    return _verdict("8", "what training stands still for is named", wrong, figures)


def _few_steps_lost(evidence: Evidence) -> Verdict:
    claim = f"a failure costs at most {evidence.bound}={evidence.most_lost} steps"
    faults = [fault for fault in _named(evidence.records, "fault") if fault["kind"] != LOOK]
    failed = _named(evidence.events, "failure", key="event")
    corrupted_at = [event["time"] for event in failed if event.get("cause") == "corrupted"]
    wrong, lost, most = list[str](), 0, 0
    last, nodes = -math.inf, set[str]()  # of the group before
    for event in _named(evidence.events, "generation", key="event"):
        own = [fault for fault in faults if last < fault["time"] <= event["time"]]
        lost_at_once, copies = _holders_lost(own), min(evidence.copies, max(1, len(nodes) - 1))
        nodes = {worker["node"] for worker in event["workers"]} or nodes
        is_corrupted = event["cause"] == "corrupted" or any(last < at <= event["time"] for at in corrupted_at)
        steps, held_from = event.get("recomputed_steps", 0), _held_up_from(evidence, own, last, event["time"])
        trained_to, last = event.get("start_step", 0) + steps, event["time"]
        lost, most = lost + steps, max(most, steps)
        if is_corrupted:  # back to what was verified before, whatever else failed
            wrong += [f"generation {event['generation']} took back {steps} steps"] * (
                steps > 2 * evidence.verify_every + AGAIN
            )
        elif lost_at_once <= copies and steps > evidence.most_lost * max(1, len(own)) + max(0, trained_to - held_from):
            source = event.get("source", "?")
            wrong.append(f"generation {event['generation']} took back {steps} steps, its state from the {source}")
    return _verdict("", claim, wrong, f"{lost} steps lost over {len(failed)} failures, at most {most} at once")


def _held_up_from(evidence: Evidence, own: Sequence[Row], since: float, until: float) -> float:
    """The step at which a keeper was stopped that was still so, or ran for less than AWAKE_S, as the first other fault
    came: training waits five seconds for its snapshots, and goes on without. Infinity where there was none."""
    failures = [each for each in _named(evidence.events, "failure", key="event") if since < each["time"] <= until]
    causes = [fault for fault in own if fault["kind"] != "stop_keeper"] or failures
    failed_at = min((each["time"] for each in causes), default=until)
    woken = {note["number"]: note["time"] + AWAKE_S for note in _notes(evidence.records, "continued")}
    stopped = [each for each in own if each["kind"] == "stop_keeper" and woken.get(each["number"], until) > failed_at]
    return min((fault["step"] for fault in stopped), default=math.inf)


def _no_false_eviction(evidence: Evidence) -> Verdict:
    faults = _excusing(evidence.records)
    groups = {each["generation"]: each["members"] for each in _named(evidence.events, "forming", key="event")}
    groups |= {each["generation"]: each["workers"] for each in _named(evidence.events, "generation", key="event")}
    evictions = [e for e in _named(evidence.events, "failure", key="event") if e.get("cause") in EVICTIONS]
    went = _notes(evidence.records, "node gone")
    wrong = []
    for event in evictions:
        earlier = [fault for fault in faults if fault["time"] <= event["time"]]
        workers = groups.get(event.get("generation"), [])
        gone = [workers[rank] for rank in event.get("ranks") or [] if rank < len(workers)]
        if gone:
            befallen = {process for fault in earlier for process in _processes(fault)}
            nodes = {node for fault in earlier for node in _nodes_taken(fault)}
            nodes |= {note["node"] for note in went if note["time"] <= event["time"]}
            explained = all(each["node"] in nodes or (each["node"], each["pid"]) in befallen for each in gone)
        else:
            explained = any(event["time"] - fault["time"] < EXPLAINS_S for fault in earlier)
        if not explained:
            wrong.append(f"generation {event.get('generation')}: {event['cause']}, {event.get('detail', '')}")
    figures = f"{len(evictions)} deaths and evictions, {len(evictions) - len(wrong)} explained by {len(faults)} faults"
    return _verdict("", "no living process is taken for dead", wrong, figures)


def _nothing_left(evidence: Evidence) -> Verdict:
    claim = "no process, actor, placement group, port or file in memory is left behind"
    looks = _named(evidence.records, "left")
    wrong = [str(each) for look in looks for each in look["found"]]
    return _verdict("", claim, wrong, f"{len(wrong)} things in {len(looks)} looks", seen=len(looks))


def _by_itself(evidence: Evidence) -> Verdict:
    faults, ended = _named(evidence.records, "fault"), _named(evidence.records, "job ended")
    by_hand = [f"the job ended by itself: {each['detail']}" for each in ended if each["unexpected"]]
    missed = [
        f"fault {each['number']}, {each['what']}: {each['why']}" for each in _named(evidence.records, "not injected")
    ]
    last = evidence.rows[-1]["step"] if evidence.rows else 0
    short = [] if last >= evidence.last_step else [f"training is at step {last} of {evidence.last_step}"]
    if len(faults) + len(missed) < evidence.num_faults:
        short.append(f"{len(faults)} of {evidence.num_faults} faults so far")
    came = outcomes(evidence.records, evidence.rows, evidence.events)
    seconds = [each.seconds for each in came if each.seconds and not each.grows]
    back = f"; back after {median(seconds):.1f} s ({min(seconds):.1f} to {max(seconds):.1f})" if seconds else ""
    figures = f"{len(faults)} of {evidence.num_faults} faults, step {last} of {evidence.last_step}{back}"
    claim = "the run goes on after every fault and to its end, without a manual action"
    return _verdict("", claim, [*by_hand, *missed, *short], figures)


def _all_is_found(evidence: Evidence) -> Verdict:
    """Each by the event that names it, with its process or host; and of those that did not suffer, none is named."""
    claim = "what hangs, is slow or computes wrong is found in time, and nothing else is said to"
    faults = [fault for fault in _named(evidence.records, "fault") if sought(fault["kind"], fault["what"])]
    found = [find(each, evidence.records, evidence.events, evidence.rows, evidence.verify_every) for each in faults]
    wrong = [f"fault {each.number}, {each.what}: {each.says}{_late(each)}" for each in found if each.found is False]
    accused, slow = 0, 0
    for event in _named(evidence.events, "suspected", key="event"):
        earlier = [fault for fault in _named(evidence.records, "fault") if fault["time"] <= event["time"]]
        explained = any(event["node"] == victim.get("node") for fault in earlier for victim in fault["victims"])
        if event["kind"] in ("hung", "corrupt") and not explained:
            wrong.append(f"{event['kind']}: process {event['pid']} on node {event['node'][:12]}, which nothing befell")
        accused += event["kind"] in ("hung", "corrupt")
        slow += event["kind"].startswith("slow_") and not explained
    unseen = sum(each.found is None for each in found)
    figures = f"{sum(each.found is True for each in found)} of {len(found)} found, {unseen} not to be seen"
    figures += f"; {accused} said to hang or to be wrong; {slow} said to be slow that no fault had befallen"
    return _verdict("", claim, wrong, figures, seen=len(found))


def _damage_is_refused(evidence: Evidence) -> Verdict:
    claim = "what is damaged in memory is refused by those that come upon it"
    faults = _named(evidence.records, "fault")
    found = {
        fault["number"]: refused(fault, faults, evidence.events)
        for fault in faults
        if fault["kind"] == "corrupt_snapshot"
    }
    wrong = [f"fault {number}: no rank said so" for number, was_refused in found.items() if was_refused is False]
    needed = [was_refused for was_refused in found.values() if was_refused is not None]
    figures = f"{sum(needed)} of {len(needed)} refused, {len(found) - len(needed)} not come upon"
    return _verdict("", claim, wrong, figures) if needed else Verdict("", claim, None, figures)


def _late(found: Finding) -> str:
    if found.steps is not None:
        return f", after {found.steps} steps of {found.limit:.0f}"
    return f", after {found.seconds:.0f} s of {found.limit:.0f}" if found.seconds and found.limit else ""


def _verdict(promise: str, claim: str, wrong: Sequence[str], figures: str, *, seen: int | None = None) -> Verdict:
    """Holds where nothing speaks against it, and there was something to `see`."""
    more = [f"and {len(wrong) - 5} more"] if len(wrong) > 5 else []
    nothing = ["there was nothing to judge"] if seen == 0 else []
    return Verdict(promise, claim, not wrong and not nothing, figures, (*wrong[:5], *more, *nothing))


def _wall(events: Sequence[Row]) -> tuple[float, float]:
    times = [event["time"] for event in events if event["event"] in ("submitted", "stopped")]
    return (min(times), max(event["time"] for event in events)) if times else (0.0, 0.0)


def _processes(fault: Row) -> list[tuple[str, int]]:
    """Node and pid of workers that a fault befell: on hosts apart, each has pids of its own."""
    return [(victim["node"], victim["pid"]) for victim in fault["victims"] if victim["what"] == "worker"]


def _excusing(records: Sequence[Row]) -> list[Row]:
    """The faults for which a process may be given up."""
    return [fault for fault in _named(records, "fault") if fault["kind"] != LOOK and not is_borne(fault, records)]


def _holders_lost(faults: Sequence[Row]) -> int:
    """How many nodes held nothing for others when a group ended: those that went, and those whose keepers stood."""
    gone = [fault for fault in faults if KINDS[fault["kind"]].nodes < 0]
    kept = [victim for fault in faults if fault["kind"] in HOLD_NOTHING for victim in fault["victims"]]
    return len(gone) + len({victim["node"] for victim in kept if "node" in victim and victim["what"] != "new node"})


def _nodes_taken(fault: Row) -> list[str]:
    """With all that came to be on them: a worker that waited for a group is no victim by its pid."""
    takes = KINDS[fault["kind"]].nodes < 0 or fault["kind"] in (DEAD_MOUNT, "restart_raylet")
    return [victim["node"] for victim in fault["victims"] if takes and victim["what"] == "node"]


def _named(lines: Sequence[Row], name: str, *, key: str = "record") -> list[Row]:
    return [line for line in lines if line.get(key) == name]


def _notes(records: Sequence[Row], what: str) -> list[Row]:
    return [note for note in _named(records, "note") if note["what"] == what]


def _distance(loss: float | None, other: float | None) -> float:
    differ = abs(loss - other) if loss is not None and other is not None else math.inf
    return differ if math.isfinite(differ) else math.inf
