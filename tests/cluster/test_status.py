"""What `jobs.status` and Ray's dashboard say of a real run, while it trains and after it was killed.

With PAGES=FOLDER the dashboard's screenshots are left there to be looked at.
"""

import json
import os
import re
import socket
import subprocess
import sys
import time
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
job_status._is_here = lambda *_: False  # as if the folder were the cluster's alone
print(job_status.on_ray(sys.argv[1], run="watched")().to_json())
"""
SETTINGS = [*SMALL, "cluster.min_workers=1", "cluster.max_workers=2", "train.steps=100000", "checkpoint.every_steps=50"]

PAGES = {  # of Ray's dashboard, and what they say of a run
    "overview": ("jobs.pretrain", "(no failures)"),
    "jobs": ("run.name=watched", "RUNNING"),
    "actors": ("RayTrainWorker", "Keeper", "TokenStream"),
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
    """A run at 60 steps and more, and where its Ray's dashboard is."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    dashboard = ["cluster.dashboard=true", f"cluster.dashboard_port={port}"]
    with Job(storage, "watched", *SETTINGS, *dashboard) as job:
        job.wait_for(lambda: job.last_step() >= 60 and bool(job.events("checkpoint")), 240)
        yield job, re.findall(r"Ray dashboard: (http://\S+)", job.printed())[-1]


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
