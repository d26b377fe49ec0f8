"""The same run as a job of a running Ray cluster. What needs a cluster is in tests/cluster."""

import errno
import io
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from zipfile import ZipFile

import pytest
import requests
import yaml
from ray._private.runtime_env.packaging import create_package
from ray.job_submission import JobStatus

from regrow.control.states import Settling
from regrow.errors import ClusterError, ConfigError
from regrow.record.run_folder import run_location
from regrow.runtime.driver import END_S, _farewell, _missing
from regrow.runtime.run_folder import Run
from regrow.submit.ending import ending
from regrow.submit.pods import STOP_S
from regrow.submit.ray_jobs import CHECKOUT, LEFT_OUT, RayJobs, job_spec
from regrow.submit.render import config_sha256, entrypoint
from regrow.submit.submit import pretrain_arguments, submit
from support.submission import CODE, ENDINGS, FAREWELL, LOST, compose

RAY = ["+cluster=cpu3", "run.name=mine", "submit.backend=ray", "submit.stop_s=42", "+submit.env.HF_HOME=/mnt/hf"]


def test_the_job_is_the_same_command_with_the_checkout() -> None:
    config = compose(RAY)
    words = pretrain_arguments(config, RAY)
    spec = job_spec(config, CODE, words)
    assert spec["entrypoint"] == entrypoint(words)
    assert "submit." not in spec["entrypoint"]
    assert spec["runtime_env"]["working_dir"] == str(CHECKOUT)
    assert spec["runtime_env"]["env_vars"] == {
        "PYTHONPATH": "platform",
        "RAY_JOB_STOP_WAIT_TIME_S": "42",
        "HF_HOME": "/mnt/hf",
    }
    assert spec["metadata"] == {
        "regrow_run": "mine",
        "regrow_folder": str(Path.cwd() / "runs" / "mine"),
        "git_sha": CODE.git_sha,
        "config_sha256": config_sha256(config),
    }
    assert all(isinstance(value, str) for value in spec["metadata"].values())  # Ray takes no others


def test_a_stopped_job_has_the_time_that_its_checkpoint_may_take() -> None:
    """Before, Ray killed the driver after 600 s, which tries to write the newest step for checkpoint.timeout_s."""
    config = compose([each for each in RAY if "stop_s" not in each] + ["checkpoint.timeout_s=1000.5"])
    assert job_spec(config, CODE, [])["runtime_env"]["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"] == str(1001 + STOP_S)
    assert STOP_S > END_S


def test_the_checkout_that_travels_has_what_a_job_needs_and_not_what_is_large() -> None:
    for needed in ("jobs/pretrain.py", "conf/pretrain.yaml", "data/python_docs.py", "platform/regrow/config/store.py"):
        assert (CHECKOUT / needed).exists()
        assert needed.partition("/")[0] not in {each.strip("/*") for each in LEFT_OUT}
    ignored = (Path(CHECKOUT) / ".gitignore").read_text().split()
    for large in (".venv/", "/runs/", ".cache/", ".whl/"):
        assert large.strip("/") in {each.strip("/") for each in LEFT_OUT}, ignored


@pytest.mark.parametrize("has_git", [True, False])
def test_what_is_not_in_git_stays_here_but_for_what_the_job_may_need(
    has_git: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By Ray's own packing."""
    travels = [
        "conf/pretrain.yaml",
        "conf/mine.yaml",
        "data/x.py",
        "jobs/pretrain.py",
        "platform/regrow/x.py",
        "pyproject.toml",
    ]
    own = ["mine.py", "own/code.py", "names/pace/__init__.py", "bpe/tokenizer.json", "texts/a.txt"]
    stays = ["hf/x.safetensors", "results/x.json", "storage.env", "data/secret.env", "own/.env", "a [1]*/x", "#x", "!x"]
    root = tmp_path / "checkout"
    for name in (*travels, *own, *stays):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("x")
    if has_git:
        for command in (
            ["init", "--quiet"],
            ["add", "conf/pretrain.yaml", "data/x.py", "jobs", "platform", "pyproject.toml"],
        ):
            subprocess.run(["git", *command], cwd=root, check=True, timeout=60)
    monkeypatch.setattr("regrow.submit.ray_jobs.CHECKOUT", root)
    settings = ["train.callback=names.pace:Pace", "data.tokenizer=bpe/tokenizer.json", "data.source='./texts/*.txt'"]
    spec = job_spec(compose([*RAY, *settings]), CODE, [])["runtime_env"]
    package = tmp_path / "package.zip"
    create_package(spec["working_dir"], package, include_gitignore=True, excludes=spec["excludes"])
    assert sorted(ZipFile(package).namelist()) == sorted([*travels, *own])


def test_rendering_prints_the_job_and_nothing_else() -> None:
    arguments = [*RAY, "submit.action=render"]
    with redirect_stdout(io.StringIO()) as printed:
        assert submit(compose(arguments), arguments) == 0
    spec = yaml.safe_load(printed.getvalue())
    assert spec["entrypoint"].startswith("python -m jobs.pretrain +cluster=cpu3 run.name=mine cluster.address=auto")


def test_storage_of_this_checkout_is_refused() -> None:
    arguments = [*RAY, "submit.action=apply", "submit.address=http://127.0.0.1:9"]
    with pytest.raises(ConfigError, match=r"run\.storage_path=runs is relative to this checkout"):
        submit(compose(arguments), arguments)


def refused(last: str) -> RuntimeError:
    """What Ray's client raises of an error in the agent, which the head hands on: each writes its traceback."""
    text = last
    for kind in ("ValueError", "RuntimeError"):
        text = (
            "Request failed with status code 500: Traceback (most recent call last):\n"
            f'  File "ray/dashboard/job.py", line 9, in answer\n    await self.do()\n{kind}: {text}\n.'
        )
    return RuntimeError(text)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("run.storage_path=s3://me:word@bucket/x", "run.storage_path has a user and a password, or a signature, in"),
        (
            "+submit.env.HF_TOKEN=word",
            "submit.env.HF_TOKEN is given as text; set it where the cluster's Ray is started",
        ),
        ("+submit.env.WHO=AKIAABCDEFGHIJKLMNOP", "submit.env.WHO holds what looks like a secret"),
    ],
)
@pytest.mark.parametrize("action", ["render", "apply"])
def test_a_secret_is_refused_and_not_shown(
    change: str, says: str, action: str, capsys: pytest.CaptureFixture[str]
) -> None:
    storage = [] if "run.storage_path" in change else ["run.storage_path=s3://bucket/x"]
    arguments = [*RAY, *storage, change, f"submit.action={action}", "submit.address=http://127.0.0.1:9"]
    with pytest.raises(ConfigError, match=says) as caught:
        submit(compose(arguments), arguments)
    assert "word" not in str(caught.value).replace("password", "")
    assert "word" not in "".join(capsys.readouterr())


class NotReady:
    """Ray's client, of a head that is just starting: as many refusals as there are errors."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)

    def list_jobs(self) -> list[Any]:
        return []

    def submit_job(self, **spec: Any) -> str:
        if self.errors:
            raise self.errors.pop(0)
        return "raysubmit_1"


def jobs_of(client: object, monkeypatch: pytest.MonkeyPatch) -> RayJobs:
    monkeypatch.setattr("regrow.submit.ray_jobs.JobSubmissionClient", lambda address: client)
    monkeypatch.setattr("regrow.submit.ray_jobs.POLL_S", 0.01)
    return RayJobs("http://head:8265", "mine", "/shared/me/mine")


def test_a_head_that_has_no_agent_yet_is_asked_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    not_yet = RuntimeError(
        "Request failed with status code 500: No available agent to submit job, please try again later.."
    )
    jobs_of(NotReady(not_yet, not_yet), monkeypatch).apply({"entrypoint": "true"})
    assert "submitted raysubmit_1" in capsys.readouterr().err


def test_a_job_that_the_cluster_refuses_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ClusterError, match=r"did not take the job: Request failed with status code 500: ValueError: no room$"
    ) as caught:
        jobs_of(NotReady(refused("no room")), monkeypatch).apply({"entrypoint": "true"})
    assert "\n" not in str(caught.value)


def test_a_cluster_that_goes_away_while_it_is_given_the_job_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was a traceback; the checkout takes a while to upload."""
    broken = requests.exceptions.ConnectionError("Connection aborted.\nBroken pipe")  # an OSError, as Ray hands it on
    with pytest.raises(ClusterError) as caught:
        jobs_of(NotReady(broken), monkeypatch).apply({"entrypoint": "true"})
    said = "the job's submission broke off (Connection aborted.); it may have been taken: submit.action=status"
    assert str(caught.value) == said


def test_a_file_that_cannot_be_packed_is_told_as_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray packs the checkout on this machine: no cluster may have taken that job."""
    unread = PermissionError(errno.EACCES, "Permission denied", "/checkout/secret.pem")
    with pytest.raises(PermissionError) as caught:
        jobs_of(NotReady(unread), monkeypatch).apply({"entrypoint": "true"})
    assert caught.value is unread


class Breaks:
    """Ray's client, of a cluster that goes away at one of these calls."""

    def __init__(self, at: str, error: Exception) -> None:
        self.at, self.error = at, error

    def _answer(self, call: str, answer: Any) -> Any:
        if call == self.at:
            raise self.error
        return answer

    def list_jobs(self) -> list[Any]:
        times = {"start_time": 1, "end_time": None, "message": "it runs"}
        job = SimpleNamespace(
            submission_id="raysubmit_1", status=JobStatus.RUNNING, metadata={"regrow_run": "mine"}, **times
        )
        return cast(list[Any], self._answer("list_jobs", [job]))

    def stop_job(self, job: str) -> bool:
        return cast(bool, self._answer("stop_job", True))

    def get_job_status(self, job: str) -> JobStatus:
        return cast(JobStatus, self._answer("get_job_status", JobStatus.RUNNING))


def test_jobs_are_told_with_the_zone_of_their_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """As jobs.status tells it; before, by this machine's zone, which was not said."""
    (line,) = jobs_of(Breaks("", OSError()), monkeypatch).describe()
    assert "started 1970-01-01 00:00:00 UTC" in line


class Shared:
    """Ray's client, of a cluster with jobs of that name, each with its run's folder; '': one of before, without."""

    def __init__(self, *folders: str) -> None:
        self.folders = folders
        self.stopped: list[str] = []
        self.submitted: list[Any] = []

    def list_jobs(self) -> list[Any]:
        times = {"status": JobStatus.RUNNING, "end_time": None, "message": "it runs"}
        return [
            SimpleNamespace(
                submission_id=f"raysubmit_{number}",
                start_time=number,
                metadata={"regrow_run": "mine"} | ({"regrow_folder": folder} if folder else {}),
                **times,
            )
            for number, folder in enumerate(self.folders, 1)
        ]

    def stop_job(self, job: str) -> None:
        self.stopped.append(job)

    def submit_job(self, **spec: Any) -> str:
        self.submitted.append(spec)
        return "raysubmit_9"


def test_a_job_of_the_same_name_with_another_folder_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another user's: stop ended it, and apply was refused while it ran."""
    client = Shared("s3://theirs/mine")
    jobs = jobs_of(client, monkeypatch)
    jobs.stop(wait_s=0)
    assert client.stopped == []
    where = "in /shared/me/mine; there is one of that name in s3://theirs/mine"
    assert f"run 'mine' does not run {where}" in capsys.readouterr().err
    assert jobs.describe() == [f"no job of run 'mine' on this cluster {where}"]
    with pytest.raises(ClusterError, match="there is one of that name in s3://theirs/mine; start it with"):
        jobs.follow()
    jobs.apply({"entrypoint": "true"})
    assert len(client.submitted) == 1


@pytest.mark.parametrize("folder", ["/shared/me/mine", ""])
def test_a_job_of_this_folder_or_of_before_folders_were_told_is_stopped(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Shared(folder, "s3://theirs/mine")
    jobs = jobs_of(client, monkeypatch)
    jobs.stop(wait_s=0)
    assert client.stopped == ["raysubmit_1"]
    with pytest.raises(ClusterError, match="is there as job raysubmit_1"):
        jobs.apply({"entrypoint": "true"})


def test_a_folder_is_the_same_however_its_storage_is_written() -> None:
    for path in ("/shared/me", "/shared/me/", "file:///shared/me"):
        assert run_location(compose([*RAY, f"run.storage_path={path}"])) == "/shared/me/mine"
    assert run_location(compose([*RAY, "run.storage_path='~/me'"])) == str(Path.home() / "me" / "mine")
    assert run_location(compose([*RAY, "run.storage_path='s3://b/me/?region=x'"])) == "s3://b/me/mine?region=x"


class Stopped(Shared):
    """Ray's client, of a job that runs until it is asked to stop, and then is STOPPED, with this log."""

    def __init__(self, log: str) -> None:
        super().__init__("")
        self.log = log

    def get_job_status(self, job: str) -> JobStatus:
        return self.get_job_info(job).status  # type: ignore[no-any-return]

    def get_job_info(self, job: str) -> Any:
        status = JobStatus.STOPPED if self.stopped else JobStatus.RUNNING
        return SimpleNamespace(status=status, message="Job was intentionally stopped.")

    def get_job_logs(self, job: str) -> str:
        return self.log

    async def tail_job_logs(self, job: str) -> AsyncIterator[str]:
        yield self.log


@pytest.mark.parametrize("action", ["stop", "logs"])
@pytest.mark.parametrize(("lines", "status", "line"), ENDINGS)
def test_a_stopped_job_ends_as_its_driver_did(
    action: str,
    lines: list[str],
    status: int,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By its log: Ray has STOPPED for one that was killed too, and both said that all is well."""
    log = "\n".join(["Running entrypoint for job raysubmit_1: python -m jobs.pretrain", *lines]) + "\n"
    client = Stopped(log)
    jobs_of(client, monkeypatch)
    if action == "logs":
        client.stopped.append("raysubmit_1")
    arguments = [*RAY, f"submit.action={action}"]
    assert submit(compose(arguments), arguments) == status
    shown = capsys.readouterr()
    assert f"raysubmit_1: STOPPED: Job was intentionally stopped.\n{line}" in shown.err
    assert shown.out == (log if action == "logs" else "")


def test_the_drivers_own_last_lines_are_told_apart() -> None:
    config, run = compose(RAY), cast(Run, SimpleNamespace(folder="/runs/mine"))
    for reason, step in (("interrupted", 7), ("interrupted", None), ("stop_at_step", 7), ("finished", 7)):
        line = _farewell(config, run, step, reason, 2.0 if step else None)
        assert ending(f"{line}\n") == (0, line)
    missing = _missing(config, Settling(False, "no room", 7, ("node",)))
    assert missing.startswith(LOST[:40])
    for line in (missing, f"error: {missing} (logs: /tmp/ray)"):
        assert ending(f"{FAREWELL}\n{line}\n") == (1, line)


GONE = [
    (ConnectionError("Failed to connect to Ray\nat head"), "Failed to connect to Ray"),
    (RuntimeError("Request failed with status code 502: Bad Gateway\nx."), "status code 502: Bad Gateway"),
    (refused("gone"), "status code 500: ValueError: gone"),
]
AWAY = pytest.mark.parametrize(("error", "why"), GONE, ids=["connection", "status", "traceback"])


@AWAY
@pytest.mark.parametrize(
    ("at", "line"),
    [
        ("stop_job", r"raysubmit_1 could not be asked to end \(.*\); it may run on: try submit.action=stop again"),
        ("get_job_status", r"lost sight of raysubmit_1 \(.*\); it was asked to end, and does so by itself"),
    ],
)
def test_a_cluster_that_goes_away_while_a_job_is_stopped_is_one_line(
    at: str, line: str, error: Exception, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = jobs_of(Breaks(at, error), monkeypatch)
    with pytest.raises(ClusterError, match=line) as caught:
        jobs.stop(wait_s=5)
    assert f"{why});" in str(caught.value)
    assert "\n" not in str(caught.value)


@AWAY
def test_a_job_that_is_lost_sight_of_has_a_status_of_its_own(
    error: Exception, why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("regrow.submit.ray_jobs.JobSubmissionClient", lambda address: Breaks("get_job_status", error))
    arguments = [*RAY, "submit.action=logs"]
    assert submit(compose(arguments), arguments) == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: lost sight of raysubmit_1 (")
    assert f"{why});" in line
    assert line.endswith("it may well run on: submit.action=logs")


@pytest.mark.parametrize("act", [RayJobs.describe, RayJobs.newest, RayJobs.follow])
def test_a_cluster_that_goes_away_before_it_is_asked_for_its_jobs_is_one_line(
    act: Callable[[RayJobs], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Breaks("", GONE[0][0])
    jobs = jobs_of(client, monkeypatch)
    client.at = "list_jobs"
    with pytest.raises(ClusterError, match=r"^the Ray cluster does not say which jobs it has \(Failed to connect"):
        act(jobs)


def test_a_cluster_that_is_not_there_is_one_line() -> None:
    with pytest.raises(ClusterError, match=r"no Ray cluster lets us in at http://127\.0\.0\.1:9 ") as caught:
        RayJobs("http://127.0.0.1:9", "mine", "/shared/me/mine")
    assert "\n" not in str(caught.value)
