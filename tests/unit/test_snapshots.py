"""Snapshots and keepers, without Ray: from any layout to any other through memory alone, and never anything torn."""

import contextlib
import errno
import itertools
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from regrow.accept.generations import Runtime, counting_runtime, on_a_device
from regrow.control.values import NOTHING, Peer, SnapshotAck, Version
from regrow.errors import CheckpointError
from regrow.plan.boxes import Box
from regrow.plan.mesh import ALONE, Coordinates, MeshShape
from regrow.runtime.keeper import Keeper, Place
from regrow.state.checksums import checksums
from regrow.state.disk.upload import WriteOrder
from regrow.state.entries import Entry
from regrow.state.memory import held as files
from regrow.state.memory import node, unneeded
from regrow.state.memory import writer as writer_module
from regrow.state.memory.control_word import ControlWord
from regrow.state.memory.held import Held, open_snapshot
from regrow.state.memory.holders import Holders
from regrow.state.memory.node import KeeperNode
from regrow.state.memory.ranges import TIMEOUT_S
from regrow.state.memory.reader import PIECE_BYTES, restore_snapshot
from regrow.state.memory.slots import HELD_BY_ALL, NOTICES, SLOT, Committed, empty_header
from regrow.state.memory.writer import UNCOMMITTED_S, Snapshots
from support.keepers import (
    RUN,
    SECRET,
    Node,
    assert_state,
    cluster,
    entries_of,
    holders,
    scalars_of,
    snapshot,
    state,
    step_to,
    wait_until,
)


@pytest.mark.parametrize("more", [-1, 0, 1, files.PIECE_BYTES + 5])
def test_a_slot_is_checksummed_piece_by_piece_as_it_is_whole(tmp_path: Path, more: int) -> None:
    sizes = [files.PIECE_BYTES // 4 + more, 0, 3]
    boxes = tuple(Box.whole(f"w{number}", (size,), "float32") for number, size in enumerate(sizes))
    header = empty_header(boxes, ALONE, run_id=RUN, generation=1, writers=1)
    content = np.random.default_rng(more + 1).integers(256, size=header.offsets[-1], dtype=np.uint8).tobytes()
    path = tmp_path / "slot"
    path.write_bytes(content)
    with open(path, "rb") as file:
        crc = files.checksums_of(file, header)
    spans = zip(boxes, header.offsets, strict=False)
    assert crc.tolist() == [each for box, at in spans for each in checksums(memoryview(content)[at:][: box.num_bytes])]
    os.truncate(path, header.offsets[2] + 2)
    with open(path, "rb") as file, pytest.raises(CheckpointError, match="is cut short"):
        files.checksums_of(file, header)


def restored(nodes: list[Node], where: Node, step: int, shard: int, num_shards: int) -> list[Entry]:
    entries = entries_of(shard, num_shards)
    result = restore_snapshot(
        entries,
        Holders.of(holders(nodes, step)),
        node=where.keeper.node,
        folder=where.keeper.folder,
        secret=SECRET,
        reader=shard,
    )
    assert result.scalars == {"step": step, "cursor": 12 * step}
    return entries


@pytest.mark.parametrize("num_shards", [1, 2, 3, 4, 6])
def test_a_snapshot_fits_every_other_number_of_shards_bit_for_bit(tmp_path: Path, num_shards: int) -> None:
    with cluster(tmp_path, 3) as nodes:
        snapshot(nodes, 5, num_shards)
        for wanted in range(1, 7):
            for shard in range(wanted):
                assert_state(restored(nodes, nodes[shard % 3], 5, shard, wanted), 5)


def test_two_replicas_share_out_what_they_both_hold(tmp_path: Path) -> None:
    with cluster(tmp_path, 4) as nodes:
        snapshot(nodes, 5, 2, replicas=2)
        for wanted in (1, 2, 3):
            for shard in range(wanted):
                assert_state(restored(nodes, nodes[shard], 5, shard, wanted), 5)


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_without_one_node_and_its_memory_its_peers_copies_are_enough(tmp_path: Path, victim: int) -> None:
    with cluster(tmp_path, 3) as nodes:
        snapshot(nodes, 7, 3)
        nodes[victim].keeper.close(delete=True)
        assert not nodes[victim].keeper.folder.exists()
        survivors = [node for number, node in enumerate(nodes) if number != victim]
        for shard in range(2):
            assert_state(restored(survivors, survivors[shard], 7, shard, 2), 7)


def test_a_holder_that_vanishes_or_is_damaged_is_replaced_by_its_copy(tmp_path: Path) -> None:
    with cluster(tmp_path, 3) as nodes:
        snapshot(nodes, 7, 3)
        known = holders(nodes, 7)
        nodes[1].keeper.close(delete=True)  # after the plan was made
        problems: list[str] = []
        for shard, reader in itertools.product(range(2), range(2)):
            entries, where = entries_of(shard, 2), nodes[2 * shard].keeper
            result = restore_snapshot(
                entries, Holders.of(known), node=where.node, folder=where.folder, secret=SECRET, reader=reader
            )
            assert_state(entries, 7)
            problems += result.problems
        assert any("node-1" in problem for problem in problems)
        nodes[2].keeper.close(delete=True)
        where = nodes[0].keeper
        with pytest.raises(CheckpointError, match=r"no file holds elements .*node-"):
            restore_snapshot(entries_of(0, 1), Holders.of(known), node=where.node, folder=where.folder, secret=SECRET)


@pytest.mark.parametrize("found", [OSError(errno.EIO, "Input/output error"), 0], ids=["a bad page", "cut short"])
def test_own_memory_that_cannot_be_read_is_replaced_by_its_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: OSError | int
) -> None:
    def preadv(*of: Any) -> int:
        if isinstance(found, OSError):
            raise found
        return found

    with cluster(tmp_path, 2) as nodes:
        snapshot(nodes, 7, 1)
        monkeypatch.setattr("regrow.state.memory.reader.os.preadv", preadv)
        entries, where = entries_of(0, 1), nodes[0].keeper
        known = Holders.of(holders(nodes, 7))
        result = restore_snapshot(entries, known, node=where.node, folder=where.folder, secret=SECRET)
        assert_state(entries, 7)
        assert (result.own_bytes, len(result.problems)) == (0, 1)
        assert "node-0" in result.problems[0]


def test_a_keeper_that_has_too_few_checksums_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def describe(path: Path, connection: Any) -> None:
        found = open_snapshot(path)
        assert found is not None
        data = found.header.encode()
        connection.send({"header": len(data)}, data + found.crc.tobytes()[:-4])

    with cluster(tmp_path, 2) as nodes:
        snapshot(nodes, 7, 1)
        monkeypatch.setattr("regrow.state.memory.node._describe", describe)
        copies = Holders.of([holder for holder in holders(nodes, 7) if holder.held.is_copy])
        where = nodes[0].keeper
        with pytest.raises(CheckpointError, match=r"its keeper has \d+ checksums of \d+"):
            restore_snapshot(entries_of(0, 1), copies, node=where.node, folder=where.folder, secret=SECRET)


def test_own_memory_is_read_before_that_of_peers(tmp_path: Path) -> None:
    with cluster(tmp_path, 3) as nodes:
        snapshot(nodes, 7, 3)
        needed = sum(entry.memory.nbytes for entry in entries_of(0, 3))
        where = nodes[0].keeper
        result = restore_snapshot(
            entries_of(0, 3), Holders.of(holders(nodes, 7)), node=where.node, folder=where.folder, secret=SECRET
        )
        assert (result.peer_bytes, result.own_bytes >= needed) == (0, True)


def commit(node: Node, generation: int, step: int, pinned: Version = Version()) -> None:  # noqa: B008
    node.keeper.committed(Committed(Version(generation, step), pinned))


def take(writer: Snapshots, step: int) -> bool:
    begun = writer.begin(step, {"step": step, "cursor": 12 * step})
    writer.wait()
    writer.confirm(step)
    return begun


def test_slots_take_turns_and_the_newest_committed_one_is_never_overwritten(tmp_path: Path) -> None:
    with cluster(tmp_path, 2) as nodes:
        (writer,) = snapshot(nodes[:1], 1, 1)
        files = {path.name for path in nodes[0].keeper.folder.glob(f"*{SLOT}")}
        assert len(files) == 2
        assert take(writer, 2)
        assert not take(writer, 3)  # nothing is committed: both slots may yet be
        assert writer.skipped == 1
        commit(nodes[0], 1, 1)
        assert not take(writer, 3)  # slot 1 is the newest committed, slot 2 on its way
        wait_until(lambda: any(report.version.step == 2 for report in nodes[0].reports))
        commit(nodes[0], 1, 2)
        assert writer.begin(3, {})  # in the place of 1
        assert {held.moment.step for held in nodes[0].keeper.holdings()} == {2}


def test_what_is_on_its_way_to_storage_is_not_overwritten(tmp_path: Path) -> None:
    with cluster(tmp_path, 1) as nodes:
        where = nodes[0].keeper.folder
        writer = Snapshots(where, entries_of(0, 1, state(1)), coordinates=ALONE, run_id=RUN, generation=1, num_slots=3)
        for step in range(1, 20):
            assert take(writer, step), step
            wait_until(lambda: nodes[0].reports and nodes[0].reports[-1].version.step == step)  # noqa: B023
            commit(nodes[0], 1, step, Version(1, 1) if step < 10 else Version(1, 10))
            held = {held.moment.step for held in nodes[0].keeper.holdings()}
            assert {step, 1 if step < 10 else 10} <= held, (step, held)


def test_slots_that_memory_has_no_room_for_leave_nothing_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = os.posix_fallocate, itertools.count()

    def fallocate(*arguments: int) -> None:
        if next(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(*arguments)

    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    with pytest.raises(CheckpointError, match="no room for a snapshot"):
        Snapshots(tmp_path, entries_of(0, 1, state(1)), coordinates=ALONE, run_id=RUN, generation=1, num_slots=3)
    assert next(calls) == 3
    assert list(tmp_path.iterdir()) == []


def test_room_can_be_waited_for(tmp_path: Path) -> None:
    with cluster(tmp_path, 1) as nodes:
        (writer,) = snapshot(nodes, 1, 1)
        assert take(writer, 2)
        assert not writer.await_room(0.01)
        threading.Timer(0.2, lambda: commit(nodes[0], 1, 2)).start()
        assert writer.await_room(20)
        assert writer.begin(3, {})
        assert writer.begin(3, {}), "again for the same step: nothing"
        assert writer.begun == 3


def test_a_keeper_that_could_not_reach_its_peer_tries_again(tmp_path: Path) -> None:
    with cluster(tmp_path, 2) as nodes:
        nobody = Peer("node-1", ("127.0.0.1", 1))
        nodes[0].keeper.set_peers((nobody,))
        complaints: list[str] = []
        nodes[0].keeper.complain = lambda text, peer, tried_s: complaints.append(text)
        writer = Snapshots(
            nodes[0].keeper.folder, entries_of(0, 1, state(1)), coordinates=ALONE, run_id=RUN, generation=1, num_slots=2
        )
        assert take(writer, 1)
        wait_until(lambda: len(complaints) >= 2)  # it has tried again
        assert "is not safe: keeper at 127.0.0.1:1" in complaints[0]
        assert not nodes[0].reports
        nodes[0].keeper.set_peers((Peer("node-1", nodes[1].keeper.address),))
        wait_until(lambda: bool(nodes[0].reports))
        assert nodes[0].reports == [SnapshotAck("node-0", Version(1, 1), ("node-1",))]
        assert [held.is_copy for held in nodes[1].keeper.holdings()] == [True]


def test_a_peer_that_says_nothing_keeps_nothing_from_the_next_one(tmp_path: Path) -> None:
    with cluster(tmp_path, 2) as nodes, socket.create_server(("127.0.0.1", 0)) as silent:
        complaints: list[str] = []
        nodes[0].keeper.complain = lambda text, peer, tried_s: complaints.append(text)
        nodes[0].keeper.set_peers((Peer("node-1", silent.getsockname()),))
        writer = Snapshots(
            nodes[0].keeper.folder, entries_of(0, 1, state(1)), coordinates=ALONE, run_id=RUN, generation=1, num_slots=2
        )
        assert take(writer, 1)
        connection, _ = silent.accept()
        with connection:
            nodes[0].keeper.set_peers((Peer("node-1", nodes[1].keeper.address),))
            wait_until(lambda: bool(nodes[0].reports), TIMEOUT_S / 2)
        assert nodes[0].reports == [SnapshotAck("node-0", Version(1, 1), ("node-1",))]
        assert not complaints


def test_a_copy_that_is_there_is_left_alone_when_the_keeper_looks_again(tmp_path: Path) -> None:
    """It may be committed by then: were its node lost while it is written again, it would be gone."""
    with cluster(tmp_path, 2) as nodes:
        snapshot(nodes, 5, 2)
        copies = sorted(nodes[1].keeper.folder.glob("*.copy*"))
        before = [path.stat().st_mtime_ns for path in copies]
        nodes[0].reports.clear()
        nodes[0].keeper.set_peers((Peer("node-1", nodes[1].keeper.address),))
        wait_until(lambda: bool(nodes[0].reports))
        assert [path.stat().st_mtime_ns for path in copies] == before
        assert len(copies) == 2


def test_snapshots_larger_than_any_socket_buffer_travel_whole(tmp_path: Path) -> None:
    with cluster(tmp_path, 2) as nodes:
        whole = torch.arange(12_000_000, dtype=torch.float32)
        box = Box.whole("model/w", (12_000_000,))
        writer = Snapshots(
            nodes[0].keeper.folder, [Entry(box, whole)], coordinates=ALONE, run_id=RUN, generation=1, num_slots=1
        )
        assert take(writer, 4)
        wait_until(lambda: bool(nodes[0].reports))
        target = [Entry(box, torch.zeros(12_000_000))]
        copies = [holder for holder in holders(nodes, 4) if holder.held.is_copy]
        where = nodes[0].keeper
        result = restore_snapshot(target, Holders.of(copies), node=where.node, folder=where.folder, secret=SECRET)
        assert (result.own_bytes, result.peer_bytes) == (0, 48_000_000)
        assert torch.equal(target[0].memory, whole)


LARGE = 1_500_007  # elements: five pieces of 64 chunks, and what is left


@pytest.mark.parametrize("byte", [0, PIECE_BYTES - 1, PIECE_BYTES, 3 * PIECE_BYTES + 70_000, 4 * LARGE - 1])
@pytest.mark.parametrize("is_copy", [False, True])
def test_one_bit_anywhere_in_a_large_snapshot_is_found_where_it_is_read(
    tmp_path: Path, is_copy: bool, byte: int
) -> None:
    with cluster(tmp_path, 2) as nodes:
        box, where = Box.whole("model/w", (LARGE,)), nodes[0].keeper
        memory = torch.arange(LARGE, dtype=torch.float32)
        writer = Snapshots(where.folder, [Entry(box, memory)], coordinates=ALONE, run_id=RUN, generation=1, num_slots=1)
        assert take(writer, 4)
        wait_until(lambda: bool(nodes[0].reports))
        (holder,) = [holder for holder in holders(nodes, 4) if holder.held.is_copy == is_copy]
        target = [Entry(box, torch.zeros(LARGE))]

        def restore() -> None:
            restore_snapshot(target, Holders.of([holder]), node=where.node, folder=where.folder, secret=SECRET)

        restore()
        assert torch.equal(target[0].memory, memory)
        path = nodes[is_copy].keeper.folder / holder.held.file
        found = open_snapshot(path)
        assert found is not None
        with open(path, "r+b") as file:
            file.seek(found.header.offsets[0] + byte)
            (was,) = file.read(1)
            file.seek(-1, 1)
            file.write(bytes([was ^ 16]))
        with pytest.raises(CheckpointError, match="model/w fails its checksum"):
            restore()
        with pytest.raises(CheckpointError, match="fails its checksums"):
            found.check()
        storage = tmp_path / "storage"
        storage.mkdir()
        order = WriteOrder(Version(1, 4), "node-0", is_copy, str(storage), "token", describe=True)
        with pytest.raises(CheckpointError, match="model/w fails its checksum"):
            nodes[is_copy].keeper.write(order)
        assert not list(storage.iterdir()), "no file is complete before its bytes are checked"
        writer.close()


def test_a_step_is_reported_where_memory_is_too_full_to_tell_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(folder: Path, version: Version) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(node, "tell_safe", full)
    with cluster(tmp_path, 1) as nodes:
        snapshot(nodes, 1, 1)
        wait_until(lambda: nodes[0].reports)


def test_a_generation_is_over_while_memory_of_those_before_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dropping, go_on = threading.Event(), threading.Event()

    def drop(folder: Path, state: Committed) -> None:
        dropping.set()
        go_on.wait(20)

    monkeypatch.setattr(unneeded, "_drop_older_generations", drop)
    with cluster(tmp_path, 1) as nodes:
        keeper = Keeper.__new__(Keeper)  # not an actor
        keeper.lock, keeper.word, keeper.place = threading.Lock(), ControlWord(), Place()
        keeper.folder, keeper.keeper = nodes[0].keeper.folder, nodes[0].keeper
        committing = [
            threading.Thread(target=keeper.committed, args=(Committed(newest=Version(2, 5), number=number),))
            for number in (1, 2)
        ]
        committing[0].start()
        assert dropping.wait(20)
        committing[1].start()
        committing[1].join(20)  # and the next commit does not wait either
        assert not committing[1].is_alive()
        keeper.over(2)
        assert ControlWord.read(keeper.folder).over == 2
        assert committing[0].is_alive()
        go_on.set()
        committing[0].join()


def test_a_place_that_comes_after_the_next_one_is_not_taken(tmp_path: Path) -> None:
    """Calls of a keeper run side by side: copies went to the peers of before, and their reports counted for none."""
    with cluster(tmp_path, 3) as nodes:
        reports, keeper = list[SnapshotAck](), Keeper.__new__(Keeper)  # not an actor
        keeper.lock, keeper.placing, keeper.place = threading.Lock(), threading.Lock(), Place()
        keeper.keeper, keeper.reports, keeper.passed_on = nodes[0].keeper, {}, Version()
        keeper.coordinator = SimpleNamespace(snapshots_sealed=SimpleNamespace(remote=reports.extend))
        nodes[0].keeper.report = lambda sealed: keeper.relay([sealed])
        before, after = (Place((Peer(node.keeper.node, node.keeper.address),)) for node in nodes[1:])
        keeper.take_place(replace(after, number=7))
        keeper.take_place(replace(before, number=6))
        entries = entries_of(0, 1)
        writer = Snapshots(nodes[0].keeper.folder, entries, coordinates=ALONE, run_id=RUN, generation=1)
        step_to(5, [writer], [entries])
        wait_until(lambda: reports)
        keeper.take_place(replace(after, number=8))  # as what is not committed is to be reported again
        assert [report.peers for report in reports] == [("node-2",)] * 2
        keeper.take_place(replace(before, number=9))
        wait_until(lambda: reports[2:])
        assert reports[2].peers == ("node-1",)


def test_a_keeper_that_asks_what_is_committed_while_memory_is_full_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread ended, and nothing of the node was copied in that generation any more, without a word."""
    write, full = Committed.write, [True]

    def written(state: Committed, folder: Path) -> None:
        if full[0] and folder.name == "n0":
            raise OSError(errno.ENOSPC, "No space left on device")
        write(state, folder)

    monkeypatch.setattr(node, "UNHEARD_S", 0.05)
    with cluster(tmp_path, 2) as nodes:
        complaints, keeper = list[str](), nodes[0].keeper
        keeper.complain = lambda text, peer, tried_s: complaints.append(text)
        entries = entries_of(0, 1)
        writer = Snapshots(keeper.folder, entries, coordinates=ALONE, run_id=RUN, generation=1)
        step_to(1, [writer], [entries])
        wait_until(lambda: nodes[0].reports)
        monkeypatch.setattr(Committed, "write", written)
        nodes[1].keeper.committed(Committed(newest=Version(1, 1), number=7))  # which its peer has not heard
        wait_until(lambda: complaints)
        assert complaints[0] == "node node-0 asks in vain what is committed: [Errno 28] No space left on device"
        full[0] = False
        wait_until(lambda: writer.is_committed(1))
        step_to(2, [writer], [entries])
        wait_until(lambda: nodes[0].reports[-1].version == Version(1, 2))


@pytest.mark.parametrize("trains_on", [True, False])
def test_a_sealed_slot_is_told_of_again_where_too_many_notices_wait_at_the_keeper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trains_on: bool
) -> None:
    """Eleven may by default, and all ranks of a node seal at once: what was told by the twelfth was lost.

    After the last step of a generation nothing looks at what is committed: it is told while the slots are closed.
    """
    received, listens = node._received, threading.Event()

    def received_then(notices: socket.socket) -> bytes | None:
        listens.wait()
        return received(notices)

    monkeypatch.setattr(node, "_received", received_then)
    with cluster(tmp_path, 1) as nodes, contextlib.ExitStack() as after:
        after.callback(listens.set)
        folder, entries = nodes[0].keeper.folder, entries_of(0, 1)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as others, contextlib.suppress(BlockingIOError):
            others.setblocking(False)
            while True:
                others.sendto(b"another rank's.slot", str(folder / NOTICES))
        writer = Snapshots(folder, entries, coordinates=ALONE, run_id=RUN, generation=1)
        step_to(5, [writer], [entries])
        if trains_on:
            assert writer.room() == 1
            listens.set()
            wait_until(lambda: writer.room() == 1 and nodes[0].reports)
        else:
            copies = contextlib.ExitStack()  # closed: then the keeper reads
            copies.callback(listens.set)
            copies.callback(writer.copier.close)
            monkeypatch.setattr(writer.copier, "close", copies.close)
            monkeypatch.setattr(writer_module, "LAST_TELL_S", 60.0)
            writer.close()
            wait_until(lambda: nodes[0].reports)
        assert [report.version for report in nodes[0].reports] == [Version(1, 5)]


def test_a_new_secret_is_obeyed(tmp_path: Path) -> None:
    with cluster(tmp_path, 2) as nodes:
        snapshot(nodes, 9, 2)
        for node in nodes:
            node.keeper.secret = b"of the next driver"
        theirs = Holders.of([holder for holder in holders(nodes, 9) if holder.node == "node-1"])
        where = nodes[0].keeper
        entries = entries_of(0, 1)
        with pytest.raises(CheckpointError):
            restore_snapshot(entries, theirs, node=where.node, folder=where.folder, secret=SECRET)
        restore_snapshot(entries, theirs, node=where.node, folder=where.folder, secret=b"of the next driver")
        assert_state(entries, 9)


def test_what_is_not_confirmed_is_never_visible(tmp_path: Path) -> None:
    with cluster(tmp_path, 1) as nodes:
        writer = Snapshots(
            nodes[0].keeper.folder, entries_of(0, 1, state(3)), coordinates=ALONE, run_id=RUN, generation=1
        )
        writer.begin(3, {})
        writer.wait()
        time.sleep(0.1)
        assert nodes[0].keeper.holdings() == []
        writer.close()
        writer.confirm(3)
        time.sleep(0.1)
        assert nodes[0].keeper.holdings() == []
        assert nodes[0].reports == []


def test_a_commit_of_a_newer_generation_frees_the_memory_of_older_ones(tmp_path: Path) -> None:
    with cluster(tmp_path, 2) as nodes:
        snapshot(nodes, 4, 2)
        Snapshots(nodes[0].keeper.folder, entries_of(0, 1), coordinates=ALONE, run_id=RUN, generation=1)  # never sealed
        snapshot(nodes, 5, 1, generation=2)
        for node in nodes:
            commit(node, 2, 5, pinned=Version(1, 4))  # on its way to storage still
            assert {held.moment.generation for held in node.keeper.holdings()} == {1, 2}
            commit(node, 2, 5)
            assert {held.moment.generation for held in node.keeper.holdings()} == {2}
            assert not list(node.keeper.folder.glob("g000001-*"))


def test_a_keeper_that_starts_anew_finds_what_is_sound(tmp_path: Path) -> None:
    with cluster(tmp_path, 2) as nodes:
        snapshot(nodes, 9, 2)
        before = nodes[0].keeper.holdings()
        assert sorted(held.is_copy for held in before) == [False, True]
        nodes[0].keeper.close(delete=False)
        again = KeeperNode(
            nodes[0].keeper.folder,
            node="node-0",
            host="127.0.0.1",
            secret=SECRET,
            run_id=RUN,
            report=lambda sealed: None,
        )
        assert again.holdings() == before
        again.close(delete=False)
        other = KeeperNode(
            nodes[0].keeper.folder, node="node-0", host="127.0.0.1", secret=SECRET, run_id="another", report=print
        )
        assert other.holdings() == []
        other.close(delete=False)


def test_a_stranger_is_shown_nothing(tmp_path: Path) -> None:
    with cluster(tmp_path, 2) as nodes:
        snapshot(nodes, 9, 2)
        where = nodes[0].keeper
        theirs = [holder for holder in holders(nodes, 9) if holder.node == "node-1"]
        with pytest.raises(CheckpointError, match=r"no file holds elements .*does not prove that it is this keeper"):
            restore_snapshot(
                entries_of(0, 1), Holders.of(theirs), node=where.node, folder=where.folder, secret=b"guessed"
            )


def test_a_missing_or_reshaped_tensor_is_named(tmp_path: Path) -> None:
    with cluster(tmp_path, 1) as nodes:
        snapshot(nodes, 9, 1)
        where = nodes[0].keeper
        fewer = entries_of(0, 1)[1:]
        with pytest.raises(CheckpointError, match="model/embed"):
            restore_snapshot(fewer, Holders.of(holders(nodes, 9)), node=where.node, folder=where.folder, secret=SECRET)


def test_no_room_in_memory_is_said_plainly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(CheckpointError, match=r"no room for a snapshot of [\d,]+ bytes .*larger memory volume"):
        Snapshots(tmp_path, entries_of(0, 1), coordinates=ALONE, run_id=RUN, generation=1)
    assert list(tmp_path.iterdir()) == []


def test_holdings_survive_a_removed_folder(tmp_path: Path) -> None:
    with cluster(tmp_path, 1) as nodes:
        shutil.rmtree(nodes[0].keeper.folder)
        assert nodes[0].keeper.holdings() == []
        assert Held("a.slot.copy", Version(1, 1), ALONE, 1, "").is_copy


def test_the_driver_the_coordinator_and_keepers_do_without_torch() -> None:
    """It takes them seconds to import, of every start, and 200 MB in every keeper."""
    code = "import sys, regrow.runtime.driver, regrow.runtime.keeper; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_training_waits_for_a_commit_that_is_late_but_not_for_ever(tmp_path: Path) -> None:
    with cluster(tmp_path, 1) as nodes:
        (writer,) = snapshot(nodes, 1, 1)
        commit(nodes[0], 1, 1)
        assert writer.await_commit(1, patience_s=60.0) < 30.0
        later = threading.Timer(0.3, commit, (nodes[0], 1, 2))
        later.start()
        assert 0.2 < writer.await_commit(2, patience_s=60.0) < 30.0
        assert not writer.is_late
        assert writer.await_commit(3, patience_s=0.1) >= 0.1
        assert writer.is_late
        assert writer.await_commit(4, patience_s=60.0) < 30.0  # not again, until a commit has come
        commit(nodes[0], 1, 3)
        assert not writer.is_late
        assert writer.await_commit(4, patience_s=0.1) >= 0.1


Uncommitted = tuple[list[Node], list[Snapshots], list[list[Entry]]]  # and of each rank its writer and its state


def train_uncommitted(nodes: list[Node], writers: list[Snapshots], entries: list[list[Entry]], steps: range) -> None:
    """Steps of which each node says what it holds, as `train.loop` has them do it; nothing is ever committed."""
    for step in steps:
        held = all(writer.is_held(writer.asked) for writer in writers)
        for writer in writers if held else ():
            writer.held_by_all(writer.asked)
        if held:
            wait_until(lambda: all(writer.room() for writer in writers))
        if not all(writer.room() for writer in writers):
            continue
        step_to(step, writers, entries)
        wait_until(lambda: all(node.reports and node.reports[-1].version.step == step for node in nodes))  # noqa: B023


@pytest.fixture
def uncommitted(tmp_path: Path) -> Iterator[Uncommitted]:
    """Two nodes, a rank on each, and no coordinator."""
    with cluster(tmp_path, 2) as nodes:
        entries = [entries_of(shard, 2) for shard in range(2)]
        writers = [
            Snapshots(
                node.keeper.folder,
                mine,
                coordinates=Coordinates(MeshShape(1, 2), shard),
                run_id=RUN,
                generation=1,
                num_slots=3,
            )
            for shard, (node, mine) in enumerate(zip(nodes, entries, strict=True))
        ]
        yield nodes, writers, entries
        for writer in writers:
            writer.close()


def test_while_nothing_is_committed_a_lost_node_costs_no_more_than_before(
    uncommitted: Uncommitted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Soak seeds 2433 and 2452: the coordinator stood for 10 s, slots were full after 3 steps, and 130 were lost."""
    nodes, writers, entries = uncommitted
    monkeypatch.setattr(writer_module, "UNCOMMITTED_S", -1.0)
    train_uncommitted(nodes, writers, entries, range(1, 31))
    for writer in writers:
        writer.close()
    nodes.pop(1).keeper.close(delete=True)
    assert_state(restored(nodes, nodes[0], 30, 0, 1), 30)


def test_what_all_hold_is_older_than_a_commit_that_comes_late_and_gives_way_to_a_newer_one(
    uncommitted: Uncommitted, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes, writers, entries = uncommitted
    monkeypatch.setattr(writer_module, "UNCOMMITTED_S", -1.0)
    train_uncommitted(nodes, writers, entries, range(1, 11))
    keeper, writer = nodes[0].keeper, writers[0]
    held = Committed.read(keeper.folder).newest
    assert held == Version(1, 8), "the one before the newest, when the tenth was begun"
    assert writer.await_commit(10, patience_s=60.0) < 30.0, "nothing that hangs is waited for"
    keeper.committed(Committed(newest=Version(1, 4), pinned=Version(1, 3), number=7))
    late = Committed.read(keeper.folder)
    assert (late.newest, late.pinned) == (held, Version(1, 3))
    keeper.committed(Committed(newest=Version(1, 10), number=8))
    assert Committed.read(keeper.folder).newest == Version(1, 10)
    assert not writer.is_late
    assert writer.await_commit(11, patience_s=0.1) >= 0.1
    keeper.committed(Committed(newest=Version(1, 4), number=9))  # as after a corruption: nothing of before counts
    assert Committed.read(keeper.folder).newest == Version(1, 4)


def test_ranks_go_by_what_nodes_hold_only_once_nothing_was_committed_for_a_while(
    uncommitted: Uncommitted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a commit, replicas are compared; and it has their copies' times, for the distance between snapshots. Where
    that is long, no commit is due for long."""
    _, (writer, _), _ = uncommitted
    now = time.monotonic() + 100.0  # since the commit before
    clock = SimpleNamespace(monotonic=lambda: now, perf_counter=time.perf_counter, sleep=time.sleep)
    monkeypatch.setattr(writer_module, "time", clock)
    assert writer.asked == NOTHING
    assert not writer.is_held(NOTHING)
    for step in (1, 2):
        assert writer.begin(step, scalars_of(step))
        writer.wait()
        writer.confirm(step)
    wait_until(lambda: writer.is_held(2))
    assert not writer.is_held(3)
    assert writer.asked == 1
    told: list[str] = []
    monkeypatch.setattr(writer, "_tell", told.append)
    writer.held_by_all(1)
    now += UNCOMMITTED_S / 2
    writer.held_by_all(1)
    assert told == []
    now += UNCOMMITTED_S
    writer.held_by_all(1)
    assert told == [f"{HELD_BY_ALL}1 1"]


def test_a_keeper_that_fails_at_one_notice_heeds_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where memory is full when it is to note what ranks hold."""
    with cluster(tmp_path, 1) as nodes:
        complaints: list[str] = []
        nodes[0].keeper.complain = lambda text, peer, tried_s: complaints.append(text)

        def full(state: Committed, folder: Path) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(Committed, "write", full)
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notices:
                notices.sendto(f"{HELD_BY_ALL}1 1".encode(), str(nodes[0].keeper.folder / NOTICES))
            wait_until(lambda: complaints)
            assert "No space left on device" in complaints[0]
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notices:
            notices.sendto(f"{HELD_BY_ALL}1 1".encode(), str(nodes[0].keeper.folder / NOTICES))  # ranks repeat it
        wait_until(lambda: Committed.read(nodes[0].keeper.folder).newest == Version(1, 1))
        snapshot(nodes, 2, 1)
        wait_until(lambda: nodes[0].reports)


def test_a_step_that_was_left_out_is_not_one_whose_commit_is_waited_for(tmp_path: Path) -> None:
    """Steps are left out where a slot is missing: a group a step ahead stood still for five seconds after each."""
    with cluster(tmp_path, 1) as nodes:
        (writer,) = snapshot(nodes, 4, 1)
        assert [writer.newest_begun(step) for step in (3, 4, 5, 6)] == [NOTHING, 4, 4, 4]


def test_a_copy_is_made_in_its_place_among_the_steps_and_sealed_once_it_is_whole(tmp_path: Path) -> None:
    """Where steps run ahead of the host: not when `begin` is called, and no sooner than it has been."""
    launched: list[Callable[[], None]] = []
    with cluster(tmp_path, 1) as nodes:
        folder, entries = nodes[0].keeper.folder, entries_of(0, 1, state(1))
        writer = Snapshots(folder, entries, coordinates=ALONE, run_id=RUN, generation=1, submit=launched.append)
        assert writer.begin(1, {"step": 1, "cursor": 12})
        for entry, later in zip(entries, entries_of(0, 1, state(2)), strict=True):
            entry.memory.copy_(later.memory)  # by a step that was launched before
        confirming = threading.Thread(target=writer.confirm, args=(1,))
        confirming.start()
        (copy,) = launched
        copy()
        confirming.join()
        wait_until(lambda: bool(nodes[0].keeper.holdings()))
        writer.close()
        for entry, expected in zip(restored(nodes, nodes[0], 1, 0, 1), entries, strict=True):
            assert torch.equal(entry.memory, expected.memory)


def test_nothing_is_waited_for_in_a_generation_that_is_over(tmp_path: Path) -> None:
    with cluster(tmp_path, 1) as nodes:
        (writer,) = snapshot(nodes, 1, 1, generation=4)
        while writer.room():
            writer.begin(writer.begun + 1, {})
        ControlWord(over=3).write(nodes[0].keeper.folder)
        assert not writer.await_room(0.0), "its generation is on"
        ControlWord(over=4).write(nodes[0].keeper.folder)
        assert writer.await_commit(2, patience_s=60.0) < 30.0
        begun = time.monotonic()
        assert not writer.await_room(60.0), "nothing is committed any more, so no slot comes free"
        assert time.monotonic() < begun + 30.0


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    with counting_runtime() as counting:
        yield counting


def on_device(folder: Path) -> Snapshots:
    return Snapshots(folder, on_a_device(entries_of(0, 1)), coordinates=ALONE, run_id=RUN, generation=1)


def test_slots_that_are_given_up_are_pinned_no_longer(tmp_path: Path, runtime: Runtime) -> None:
    for _ in range(3):  # as often as another node of the group has no room
        snapshots = on_device(tmp_path)
        assert len(runtime.pinned) == 2
        snapshots.discard()
        assert not runtime.pinned
        assert not list(tmp_path.iterdir())
    snapshots = on_device(tmp_path)
    snapshots.close()
    assert not runtime.pinned
    assert {path.suffix for path in tmp_path.iterdir()} == {SLOT}


def test_memory_that_cannot_be_pinned_is_a_problem_of_the_node_and_leaves_nothing(
    tmp_path: Path, runtime: Runtime
) -> None:
    runtime.room = 1
    with pytest.raises(CheckpointError, match=r"cannot pin 0\.0 GB of .* \(cudaHostRegister: error 2\)"):
        on_device(tmp_path)
    assert not runtime.pinned
    assert not list(tmp_path.iterdir())
