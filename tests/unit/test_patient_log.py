"""A log on a disk that takes nothing for a while: a limit of the operating system stands for a full one."""

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from regrow.record.events import Note
from regrow.record.log import METRIC_KEYS, RunLog, read_events, read_metrics
from regrow.runtime.patient_log import PatientLog
from regrow.storage import Storage


@contextmanager
def full_disk() -> Iterator[None]:
    """No file grows beyond what a line takes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


def a_row(step: int) -> dict[str, float]:
    return dict.fromkeys(METRIC_KEYS, 0.5) | {"generation": 1, "step": step}


def test_what_a_full_disk_does_not_take_is_written_once_there_is_room(tmp_path: Path) -> None:
    said: list[str] = []
    storage = Storage.at(str(tmp_path))
    log = PatientLog(RunLog(storage), said.append)
    log.begin(1, 0)
    log.row(a_row(1))
    with full_disk():
        log.row(a_row(2))
        log.event(Note(text="as the disk was full"))
        log.row(a_row(3))
        with pytest.raises(OSError, match=r"wrote|too large"):
            log.flush()
    assert [row["step"] for row in read_metrics(storage)] == [1]
    log.row(a_row(4))
    log.flush()
    log.close()
    assert [row["step"] for row in read_metrics(storage)] == [1, 2, 3, 4]
    assert [event["text"] for event in read_events(storage)] == ["as the disk was full"]
    assert len(said) == 2, said
    assert "cannot be written" in said[0]
    assert "again" in said[1]


def test_what_is_never_written_is_told_of(tmp_path: Path) -> None:
    said: list[str] = []
    log = PatientLog(RunLog(Storage.at(str(tmp_path))), said.append)
    log.begin(1, 0)
    with full_disk():
        log.row(a_row(1))
        log.row(a_row(2))
        with pytest.raises(OSError, match=r"wrote|too large"):
            log.close()
    assert said[-1] == "2 lines of the log were not written"
