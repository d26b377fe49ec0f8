"""A Ray that does not start is one clear line, whatever Ray raises."""

import errno
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from jobs import prepare_data
from ray._private import ray_constants, services

from regrow.config.schema import ClusterConfig, PretrainConfig
from regrow.control.membership import ENDS_WITH_JOB
from regrow.errors import ClusterError
from regrow.runtime import cluster
from regrow.runtime.cluster import check_room, cluster_for, patient_start, room_for


@pytest.mark.parametrize("local_nodes", [0, 2])
def test_a_ray_that_does_not_start_is_one_line(
    local_nodes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("a-long-name-" * 8)  # longer than the names of sockets may be
    folder.mkdir()
    monkeypatch.setenv("RAY_TMPDIR", str(folder))
    config = ClusterConfig(address=None, local_nodes=local_nodes, dashboard=False)
    refused = pytest.raises(ClusterError, match=r"^Ray did not start on this machine: .*107 bytes")
    with refused as caught, cluster_for(config):
        pass
    assert "\n" not in str(caught.value)
    assert f"{folder}/ray/session_latest/logs" in str(caught.value)


def test_a_corpus_is_prepared_on_all_cores_of_a_machine_that_would_train_on_several_nodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before, by one task a node: each had the one CPU of a worker that a cluster is asked for."""
    handed: list[ClusterConfig] = []

    class Done(Exception):
        pass

    def prepare_all(*settings: Any, distribute: Callable[..., Any], **more: Any) -> None:
        distribute(int, [1])

    def start(config: ClusterConfig) -> None:
        handed.append(config)
        raise Done

    monkeypatch.setattr("regrow.data.prepare.prepare.find_or_prepare", prepare_all)
    monkeypatch.setattr(cluster, "cluster_for", start)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(Done):
        prepare_data.main(PretrainConfig(cluster=ClusterConfig(local_nodes=2, max_workers=8)))
    assert [(each.local_nodes, each.max_workers, each.cpus_per_worker) for each in handed] == [(0, 1, 1)]


def test_local_nodes_have_room_for_all_workers_in_whole_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six workers on two nodes, `parallel.tp=2`: two nodes of three are room for four."""
    asked: list[int] = []
    stand_in = SimpleNamespace(address="", shutdown=lambda: None)
    joined = SimpleNamespace(dashboard_url="", address_info={"session_dir": ""})
    monkeypatch.setattr("ray.cluster_utils.Cluster", lambda **options: stand_in)
    monkeypatch.setattr(cluster, "add_local_node", lambda nodes, config, num_workers: asked.append(num_workers))
    monkeypatch.setattr(cluster, "check_room", lambda *_: None)
    monkeypatch.setattr(cluster.ray, "init", lambda *address, **options: joined)
    monkeypatch.setattr(cluster.ray, "shutdown", lambda *options: None)
    with cluster_for(ClusterConfig(local_nodes=2, max_workers=6), 2):
        pass
    assert sum(number // 2 * 2 for number in asked) >= 6


@pytest.mark.parametrize("local_nodes", [0, 2])
def test_a_dashboard_whose_port_is_taken_has_the_next_free_one(
    local_nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray looks further only where it is given no port: a second job on a machine did not start."""
    commands: list[list[str]] = []

    def note(command: list[str], *_: Any, **__: Any) -> None:
        commands.append(command)
        raise RuntimeError("noted")

    def start(*, dashboard_port: int | None, **_: Any) -> None:
        """Its dashboard, up to its process."""
        of_session = ("127.0.0.1", "127.0.0.1:1", "00", "127.0.0.1", "/tmp", "/tmp", "/tmp")
        services.start_api_server(True, True, *of_session, port=dashboard_port)

    monkeypatch.setattr(services, "start_ray_process", note)
    monkeypatch.setattr(ray, "init", start)
    monkeypatch.setattr("ray.cluster_utils.Cluster", lambda *, head_node_args, **_: start(**head_node_args))
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        config = ClusterConfig(address=None, local_nodes=local_nodes, dashboard_port=port)
        with pytest.raises(ClusterError, match="noted"), cluster_for(config):
            pass
    assert {f"--port={port}", "--port-retries=50"} <= set(commands[0]), "its process tries this one and 50 more"
    assert ray_constants.DEFAULT_DASHBOARD_PORT == 8265


@pytest.mark.parametrize("at", ["home/.ray/auth_token", "home/.ray", "home"])
def test_a_home_without_room_for_rays_token_is_one_line_that_names_it(
    at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, RAY_TMPDIR was named, which does not help."""

    def init(**_: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(tmp_path / at))

    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(ClusterError) as caught, cluster_for(ClusterConfig(address=None)):
        pass
    assert str(caught.value) == (
        f"Ray did not start on this machine: [Errno 13] Permission denied: '{tmp_path / at}'. Ray keeps its token in "
        "~/.ray: set HOME to a folder that can be written"
    )


def test_a_node_that_is_slow_to_come_up_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray asks until its first answer after 30 s."""
    asked = 0

    def get_node(gcs_address: str, node_id: str) -> dict[str, str]:
        nonlocal asked
        asked += 1
        if asked < 4:
            raise RuntimeError("not registered")
        return {"node_id": node_id}

    monkeypatch.setattr(services, "get_node", get_node)
    monkeypatch.setattr(cluster, "POLL_S", 0.0)
    with patient_start():
        assert services.get_node("address", "node") == {"node_id": "node"}
    assert services.get_node is get_node
    asked = 0
    monkeypatch.setattr(cluster, "START_S", 0.0)
    with patient_start(), pytest.raises(RuntimeError, match="not registered"):
        services.get_node("address", "node")


def test_ranks_that_are_to_be_on_one_node_are_refused_where_none_has_room_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before anything is prepared for them."""
    nodes = [{"Alive": True, "NodeID": name, "Resources": {"CPU": 1.0}} for name in "ab"]
    joined = SimpleNamespace(dashboard_url=None, address_info={"session_dir": ""})
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    monkeypatch.setattr(cluster, "_join", lambda config: joined)
    config = ClusterConfig(address="head:6379", min_workers=2, max_workers=2)
    with cluster_for(config):
        pass
    with pytest.raises(ClusterError, match=r"with room for 0 workers, parallel.tp=2 of them on a node"):
        cluster_for(config, 2).__enter__()


@pytest.mark.parametrize(("cpus", "each", "room"), [(4, 0.8, 5), (1, 0.1, 10), (4, 0.9, 4), (4, 1.0, 4)])
def test_room_is_counted_as_ray_counts_it(cpus: int, each: float, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """4.0 // 0.8 is 4 in floating point."""
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "NodeID": "node", "Resources": {"CPU": float(cpus)}}])
    assert room_for(ClusterConfig(cpus_per_worker=each)) == room


@pytest.mark.parametrize("coming", [[0, 0, 8, 8, 16], [0, 8]], ids=["come", "stay away"])
@pytest.mark.parametrize("is_made_for_it", [True, False])
def test_a_job_waits_for_the_nodes_of_a_cluster_that_was_made_for_it(
    coming: list[int], is_made_for_it: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, what the submitter submits again to a head that was replaced failed at once, and cost a retry of ten."""
    clock, said, left = [0.0], list[str](), list(coming)

    def nodes() -> list[dict[str, Any]]:
        gpus = left.pop(0) if len(left) > 1 else left[0]
        return [{"Alive": True, "NodeID": "a", "Resources": {"CPU": 64.0, "GPU": float(gpus)}}]

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    monkeypatch.setattr(cluster.ray, "nodes", nodes)
    monkeypatch.setattr(cluster, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
    if is_made_for_it:
        monkeypatch.setenv(ENDS_WITH_JOB, "1")
    config = ClusterConfig(address="auto", min_workers=16, max_workers=16, gpus_per_worker=1)
    if is_made_for_it and coming[-1] == 16:
        assert check_room(config, tell=said.append) == 16
    else:
        with pytest.raises(ClusterError, match="needs 16 GPUs, found"):
            check_room(config, tell=said.append)
    waits = "of cluster.min_workers=16 workers: its nodes are still coming, and are waited for up to 900 s"
    assert said == ([f"the cluster has room for {room} {waits}" for room in (0, 8)] if is_made_for_it else [])
    assert (clock[0] >= cluster.COMING_S) is (is_made_for_it and coming[-1] == 8)
