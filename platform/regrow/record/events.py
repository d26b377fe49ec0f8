"""What can happen to a run: every event of events.jsonl as a dataclass, with its fields, its causes and its words.

`to_row` is the line in events.jsonl, `from_row` reads one back, whichever version wrote it: fields that this version
does not know are kept in `more`, and a line that lacks what its event needs becomes `Unknown`. Names ending in `_s` are
seconds, times are unix seconds. The table in docs/file-formats.md says when each is written. Pure.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, ClassVar

Row = dict[str, Any]
SHOWN_NODES = 3  # in a sentence, by their ids


class Cause(StrEnum):
    """Why a group was formed, and why the one before it ended. A failure's cause is also that of the next group."""

    start = "start"
    resume = "resume"
    worker_died = "worker_died"
    worker_failed = "worker_failed"
    worker_hung = "worker_hung"
    node_silent = "node_silent"
    controller_died = "controller_died"
    nonfinite = "nonfinite"
    corrupted = "corrupted"
    grow = "grow"
    drain = "drain"
    end_of_float8 = "end_of_float8"
    # no event has these two: a job of which the next one finds that it ended, a group that nothing has followed yet
    driver_died = "driver_died"
    unfinished = "unfinished"


CAUSE_WORDS: dict[str, str] = {
    Cause.start: "started",
    Cause.resume: "resumed",
    Cause.worker_died: "a worker died",
    Cause.worker_failed: "a worker failed",
    Cause.worker_hung: "a worker hung",
    Cause.node_silent: "a node fell silent",
    Cause.controller_died: "Ray Train's controller died",
    Cause.nonfinite: "gradients are not finite",
    Cause.corrupted: "a unit computed wrong",
    Cause.grow: "grew",
    Cause.drain: "left draining nodes",
    Cause.end_of_float8: "went on in bfloat16",
    Cause.driver_died: "the job ended without a word",
    Cause.unfinished: "not yet back",
}
SUSPICIONS: dict[str, str] = {
    "slow_compute": "computes slowly",
    "slow_data": "waits for data",
    "slow_copy": "copies snapshots slowly",
    "slow_link": "slow links",
    "hung": "hangs",
    "corrupt": "computes something else than the others",
    "differing": "computes something else than its pair",
}
OF_RANKS = ("slow_compute", "slow_data", "slow_copy")  # suspicions that a rank takes along into the next group
GRACEFUL = (Cause.grow, Cause.drain, Cause.end_of_float8)  # the whole group left together, to form anew
FAILURES = (
    Cause.worker_died,
    Cause.worker_failed,
    Cause.worker_hung,
    Cause.node_silent,
    Cause.controller_died,
    Cause.nonfinite,
    Cause.corrupted,
)


class FaultKind(StrEnum):
    """What it was that failed, as far as is known where a failure is noticed; `node_lost` events may say more later."""

    gpu = "gpu"  # its driver has reported a fault of the hardware, or the error is CUDA's
    network = "network"  # the node's links were slow, or its process goes on and is not reached
    host = "host"  # the node is dead, or silent
    software = "software"  # a process alone
    hang = "hang"
    sdc = "sdc"  # it computed wrong, silently


class WhyStorage(StrEnum):
    """Why a checkpoint in storage, not a snapshot in the nodes' memory, was where a group's state came from."""

    off = "off"  # snapshot.every_steps=0
    started = "started"  # another job of the run: no node held anything
    none_committed = "none_committed"  # since the job began
    discarded = "discarded"  # what was in memory had gone wrong: not finite, or corrupted
    copies_lost = "copies_lost"  # nodes went that held a shard and all its copies
    unreadable = "unreadable"  # it was there, and a rank could not read it
    older = "older"  # than what was in storage


def suspicion_words(kind: str) -> str:
    return SUSPICIONS.get(kind) or kind.replace("_", " ")


def cause_words(cause: object) -> str:
    """A cause in words, also one of another version."""
    return CAUSE_WORDS.get(str(cause)) or str(cause).replace("_", " ")


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened to a run."""

    name: ClassVar[str] = ""  # as in events.jsonl: the class' name in lower case
    words: ClassVar[str] = ""  # the sentence, a format of the event

    time: float = 0.0  # when it happened; 0: now, which the log fills in
    more: Row = field(default_factory=dict)  # fields that this version does not know

    def __init_subclass__(cls) -> None:
        cls.name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower()
        EVENTS[cls.name] = cls

    def to_row(self) -> Row:
        """The line of events.jsonl. What is None is left out."""
        own = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in ("time", "more")}
        told = {key: value for key, value in own.items() if value is not None}
        return {"time": self.time, "event": self.name} | told | self.more

    def sentence(self) -> str | None:
        """One line for people; None for an event that need not be seen live."""
        return self.words.format(self) or None

    @property
    def title(self) -> str:
        return self.name.replace("_", " ")

    @property
    def of_group(self) -> bool:
        """Whether it is worth a look as long as the group that met it."""
        return isinstance(self, GroupIncident)

    @property
    def written_at(self) -> float:
        """When the log took it, unix time, as far as it says."""
        return self.time


EVENTS: dict[str, type[Event]] = {}


class Incident(Event):
    """An event that needs a look; alerts count them by kind."""


class GroupIncident(Incident):
    """An incident that holds as long as the group that met it."""


del EVENTS["incident"], EVENTS["group_incident"]  # kinds of events


@dataclass(frozen=True, kw_only=True)
class Unknown(Event):
    """An event of another version."""

    said: str  # its name

    @property
    def of_group(self) -> bool:
        return issubclass(EVENTS.get(self.said, Event), GroupIncident)

    def to_row(self) -> Row:
        return {"time": self.time, "event": self.said} | self.more

    @property
    def title(self) -> str:
        return self.said.replace("_", " ")


del EVENTS["unknown"]


# the life of a run and of its groups


@dataclass(frozen=True, kw_only=True)
class Submitted(Event):
    """A job of this run was started: what, where and by which command."""

    run_id: str | None = None  # the run's, random
    job: str | None = None  # this job's, random: by it a coordinator that is restarted knows its own past
    host: str | None = None  # name of the driver's machine
    pid: int | None = None  # the driver's
    ray: str | None = None  # address of its Ray cluster's head
    min_workers: int | None = None  # cluster.min_workers
    max_workers: int | None = None  # cluster.max_workers
    git: str | None = None  # commit, with -dirty where tracked files differ
    versions: dict[str, str] | None = None  # of Python and libraries
    command: str | None = None  # as it was typed
    geometry: list[str] | None = None  # lines that say how the batch is split
    heard_at: float | None = None  # time of the newest row before it, which the log fills in
    logged_at: float | None = None  # when the log took it, which that fills in: `time` is the command's

    @property
    def written_at(self) -> float:
        return self.logged_at or self.time


@dataclass(frozen=True, kw_only=True)
class Forming(Event):
    """A group gets its number; its members join."""

    generation: int  # its number
    members: list[Row] = field(default_factory=list)  # by rank: id node host pid lifeline gpu machine started gpu_uuid
    ports: str | None = None  # where they are met in this generation; see `control.past.formed`


@dataclass(frozen=True, kw_only=True)
class Generation(Event):
    """A group is ready for its first step. It began to form `init_s + restore_s` before."""

    generation: int  # its number
    world_size: int  # ranks
    start_step: int  # steps done before
    cause: str  # why it was formed: a Cause
    axes: dict[str, int] | None = None  # of the mesh, outermost first: pp dp_replicate dp_shard cp tp
    source: str | None = None  # where its state came from: seed, snapshot (the nodes' memory), checkpoint
    source_reason: str | None = None  # of a checkpoint: a WhyStorage
    verified_step: int | None = None  # the newest whose state was verified then, where units verify each other
    recomputed_steps: int | None = None  # steps that are to be done again
    init_s: float | None = None  # forming the group and building the model
    restore_s: float | None = None  # loading the state
    startup_s: dict[str, float] | None = None  # phase -> seconds: what driver and workers did before
    workers: list[Row] | None = None  # by rank: host node pid device graphs lowered
    peak_flops: float | None = None  # FLOP/s of one rank's device, which MFU is taken of
    peak_source: str | None = None  # where that is known from
    regrow: str | None = None  # folder of the code that rank 0 runs

    def sentence(self) -> str:
        ranks = f"{self.world_size} rank{'s' if self.world_size != 1 else ''}"
        mfu = ""
        if self.peak_flops:
            mfu = f"; MFU: 6N + 12LHQT FLOPs a token over {self.peak_flops / 1e12:,.3g} TFLOP/s a rank"
            mfu += f" ({self.peak_source})"
        source = f", state from {self.source}" if self.source else ""
        why = f"{cause_words(self.cause)}{source}"
        return f"generation {self.generation}: {ranks} from step {self.start_step} ({why}){mfu}"


@dataclass(frozen=True, kw_only=True)
class Spares(Event):
    """How many ranks wait beside the group, ready, has changed: with them a step would take as long."""

    count: int  # ranks
    nodes: dict[str, int] = field(default_factory=dict)  # where they are: node -> ranks
    generation: int | None = None  # the group's number

    def sentence(self) -> str:
        if not self.count:
            return "no spares are left"
        wait = "rank waits as a spare" if self.count == 1 else "ranks wait as spares"
        where = ", ".join(f"{node[:12]}" + (f" ({count})" if count > 1 else "") for node, count in self.nodes.items())
        where = f"on {len(self.nodes)} nodes" if len(self.nodes) > SHOWN_NODES else f"on node {where}"
        return f"{self.count} {wait} {where}: a step with more would take as long"


@dataclass(frozen=True, kw_only=True)
class Failure(Event):
    """A group broke, or lost ranks."""

    cause: str = "unknown"  # a Cause, one of FAILURES
    detail: str = ""  # a sentence: which process, and how it was noticed
    generation: int | None = None  # the group's number
    ranks: list[int] | None = None  # those that were lost, as far as known
    nodes: list[str] | None = None  # ids, of these
    kind: str | None = None  # what failed, as far as is known then: a FaultKind
    gpus: dict[str, list[str]] | None = None  # node -> what each of its GPUs told last: temperature, power, clock
    step: int | None = None  # nonfinite: of the gradients
    is_loss: bool | None = None  # it counts as if a host were lost, whatever the cause; None: as the cause says

    def sentence(self) -> str:
        return f"{cause_words(self.cause)}: {self.detail}"


@dataclass(frozen=True, kw_only=True)
class NodeLost(Event):
    """Ray has found a node dead that members of the newest group, or of those that waited, were on."""

    node: str  # id
    host: str | None = None  # its name, or the node's id where that is not known
    drained: bool | None = None  # it was to be taken away
    generation: int | None = None  # the newest
    words = "node {0.node:.12} is gone"


@dataclass(frozen=True, kw_only=True)
class Ready(Event):
    """Newcomers on a node are ready to join: to make the group larger, or to wait beside it as spares."""

    node: str  # id
    ranks: int  # that have come since the node's last such event
    host: str | None = None  # its name, or the node's id: as of `node_lost`
    start_s: float | None = None  # since the node came up, or lost its last worker; nothing where it was there before
    generation: int | None = None  # that trains meanwhile


@dataclass(frozen=True, kw_only=True)
class Rollback(Event):
    """A generation took back the rows past its start."""

    generation: int  # the one that starts
    steps: int  # how many rows were taken back
    from_step: int | None = None  # the newest one's
    to_step: int | None = None  # step from which the generation starts
    seconds: float = 0.0  # that these steps had taken: recomputed work
    first_time: float | None = None  # when the first of them began
    first_step_end: float | None = None  # when the first of them ended
    last_time: float | None = None  # when the last of them ended
    spans: list[Row] | None = None  # the three times of each generation's rows among them, in order, with `generation`


@dataclass(frozen=True, kw_only=True)
class Trained(Event):
    """The group has left for good: only what is in memory is still to be written."""

    step: int  # its last


@dataclass(frozen=True, kw_only=True)
class Stopped(Event):
    """A job ended in an orderly way."""

    step: int | None = None  # the newest in storage
    reason: str = "stopped"  # finished, stop_at_step, interrupted, failed
    detail: str = ""  # of a failure: what to do about it


@dataclass(frozen=True, kw_only=True)
class CoordinatorRestarted(Incident):
    """The coordinator died and is back; the group went on meanwhile."""

    generation: int  # the group's number
    words = "the coordinator died and is back, training went on; generation {0.generation}"


# what is saved, and what of it turns out to be damaged

HELD_UP = 0.2  # share of a checkpoint's time that one node is named for


@dataclass(frozen=True, kw_only=True)
class Checkpoint(Event):
    """A checkpoint was committed to storage."""

    step: int  # of its state
    bytes: int | None = None  # written to storage
    seconds: float | None = None  # from its beginning to its commit
    reason: str | None = None  # it was written for: steps, minutes, interval, end, drain
    stall_s: float | None = None  # for which training stood still up to `time`, where ranks write themselves
    generation: int | None = None  # of these ranks
    verified_step: int | None = None  # the newest whose state was verified then, where units verify each other
    write_s: float | None = None  # from its beginning until a node's part is there, the median of nodes
    held_up_s: float | None = None  # for which the slowest node's part came after that
    index_s: float | None = None  # writing the metadata file, once all parts are there
    commit_s: float | None = None  # writing COMMIT, once that is there
    nodes: list[dict[str, Any]] | None = None  # the slowest first: node seconds check_s write_s bytes; `of` another one

    def sentence(self) -> str:
        size = f": {self.bytes / 1e6:,.1f} MB" if self.bytes is not None else ""
        took = f" in {self.seconds:.2f} s" if self.seconds is not None else ""
        return f"checkpoint of step {self.step} committed{size}{took}{self._slow_node()}"

    def _slow_node(self) -> str:
        """Which node the others were waited for, if it was one that took much of the time."""
        if not self.nodes or not self.seconds or (self.held_up_s or 0.0) < max(1.0, HELD_UP * self.seconds):
            return ""
        return f", {self.held_up_s:.1f} s of that waiting for node {str(self.nodes[0]['node'])[:12]} to write its part"


@dataclass(frozen=True, kw_only=True)
class CheckpointFailed(Event):
    """A checkpoint was given up. What was asked for, as the last one, is tried again."""

    step: int  # of its state
    detail: str = ""  # what went wrong
    words = "checkpoint of step {0.step} was not written: {0.detail}"


@dataclass(frozen=True, kw_only=True)
class CheckpointDamaged(GroupIncident):
    """A group that forms could not use a checkpoint, and takes the one before it."""

    step: int  # of its state
    detail: str = ""  # what is wrong with it
    generation: int | None = None  # the group's number
    words = "checkpoint of step {0.step} cannot be used, trying the one before: {0.detail}"


@dataclass(frozen=True, kw_only=True)
class SnapshotFailed(GroupIncident):
    """A keeper cannot make snapshots safe, or none was committed for long; once a generation and node."""

    detail: str  # a sentence
    words = "{0.detail}"


@dataclass(frozen=True, kw_only=True)
class SnapshotSpacing(Event):
    """Snapshots have another distance from here on, or a failure costs more or far less, where
    `snapshot.every_steps=auto`."""

    every_steps: int  # from one to the next
    before: int  # steps until here; 0: nothing was chosen
    commit_s: float  # from the end of a step to the commit of its snapshot
    added_s: float | None = None  # that a snapshot adds to the steps beside it; not there: not known yet
    step_s: float  # of a step without a snapshot beside it
    mtbf_s: float  # between failures, as they were seen and expected
    steps_lost: int  # the most that a failure costs
    generation: int | None = None  # the group's number
    words = (
        "snapshots every {0.every_steps} steps: one is committed after {0.commit_s:.2f} s, a step takes "
        "{0.step_s:.2f} s; a failure costs at most {0.steps_lost} steps"
    )


@dataclass(frozen=True, kw_only=True)
class CopiesMoved(GroupIncident):
    """A node cannot copy its snapshots to another one: from here on others hold its copies, or none."""

    node: str  # by its id
    peers: list[str]  # that hold them; none: a lost node costs what is not in storage
    detail: str  # a sentence
    words = "{0.detail}"


@dataclass(frozen=True, kw_only=True)
class KeeperRestarted(GroupIncident):
    """A node's keeper reported nothing and answered nothing: it was ended, and started again."""

    node: str  # by its id
    detail: str  # a sentence
    words = "{0.detail}"


@dataclass(frozen=True, kw_only=True)
class SnapshotDamaged(GroupIncident):
    """A rank that restores refused a copy of a committed snapshot, and read another one."""

    step: int  # of its state
    detail: str = ""  # what is wrong with it
    words = "a copy of the snapshot of step {0.step} cannot be used, another one was: {0.detail}"


@dataclass(frozen=True, kw_only=True)
class SnapshotUnreadable(GroupIncident):
    """A group that forms could not read a committed snapshot whole, and goes back to a checkpoint."""

    step: int  # of its state
    detail: str = ""  # what is wrong with it
    words = "the snapshot of step {0.step} cannot be used, going back to storage: {0.detail}"


# what the loop does beside its steps


@dataclass(frozen=True, kw_only=True)
class Validation(Event):
    """The validation split was scored; training stood still for `seconds` up to `time`."""

    step: int | None = None  # after which
    loss: float | None = None  # nats a token
    seconds: float = 0.0  # that it took
    generation: int | None = None  # of the group


@dataclass(frozen=True, kw_only=True)
class Profile(Event):
    """A profile of some steps was written."""

    step: int  # the window's last
    folder: str  # that holds it, in the run folder
    words = "profile of the steps up to {0.step}: {0.folder}/summary.md"


@dataclass(frozen=True, kw_only=True)
class DataFallback(Incident):
    """The token stream did not deliver a window, so a rank read it from the shards itself."""

    rank: int  # of the group
    window: int  # number of the window
    reason: str = ""  # why the stream was not waited for
    windows: int = 1  # that it stands for, this one and those just before it; the 1st, 2nd, 4th, 8th, ... is told
    generation: int | None = None  # of the group

    def sentence(self) -> str:
        before = f", nor the {self.windows - 1} before it," if self.windows > 1 else ""
        return (
            f"the token stream did not deliver window {self.window}{before} to rank {self.rank} ({self.reason}); it "
            "reads the same rows directly"
        )


@dataclass(frozen=True, kw_only=True)
class DataWaits(Incident):
    """Storage failed when a rank read rows, which asks again for `data.storage_timeout_s`."""

    rank: int  # of the group
    reason: str = ""  # what storage said
    generation: int | None = None  # of the group
    words = "rank {0.rank} waits for rows that storage does not give: {0.reason}"


# nodes, devices and processes


@dataclass(frozen=True, kw_only=True)
class Drain(Incident):
    """A node is to be taken away."""

    node: str  # id
    deadline: float  # unix time by which it goes
    asked: bool | None = None  # by jobs.drain, for maintenance: it is left at once, until it is said to be back

    def sentence(self) -> str:
        if self.asked:
            return f"node {self.node[:12]} is drained for maintenance: the group leaves it, until it is said to be back"
        return f"node {self.node[:12]} is to be taken away; the group leaves it in time"


@dataclass(frozen=True, kw_only=True)
class Undrain(Event):
    """A node that was drained for maintenance is in service again, or is gone."""

    node: str  # id
    lost: bool | None = None  # Ray has found it dead: its host comes back as another node

    def sentence(self) -> str:
        return f"node {self.node:.12} {'was drained, and is gone' if self.lost else 'is in service again'}"


@dataclass(frozen=True, kw_only=True)
class Quarantine(Incident):
    """A node failed too often, or is slow, and its host is left alone for a while."""

    node: str  # id
    seconds: float  # for which it is left alone
    host: str | None = None  # that failures are counted by: its name, or the node's id where it has several
    reason: str | None = None  # "slow": a spare took its place; "corrupt": it computed wrong

    def sentence(self) -> str:
        whys = {
            "slow": ("is slow, and a spare takes its place", "drain_slow_s"),
            "corrupt": ("computed wrong", "verify_every_steps"),
        }
        why, setting = whys.get(self.reason or "", ("failed again and again", "quarantine_failures"))
        return (
            f"node {self.node:.12} {why}: it is left alone for {self.seconds:.0f} s (cluster.{setting}, "
            "cluster.quarantine_s)"
        )


@dataclass(frozen=True, kw_only=True)
class Stalled(GroupIncident):
    """A group stood still; before a worker is ended for it, and once where none is found to blame."""

    seconds: float  # since the last step
    generation: int | None = None  # of the group
    stacks: str = ""  # file in the run folder that says what every worker was doing
    words = "no step for {0.seconds:.1f} s; what every worker was doing: {0.stacks}"


@dataclass(frozen=True, kw_only=True)
class Suspected(GroupIncident):
    """A rank or a node keeps the others waiting: slow_compute, slow_data, slow_copy, slow_link, hung. Or it came to
    something else than others, from the same: corrupt, differing."""

    kind: str  # of these
    node: str  # id; empty: no node's links stand out
    pid: int = 0  # of the process; 0: the node's links
    rank: int | None = None  # of the process
    since: float | None = None  # when it began, as far as is known
    factor: float = 0.0  # a step's time over what it would be without it; 0: it is not slow
    detail: str = ""  # a sentence: the evidence

    def sentence(self) -> str:
        what = f"rank {self.rank}, process {self.pid} on node {self.node:.12}" if self.pid else f"node {self.node:.12}"
        slower = f", steps take {self.factor:.2f} times as long" if self.factor else ""
        return f"{suspicion_words(self.kind)}: {what if self.node else 'the network'}{slower} ({self.detail})"


@dataclass(frozen=True, kw_only=True)
class Corruption(GroupIncident):
    """Units computed wrong, as verifications have confirmed; or several differ, and none can tell which is wrong."""

    step: int  # of the verification
    units: list[int]  # the odd ones, or all that differ
    ranks: list[int]  # of these units
    nodes: list[str]  # ids
    verified_step: int  # the newest whose state is known to be right: the run goes back to it, or before
    is_decided: bool = True  # these are wrong; else one of them is
    waits_for: int | None = None  # fewest ranks of the next group, a third unit of which tells; None: the run ends
    detail: str = ""  # a sentence: what was compared

    def sentence(self) -> str:
        named = f"unit{'s' * (len(self.units) > 1)} {', '.join(map(str, self.units))}"
        what = f"{named} computed wrong" if self.is_decided else f"{named}: one of them computes wrong"
        return f"{what} ({self.detail}); the state of step {self.verified_step} is the newest known to be right"


@dataclass(frozen=True, kw_only=True)
class Cleared(Event):
    """A suspicion is over: it is as fast as the others again, or its rank has left, or its group is over."""

    kind: str  # of what
    node: str  # id
    pid: int = 0  # of the process; 0: the node's links
    rank: int | None = None  # of the process
    since: float | None = None  # of the suspicion
    recovered: bool | None = None  # as fast as the others again, or right; else its rank has left, or its group is over
    words = "no longer: {0.kind}, node {0.node:.12}"


@dataclass(frozen=True, kw_only=True)
class Unfit(GroupIncident):
    """A process may not train: its device computes wrong, its node's link or memory does not do, it alone has an error,
    it died before it joined, or the group broke with it."""

    node: str  # id
    pid: int  # of the process
    detail: str = ""  # what was measured
    words = "process {0.pid} on node {0.node:.12} was ended: {0.detail}"


@dataclass(frozen=True, kw_only=True)
class GpuError(GroupIncident):
    """A GPU's driver reported an error."""

    node: str  # id
    gpu: str  # uuid
    xid: int  # number of the error
    meaning: str = ""  # of a fault of the hardware; empty where it may be a program's

    def sentence(self) -> str:
        known = f" ({self.meaning})" if self.meaning else ""
        return f"node {self.node[:12]}, {self.gpu}: Xid {self.xid}{known}"


@dataclass(frozen=True, kw_only=True)
class Link(Event):
    """A new node's link to another one was measured."""

    node: str  # id of the new node
    to: str  # id of the other one
    sent: float | None = None  # bytes/s
    received: float | None = None  # bytes/s


@dataclass(frozen=True, kw_only=True)
class LinkFailed(GroupIncident):
    """A new node could not reach another one; it tries the next."""

    node: str  # id of the new node
    to: str  # id of the other one
    detail: str = ""  # what went wrong
    words = "node {0.node:.12} did not reach node {0.to:.12}: {0.detail}"


@dataclass(frozen=True, kw_only=True)
class Note(Event):
    """A sentence about something that no other event is for."""

    text: str  # the sentence
    generation: int | None = None  # of the group that says it
    words = "{0.text}"


INCIDENTS = tuple(name for name, kind in EVENTS.items() if issubclass(kind, Incident))


def from_row(row: Mapping[str, Any]) -> Event:
    """The event that a line of events.jsonl holds, whichever version wrote it."""
    kind = EVENTS.get(str(row["event"]))
    given = {key: value for key, value in row.items() if key != "event"}
    known = {each.name for each in fields(kind)} - {"more"} if kind is not None else {"time"}
    told = {key: value for key, value in given.items() if key in known and value is not None}
    more = {key: value for key, value in given.items() if key not in known}
    if kind is not None:
        try:
            return kind(**told, more=more)
        except TypeError:  # it lacks what it needs
            more |= told
            more.pop("time", None)
    return Unknown(time=given.get("time") or 0.0, said=str(row["event"]), more=more)


def startup_line(startup_s: Mapping[str, float], first_step_s: float) -> str:
    """Where the time from the command to the first step went."""
    parts = [f"{name} {seconds:.1f}" for name, seconds in startup_s.items() if seconds >= 0.05]
    total = sum(startup_s.values()) + first_step_s
    return f"first step after {total:.1f} s: {', '.join(parts)}, step with its data {first_step_s:.1f}"
