"""What keepers answer when they are asked between steps, without keepers: the answers are put in Ray's place."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from regrow.control.health import Pulse, Stalls
from regrow.control.membership import Member
from regrow.runtime import watch as module
from regrow.runtime.watch import WHERE_AGAIN_S, Watch


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
    watch = Watch(Stalls(30.0, 600.0, 180.0), save=lambda found: None, slow=lambda found: None)
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


def test_who_runs_and_never_arrives_is_given_up_after_two_questions_and_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """On node b, where a process that is no member is idle, too."""
    members = [Member("1", "a", "10.0.0.1", 1, 11), Member("2", "b", "10.0.0.2", 1, 22)]
    now, asked = 0.0, 0
    state = Pulse(0, 1, 9, 0.0, 0.0, "S", collectives=40)
    here = {
        "a": [replace(state, pid=11, collectives=41, waits=True)],
        "b": [replace(state, pid=22), replace(state, pid=33)],
    }

    def ask(node: str) -> Callable[[], Any]:
        def answer() -> list[Pulse]:
            nonlocal asked
            asked += node == "a"
            return [replace(pulse, asked=asked) for pulse in here[node]]

        return answer

    keepers: Any = {
        node: SimpleNamespace(
            where=SimpleNamespace(remote=lambda node=node: ask(node)),
            pulses=SimpleNamespace(remote=lambda node=node: lambda: here[node]),
            look=SimpleNamespace(remote=lambda node=node: lambda: f"the stacks of {node}"),
        )
        for node in here
    }
    monkeypatch.setattr(module.ray, "wait", lambda calls, **options: (calls, []))
    monkeypatch.setattr(module.ray, "get", lambda call: call())
    saved: list[dict[str, str]] = []
    watch = Watch(Stalls(30.0, 6000.0, 60.0), save=saved.append, slow=lambda found: None)
    watch.stalls.begin(0.0)
    watch.stalls.stepped(1.0, 0.0)
    for now in (3.0, 30.0, 59.0):
        assert watch.tick(now, members, keepers) == []
    assert asked == 0
    for now in (61.0, 61.0 + 0.9 * WHERE_AGAIN_S):
        assert watch.tick(now, members, keepers) == []
    assert asked == 1
    for now in (62.0 + WHERE_AGAIN_S, 62.1 + WHERE_AGAIN_S):
        assert not saved
        suspects = watch.tick(now, members, keepers)
    assert saved == [{"b": "the stacks of b", "a": "the stacks of a"}]
    assert [(each.member.pid, each.dark) for each in suspects] == [(22, False)]
    assert "process 22 runs, and is not in the collective that others wait in" in suspects[0].detail
