"""A checkpoint in the making: which node writes which part, in whose place, and which one puts them together. Pure.

Each node writes its own part. In a large group the order goes to the nodes that speak for others, and what came of it
comes with their answers; where one of these may not come, all whose answers it was to bring are asked themselves, and
a node that has written by then answers with that.
"""

from collections.abc import Set
from enum import Enum

from regrow.control.commands import Outbox, PublishCommit, PublishIndex, Write, WriteAll
from regrow.control.commits import SnapshotCommit
from regrow.control.events import Spoken, WriteFailed, Written
from regrow.control.node_times import CheckpointTimes
from regrow.control.peers import KeeperRegistry


class Stage(Enum):
    """Of an upload."""

    WRITING = "nodes write their parts"
    INDEX = "the index is being written"
    COMMIT = "COMMIT is being written"


class Upload:
    """Of one checkpoint. What fails returns why the checkpoint does, or empty where another node has the part."""

    def __init__(
        self, number: int, commit: SnapshotCommit, reason: str, now: float, keepers: KeeperRegistry, out: Outbox
    ) -> None:
        self.number, self.version, self.peers = number, commit.version, dict(commit.peers)
        self.begun_at, self.reason, self.stage = now, reason, Stage.WRITING
        self.asked: dict[str, str] = {}  # by origin: the node that writes it
        self.times = CheckpointTimes()
        self.lacked = True  # all that has failed of it did because a part was not there
        self._written: set[str] = set()  # origins
        self._speakers: dict[str, str] = {}  # by origin whose answer comes with another's: the node that speaks for it
        self._index_by = ""  # the node whose keeper puts it together; empty: the coordinator
        self._keepers, self._out = keepers, out

    def begin(self, timeout_s: float) -> None:
        """Each node writes its own part, or where it cannot be asked the one with its copies."""
        self._speakers = self._keepers.spoken_for(self.peers)
        if self._speakers:
            self.asked = {origin: origin for origin in self.peers}
            nodes = tuple(dict.fromkeys(self._speakers.values()))
            self._index_by = nodes[self.number % len(nodes)]
            self._out.append(WriteAll(self.number, self.version, nodes, self._describes, timeout_s))
            return
        for origin, peers in self.peers.items():
            self._write(origin, next(filter(self._keepers.is_there, (origin, *peers)), origin))

    @property
    def doing(self) -> str:
        """What it is about, in words."""
        nodes = sorted({node[:12] for origin, node in self.asked.items() if origin not in self._written})
        return f"node {', '.join(nodes)} writes" if self.stage is Stage.WRITING else self.stage.value

    def written(self, event: Written, now: float) -> None:
        """A part is there; the index comes once all are."""
        self._wrote(event, now - self.begun_at)
        self._publish_index_if_whole(now)

    def write_failed(self, event: WriteFailed, *, at_last: bool) -> str:
        """The next node that has copies is to do it instead. `at_last`: one that has gone dark is better than none."""
        origin, node = event.origin, event.node
        if origin in self._written or self.asked[origin] != node:
            return ""
        self._speakers.pop(origin, None)
        self.lacked = self.lacked and event.has_none
        if holder := self._next_holder(origin, node, at_last=at_last):
            self._write(origin, holder)
        return "" if holder else f"node {node[:12]} {event.problem}"

    def spoken(self, event: Spoken, now: float, *, at_last: bool) -> str:
        """What nodes came to, of which one has told; those that are left out are asked themselves."""
        for answer in event.answers:
            if answer.origin not in self.peers:
                continue  # a group has formed since
            if isinstance(answer, Written):  # it waited for others'
                self._wrote(answer, answer.times.write_s)
            elif isinstance(answer, WriteFailed) and (problem := self.write_failed(answer, at_last=at_last)):
                return problem
        self._ask_themselves({event.node})
        self._publish_index_if_whole(now)
        return ""

    def gone_dark(self, nodes: Set[str], *, at_last: bool) -> str:
        """Nothing is to be expected of these nodes any more, nor of what they were to pass on."""
        if self.stage is Stage.INDEX and self._index_by in nodes:
            self.index_not_written()
        if self.stage is not Stage.WRITING:
            return ""
        speakers = {self._speakers[node] for node in nodes if node in self._speakers}
        failed = [
            WriteFailed(self.number, origin, node, "says nothing", has_none=True)
            for origin, node in self.asked.items()
            if node in nodes
        ]
        for each in failed:
            if problem := self.write_failed(each, at_last=at_last):
                return problem
        self._ask_themselves(speakers)
        return ""

    def index_not_written(self, problem: str = "") -> str:
        """The keeper that was to do it did not: the coordinator does. `problem`: why that could not, either."""
        if problem:
            self.lacked = False
        elif self._index_by:
            self._index_by = ""
            self._publish_index()
        return problem

    def index_written(self, now: float) -> None:
        self.times.passed(now)
        self.stage = Stage.COMMIT
        self._out.append(PublishCommit(self.number, self.version))

    @property
    def _describes(self) -> str:
        """The node that describes the tensors, too."""
        return next(iter(self.peers))

    def _wrote(self, event: Written, seconds: float) -> None:
        self._speakers.pop(event.origin, None)
        self.times.wrote(event.origin, self.asked[event.origin], event.times, seconds)
        self._written.add(event.origin)

    def _write(self, origin: str, node: str) -> None:
        self.asked[origin] = node
        describe = origin == self._describes
        self._out.append(Write(self.number, self.version, node, origin, node != origin, describe))

    def _ask_themselves(self, speakers: Set[str]) -> None:
        for origin in [each for each, speaker in self._speakers.items() if speaker in speakers]:
            del self._speakers[origin]
            self._write(origin, origin)

    def _publish_index_if_whole(self, now: float) -> None:
        if self.stage is Stage.WRITING and self._written == self.peers.keys():
            self.times.passed(now)
            self.stage = Stage.INDEX
            if not self._keepers.is_there(self._index_by):
                self._index_by = ""
            self._publish_index()

    def _publish_index(self) -> None:
        self._out.append(PublishIndex(self.number, self.version, tuple(self.peers), self._index_by))

    def _next_holder(self, origin: str, node: str, *, at_last: bool) -> str:
        """The node after this one that has copies of what is of `origin`, or empty."""
        holders = (origin, *self.peers[origin])
        rest = [each for each in holders[holders.index(node) + 1 :] if each in self._keepers.known]
        return next(filter(self._keepers.can_ask, rest), next(iter(rest if at_last else ()), ""))
