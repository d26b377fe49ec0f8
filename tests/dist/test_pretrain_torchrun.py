"""jobs.pretrain_torchrun: the same run under torchrun and in one process, without Ray or Hydra."""

import contextlib
import datetime
import errno
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from jobs import pretrain_torchrun
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _set_pg_timeout as set_timeout

from regrow.config.plain import pretrain_config
from regrow.data.read.corpora import Corpora, find_corpora
from regrow.data.read.manifest import Manifest
from regrow.data.read.outage import PatientReader
from regrow.errors import ConfigError, DataError, RegrowError, ResumeError, UnavailableError
from regrow.parallel.fsdp import groups_of
from regrow.record import events, lock
from regrow.record.claim import Claim
from regrow.record.log import RunLog, read_events, read_metrics
from regrow.runtime import opened, torchrun
from regrow.runtime.torchrun import TorchrunRun, for_this_group
from regrow.show.console import Console
from regrow.state.disk.catalog import committed_steps, open_checkpoint
from regrow.state.entries import Progress
from regrow.storage import Storage
from regrow.train.build import build_step
from regrow.train.step import TrainStep
from support.corpus import write_corpus
from support.gloo import run_ranks
from support.s3 import s3_server

ROOT = Path(__file__).parents[2]
STEPS, SEQ_LEN, VOCAB = 12, 32, 512
SMALL = [
    "model.dim=64",
    "model.num_layers=2",
    "model.num_heads=4",
    "model.num_kv_heads=2",
    "model.ffn_dim=160",
    f"model.vocab_size={VOCAB}",
    f"data.vocab_size={VOCAB}",
    f"data.seq_len={SEQ_LEN}",
    f"train.steps={STEPS}",
    "train.validate_every_steps=6",
    "train.validation_seqs=12",
    "checkpoint.every_steps=4",
    "observe.peak_tflops=1",
]
# a finder that refuses what the door is to do without; and a rank that reaches the interpreter's finalization aborts,
# as gloo's threads do there now and then
WITHOUT = """
import atexit, os, sys
if "RANK" in os.environ:
    atexit.register(os.abort)
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("ray", "hydra", "omegaconf"):
            raise ImportError(f"{name} is not to be imported here")
sys.meta_path.insert(0, Refuse())
"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus") / "rows"
    rng = np.random.default_rng(0)
    rows = (np.cumsum(rng.integers(0, 3, (400, SEQ_LEN + 1)), axis=1) % VOCAB).astype(np.uint32)
    write_corpus(folder, rows[:360], rows_per_group=8, rows_per_shard=120, vocab_size=VOCAB, validation=rows[360:])
    return folder


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(WITHOUT)
    paths = [str(tmp_path / "site"), str(ROOT / "platform"), os.environ.get("PYTHONPATH", "")]
    clean = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return clean | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}


def pretrain(
    environment: dict[str, str], storage: Path | str, name: str, *settings: str, ranks: int = 1
) -> subprocess.CompletedProcess[str]:
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"] if ranks > 1 else []
    command = [sys.executable, "-m", *launcher, "jobs.pretrain_torchrun"]
    return subprocess.run(
        [*command, f"run.storage_path={storage}", f"run.name={name}", *SMALL, *settings],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )


def succeed(environment: dict[str, str], storage: Path, name: str, *settings: str, ranks: int = 1) -> list[dict]:
    done = pretrain(environment, storage, name, *settings, ranks=ranks)
    assert done.returncode == 0, done.stdout + done.stderr
    return read_metrics(Storage.at(storage / name))


def losses(rows: Sequence[dict]) -> list[float]:
    return [row["loss"] for row in rows]


def test_one_process_and_ranks_of_torchrun_train_the_same_run_and_go_on_with_each_others(
    environment: dict[str, str], tmp_path: Path, corpus: Path
) -> None:
    rows = f"data.corpora.rows={corpus}"
    alone = succeed(environment, tmp_path, "alone", rows)
    assert [row["step"] for row in alone] == list(range(1, STEPS + 1))
    assert losses(alone)[-1] < losses(alone)[0]
    assert [row["step"] for row in alone if "validation_loss" in row] == [6, 12]
    first = succeed(environment, tmp_path, "both", rows, "train.stop_at_step=5", ranks=2)
    assert len(first) == 5
    both = succeed(environment, tmp_path, "both", rows)  # by another number of ranks
    assert [row["batch_digest"] for row in both] == [row["batch_digest"] for row in alone]
    assert losses(both) == pytest.approx(losses(alone), abs=1e-5)
    events = read_events(Storage.at(tmp_path / "both"))
    begun = [(e["cause"], e["source"], e["start_step"], e["world_size"]) for e in events if e["event"] == "generation"]
    assert begun == [("start", "seed", 0, 2), ("resume", "checkpoint", 5, 1)]
    assert [event["reason"] for event in events if event["event"] == "stopped"] == ["stop_at_step", "finished"]
    assert sorted(path.name for path in (tmp_path / "both/checkpoints").iterdir()) == ["step-00000008", "step-00000012"]


@pytest.mark.long
def test_a_run_goes_on_between_pipelines_and_one_process_with_the_same_losses(
    environment: dict[str, str], tmp_path: Path, corpus: Path
) -> None:
    settings = [f"data.corpora.rows={corpus}", "model.num_layers=4"]
    alone = succeed(environment, tmp_path, "alone", *settings)
    succeed(environment, tmp_path, "both", *settings, "parallel.pp=2", "train.stop_at_step=5", ranks=2)
    succeed(environment, tmp_path, "both", *settings, "train.stop_at_step=7")
    interleaved = ["parallel.pp=2", "parallel.schedule=interleaved"]
    both = succeed(environment, tmp_path, "both", *settings, *interleaved, ranks=4)
    assert [row["batch_digest"] for row in both] == [row["batch_digest"] for row in alone]
    assert losses(both) == pytest.approx(losses(alone), abs=1e-5)
    validated = [[row["validation_loss"] for row in rows if row["step"] == 12] for rows in (both, alone)]
    assert validated[0] == pytest.approx(validated[1], abs=1e-5)
    begun = [e for e in read_events(Storage.at(tmp_path / "both")) if e["event"] == "generation"]
    assert [(e["start_step"], e["axes"]) for e in begun] == [
        (0, axes(pp=2)),
        (5, axes()),
        (7, axes(pp=2, dp_shard=2)),
    ]


@pytest.mark.long
def test_a_run_goes_on_between_ranks_that_share_rows_and_one_process_with_the_same_losses(
    environment: dict[str, str], tmp_path: Path, corpus: Path
) -> None:
    settings = [f"data.corpora.rows={corpus}", "model.document_attention=true", "cluster.verify_every_steps=2"]
    alone = succeed(environment, tmp_path, "alone", *settings)
    succeed(environment, tmp_path, "both", *settings, "parallel.cp=2", "train.stop_at_step=5", ranks=2)
    succeed(environment, tmp_path, "both", *settings, "train.stop_at_step=7")
    both = succeed(environment, tmp_path, "both", *settings, "parallel.cp=2", ranks=4)
    assert [row["batch_digest"] for row in both] == [row["batch_digest"] for row in alone]
    assert losses(both) == pytest.approx(losses(alone), abs=1e-5)
    validated = [[row["validation_loss"] for row in rows if row["step"] == 12] for rows in (both, alone)]
    assert validated[0] == pytest.approx(validated[1], abs=1e-5)
    events = read_events(Storage.at(tmp_path / "both"))
    begun = [(event["start_step"], event["axes"]) for event in events if event["event"] == "generation"]
    assert begun == [(0, axes(cp=2)), (5, axes()), (7, axes(dp_shard=2, cp=2))]
    assert not [event for event in events if "computes wrong" in str(event.get("text"))]


def axes(**sizes: int) -> dict[str, int]:
    return dict.fromkeys(("pp", "dp_replicate", "dp_shard", "cp", "tp"), 1) | sizes


FLOAT8_FIRST = ["parallel.float8=tensorwise", "parallel.bfloat16_tail=0.5", "parallel.dtype=bfloat16"]


def test_a_run_with_float8_goes_on_in_bfloat16_for_its_last_steps(
    environment: dict[str, str], tmp_path: Path, corpus: Path
) -> None:
    rows = succeed(environment, tmp_path, "tail", f"data.corpora.rows={corpus}", *FLOAT8_FIRST)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    begun = [e["start_step"] for e in read_events(Storage.at(tmp_path / "tail")) if e["event"] == "generation"]
    assert begun == [0, 6]


def test_a_run_with_float8_keeps_the_rows_of_all_its_steps_in_an_object_store(corpus: Path) -> None:
    """Before, the rows in bfloat16 were written over those in float8: both were segment 0 of one generation."""
    with s3_server() as bucket:
        servers = {key: value for key, value in os.environ.items() if key.startswith("AWS_")}
        run = train_alone(f"{bucket}/runs", "tail", f"data.corpora.rows={corpus}", *FLOAT8_FIRST, env=servers)
        assert [row["step"] for row in read_metrics(run)] == list(range(1, STEPS + 1))
        begun = [event for event in read_events(run) if event["event"] == "generation"]
        assert [(each["generation"], each["cause"]) for each in begun] == [(1, "start"), (2, "end_of_float8")]


def test_a_run_that_goes_back_to_before_the_end_of_float8_trains_those_steps_in_float8(
    tmp_path: Path, corpus: Path
) -> None:
    settings = [f"data.corpora.rows={corpus}", "checkpoint.every_steps=3", *FLOAT8_FIRST]
    train_alone(tmp_path, "back", *settings, "train.stop_at_step=6")
    (data, *_) = (tmp_path / "back/checkpoints/step-00000006").glob("*.safetensors")
    content = bytearray(data.read_bytes())
    content[-100] ^= 1
    data.write_bytes(content)
    run = train_alone(tmp_path, "back", *settings)
    assert [e["start_step"] for e in read_events(run) if e["event"] == "generation"] == [0, 3, 6]


def train_alone(storage: Path | str, name: str, *settings: str, env: dict[str, str] | None = None) -> Storage:
    """A run on one rank, as `succeed` but in a process that has torch loaded; its folder."""
    arguments = [f"run.storage_path={storage}", f"run.name={name}", *SMALL, *settings]
    run_ranks(train_in_this_group, 1, arguments, env=env)
    return Storage.at(f"{storage}/{name}")


def test_a_run_goes_on_from_the_newest_state_that_is_known_to_be_right(tmp_path: Path, corpus: Path) -> None:
    """Before, from the newest checkpoint: which units computed wrong was looked at with Ray alone."""
    arguments = [f"run.storage_path={tmp_path}", "run.name=wrong", f"data.corpora.rows={corpus}", *SMALL]
    run_ranks(train_in_this_group, 1, [*arguments, "train.stop_at_step=10", "checkpoint.keep=3"])
    run = Storage.at(tmp_path / "wrong")
    log = RunLog(run)
    log.event(events.Corruption(step=11, units=[1], ranks=[1], nodes=["b"], verified_step=7))
    log.close()
    run_ranks(train_in_this_group, 1, arguments)
    begun = [event["start_step"] for event in read_events(run) if event["event"] == "generation"]
    assert begun == [0, 4]
    assert [row["step"] for row in read_metrics(run)] == list(range(1, STEPS + 1))


def test_a_run_goes_on_with_the_losses_of_one_that_was_not_stopped_where_float8_is_gathered(
    tmp_path: Path, corpus: Path
) -> None:
    """Its first step was with the scales of the weights that a run begins with, which clip what was trained since."""
    settings = [*SMALL, f"run.storage_path={tmp_path}", f"data.corpora.rows={corpus}", "optim.lr=0.03"]
    float8 = ["parallel.dtype=bfloat16", "parallel.float8=tensorwise_all_gather", "parallel.bfloat16_tail=0"]
    for run in (["run.name=whole"], ["run.name=stopped", "train.stop_at_step=8"], ["run.name=stopped"]):
        run_ranks(train_in_this_group, 1, [*settings, *float8, *run])
    whole, stopped = (losses(read_metrics(Storage.at(tmp_path / name))) for name in ("whole", "stopped"))
    assert len(whole) == STEPS
    assert stopped == whole


def test_a_callback_that_a_job_leaves_out_comes_back_without_the_state_of_before(tmp_path: Path, corpus: Path) -> None:
    """Before, with that of the steps before the job without it."""
    rows, name = f"data.corpora.rows={corpus}", "train.callback=support.counted:Counted"
    kept = []
    for stop, callback in ((4, [name]), (6, []), (8, [name])):
        run = train_alone(tmp_path, "counted", rows, f"train.stop_at_step={stop}", *callback)
        kept.append(Progress.of(open_checkpoint(run / "checkpoints", stop).scalars).user)
    assert [each.get("steps") for each in kept] == [4, None, 2]
    assert kept[1] == {}
    notes = [event["text"] for event in read_events(run) if event["event"] == "note"]
    assert notes == ["train.callback=null: the state of support.counted:Counted is not kept any longer"]


def test_a_phase_is_let_go_of_before_the_next_one_is_built(tmp_path: Path, corpus: Path) -> None:
    assert run_ranks(phases, 1, [*SMALL, f"run.storage_path={tmp_path}", f"data.corpora.rows={corpus}"]) == [[0, 0]]


def phases(arguments: list[str]) -> list[int]:
    """How many steps of earlier phases there are when each phase's is built."""
    built: list[weakref.ref[TrainStep]] = []
    found = []

    def counted(*args: Any, **kwargs: Any) -> TrainStep:
        found.append(sum(each() is not None for each in built))
        step = build_step(*args, **kwargs)
        built.append(weakref.ref(step))
        return step

    pretrain_torchrun.build_step = counted
    float8 = ["parallel.float8=tensorwise", "parallel.bfloat16_tail=0.5", "parallel.dtype=bfloat16"]
    train_in_this_group([*arguments, *float8])
    return found


def train_in_this_group(arguments: list[str]) -> str:
    """As `main`, on ranks that have a group; what this one prints."""
    config, printed = for_this_group(pretrain_config(arguments), torch.device("cpu")), io.StringIO()
    with Console(printed) as console:
        run = TorchrunRun(config, console)
        while not run.is_over(progress := pretrain_torchrun.train_phase(config, run, torch.device("cpu"))):
            pass
        run.close(progress)
    return printed.getvalue()


def test_what_is_left_out_of_a_corpus_is_said_and_is_in_the_log(tmp_path: Path, corpus: Path) -> None:
    torn = shutil.copytree(corpus, tmp_path / "torn")
    replace(Manifest.load(torn), damaged={"1.parquet[0:60]": "no footer", "2.parquet": "cut short"}).save(torn)
    arguments = [f"run.storage_path={tmp_path}", f"data.corpora.rows={torn}", *SMALL, "train.stop_at_step=1"]
    (printed,) = run_ranks(train_in_this_group, 1, arguments)
    (note,) = [event for event in read_events(Storage.at(tmp_path) / "debug") if event["event"] == "note"]
    assert note["text"] == (
        "rows: 2 pieces of its source could not be read and are left out, the first: 1.parquet[0:60]: no footer; "
        f"python -m jobs.inspect_data {torn} names them"
    )
    assert note["text"] in printed


@pytest.mark.parametrize("axes", [["parallel.tp=2"], ["parallel.cp=2"], ["parallel.pp=2"], ["parallel.dp_replicate=2"]])
def test_no_group_of_a_mesh_waits_longer_than_collectives_may_take(
    tmp_path: Path, corpus: Path, axes: list[str]
) -> None:
    arguments = [f"run.storage_path={tmp_path}", f"data.corpora.rows={corpus}", "train.collective_timeout_s=77", *SMALL]
    assert run_ranks(timeouts_of_groups, 4, [*arguments, "train.stop_at_step=1", *axes]) == [{77.0}] * 4


def timeouts_of_groups(arguments: list[str]) -> set[float]:
    """Seconds, of all groups that training goes over."""
    found: set[float] = set()
    begin = TorchrunRun.begin

    def look(run: TorchrunRun, step: TrainStep, mesh: DeviceMesh, *rest: Any) -> None:
        groups = [*groups_of(mesh), *(step.pipeline._groups.values() if step.pipeline else ())]
        found.update(each._get_backend(torch.device("cpu")).options._timeout.total_seconds() for each in groups)
        begin(run, step, mesh, *rest)

    TorchrunRun.begin = look
    train_in_this_group(arguments)
    return found


@pytest.mark.parametrize(
    ("asked", "told"),
    [(0, "torchrun ends the ranks after its --shutdown-timeout"), (1, "interrupted by a signal to rank 1: step ")],
)
def test_a_rank_that_is_asked_to_stop_stops_all_and_the_first_one_says_so(
    tmp_path: Path, corpus: Path, asked: int, told: str
) -> None:
    arguments = [f"run.storage_path={tmp_path}", "run.name=stop", f"data.corpora.rows={corpus}", *SMALL]
    printed = run_ranks(train_until_asked, 2, asked, arguments, env={"TORCHELASTIC_RUN_ID": "none"})
    assert told in printed[0]
    run = Storage.at(tmp_path / "stop")
    stopped = [(each["reason"], each["step"]) for each in read_events(run) if each["event"] == "stopped"]
    assert stopped == [("interrupted", committed_steps(run / "checkpoints")[0])]


def train_until_asked(asked: int, arguments: list[str]) -> str:
    """One rank gets a signal after the second step."""
    step_done = TorchrunRun.step_done

    def ask(run: TorchrunRun, row: dict[str, float]) -> None:
        step_done(run, row)
        if run.rank == asked and row["step"] == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    TorchrunRun.step_done = ask
    return train_in_this_group(arguments)


def test_a_log_that_storage_does_not_take_costs_one_checkpoint_and_no_run(tmp_path: Path, corpus: Path) -> None:
    arguments = [f"run.storage_path={tmp_path}", "run.name=away", f"data.corpora.rows={corpus}", *SMALL]
    run_ranks(train_without_a_flush, 2, arguments)
    run = Storage.at(tmp_path / "away")
    assert [row["step"] for row in read_metrics(run)] == list(range(1, STEPS + 1))
    events = read_events(run)
    assert [event["step"] for event in events if event["event"] == "checkpoint_failed"] == [4]
    assert [event["step"] for event in events if event["event"] == "checkpoint"] == [8, 12]
    assert sorted(committed_steps(run / "checkpoints")) == [8, 12]


def train_without_a_flush(arguments: list[str]) -> None:
    """The log's first flush fails, as it does while storage is away: the one before the first checkpoint's commit."""
    flush, failed = RunLog.flush, []

    def away(self: RunLog) -> None:
        if not failed:
            failed.append("flush")
            raise OSError("503 Slow Down")
        flush(self)

    RunLog.flush = away
    train_in_this_group(arguments)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["checkpoint.every_minutes=30"],
            "checkpoint.every_minutes=30: without Ray checkpoints come by steps alone; leave it out, and set",
        ),
        (["train.callback=nowhere:X"], "train.callback=nowhere:X: its import raised ModuleNotFoundError: No module"),
        (["train.stesp=3"], "unknown setting 'train.stesp'; did you mean 'train.steps'?"),
        pytest.param(["data.corpora.rows=/nowhere"], "/nowhere holds no finished corpus", marks=pytest.mark.long),
        pytest.param(
            ["parallel.pp=2"], "cluster.max_workers=1 must be a multiple of parallel.pp=2", marks=pytest.mark.long
        ),
        pytest.param(
            ["parallel.cp=2"], "cluster.max_workers=1 must be a multiple of parallel.cp=2", marks=pytest.mark.long
        ),
        pytest.param(
            ["optim.global_batch_seqs=480"], "global_batch_seqs=480; lower it to at most 360", marks=pytest.mark.long
        ),
    ],
)
def test_a_mistake_is_one_line(
    environment: dict[str, str], tmp_path: Path, corpus: Path, settings: list[str], message: str
) -> None:
    done = pretrain(environment, tmp_path, "wrong", f"data.corpora.rows={corpus}", *settings)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "wrong").exists()


def test_a_rank_that_waits_for_storage_says_so_and_gives_up_before_the_others_give_it_up(
    tmp_path: Path, corpus: Path
) -> None:
    arguments = [f"run.storage_path={tmp_path}", "run.name=rows", f"data.corpora.rows={corpus}", *SMALL]
    arguments += ["train.collective_timeout_s=100", "data.storage_timeout_s=900"]
    told = run_ranks(train_with_an_outage, 2, arguments)
    assert [patience_s for _, patience_s in told] == [80.0, 80.0]
    waits = "rank 1 waits for rows that storage does not give: 503 Slow Down"
    assert [waits in printed for printed, _ in told] == [False, True]


def train_with_an_outage(arguments: list[str]) -> tuple[str, float]:
    """Storage fails rank 1's first read; what this rank prints, and how long it would have waited."""
    train_rows, found = TorchrunRun.train_rows, []

    def failing_once(run: TorchrunRun) -> PatientReader:
        found.append(run.patience.timeout_s)
        reader = train_rows(run)
        read, failed = reader._reader.read, []

        def away(row_ids: Any) -> Any:
            if run.rank == 1 and not failed:
                failed.append(True)
                raise UnavailableError("503 Slow Down")
            return read(row_ids)

        reader._reader.read = away
        return reader

    TorchrunRun.train_rows = failing_once
    return train_in_this_group(arguments), found[0]


def test_what_there_is_only_with_ray_is_refused_and_not_advised() -> None:
    wrong = ["observe.profile_at_step=3", "checkpoint.every_steps=null", "parallel.compile_cache=s3://me:word@b/x"]
    told = run_ranks(refusals, 1, [[each] for each in [*wrong, "cluster.backend=asynchronous"]])[0]
    assert told[0] == "observe.profile_at_step=3: without Ray no profile is taken; leave it out"
    assert told[1] == "checkpoint.every_steps=null leaves only the checkpoint at the end; set checkpoint.every_steps"
    assert told[2].startswith("parallel.compile_cache: without Ray nothing compiled is fetched or kept; leave it out")
    assert "word" not in told[2]  # before, each rank printed it
    assert told[3] == "cluster.backend=asynchronous: without Ray collectives on CPUs are gloo's; leave it out"


def refusals(wrong: list[list[str]]) -> list[str]:
    told = []
    for arguments in wrong:
        with pytest.raises(ConfigError) as refused:
            for_this_group(pretrain_config(arguments), torch.device("cpu"))
        told.append(str(refused.value))
    return told


def test_gradients_that_are_not_finite_end_a_run_in_one_line_and_its_log_has_why(
    environment: dict[str, str], tmp_path: Path, corpus: Path
) -> None:
    settings = [f"data.corpora.rows={corpus}", "optim.lr=1e30", "train.nonfinite_skips=0"]
    done = pretrain(environment, tmp_path, "nan", *settings)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    events = read_events(Storage.at(tmp_path / "nan"))
    failure, stopped = (next(each for each in events if each["event"] == name) for name in ("failure", "stopped"))
    assert (failure["cause"], failure["generation"], stopped["reason"]) == ("nonfinite", 1, "failed")
    assert stopped["detail"].startswith(f"{failure['detail']}; look at the loss before it (python -m jobs.report ")
    assert f"error: {stopped['detail']}" in done.stderr


RAISES = """
class Raises:
    def after_step(self, row):
        if row["step"] == 3:
            raise KeyError("third")
    def state(self):
        return {}
"""


def test_what_a_callback_raises_ends_a_run_in_one_line_after_its_traceback(
    environment: dict[str, str], tmp_path: Path, corpus: Path
) -> None:
    (tmp_path / "site" / "raises.py").write_text(RAISES)
    settings = [f"data.corpora.rows={corpus}", "train.callback=raises:Raises"]
    done = pretrain(environment, tmp_path, "raises", *settings, ranks=2)
    assert done.returncode == 1
    line = "train.callback=raises:Raises: after_step raised KeyError: 'third'"
    assert f"\nerror: {line}\n" in done.stderr
    assert 'raise KeyError("third")' in done.stderr
    (stopped,) = (each for each in read_events(Storage.at(tmp_path / "raises")) if each["event"] == "stopped")
    assert (stopped["reason"], stopped["detail"]) == ("failed", line)


RAISES_ALONE = """
import os, time
import torch.distributed as dist
class Raises:
    def after_step(self, row):
        if row["step"] == 3 and os.environ["RANK"] == "1":
            dist.destroy_process_group = lambda: time.sleep(600)
            raise KeyError("third")
    def state(self):
        return {}
"""


def test_a_rank_that_fails_alone_says_why_and_ends_though_its_group_cannot_be_destroyed(
    environment: dict[str, str], tmp_path: Path, corpus: Path
) -> None:
    """NCCL's waits for peers that are in a collective: before, so did the rank that they wait for, without a word."""
    (tmp_path / "site" / "alone.py").write_text(RAISES_ALONE)
    settings = [f"data.corpora.rows={corpus}", "train.callback=alone:Raises"]
    done = pretrain(environment, tmp_path, "alone", *settings, ranks=2)
    assert done.returncode == 1
    assert "\nerror: train.callback=alone:Raises: after_step raised KeyError: 'third'\n" in done.stderr


@pytest.mark.parametrize(
    ("raised", "status", "said"),
    [
        ("", 0, ""),
        ("raise KeyboardInterrupt", 130, ""),
        ("raise SystemExit(7)", 7, ""),
        ("raise ConfigError('a line')", 1, "error: a line\n"),
        ("raise KeyError('third')", 1, "KeyError: 'third'\n"),
    ],
)
def test_a_rank_ends_at_once_and_destroys_its_group_only_where_it_succeeds(raised: str, status: int, said: str) -> None:
    program = f"""
import atexit
import torch.distributed as dist
from regrow.errors import ConfigError
from regrow.runtime.torchrun import process_group, program_of_a_rank
atexit.register(print, "finalized")
destroy = dist.destroy_process_group
dist.destroy_process_group = lambda: (print("destroyed"), destroy())
with program_of_a_rank(), process_group(60.0):
    {raised or "pass"}
"""
    clean = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    done = subprocess.run([sys.executable, "-c", program], env=clean, capture_output=True, text=True, timeout=280)
    assert (done.returncode, done.stdout) == (status, "" if raised else "destroyed\n"), done.stderr
    assert done.stderr.endswith(said)


def test_an_error_that_ends_a_run_is_in_its_log(tmp_path: Path, corpus: Path) -> None:
    """Before, the next job took the end for a death: `driver_died`."""
    arguments = [f"run.storage_path={tmp_path}", "run.name=error", f"data.corpora.rows={corpus}", *SMALL]
    assert run_ranks(train_on_damaged_rows, 2, arguments) == ["rank 0: row 3 is damaged", "rank 1: row 3 is damaged"]
    run = Storage.at(tmp_path / "error")
    (stopped,) = (each for each in read_events(run) if each["event"] == "stopped")
    assert (stopped["reason"], stopped["step"], stopped["detail"]) == ("failed", 0, "rank 0: row 3 is damaged")


def train_on_damaged_rows(arguments: list[str]) -> str:
    def damaged(run: TorchrunRun) -> PatientReader:
        raise DataError(f"rank {run.rank}: row 3 is damaged")

    TorchrunRun.train_rows = damaged
    pretrain_torchrun.process_group = lambda timeout_s: contextlib.nullcontext(torch.device("cpu"))  # that of this rank
    with pytest.raises(DataError) as ended:
        pretrain_torchrun.main(arguments)
    return str(ended.value)


@pytest.mark.parametrize("lasts", [False, True])
def test_a_disk_that_is_full_where_float8_ends_is_waited_for_and_ends_a_run_by_a_line_of_its_log(
    tmp_path: Path, corpus: Path, lasts: bool
) -> None:
    """Before, one moment of it ended all ranks, and the log had no end."""
    arguments = [f"run.storage_path={tmp_path}", "run.name=full", f"data.corpora.rows={corpus}", *SMALL, *FLOAT8_FIRST]
    told = run_ranks(train_on_a_full_disk, 2, lasts, [*arguments, "checkpoint.timeout_s=1"])
    run = Storage.at(tmp_path / "full")
    (stopped,) = (each for each in read_events(run) if each["event"] == "stopped")
    if lasts:
        assert told == ["OSError: [Errno 28] No space left on device"] * 2
        assert (stopped["reason"], stopped["step"], stopped["detail"]) == ("failed", 6, told[0])
    else:
        assert [row["step"] for row in read_metrics(run)] == list(range(1, STEPS + 1))
        assert (stopped["reason"], told) == ("finished", ["", ""])


def train_on_a_full_disk(lasts: bool, arguments: list[str]) -> str:
    """How this rank's run ends; the log cannot be begun where float8 ends, the first time or each time."""
    begin, begun = RunLog.begin, []

    def full(self: RunLog, generation: int, start_step: int) -> events.Rollback:
        begun.append(start_step)
        if start_step and (lasts or len(begun) == 2):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return begin(self, generation, start_step)

    RunLog.begin = full
    pretrain_torchrun.process_group = lambda timeout_s: contextlib.nullcontext(torch.device("cpu"))  # that of this rank
    try:
        pretrain_torchrun.main(arguments)
    except RegrowError as ended:
        return str(ended)
    return ""


def test_an_error_of_storage_that_ends_a_run_is_in_its_log(tmp_path: Path, corpus: Path) -> None:
    arguments = [f"run.storage_path={tmp_path}", "run.name=storage", f"data.corpora.rows={corpus}", *SMALL]
    run_ranks(train_without_storage, 1, arguments)
    (stopped,) = (each for each in read_events(Storage.at(tmp_path / "storage")) if each["event"] == "stopped")
    assert (stopped["reason"], stopped["detail"]) == ("failed", "503 Slow Down")


def train_without_storage(arguments: list[str]) -> None:
    def away(*args: Any, **kwargs: Any) -> None:
        raise OSError("503 Slow Down")

    torchrun.store.restore_newest = away
    pretrain_torchrun.process_group = lambda timeout_s: contextlib.nullcontext(torch.device("cpu"))  # that of this rank
    with pytest.raises(OSError, match="503 Slow Down"):
        pretrain_torchrun.main(arguments)


def test_help_is_printed_and_no_mistake(environment: dict[str, str], tmp_path: Path) -> None:
    done = pretrain(environment, tmp_path, "none", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "torchrun --nproc-per-node" in done.stdout


def test_copies_of_snapshots_of_which_there_are_none_are_no_reason_to_refuse_a_run() -> None:
    """A run on fewer than three ranks was refused with two copies, for which Ray has other nodes."""
    assert run_ranks(copies_kept, 1, [*SMALL, "snapshot.copies=2"]) == [2]


def copies_kept(arguments: list[str]) -> int:
    return for_this_group(pretrain_config(arguments), torch.device("cpu")).snapshot.copies


@pytest.mark.parametrize("timeout_s", ["inf", "nan", "-1", "1e14"])
def test_a_timeout_with_which_no_group_can_be_made_is_refused_before_there_is_one(timeout_s: str) -> None:
    """Before, by a traceback of datetime's or gloo's."""
    with pytest.raises(ConfigError, match=r"train.collective_timeout_s=\S+ must be "):
        pretrain_torchrun.main([f"train.collective_timeout_s={timeout_s}"])


def test_a_corpus_may_take_longer_to_prepare_than_ranks_wait_for_each_other(tmp_path: Path, corpus: Path) -> None:
    arguments = [f"run.storage_path={tmp_path}", "run.name=slow", f"data.corpora.rows={corpus}", *SMALL]
    told = run_ranks(prepare_slowly, 2, arguments)
    assert told == [["the text is not there", str(corpus)]] * 2


def prepare_slowly(arguments: list[str]) -> list[str]:
    """What this rank hears of a corpus that cannot be prepared, and where the one is that can."""
    set_timeout(datetime.timedelta(seconds=2.0), dist.group.WORLD)
    config = for_this_group(pretrain_config(arguments), torch.device("cpu"))

    def refuse(*args: Any, **kwargs: Any) -> Corpora:
        time.sleep(4.0)
        raise DataError("the text is not there")

    def find(*args: Any, **kwargs: Any) -> Corpora:
        time.sleep(4.0)
        return find_corpora(*args, **kwargs)

    with Console(sys.stderr) as console:
        torchrun.find_corpora = refuse
        with pytest.raises(DataError) as refused:
            TorchrunRun(config, console)
        torchrun.find_corpora = find
        return [str(refused.value), *TorchrunRun(config, console).corpora.folders]


@pytest.mark.parametrize("there", ["another", "none"])
def test_a_host_with_other_rows_in_the_folder_or_with_none_is_named_on_all_ranks(
    tmp_path: Path, corpus: Path, there: str
) -> None:
    """Before, it trained those, without a word."""
    if there == "another":
        rows = np.zeros((360, SEQ_LEN + 1), np.uint32)
        write_corpus(tmp_path / there, rows, rows_per_group=8, rows_per_shard=120, vocab_size=VOCAB)
    arguments = [f"run.storage_path={tmp_path}", "run.name=apart", f"data.corpora.rows={corpus}", *SMALL]
    told = run_ranks(refusal_of_a_host_apart, 2, arguments, tmp_path / there)
    assert told[0] == told[1]
    said = f"{corpus} on host-1 is another corpus than on host-0 (sha256 " if there == "another" else "on host-1: "
    assert told[0].startswith(said)
    assert "holds no finished corpus" in told[0] or there == "another"
    assert not (tmp_path / "apart/config.yaml").exists()


def refusal_of_a_host_apart(arguments: list[str], mounted: Path) -> str:
    """What this rank is told, where the second one has another folder mounted than the first."""
    rank, load = dist.get_rank(), Manifest.load
    torchrun.socket.gethostname = lambda: f"host-{rank}"
    if rank:
        Manifest.load = lambda folder: load(mounted)
    config = for_this_group(pretrain_config(arguments), torch.device("cpu"))
    with Console(sys.stderr) as console, pytest.raises(DataError) as refused:
        TorchrunRun(config, console)
    return str(refused.value)


def test_a_host_on_which_the_runs_folder_is_its_own_is_named_on_all_ranks(tmp_path: Path, corpus: Path) -> None:
    """Before, checkpoints were committed of which the second host had its part for itself: none could be restored."""
    arguments = [f"run.storage_path={tmp_path}/runs", "run.name=own", f"data.corpora.rows={corpus}", *SMALL]
    told = run_ranks(refusal_of_a_folder_apart, 2, arguments, tmp_path / "scratch")
    said = f"run.storage_path={tmp_path}/runs on host-1 is another folder than on host-0; give one that all hosts share"
    assert told == [f"{said}, or a URI"] * 2


def refusal_of_a_folder_apart(arguments: list[str], mounted: Path) -> str:
    """What this rank is told, where the second one has another folder under the path than the first."""
    rank = dist.get_rank()
    torchrun.socket.gethostname = lambda: f"host-{rank}"
    opened.SEEN_WITHIN_S = 0.5
    if rank:
        opened.run_folder = lambda config: Storage.at(mounted)
    config = for_this_group(pretrain_config(arguments), torch.device("cpu"))
    with Console(sys.stderr) as console, pytest.raises(ConfigError) as refused:
        TorchrunRun(config, console)
    return str(refused.value)


def test_ranks_on_several_kinds_of_gpu_have_the_numbers_of_the_smallest() -> None:
    """Before, each rank those of its own: their collectives did not match."""
    settings = ["model=1b", "data=fineweb_edu", "parallel.dtype=bfloat16"]
    h100, h200, mixed = (
        run_ranks(numbers_on, 2, kinds, settings) for kinds in ([H100, H100], [H200, H200], [H200, H100])
    )
    assert h100[0] != h200[0]
    assert mixed == h100


def test_a_gpu_of_less_memory_than_its_kind_has_is_not_taken_for_a_whole_one() -> None:
    """A part of one by MIG, and an A100 of 64 GB: passes that fill 79 GiB were settled for both."""
    settings = ["model=1b", "data=fineweb_edu", "data.seq_len=2048", "parallel.dtype=bfloat16", "parallel.compile=true"]
    settings += ["optim.num_slices=40", "optim.global_batch_seqs=40"]
    kinds = [("NVIDIA A100-SXM4-80GB", 80 << 30), ("NVIDIA A100-SXM-64GB", 64 << 30)]
    whole, small = (run_ranks(numbers_on, 2, [kind] * 2, settings)[0] for kind in kinds)
    part = run_ranks(numbers_on, 2, [("NVIDIA H100 80GB HBM3 MIG 3g.40gb", 40 << 30)] * 2, settings)[0]
    assert small[1] < whole[1]
    assert part[1:3] == (1, False)


H100, H200 = ("NVIDIA H100 80GB HBM3", 80 << 30), ("NVIDIA H200", 141 << 30)


def numbers_on(kinds: Sequence[tuple[str, int]], settings: list[str]) -> tuple[int, int, bool | None, str]:
    name, memory_bytes = kinds[dist.get_rank()]
    torch.cuda.get_device_name = lambda device: name
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(total_memory=memory_bytes)
    config = for_this_group(pretrain_config(settings), torch.device("cuda", 0))
    parallel = config.parallel
    return parallel.pp, parallel.slices_per_pass, parallel.sync_every_micro_batch, config.cluster.name


def refusal(arguments: list[str]) -> str:
    """What this rank is told of a run whose folder it does not get."""
    set_timeout(datetime.timedelta(seconds=6.0), dist.group.WORLD)
    lock.LOCK_WAIT_S = 8.0  # of this process
    config = for_this_group(pretrain_config(arguments), torch.device("cpu"))
    with Console(sys.stderr) as console, pytest.raises(ResumeError) as refused:
        TorchrunRun(config, console)
    return str(refused.value)


def test_a_run_that_another_process_trains_is_refused_on_all_ranks(tmp_path: Path, corpus: Path) -> None:
    """The rank that holds no lock hears of it, too, though the first one waits for longer than a collective may."""
    held = lock.lock_run(Storage.at(tmp_path / "busy"))
    arguments = [f"run.storage_path={tmp_path}", "run.name=busy", f"data.corpora.rows={corpus}", *SMALL]
    told = run_ranks(refusal, 2, arguments)
    assert held is not None
    assert told[0] == told[1]
    assert "is in use by another process" in told[0]
    assert not (tmp_path / "busy/config.yaml").exists()


def test_a_start_that_is_refused_or_has_nothing_to_do_ends_no_live_job(tmp_path: Path, corpus: Path) -> None:
    """Without locks a job that is started ends the one before: also one by other settings did, and was then refused."""
    write_corpus(
        tmp_path / "other",
        np.zeros((360, SEQ_LEN + 1), np.uint32),
        rows_per_group=8,
        rows_per_shard=120,
        vocab_size=512,
    )
    arguments = [f"run.storage_path={tmp_path}", "run.name=live", *SMALL]
    run_ranks(train_in_this_group, 1, [*arguments, f"data.corpora.rows={corpus}", "train.stop_at_step=6"])
    refused, printed, events = run_ranks(mistaken_starts, 1, arguments, corpus, tmp_path / "other")[0]
    assert "exists with other settings (corpus: " in refused
    assert "step 6 is already committed: nothing to do; raise train.steps or train.stop_at_step" in printed
    assert events == ["submitted"]


def mistaken_starts(arguments: list[str], corpus: Path, other: Path) -> tuple[str, str, list[str]]:
    """While a first job writes the run on storage without locks: how the first start is refused, what the second one
    prints, and what both have put into the log."""
    opened.lock_run = lambda folder, tell: None

    def start(*more: str) -> tuple[TorchrunRun, str]:
        printed = io.StringIO()
        config = for_this_group(pretrain_config([*arguments, *more]), torch.device("cpu"))
        return TorchrunRun(config, Console(printed)), printed.getvalue()

    live, _ = start(f"data.corpora.rows={corpus}")
    before = read_events(live.run.folder)
    with pytest.raises(ResumeError) as refused:
        start(f"data.corpora.rows={other}")
    second, printed = start(f"data.corpora.rows={corpus}", "train.stop_at_step=6")
    assert second.is_done
    claim_of(live).check()
    return (
        str(refused.value),
        printed,
        [each["event"] for each in [before[-1], *read_events(live.run.folder)[len(before) :]]],
    )


def test_a_job_that_was_superseded_does_not_take_the_run_back_when_its_torchrun_starts_it_anew(
    tmp_path: Path, corpus: Path
) -> None:
    """Before, two with --max-restarts ended each other in turn; and one with run.resume=false was refused its own."""
    arguments = [f"run.storage_path={tmp_path}", "run.name=turns", f"data.corpora.rows={corpus}", *SMALL]
    told = run_ranks(restarts_in_turn, 1, arguments)[0]
    assert "exists at " in told[0]
    assert "run.resume=false" in told[0]
    assert "is written by another job now (process " in told[1]


def restarts_in_turn(arguments: list[str]) -> list[str]:
    """Two agents' jobs on storage without locks: how the second is refused that is not to go on with the first's run,
    and how the first is once the second has that run."""
    opened.lock_run = lambda folder, tell: None
    os.environ |= {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_MAX_RESTARTS": "3"}

    def start(agent: int, *more: str) -> TorchrunRun:
        os.getppid = lambda: agent
        config = for_this_group(pretrain_config([*arguments, *more]), torch.device("cpu"))
        opened.check_start(config)
        return TorchrunRun(config, Console(io.StringIO()))

    first, second = os.getpid(), os.getppid()
    start(first, "run.resume=false")
    again = start(first, "run.resume=false")
    with pytest.raises(ResumeError) as refused:
        start(second, "run.resume=false")
    claim_of(again).check()
    other = start(second)
    with pytest.raises(RegrowError) as superseded:
        start(first)
    claim_of(other).check()
    return [str(refused.value), str(superseded.value)]


def claim_of(run: TorchrunRun) -> Claim:
    assert run._opened is not None
    assert run._opened.claim is not None
    return run._opened.claim


@pytest.mark.long
def test_of_two_jobs_on_one_bucket_the_newer_one_goes_on_and_the_older_one_ends_in_a_line(
    environment: dict[str, str], tmp_path: Path, corpus: Path
) -> None:
    """Before, both wrote the run: rows, checkpoints, and deletions of each other's."""
    with s3_server() as bucket:
        run, committed = Storage.at(f"{bucket}/runs/one"), Storage.at(f"{bucket}/runs/one/checkpoints")
        settings = [f"run.storage_path={bucket}/runs", "run.name=one", f"data.corpora.rows={corpus}", *SMALL]
        settings += ["train.steps=100000", "train.validate_every_steps=0", "checkpoint.every_steps=5"]
        servers = {key: value for key, value in os.environ.items() if key.startswith("AWS_")}

        def start() -> subprocess.Popen[str]:
            command = [sys.executable, "-m", "jobs.pretrain_torchrun", *settings]
            return subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment | servers,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )

        def wait_past(step: int) -> None:
            give_up_at = time.monotonic() + 120.0
            while max(committed_steps(committed), default=0) <= step:
                assert time.monotonic() < give_up_at
                time.sleep(0.1)

        with start() as old:
            wait_past(0)
            with start() as new:
                printed = old.communicate(timeout=120.0)[0]
                assert old.returncode == 1, printed
                assert "is written by another job now (process " in printed
                wait_past(committed_steps(committed)[0])
                new.send_signal(signal.SIGINT)
                new.communicate(timeout=120.0)
        logged = read_metrics(run)
        assert [row["step"] for row in logged] == list(range(1, len(logged) + 1))
        assert {row["generation"] for row in logged} == {1, 2}
        assert [each["reason"] for each in read_events(run) if each["event"] == "stopped"] == ["interrupted"]
        assert run.list("writers") == ["000001.json", "000002.json"]
        run_id = json.loads(run.read_bytes("run.json"))["run_id"]
        for step in committed_steps(committed):
            open_checkpoint(committed, step, run_id=run_id)
