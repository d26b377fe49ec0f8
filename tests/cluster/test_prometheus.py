"""A real Prometheus scrapes a real run: every expression of the dashboard and every alert rule has something to say,
each alert fires when what it is for happens, and none of them otherwise.
"""

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from regrow.config.schema import DataConfig
from regrow.data.prepare.documents import Piece
from regrow.drill.nodes import LocalNodes, local_nodes
from regrow.show.prometheus import FAMILIES
from regrow.state.memory.held import COPY
from support.cluster import SMALL, Job
from support.corpus import WordRecipe
from support.prometheus import Prometheus, dashboard_expressions, discovery_of, hurried, missing, rules

pytestmark = [
    pytest.mark.skipif(bool(missing("prometheus")), reason=missing("prometheus")),
    pytest.mark.timeout(900),  # all waits are for what happens, on machines that do other things too
]

SETTLE_S = 30.0  # from what happens to what Prometheus knows of it, on a busy machine
LOST_AFTER_S = 15.0  # more than it takes a hurried rule to call a run lost
# in expressions that have nothing to say where there are none
ON_GPUS = ("ray_node_gpus_utilization", "ray_regrow_rank_power_watts", "ray_regrow_rank_temperature_celsius")
WHEN_SOMETHING_CHANGES = ("changes(ray_regrow_generation",)


@pytest.fixture(autouse=True)
def _every_two_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_metrics_report_interval_ms", "2000")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Settings that name a small one, which is soon prepared."""
    file = tmp_path_factory.mktemp("corpus") / "words.jsonl"
    documents = WordRecipe(400).documents(DataConfig(), Piece("words", 0, 400))
    file.write_text("".join(json.dumps({"text": document.text}) + "\n" for document in documents))
    return ["data=text_files", f"data.source={file}", "data.validation_fraction=0.05"]


@pytest.fixture
def ray_with_dashboard(_every_two_seconds: None, ray_folder: Path) -> Iterator[tuple[str, Path]]:
    """A Ray that outlives the jobs on it: its address, and the file that its dashboard keeps for Prometheus."""
    from ray.cluster_utils import Cluster

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    head = {"num_cpus": 2, "include_dashboard": True, "dashboard_port": port}
    nodes = Cluster(initialize_head=True, head_node_args=head)
    try:
        yield nodes.address, ray_folder / "prom_metrics_service_discovery.json"
    finally:
        nodes.shutdown()


def test_dashboard_and_rules_speak_of_a_run_that_is_scraped_and_no_alert_fires_when_it_stops(
    ray_with_dashboard: tuple[str, Path], corpus: list[str], tmp_path: Path
) -> None:
    address, discovery = ray_with_dashboard
    arguments = [
        *SMALL,
        *corpus,
        f"cluster.address={address}",
        "train.steps=100000",
        "train.validate_every_steps=20",
        "train.validation_seqs=12",
        "checkpoint.every_steps=30",
        "observe.report_every_s=2",
    ]
    with (
        Prometheus(tmp_path / "prometheus", discovery=discovery, rules=hurried(rules())) as prometheus,
        Job(tmp_path, "watched", *arguments) as job,
    ):
        job.wait_for(lambda: job.last_step() > 60, 300)
        silent = set(dashboard_expressions())

        def all_speak() -> bool:
            silent.difference_update([each for each in silent if prometheus.query(each)])
            return all(any(name in each for name in (*ON_GPUS, *WHEN_SOMETHING_CHANGES)) for each in silent)

        try:
            job.wait_for(all_speak, 90)
        except AssertionError as error:
            raise AssertionError(f"nothing to say: {sorted(silent)}") from error
        assert set(prometheus.rule_health().values()) == {"ok"}
        told = figures(prometheus)
        assert told >= {f"ray_{name}" for name in FAMILIES} - set(ON_GPUS)
        _agrees_with_the_log(prometheus, job)
        cost = prometheus.value("sum(ray_regrow_metrics_cpu_seconds_total) / sum(ray_regrow_step_seconds_total)")
        assert 0 < cost <= 0.01
        assert prometheus.value('sum(ray_regrow_state_seconds_total{state="productive"})') > 0

        job.interrupt()
        assert job.wait() == 130, job.printed()
        prometheus.wait_for(
            lambda: prometheus.value('sum(ray_regrow_stops_total{reason="interrupted"})') == 1, timeout_s=SETTLE_S
        )
        prometheus.wait_for(lambda: not prometheus.query("ray_regrow_running"), timeout_s=SETTLE_S)
        time.sleep(LOST_AFTER_S)
        assert "RegrowRunLost" not in {alert for alert, _ in prometheus.have_fired()}


def figures(prometheus: Prometheus) -> set[str]:
    return {each["metric"]["__name__"] for each in prometheus.query('{__name__=~"ray_regrow_.+"}')}


def _agrees_with_the_log(prometheus: Prometheus, job: Job) -> None:
    """What is scraped is what the run's own log has, as of a step that both know."""
    at = time.time() - 1.0
    (step,) = prometheus.query("ray_regrow_step", at)
    (loss,) = prometheus.query("ray_regrow_loss", at)
    (tokens,) = prometheus.query("ray_regrow_trained_tokens", at)
    rows = {row["step"]: row for row in job.metrics()}
    row = rows[int(step["value"][1])]
    assert float(loss["value"][1]) == row["loss"]
    assert float(tokens["value"][1]) == row["tokens_seen"]
    assert step["metric"]["run"] == "watched"
    assert not [label for label in step["metric"] if "rank" in label.lower()]


class Drill:
    """A run on two nodes of this machine, whose Prometheus has a second for every minute."""

    def __init__(self, prometheus: Prometheus, job: Job) -> None:
        self.prometheus, self.job = prometheus, job

    @property
    def firing(self) -> set[str]:
        return {alert for alert, _ in self.prometheus.firing()}

    def fires(self, alert: str, timeout_s: float = 150.0) -> None:
        key = (alert, self.job.folder.name)
        self.prometheus.wait_for(lambda: key in self.prometheus.firing(), timeout_s)
        told = self.prometheus.firing()[key]["annotations"]
        assert self.job.folder.name in told["summary"]
        assert not [text for text in told.values() if "no value" in text or "<error" in text], told

    def ends(self, alert: str, timeout_s: float = 150.0) -> None:
        self.prometheus.wait_for(lambda: alert not in self.firing, timeout_s)


@contextmanager
def drill(storage: Path, name: str, *arguments: str, num_nodes: int = 2) -> Iterator[tuple[Drill, LocalNodes]]:
    discovery = storage / "nodes.json"
    room = "cluster.cpus_per_worker=2"  # so that the head has none
    arguments = (*SMALL, room, "train.steps=1000000", "observe.report_every_s=5", *arguments)
    with local_nodes(num_nodes, cpus=2) as nodes:
        table: list[dict[str, Any]] = nodes.raylets.global_state.node_table()
        discovery.write_text(
            discovery_of(f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}" for node in table)
        )
        with (
            Prometheus(storage / "prometheus", discovery=discovery, rules=hurried(rules())) as prometheus,
            Job(storage, name, *arguments, f"cluster.address={nodes.address}") as job,
        ):
            yield Drill(prometheus, job), nodes


@pytest.mark.long
def test_alerts_fire_where_room_storage_the_memory_tier_and_the_driver_are_lost(
    corpus: list[str], tmp_path: Path
) -> None:
    wanted = ["cluster.max_workers=3", "checkpoint.every_steps=null", "checkpoint.every_minutes=0.05"]
    with drill(tmp_path, "drilled", *corpus, *wanted) as (run, _):
        run.job.wait_for(lambda: run.job.last_step() > 25, 300)
        run.fires("RegrowBelowTargetSize")  # there are two nodes
        assert run.firing <= {"RegrowBelowTargetSize", "RegrowGoodputLow"}  # these steps are too small for good figures

        checkpoints, away = run.job.folder / "checkpoints", run.job.folder / "away"
        checkpoints.rename(away)
        checkpoints.write_text("storage is broken")
        run.fires("RegrowCheckpointOld")
        assert "RegrowSnapshotOld" not in run.firing
        checkpoints.unlink()
        away.rename(checkpoints)
        run.ends("RegrowCheckpointOld")

        blocked = _block_copies(run.job)
        run.fires("RegrowSnapshotOld")
        assert "RegrowNoProgress" not in run.firing
        for path in blocked:
            path.rmdir()
        run.ends("RegrowSnapshotOld")

        assert "RegrowRunLost" not in {alert for alert, _ in run.prometheus.have_fired()}
        os.kill(run.job.process.pid, signal.SIGKILL)
        run.fires("RegrowRunLost")


@pytest.mark.long
def test_alerts_fire_where_a_run_stands_still(corpus: list[str], tmp_path: Path) -> None:
    with drill(tmp_path, "still", *corpus, "cluster.min_workers=2", "cluster.max_workers=2") as (run, nodes):
        run.job.wait_for(lambda: run.job.last_step() > 25, 300)
        assert "RegrowNoProgress" not in run.firing
        nodes.kill(1)
        run.fires("RegrowNoProgress")
        run.fires("RegrowGoodputLow")
        assert "RegrowRunLost" not in {alert for alert, _ in run.prometheus.have_fired()}


@pytest.mark.long
def test_an_alert_fires_where_steps_are_not_finite_and_a_run_that_says_so_and_ends_is_not_lost(
    corpus: list[str], tmp_path: Path
) -> None:
    with drill(tmp_path, "diverging", *corpus, "optim.lr=1e30", num_nodes=1) as (run, _):
        run.fires("RegrowNotFinite", 300)
        assert run.job.wait() == 1, run.job.printed()
        run.prometheus.wait_for(lambda: not run.prometheus.query("ray_regrow_running"), SETTLE_S)
        time.sleep(LOST_AFTER_S)
        assert "RegrowRunLost" not in {alert for alert, _ in run.prometheus.have_fired()}


def _block_copies(job: Job) -> list[Path]:
    """A folder where each node keeps a copy of another one's snapshot, so that none can be written."""
    copies = [path for folder in job.memory() for path in folder.glob(f"*{COPY}")]
    assert copies
    for path in copies:
        path.unlink()
        path.mkdir()
    return copies
