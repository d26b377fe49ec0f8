"""A run's config as the manifests that KubeRay takes. Pure: what it depends on is in its arguments."""

import hashlib
import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from math import ceil
from typing import Any

import yaml

from regrow.config.schema import PretrainConfig, Queue, SubmitConfig, SubmitJobConfig
from regrow.submit.network import network_policy
from regrow.submit.pods import (
    HEAD_OBJECT_STORE_BYTES,
    LABELS_FILE,
    head_pod,
    longest_restart_s,
    sizes,
    submitter_pod,
    worker_pod,
)

Manifest = dict[str, Any]

IN_IMAGE = ("conf", "data", "jobs", "platform")  # folders of the checkout that a job reads
MAX_NAME = 47  # characters of a RayJob's name: KubeRay appends to it
GROUP = "workers"
# ends of the submitter's pod, by evictions and broken connections, after which KubeRay deletes the cluster that trains
SUBMITTER_RETRIES = 1000
IDLE_FACTOR = 1.5  # over the longest restart
# Ray's autoscaler ends where the API server refuses its first connection, or for lack of memory, and KubeRay forbids
# Kubernetes to start a container of its pod again. The trap: a container's first process ignores SIGTERM without one
AUTOSCALER = (
    "trap 'kill $!; exit' TERM; while :; do $KUBERAY_GEN_AUTOSCALER_START_CMD & wait $!; "
    'echo "the autoscaler has ended ($?) and is started again"; sleep 5 & wait $!; done'
)


@dataclass(frozen=True)
class Code:
    """The versions that an image and a submission have to agree on."""

    git_sha: str | None  # None outside a checkout
    ray_version: str
    untracked: Sequence[str] = ()  # files of the checkout that no image of the commit has

    @property
    def tag(self) -> str:
        return f"{self.git_sha or 'unknown'}-ray{self.ray_version}"


def render(config: SubmitJobConfig, code: Code, arguments: Sequence[str], owner: str = "") -> list[Manifest]:
    """The manifests of a run, its RayJob last; `arguments` are those of `jobs.pretrain`, `owner` is what
    KubeRay's attempts at it have in common; empty: nothing."""
    name = job_name(config)
    labels = {"app.kubernetes.io/name": "regrow", "regrow/run": name}
    policy = [network_policy(config.submit, name, labels)] if config.submit.network_policy else []
    return [*policy, _job(config, code, arguments, labels, owner)]


def _job(config: SubmitJobConfig, code: Code, arguments: Sequence[str], labels: dict[str, str], owner: str) -> Manifest:
    submit, size, image = config.submit, sizes(config, config.submit), image_of(config.submit, code)
    command, about = entrypoint(arguments), {"run": config.run.name, "git_sha": code.git_sha or "unknown"}
    scaling = autoscales(submit, size.least_nodes, size.most_nodes)
    idle_s = submit.idle_timeout_s or ceil(longest_restart_s(config) * IDLE_FACTOR)
    autoscaler = {
        "version": "v2",
        "args": [AUTOSCALER],
        "upscalingMode": "Default",
        "idleTimeoutSeconds": idle_s,
        "resources": {"requests": {"cpu": "1", "memory": "2Gi"}, "limits": {"cpu": "1", "memory": "2Gi"}},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    head = {
        "rayStartParams": {
            "num-cpus": "0",
            "num-gpus": "0",
            "dashboard-host": "0.0.0.0",
            "object-store-memory": str(HEAD_OBJECT_STORE_BYTES),
        },
        "template": head_pod(config, submit, image, labels, owner),
    }
    workers = {
        "groupName": GROUP,
        "replicas": size.least_nodes if scaling else size.most_nodes,
        "minReplicas": size.least_nodes,
        "maxReplicas": size.most_nodes,
        "numOfHosts": 1,
        "scaleStrategy": {},  # KubeRay's first write adds it, and would own the whole list from then on
        "rayStartParams": {
            "object-store-memory": str(round(submit.object_store_gb * 1e9)),
            **({"labels-file": LABELS_FILE} if submit.rack_label else {}),
        },
        "template": worker_pod(config, submit, size, image, labels),
    }
    cluster = {
        "rayVersion": code.ray_version,
        "enableInTreeAutoscaling": scaling,
        **({"autoscalerOptions": autoscaler} if scaling else {}),
        **({"authOptions": _auth(submit)} if submit.auth else {}),
        **({"gcsFaultToleranceOptions": _gcs(submit)} if submit.redis_address else {}),
        "headGroupSpec": head,
        "workerGroupSpecs": [workers],
    }
    spec = {
        **({"suspend": True} if submit.queue is Queue.kueue else {}),  # until Kueue admits it
        "submissionMode": "K8sJobMode",
        "submitterConfig": {"backoffLimit": SUBMITTER_RETRIES},
        "submitterPodTemplate": submitter_pod(submit, image, labels, command, about),
        "backoffLimit": submit.retries,
        **({"activeDeadlineSeconds": submit.deadline_s} if submit.deadline_s is not None else {}),
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": submit.keep_s,
        "entrypoint": command,
        "metadata": about,
        "rayClusterSpec": cluster,
    }
    metadata = {
        "name": job_name(config),
        "namespace": submit.namespace,
        "labels": labels | _queue_labels(submit),
        "annotations": {
            "regrow/run-name": config.run.name,
            "regrow/git-sha": code.git_sha or "unknown",
            "regrow/config-sha256": config_sha256(config),
            **({"kueue.x-k8s.io/elastic-job": "true"} if submit.queue is Queue.kueue and scaling else {}),
        },
    }
    return {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": metadata, "spec": spec}


def to_yaml(manifests: Sequence[Manifest]) -> str:
    """A stream of YAML documents, keys in the order given."""
    return "".join("---\n" + yaml.dump(each, Dumper=_Plain, sort_keys=False, width=110) for each in manifests)


def job_name(config: SubmitJobConfig) -> str:
    """The RayJob's name: the run's where Kubernetes allows it, else one made of it.

    >>> config = SubmitJobConfig()
    >>> config.run.name = "Llama_8B"
    >>> job_name(config)
    'llama-8b-bc47c2'
    """
    if config.submit.name is not None:
        return config.submit.name
    name = config.run.name
    if re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", name) and len(name) <= MAX_NAME:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:6]  # two runs never share a job
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    plain = plain if plain[:1].isalpha() else f"run-{plain}"
    return f"{plain[: MAX_NAME - 7].strip('-')}-{digest}"


def image_of(submit: SubmitConfig, code: Code) -> str:
    """The image with its tag, which names commit and Ray version unless the config says otherwise."""
    last = submit.image.rpartition("/")[2]
    return submit.image if ":" in last or "@" in last else f"{submit.image}:{code.tag}"


def autoscales(submit: SubmitConfig, least_nodes: int, most_nodes: int) -> bool:
    """Whether Ray's autoscaler sizes the cluster. Kueue admits fixed sizes, unless its elastic jobs are on."""
    allowed = submit.queue is not Queue.kueue or submit.kueue_elastic
    return submit.autoscale and allowed and least_nodes < most_nodes


def entrypoint(arguments: Sequence[str]) -> str:
    """The job's command, quoted for the shell that Ray runs it in."""
    return shlex.join(["python", "-m", "jobs.pretrain", *arguments])


def config_sha256(config: PretrainConfig) -> str:
    """Of the run's resolved config, without where it is submitted to."""
    groups = {field.name: getattr(config, field.name) for field in fields(PretrainConfig)}
    return hashlib.sha256(json.dumps({k: asdict(v) for k, v in groups.items()}, sort_keys=True).encode()).hexdigest()


def _auth(submit: SubmitConfig) -> dict[str, Any]:
    return {"mode": "token", **({"secretName": submit.auth_secret} if submit.auth_secret else {})}


def _gcs(submit: SubmitConfig) -> dict[str, Any]:
    options: dict[str, Any] = {"redisAddress": submit.redis_address}
    if submit.redis_secret:
        name, _, key = submit.redis_secret.partition("/")
        options["redisPassword"] = {"valueFrom": {"secretKeyRef": {"name": name, "key": key}}}
    return options


def _queue_labels(submit: SubmitConfig) -> dict[str, str]:
    queue = submit.queue_name or ""
    if submit.queue is Queue.kueue:
        return {"kueue.x-k8s.io/queue-name": queue}
    if submit.queue is Queue.volcano:
        priority = {"ray.io/priority-class-name": submit.priority_class} if submit.priority_class else {}
        return {"ray.io/scheduler-name": "volcano", "volcano.sh/queue-name": queue, **priority}
    return {}


class _Plain(yaml.SafeDumper):
    """Writes what occurs twice twice, lists under their key, and quotes whatever is not plainly a word."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        return super().increase_indent(flow, False)

    def represent_text(self, text: str) -> yaml.ScalarNode:
        # kubectl's YAML reads 08, 0o17, 12e4, y and more as something else: only letters begin what is bare
        bare = re.match(r"[A-Za-z/]", text) and text.lower() not in NOT_WORDS
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=None if bare else "'")


NOT_WORDS = ("y", "n", "yes", "no", "on", "off", "true", "false", "null")
_Plain.add_representer(str, _Plain.represent_text)
