"""Who may connect to a run's pods: what is rendered, that it is there before the job, and that it goes with it."""

from pathlib import Path
from typing import Any

import pytest

from regrow.config.schema import SubmitConfig
from regrow.errors import ClusterError, ConfigError
from regrow.submit.check import check_submit
from support.kubernetes import KIND, NAME, POLICY, RUNNING, STOPPED, SUCCEEDED, Cluster, act
from support.stand_in_kubectl import collect, path
from support.submission import compose, rendered

JOB = ("+cluster=h100x64", "run.name=llama8b")
OFF = "submit.network_policy=false"


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster.on_path(tmp_path, monkeypatch)


def pod_templates(job: dict[str, Any]) -> list[dict[str, Any]]:
    ray = job["spec"]["rayClusterSpec"]
    groups = [ray["headGroupSpec"], *ray["workerGroupSpecs"]]
    return [job["spec"]["submitterPodTemplate"], *(group["template"] for group in groups)]


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    return bool(selector["matchLabels"].items() <= labels.items())


def test_a_runs_pods_speak_to_each_other_at_all_ports_and_another_runs_pods_do_not() -> None:
    policy, job = rendered(JOB)[1]
    other = rendered([*JOB[:1], "run.name=other"])[1][-1]
    inside = policy["spec"]["ingress"][0]
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    assert "ports" not in inside
    for selector in (policy["spec"]["podSelector"], *(each["podSelector"] for each in inside["from"])):
        assert all(selects(selector, pod["metadata"]["labels"]) for pod in pod_templates(job))
        assert not any(selects(selector, pod["metadata"]["labels"]) for pod in pod_templates(other))


def test_from_elsewhere_only_ports_are_open_that_the_head_names_for_them() -> None:
    policy, job = rendered(JOB)[1]
    head = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    named = {port["name"]: port["containerPort"] for port in head["ports"]}
    opened = [sorted(port["port"] for port in each["ports"]) for each in policy["spec"]["ingress"][1:]]
    assert opened == [[named["dashboard"]], sorted(named[name] for name in ("metrics", "as-metrics", "dash-metrics"))]
    everything = {named["gcs-server"], named["client"]}
    assert not everything & {port for ports in opened for port in ports}


def test_namespaces_are_settings() -> None:
    (policy, _) = rendered([*JOB, "submit.operator_namespace=ray-system", "submit.monitoring_namespace=null"])[1]
    (where,) = policy["spec"]["ingress"][1]["from"]
    assert where == {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "ray-system"}}}
    assert len(policy["spec"]["ingress"]) == 2
    assert [each["kind"] for each in rendered([*JOB, OFF])[1]] == ["RayJob"]
    for setting in ("operator_namespace", "monitoring_namespace"):
        with pytest.raises(ConfigError, match=rf"submit\.{setting}='No_Name' is no name of a namespace"):
            check_submit(compose([*JOB, f"submit.{setting}=No_Name"]))


def test_the_policy_is_there_before_the_job_and_goes_with_it(cluster: Cluster) -> None:
    assert act("apply", "submit.follow=false") == 0
    kinds = [("NetworkPolicy" in call["input"], "RayJob" in call["input"]) for call in cluster.calls if call["input"]]
    assert kinds == [(True, False), (False, True)]
    assert cluster.job is not None
    assert cluster.policy is not None
    (owner,) = cluster.policy["metadata"]["ownerReferences"]
    assert owner == {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "name": NAME,
        "uid": cluster.job["metadata"]["uid"],
    }
    collect(cluster.folder)
    assert cluster.policy is not None
    path(cluster.folder, KIND, NAME).unlink()  # however it was deleted
    collect(cluster.folder)
    assert cluster.policy is None


def test_the_next_job_has_a_policy_of_its_own_whenever_the_old_one_is_collected(cluster: Cluster) -> None:
    """The stand-in collects after the new policy was applied, before the new job is there."""
    cluster.has_submitter(NAME, "2026-01-01T00:00:00Z")
    cluster.will_be(RUNNING, STOPPED, {"do": ["release"]}, RUNNING, SUCCEEDED)
    assert act("apply") == 0
    assert act("apply", "submit.follow=false") == 0
    assert cluster.job is not None
    assert cluster.policy is not None
    (owner,) = cluster.policy["metadata"]["ownerReferences"]
    assert owner["uid"] == cluster.job["metadata"]["uid"]
    collect(cluster.folder)
    assert cluster.policy is not None


def test_a_job_that_had_not_begun_is_stopped_with_its_policy(cluster: Cluster) -> None:
    assert act("apply", "submit.follow=false") == 0
    assert act("stop", "submit.follow=false") == 0
    collect(cluster.folder)
    assert (cluster.job, cluster.policy) == (None, None)


def test_diff_shows_a_policy_that_is_not_there_or_has_changed_and_nothing_else(
    cluster: Cluster, capfd: pytest.CaptureFixture[str]
) -> None:
    assert act("apply", "submit.follow=false") == 0
    capfd.readouterr()
    assert act("diff") == 0
    assert capfd.readouterr().out == ""
    assert act("diff", "submit.monitoring_namespace=null") == 0
    changed = capfd.readouterr().out
    assert "44217" in changed
    assert "rayClusterSpec" not in changed
    path(cluster.folder, POLICY, NAME).unlink()
    assert act("diff") == 0
    assert "+kind: NetworkPolicy" in capfd.readouterr().out


def test_a_policy_that_is_refused_starts_no_job_and_says_what_to_do(cluster: Cluster) -> None:
    (cluster.folder / "refusal").write_text(
        'Error from server (Forbidden): networkpolicies.networking.k8s.io "llama8b" is forbidden: User "bob" cannot '
        'patch resource "networkpolicies" in API group "networking.k8s.io" in the namespace "pretrain"'
    )
    with pytest.raises(ClusterError, match=r"have k8s/rbac.yaml applied again.*submit\.network_policy=false"):
        act("apply")
    assert cluster.job is None


def test_without_a_policy_none_is_asked_for(cluster: Cluster) -> None:
    assert act("apply", "submit.follow=false", OFF) == 0
    assert cluster.verbs == ["apply --server-side"]
    assert cluster.policy is None
    assert SubmitConfig().network_policy
