"""A Kubernetes node's label becomes the label of the Ray node by which copies are placed."""

import http.server
import json
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray._private.label_utils import parse_node_labels_from_yaml_file

from regrow.config.schema import PretrainConfig
from regrow.control.membership import NODE_NAME
from regrow.control.peers import plan_peers
from regrow.errors import ConfigError
from regrow.runtime.keeper import domain_of
from regrow.submit import node_labels
from regrow.submit.check import check_submit
from support.submission import compose, rendered

ROOT = Path(__file__).parents[2]
RACK = "topology.k8s.aws/network-node-layer-3"
NODES = {"ip-10-0-1-7": {RACK: "nn-d2e25ce93dad9593e"}, "ip-10-0-1-8": {}}


class Api(http.server.BaseHTTPRequestHandler):
    """As the Kubernetes API answers the account of racks.yaml."""

    def do_GET(self) -> None:
        node = self.path.removeprefix("/api/v1/nodes/")
        known = self.headers["Authorization"] == "Bearer secret" and node in NODES
        body = json.dumps({"kind": "Node", "metadata": {"name": node, "labels": NODES.get(node)}}).encode()
        self.send_response(200 if known else 403)
        self.end_headers()
        self.wfile.write(body if known else b"{}")

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def api(tmp_path: Path) -> Iterator[tuple[int, Path]]:
    """Its port, and a folder with a token and the authority that its certificate is of."""
    subject = ["-subj", "/CN=kubernetes", "-addext", "subjectAltName=IP:127.0.0.1"]
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject]
    made += ["-keyout", str(tmp_path / "key"), "-out", str(tmp_path / "ca.crt")]
    subprocess.run(made, check=True, capture_output=True)
    (tmp_path / "token").write_text("secret\n")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Api)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "ca.crt", tmp_path / "key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server.server_port, tmp_path
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("node", "token", "expected", "said"),
    [
        ("ip-10-0-1-7", "secret", {"rack": "nn-d2e25ce93dad9593e"}, "rack"),
        ("ip-10-0-1-8", "secret", {}, "it is a failure domain by itself"),
        ("ip-10-0-1-7", "of another account", {}, "HTTP Error 403"),
    ],
)
def test_ray_reads_the_label_that_the_node_has_and_starts_without_it(
    api: tuple[int, Path],
    node: str,
    token: str,
    expected: dict[str, str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    port, credentials = api
    (credentials / "token").write_text(token)
    monkeypatch.setattr(node_labels, "RETRY_S", 0.0)
    environment = {"NODE_NAME": node, "KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(port)}
    file = credentials / "labels.yaml"
    node_labels.main([RACK, "rack", str(file)], environment, credentials)
    assert parse_node_labels_from_yaml_file(str(file)) == expected
    assert said in capsys.readouterr().out


def test_workers_ask_for_their_rack_and_no_other_container_has_the_token() -> None:
    _, (*_, manifest) = rendered(["+cluster=h100x64", "+site=eks_p5"])
    spec = manifest["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]
    pod = spec["template"]["spec"]
    (asks,), (worker,) = pod["initContainers"], pod["containers"]
    assert asks["command"][-3:] == [RACK, "rack", spec["rayStartParams"]["labels-file"]]
    assert PretrainConfig().snapshot.domain_label == "rack"
    assert {mount["name"] for mount in asks["volumeMounts"]} == {"labels", "api"}
    assert "api" not in {mount["name"] for mount in worker["volumeMounts"]}
    assert {mount["name"] for mount in asks["volumeMounts"]} <= {volume["name"] for volume in pod["volumes"]}
    assert pod["automountServiceAccountToken"] is False


def test_racks_are_the_only_right_beside_the_jobs_own() -> None:
    role, binding = yaml.safe_load_all((ROOT / "k8s" / "racks.yaml").read_text())
    assert role["rules"] == [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["get"]}]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]


@pytest.mark.parametrize("label", ["null", "ray.io/availability-zone"])
def test_a_rack_that_no_snapshot_goes_by_is_refused(label: str) -> None:
    config = compose(["+cluster=h100x64", f"submit.rack_label={RACK}", f"snapshot.domain_label={label}"])
    with pytest.raises(ConfigError, match=r"snapshot.domain_label=.*; set snapshot.domain_label=rack, or"):
        check_submit(config)


def test_copies_are_on_other_hosts_where_several_pods_are_on_one_and_its_rack_is_not_known() -> None:
    """Four ranks a pod, eight GPUs a host: before, each pod counted by itself, and a host took both copies with it."""
    pods = {"1a": "one", "2b": "one", "3c": "two", "4d": "two"}
    domains = [(pod, domain_of(pod, {}, "rack", {NODE_NAME: host})) for pod, host in pods.items()]
    assert all(pods[pod] != pods[holder] for pod, holders in plan_peers(domains).items() for holder in holders)
    assert domain_of("1a", {"rack": "r"}, "rack", {NODE_NAME: "one"}) == "r"
    for label in ("rack", None):
        assert domain_of("1a", {"zone": "z"}, label, {NODE_NAME: "one"}) == "one"
        assert domain_of("1a", {"zone": "z"}, label, {}) == "1a", "nodes of one machine that fail one by one"
