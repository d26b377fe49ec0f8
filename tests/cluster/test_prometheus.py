"""A real Prometheus scrapes a real run: every expression of the dashboard and every alert rule has something to say,
each alert fires when what it is for happens, and none of them otherwise.
"""

import json
import os
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from regrow.checkpoint.held import COPY
from regrow.config.schema import DataConfig
from regrow.data.documents import Piece
from regrow.elastic.local_nodes import LocalNodes, local_nodes
from regrow.observe.metrics import FAMILIES
from regrow.testing.cluster import SMALL, Job
from regrow.testing.corpus import WordRecipe
from regrow.testing.prometheus import Prometheus, dashboard_expressions, discovery_of, hurried, missing, rules

pytestmark = [
    pytest.mark.skipif(bool(missing("prometheus")), reason=missing("prometheus")),
    pytest.mark.timeout(900),  # all waits are for what happens, on machines that do other things too
]

SETTLE_S = 15.0  # from what happens to what Prometheus knows of it, on a busy machine
ON_GPUS = ("ray_node_gpus_utilization",)  # expressions that have nothing to say where there are none
WHEN_SOMETHING_CHANGES = ("changes(ray_regrow_generation",)


@pytest.fixture(autouse=True)
def _every_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_metrics_report_interval_ms", "1000")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Settings that name a small one, which is soon prepared."""
    file = tmp_path_factory.mktemp("corpus") / "words.jsonl"
    documents = WordRecipe(400).documents(DataConfig(), Piece("words", 0, 400))
    file.write_text("".join(json.dumps({"text": document.text}) + "\n" for document in documents))
    return ["data=text_files", f"data.source={file}", "data.validation_fraction=0.05"]


@pytest.fixture
def ray_with_dashboard(_every_second: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Path]]:
    """A Ray that outlives the jobs on it: its address, and the file that its dashboard keeps for Prometheus."""
    from ray.cluster_utils import Cluster

    with tempfile.TemporaryDirectory(prefix="rgp", dir="/tmp", ignore_cleanup_errors=True) as folder:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        monkeypatch.setenv("RAY_TMPDIR", folder)  # where Ray notes the address
        (Path(folder) / "ray").mkdir()
        nodes = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 2, "include_dashboard": True, "dashboard_port": port, "temp_dir": folder},
        )
        try:
            yield nodes.address, Path(folder) / "prom_metrics_service_discovery.json"
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
            return not {each for each in silent if not each.startswith((*ON_GPUS, *WHEN_SOMETHING_CHANGES))}

        try:
            job.wait_for(all_speak, 90)
        except AssertionError as error:
            raise AssertionError(f"nothing to say: {sorted(silent)}") from error
        assert set(prometheus.rule_health().values()) == {"ok"}
        told = figures(prometheus)
        assert told >= {f"ray_{name}" for name in FAMILIES}
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
        time.sleep(8)  # more than the rule for lost runs waits
        assert "RegrowRunLost" not in {alert for alert, _ in prometheus.have_fired()}


def figures(prometheus: Prometheus) -> set[str]:
    return {each["metric"]["__name__"] for each in prometheus.query('{__name__=~"ray_regrow_.+"}')}


def _agrees_with_the_log(prometheus: Prometheus, job: Job) -> None:
    """What is scraped is what the run's own log has, as of a step that both know."""
    at = time.time() - 0.5
    (step,) = prometheus.query("ray_regrow_step", at)
    (loss,) = prometheus.query("ray_regrow_loss", at)
    (tokens,) = prometheus.query("ray_regrow_trained_tokens", at)
    rows = {row["step"]: row for row in job.metrics()}
    row = rows[int(step["value"][1])]
    assert float(loss["value"][1]) == row["loss"]
    assert float(tokens["value"][1]) == row["tokens_seen"]
    assert step["metric"]["run"] == "watched"
    assert not [label for label in step["metric"] if "rank" in label.lower()]


@pytest.mark.long
def test_each_alert_fires_when_what_it_is_for_happens(corpus: list[str], tmp_path: Path) -> None:
    """One run after another loses room, storage, its memory tier, a node and its driver; a third one diverges."""
    discovery, sized = tmp_path / "nodes.json", ["cluster.min_workers=2", "cluster.max_workers=3"]
    arguments = [*SMALL, *corpus, "train.steps=1000000", "checkpoint.every_steps=100", "observe.report_every_s=5"]
    with (
        local_nodes(2, cpus=1) as nodes,
        Prometheus(tmp_path / "prometheus", discovery=discovery, rules=hurried(rules())) as prometheus,
        Job(tmp_path, "drilled", *arguments, *sized, f"cluster.address={nodes.address}") as job,
    ):
        _write_discovery(nodes, discovery)

        def fires(alert: str, run: str = "drilled", timeout_s: float = 120.0) -> None:
            prometheus.wait_for(lambda: (alert, run) in prometheus.firing(), timeout_s)
            told = prometheus.firing()[alert, run]["annotations"]
            assert run in told["summary"]
            assert not [text for text in told.values() if "no value" in text or "error" in text.lower()], told

        def ends(alert: str, timeout_s: float = 120.0) -> None:
            prometheus.wait_for(lambda: (alert, "drilled") not in prometheus.firing(), timeout_s)

        job.wait_for(lambda: job.last_step() > 20, 300)
        fires("RegrowBelowTargetSize")  # two nodes, and three are wanted
        unrelated = {"RegrowBelowTargetSize", "RegrowGoodputLow"}
        assert {alert for alert, _ in prometheus.firing()} <= unrelated

        checkpoints, away = job.folder / "checkpoints", job.folder / "away"
        checkpoints.rename(away)
        checkpoints.write_text("storage is broken")
        fires("RegrowCheckpointOld")
        assert "RegrowSnapshotOld" not in {alert for alert, _ in prometheus.firing()}
        checkpoints.unlink()
        away.rename(checkpoints)
        ends("RegrowCheckpointOld")

        blocked = _block_copies(job)
        fires("RegrowSnapshotOld")
        assert "RegrowNoProgress" not in {alert for alert, _ in prometheus.firing()}
        for path in blocked:
            path.rmdir()
        ends("RegrowSnapshotOld")

        nodes.kill(1)
        fires("RegrowNoProgress")  # below min_workers
        fires("RegrowGoodputLow")
        assert "RegrowRunLost" not in {alert for alert, _ in prometheus.have_fired()}

        os.kill(job.process.pid, signal.SIGKILL)
        fires("RegrowRunLost")

        alone = ["cluster.max_workers=1", f"cluster.address={nodes.address}", "optim.lr=1e30"]
        with Job(tmp_path, "diverging", *arguments, *alone) as diverging:
            fires("RegrowNotFinite", "diverging")
            assert diverging.wait() == 1
        time.sleep(8)
        assert ("RegrowRunLost", "diverging") not in prometheus.have_fired()  # it said why it ended


def _write_discovery(nodes: LocalNodes, discovery: Path) -> None:
    """As Ray's dashboard would, which these nodes do without."""
    table: list[dict[str, Any]] = nodes._raylets.global_state.node_table()
    discovery.write_text(discovery_of(f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}" for node in table))


def _block_copies(job: Job) -> list[Path]:
    """A folder where each node keeps a copy of another one's snapshot, so that none can be written."""
    copies = [path for folder in job.memory() for path in folder.glob(f"*{COPY}")]
    assert copies
    for path in copies:
        path.unlink()
        path.mkdir()
    return copies
