"""What keepers answer when they are asked between steps, without keepers: the answers are put in Ray's place."""

from types import SimpleNamespace
from typing import Any

import pytest
import ray

from regrow.checkpoint import watch as module
from regrow.checkpoint.watch import Watch
from regrow.observe.stalls import Stalls


def test_what_gpus_told_last_is_kept_also_of_nodes_that_answer_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"a": ["50 C"], "b": ["60 C"], "c": list[str]()}
    arrived = set(told)

    def get(node: str) -> list[str]:
        if node not in told:
            raise ray.exceptions.RayActorError
        return told[node]

    monkeypatch.setattr(module.ray, "wait", lambda calls, **options: ([call for call in calls if call in arrived], []))
    monkeypatch.setattr(module.ray, "get", get)
    keepers: Any = {
        node: SimpleNamespace(gpus=SimpleNamespace(remote=lambda node=node: node)) for node in ("a", "b", "c")
    }
    watch = Watch(Stalls(30.0, 600.0), save=lambda found: None, slow=lambda found: None)
    watch.read_gpus(0.0, keepers)
    arrived.discard("b")
    watch.tick(0.0, [], {})
    assert watch.gpus == {"a": ["50 C"]}
    arrived.add("b")
    watch.tick(0.1, [], {})
    assert watch.gpus == {"a": ["50 C"], "b": ["60 C"]}
    told["b"] = ["70 C"]
    del told["a"]
    watch.read_gpus(1.0, keepers)
    watch.tick(1.0, [], {})
    assert watch.gpus == {"a": ["50 C"], "b": ["70 C"]}
