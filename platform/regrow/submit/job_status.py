"""The status of a run that is a job of a cluster: what its job API says, and what the run folder says, read over there.

The folder of a job is often in reach of the cluster alone (its disks, its credentials). So the cluster is asked to run
`python -m jobs.status FOLDER --json`: in the head's container on Kubernetes, as a small job elsewhere.
"""

import contextlib
import json
import logging
import os
import re
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from regrow.config.store import pretrain_config
from regrow.errors import ClusterError, ConfigError, JobNotThereError, RegrowError
from regrow.record.log import read_events
from regrow.record.run_folder import read_status, run_location
from regrow.record.status import State, Status
from regrow.show.units import when
from regrow.storage import Storage, is_remote
from regrow.submit.kubectl import Kubectl
from regrow.submit.kuberay import ENDED, KIND, KubeRay, head_of
from regrow.submit.reasons import refusal, unix

PRETRAIN = ("jobs.pretrain", "jobs/pretrain.py")  # as a command names it; the second, where Ray did not start it
ANSWER_S, POLL_S = 180.0, 0.5  # for a small job on a Ray cluster, the first of which takes the checkout there
EARLIER_S = 5.0  # by which two machines' clocks may differ
FILLED_IN = re.compile(r"\$\\*\{")  # ${oc.env:NAME}, with or without the backslashes that Hydra takes away
NOT_BEGUN = "holds no run that has begun"

Look = Callable[[], Status]


def on_kubernetes(name: str, *, namespace: str, context: str | None) -> Look:
    """A way to look at the run of a RayJob. Raises ClusterError where there is no kubectl."""
    kubectl = Kubectl(namespace=namespace, context=context)
    job = KubeRay(kubectl, name)

    def look() -> Status:
        found = kubectl.get(KIND, name)
        if found is None:
            raise JobNotThereError(job.not_there())
        run, folder = _run_of(str(found["spec"].get("entrypoint", "")))
        lines = job.described(found)
        status = found.get("status") or {}
        head = head_of(job.kubectl, status)
        over = status.get("jobDeploymentStatus") in ENDED
        ended = {"SUCCEEDED": State.finished, "STOPPED": State.stopped}.get(str(status.get("jobStatus")), State.failed)
        why = "its cluster is gone" if over else "its cluster has no head yet"
        if head is not None:
            try:
                read = _parse(kubectl.exec(head, "ray-head", _command(folder)))
            except ClusterError as error:
                why = str(error)
            else:
                begun_at = unix(status.get("startTime"), 0.0)
                if not over:
                    read = _of_attempt(read, begun_at, State.starting, begun_at)
                elif ended is State.failed:
                    read = _of_attempt(read, begun_at, ended, unix(status.get("endTime"), begun_at))
                known = not over or read.state in (State.finished, State.stopped, State.failed)
                return replace(read, job=lines, state=read.state if known else ended)
        if over:
            return _without_logs(ended, run, folder, lines, f"{why}; the run itself is in {folder}")
        if head is None:
            return _without_logs(State.starting, run, folder, lines, why)
        return _not_read(run, folder, lines, why)

    return look


def on_ray(address: str, *, run: str | None) -> Look:
    """A way to look at a run of a running Ray cluster, the newest or the one of this name.

    Raises ClusterError where no cluster answers, or none that lets us in.
    """
    use_token()
    from ray.job_submission import JobSubmissionClient  # takes a second

    logging.getLogger("ray").setLevel(logging.ERROR)  # it tells of every file that it takes along
    try:
        client = JobSubmissionClient(None if address == "auto" else address)
        client.list_jobs()
    except Exception as error:  # of Ray or of its HTTP client
        raise ClusterError(
            f"no Ray cluster lets us in at {address} ({refusal(error)}); name its dashboard, http://HOST:8265, and "
            "set RAY_AUTH_MODE=token with RAY_AUTH_TOKEN_PATH if it wants a token"
        ) from error

    def look() -> Status:
        try:
            found, (name, folder), passed_over = _newest(client.list_jobs(), run, address)
            lines = [*_describe(found), *filter(None, [passed_over])]
            begun_at = (found.start_time or 0) / 1000
            if is_here(folder, begun_at, (found.end_time or float("inf")) / 1000):
                return replace(read_status(Storage.at(folder)), job=lines)
            try:
                read = _parse(_ask(client, found, folder))
            except RegrowError as error:
                return _not_read(name, folder, lines, str(error))
            if not found.status.is_terminal():
                read = _of_attempt(read, begun_at, State.starting, begun_at)
            elif found.status.value == "FAILED":
                read = _of_attempt(read, begun_at, State.failed, (found.end_time or found.start_time or 0) / 1000)
            return replace(read, job=lines)
        except (RuntimeError, OSError) as error:  # of Ray's client
            raise ClusterError(f"{address} does not answer: {refusal(error)}") from error

    return look


def _run_of(entrypoint: str) -> tuple[str, str]:
    """The name and the folder of the run that a job's command trains.

    Nothing of this machine's environment goes into them: the command may be anybody's. Raises ClusterError where it
    trains none, or where it leaves anything to an environment.
    """
    try:
        words = shlex.split(entrypoint)
    except ValueError as error:
        raise ClusterError(f"{entrypoint!r} is no command that can be read ({error})") from error
    begin = next((number for number, word in enumerate(words, 1) if word.endswith(PRETRAIN)), None)
    if begin is None:
        raise ClusterError(f"the job runs {entrypoint!r}, not {PRETRAIN[0]}: it has no run to look at")
    for word in words[begin:]:
        if FILLED_IN.search(word) or "hydra.searchpath" in word:  # whose files may have it too
            raise ClusterError(f"{word!r} is for the job's own environment to fill in; name the run's folder")
    try:
        config = pretrain_config(words[begin:])
    except ConfigError as error:
        raise ClusterError(
            f"this checkout does not know the settings of the job ({error}); look from one that does, or name the "
            "run's folder"
        ) from error
    return config.run.name, run_location(config)


def _newest(jobs: Sequence[Any], run: str | None, address: str) -> tuple[Any, tuple[str, str], str]:
    """The job to look at, with the name and the folder of its run, and which newer one could not be read, if any."""
    training = [job for job in jobs if re.search(r"\bjobs[./]pretrain(\.py)?\b", job.entrypoint or "")]
    training.sort(key=lambda job: job.start_time or 0, reverse=True)
    others, passed_over = set(), ""
    for job in training:
        try:
            name, folder = _run_of(job.entrypoint)
        except ClusterError as error:  # another user's, perhaps
            passed_over = passed_over or f"{job.submission_id or job.job_id} is passed over: {error}"
            continue
        if run in (None, name):
            return job, (name, folder), passed_over
        others.add(name)
    known = f"; it has {', '.join(sorted(others))}" if others else ""
    unread = f"; {passed_over}" if passed_over else ""
    raise ClusterError(f"no job of {'a run' if run is None else f'run {run!r}'} at {address}{known}{unread}")


def _describe(job: Any) -> list[str]:
    metadata = job.metadata or {}
    started, ended = (when(each / 1000) if each else None for each in (job.start_time, job.end_time))
    return [
        f"{job.submission_id or job.job_id}: {job.status.value}, commit {metadata.get('git_sha', '?')}, "
        f"started {started or 'not yet'}{f', ended {ended}' if ended else ''}",
        *([" ".join(str(job.message).split())[:300]] if job.message else []),
    ]


def is_here(folder: str, begun_at: float, ended_at: float) -> bool:
    """Whether this machine has the folder too, and it is the same run: one was submitted while the job ran."""
    if is_remote(folder):
        return False
    times = [event["time"] for event in read_events(Storage.at(folder)) if event["event"] == "submitted"]
    return any(begun_at - EARLIER_S <= each <= ended_at + EARLIER_S for each in times)


def _ask(client: Any, job: Any, folder: str) -> str:
    """What a small job of ours prints, with the run's environment, on the head."""
    from regrow.submit.ray_jobs import CHECKOUT, left_out, submit_job

    environment = dict((job.runtime_env or {}).get("env_vars") or {})
    asked = submit_job(
        client,
        entrypoint=shlex.join(_command(folder)),
        runtime_env={
            "working_dir": str(CHECKOUT),
            "excludes": left_out(CHECKOUT),
            "env_vars": environment | {"PYTHONPATH": "platform"},
        },
        metadata={"looks_at": folder},
    )
    give_up_at = time.monotonic() + ANSWER_S
    try:
        while not client.get_job_status(asked).is_terminal():
            if time.monotonic() > give_up_at:
                client.stop_job(asked)
                raise ClusterError(
                    f"the cluster has not answered for {ANSWER_S:.0f} s: has its head a moment to spare?"
                )
            time.sleep(POLL_S)
        return str(client.get_job_logs(asked))
    finally:
        with contextlib.suppress(RuntimeError):  # it has not ended: Ray lets it be listed
            client.delete_job(asked)


def _command(folder: str) -> list[str]:
    return ["python", "-m", "jobs.status", folder, "--json"]


def _parse(text: str) -> Status:
    """The status in what the command over there printed."""
    lines = [line for line in text.splitlines() if line.strip()]
    for line in reversed(lines):
        if line.startswith("{"):
            with contextlib.suppress(ValueError, KeyError, TypeError):
                return Status.from_dict(json.loads(line))
    raise ClusterError(f"the run's folder cannot be read over there: {lines[-1] if lines else 'no answer'}")


def _of_attempt(read: Status, begun_at: float, silent: State, since: float) -> Status:
    """The status of an attempt that began then, unix time: `silent` and `since` where it has not been heard yet."""
    if read.heard_at is None or read.heard_at >= begun_at - EARLIER_S:
        return read
    detail = f"the attempt before it: {read.state.value}" + (f": {read.detail}" if read.detail else "")
    return replace(read, state=silent, since=since, detail=detail, eta_s=None, suspects=[], ranks=[])


def _not_read(run: str, folder: str, lines: list[str], error: str) -> Status:
    if NOT_BEGUN in error:
        return _without_logs(State.starting, run, folder, lines, "nothing is logged yet")
    return _without_logs(State.unseen, run, folder, lines, error)


def _without_logs(state: State, run: str, folder: str, lines: list[str], why: str) -> Status:
    return Status(run, folder, time.time(), state, detail=why, job=lines)


def use_token() -> None:
    """Use a token that is there, as Ray does where it starts or joins a cluster, unless RAY_AUTH_MODE says otherwise.

    A Ray that `ray.init` starts has one. To be called before ray is first imported, which is when it looks at the mode.
    """
    given = any(name in os.environ for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    if given or (Path.home() / ".ray" / "auth_token").exists():
        os.environ.setdefault("RAY_AUTH_MODE", "token")
