"""One writer a run, on disks with and without locks, in S3, and in stores without conditional writes."""

import contextlib
import errno
import fcntl
import json
import os
import resource
import socket
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import pytest

from regrow.control.commands import Delete
from regrow.errors import ResumeError
from regrow.record import claim as module
from regrow.record.claim import Claim, Superseded, is_taken_over
from regrow.record.events import Forming
from regrow.record.lock import LOCK_FILE, is_held, lock_run, take_lock
from regrow.record.log import METRIC_KEYS, RunLog, read_events, read_metrics
from regrow.runtime.publisher import Publisher
from regrow.state.disk.catalog import committed_steps
from regrow.storage import LocalStorage, RemoteStorage, Storage
from support.s3 import s3_server


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    with s3_server() as uri:
        yield uri


class Unconditional(RemoteStorage):
    """A store without conditional writes, as Arrow's Google and Azure file systems are used: a look, then a write."""

    def _create(self, path: str, data: bytes) -> bool:
        if self.exists(path.removeprefix(f"{self.root}/")):
            return False
        self.write_bytes(path.removeprefix(f"{self.root}/"), data)
        return True

    def join(self, *names: str) -> "Unconditional":
        below = super().join(*names)
        return Unconditional(below.fs, below.root, below.uri)


@pytest.fixture(params=["disk", "s3", "fsspec", "unconditional"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "disk":
        return Storage.at(tmp_path)
    if request.param == "s3":
        return Storage.at(f"{request.getfixturevalue('bucket')}/{uuid.uuid4().hex}")
    found = Storage.at(f"memory://{uuid.uuid4().hex}")
    assert isinstance(found, RemoteStorage)
    return found if request.param == "fsspec" else Unconditional(found.fs, found.root, found.uri)


def row(generation: int, step: int) -> dict[str, Any]:
    return dict.fromkeys(METRIC_KEYS, 0.01) | {"generation": generation, "step": step, "batch_digest": 1}


def publisher_of(folder: Storage, claim: Claim) -> Publisher:
    return Publisher(folder / "checkpoints", "run", keep=1, flush_log=lambda: None, check=claim.check)


def commit(publisher: Publisher, step: int, pointer: bytes) -> None:
    publisher.commit(f"step-{step:08d}", pointer, fence=lambda: None)


def test_a_file_is_created_once(folder: Storage) -> None:
    assert folder.create("a/b", b"first")
    assert not folder.create("a/b", b"second")
    assert folder.read_bytes("a/b") == b"first"
    assert folder.list("a") == ["b"]


@pytest.mark.parametrize("where", ["disk", "s3"])
def test_of_many_that_create_a_file_at_once_one_does(where: str, tmp_path: Path, bucket: str) -> None:
    folder = Storage.at(tmp_path if where == "disk" else f"{bucket}/{uuid.uuid4().hex}")
    start = threading.Barrier(8)

    def create(number: int) -> bool:
        start.wait()
        return folder.create("file", str(number).encode())

    with ThreadPoolExecutor(8) as threads:
        created = list(threads.map(create, range(8)))
    assert created.count(True) == 1
    assert folder.read_bytes("file") == str(created.index(True)).encode()


def test_the_newer_of_two_writers_fences_the_older_one_off_at_its_commit_and_its_log(folder: Storage) -> None:
    """Two clusters at once, as after a partition: before, they overwrote each other's COMMIT and deleted each other's
    checkpoints."""
    old = Claim.take(folder)
    old_log, old_publisher = RunLog(folder, claim=old, upload_every_s=1000), publisher_of(folder, old)
    old_log.begin(1, 0)
    old_log.row(row(1, 1))
    old_log.flush()
    commit(old_publisher, 1, b'"old"')

    new = Claim.take(folder)
    assert new.number == old.number + 1
    new_log, new_publisher = RunLog(folder, claim=new, upload_every_s=1000), publisher_of(folder, new)
    new_log.begin(2, 1)
    new_log.row(row(2, 2))
    new_log.event(Forming(generation=2, time=1.0))
    new_log.flush()
    commit(new_publisher, 2, b'"new"')

    for step in (2, 3):
        with pytest.raises(Superseded, match="written by another job now"):
            commit(old_publisher, step, b'"old"')
    with pytest.raises(Superseded):
        old_log.begin(2, 0)
    old_publisher.withdraw(2)
    old_publisher.delete(Delete())
    assert old_publisher.close() == ""
    (deleted,) = old_publisher.done()
    assert "written by another job now" in deleted.problem  # type: ignore[union-attr]
    assert committed_steps(folder / "checkpoints") == [2, 1]
    assert (folder / "checkpoints").read_bytes("step-00000002/COMMIT") == b'"new"'
    with contextlib.suppress(Superseded):  # on a disk; elsewhere it is the upload that is refused
        old_log.event(Forming(generation=2, time=2.0))
    with pytest.raises(Superseded):
        old_log.flush()
    assert [each["step"] for each in read_metrics(folder)] == [1, 2]
    assert [each["time"] for each in read_events(folder)] == [1.0]
    new.check()


def test_a_commit_on_its_way_when_another_writer_commits_does_not_replace_it(bucket: str) -> None:
    """A coordinator that is stopped between its look and its write, and continued once another one has committed."""
    folder = Storage.at(f"{bucket}/{uuid.uuid4().hex}")
    old, new = Claim.take(folder), None
    looks = []

    def check() -> None:
        looks.append(1)
        if len(looks) == 3:  # the look after COMMIT was found there
            old.check()

    def flush() -> None:
        nonlocal new
        new = Claim.take(folder)
        commit(publisher_of(folder, new), 5, b'"new"')

    stopped = Publisher(folder / "checkpoints", "run", keep=1, flush_log=flush, check=check)
    with pytest.raises(Superseded):
        commit(stopped, 5, b'"old"')
    assert (folder / "checkpoints").read_bytes("step-00000005/COMMIT") == b'"new"'


def test_a_step_that_is_trained_again_is_committed_again(folder: Storage) -> None:
    publisher = publisher_of(folder, Claim.take(folder))
    commit(publisher, 5, b'"before"')
    commit(publisher, 5, b'"after"')
    assert (folder / "checkpoints").read_bytes("step-00000005/COMMIT") == b'"after"'


def test_a_coordinator_that_is_restarted_takes_its_own_place_and_no_other_jobs(folder: Storage) -> None:
    """The old cluster's head behind a partition does not take the run back from the new cluster."""
    first = Claim.take(folder, job="old")
    again = Claim.take(folder, job="old", restarted=True)
    assert again.number == first.number + 1
    with pytest.raises(Superseded):
        first.check()
    Claim.take(folder, job="new")
    with pytest.raises(Superseded, match=f"process {os.getpid()} on "):
        Claim.take(folder, job="old", restarted=True)


def test_a_coordinator_that_died_before_it_took_a_number_is_superseded_by_no_job_before(folder: Storage) -> None:
    """It said that another job writes the run now, of one that had ended."""
    Claim.take(folder, job="a")
    Claim.take(folder, job="a", restarted=True)
    assert Claim.take(folder, job="b", restarted=True).number == 3
    Claim.take(folder, job="c")
    Claim.take(folder, job="c", restarted=True)
    with pytest.raises(Superseded):
        Claim.take(folder, job="b", restarted=True)


def test_an_attempt_after_another_submission_began_does_not_take_the_run_back(folder: Storage) -> None:
    """KubeRay's, of a job that the other one had ended: each ended the other, again and again."""
    Claim.take(folder, job="a0", owner="a")
    assert not is_taken_over(folder, "a")
    assert Claim.take(folder, job="a1", owner="a").number == 2
    by_hand = Claim.take(folder, job="w0")
    assert is_taken_over(folder, "a")
    for restarted in (False, True):
        with pytest.raises(Superseded, match=f"process {os.getpid()} on "):
            Claim.take(folder, job="a2", owner="a", restarted=restarted)
    by_hand.check()
    Claim.take(folder, job="b0", owner="b")  # a user's next submission
    assert is_taken_over(folder, "a")
    assert not is_taken_over(folder, "b")


def test_claims_of_before_owners_are_read(folder: Storage) -> None:
    folder.create("writers/000001.json", json.dumps({"job": "old", "host": "elsewhere", "pid": 7}).encode())
    assert Claim.take(folder, job="a0", owner="a").number == 2
    folder.create("writers/000003.json", json.dumps({"job": "other", "host": "elsewhere", "pid": 8}).encode())
    with pytest.raises(Superseded, match="process 8 on elsewhere"):
        Claim.take(folder, job="a1", owner="a")


def test_where_two_take_one_number_the_later_one_has_it(tmp_path: Path) -> None:
    """Without conditional writes both may be told that they have it; the one that was overwritten finds out."""
    folder = Storage.at(tmp_path)
    first = Claim.take(folder)
    content = json.dumps({"job": "", "host": "elsewhere", "pid": 7}).encode()
    folder.write_bytes("writers/000001.json", content)
    with pytest.raises(Superseded, match="process 7 on elsewhere"):
        first.check()
    Claim(folder, 1, content).check()


def test_a_lost_claim_stays_lost_and_is_looked_for_at_most_so_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = Claim.take(Storage.at(tmp_path))
    looks = list[str]()
    exists = LocalStorage.exists
    monkeypatch.setattr(LocalStorage, "exists", lambda self, name: looks.append(name) or exists(self, name))
    for _ in range(100):
        old.check(within_s=1000.0)
    assert not looks
    Claim.take(Storage.at(tmp_path))
    looks.clear()
    for _ in range(3):
        with pytest.raises(Superseded):
            old.check()
    assert looks == ["writers/000002.json"]


def test_a_run_starts_on_a_file_system_without_locks_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lustre by default, some FUSE file systems: before, no run could start there."""

    def unsupported(file: Any, operation: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", unsupported)
    said, folder = list[str](), Storage.at(tmp_path)
    assert lock_run(folder, said.append) is None
    assert [f"{folder} has no file locks" in line for line in said] == [True]
    old, new = Claim.take(folder), None
    with RunLog(folder, claim=old) as log:
        log.begin(1, 0)
        log.row(row(1, 1))
        log.event(Forming(generation=1))
        new = Claim.take(folder)
        monkeypatch.setattr("regrow.record.log.LOOK_EVERY_S", 0.0)
        with pytest.raises(Superseded):
            log.row(row(1, 2))
    assert [each["step"] for each in read_metrics(folder)] == [1]
    new.check()


def test_where_there_are_locks_the_second_job_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("regrow.record.lock.LOCK_WAIT_S", 0.1)
    said = list[str]()
    held = lock_run(Storage.at(tmp_path), said.append)
    with pytest.raises(ResumeError, match="in use by another process; wait for it"):
        lock_run(Storage.at(tmp_path), said.append)
    Claim.take(Storage.at(tmp_path))
    with pytest.raises(ResumeError, match=rf"by another process \(process {os.getpid()} on .*\); .* another run.name$"):
        lock_run(Storage.at(tmp_path), said.append)
    # the holder's, though the second job has asked since
    assert (tmp_path / LOCK_FILE).read_text() == f"process {os.getpid()} on {socket.gethostname()}"
    assert held is not None
    assert not said
    held.close()


@pytest.fixture
def left_by_another_host(tmp_path: Path) -> Iterator[IO[str]]:
    """The lock of a run's folder as a file server keeps it of a host that is gone."""
    Storage.at(tmp_path).write_bytes("writers/000001.json", json.dumps({"host": "elsewhere", "pid": 7}).encode())
    with open(tmp_path / LOCK_FILE, "a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield held


def test_a_lock_that_another_host_has_is_waited_for_longer_and_the_refusal_says_which_and_what_to_do(
    left_by_another_host: IO[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS keeps a dead host's lock: before, a run was refused for its own predecessor, which was not named."""
    monkeypatch.setattr("regrow.record.lock.LOCK_WAIT_S", 0.0)
    monkeypatch.setattr("regrow.record.lock.LEASE_WAIT_S", 0.5)
    said = list[str]()
    with pytest.raises(ResumeError) as refused:
        lock_run(Storage.at(tmp_path), said.append)
    assert "in use by another process (process 7 on elsewhere); wait for it" in str(refused.value)
    assert str(refused.value).endswith(f"where elsewhere is gone for good, delete {tmp_path / LOCK_FILE}")
    assert [text.split(", as ")[0] for text in said] == [
        f"run folder {tmp_path} is locked (process 7 on elsewhere): waiting up to 0 s"
    ]


@pytest.mark.parametrize("how", ["the lease ends", "a person deletes the file"])
def test_a_job_that_waits_for_a_host_that_is_gone_has_the_lock_once_it_can(
    how: str, left_by_another_host: IO[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("regrow.record.lock.LOCK_WAIT_S", 0.0)
    monkeypatch.setattr("regrow.record.lock.LEASE_WAIT_S", 1e9)
    waits = threading.Event()
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(lock_run, Storage.at(tmp_path), lambda text: waits.set())
        assert waits.wait(60)
        if how == "the lease ends":
            fcntl.flock(left_by_another_host, fcntl.LOCK_UN)
        else:
            (tmp_path / LOCK_FILE).unlink()
        held = waiting.result(60)
    assert held is not None
    assert (tmp_path / LOCK_FILE).read_text().startswith(f"process {os.getpid()} on ")
    assert is_held(Storage.at(tmp_path), None) is True
    held.close()


def test_a_file_that_was_deleted_after_it_was_opened_is_no_lock(tmp_path: Path) -> None:
    """The next job makes another one, and locks that."""
    with open(tmp_path / LOCK_FILE, "a") as first, open(tmp_path / LOCK_FILE, "a") as second:
        assert take_lock(first)
        assert not take_lock(second), "held by the first"
        (tmp_path / LOCK_FILE).unlink()
        fcntl.flock(first, fcntl.LOCK_UN)
        assert not take_lock(second)
        (tmp_path / LOCK_FILE).touch()
        assert not take_lock(second)


def test_the_lock_names_its_newest_holder_alone(tmp_path: Path) -> None:
    (tmp_path / LOCK_FILE).write_text("12345678901234567890")
    held = lock_run(Storage.at(tmp_path))
    assert held is not None
    assert (tmp_path / LOCK_FILE).read_text() == f"process {os.getpid()} on {socket.gethostname()}"
    held.close()


def test_a_full_disk_does_not_keep_the_writer_from_its_lock(tmp_path: Path) -> None:
    """A coordinator that was started again there had ended with `No space left on device`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        held = lock_run(Storage.at(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert held is not None
    assert is_held(Storage.at(tmp_path), None) is True
    held.close()


def test_names_of_segments_sort_by_writer_whatever_the_clocks_said(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Storage.at(f"memory://{uuid.uuid4().hex}")
    for generation, clock in ((1, 2000.0), (2, 1000.0)):  # set back between the two
        monkeypatch.setattr(module.time, "time_ns", lambda clock=clock: int(clock * 1e9))
        with RunLog(folder, claim=Claim.take(folder)) as log:
            log.event(Forming(generation=generation, time=clock))
    assert [event["generation"] for event in read_events(folder)] == [1, 2]
