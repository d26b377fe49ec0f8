"""A run's life on Kubernetes as a real API server has it: owners of fields, outages, why nothing happens."""

import io
import itertools
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from regrow.errors import ClusterError
from regrow.submit import kuberay, waiting
from regrow.submit.kubectl import Kubectl, PodLogs, Unreachable
from regrow.submit.reasons import Around, reasons
from support.kubernetes import (
    CLUSTER,
    FAILED,
    KIND,
    NAME,
    READY,
    REFUSED,
    RUNNING,
    STARTED,
    STOPPED,
    SUCCEEDED,
    Cluster,
    act,
)
from support.submission import CODE

ROOT = Path(__file__).parents[2]
KUEUE = ("submit.queue=kueue", "submit.queue_name=h100")
VOLCANO = ("submit.queue=volcano", "submit.queue_name=h100", "submit.priority_class=research")
EFA = ("+site=eks_p5", "submit.head_cpus=17.5", "submit.disk_gb=1000", "submit.shm_gb=1099.5")
QUEUES = [
    pytest.param((), id="plain"),
    pytest.param(EFA, id="fractions", marks=pytest.mark.long),
    pytest.param(KUEUE, id="kueue"),
    pytest.param(VOLCANO, id="volcano", marks=pytest.mark.long),
]
FIRST = {"do": ["first_write"], "jobDeploymentStatus": "Initializing"}
ADMITTED = {"do": ["admit"], "jobDeploymentStatus": "Initializing"}
GONE = {"do": ["release"]}


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster.on_path(tmp_path, monkeypatch)


@pytest.mark.parametrize("queue", QUEUES)
def test_a_run_goes_on_after_it_was_stopped_failed_and_was_complete(
    cluster: Cluster, queue: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    cluster.has_head()
    cluster.has_submitter(NAME, "2026-01-01T00:00:00Z")
    admitted = [{"jobDeploymentStatus": "Suspended"}, ADMITTED] if queue == KUEUE else []
    begin = [FIRST, *admitted, RUNNING]

    cluster.will_be(*begin, SUCCEEDED)
    assert act("apply", *queue) == 0
    assert "nothing of the job" not in capfd.readouterr().err
    for end, status in ((STOPPED, 0), (FAILED, 1), (SUCCEEDED, 0)):
        # the look that finds it ended, the one that finds its finalizer, the one after that was released
        cluster.will_be(SUCCEEDED, {}, GONE, *begin, *([RUNNING] if end is STOPPED else []), end)
        assert act("apply", *queue) == status
        shown = capfd.readouterr().err
        assert "its successor goes on with the run" in shown
        assert "cannot be shown" not in shown
        assert "nothing of the job has changed" in shown  # that Kueue resumed it is no change
        assert "serverside-applied" in shown
    cluster.will_be(SUCCEEDED, {}, GONE, *begin, RUNNING)
    assert act("apply", *queue, "submit.follow=false") == 0
    for _ in begin:
        assert act("status", *queue) == 0
    cluster.will_be(RUNNING, RUNNING, STOPPED)
    assert act("stop", *queue) == 0
    assert "asked llama8b-x1 to end after its step, with a checkpoint" in capfd.readouterr().err


@pytest.mark.parametrize("queue", QUEUES)
def test_a_job_that_kuberay_has_touched_differs_in_nothing(
    cluster: Cluster, queue: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    cluster.will_be(FIRST, ADMITTED)
    assert act("apply", *queue, "submit.follow=false") == 0
    assert [act("status", *queue) for _ in range(2)] == [0, 0]
    assert cluster.job is not None
    assert cluster.job["metadata"]["finalizers"]
    capfd.readouterr()
    assert act("diff", *queue) == 0
    shown = capfd.readouterr()
    assert shown.out == ""
    assert shown.err == "no difference: applying would change nothing of RayJob llama8b\n"


def test_fields_that_kuberay_owns_are_compared_all_the_same(
    cluster: Cluster, capfd: pytest.CaptureFixture[str]
) -> None:
    cluster.will_be(FIRST)
    assert act("apply", "submit.follow=false") == 0
    assert act("status") == 0
    job = cluster.job
    assert job is not None
    for each in job["managedFields"]:  # as when it was made by a version of ours that did not render scaleStrategy
        if each["manager"] == "ray-operator":
            each["fields"].append(["spec", "rayClusterSpec", "workerGroupSpecs"])
    (cluster.folder / "objects" / f"{KIND}.{NAME}.json").write_text(json.dumps(job))
    assert act("diff", "submit.drain_s=45") == 0
    assert "+          terminationGracePeriodSeconds: 90" in capfd.readouterr().out


def test_what_cannot_be_compared_is_no_reason_not_to_go_on(
    cluster: Cluster, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> str:
        raise ClusterError("kubectl diff: no diff on PATH")

    monkeypatch.setattr("regrow.submit.kubectl.Kubectl.diff", refused)
    cluster.has_job(STOPPED)
    assert act("apply", "submit.follow=false") == 0
    assert cluster.verbs == [*["create --dry-run=server"] * 2, "delete rayjobs.ray.io", *STARTED]
    assert "what has changed cannot be shown: kubectl diff: no diff on PATH" in capfd.readouterr().err


@pytest.mark.parametrize("text", ["y", "N", "08", "0o17", "0O7", "0X1f", "0B1", "+.5", "12e4", "1_000", "~", "on"])
def test_text_that_looks_like_something_else_arrives_as_text(cluster: Cluster, text: str) -> None:
    name = text if text[0].isalnum() else "llama8b"
    more = ["submit.follow=false", f"run.name='{name}'", f"+submit.env.WORD='{text}'", "submit.name=llama8b"]
    assert act("apply", *more) == 0
    job = cluster.job
    assert job is not None
    assert job["metadata"]["annotations"]["regrow/run-name"] == name
    head = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    assert {"name": "WORD", "value": text} in head["env"]


def will_answer(monkeypatch: pytest.MonkeyPatch, cluster: Cluster, *messages: str) -> None:
    """From the second look at the job on, kubectl fails with one message after the other, and then no more."""
    ask, left = Kubectl.get, ["", *messages]

    def get(self: Kubectl, kind: str, name: str) -> Any:
        if kind == KIND and left:
            message = left.pop(0)
            if message:
                cluster.is_away(message, 1)
        return ask(self, kind, name)

    monkeypatch.setattr(Kubectl, "get", get)


def test_following_outlasts_a_server_that_goes_away(
    cluster: Cluster, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.has_job({"jobDeploymentStatus": "Initializing"}, RUNNING, SUCCEEDED)
    cluster.has_submitter("llama8b", "2026-01-01T00:00:00Z")
    line = "2026-01-01T00:00:0{}Z step {}"
    cluster.will_log(([line.format(0, 0)], "error: unexpected EOF"), ([line.format(0, 0), line.format(1, 1)], ""))
    klog = 'E1123 08:14:25.677386 17927 memcache.go:265] "Unhandled Error" err="couldn\'t get"\n'
    will_answer(monkeypatch, cluster, klog * 2 + REFUSED, klog + REFUSED, REFUSED)
    assert act("logs") == 0
    shown = capfd.readouterr()
    assert shown.err.count(f"kubectl get: {REFUSED}; the job runs on; asking again") == 1
    assert "Kubernetes answers again" in shown.err
    assert "Complete (SUCCEEDED)" in shown.err
    assert "memcache" not in shown.err


def test_a_server_that_is_away_from_the_start_is_one_line(cluster: Cluster) -> None:
    cluster.is_away(REFUSED, 1)
    with pytest.raises(ClusterError) as caught:
        act("apply")
    assert str(caught.value) == f"kubectl get: {REFUSED}"


def test_a_job_that_is_lost_sight_of_has_a_status_of_its_own(
    cluster: Cluster, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.has_job(RUNNING, {"do": ["vanish"]})
    assert act("logs") == 3
    assert "RayJob llama8b was deleted while it was followed; last it was Running (RUNNING)" in capfd.readouterr().err
    monkeypatch.setattr(kuberay, "UNREACHABLE_S", 0.05)
    cluster.has_job(RUNNING)
    cluster.will_log(([], ""))
    look = kuberay.KubeRay.look

    def away(self: kuberay.KubeRay, meanwhile: str) -> Any:
        cluster.is_away(REFUSED, 10**6)
        return look(self, meanwhile)

    monkeypatch.setattr(kuberay.KubeRay, "look", away)
    assert act("logs") == 3
    assert capfd.readouterr().err.endswith(f"error: kubectl get: {REFUSED}; the job runs on, unseen from here\n")


@pytest.mark.parametrize("kind", ["jobs", "pods"])
def test_logs_that_we_may_not_look_for_are_told_of_once(
    kind: str, cluster: Cluster, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run was followed to its end without a line of its logs, nor a reason."""
    select, forbidden = Kubectl.select, f"kubectl get: Error from server (Forbidden): {kind} is forbidden"

    def refused(self: Kubectl, each: str, selector: str) -> Any:
        if each == kind:
            raise ClusterError(forbidden)
        return select(self, each, selector)

    monkeypatch.setattr(Kubectl, "select", refused)
    cluster.has_job(RUNNING, RUNNING, RUNNING, SUCCEEDED)
    cluster.has_submitter("llama8b", "2026-01-01T00:00:00Z")
    assert act("logs") == 0
    assert capfd.readouterr().err.count(f"the logs cannot be shown: {forbidden}; asking again\n") == 1


def test_a_refusal_just_after_the_server_was_away_is_not_believed(
    cluster: Cluster, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    forbidden = 'Error from server (Forbidden): rayjobs.ray.io "llama8b" is forbidden'
    will_answer(monkeypatch, cluster, REFUSED, forbidden, forbidden)
    cluster.has_job(RUNNING, SUCCEEDED)
    assert act("logs") == 0
    will_answer(monkeypatch, cluster, forbidden)
    cluster.has_job(RUNNING, SUCCEEDED)
    assert act("logs") == 3  # it is, where it comes out of the blue
    assert "is forbidden; the job runs on, unseen from here" in capfd.readouterr().err


def test_a_refusal_just_after_a_call_that_hung_is_not_believed(
    cluster: Cluster, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The minute begins when the call that hung is given up, not when it was made."""
    clock = [0.0]
    monkeypatch.setattr(kuberay.time, "monotonic", lambda: clock[0])
    look = Kubectl.get
    answers: list[tuple[float, ClusterError | None]] = [
        (0.0, None),
        (60.0, Unreachable("kubectl get has not answered for 60 s")),
        (2.0, ClusterError("kubectl get: Error from server (Forbidden): rayjobs.ray.io is forbidden")),
        (3.0, None),
    ]

    def get(self: Kubectl, kind: str, name: str) -> Any:
        took_s, error = answers.pop(0) if answers else (0.0, None)
        clock[0] += took_s
        if error is not None:
            raise error
        return look(self, kind, name)

    monkeypatch.setattr(Kubectl, "get", get)
    cluster.has_job(RUNNING, SUCCEEDED)
    assert act("logs") == 0
    assert "Kubernetes answers again, after 1 min 5 s" in capfd.readouterr().err


def test_a_deletion_that_waits_says_for_what_and_goes_on(cluster: Cluster, capfd: pytest.CaptureFixture[str]) -> None:
    held = {"finalizers": ["ray.io/rayjob-finalizer"]}
    cluster.has_job(STOPPED, {}, {}, GONE, **held)
    assert act("apply", "submit.follow=false") == 0
    shown = capfd.readouterr().err
    assert shown.count("it is being deleted, and waits for ray.io/rayjob-finalizer: does KubeRay's operator run?") == 1
    assert "serverside-applied" in shown

    cluster.has_job({"jobDeploymentStatus": "Initializing"}, {}, GONE, **held)
    assert act("stop") == 0
    assert "waits for ray.io/rayjob-finalizer" in capfd.readouterr().err
    assert cluster.job is None


def test_status_says_that_a_job_is_being_deleted(cluster: Cluster, capfd: pytest.CaptureFixture[str]) -> None:
    cluster.has_job(SUCCEEDED, finalizers=["ray.io/rayjob-finalizer"], deletionTimestamp="2026-01-01T00:00:00Z")
    assert act("status") == 0
    assert "! it is being deleted, and waits for ray.io/rayjob-finalizer: does KubeRay" in capfd.readouterr().out


def test_a_deletion_that_does_not_end_is_given_up(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kuberay, "DELETING_S", 0.02)
    cluster.has_job(STOPPED, finalizers=["ray.io/rayjob-finalizer"])
    with pytest.raises(
        ClusterError, match=r"still being deleted after 0\.02 s.*no new one was made: submit\.action=apply"
    ):
        act("apply")


def started(cluster: Cluster, *arguments: str) -> "subprocess.Popen[str]":
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background ignores it
        "import sys; from regrow.submit import kuberay, submit, waiting\n"
        "kuberay.POLL_S, kuberay.REASONS_S, waiting.QUIET_S = 0.05, 0.05, 0.3\n"
        f"submit.git_sha = lambda: {CODE.git_sha!r}\n"
        "submit.untracked = lambda *_: []\n"
        "import runpy; sys.argv[0] = 'jobs.submit'; runpy.run_module('jobs.submit', run_name='__main__')"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code, *READY, *arguments],
        cwd=ROOT,
        env=os.environ | cluster.environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("action", "steps", "last"),
    [
        (
            "apply",
            [STOPPED],
            "no longer waiting; RayJob llama8b is being deleted, and no new one was made: submit.action=apply again "
            "makes it and goes on with the run",
        ),
        (
            "stop",
            [{"jobDeploymentStatus": "Initializing"}],
            "no longer waiting; RayJob llama8b is being deleted, and nothing more has to be done: it goes by itself",
        ),
        (
            "stop",
            [RUNNING],
            "no longer waiting; llama8b-x1 was asked to end and does so by itself (submit.action=status)",
        ),
        (
            "logs",
            [{"jobDeploymentStatus": "Initializing"}],
            "no longer following; the job runs on, and submit.action=stop ends it",
        ),
    ],
)
def test_an_interrupt_says_what_goes_on_without_us_and_waiting_is_never_silent(
    cluster: Cluster, action: str, steps: list[dict[str, Any]], last: str
) -> None:
    cluster.has_job(*steps, finalizers=["ray.io/rayjob-finalizer"])
    cluster.has_head()
    with started(cluster, f"submit.action={action}") as process:
        assert process.stderr is not None
        lines: list[str] = []
        for line in process.stderr:
            lines.append(line.rstrip("\n"))
            if line.startswith("waiting for ") and "RayJob llama8b" in line:  # not for an answer of a slow kubectl
                break
        process.send_signal(signal.SIGINT)
        lines += process.stderr.read().splitlines()
        assert process.wait(60) == 130, lines
    assert last in lines
    assert "Traceback" not in "\n".join(lines)


@pytest.mark.parametrize("length", [40, 43, 44, 45, 46, 47])
def test_events_of_pods_are_a_jobs_own_however_long_its_name_is(length: int) -> None:
    """KubeRay's names of pods: 50 characters of the cluster and its group, the kind of node, five letters."""
    job = "x" * length
    cluster = f"{job}-ab1cd"
    pods = [f"{prefix[:50]}-{kind}" for prefix, kind in ((cluster, "head"), (f"{cluster}-workers", "worker-k2x9z"))]
    others = [f"{job[:-1]}y-ab1cd"[:50] + "-head", f"{job[:40]}-head"]
    events = [
        {"involvedObject": {"kind": "Pod", "name": name}, "reason": "FailedScheduling", "message": f"no node of {name}"}
        for name in pods + others
    ]
    status = {"jobDeploymentStatus": "Initializing", "rayClusterName": cluster}
    found = reasons({"metadata": {"name": job}, "spec": {}, "status": status}, Around(events), now=0.0)
    assert {each.text.rpartition(" ")[2] for each in found} == set(pods)


def test_pods_that_are_not_made_say_why_once(cluster: Cluster, capfd: pytest.CaptureFixture[str]) -> None:
    failure = {
        "type": "ReplicaFailure",
        "status": "True",
        "reason": "FailedCreateHeadPod",
        "message": 'pods "llama8b-c1-head" is forbidden: no PriorityClass with name low was found',
    }
    step = {
        "jobDeploymentStatus": "Initializing",
        "rayClusterName": CLUSTER,
        "rayClusterStatus": {"conditions": [failure]},
    }
    cluster.has_warning("RayCluster", CLUSTER, "FailedToCreateHeadPod", "no PriorityClass", count=3)
    cluster.has_warning("Pod", f"{CLUSTER}-workers-worker-x1y2z", "FailedScheduling", "0/4 nodes are available")
    cluster.has_warning("Pod", "another-c1-head", "BackOff", "not ours")
    cluster.has_job(step, step, step, SUCCEEDED)
    assert act("logs") == 0
    shown = capfd.readouterr().err
    assert shown.count("! pods are not made: FailedCreateHeadPod: pods") == 1
    assert shown.count("! FailedToCreateHeadPod: RayCluster llama8b-c1: no PriorityClass (") == 1
    assert "3 times)" in shown
    assert shown.count("! FailedScheduling: Pod llama8b-c1-workers-worker-x1y2z: 0/4 nodes") == 1
    assert "not ours" not in shown
    cluster.will_be(step)
    assert act("status") == 0
    assert "! pods are not made: FailedCreateHeadPod" in capfd.readouterr().out


def test_a_job_that_no_operator_looks_at_says_so_after_a_minute(
    cluster: Cluster, capfd: pytest.CaptureFixture[str]
) -> None:
    now = time.time()
    for age, expected in ((30, 0), (120, 1)):
        created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now - age))
        cluster.has_job(creationTimestamp=created)
        assert act("status") == 0
        assert capfd.readouterr().out.count("! no operator has looked at this job: is KubeRay there") == expected


def test_a_pod_that_a_dead_host_keeps_is_told_of_with_the_way_to_let_it_go(
    cluster: Cluster, capfd: pytest.CaptureFixture[str]
) -> None:
    """KubeRay counts it among the workers, or waits for its end, and makes none in its place."""

    def ago(seconds: float) -> str:
        return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - seconds))

    def status(ready: int) -> list[str]:
        cluster.has_job(RUNNING | {"rayClusterStatus": {"readyWorkerReplicas": ready, "desiredWorkerReplicas": 8}})
        assert act("status") == 0
        return [line for line in capfd.readouterr().out.splitlines() if line.startswith("!")]

    cluster.has_pod("w0", "worker", node="n0")
    cluster.has_pod("w1", "worker", node="n1", deletionTimestamp=ago(-60))  # its grace period is not over
    cluster.has_pod("w2", "worker", node="n2", deletionTimestamp=ago(10))
    assert status(7) == []
    cluster.has_pod("w3", "worker", node="n3", deletionTimestamp=ago(720))
    (line,) = status(7)
    taint = "or taint it node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"
    assert re.fullmatch(
        "! worker pod w3 on node n3: Terminating past the grace period, and KubeRay neither replaces nor adds workers "
        f"meanwhile; if that host is dead: kubectl delete node n3, {taint} \\(for 12 min[^)]*\\)",
        line,
    )
    for number in range(4, 9):
        cluster.has_pod(f"w{number}", "worker", node=f"n{number // 2}", deletionTimestamp=ago(1000 - number))
    (line,) = status(2)
    assert "worker pod w4 on node n2, w5 on node n2, w6 on node n3 and 3 more: Terminating" in line
    assert "kubectl delete node n2 n3, or" in line
    assert status(8) == []  # no worker waits for another
    cluster.has_pod("head", "head", node="n9", deletionTimestamp=ago(720))
    (line,) = status(8)
    assert "! head pod head on node n9: Terminating past the grace period, and KubeRay makes no other head" in line


def test_a_cluster_that_is_whole_is_not_asked_for_its_workers(cluster: Cluster) -> None:
    """There are thousands, of some 15 kB each."""
    for ready in (7, 8):
        cluster.has_job(RUNNING | {"rayClusterStatus": {"readyWorkerReplicas": ready, "desiredWorkerReplicas": 8}})
        assert act("status") == 0
    asked = [each for call in cluster.calls for each in call["arguments"] if each.startswith("--selector=regrow")]
    assert asked == [f"--selector=regrow/run={NAME}", f"--selector=regrow/run={NAME},regrow/role!=worker"]


def test_a_submission_that_fails_again_and_again_says_where_the_reason_is(
    cluster: Cluster, capfd: pytest.CaptureFixture[str]
) -> None:
    for number, phase in enumerate(("Failed", "Failed", "Running")):
        cluster.has_pod(f"s{number}", "submitter", phase=phase, creationTimestamp=f"2026-01-01T00:0{number}:00Z")
    line = "! the job is not submitted to Ray: kubectl logs s1 says why (2 times)"
    for job, expected in (("", True), ("RUNNING", False)):  # a connection of the log broke
        cluster.has_job(RUNNING | {"jobStatus": job})
        assert act("status") == 0
        assert (line in capfd.readouterr().out.splitlines()) is expected


def test_a_suspended_job_names_its_queue_and_what_the_queue_says(
    cluster: Cluster, capfd: pytest.CaptureFixture[str]
) -> None:
    cluster.will_be({"do": ["first_write"], "jobDeploymentStatus": "Suspended"})
    assert act("apply", *KUEUE, "submit.follow=false") == 0
    job = cluster.job
    assert job is not None
    condition = {"type": "QuotaReserved", "status": "False", "message": "insufficient unused quota for nvidia.com/gpu"}
    cluster.has(
        "workloads.kueue.x-k8s.io",
        "rayjob-llama8b-a1b2c",
        metadata={"labels": {"kueue.x-k8s.io/job-uid": job["metadata"]["uid"]}},
        status={"conditions": [condition]},
    )
    capfd.readouterr()
    assert act("status", *KUEUE) == 0
    line = "! it is suspended until Kueue admits it from the queue h100: insufficient unused quota for nvidia.com/gpu"
    assert line in capfd.readouterr().out.splitlines()


def test_the_cause_of_a_failure_is_its_end(cluster: Cluster, capfd: pytest.CaptureFixture[str]) -> None:
    noise = "\n".join(f"(pid=1) step {n} loss 3.{n}" for n in range(100))
    message = (
        f"Job entrypoint command failed with exit code 1, last available logs (truncated):\n{noise}\nerror: no GPU"
    )
    cluster.has_job(RUNNING, FAILED | {"message": message})
    assert act("logs") == 1
    line = capfd.readouterr().err.splitlines()[-1]
    assert line.startswith("Failed (FAILED): AppFailed: Job entrypoint command failed with exit code 1")
    assert line.endswith(" ... error: no GPU")


def test_a_job_that_kuberay_has_given_up_for_good_says_how_to_go_on(
    cluster: Cluster, capfd: pytest.CaptureFixture[str]
) -> None:
    """The head did not answer for RAYJOB_STATUS_CHECK_TIMEOUT_SECONDS, which counts as no failure to be retried."""
    given_up = {"reason": "JobStatusCheckTimeoutExceeded", "message": "Job status checks have been failing since noon"}
    hint = "KubeRay does not retry this: submit.action=apply goes on with the run"
    cluster.has_job(RUNNING, FAILED | given_up)
    assert act("logs") == 1
    assert f"failing since noon; {hint}\n" in capfd.readouterr().err
    assert act("status") == 0
    assert hint in capfd.readouterr().out.splitlines()[0]
    cluster.has_job(FAILED)
    assert act("status") == 0
    assert hint not in capfd.readouterr().out


def test_log_lines_come_once_and_where_they_stopped(cluster: Cluster, capfd: pytest.CaptureFixture[str]) -> None:
    cluster.has_job(RUNNING, RUNNING, RUNNING, RUNNING, SUCCEEDED)
    cluster.has_submitter("llama8b", "2026-01-01T00:00:00Z")
    a, b, c, d = (f"2026-01-01T00:00:00.{n}Z {n}" for n in ("1", "2", "25", "3"))
    cluster.will_log(
        ([a, b], "error: the kubelet is away"),
        ([], "error: the kubelet is away"),
        ([a, b, c], ""),  # from that second on, as the server understands it
        ([a, b, c, d], ""),
    )
    assert act("logs") == 0
    shown = capfd.readouterr()
    assert shown.out.split() == ["1", "2", "25", "3"]
    assert shown.err.count("kubectl logs: the kubelet is away; asking again") == 1
    asked = [each for call in cluster.calls for each in call["arguments"] if each.startswith("--since-time")]
    assert asked == ["--since-time=2026-01-01T00:00:00.2Z"] * 2 + ["--since-time=2026-01-01T00:00:00.25Z"]


def test_no_line_is_lost_when_the_clock_goes_back_from_summer_time() -> None:
    """Times have the offset of the node's zone. Digits that say no more are not there in all of them."""
    times = [
        "2026-10-25T02:59:59.999999998+02:00",
        "2026-10-25T02:59:59.999999999+02:00",
        "2026-10-25T02:00:00+01:00",
        "2026-10-25T01:00:00.000000001Z",
        "2026-10-25T02:00:00.5+01:00",
        "2026-10-25T03:00:00.25+01:00",
    ]
    shown: list[bytes] = []
    lines = PodLogs(shown.append)
    for after in range(len(times) + 1):  # the connection breaks after each, and the lines of all times come again
        lines.reconnect()
        for number, time_ in enumerate(times[:after]):
            lines.take(f"{time_} line {number}\n".encode())
    assert shown == [f"line {number}\n".encode() for number in range(len(times))]
    assert lines.since == times[-1]


def test_a_line_without_a_time_is_passed_on_and_keeps_no_other_back() -> None:
    shown: list[bytes] = []
    lines = PodLogs(shown.append)
    given = [b"2026-01-01T00:00:01Z a\n", b"unable to retrieve container logs\n", b"2026-01-01T00:00:02Z b\n"]
    for line in given:
        lines.take(line)
    assert shown == [b"a\n", given[1], b"b\n"]
    assert lines.since == "2026-01-01T00:00:02Z"


@pytest.mark.parametrize(
    ("stderr", "line"),
    [
        (
            'E1123 08:14:25.677386 17927 memcache.go:265] "Unhandled Error" err="couldn\'t get current server"\n' * 2
            + "error: You must be logged in to the server (Unauthorized)",
            "kubectl get: You must be logged in to the server (Unauthorized); the credentials of kubectl's context are "
            "not, or no longer, accepted",
        ),
        ('error: context "nope" does not exist', 'kubectl get: context "nope" does not exist'),
        (
            'error: the server doesn\'t have a resource type "rayjobs"',
            'kubectl get: the server doesn\'t have a resource type "rayjobs"; is KubeRay installed in this cluster? '
            "k8s/README.md, 'Once per cluster'",
        ),
        (
            'error: Apply failed with 2 conflicts: conflicts with "kueue" using ray.io/v1:\n- .spec.suspend\n'
            "- .spec.entrypoint\nPlease review the fields above--they currently have\nother managers",
            'kubectl get: Apply failed with 2 conflicts: conflicts with "kueue" using ray.io/v1: / - .spec.suspend / '
            "- .spec.entrypoint",
        ),
    ],
)
def test_what_kubectl_says_is_one_line_with_its_headline(cluster: Cluster, stderr: str, line: str) -> None:
    cluster.is_away(stderr, 1)
    with pytest.raises(ClusterError) as caught:
        act("status")
    assert str(caught.value) == line


@pytest.mark.parametrize("action", ["status", "stop", "logs"])
def test_a_namespace_that_is_not_there_is_an_error(cluster: Cluster, action: str) -> None:
    (cluster.folder / "no_namespace").touch()
    with pytest.raises(
        ClusterError, match=r"there is no namespace pretrain; name another, or make it as k8s/README\.md"
    ):
        act(action)


def test_a_dashboard_is_offered_where_there_is_a_head(cluster: Cluster, capfd: pytest.CaptureFixture[str]) -> None:
    cluster.has_job(RUNNING, RUNNING)
    assert act("status") == 0
    assert "dashboard" not in capfd.readouterr().out
    cluster.has_head()
    assert act("status") == 0
    assert "dashboard: kubectl" in capfd.readouterr().out


def test_on_a_terminal_a_spinner_moves_while_nothing_happens() -> None:
    controller, terminal = pty.openpty()
    code = (
        "import time; from regrow.submit.waiting import Waiting\n"
        "with Waiting() as waiting:\n"
        "    waiting.on('RayJob [x] to begin')\n"
        "    waiting.say('New')\n"
        "    input()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stderr=terminal) as process:
        os.close(terminal)
        shown = b""
        while shown.count(b"RayJob [x] to begin (") < 3:
            shown += os.read(controller, 1 << 16)
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.close()
        assert process.wait() == 0
    assert b"New" in shown


def test_lines_that_wait_come_rarer_with_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(waiting.time, "monotonic", lambda: clock[0])
    stream = io.StringIO()
    shown = waiting.Waiting(stream)
    shown.on("RayJob x")
    times: list[float] = []
    while clock[0] < 7200:
        before = len(stream.getvalue())
        shown.beat()
        if len(stream.getvalue()) > before:
            times.append(clock[0])
        clock[0] += 1
    assert times[:6] == [9, 18, 27, 36, 45, 54]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert set(gaps[6:60]) == {60}
    assert gaps[-1] == 600
    assert stream.getvalue().splitlines()[0] == "waiting for RayJob x (9 s)"
