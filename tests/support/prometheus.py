"""A real Prometheus beside a local Ray, for tests: it scrapes, evaluates the rules in k8s/monitoring, and is asked."""

import json
import re
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import yaml

MONITORING = Path(__file__).parents[2] / "k8s" / "monitoring"
READY_S = 30.0
MINUTES = {"m": 1, "h": 60}
LEAST_RANGE_S = 10  # of hurried rules: a busy machine is late now and then


def missing(*programs: str) -> str:
    """Why a test that needs these programs is skipped, or empty."""
    absent = [program for program in programs if shutil.which(program) is None]
    return f"needs {', '.join(absent)}: apt-get install prometheus" if absent else ""


def rules() -> dict[str, Any]:
    """The rules as a Prometheus without an operator takes them."""
    return dict(yaml.safe_load((MONITORING / "rules.yaml").read_text())["spec"])


def hurried(content: dict[str, Any]) -> dict[str, Any]:
    """The same rules with a second for every minute: of ranges, of `for`, and of thresholds, written `15 * 60`.

    Ranges have at least ten. Ray tells of its figures every ten seconds unless RAY_metrics_report_interval_ms, 1000 at
    least, says otherwise, and forgets those that it is not told of for twice as long.
    """
    groups = []
    for group in content["groups"]:
        changed = [
            rule
            | {"expr": _hurry(rule["expr"], LEAST_RANGE_S).replace("* 60", "* 1")}
            | ({"for": _hurry(rule["for"], 0)} if "for" in rule else {})
            for rule in group["rules"]
        ]
        groups.append(group | {"rules": changed})
    return {"groups": groups}


def dashboard_expressions() -> list[str]:
    """Every query of the dashboard, its variables as Grafana fills them in."""
    dashboard = json.loads((MONITORING / "dashboard.json").read_text())
    found = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    found += [annotation["expr"] for annotation in dashboard["annotations"]["list"]]
    filled = {"$namespace": ".*", "$run": ".*", "$__rate_interval": "1m", "$__range": "6h"}
    for variable, value in filled.items():
        found = [expression.replace(variable, value) for expression in found]
    return list(dict.fromkeys(found))


class Prometheus:
    """Scrapes every two seconds what `discovery` lists, and evaluates `rules` every second. A context manager."""

    def __init__(self, folder: Path, *, discovery: Path, rules: dict[str, Any]) -> None:
        """`discovery` is a file as Ray writes it for Prometheus; it need not be there yet."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "rules.yml").write_text(yaml.dump(rules))
        config = {
            "global": {"scrape_interval": "2s", "scrape_timeout": "2s", "evaluation_interval": "1s"},
            "rule_files": ["rules.yml"],
            "scrape_configs": [
                {"job_name": "ray", "file_sd_configs": [{"files": [str(discovery)], "refresh_interval": "1s"}]}
            ],
        }
        (folder / "prometheus.yml").write_text(yaml.dump(config))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = f"http://127.0.0.1:{free.getsockname()[1]}"
        self.output = folder / "prometheus.out"
        command = [
            "prometheus",
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={self.address.removeprefix('http://')}",
            "--log.level=warn",
        ]
        with open(self.output, "wb") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        self.wait_for(self._is_ready, READY_S)

    def query(self, expression: str, at: float | None = None) -> list[dict[str, Any]]:
        """The samples of an expression now, or at a unix time. Raises AssertionError where it is refused."""
        arguments = {"query": expression} | ({"time": str(at)} if at is not None else {})
        data = self._get(f"/api/v1/query?{urllib.parse.urlencode(arguments)}")
        assert data["resultType"] == "vector", f"{expression}: {data['resultType']}"
        return list(data["result"])

    def value(self, expression: str) -> float:
        """Of an expression with one sample; NaN where it has none."""
        found = self.query(expression)
        assert len(found) <= 1, f"{expression}: {found}"
        return float(found[0]["value"][1]) if found else float("nan")

    def firing(self) -> dict[tuple[str, str], dict[str, Any]]:
        """The alerts that fire now, by name and run."""
        alerts = self._get("/api/v1/alerts")["alerts"]
        return {
            (each["labels"]["alertname"], each["labels"]["run"]): each for each in alerts if each["state"] == "firing"
        }

    def have_fired(self) -> set[tuple[str, str]]:
        """The alerts that have fired since the beginning, by name and run."""
        found = self.query('max_over_time(ALERTS{alertstate="firing"}[1h])')
        return {(each["metric"]["alertname"], each["metric"]["run"]) for each in found}

    def rule_health(self) -> dict[str, str]:
        """Each rule's health once it was evaluated, `ok` or what went wrong."""
        groups = self._get("/api/v1/rules")["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        return {rule["name"]: rule.get("lastError") or rule["health"] for rule in rules}

    def wait_for(self, condition: Callable[[], object], timeout_s: float) -> None:
        """Wait until a condition holds; raises if it does not within this time."""
        give_up_at = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, self.output.read_text()
            if time.monotonic() > give_up_at:
                known = [(each["metric"], each["value"][1]) for each in self.query("{__name__=~'up|ALERTS'}")]
                raise AssertionError(f"not within {timeout_s:.0f} s: {known} {self.output.read_text()[-2000:]}")
            time.sleep(0.2)

    def __enter__(self) -> "Prometheus":
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.kill()
        self.process.wait()

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.address}/-/ready", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def _get(self, path: str) -> dict[str, Any]:
        try:
            with urllib.request.urlopen(f"{self.address}{path}", timeout=10) as answer:
                content = json.loads(answer.read())
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path}: {error.read().decode()}") from error
        return dict(content["data"])


def discovery_of(addresses: Iterable[str]) -> str:
    """The content of a discovery file, as Ray's dashboard writes it."""
    return json.dumps([{"labels": {"job": "ray"}, "targets": list(addresses)}])


def _hurry(text: str, least_s: int) -> str:
    return re.sub(r"\b(\d+)([mh])\b", lambda found: f"{max(least_s, int(found[1]) * MINUTES[found[2]])}s", text)
