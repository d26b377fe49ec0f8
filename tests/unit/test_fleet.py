"""What the coordinator makes of keepers' answers, without keepers: the answers are put in Ray's place."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from regrow.checkpoint import fleet as module
from regrow.checkpoint.fleet import Fleet
from regrow.checkpoint.slots import Moment
from regrow.checkpoint.upload import Upload
from regrow.plan.cadence import Cadence
from regrow.storage import Storage


def keeper() -> Any:
    return SimpleNamespace(
        write=SimpleNamespace(remote=lambda order: object()), committed=SimpleNamespace(remote=lambda *told: None)
    )


def test_nodes_that_fail_at_once_cost_one_checkpoint_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first failure gives the checkpoint up, and with it what was asked of the others."""
    nodes, events = ["a", "b", "c"], []
    fleet = Fleet(
        "run",
        b"",
        Storage.at(tmp_path),
        Cadence(every_steps=10, every_minutes=None, automatic=False, mtbf_hours=0.0, now=time.time()),
        keep=2,
        upload_timeout_s=60.0,
        commit=lambda folder, pointer: None,
        event=lambda name, **fields: events.append((name, fields["step"])),
    )
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
