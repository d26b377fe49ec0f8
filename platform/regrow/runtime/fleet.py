"""The coordinator's dealings with keepers: what is committed in memory, and what of it goes to storage.

A step is committed in memory once every node has it safe (`commits`). Some of these steps become checkpoints
(`plan.cadence`): keepers write them while training goes on, one at a time, and what is on its way is pinned in memory.
Nothing here waits for storage or for a keeper: `tick`, called often, takes what has come of it.
"""

import contextlib
import random
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import ray

from regrow.control.cadence import Cadence
from regrow.control.commits import CommitTracker
from regrow.control.peers import plan_peers, plan_tree
from regrow.control.values import Peer, SnapshotAck, Version
from regrow.errors import first_line
from regrow.runtime.keeper import FAN_OUT, KeeperInfo, Place, end_keepers, running_keepers
from regrow.state.disk.catalog import step_folder, try_retain
from regrow.state.disk.format import Index
from regrow.state.disk.upload import Upload, WriteOrder, write_index
from regrow.state.memory.held import Holder, is_whole
from regrow.state.memory.slots import Committed
from regrow.storage import Storage

ANSWER_S = 10.0  # for keepers to answer a small question
ENOUGH_S = 0.05  # between looks whether those that have are enough
NEIGHBOURS = 3  # that a newcomer may try to measure its link to
RETRY_S = 30.0  # from a checkpoint that failed to the next one


class Fleet:
    """All keepers of a run. Every method is quick but `adopt`, `greet` and `newest`, which ask keepers and wait."""

    def __init__(
        self,
        run_id: str,
        secret: bytes,
        checkpoints: Storage,
        cadence: Cadence,
        *,
        keep: int,
        upload_timeout_s: float,
        commit: Callable[[str, bytes], None],
        event: Callable[..., None],
    ) -> None:
        """`commit(step folder, content)` writes COMMIT; `event(name, **fields)` goes into the run's log."""
        self.run_id, self.secret, self.checkpoints, self.cadence = run_id, secret, checkpoints, cadence
        self.keep, self.upload_timeout_s, self.commit, self.event = keep, upload_timeout_s, commit, event
        self.known: dict[str, tuple[Any, KeeperInfo]] = {}  # node -> actor, what is known of it
        self.dark: set[str] = set()  # nodes that do not answer
        self.newcomers: dict[str, Peer] = {}  # whose keepers asked for neighbours, in the order of their coming
        self.board = CommitTracker(is_whole)
        self.peers: dict[str, str] = {}  # of the current generation's nodes; one alone has another one, if that is up
        self.upload: Upload | None = None
        self.writing: dict[Any, tuple[str, WriteOrder]] = {}  # by the reference to what will come of it
        self.publishing: Future[bytes] | None = None
        self.index: Index | None = None  # of what is published
        self.deleting: Future[str] | None = None  # what is not kept
        self.wanted: int | None = None  # a step that is to be a checkpoint, or one after it
        self.wanted_at = 0.0
        self.covered = -1  # the newest step that a checkpoint was begun of
        self.retry_at = 0.0
        self.reason = ""  # for the checkpoint that is being written
        self.failure = ""  # of the newest checkpoint that was begun
        self.storage = ThreadPoolExecutor(1, thread_name_prefix="storage")
        self._messages = time.time_ns()  # above all that a coordinator before this one sent

    def adopt(self, me: Any) -> None:
        """Keepers that outlived an earlier coordinator of this run hold what it had committed."""
        calls = {handle.serve.remote(me, self.secret): handle for handle in running_keepers(self.run_id).values()}
        for call in _answered(calls):
            with contextlib.suppress(ray.exceptions.RayError):  # its node is gone
                self.register(calls[call], ray.get(call))
        self.board.rebuild((info.node, info.newest, info.held) for _, info in self.known.values())

    def register(self, handle: Any, info: KeeperInfo) -> None:
        """A node's keeper is up, or is up again."""
        self.known[info.node] = (handle, info)
        self.dark.discard(info.node)

    def neighbours(self, info: KeeperInfo) -> list[Peer]:
        """Other nodes, those that train before others that came lately, for a newcomer to measure its links to."""
        self.newcomers.pop(info.node, None)
        here, alive = [node for node in self.peers if node != info.node], self._alive()
        found = [Peer(node, self.known[node][1].address) for node in random.sample(here, min(len(here), NEIGHBOURS))]
        found += [peer for node, peer in reversed(self.newcomers.items()) if node not in self.peers]
        self.newcomers[info.node] = Peer(info.node, info.address)
        return [peer for peer in found if peer.node in alive][:NEIGHBOURS]

    def greet(self, node: str, handle: Any, me: Any) -> None:
        """A keeper was restarted: it takes its old place."""
        self.register(handle, ray.get(handle.serve.remote(me, self.secret), timeout=ANSWER_S))
        if node in self.peers or node in self.peers.values():
            self._send_places()
            self._tell()

    def begin(self, generation: int, start_step: int, nodes: list[str]) -> None:
        """A generation trains on these nodes from `start_step`. Without all their keepers nothing is committed."""
        self.cadence.resumed(start_step, time.time())
        if not self.known.keys() >= set(nodes):
            nodes = []
        self.peers = self._plan_peers(nodes)
        self.board.begin(generation, start_step, self.peers)
        self.covered = min(self.covered, start_step)
        self._send_places()
        if self.upload is not None and self.upload.moment.step > start_step:
            self._end_upload(f"the run went back to step {start_step}")

    def check_peers(self) -> None:
        """Something keeps snapshots from being safe: is it a node outside the group that held its copies, and died?"""
        outside = set(self.peers.values()) - self.peers.keys() - {""}
        if outside and outside - self._alive():
            self.peers = self._plan_peers(list(self.peers))
            self.board.replan(self.peers)
            self._send_places()

    def sealed(self, reports: list[SnapshotAck]) -> bool:
        """Nodes have a step safe; whether they were the last ones, and it is committed."""
        commits = [report for report in reports if self.board.sealed(report) is not None]
        if commits:
            self._begin_upload_if_due()
            self._tell()
        return bool(commits)

    def want(self, step: int) -> None:
        """The snapshot of this step, or the next one if it is lost, is to be a checkpoint."""
        if step > self.covered:
            self.wanted, self.wanted_at = step, time.time()
            self._begin_upload_if_due()

    def newest(self, *, group: Collection[str], logged: int) -> tuple[int, list[Holder]] | None:
        """The newest step that is whole in memory, and where its files are; None where nothing was committed.

        `group` are the nodes of those who ask, which answer soon; whose copies are nearest to them. `logged`: as for
        `CommitTracker.newest_whole`.
        """
        if self.board.newest is None:
            return None
        holders = self._ask_holders(self.board.newest.version, group)
        moment = self.board.newest_whole((holder.held for holder in holders), logged)
        return moment.step, [holder for holder in holders if holder.held.moment == moment]

    def committed(self) -> tuple[int, list[Holder]] | None:
        """The newest committed step, and all its files that anybody has, where what `newest` gave is not sound."""
        if self.board.newest is None:
            return None
        moment = self.board.newest.version
        return moment.step, [holder for holder in self._ask_holders(moment) if holder.held.moment == moment]

    def _ask_holders(self, since: Version, group: Collection[str] | None = None) -> list[Holder]:
        """Who holds what of this step and later ones: a group's nodes, and others until the step is whole; or all."""
        alive = self._alive()
        calls = {handle.holdings.remote(since): info for node, (handle, info) in self.known.items() if node in alive}
        holders: list[Holder] = []
        give_up_at = time.monotonic() + ANSWER_S
        while calls and time.monotonic() < give_up_at:
            waiting = {info.node for info in calls.values()}
            if group is not None and waiting.isdisjoint(group) and is_whole(since, [each.held for each in holders]):
                break  # a node that has just died, which Ray may not know, is not waited for if it need not be
            for call in _answered(calls, ENOUGH_S):
                info = calls.pop(call)
                with contextlib.suppress(ray.exceptions.RayError):
                    holders += [Holder(info.node, info.address, held) for held in ray.get(call)]
        return holders

    def discard(self) -> None:
        """What is in memory is not to be used: the state itself went wrong."""
        self.board.newest = None
        if self.upload is not None:
            self._end_upload("the state went wrong")

    def holds(self, step: int) -> bool:
        """Whether a step, or a later one, is committed in memory."""
        return self.board.newest is not None and self.board.newest.version.step >= step

    def keepers(self) -> dict[str, Any]:
        """Of the current generation's nodes."""
        return {node: self.known[node][0] for node in self.peers if node in self.known}

    def over(self, generation: int) -> None:
        """Have nobody of a generation wait any longer for those it has lost."""
        for keeper in self.keepers().values():
            keeper.over.remote(generation)

    def gone_dark(self, nodes: set[str]) -> None:
        """Nothing is asked of these nodes' keepers, until their workers come back with them."""
        self.dark |= nodes
        for call, (node, order) in list(self.writing.items()):
            if node in nodes:
                del self.writing[call]
                self._write_instead(node, order, "says nothing")

    def end_process(self, node: str, pid: int) -> None:
        """Kill a worker, through its node's keeper."""
        if node in self.known:
            self.known[node][0].end_process.remote(pid)

    def tick(self) -> None:
        """Take what has come of orders; go on with what they were for."""
        done, _ = ray.wait(list(self.writing), num_returns=len(self.writing), timeout=0) if self.writing else ([], [])
        for call in done:
            if call in self.writing:  # one that failed may have ended the checkpoint, and the others with it
                self._take(call)
        if self.publishing is not None and self.publishing.done():
            self._publish(self.publishing)
        if self.deleting is not None and self.deleting.done():
            problem, self.deleting = self.deleting.result(), None
            if problem:
                self.event("note", text=problem)
        late = time.time() - self.upload_timeout_s
        if self.upload is not None and self.upload.begun_at < late:
            nodes = sorted({node[:12] for node, _ in self.writing.values()})
            whom = f"node {', '.join(nodes)} writes" if nodes else "the index is being written"
            self._end_upload(f"after {self.upload_timeout_s:.0f} s {whom} still; checkpoint.timeout_s allows more")
        if self.upload is None and self.wanted is not None and self.wanted_at < late:
            self._failed(self.wanted, f"its snapshot is not committed after {self.upload_timeout_s:.0f} s")
            self.wanted = None

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written, or is to be."""
        return self.upload is not None or self.wanted is not None

    def close(self) -> None:
        """End all keepers, those too whose workers ended before they could name them: they leave nothing in memory."""
        known = {node: handle for node, (handle, _) in self.known.items()}
        end_keepers((running_keepers(self.run_id) | known).values())
        self.storage.shutdown(wait=True)

    def _alive(self) -> set[str]:
        """Nodes that Ray has not found dead, and that answer."""
        return {node["NodeID"] for node in ray.nodes() if node["Alive"]} - self.dark

    def _plan_peers(self, nodes: list[str]) -> dict[str, str]:
        """Who holds whose copies; where a group is on one node, another one that has a keeper, and no rank of it."""
        peers = plan_peers([(node, self.known[node][1].domain) for node in nodes])
        if len(nodes) == 1 and len(self.known) > 1:
            (alone,) = nodes
            domain = self.known[alone][1].domain
            others = [node for node in self.known if node != alone and node in self._alive()]
            others.sort(key=lambda node: self.known[node][1].domain == domain)
            peers[alone] = next(iter(others), "")
        return peers

    def _send_places(self) -> None:
        for node, branch in plan_tree(list(self.peers), fan_out=FAN_OUT).items():
            leader = self.known[branch.leader][0] if branch.leader else None
            members = tuple(self.known[member][0] for member in branch.members)
            place = Place(self._peer_of(node), leader, members, branch.num_nodes)
            self.known[node][0].take_place.remote(place)

    def _peer_of(self, node: str) -> Peer | None:
        peer = self.peers[node]
        return Peer(peer, self.known[peer][1].address) if peer else None

    def _tell(self) -> None:
        """Say what is committed, and what is on its way to storage."""
        newest = self.board.newest.version if self.board.newest else Version()
        state = Committed(newest, self.upload.moment if self.upload else Version())
        self._messages += 1
        outside = set(self.peers.values()) - self.peers.keys() - {""}
        for node in [*list(self.peers)[:FAN_OUT], *outside]:  # they tell the others
            self.known[node][0].committed.remote(self._messages, state)

    def _begin_upload_if_due(self) -> None:
        commit = self.board.newest
        if self.upload is not None or commit is None:
            return
        step, now = commit.version.step, time.time()
        if self.wanted is not None and step >= self.wanted:
            self.wanted, self.reason = None, "asked for"
        else:
            self.reason = self.cadence.due(step, now) if now > self.retry_at else ""
        if not self.reason:
            return
        self.cadence.begun(step, now)
        self.covered, self.failure = step, ""
        folder = self.checkpoints / step_folder(step)
        self.upload = Upload(commit.version, dict(commit.peers), folder, self.run_id)
        for node, order in self.upload.orders():
            self._ask(node, order)

    def _ask(self, node: str, order: WriteOrder) -> None:
        handle, _ = self.known[node]
        self.writing[handle.write.remote(order)] = (node, order)

    def _take(self, call: Any) -> None:
        node, order = self.writing.pop(call)
        if self.upload is None or order.moment != self.upload.moment:
            return  # of one that was given up
        try:
            self.upload.done(order, ray.get(call))
        except ray.exceptions.RayError as error:
            problem = first_line(error.cause or error) if isinstance(error, ray.exceptions.RayTaskError) else "is gone"
            self._write_instead(node, order, problem)
            return
        if self.upload.complete and self.publishing is None:
            try:
                self.index = self.upload.index()
            except Exception as error:
                self._end_upload(first_line(error))
                return
            self.publishing = self.storage.submit(write_index, self.upload.folder, self.index)

    def _write_instead(self, node: str, order: WriteOrder, problem: str) -> None:
        """Another node that holds the same writes what this one could not."""
        if self.upload is None or order.moment != self.upload.moment:
            return
        instead = self.upload.failed(node, order, problem)
        if instead is not None and instead[0] in self.known.keys() - self.dark:
            self._ask(*instead)
        else:
            self._end_upload(self.upload.problem or f"node {node[:12]} {problem}")

    def _publish(self, publishing: Future[bytes]) -> None:
        """The index is written, or is not: COMMIT comes last."""
        self.publishing = None
        upload, index = self.upload, self.index
        assert upload is not None
        assert index is not None
        try:
            pointer = publishing.result()
            self.commit(step_folder(index.step), pointer)
        except Exception as error:  # storage raises many kinds
            self._end_upload(first_line(error))
            return
        seconds = time.time() - upload.begun_at
        self.cadence.written(took_s=seconds)
        self.event("checkpoint", step=index.step, seconds=seconds, bytes=index.num_bytes, reason=self.reason)
        self._end_upload("")
        self.retain()

    def retain(self) -> None:
        """Have checkpoints deleted that are more than is kept."""
        self.deleting = self.storage.submit(try_retain, self.checkpoints, keep=self.keep)

    def _end_upload(self, problem: str) -> None:
        """The checkpoint is committed, or given up for a reason."""
        assert self.upload is not None
        if problem:
            self.cadence.abandoned()
            self._failed(self.upload.moment.step, problem)
        self.upload, self.index, self.publishing = None, None, None
        self.writing.clear()
        self._begin_upload_if_due()
        self._tell()

    def _failed(self, step: int, problem: str) -> None:
        self.retry_at = time.time() + RETRY_S
        self.failure = f"the checkpoint of step {step} was not written: {problem}"
        self.event("checkpoint_failed", step=step, detail=problem)


def _answered(calls: dict[Any, Any], wait_s: float = ANSWER_S) -> list[Any]:
    """The calls that were answered in time."""
    done: list[Any] = ray.wait(list(calls), num_returns=len(calls), timeout=wait_s)[0] if calls else []
    return done
