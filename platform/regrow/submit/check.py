"""Settings of a submission that cannot be meant, and what renders well and still cannot run. Pure."""

import posixpath
import re

from regrow.config.schema import SubmitConfig, SubmitJobConfig
from regrow.errors import ConfigError
from regrow.submit.names import DNS_1123, LABEL_KEY, LABEL_VALUE
from regrow.submit.render import Code, image_of

PLACEHOLDER = re.compile(r"example\.(com|org|net)|<[^>]*>|\bCHANGE_?ME\b", re.IGNORECASE)
EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
TAKEN = ("/", "/tmp", "/dev", "/dev/shm")  # in a pod


def check_submit(config: SubmitJobConfig) -> None:
    """Check the group `submit` by itself. Raises ConfigError for the first rule that is broken."""
    submit = config.submit
    for name, least in (
        ("workers_per_node", 1),
        ("retries", 0),
        ("keep_s", 0),
        ("disk_gb", 1),
        ("drain_s", 20),
        ("stop_s", 1),
        ("host_silence_s", 2),
        ("object_store_gb", 0.1),
        ("memory_gb_per_worker", 0.1),
        ("head_cpus", 1),
        ("head_memory_gb", 16),
    ):
        value = getattr(submit, name)
        if value < least:
            raise ConfigError(f"submit.{name}={value:g} must be at least {least:g}")
    for name in ("cpus_per_node", "shm_gb", "network_devices", "deadline_s", "idle_timeout_s", "grace_s"):
        value = getattr(submit, name)
        if value is not None and value <= 0:
            raise ConfigError(f"submit.{name}={value:g} must be positive, or null")
    if not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", submit.namespace):
        raise ConfigError(f"submit.namespace={submit.namespace!r} is no name of a namespace")
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
    if submit.volume_claim is not None and not config.run.storage_path.startswith("/"):
        raise ConfigError(
            f"submit.volume_claim={submit.volume_claim} is mounted at run.storage_path, which must be an absolute "
            f"path, not {config.run.storage_path}"
        )
    if submit.volume_claim is not None and posixpath.normpath("/" + config.run.storage_path.lstrip("/")) in TAKEN:
        raise ConfigError(
            f"submit.volume_claim={submit.volume_claim} cannot be mounted at run.storage_path="
            f"{config.run.storage_path}, where the pods have something else; name another folder"
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
    """Refuse what renders well and cannot run: placeholders, and storage that the pods do not share.

    Raises ConfigError for the first.
    """
    image = image_of(config.submit, code)
    if PLACEHOLDER.search(image):
        raise ConfigError(f"submit.image={config.submit.image} is a placeholder; build and push yours: k8s/README.md")
    if re.search(r"dirty|unknown", image):
        raise ConfigError(
            f"image {image}: the checkout has changes that are not committed, or is none, and no image is known to "
            "hold them; commit, and build the image from that"
        )
    check_storage(config)
    submit = config.submit
    if "://" not in config.run.storage_path and submit.volume_claim is None:
        raise ConfigError(
            f"run.storage_path={config.run.storage_path} is a folder that the pods do not share; set "
            "submit.volume_claim to a PersistentVolumeClaim to be mounted there, or run.storage_path to a URI (s3://BUCKET/FOLDER)"
        )


def check_storage(config: SubmitJobConfig) -> None:
    """Refuse storage that no other machine can have. Raises ConfigError."""
    path = config.run.storage_path
    if PLACEHOLDER.search(path):
        raise ConfigError(f"run.storage_path={path} is a placeholder; name your own")
    if "://" not in path and not path.startswith("/"):
        raise ConfigError(
            f"run.storage_path={path} is relative to this checkout; set it to a URI (s3://BUCKET/FOLDER) or to an "
            "absolute path that all nodes share"
        )
