"""An address where no Ray answers is one line, soon, and nothing of Ray's own."""

import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import ray
from ray._private.utils import check_version_info

from regrow.config.plain import to_yaml
from regrow.config.schema import ClusterConfig, PretrainConfig
from regrow.errors import ClusterError
from regrow.record.events import Submitted
from regrow.record.log import RunLog
from regrow.runtime import cluster as local_cluster
from regrow.runtime import maintenance
from regrow.runtime.cluster import cluster_for
from regrow.runtime.head import answering_head
from regrow.runtime.maintenance import attached
from regrow.storage import LocalStorage

ROOT = Path(__file__).parents[2]


@contextmanager
def listener(answer: bytes | None) -> Iterator[int]:
    """A port that takes connections and answers the first bytes with these: b"" hangs up, None says nothing."""
    with socket.socket() as listening:
        listening.bind(("0.0.0.0", 0))  # Ray takes this machine's own address for 127.0.0.1
        listening.listen()

        def serve() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:  # closed
                    return
                with connection:
                    connection.recv(4096)
                    if answer is None:
                        connection.recv(1)  # until the other side has gone
                    else:
                        connection.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listening.getsockname()[1]
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()


def a_run(folder: Path) -> None:
    """One that has begun and not ended."""
    log = RunLog(LocalStorage(folder))
    log.event(Submitted(time=1.0))
    log.close()
    (folder / "config.yaml").write_text(to_yaml(PretrainConfig()))
    (folder / "run.json").write_text('{"run_id": "mine"}')


def closed_port() -> int:
    with socket.socket() as closed:
        closed.bind(("0.0.0.0", 0))
        return int(closed.getsockname()[1])


def test_a_closed_port_is_no_head() -> None:
    port = closed_port()
    with pytest.raises(ConnectionError, match=rf"^the head at [\d.]+:{port} does not answer: .*refused"):
        answering_head(f"127.0.0.1:{port}")


def test_a_port_that_takes_connections_and_says_nothing_costs_the_deadline_and_no_more() -> None:
    with listener(None) as port:
        refused = pytest.raises(
            ConnectionError, match=rf"^the head at .*:{port} does not answer: nothing within 0.3 s$"
        )
        begun = time.monotonic()
        with refused:
            answering_head(f"127.0.0.1:{port}", timeout_s=0.3)
        assert time.monotonic() - begun >= 0.3


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"", "hung up|reset"),
        (bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]), "what listens there is no Ray head: "),  # SETTINGS, as a proxy does
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", r"what listens there is no Ray head, it says b'HTTP/1.1 '"),
    ],
)
def test_what_is_no_grpc_server_is_no_head(answer: bytes, why: str) -> None:
    with listener(answer) as port, pytest.raises(ConnectionError, match=why):
        answering_head(f"127.0.0.1:{port}", timeout_s=30)


def test_a_cluster_that_does_not_answer_is_one_line_and_ray_is_not_asked(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def asked(**_: object) -> None:
        raise AssertionError("ray.init was called")

    monkeypatch.setattr(local_cluster.ray, "init", asked)
    with listener(b"") as port:
        address = f"127.0.0.1:{port}"
        refused = pytest.raises(
            ClusterError, match=rf"needs 1 CPUs, found 0: no Ray cluster at '{address}' \(the head at"
        )
        with refused as caught, cluster_for(ClusterConfig(address=address)):
            pass
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_a_cluster_of_other_versions_is_one_line_that_has_them_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: object) -> None:
        check_version_info({"ray_version": "2.59.0", "python_version": "3.12.1"}, "node 10.0.0.1")

    monkeypatch.setattr(local_cluster.ray, "init", refuse)
    for module in (local_cluster, maintenance):
        monkeypatch.setattr(module, "answering_head", lambda address: address)
    a_run(tmp_path)
    mine = f"Ray: {ray.__version__} Python: {platform.python_version()}"
    for joining in (cluster_for(ClusterConfig(address="head:6379")), attached(LocalStorage(tmp_path), "head:6379")):
        with pytest.raises(ClusterError) as caught, joining:
            pass
        assert str(caught.value) == (
            "the Ray cluster at 'head:6379' has other versions than this process; install here what it has. Version "
            "mismatch: The cluster was started with: Ray: 2.59.0 Python: 3.12.1 This process on node 10.0.0.1 was "
            f"started with: {mine}"
        )


def test_the_address_that_a_ray_left_behind_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    port = closed_port()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "ray").mkdir()
        (Path(folder) / "ray" / "ray_current_cluster").write_text(f"127.0.0.1:{port}")
        monkeypatch.setenv("RAY_TMPDIR", folder)
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        monkeypatch.setattr("ray._private.services.find_gcs_addresses", set)  # of other tests
        with pytest.raises(ConnectionError, match=rf"the head at .*:{port} does not answer"):
            answering_head("auto")


def test_where_no_ray_was_ever_started_that_is_said_in_our_words(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("RAY_TMPDIR", folder)
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        monkeypatch.setattr("ray._private.services.find_gcs_addresses", set)  # of other tests
        with pytest.raises(ConnectionError, match=r"^none is running on this machine and RAY_ADDRESS is not set$"):
            answering_head("auto")


@contextmanager
def real_head(folder: Path, **environment: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """The GCS alone, which is a head for this: it takes a second to start, not ten. Without a token by default."""
    address, port = ray.util.get_node_ip_address(), closed_port()
    server = Path(ray.__file__).parent / "core" / "src" / "ray" / "gcs" / "gcs_server"
    arguments = [f"--gcs_server_port={port}", f"--log_dir={folder}", "--config_list=", f"--node-ip-address={address}"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(
        [server, *arguments, "--session-name=s"], env=os.environ | {"RAY_AUTH_MODE": "disabled"} | environment, **quiet
    ) as head:
        try:
            give_up_at = time.monotonic() + 60
            while True:
                try:
                    with socket.create_connection((address, port), 1):
                        break
                except OSError:
                    assert head.poll() is None
                    assert time.monotonic() < give_up_at
                    time.sleep(0.1)
            yield f"{address}:{port}", head
        finally:
            head.kill()


def test_a_real_head_answers_until_it_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # another test's Ray may have set another
    with real_head(tmp_path) as (address, head):
        assert answering_head(address) == address
        os.kill(head.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, head.pid, os.WSTOPPED)  # every thread of it, not only soon
        with pytest.raises(ConnectionError, match=r"nothing within 0.5 s"):
            answering_head(address, timeout_s=0.5)


TOKEN = "of-this-cluster" * 3
WANTS = "wants its token; set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH"


def run_python(home: Path, *command: str, **environment: str) -> str:
    """What a Python says on stdout and stderr whose user has this home, and these variables of Ray's alone."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")} | {"HOME": str(home)}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=kept | {"PYTHONPATH": str(ROOT / "platform")} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    return done.stdout


LOOK = """
import os, sys
from regrow.runtime.head import answering_head
from regrow.runtime.maintenance import attached
from regrow.storage import LocalStorage
try:
    print(answering_head(sys.argv[1]) == sys.argv[1], os.environ.get("RAY_AUTH_MODE"))
except ConnectionError as error:
    print(f"{type(error).__name__}: {error}")
"""


def test_a_head_with_a_token_is_shown_the_token_that_is_here_and_one_without_is_not(tmp_path: Path) -> None:
    """A Ray whose processes use a token refuses the calls of those that do not: its actors die before they run."""
    homes = {"none": "", "right": TOKEN, "wrong": "of-another-one" * 3}
    for name, token in homes.items():
        (tmp_path / name / ".ray").mkdir(parents=True)
        if token:
            (tmp_path / name / ".ray" / "auth_token").write_text(token)  # as an earlier Ray on this machine leaves it
    token_mode = {"RAY_AUTH_MODE": "token"}
    with_token: list[tuple[str, dict[str, str], str]] = [
        ("none", {}, WANTS),
        ("none", token_mode, WANTS),
        ("none", token_mode | {"RAY_AUTH_TOKEN_PATH": "/not/there"}, "wants its token: "),
        ("none", {"RAY_AUTH_TOKEN": TOKEN}, "True token"),
        ("none", token_mode | {"RAY_AUTH_TOKEN": homes["wrong"]}, "refuses the token that is here"),
        ("right", {}, "True token"),
        ("right", {"RAY_AUTH_MODE": "disabled"}, WANTS),
        ("wrong", {}, "refuses the token that is here"),
    ]
    with real_head(tmp_path, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=TOKEN) as (address, _):
        for home, environment, words in with_token:
            said = run_python(tmp_path / home, "-c", LOOK, address, **environment)
            assert words in said, (home, environment, said)
            assert said.count("\n") == 1, said
    with real_head(tmp_path) as (address, _):
        assert run_python(tmp_path / "right", "-c", LOOK, address) == "True None\n"
        said = run_python(tmp_path / "right", "-c", LOOK, address, **token_mode)
        assert "has no token, and RAY_AUTH_MODE=token is set here" in said


def test_commands_that_are_not_let_in_say_so_in_one_line(tmp_path: Path) -> None:
    run = tmp_path / "run"
    a_run(run)
    with real_head(tmp_path, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=TOKEN) as (address, _):
        for command in (
            ("-m", "jobs.drain", str(run), "--address", address),
            ("-m", "jobs.pretrain", f"cluster.address={address}", f"run.storage_path={tmp_path}", "run.name=new"),
        ):
            said = run_python(tmp_path, *command)
            assert said == f"error: no Ray cluster lets us in at '{address}': the head at {address} {WANTS}\n"
