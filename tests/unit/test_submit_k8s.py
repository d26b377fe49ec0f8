"""What lies in k8s/ and conf/site agrees with what is rendered."""

import re
import shlex
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from regrow.config.check import check
from regrow.config.schema import Network, PretrainConfig, SubmitAction, SubmitConfig
from regrow.submit.check import IMAGE, broken_rules, check_submit
from regrow.submit.pods import GROUP, USER, sizes
from regrow.submit.render import Code
from support.submission import CODE, compose, rendered

ROOT = Path(__file__).parents[2]
README = (ROOT / "k8s" / "README.md").read_text()
DOCKERFILE = (ROOT / "k8s" / "Dockerfile").read_text()
SITES = sorted(path.stem for path in (ROOT / "conf" / "site").glob("*.yaml"))


def pods(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    cluster = manifest["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return [manifest["spec"]["submitterPodTemplate"]["spec"], *(group["template"]["spec"] for group in groups)]


def test_the_account_of_the_pods_is_made_by_rbac() -> None:
    documents = {each["kind"]: each for each in yaml.safe_load_all((ROOT / "k8s" / "rbac.yaml").read_text())}
    account = documents["ServiceAccount"]["metadata"]["name"]
    assert account == SubmitConfig().service_account
    *_, manifest = rendered(["+cluster=h100x64"])[1]
    assert {pod["serviceAccountName"] for pod in pods(manifest)} == {account}
    assert documents["RoleBinding"]["roleRef"]["name"] == documents["Role"]["metadata"]["name"]


def test_only_the_head_speaks_to_kubernetes() -> None:
    *_, manifest = rendered(["+cluster=h100x64"])[1]
    assert [pod.get("automountServiceAccountToken") for pod in pods(manifest)] == [False, None, False]


def test_submitters_may_do_what_kubectl_is_asked_and_read_no_secrets() -> None:
    documents = {each["kind"]: each for each in yaml.safe_load_all((ROOT / "k8s" / "rbac.yaml").read_text())}
    allowed = {
        (resource, verb)
        for rule in documents["Role"]["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    wanted = {
        *(("rayjobs", verb) for verb in ("get", "list", "watch", "create", "patch", "delete")),
        *(("pods", verb) for verb in ("get", "list")),
        *(("jobs", verb) for verb in ("get", "list")),
        *(("networkpolicies", verb) for verb in ("get", "create", "patch", "delete")),
        ("pods/log", "get"),
        *(("pods/exec", verb) for verb in ("get", "create")),  # by websocket, by SPDY
        *(("pods/portforward", verb) for verb in ("get", "create")),
        ("events", "list"),
        ("namespaces", "get"),
        ("workloads", "list"),
    }
    assert wanted <= allowed
    assert not [resource for resource, _ in allowed if resource == "secrets"]


@pytest.mark.parametrize("network", [f"submit.network={each.value}" for each in Network] + ["+site=eks_p5"])
def test_pods_are_made_for_the_restricted_policy_on_every_network(network: str) -> None:
    """Kubernetes' Pod Security Standards, as far as they concern what is rendered."""
    *_, manifest = rendered(["+cluster=h100x64", network, "run.storage_path=/mnt/runs", "submit.volume_claim=runs"])[1]
    contexts = [manifest["spec"]["rayClusterSpec"]["autoscalerOptions"]["securityContext"]]
    allowed = {"emptyDir", "persistentVolumeClaim", "projected"}
    for pod in pods(manifest):
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert all(allowed & volume.keys() for volume in pod.get("volumes", []))
        contexts += [each["securityContext"] for each in (*pod["containers"], *pod.get("initContainers", []))]
    for context in contexts:
        assert context == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def test_the_image_has_the_users_ids_and_what_the_drain_needs() -> None:
    assert f"USER {USER}:{GROUP}" in DOCKERFILE
    assert f"useradd --uid {USER} --gid {GROUP}" in DOCKERFILE
    assert "procps" in DOCKERFILE  # pgrep
    (home,) = re.findall(r"^WORKDIR (\S+)$", DOCKERFILE, re.MULTILINE)
    assert home == IMAGE
    assert f"PYTHONPATH={home} " in DOCKERFILE  # jobs and data are found from anywhere


@pytest.mark.parametrize("site", SITES)
def test_every_site_composes_and_renders_cleanly(site: str) -> None:
    config, _ = rendered(["+cluster=h100x64", f"+site={site}"])
    check(config)
    check_submit(config)
    assert broken_rules(config, CODE, []) == []


def test_the_readmes_site_is_one(tmp_path: Path) -> None:
    (block,) = re.findall(r"# @package _global_\n((?:    .*\n)+)", README)
    given = yaml.safe_load(block)
    config = compose(["+cluster=h100x64"])
    for group, settings in given.items():
        for name in settings:
            assert hasattr(getattr(config, group), name), f"{group}.{name}"


def test_the_readme_names_settings_and_actions_that_exist() -> None:
    settings = {f"submit.{field.name}" for field in fields(SubmitConfig)}
    named = set(re.findall(r"\bsubmit\.[a-z_]+\b", README))
    assert len(named) >= 15
    assert named - settings == set()
    groups = {field.name: field for field in fields(PretrainConfig)}
    config = PretrainConfig()
    for group, name in re.findall(r"\b(run|cluster|data|snapshot|train)\.([a-z_]+)=?", README):
        assert group in groups
        assert hasattr(getattr(config, group), name), f"{group}.{name}"
    actions = set(re.findall(r"submit\.action=([a-z]+)", README))
    assert actions == {action.value for action in SubmitAction} - {"render"}


def test_the_readme_builds_the_tag_that_is_looked_for() -> None:
    assert "git rev-parse --short=12 HEAD" in README
    (suffix,) = set(re.findall(r"regrow:\$sha-(\S+)", README))
    assert Code("0123456789ab", "2.60.0").tag == f"0123456789ab-{suffix}"


def test_the_readmes_operator_waits_for_another_head_and_has_memory_for_the_largest_cluster() -> None:
    """KubeRay fails a job for good whose state it cannot ask for 300 s; its chart's 512Mi do for some 500 pods."""
    (line,) = re.findall(r"^    (helm install (?:.*\\\n)*.*)$", README, re.MULTILINE)
    words = shlex.split(line.replace("\\\n", " "))
    options = dict(word.split("=", 1) for before, word in pairwise(words) if before in ("--set", "--set-string"))
    assert options["env[0].name"] == "RAYJOB_STATUS_CHECK_TIMEOUT_SECONDS"
    assert int(options["env[0].value"]) >= 3600
    assert words[words.index("env[0].value=3600") - 1] == "--set-string"  # a number is no value of a variable
    config = compose(["+cluster=h100x16384"])
    megabytes = int(options["resources.limits.memory"].removesuffix("Gi")) * 1024
    assert megabytes > sizes(config, config.submit).most_nodes


def test_the_readmes_budget_is_for_the_head_alone() -> None:
    (line,) = re.findall(r"`(kubectl create poddisruptionbudget [^`]*)`", README)
    options = dict(word.removeprefix("--").split("=", 1) for word in shlex.split(line) if word.startswith("--"))
    selected = dict(pair.split("=") for pair in options["selector"].split(","))
    spec = rendered(["+cluster=h100x64", "run.name=llama8b"])[1][-1]["spec"]
    groups = [spec["rayClusterSpec"]["headGroupSpec"], *spec["rayClusterSpec"]["workerGroupSpecs"]]
    templates = [*(group["template"] for group in groups), spec["submitterPodTemplate"]]
    assert [selected.items() <= pod["metadata"]["labels"].items() for pod in templates] == [True, False, False]
    assert options["min-available"] == "1"


def test_the_readme_says_what_was_run_against_what() -> None:
    assert "No job has run on Kubernetes yet." in README
    for what in ("API\nserver (1.36, kubectl 1.32", "1.20.2, etcd 3.4.23, kubectl 1.32.4", "No operator"):
        assert what in README
