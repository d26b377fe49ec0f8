"""A run as a RayJob: start it, go on with it, follow it, look at it, stop it with a checkpoint.

The RayJob is named after the run, so that one run is never started twice. KubeRay does not start one anew that has
ended: to go on with a run, its RayJob is deleted first. The run itself lies in its storage.
"""

import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from regrow.errors import ClusterError
from regrow.show.units import duration
from regrow.submit.ending import LINES, ending, taken_over
from regrow.submit.kubectl import Kubectl, PodLogs, Unreachable
from regrow.submit.reasons import Around, Reason, cause, reasons
from regrow.submit.render import Manifest, to_yaml
from regrow.submit.waiting import Waiting

KIND = "rayjobs.ray.io"
KINDS = {"RayJob": KIND, "NetworkPolicy": "networkpolicies.networking.k8s.io"}
DASHBOARD = "http://127.0.0.1:8265"  # from the head pod
POLL_S = 2.0
REASONS_S = 5.0  # between looks at events
ENDED = ("Complete", "Failed", "ValidationFailed")  # jobDeploymentStatus
ANEW = ("Initializing", "Retrying", "Suspended")  # of a job that had begun: it will again
TRAINS = ("PENDING", "RUNNING")  # jobStatus: Ray's job has not ended
ENDS = ("SUCCEEDED", "STOPPED")  # jobStatus: the submitter has yet to say so; after FAILED KubeRay may try again
UNSEEN_BY_KUBERAY = "JobStatusCheckTimeoutExceeded"  # reason: the head did not answer for too long
LATE = "DeadlineExceeded"  # reason: submit.deadline_s after an attempt began
TRAINS_ON = "; submit.action=stop has it end with a checkpoint before its cluster goes, submit.keep_s later"
NOT_RETRIED = "; KubeRay does not retry this: submit.action=apply goes on with the run"
UNKNOWN = "and whether its newest step is in storage is not known here"
STOPPING_S = 120.0  # beyond the time that the job has for its checkpoint
DELETING_S = 600.0
UNREACHABLE_S = 6 * 3600.0  # for which an API server may be away while something waits
SETTLING_S = 60.0  # after it was away: its answers may still be wrong, as "forbidden" before its rules are loaded

Object = dict[str, Any]
Answer = TypeVar("Answer")


class LostSight(ClusterError):
    """The job was there, and nothing more can be said of it from here."""


class KubeRay:
    """One RayJob, there or not."""

    def __init__(self, kubectl: Kubectl, name: str, *, waiting: Waiting | None = None) -> None:
        self.kubectl, self.name = kubectl, name
        self.waiting = waiting or Waiting()

    def apply(self, manifests: Sequence[Manifest]) -> None:
        """Start the job, or go on with the run of one that has ended. Raises ClusterError where it runs.

        The job is the last of the manifests; what it needs is there before it, and goes with it.
        """
        with self.waiting:
            self.waiting.on("an answer of Kubernetes")
            before = self.kubectl.get(KIND, self.name)
            if before is not None:
                self._make_room(before, manifests)
            self.waiting.on("Kubernetes to take the job")
            *others, job = manifests
            for each in others:
                self._make_anew(each)
            text = self._new(to_yaml([job])) if before is not None else self.kubectl.apply(to_yaml([job]))
            self.waiting.say(text.strip())
            self._give_to(job, others)

    def follow(self) -> int:
        """Show the job's logs and its states until it has ended; 0 where it succeeded, or was stopped and left
        nothing behind.

        Raises LostSight where it or its log was deleted, or the API server is away for too long.
        """
        with self.waiting:
            self.waiting.on("an answer of Kubernetes")
            job = self.kubectl.get(KIND, self.name)
            if job is None:
                raise ClusterError(f"{self.not_there()}; start it with submit.action=apply")
            return self._follow(job)

    def _follow(self, job: Object) -> int:
        logs, shown, told, uid = _Logs(self), "", _Told(), job["metadata"].get("uid")
        while True:
            status = job.get("status") or {}
            line = _state_line(status)
            if line != shown:
                self.waiting.say(line)
                shown = line
            state, ray = status.get("jobDeploymentStatus"), status.get("jobStatus")
            if state in ENDED:
                return _ended(self, status)
            self.waiting.on(f"RayJob {self.name}, which is {state or 'new'}{f' ({ray})' if ray else ''}")
            if state == "Running" and ray in TRAINS:
                logs.follow()
            else:
                told.tell(self, job)
            time.sleep(POLL_S)
            try:
                found = self.look("the job runs on")
            except ClusterError as error:
                raise LostSight(f"{error}; the job runs on, unseen from here") from error
            if found is None or found["metadata"].get("uid") != uid:
                raise LostSight(f"RayJob {self.name} was deleted while it was followed; last it was {shown}")
            job = found

    def describe(self) -> list[str]:
        """How the job is doing, a fact a line; what keeps it from training begins with an exclamation mark."""
        with self.waiting:
            self.waiting.on("an answer of Kubernetes")
            job = self.kubectl.get(KIND, self.name)
            return [self.not_there()] if job is None else self.described(job)

    def described(self, job: Object) -> list[str]:
        """The same for a job that was looked at."""
        status = job.get("status") or {}
        annotations = job["metadata"].get("annotations") or {}
        lines = [
            _state_line(status),
            f"run {annotations.get('regrow/run-name', '?')}, commit {annotations.get('regrow/git-sha', '?')}, "
            f"started {status.get('startTime', 'not yet')}",
        ]
        lines += [f"! {reason}" for reason in why_idle(self.kubectl, job)]
        cluster = status.get("rayClusterStatus") or {}
        if cluster:
            counts = {key: cluster.get(f"{key}WorkerReplicas", 0) for key in ("ready", "desired", "min", "max")}
            lines.append("worker pods: " + ", ".join(f"{count} {key}" for key, count in counts.items()))
        if status.get("failed"):
            lines.append(f"failed attempts: {status['failed']} of {job['spec'].get('backoffLimit', 0) + 1}")
        if status.get("rayClusterName") and head_of(self.kubectl, status) is not None:
            forward = self.kubectl.written("port-forward", f"service/{status['rayClusterName']}-head-svc", "8265")
            lines.append(f"dashboard: {forward}, then {DASHBOARD}")
        return lines

    def stop(self, *, wait_s: float) -> int:
        """Have the job commit a checkpoint and end; wait for that as long as it is given, 0: do not wait. 1 where it
        failed or left behind what it had committed, else 0.

        Raises LostSight as `follow`.
        """
        with self.waiting:
            self.waiting.on("an answer of Kubernetes")
            return self._stop(wait_s)

    def _stop(self, wait_s: float) -> int:
        job = self.kubectl.get(KIND, self.name)
        status = (job or {}).get("status") or {}
        if job is None:
            self.waiting.say(self.not_there())
            return 0
        ray, deleting, trains = status.get("jobId"), job["metadata"].get("deletionTimestamp"), _trains(job)
        head = head_of(self.kubectl, status) if trains else None
        over = status.get("jobDeploymentStatus") in ENDED  # to KubeRay, which lets Ray's job go on after some ends
        if over and head is None:
            self.waiting.say(f"RayJob {self.name} does not run: it is {_state_line(status)}")
            return 0
        if status.get("jobStatus") in ENDS and not deleting:
            self.waiting.say(f"RayJob {self.name} ends already: it is {_state_line(status)}")
            return _until_ended(self, job, wait_s) if wait_s else 0
        if not trains:
            self.delete(job, wait=bool(wait_s))
            return 0
        if head is None:
            raise ClusterError(
                f"RayJob {self.name} runs, but its cluster {status.get('rayClusterName')} has no head pod; try again"
            )
        self.ask(head, status)
        if not wait_s:
            return 0
        try:
            return _until_driver_ends(self, status, wait_s) if over else _until_ended(self, job, wait_s)
        except KeyboardInterrupt:
            self.waiting.say(f"no longer waiting; {ray} was asked to end and does so by itself (submit.action=status)")
            raise

    def ask(self, head: str, status: Object) -> None:
        """Have Ray end its job."""
        self.waiting.on("Ray to be told")
        command = ["ray", "job", "stop", "--no-wait", "--address", DASHBOARD, str(status.get("jobId"))]
        self.kubectl.exec(head, "ray-head", command)
        self.waiting.say(f"asked {status.get('jobId')} to end after its step, with a checkpoint")

    def delete(self, job: Object, *, wait: bool) -> None:
        """Of a job that does not train."""
        deleting = job["metadata"].get("deletionTimestamp")
        if not deleting:
            self.kubectl.delete(KIND, self.name)
        self.waiting.say(f"RayJob {self.name} {'is being' if deleting else 'is not training now, and is'} deleted")
        if wait:
            self._until_gone(job, "nothing more has to be done: it goes by itself")

    def _make_anew(self, manifest: Manifest) -> None:
        """Make what the job needs. What is there is of a job before it, and goes after that, sooner or later."""

        def make() -> str:
            self.kubectl.delete(KINDS[manifest["kind"]], manifest["metadata"]["name"])
            return self.kubectl.apply(to_yaml([manifest]))

        self.waiting.say(_patiently(self.waiting, make, "no new job was made yet").strip())

    def _give_to(self, job: Manifest, others: Sequence[Manifest]) -> None:
        """Have Kubernetes delete what the job needs, once the job is deleted."""
        try:
            for each in others:
                if uid := self.kubectl.uid(KIND, self.name):
                    self.kubectl.give_to(KINDS[each["kind"]], each["metadata"]["name"], job, uid)
        except ClusterError as error:  # the job is there, which is what was asked for
            names = ", ".join(f"{each['kind']} {each['metadata']['name']}" for each in others)
            self.waiting.say(f"{names} will stay when the job is deleted: {error}")

    def _make_room(self, job: Object, manifests: Sequence[Manifest]) -> None:
        """Delete a job that has ended, and wait until it is gone.

        Raises ClusterError where it has not ended, and where its successor would be refused.
        """
        state = (job.get("status") or {}).get("jobDeploymentStatus") or "New"
        deleting = job["metadata"].get("deletionTimestamp")
        if not deleting and state not in ENDED:
            raise ClusterError(
                f"RayJob {self.name} is there ({state}): one run has one job; stop it first "
                "(submit.action=stop), or choose another run.name"
            )
        _check_is_over(self.kubectl, job)
        for each in manifests:
            self.kubectl.trial(to_yaml([each]))
        if deleting:
            self.waiting.say(f"RayJob {self.name} is being deleted; a new one is made once it is gone")
        else:
            self.waiting.say(f"RayJob {self.name} has ended ({state}); its successor goes on with the run")
            try:
                self.waiting.say(self.kubectl.diff(to_yaml(manifests)).rstrip() or "nothing of the job has changed")
            except ClusterError as error:  # it is shown, not needed
                self.waiting.say(f"what has changed cannot be shown: {error}")
            self.kubectl.delete(KIND, self.name)
        self._until_gone(job, "no new one was made: submit.action=apply again makes it and goes on with the run")

    def _until_gone(self, job: Object, interrupted: str) -> None:
        """Wait until this very object is no more, saying what holds it."""
        uid, told = job["metadata"].get("uid"), _Told()
        give_up_at = time.monotonic() + DELETING_S
        self.waiting.on(f"RayJob {self.name} to be deleted")
        try:
            while True:
                found = self.look("the deletion goes on")
                if found is None or found["metadata"].get("uid") != uid:
                    return
                held = found["metadata"].get("finalizers") or []
                if time.monotonic() > give_up_at:
                    raise ClusterError(
                        f"RayJob {self.name} is still being deleted after {DELETING_S:g} s, and waits for "
                        f"{', '.join(held) or 'the API server'}: does KubeRay's operator run? {interrupted}"
                    )
                told.tell(self, found)
                time.sleep(POLL_S)
        except KeyboardInterrupt:
            self.waiting.say(f"no longer waiting; RayJob {self.name} is being deleted, and {interrupted}")
            raise

    def _new(self, manifests: str) -> str:
        """Make the job, where there is none any more, however often the API server goes away meanwhile."""
        asked = False

        def make() -> str:
            nonlocal asked
            if asked and self.kubectl.get(KIND, self.name) is not None:
                return f"{KIND}/{self.name} was made"
            asked = True
            return self.kubectl.apply(manifests)

        return _patiently(self.waiting, make, "no new job was made yet")

    def not_there(self) -> str:
        """What to say of a job that was not found. Raises ClusterError where there is no such namespace."""
        namespace = self.kubectl.namespace
        try:
            known = self.kubectl.get("namespaces", namespace) is not None
        except ClusterError:  # not every user may look
            known = True
        if not known:
            raise ClusterError(f"there is no namespace {namespace}; name another, or make it as k8s/README.md does")
        return f"no RayJob {self.name} in namespace {namespace}: not started, or removed after it had ended"

    def look(self, meanwhile: str) -> Object | None:
        return _patiently(self.waiting, lambda: self.kubectl.get(KIND, self.name), meanwhile)


def why_idle(kubectl: Kubectl, job: Object) -> list[Reason]:
    """Why nothing happens to a job, as far as we may look."""
    status = job.get("status") or {}
    if status.get("jobDeploymentStatus") in ENDED and not job["metadata"].get("deletionTimestamp"):
        return []
    counts = status.get("rayClusterStatus") or {}
    whole = counts.get("readyWorkerReplicas", 0) >= counts.get("desiredWorkerReplicas", 0)
    pods = f"regrow/run={job['metadata']['name']}" + (",regrow/role!=worker" if whole else "")  # there are thousands
    around = Around(_as_far_as_allowed(kubectl.warnings), pods=_as_far_as_allowed(lambda: kubectl.select("pods", pods)))
    if job["spec"].get("suspend") and "kueue.x-k8s.io/queue-name" in (job["metadata"].get("labels") or {}):
        selector = f"kueue.x-k8s.io/job-uid={job['metadata'].get('uid')}"
        found = _as_far_as_allowed(lambda: kubectl.select("workloads.kueue.x-k8s.io", selector))
        around = replace(around, workloads=found)
    return reasons(job, around, now=time.time())


def _patiently(waiting: Waiting, ask: Callable[[], Answer], meanwhile: str) -> Answer:
    """The answer, asked for again while the API server is away, for up to UNREACHABLE_S.

    Raises ClusterError after that, and at once for what is refused, unless the server was away just now.
    """
    begun: float | None = None
    last = 0.0
    while True:
        asked = time.monotonic()
        try:
            answer = ask()
        except ClusterError as error:
            now = time.monotonic()  # a call that hangs has taken a while
            if isinstance(error, Unreachable):
                last = now
                if begun is None:
                    begun = asked
                    waiting.say(f"{error}; {meanwhile}; asking again")
            elif begun is None or now - last > SETTLING_S:
                raise
            if now - begun > UNREACHABLE_S:
                raise
            time.sleep(POLL_S)
        else:
            if begun is not None:
                waiting.say(f"Kubernetes answers again, after {duration(time.monotonic() - begun)}")
            return answer


def head_of(kubectl: Kubectl, status: Object) -> str | None:
    """The running head pod of the job's cluster."""
    cluster = status.get("rayClusterName")
    pods = kubectl.select("pods", f"ray.io/cluster={cluster},ray.io/node-type=head") if cluster else []
    up = [pod for pod in pods if (pod.get("status") or {}).get("phase", "Running") == "Running"]
    return str(up[0]["metadata"]["name"]) if up else None


def _ended(job: KubeRay, status: Object) -> int:
    """How a job has ended, 0 as `KubeRay.follow`; of one that was stopped, or lost its run, the last line is said."""
    if status.get("jobStatus") == "SUCCEEDED":
        return 1 if _is_taken_over(job) else 0
    return _as_its_log_says(job) if status.get("jobStatus") == "STOPPED" else 1


def _until_ended(job: KubeRay, before: Object, wait_s: float) -> int:
    """Wait for the end of a job that was this object as it was asked to; ask again where it begins anew, and leave
    alone the one of its name that was made after it."""
    uid, asked = before["metadata"].get("uid"), before.get("status") or {}
    give_up_at = time.monotonic() + wait_s + STOPPING_S
    while time.monotonic() < give_up_at:
        found = job.look("what was asked of Ray is done all the same")
        if found is None or found["metadata"].get("uid") != uid:
            raise LostSight(f"RayJob {job.name} was deleted meanwhile, {UNKNOWN}")
        status = found.get("status") or {}
        if status.get("jobDeploymentStatus") in ENDED:
            job.waiting.say(_state_line(status))
            ended = _ended(job, status)
            job.waiting.say(f"RayJob {job.name} has ended; submit.action=apply goes on with the run")
            return ended
        if status.get("jobDeploymentStatus") in ANEW:
            job.delete(found, wait=True)
            raise LostSight(f"RayJob {job.name} was about to begin anew, and is deleted, {UNKNOWN}")
        if _trains(found) and _is_another(status, asked) and (head := head_of(job.kubectl, status)) is not None:
            job.ask(head, status)
            asked, give_up_at = status, time.monotonic() + wait_s + STOPPING_S
        elif not _is_another(status, asked):
            asked = asked | status  # what was not known of it may be by now
        job.waiting.on(f"the checkpoint of RayJob {job.name}, which is {_state_line(status)}")
        time.sleep(POLL_S)
    raise ClusterError(f"RayJob {job.name} has not ended for {wait_s + STOPPING_S:g} s; see submit.action=logs")


def _until_driver_ends(job: KubeRay, status: Object, wait_s: float) -> int:
    """Wait for the driver of a job that is over to KubeRay, whose states say no more: by the pod that follows its log
    and ends with it. As `KubeRay.stop`."""
    give_up_at = time.monotonic() + wait_s + STOPPING_S

    def look() -> tuple[str, bool]:
        pod = _submitter(job.kubectl, job.name) or {}
        return str((pod.get("status") or {}).get("phase")), head_of(job.kubectl, status) is not None

    job.waiting.on(f"the checkpoint of RayJob {job.name}, which is over to KubeRay")
    while time.monotonic() < give_up_at:
        try:
            phase, has_head = _patiently(job.waiting, look, "what was asked of Ray is done all the same")
        except ClusterError as error:  # not every user may look
            raise LostSight(f"RayJob {job.name} was asked to end, {UNKNOWN}: {error}") from error
        if phase == "Succeeded":
            return _as_its_log_says(job)
        if not has_head:
            raise LostSight(f"the cluster of RayJob {job.name} went before its log had ended, {UNKNOWN}")
        time.sleep(POLL_S)
    raise ClusterError(f"RayJob {job.name} has not ended for {wait_s + STOPPING_S:g} s; see submit.action=status")


def _is_taken_over(job: KubeRay) -> bool:
    """Whether a job has ended well as another one has its run, as far as its log can be read; it says so then."""
    line = ""
    with contextlib.suppress(ClusterError):
        line = taken_over(_last_lines(job))
    if line:
        job.waiting.say(line)
    return bool(line)


def _last_lines(job: KubeRay) -> str:
    """Of the log of a job that has ended. Raises ClusterError where they cannot be read."""

    def ask() -> str:
        pod = submitter_of(job.kubectl, job.name)
        if pod is None:
            raise ClusterError("the pod that followed its log is gone")
        return job.kubectl.last_lines(pod, LINES)

    return _patiently(job.waiting, ask, "the job has ended")


def _as_its_log_says(job: KubeRay) -> int:
    """Say with which line a job that was stopped has ended; 0 as `KubeRay.follow`."""
    try:
        exit_status, line = ending(_last_lines(job))
    except ClusterError as error:
        raise LostSight(f"RayJob {job.name} was stopped, {UNKNOWN}: {error}") from error
    job.waiting.say(line)
    return exit_status


def submitter_of(kubectl: Kubectl, name: str) -> str | None:
    """The newest pod of the newest Kubernetes Job that follows the Ray job's logs."""
    pod = _submitter(kubectl, name)
    return f"pod/{pod['metadata']['name']}" if pod else None


def _submitter(kubectl: Kubectl, name: str) -> Object | None:
    job = _newest(kubectl.select("jobs", f"ray.io/originated-from-cr-name={name}"))
    return _newest(kubectl.select("pods", f"job-name={job['metadata']['name'] if job else name}"))


def _as_far_as_allowed(ask: Callable[[], list[Object]]) -> list[Object]:
    try:
        return ask()
    except ClusterError:  # not allowed, or not there: the rest is said all the same
        return []


class _Told:
    """Reasons that were said already."""

    def __init__(self) -> None:
        self._texts: set[str] = set()
        self._next_at = 0.0

    def tell(self, of: KubeRay, job: Object) -> None:
        """Say what is new of why nothing happens."""
        if time.monotonic() < self._next_at:
            return
        self._next_at = time.monotonic() + REASONS_S
        for reason in why_idle(of.kubectl, job):
            if reason.text not in self._texts:
                self._texts.add(reason.text)
                of.waiting.say(f"  ! {reason}")


class _Logs:
    """The logs of a job's submitter, from pod to pod."""

    def __init__(self, job: KubeRay) -> None:
        self._job, self._pod, self._complaint = job, "", ""
        self._lines = PodLogs(_to_stdout)

    def follow(self) -> None:
        """Pass lines on until they end or break off."""
        kubectl, waiting = self._job.kubectl, self._job.waiting
        try:
            what = submitter_of(kubectl, self._job.name)
        except Unreachable:  # the next look at the job will tell
            return
        except ClusterError as error:  # not every user may look
            self._complain(f"the logs cannot be shown: {error}")
            return
        if what is None:
            return
        if what != self._pod:
            self._pod, self._lines = what, PodLogs(_to_stdout)
        self._lines.reconnect()
        with waiting.paused():
            complaint = kubectl.logs(what, self._lines.take, since=self._lines.since) or ""
        self._complain(complaint)

    def _complain(self, text: str) -> None:
        """Say what is new of why there are no logs; empty: there are."""
        if text and text != self._complaint:
            self._job.waiting.say(f"{text}; asking again")
        self._complaint = text


def _newest(found: list[Object]) -> Object | None:
    return max(found, key=lambda each: str(each["metadata"].get("creationTimestamp", "")), default=None)


def _to_stdout(line: bytes) -> None:
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()


def _trains(job: Object) -> bool:
    """Whether Ray's job has not ended, as far as KubeRay has seen, which lets it go on after some ends of its own."""
    status = job.get("status") or {}
    is_kept = not job["metadata"].get("deletionTimestamp")
    return bool(status.get("jobId")) and is_kept and status.get("jobStatus") in TRAINS


def _is_another(status: Object, asked: Object) -> bool:
    """Whether Ray's job is not the one that had this status: KubeRay's next one, or, as another head knew none, the
    submitter's, of the same id."""

    def begun(of: Object) -> tuple[Any, ...]:
        return of.get("jobId"), of.get("startTime"), (of.get("rayJobInfo") or {}).get("startTime")

    return any(
        now != before and None not in (now, before) for now, before in zip(begun(status), begun(asked), strict=True)
    )


def _check_is_over(kubectl: Kubectl, job: Object) -> None:
    """Raises ClusterError where a job that has ended, as KubeRay has it, trains on."""
    if _trains(job) and head_of(kubectl, job["status"]):
        name, why = job["metadata"]["name"], job["status"].get("reason") or job["status"]["jobDeploymentStatus"]
        raise ClusterError(
            f"RayJob {name} is over to KubeRay alone ({why}), and its cluster trains on: stop it first "
            "(submit.action=stop), which has it commit a checkpoint; where Ray is dead there, kubectl delete rayjob "
            f"{name}"
        )


def _state_line(status: Object) -> str:
    state, job = status.get("jobDeploymentStatus") or "New", status.get("jobStatus")
    parts = [f"{state}{f' ({job})' if job else ''}"]
    parts += [cause(str(status[key])) for key in ("reason", "message") if status.get(key)]
    hint = TRAINS_ON if status.get("reason") in (LATE, UNSEEN_BY_KUBERAY) and job in TRAINS else ""
    hint += NOT_RETRIED if status.get("reason") == UNSEEN_BY_KUBERAY else ""
    return ": ".join(parts) + hint
