"""What the coordinator makes of keepers' answers, without keepers: the answers are put in Ray's place."""

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from regrow.checkpoint import fleet as module
from regrow.checkpoint.commits import SnapshotCommit
from regrow.checkpoint.fleet import Fleet
from regrow.checkpoint.held import Held
from regrow.checkpoint.keeper_node import Sealed
from regrow.checkpoint.layout import Part
from regrow.checkpoint.slots import Moment
from regrow.checkpoint.upload import Upload
from regrow.plan.cadence import Cadence
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


def test_of_the_newest_step_enough_is_known_at_once_and_all_where_that_is_not_sound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of three nodes has its own snapshot and the one before it's; the third answers last."""
    nodes, moment, asked = ["a", "b", "c"], Moment(1, 10), list[str]()

    def held(node: str) -> list[Held]:
        shard = nodes.index(node)
        return [Held(f"{node}{each}", moment, Part(each, 3), 1, "") for each in (shard, (shard - 1) % 3)]

    def handle(node: str) -> Any:
        return SimpleNamespace(holdings=SimpleNamespace(remote=lambda moment: node))

    def wait(calls: list[str], **options: Any) -> tuple[list[str], list[str]]:
        asked.append("".join(calls))
        return calls[:1], calls[1:]

    monkeypatch.setattr(module.ray, "nodes", lambda: [{"NodeID": node, "Alive": True} for node in nodes])
    monkeypatch.setattr(module.ray, "wait", wait)
    monkeypatch.setattr(module.ray, "get", held)
    fleet = make(tmp_path)
    fleet.known = {node: (handle(node), SimpleNamespace(node=node, address=("", 0))) for node in nodes}  # type: ignore[misc]
    assert fleet.newest(everyone=False) is None
    fleet.board.newest = SnapshotCommit(moment, dict.fromkeys(nodes, ""))
    first = fleet.newest(everyone=False)
    assert first is not None
    assert {holder.node for holder in first[1]} == {"a", "b"}
    assert asked == ["abc", "bc"]
    every = fleet.newest(everyone=True)
    assert every is not None
    assert sorted(holder.held.part.shard for holder in every[1]) == [0, 0, 1, 1, 2, 2]
    fleet.storage.shutdown()
