"""Copies on other nodes: whole after so many losses, one right after the other, and what a node cannot copy moves."""

import threading
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path

import pytest

from regrow.control.peers import plan_peers
from regrow.control.values import Peer, SnapshotAck, Version
from regrow.forecast.memory import equal_nodes, plan_snapshot_memory, ranks_copied
from regrow.plan.mesh import ALONE, Coordinates, MeshShape
from regrow.state.disk.catalog import step_folder
from regrow.state.disk.upload import WriteOrder
from regrow.state.entries import Progress
from regrow.state.memory import held
from regrow.state.memory.holders import Holders
from regrow.state.memory.node import KeeperNode
from regrow.state.memory.reader import restore_snapshot
from regrow.state.memory.slots import MAGIC, Committed
from regrow.state.memory.writer import Snapshots
from regrow.storage import Storage
from regrow.train.saver import Cadence, SnapshotSaver
from support.keepers import (
    RUN,
    SECRET,
    Node,
    assert_state,
    cluster,
    entries_of,
    holders,
    peers_of,
    scalars_of,
    snapshot,
    wait_until,
)

STEP = 7


def nothing(*_: object) -> None: ...


def restored_by(nodes: Sequence[Node], generation: int) -> list[Snapshots]:
    """A group of one rank a node that restores the newest snapshot, and is about to take its first step."""
    known, made = holders(list(nodes), STEP), []
    for rank, node in enumerate(nodes):
        entries, keeper = entries_of(rank, len(nodes)), node.keeper
        found = restore_snapshot(
            entries, Holders.of(known), node=keeper.node, folder=keeper.folder, secret=SECRET, reader=rank
        )
        snapshots = Snapshots(
            keeper.folder,
            entries,
            coordinates=Coordinates(MeshShape(1, len(nodes)), rank),
            run_id=RUN,
            generation=generation,
        )
        cadence = Cadence(100, snapshot_every_steps=1)
        ways = {"want_checkpoint": nothing, "write": nothing}
        saver = SnapshotSaver(cadence, snapshots, start_step=STEP, num_ahead=0, timeout_s=1.0, **ways)
        saver.keep_restored(Progress(found.scalars["step"], found.scalars["cursor"], 0))
        saver.before_update()
        made.append(snapshots)
    return made


def lose(nodes: list[Node], number: int) -> None:
    """A node, and what it held."""
    nodes.pop(number).keeper.close(delete=True)


def assert_whole(nodes: list[Node], generation: int) -> None:
    where, entries = nodes[0].keeper, entries_of(0, 1)
    known = [each for each in holders(nodes, STEP) if each.held.moment == Version(generation, STEP)]
    restore_snapshot(entries, Holders.of(known), node=where.node, folder=where.folder, secret=SECRET)
    assert_state(entries, STEP)


@pytest.mark.parametrize("second", [0, 1])
def test_a_second_node_that_is_lost_before_the_first_step_costs_nothing_once_what_was_restored_is_copied(
    tmp_path: Path, second: int
) -> None:
    with cluster(tmp_path, 3) as nodes:
        snapshot(nodes, STEP, 3)
        lose(nodes, 1)
        for number, node in enumerate(nodes):
            node.keeper.set_peers(peers_of(nodes, number))
        groups = restored_by(nodes, generation=2)
        wanted = Version(2, STEP)  # the one before is copied to the new peers beside it
        wait_until(lambda: all(wanted in [report.version for report in node.reports] for node in nodes))
        found = [next(report for report in node.reports if report.version == wanted) for node in nodes]
        assert [report.peers for report in found] == [("node-2",), ("node-0",)]
        lose(nodes, second)
        assert_whole(nodes, generation=2)
        for snapshots in groups:
            snapshots.close()


@pytest.mark.parametrize("lost", list(combinations(range(4), 2)))
def test_with_two_copies_any_two_nodes_may_be_lost_at_once(tmp_path: Path, lost: tuple[int, int]) -> None:
    with cluster(tmp_path, 4, copies=2) as nodes:
        snapshot(nodes, STEP, 4)
        for number in reversed(lost):
            lose(nodes, number)
        assert_whole(nodes, generation=1)


def test_what_two_nodes_hold_for_others_is_written_to_storage_by_either_of_them(tmp_path: Path) -> None:
    """A keeper with copies of two nodes writes those of the one that it is asked for."""
    with cluster(tmp_path / "memory", 3, copies=2) as nodes:
        snapshot(nodes, STEP, 3)
        storage = Storage.at(tmp_path / "checkpoints") / step_folder(STEP)
        for holder, origin in ((1, 0), (2, 0), (2, 1)):
            order = WriteOrder(Version(1, STEP), f"node-{origin}", True, str(storage), f"{holder}{origin}", True)
            written = nodes[holder].keeper.write(order)
            assert written.num_ranks == 1
            assert sum(each.num_bytes - each.header_bytes for each in written.files) < 4 * 97 * 200


def test_a_keeper_says_to_which_peer_it_cannot_copy_and_copies_to_the_next_ones(tmp_path: Path) -> None:
    with cluster(tmp_path, 3) as nodes:
        said: list[tuple[str, str]] = []
        keeper = nodes[0].keeper
        keeper.complain = lambda text, peer, tried_s: said.append((peer, text))
        full = Peer("node-9", ("127.0.0.1", 1))
        keeper.set_peers((*peers_of(nodes, 0), full))
        groups = [Snapshots(keeper.folder, entries_of(0, 1), coordinates=ALONE, run_id=RUN, generation=1)]
        groups[0].begin(STEP, scalars_of(STEP))
        groups[0].wait()
        groups[0].confirm(STEP)
        wait_until(lambda: said)
        assert said[0][0] == "node-9"
        assert not nodes[0].reports
        keeper.set_peers(peers_of(nodes, 0, 2))
        wait_until(lambda: nodes[0].reports)
        assert nodes[0].reports[-1].peers == ("node-1", "node-2")


def test_a_slot_that_is_overwritten_while_it_is_copied_is_no_fault_of_the_peer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both slots of a new group hold steps that are not committed: training goes on in the older one."""
    with cluster(tmp_path, 2) as nodes:
        said: list[str] = []
        keeper = nodes[0].keeper
        keeper.complain = lambda text, peer, tried_s: said.append(text)
        take, overwritten = held.take_checksums, threading.Event()

        def take_checksums(path: Path) -> held.Snapshot | None:
            found = take(path)
            if path.parent == keeper.folder and not overwritten.is_set():
                with open(path, "r+b") as file:
                    file.write(bytes(len(MAGIC)))
                overwritten.set()
            return found

        monkeypatch.setattr(held, "take_checksums", take_checksums)
        writer = Snapshots(keeper.folder, entries_of(0, 1), coordinates=ALONE, run_id=RUN, generation=1)
        for step in (STEP, STEP + 1):
            writer.begin(step, scalars_of(step))
            writer.wait()
            writer.confirm(step)
            wait_until(overwritten.is_set)
        wait_until(lambda: nodes[0].reports)
        assert [report.version for report in nodes[0].reports] == [Version(1, STEP + 1)]
        assert said == []


def test_a_place_that_has_not_changed_is_reported_again_without_another_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cluster(tmp_path, 2) as nodes:
        snapshot(nodes, STEP, 2)
        looked: list[Path] = []
        take: Callable[[Path], None] = nodes[0].keeper.take
        monkeypatch.setattr(nodes[0].keeper, "take", lambda path: (looked.append(path), take(path)))
        (before,) = nodes[0].reports
        nodes[0].keeper.set_peers(peers_of(nodes, 0))
        assert nodes[0].reports == [before, before]
        nodes[0].keeper.committed(Committed(Version(1, STEP)))
        nodes[0].keeper.set_peers(peers_of(nodes, 0))
        assert nodes[0].reports == [before, before]
        assert not looked


def test_a_keeper_that_comes_back_to_a_node_without_peers_takes_up_what_was_sealed_meanwhile(tmp_path: Path) -> None:
    with cluster(tmp_path, 1) as nodes:
        (writer,) = snapshot(nodes, STEP, 1)
        nodes[0].keeper.close(delete=False)
        writer.begin(STEP + 1, scalars_of(STEP + 1))
        writer.wait()
        writer.confirm(STEP + 1)
        reports: list[SnapshotAck] = []
        folder = nodes[0].keeper.folder
        nodes[0].keeper = KeeperNode(
            folder, node="node-0", host="127.0.0.1", secret=SECRET, run_id=RUN, report=reports.append
        )
        nodes[0].keeper.start()
        nodes[0].keeper.set_peers(())
        report = SnapshotAck("node-0", Version(1, STEP + 1), ())
        wait_until(lambda: report in reports)
        times = next(each.times for each in reports if each == report)
        assert times is not None
        assert 0 < times.check_s <= times.seconds
        assert times.bytes > 0


@pytest.mark.parametrize(("copies", "of_small", "of_large"), [(1, 8, 1), (2, 16, 9)])
def test_a_small_node_plans_for_the_copies_of_the_large_ones_that_it_holds(
    copies: int, of_small: int, of_large: int
) -> None:
    """As if each node copied to one like itself, a node of one rank was overfilled by one of eight."""
    ranks = ["large"] * 8 + ["other"] * 8 + ["small"]
    peers = plan_peers([(node, node) for node in dict.fromkeys(ranks)], copies=copies)
    copied = ranks_copied(peers, ranks)
    assert copied["small"] == of_small
    assert min(copied["large"], copied["other"]) == of_large
    plan = plan_snapshot_memory(17, {17: 100}, slots=2, ranks_on_node=1, ranks_copied=copied["small"])
    assert plan.at_most == plan.of_before == 2 * 100 * (1 + of_small)


def test_no_group_is_planned_to_hold_files_of_more_ranks_than_it_has() -> None:
    """A node of eight ranks was to hold eight times the state of a group of one, which is all of it."""
    plan = plan_snapshot_memory(8, {1: 800, 4: 200, 8: 100}, slots=3, ranks_on_node=8, ranks_copied=0)
    assert (plan.at_most, plan.of_before) == (3 * 800, 3 * 800)
    copied = plan_snapshot_memory(12, {8: 150, 12: 100}, slots=3, ranks_on_node=8, ranks_copied=8)
    assert (copied.at_most, copied.of_before) == (3 * 8 * 150, 3 * 12 * 100)
    uneven = plan_snapshot_memory(16, {8: 200, 12: 150, 16: 100}, slots=2, ranks_on_node=8, ranks_copied=8)
    assert (uneven.at_most, uneven.world_size) == (2 * 12 * 150, 12)


def test_where_nodes_are_equal_the_placement_is_what_presets_and_submissions_plan_for() -> None:
    for num_nodes, copies in ((1, 1), (2, 1), (2, 2), (3, 2), (8, 1), (8, 2)):
        nodes = [f"n{number}" for number in range(num_nodes)]
        peers = plan_peers([(node, node) for node in nodes], copies=copies)
        expected = equal_nodes(8 * num_nodes, 8, copies)
        assert {(8, ranks_copied(peers, nodes * 8)[node]) for node in nodes} == {expected}


def test_a_node_that_does_not_hear_the_coordinator_hears_of_commits_from_those_with_its_copies(tmp_path: Path) -> None:
    """It had no room for snapshots otherwise, so that none was made on any node until it was given up."""
    with cluster(tmp_path, 3) as nodes:
        snapshot(nodes, STEP, 3)
        nodes[2].keeper.committed(Committed(Version(1, STEP), Version(1, STEP), number=7))
        deaf, hears = nodes[0].keeper, nodes[1].keeper
        hears.committed(Committed(Version(1, STEP), Version(1, STEP - 1), number=8))
        wait_until(lambda: Committed.read(deaf.folder) == Committed(Version(1, STEP), Version(1, STEP - 1)))
        deaf.committed(Committed(Version(1, STEP - 1), number=6))  # sent before, and late
        assert Committed.read(deaf.folder).newest == Version(1, STEP)


def test_what_all_ranks_are_told_of_a_snapshot_is_all_that_was_found_and_the_mesh_once(tmp_path: Path) -> None:
    with cluster(tmp_path, 3) as nodes:
        snapshot(nodes, STEP, 3)
        found = [each for each in holders(nodes, STEP) if each.held.moment == Version(1, STEP)]
        assert len(found) == 6
        told = Holders.of(found)
        assert list(told) == [told[at] for at in range(len(told))] == found
        again = Holders.of_json(told.to_json())
        assert again == told
        assert len({id(each.held.coordinates.mesh) for each in again}) == 1
        assert [list(told.without(each)) for each in found] == [[o for o in found if o != each] for each in found]
    nothing = Holders(Version(1, STEP))
    assert Holders.of_json(nothing.to_json()) == nothing
    assert not nothing
    assert not nothing.is_whole
    with pytest.raises(IndexError):
        nothing[0]
