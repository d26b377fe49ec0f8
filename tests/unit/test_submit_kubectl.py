"""What kubectl is asked, in which order, and what becomes of its answers; a stand-in program writes it down."""

import itertools
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from regrow.config.schema import SubmitJobConfig
from regrow.deadline import within
from regrow.errors import ClusterError, ConfigError
from regrow.record.claim import OWNER
from regrow.record.provenance import untracked
from regrow.submit import kuberay
from regrow.submit.check import check_may_apply, check_submit
from regrow.submit.kubectl import Kubectl, Unreachable, _error
from regrow.submit.render import Code
from regrow.submit.submit import check_in_git
from support import commands
from support.kubernetes import FAILED, LATE, NAME, READY, RUNNING, STARTED, STOPPED, SUCCEEDED, Cluster, act
from support.kubernetes import REFUSED as REFUSED_CONNECTION
from support.submission import CODE, ENDINGS, FAREWELL, LOST_RUN, compose, rendered

ROOT = Path(__file__).parents[2]


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster.on_path(tmp_path, monkeypatch)


def test_apply_sends_what_render_prints_server_side_and_follows(
    cluster: Cluster, capfd: pytest.CaptureFixture[str]
) -> None:
    cluster.has_submitter("llama8b", "2026-01-01T00:00:00Z")
    assert act("render") == 0
    printed = capfd.readouterr().out
    cluster.will_be({"jobDeploymentStatus": "Initializing"}, RUNNING, RUNNING, SUCCEEDED)
    assert act("apply") == 0
    applied = [call for call in cluster.calls if "apply" in call["arguments"]]
    for call in applied:
        assert call["arguments"] == [
            *("--context", "east", "--namespace", "pretrain", "apply"),
            *("--server-side", "--field-manager=regrow", "--validate=strict", "--filename=-"),
        ]
    sent = "".join(call["input"] for call in applied)
    assert re.sub(rf" *- name: {OWNER}\n +value: rayjob-[0-9a-f]{{16}}\n", "", sent) == printed
    *_, manifest = yaml.safe_load_all(printed)
    assert manifest["spec"]["entrypoint"].endswith("cluster.address=auto")
    shown = capfd.readouterr()
    assert shown.out == "logs of pod/llama8b-abcde\n"
    for line in ("serverside-applied", "Initializing", "Running (RUNNING)", "Complete (SUCCEEDED)"):
        assert line in shown.err
    assert cluster.verbs[: len(STARTED)] == STARTED
    assert "logs pod/llama8b-abcde" in cluster.verbs


def test_apply_does_not_follow_where_it_is_told_not_to(cluster: Cluster) -> None:
    assert act("apply", "submit.follow=false") == 0
    assert cluster.verbs == STARTED


def test_a_failed_job_ends_in_status_1_with_the_reason(cluster: Cluster, capfd: pytest.CaptureFixture[str]) -> None:
    cluster.has_job(RUNNING, FAILED)
    assert act("logs") == 1
    assert "Failed (FAILED): AppFailed: exit 1" in capfd.readouterr().err


def test_logs_of_a_retried_job_go_on_with_the_new_attempts_pod(
    cluster: Cluster, capfd: pytest.CaptureFixture[str]
) -> None:
    cluster.has_submitter("llama8b-2", "2026-01-02T00:00:00Z")
    cluster.has_submitter("llama8b", "2026-01-01T00:00:00Z")
    cluster.has_job(RUNNING, {"jobDeploymentStatus": "Retrying"}, RUNNING, SUCCEEDED)
    assert act("logs") == 0
    follows = [call["arguments"][4:] for call in cluster.calls if "logs" in call["arguments"]]
    assert follows == [
        ["logs", "pod/llama8b-2-abcde", "--follow", "--timestamps"],
        ["logs", "pod/llama8b-2-abcde", "--follow", "--timestamps", "--since-time=2026-01-01T00:00:00.5Z"],
        ["logs", "pod/llama8b-2-abcde", "--tail=100"],  # how it ended
    ]
    assert capfd.readouterr().out == "logs of pod/llama8b-2-abcde\n"


def test_logs_of_a_job_that_is_not_there_say_so(cluster: Cluster) -> None:
    with pytest.raises(
        ClusterError, match=r"no RayJob llama8b in namespace pretrain: .*; start it with submit\.action=apply"
    ):
        act("logs")


def test_a_running_run_is_not_started_twice(cluster: Cluster) -> None:
    cluster.has_job(RUNNING)
    with pytest.raises(ClusterError, match=r"RayJob llama8b is there \(Running\).*submit\.action=stop"):
        act("apply")
    assert cluster.verbs == []


@pytest.mark.parametrize("status", [SUCCEEDED, STOPPED, FAILED, {"jobDeploymentStatus": "ValidationFailed"}])
def test_apply_goes_on_with_a_run_whose_job_has_ended(
    cluster: Cluster, capfd: pytest.CaptureFixture[str], status: dict[str, Any]
) -> None:
    cluster.has_job(status)
    assert act("apply", "submit.follow=false") == 0
    assert cluster.verbs == [
        "create --dry-run=server",
        "create --dry-run=server",
        "diff --server-side",
        "delete rayjobs.ray.io",
        *STARTED,
    ]
    assert "+  entrypoint: python -m jobs.pretrain" in capfd.readouterr().err


def test_diff_shows_the_difference_and_changes_nothing(cluster: Cluster, capfd: pytest.CaptureFixture[str]) -> None:
    assert act("diff") == 0
    assert "entrypoint" in capfd.readouterr().out
    assert cluster.verbs == ["diff --server-side", *["create --dry-run=server"] * 2]


def test_a_difference_is_shown_whatever_compares_on_this_machine(
    cluster: Cluster, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user's program for KUBECTL_EXTERNAL_DIFF prints no unified diff, and nothing was said to differ."""
    other = 'case "$*" in *" diff "*) echo "1c1: it differs"; exit 1;; esac\n'
    cluster.begins_with(f'[ -z "$KUBECTL_EXTERNAL_DIFF" ] || {other[:-1]}\n')
    monkeypatch.setenv("KUBECTL_EXTERNAL_DIFF", "difft")
    assert act("diff") == 0
    assert "\n+  entrypoint: python -m jobs.pretrain" in capfd.readouterr().out
    cluster.begins_with(other)  # a diff on PATH of another kind
    assert act("diff") == 0
    assert capfd.readouterr() == ("1c1: it differs\n", "")


def test_a_users_preferences_for_kubectl_do_not_keep_a_job_from_being_deleted(cluster: Cluster) -> None:
    """With `interactive` by ~/.kube/kuberc, kubectl asks, reads the end of its input and deletes nothing."""
    asks = 'case "$*" in *" delete "*) echo "deletion is cancelled"; exit 0;; esac'
    cluster.begins_with(f'[ "$KUBERC" = off ] || {asks}\n')
    cluster.has_job({"jobDeploymentStatus": "Initializing"})
    assert act("stop", "submit.follow=false") == 0
    assert cluster.job is None


def test_a_users_preferences_for_kubectl_do_not_change_logs(
    cluster: Cluster, capfd: pytest.CaptureFixture[str]
) -> None:
    cluster.begins_with('[ "$KUBERC" = off ] || { echo "as preferred"; exit 0; }\n')
    cluster.has_submitter("llama8b", "2026-01-01T00:00:00Z")
    cluster.has_job(RUNNING, RUNNING, SUCCEEDED)
    assert act("logs") == 0
    assert capfd.readouterr().out == "logs of pod/llama8b-abcde\n"


@pytest.mark.parametrize("deleting", [{}, {"deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": ["a/b"]}])
def test_a_job_is_not_replaced_by_one_that_the_server_refuses(cluster: Cluster, deleting: dict[str, Any]) -> None:
    cluster.has_job(STOPPED, **deleting)
    line = 'Error from server (BadRequest): strict decoding error: unknown field "spec.entrypiont"'
    (cluster.folder / "refusal").write_text(line)
    with pytest.raises(ClusterError, match="unknown field"):
        act("apply")
    with pytest.raises(ClusterError, match="unknown field"):
        act("diff")
    assert cluster.job is not None
    trials = [call["arguments"][4:] for call in cluster.calls if "create" in call["arguments"]]
    assert trials == [["create", "--dry-run=server", "--field-manager=regrow", "--validate=strict", "--filename=-"]] * 2


def test_stop_asks_ray_in_the_head_pod_and_waits_for_the_checkpoint(
    cluster: Cluster, capfd: pytest.CaptureFixture[str]
) -> None:
    cluster.has_head()
    cluster.has_submitter("llama8b", "2026-01-01T00:00:00Z")
    cluster.has_job(RUNNING, RUNNING, RUNNING, STOPPED)
    assert act("stop") == 0
    (call,) = [call["arguments"] for call in cluster.calls if "exec" in call["arguments"]]
    assert call[4:] == [
        *("exec", "llama8b-c1-head", "--container=ray-head", "--"),
        *("ray", "job", "stop", "--no-wait", "--address", "http://127.0.0.1:8265", "llama8b-x1"),
    ]
    select, _ = [call["arguments"] for call in cluster.calls if "pods" in call["arguments"]]
    assert "--selector=ray.io/cluster=llama8b-c1,ray.io/node-type=head" in select
    assert "has ended; submit.action=apply goes on with the run" in capfd.readouterr().err


@pytest.mark.parametrize("action", ["stop", "logs"])
@pytest.mark.parametrize(("lines", "status", "line"), ENDINGS)
def test_a_stopped_job_ends_as_its_driver_did(
    cluster: Cluster, capfd: pytest.CaptureFixture[str], action: str, lines: list[str], status: int, line: str
) -> None:
    """By its log: Ray has STOPPED for one that was killed too, and both said that all is well."""
    cluster.has_head()
    cluster.has_submitter("llama8b", "2026-01-01T00:00:00Z", *lines)
    cluster.has_job(RUNNING, RUNNING, STOPPED)
    assert act(action) == status
    shown = capfd.readouterr().err
    assert f"\n{line}" in shown
    assert ("has ended; submit.action=apply goes on with the run" in shown) is (action == "stop")


def test_how_a_stopped_job_ended_is_not_known_where_its_log_or_the_job_is_gone(
    cluster: Cluster, capfd: pytest.CaptureFixture[str]
) -> None:
    cluster.has_head()
    unknown = "and whether its newest step is in storage is not known here"
    cluster.has_job(STOPPED)
    assert act("logs") == 3
    assert f"was stopped, {unknown}: the pod that followed its log is gone" in capfd.readouterr().err
    cluster.has_job(RUNNING, STOPPED)
    with pytest.raises(ClusterError, match=unknown):
        act("stop")
    cluster.has_job(RUNNING, {"do": ["vanish"]})
    with pytest.raises(ClusterError, match=f"was deleted meanwhile, {unknown}"):
        act("stop")


def test_a_job_that_fails_while_it_is_stopped_is_no_success(cluster: Cluster) -> None:
    cluster.has_head()
    cluster.has_job(RUNNING, FAILED)
    assert act("stop") == 1


UNSEEN = LATE | {"reason": "JobStatusCheckTimeoutExceeded"}


@pytest.mark.parametrize("status", [LATE, LATE | {"jobStatus": "PENDING"}, UNSEEN])
def test_stop_of_a_job_that_is_over_to_kuberay_alone_asks_ray(
    cluster: Cluster, capfd: pytest.CaptureFixture[str], status: dict[str, Any]
) -> None:
    """KubeRay leaves Ray's job alone, and deletes the cluster that trains submit.keep_s later."""
    cluster.has_head()
    cluster.has_job(status)
    assert act("stop", "submit.follow=false") == 0
    assert cluster.verbs == ["exec llama8b-c1-head"]
    assert cluster.calls[-1]["arguments"][-1] == "llama8b-x1"
    assert "asked llama8b-x1 to end after its step, with a checkpoint" in capfd.readouterr().err


@pytest.mark.parametrize("status", [LATE, UNSEEN])
def test_apply_deletes_no_job_that_trains_on(cluster: Cluster, status: dict[str, Any]) -> None:
    """Before, it went without the checkpoint that stop has it commit."""
    cluster.has_head()
    cluster.has_job(status)
    with pytest.raises(
        ClusterError, match=rf"KubeRay alone \({status['reason']}\), and its cluster trains on: stop it"
    ):
        act("apply", "submit.follow=false")
    assert not [verb for verb in cluster.verbs if verb.startswith(("delete", "apply"))]


@pytest.mark.parametrize(("lines", "status", "line"), ENDINGS)
def test_stop_of_a_job_past_its_deadline_waits_for_the_end_of_its_log(
    cluster: Cluster,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    lines: list[str],
    status: int,
    line: str,
) -> None:
    """The job's own state stays as it was at the deadline."""
    cluster.has_head()
    cluster.has_job(LATE)
    cluster.has_submitter("llama8b", "2026-01-01T00:00:00Z", *lines)
    pauses: list[float] = []

    def ends(seconds: float) -> None:
        pauses.append(seconds)
        cluster.has_submitter("llama8b", "2026-01-01T00:00:00Z", *lines, phase="Succeeded")

    # not of the module time: other threads sleep too
    monkeypatch.setattr(kuberay, "time", SimpleNamespace(monotonic=time.monotonic, sleep=ends))
    assert act("stop") == status
    assert len(pauses) == 1
    assert f"\n{line}" in capfd.readouterr().err


def test_stop_of_a_job_past_its_deadline_ends_where_its_cluster_or_the_time_does(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.has_head()
    cluster.has_job(LATE)
    cluster.has_submitter("llama8b", "2026-01-01T00:00:00Z")
    job = kuberay.KubeRay(Kubectl(namespace="pretrain", context="east"), "llama8b")
    monkeypatch.setattr(kuberay, "STOPPING_S", 0.05)
    with pytest.raises(ClusterError, match=r"has not ended for .* submit\.action=status"):
        job.stop(wait_s=0.01)
    monkeypatch.setattr(Kubectl, "exec", lambda *_: (cluster.folder / "objects/pods.llama8b-c1-head.json").unlink())
    with pytest.raises(kuberay.LostSight, match="the cluster of RayJob llama8b went before its log had ended"):
        act("stop")


def test_a_job_past_its_deadline_says_how_to_have_its_checkpoint(
    cluster: Cluster, capfd: pytest.CaptureFixture[str]
) -> None:
    cluster.has_job(RUNNING, LATE)
    assert act("logs") == 1
    hint = "DeadlineExceeded: it has passed it; submit.action=stop has it end with a checkpoint before"
    assert hint in capfd.readouterr().err
    cluster.has_job(LATE | {"jobStatus": ""})
    assert act("status") == 0
    assert "submit.action=stop" not in capfd.readouterr().out


def test_stop_of_a_job_that_waits_for_its_cluster_deletes_it(cluster: Cluster) -> None:
    cluster.has_job({"jobDeploymentStatus": "Initializing"})
    assert act("stop") == 0
    assert cluster.verbs == ["delete rayjobs.ray.io"]


@pytest.mark.parametrize("ray", ["STOPPED", "SUCCEEDED"])
def test_stop_of_a_job_that_ends_already_waits_and_deletes_nothing(
    cluster: Cluster, capfd: pytest.CaptureFixture[str], ray: str
) -> None:
    """Ray's job has ended, and its submitter not yet: another terminal's logs are to see how."""
    ending = RUNNING | {"jobStatus": ray}
    cluster.has_job(ending, ending, SUCCEEDED)
    assert act("stop") == 0
    assert cluster.verbs == []
    shown = capfd.readouterr().err
    assert f"RayJob llama8b ends already: it is Running ({ray})" in shown
    assert "has ended; submit.action=apply goes on with the run" in shown
    cluster.has_job(ending)
    assert act("stop", "submit.follow=false") == 0
    assert cluster.verbs == []
    assert cluster.job is not None


@pytest.mark.parametrize(
    "status",
    [
        RUNNING | {"jobStatus": "FAILED"},  # and is retried
        {"jobDeploymentStatus": "Retrying", "failed": 1},
        {"jobDeploymentStatus": "Suspended"},
    ],
)
def test_stop_of_a_job_between_two_attempts_deletes_it_and_does_not_say_that_it_never_trained(
    cluster: Cluster, capfd: pytest.CaptureFixture[str], status: dict[str, Any]
) -> None:
    cluster.has_job(status)
    assert act("stop") == 0
    assert cluster.verbs == ["delete rayjobs.ray.io"]
    assert "RayJob llama8b is not training now, and is deleted" in capfd.readouterr().err


AGAIN = RUNNING | {"jobId": "llama8b-x2", "startTime": "2026-01-01T01:00:00Z"}
BEGINS = AGAIN | {"jobStatus": ""}
SAME_ID = {"startTime": "2026-01-01T00:00:00Z", "rayJobInfo": {"startTime": "2026-01-01T00:01:00Z"}}
SUSPENDED = [{"jobDeploymentStatus": "Suspending", "jobStatus": "RUNNING"}, {"jobDeploymentStatus": "Suspended"}]


@pytest.mark.parametrize(
    ("steps", "asked"),
    [
        ([RUNNING, *SUSPENDED], ["llama8b-x1"]),
        ([RUNNING, {"jobDeploymentStatus": "Retrying", "failed": 1}], ["llama8b-x1"]),
        ([RUNNING, {"jobDeploymentStatus": "Initializing", "jobId": "llama8b-x2"}], ["llama8b-x1"]),
        ([RUNNING, AGAIN, AGAIN, STOPPED], ["llama8b-x1", "llama8b-x2"]),
        ([RUNNING, BEGINS, AGAIN, AGAIN, STOPPED], ["llama8b-x1", "llama8b-x2"]),
        (  # what is known later of the one that was asked again makes it no other one
            [RUNNING | SAME_ID, AGAIN, AGAIN | {"rayJobInfo": {"startTime": "2026-01-01T01:01:00Z"}}, STOPPED],
            ["llama8b-x1", "llama8b-x2"],
        ),
        (  # another head knows no job, and the submitter has submitted it again
            [
                RUNNING,
                RUNNING | SAME_ID,
                RUNNING | SAME_ID | {"rayJobInfo": {"startTime": "2026-01-01T02:00:00Z"}},
                STOPPED,
            ],
            ["llama8b-x1", "llama8b-x1"],
        ),
        ([RUNNING, RUNNING | SAME_ID, STOPPED], ["llama8b-x1"]),  # nothing new but what is known of it
    ],
)
def test_a_job_that_begins_anew_while_stop_waits_does_not_train_on(
    cluster: Cluster, steps: list[Any], asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, a job that Kueue admitted again, or whose head had died, trained on, and nothing said so."""
    monkeypatch.setattr(kuberay, "POLL_S", 0.01)
    cluster.has_head()
    cluster.has_submitter("llama8b", "2026-01-01T00:00:00Z")
    cluster.has_job(steps[0], *steps, {"do": ["vanish"]})
    if steps[-1] is STOPPED:
        assert act("stop") == 0
    else:
        with pytest.raises(kuberay.LostSight, match="was about to begin anew, and is deleted, and whether its newest"):
            act("stop")
    assert [call["arguments"][-1] for call in cluster.calls if "exec" in call["arguments"]] == asked
    assert ("delete rayjobs.ray.io" in cluster.verbs) is (steps[-1] is not STOPPED)


@pytest.mark.parametrize(
    "later", [{"jobDeploymentStatus": "Initializing"}, {"jobDeploymentStatus": "Suspended"}, AGAIN]
)
def test_stop_of_one_job_neither_stops_nor_deletes_the_one_that_comes_after_it(
    cluster: Cluster, later: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, it was taken for the job that began anew."""
    look, looks = kuberay.KubeRay.look, itertools.count(1)

    def look_and_find_another(self: kuberay.KubeRay, meanwhile: str) -> Any:
        if next(looks) == 2:  # the job was deleted, and applied again
            assert cluster.job is not None
            cluster.has("rayjobs.ray.io", NAME, **cluster.job | {"metadata": {"uid": "uid-2"}})
        return look(self, meanwhile)

    monkeypatch.setattr(kuberay.KubeRay, "look", look_and_find_another)
    cluster.has_head()
    cluster.has_job(RUNNING, RUNNING, later, STOPPED, {"do": ["vanish"]})
    with pytest.raises(kuberay.LostSight, match="RayJob llama8b was deleted meanwhile, and whether its newest"):
        act("stop")
    assert [call["arguments"][-1] for call in cluster.calls if "exec" in call["arguments"]] == ["llama8b-x1"]
    assert "delete rayjobs.ray.io" not in cluster.verbs


@pytest.mark.parametrize(("line", "status"), [(FAREWELL, 0), (LOST_RUN, 1)])
def test_a_job_that_ends_well_as_another_has_its_run_has_not_succeeded(
    line: str, status: int, cluster: Cluster, capfd: pytest.CaptureFixture[str]
) -> None:
    cluster.has_job(RUNNING, SUCCEEDED)
    cluster.has_submitter("llama8b", "2026-01-01T00:00:00Z", line)
    assert act("logs") == status
    assert (line in capfd.readouterr().err) is bool(status)


def test_attempts_at_one_rayjob_have_an_owner_in_common_and_the_next_rayjob_another(cluster: Cluster) -> None:
    owners = list[str]()
    for _ in range(2):
        cluster.has_job(SUCCEEDED, {}, {"do": ["vanish"]}, RUNNING)
        assert act("apply", "submit.follow=false") == 0
        assert cluster.job is not None
        head = cluster.job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
        owners += [each["value"] for each in head["env"] if each["name"] == OWNER]
    assert len({*owners}) == 2


@pytest.mark.parametrize("status", [None, SUCCEEDED, LATE])  # the last without a cluster, which is gone
def test_stop_of_a_job_that_does_not_run_does_nothing(cluster: Cluster, status: dict[str, Any] | None) -> None:
    if status:
        cluster.has_job(status)
    assert act("stop") == 0
    assert cluster.verbs == []


def test_a_job_that_does_not_end_is_reported(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kuberay, "STOPPING_S", 0.05)
    cluster.has_head()
    cluster.has_job(RUNNING)
    job = kuberay.KubeRay(Kubectl(namespace="pretrain", context="east"), "llama8b")
    with pytest.raises(ClusterError, match=r"has not ended .* submit\.action=logs"):
        job.stop(wait_s=0.01)


def test_status_says_how_the_job_is_doing(cluster: Cluster, capfd: pytest.CaptureFixture[str]) -> None:
    cluster.has_job(annotations={"regrow/run-name": "llama8b", "regrow/git-sha": "0123456789ab"})
    cluster.has_head()
    workers = {"readyWorkerReplicas": 6, "desiredWorkerReplicas": 8, "minWorkerReplicas": 4, "maxWorkerReplicas": 8}
    cluster.will_be(RUNNING | {"failed": 2, "startTime": "2026-01-01T00:00:00Z", "rayClusterStatus": workers})
    assert act("status") == 0
    assert capfd.readouterr().out.splitlines() == [
        "Running (RUNNING)",
        "run llama8b, commit 0123456789ab, started 2026-01-01T00:00:00Z",
        "worker pods: 6 ready, 8 desired, 4 min, 8 max",
        "failed attempts: 2 of 11",
        "dashboard: kubectl --context east --namespace pretrain port-forward service/llama8b-c1-head-svc 8265, "
        "then http://127.0.0.1:8265",
    ]


def test_status_of_no_job(cluster: Cluster, capfd: pytest.CaptureFixture[str]) -> None:
    assert act("status") == 0
    assert capfd.readouterr().out.startswith("no RayJob llama8b")


def test_what_kubectl_refuses_is_one_line(cluster: Cluster) -> None:
    (cluster.folder / "refusal").write_text("Error from server (Forbidden): rayjobs.ray.io is forbidden\n\n")
    with pytest.raises(ClusterError) as caught:
        act("apply")
    assert str(caught.value) == "kubectl apply: Error from server (Forbidden): rayjobs.ray.io is forbidden"


@pytest.mark.parametrize(
    "line",
    [
        'Error from server (Forbidden): networkpolicies.networking.k8s.io "llama-timeout" is forbidden',
        'Error from server (NotFound): namespaces "too many requests" not found',
        'Error from server (Conflict): Operation cannot be fulfilled on rayjobs.ray.io "etcdserver"',
        'Error from server (BadRequest): admission webhook "v.io" denied the request: jobs need a timeout',
        'Error from server (Invalid): RayJob "a" is invalid: spec.x: Invalid value: timed out',
        'error: context "connection refused" does not exist',
        "error: context 'eof' does not exist",
    ],
)
def test_a_refusal_that_only_quotes_an_outage_is_not_waited_out(cluster: Cluster, line: str) -> None:
    (cluster.folder / "refusal").write_text(line)
    with pytest.raises(ClusterError) as caught:
        act("apply")
    assert not isinstance(caught.value, Unreachable)


@pytest.mark.parametrize(
    "line",
    [
        REFUSED_CONNECTION,
        'Error from server (InternalError): calling webhook "v": Post "https://v:443": context deadline exceeded',
        "Error from server (Timeout): the server was unable to return a response in the time allotted",
        "Unable to connect to the server: dial tcp: lookup api on 10.0.0.2:53: no such host",
        'Get "https://10.0.0.1:6443/api": net/http: TLS handshake timeout',
        # of an API server that has lost its etcd
        'Error from server: rpc error: code = Unavailable desc = connection error: desc = "transport: Error while '
        'dialing: dial tcp 127.0.0.1:2379: connect: connection refused"',
    ],
)
def test_an_outage_is_one_whatever_it_quotes(line: str) -> None:
    assert isinstance(_error("get", 1, line), Unreachable)


def test_a_broken_rule_is_refused_before_kubectl_is_asked(cluster: Cluster, capfd: pytest.CaptureFixture[str]) -> None:
    assert act("apply", "submit.grace_s=10", "submit.shm_gb=1") == 1
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 2
    assert [line.partition("=")[0] for line in lines] == ["error: submit.shm_gb", "error: submit.grace_s"]
    assert cluster.calls == []


def test_a_quota_that_the_job_of_before_fills_does_not_keep_its_successor_away(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.has_job(STOPPED)
    line = (
        'Error from server (Forbidden): error when creating "STDIN": rayjobs.ray.io "llama8b" is forbidden: exceeded '
        "quota: runs, requested: count/rayjobs.ray.io=1, used: count/rayjobs.ray.io=4, limited: count/rayjobs.ray.io=4"
    )
    delete = Kubectl.delete

    def freed(self: Kubectl, kind: str, name: str) -> None:
        (cluster.folder / "refusal").unlink(missing_ok=True)
        delete(self, kind, name)

    monkeypatch.setattr(Kubectl, "delete", freed)
    (cluster.folder / "refusal").write_text(line)
    assert act("apply", "submit.follow=false") == 0
    assert cluster.verbs[-len(STARTED) :] == STARTED


TAGGED = f"submit.image='registry.llama.dev/regrow:{CODE.tag}'"
MOUNTED = ("run.storage_path=/mnt/runs", "submit.volume_claim=runs")
REFUSED = [
    (["submit.image=registry.example.com/regrow"], CODE, "submit.image=registry.example.com/regrow is a placeholder"),
    (["submit.image='<registry>/regrow'"], CODE, "is a placeholder"),
    ([], Code("0123456789ab-dirty", "2.60.0"), "changes that are not committed"),
    ([], Code(None, "2.60.0"), "changes that are not committed"),
    ([TAGGED], Code("0123456789ab-dirty", "2.60.0"), "changes that are not committed"),
    ([TAGGED], Code(None, "2.60.0"), "changes that are not committed"),
    (
        [],
        replace(CODE, untracked=("conf/model/2b.yaml",)),
        "conf/model/2b.yaml is not in git, and not known to be",
    ),
    ([], replace(CODE, untracked=("data/a.py", "data/b.py")), "data/a.py and 1 more are not in git"),
    (["run.storage_path=runs"], CODE, "run.storage_path=runs is relative to this checkout"),
    (["run.storage_path=s3://example.com/runs"], CODE, "is a placeholder"),
    (["run.storage_path=/mnt/runs"], CODE, "set submit.volume_claim"),
    (["run.storage_path=file:///mnt/runs"], CODE, "set submit.volume_claim"),
    (["run.storage_path=file://runs"], CODE, "run.storage_path=file://runs is relative to this checkout"),
    (["data.source=/home/me/corpus"], CODE, "data.source=/home/me/corpus is nowhere in the pods"),
    (["data.source=file:///home/me/a.txt"], CODE, "data.source=file:///home/me/a.txt is nowhere in the pods"),
    (["data.tokenizer='~/tokenizer.json'"], CODE, "data.tokenizer=~/tokenizer.json is nowhere in the pods"),
    (["data.tokenizer=/tmp/tokenizer.json"], CODE, "data.tokenizer=/tmp/tokenizer.json is nowhere in the pods"),
    (["+data.corpora.code=/data/code"], CODE, "data.corpora.code=/data/code is nowhere in the pods"),
    ([*MOUNTED, "+data.corpora.code=/mnt/runs2/code"], CODE, "name a URI, or a place below /mnt/runs, /opt/regrow"),
    (["data.cache_dir=/mnt/nvme"], CODE, "data.cache_dir=/mnt/nvme is nowhere in the pods"),
    (["parallel.compile_cache=/home/me/cache"], CODE, "compile_cache=/home/me/cache is nowhere in the pods"),
    (["snapshot.folder=/mnt/snapshots"], CODE, "snapshot.folder=/mnt/snapshots is no memory of the pods; set"),
]


@pytest.mark.parametrize(("change", "code", "line"), REFUSED)
def test_placeholders_are_refused_in_one_line(change: Sequence[str], code: Code, line: str) -> None:
    config = compose([*READY, *change])
    with pytest.raises(ConfigError) as caught:
        check_may_apply(config, code)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_filled_in_is_not_refused() -> None:
    check_may_apply(compose(READY), CODE)
    check_may_apply(compose([*READY, TAGGED]), CODE)
    check_may_apply(compose([*READY, *MOUNTED]), CODE)


def test_a_folder_that_is_named_by_a_uri_is_mounted_by_its_path() -> None:
    config, manifests = rendered([*READY, "run.storage_path=file:///mnt/runs", "submit.volume_claim=runs"])
    check_submit(config)
    check_may_apply(replace(config, data=replace(config.data, source="/mnt/runs/corpus/*.parquet")), CODE)
    (worker,) = manifests[-1]["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    mounts = worker["template"]["spec"]["containers"][0]["volumeMounts"]
    assert {"name": "storage", "mountPath": "/mnt/runs"} in mounts
    with pytest.raises(ConfigError, match=r"cannot be mounted at run\.storage_path=file:///tmp,"):
        check_submit(compose([*READY, "run.storage_path=file:///tmp", "submit.volume_claim=runs"]))


@pytest.mark.parametrize(
    "change",
    [
        "data.source=/mnt/runs/corpus/*.parquet",
        "data.source=file:///opt/regrow/corpus",
        "data.source=hf://datasets/a/b",
        "data.source=corpora/a.txt",  # of the checkout
        "data.tokenizer=/mnt/runs/tokenizer.json",
        "+data.corpora.code=s3://llama/code",
        "data.cache_dir=/tmp/cache",
        "parallel.compile_cache=/mnt/runs/compiled",
        "snapshot.folder=/dev/shm/mine",
    ],
)
def test_a_path_that_pods_have_is_not_refused(change: str) -> None:
    check_may_apply(compose([*READY, *MOUNTED, change]), CODE)


def checkout(folder: Path, *tracked: str) -> None:
    """A commit of some of the files there."""
    for arguments in (["init", "--quiet"], ["add", *tracked], ["commit", "--quiet", "--message=a"]):
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
        subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=60)


def test_a_file_that_an_image_of_the_commit_lacks_is_named(tmp_path: Path) -> None:
    assert untracked("conf", "data", root=tmp_path) == []  # which is no checkout
    (tmp_path / ".gitignore").write_text("*.log\n")
    for name in ("conf/model/a.yaml", "conf/cluster/mine.yaml", "conf/site/mine.yaml", "data/x.log", "notes/x"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    checkout(tmp_path, "conf/model")
    assert untracked("conf", "data", root=tmp_path) == ["conf/cluster/mine.yaml"]  # a site is not the job's


def test_a_place_in_the_checkout_is_one_that_git_lists(tmp_path: Path, cluster: Cluster) -> None:
    (tmp_path / ".gitignore").write_text("ignored\n")
    for name in ("kept/a.txt", "kept/b/tokenizer.json", "mine/a.txt", "ignored/a.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")

    def reading(setting: str, place: str) -> SubmitJobConfig:
        config = compose(READY)
        config.data = replace(config.data, **{setting: {"mine": place} if setting == "corpora" else place})
        return config

    names = {"source": "data.source", "tokenizer": "data.tokenizer", "corpora": "data.corpora.mine"}
    lacking = ("mine", "mine/a.txt", "mine/*.txt", "file://mine", "ignored", "ignored/a.txt", "gone")
    has = ("kept", "./kept/", "kept/*.txt", "file://kept/a.txt", "kept/b/tokenizer.json", "s3://llama/a", "/mnt/runs/a")
    for setting, place in itertools.product(names, [*lacking, *has]):
        check_in_git(reading(setting, place), tmp_path)  # which is no checkout
    checkout(tmp_path, "kept")
    for setting, place in itertools.product(names, [*lacking, "../texts"]):
        with pytest.raises(ConfigError, match=f"^{re.escape(f'{names[setting]}={place}')} is not in git, so that no "):
            check_in_git(reading(setting, place), tmp_path)
    for setting, place in itertools.product(names, has):
        check_in_git(reading(setting, place), tmp_path)
    with pytest.raises(ConfigError, match=r"data\.source=\.\./texts is not in git"):
        act("apply", "data.source=../texts")
    assert cluster.calls == []


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        ("submit.workers_per_node=0", "submit.workers_per_node=0 must be at least 1"),
        ("submit.retries=-1", "submit.retries=-1 must be at least 0"),
        ("submit.drain_s=5", "submit.drain_s=5 must be at least 20"),
        ("submit.shm_gb=0", "submit.shm_gb=0 must be positive, or null"),
        *(
            (f"submit.{name}={value}", f"submit.{name}={value} must be a finite number")
            for name in (
                "head_cpus",
                "shm_gb",
                "cpus_per_node",
                "memory_gb_per_worker",
                "object_store_gb",
                "head_memory_gb",
            )
            for value in ("nan", "inf")
        ),
        ("submit.namespace=My_Space", "submit.namespace='My_Space' is no name of a namespace"),
        ("submit.redis_secret=redis", "submit.redis_secret=redis must name a Secret and its key: SECRET/KEY"),
        ("submit.redis_secret=redis/key", "submit.redis_secret=redis/key has no Redis; set submit.redis_address"),
        ("submit.volume_claim=runs", "which must be an absolute path, not s3://llama/runs"),
        ("snapshot.transport=nixl", "no device for RDMA in pods of submit.network=plain; set efa or infiniband there"),
        ("submit.topology_key='a b'", "submit.topology_key='a b' is no key of a label"),
        ("submit.network_resource=rdma", "submit.network_resource=rdma must be the device plugin's full name"),
        ("submit.env_secret=Bad_Name", "submit.env_secret='Bad_Name' is no name of a Kubernetes object"),
        ("submit.service_account=Bad_Name", "submit.service_account='Bad_Name' is no name of a Kubernetes object"),
        ("submit.priority_class=a..b", "submit.priority_class='a..b' is no name of a Kubernetes object"),
        ("submit.tolerations=[{key: a, effect: Nope}]", "submit.tolerations[0].effect='Nope' must be NoSchedule, "),
        ("submit.tolerations=[{key: a, operator: In}]", "submit.tolerations[0].operator='In' must be Exists or Equal"),
        ("submit.tolerations=[{key: a, value: b}]", "submit.tolerations[0].value='b' has no use with Exists"),
        ("submit.tolerations=[{key: a, operator: Equal, value: 'a b'}]", "value='a b' is no value of a taint"),
        ("+submit.node_selector={zone: 'a b'}", "submit.node_selector.zone='a b' is no value of a label"),
        ("+submit.node_selector={a-: c}", "submit.node_selector='a-' is no key of a label"),
        ("+submit.env={1a: c}", "submit.env has '1a', which is no name of an environment variable"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(setting: str, line: str) -> None:
    check_submit(compose(READY))
    with pytest.raises(ConfigError) as caught:
        check_submit(compose([*READY, setting]))
    assert line in str(caught.value)


@pytest.mark.parametrize("path", ["/tmp", "/dev/shm/", "//tmp", "/"])
def test_storage_is_not_mounted_where_pods_have_something_else(path: str) -> None:
    with pytest.raises(ConfigError, match=f"cannot be mounted at run.storage_path={path}, where the pods have"):
        check_submit(compose([*READY, "submit.volume_claim=runs", f"run.storage_path={path}"]))
    check_submit(compose([*READY, "submit.volume_claim=runs", "run.storage_path=/mnt/tmp"]))


def test_an_interrupt_stops_following_and_not_the_job(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def interrupted(self: kuberay.KubeRay) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(kuberay.KubeRay, "follow", interrupted)
    cluster.has_job(RUNNING)
    assert act("logs") == 130
    assert "the job runs on, and submit.action=stop ends it" in capfd.readouterr().err
    assert cluster.verbs == []


def test_apply_refuses_a_placeholder_before_kubectl_is_asked(cluster: Cluster) -> None:
    with pytest.raises(ConfigError, match="placeholder"):
        act("apply", "submit.image=registry.example.com/regrow")
    assert cluster.calls == []


def test_the_command_prints_manifests_and_nothing_else_with_defaults() -> None:
    command = [sys.executable, "-m", "jobs.submit"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    assert done.stderr == ""
    *_, manifest = yaml.safe_load_all(done.stdout)
    assert (manifest["kind"], manifest["metadata"]["name"]) == ("RayJob", SubmitJobConfig().run.name)


def test_the_command_prints_manifests_without_kubectl_torch_or_ray() -> None:
    code = (
        "import sys, runpy; sys.argv = ['jobs.submit', '+cluster=h100x64', 'train.steps=7']\n"
        "try: runpy.run_module('jobs.submit', run_name='__main__')\n"
        "except SystemExit: pass\n"
        "print('HEAVY', sorted({'torch', 'ray', 'pyarrow'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PATH": "", "HF_ENDPOINT": "http://127.0.0.1:9"},
    )
    note, heavy = done.stderr.splitlines()
    assert note.startswith("note: the corpus was not looked at, the job will: data.source=hf://datasets/HuggingFaceFW/")
    assert heavy == "HEAVY []"
    *_, manifest = yaml.safe_load_all(done.stdout)
    assert manifest["spec"]["entrypoint"] == (
        "python -m jobs.pretrain +cluster=h100x64 train.steps=7 cluster.address=auto"
    )


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["submit.action=status"], "error: kubectl is not on PATH; install it, use submit.backend=ray"),
        (["submit.actoin=apply"], "error: unknown setting 'submit.actoin'; did you mean 'submit.action'?"),
        (["optim.num_slices=7", "submit.action=apply"], "error: optim.global_batch_seqs=12 does not divide"),
        (["submit.backend=ray", "submit.action=diff"], "error: submit.action=diff compares with Kubernetes"),
        (["+site=moon"], "error: no site called 'moon'; available: eks_p5, infiniband"),
    ],
)
def test_a_mistake_ends_in_one_line(arguments: list[str], line: str, tmp_path: Path) -> None:
    done = commands.call("submit", *arguments, env={"PATH": str(tmp_path)})
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith(line), done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr


def test_a_command_called_in_the_tests_process_ends_alone_beside_a_call_that_an_earlier_one_left_behind() -> None:
    """A program would end at once, by os._exit: so did the process of the tests."""
    answer = threading.Event()
    with pytest.raises(TimeoutError):
        within(0.01, answer.wait)
    done = commands.call("submit", "submit.backend=ray", "submit.action=diff")
    answer.set()
    assert done.returncode == 1
    assert done.stderr.startswith("error: submit.action=diff compares with Kubernetes")
