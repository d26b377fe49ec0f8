"""What a coordinator goes on with that takes the place of another one, or comes after an earlier job. Pure."""

from regrow.control.commands import Outbox, TellOver
from regrow.control.corruption import Corruptions
from regrow.control.events import Began, KeepersFound, NotFinite, Restarted, Row, RowsAgain, Verified
from regrow.control.group import Group
from regrow.control.membership import Formation
from regrow.control.past import Past
from regrow.control.rows import Rows
from regrow.control.snapshots import Snapshots
from regrow.control.states import Forming
from regrow.control.values import NEVER, Version


class Takeover:
    """Of the run's group, of what keepers hold, and of what is in storage."""

    def __init__(
        self, past: Past, group: Group, snapshots: Snapshots, corruptions: Corruptions, rows: Rows, out: Outbox
    ) -> None:
        self._past, self._group, self._snapshots = past, group, snapshots
        self._corruptions, self._rows, self._out = corruptions, rows, out

    def keepers_found(self, event: KeepersFound, now: float) -> None:
        """A group of which the log does not know was formed while storage was away: it is over, its number taken."""
        self._snapshots.keepers_found(event, self._past.counts)
        newest = max((version for _, version, _ in event.known), default=NEVER)
        if (successor := self._past.successor(newest)) is not None:
            text = f"step {newest.step} of generation {newest.generation}, which nodes have in memory, does not count: "
            self._out.record("note", text=f"{text}generation {successor.generation} went on from step {successor.step}")
        if event.newest_generation > self._group.generation:
            self._group.membership.generation = event.newest_generation
            self._out.append(TellOver(event.newest_generation, tuple(node for node, *_ in event.known)))

    def restarted(self, event: Restarted, now: float) -> None:
        """Go on with the group that trains, which may not even have noticed."""
        group, snapshots = self._group, self._snapshots
        self._out.record("coordinator_restarted", generation=group.generation)
        self._out.extend(snapshots.checkpoints.steps.deletions_left)
        if not event.members:
            return  # no group was formed since the driver started
        group.formation = Formation(group.generation, event.members)
        group.membership.take_up(event.members)
        for member in event.members:
            group.nodes.met(member)
        if (question := self._past.undecided) is not None:
            self._corruptions.go_on(question, event.members)
        if event.start_step is None:
            group.take_up(Forming(group.generation), event.lost, event.lost_at, now)
            return
        self._rows.go_on(group.generation, event.start_step)
        newest = snapshots.commits.newest
        last = max(self._rows.trained, newest.version.step if newest else 0)
        snapshots.begin(group.generation, last, event.nodes, now)
        self._corruptions.begin(event.start_step, trained=last)
        if (limit := self._past.limit) is not None:  # the group is over, and what it did since does not count
            self._corruptions.verification.limit = limit
            snapshots.commits.roll_back(limit)
        if self._past.discarded == group.generation:
            snapshots.commits.discard()
        group.train(event.start_step, now)
        group.take_up(group.state, event.lost, event.lost_at, now)

    def knows(self, event: Began | NotFinite) -> bool:
        """Whether the coordinator before was told, too: it died before it answered, and the call was made again."""
        past = self._past
        if isinstance(event, Began):
            return past.restarted and Version(event.generation, event.start_step) in past.began
        return past.restarted and past.discarded == event.generation

    def unseen(self, event: Row | RowsAgain | Verified) -> Began | None:
        """Of a group that trains, as its ranks tell, though the log does not: the coordinator before died in between.
        It began from an earlier step than this, if some of its rows have gone, too."""
        group = self._group
        if not self._past.restarted or isinstance(event, RowsAgain) or not isinstance(group.state, Forming):
            return None
        members = group.membership.current
        workers = [{"host": each.machine or each.host, "node": each.node, "pid": each.pid} for each in members]
        nodes = tuple(dict.fromkeys(each.node for each in members))
        details = {"world_size": len(members), "workers": workers}
        newest = self._snapshots.commits.newest
        known = newest.version.step if newest and newest.version.generation == event.generation else 0
        step = event.step if isinstance(event, Verified) else event.row["step"]
        return Began(event.generation, max(step - 1, known), nodes, details)  # the row may be sent again
