"""Faults on real processes and real snapshots, as far as they need no Ray; nodes are in tests/cluster."""

import itertools
import json
import mmap
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from regrow.control.values import Version
from regrow.drill import inject, inject_apart, switch
from regrow.drill.faults import parse_plan
from regrow.drill.inject import FILLER, Injector, NotNow, damage, free_bytes
from regrow.drill.inject_apart import InjectorApart
from regrow.drill.processes import is_alive, wait_until_gone
from regrow.errors import CheckpointError
from regrow.plan.boxes import ITEM_BYTES, Box
from regrow.plan.mesh import ALONE
from regrow.state.checksums import CHUNK_BYTES, num_chunks
from regrow.state.memory.held import open_snapshot
from regrow.state.memory.holders import Holders
from regrow.state.memory.reader import restore_snapshot
from regrow.state.memory.slots import SLOT, Committed, SlotFile, empty_header
from regrow.train.flips import BitFlipper
from regrow.train.orders import ACTIVATIONS, GRADIENTS, HANG, WEIGHTS, Order, hangs_since
from support.keepers import RUN, SECRET, assert_state, cluster, entries_of, holders, snapshot

Notes = list[tuple[int, str, dict[str, Any]]]


@pytest.fixture
def workers() -> Iterator[list[dict[str, Any]]]:
    """Three processes that sleep, as the workers of a group."""
    processes = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) for _ in range(3)]
    yield [{"pid": process.pid, "node": f"node{rank}"} for rank, process in enumerate(processes)]
    for process in processes:
        process.kill()
        process.wait()


@pytest.fixture
def notes() -> Notes:
    return []


@pytest.fixture
def injector(tmp_path: Path, notes: Notes) -> Iterator[Injector]:
    nodes: Any = SimpleNamespace(
        nodes=[], add=lambda: "new", pid=lambda node, pid: pid, memory_folders=lambda: [tmp_path]
    )
    made = Injector(nodes, seed=7, note=lambda number, what, **fields: notes.append((number, what, fields)))
    yield made
    made.close()


def test_an_order_to_flip_bits_is_left_where_the_worker_looks(
    injector: Injector, workers: list[dict[str, Any]], notes: Notes, tmp_path: Path
) -> None:
    injector.nodes.orders = lambda node: tmp_path / node  # type: ignore[method-assign]
    (tmp_path / "node1").mkdir()
    for number, line in enumerate(("flip_weights rank=1", "flip_gradients rank=1 chance=0.5")):
        victim, *_ = injector.inject(number, *parse_plan([f"at step 1: {line}"]), workers, driver=0)
        assert victim["rank"] == 1
    order = json.loads((tmp_path / "node1" / f"{workers[1]['pid']}.gradients.json").read_text())
    assert order == vars(Order(GRADIENTS, chance=0.5))
    (hung,) = injector.inject(2, *parse_plan(["at step 1: hang_validation rank=1"]), workers, driver=0)
    order = json.loads((tmp_path / "node1" / f"{hung['pid']}.hang.json").read_text())
    assert order == vars(Order(HANG, phase="validation"))
    injector.tick()
    assert notes == []
    hangs_since(tmp_path / "node1", hung["pid"]).touch()
    injector.tick()
    injector.tick()
    assert [(number, what) for number, what, _ in notes] == [(2, "hangs")]


@pytest.mark.parametrize("first_ends_first", [False, True])
def test_a_rank_is_as_slow_as_the_newest_fault_that_is_not_over_has_it(
    first_ends_first: bool, injector: Injector, workers: list[dict[str, Any]], notes: Notes, tmp_path: Path
) -> None:
    injector.nodes.orders = lambda node: tmp_path  # type: ignore[method-assign]
    ends, lasts = "for_s=0.05", "for_s=300"
    do(injector, f"slow_rank rank=1 share=0.5 {ends if first_ends_first else lasts}", workers)
    do(injector, f"slow_rank rank=1 share=0.2 {lasts if first_ends_first else ends}", workers, number=1)

    def share() -> float:
        order = Order(**json.loads((tmp_path / f"{workers[1]['pid']}.slow.json").read_text()))
        return order.share if order.until > time.time() else 0.0

    until(injector, lambda: bool(notes))
    assert [(number, what) for number, what, _ in notes] == [(0 if first_ends_first else 1, "as fast as before")]
    assert share() == (0.2 if first_ends_first else 0.5)


def test_a_fault_waits_for_a_group_that_it_is_for(injector: Injector, workers: list[dict[str, Any]]) -> None:
    for line in ("flip_weights replicas=2", "flip_gradients"):
        with pytest.raises(NotNow, match="other ranks than"):
            injector.inject(0, *parse_plan([f"at step 1: {line}"]), workers[: 2 if "grad" in line else 1], driver=0)


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def until(injector: Injector, condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    give_up_at = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up_at
        injector.tick()
        time.sleep(0.01)


def do(injector: Injector, line: str, workers: list[dict[str, Any]], number: int = 0) -> list[dict[str, Any]]:
    (fault,) = parse_plan([f"at step 1: {line}"])
    return injector.inject(number, fault, workers, driver=0)


def test_the_worker_that_is_named_is_killed_and_no_other(injector: Injector, workers: list[dict[str, Any]]) -> None:
    (victim,) = do(injector, "kill_worker rank=1", workers)
    assert victim == {"what": "worker", "rank": 1, "pid": workers[1]["pid"], "node": "node1"}
    assert wait_until_gone([victim["pid"]], 10.0) == []
    assert is_alive(workers[0]["pid"])
    assert is_alive(workers[2]["pid"])
    with pytest.raises(NotNow, match="rank 1 is not there"):
        do(injector, "kill_worker rank=1", workers)
    with pytest.raises(NotNow, match="rank 7 is not there"):
        do(injector, "kill_worker rank=7", workers)


def test_a_victim_that_is_not_named_is_drawn_from_the_living_the_same_one_each_time(
    injector: Injector, workers: list[dict[str, Any]]
) -> None:
    drawn = [do(injector, "stop_worker", workers, number)[0]["rank"] for number in range(3)]
    assert sorted(drawn) == [0, 1, 2]  # one that is stopped is not drawn again
    with pytest.raises(NotNow, match="no worker is there"):
        do(injector, "stop_worker", workers)
    injector.close()
    again = Injector(injector.nodes, seed=7, note=injector.note)
    assert [do(again, "stop_worker", workers, number)[0]["rank"] for number in range(3)] == drawn
    again.close()


def test_a_stopped_worker_runs_on_when_its_time_has_come(
    injector: Injector, workers: list[dict[str, Any]], notes: Notes
) -> None:
    do(injector, "stop_worker rank=0 continue_after_s=0.5", workers, number=4)
    pid = workers[0]["pid"]
    assert injector.busy
    until(injector, lambda: state_of(pid) == "T")
    until(injector, lambda: state_of(pid) != "T")
    assert notes == [(4, "continued", {"processes": 1})]


def test_a_slow_worker_is_stopped_and_continued_in_turn_and_runs_in_the_end(
    injector: Injector, workers: list[dict[str, Any]], notes: Notes
) -> None:
    do(injector, "slow_worker rank=2 for_s=0.6 share=0.5 period_s=0.1", workers)
    pid, seen = workers[2]["pid"], []

    def over() -> bool:
        seen.append(state_of(pid))
        return not injector.busy

    until(injector, over)
    changes = sum(1 for before, after in itertools.pairwise(seen) if before != after)
    assert changes >= 4
    assert state_of(pid) != "T"
    ((number, what, fields),) = notes
    assert (number, what) == (0, "at its own speed")
    assert fields["longest_s"] >= 0.05


def test_how_long_a_slow_worker_was_stopped_at_a_stretch_is_noted_where_the_drill_came_late(
    injector: Injector, workers: list[dict[str, Any]], notes: Notes, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr(inject, "time", SimpleNamespace(monotonic=lambda: clock[-1]))
    do(injector, "slow_worker rank=2 for_s=5", workers)
    for at in (100.2, 100.4, 125.0, 125.2):  # another fault took the drill 24 s, while the worker was stopped
        clock.append(at)
        injector.tick()
    assert notes == [(0, "at its own speed", {"longest_s": 24.6})]


def test_whatever_is_stopped_or_filled_is_freed_at_the_end(
    injector: Injector, workers: list[dict[str, Any]], tmp_path: Path
) -> None:
    do(injector, "stop_worker rank=0", workers)
    leave_mb = free_bytes(str(tmp_path)) / 1e6 - 64  # so that about so much is filled
    do(injector, f"fill_memory leave_mb={leave_mb:.3f} for_s=60", workers)
    assert (tmp_path / FILLER).stat().st_size > 0
    injector.close()
    assert not (tmp_path / FILLER).exists()
    assert state_of(workers[0]["pid"]) != "T"


def test_filled_memory_is_freed_when_its_time_has_come(
    injector: Injector, workers: list[dict[str, Any]], tmp_path: Path, notes: Notes
) -> None:
    do(injector, f"fill_memory leave_mb={free_bytes(str(tmp_path)) / 1e6 - 64:.3f} for_s=0.1", workers)
    until(injector, lambda: not (tmp_path / FILLER).exists())
    assert [what for _, what, _ in notes] == ["memory freed"]


def test_a_worker_that_is_stopped_for_good_is_not_continued_by_a_fault_that_slowed_it_before(
    injector: Injector, workers: list[dict[str, Any]]
) -> None:
    do(injector, "slow_worker rank=0 for_s=1 share=0.5 period_s=0.1", workers, number=0)
    pid = workers[0]["pid"]
    until(injector, lambda: state_of(pid) == "T")
    until(injector, lambda: state_of(pid) != "T")
    do(injector, "stop_worker rank=0", workers, number=1)
    until(injector, lambda: state_of(pid) == "T")
    states = set()

    def slowed() -> bool:
        states.add(state_of(pid))
        return not injector.busy

    until(injector, slowed)
    assert states == {"T"}
    injector.close()
    assert state_of(pid) != "T"


def test_a_worker_that_is_stopped_stays_so_while_snapshots_are_damaged(
    injector: Injector, workers: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inject, "SETTLE_S", 0.0)
    monkeypatch.setattr(inject, "damage", lambda folder: {"files": ["a"]})
    injector.nodes.memory_of = lambda node: [tmp_path]  # type: ignore[method-assign]
    do(injector, "stop_worker rank=2", workers, number=0)
    until(injector, lambda: state_of(workers[2]["pid"]) == "T")
    do(injector, "corrupt_snapshot rank=1", workers, number=1)  # rank 0 is killed
    until(injector, lambda: state_of(workers[1]["pid"]) != "T")
    assert state_of(workers[2]["pid"]) == "T"


@pytest.mark.parametrize("first_ends_first", [True, False])
def test_memory_stays_filled_until_the_last_fault_that_fills_it_is_over(
    injector: Injector,
    workers: list[dict[str, Any]],
    tmp_path: Path,
    notes: Notes,
    monkeypatch: pytest.MonkeyPatch,
    first_ends_first: bool,
) -> None:
    filler = tmp_path / FILLER
    room = 16_000_000  # bytes, of which the filler takes its part
    monkeypatch.setattr(inject, "free_bytes", lambda folder: room - (filler.stat().st_size if filler.exists() else 0))
    ends, lasts = "for_s=0.05", "for_s=60"
    do(injector, f"fill_memory leave_mb=4 {ends if first_ends_first else lasts}", workers, number=0)
    assert filler.stat().st_size == 12_000_000
    victims = do(injector, f"fill_memory leave_mb=2 {lasts if first_ends_first else ends}", workers, number=1)
    assert filler.stat().st_size == victims[0]["bytes"] == 14_000_000
    until(injector, lambda: bool(notes))
    assert filler.stat().st_size == (14_000_000 if first_ends_first else 12_000_000)
    injector.close()
    assert not filler.exists()


def test_damage_hits_the_newest_committed_snapshots_which_are_restored_from_other_copies(tmp_path: Path) -> None:
    with cluster(tmp_path, 2) as nodes:
        snapshot(nodes, 5, 2)
        first = nodes[0].keeper
        assert damage(first.folder) is None, "nothing is committed yet"
        first.committed(Committed(newest=Version(1, 5)))
        damaged = damage(first.folder)
        assert damaged is not None
        assert damaged["step"] == 5
        assert sorted(damaged["ranks"]) == [0, 1]  # its own, and its copy of the other node's
        assert damaged["axes"]["dp_shard"] == 2
        for name in damaged["files"]:
            found = open_snapshot(first.folder / name)
            assert found is not None
            with pytest.raises(CheckpointError, match="fails its checksums"):
                found.check()
        for shard in range(2):
            entries = entries_of(shard, 2)
            restored = restore_snapshot(
                entries,
                Holders.of(holders(nodes, 5)),
                node=first.node,
                folder=first.folder,
                secret=SECRET,
                reader=shard,
            )
            assert_state(entries, 5)
            assert restored.problems
            assert restored.own_bytes == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_damage_that_is_taken_as_good_changes_numbers_by_far_in_whatever_is_read(tmp_path: Path, dtype: str) -> None:
    """One exponent in each piece that has a checksum of its own: weights become 16 times or a 16th of themselves."""
    box, of_type = Box.whole("model/w", (5000, 9), dtype), getattr(torch, dtype)
    values = (0.02 * torch.randn(box.num_elements, generator=torch.Generator().manual_seed(7))).to(of_type)
    header = empty_header([box], ALONE, run_id=RUN, generation=1, writers=1)
    path = tmp_path / f"a{SLOT}"
    path.write_bytes(bytes(header.offsets[-1]))
    with open(path, "r+b") as file:
        slot = SlotFile(path, header, mmap.mmap(file.fileno(), 0))
    slot.memory()[0].copy_(values)
    slot.seal(3, {"step": 3})
    Committed(newest=Version(1, 3)).write(tmp_path)
    assert damage(tmp_path) == {"step": 3, "files": [path.name], "ranks": [0], "axes": ALONE.mesh.sizes}
    data = bytearray(path.read_bytes()[header.offsets[0] : header.offsets[0] + box.num_bytes])
    damaged = torch.frombuffer(data, dtype=of_type)
    changed = (damaged != values).nonzero().flatten()
    in_chunk = Counter((changed * ITEM_BYTES[dtype] // CHUNK_BYTES).tolist())
    assert in_chunk == dict.fromkeys(range(num_chunks(box.num_bytes)), 1)
    factors = (damaged[changed].double() / values[changed].double()).tolist()
    assert set(factors) <= {16.0, 1 / 16}


def test_a_rank_with_earlier_stages_of_a_pipeline_flips_bits_of_what_its_last_one_gives_out() -> None:
    """It has no norm behind its blocks."""
    model, stages = nn.Module(), {0: nn.Identity(), 2: nn.Identity()}
    model.norm, model.stages, model.weight = None, stages, nn.Parameter(torch.ones(2, 2))
    flipper, activations = BitFlipper(model), torch.ones(1, 2, 2)
    assert torch.equal(stages[2](activations), activations)
    flipper.obey(Order(ACTIVATIONS))
    assert torch.equal(stages[0](activations), activations)
    assert (stages[2](activations) != activations).sum() == 1
    flipper.obey(Order(WEIGHTS))
    assert (model.weight != 1).sum() == 1
    assert flipper.flipped == 2


def test_a_raylet_that_ended_by_itself_is_started_again_after_a_while_and_noted_as_gone(
    notes: Notes, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes: Any = SimpleNamespace()
    nodes.nodes = [_node(name) for name in "ab"]

    def restart(number: int) -> str:
        nodes.nodes[number] = _node("c")
        return "c"

    nodes.restart_raylet = restart
    made = InjectorApart(nodes, seed=7, note=lambda number, what, **fields: notes.append((number, what, fields)))
    made.tick()
    nodes.nodes[1].ray.poll = lambda: 1
    made.tick()
    assert notes == []  # a fault may yet take the host away
    monkeypatch.setattr(inject_apart, "RAYLET_BACK_S", 0.0)
    made.tick()
    made.tick()
    assert notes == [(0, "node gone", {"node": "b", "another": "c"})]
    assert [node.node_id for node in nodes.nodes] == ["a", "c"]


def test_no_raylet_is_started_or_drained_on_a_host_that_is_cut_off_from_the_head(
    notes: Notes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Soak seed 2461: the drill waited for it to join, and so never healed the link that it would have joined by; seed
    2434, for Ray to reach one that was to be drained."""
    monkeypatch.setattr(inject_apart, "RAYLET_BACK_S", -1.0)
    nodes: Any = SimpleNamespace(head=SimpleNamespace(name="head", up=True), nodes=[_node("a"), _node("b")])
    nodes.hosts = SimpleNamespace(partition=lambda *of, **more: None)
    restarted: list[int] = []
    nodes.restart_raylet = lambda number: restarted.append(number) or "c"
    made = InjectorApart(nodes, seed=7, note=lambda number, what, **fields: notes.append((number, what, fields)))
    monkeypatch.setattr(made, "on_node", lambda scene, number=0: [])
    heals: list[Any] = []
    monkeypatch.setattr(made, "until_healed", lambda scene, heal, note: heals.append(heal))
    fault = SimpleNamespace(options={}, option=lambda name: None)
    scene: Any = SimpleNamespace(node=0, fault=fault, number=3)
    made.does["blink_node"](scene)
    nodes.nodes[0].ray.poll = lambda: 1  # Ray has given the node up
    made.tick()
    for kind in ("restart_raylet", "drain_node", "drain_all"):
        with pytest.raises(NotNow, match="host-a is cut off from the head"):
            made.does[kind](scene)
    assert restarted == []
    heals.pop()()
    made.tick()
    made.does["restart_raylet"](scene)
    assert restarted == [0, 0]


class _Hosts:
    """What is wrong with hosts, by name, as they were last told."""

    def __init__(self) -> None:
        self.storage: dict[str, str] = {}
        self.links: dict[str, dict[str, float]] = {}

    def break_storage(self, host: Any, kind: str = "", delay_s: float = 0.0) -> None:
        self.storage[host.name] = kind

    def shape(self, host: Any, **shape: float) -> None:
        self.links[host.name] = shape


@pytest.fixture
def apart(notes: Notes) -> Iterator[InjectorApart]:
    nodes: Any = SimpleNamespace(head=SimpleNamespace(name="head", up=True), nodes=[_node("a"), _node("b")])
    nodes.hosts, nodes.pids, nodes.pid = _Hosts(), lambda number: [], lambda node, pid: pid
    nodes.number_of = lambda node: next((n for n, each in enumerate(nodes.nodes) if each.node_id == node), None)

    def add(broken: str) -> str:
        nodes.nodes.append(_node("new"))
        nodes.hosts.storage["host-new"] = broken
        return "new"

    def kill(number: int) -> None:
        nodes.nodes.pop(number).host.up = False

    nodes.add, nodes.kill = add, kill
    made = InjectorApart(nodes, seed=7, note=lambda number, what, **fields: notes.append((number, what, fields)))
    yield made
    made.close()


HUNG = {"head": "hung", "host-a": "hung", "host-b": "hung"}


@pytest.mark.parametrize(
    ("lines", "then"),
    [
        (("partition_storage node=0 for_s=0.05", "hung_storage for_s=60"), HUNG),
        (("hung_storage for_s=60", "partition_storage node=0 for_s=0.05"), HUNG),
        (("hung_storage for_s=60", "full_storage for_s=0.05"), HUNG),
        (
            ("full_storage for_s=0.05", "partition_storage node=0 for_s=60"),
            {"head": "", "host-a": "hung", "host-b": ""},
        ),
    ],
)
def test_storage_that_two_faults_break_stays_broken_until_both_are_over(
    apart: InjectorApart, notes: Notes, lines: tuple[str, str], then: dict[str, str]
) -> None:
    for number, line in enumerate(lines):
        do(apart, line, [], number)
    until(apart, lambda: bool(notes))
    assert apart.nodes.hosts.storage == then
    apart.close()
    assert set(apart.nodes.hosts.storage.values()) == {""}


def test_a_newcomers_own_storage_fails_on_when_that_of_all_hosts_works_again(
    apart: InjectorApart, notes: Notes
) -> None:
    do(apart, "return_node_without_storage for_s=60", [], 0)
    do(apart, "full_storage for_s=0.05", [], 1)
    assert apart.nodes.hosts.storage["host-new"] == "full"
    until(apart, lambda: bool(notes))
    assert apart.nodes.hosts.storage == {"head": "", "host-a": "", "host-b": "", "host-new": "failing"}


@pytest.mark.parametrize("first_ends_first", [True, False])
def test_a_link_is_as_the_newest_fault_that_is_not_over_has_it(
    apart: InjectorApart, notes: Notes, first_ends_first: bool
) -> None:
    ends, lasts = "for_s=0.05", "for_s=60"
    do(apart, f"slow_link node=0 rate_mbit=20 {ends if first_ends_first else lasts}", [], 0)
    do(apart, f"slow_link node=0 rate_mbit=5 {lasts if first_ends_first else ends}", [], 1)
    assert apart.nodes.hosts.links == {"host-a": {"rate_mbit": 5.0}}
    until(apart, lambda: bool(notes))
    assert apart.nodes.hosts.links == {"host-a": {"rate_mbit": 5.0 if first_ends_first else 20.0}}
    apart.close()
    assert apart.nodes.hosts.links == {"host-a": {}}


def test_what_two_partitions_drop_is_heard_again_once_both_are_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules: list[str] = []
    host: Any = SimpleNamespace(refused=Counter(), inside=lambda command: rules.append(f"{command[2]} {command[6]}"))
    monkeypatch.setattr(switch, "run", lambda command: None)
    made = switch.Switch(tmp_path)
    made.hosts[1] = host
    made.refuse(1, ["10.0.0.2", "10.0.0.3"], on=True)
    made.refuse(1, ["10.0.0.2"], on=True)
    made.refuse(1, ["10.0.0.2", "10.0.0.3"], on=False)
    assert rules == ["add 10.0.0.2", "add 10.0.0.3", "del 10.0.0.3"]
    made.refuse(1, ["10.0.0.2"], on=False)
    assert rules[3:] == ["del 10.0.0.2"]


def _node(name: str) -> Any:
    host = SimpleNamespace(name=f"host-{name}", up=True)
    return SimpleNamespace(node_id=name, host=host, ray=SimpleNamespace(poll=lambda: None))
