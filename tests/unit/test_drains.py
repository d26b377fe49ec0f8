"""Planned maintenance: nodes are left one after another, and no step is lost; in virtual time."""

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from jobs import drain
from ray.exceptions import GetTimeoutError, RayActorError

from regrow.config.schema import ParallelConfig
from regrow.control import commands as c
from regrow.control import events as e
from regrow.control.drains import Maintenance, NodeState
from regrow.control.group import LEAVING_S
from regrow.control.past import Past
from regrow.control.states import LeavingGroup
from regrow.control.values import Version
from regrow.errors import ClusterError
from regrow.record.events import Stopped, Submitted
from regrow.record.history import History
from regrow.record.log import RunLog
from regrow.record.status import status_of
from regrow.runtime import maintenance
from regrow.runtime.maintenance import DrainError, Rolling, attached, find_nodes, left, run_for
from regrow.storage import LocalStorage
from support.commands import call
from support.control_world import World
from support.told import Told, log_of, one

STEPS = 2000
ROOT = Path(__file__).parents[2]


class Asked:
    """The coordinator of a world in virtual time, to the command that drains its nodes."""

    def __init__(self, world: World) -> None:
        self.world, self.told = world, list[tuple[str, dict[str, Any]]]()

    def rolling(self, patience_s: float = 15.0) -> Rolling:
        return Rolling(
            self,
            lambda what, text, fields: self.told.append((what, fields)),
            patience_s,
            clock=lambda: self.world.now,
            sleep=self.world.run_for,
        )

    def drain(self, node: str) -> str:
        return str(self._there().tell(e.DrainAsked(node)))

    def undrain(self, node: str) -> str:
        return str(self._there().tell(e.UndrainAsked(node)))

    def maintenance(self) -> Maintenance:
        world = self._there()
        return world.control.drains.look(world.control.next_step - 1, world.now)

    def nodes(self) -> list[NodeState]:
        return [node for node in self.maintenance().nodes if node.ranks or node.waiting]

    def words(self) -> list[str]:
        return [what for what, _ in self.told if what not in ("waiting", "leaving")]

    def _there(self) -> World:
        """Calls wait for a coordinator that is restarted."""
        while not self.world.up:
            self.world.run_for(0.1)
        return self.world


def world_of(num_nodes: int, **options: Any) -> tuple[World, Asked]:
    """One that trains, with all of its nodes joined."""
    world = World(7, num_nodes=num_nodes, last_step=STEPS, **options)
    world.loses_reports = False
    while len(world.rows) < 5:
        world.run_for(1.0)
    return world, Asked(world)


def sizes(world: World) -> list[int]:
    return [len(run.formation.members) for run in world.runs.values()]


def assert_no_step_was_lost(world: World) -> None:
    generations = [fields for _, name, fields in world.events if name == "generation"]
    assert [fields["recomputed_steps"] for fields in generations] == [0] * len(generations)
    assert [name for _, name, _ in world.events if name == "failure"] == []
    steps = [row["step"] for row in world.rows]  # a coordinator that dies may take a row with it
    assert steps == sorted(set(steps))


@pytest.mark.parametrize("restarts", [False, True], ids=["", "coordinator restarted"])
def test_each_node_in_turn_is_taken_away_while_it_is_out_and_no_step_is_lost(restarts: bool) -> None:
    """With its memory, as a reboot does; another one comes in its place."""
    world, asked = world_of(3)

    def reboot(node: NodeState) -> None:
        if restarts:
            world.restart_coordinator()
            while not world.up:
                world.run_for(0.1)
            assert node.id in world.control.group.nodes.exclusions.asked
        assert {each.node for each in world.workers.values() if each.alive}.isdisjoint({node.id})
        world.kill_node(world.nodes[node.id])

    asked.rolling().drain(asked.nodes(), reboot)
    assert asked.words() == ["asked", "out", "back", "whole"] * 3
    assert_no_step_was_lost(world)
    assert set(sizes(world)) == {2, 3}
    assert len(asked.nodes()) == 3


def test_a_spare_takes_over_and_the_group_is_never_slower() -> None:
    world, asked = world_of(4, num_slices=6)  # three have two slices each, and so has one of four
    assert sizes(world) == [3]
    asked.rolling().drain(asked.nodes(), lambda node: None)
    assert asked.words() == ["asked", "out", "back", "whole"] * 4
    assert set(sizes(world)) == {3}
    assert_no_step_was_lost(world)


def test_the_next_node_waits_until_no_more_workers_can_come_and_one_too_many_is_refused() -> None:
    world, asked = world_of(3, min_workers=2)
    nodes = asked.nodes()
    rolling = asked.rolling(patience_s=10.0)
    begun = world.now
    with pytest.raises(DrainError) as refused:
        rolling.drain(nodes)
    assert str(refused.value) == (
        f"node {nodes[1].id} has 1 of the 2 workers that are there; without it 1 are left, and a group "
        "takes cluster.min_workers=2: let others come first"
    )
    assert asked.words() == ["asked", "out", "short"]
    assert world.now - begun > 10.0
    text, fields = left(rolling, nodes, "runs/a", undrain=False)
    assert fields == {"back": [], "out": [nodes[0].id], "leaving": [], "not_asked": [each.id for each in nodes[1:]]}
    assert text.endswith(f"to put back: python -m jobs.drain runs/a --undrain {nodes[0].id}")
    asked.rolling().give_back(nodes[:1])
    world._refill(world.nodes[nodes[0].id])
    world.run_for(20.0)
    assert sizes(world)[-1] == 3
    assert_no_step_was_lost(world)


def test_a_node_is_not_out_before_its_last_snapshot_is_elsewhere() -> None:
    told = Told()
    told.form(one(1, "a"), one(2, "b"), one(3, "c"))
    told.begin("abc")
    assert told(e.DrainAsked("b")) == ""
    assert told.row(1) == "drain"
    told(e.Leaving(1, 1, ""))
    told.seal(Version(1, 1), told.peers)
    told.join(one(1, "a"), one(2, "b"), one(3, "c"))
    assert told.ask("m1", 1).formation is not None
    assert not told.ask("m2", 1).unfit, "not before the others train"

    def b() -> NodeState:
        return next(node for node in told.control.drains.look(1, told.now).nodes if node.id == "b")

    assert not b().is_out
    told.begin("ac", 1)
    told()
    assert told.ask("m2", 1).unfit
    told(e.Died((("b", 2),), 2, "worker_died", "it has ended"))
    assert told.records("failure") == []
    assert not b().is_out, "half of the newest committed step is on it"
    told.seal(Version(2, 2), told.peers)
    assert b().is_out
    assert told.control.excluded_nodes(told.now) == {"b"}
    assert told(e.UndrainAsked("b")) == ""
    assert told.control.excluded_nodes(told.now) == set()
    assert told(e.UndrainAsked("b")) == "node b was not drained by jobs.drain"


def test_a_drained_node_holds_no_copies_though_no_other_has_room_for_them() -> None:
    told = Told()
    told.form(one(1, "a"), one(2, "b"))
    told.begin("ab")
    assert told.peers == {"a": ("b",), "b": ("a",)}
    told.join(one(1, "a"))
    told(e.Died((("b", 2),), 1, "worker_died", "gone"))
    told.join(one(1, "a"))
    assert told.ask("m1", 1).formation is not None
    told.begin("a")
    assert told.peers == {"a": ("b",)}, "its keeper is there, though no worker is"
    told.join(one(3, "b"))
    assert told(e.DrainAsked("b")) == ""
    assert told.peers == {"a": ()}
    told.seal(Version(2, 1), told.peers)
    told()
    told(e.Died((("b", 3),), 1, "worker_died", "it has ended"))
    (state,) = [node for node in told.control.drains.look(1, told.now).nodes if node.id == "b"]
    assert state.is_out


def test_what_was_asked_for_outlives_the_job_until_it_is_undone() -> None:
    asked = {"time": 1.0, "event": "drain", "node": "a", "deadline": 1.0, "asked": True}
    notice = {"time": 1.0, "event": "drain", "node": "b", "deadline": 9.0}
    submitted = {"time": 2.0, "event": "submitted"}
    for events, drained in (
        ([asked, notice, submitted], {"a"}),
        ([asked, submitted, {"time": 3.0, "event": "undrain", "node": "a"}], set()),
    ):
        for restarted in (False, True):
            past = Past.of(events, generation=1, logged=0, stored=(), restarted=restarted)
            assert past.drained == drained
            assert Told(past).control.excluded_nodes(1e9) == drained
        status = status_of(History.of_logs([], events), folder="a", config={}, now=100.0)
        assert [text for text in status.warnings if "is drained for maintenance" in text] == [
            "node a is drained for maintenance: the group leaves it, until it is said to be back"
        ] * len(drained)


def test_a_node_is_back_for_a_coordinator_that_is_asked_once_more_as_the_one_before_died_before_it_answered() -> None:
    told = Told()
    told.form(one(1, "a"), one(2, "b"))
    told.begin("ab")
    assert (told(e.DrainAsked("b")), told(e.UndrainAsked("b"))) == ("", "")
    again = Told(Past.of(log_of(told), generation=1, logged=0, stored=(), restarted=True))
    assert again(e.UndrainAsked("b")) == ""
    assert again.records("undrain") == []
    assert "was not drained" in again(e.UndrainAsked("a"))


def test_a_drained_node_that_ray_has_found_dead_is_drained_no_more() -> None:
    """After months a run had hundreds of these: on every list, and in what each new worker is placed by."""
    told = Told()
    told(e.NodesAlive(frozenset("abc")))
    told.form(one(1, "a"), one(2, "b"), one(3, "c"))
    told.begin("abc")
    for drained in "bc":
        assert told(e.DrainAsked(drained)) == ""
    told(e.NodesAlive(frozenset("ac")))
    asked = told.control.group.nodes.exclusions.asked
    assert asked == {"c"}
    assert told.records("node_lost")[0]["drained"] is True
    view = told.control.drains.look(0, told.now)
    assert [(each.id, each.asked, each.is_out) for each in view.gone] == [("b", True, True)]
    assert told(e.UndrainAsked("b")) == "", "a command that has rebooted it says so"
    events = [
        {"time": told.now, "event": command.event, **command.fields}
        for command in told.commands
        if isinstance(command, c.Record)
    ]
    assert Past.of(events, generation=1, logged=0, stored=(), restarted=False).drained == {"c"}
    status = status_of(History.of_logs([], events), folder="a", config={}, now=told.now)
    assert [text[:6] for text in status.warnings if "is drained for maintenance" in text] == ["node c"]


def test_a_drain_outlives_the_job_until_ray_says_that_the_node_is_not_there() -> None:
    """It may have gone between two jobs, or with the cluster of the earlier one."""
    told = Told(Past(drained=frozenset("ab")))
    asked = told.control.group.nodes.exclusions.asked
    told()
    assert asked == {"a", "b"}, "Ray has not been asked yet"
    told(e.NodesAlive(frozenset("bc")))
    assert asked == {"b"}
    assert told.records("undrain") == [{"node": "a", "lost": True}]


def test_a_node_that_dies_while_it_is_left_is_out_of_service() -> None:
    world, asked = world_of(3)
    first, second, _ = asked.nodes()
    world.after(0.1, lambda: world.kill_node(world.nodes[first.id]))
    asked.rolling().drain([first, second])
    assert asked.words() == ["asked", "out", "whole", "asked", "out"]
    assert first.id not in world.control.group.nodes.exclusions.asked


@pytest.mark.parametrize(
    ("options", "node", "why"),
    [
        ({"in_place": False}, "a", "cluster.in_place=false: a group that restarts as a whole cannot leave a node"),
        ({}, "z", "no worker of the run is on node z"),
        ({"min_workers": 2}, "a", "node a has 1 of the 2 workers that are there; without it 1 are left"),
    ],
)
def test_what_cannot_be_drained_is_refused_and_nothing_changes(options: dict[str, Any], node: str, why: str) -> None:
    told = Told(**options)
    told.form(one(1, "a"), one(2, "b"))
    told.begin("ab")
    assert str(told(e.DrainAsked(node))).startswith(why)
    assert told.control.excluded_nodes(told.now) == set()
    assert told.records("drain") == []


def test_where_the_smallest_group_is_larger_than_cluster_min_workers_a_refusal_says_both() -> None:
    told = Told(min_workers=3, parallel=ParallelConfig(cp=2))
    told.form(*(one(number, node) for number, node in enumerate("abcd")))
    told.begin("abcd")
    said = told(e.DrainAsked("a"))
    assert "without it 3 are left, and a group takes 4 (the smallest group with cluster.min_workers=3): " in said


def test_a_run_that_ends_drains_no_more() -> None:
    told = Told()
    told.form(one(1, "a"), one(2, "b"))
    told(e.StopAsked("interrupted"))
    assert told(e.DrainAsked("a")) == "the run ends: interrupted"


def node(number: str, host: str = "h", address: str = "10.0.0.1") -> NodeState:
    return NodeState(number, host, address, 1, 0, False, False)


def test_nodes_are_found_by_id_host_address_or_all() -> None:
    nodes = [node("abcd1"), node("abcd2", "g"), node("ef012", "g", "10.0.0.2")]
    by = {"abcd1": [0], "g": [1, 2], "10.0.0.1": [0, 1], "all": [0, 1, 2], "ef01": [2]}
    for name, numbers in by.items():
        assert find_nodes([name], nodes) == [nodes[number] for number in numbers]
    assert find_nodes(["g", "ef01"], nodes) == nodes[1:]
    with pytest.raises(DrainError, match=r"'abcd' begins the ids of 2 nodes: abcd1 \(h, 10.0.0.1\) with 1 rank, abcd2"):
        find_nodes(["abcd"], nodes)
    with pytest.raises(DrainError, match=r"no node 'abx' in this run; there are abcd1 \(h, 10.0.0.1\) with 1 rank, "):
        find_nodes(["abx"], nodes)


def test_a_node_that_another_command_puts_back_ends_the_wait() -> None:
    world, asked = world_of(2)
    (first, _) = asked.nodes()
    world.after(1.0, lambda: world.tell(e.UndrainAsked(first.id)))
    with pytest.raises(DrainError, match="was put back into service meanwhile"):
        asked.rolling().drain([first])


def test_a_command_for_each_node_finds_it_in_its_environment_and_its_failure_ends_the_drains(tmp_path: Path) -> None:
    told = tmp_path / "told"
    run_for(f"echo $REGROW_NODE_ID $REGROW_NODE_HOST $REGROW_NODE_ADDRESS > {told}")(node("abcd1"))
    assert told.read_text() == "abcd1 h 10.0.0.1\n"
    _world, asked = world_of(3)
    nodes, rolling = asked.nodes(), asked.rolling()
    with pytest.raises(DrainError, match=f"'exit 3' ended with status 3 for node {nodes[0].id} .*stays out of service"):
        rolling.drain(nodes, run_for("exit 3"))
    assert asked.words() == ["asked", "out"]
    assert [each.asked for each in asked.maintenance().nodes if each.id == nodes[0].id] == [True]


@pytest.mark.parametrize("error", [RayActorError(), GetTimeoutError()], ids=["it has died", "it does not answer"])
def test_a_coordinator_that_is_gone_meanwhile_does_not_hide_which_nodes_are_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    world, asked = world_of(3)
    first, second, third = (node.id for node in asked.nodes())

    class Gone(Asked):
        has_one_out = False

        def maintenance(self) -> Maintenance:
            if self.has_one_out:
                raise error
            world.run_for(1.0)
            view = super().maintenance()
            self.has_one_out = any(node.asked and node.is_out for node in view.nodes)
            return view

    monkeypatch.setattr(maintenance, "attached", lambda folder, address: nullcontext(Gone(world)))
    monkeypatch.setattr(maintenance, "POLL_S", 0.0)
    monkeypatch.setattr(sys, "argv", ["jobs.drain", "runs/a", first, second, third, "--json"])
    with pytest.raises((type(error), SystemExit)):
        drain.main()
    *_, out, told_last = map(json.loads, capsys.readouterr().out.splitlines())
    assert (out["event"], told_last["event"]) == ("out", "left")
    assert (told_last["out"], told_last["not_asked"]) == ([first], [second, third])
    assert told_last["text"].endswith(f"to put back: python -m jobs.drain runs/a --undrain {first}")


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--help"], 0, "one node after another, no step lost"),
        (["nothing", "all"], 1, "holds no run that has begun"),
        (["nothing", "--json", "all", "--each", "true", "more"], 1, "holds no run that has begun"),
        (["http://head:8265", "all"], 2, "RUN is a run folder"),
        (["mine", "all", "--each", "true", "--undrain"], 2, "--each and --undrain exclude one another"),
        (["mine", "all", "--patience", "0"], 2, "--patience takes a number of seconds above 0"),
    ],
)
def test_the_command_says_what_is_wrong_with_it(arguments: list[str], status: int, words: str) -> None:
    done = call("drain", *arguments)
    assert done.returncode == status
    assert words in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_a_run_that_has_ended_is_not_asked(tmp_path: Path) -> None:
    log = RunLog(LocalStorage(tmp_path))
    log.event(Submitted(time=1.0))
    log.event(Stopped(time=2.0, step=7, reason="finished"))
    log.close()
    with pytest.raises(ClusterError, match="does not run: finished at step 7"), attached(LocalStorage(tmp_path)):
        pass


@pytest.mark.parametrize("drained", [frozenset[str](), frozenset({"gone months ago"})])
def test_a_notice_is_not_waited_out_for_a_node_that_was_drained_long_ago(drained: frozenset[str]) -> None:
    told = Told(Past(drained=drained), min_workers=2, max_workers=8)
    members = [one(number, f"node {number}") for number in range(4)]
    told.form(*members)
    told.begin([member.node for member in members])
    told.row(1)
    told(e.Notice({"node 3": told.now + 12.0}))
    told.now += 3.0
    assert told.row(2) == "drain"
    told(e.Leaving(1, 3, ""))
    state = told.control.state
    assert isinstance(state, LeavingGroup)
    assert state.until == told.now + LEAVING_S
