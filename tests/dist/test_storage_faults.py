"""The coordinator, and ranks that read, on a file system that is full, read-only, failing, slow or hung for a while."""

import json
import os
import pickle
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
import torch
import torch.distributed as dist

from regrow.config.schema import CheckpointConfig, ClusterConfig, ObserveConfig, PretrainConfig
from regrow.control.membership import Member
from regrow.control.states import RowAnswer
from regrow.control.values import SnapshotAck, Version
from regrow.data.read.corpora import Corpora
from regrow.data.read.outage import Patience, PatientReader
from regrow.data.read.shards import ShardReader
from regrow.drill.breakable import KINDS
from regrow.drill.hosts import why_impossible
from regrow.errors import DataError, GroupOver, UnavailableError
from regrow.record.log import METRIC_KEYS, read_events, read_metrics
from regrow.runtime import log_writer, shell
from regrow.runtime.actor import Coordinator
from regrow.runtime.keeper import KeeperInfo
from regrow.runtime.restore import restore
from regrow.state.entries import Progress
from regrow.storage import Storage
from regrow.train.validation import Validation
from support.actors import Handle
from support.breaking import Mounted
from support.corpus import write_corpus

pytestmark = [
    pytest.mark.skipif(bool(why_impossible()), reason=f"no breakable file system: {why_impossible()}"),
    pytest.mark.timeout(300),
]
SLOW_S = 1.0


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Mounted]:
    made = Mounted(tmp_path)
    yield made
    made.close()


class Keeper:
    """A node's, which writes no checkpoints."""

    def __init__(self) -> None:
        self.info = KeeperInfo("node", "node", "/dev/shm/node", ("node", 1), Version(), ())

    def __getattr__(self, name: str) -> Callable[..., Any]:
        answer: Any = Future() if name == "write" else [] if name in ("pulses", "where", "gpus", "holdings") else None
        return lambda *arguments: answer


def until(condition: Callable[[], Any], patience_s: float = 60.0) -> Any:
    give_up_at = time.monotonic() + patience_s
    while not (found := condition()):
        assert time.monotonic() < give_up_at
        time.sleep(0.02)
    return found


def form(made: Coordinator, pid: int) -> int:
    """A group of one worker that trains from the next step."""
    after = made.ready()
    made.join(Member(f"m{pid}", "node", "127.0.0.1", after + 1, pid), 1)  # another port after each group
    answer = until(lambda: found if (found := made.formation(f"m{pid}", after)).seat else None)
    generation: int = answer.seat.generation
    return generation


def begin(made: Coordinator, generation: int, step: int) -> None:
    made.start_training(generation, step, {"workers": [{"node": "node"}]})


def row(generation: int, step: int) -> dict[str, Any]:
    return dict.fromkeys(METRIC_KEYS, 0.01) | {"generation": generation, "step": step, "batch_digest": 1}


def coordinator(folder: Path) -> Coordinator:
    return Coordinator(
        str(folder),
        "run",
        checkpoints="checkpoints",
        config=PretrainConfig(
            cluster=ClusterConfig(max_workers=8, wait_for_workers_s=600),
            checkpoint=CheckpointConfig(every_steps=1000, keep=2),
            observe=ObserveConfig(tensorboard=True, metrics=False),
        ),
        submitted={},
    )


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of TensorBoard's own thread
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_without_its_folder_and_nothing_of_its_log_is_missing_afterwards(
    kind: str, mounted: Mounted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps, a death and the next group, and a checkpoint that is asked for; two lines say that storage was away."""
    monkeypatch.setattr(log_writer, "LATE_S", 0.5)
    monkeypatch.setattr(log_writer, "RETRY_S", 0.1)
    monkeypatch.setattr(shell, "KEEPERS_S", 0.5)
    made, keeper = coordinator(mounted.folder), Keeper()
    made.register_keeper(Handle(keeper), keeper.info)
    first = form(made, 1)
    begin(made, first, 0)
    for step in range(1, 11):
        made.row(first, row(first, step))
    until(lambda: len(read_metrics(Storage.at(mounted.real))) == 10)

    mounted.breaks(kind=kind, delay_s=SLOW_S)
    longest_s = 0.0

    def timed(call: Callable[..., Any], *arguments: Any) -> Any:
        nonlocal longest_s
        begun = time.monotonic()
        found = call(*arguments)
        longest_s = max(longest_s, time.monotonic() - begun)
        return found

    for step in range(11, 16):
        assert timed(made.row, first, row(first, step)) == RowAnswer()
    timed(made.ray_view, [("node", 1, "worker_died", "gone")], 0, {}, {})
    second = form(made, 2)
    assert second == first + 1
    timed(begin, made, second, 13)
    for step in range(14, 21):
        assert timed(made.row, second, row(second, step)) == RowAnswer()
    timed(made.snapshots_sealed, [SnapshotAck("node", Version(second, 20), ())])
    timed(made.want_checkpoint, second, 20)
    assert made.updates(0)[1] == "", "the run goes on"
    assert longest_s < 1.0, "no call waits for storage"
    away = until(lambda: [line for line in notes(made) if "cannot be written" in line])
    assert "training goes on, the log is kept in memory" in away[0]

    mounted.breaks()
    until(lambda: [line for line in notes(made) if "can be written again" in line])
    made.shell.close()
    made.lock.close()  # type: ignore[union-attr]
    storage = Storage.at(mounted.real)
    found = [(each["step"], each["generation"]) for each in read_metrics(storage)]
    assert found == [(step, first) for step in range(1, 14)] + [(step, second) for step in range(14, 21)]
    events = read_events(storage)
    names = [each["event"] for each in events if each["event"] not in ("note", "submitted")]
    wanted = ["forming", "generation", "failure", "forming", "rollback", "generation"]
    assert [name for name in names if name in wanted] == wanted
    (rollback,) = [each for each in events if each["event"] == "rollback"]
    assert (rollback["from_step"], rollback["to_step"], rollback["steps"]) == (15, 13, 2)
    told = [each["text"] for each in events if each["event"] == "note" and "run folder" in each["text"]]
    assert ["cannot" in told[0], "again" in told[-1], len(told)] == [True, True, 2]
    lines = [line for line in (mounted.real / "events.jsonl").read_bytes().splitlines() if line]
    assert all(json.loads(line) for line in lines)
    assert len(set(lines)) == len(lines)


def notes(made: Coordinator) -> list[str]:
    return [update.content["text"] for update in made.updates(0)[0] if update.content.get("event") == "note"]


def test_a_full_folder_keeps_the_status_of_its_owner(mounted: Mounted) -> None:
    """What is asked of such a folder from outside is answered meanwhile."""
    made = coordinator(mounted.folder)
    made.shell.close()
    mounted.breaks(kind="full")
    assert os.listdir(mounted.folder)
    assert [event["event"] for event in read_events(Storage.at(mounted.folder))] == ["submitted"]


@pytest.fixture
def data(mounted: Mounted) -> Corpora:
    """A corpus on such a file system, as the driver hands it to ranks: its manifest was read."""
    rows = np.arange(64 * 9, dtype=np.uint32).reshape(64, 9)
    write_corpus(mounted.real / "corpus", rows, rows_per_group=8, rows_per_shard=64, validation=rows[:12])
    return pickle.loads(pickle.dumps(known(Corpora.at(mounted.folder / "corpus"))))


def known(corpora: Corpora) -> Corpora:
    assert corpora.manifests
    return corpora


@pytest.mark.parametrize("kind", ["failing", "hung"])
def test_a_group_that_forms_while_storage_fails_opens_the_corpus_and_waits_for_its_rows(
    kind: str, mounted: Mounted, data: Corpora
) -> None:
    """A worker that died in an outage ended the run: the next group could not open what the last one had read."""
    wanted, told = np.arange(64)[::-3], list[str]()
    expected = ShardReader(mounted.real / "corpus", "train").read(wanted)
    mounted.breaks(kind=kind, delay_s=0.0)
    config = PretrainConfig()
    config.data.seq_len = 8
    waits: list[str] = []

    @contextmanager
    def waiting() -> Iterator[None]:
        """As a heartbeat's phase: without it the rank would be taken for hung."""
        waits.append("begun")
        yield
        waits.append("over")

    patience = Patience(60.0, told.append, waiting=waiting)
    validation = Validation(config, data, device=torch.device("cpu"), unit=0, num_units=1, patience=patience)
    reader, rows = PatientReader(data.reader("train"), patience), Future()
    Thread(target=lambda: rows.set_result(reader.read(wanted)), daemon=True).start()
    if kind == "failing":
        until(lambda: told)
        assert "cannot be read here" in told[0]
    assert not rows.done()
    mounted.breaks(kind="", delay_s=0.0)
    assert np.array_equal(rows.result(60), expected)
    assert len(told) == (kind == "failing")
    assert waits == (["begun", "over"] if kind == "failing" else [])
    assert torch.cat(validation.batches).shape[1] == 9


def test_a_group_has_its_state_from_memory_while_storage_hangs_where_its_first_rank_is(
    mounted: Mounted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "get", lambda reference, timeout: reference.future().result(timeout))
    job = SimpleNamespace(
        coordinator=Handle(coordinator(mounted.folder)),
        checkpoints=str(mounted.folder / "checkpoints"),
        config=PretrainConfig(),
    )
    memory = SimpleNamespace(
        restore=lambda entries, place, at_least: Progress(7) if at_least == 0 else None,
        phase=lambda phase: nullcontext(),
    )
    found: Future[Any] = Future()

    def restore_alone() -> None:
        found.set_result(restore(job, 2, None, [], None, None, memory))  # type: ignore[arg-type]

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mounted.breaks(kind="hung", delay_s=0.0)
        Thread(target=restore_alone, daemon=True).start()
        assert found.result(60) == (Progress(7), "snapshot")
    finally:
        mounted.breaks(kind="", delay_s=0.0)
        dist.destroy_process_group()


def test_a_rank_does_not_wait_for_storage_in_a_group_that_is_over(mounted: Mounted, data: Corpora) -> None:
    mounted.breaks(kind="failing", delay_s=0.0)
    told: list[str] = []
    reader = PatientReader(data.reader("train"), Patience(600.0, told.append, is_over=lambda: bool(told)))
    with pytest.raises(GroupOver):
        reader.read(np.arange(4))


def test_a_rank_gives_up_on_storage_that_goes_on_failing_and_at_once_on_rows_that_are_not_there(
    mounted: Mounted, data: Corpora
) -> None:
    mounted.breaks(kind="failing", delay_s=0.0)
    with pytest.raises(UnavailableError, match="row group 0 cannot be read here"):
        PatientReader(data.reader("train"), Patience(0.0)).read(np.arange(4))
    mounted.breaks(kind="", delay_s=0.0)
    next((mounted.real / "corpus").glob("train*.parquet")).unlink()
    with pytest.raises(DataError, match="No such file") as error:
        PatientReader(data.reader("train"), Patience(600.0)).read(np.arange(4))
    assert not isinstance(error.value, UnavailableError)
