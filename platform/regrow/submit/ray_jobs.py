"""A run as a job of a running Ray cluster, through its job API. The checkout travels with it."""

import asyncio
import contextlib
import logging
import posixpath
import re
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from aiohttp import ClientError
from ray.job_submission import JobDetails, JobStatus, JobSubmissionClient

from regrow.config.check import places_read
from regrow.config.schema import SubmitJobConfig
from regrow.errors import ClusterError
from regrow.program import is_unread
from regrow.record.provenance import top_of_checkout
from regrow.record.run_folder import run_location
from regrow.show.units import when
from regrow.storage import local_path
from regrow.submit.ending import ending
from regrow.submit.kuberay import LostSight
from regrow.submit.pods import stop_s
from regrow.submit.reasons import refusal
from regrow.submit.render import IN_IMAGE, Code, config_sha256, entrypoint

CHECKOUT = Path(__file__).parents[3]
LEFT_OUT = [".git", ".venv", "/runs", ".cache", ".whl", "**/__pycache__", "/docs", "/tests", "/benchmarks", "*.env"]
RUN, FOLDER = "regrow_run", "regrow_folder"  # keys of a job's metadata
POLL_S = 1.0
STOPPING_S = 60.0
AGENT_S = 60.0  # a head that has just started, or is very busy, has no agent for jobs for a while
NO_AGENT = "No available agent"
AGENT_PORT = " Another Ray on the head's machine may have its agent's port (--dashboard-agent-listen-port of ray start)"
ALIVE = (JobStatus.PENDING, JobStatus.RUNNING)
AWAY = (RuntimeError, OSError, ClientError)  # of Ray's client: an answer other than 200; none; no WebSocket


def job_spec(config: SubmitJobConfig, code: Code, arguments: list[str]) -> dict[str, Any]:
    """What the job API is given."""
    environment = {"PYTHONPATH": "platform", "RAY_JOB_STOP_WAIT_TIME_S": str(stop_s(config, config.submit))}
    return {
        "entrypoint": entrypoint(arguments),
        "runtime_env": {
            "working_dir": str(CHECKOUT),
            "excludes": left_out(CHECKOUT, _named(config)),
            "env_vars": environment | config.submit.env,
        },
        "metadata": {
            RUN: config.run.name,
            FOLDER: run_location(config),
            "git_sha": code.git_sha or "unknown",
            "config_sha256": config_sha256(config),
        },
    }


def left_out(checkout: Path, named: Collection[str] = ()) -> list[str]:
    """Patterns, as in .gitignore, of what of a checkout does not travel: LEFT_OUT, and at its top what is not in git.

    A user's own modules and packages do, and what is `named`. So not the models, results and logs that commands write
    there, which may be larger than Ray takes, nor files of credentials.
    """
    kept = {*(top_of_checkout(checkout) or {*IN_IMAGE, "pyproject.toml"}), *named}
    others = [each for each in checkout.iterdir() if each.name not in kept and not _is_python(each)]
    return [*LEFT_OUT, *("/" + re.sub(r"([\\*?\[ ])", r"\\\1", each.name) for each in sorted(others))]


def _is_python(path: Path) -> bool:
    return path.suffix == ".py" or (path.is_dir() and any(path.glob("*.py")))


def _named(config: SubmitJobConfig) -> set[str]:
    """What the run reads by a relative path, or imports: the names at the top of the checkout."""
    places = [local_path(place or "") for _, place in places_read(config.data)]
    module = (config.train.callback or "").partition(":")[0].partition(".")[0]
    return {posixpath.normpath(place).partition("/")[0] for place in places} | {module}


def submit_job(client: JobSubmissionClient, **spec: Any) -> str:
    """The job's id. Raises ClusterError where the cluster refuses it."""
    give_up_at = time.monotonic() + AGENT_S
    while True:
        try:
            return client.submit_job(**spec)
        except RuntimeError as error:
            if NO_AGENT not in str(error) or time.monotonic() > give_up_at:
                taken = "" if NO_AGENT not in str(error) else AGENT_PORT
                raise ClusterError(f"the cluster did not take the job: {refusal(error)}{taken}") from error
        time.sleep(POLL_S)


async def show(client: JobSubmissionClient, job: str, shown: int, *, silence_s: float | None = None) -> int:
    """Write what the log has beyond so many characters, until it ends, the connection does, or nothing came for so
    long; how many there are."""
    seen, now = 0, asyncio.get_running_loop().time
    with contextlib.suppress(RuntimeError, TimeoutError):  # the connection broke; nothing came
        async with asyncio.timeout(silence_s) as silence:
            async for lines in client.tail_job_logs(job):
                seen += len(lines)
                sys.stdout.write(lines[max(0, len(lines) - max(0, seen - shown)) :])
                sys.stdout.flush()
                silence.reschedule(None if silence_s is None else now() + silence_s)
    return max(seen, shown)


def _is_of_this_machine(error: Exception) -> bool:
    """A file of the checkout that cannot be read, or no room for its archive: nothing was sent."""
    is_of_a_connection = isinstance(error, ConnectionError | TimeoutError)
    return isinstance(error, OSError) and error.errno is not None and not is_of_a_connection


class RayJobs:
    """The jobs of one run on one cluster. A token is used as Ray does; see `job_status.use_token`."""

    def __init__(self, address: str | None, run: str, folder: str) -> None:
        """`folder` as `run_location` has it. Raises ClusterError where no cluster answers, or none that lets us in."""
        self.run, self.folder = run, folder
        self.elsewhere = ""  # in which other folder a newer job of that name has its run, as of the last look
        logging.getLogger("ray").setLevel(logging.ERROR)  # it warns of .gitignore, which is what we want
        try:
            self.client = JobSubmissionClient(address)
            self.client.list_jobs()
        except Exception as error:  # of Ray or of its HTTP client
            raise ClusterError(
                f"no Ray cluster lets us in at {address or 'its usual address'} ({refusal(error)}); set "
                "submit.address=http://HOST:8265, and RAY_AUTH_MODE=token with RAY_AUTH_TOKEN_PATH if it wants one"
            ) from error

    def apply(self, spec: dict[str, Any]) -> None:
        """Start the run, or go on with it. Raises ClusterError where it runs already, or the cluster refuses it."""
        newest = self.newest()
        if newest is not None and newest.status in ALIVE:
            raise ClusterError(
                f"run {self.run!r} is there as job {newest.submission_id} ({newest.status.value}); stop it first "
                "(submit.action=stop), or choose another run.name"
            )
        try:
            job = submit_job(self.client, **spec)
        except (OSError, ClientError) as error:
            if _is_of_this_machine(error):
                raise
            raise ClusterError(
                f"the job's submission broke off ({refusal(error)}); it may have been taken: submit.action=status"
            ) from error
        print(f"submitted {job}", file=sys.stderr, flush=True)

    def follow(self) -> int:
        """Show the newest job's logs until it has ended; 0 where it succeeded, or was stopped and left nothing behind.

        Raises LostSight where the cluster goes away meanwhile.
        """
        job, shown = self._submission(), 0
        try:
            while True:
                ended = self.client.get_job_status(job) not in ALIVE
                shown = asyncio.run(show(self.client, job, shown))
                if ended:
                    break
                time.sleep(POLL_S)
            return self._ended(job)
        except AWAY as error:
            if is_unread(error):
                raise
            raise LostSight(
                f"lost sight of {job} ({refusal(error)}); it may well run on: submit.action=logs"
            ) from error

    def _ended(self, job: str) -> int:
        """Say how a job has ended; 0 as `follow`."""
        info = self.client.get_job_info(job)
        print(f"{job}: {info.status.value}: {info.message}", file=sys.stderr)
        if info.status is not JobStatus.STOPPED:
            return 0 if info.status is JobStatus.SUCCEEDED else 1
        status, line = ending(self.client.get_job_logs(job))
        print(line, file=sys.stderr)
        return status

    def describe(self) -> list[str]:
        """How the run's jobs are doing, the newest first."""
        jobs = self._jobs()
        if not jobs:
            return [f"no job of run {self.run!r} on this cluster{self.elsewhere}"]
        return [
            f"{job.submission_id}: {job.status.value}, commit {(job.metadata or {}).get('git_sha', '?')}, started "
            f"{_clock(job.start_time)}{f', ended {_clock(job.end_time)}' if job.end_time else ''}: {job.message}"
            for job in jobs
        ]

    def stop(self, *, wait_s: float) -> int:
        """Have the job commit a checkpoint and end; wait for that as long as it is given, 0: do not wait. 1 where it
        failed or left behind what it had committed, else 0.

        Raises ClusterError where the cluster goes away, which says whether the job was asked to.
        """
        newest = self.newest()
        if newest is None or newest.status not in ALIVE:
            print(f"run {self.run!r} does not run{self.elsewhere}", file=sys.stderr)
            return 0
        job = str(newest.submission_id)
        try:
            self.client.stop_job(job)
        except AWAY as error:
            raise ClusterError(
                f"{job} could not be asked to end ({refusal(error)}); it may run on: try submit.action=stop again"
            ) from error
        print(f"asked {job} to end after its step, with a checkpoint", file=sys.stderr)
        give_up_at = time.monotonic() + wait_s + STOPPING_S
        try:
            while wait_s and self.client.get_job_status(job) in ALIVE:
                if time.monotonic() > give_up_at:
                    raise ClusterError(f"{job} has not ended for {wait_s + STOPPING_S:g} s; see submit.action=logs")
                time.sleep(POLL_S)
            return self._ended(job) if wait_s else 0
        except AWAY as error:
            if is_unread(error):
                raise
            raise ClusterError(
                f"lost sight of {job} ({refusal(error)}); it was asked to end, and does so by itself"
            ) from error

    def newest(self) -> JobDetails | None:
        jobs = self._jobs()
        return jobs[0] if jobs else None

    def _jobs(self) -> list[JobDetails]:
        try:
            jobs = self.client.list_jobs()
        except AWAY as error:
            raise ClusterError(f"the Ray cluster does not say which jobs it has ({refusal(error)})") from error
        named = [job for job in jobs if (job.metadata or {}).get(RUN) == self.run]
        named.sort(key=lambda job: job.start_time or 0, reverse=True)
        folders = [(job.metadata or {}).get(FOLDER, self.folder) for job in named]  # jobs of before have none
        others = [folder for folder in folders if folder != self.folder]
        self.elsewhere = f" in {self.folder}; there is one of that name in {others[0]}" if others else ""
        return [job for job, folder in zip(named, folders, strict=True) if folder == self.folder]

    def _submission(self) -> str:
        newest = self.newest()
        if newest is None:
            raise ClusterError(
                f"no job of run {self.run!r} on this cluster{self.elsewhere}; start it with submit.action=apply"
            )
        return str(newest.submission_id)


def _clock(milliseconds: int | None) -> str:
    return when(milliseconds / 1000) if milliseconds else "?"
