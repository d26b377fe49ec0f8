"""What `jobs.status` and Ray's dashboard say of a real run, while it trains and after it was killed.

With PAGES=FOLDER the dashboard's screenshots are left there to be looked at.
"""

import base64
import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from regrow.record.run_folder import read_status
from regrow.record.status import GONE_S, State, Status
from regrow.storage import Storage
from support.browser import Browser, find_browser
from support.cluster import ROOT, SMALL, Job

FROM_AFAR = """
import sys
from regrow.submit import job_status
job_status.is_here = lambda *_: False  # as if the folder were the cluster's alone
print(job_status.on_ray(sys.argv[1], run="watched")().to_json())
"""
ASK = """
import sys, ray
ray.init(address=sys.argv[1], log_to_driver=False)
coordinator = ray.get_actor(f"{sys.argv[2]}:coordinator", namespace="regrow")
print(ray.get(coordinator.secret.remote()).hex(), end="")
"""
SHOWN = (  # what Ray tells of a run over HTTP
    *("/api/train/v2/runs/v1", "/api/v0/actors?detail=1", "/api/v0/tasks?detail=1&limit=10000", "/api/jobs/"),
    *("/logical/actors", "/nodes?view=summary", "/api/v0/workers?detail=1", "/api/v0/runtime_envs?detail=1"),
)
SETTINGS = [*SMALL, "cluster.min_workers=1", "cluster.max_workers=2", "train.steps=100000", "checkpoint.every_steps=50"]

PAGES = {  # of Ray's dashboard, and what they say of a run
    "overview": ("jobs.pretrain", "(no failures)"),
    "jobs": ("run.name=watched", "RUNNING"),
    "actors": ("RayTrainWorker", "Keeper"),  # of the ten that came last; others are on a second page
    "cluster": ("ALIVE",),
    "logs": ("Select a node to view logs",),
}
OF_RAY = re.compile(r"Failed to load resource: .* status of (404|500|501) ")  # it looks for Grafana and Prometheus


def until(look: Callable[[], Status], condition: Callable[[Status], bool], timeout_s: float = 90.0) -> Status:
    give_up_at = time.monotonic() + timeout_s
    while not condition(found := look()):
        assert time.monotonic() < give_up_at, found
        time.sleep(0.1)
    return found


@pytest.fixture(scope="module")
def watched(storage: Path) -> Iterator[tuple[Job, str]]:
    """A run at 60 steps and more, and where its Ray's dashboard is, which shows Ray Train's runs, too."""
    tracked = pytest.MonkeyPatch()
    tracked.setenv("RAY_TRAIN_ENABLE_STATE_TRACKING", "1")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    dashboard = ["cluster.dashboard=true", f"cluster.dashboard_port={port}"]
    with Job(storage, "watched", *SETTINGS, *dashboard) as job:
        job.wait_for(lambda: job.last_step() >= 60 and bool(job.events("checkpoint")), 240)
        yield job, re.findall(r"Ray dashboard: (http://\S+)", job.printed())[-1]
    tracked.undo()


@pytest.mark.skipif(find_browser() is None, reason="needs Chromium: apt-get install chromium")
def test_rays_dashboard_shows_the_job_and_names_its_actors(watched: tuple[Job, str], tmp_path: Path) -> None:
    """Its pages are Ray's; what they say of a run is ours: the job's entry, actors by name, where its logs are."""
    job, address = watched
    assert "`ray get-auth-token`" in job.printed()
    folder = Path(os.environ.get("PAGES", tmp_path))
    with Browser(find_browser() or "") as browser:
        browser.cookie("ray-authentication-token", (Path.home() / ".ray" / "auth_token").read_text().strip(), address)
        for page, texts in PAGES.items():
            browser.open(f"{address}/#/{page}", width=1400)
            _wait_for_texts(browser, texts)
            browser.screenshot(folder / f"dashboard-{page}.png")
            assert (folder / f"dashboard-{page}.png").stat().st_size > 20_000
            ours = [text for text in browser.complaints if not OF_RAY.search(text)]
            assert ours == [], page
    assert job.process.poll() is None


def _wait_for_texts(browser: Browser, texts: tuple[str, ...], timeout_s: float = 60.0) -> None:
    give_up_at = time.monotonic() + timeout_s
    while absent := [text for text in texts if text not in (shown := browser.evaluate("document.body.innerText"))]:
        assert time.monotonic() < give_up_at, f"not on the page: {absent}; it has {shown}"
        time.sleep(0.5)


@pytest.mark.long  # test_coordinator asks Ray's own function for what it would show of the settings
def test_the_keepers_secret_is_in_nothing_that_ray_shows_or_logs(watched: tuple[Job, str]) -> None:
    job, address = watched
    run_id = json.loads((job.folder / "run.json").read_bytes())["run_id"]
    arguments = [argument for pid in job.processes() for argument in _command(pid)]
    gcs = next(each.partition("=")[2] for each in arguments if each.startswith("--gcs-address="))
    environment = os.environ | {"RAY_AUTH_MODE": "token"}
    command = [sys.executable, "-c", ASK, gcs, run_id]
    asked = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    secret = bytes.fromhex(asked.stdout)
    assert len(secret) == 32, asked.stderr
    forms = [secret, secret.hex().encode(), repr(secret)[2:-1].encode(), json.dumps(repr(secret))[3:-2].encode()]
    forms += [base64.b64encode(secret)[:-1], json.dumps(list(secret)).encode()]

    shown = {path: _ask_dashboard(address, path) for path in SHOWN}
    assert b"train_loop_config" in shown["/api/train/v2/runs/v1"]
    assert all(run_id.encode() in shown[path] for path in ("/api/train/v2/runs/v1", "/api/v0/actors?detail=1"))
    shown |= {str(path): path.read_bytes() for path in job.ray_folder.rglob("*") if _is_text(path)}
    shown |= {f"environment of {pid}": Path(f"/proc/{pid}/environ").read_bytes() for pid in job.processes()}
    shown |= {str(path): path.read_bytes() for path in (job.output, *job.folder.glob("*.*"))}
    assert any("worker-" in name for name in shown)  # logs of workers
    (of_gcs,) = (pid for pid in job.processes() if _command(pid)[:1] and _command(pid)[0].endswith("gcs_server"))
    shown["memory of the GCS"] = _memory(of_gcs)  # all that it keeps, and what one puts under it, such as Redis
    assert run_id.encode() in shown["memory of the GCS"]
    assert [(name, form) for name, content in shown.items() for form in forms if form in content] == []


def _memory(pid: int) -> bytes:
    """All that a process may write to."""
    regions = (line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines())
    content = list[bytes]()
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        for between, access, *_ in regions:
            start, end = (int(each, 16) for each in between.split("-"))
            if access.startswith("rw"):
                with contextlib.suppress(OSError):  # a guard page, or gone since
                    memory.seek(start)
                    content.append(memory.read(end - start))
    return b"".join(content)


def _ask_dashboard(address: str, path: str) -> bytes:
    token = (Path.home() / ".ray" / "auth_token").read_text().strip()
    request = urllib.request.Request(address + path, headers={"Authorization": f"Bearer {token}"})
    give_up_at = time.monotonic() + 90.0
    while True:
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return bytes(answer.read())
        except urllib.error.HTTPError as error:  # before a node's agent is up, and where one is slow to answer
            if time.monotonic() > give_up_at:
                raise AssertionError(f"{path}: {error.read().decode(errors='replace')[:1000]}") from error
            time.sleep(1.0)


def _command(pid: int) -> list[str]:
    with contextlib.suppress(FileNotFoundError):  # it ended just now
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return []


def _is_text(path: Path) -> bool:
    return path.is_file() and path.suffix in (".log", ".out", ".err", ".json", ".txt", ".yaml")


def test_a_run_is_seen_from_its_folder_and_from_its_cluster_until_it_is_killed(watched: tuple[Job, str]) -> None:
    job, address = watched
    storage = Storage.at(job.folder)
    found = read_status(storage)
    assert (found.run, found.state, found.world_size, found.max_workers) == ("watched", State.training, 2, 2)
    assert found.speed is not None
    assert found.eta_s is not None
    assert found.checkpoints[0].step >= 50
    assert found.interruptions == []

    for program in (["-m", "jobs.status", address, "--json"], ["-c", FROM_AFAR, address]):
        printed = subprocess.run([sys.executable, *program], cwd=ROOT, capture_output=True, text=True, timeout=240)
        assert printed.returncode == 0, printed.stderr
        seen = Status.from_dict(json.loads(printed.stdout))
        assert (seen.run, seen.state, seen.folder, seen.world_size) == ("watched", "training", str(storage), 2), (
            printed.stdout
        )
        assert "RUNNING" in seen.job[0]
        assert seen.step >= found.step

    subprocess.run(["kill", "-9", str(job.workers()[1])], check=True)
    found = until(lambda: read_status(storage), lambda each: bool(each.causes))
    assert found.state in (State.regrouping, State.training)
    assert list(found.causes) == ["worker_died"]
    found = until(lambda: read_status(storage), lambda each: each.state is State.training and each.generation == 2)
    assert found.interruptions[0].back_s is not None
    assert found.interruptions[0].ranks_before == 2

    job.kill_driver_and_workers()
    killed_at = time.time()
    found = until(lambda: read_status(storage), lambda each: each.state is not State.training)
    assert found.state in (State.gone, State.regrouping)
    found = until(lambda: read_status(storage), lambda each: each.state is State.gone)
    assert time.time() - killed_at < 3 * GONE_S
    assert found.since == found.heard_at
    assert found.heard_at is not None
    assert found.heard_at < killed_at + 2.0
    command = [sys.executable, "-m", "jobs.status", str(job.folder), "--json"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert json.loads(printed)["state"] == "gone"
