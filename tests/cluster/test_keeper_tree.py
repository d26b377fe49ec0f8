"""Reports and what came of orders go up a tree of keepers, commits and orders down it: real keepers, memory and files,
two of them under each."""

import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from regrow.config.schema import CheckpointConfig, ClusterConfig, ObserveConfig, PretrainConfig
from regrow.control import commands as c
from regrow.control import events as e
from regrow.control.core import Control
from regrow.control.membership import Member
from regrow.control.peers import plan_peers, plan_tree
from regrow.control.values import SnapshotAck, Version
from regrow.plan.mesh import Coordinates, MeshShape
from regrow.runtime.fleet import Fleet
from regrow.runtime.keeper import Keeper, KeeperSettings
from regrow.runtime.publisher import Publisher
from regrow.runtime.writing import GROUPS, fetch
from regrow.state.disk.catalog import committed_steps, open_checkpoint, step_folder, verify
from regrow.state.memory.held import is_whole
from regrow.state.memory.slots import Committed
from regrow.state.memory.writer import Snapshots
from regrow.storage import Storage
from support.keepers import RUN, SECRET, entries_of, step_to

NODES = [f"node-{number}" for number in range(7)]  # two, four under these, then one under node-2
STEP = 3
SETTINGS = KeeperSettings("", "rack", 600.0)


class Root:
    """Control and its keepers in an actor of their own, as the coordinator has them; a tree with two at its top."""

    def __init__(self, folder: Path) -> None:
        config = PretrainConfig(
            cluster=ClusterConfig(max_workers=8),
            checkpoint=CheckpointConfig(every_steps=None),
            observe=ObserveConfig(metrics=False),
        )
        self.control = Control(config, is_whole=is_whole, now=time.time(), fan_out=2)
        checkpoints = Storage.at(folder / "checkpoints")
        self.publisher = Publisher(checkpoints, RUN, keep=2, flush_log=lambda: None, fetch=fetch)
        self.fleet = Fleet(RUN, SECRET, self.publisher)
        self.commands: list[Any] = []
        self.calls = 0

    def ready(self) -> int:
        return 0

    def complaint(self, *what: Any) -> None:
        pass

    def note(self, event: str, fields: Any) -> None:
        pass

    def gone(self, node: str, pid: int) -> None:
        pass

    def tell(self, event: Any) -> None:
        carriers: dict[type, Any] = {
            c.SendPlaces: self.fleet.send_places,
            c.Announce: self.fleet.announce,
            c.Write: self.fleet.write,
            c.WriteAll: self.fleet.write_all,
            c.ReadBack: self.fleet.read_back,
            c.ReadBackAll: self.fleet.read_back_all,
            c.PublishIndex: lambda command: (self.fleet if command.by else self.publisher).publish_index(command),
            c.PublishCommit: self.publisher.publish_commit,
            c.Delete: self.publisher.delete,
        }
        for command in self.control.on(event, time.time()):
            self.commands.append(command)
            carriers.get(type(command), lambda command: None)(command)

    def begin(self, keepers: dict[str, tuple[Any, Any]]) -> None:
        self.tell(e.Joined(Member("one for all", NODES[0], "host", 1, 1), 1))
        self.tell(e.Asked("one for all", 0))
        for handle, info in keepers.values():
            self.tell(self.fleet.register(handle, info))
        self.tell(e.Began(1, 0, tuple(keepers), {}))
        ray.get([handle.pulses.remote() for handle, _ in keepers.values()])  # asked after: they know their places

    def snapshots_sealed(self, reports: list[SnapshotAck]) -> None:
        self.calls += 1
        self.tell(e.Sealed(reports))

    def newest(self) -> tuple[Version | None, int]:
        return self.control.newest_snapshot, self.calls

    def turn(self) -> list[Any]:
        """Take in what was answered; all commands so far."""
        for event in [*self.fleet.answers(), *self.publisher.done()]:
            self.tell(event)
        return self.commands


@pytest.fixture(scope="module")
def with_ray() -> Iterator[None]:
    with (
        tempfile.TemporaryDirectory(prefix="rgt", dir="/tmp", ignore_cleanup_errors=True) as temporary,
        pytest.MonkeyPatch.context() as monkeypatch,
    ):
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            namespace="regrow",
            labels={"rack": "r7"},
            _temp_dir=f"{temporary}/ray",
        )
        try:
            yield
        finally:
            ray.shutdown()


@pytest.fixture
def folder(with_ray: None) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="rgt", dir="/tmp", ignore_cleanup_errors=True) as temporary:
        yield Path(temporary)


def start_keepers(folder: Path) -> tuple[Any, dict[str, Any], list[Any]]:
    """The root, the keepers by node, and what they say of themselves; a generation has begun."""
    root: Any = ray.remote(Root).options(num_cpus=0).remote(folder)
    keeper: Any = ray.remote(concurrency_groups=GROUPS)(Keeper).options(num_cpus=0, max_concurrency=8)
    handles = {node: keeper.remote(RUN, node, str(folder / f"regrow-{RUN}-{node}"), SETTINGS) for node in NODES}
    infos = ray.get([handle.serve.remote(root, SECRET) for handle in handles.values()], timeout=120)
    ray.get(root.begin.remote({info.node: (handles[info.node], info) for info in infos}), timeout=60)
    return root, handles, infos


def test_a_step_that_all_report_is_committed_and_all_hear_of_it(folder: Path) -> None:
    assert [branch.num_nodes for branch in plan_tree(NODES, fan_out=2).values()] == [4, 3, 2, 1, 1, 1, 1]
    root, handles, infos = start_keepers(folder)
    assert {info.domain for info in infos} == {"r7"}
    assert {info.settings for info in infos} == {SETTINGS}
    assert all(info.object_store_bytes == 0 for info in infos), "its folder is not in /dev/shm"
    peers = plan_peers([(node, node) for node in NODES])
    for number, step in enumerate((1, 2), 1):
        moment = Version(1, step)
        for node in NODES[:-1]:
            ray.get(handles[node].relay.remote([SnapshotAck(node, moment, peers[node])]), timeout=60)
        time.sleep(0.2)
        assert ray.get(root.newest.remote())[0] == (Version(1, step - 1) if step > 1 else None), "one has not reported"
        handles[NODES[-1]].relay.remote([SnapshotAck(NODES[-1], moment, peers[NODES[-1]])])
        wait_until(lambda: all(Committed.read(Path(info.folder)).newest == moment for info in infos))  # noqa: B023
        assert ray.get(root.newest.remote()) == (moment, 2 * number), "two messages a step"
    again = SnapshotAck(NODES[-1], Version(1, 2), ("node-3",))  # others hold its copies now, say all but its leaders
    handles[NODES[-1]].relay.remote([again])
    wait_until(lambda: ray.get(root.newest.remote())[1] == 5)


@pytest.mark.parametrize("killed", [(), ("node-0",), ("node-2",), ("node-3", "node-6")], ids=" ".join)
def test_a_checkpoint_is_written_through_the_tree_whichever_keeper_of_it_dies(
    folder: Path, killed: tuple[str, ...]
) -> None:
    """node-0 speaks for 2, 3 and 6, node-2 for 6: the nodes they spoke for are asked themselves; their own parts come
    from their copies; each part is written once."""
    root, handles, _ = start_keepers(folder)
    entries = [entries_of(rank, len(NODES)) for rank in range(len(NODES))]
    writers = [
        Snapshots(
            folder / f"regrow-{RUN}-{node}",
            mine,
            coordinates=Coordinates(MeshShape(1, len(NODES)), rank),
            run_id=RUN,
            generation=1,
        )
        for rank, (node, mine) in enumerate(zip(NODES, entries, strict=True))
    ]
    step_to(STEP, writers, entries)
    wait_until(lambda: ray.get(root.newest.remote())[0] == Version(1, STEP))
    for node in killed:
        ray.kill(handles[node], no_restart=True)
    root.tell.remote(e.CheckpointWanted(1, STEP))

    def commands() -> Counter[type]:
        return Counter(type(each) for each in ray.get(root.turn.remote()))

    wait_until(lambda: commands()[c.Delete])
    ordered = ray.get(root.turn.remote())
    writes = [each for each in ordered if isinstance(each, c.Write)]
    (index, *again) = [each for each in ordered if isinstance(each, c.PublishIndex)]
    assert commands()[c.WriteAll] == 1
    if not killed:
        assert (writes, again, index.by in NODES[:2]) == ([], [], True)
        assert (commands()[c.ReadBackAll], commands()[c.ReadBack]) == (1, 0)
    assert {each.origin for each in writes if each.copies} == set(killed)
    checkpoints = Storage.at(folder / "checkpoints")
    assert committed_steps(checkpoints) == [STEP]
    made = open_checkpoint(checkpoints, STEP)
    verify(checkpoints, made, lambda num_bytes: None)
    assert len(made.files) == len(NODES)
    there = [path.suffix for path in (folder / "checkpoints" / step_folder(STEP)).iterdir()]
    assert there.count(".safetensors") == len(NODES), "nothing was written twice"
    for each in writers:
        each.close()


def wait_until(condition: Any, deadline_s: float = 120.0) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)
