"""What the coordinator makes of keepers' answers, and of storage's: keepers are objects of this process."""

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from threading import Timer
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch

from regrow.control import commands as c
from regrow.control import events as e
from regrow.control.values import Version
from regrow.errors import CheckpointError
from regrow.plan.mesh import Coordinates, MeshShape
from regrow.record.claim import Superseded
from regrow.runtime import fleet
from regrow.runtime import publisher as publisher_module
from regrow.runtime.fleet import Fleet
from regrow.runtime.keeper import KeeperInfo
from regrow.runtime.publisher import Publisher
from regrow.state.disk.catalog import committed_steps, computed_wrong, step_folder
from regrow.state.disk.format import COMMIT, DAMAGED, DataFile
from regrow.state.disk.store import save_one_by_one
from regrow.state.disk.upload import Joined, Published, Written
from regrow.state.entries import whole_entry
from regrow.state.memory.held import Held
from regrow.state.memory.holders import Holders, Holding
from regrow.storage import LocalStorage, Storage
from support.actors import Handle
from support.spans import content_of


def publisher_in(folder: Path) -> Publisher:
    return Publisher(Storage.at(folder), "run", keep=2, flush_log=lambda: None)


def until(condition: Callable[[], Any]) -> Any:
    end = time.monotonic() + 20.0
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.002)
    return found


class Keeper:
    """A node's own snapshots, and copies of another one's."""

    def __init__(self, node: str) -> None:
        self.node, self.held, self.asked = node, list[Held](), 0
        self.error: Exception | None = None

    def holdings(self, since: Version) -> list[Holding]:
        self.asked += 1
        return Holding.all_of(held for held in self.held if held.moment >= since)

    def write(self, order: Any) -> Any:
        if self.error is not None:
            raise self.error
        return Written((DataFile(f"{order.origin}.safetensors", 8, 4, ""),), 1, {}, {}, {})

    def read_back(self, folder: str, files: Sequence[DataFile], origin: str) -> str:
        if self.error is not None:
            raise self.error
        return f"{folder.rpartition('/')[2]}/{files[0].name} read by {self.node}"

    def put_together(self, order: Any) -> Any:
        assert self.error is not None
        raise self.error

    def gpus(self) -> Any:
        if self.error is not None:
            raise self.error
        return ["50 C"] if self.node != "c" else Future()


class Nodes:
    """Three of them, and the fleet that knows them."""

    def __init__(self, folder: Path) -> None:
        self.keepers = {node: Keeper(node) for node in "abc"}
        self.fleet = Fleet("run", b"", publisher_in(folder))
        for node, keeper in self.keepers.items():
            info = KeeperInfo(node, node, "", (node, 1), Version(), ())
            assert self.fleet.register(Handle(keeper), info) == e.KeeperUp(node, node, (node, 1))

    def hold(self, version: Version, *, copies: bool) -> None:
        for shard, keeper in enumerate(self.keepers.values()):
            for each in (shard, (shard - 1) % 3) if copies else (shard,):
                keeper.held.append(Held(f"{keeper.node}{each}", version, Coordinates(MeshShape(1, 3), each), 1, ""))

    def holders(
        self, version: Version, can_ask: Sequence[str] = "abc", group: list[str] | None = None
    ) -> dict[Version, Holders]:
        return self.fleet.holders(version, lambda node: node in can_ask, group)


def test_all_that_can_be_asked_are_and_answer_for_this_version_and_later_ones(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    for step in (9, 10, 11):
        nodes.hold(Version(1, step), copies=step == 10)
    found = nodes.holders(Version(1, 10))
    assert found.keys() == {Version(1, 10), Version(1, 11)}
    assert sorted(holder.held.coordinates.rank for holder in found[Version(1, 10)]) == [0, 0, 1, 1, 2, 2]
    assert {holder.node for holder in nodes.holders(Version(1, 10), can_ask="ac")[Version(1, 10)]} == {"a", "c"}


def test_those_who_ask_and_enough_others_are_waited_for_and_no_more(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    nodes.hold(Version(1, 10), copies=True)
    silent: Future[list[Holding]] = Future()  # a node that has just died, which Ray may not know
    nodes.keepers["c"].holdings = lambda since: silent  # type: ignore[method-assign, assignment, return-value]
    begun = time.monotonic()
    found = nodes.holders(Version(1, 10), group=["a"])
    assert time.monotonic() - begun < 5.0
    assert {holder.node for holder in found[Version(1, 10)]} == {"a", "b"}


class Answer(Future[list[Holding]]):
    """A keeper's; once it is read, `then`."""

    then: Callable[[], None] = staticmethod(lambda: None)

    def result(self, timeout: float | None = None) -> list[Holding]:
        found = super().result(timeout)
        self.then()
        return found


@pytest.mark.parametrize(("seconds", "all_answer"), [(9.0, True), (21.0, False)])
def test_many_answers_may_take_longer_than_one(
    seconds: float, all_answer: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 12,288 keepers the last one is heard long after the first: the group would go back to storage without it."""
    nodes, now, answers = Nodes(tmp_path), [0.0], [Answer() for _ in "abc"]
    nodes.hold(Version(1, 10), copies=False)
    keepers = list(nodes.keepers.values())

    def next_answer(number: int) -> None:
        now[0] += seconds
        if number < len(answers):
            Timer(0.2, lambda: answers[number].set_result(Holding.all_of(keepers[number].held))).start()

    for number, (keeper, answer) in enumerate(zip(keepers, answers, strict=True)):
        keeper.holdings = lambda since, answer=answer: answer  # type: ignore[method-assign, assignment, misc]
        answer.then = partial(next_answer, number + 1)  # type: ignore[method-assign]
    monkeypatch.setattr(fleet, "time", SimpleNamespace(monotonic=lambda: now[0]))
    answers[0].set_result(Holding.all_of(keepers[0].held))
    assert nodes.holders(Version(1, 10), group=[*"abc"])[Version(1, 10)].is_whole == all_answer


def test_answers_become_events_and_a_keeper_that_is_gone_answers_none(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    nodes.keepers["b"].error = ray.exceptions.RayActorError()
    nodes.fleet.ask(c.Ask(7, c.Question.GPUS, ("a", "b", "c")))
    assert nodes.fleet.answers() == [e.Answered(7, "a", ["50 C"]), e.Answered(7, "b", None)]
    assert nodes.fleet.answers() == [], "once; and c has not answered yet"


@pytest.mark.parametrize(
    ("error", "problem"),
    [(ray.exceptions.RayActorError(), "is gone"), (CheckpointError("w fails its checksum"), "w fails its checksum")],
    ids=["gone", "damaged"],
)
def test_a_node_that_cannot_write_says_why(error: Exception, problem: str, tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    nodes.keepers["b"].error = error
    for node in "ab":
        nodes.fleet.write(c.Write(3, Version(1, 10), node, node, copies=False, describe=node == "a"))
    assert nodes.fleet.answers() == [e.Written(3, "a"), e.WriteFailed(3, "b", "b", problem, has_none=True)]


def test_any_node_reads_back_what_another_one_has_written(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    for node in "ab":
        nodes.fleet.write(c.Write(3, Version(1, 10), node, node, copies=False, describe=node == "a"))
    assert nodes.fleet.answers() == [e.Written(3, "a"), e.Written(3, "b")]
    nodes.keepers["b"].error = ray.exceptions.RayActorError()
    nodes.fleet.read_back(c.ReadBack(3, "b", "b"))
    assert nodes.fleet.answers() == [e.HasReadBack(3, "b", None, "is gone")]
    nodes.keepers["b"].error = ray.exceptions.RayTaskError("read_back", "a traceback", OSError(13, "Permission denied"))
    nodes.fleet.read_back(c.ReadBack(3, "b", "b"))
    assert nodes.fleet.answers() == [e.HasReadBack(3, "b", None, "[Errno 13] Permission denied")]
    nodes.fleet.read_back(c.ReadBack(3, "a", "b"))
    assert nodes.fleet.answers() == [e.HasReadBack(3, "b", "step-00000010/b.safetensors read by a")]


@pytest.mark.parametrize("error", [ray.exceptions.RayActorError(), OSError(5, "storage is away")])
def test_an_index_that_a_keeper_does_not_write_is_the_coordinators_whatever_it_was(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = Nodes(tmp_path)
    nodes.keepers["b"].error = error
    monkeypatch.setattr(nodes.fleet._publisher, "index_order", lambda command: None)
    nodes.fleet.publish_index(c.PublishIndex(3, Version(1, 10), ("a",), "b"))
    assert nodes.fleet.answers() == [e.IndexNotWritten(3)]


def test_nodes_that_hold_different_things_make_no_checkpoint(tmp_path: Path) -> None:
    publisher = publisher_in(tmp_path)
    for node in "ab":
        order = publisher.order(c.Write(1, Version(1, 10), node, node, copies=False, describe=node == "a"))
        publisher.written(1, order, Written((), 1, {}, {0: node}, {}))
    publisher.publish_index(c.PublishIndex(1, Version(1, 10), ("a", "b")))
    assert until(publisher.done) == [e.IndexNotWritten(1, "node b holds another state than a")]
    publisher.close()


def test_checkpoints_that_cannot_be_deleted_are_told_of_and_stop_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher, folder, rmtree = publisher_in(tmp_path), Storage.at(tmp_path), shutil.rmtree
    for number in range(1, 5):  # uncommitted leftovers are deleted too, once there are enough that are whole
        (folder / f"step-0000000{number}").write_bytes("part", b"")
    for number in (3, 4):
        (folder / f"step-0000000{number}").write_bytes("COMMIT", b"{}")
    monkeypatch.setattr(
        "regrow.state.disk.catalog.open_checkpoint",
        lambda folder, step, run_id, with_files: SimpleNamespace(files=(), generation=1, layout=None, step=step),
    )

    def refuse(path: Path) -> None:
        if path.name.endswith("1"):
            raise PermissionError(13, "Permission denied", "part")
        rmtree(path)

    with monkeypatch.context() as patched:
        patched.setattr("shutil.rmtree", refuse)
        publisher.delete(c.Delete())
        (deleted,) = until(publisher.done)
    assert folder.list() == ["step-00000001", "step-00000003", "step-00000004"]
    assert "next one tries again: [Errno 13] Permission denied: 'part'" in deleted.problem
    publisher.delete(c.Delete())
    assert until(publisher.done) == [e.Deleted("")]
    assert folder.list() == ["step-00000003", "step-00000004"]
    publisher.close()


class Refusing(LocalStorage):
    """No notes of damage for a while."""

    is_away = True

    def join(self, *names: str) -> "Refusing":
        return Refusing(self.root.joinpath(*names))

    def write_chunks(self, name: str, chunks: Iterable[Any]) -> int:
        if self.is_away and name.endswith(DAMAGED):
            raise OSError(5, "storage is away")
        return super().write_chunks(name, chunks)


def test_a_note_of_damage_does_not_take_the_place_of_one_that_a_rank_computed_wrong_and_storage_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is only damaged is tried again where nothing else is left."""
    monkeypatch.setattr(Refusing, "is_away", True)
    save_one_by_one(Storage.at(tmp_path), [whole_entry("w", torch.zeros(3))], scalars={"step": 20}, run_id="run")
    notes = publisher_module.Notes(Refusing(tmp_path), lambda: None)
    notes.write(c.NoteDamaged(20, "a rank computed wrong", computed_wrong=True))
    notes.write(c.NoteDamaged(20, "cannot be read"))
    monkeypatch.setattr(Refusing, "is_away", False)
    notes.write(c.NoteDamaged(20, "cannot be read"))
    assert not notes.refused
    assert computed_wrong(Storage.at(tmp_path), [20]) == [20]


@pytest.mark.parametrize("then", ["the note", "another COMMIT", "nothing", "the end", "never"])
def test_that_a_checkpoint_was_computed_wrong_is_noted_again_until_it_is_there(
    then: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was tried once: the job that had dropped the checkpoint restored it later, as no reader finds it wrong."""
    monkeypatch.setattr(Refusing, "is_away", True)
    monkeypatch.setattr(publisher_module, "NOTE_AGAIN_S", 0.0)
    folder, publisher = Storage.at(tmp_path), Publisher(Refusing(tmp_path), "run", keep=2, flush_log=lambda: None)
    for step in (5, 10, 20, 30):
        save_one_by_one(folder, [whole_entry("w", torch.zeros(3))], scalars={"step": step}, run_id="run")
    publisher.note_damaged(c.NoteDamaged(30, "a rank computed wrong", computed_wrong=True))
    publisher.delete(c.Delete())
    assert until(publisher.done) == [e.Deleted("")]
    assert committed_steps(folder) == [30, 20, 10], "it does not count for one of those that are kept"
    if then == "another COMMIT":
        publisher.commit(step_folder(30), b"{}", fence=lambda: None)
    elif then == "nothing":
        (tmp_path / step_folder(30) / COMMIT).unlink()
    monkeypatch.setattr(Refusing, "is_away", then == "never")
    if then == "never":
        assert publisher.close(60.0) == (
            "a rank computed step-00000030 wrong, and storage takes no note of that: delete COMMIT there"
        )
    elif then == "the end":
        assert publisher.close(60.0) == ""
    else:
        until(lambda: publisher.done() == [] and not publisher._notes.refused)
        publisher.close(60.0)
    is_noted = then in ("the note", "the end")
    assert computed_wrong(folder, [10, 20, 30]) == ([30] if is_noted else [])


class Slow(LocalStorage):
    """Its deletions wait."""

    begun, going_on = threading.Event(), threading.Event()

    def join(self, *names: str) -> "Slow":
        return Slow(self.root.joinpath(*names))

    def delete(self, name: str) -> None:
        self.begun.set()
        assert self.going_on.wait(60.0)
        super().delete(name)


def test_a_commit_does_not_wait_for_the_deletion_of_old_checkpoints_which_spares_it(tmp_path: Path) -> None:
    """A run that went back from step 30 writes 10 again, where there is a leftover that would go with the old ones."""
    folder, publisher = Storage.at(tmp_path), Publisher(Slow(tmp_path), "run", keep=2, flush_log=lambda: None)
    for step in (5, 20, 30):
        save_one_by_one(folder, [whole_entry("w", torch.zeros(3))], scalars={"step": step}, run_id="run")
    (folder / "step-00000010").write_bytes("part", b"")
    publisher.delete(c.Delete())
    assert Slow.begun.wait(60.0)

    version, tensors = Version(2, 10), {0: {"w": ("float64", (1,))}}
    order = publisher.order(c.Write(1, version, "a", "a", copies=False, describe=True))
    file = DataFile(f"{order.token}.safetensors", 9, 1, "", content_of("w", "float64", 1, 0))
    publisher.written(1, order, Written((file,), 1, {}, {0: ""}, tensors))
    publisher.publish_index(c.PublishIndex(1, version, ("a",)))
    assert until(publisher.done) == [e.IndexWritten(1)]
    publisher.publish_commit(c.PublishCommit(1, version))
    assert until(publisher.done) == [e.CheckpointCommitted(1, 10, 9)]
    Slow.going_on.set()
    assert until(publisher.done) == [e.Deleted("")]
    assert committed_steps(folder) == [30, 20, 10]
    assert folder.exists("step-00000010/part")
    publisher.close()


def test_a_checkpoint_that_may_not_have_been_read_back_counts_for_none_of_those_that_are_kept(tmp_path: Path) -> None:
    folder, publisher = Storage.at(tmp_path), publisher_in(tmp_path)
    for step in (5, 20, 30):
        save_one_by_one(folder, [whole_entry("w", torch.zeros(3))], scalars={"step": step}, run_id="run")
    for command, left in ((c.Delete(unread=(30,)), [30, 20, 5]), (c.Delete(), [30, 20])):
        publisher.delete(command)
        assert until(publisher.done) == [e.Deleted("")]
        assert committed_steps(folder) == left
    publisher.close()


CUT = ".g000003-a.safetensors.1f.tmp"  # of a keeper that was killed as it wrote
EARLIER, OWN, LATER, OTHER = "g000001-a.safetensors", "g000003-b.metadata", "g000004-c.safetensors", "part"


@pytest.mark.parametrize("beside", ["nothing", "COMMIT", "an upload", "a claim"])
def test_what_a_checkpoint_that_failed_has_left_is_deleted(tmp_path: Path, beside: str) -> None:
    """But nothing that a checkpoint may be made of."""
    folder, publisher = Storage.at(tmp_path), publisher_in(tmp_path)
    if beside == "a claim":
        publisher = Publisher(folder, "run", keep=2, flush_log=lambda: None, check=superseded)
    files = [EARLIER, OWN, CUT, LATER, OTHER, *(["COMMIT"] if beside == "COMMIT" else [])]
    for name in files:
        (folder / "step-00000010").write_bytes(name, b"")
    version = Version(3, 10)
    for number in (1, 2) if beside == "an upload" else (1,):
        publisher.order(c.Write(number, version, "a", "a", copies=False, describe=True))
    publisher.clean_up(c.CleanUp(1, version))
    (done,) = until(publisher.done)
    assert done.upload == 1
    assert bool(done.problem) == (beside == "a claim")
    assert folder.list("step-00000010") == sorted([LATER, OTHER] if beside == "nothing" else files)
    publisher.close()


def superseded() -> None:
    raise Superseded("another process writes the run")


def test_what_is_written_for_a_checkpoint_that_failed_meanwhile_is_deleted(tmp_path: Path) -> None:
    folder, publisher, version = Storage.at(tmp_path), publisher_in(tmp_path), Version(3, 10)
    order = publisher.order(c.Write(1, version, "a", "a", copies=False, describe=True))
    publisher.clean_up(c.CleanUp(1, version))
    assert until(publisher.done) == [e.Deleted("", 1)]
    for name in (OWN, EARLIER, LATER, OTHER):
        (folder / "step-00000010").write_bytes(name, b"")

    def of(name: str) -> Written:
        return Written((DataFile(name, 9, 1, "0" * 64, content_of("w", "float64", 1, 0)),), 1, {}, {}, {})

    publisher.written(1, order, of(EARLIER))
    publisher.joined(1, Joined.of({"b": of(LATER)}))
    publisher.index_written(1, Published(9, json.dumps({"index": OWN}).encode()))
    until(lambda: not publisher.done() and folder.list("step-00000010") == [OTHER])
    publisher.close()


def test_a_commit_that_is_withdrawn_is_no_checkpoint(tmp_path: Path) -> None:
    publisher, folder = publisher_in(tmp_path), Storage.at(tmp_path)
    publisher.commit("step-00000010", b"{}", fence=lambda: None)
    assert folder.list("step-00000010") == ["COMMIT"]
    publisher.withdraw(10)
    publisher.close()
    assert folder.list("step-00000010") == []


def test_what_one_piece_of_work_fails_with_takes_no_other_along(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    class Broken(LocalStorage):
        def delete(self, name: str) -> None:
            raise RuntimeError("a mistake of ours")

    publisher = Publisher(Broken(tmp_path), "run", keep=2, flush_log=lambda: None)
    publisher.withdraw(10)
    publisher.delete(c.Delete())  # waits for that
    publisher.close(60.0)
    assert publisher.done() == [e.Deleted("")]
    assert "a mistake of ours" in capfd.readouterr().err
