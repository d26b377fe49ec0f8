"""The handles of keepers: what control wants of them becomes calls, what they answer becomes events.

Nothing here waits but `adopt`, `greet` and `holders`, which are not called with the coordinator's lock held.
"""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, as_completed
from functools import partial
from itertools import chain
from queue import Empty, SimpleQueue
from typing import Any

import ray

from regrow.control import events as e
from regrow.control.commands import (
    Announce,
    Ask,
    Kill,
    PublishIndex,
    Question,
    ReadBack,
    ReadBackAll,
    RestartKeeper,
    SendPlaces,
    TellOver,
    Write,
    WriteAll,
)
from regrow.control.values import NOTHING, Version
from regrow.errors import CheckpointError, first_line
from regrow.runtime.calls import KeeperClient
from regrow.runtime.keeper import KeeperInfo, KeeperSettings, Place, end_keepers, running_keepers
from regrow.runtime.liveness.connections import HeldConnections
from regrow.runtime.publisher import Publisher
from regrow.show.units import counted
from regrow.state.disk.upload import Joined, Published, Written
from regrow.state.memory.holders import Holders, Holding
from regrow.state.memory.ranges import Address
from regrow.state.memory.slots import Committed
from regrow.state.memory.transport import TransportError

ANSWER_S = 10.0  # for keepers to answer a small question; where many are asked, from one answer to the next
ALL_ANSWER_S = 20.0  # for all of them: the rank that asked is not taken for hung meanwhile (`control.phases`)

LEFT = (
    "node {}: its keeper was ended before it had given its memory back; what is left in snapshot.folder is deleted by "
    "a keeper that starts there"
)

Then = Callable[["Future[Any]"], e.Event | None]  # of an answer, what control is told


class Fleet:
    """All keepers of a run."""

    def __init__(self, run_id: str, secret: bytes, publisher: Publisher) -> None:
        self._run_id, self._secret, self._publisher = run_id, secret, publisher
        self._known: dict[str, tuple[KeeperClient, KeeperInfo]] = {}
        self._unheard: dict[str, Any] = {}  # keepers by node that have not said yet what they hold
        self._pending: dict[Future[Any], Then] = {}
        self._has_late = False  # a keeper has answered late what it holds
        self._has_looked = False  # for keepers of an earlier coordinator, and asked them what they hold
        self._connections = HeldConnections()

    @property
    def has_adopted(self) -> bool:
        """Whether all keepers of an earlier coordinator have said what they hold, are gone, or never can serve."""
        return self._has_looked and not self._unheard

    def register(self, handle: Any, info: KeeperInfo, *, restarted: bool = False) -> e.KeeperUp:
        """A node's keeper is up, or is up again."""
        self._known[info.node] = KeeperClient(handle), info
        self._unheard.pop(info.node, None)
        if info.lifeline:
            self._connections.hold(info.node, (info.address[0], info.lifeline))
        return e.KeeperUp(info.node, info.domain, info.address, restarted, info.node_up_s)

    def adopt(self, me: Any) -> list[e.Event]:
        """Keepers that outlived an earlier coordinator of this run hold what it had committed. Those that answer late
        are told of then."""
        self._unheard = running_keepers(self._run_id)
        late = {KeeperClient(handle).serve(me, self._secret): node for node, handle in self._unheard.items()}
        handles, found = dict(self._unheard), list[e.Event]()

        def take(answer: "Future[KeeperInfo]", node: str, *, is_late: bool) -> e.Event | None:
            if (error := answer.exception()) is None:
                self._has_late |= is_late
                return self.register(handles[node], answer.result(), restarted=is_late)
            out_of_reach = isinstance(getattr(error, "cause", None), TransportError)  # what it holds, for each job
            if out_of_reach or isinstance(error, ray.exceptions.ActorDiedError):  # with what it held
                self._unheard.pop(node, None)
            return None

        for call, _ in _as_answered(list(late)):
            if (event := take(call, late.pop(call), is_late=False)) is not None:
                found.append(event)
        self._pending |= {call: partial(take, node=node, is_late=True) for call, node in late.items()}
        self._has_looked = True
        return [*found, self._found()]

    def other_settings(self, mine: KeeperSettings) -> str:
        """Which settings the keepers that are known go by in place of these, a line; empty where by none."""
        known = [info.settings for _, info in self._known.values() if info.settings is not None]
        found = Counter(each for theirs in known for each in mine.in_place(theirs))
        return ", ".join(f"{each} on {counted(number, 'node')}" for each, number in found.items())

    def _found(self) -> e.KeepersFound:
        """What the keepers that are known said when they were."""
        infos = [info for _, info in self._known.values()]
        known = tuple((info.node, info.newest, info.held) for info in infos)
        return e.KeepersFound(known, max((info.newest_generation for info in infos), default=NOTHING))

    def greet(self, handle: Any, me: Any) -> e.KeeperUp:
        """A keeper was restarted: it takes its old place."""
        return self.register(handle, KeeperClient(handle).serve(me, self._secret).result(ANSWER_S), restarted=True)

    def holders(
        self,
        since: Version,
        can_ask: Callable[[str], bool],
        group: Collection[str] | None = None,
    ) -> dict[Version, Holders]:
        """What nodes hold of this version and later ones: a group's nodes, and others until it is whole; or all."""
        known = list(self._known.items())
        calls = {client.holdings(since): info for node, (client, info) in known if can_ask(node)}
        left = {info.node for info in calls.values() if group is not None and info.node in group}
        answers: list[tuple[str, Address, list[Holding]]] = []
        for call, more in _as_answered(calls):
            info = calls[call]
            left.discard(info.node)
            with contextlib.suppress(ray.exceptions.RayError):
                answers.append((info.node, info.address, call.result()))
            if group is None or left or more:
                continue
            if since in (found := Holders.by_moment(answers)) and found[since].is_whole:
                break  # a node that has just died, which Ray may not know, is not waited for if it need not be
        return Holders.by_moment(answers)

    # what control wants

    def kill(self, command: Kill) -> None:
        for client in self._clients([command.node]):
            client.end_process(command.pid, command.started)

    def remember(self, generation: int, nodes: Iterable[str]) -> list[Future[None]]:
        """Have these nodes' keepers remember that a generation gets this number."""
        return [client.remember(generation) for client in self._clients(nodes)]

    def tell_over(self, command: TellOver) -> None:
        for client in self._clients(command.nodes):
            client.over(command.generation)

    def send_places(self, command: SendPlaces) -> None:
        for node, place in command.places.items():
            leader = self._known[place.leader][0].handle if place.leader else None
            members = tuple(client.handle for client in self._clients(place.members))
            mine = Place(place.peers, leader, members, place.num_nodes, command.number)
            self._known[node][0].take_place(mine)

    def announce(self, command: Announce) -> None:
        for client in self._clients(command.nodes):
            client.committed(Committed(command.newest, command.pinned, command.number, command.kept))

    def restart(self, command: RestartKeeper) -> None:
        known = self._known.get(command.node)
        handle = known[0].handle if known is not None else self._unheard.get(command.node)
        if handle is not None:
            ray.kill(handle, no_restart=False)

    def ask(self, command: Ask) -> None:
        for node in command.nodes:
            client = self._known[node][0]
            questions: dict[Question, Callable[[], Future[Any]]] = {
                Question.HEARTBEATS: client.pulses,
                Question.LINKS: client.links,
                Question.POSITIONS: client.where,
                Question.GPUS: client.gpus,
                Question.STACKS: client.look,
                Question.HOLDINGS: lambda client=client: client.holdings(command.since),  # type: ignore[misc]
            }

            def then(answer: "Future[Any]", node: str = node) -> e.Event:
                gone = answer.exception() is not None  # its node is, which shows by itself
                found = None if gone else answer.result()
                if found is not None and command.question is Question.HOLDINGS:
                    found = list(chain.from_iterable(found))
                return e.Answered(command.number, node, found)

            self._pending[questions[command.question]()] = then

    def write(self, command: Write) -> None:
        order = self._publisher.order(command)

        def then(answer: "Future[Written]") -> e.Event:
            if (error := answer.exception()) is not None:
                cause = getattr(error, "cause", None) or error
                has_none = isinstance(cause, ray.exceptions.RayError | CheckpointError)  # storage's are OSErrors
                return e.WriteFailed(command.upload, command.origin, command.node, _problem(error), has_none)
            self._publisher.written(command.upload, order, answer.result())
            return e.Written(command.upload, command.origin, answer.result().times)

        self._pending[self._known[command.node][0].write(order)] = then

    def write_all(self, command: WriteAll) -> None:
        order, upload = self._publisher.order_all(command), command.upload

        def then(answer: "Future[Joined]", node: str) -> e.Event:
            if answer.exception() is not None:
                return e.Spoken(upload, node, ())
            joined = answer.result()
            self._publisher.joined(upload, joined)
            written = [e.Written(upload, each, times) for each, times in joined.times.items()]
            failed = [e.WriteFailed(upload, each, each, *problem) for each, problem in joined.problems.items()]
            return e.Spoken(upload, node, (*written, *failed))

        for node in command.nodes:
            self._pending[self._known[node][0].write_all(order)] = partial(then, node=node)

    def read_back(self, command: ReadBack) -> None:
        upload = self._publisher.upload(command.upload)

        def then(answer: "Future[str]") -> e.Event:
            if (error := answer.exception()) is not None:
                return e.HasReadBack(command.upload, command.origin, None, _problem(error))
            return e.HasReadBack(command.upload, command.origin, answer.result())

        files = upload.files_of(command.origin)
        self._pending[self._known[command.node][0].read_back(str(upload.folder), files, command.origin)] = then

    def read_back_all(self, command: ReadBackAll) -> None:
        order, upload = self._publisher.upload(command.upload).for_all, command.upload
        assert order is not None, "all were written for one"

        def then(answer: "Future[dict[str, str]]", node: str) -> e.Event:
            found = {} if answer.exception() is not None else answer.result()
            return e.Spoken(upload, node, tuple(e.HasReadBack(upload, *each) for each in found.items()))

        for node in command.nodes:
            self._pending[self._known[node][0].read_back_all(order)] = partial(then, node=node)

    def publish_index(self, command: PublishIndex) -> None:
        """Have a keeper write the metadata file: of 16,384 ranks it is 150 MB."""

        def then(answer: "Future[Published]") -> e.Event:
            if answer.exception() is not None:
                return e.IndexNotWritten(command.upload)  # whatever it was: the coordinator tries itself
            self._publisher.index_written(command.upload, answer.result())
            return e.IndexWritten(command.upload)

        order = self._publisher.index_order(command)
        self._pending[self._known[command.by][0].put_together(order)] = then

    def answers(self) -> list[e.Event]:
        """What keepers have answered since the last call, and whose connections have ended."""
        done = [call for call in list(self._pending) if call.done()]
        answers = [event for call in done if (event := self._pending.pop(call)(call)) is not None]
        if self._has_late:
            self._has_late = False
            answers.append(self._found())
        return [*answers, *(e.ConnectionLost(node) for node in self._connections.lost())]

    def close(self) -> str:
        """End all keepers, those too whose workers ended before they could name them: they leave nothing in memory, or
        it is said where."""
        self._connections.close()
        known = {node: client.handle for node, (client, _) in self._known.items()}
        left = end_keepers(running_keepers(self._run_id) | known)
        return LEFT.format(", ".join(node[:12] for node in left)) if left else ""

    def _clients(self, nodes: Iterable[str] | Sequence[str]) -> list[KeeperClient]:
        return [self._known[node][0] for node in nodes if node in self._known]


def _as_answered(calls: Collection["Future[Any]"]) -> Iterator[tuple["Future[Any]", bool]]:
    """Calls as they are answered, each with whether there are more answers already; what is late is left out."""
    done = SimpleQueue[Future[Any]]()
    for call in calls:
        call.add_done_callback(done.put)
    begun = time.monotonic()
    give_up_at = begun + ANSWER_S
    for _ in calls:
        try:
            call = done.get(timeout=max(0.0, give_up_at - time.monotonic()))
        except Empty:
            return
        give_up_at = min(time.monotonic() + ANSWER_S, begun + ALL_ANSWER_S)
        yield call, not done.empty()


def secret_of_keepers(run_id: str) -> bytes | None:
    """The secret that the keepers of a run go by: of the first one that answers."""
    calls = [KeeperClient(handle).secret() for handle in running_keepers(run_id).values()]
    try:
        return next((found for call in as_completed(calls, ANSWER_S) if (found := _answer(call)) is not None), None)
    except TimeoutError:
        return None


def _answer(call: "Future[bytes]") -> bytes | None:
    with contextlib.suppress(ray.exceptions.RayError):  # its node is gone, or it serves no run yet
        return call.result()
    return None


def _problem(error: BaseException) -> str:
    """Why a keeper did not write, or read back."""
    if isinstance(error, ray.exceptions.RayError) and not isinstance(error, ray.exceptions.RayTaskError):
        return "is gone"
    return first_line(getattr(error, "cause", None) or error)
