"""Has Ray run a RayJob's command and passes its log on until it has ended: in the pod of KubeRay's submitter.

    python -m regrow.submit.submitter METADATA ENTRYPOINT

The command that KubeRay writes where there is none ends with the log's connection, and with status 0 where the head
closes that in order: where it could not read its tables in time, or met bytes that are no UTF-8. 30 s later KubeRay
deletes the cluster, which trains. This one ends with 0 once Ray's job has ended, however it did, which KubeRay asks
Ray, and with 1 where Ray refuses something: then Kubernetes starts another.
"""

import asyncio
import functools
import json
import sys
import time
from collections.abc import Mapping, Sequence
from os import environ

from ray.exceptions import AuthenticationError
from ray.job_submission import JobStatus, JobSubmissionClient

from regrow.deadline import within
from regrow.errors import ClusterError
from regrow.process_log import say
from regrow.program import program
from regrow.submit.ray_jobs import ALIVE, AWAY, show, submit_job
from regrow.submit.reasons import refusal

ANSWER_S = 60.0  # for a question, of which Ray's client waits for good: a host may die before it answers
AWAY_S = 2.0  # between looks for a head that is not there
FIRST_S, LONGEST_S = 1.0, 60.0  # before the log is asked for again; longer where it had nothing new
SILENCE_S = 300.0  # of a log, after which the head is asked whether it is there: a dead host closes no connection


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Raises ClusterError where Ray refuses the job, or an answer."""
    metadata, entrypoint = arguments
    job, address = environment["RAY_JOB_SUBMISSION_ID"], environment["RAY_DASHBOARD_ADDRESS"]
    try:
        _follow(f"http://{address.removeprefix('http://')}", job, entrypoint, json.loads(metadata))
    except (*AWAY, AuthenticationError) as error:
        raise ClusterError(f"lost sight of {job} ({refusal(error)})") from error


def _follow(address: str, job: str, entrypoint: str, metadata: dict[str, str]) -> None:
    shown, pause_s = 0, FIRST_S
    while True:
        client, jobs = _answer(address)
        if job not in jobs:  # not yet, or another head
            about = {"entrypoint": entrypoint, "submission_id": job, "metadata": metadata}
            within(ANSWER_S, functools.partial(submit_job, client, **about))
            say(f"submitted {job}")
            shown = 0
        before = shown
        shown = asyncio.run(show(client, job, shown, silence_s=SILENCE_S))
        if job in jobs and jobs[job] not in ALIVE:
            say(f"{job}: {jobs[job].value}")
            return
        pause_s = FIRST_S if shown > before else min(2 * pause_s, LONGEST_S)
        time.sleep(pause_s)


def _answer(address: str) -> tuple[JobSubmissionClient, dict[str | None, JobStatus]]:
    """A client and what its cluster says of its jobs, once it answers."""
    said = False
    while True:
        try:
            return within(ANSWER_S, lambda: _ask(address))
        except OSError as error:
            if not said:
                say(f"{address} does not answer ({refusal(error)}); asking again")
            said = True
        time.sleep(AWAY_S)


def _ask(address: str) -> tuple[JobSubmissionClient, dict[str | None, JobStatus]]:
    client = JobSubmissionClient(address)
    return client, {each.submission_id: each.status for each in client.list_jobs()}


if __name__ == "__main__":
    with program():
        main(sys.argv[1:], environ)
