"""The memory of snapshot slots outlives generations: mapped and pinned once, never torn under a reader, never left."""

import fcntl
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from regrow.accept.generations import Runtime, counting_runtime, on_a_device
from regrow.control.values import Version
from regrow.errors import CheckpointError
from regrow.plan.mesh import ALONE
from regrow.state.disk.stacks import parts_of
from regrow.state.disk.upload import WriteOrder, write_parts
from regrow.state.entries import Entry
from regrow.state.memory import reader as memory
from regrow.state.memory.arenas import MOST_WASTE, Arena, Arenas
from regrow.state.memory.held import bytes_held, open_snapshot
from regrow.state.memory.holders import Holder, Holders
from regrow.state.memory.node import KeeperNode, Peer
from regrow.state.memory.ranges import Connection
from regrow.state.memory.reader import restore_snapshot
from regrow.state.memory.slots import SLOT, Committed, SlotFile, empty_header, open_slot
from regrow.state.memory.writer import Snapshots
from regrow.storage import LocalStorage
from support.keepers import (
    RUN,
    SECRET,
    Node,
    assert_state,
    cluster,
    entries_of,
    holders,
    scalars_of,
    state,
    wait_until,
)

PAGE = 4096


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    with counting_runtime() as counting:
        yield counting


class Worker:
    """A process that goes from generation to generation on one node, alone."""

    def __init__(self, node: Node, *, device: bool = False, num_slots: int = 2) -> None:
        self.node, self.device, self.num_slots = node, device, num_slots
        self.arenas = Arenas(node.keeper.folder)
        self.generation, self.step = 0, 0

    def train(self, num_steps: int = 2, *, commits: bool = True) -> list[Path]:
        """A generation; its slots."""
        self.generation += 1
        folder, entries = self.node.keeper.folder, entries_of(0, 1)
        snapshots = Snapshots(
            folder,
            on_a_device(entries) if self.device else entries,
            coordinates=ALONE,
            run_id=RUN,
            generation=self.generation,
            num_slots=self.num_slots,
            arenas=self.arenas,
        )
        for _ in range(num_steps):
            self.step += 1
            for entry, after in zip(entries, entries_of(0, 1, state(self.step)), strict=True):
                entry.memory.copy_(after.memory)
            assert snapshots.begin(self.step, scalars_of(self.step))
            snapshots.wait()
            snapshots.confirm(self.step)
            if commits:
                moment = Version(self.generation, self.step)
                wait_until(lambda: any(report.version == moment for report in self.node.reports))  # noqa: B023
                self.node.keeper.committed(Committed(moment))
        snapshots.close()
        return sorted(folder.glob(f"g{self.generation:06d}-*{SLOT}"))


def restored(nodes: list[Node], known: list[Holder]) -> list[Entry]:
    entries, where = entries_of(0, 1), nodes[0].keeper
    restore_snapshot(entries, Holders.of(known), node=where.node, folder=where.folder, secret=SECRET)
    return entries


def test_memory_is_pinned_once_for_all_generations_and_what_it_holds_is_right(tmp_path: Path, runtime: Runtime) -> None:
    with cluster(tmp_path, 1) as nodes:
        worker, registered = Worker(nodes[0], device=True), []
        for _ in range(8):
            worker.train()
            registered.append(runtime.registered)
            assert_state(restored(nodes, holders(nodes, worker.step)), worker.step)
        assert registered == [2, *[3] * 7]  # one more, as the slot that the second starts from is kept
        assert runtime.num_bytes == worker.arenas.num_bytes
        worker.arenas.close()
        assert not runtime.pinned
        assert_state(restored(nodes, holders(nodes, worker.step)), worker.step)


def test_slots_that_a_group_could_not_use_are_pinned_already_when_it_tries_again(
    tmp_path: Path, runtime: Runtime
) -> None:
    arenas = Arenas(tmp_path)
    for generation in range(1, 6):
        entries = on_a_device(entries_of(0, 1))
        snapshots = Snapshots(tmp_path, entries, coordinates=ALONE, run_id=RUN, generation=generation, arenas=arenas)
        snapshots.discard()
        assert not list(tmp_path.glob(f"*{SLOT}"))
    assert runtime.registered == 2
    arenas.close()
    assert list(tmp_path.iterdir()) == []


def test_the_newest_committed_snapshot_survives_generations_that_commit_nothing(tmp_path: Path) -> None:
    with cluster(tmp_path, 1) as nodes:
        worker = Worker(nodes[0])
        worker.train()
        for _ in range(4):
            worker.train(num_steps=0)
            assert_state(restored(nodes, holders(nodes, 2)), 2)
        worker.train(num_steps=1, commits=False)
        wait_until(lambda: holders(nodes, 3))
        worker.train(num_steps=0)
        assert_state(restored(nodes, holders(nodes, 2)), 2)
        assert len({holder.held.moment for holder in holders(nodes, 3)}) == 1, "it might have been committed yet"


def test_what_is_on_its_way_to_storage_is_kept_too(tmp_path: Path) -> None:
    with cluster(tmp_path, 1) as nodes:
        worker = Worker(nodes[0], num_slots=3)
        worker.train(3)
        nodes[0].keeper.committed(Committed(Version(1, 3), pinned=Version(1, 2)))
        for _ in range(3):
            worker.train(0)
        for step in (2, 3):
            assert_state(restored(nodes, holders(nodes, step)), step)
        assert not holders(nodes, 1)


Meanwhile = Callable[[], None]


def read_by_mapping(nodes: list[Node], meanwhile: Meanwhile, monkeypatch: pytest.MonkeyPatch) -> list[Entry]:
    before(monkeypatch, memory.PieceOfSnapshot, "check", meanwhile)
    return restored(nodes, [holder for holder in holders(nodes, 2) if not holder.held.is_copy])


def read_from_the_server(nodes: list[Node], meanwhile: Meanwhile, monkeypatch: pytest.MonkeyPatch) -> list[Entry]:
    known = [Holder("elsewhere", each.address, each.held) for each in holders(nodes, 2) if not each.held.is_copy]
    before(monkeypatch, Connection, "send_file", meanwhile)
    return restored(nodes, known)


def read_by_the_peer(nodes: list[Node], meanwhile: Meanwhile, monkeypatch: pytest.MonkeyPatch) -> list[Entry]:
    inner = Connection.send_file

    def send_file(self: Connection, file: Any, ranges: Any) -> None:
        header = open_slot(Path(file.name))
        if header is not None and header.step == 2:
            meanwhile()
        inner(self, file, ranges)

    monkeypatch.setattr(Connection, "send_file", send_file)
    nodes[0].keeper.complain = lambda *what: None  # of the step before, which is gone
    nodes[0].keeper.set_peers((Peer("node-1", nodes[1].keeper.address),))
    wait_until(lambda: any(holder.held.is_copy for holder in holders(nodes, 2)))
    return restored(nodes, [holder for holder in holders(nodes, 2) if holder.held.is_copy])


def read_for_storage(nodes: list[Node], meanwhile: Meanwhile, monkeypatch: pytest.MonkeyPatch) -> list[Entry]:
    written: list[bytes] = []
    inner = LocalStorage.write_chunks

    def write_chunks(self: LocalStorage, name: str, chunks: Any) -> int:
        stream = iter(chunks)
        written.append(next(stream))
        meanwhile()
        written.extend(bytes(chunk) for chunk in stream)
        return inner(self, name, written)  # which is read back

    monkeypatch.setattr(LocalStorage, "write_chunks", write_chunks)
    order = WriteOrder(Version(1, 2), "node-0", False, str(nodes[0].keeper.folder.parent), "token", True)
    write_parts(nodes[0].keeper.folder, nodes[0].keeper.holdings(), order, run_id=RUN)
    entries, data = entries_of(0, 1), b"".join(written[1:])
    for part in parts_of([entry.box for entry in entries], ALONE):
        content, data = data[: part.num_bytes], data[part.num_bytes :]
        rows = torch.frombuffer(bytearray(content), dtype=torch.float32).view(part.stack.rows, -1)
        columns = rows.split([each.size for each in part.stack.columns], 1)
        for member, columns_of_one in zip(part.members, columns, strict=True):
            entries[member].memory.copy_(columns_of_one.reshape(-1))
    return entries


def before(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, meanwhile: Meanwhile) -> None:
    inner = getattr(owner, name)

    def wrapped(*args: Any) -> Any:
        meanwhile()
        return inner(*args)

    monkeypatch.setattr(owner, name, wrapped)


@pytest.mark.parametrize("read", [read_by_mapping, read_from_the_server, read_by_the_peer, read_for_storage])
def test_memory_that_is_being_read_is_not_made_another_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[..., list[Entry]]
) -> None:
    """A newer generation has committed and the slot is gone: whoever reads it yet finishes with what it began."""
    with cluster(tmp_path, 2) as nodes:
        nodes[0].keeper.set_peers(())
        worker = Worker(nodes[0])
        (*_, slot) = worker.train(2, commits=False)
        wait_until(lambda: len(nodes[0].reports) == 2)
        inode, inodes = slot.stat().st_ino, list[set[int]]()

        def change() -> None:
            if worker.generation == 1:
                worker.generation, worker.step = 2, 2
                nodes[0].keeper.committed(Committed(Version(2, 3)))
                assert not slot.exists()
                inodes.append({path.stat().st_ino for path in worker.train(2, commits=False)})

        assert_state(read(nodes, change, monkeypatch), 2)
        assert len(inodes[0]) == 2
        assert inode not in inodes[0]
        wait_until(lambda: is_unread(nodes[0].keeper.folder, inode))  # a push ends with the peer's answer
        nodes[0].keeper.committed(Committed(Version(4, 0)))
        assert inode in {path.stat().st_ino for path in worker.train(0)}, "and after that it is used"


def is_unread(folder: Path, inode: int) -> bool:
    (path, *_) = (each.path for each in os.scandir(folder) if each.inode() == inode)  # others come and go meanwhile
    with open(path, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def test_who_comes_too_late_to_read_a_slot_is_told(tmp_path: Path) -> None:
    with cluster(tmp_path, 1) as nodes:
        worker = Worker(nodes[0])
        worker.train()
        snapshot = open_snapshot(nodes[0].keeper.folder / holders(nodes, 2)[0].held.file)
        assert snapshot is not None
        os.link(snapshot.path, tmp_path / "opened-before")
        worker.train()
        worker.train()
        object.__setattr__(snapshot, "path", tmp_path / "opened-before")
        with pytest.raises(CheckpointError, match="holds another snapshot by now"), snapshot.payload():
            pass


def slots_of(folder: Path, generation: int, count: int) -> list[Path]:
    return [folder / f"g{generation:06d}-{number}{SLOT}" for number in range(count)]


def seal(folder: Path, arena: Arena, generation: int, step: int) -> None:
    assert arena.slot is not None
    header = empty_header([], ALONE, run_id=RUN, generation=generation, writers=1)
    SlotFile(arena.slot, header, arena.memory).seal(step, {})


def test_arenas_that_are_too_small_make_room_before_larger_ones_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runtime: Runtime
) -> None:
    arenas = Arenas(tmp_path)

    def take(generation: int, num_bytes: int) -> list[Arena]:
        taken = arenas.take(slots_of(tmp_path, generation, 3), num_bytes)
        for arena in taken:
            arena.pin()
        arenas.release(taken)
        return taken

    small = take(1, 8 * PAGE)
    seal(tmp_path, small[0], 1, 5)
    Committed(Version(1, 5)).write(tmp_path)
    held_before, real = list[int](), os.posix_fallocate
    monkeypatch.setattr(os, "posix_fallocate", lambda *a: (held_before.append(bytes_held(tmp_path)), real(*a)))
    large = take(2, 9 * PAGE)
    assert not {arena.path for arena in small} & {arena.path for arena in large}
    assert held_before[0] < 10 * PAGE, "the one that is needed, and the commit"
    assert small[0].slot is not None
    assert open_slot(small[0].slot) is not None
    assert {arena.path for arena in take(3, 8 * PAGE)} == {arena.path for arena in large}, "larger ones will do"
    assert runtime.num_bytes == arenas.num_bytes
    few = take(4, 2 * PAGE)
    assert not {arena.path for arena in few} & {arena.path for arena in large}, "much larger ones will not"
    assert runtime.num_bytes == arenas.num_bytes
    arenas.close()
    assert not runtime.pinned


@pytest.mark.parametrize("seed", range(20))
def test_arenas_take_no_more_memory_than_slots_made_anew_would(tmp_path: Path, seed: int) -> None:
    rng, count = random.Random(seed), 2 + seed % 3
    arenas, sizes, anew, peak = Arenas(tmp_path), [0], 0, 0
    for generation in range(1, 40):
        sizes.append(rng.choice([20, 21, 23, 27, 32, 40, 80]) * PAGE)
        taken = arenas.take(slots_of(tmp_path, generation, count), sizes[-1])
        anew += count * sizes[-1]
        peak = max(peak, anew)
        slots = sum(path.stat().st_size for path in tmp_path.glob("g*"))
        assert arenas.num_bytes <= max(slots, 2 * count * sizes[-1])
        assert arenas.num_bytes <= peak
        assert all(sizes[-1] <= arena.num_bytes <= MOST_WASTE * sizes[-1] for arena in taken)
        for step in range(rng.randrange(count + 1)):
            seal(tmp_path, taken[step], generation, step)
            if rng.random() < 0.5:
                Committed(Version(generation, step)).write(tmp_path)
                for path in set(tmp_path.glob("g*")) - set(tmp_path.glob(f"g{generation:06d}*")):
                    path.unlink()  # as keepers do
                anew = count * sizes[-1]
        arenas.release(taken)
    arenas.close()
    assert not list(tmp_path.glob("arenas*"))


def test_a_slot_and_its_arena_are_counted_once(tmp_path: Path) -> None:
    arenas = Arenas(tmp_path)
    arenas.take(slots_of(tmp_path, 1, 2), 8 * PAGE)
    assert 16 * PAGE <= bytes_held(tmp_path) < 20 * PAGE


OWNER = """
import sys, time
from pathlib import Path
from regrow.state.memory.arenas import Arenas
from regrow.plan.mesh import ALONE
from regrow.state.memory.slots import SlotFile, empty_header
folder = Path(sys.argv[1])
slots = [folder / f"g000001-token-{number}.slot" for number in range(3)]
arenas = Arenas(folder)
taken = arenas.take(slots, 1 << 16)
SlotFile(slots[0], empty_header([], ALONE, run_id="run", generation=1, writers=1), taken[0].memory).seal(4, {})
slots[2].unlink()
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("restarts", [False, True])
def test_the_memory_of_a_process_that_was_killed_is_freed_but_its_slots(tmp_path: Path, restarts: bool) -> None:
    with cluster(tmp_path, 1) as nodes:
        keeper = nodes[0].keeper
        command = [sys.executable, "-c", OWNER, str(keeper.folder)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
            assert owner.stdout is not None
            assert owner.stdout.readline() == "ready\n"
            keeper.committed(Committed())
            assert len(list(keeper.folder.glob("arenas-*"))) == 4, "its own, while it lives"
            owner.send_signal(signal.SIGKILL)
        if restarts:
            keeper.close(delete=False)
            keeper = nodes[0].keeper = KeeperNode(
                keeper.folder, node="node-0", host="127.0.0.1", secret=SECRET, run_id=RUN, report=lambda sealed: None
            )
        wait_until(lambda: not list(keeper.folder.glob("arenas-*")))
        assert open_slot(keeper.folder / "g000001-token-0.slot") is not None
        keeper.committed(Committed(Version(2, 5)))
        assert {path.name for path in keeper.folder.iterdir()} <= {"committed", "keeper.sock", "lock"}


def test_a_folder_that_was_deleted_meanwhile_is_filled_anew(tmp_path: Path, runtime: Runtime) -> None:
    folder = tmp_path / "memory"
    folder.mkdir()
    arenas = Arenas(folder)
    taken = arenas.take(slots_of(folder, 1, 2), PAGE)
    taken[0].pin()
    arenas.release(taken)
    shutil.rmtree(folder)
    folder.mkdir()
    again = arenas.take(slots_of(folder, 2, 2), PAGE)
    assert not {arena.path for arena in taken} & {arena.path for arena in again}
    assert not runtime.pinned


class Refusing:
    """A driver that pins, and unpins nothing."""

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        return 1


def test_pages_that_the_driver_did_not_unpin_are_counted_and_their_addresses_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What is mapped at the same addresses later could not be pinned, and a copy there would go to the old pages."""
    with counting_runtime(Runtime(Refusing())) as runtime:
        for generation in range(1, 4):
            arenas = Arenas(tmp_path)
            (arena,) = arenas.take(slots_of(tmp_path, generation, 1), 64 * PAGE)
            arena.pin()
            arenas.release([arena])
            arenas.close()
            del arena
        assert runtime.num_bytes == 3 * 64 * PAGE, "three ranges, none of them where another one was"
    assert not list(tmp_path.glob("arenas*"))
    assert "stay pinned until this process ends (cudaHostUnregister: error 1)" in caplog.text


def test_memory_that_a_device_may_write_to_yet_is_not_made_another_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arenas = Arenas(tmp_path)
    first = Snapshots(tmp_path, entries_of(0, 1), coordinates=ALONE, run_id=RUN, generation=1, arenas=arenas)
    inodes = {path.stat().st_ino for path in tmp_path.glob(f"*{SLOT}")}
    monkeypatch.setattr(first.copier, "close", lambda: (_ for _ in ()).throw(RuntimeError("it does not come to rest")))
    with pytest.raises(RuntimeError):
        first.close()
    Snapshots(tmp_path, entries_of(0, 1), coordinates=ALONE, run_id=RUN, generation=2, arenas=arenas)
    assert not inodes & {path.stat().st_ino for path in tmp_path.glob(f"g000002*{SLOT}")}


def test_no_room_takes_nothing_and_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arenas = Arenas(tmp_path)
    arenas.release(arenas.take(slots_of(tmp_path, 1, 2), PAGE))
    files = {path for path in tmp_path.iterdir() if path.name.startswith("arenas")}
    real = os.posix_fallocate

    def full(descriptor: int, offset: int, size: int) -> None:
        if len(list(tmp_path.glob("arenas-*-*"))) > 3:
            raise OSError(28, "No space left on device")
        real(descriptor, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(CheckpointError, match="no room"):
        arenas.take(slots_of(tmp_path, 2, 4), PAGE)
    assert set(tmp_path.iterdir()) == files
    assert len(arenas.take(slots_of(tmp_path, 3, 2), PAGE)) == 2
