"""What a process looks at before it joins: it says what its host lacks, and the others hear nothing of it."""

import errno
import shutil
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from regrow.config.schema import PretrainConfig, TrainConfig
from regrow.data.read.corpora import Corpora
from regrow.errors import ConfigError, DataError, ResumeError
from regrow.record.run_folder import RUN_FILE, write_record
from regrow.runtime import ready
from regrow.runtime.memory_tier import NO_ROOM_S, ROOM_S, may_wait
from regrow.runtime.ready import check_here
from regrow.storage import Storage
from support.corpus import write_rows
from support.counted import Counted

HOST = socket.gethostname()


@pytest.fixture
def job(tmp_path: Path) -> Any:
    """A run on a host that has everything."""
    write_rows(tmp_path / "corpus", num_rows=100)
    write_record(Storage.at(tmp_path / "run"), run_id="run", identity={}, manifest_sha256="")
    return SimpleNamespace(
        config=PretrainConfig(train=TrainConfig(validate_every_steps=0)),
        corpora=Corpora.at(tmp_path / "corpus"),
        folder=str(tmp_path / "run"),
        run_id="run",
    )


def test_a_host_that_has_corpus_and_run_folder_is_fit(job: Any) -> None:
    check_here(job)


def test_a_host_without_the_corpus_says_so_and_nobody_is_told_to_delete_it(job: Any, tmp_path: Path) -> None:
    _ = job.corpora.manifests  # as they came from the driver, which has read them
    shard = next((tmp_path / "corpus").glob("*.parquet"))
    shard.unlink()
    with pytest.raises(
        DataError, match=rf"on {HOST}: .*cannot be read here .*No such file.* mounted on this host"
    ) as error:
        check_here(job)
    assert "delete" not in str(error.value)
    shutil.rmtree(tmp_path / "corpus")
    with pytest.raises(DataError, match=rf"on {HOST}: .*cannot be read here .*No such file") as error:
        check_here(job)
    assert "delete" not in str(error.value)


def test_a_host_that_does_not_see_the_runs_folder_does_not_take_it_for_a_new_run(job: Any, tmp_path: Path) -> None:
    """It would have begun from the seed, had it become rank 0."""
    (tmp_path / "run" / RUN_FILE).unlink()
    with pytest.raises(ResumeError, match=rf"cannot be read on {HOST}: it has no {RUN_FILE} there; .* mounted there"):
        check_here(job)
    (tmp_path / "run" / RUN_FILE).mkdir()
    with pytest.raises(ResumeError, match=rf"cannot be read on {HOST}: .*Is a directory"):
        check_here(job)


def test_a_host_whose_own_disk_has_a_run_of_this_name_is_not_fit(job: Any, tmp_path: Path) -> None:
    """Its parts of checkpoints would be where no other host finds them."""
    write_record(Storage.at(tmp_path / "run"), run_id="old", identity={}, manifest_sha256="")
    with pytest.raises(ResumeError, match=rf"cannot be read on {HOST}: it has another run of this name there; is"):
        check_here(job)


def test_a_host_without_the_module_of_a_callback_says_so_before_it_joins(
    job: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before, a newcomer said so in the group, which had stopped for it."""
    job.config.train.callback = "nowhere:X"
    with pytest.raises(ConfigError, match=rf"on {HOST}: train.callback=nowhere:X: .*No module named 'nowhere'; name a"):
        check_here(job)
    assert "Traceback" not in capsys.readouterr().err
    job.config.train.callback = "support.counted:Other"
    with pytest.raises(
        ConfigError, match=rf"on {HOST}: train.callback=\S+: support.counted has no class 'Other'; name"
    ):
        check_here(job)


def test_a_callback_is_looked_up_before_a_process_joins_and_not_made(job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(Counted, "__init__", made.append)
    job.config.train.callback = "support.counted:Counted"
    check_here(job)
    assert made == []


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> list[OSError]:
    """What reads of rows and of the run's folder fail with, one each, the last first; none is left: they do not."""
    errors: list[OSError] = []

    def or_fails(works: Any) -> Any:
        def call(*of: Any, **more: Any) -> Any:
            if errors:
                raise errors.pop()
            return works(*of, **more)

        return call

    monkeypatch.setattr(ready, "read_record", or_fails(ready.read_record))
    monkeypatch.setattr(ready, "RETRY_S", 0.0)
    return errors


def test_storage_that_fails_for_a_while_is_waited_for(job: Any, failing: list[OSError]) -> None:
    """Soak seed 2459: it failed on all hosts; a healthy newcomer was ended three times, and its host quarantined."""
    told: list[str] = []
    failing += [OSError(errno.EIO, "Input/output error")] * 3
    check_here(job, told.append)
    assert failing == []
    assert [text.rpartition("cannot be read on ")[2].partition(":")[0] for text in told] == [HOST]


def test_storage_that_goes_on_failing_is_this_hosts_problem(job: Any, failing: list[OSError]) -> None:
    job.config.data.storage_timeout_s = 0.0
    failing += [OSError(errno.EIO, "Input/output error")] * 2
    with pytest.raises(ResumeError, match=f"on {HOST}: .*Input/output error"):
        check_here(job)


@pytest.mark.parametrize(
    ("problems", "known", "patience_s"),
    [
        (["", "", "full"], [True, True, False], -1.0),  # a newcomer
        (["", "", "full"], [True, True, True], ROOM_S),  # something takes the room of one node for a while
        (["full", "full", "full"], [True, True, True], NO_ROOM_S),  # and of all
        (["full", "full", "full"], [False, False, False], -1.0),  # at the start
        (["full", "full", "full"], [True, True, False], -1.0),
    ],
)
def test_a_group_waits_for_room_only_where_it_may_come(
    problems: list[str], known: list[bool], patience_s: float
) -> None:
    assert may_wait(problems, known, patience_s) == (patience_s > 0)
    assert not may_wait(problems, known, patience_s + 1.0)
