"""Settings of a submission that cannot be meant, and what renders well and still cannot run. Pure."""

import re

from regrow.config.schema import SubmitJobConfig
from regrow.errors import ConfigError
from regrow.submit.render import Code, image_of

PLACEHOLDER = re.compile(r"example\.(com|org|net)|<[^>]*>|\bCHANGE_?ME\b", re.IGNORECASE)


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
    if submit.volume_claim is not None and not config.run.storage_path.startswith("/"):
        raise ConfigError(
            f"submit.volume_claim={submit.volume_claim} is mounted at run.storage_path, which must be an absolute "
            f"path, not {config.run.storage_path}"
        )


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
    if "://" in path and not config.data.corpora:
        raise ConfigError(
            f"run.storage_path={path} cannot hold a corpus in the making; prepare one with jobs.prepare_data and name "
            "it: +data.corpora.NAME=FOLDER_OR_URI"
        )
