"""A run as a RayJob: start it, go on with it, follow it, look at it, stop it with a checkpoint.

The RayJob is named after the run, so that one run is never started twice. KubeRay does not start one anew that has
ended: to go on with a run, its RayJob is deleted first. The run itself lies in its storage.
"""

import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from regrow.errors import ClusterError
from regrow.submit.kubectl import Kubectl

KIND = "rayjobs.ray.io"
DASHBOARD = "http://127.0.0.1:8265"  # from the head pod
POLL_S = 2.0
ENDED = ("Complete", "Failed", "ValidationFailed")  # jobDeploymentStatus
STOPPING_S = 120.0  # beyond the time that the job has for its checkpoint

Status = dict[str, Any]


class KubeRay:
    """One RayJob, there or not."""

    def __init__(self, kubectl: Kubectl, name: str, *, say: Callable[[str], None] | None = None) -> None:
        self.kubectl, self.name = kubectl, name
        self.say = say or (lambda line: print(line, file=sys.stderr, flush=True))

    def apply(self, manifests: str) -> None:
        """Start the job, or go on with the run of one that has ended. Raises ClusterError where it runs."""
        status = self._status()
        if status is not None:
            state = status.get("jobDeploymentStatus") or "New"
            if state not in ENDED:
                raise ClusterError(
                    f"RayJob {self.name} is there ({state}): one run has one job; stop it first "
                    "(submit.action=stop), or choose another run.name"
                )
            self.say(f"RayJob {self.name} has ended ({state}); its successor goes on with the run")
            difference = self.kubectl.diff(manifests)
            if difference:
                self.say(difference.rstrip())
            self.kubectl.delete(KIND, self.name)
        self.say(self.kubectl.apply(manifests).strip())

    def follow(self) -> int:
        """Show the job's logs and its states until it has ended; 0 where it succeeded or was stopped."""
        shown, since = "", ""
        while True:
            status = self._status()
            if status is None:
                raise ClusterError(f"there is no RayJob {self.name}; start it with submit.action=apply")
            line = _state_line(status)
            if line != shown:
                self.say(line)
                shown = line
            state, job = status.get("jobDeploymentStatus"), status.get("jobStatus")
            if state in ENDED:
                return 0 if job in ("SUCCEEDED", "STOPPED") else 1
            if state == "Running" and job in ("PENDING", "RUNNING"):
                options = [f"--since-time={since}"] if since else []
                self.kubectl.follow(f"job/{self._submitter(status)}", *options)
                since = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            time.sleep(POLL_S)

    def describe(self) -> list[str]:
        """How the job is doing, a fact a line."""
        found = self.kubectl.get(KIND, self.name)
        if found is None:
            return [f"no RayJob {self.name}: not started, or removed after it had ended"]
        status = found.get("status") or {}
        annotations = found["metadata"].get("annotations") or {}
        lines = [
            _state_line(status),
            f"run {annotations.get('regrow/run-name', '?')}, commit {annotations.get('regrow/git-sha', '?')}, "
            f"started {status.get('startTime', 'not yet')}",
        ]
        cluster = status.get("rayClusterStatus") or {}
        if cluster:
            counts = {key: cluster.get(f"{key}WorkerReplicas", 0) for key in ("ready", "desired", "min", "max")}
            lines.append("worker pods: " + ", ".join(f"{count} {key}" for key, count in counts.items()))
        if status.get("failed"):
            lines.append(
                f"failed attempts: {status['failed']} of {found['spec'].get('backoffLimit', 0)} that are retried"
            )
        if status.get("rayClusterName"):
            forward = self.kubectl.written("port-forward", f"service/{status['rayClusterName']}-head-svc", "8265")
            lines.append(f"dashboard: {forward}, then {DASHBOARD}")
        return lines

    def stop(self, *, wait_s: float) -> None:
        """Have the job commit a checkpoint and end; wait for that as long as it is given, 0: do not wait."""
        status = self._status()
        if status is None or status.get("jobDeploymentStatus") in ENDED:
            self.say(f"RayJob {self.name} does not run")
            return
        job, cluster = status.get("jobId"), status.get("rayClusterName")
        if not job or status.get("jobStatus") not in ("PENDING", "RUNNING"):
            self.kubectl.delete(KIND, self.name)
            self.say(f"RayJob {self.name} had not begun to train, and is deleted")
            return
        heads = self.kubectl.select("pods", f"ray.io/cluster={cluster},ray.io/node-type=head")
        if not heads:
            raise ClusterError(f"RayJob {self.name} runs, but its cluster {cluster} has no head pod; try again")
        pod = heads[0]["metadata"]["name"]
        self.kubectl.exec(pod, "ray-head", ["ray", "job", "stop", "--no-wait", "--address", DASHBOARD, job])
        self.say(f"asked {job} to end after its step, with a checkpoint")
        give_up_at = time.monotonic() + wait_s + STOPPING_S
        while wait_s and time.monotonic() < give_up_at:
            now = self._status()
            if now is None or now.get("jobDeploymentStatus") in ENDED:
                self.say(f"RayJob {self.name} has ended; submit.action=apply goes on with the run")
                return
            time.sleep(POLL_S)
        if wait_s:
            raise ClusterError(
                f"RayJob {self.name} has not ended for {wait_s + STOPPING_S:g} s; see submit.action=logs"
            )

    def _status(self) -> Status | None:
        """None where there is no such job; empty where KubeRay has not seen it yet."""
        found = self.kubectl.get(KIND, self.name)
        return None if found is None else found.get("status") or {}

    def _submitter(self, status: Status) -> str:
        """The Kubernetes Job that follows the Ray job's logs."""
        jobs = self.kubectl.select("jobs", f"ray.io/originated-from-cr-name={self.name}")
        jobs.sort(key=lambda job: str(job["metadata"].get("creationTimestamp", "")))
        return str(jobs[-1]["metadata"]["name"]) if jobs else self.name


def _state_line(status: Status) -> str:
    state, job = status.get("jobDeploymentStatus") or "New", status.get("jobStatus")
    parts = [f"{state}{f' ({job})' if job else ''}"]
    for key in ("reason", "message"):
        text = " ".join(str(status.get(key) or "").split())
        if text:
            parts.append(text[:300])
    return ": ".join(parts)
