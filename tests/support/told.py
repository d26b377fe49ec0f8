"""A control alone, told event by event in virtual time."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from regrow.config.schema import CheckpointConfig, ClusterConfig, ParallelConfig, PretrainConfig, SnapshotConfig
from regrow.control import commands as c
from regrow.control import events as e
from regrow.control.core import Control
from regrow.control.membership import Formation, Member
from regrow.control.past import Past, formed
from regrow.control.peers import FAN_OUT
from regrow.control.states import Answer, RowAnswer
from regrow.control.values import SnapshotAck, Version
from regrow.record.log import METRIC_KEYS
from support.control_world import is_whole

CLUSTER = ClusterConfig(max_workers=8, wait_for_workers_s=60)


class Told:
    """A control, and all that it wanted since `clear`."""

    def __init__(
        self,
        past: Past | None = None,
        *,
        checkpoint: CheckpointConfig | None = None,
        copies: int = 1,
        every_steps: int | str = "auto",
        parallel: ParallelConfig | None = None,
        fan_out: int = FAN_OUT,
        **cluster: Any,
    ) -> None:
        config = PretrainConfig(
            cluster=replace(CLUSTER, **cluster),
            checkpoint=checkpoint or CheckpointConfig(every_steps=10),
            snapshot=SnapshotConfig(every_steps, copies=copies),
            parallel=parallel or ParallelConfig(),
        )
        config.optim.num_slices = max(config.optim.num_slices, config.cluster.max_workers)
        self.now, self.commands = 1000.0, list[c.Command]()
        self.cleans_up = True  # storage, at once, what failed uploads have left
        self.control = Control(config, is_whole=is_whole, now=self.now, past=past, fan_out=fan_out)

    def __call__(self, event: e.Event | None = None) -> Any:
        """Tell it an event, or that time has passed; its reply."""
        found = self.control.on(event, self.now) if event is not None else self.control.tick(self.now)
        self.commands += found
        for command in found:
            if isinstance(command, c.CleanUp) and self.cleans_up:
                self(e.Deleted("", command.upload))
        return next((command.value for command in found if isinstance(command, c.Reply)), None)

    def clear(self) -> None:
        self.commands.clear()

    def of(self, kind: type) -> list[Any]:
        return [command for command in self.commands if isinstance(command, kind)]

    def records(self, event: str) -> list[dict[str, Any]]:
        return [dict(command.fields) for command in self.of(c.Record) if command.event == event]

    def join(self, *members: Member, expected: int | None = None) -> None:
        """One of the newest group comes again, with another port than it had there."""
        for member in members:
            formation = self.control.group.formation
            rank = formation.rank_of(member.id) if formation is not None else None
            offer = replace(member, port=formation.members[rank].port + 1) if formation and rank is not None else member
            self(e.Joined(offer, expected or len(members)))

    def ask(self, member_id: str, after: int = 0) -> Answer:
        self.now += 0.001  # whether a group can be formed is not looked at in one instant twice
        answer: Answer = self(e.Asked(member_id, after))
        return answer

    def start(self, *members: Member) -> None:
        """Ray Train has started all of these at once."""
        self(e.GroupStarted(tuple((each.node, each.pid) for each in members)))

    def form(self, *members: Member) -> Formation:
        """The next group, of these processes; they come back, if they were in the one before."""
        if not self.control.group.in_place:
            self.start(*members)
        self.join(*members)
        answer = self.ask(members[0].id, self.control.generation)
        assert answer.formation is not None
        return answer.formation

    def begin(self, nodes: Iterable[str], step: int = 0) -> None:
        """Their keepers are up, and the newest group trains."""
        for node in nodes:
            self(e.KeeperUp(node, node, (node, 1)))
        workers = [{"node": node} for node in nodes]
        self(e.Began(self.control.generation, step, tuple(nodes), {"workers": workers}))

    def metrics(self, step: int, **fields: Any) -> dict[str, Any]:
        return dict.fromkeys(METRIC_KEYS, 0.5) | {"generation": self.control.generation, "step": step} | fields

    def row(self, step: int, **fields: Any) -> str:
        answer: RowAnswer = self(e.Row(self.control.generation, self.metrics(step, **fields)))
        return answer.leave

    def seal(self, version: Version, peers: Mapping[str, Iterable[str]]) -> None:
        self(e.Sealed([SnapshotAck(node, version, tuple(holders)) for node, holders in peers.items()]))

    @property
    def peers(self) -> dict[str, tuple[str, ...]]:
        """As keepers were told last."""
        places = self.of(c.SendPlaces)[-1].places
        return {node: tuple(peer.node for peer in place.peers) for node, place in places.items()}


def one(pid: int, node: str = "node") -> Member:
    return Member(f"m{pid}", node, "127.0.0.1", pid, pid)


def log_of(told: Told, *, submitted: bool = True) -> list[dict[str, Any]]:
    """What its log holds: all that it wanted recorded, and the groups that it formed."""
    rows: list[dict[str, Any]] = [{"event": "submitted", "time": 1000.0}] if submitted else []
    for command in told.commands:
        if isinstance(command, c.Form):
            rows.append({"event": "forming", "time": told.now, **formed(command.generation, command.members)})
        elif isinstance(command, c.Record):
            rows.append({"event": command.event, "time": told.now, **command.fields})
    return rows
