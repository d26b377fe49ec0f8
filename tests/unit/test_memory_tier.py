"""A rank's dealings with its keeper, before it was in any group."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from regrow.config.check import topologies
from regrow.config.schema import ClusterConfig, OptimConfig, PretrainConfig
from regrow.control import events as e
from regrow.control.phases import Phase
from regrow.control.values import Version
from regrow.errors import CheckpointError
from regrow.forecast.estimate import rank_bytes
from regrow.forecast.memory import plan_snapshot_memory
from regrow.model.size import state_bytes
from regrow.parallel.stream import HostStream
from regrow.plan.mesh import ALONE, Coordinates, plan_mesh
from regrow.runtime import memory_tier
from regrow.runtime.abort import Breaker
from regrow.runtime.keeper import KeeperInfo
from regrow.runtime.memory_tier import ROOM_S, MemoryTier, cannot_serve
from regrow.state.collective import PeerError
from regrow.state.memory.control_word import ControlWord
from regrow.state.memory.holders import Holders
from regrow.state.memory.reader import Restored
from regrow.state.memory.transport import TransportError
from support.keepers import wait_until
from support.told import Told, one

NODE, GENERATION = "node0", 5


@pytest.fixture
def newcomer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MemoryTier:
    """A process whose keeper is up, and which was in no group yet."""
    info = KeeperInfo(NODE, NODE, str(tmp_path), ("127.0.0.1", 1), Version(), ())
    answer: Future[KeeperInfo] = Future()
    answer.set_result(info)
    keeper = SimpleNamespace(serve=SimpleNamespace(remote=lambda *of: answer))
    coordinator = SimpleNamespace(secret=lambda: b"secret", register_keeper=lambda *of: None)
    context = SimpleNamespace(get_node_id=lambda: NODE)
    monkeypatch.setattr(memory_tier.ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(memory_tier.ray, "get", lambda reference, timeout: reference.result(timeout))
    monkeypatch.setattr(memory_tier, "start_keeper", lambda *of, **more: keeper)
    monkeypatch.setattr(memory_tier, "CoordinatorClient", lambda handle: coordinator)
    config = PretrainConfig(cluster=ClusterConfig(max_workers=16), optim=OptimConfig(num_slices=16))
    job: Any = SimpleNamespace(config=config, topologies=topologies(config), run_id="run", coordinator=None)
    return MemoryTier(job)


def test_a_newcomer_is_told_that_its_first_generation_is_over(newcomer: MemoryTier, tmp_path: Path) -> None:
    """Soak seed 2459: a host lost power while a group formed; the newcomer waited for it in its first collective, and
    the run for the newcomer, as no other thread of it looked yet whether that generation was over."""
    newcomer.check_room()
    breaker = Breaker()
    newcomer.waiting(GENERATION, breaker)
    assert not breaker.begun
    ControlWord(over=GENERATION).write(tmp_path)
    wait_until(lambda: breaker.begun)
    breaker.left()


@pytest.mark.parametrize("speaks", [True, False])
def test_a_worker_whose_keeper_has_ended_has_another_one_from_its_next_group_on(
    newcomer: MemoryTier, monkeypatch: pytest.MonkeyPatch, speaks: bool
) -> None:
    """The handle was that of the keeper that had ended, in every group of this process."""
    dead, secret, serving = Future[Any](), Future[bytes](), newcomer.keeper.serve
    dead.set_exception(ray.exceptions.ActorDiedError())
    secret.set_result(b"of the other")
    calls = SimpleNamespace(remote=lambda *of: dead)
    other = SimpleNamespace(serve=serving, secret=SimpleNamespace(remote=lambda: secret))
    newcomer.check_room()
    newcomer._serving, newcomer.keeper = None, SimpleNamespace(serve=calls, secret=calls)
    newcomer._start_keeper = lambda: other  # type: ignore[assignment]
    monkeypatch.setattr(memory_tier, "gather", lambda mine: [mine])
    breaker = Breaker()
    newcomer.join(GENERATION, set(), breaker, speaks=speaks)
    assert newcomer.keeper is other
    assert newcomer.secret == (b"secret" if speaks else b"of the other")
    breaker.left()


@pytest.mark.parametrize("speaks", [True, False])
def test_a_spare_whose_keeper_was_restarted_while_it_waited_tells_where_that_is_now(
    newcomer: MemoryTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, speaks: bool
) -> None:
    """It told where the keeper had been as the process began, and others sent their copies there."""
    told: list[tuple[str, int]] = []
    register = lambda keeper, info: told.append(info.address)  # noqa: E731
    monkeypatch.setattr(newcomer, "coordinator", SimpleNamespace(secret=lambda: b"secret", register_keeper=register))
    monkeypatch.setattr(memory_tier, "gather", lambda mine: [mine])
    newcomer.check_room()
    info, secret = Future[KeeperInfo](), Future[bytes]()
    info.set_result(KeeperInfo(NODE, "rack", str(tmp_path), ("127.0.0.1", 2), Version(), ()))
    secret.set_result(b"secret")
    calls = {"serve": SimpleNamespace(remote=lambda *of: info), "secret": SimpleNamespace(remote=lambda: secret)}
    newcomer.keeper = SimpleNamespace(**calls)
    told += [("127.0.0.1", 2)]  # as it was found again
    breaker = Breaker()
    newcomer.join(GENERATION, set(), breaker, speaks=speaks)
    assert told[-1] == ("127.0.0.1", 2)
    assert newcomer.domain == ("rack" if speaks else NODE)
    breaker.left()


def test_a_keeper_that_was_restarted_while_the_process_began_is_told_of_where_it_is(
    newcomer: MemoryTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process compiles for minutes before it looks at its room, and told where the keeper had been before."""
    told: list[tuple[str, int]] = []
    register = lambda keeper, info: told.append(info.address)  # noqa: E731
    monkeypatch.setattr(newcomer, "coordinator", SimpleNamespace(secret=lambda: b"secret", register_keeper=register))
    info = Future[KeeperInfo]()
    info.set_result(KeeperInfo(NODE, "rack", str(tmp_path), ("127.0.0.1", 2), Version(), ()))
    newcomer.keeper = SimpleNamespace(serve=SimpleNamespace(remote=lambda *of: info))
    newcomer.check_room()
    assert (told, newcomer.domain) == ([("127.0.0.1", 2)], "rack")


FIRST = "node1/a.slot: model/1 fails its checksum"


@pytest.mark.parametrize(
    ("again", "other", "events"),
    [
        ((), "", [("snapshot_damaged", FIRST)]),
        ((FIRST.replace("model/1", "model/2"),), "", [("snapshot_damaged", FIRST)]),
        (
            ("node2/b.slot: is cut short",),
            "",
            [("snapshot_damaged", FIRST), ("snapshot_damaged", "node2/b.slot: is cut short")],
        ),
        ((), "no copy is sound", [("snapshot_damaged", FIRST), ("snapshot_unreadable", "no copy is sound")]),
    ],
)
def test_what_a_rank_refuses_is_told_though_another_rank_has_all_read_again(
    newcomer: MemoryTier,
    monkeypatch: pytest.MonkeyPatch,
    again: tuple[str, ...],
    other: str,
    events: list[tuple[str, str]],
) -> None:
    """Each file once. Another rank could not read the first snapshot, nor, where `other` says why, the second."""
    told: list[tuple[str, str]] = []
    holders, problems = Holders(Version(1, 5)), iter(["no copy is sound", other])
    restored, progress = iter([(FIRST,), again]), SimpleNamespace()
    newcomer.coordinator = SimpleNamespace(  # type: ignore[assignment]
        newest_snapshot=lambda: holders,
        committed_snapshot=lambda: holders,
        note=lambda event, fields: told.append((event, fields["detail"])),
    )
    monkeypatch.setattr(memory_tier.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(memory_tier, "from_rank_0", lambda mine: mine)
    monkeypatch.setattr(memory_tier, "gather", lambda mine: [mine, next(problems)])
    monkeypatch.setattr(memory_tier, "restore_snapshot", lambda *_, **__: Restored({}, problems=next(restored)))
    monkeypatch.setattr(memory_tier, "restored_progress", lambda *_, **__: progress)
    newcomer.secret = b"secret"
    assert newcomer.restore([], ALONE, at_least=1) is (None if other else progress)
    assert told == events


def test_a_rank_that_copies_its_state_from_other_nodes_is_seen_to_read_it(
    newcomer: MemoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A newcomer that did for more than half a minute, while survivors waited, was taken for hung."""
    seen: list[Phase] = []
    holders = Holders(Version(1, 5))

    @contextlib.contextmanager
    def phase(what: Phase) -> Iterator[None]:
        seen.append(what)
        yield
        seen.append(Phase.forming)

    def read(*args: Any, **ways: Any) -> Restored:
        assert seen == [Phase.restore]
        return Restored({})

    ask = {"newest_snapshot": lambda: holders, "committed_snapshot": lambda: holders}
    newcomer.coordinator = SimpleNamespace(**ask)  # type: ignore[assignment]
    monkeypatch.setattr(newcomer, "phase", phase)
    monkeypatch.setattr(memory_tier.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(memory_tier, "from_rank_0", lambda mine: mine)
    monkeypatch.setattr(memory_tier, "gather", lambda mine: [mine])
    monkeypatch.setattr(memory_tier, "restore_snapshot", read)
    monkeypatch.setattr(memory_tier, "restored_progress", lambda *_, **__: SimpleNamespace())
    newcomer.secret = b"secret"
    assert newcomer.restore([], ALONE, at_least=1) is not None
    assert seen == [Phase.restore, Phase.forming]


def without_room(tier: MemoryTier, monkeypatch: pytest.MonkeyPatch, told: Told, *, copied: int) -> Exception:
    """What the first of four ranks of `NODE` fails with in the newest group, whose members on other nodes have room:
    its own node's is a byte less than is needed with copies of so many others."""
    group = [(member.node, member.node) for member in told.control.group.membership.current]
    mesh, config = plan_mesh(len(group), 1), tier.job.config
    need = plan_snapshot_memory(
        mesh.world_size,
        rank_bytes(config, tier.job.topologies),
        slots=config.snapshot.slots,
        ranks_on_node=4,
        ranks_copied=copied,
    )

    def gathered(mine: Any) -> Any:
        if len(mine) == 2:
            return group
        return [(mine[0] if node == NODE else "", node != "large", ROOM_S + 1.0) for node, _ in group]

    monkeypatch.setattr(memory_tier, "gather", gathered)
    monkeypatch.setattr(tier, "_room", lambda: need.total - 1)
    tier._has_held = True
    with pytest.raises(Exception, match="GB are needed") as caught:
        tier.start([], Coordinates(mesh, 0), GENERATION, HostStream())
    return caught.value


def test_a_node_that_has_no_room_for_copies_of_a_larger_one_that_comes_trains_on_without_it(
    newcomer: MemoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ranks were expelled, three times, and its host was quarantined for an hour."""
    told = Told(max_workers=16)
    small = [one(4 * number + pid, node) for number, node in enumerate((NODE, "other")) for pid in range(4)]
    told.form(*small)
    told.begin([NODE, "other"])
    told.row(1)
    large = [one(8 + pid, "large") for pid in range(8)]
    assert len(told.form(*small, *large).members) == 16
    told.clear()
    error = without_room(newcomer, monkeypatch, told, copied=8)
    assert isinstance(error, PeerError)
    told(e.Broke(told.control.generation, str(error)))
    assert [each.id for each in told.form(*small, *large).members] == [each.id for each in small]
    told.begin([NODE, "other"], 1)
    told.row(2)
    assert told.records("quarantine") == []
    assert {each["node"] for each in told.records("unfit")} == {"large"}


def test_a_node_that_had_no_room_in_a_group_without_newcomers_either_has_trouble_of_its_own(
    newcomer: MemoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Told(max_workers=16)
    told.form(*[one(at, node) for at, node in enumerate([NODE] * 4 + ["other"] * 4 + ["large"] * 8)])
    assert isinstance(without_room(newcomer, monkeypatch, told, copied=4), CheckpointError)


def test_a_keeper_that_cannot_work_is_said_with_what_to_set() -> None:
    folder = cannot_serve("node" * 8, "/mem", PermissionError(13, "Permission denied"))
    assert folder.startswith("snapshot.folder=/mem cannot hold snapshots on node nodenodenode ([Errno 13] Permission")
    transport = cannot_serve("node" * 8, "/mem", TransportError("no device; set snapshot.transport=tcp"))
    assert transport == "node nodenodenode: no device; set snapshot.transport=tcp"


def test_how_long_a_node_has_been_up_is_known_of_a_child_of_its_raylet_alone() -> None:
    says = "from regrow.runtime.keeper import _node_up_s; print(_node_up_s())"
    as_raylet = f"open('/proc/self/comm', 'w').write('raylet'); subprocess.run([sys.executable, '-c', {says!r}])"
    found = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120).stdout
        for code in (f"import subprocess, sys; {as_raylet}", says)
    ]
    assert 0.0 < float(found[0]) < 120.0, "its parent began with this test"
    assert found[1].strip() == "None"


def test_what_rays_object_store_takes_is_known_of_this_nodes_raylet_alone() -> None:
    """Each keeper listed all nodes as it started."""
    says = (
        "import ray; ray.nodes = None; from pathlib import Path; from regrow.runtime import keeper; "
        "print([keeper._object_store_bytes(Path(each)) for each in ('/dev/shm/regrow', '/proc/regrow')])"
    )
    raylet = (
        "import subprocess, sys; open('/proc/self/comm', 'w').write('raylet'); "
        f"subprocess.run([sys.executable, '-c', {says!r}], check=True)"
    )
    found = [
        subprocess.run([sys.executable, "-c", *of], capture_output=True, text=True, check=True, timeout=120).stdout
        for of in ([raylet, "--store_socket_name=store", "--object_store_memory=7058327961"], [says])
    ]
    assert [each.strip() for each in found] == ["[7058327961, 0]", "[0, 0]"]


def test_a_node_that_holds_all_of_two_groups_is_large_enough(
    newcomer: MemoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was to hold the state of a group of one for each of its sixteen ranks, and was refused."""
    config, told = newcomer.job.config, list[str]()
    newcomer.folder = Path("/dev/shm")
    monkeypatch.setattr(newcomer, "_tell_of_store", lambda *of: None)
    held = 2 * config.snapshot.slots * state_bytes(config.model)
    uneven = 1.01  # rows do not divide evenly
    for room in (held * uneven, held / uneven):
        monkeypatch.setattr(newcomer, "_room", lambda: room)  # noqa: B023
        told.append(newcomer._shortage(plan_mesh(16, 1), 16, 0))
    assert [bool(each) for each in told] == [False, True]
