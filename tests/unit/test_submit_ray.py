"""The same run as a job of a running Ray cluster. What needs a cluster is in tests/cluster."""

import io
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import yaml

from regrow.errors import ClusterError, ConfigError
from regrow.submit.ray_jobs import CHECKOUT, LEFT_OUT, RayJobs, job_spec
from regrow.submit.render import config_sha256, entrypoint
from regrow.submit.submit import pretrain_arguments, submit
from support.submission import CODE, compose

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
    assert spec["metadata"] == {"regrow_run": "mine", "git_sha": CODE.git_sha, "config_sha256": config_sha256(config)}
    assert all(isinstance(value, str) for value in spec["metadata"].values())  # Ray takes no others


def test_the_checkout_that_travels_has_what_a_job_needs_and_not_what_is_large() -> None:
    for needed in ("jobs/pretrain.py", "conf/pretrain.yaml", "data/python_docs.py", "platform/regrow/config/store.py"):
        assert (CHECKOUT / needed).exists()
        assert needed.partition("/")[0] not in {each.strip("/*") for each in LEFT_OUT}
    ignored = (Path(CHECKOUT) / ".gitignore").read_text().split()
    for large in (".venv/", "/runs/", ".cache/", ".whl/"):
        assert large.strip("/") in {each.strip("/") for each in LEFT_OUT}, ignored


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


class NotReady:
    """Ray's client, of a head that is just starting: as many refusals as there are errors."""

    def __init__(self, *errors: str) -> None:
        self.errors = list(errors)

    def list_jobs(self) -> list[Any]:
        return []

    def submit_job(self, **spec: Any) -> str:
        if self.errors:
            raise RuntimeError(f"Request failed with status code 500: {self.errors.pop(0)}\nTraceback")
        return "raysubmit_1"


def jobs_of(client: NotReady, monkeypatch: pytest.MonkeyPatch) -> RayJobs:
    monkeypatch.setattr("regrow.submit.ray_jobs.JobSubmissionClient", lambda address: client)
    monkeypatch.setattr("regrow.submit.ray_jobs.POLL_S", 0.01)
    return RayJobs("http://head:8265", "mine")


def test_a_head_that_has_no_agent_yet_is_asked_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    not_yet = "No available agent to submit job, please try again later."
    jobs_of(NotReady(not_yet, not_yet), monkeypatch).apply({"entrypoint": "true"})
    assert "submitted raysubmit_1" in capsys.readouterr().err


def test_a_job_that_the_cluster_refuses_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ClusterError, match="did not take the job: Request failed with status code 500: no room"
    ) as caught:
        jobs_of(NotReady("no room"), monkeypatch).apply({"entrypoint": "true"})
    assert "\n" not in str(caught.value)


def test_a_cluster_that_is_not_there_is_one_line() -> None:
    with pytest.raises(ClusterError, match=r"no Ray cluster lets us in at http://127\.0\.0\.1:9 ") as caught:
        RayJobs("http://127.0.0.1:9", "mine")
    assert "\n" not in str(caught.value)
