"""What the coordinator makes of keepers' answers, without keepers: the answers are put in Ray's place."""

import shutil
import time
from collections.abc import Callable
from concurrent.futures import wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from regrow.control.cadence import Cadence
from regrow.control.commits import SnapshotCommit
from regrow.plan.mesh import Coordinates, MeshShape
from regrow.runtime import fleet as module
from regrow.runtime.fleet import Fleet
from regrow.state.disk.upload import Upload
from regrow.state.memory.held import Held
from regrow.state.memory.node import Sealed
from regrow.state.memory.slots import Moment
from regrow.storage import Storage


def keeper() -> Any:
    return SimpleNamespace(
        write=SimpleNamespace(remote=lambda order: object()), committed=SimpleNamespace(remote=lambda *told: None)
    )


def make(folder: Path, event: Callable[..., None] = lambda name, **fields: None) -> Fleet:
    return Fleet(
        "run",
        b"",
        Storage.at(folder),
        Cadence(every_steps=10, every_minutes=None, automatic=False, mtbf_hours=0.0, now=time.time()),
        keep=2,
        upload_timeout_s=60.0,
        commit=lambda folder, pointer: None,
        event=event,
    )


def test_nodes_that_fail_at_once_cost_one_checkpoint_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first failure gives the checkpoint up, and with it what was asked of the others."""
    nodes, events = ["a", "b", "c"], []
    fleet = make(tmp_path, lambda name, **fields: events.append((name, fields["step"])))
    fleet.known = {node: (keeper(), SimpleNamespace(address=("", 0))) for node in nodes}  # type: ignore[misc]
    fleet.peers = dict.fromkeys(nodes, "")  # no copies: nobody else can write what one could not
    fleet.upload = Upload(Moment(1, 10), dict(fleet.peers), fleet.checkpoints, "run")
    for node, order in fleet.upload.orders():
        fleet._ask(node, order)

    def fail(call: object) -> None:
        raise ray.exceptions.RayActorError

    monkeypatch.setattr(module.ray, "wait", lambda calls, **options: (calls, []))
    monkeypatch.setattr(module.ray, "get", fail)
    fleet.tick()
    assert not fleet.busy
    assert not fleet.writing
    assert events == [("checkpoint_failed", 10)]
    fleet.storage.shutdown()


def test_checkpoints_that_cannot_be_deleted_are_told_of_and_stop_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes, rmtree = list[str](), shutil.rmtree
    fleet = make(tmp_path, lambda name, text: notes.append(f"{name}: {text}"))
    for number in range(1, 5):  # uncommitted leftovers are deleted too, once there are enough that are whole
        (fleet.checkpoints / f"step-0000000{number}").write_bytes("part", b"")
    monkeypatch.setattr("regrow.state.disk.catalog.committed_steps", lambda folder: [4, 3])
    monkeypatch.setattr("regrow.state.disk.catalog.open_checkpoint", lambda folder, step: SimpleNamespace(files=()))

    def refuse(path: Path) -> None:
        if path.name.endswith("1"):
            raise PermissionError(13, "Permission denied", "part")
        rmtree(path)

    with monkeypatch.context() as patched:
        patched.setattr("shutil.rmtree", refuse)
        fleet.retain()
        wait([fleet.deleting])  # type: ignore[list-item]
    fleet.tick()
    assert len(notes) == 1
    assert fleet.checkpoints.list() == ["step-00000001", "step-00000003", "step-00000004"]
    assert "next one tries again: [Errno 13] Permission denied: 'part'" in notes[0]
    fleet.retain()
    fleet.storage.shutdown(wait=True)
    fleet.tick()
    assert len(notes) == 1
    assert fleet.checkpoints.list() == ["step-00000003", "step-00000004"]


def test_a_group_on_one_node_has_its_copies_on_another_that_is_up_until_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive = ["a", "b", "c"]
    monkeypatch.setattr(module.ray, "nodes", lambda: [{"NodeID": node, "Alive": True} for node in alive])
    fleet, told = make(tmp_path), list[tuple[str, Any]]()

    def handle(node: str) -> Any:
        return SimpleNamespace(
            take_place=SimpleNamespace(remote=lambda place: told.append((node, place.peer and place.peer.node))),
            committed=SimpleNamespace(remote=lambda number, state: told.append((node, state.newest.step))),
        )

    domains = {"a": "rack 1", "b": "rack 1", "c": "rack 2"}
    fleet.known = {  # type: ignore[assignment]
        node: (handle(node), SimpleNamespace(address=("", 0), domain=domain)) for node, domain in domains.items()
    }
    fleet.begin(1, 0, ["a"])
    assert told == [("a", "c")]  # of another rack
    told.clear()
    assert fleet.sealed([Sealed("a", Moment(1, 5), "c")])
    assert told == [("a", 5), ("c", 5)]
    fleet.check_peers()
    assert fleet.peers == {"a": "c"}
    alive.remove("c")
    told.clear()
    fleet.check_peers()
    assert told == [("a", "b")]
    assert not fleet.sealed([Sealed("a", Moment(1, 6), "c")])  # these copies went with it
    assert fleet.sealed([Sealed("a", Moment(1, 6), "b")])
    alive.remove("b")
    fleet.check_peers()
    assert fleet.sealed([Sealed("a", Moment(1, 7), "")])
    fleet.begin(2, 7, ["a", "b"])
    assert fleet.peers == {"a": "b", "b": "a"}
    fleet.storage.shutdown()


class Holders:
    """Three nodes in Ray's place; each has its own snapshots, and copies of another's."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.nodes, self.answered = ["a", "b", "c"], list[str]()
        self.held: dict[str, list[Held]] = {node: [] for node in self.nodes}
        monkeypatch.setattr(module.ray, "nodes", lambda: [{"NodeID": node, "Alive": True} for node in self.nodes])
        monkeypatch.setattr(module.ray, "wait", lambda calls, **options: (calls[:1], calls[1:]))
        monkeypatch.setattr(module.ray, "get", self._get)
        self.fleet = make(folder)
        self.fleet.known = {
            node: (self._handle(node), SimpleNamespace(node=node, address=("", 0)))  # type: ignore[misc]
            for node in self.nodes
        }

    def hold(self, moment: Moment, *, copies: bool) -> None:
        for shard, node in enumerate(self.nodes):
            for each in (shard, (shard - 1) % 3) if copies else (shard,):
                self.held[node].append(Held(f"{node}{each}", moment, Coordinates(MeshShape(1, 3), each), 1, ""))

    def _handle(self, node: str) -> Any:
        return SimpleNamespace(holdings=SimpleNamespace(remote=lambda since: (node, since)))

    def _get(self, call: tuple[str, Moment]) -> list[Held]:
        node, since = call
        self.answered.append(node)
        return [held for held in self.held[node] if held.moment >= since]


def test_of_the_newest_step_those_who_ask_and_enough_others_are_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Holders(tmp_path, monkeypatch)
    fleet, moment = made.fleet, Moment(1, 10)
    made.hold(moment, copies=True)
    assert fleet.newest(group=["a"], logged=10) is None
    assert fleet.committed() is None
    fleet.board.newest = SnapshotCommit(moment, dict.fromkeys(made.nodes, ""))
    for group, answered in ((["a"], ["a", "b"]), (["a", "c"], ["a", "b", "c"])):
        made.answered.clear()
        found = fleet.newest(group=group, logged=10)
        assert found is not None
        assert found[0] == 10
        assert made.answered == answered
    found = fleet.committed()
    assert found is not None
    assert sorted(holder.held.coordinates.rank for holder in found[1]) == [0, 0, 1, 1, 2, 2]
    fleet.storage.shutdown()


def test_a_step_that_survivors_have_all_of_needs_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Holders(tmp_path, monkeypatch)
    fleet = made.fleet
    fleet.begin(2, 10, [])
    fleet.board.newest = SnapshotCommit(Moment(2, 10), dict.fromkeys(made.nodes, ""))
    for moment in (Moment(2, 10), Moment(2, 11), Moment(1, 13), Moment(2, 13)):
        made.hold(moment, copies=moment.step == 10)
    made.held["b"].append(Held("torn", Moment(2, 12), Coordinates(MeshShape(1, 3), 1), 1, ""))  # by one of three
    for logged, step in ((10, 10), (11, 11), (12, 11), (13, 13)):  # a step without a row is none to begin from
        found = fleet.newest(group=made.nodes, logged=logged)
        assert found is not None
        assert found[0] == step
        assert {holder.held.moment for holder in found[1]} == {Moment(2, step)}
    found = fleet.committed()
    assert found is not None
    assert found[0] == 10
    fleet.storage.shutdown()


def test_a_newcomer_is_given_nodes_that_train_else_those_that_came_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet, alive = make(tmp_path), ["a", "b", "c", "d", "e", "f"]
    monkeypatch.setattr(module.ray, "nodes", lambda: [{"NodeID": node, "Alive": True} for node in alive])
    infos: dict[str, Any] = {node: SimpleNamespace(node=node, address=(node, 1)) for node in alive}

    def given(node: str) -> list[str]:
        peers = fleet.neighbours(infos[node])
        assert all(peer.address == (peer.node, 1) for peer in peers)
        return [peer.node for peer in peers]

    assert given("a") == []
    assert given("b") == ["a"]
    assert given("a") == ["b"]  # another rank of it asks
    assert given("c") == ["a", "b"]
    alive.remove("c")
    assert given("d") == ["a", "b"]
    fleet.known = {node: (None, infos[node]) for node in "ab"}
    fleet.peers = {"a": "b", "b": "a"}
    found = given("e")
    assert sorted(found[:2]) == ["a", "b"]
    assert found[2:] == ["d"]
    assert given("a") == ["b", "e", "d"]
    fleet.storage.shutdown()
