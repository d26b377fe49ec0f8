import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regrow.record import log as run_log
from regrow.record.claim import Claim
from regrow.record.events import Forming, Stopped, Submitted
from regrow.record.log import (
    METRIC_KEYS,
    LogReader,
    RunLog,
    encode,
    newest_row,
    next_generation,
    read_events,
    read_metrics,
    rows_past,
)
from regrow.storage import Storage
from support.counting import Counting


def make_row(step: int, generation: int = 1, **changes: object) -> dict[str, object]:
    row: dict[str, object] = {
        "step": step,
        "tokens_seen": step * 100,
        "loss": 8.0 - 0.01 * step,
        "grad_norm": 1.0,
        "lr": 1e-3,
        "tokens_per_s": 1000.0,
        "mfu": 0.4,
        "step_s": 0.5,
        "data_wait_s": 0.01,
        "snapshot_s": 0.0,
        "world_size": 2,
        "generation": generation,
        "batch_digest": f"{step:016x}",
        "time": 1000.0 + step,
    }
    return row | changes


def newest_step(storage: Storage) -> int:
    row = newest_row(storage)
    return int(row["step"]) if row else 0


def steps_of(storage: Storage) -> list[tuple[int, int]]:
    return [(row["step"], row["generation"]) for row in read_metrics(storage)]


@pytest.fixture(params=["local", "object store"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "local":
        return Storage.at(tmp_path / "run")
    return Storage.at(f"memory://{uuid.uuid4().hex}/run")


@pytest.fixture
def local(tmp_path: Path) -> Storage:
    return Storage.at(tmp_path / "run")


@pytest.fixture
def remote() -> Storage:
    return Storage.at(f"memory://{uuid.uuid4().hex}/run")


def test_rows_and_events_come_back_as_they_were_written(storage: Storage) -> None:
    with RunLog(storage) as log:
        log.event(Submitted(host="a", versions={"torch": "2"}))
        log.begin(1, 0)
        for step in (1, 2):
            assert log.row(make_row(step))
        log.event(Stopped(step=2, reason="finished", time=7.0))
    assert read_metrics(storage) == [make_row(1), make_row(2)]
    submitted, stopped = read_events(storage)  # as they were written, whatever their times
    assert stopped == {"time": 7.0, "event": "stopped", "step": 2, "reason": "finished", "detail": ""}
    assert submitted["versions"] == {"torch": "2"}
    assert submitted["time"] == pytest.approx(time.time(), abs=60)


def test_a_run_folder_without_logs_reads_as_empty(storage: Storage) -> None:
    assert read_metrics(storage) == []
    assert read_events(storage) == []


def test_a_new_generation_takes_back_rows_past_its_start_and_says_what_they_cost(storage: Storage) -> None:
    with RunLog(storage) as log:
        log.begin(1, 0)
        for step in range(1, 6):
            log.row(make_row(step))
        rollback = log.begin(2, 3)
        log.row(make_row(4, 2))
    assert (rollback.steps, rollback.seconds) == (2, 1.0)
    assert (rollback.first_time, rollback.last_time) == (1003.5, 1005.0)
    assert steps_of(storage) == [(1, 1), (2, 1), (3, 1), (4, 2)]  # 5 is gone before anything replaced it
    (event,) = read_events(storage)
    assert {key: event[key] for key in ("event", "generation", "from_step", "to_step", "steps")} == {
        "event": "rollback",
        "generation": 2,
        "from_step": 5,
        "to_step": 3,
        "steps": 2,
    }


def test_a_resumed_process_rolls_back_what_the_one_before_logged(storage: Storage) -> None:
    with RunLog(storage) as log:
        log.begin(1, 0)
        for step in range(1, 8):
            log.row(make_row(step))
    with RunLog(storage) as log:
        assert log.begin(2, 5).steps == 2
        log.row(make_row(6, 2))
        log.flush()
        assert log.begin(3, 0).steps == 6
        assert read_metrics(storage) == []
        log.row(make_row(1, 3))
    assert steps_of(storage) == [(1, 3)]


def test_a_rollback_tells_the_rows_of_each_generation_apart(storage: Storage) -> None:
    with RunLog(storage) as log:
        log.begin(1, 0)
        for step in range(1, 5):
            log.row(make_row(step))
        log.begin(2, 4)
        log.row(make_row(5, 1), is_late=True)
        log.row(make_row(6, 2))
        log.begin(3, 6)
        for step in range(7, 10):
            log.row(make_row(step, 3))
        log.begin(4, 2)
    (event,) = read_events(storage)
    assert (event["steps"], event["first_time"], event["last_time"]) == (7, 1002.5, 1009.0)
    assert event["spans"] == [
        {"generation": 1, "first_time": 1002.5, "first_step_end": 1003.0, "last_time": 1005.0},
        {"generation": 2, "first_time": 1005.5, "first_step_end": 1006.0, "last_time": 1006.0},
        {"generation": 3, "first_time": 1006.5, "first_step_end": 1007.0, "last_time": 1009.0},
    ]


def test_a_new_generation_without_rollback_goes_on_and_notes_nothing(storage: Storage) -> None:
    with RunLog(storage) as log:
        log.begin(1, 0)
        log.row(make_row(1))
        assert log.begin(2, 1).steps == 0
        log.row(make_row(2, 2))
    assert steps_of(storage) == [(1, 1), (2, 2)]
    assert read_events(storage) == []


def test_a_row_of_an_older_generation_is_refused(storage: Storage) -> None:
    with RunLog(storage) as log:
        log.begin(1, 0)
        log.row(make_row(1))
        log.begin(2, 1)
        assert not log.row(make_row(2, 1))
        assert log.row(make_row(2, 2))
    assert steps_of(storage) == [(1, 1), (2, 2)]


def test_a_late_row_counts_in_the_generation_that_writes_it(storage: Storage) -> None:
    """In an object store every reader skipped it: a finished run lacked its last steps."""
    with RunLog(storage) as log:
        log.begin(1, 0)
        log.row(make_row(1))
        log.begin(2, 1)
        assert log.row(make_row(2, 1), is_late=True)
        log.flush()
        assert newest_step(storage) == 2
        assert [row["step"] for row in rows_past(storage, 1)] == [2]
        log.row(make_row(3, 2))
        assert log.begin(3, 2).steps == 1
        assert log.row(make_row(3, 2), is_late=True)
    assert steps_of(storage) == [(1, 1), (2, 1), (3, 2)]


def test_a_run_that_moves_between_kinds_of_storage_is_read_in_the_order_in_which_it_was_written(
    local: Storage, remote: Storage
) -> None:
    """From an object store to a local disk, back, and once more; a local disk's lines stood before all others."""

    def copy(source: Storage, to: Storage) -> None:
        for name in [
            *(each for each in source.list() if "." in each),
            *(f"writers/{n}" for n in source.list("writers")),
        ]:
            to.write_bytes(name, source.read_bytes(name))

    def train(storage: Storage, number: int) -> None:
        reader = LogReader(storage)
        with RunLog(storage, claim=Claim.take(storage), upload_every_s=1000) as log:
            assert log.begin(2 * number, number - 1).steps == 0
            log.event(Forming(generation=2 * number, time=5.0))
            assert log.row(make_row(number, 2 * number))
            assert log.row(make_row(number + 1, 2 * number))
            log.flush()
            assert reader.metrics() == read_metrics(storage)
            assert log.begin(2 * number + 1, number).steps == 1  # one a step, in the middle too
            log.flush()
            assert reader.metrics() == read_metrics(storage)

    def check(storage: Storage, number: int) -> None:
        assert steps_of(storage) == [(step, 2 * step) for step in range(1, number + 1)]
        newest = read_metrics(storage, tail=True)
        assert newest == read_metrics(storage)[-len(newest) :]
        assert newest_step(storage) == number
        forming = [each["generation"] for each in read_events(storage) if each["event"] == "forming"]
        assert forming == [2 * step for step in range(1, number + 1)]

    for number, storage, other in ((1, remote, local), (2, local, remote), (3, remote, local), (4, local, remote)):
        train(storage, number)
        check(storage, number)
        copy(storage, other)
        check(other, number)


def test_a_run_that_began_on_a_local_disk_goes_on_in_an_object_store_and_comes_back(
    local: Storage, remote: Storage
) -> None:
    for number, storage, other in ((1, local, remote), (2, remote, local), (3, local, remote)):
        with RunLog(storage) as log:
            log.begin(number, number - 1)
            log.row(make_row(number, number))
        for name in storage.list():
            other.write_bytes(name, storage.read_bytes(name))
        for each in (storage, other):
            assert steps_of(each) == [(step, step) for step in range(1, number + 1)]
            assert newest_step(each) == number


def test_rows_must_come_one_a_step_and_whole(local: Storage) -> None:
    with RunLog(local) as log:
        with pytest.raises(AssertionError, match="begin"):
            log.row(make_row(1))
        log.begin(1, 4)
        with pytest.raises(AssertionError, match="expected 5"):
            log.row(make_row(6))
        row = make_row(5)
        del row["batch_digest"]
        with pytest.raises(AssertionError, match="batch_digest"):
            log.row(row)


def test_keys_stand_in_their_documented_order_and_a_digest_may_be_a_number(local: Storage) -> None:
    with RunLog(local) as log:
        log.begin(1, 0)
        shuffled = dict(sorted(make_row(1, validation_loss=5.0).items()))
        log.row(shuffled | {"batch_digest": 0xAB})
    (row,) = [json.loads(line) for line in local.read_bytes("metrics.jsonl").splitlines()]
    assert tuple(row) == (*METRIC_KEYS, "validation_loss")
    assert row["batch_digest"] == "00000000000000ab"


@pytest.mark.parametrize("tail", [b'{"step": 3, "lo', b"\x00\x00\x00", b'{"step": 3}', b"\xff\xfe"])
def test_a_torn_last_line_is_dropped_at_open(local: Storage, tail: bytes) -> None:
    with RunLog(local) as log:
        log.event(Submitted(time=1.0))
        log.begin(1, 0)
        log.row(make_row(1))
        log.row(make_row(2))
    for name in ("metrics.jsonl", "events.jsonl"):
        with open(local.local_path / name, "ab") as file:
            file.write(tail)
    assert [row["step"] for row in read_metrics(local)][:2] == [1, 2]  # before anyone mends it
    with RunLog(local) as log:
        log.event(Submitted(time=2.0))
        assert log.begin(2, 2).steps == 0
        log.row(make_row(3, 2))
    for name, num_lines in (("metrics.jsonl", 3), ("events.jsonl", 2)):
        lines = (local.local_path / name).read_bytes().splitlines()
        assert len([json.loads(line) for line in lines]) == num_lines


def test_a_file_that_is_one_torn_line_becomes_empty(local: Storage) -> None:
    local.write_bytes("events.jsonl", b"x" * 200_000)
    RunLog(local).close()
    assert local.read_bytes("events.jsonl") == b""


def test_lines_torn_in_the_middle_are_skipped(local: Storage) -> None:
    lines = [encode(make_row(1)), b'{"step": 2, "loss"\n', b"[1, 2]\n", b"{}\n", b"\n", encode(make_row(3))]
    local.write_bytes("metrics.jsonl", b"".join(lines))
    local.write_bytes("events.jsonl", b'{"event": "failu\n{"time": 1.0, "event": "submitted"}\n{"event": "x"}\n')
    assert [row["step"] for row in read_metrics(local)] == [1, 3]
    assert [event["event"] for event in read_events(local)] == ["submitted"]


def test_nan_and_infinity_are_valid_json_and_come_back() -> None:
    record = make_row(
        1, loss=float("nan"), grad_norm=float("inf"), more={"a": [1.0, float("-inf")], "b/c": float("nan")}
    )
    line = encode(record)
    plain = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert plain["loss"] is None
    assert plain["nonfinite"] == {"loss": "nan", "grad_norm": "inf", "more/a/1": "-inf", "more/b/c": "nan"}
    back = run_log.decode_row(line)
    assert back is not None
    assert back["loss"] != back["loss"]
    assert back["grad_norm"] == float("inf")
    assert back["more"]["a"] == [1.0, float("-inf")]
    assert "nonfinite" not in back


def test_numpy_scalars_are_written_as_numbers() -> None:
    np = pytest.importorskip("numpy")
    line = encode({"a": np.float32(0.5), "b": np.int64(3), "c": np.float32("nan"), "d": Path("x")})
    assert json.loads(line) == {"a": 0.5, "b": 3, "c": None, "d": "x", "nonfinite": {"c": "nan"}}


def test_a_local_writer_with_an_old_generation_changes_nothing_that_is_read(local: Storage) -> None:
    old = RunLog(local)
    old.begin(1, 0)
    for step in (1, 2, 3):
        old.row(make_row(step))
    with RunLog(local) as new:
        new.begin(2, 1)
        new.row(make_row(2, 2))
        old.row(make_row(4))  # a paused process that wakes up
    old.close()
    assert steps_of(local) == [(1, 1), (2, 2)]


def test_a_remote_writer_with_an_old_generation_changes_nothing_that_is_read(remote: Storage) -> None:
    old = RunLog(remote, upload_every_s=1000)
    old.begin(1, 0)
    for step in (1, 2, 3):
        old.row(make_row(step))
    old.flush()
    with RunLog(remote, upload_every_s=1000) as new:
        new.begin(2, 2)
        old.row(make_row(4))
        old.flush()
        assert steps_of(remote) == [(1, 1), (2, 1)]
        new.row(make_row(3, 2))
    old.close()
    assert steps_of(remote) == [(1, 1), (2, 1), (3, 2)]


def test_a_rolled_back_step_stays_invisible_in_an_object_store_until_it_is_done_again(remote: Storage) -> None:
    with RunLog(remote, upload_every_s=1000) as log:
        log.begin(1, 0)
        for step in range(1, 5):
            log.row(make_row(step))
        log.begin(2, 2)
        assert steps_of(remote) == [(1, 1), (2, 1)]


def test_rows_are_uploaded_by_themselves_and_events_at_once(remote: Storage) -> None:
    def wait_until(seen: object) -> None:
        deadline = time.monotonic() + 5
        while not seen() and time.monotonic() < deadline:  # type: ignore[operator]
            time.sleep(0.01)
        assert seen()  # type: ignore[operator]

    with RunLog(remote, upload_every_s=0.05) as log:
        log.begin(1, 0)
        log.row(make_row(1))
        wait_until(lambda: steps_of(remote) == [(1, 1)])
    with RunLog(remote, upload_every_s=1000) as log:
        log.event(Submitted())
        wait_until(lambda: len(read_events(remote)) == 1)


def test_a_generation_that_begins_again_writes_over_none_of_its_rows(remote: Storage) -> None:
    with RunLog(remote, upload_every_s=1000) as log:
        for start_step in (0, 2):
            log.begin(1, start_step)
            log.row(make_row(start_step + 1))
            log.row(make_row(start_step + 2))
    assert steps_of(remote) == [(step, 1) for step in range(1, 5)]


def test_segments_are_numbered_and_bounded(remote: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_log, "SEGMENT_BYTES", 1000)
    with RunLog(remote, upload_every_s=1000) as log:
        log.begin(1, 0)
        for step in range(1, 21):
            log.row(make_row(step))
            log.flush()
    names = [name for name in remote.list() if name.startswith("metrics-")]
    assert [name.rsplit("-", 1)[1] for name in names] == [f"{n:05d}.jsonl" for n in range(len(names))]
    assert 5 <= len(names) <= 8
    assert max(len(remote.read_bytes(name)) for name in names) < 1400
    assert steps_of(remote) == [(step, 1) for step in range(1, 21)]


def test_rows_survive_a_failing_object_store_until_it_is_back(remote: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    with RunLog(remote, upload_every_s=0.01) as log:
        log.begin(1, 0)
        write, down = remote.write_bytes, [True]

        def flaky(name: str, data: bytes) -> None:
            if down[0]:
                raise OSError("storage is away")
            write(name, data)

        monkeypatch.setattr(remote, "write_bytes", flaky)
        for step in (1, 2):
            log.row(make_row(step))  # training goes on
        with pytest.raises(OSError, match="away"):
            log.flush()
        down[0] = False
        log.row(make_row(3))
    assert steps_of(remote) == [(1, 1), (2, 1), (3, 1)]


def test_generations_are_never_numbered_twice() -> None:
    assert next_generation([]) == 1
    assert next_generation([{"event": "generation", "generation": 4}, {"event": "stopped"}]) == 5


WRITER = """
import sys
from regrow.record.events import Generation
from regrow.record.log import METRIC_KEYS, RunLog, next_generation, read_events, read_metrics
from regrow.storage import Storage
storage = Storage.at(sys.argv[1])
start = len(read_metrics(storage))
with RunLog(storage) as log:
    generation = next_generation(read_events(storage))
    log.begin(generation, max(0, start - 3))
    log.event(Generation(generation=generation, world_size=1, start_step=0, cause="start"))
    print("ready", flush=True)
    for step in range(max(0, start - 3) + 1, 10**9):
        log.row(dict.fromkeys(METRIC_KEYS, 0.5) | {"step": step, "generation": generation, "time": float(step)})
"""


def test_a_writer_killed_at_any_moment_leaves_every_step_once(local: Storage) -> None:
    for attempt in range(3):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(local)], stdout=subprocess.PIPE)
        assert writer.stdout is not None
        writer.stdout.readline()
        time.sleep(0.05 + 0.03 * attempt)
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        rows = read_metrics(local)
        assert len(rows) > 3
        assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
        assert {row["generation"] for row in rows} == set(range(1, attempt + 2))
    assert [event["event"] for event in read_events(local)].count("rollback") == 2


# what is read of long logs


NUM_ROWS = 100_000


@pytest.fixture(scope="module")
def long_log() -> Counting:
    """Of 100,000 steps in an object store, as its writer left it."""
    storage = Counting.empty()
    with RunLog(storage, upload_every_s=1000) as log:
        log.begin(1, 0)
        for step in range(1, NUM_ROWS + 1):
            log.row(make_row(step))
            if step % 2000 == 0:
                log.flush()  # a segment is as large as it gets
    segments = [name for name in storage.list() if name.startswith("metrics-")]
    assert 10 < len(segments) < 40
    return storage


def test_a_change_of_the_group_reads_the_end_of_a_long_log(long_log: Counting) -> None:
    """Before: all of its segments, at every change, in the coordinator's one thread."""
    with RunLog(long_log, upload_every_s=1000) as log:
        long_log.taken()
        rollback = log.begin(2, NUM_ROWS - 10)
        requests, num_bytes = long_log.taken()
        assert (rollback.steps, rollback.from_step, rollback.to_step) == (10, NUM_ROWS, NUM_ROWS - 10)
        assert requests <= 3
        assert num_bytes < 3 << 20
        log.begin(3, NUM_ROWS - 5000)  # back to a checkpoint
        assert long_log.taken()[0] <= 6
        for step in range(NUM_ROWS - 4999, NUM_ROWS + 1):
            log.row(make_row(step, 3))
    assert steps_of(long_log)[-5001:-4999] == [(NUM_ROWS - 5000, 1), (NUM_ROWS - 4999, 3)]


def test_a_coordinator_that_starts_reads_the_end_of_a_long_log(long_log: Counting) -> None:
    long_log.taken()
    assert newest_step(long_log) == NUM_ROWS
    requests, num_bytes = long_log.taken()
    assert requests <= 3
    assert num_bytes < 3 << 20


def test_a_report_reads_again_only_what_has_changed(long_log: Counting) -> None:
    reader = LogReader(long_log)
    whole = reader.metrics()
    long_log.taken()
    with RunLog(long_log, upload_every_s=1000) as log:
        log.begin(4, NUM_ROWS)
        log.row(make_row(NUM_ROWS + 1, 4))
        log.flush()
        long_log.taken()
        assert reader.metrics() == [*whole, make_row(NUM_ROWS + 1, 4)]
        requests, num_bytes = long_log.taken()
        assert requests <= 4
        assert num_bytes < 3 << 20
    assert reader.metrics() == read_metrics(long_log)


def test_a_segment_that_grew_before_another_one_followed_is_read_to_its_end(remote: Storage) -> None:
    """A report that is written again and again lost what came between two of its looks, for good."""
    reader = LogReader(remote)
    with RunLog(remote, upload_every_s=1000) as log:
        log.begin(1, 0)
        log.row(make_row(1))
        log.flush()
        assert len(reader.metrics()) == 1
        log.row(make_row(2))
        log.begin(2, 2)
        log.row(make_row(3, 2))
        log.flush()
        assert reader.metrics() == read_metrics(remote)
    assert steps_of(remote) == [(1, 1), (2, 1), (3, 2)]


def test_events_of_a_segment_that_grew_before_another_one_followed_are_all_read(
    remote: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of thousands of ranks nearly every `forming` fills a segment."""
    monkeypatch.setattr(run_log, "SEGMENT_BYTES", 300)
    reader = LogReader(remote)
    with RunLog(remote, upload_every_s=1000) as log:
        for number in range(1, 30):
            log.event(Stopped(step=number, time=float(number)))
            log.flush()
            if number % 5 == 0:
                assert reader.events() == read_events(remote)
        assert len([name for name in remote.list() if name.startswith("events-")]) > 5


def test_a_local_log_is_read_from_its_end_and_cut_there(local: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_log, "TAIL_BYTES", 1000)  # less than three rows
    with RunLog(local) as log:
        log.begin(1, 0)
        for step in range(1, 1001):
            log.row(make_row(step))
        reader = LogReader(local)
        assert len(reader.metrics()) == 1000
        assert newest_step(local) == 1000
        assert [row["step"] for row in rows_past(local, 993)] == list(range(994, 1001))
        with open(local.local_path / "metrics.jsonl", "ab") as file:
            file.write(b'{"step": 1001, "torn')
        assert newest_step(local) == 1000
        read = list[int]()
        pread = os.pread
        monkeypatch.setattr(run_log.os, "pread", lambda file, size, at: read.append(size) or pread(file, size, at))
        assert log.begin(2, 990).steps == 10
        assert sum(read) < 75_000  # 64 KiB of it to find a torn tail
        assert steps_of(local) == [(step, 1) for step in range(1, 991)]
        for step in range(991, 1020):
            log.row(make_row(step, 2))
    assert reader.metrics() == read_metrics(local)
    assert [row["step"] for row in rows_past(local, 0)] == list(range(1, 1020))


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=8), st.integers(0, 100), st.booleans())
def test_the_end_of_a_log_says_what_all_of_it_does(
    generations: list[tuple[int, int]], past: int, is_local: bool
) -> None:
    """Whatever was taken back, and however many pieces it is in."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patched:
        patched.setattr(run_log, "TAIL_BYTES", 700)
        patched.setattr(run_log, "SEGMENT_BYTES", 700)
        storage, step = Storage.at(folder) if is_local else Counting.empty(), 0
        reader = LogReader(storage)
        with RunLog(storage, upload_every_s=1000) as log:
            for number, (back, on) in enumerate(generations, 1):
                step = max(0, step - back)
                log.begin(number, step)
                for _ in range(on):
                    step += 1
                    log.row(make_row(step, number))
                    log.flush()
                assert reader.metrics() == read_metrics(storage)
            rows = read_metrics(storage)
            assert newest_step(storage) == (rows[-1]["step"] if rows else 0)
            assert rows_past(storage, past) == [row for row in rows if row["step"] > past]


def test_events_are_in_the_order_in_which_they_were_written_though_a_clock_was_set_back(storage: Storage) -> None:
    """The newest `forming` is what a coordinator that is restarted goes on from: before, it took an older one."""
    for generation, clock in ((1, 5000.0), (2, 1000.0)):
        with RunLog(storage, claim=Claim.take(storage)) as log:
            log.event(Forming(generation=generation, time=clock))
    assert [event["generation"] for event in read_events(storage)] == [1, 2]
