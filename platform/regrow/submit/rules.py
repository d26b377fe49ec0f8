"""Settings with which a job would be accepted by Kubernetes and could not run: room, time, queue, image, secrets. Pure.

Fields and types are the API server's to judge: `submit.action=diff` and `apply` have it do so.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from regrow.config.schema import Queue, SubmitJobConfig
from regrow.submit.names import DNS_1035, LABEL_VALUE
from regrow.submit.pods import LEAVE_S, grace_s
from regrow.submit.render import MAX_NAME, Code, autoscales, image_of, job_name
from regrow.submit.sizes import GIB, HEADERS, Sizes, longest_restart_s, sizes

PULL_POLICIES = ("IfNotPresent", "Always", "Never")
SECRET_NAME = re.compile(r"TOKEN|PASSWORD|PASSWD|SECRET|CREDENTIAL|PRIVATE_KEY|ACCESS_KEY|API_KEY", re.IGNORECASE)
NOT_SECRET = ("RAY_AUTH_TOKEN_PATH",)  # where one lies
SECRET_TEXT = re.compile(
    r"\bAKIA[0-9A-Z]{16}\b|://[^/\s:@]*:[^/\s@]+@|-----BEGIN [A-Z ]*PRIVATE KEY|\bhf_[A-Za-z0-9]{30,}"
)
OPERATORS_OWN = {  # environment variables that KubeRay's operator refuses in pods
    "RAY_REDIS_ADDRESS": "submit.redis_address",
    "REDIS_PASSWORD": "submit.redis_secret",
    "REDIS_USERNAME": "submit.redis_secret",
    "RAY_enable_autoscaler_v2": "submit.autoscale",
}


def broken_rules(config: SubmitJobConfig, code: Code, arguments: Sequence[str]) -> list[str]:
    """A line for each setting with which this job could not run, naming value and fix."""
    size = sizes(config, config.submit)
    found = [*_name(config), *_image(config, code), *_command(config, arguments), *_queue(config)]
    found += [*_room(config, size), *_time(config, size), *_environment(config), *_secrets(config, arguments)]
    return found


def _name(config: SubmitJobConfig) -> Iterator[str]:
    name = job_name(config)
    if len(name) > MAX_NAME or not DNS_1035.fullmatch(name):
        yield (
            f"submit.name={name!r} must be 1 to {MAX_NAME} lower-case letters, digits or '-', from a letter on: "
            "KubeRay's operator refuses others; set submit.name"
        )


def _image(config: SubmitJobConfig, code: Code) -> Iterator[str]:
    submit = config.submit
    tag = image_of(submit, code).rpartition("/")[2].partition("@")[0].partition(":")[2]
    sha = (code.git_sha or "unknown").removesuffix("-dirty")
    if not submit.image:
        yield "submit.image is empty; set it to yours, built as k8s/README.md does"
    if f"ray{code.ray_version}" not in re.split(r"[-_+]", tag):
        yield (
            f"submit.image={submit.image} does not say that it has Ray {code.ray_version}, which this checkout is "
            f"tested with; tag it {code.tag}, as k8s/README.md builds it, or leave the tag out"
        )
    if sha not in tag:
        yield (
            f"submit.image={submit.image} does not say that it holds commit {sha}; build it from this checkout with "
            f"the tag {code.tag}, or check out its commit"
        )
    if submit.image_pull_policy not in PULL_POLICIES:
        yield f"submit.image_pull_policy={submit.image_pull_policy} must be {', '.join(PULL_POLICIES)}"


def _command(config: SubmitJobConfig, arguments: Sequence[str]) -> Iterator[str]:
    for argument in arguments:
        if "$(" in argument:
            yield f"{argument} has $(...), which Kubernetes expands in commands; write it in another way"
    if config.submit.retries > 0 and not config.run.resume:
        yield (
            f"submit.retries={config.submit.retries} with run.resume=false: each retry would refuse the run that the "
            "first attempt began; set run.resume=true or submit.retries=0"
        )


def _queue(config: SubmitJobConfig) -> Iterator[str]:
    submit = config.submit
    if submit.queue is Queue.none:
        return
    if not submit.queue_name:
        yield f"submit.queue={submit.queue.value} names no queue; set submit.queue_name"
    labels = [("submit.queue_name", submit.queue_name)]
    labels += [("submit.priority_class", submit.priority_class)] if submit.queue is Queue.volcano else []
    for setting, value in labels:
        if not LABEL_VALUE.fullmatch(value or ""):
            yield f"{setting}={value!r} is no value of a label: at most 63 letters, digits, '-', '_' or '.'"


def _room(config: SubmitJobConfig, size: Sizes) -> Iterator[str]:
    """Whether ranks, data tasks and snapshots fit into a worker pod."""
    cluster, submit = config.cluster, config.submit
    wanted = size.workers * cluster.cpus_per_worker + config.data.stream_cpus
    if size.cpus < wanted:
        yield (
            f"submit.cpus_per_node={size.cpus} is too few for {size.workers} workers of "
            f"cluster.cpus_per_worker={cluster.cpus_per_worker:g} and one of "
            f"data.stream_cpus={config.data.stream_cpus:g}; set submit.cpus_per_node={wanted + 1:.0f}"
        )
    if config.snapshot.copies > max(1, size.most_nodes - 1):
        yield (
            f"snapshot.copies={config.snapshot.copies} has {size.most_nodes - 1} other nodes of {size.most_nodes}; "
            "lower it, raise cluster.max_workers, or lower submit.workers_per_node"
        )
    snapshots, store = size.snapshot_bytes * HEADERS, submit.object_store_gb * 1e9
    if size.shm_gib * GIB < snapshots + store:
        yield (
            f"submit.shm_gb={submit.shm_gb} is too little: {snapshots / 1e9:.1f} GB for snapshots in groups down to "
            f"cluster.min_workers={cluster.min_workers} and {store / 1e9:.1f} GB for the object store; raise it or "
            "cluster.min_workers, or lower snapshot.slots"
        )


def _time(config: SubmitJobConfig, size: Sizes) -> Iterator[str]:
    """Whether a drain ends within the grace period, and idle nodes outlive a restart."""
    submit, drained_s = config.submit, config.submit.drain_s + LEAVE_S
    if grace_s(submit) <= drained_s:
        yield (
            f"submit.grace_s={submit.grace_s} ends before the drain does, after {drained_s} s; set "
            f"submit.grace_s={drained_s + 35} or more, or lower submit.drain_s={submit.drain_s}"
        )
    idle_s, longest_s = submit.idle_timeout_s, longest_restart_s(config)
    if idle_s and idle_s <= longest_s and autoscales(submit, size.least_nodes, size.most_nodes):
        yield (
            f"submit.idle_timeout_s={idle_s} must be above the {longest_s:g} s that the longest restart takes "
            "(train.collective_timeout_s, cluster.silence_s and a start): nodes would go that the run waits for; set "
            f"submit.idle_timeout_s={round(longest_s * 1.5)}"
        )


def _environment(config: SubmitJobConfig) -> Iterator[str]:
    for name in config.submit.env:
        if name in OPERATORS_OWN:
            yield f"submit.env.{name} is refused by KubeRay's operator in pods; use {OPERATORS_OWN[name]}"


def _secrets(config: SubmitJobConfig, arguments: Sequence[str]) -> Iterator[str]:
    """No secret stands in a manifest: whoever may read the job could read it."""
    instead = "put it into a Secret and name that: submit.env_secret"
    for name, value in config.submit.env.items():
        if SECRET_NAME.search(name) and name not in NOT_SECRET and value:
            yield f"submit.env.{name} is given as text; {instead}"
    texts = [("an argument", argument) for argument in arguments]
    for setting, text in [*texts, *_texts(asdict(config.submit), "submit")]:
        if SECRET_TEXT.search(text):
            yield f"{setting} holds what looks like a secret; {instead}"


def _texts(value: Any, where: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield where, value
    elif isinstance(value, dict):
        for key, below in value.items():
            yield from _texts(below, f"{where}.{key}")
    elif isinstance(value, list):
        for number, below in enumerate(value):
            yield from _texts(below, f"{where}[{number}]")
