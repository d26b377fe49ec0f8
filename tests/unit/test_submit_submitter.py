"""The command in a submitter's pod, with a stand-in for the head that closes the log's connection in order."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from ray.job_submission import JobSubmissionClient

from regrow.deadline import within
from regrow.errors import ClusterError
from regrow.submit import submitter
from support.submission import rendered

JOB = "llama8b-x1"
METADATA, ENTRYPOINT = {"run": "llama8b"}, "python -m jobs.pretrain run.name=llama8b"
FOREVER = "forever"  # a connection whose other end died


class Head:
    """What it knows of the job at each look, the last from then on, and its log at each connection."""

    def __init__(self) -> None:
        self.statuses: list[str | None] = ["SUCCEEDED"]
        self.logs: list[list[str]] = []
        self.refusal, self.forbids = "", False
        self.submitted: list[dict[str, Any]] = []
        self.address = ""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def start(self, port: int = 0) -> None:
        asyncio.run_coroutine_threadsafe(self._start(port), self._loop).result()

    def end(self) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _start(self, port: int) -> None:
        app = web.Application()
        app.router.add_get("/api/version", self._version)
        app.router.add_get("/api/jobs/", self._list)
        app.router.add_post("/api/jobs/", self._submit)
        app.router.add_get("/api/jobs/{job}/logs/tail", self._tail)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port)
        await site.start()
        self.address = "{}:{}".format(*self._runner.addresses[0])

    async def _version(self, request: web.Request) -> web.Response:
        if self.forbids:
            return web.Response(status=403, text="Forbidden")
        return web.json_response({"version": "4", "ray_version": "2.60.0", "ray_commit": "", "session_name": ""})

    async def _list(self, request: web.Request) -> web.Response:
        status = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        about = {"type": "SUBMISSION", "submission_id": JOB, "entrypoint": ENTRYPOINT, "status": status}
        return web.json_response([about] if status else [])

    async def _submit(self, request: web.Request) -> web.Response:
        if self.refusal:
            return web.Response(status=500, text=self.refusal)
        self.submitted.append(await request.json())
        return web.json_response({"job_id": JOB, "submission_id": JOB})

    async def _tail(self, request: web.Request) -> web.WebSocketResponse:
        stream = web.WebSocketResponse()
        await stream.prepare(request)
        for each in self.logs.pop(0) if self.logs else []:
            if each == FOREVER:
                await stream.receive()
            else:
                await stream.send_str(each)
        return stream

    @property
    def environment(self) -> dict[str, str]:
        """As KubeRay sets it."""
        return {"RAY_DASHBOARD_ADDRESS": self.address, "RAY_JOB_SUBMISSION_ID": JOB}


@pytest.fixture
def head(monkeypatch: pytest.MonkeyPatch) -> Iterator[Head]:
    monkeypatch.setattr(submitter, "FIRST_S", 0.01)
    monkeypatch.setattr(submitter, "LONGEST_S", 0.02)
    here = Head()
    here.start()
    yield here
    here.end()


def run(head: Head) -> None:
    submitter.main([json.dumps(METADATA), ENTRYPOINT], head.environment)


def test_the_rendered_command_submits_the_job_and_outlasts_a_log_that_ends_before_it(head: Head) -> None:
    """KubeRay's own ended with 0 then, and KubeRay deleted the cluster that trained."""
    (job,) = [each for each in rendered(["+cluster=h100x64", "run.name='a$(HOME)$$'"])[1] if each["kind"] == "RayJob"]
    (container,) = job["spec"]["submitterPodTemplate"]["spec"]["containers"]
    python, *words = [each.replace("$$", "$") for each in container["command"]]  # as Kubernetes does
    assert python == "python"
    assert "args" not in container
    head.statuses = [None, "RUNNING", "RUNNING", "SUCCEEDED"]
    head.logs = [["step 1\n"], ["step 1\nst"], ["step 1\n", "step 2\n"], ["step 1\n", "step 2\nfinished\n"]]
    done = subprocess.run(
        [sys.executable, *words], env=os.environ | head.environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"submitted {JOB}\nstep 1\nstep 2\nfinished\n{JOB}: SUCCEEDED\n"
    (given,) = head.submitted
    assert given["submission_id"] == JOB
    assert given["entrypoint"] == job["spec"]["entrypoint"]
    assert given["metadata"].items() >= job["spec"]["metadata"].items()
    assert "a$(HOME)$$" in given["entrypoint"]


@pytest.mark.parametrize("status", ["SUCCEEDED", "STOPPED", "FAILED"])
def test_it_ends_well_however_the_job_ends_which_kuberay_asks_ray(
    head: Head, status: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Another status has Kubernetes start it again, a thousand times, and KubeRay wait for that."""
    head.statuses, head.logs = ["RUNNING", status], [["step 1\n"], ["step 1\n", "error: no GPU\n"]]
    run(head)
    assert capfd.readouterr().out == f"step 1\nerror: no GPU\n{JOB}: {status}\n"


def test_a_job_that_ray_knows_is_not_submitted_again_and_one_that_another_head_does_not_know_is(
    head: Head, capfd: pytest.CaptureFixture[str]
) -> None:
    head.statuses = ["RUNNING", "SUCCEEDED"]
    run(head)
    assert head.submitted == []
    capfd.readouterr()
    head.statuses, head.logs = ["RUNNING", None, "SUCCEEDED"], [["step 1\n"], ["step 1\n"], ["step 1\nfinished\n"]]
    run(head)
    assert len(head.submitted) == 1
    assert capfd.readouterr().out == f"step 1\nsubmitted {JOB}\nstep 1\nfinished\n{JOB}: SUCCEEDED\n"


def test_a_log_that_says_nothing_is_asked_for_again(
    head: Head, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that dies closes no connection."""
    monkeypatch.setattr(submitter, "SILENCE_S", 0.2)
    head.statuses, head.logs = ["RUNNING", "SUCCEEDED"], [["step 1\n", FOREVER], ["step 1\nfinished\n"]]
    run(head)
    assert capfd.readouterr().out == f"step 1\nfinished\n{JOB}: SUCCEEDED\n"


def test_a_job_that_ray_refuses_is_another_status_and_one_line(head: Head) -> None:
    head.statuses, head.refusal = [None], "no room"
    with pytest.raises(ClusterError, match=r"the cluster did not take the job: .*500: no room"):
        run(head)


def test_a_head_that_is_not_there_yet_is_waited_for(
    head: Head, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    later, pauses = Head(), []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            later.start(port)

    later.address = f"127.0.0.1:{port}"
    monkeypatch.setattr(submitter, "time", SimpleNamespace(sleep=sleep))
    run(later)
    later.end()
    assert pauses == [submitter.AWAY_S] * 2
    line = f"http://127.0.0.1:{port} does not answer (Failed to connect to Ray at address: http://127.0.0.1:{port}."
    assert capfd.readouterr().out == f"{line}); asking again\n{JOB}: SUCCEEDED\n"


def test_a_head_that_dies_before_it_answers_is_asked_again(
    head: Head, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's client waits for its answer for good, and nothing else submits to the next head."""
    with socket.create_server(("127.0.0.1", 0)) as dead:
        address, asked = "http://{}:{}".format(*dead.getsockname()), list[str]()

        def client(given: str) -> Any:
            asked.append(given)
            return JobSubmissionClient(address if len(asked) == 1 else given)

        monkeypatch.setattr(submitter, "JobSubmissionClient", client)
        monkeypatch.setattr(submitter, "AWAY_S", 0.0)
        monkeypatch.setattr(submitter, "within", lambda seconds, ask: within(0.5 if len(asked) == 0 else seconds, ask))
        run(head)
    assert (
        capfd.readouterr().out
        == f"http://{head.address} does not answer (no answer within 0.5 s); asking again\n{JOB}: SUCCEEDED\n"
    )


def test_a_token_that_is_refused_is_another_status_and_one_line(head: Head) -> None:
    head.forbids = True
    with pytest.raises(ClusterError, match=f"lost sight of {JOB} "):
        run(head)
