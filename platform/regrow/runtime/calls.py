"""What workers, keepers and Ray Train's controller call of the coordinator, and it of keepers: typed, both ways.

The protocols are what the actors offer, and mypy holds the actors to them; the clients are the one place where a call
is put into Ray's `handle.method.remote(...)`. `CoordinatorClient` puts its generation into every call that is fenced.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import ray

from regrow.control.drains import Maintenance
from regrow.control.health import Pulse
from regrow.control.membership import Member
from regrow.control.states import Answer, RowAnswer, StartedAnswer
from regrow.control.values import GpuReading, Peer, SnapshotAck, Version
from regrow.control.verification import Outcome
from regrow.state.disk.format import DataFile
from regrow.state.disk.packed import PackedFiles
from regrow.state.disk.upload import IndexOrder, Joined, OrderForAll, Published, WriteOrder, Written
from regrow.state.memory.holders import Holders, Holding
from regrow.state.memory.slots import Committed
from regrow.storage import RETRY_DEADLINE_S

if TYPE_CHECKING:
    from regrow.runtime.keeper import KeeperInfo, Place

CALL_TIMEOUT_S = 120.0  # of a call to the coordinator
COMMIT_TIMEOUT_S = CALL_TIMEOUT_S + 2 * RETRY_DEADLINE_S  # of one that waits for storage: for the log, then for COMMIT

Value = TypeVar("Value")
Death = tuple[str, int, str, str]  # of a process, by node and pid: the cause, and a sentence


class CoordinatorCalls(Protocol):
    """The coordinator's actor, as others than the driver see it."""

    def ready(self) -> int: ...
    def join(self, member: Member, expected: int) -> None: ...
    def join_all(self, joining: Sequence[tuple[Member, int]]) -> None: ...
    def formation(self, member_id: str, after: int) -> Answer: ...
    def formations(self, asking: Sequence[tuple[str, int]]) -> list[Answer]: ...
    def next_step(self) -> int: ...
    def stored_step(self) -> int: ...
    def trusted_step(self) -> int | None: ...
    def spared_step(self) -> int | None: ...
    def secret(self) -> bytes: ...
    def start_training(self, generation: int, start_step: int, details: Mapping[str, Any]) -> None: ...
    def now(self) -> float: ...
    def row(self, generation: int, row: Mapping[str, Any]) -> RowAnswer: ...
    def rows_again(self, generation: int, since: int, rows: Sequence[Mapping[str, Any]]) -> RowAnswer: ...
    def verified(self, generation: int, step: int, outcome: Outcome) -> None: ...
    def want_checkpoint(self, generation: int, step: int) -> None: ...
    def commit(self, generation: int, step_folder: str, pointer: bytes) -> None: ...
    def event(self, generation: int, event: str, fields: Mapping[str, Any]) -> None: ...
    def note(self, event: str, fields: Mapping[str, Any]) -> None: ...
    def leaving(self, generation: int, step: int, cause: str) -> None: ...
    def not_finite(self, generation: int, step: int, detail: str) -> None: ...
    def done(self) -> None: ...
    def broke(self, generation: int, detail: str, rank: int | None = None) -> None: ...
    def unfit(self, node: str, pid: int, detail: str, machine: str) -> None: ...
    def trouble(self, generation: int, member: Member, expected: int, message: str) -> None: ...
    def newest_snapshot(self) -> Holders | None: ...
    def committed_snapshot(self) -> Holders | None: ...
    def register_keeper(self, handle: Any, info: "KeeperInfo") -> None: ...
    def neighbours(self, info: "KeeperInfo") -> list[Peer]: ...
    def greet(self, node: str, handle: Any) -> None: ...
    def snapshots_sealed(self, reports: Sequence[SnapshotAck]) -> None: ...
    def complaint(self, node: str, text: str, peer: str = "", tried_s: float = 0.0) -> None: ...
    def gone(self, node: str, pid: int) -> None: ...
    def gpu_error(self, node: str, gpu: str, xid: int) -> None: ...
    def ray_view(
        self, dead: Sequence[Death], left: int, draining: Mapping[str, float], placed: Mapping[str, int]
    ) -> None: ...
    def started(self, processes: Sequence[tuple[str, int, float]]) -> StartedAnswer: ...
    def group_failed(self, cause: str, detail: str, ranks: Sequence[int]) -> None: ...
    def group_shut_down(self) -> None: ...
    def group_started(self, processes: Sequence[tuple[str, int]]) -> None: ...
    def avoided_nodes(self) -> set[str]: ...
    def fail(self, message: str) -> None: ...
    def drain(self, node: str) -> str: ...
    def undrain(self, node: str) -> str: ...
    def maintenance(self) -> Maintenance: ...


class KeeperCalls(Protocol):
    """A keeper's actor."""

    def serve(self, coordinator: Any, secret: bytes) -> "KeeperInfo": ...
    def secret(self) -> bytes: ...
    def seat(self, member: Member, expected: int, after: int) -> Answer | None: ...
    def broke(self, generation: int, detail: str, rank: int | None = None) -> None: ...
    def take_place(self, place: "Place") -> None: ...
    def relay(self, reports: Sequence[SnapshotAck]) -> None: ...
    def committed(self, state: Committed) -> None: ...
    def holdings(self, since: Version) -> list[Holding]: ...
    def write(self, order: WriteOrder) -> Written: ...
    def write_all(self, order: OrderForAll) -> Joined: ...
    def read_back(self, folder: str, files: Sequence[DataFile] | PackedFiles, origin: str) -> str: ...
    def read_back_all(self, order: OrderForAll) -> dict[str, str]: ...
    def put_together(self, order: IndexOrder) -> Published: ...
    def pulses(self) -> list[Pulse]: ...
    def where(self) -> list[Pulse]: ...
    def gpus(self) -> list[GpuReading]: ...
    def links(self) -> dict[str, float]: ...
    def look(self) -> str: ...
    def check_link(self, neighbours: Sequence[Peer], least_bytes_per_s: float) -> str: ...
    def remember(self, generation: int) -> None: ...
    def over(self, generation: int) -> None: ...
    def end_process(self, pid: int, started: int) -> None: ...
    def close(self) -> None: ...


class KeeperClient:
    """A keeper, to the coordinator. Calls with an answer return a future of it; its errors are Ray's."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    def serve(self, coordinator: Any, secret: bytes) -> "Future[KeeperInfo]":
        return _future(self.handle.serve.remote(coordinator, secret))

    def secret(self) -> Future[bytes]:
        return _future(self.handle.secret.remote())

    def holdings(self, since: Version) -> Future[list[Holding]]:
        return _future(self.handle.holdings.remote(since))

    def write(self, order: WriteOrder) -> Future[Written]:
        return _future(self.handle.write.remote(order))

    def write_all(self, order: OrderForAll) -> Future[Joined]:
        return _future(self.handle.write_all.remote(order))

    def read_back(self, folder: str, files: Any, origin: str) -> Future[str]:
        """`files`: of one origin, or those of many, or where Ray holds these."""
        return _future(self.handle.read_back.remote(folder, files, origin))

    def read_back_all(self, order: OrderForAll) -> Future[dict[str, str]]:
        return _future(self.handle.read_back_all.remote(order))

    def put_together(self, order: IndexOrder) -> Future[Published]:
        return _future(self.handle.put_together.remote(order))

    def pulses(self) -> Future[list[Pulse]]:
        return _future(self.handle.pulses.remote())

    def where(self) -> Future[list[Pulse]]:
        return _future(self.handle.where.remote())

    def gpus(self) -> Future[list[GpuReading]]:
        return _future(self.handle.gpus.remote())

    def links(self) -> Future[dict[str, float]]:
        return _future(self.handle.links.remote())

    def look(self) -> Future[str]:
        return _future(self.handle.look.remote())

    def take_place(self, place: "Place") -> None:
        self.handle.take_place.remote(place)

    def committed(self, state: Committed) -> None:
        self.handle.committed.remote(state)

    def remember(self, generation: int) -> Future[None]:
        return _future(self.handle.remember.remote(generation))

    def over(self, generation: int) -> None:
        self.handle.over.remote(generation)

    def end_process(self, pid: int, started: int) -> None:
        self.handle.end_process.remote(pid, started)


class CoordinatorClient:
    """The coordinator, to all others than the driver; to a worker in its generation, once it has one.

    Calls that return a reference are waited for with `ray.get`, which raises what the coordinator raised: a worker
    that is fenced off ends there.
    """

    def __init__(self, handle: Any, generation: int = 0) -> None:
        self.handle, self.generation = handle, generation

    # before a generation

    def join(self, member: Member, expected: int) -> None:
        _wait(self.handle.join.remote(member, expected))

    def formation(self, member_id: str, after: int) -> Answer:
        return cast(Answer, _wait(self.handle.formation.remote(member_id, after)))

    def join_all(self, joining: Sequence[tuple[Member, int]]) -> None:
        _wait(self.handle.join_all.remote(joining))

    def formations(self, asking: Sequence[tuple[str, int]]) -> list[Answer]:
        return cast("list[Answer]", _wait(self.handle.formations.remote(asking)))

    def trouble(self, generation: int, member: Member, expected: int, message: str) -> None:
        _wait(self.handle.trouble.remote(generation, member, expected, message))

    def next_step(self) -> int:
        return int(_wait(self.handle.next_step.remote()))

    def stored_step(self) -> int:
        """The newest step that is in storage, as far as the coordinator knows; NOTHING: none."""
        return int(_wait(self.handle.stored_step.remote()))

    def trusted_step(self) -> int | None:
        """The newest step that may be restored; None: any."""
        return cast("int | None", _wait(self.handle.trusted_step.remote()))

    def spared_step(self) -> int | None:
        """The step that a deletion of old checkpoints leaves, NOTHING: none; None: none is to be deleted."""
        return cast("int | None", _wait(self.handle.spared_step.remote()))

    def secret(self) -> bytes:
        """That keepers and their clients prove to each other."""
        return bytes(_wait(self.handle.secret.remote()))

    def newest_snapshot(self) -> Holders | None:
        return cast("Holders | None", _wait(self.handle.newest_snapshot.remote()))

    def committed_snapshot(self) -> Holders | None:
        return cast("Holders | None", _wait(self.handle.committed_snapshot.remote()))

    def register_keeper(self, keeper: Any, info: "KeeperInfo") -> None:
        _wait(self.handle.register_keeper.remote(keeper, info))

    def neighbours(self, info: "KeeperInfo") -> list[Peer]:
        return cast("list[Peer]", _wait(self.handle.neighbours.remote(info)))

    def unfit(self, node: str, pid: int, detail: str, machine: str) -> None:
        _wait(self.handle.unfit.remote(node, pid, detail, machine))

    # in it; refused once it is over

    def start_training(self, start_step: int, details: Mapping[str, Any]) -> None:
        _wait(self.handle.start_training.remote(self.generation, start_step, details))

    def now(self) -> float:
        """Unix time by its clock."""
        return float(_wait(self.handle.now.remote()))

    def commit(self, step_folder: str, pointer: bytes) -> None:
        """Raises what it raised itself, OSError among that, and TimeoutError where it does not answer."""
        try:
            _wait(self.handle.commit.remote(self.generation, step_folder, pointer), timeout_s=COMMIT_TIMEOUT_S)
        except ray.exceptions.GetTimeoutError as error:
            raise TimeoutError(f"the run's coordinator has not answered for {COMMIT_TIMEOUT_S:.0f} s") from error
        except ray.exceptions.RayTaskError as error:
            raise (error.cause or error) from None

    def row(self, row: Mapping[str, Any]) -> Any:
        """A reference to a `RowAnswer`."""
        return self.handle.row.remote(self.generation, row)

    def rows_again(self, since: int, rows: Sequence[Mapping[str, Any]]) -> Any:
        """The same."""
        return self.handle.rows_again.remote(self.generation, since, rows)

    def verified(self, step: int, outcome: Outcome) -> Any:
        return self.handle.verified.remote(self.generation, step, outcome)

    def want_checkpoint(self, step: int) -> Any:
        return self.handle.want_checkpoint.remote(self.generation, step)

    def event(self, event: str, fields: Mapping[str, Any]) -> Any:
        return self.handle.event.remote(self.generation, event, fields)

    def leaving(self, step: int, cause: str) -> Any:
        return self.handle.leaving.remote(self.generation, step, cause)

    def not_finite(self, step: int, detail: str) -> Any:
        return self.handle.not_finite.remote(self.generation, step, detail)

    # whatever the generation

    def broke(self, detail: str, rank: int | None) -> None:
        _wait(self.handle.broke.remote(self.generation, detail, rank))

    def done(self) -> Any:
        return self.handle.done.remote()

    def note(self, event: str, fields: Mapping[str, Any]) -> None:
        self.handle.note.remote(event, fields)

    def complaint(self, node: str, text: str, peer: str = "", tried_s: float = 0.0) -> None:
        self.handle.complaint.remote(node, text, peer, tried_s)

    # of a keeper, and of Ray Train's controller; their answers are not waited for

    def snapshots_sealed(self, reports: Sequence[SnapshotAck]) -> None:
        self.handle.snapshots_sealed.remote(reports)

    def gone(self, node: str, pid: int) -> None:
        self.handle.gone.remote(node, pid)

    def gpu_error(self, node: str, gpu: str, xid: int) -> None:
        self.handle.gpu_error.remote(node, gpu, xid)

    def ray_view(
        self, dead: Sequence[Death], left: int, draining: Mapping[str, float], placed: Mapping[str, int]
    ) -> None:
        self.handle.ray_view.remote(dead, left, draining, placed)

    def group_failed(self, cause: str, detail: str, ranks: Sequence[int]) -> Any:
        """A reference."""
        return self.handle.group_failed.remote(cause, detail, ranks)

    def group_shut_down(self) -> None:
        """Waits for the answer, so that it comes before what follows."""
        _wait(self.handle.group_shut_down.remote())

    def group_started(self, processes: Sequence[tuple[str, int]]) -> None:
        """By node and pid. The same."""
        _wait(self.handle.group_started.remote(processes))

    def fail(self, message: str) -> None:
        """The run is given up."""
        self.handle.fail.remote(message)

    # of jobs.drain

    def drain(self, node: str) -> str:
        return str(_wait(self.handle.drain.remote(node)))

    def undrain(self, node: str) -> str:
        return str(_wait(self.handle.undrain.remote(node)))

    def maintenance(self) -> Maintenance:
        return cast(Maintenance, _wait(self.handle.maintenance.remote()))


def _future(reference: Any) -> "Future[Any]":
    return cast("Future[Any]", reference.future())


def _wait(reference: Any, *, timeout_s: float = CALL_TIMEOUT_S) -> Any:
    return ray.get(reference, timeout=timeout_s)
