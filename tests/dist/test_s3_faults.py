"""Checkpoints in S3 while requests are slow, fail, fail after they were carried out, break off, or are refused: nothing
is lost, and nothing is torn. Two servers that are not each other's: moto, and rclone's."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from regrow import storage as storage_module
from regrow.plan.mesh import Coordinates, MeshShape
from regrow.record.claim import Claim, Superseded
from regrow.state.disk import catalog
from regrow.state.disk.catalog import committed_steps, open_checkpoint
from regrow.state.disk.store import restore
from regrow.storage import Storage, StorageError
from support.keepers import RUN, Node, assert_state, cluster, entries_of, snapshot, write_checkpoint
from support.s3 import Faults, s3_server

pytestmark = pytest.mark.timeout(300)
LONG = pytest.mark.long
KINDS = ("slow", "error", pytest.param("late_error", marks=LONG), "cut", pytest.param("reset", marks=LONG))
RETRY_S = 60.0


# both answer alike; what a store may do otherwise, rclone's does
@pytest.fixture(scope="module", params=[pytest.param("moto", marks=pytest.mark.long), "rclone"])
def server(request: pytest.FixtureRequest) -> Iterator[tuple[str, Faults]]:
    faults = Faults()
    with s3_server(request.param, faults) as bucket:
        yield bucket, faults


@pytest.fixture
def served(server: tuple[str, Faults], monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Faults]]:
    """Without faults, and afterwards too."""
    monkeypatch.setattr(storage_module, "RETRY_DEADLINE_S", RETRY_S)
    monkeypatch.setattr(storage_module, "RETRY_AFTER_S", 0.1)
    yield server
    server[1].set("")


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Node]]:
    with cluster(tmp_path, 2) as found:
        yield found


def assert_sound(checkpoints: Storage, step: int) -> None:
    index = open_checkpoint(checkpoints, step, run_id=RUN)
    catalog.verify(checkpoints, index, lambda num_bytes: None)
    entries = entries_of(0, 1)
    restore(checkpoints, index, entries, Coordinates(MeshShape(1, 1)))
    assert_state(entries, step)


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_is_written_and_read_through_faults(
    kind: str, served: tuple[str, Faults], nodes: list[Node]
) -> None:
    bucket, faults = served
    checkpoints = Storage.at(f"{bucket}/{kind}/checkpoints")
    snapshot(nodes, 3, 4)
    write_checkpoint(nodes, checkpoints, 3)
    snapshot(nodes, 5, 4)
    faults.set(kind, 0.12, seed=5)
    write_checkpoint(nodes, checkpoints, 5)
    assert committed_steps(checkpoints) == [5, 3]
    assert_sound(checkpoints, 5)
    assert faults.seen, "some requests went wrong"
    faults.set("")
    assert_sound(checkpoints, 5)
    assert_sound(checkpoints, 3)


@pytest.mark.parametrize("kind", ["error", "late_error", "cut", "reset"])
def test_what_is_sent_in_parts_is_whole_or_not_there(kind: str, served: tuple[str, Faults]) -> None:
    bucket, faults = served
    folder = Storage.at(f"{bucket}/{kind}/large")
    chunks = [bytes([number]) * 4_000_000 for number in range(7)]  # more than one part of Arrow's
    faults.set(kind, 0.2, seed=1)
    assert folder.write_chunks("file", chunks) == 28_000_000
    assert folder.read_range("file", 11_999_998, 4) == bytes([2, 2, 3, 3])
    faults.set("")
    assert folder.read_bytes("file") == b"".join(chunks)
    assert folder.list() == ["file"]


def test_credentials_that_end_cost_a_checkpoint_and_nothing_that_was_there(
    served: tuple[str, Faults], nodes: list[Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_module, "RETRY_DEADLINE_S", 2.0)
    bucket, faults = served
    checkpoints = Storage.at(f"{bucket}/expired/checkpoints")
    snapshot(nodes, 3, 4)
    write_checkpoint(nodes, checkpoints, 3)
    snapshot(nodes, 5, 4)
    faults.set("expired", 1.0)
    begun = time.monotonic()
    with pytest.raises(OSError, match=r"expired/checkpoints/step-00000005/.*(ExpiredToken|ACCESS_DENIED|403)"):
        write_checkpoint(nodes, checkpoints, 5)
    assert time.monotonic() - begun < RETRY_S, "it does not try for ever"
    faults.set("")
    assert committed_steps(checkpoints) == [3]
    assert_sound(checkpoints, 3)
    write_checkpoint(nodes, checkpoints, 5)
    assert_sound(checkpoints, 5)


def test_what_is_there_is_not_created_again(served: tuple[str, Faults]) -> None:
    """On a store that ignores the condition too, which is found out without harm."""
    bucket, _ = served
    folder = Storage.at(f"{bucket}/created")
    folder.write_bytes("before", b"theirs")
    assert not folder.create("before", b"ours")
    for number in range(2):
        assert folder.create(f"file-{number}", b"first")
        assert not folder.create(f"file-{number}", b"second")
        assert folder.read_bytes(f"file-{number}") == b"first"
    assert folder.read_bytes("before") == b"theirs"


def test_of_two_jobs_of_one_run_the_newer_one_goes_on(served: tuple[str, Faults]) -> None:
    bucket, faults = served
    folder = Storage.at(f"{bucket}/claimed")
    faults.set("error", 0.2, seed=3)
    first = Claim.take(folder, job="first")
    second = Claim.take(folder, job="second")
    assert second.number > first.number
    with pytest.raises(Superseded):
        first.check()
    second.check()


def test_a_store_that_takes_no_checksums_at_the_end_of_uploads_says_what_to_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with s3_server("rclone") as bucket, monkeypatch.context() as without:
        without.delenv("AWS_REQUEST_CHECKSUM_CALCULATION")
        with pytest.raises(StorageError, match="set AWS_REQUEST_CHECKSUM_CALCULATION=when_required"):
            Storage.at(f"{bucket}/trailers").write_bytes("file", b"content")
