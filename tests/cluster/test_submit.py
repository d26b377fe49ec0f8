"""`jobs.submit` and a submitter's command against a real Ray with token authentication, as a user without rights."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from regrow.drill.processes import of_ray, send, wait_until_gone
from regrow.record.log import read_events, read_metrics
from regrow.storage import Storage
from regrow.submit.pods import drain_command
from support.cluster import ROOT, SMALL
from support.submission import rendered
from support.unprivileged import NOBODY, unprivileged, why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=f"no user without rights: {why_not()}")

LOCAL = ["cluster.local_nodes=0", "cluster.max_workers=2"]
STEPS = 100
SLOW = ["model.dim=256", "model.ffn_dim=704", "data.seq_len=128"]  # a step of a third of a second
BIN = Path(sys.executable).parent
TOKEN, OTHER_TOKEN = "of-this-cluster" * 3, "of-another-one" * 3


class Place:
    """A running head, and the user who has been given its token."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.empty = folder, folder / "empty"
        for each in ("home", "empty", "runs"):
            (folder / each).mkdir()
        for name, token in (("token", TOKEN), ("other", OTHER_TOKEN)):
            (folder / name).write_text(token)
        for each in [folder, *folder.iterdir()]:
            if os.geteuid() == 0:
                os.chown(each, NOBODY, NOBODY)
        (folder / "token").chmod(0o600)
        self.port, self.dashboard = free_ports(2)
        self.address = f"http://127.0.0.1:{self.dashboard}"
        ports = free_ports(3)
        self.head = self.start(
            [
                *(str(BIN / "ray"), "start", "--head", "--block", "--disable-usage-stats", "--num-cpus=4"),
                *("--node-ip-address=127.0.0.1", f"--port={self.port}", f"--dashboard-port={self.dashboard}"),
                f"--ray-client-server-port={ports[0]}",
                *(f"--dashboard-agent-listen-port={ports[1]}", f"--metrics-export-port={ports[2]}"),
            ],
            output=folder / "head.out",
        )

    def environment(self, token: str) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
        return kept | {
            "HOME": str(self.folder / "home"),
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT / "platform"),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.folder / token),
            "RAY_TMPDIR": str(self.folder),
        }

    def start(self, command: list[str], *, output: Path, token: str = "token") -> "subprocess.Popen[bytes]":
        with open(output, "wb") as file:
            return subprocess.Popen(
                unprivileged(command, self.empty),
                cwd=ROOT,
                env=self.environment(token),
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def run(self, *command: str, token: str = "token", timeout_s: float = 240.0) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            unprivileged(list(command), self.empty),
            cwd=ROOT,
            env=self.environment(token),
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )

    def submit(self, name: str, *arguments: str, token: str = "token") -> subprocess.CompletedProcess[str]:
        return self.run(sys.executable, "-m", "jobs.submit", *self.arguments(name), *arguments, token=token)

    def arguments(self, name: str) -> list[str]:
        ray = ["submit.backend=ray", f"submit.address={self.address}"]
        return [*ray, *LOCAL, *SMALL, *SLOW, *self.run_arguments(name), f"train.steps={STEPS}"]

    def run_arguments(self, name: str) -> list[str]:
        return [f"run.name={name}", f"run.storage_path={self.folder / 'runs'}"]

    def rows(self, name: str) -> list[dict[str, Any]]:
        folder = self.folder / "runs" / name
        return read_metrics(Storage.at(folder)) if (folder / "metrics.jsonl").exists() else []

    def events(self, name: str, kind: str) -> list[dict[str, Any]]:
        return [event for event in read_events(Storage.at(self.folder / "runs" / name)) if event["event"] == kind]

    def end(self) -> None:
        wait_until_gone(send(signal.SIGKILL, of_ray(str(self.folder))), 20.0)
        self.head.wait()


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [int(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    return ports


def with_deadline(condition: Callable[[], bool], timeout_s: float) -> bool:
    give_up_at = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > give_up_at:
            return False
        time.sleep(0.1)
    return True


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    folder = Path(tempfile.mkdtemp(prefix="rgj", dir="/tmp"))  # socket paths below it have to stay short
    folder.chmod(0o755)
    here = Place(folder)
    try:

        def is_up() -> bool:
            assert here.head.poll() is None, (folder / "head.out").read_text()
            return here.run(str(BIN / "ray"), "job", "list", f"--address={here.address}").returncode == 0

        assert with_deadline(is_up, 90.0), (folder / "head.out").read_text()
        yield here
    finally:
        here.end()
        shutil.rmtree(folder, ignore_errors=True)


def test_a_wrong_token_is_refused_in_one_line(place: Place) -> None:
    for action in ("apply", "status", "stop", "logs"):
        refused = place.submit("intruder", f"submit.action={action}", token="other")
        assert refused.returncode == 1
        assert refused.stderr.startswith(f"error: no Ray cluster lets us in at {place.address} ")
        assert refused.stderr.count("\n") == 1
        assert "Traceback" not in refused.stdout
    address = f"127.0.0.1:{place.port}"
    joining = [f"cluster.address={address}", *LOCAL, *place.run_arguments("intruder")]
    refused = place.run(sys.executable, "-m", "jobs.pretrain", *joining, token="other")
    assert refused.returncode == 1
    assert refused.stderr.startswith(f"error: no Ray cluster lets us in at '{address}': the head at ")
    assert f":{place.port} refuses the token that is here" in refused.stderr
    assert refused.stderr.count("\n") == 1
    assert not (place.folder / "runs" / "intruder").exists()


@pytest.mark.long
def test_a_run_is_submitted_stopped_and_resumed_by_the_same_commands(place: Place) -> None:
    applied = place.submit("mine", "submit.action=apply", "submit.follow=false")
    assert applied.returncode == 0, applied.stderr
    assert re.search(r"^submitted \S+$", applied.stderr, re.MULTILINE)
    begun = with_deadline(lambda: len(place.rows("mine")) >= 5, 180.0)
    assert begun, place.submit("mine", "submit.action=logs").stdout
    twice = place.submit("mine", "submit.action=apply", "submit.follow=false")
    assert twice.returncode == 1
    assert "run 'mine' is there as job " in twice.stderr
    stopped = place.submit("mine", "submit.action=stop")
    assert stopped.returncode == 0, stopped.stderr
    reached = len(place.rows("mine"))
    assert 5 <= reached < STEPS
    assert [event["step"] for event in place.events("mine", "stopped")] == [reached]
    status = place.submit("mine", "submit.action=status")
    assert re.fullmatch(r"\S+: (STOPPED|SUCCEEDED|FAILED), commit \S+, started .*\n", status.stdout), status.stdout

    resumed = place.submit("mine", "submit.action=apply")
    assert resumed.returncode == 0, resumed.stderr + resumed.stdout
    assert "finished" in resumed.stdout
    rows = place.rows("mine")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert place.events("mine", "generation")[-1]["start_step"] == reached  # nothing was trained twice
    assert len(place.events("mine", "submitted")) == 2
    assert "SUCCEEDED" in place.submit("mine", "submit.action=status").stdout.splitlines()[0]
    if os.geteuid() == 0:
        assert {path.owner() for path in (place.folder / "runs" / "mine").iterdir()} == {"nobody"}


def test_the_submitters_command_for_kubernetes_submits_and_follows(place: Place) -> None:
    arguments = ["+cluster=h100x64", *place.run_arguments("rendered"), *SMALL, "train.steps=20"]
    (job,) = [each for each in rendered(arguments)[1] if each["kind"] == "RayJob"]
    entrypoint = str(job["spec"]["entrypoint"])
    assert "+cluster=h100x64" in entrypoint
    local = entrypoint.replace("+cluster=h100x64", f"+cluster=cpu3 model=debug {' '.join(LOCAL)}")
    (container,) = job["spec"]["submitterPodTemplate"]["spec"]["containers"]
    *words, given = container["command"]
    assert (words[0], given) == ("python", entrypoint)
    by_kuberay = [f"RAY_DASHBOARD_ADDRESS={place.address.removeprefix('http://')}", "RAY_JOB_SUBMISSION_ID=rendered-1"]
    command = ["env", *by_kuberay, sys.executable, *words[1:], f"cd {ROOT} && exec {local}"]  # as in the image's folder
    refused = place.run(*command, token="other")
    assert refused.returncode == 1
    assert refused.stderr.startswith("error: lost sight of rendered-1 (")
    done = place.run(*command)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [row["step"] for row in place.rows("rendered")] == list(range(1, 21))
    lines = done.stdout.splitlines()
    assert (lines[0], lines[-1]) == ("submitted rendered-1", "rendered-1: SUCCEEDED")
    assert len([line for line in lines if line.startswith("finished 20 steps")]) == 1
    again = place.run(*command)  # as of a pod that was evicted
    assert (again.returncode, again.stdout.splitlines()) == (0, lines[1:]), again.stderr


def test_a_pods_drain_ends_its_raylet_and_starts_no_python_worker(ray_folder: Path, tmp_path: Path) -> None:
    """The command of a worker pod, where the raylet has had no driver: as one, it would have a worker started a CPU."""
    (port, client, agent, metrics), output = free_ports(4), tmp_path / "head.out"
    command = [
        *(str(BIN / "ray"), "start", "--head", "--block", "--disable-usage-stats", "--num-cpus=2"),
        *("--include-dashboard=false", f"--port={port}", f"--ray-client-server-port={client}"),
        *(f"--dashboard-agent-listen-port={agent}", f"--metrics-export-port={metrics}"),
    ]
    kept = {key: value for key, value in os.environ.items() if not key.startswith("RAY_") or key == "RAY_TMPDIR"}
    environment = kept | {"RAY_AUTH_MODE": "disabled"}
    with open(output, "wb") as file:
        head = subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)
    try:
        pgrep = tmp_path / "pgrep"  # a pod sees its own processes alone
        pgrep.write_text(f'#!/bin/sh\nexec {shutil.which("pgrep")} --parent {head.pid} "$@"\n')
        pgrep.chmod(0o755)
        asked = environment | {"RAY_ADDRESS": f"127.0.0.1:{port}", "PATH": f"{tmp_path}:{BIN}:{os.environ['PATH']}"}
        up = with_deadline(lambda: "will now block forever" in output.read_text(), 90.0)  # its node is registered
        assert up, output.read_text()
        done = subprocess.run(["bash", "-c", drain_command(60)], env=asked, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert subprocess.run([pgrep, "-x", "raylet"]).returncode == 1, done.stderr  # it has left
        logs = [path.name for path in (ray_folder / "session_latest" / "logs").iterdir()]
        assert "raylet.out" in logs
        assert [name for name in logs if re.match(r"python-core-(driver|worker)-", name)] == []
    finally:
        wait_until_gone(send(signal.SIGKILL, of_ray(str(ray_folder.parent))), 20.0)
        head.wait()
