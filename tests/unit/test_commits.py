"""Which snapshot is the newest committed one, told by what keepers report, or by what they hold."""

from regrow.control.commits import CommitTracker
from regrow.control.values import SnapshotAck, Version
from regrow.plan.mesh import Coordinates, MeshShape
from regrow.state.memory.held import COPY, Held, is_whole
from regrow.state.memory.slots import SLOT


def held(step: int, shard: int, *, copy: bool = False) -> Held:
    return Held(
        f"g000001-{shard}-{step}{SLOT}" + (f".of{COPY}" if copy else ""),
        Version(1, step),
        Coordinates(MeshShape(1, 2), shard),
        1,
        "",
    )


def rebuilt(*known: tuple[str, int, list[Held]]) -> CommitTracker:
    board = CommitTracker(is_whole)
    board.rebuild((node, Version(1, step), holdings) for node, step, holdings in known)
    return board


def newest(board: CommitTracker) -> int | None:
    return board.newest.version.step if board.newest else None


def test_a_step_is_committed_once_every_node_has_it_safe_with_its_peer() -> None:
    board = CommitTracker(is_whole)
    board.begin(1, 0, {"a": ("b",), "b": ("a",)})
    assert board.sealed(SnapshotAck("a", Version(1, 5), ("b",))) is None
    assert board.sealed(SnapshotAck("b", Version(1, 5), ())) is None  # it had not heard of its peer
    assert board.sealed(SnapshotAck("b", Version(2, 5), ("a",))) is None
    assert newest(board) is None
    assert board.sealed(SnapshotAck("b", Version(1, 5), ("a",))) is not None
    assert newest(board) == 5


def test_a_late_report_of_what_was_discarded_commits_nothing() -> None:
    board = CommitTracker(is_whole)
    board.begin(1, 0, {"a": ()})
    assert board.sealed(SnapshotAck("a", Version(1, 5), ())) is not None
    board.discard()
    assert board.sealed(SnapshotAck("a", Version(1, 4), ())) is None
    assert newest(board) is None
    board.begin(2, 0, {"a": ()})
    assert board.sealed(SnapshotAck("a", Version(2, 1), ())) is not None


def test_the_newest_commit_that_any_keeper_knows_is_found_again() -> None:
    a = [held(6, 0), held(7, 0), held(6, 1, copy=True), held(7, 1, copy=True)]
    b = [held(6, 1), held(7, 1), held(6, 0, copy=True), held(7, 0, copy=True)]
    assert newest(rebuilt(("a", 7, a), ("b", 6, b))) == 7
    assert newest(rebuilt(("a", 6, a), ("b", 6, b))) == 6, "7 was never committed"
    assert newest(rebuilt(("new", -1, []))) is None


def test_a_commit_that_only_a_lost_node_had_heard_of_is_found_where_the_one_before_is_overwritten() -> None:
    """Node a knew of 7, and wrote 8 in the place of 6; with its copies b has all of 7, and of 6 no more."""
    b = [held(6, 1), held(7, 1), held(7, 0, copy=True), held(8, 0, copy=True)]
    assert newest(rebuilt(("b", 6, b))) == 7
    assert newest(rebuilt(("b", 6, [held(6, 1)]))) == 6, "nothing else is whole: storage it is"
