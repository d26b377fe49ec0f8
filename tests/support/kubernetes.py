"""A cluster for tests of submission: the stand-in for kubectl on PATH, and what its API server holds."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from regrow.config.schema import SubmitAction
from regrow.submit import kuberay
from regrow.submit.submit import submit
from support import stand_in_kubectl
from support.stand_in_kubectl import STATE, load, store
from support.submission import CODE, FAREWELL, compose

KIND, NAME = "rayjobs.ray.io", "llama8b"
POLICY = "networkpolicies.networking.k8s.io"
STARTED = [f"delete {POLICY}", "apply --server-side", "apply --server-side", f"patch {POLICY}"]  # a job, and its policy
READY = (
    "+cluster=h100x64",
    f"run.name={NAME}",
    "run.storage_path=s3://llama/runs",
    "+data.corpora.web=/opt/regrow/web",  # as in an image, and not on this machine
    "submit.image=registry.llama.dev/regrow",
    "submit.context=east",
    "submit.namespace=pretrain",
)
CLUSTER = "llama8b-c1"
RUNNING = {
    "jobDeploymentStatus": "Running",
    "jobStatus": "RUNNING",
    "jobId": "llama8b-x1",
    "rayClusterName": CLUSTER,
}
SUCCEEDED = {"jobDeploymentStatus": "Complete", "jobStatus": "SUCCEEDED"}
STOPPED = {"jobDeploymentStatus": "Complete", "jobStatus": "STOPPED"}
FAILED = {"jobDeploymentStatus": "Failed", "jobStatus": "FAILED", "reason": "AppFailed", "message": "exit\n 1"}
LATE = RUNNING | {"jobDeploymentStatus": "Failed", "reason": "DeadlineExceeded", "message": "it has passed it"}
REFUSED = "The connection to the server 10.0.0.1:6443 was refused - did you specify the right host or port?"

Object = dict[str, Any]


class Cluster:
    """The stand-in's folder, and the environment in which it is kubectl."""

    @classmethod
    def on_path(cls, folder: Path, monkeypatch: Any) -> "Cluster":
        """For a test, by its `monkeypatch`: asked without pauses, from a checkout without changes."""
        found = cls(folder)
        for name, value in found.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(kuberay, "POLL_S", 0.01)
        monkeypatch.setattr(kuberay, "REASONS_S", 0.0)
        monkeypatch.setattr("regrow.submit.submit.git_sha", lambda: CODE.git_sha)
        monkeypatch.setattr("regrow.submit.submit.untracked", lambda *_: [])
        found.answers_at_once(monkeypatch)
        return found

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "cluster"
        self.folder.mkdir()
        programs = folder / "bin"
        programs.mkdir()
        program = programs / "kubectl"
        tests = Path(stand_in_kubectl.__file__).parents[1]
        run = f'PYTHONPATH="{tests}" exec "{sys.executable}" -m support.stand_in_kubectl "$@"'
        self._program = f"#!/bin/sh\n{run}\n"
        program.write_text(self._program)
        program.chmod(0o755)
        self.environment = {"PATH": f"{programs}:{os.environ['PATH']}", STATE: str(self.folder)}

    def answers_at_once(self, monkeypatch: Any) -> None:
        """What this process asks is answered in it, which takes a thousandth of the time of a program. Logs
        come from the program all the same."""
        start, program, text = subprocess.run, self.folder.parent / "bin/kubectl", self._program

        def run(command: Any, **options: Any) -> Any:
            if command[0] != str(program) or program.read_text() != text:
                return start(command, **options)
            status, out, err = stand_in_kubectl.answered(self.folder, list(command[1:]), options["input"])
            return subprocess.CompletedProcess(command, status, out, err)

        monkeypatch.setattr(subprocess, "run", run)

    def begins_with(self, shell: str) -> None:
        """What kubectl does before it answers, in a process of its own from now on."""
        head, run = self._program.splitlines(True)
        (self.folder.parent / "bin/kubectl").write_text(head + shell + run)

    def will_be(self, *steps: Object) -> None:
        """What the RayJob goes through, a step a look."""
        (self.folder / "script.json").write_text(json.dumps(steps))

    def has(self, kind: str, name: str, **content: Any) -> None:
        metadata = {"name": name} | content.pop("metadata", {})
        store(self.folder, kind, name, {"metadata": metadata} | content)

    def has_job(self, *steps: Object, **metadata: Any) -> None:
        """A RayJob that was made by hand, and what it goes through."""
        spec = {"backoffLimit": 10, "entrypoint": "python -m jobs.pretrain"}
        self.has(KIND, NAME, metadata={"uid": "uid-1"} | metadata, spec=spec, status={})
        self.will_be(*steps)

    def has_head(self) -> None:
        labels = {"ray.io/cluster": CLUSTER, "ray.io/node-type": "head"}
        self.has("pods", f"{CLUSTER}-head", metadata={"labels": labels}, status={"phase": "Running"})

    def has_pod(self, name: str, role: str, *, node: str = "", phase: str = "Running", **metadata: Any) -> None:
        """Of the run."""
        labels = {"regrow/run": NAME, "regrow/role": role, "ray.io/cluster": CLUSTER}
        self.has("pods", name, metadata={"labels": labels} | metadata, spec={"nodeName": node}, status={"phase": phase})

    def has_submitter(self, name: str, created: str, *last_lines: str, phase: str = "Running") -> None:
        """A Kubernetes Job that follows the Ray job, with its pod; with a farewell at its end, if nothing is said."""
        (self.folder / "last_lines").write_text("\n".join(last_lines or [FAREWELL]) + "\n")
        labels = {"ray.io/originated-from-cr-name": NAME}
        self.has("jobs", name, metadata={"labels": labels, "creationTimestamp": created})
        metadata = {"labels": {"job-name": name}, "creationTimestamp": created}
        self.has("pods", f"{name}-abcde", metadata=metadata, status={"phase": phase})

    def has_warning(self, kind: str, name: str, reason: str, message: str, **more: Any) -> None:
        """An event."""
        content = {"involvedObject": {"kind": kind, "name": name}, "reason": reason, "message": message}
        number = len(list((self.folder / "objects").glob("events.*")))
        self.has("events", f"event-{number}", **content, **more)

    def is_away(self, message: str, calls: int) -> None:
        """The next calls are answered by this alone."""
        (self.folder / "away.json").write_text(json.dumps([message, calls]))

    def will_log(self, *calls: tuple[list[str], str]) -> None:
        """Lines, and then an error, of each call of logs."""
        (self.folder / "logs.json").write_text(json.dumps(calls))

    @property
    def job(self) -> Object | None:
        return load(self.folder, KIND, NAME)

    @property
    def policy(self) -> Object | None:
        """The NetworkPolicy of the job's name."""
        return load(self.folder, POLICY, NAME)

    @property
    def calls(self) -> list[Object]:
        path = self.folder / "calls.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def verbs(self) -> list[str]:
        """What was asked, without looks."""
        found = [" ".join(call["arguments"][4:6]) for call in self.calls]
        return [each for each in found if not each.startswith("get ")]


def act(action: str, *more: str) -> int:
    """What `jobs.submit` does with this action; its exit status."""
    config = compose([*READY, *more])
    config.submit.action = SubmitAction(action)
    return submit(config, [*READY, *more])
