"""Which committed snapshots become checkpoints, which nodes write them, and when COMMIT may be written. Pure.

Keepers write one checkpoint at a time while training goes on, and what is on its way is pinned in memory. Where a node
does not write its part, because it is gone or its memory is damaged, one with its copies does. Then comes the
index, then COMMIT, each once the one before is known to be there.
"""

from dataclasses import dataclass, field
from enum import Enum

from regrow.control.cadence import Cadence
from regrow.control.commands import Delete, Outbox, PublishCommit, PublishIndex, Withdraw, Write
from regrow.control.commits import CommitTracker
from regrow.control.events import (
    CheckpointCommitted,
    CheckpointWanted,
    Deleted,
    IndexWritten,
    PublishFailed,
    WriteFailed,
    Written,
)
from regrow.control.peers import KeeperRegistry
from regrow.control.values import NEVER, Version

RETRY_S = 30.0  # from a checkpoint that failed to the next one


class Stage(Enum):
    """Of an upload."""

    WRITING = "nodes write their parts"
    INDEX = "the index is being written"
    COMMIT = "COMMIT is being written"


@dataclass
class Upload:
    """A checkpoint in the making. `peers` as in the snapshot's commit; `asked`: by origin, the node that writes it."""

    number: int
    version: Version
    peers: dict[str, tuple[str, ...]]
    begun_at: float
    reason: str
    stage: Stage = Stage.WRITING
    asked: dict[str, str] = field(default_factory=dict)
    written: set[str] = field(default_factory=set)  # origins


class Checkpoints:
    """Decides on checkpoints; is told what came of it."""

    def __init__(
        self, cadence: Cadence, snapshots: CommitTracker, keepers: KeeperRegistry, out: Outbox, *, timeout_s: float
    ) -> None:
        self.cadence, self.timeout_s = cadence, timeout_s
        self.upload: Upload | None = None
        self.failure = ""  # of the newest checkpoint that was begun
        self._snapshots, self._keepers, self._out = snapshots, keepers, out
        self._wanted: tuple[int, float] | None = None  # a step that is to be one, or one after it; since when
        self._covered = -1  # the newest step that one was begun of
        self._retry_at = 0.0
        self._number = 0
        self._late: dict[int, Upload] = {}  # given up when COMMIT was on its way
        self._withdrawn: set[int] = set()  # of these, the ones that must not count should it arrive

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written, or is to be."""
        return self.upload is not None or self._wanted is not None

    @property
    def pinned(self) -> Version:
        """What must stay in memory, for it is on its way to storage."""
        return self.upload.version if self.upload else NEVER

    def began(self, start_step: int, now: float) -> None:
        """A generation trains from `start_step`: a checkpoint of a later step is none any more."""
        self.cadence.resumed(start_step, now)
        self._covered = min(self._covered, start_step)
        self._withdrawn |= {number for number, late in self._late.items() if late.version.step > start_step}
        if self.upload is not None and self.upload.version.step > start_step:
            self._give_up(f"the run went back to step {start_step}", now, withdraw=True)

    def want(self, event: CheckpointWanted, now: float) -> None:
        """The snapshot of this step, or the next one if it is lost, is to be a checkpoint."""
        if event.step > self._covered:
            self._wanted = event.step, now
            self.begin_if_due(now)

    def begin_if_due(self, now: float) -> None:
        """Call it whenever a snapshot was committed."""
        commit = self._snapshots.newest
        if self.upload is not None or commit is None:
            return
        step, reason = commit.version.step, ""
        if self._wanted is not None and step >= self._wanted[0]:
            self._wanted, reason = None, "asked for"
        elif now > self._retry_at:
            reason = self.cadence.due(step, now)
        if not reason:
            return
        self.cadence.begun(step, now)
        self._covered, self.failure = step, ""
        self._number += 1
        self.upload = Upload(self._number, commit.version, dict(commit.peers), now, reason)
        for node in self.upload.peers:
            self._write(self.upload, node, node)

    def written(self, event: Written, now: float) -> None:
        """The index comes once all nodes have."""
        found = self._current(event.upload, Stage.WRITING)
        if found is None:
            return
        found.written.add(event.origin)
        if found.written == found.peers.keys():
            found.stage = Stage.INDEX
            self._out.append(PublishIndex(found.number, found.version, tuple(found.peers)))

    def write_failed(self, event: WriteFailed, now: float) -> None:
        """The next node that has copies is to do it instead."""
        origin, node = event.origin, event.node
        found = self._current(event.upload, Stage.WRITING)
        if found is None or origin in found.written or found.asked[origin] != node:
            return
        holders = (origin, *found.peers[origin])
        peer = next(filter(self._keepers.can_ask, holders[holders.index(node) + 1 :]), "")
        if peer:
            self._write(found, origin, peer)
        else:
            self._give_up(f"node {node[:12]} {event.problem}", now)

    def gone_dark(self, nodes: set[str], now: float) -> None:
        """Nothing is to be expected of these nodes any more."""
        upload = self.upload
        for origin, node in list(upload.asked.items()) if upload is not None else []:
            if node in nodes and self.upload is upload and upload is not None:
                self.write_failed(WriteFailed(upload.number, origin, node, "says nothing"), now)

    def index_written(self, event: IndexWritten, now: float) -> None:
        found = self._current(event.upload, Stage.INDEX)
        if found is not None:
            found.stage = Stage.COMMIT
            self._out.append(PublishCommit(found.number, found.version))

    def committed(self, event: CheckpointCommitted, now: float) -> None:
        """COMMIT is there. Retention follows."""
        upload, step = event.upload, event.step
        current = self._current(upload, Stage.COMMIT)
        found = current or self._late.pop(upload)
        if upload in self._withdrawn:
            self._withdrawn.remove(upload)
            if self.upload is None or self.upload.version.step != step:  # which would write over it
                self._out.append(Withdraw(step))
            return
        seconds = now - found.begun_at
        self._out.record("checkpoint", step=step, seconds=seconds, bytes=event.num_bytes, reason=found.reason)
        if current is not None:
            self.cadence.written(took_s=seconds)
            self.upload = None
            self.begin_if_due(now)
        self._out.append(Delete())

    def publish_failed(self, event: PublishFailed, now: float) -> None:
        self._late.pop(event.upload, None)
        self._withdrawn.discard(event.upload)
        if self.upload is not None and self.upload.number == event.upload:
            self._give_up(event.problem, now, failed=True)

    def deleted(self, event: Deleted, now: float) -> None:
        if event.problem:
            self._out.record("note", text=event.problem)

    def discard(self, now: float) -> None:
        """What is in memory is not to be used: the state itself went wrong."""
        if self.upload is not None:
            self._give_up("the state went wrong", now, withdraw=True)

    def tick(self, now: float) -> None:
        """Give up what takes too long."""
        upload, late = self.upload, now - self.timeout_s
        if upload is not None and upload.begun_at < late:
            nodes = sorted({node[:12] for origin, node in upload.asked.items() if origin not in upload.written})
            slow = f"node {', '.join(nodes)} writes" if upload.stage is Stage.WRITING else upload.stage.value
            self._give_up(f"after {self.timeout_s:.0f} s {slow} still; checkpoint.timeout_s allows more", now)
        if self.upload is None and self._wanted is not None and self._wanted[1] < late:
            self._failed(self._wanted[0], f"its snapshot is not committed after {self.timeout_s:.0f} s", now)
            self._wanted = None

    def _current(self, upload: int, stage: Stage) -> Upload | None:
        """The upload, if it is that one and has come so far: what is said of others comes too late."""
        found = self.upload
        return found if found is not None and (found.number, found.stage) == (upload, stage) else None

    def _write(self, upload: Upload, origin: str, node: str) -> None:
        upload.asked[origin] = node
        describe = origin == next(iter(upload.peers))
        self._out.append(Write(upload.number, upload.version, node, origin, node != origin, describe))

    def _give_up(self, problem: str, now: float, *, withdraw: bool = False, failed: bool = False) -> None:
        """`failed`: storage said so, and no COMMIT is on its way."""
        upload, self.upload = self.upload, None
        assert upload is not None
        if upload.stage is Stage.COMMIT and not failed:
            self._late[upload.number] = upload
            self._withdrawn |= {upload.number} if withdraw else set()
        self.cadence.abandoned()
        self._failed(upload.version.step, problem, now)
        self.begin_if_due(now)

    def _failed(self, step: int, problem: str, now: float) -> None:
        self._retry_at = now + RETRY_S
        self.failure = f"the checkpoint of step {step} was not written: {problem}"
        self._out.record("checkpoint_failed", step=step, detail=problem)
