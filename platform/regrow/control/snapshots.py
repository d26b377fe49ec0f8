"""What is safe: snapshots that are committed in memory, checkpoints made of them, what keepers are told. Pure."""

from collections.abc import Callable, Sequence

from regrow.control.awaited import ARE_BACK, AwaitedNodes
from regrow.control.cadence import Cadence
from regrow.control.checkpoints import Checkpoints
from regrow.control.commands import (
    Announce,
    Ask,
    Outbox,
    Question,
    Reply,
    SendPlaces,
    ShowSnapshots,
    SnapshotCommitted,
)
from regrow.control.commits import CommitTracker, IsWhole
from regrow.control.events import Answered, Complaint, KeepersFound, KeeperUp, NeighboursAsked, NodesAlive
from regrow.control.node_times import SnapshotTimes
from regrow.control.peers import KeeperRegistry
from regrow.control.read_back import StoredSteps
from regrow.control.silent import HANGS, LATE_S, SilentKeepers
from regrow.control.states import Settling
from regrow.control.values import NEVER, Replica, SnapshotAck, Version, short_id

UNSAFE_S, UNSAFE = 120.0, 2.0  # without a commit in memory, and times what steps without one usually take: worth a word
UNHEARD_S = 1.0  # that some nodes have not reported what others have: those with their copies are asked
MOST_UNHEARD = 8  # of such nodes: where more are late, copies are slow
SILENT_S = 30.0  # that nodes have not reported: none waits for another one of them any more

SHOW_S = 10.0  # between two times that nodes' times are shown

COPIES = -2  # the number of the question; others' are above


class Snapshots:
    """The run's keepers, and what they hold."""

    def __init__(
        self,
        out: Outbox,
        cadence: Cadence,
        is_whole: IsWhole,
        *,
        copies: int,
        upload_timeout_s: float,
        steps: StoredSteps,
        first_message: int,
        fan_out: int,
        now: float,
    ) -> None:
        self.keepers = KeeperRegistry(fan_out, copies)
        self.commits = CommitTracker(is_whole)
        self.checkpoints = Checkpoints(
            cadence, self.commits, self.keepers, out, timeout_s=upload_timeout_s, steps=steps
        )
        self.silent = SilentKeepers(out)
        self.awaited = AwaitedNodes(self.commits, self.keepers, self.checkpoints, out)
        self._out, self._message = out, first_message
        self._announced: tuple[Version, Version, tuple[Version, ...]] = (NEVER, NEVER, ())  # see `_to_announce`
        self._begun_at = self._safe_at = now  # when a group began to train, and a snapshot last committed
        self._complaints: set[str] = set()  # in this generation
        self._given_up: dict[str, str] = {}  # nodes, and to which other one each cannot copy
        self._unreported = NEVER, now  # a version that some nodes have not reported, and since when
        self._set_apart_at = now  # since when nodes wait for others as they do
        self._copies: dict[tuple[Version, str], set[str]] = {}  # of a version of a node: which nodes hold all of them
        self._copies_asked_at = now
        self._by_way: dict[str, float] = {}  # nodes heard only by way of those with their copies, and since when
        self._times, self._shown_at = SnapshotTimes(), now

    def tick(self, now: float) -> None:
        """Decide what time alone decides."""
        self.checkpoints.tick(now)
        if self.keepers.links.try_again(now) or self._given_up:
            self._move_copies()
        if now - self._shown_at > SHOW_S:
            self._shown_at = now
            self._out.append(ShowSnapshots(self._times.rows()))
        self._look_for_silent_keepers(now)

    @property
    def settling(self) -> Settling:
        """What of the run is still to be written."""
        checkpoints, newest = self.checkpoints, self.commits.newest
        unstored = checkpoints.unstored
        peers = newest.peers if newest is not None and unstored is not None else {}
        nodes = {*peers}.union(*peers.values()) & self.keepers.known.keys()
        step = unstored.step if unstored else None
        lost = checkpoints.failures.lost(
            lambda step: checkpoints.is_left or step <= checkpoints.stored or self.commits.holds(step)
        )
        return Settling(checkpoints.busy, checkpoints.failures.of_newest, step, tuple(sorted(nodes)), lost)

    def begin(self, generation: int, start_step: int, nodes: Sequence[str], now: float) -> None:
        """A generation trains from `start_step`: later snapshots and checkpoints of those before it are given up."""
        self._complaints.clear()
        self._by_way.clear()
        self._given_up.clear()
        self._safe_at = self._begun_at = now
        self._times.begin(nodes)
        self.keepers.links.begin()
        self.keepers.begin(nodes)
        self.commits.begin(generation, start_step, self.keepers.peers)
        self._tell_places()
        self.checkpoints.began(start_step, now)
        self.checkpoints.failures.forget()

    def sealed(self, acks: Sequence[SnapshotAck], now: float) -> None:
        """Nodes have versions safe; once it is all of a version's, that is committed."""
        self._times.take(acks)
        for ack in acks:
            self.keepers.links.copied(ack.node, ack.peers)
            if ack.by_way:
                self._by_way.setdefault(ack.node, now)
            else:
                self._by_way.pop(ack.node, None)
        commits = [ack for ack in acks if self.commits.sealed(ack) is not None]
        if commits:
            self._safe_at = now
            self._out.append(SnapshotCommitted(commits[-1].version))
            self.checkpoints.begin_if_due(now)

    def discard(self, now: float) -> None:
        """What is in memory is not to be used: the state itself went wrong."""
        self.commits.discard()
        self.checkpoints.discard(now)
        self.checkpoints.failures.forget()

    def verify(self, step: int, verifies: int) -> None:
        """States up to that of `step` are verified; the next step that verifies is `verifies`."""
        self.commits.verify(step)
        self.commits.expect(verifies)
        self.checkpoints.steps.verify(step)

    def go_back(self, step: int, now: float) -> None:
        """What comes after this step is not to be used of what is in memory: some rank computed wrong."""
        self.commits.roll_back(step)
        self.checkpoints.discard(now)
        self.checkpoints.failures.forget()

    def keeper_up(self, event: KeeperUp, now: float) -> None:
        self.keepers.up(event)
        self.silent.is_back(event.node)
        if event.restarted and self.keepers.links.is_back(event.node) and self.keepers.replan():
            self.commits.replan(self.keepers.peers)
        if self.keepers.completes():
            self._send_places()
            self._announce()
        elif event.restarted and event.node in {*self.keepers.peers, *self.keepers.outside}:
            self._tell_places()
            self._announce()

    def keepers_found(self, event: KeepersFound, counts: Callable[[Version], bool]) -> None:
        self.commits.rebuild(event.known, counts)

    def nodes_alive(self, event: NodesAlive, now: float) -> None:
        self.keepers.nodes_alive(event.nodes)
        if self.keepers.has_lost_holders:  # none of the group's nodes has it, so no group forms for it
            self.replan()

    def neighbours(self, event: NeighboursAsked, now: float) -> None:
        self._out.append(Reply(self.keepers.neighbours(event.node, event.address)))

    def gone_dark(self, nodes: set[str], now: float) -> None:
        self.keepers.gone_dark(nodes)
        self.awaited.gone_dark(now)
        self.checkpoints.gone_dark(nodes, now)
        self.checkpoints.read_backs.gone_dark(nodes)

    def complain(self, event: Complaint, now: float, *, wanted: bool = True) -> None:
        """Said once a generation: a keeper tries again and again, for a while. Then others hold its copies, where these
        are `wanted`: the next group has other places."""
        node, peer = event.node, event.peer
        is_planned = peer in self.keepers.peers.get(node, ())
        if wanted and is_planned and self.keepers.links.refused(node, peer, event.tried_s, now):
            self._given_up[node] = peer
        if self.keepers.has_lost_holders:
            self.replan()
        if node not in self._complaints:
            self._complaints.add(node)
            self._out.record("snapshot_failed", detail=event.text)

    def complain_if_unsafe(self, now: float, between_s: float) -> None:
        """A group trains on, and nothing of it is committed; snapshots are up to `between_s` apart."""
        unsafe_s = max(UNSAFE_S, UNSAFE * between_s)
        if (self.keepers.peers or self.keepers.missing) and now - self._safe_at > unsafe_s:
            text = f"no snapshot has been committed for {unsafe_s:.0f} s; a lost node would cost as much"
            self.complain(Complaint("", text), now)

    def answered(self, event: Answered, now: float) -> list[SnapshotAck]:
        """A keeper that answers does not hang, however long its copies take; the reports of nodes of which those asked
        have all copies."""
        if event.question == ARE_BACK and event.answer is not None:
            self.keepers.is_back(event.node)
        elif event.question == HANGS:
            self.silent.answered(event.node, now)
        elif event.question == COPIES and event.answer is not None:
            version, nodes = self.commits.unreported()
            whole = [node for node in nodes if _holds_copies(event.answer, node, version)]
            for node in whole:
                self._copies.setdefault((version, node), set()).add(event.node)
            peers = self.keepers.peers
            heard = [node for node in whole if self._copies[version, node] >= {*peers[node]}]
            return [SnapshotAck(node, version, peers[node], by_way=True) for node in heard]
        return []

    def replan(self) -> bool:
        """Whether others hold copies from here on."""
        if not self.keepers.replan():
            return False
        self._send_places()
        return True

    def _move_copies(self) -> None:
        """Once for all links that were given up since: everything that is not committed is reported anew."""
        given_up, self._given_up = self._given_up, {}
        if not self.replan():
            return
        for node, peer in given_up.items():
            peers = self.keepers.peers.get(node, ())
            holders = ", ".join(each[:12] for each in peers)
            then = f"its copies are on {holders} from here on" if holders else "and to no other: it has no copies"
            text = f"node {node[:12]} cannot copy its snapshots to node {peer[:12]}: {then}"
            self._out.record("copies_moved", node=node, peers=list(peers), detail=text)

    def _send_places(self) -> None:
        """What is not committed is reported again."""
        self.commits.replan(self.keepers.peers)
        self._tell_places()

    def _tell_places(self) -> None:
        self._message += 1
        self._out.append(SendPlaces(self._message, self.keepers.places()))

    def _look_for_silent_keepers(self, now: float) -> None:
        """Nodes do not report what others have: they are asked themselves, and those with their copies; after a while
        none waits for another one of them any more. So with nodes that only those with their copies speak for."""
        version, nodes = self.commits.unreported()
        known, since = self._unreported
        if version != known:
            self._unreported, self._copies_asked_at, since = (version, now), now, now
            self._copies.clear()
        elif 0 < len(nodes) <= MOST_UNHEARD and now - self._copies_asked_at > UNHEARD_S:
            self._copies_asked_at = now
            holders = sorted(
                {peer for node in nodes for peer in self.keepers.peers[node] if self.keepers.is_there(peer)}
            )
            self._out.append(Ask(COPIES, Question.HOLDINGS, tuple(holders), since=version))
        self.silent.unknown(self.keepers.missing, self._begun_at, now)
        by_way = {node for node, unheard_since in self._by_way.items() if now - unheard_since > SILENT_S}
        late_s = now - since
        is_late = late_s > LATE_S and (len(nodes) <= MOST_UNHEARD or late_s > SILENT_S)
        self.silent.late(by_way | ({*nodes} if is_late else set()), now)
        apart = by_way | ({*nodes} if late_s > SILENT_S else set())
        if apart and now - self._set_apart_at > SILENT_S:
            self._set_apart_at = now
            if self.keepers.set_apart(apart):
                self._send_places()

    def announce_changes(self) -> None:
        """Say what is committed and what is pinned, once that has changed."""
        (newest, *stays), (known, *stayed) = self._to_announce, self._announced
        if newest not in (NEVER, known) or stays != stayed:
            self._announce()

    @property
    def _to_announce(self) -> tuple[Version, Version, tuple[Version, ...]]:
        """What is committed in memory, and what must stay there: on its way to storage, or to go back to."""
        newest, upload = self.commits.newest, self.checkpoints.upload
        return newest.version if newest else NEVER, upload.version if upload else NEVER, self.commits.kept

    def _announce(self) -> None:
        newest, pinned, kept = self._announced = self._to_announce
        self._message += 1
        needed = frozenset(each.generation for each in (newest, pinned, *kept) if each != NEVER)
        nodes = self.keepers.known_of((*self.keepers.speakers, *self.keepers.bystanders(needed)))
        if nodes:
            self._out.append(Announce(self._message, newest, pinned, nodes, kept))


def _holds_copies(held: Sequence[Replica], node: str, version: Version) -> bool:
    """Whether these are, among others, copies of all that a node's ranks wrote of a version."""
    copies = [each for each in held if each.moment == version and each.copy_of == short_id(node)]
    return bool(copies) and len(copies) >= copies[0].writers
