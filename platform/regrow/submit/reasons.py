"""Why a RayJob does not train or grow: from its conditions, queue, finalizers, pods and the events around it. Pure."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from regrow.errors import first_line
from regrow.show.units import duration

Object = dict[str, Any]

NOT_SEEN_S = 60.0  # after which a job that no operator has touched is told of
LATE_S = 60.0  # after a pod's grace period, for the kubelet to end it, and between two clocks
EVENTS = 3  # the newest that are shown
TEXT = 300  # characters of a message
POD_PREFIX = 50  # characters of a cluster's name that KubeRay gives its pods
QUEUE_LABELS = {"kueue.x-k8s.io/queue-name": "Kueue", "volcano.sh/queue-name": "Volcano"}


@dataclass(frozen=True)
class Reason:
    """What keeps a job from training. Two that differ in `when` alone are the same news."""

    text: str
    when: str = ""  # how long, how often

    def __str__(self) -> str:
        return f"{self.text} ({self.when})" if self.when else self.text


@dataclass(frozen=True)
class Around:
    """What was found beside a RayJob."""

    events: Sequence[Object] = ()  # of type Warning, of the whole namespace
    workloads: Sequence[Object] = field(default=())  # of Kueue, for this job
    pods: Sequence[Object] = ()  # of the run


def reasons(job: Object, around: Around, *, now: float) -> list[Reason]:
    """What keeps the job from training, or from going, the most decisive first; `now` in unix seconds."""
    metadata, status = job["metadata"], job.get("status") or {}
    return [
        *_deletion(metadata, now),
        *_unseen(metadata, status, now),
        *_suspension(job, status, around.workloads),
        *_conditions(status),
        *_late(around.pods, now),
        *_submission(status, around.pods),
        *_warnings(job, status, around.events, now),
    ]


def cause(message: str) -> str:
    """A long message in `TEXT` characters: how it begins, and its end, where Ray puts the error below the logs.

    >>> cause("Job entrypoint command failed with exit code 1, last available logs:\\nstep 1\\nerror: no GPU")
    'Job entrypoint command failed with exit code 1, last available logs: ... error: no GPU'
    """
    lines = [" ".join(line.split()) for line in message.splitlines() if line.strip()]
    whole = " ".join(lines)
    if len(whole) <= TEXT and len(lines) < 3:
        return whole
    if len(lines) < 2:
        return f"{whole[: TEXT // 3]} ... {whole[-(TEXT - TEXT // 3) :]}"
    first, last = lines[0][: TEXT // 3], lines[-1]
    rest = TEXT - len(first)
    return f"{first} ... {last if len(last) <= rest else last[-rest:]}"


def refusal(error: BaseException) -> str:
    """What Ray's client says, in a line: of a traceback over there the status before it and the error at its end.

    >>> refusal(RuntimeError("Request failed with status code 500: Traceback (...):\\n  File ...\\nOSError: full\\n."))
    'Request failed with status code 500: OSError: full'
    """
    status, _, text = str(error).partition("Traceback (")
    lines = [line.strip() for line in text.splitlines() if line.strip(" .")]  # the client ends what it is told in a dot
    return (status.rpartition("\n")[2] + lines[-1])[:TEXT] if lines else first_line(error)


def _deletion(metadata: Object, now: float) -> list[Reason]:
    since = metadata.get("deletionTimestamp")
    if not since:
        return []
    held = ", ".join(metadata.get("finalizers") or [])
    waits = f", and waits for {held}: does KubeRay's operator run?" if held else ""
    return [Reason(f"it is being deleted{waits}", f"for {_ago(since, now)}")]


def _unseen(metadata: Object, status: Object, now: float) -> list[Reason]:
    """KubeRay's first acts are a finalizer and a state."""
    if status.get("jobDeploymentStatus") or metadata.get("finalizers") or metadata.get("deletionTimestamp"):
        return []
    age = now - unix(metadata.get("creationTimestamp"), now)
    if age < NOT_SEEN_S:
        return []
    text = "no operator has looked at this job: is KubeRay there, does it watch this namespace?"
    return [Reason(text, f"for {duration(age)}")]


def _suspension(job: Object, status: Object, workloads: Sequence[Object]) -> list[Reason]:
    if status.get("jobDeploymentStatus") not in ("Suspended", "Suspending") and not job["spec"].get("suspend"):
        return []
    labels = job["metadata"].get("labels") or {}
    for label, owner in QUEUE_LABELS.items():
        if label in labels:
            text = f"it is suspended until {owner} admits it from the queue {labels[label]}"
            for workload in workloads:
                for condition in (workload.get("status") or {}).get("conditions") or []:
                    if condition.get("type") == "QuotaReserved" and condition.get("status") == "False":
                        text += f": {cause(str(condition.get('message', '')))}"
            return [Reason(text)]
    return [Reason("it is suspended, and in no queue: resume it (spec.suspend=false) where it was suspended")]


def _conditions(status: Object) -> list[Reason]:
    lines = []
    conditions = (status.get("rayClusterStatus") or {}).get("conditions") or []
    for condition in conditions:
        kind, message = condition.get("type"), cause(str(condition.get("message") or ""))
        if kind == "ReplicaFailure" and condition.get("status") == "True":
            lines.append(Reason(f"pods are not made: {condition.get('reason', '?')}: {message}"))
        waiting = status.get("jobDeploymentStatus") == "Initializing"
        if kind == "HeadPodReady" and condition.get("status") == "False" and waiting and message:
            lines.append(Reason(f"the head is not ready: {condition.get('reason', '?')}: {message}"))
    return lines


def _late(pods: Sequence[Object], now: float) -> list[Reason]:
    """Pods that should have ended: for KubeRay they are there, and it replaces none (ray-project/kuberay#4078)."""
    lines = []
    for role, meanwhile in (("head", "makes no other head"), ("worker", "neither replaces nor adds workers")):
        late = []
        for pod in pods:
            due = unix(pod["metadata"].get("deletionTimestamp"), now)  # when its grace period is over
            if _role(pod) == role and now - due > LATE_S:
                late.append((due, pod["metadata"]["name"], (pod.get("spec") or {}).get("nodeName", "?")))
        if late:
            shown = sorted(late)[:EVENTS]
            names = ", ".join(f"{name} on node {node}" for _, name, node in shown)
            more = f" and {len(late) - EVENTS} more" if len(late) > EVENTS else ""
            nodes = " ".join(dict.fromkeys(node for *_, node in shown))
            text = (
                f"{role} pod {names}{more}: Terminating past the grace period, and KubeRay {meanwhile} meanwhile; if "
                f"that host is dead: kubectl delete node {nodes}, or taint it "
                "node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"
            )
            lines.append(Reason(text, f"for {duration(now - shown[0][0])}"))
    return lines


def _submission(status: Object, pods: Sequence[Object]) -> list[Reason]:
    """Submitters that failed before Ray had a job: Kubernetes tries again, for days."""
    failed = [pod for pod in pods if _role(pod) == "submitter" and (pod.get("status") or {}).get("phase") == "Failed"]
    if status.get("jobDeploymentStatus") != "Running" or status.get("jobStatus") or not failed:
        return []
    newest = max(failed, key=lambda pod: str(pod["metadata"].get("creationTimestamp", "")))["metadata"]["name"]
    return [Reason(f"the job is not submitted to Ray: kubectl logs {newest} says why", f"{len(failed)} times")]


def _role(pod: Object) -> str:
    return str((pod["metadata"].get("labels") or {}).get("regrow/role"))


def _warnings(job: Object, status: Object, events: Sequence[Object], now: float) -> list[Reason]:
    """The newest events of the job, its cluster, its pods, its submitter and its queue's object, each once."""
    born = unix(job["metadata"].get("creationTimestamp"), 0.0)
    found: dict[tuple[str, str], Object] = {}
    for event in sorted(events, key=lambda each: _when(each, now)):
        about = event.get("involvedObject") or {}
        if _when(event, now) >= born and _is_ours(job["metadata"], status, about):
            found[str(event.get("reason", "")), str(event.get("message", ""))] = event
    lines = []
    for event in list(found.values())[::-1][:EVENTS]:
        about = event.get("involvedObject") or {}
        count = (event.get("series") or {}).get("count") or event.get("count") or 1
        times = f", {count} times" if count > 1 else ""
        text = f"{event.get('reason', '?')}: {about.get('kind')} {about.get('name')}: "
        age = duration(max(0.0, now - _when(event, now)))
        lines.append(Reason(text + cause(str(event.get("message", ""))), f"{age} ago{times}"))
    return lines


def _is_ours(metadata: Object, status: Object, about: Object) -> bool:
    kind, name = str(about.get("kind")), str(about.get("name"))
    job, cluster = re.escape(metadata["name"]), str(status.get("rayClusterName") or "")
    if kind == "RayJob":
        return name == metadata["name"] and about.get("uid") in (None, metadata.get("uid"))
    patterns = {
        "Job": job,  # the submitter's
        "Pod": rf"{job}(-\d+)?-[a-z0-9]{{5}}",
        "Workload": rf"rayjob-{job}-[a-z0-9]+",  # Kueue's
        "PodGroup": rf"ray-{job}-pg",  # Volcano's
    }
    if kind in patterns and re.fullmatch(patterns[kind], name):
        return True
    return bool(cluster) and (name == cluster or name.startswith((f"{cluster}-", f"{cluster[:POD_PREFIX]}-")))


def _when(event: Object, now: float) -> float:
    series = event.get("series") or {}
    times: Iterable[Any] = (
        series.get("lastObservedTime"),
        event.get("lastTimestamp"),
        event.get("eventTime"),
        event.get("firstTimestamp"),
        (event.get("metadata") or {}).get("creationTimestamp"),
    )
    return next((unix(each, now) for each in times if each), now)


def _ago(text: str, now: float) -> str:
    return duration(max(0.0, now - unix(text, now)))


def unix(text: str | None, default: float) -> float:
    """A time as Kubernetes writes it, in unix seconds; `default` where it is none."""
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except ValueError:
        return default
