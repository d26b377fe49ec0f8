"""Settings of a submission that cannot be meant, and what renders well and still cannot run. Pure.

With some a job would be accepted by Kubernetes and could not run: room, time, queue, image, secrets. Fields and types
are the API server's to judge: `submit.action=diff` and `apply` have it do so.
"""

import posixpath
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from math import ceil
from pathlib import PurePosixPath
from typing import Any

from regrow.config.check import check_finite, places_read
from regrow.config.ray_health import LEAST_S
from regrow.config.schema import Network, Queue, SnapshotTransport, SubmitBackend, SubmitConfig, SubmitJobConfig
from regrow.errors import ConfigError
from regrow.storage import CREDENTIALS, is_remote, local_path
from regrow.submit.pods import GIB, HEADERS, LEAVE_S, Sizes, grace_s, longest_restart_s, sizes
from regrow.submit.render import MAX_NAME, Code, autoscales, image_of, job_name

# names as Kubernetes takes them
LABEL_KEY = re.compile(r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
DNS_1123 = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
PLACEHOLDER = re.compile(r"example\.(com|org|net)|<[^>]*>|\bCHANGE_?ME\b", re.IGNORECASE)
EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
IMAGE = "/opt/regrow"  # the checkout, in the image of k8s/Dockerfile
OTHER_DISK_GB = 20  # of a pod's /tmp: Ray's logs and spilled objects, what was compiled
TAKEN = ("/", "/tmp", "/dev", "/dev/shm")  # in a pod
PULL_POLICIES = ("IfNotPresent", "Always", "Never")
SECRET_NAME = re.compile(  # TOKENIZERS_PARALLELISM is none
    r"TOKEN(?!I[SZ])|PASSWORD|PASSWD|SECRET|CREDENTIAL|PRIVATE_KEY|ACCESS_KEY|API_KEY|[A-Z]_KEY$|CONNECTION_STRING",
    re.IGNORECASE,
)
NOT_SECRET = ("HF_HUB_DISABLE_IMPLICIT_TOKEN",)
PLACE_NAME = re.compile(r".*_(FILE|PATH)|GOOGLE_APPLICATION_CREDENTIALS", re.IGNORECASE)  # where a secret lies
PLACE = re.compile(r"[/~][^\s{}]*")
SECRET_TEXT = re.compile(
    rf"\bAKIA[0-9A-Z]{{16}}\b|{CREDENTIALS.pattern}|-----BEGIN [A-Z ]*PRIVATE KEY|\bhf_[A-Za-z0-9]{{30,}}"
    r"|AccountKey=|SharedAccessSignature=|\bghp_[A-Za-z0-9]{30,}"
)
OPERATORS_OWN = {  # environment variables that KubeRay's operator refuses in pods
    "RAY_REDIS_ADDRESS": "submit.redis_address",
    "REDIS_PASSWORD": "submit.redis_secret",
    "REDIS_USERNAME": "submit.redis_secret",
    "RAY_enable_autoscaler_v2": "submit.autoscale",
}


def check_submit(config: SubmitJobConfig) -> None:
    """Check the group `submit` by itself. Raises ConfigError for the first rule that is broken."""
    submit = config.submit
    check_finite("submit", submit)
    for name, least in (
        ("workers_per_node", 1),
        ("retries", 0),
        ("keep_s", 0),
        ("disk_gb", 1),
        ("drain_s", 20),
        ("host_silence_s", LEAST_S),
        ("object_store_gb", 0.1),
        ("memory_gb_per_worker", 0.1),
        ("head_cpus", 1),
        ("head_memory_gb", 16),
    ):
        value = getattr(submit, name)
        if value < least:
            raise ConfigError(f"submit.{name}={value:g} must be at least {least:g}")
    for name in ("cpus_per_node", "shm_gb", "network_devices", "deadline_s", "idle_timeout_s", "grace_s", "stop_s"):
        value = getattr(submit, name)
        if value is not None and value <= 0:
            raise ConfigError(f"submit.{name}={value:g} must be positive, or null")
    for name in ("namespace", "operator_namespace", "monitoring_namespace"):
        value = getattr(submit, name)
        if value is not None and not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", value):
            raise ConfigError(f"submit.{name}={value!r} is no name of a namespace")
    if submit.redis_secret is not None and not re.fullmatch(r"[^/]+/[^/]+", submit.redis_secret):
        raise ConfigError(f"submit.redis_secret={submit.redis_secret} must name a Secret and its key: SECRET/KEY")
    if submit.redis_secret is not None and submit.redis_address is None:
        raise ConfigError(f"submit.redis_secret={submit.redis_secret} has no Redis; set submit.redis_address")
    label = config.snapshot.domain_label
    is_ours = label is not None and not label.startswith("ray.io/") and LABEL_KEY.fullmatch(label)
    if submit.rack_label is not None and not is_ours:
        raise ConfigError(
            f"submit.rack_label={submit.rack_label} cannot become snapshot.domain_label={label} of Ray's nodes; "
            "set snapshot.domain_label=rack, or submit.rack_label=null"
        )
    path = local_path(config.run.storage_path)
    if submit.volume_claim is not None and not path.startswith("/"):
        raise ConfigError(
            f"submit.volume_claim={submit.volume_claim} is mounted at run.storage_path, which must be an absolute "
            f"path, not {config.run.storage_path}"
        )
    if submit.volume_claim is not None and posixpath.normpath("/" + path.lstrip("/")) in TAKEN:
        raise ConfigError(
            f"submit.volume_claim={submit.volume_claim} cannot be mounted at run.storage_path="
            f"{config.run.storage_path}, where the pods have something else; name another folder"
        )
    if config.snapshot.transport is SnapshotTransport.nixl and submit.network is Network.plain:
        raise ConfigError(
            "snapshot.transport=nixl finds no device for RDMA in pods of submit.network=plain; set efa or infiniband "
            "there, or snapshot.transport=tcp"
        )
    _check_names(submit)
    _check_tolerations(submit)


def _check_names(submit: SubmitConfig) -> None:
    """What the API server takes in a RayJob and refuses in its pods, which would then never be made."""
    secret = submit.redis_secret.partition("/")[0] if submit.redis_secret is not None else None
    for setting, name in (
        ("submit.service_account", submit.service_account),
        ("submit.priority_class", submit.priority_class),
        ("submit.image_pull_secret", submit.image_pull_secret),
        ("submit.env_secret", submit.env_secret),
        ("submit.auth_secret", submit.auth_secret),
        ("submit.redis_secret", secret),
        ("submit.volume_claim", submit.volume_claim),
    ):
        if name is not None and (len(name) > 253 or not DNS_1123.fullmatch(name)):
            raise ConfigError(
                f"{setting}={name!r} is no name of a Kubernetes object: lower-case letters, digits, '-' and '.', "
                "from a letter or digit to one"
            )
    keys = [
        ("submit.topology_key", submit.topology_key),
        ("submit.rack_label", submit.rack_label),
        ("submit.network_resource", submit.network_resource),
    ]
    keys += [("submit.node_selector", key) for key in submit.node_selector]
    keys += [("submit.head_node_selector", key) for key in submit.head_node_selector]
    for setting, key in keys:
        if key is not None and not LABEL_KEY.fullmatch(key):
            raise ConfigError(f"{setting}={key!r} is no key of a label or resource: [DOMAIN/]NAME")
    if submit.network_resource is not None and "/" not in submit.network_resource:
        raise ConfigError(
            f"submit.network_resource={submit.network_resource} must be the device plugin's full name, DOMAIN/NAME, as "
            "kubectl describe node shows it"
        )
    for setting, labels in (
        ("submit.node_selector", submit.node_selector),
        ("submit.head_node_selector", submit.head_node_selector),
    ):
        for key, value in labels.items():
            if not LABEL_VALUE.fullmatch(value):
                raise ConfigError(f"{setting}.{key}={value!r} is no value of a label")
    for key in submit.env:
        if not re.fullmatch(r"[-._a-zA-Z][-._a-zA-Z0-9]*", key):
            raise ConfigError(f"submit.env has {key!r}, which is no name of an environment variable")


def _check_tolerations(submit: SubmitConfig) -> None:
    for number, toleration in enumerate(submit.tolerations):
        where = f"submit.tolerations[{number}]"
        if toleration.effect not in (None, "", *EFFECTS):
            raise ConfigError(f"{where}.effect={toleration.effect!r} must be {', '.join(EFFECTS)}, or null for all")
        if toleration.operator not in ("Exists", "Equal"):
            raise ConfigError(f"{where}.operator={toleration.operator!r} must be Exists or Equal")
        if toleration.operator == "Exists" and toleration.value:
            raise ConfigError(f"{where}.value={toleration.value!r} has no use with Exists; set operator=Equal")
        if toleration.operator == "Equal" and not toleration.key:
            raise ConfigError(f"{where}.key is empty, which only Exists takes")
        if toleration.key and not LABEL_KEY.fullmatch(toleration.key):
            raise ConfigError(f"{where}.key={toleration.key!r} is no key of a taint: [DOMAIN/]NAME")
        if not LABEL_VALUE.fullmatch(toleration.value or ""):
            raise ConfigError(f"{where}.value={toleration.value!r} is no value of a taint")


def check_may_apply(config: SubmitJobConfig, code: Code) -> None:
    """Refuse what renders well and cannot run: placeholders, code that no image has, places that no pod has.

    Raises ConfigError for the first.
    """
    image = image_of(config.submit, code)
    if PLACEHOLDER.search(image):
        raise ConfigError(f"submit.image={config.submit.image} is a placeholder; build and push yours: k8s/README.md")
    if code.git_sha is None or code.git_sha.endswith("-dirty") or re.search(r"dirty|unknown", image):
        raise ConfigError(
            f"image {image}: the checkout has changes that are not committed, or is none, and no image is known to "
            "hold them; commit, and build the image from that"
        )
    if code.untracked:
        first, *others = code.untracked
        are = f" and {len(others)} more are" if others else " is"
        raise ConfigError(
            f"{first}{are} not in git, and not known to be in image {image}; commit, and build the image from that, or "
            "take it out of the checkout"
        )
    check_storage(config)
    submit = config.submit
    if not is_remote(config.run.storage_path) and submit.volume_claim is None:
        raise ConfigError(
            f"run.storage_path={config.run.storage_path} is a folder that the pods do not share; set "
            "submit.volume_claim to a PersistentVolumeClaim to be mounted there, or run.storage_path to a URI (s3://BUCKET/FOLDER)"
        )
    _check_places(config)


def _check_places(config: SubmitJobConfig) -> None:
    """Whether pods have the local folders and files that the run is given."""
    data, mounted = config.data, [local_path(config.run.storage_path)] if config.submit.volume_claim else []
    written = [("data.cache_dir", data.cache_dir), ("parallel.compile_cache", config.parallel.compile_cache)]
    for settings, places in ((places_read(data), [*mounted, IMAGE]), (written, [*mounted, "/tmp"])):
        for setting, place in settings:
            path = local_path(place or "")
            if path.startswith(("/", "~")) and not any(_is_below(path, each) for each in places):
                raise ConfigError(
                    f"{setting}={place} is nowhere in the pods; name a URI, or a place below "
                    f"{', '.join(places)}{'' if mounted else ' (submit.volume_claim mounts run.storage_path)'}"
                )
    if not _is_below(config.snapshot.folder, "/dev/shm"):
        raise ConfigError(
            f"snapshot.folder={config.snapshot.folder} is no memory of the pods; set snapshot.folder=/dev/shm"
        )


def _is_below(path: str, place: str) -> bool:
    return PurePosixPath(posixpath.normpath(path)).is_relative_to(posixpath.normpath(place))


def check_storage(config: SubmitJobConfig) -> None:
    """Refuse storage that no other machine can have. Raises ConfigError."""
    path = config.run.storage_path
    if PLACEHOLDER.search(path):
        raise ConfigError(f"run.storage_path={path} is a placeholder; name your own")
    if not is_remote(path) and not local_path(path).startswith("/"):
        raise ConfigError(
            f"run.storage_path={path} is relative to this checkout; set it to a URI (s3://BUCKET/FOLDER) or to an "
            "absolute path that all nodes share"
        )


def broken_rules(config: SubmitJobConfig, code: Code, arguments: Sequence[str]) -> list[str]:
    """A line for each setting with which this job could not run, naming value and fix."""
    size = sizes(config, config.submit)
    found = [*_name(config), *_image(config, code), *_command(config, arguments), *_queue(config)]
    found += [*_room(config, size), *_time(config, size), *_environment(config), *_secrets(config, arguments)]
    return found


def check_secrets(config: SubmitJobConfig, arguments: Sequence[str]) -> None:
    """Raises ConfigError for the first secret that would stand in a job."""
    for line in _secrets(config, arguments):
        raise ConfigError(line)


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
    cluster, submit, tp = config.cluster, config.submit, config.parallel.tp
    if size.workers % tp:
        yield (
            f"submit.workers_per_node={submit.workers_per_node} puts {size.workers} ranks into a pod, no multiple of "
            f"parallel.tp={tp}, which are together on a node: some would find no room; set "
            f"submit.workers_per_node={max(1, size.workers // tp) * tp}"
        )
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
    cache_gb, disk_gb = config.data.cache_gb, submit.disk_gb
    caches = any(map(is_remote, config.data.corpora.values() or [config.run.storage_path]))
    if caches and cache_gb + OTHER_DISK_GB > disk_gb and _is_below(config.data.cache_dir or "/tmp", "/tmp"):
        smaller = f" or data.cache_gb={disk_gb - OTHER_DISK_GB}" if disk_gb > OTHER_DISK_GB else ""
        yield (
            f"data.cache_gb={cache_gb:g} and {OTHER_DISK_GB} GB for all else do not fit into submit.disk_gb={disk_gb}: "
            f"pods would be evicted; set submit.disk_gb={ceil(cache_gb) + OTHER_DISK_GB}{smaller}"
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
    """No secret stands in a manifest, or in a job of Ray's: every reader of the job could read it."""
    instead = "put it into a Secret and name that: submit.env_secret"
    if config.submit.backend is SubmitBackend.ray:
        instead = "set it where the cluster's Ray is started, on all hosts"
    for name, value in config.submit.env.items():
        is_place = PLACE_NAME.fullmatch(name) and PLACE.fullmatch(value)
        if SECRET_NAME.search(name) and name not in NOT_SECRET and value and not is_place:
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
