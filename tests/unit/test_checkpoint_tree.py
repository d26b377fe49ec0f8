"""A checkpoint of a large group: orders go to the nodes that speak for others, and answers come with theirs."""

import threading
from collections.abc import Iterable
from typing import Any

import pytest

from regrow.config.schema import CheckpointConfig
from regrow.control import commands as c
from regrow.control import events as e
from regrow.control.values import PartTimes, Version
from regrow.errors import CheckpointError
from regrow.runtime.keeper import Place
from regrow.runtime.writing import Writing
from regrow.state.disk.catalog import open_checkpoint, step_folder
from regrow.state.disk.format import COMMIT, DataFile
from regrow.state.disk.packed import PackedFiles
from regrow.state.disk.upload import Joined, OrderForAll, Upload, WriteOrder, Written
from regrow.storage import Storage
from support.spans import content_of
from support.told import Told, one

NODES = "abcdefg"  # a and b are at the top; a speaks for c, d and g, which c passes on; b for e and f
OF_A, OF_B = "acdg", "bef"


def uploading() -> Told:
    told = Told(checkpoint=CheckpointConfig(every_steps=10), fan_out=2, copies=1)
    told.form(*(one(pid, node) for pid, node in enumerate(NODES)))
    told.begin(NODES)
    told.seal(Version(1, 10), told.peers)
    assert told.of(c.Write) == []
    assert told.of(c.WriteAll) == [c.WriteAll(1, Version(1, 10), ("a", "b"), "a", 1800.0)]
    told.clear()
    return told


def spoken(told: Told, by: str, nodes: Iterable[str], *failed: str) -> None:
    problems = [e.WriteFailed(1, node, node, "w fails its checksum", has_none=True) for node in failed]
    told(e.Spoken(1, by, [*(e.Written(1, node, PartTimes(0.5, 1.0, 7)) for node in nodes), *problems]))


def read(told: Told, by: str, nodes: Iterable[str]) -> None:
    told(e.Spoken(1, by, [e.HasReadBack(1, node, "") for node in nodes]))


def asked(told: Told, kind: type = c.Write) -> list[tuple[str, str]]:
    """(node, origin), in this order."""
    return [(each.node, each.origin) for each in told.of(kind)]


def test_a_few_messages_make_the_checkpoint_of_many_nodes() -> None:
    told = uploading()
    told.now += 5.0
    spoken(told, "a", OF_A)
    assert told.of(c.PublishIndex) == []
    spoken(told, "b", OF_B)
    (index,) = told.of(c.PublishIndex)
    assert (set(index.nodes), index.by in "ab") == (set(NODES), True)
    told(e.IndexWritten(1))
    told(e.CheckpointCommitted(1, 10, 99))
    (checkpoint,) = told.records("checkpoint")
    assert checkpoint["write_s"] == 1.0, "as each says of itself: the answer waited for the slowest"
    assert told.of(c.ReadBackAll) == [c.ReadBackAll(1, ("a", "b"), 1800.0)]
    read(told, "a", OF_A)
    assert told.of(c.Delete) == []
    read(told, "b", OF_B)
    assert len(told.of(c.Delete)) == 1
    assert (told.of(c.Write), told.of(c.ReadBack)) == ([], [])


def test_of_nodes_that_are_left_out_each_is_asked_itself_and_of_what_failed_the_holder_of_its_copies() -> None:
    told = uploading()
    holder = told.control.snapshots.keepers.peers["d"][0]
    spoken(told, "a", "ac", "d")
    assert asked(told) == [(holder, "d"), ("g", "g")]
    told(e.Written(1, "g"))
    spoken(told, "b", OF_B)
    assert told.of(c.PublishIndex) == []
    told(e.Written(1, "d"))
    assert len(told.of(c.PublishIndex)) == 1


@pytest.mark.parametrize("dark", ["a", "c", "g"])
def test_where_one_says_nothing_all_whose_answers_may_wait_for_it_are_asked_themselves(dark: str) -> None:
    """And are not asked again when the answer for all comes after all."""
    told = uploading()
    told.control.snapshots.gone_dark({dark}, told.now)
    told()
    holder = told.control.snapshots.keepers.peers[dark][0]
    assert asked(told) == [(holder, dark), *((node, node) for node in OF_A if node != dark)]
    told.clear()
    spoken(told, "a", OF_A)
    spoken(told, "b", OF_B)
    assert (asked(told), len(told.of(c.PublishIndex))) == ([], 1)


def test_what_a_node_of_another_group_answers_does_not_count() -> None:
    """Keepers pass orders on by their own places, which may be newer than control's were."""
    told = uploading()
    spoken(told, "a", [*OF_A, "y"], "x")
    spoken(told, "b", OF_B)
    assert (asked(told), len(told.of(c.PublishIndex))) == ([], 1)


def test_the_coordinator_puts_together_what_a_keeper_that_is_gone_does_not() -> None:
    for is_told in (True, False):
        told = uploading()
        spoken(told, "a", OF_A)
        spoken(told, "b", OF_B)
        (index,) = told.of(c.PublishIndex)
        told.clear()
        if is_told:
            told(e.IndexNotWritten(1))
        else:
            told.control.snapshots.gone_dark({index.by}, told.now)
            told()
        assert [each.by for each in told.of(c.PublishIndex)] == [""]
        told(e.IndexNotWritten(1))
        assert len(told.of(c.PublishIndex)) == 1


def test_what_comes_late_of_an_index_that_another_one_has_written_drops_no_checkpoint() -> None:
    """A dark node's keeper came to its error while COMMIT was written: that was there then, and did not count."""
    for late in (e.IndexNotWritten(1), e.IndexNotWritten(1, "storage is away"), e.IndexWritten(1)):
        told = uploading()
        spoken(told, "a", OF_A)
        spoken(told, "b", OF_B)
        (index,) = told.of(c.PublishIndex)
        told.control.snapshots.gone_dark({index.by}, told.now)
        told()
        told(e.IndexWritten(1))
        told.clear()
        told(late)
        assert (told.of(c.PublishIndex), told.of(c.PublishCommit), told.records("checkpoint_failed")) == ([], [], [])
        told(e.CheckpointCommitted(1, 10, 99))
        assert [each["step"] for each in told.records("checkpoint")] == [10]


def test_an_index_that_the_coordinator_cannot_write_either_is_why_there_is_no_checkpoint() -> None:
    told = uploading()
    spoken(told, "a", OF_A)
    spoken(told, "b", OF_B)
    told(e.IndexNotWritten(1))
    assert told.records("checkpoint_failed") == []
    told(e.IndexNotWritten(1, "storage is away"))
    (failed,) = told.records("checkpoint_failed")
    assert (failed["step"], failed["detail"]) == (10, "storage is away")


def test_parts_that_no_node_speaks_for_are_read_back_by_their_own_and_then_by_others() -> None:
    told = uploading()
    spoken(told, "a", OF_A)
    spoken(told, "b", OF_B)
    told(e.IndexWritten(1))
    told(e.CheckpointCommitted(1, 10, 99))
    read(told, "b", "be")
    assert asked(told, c.ReadBack) == [("f", "f")]
    told.control.snapshots.gone_dark({"c"}, told.now)
    told()
    assert asked(told, c.ReadBack)[1:] == [("a", "a"), ("c", "c"), ("d", "d"), ("g", "g"), ("a", "c")]
    for node in "facdg":
        told(e.HasReadBack(1, node, ""))
    assert len(told.of(c.Delete)) == 1


def test_no_node_is_asked_through_others_while_one_of_them_is_not_there() -> None:
    told = Told(checkpoint=CheckpointConfig(every_steps=10), fan_out=2)
    told.form(*(one(pid, node) for pid, node in enumerate(NODES)))
    told.begin(NODES)
    told(e.NodesAlive(frozenset(NODES[:-1])))
    told.seal(Version(1, 10), told.peers)
    assert told.of(c.WriteAll) == []
    assert len(told.of(c.Write)) == len(NODES)


# what is joined


def file_of(number: int, *, rows: int = 4) -> DataFile:
    return DataFile(f"file-{number}", 8, 4, f"{number:064x}", content_of("w", "float32", rows, number))


def written(number: int, step: int = 3, *, rows: int = 4) -> Written:
    tensors = {0: {"w": ("float32", (rows,))}} if number == 0 else {}
    return Written((file_of(number, rows=rows),), 1, {"step": step}, {0: "sha"}, tensors, PartTimes(0.0, number, 4))


def test_joined_answers_are_what_they_were_made_of() -> None:
    one_by_one = [Joined.of({node: written(number)}) for number, node in enumerate("abcd")]
    pairs = [Joined.together(one_by_one[:2]), Joined.together([*one_by_one[2:], Joined.of({}, {"e": ("full", False)})])]
    whole = Joined.together(pairs)
    assert (whole.num_ranks, whole.problems, list(whole.times)) == (4, {"e": ("full", False)}, list("abcd"))
    assert (len(whole.states), whole.files.num_bytes, whole.files.tensor_bytes) == (1, 32, 16)
    for number, node in enumerate("abcd"):
        (file,) = whole.files.of_origin(node)
        assert file.content is not None
        assert (file.name, file.header_sha256) == (file_of(number).name, file_of(number).header_sha256)
        assert (file.content.spans, file.content.crc) == (content_of("w", "float32", 4, number).spans, bytes(4))
    assert PackedFiles.joined([]).origins == ()


def test_a_checkpoint_is_put_together_of_what_was_joined_and_what_came_by_itself(tmp_path: str) -> None:
    folder = Storage.at(str(tmp_path))
    upload = Upload(Version(1, 3), tuple("abcd"), folder / step_folder(3), "0123456789abcdef")
    upload.order_all("a", 60.0)
    upload.joined(Joined.of({"a": written(0), "b": written(1)}))
    for number, node in ((1, "b"), (2, "c"), (3, "d")):  # b's twice: it had answered the order for all already
        order = upload.order(node, copies=node == "d", describe=False)
        assert bool(order.repeats) == (node != "d")
        upload.done(order, written(number))
    assert upload.complete
    published = upload.index_order.carry_out(upload.folder, lambda files: files)
    assert published.num_bytes == 4 * 8
    (folder / step_folder(3)).write_bytes(COMMIT, published.commit)
    assert [file.name for file in open_checkpoint(folder, 3).files] == [f"file-{number}" for number in range(4)]


def test_nodes_of_different_states_are_named(tmp_path: str) -> None:
    upload = Upload(Version(1, 3), ("a", "b"), Storage.at(str(tmp_path)), "0123456789abcdef")
    upload.joined(Joined.together([Joined.of({"a": written(0)}), Joined.of({"b": written(1, step=4)})]))
    with pytest.raises(CheckpointError, match="node b holds another state than a"):
        upload.index_order.carry_out(upload.folder, lambda files: files)


class SpokenFor(Writing):
    """A keeper that another one speaks for."""

    def __init__(self) -> None:
        self.node_id, self.lock, self.place, self._own = "a", threading.Lock(), Place(leader="b"), {}
        self.orders: list[str] = []

    @property
    def _keeper(self) -> Any:
        return self

    def write(self, order: WriteOrder) -> Written:
        self.orders.append(order.folder)
        return Written((), 1, {}, {}, {})


def test_a_checkpoint_that_is_read_back_after_the_next_one_was_ordered_is_read_by_way_of_the_tree() -> None:
    """Each node was asked by itself, as a keeper remembered the newest order alone."""
    keeper = SpokenFor()
    orders = [OrderForAll(Version(1, step), str(step), f"token-{step}", "a", 5.0) for step in range(10, 60, 10)]
    for order in orders:
        keeper.write_all(order)
        keeper.write_all(order)
    assert keeper.orders == ["10", "20", "30", "40", "50"], "each once"
    assert [keeper.read_back_all(order) for order in orders] == [{}, {}, {"a": ""}, {"a": ""}, {"a": ""}]
    assert keeper.read_back_all(orders[-1]) == {}, "of two that ask, the first has the answer"
