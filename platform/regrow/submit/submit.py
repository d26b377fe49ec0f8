"""What `jobs.submit` does: render, check, and act on Kubernetes or on a running Ray cluster."""

import re
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import yaml

from regrow.config.check import check
from regrow.config.schema import SubmitAction, SubmitBackend, SubmitJobConfig
from regrow.errors import ConfigError
from regrow.observe.provenance import git_sha
from regrow.submit.arguments import pretrain_arguments
from regrow.submit.crd import load_schema, validate
from regrow.submit.kubectl import Kubectl
from regrow.submit.kuberay import KubeRay
from regrow.submit.lint import lint
from regrow.submit.manifest import Finding, Manifest
from regrow.submit.render import Code, image_of, job_name, render, to_yaml

PLACEHOLDER = re.compile(r"example\.(com|org|net)|<[^>]*>|\bCHANGE_?ME\b", re.IGNORECASE)


def submit(config: SubmitJobConfig, given: Sequence[str]) -> int:
    """Carry out `submit.action` for a config and the arguments that it was composed from; the exit status."""
    check(config)
    code = Code(git_sha(), metadata.version("ray"))
    if config.submit.backend is SubmitBackend.ray:
        return _on_ray(config, code, given)
    return _on_kuberay(config, code, given)


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


def _on_kuberay(config: SubmitJobConfig, code: Code, given: Sequence[str]) -> int:
    action, options = config.submit.action, config.submit
    if action in (SubmitAction.render, SubmitAction.diff, SubmitAction.apply):
        manifests = render(config, code, pretrain_arguments(config, given))
        findings = lint(manifests, config, code) + _by_schema(manifests, options.crd_file)
        for finding in dict.fromkeys(findings):
            print(f"error: {finding}", file=sys.stderr)
        if findings:
            return 1
        text = to_yaml(manifests)
        if action is SubmitAction.render:
            sys.stdout.write(text)
            return 0
    if action is SubmitAction.apply:
        check_may_apply(config, code)
    kubectl = Kubectl(namespace=options.namespace, context=options.context)
    job = KubeRay(kubectl, job_name(config))
    if action is SubmitAction.diff:
        sys.stdout.write(kubectl.diff(text))
    elif action is SubmitAction.status:
        print("\n".join(job.describe()))
    elif action is SubmitAction.stop:
        job.stop(wait_s=options.stop_s if options.follow else 0)
    elif action is SubmitAction.logs:
        return job.follow()
    else:
        job.apply(text)
        return job.follow() if options.follow else 0
    return 0


def _on_ray(config: SubmitJobConfig, code: Code, given: Sequence[str]) -> int:
    from regrow.submit.ray_jobs import RayJobs, job_spec  # ray takes a second

    action, options = config.submit.action, config.submit
    if action is SubmitAction.diff:
        raise ConfigError("submit.action=diff compares with Kubernetes; a Ray cluster keeps nothing to compare with")
    if action in (SubmitAction.render, SubmitAction.apply):
        spec = job_spec(config, code, pretrain_arguments(config, given))
        if action is SubmitAction.render:
            sys.stdout.write(yaml.safe_dump(spec, sort_keys=False, width=110))
            return 0
        check_storage(config)
    jobs = RayJobs(options.address, config.run.name)
    if action is SubmitAction.status:
        print("\n".join(jobs.describe()))
    elif action is SubmitAction.stop:
        jobs.stop(wait_s=options.stop_s if options.follow else 0)
    elif action is SubmitAction.logs:
        return jobs.follow()
    else:
        jobs.apply(spec)
        return jobs.follow() if options.follow else 0
    return 0


def _by_schema(manifests: Sequence[Manifest], crd_file: str | None) -> list[Finding]:
    if crd_file is None:
        return []
    schema = load_schema(Path(crd_file), kind="RayJob", version="v1")
    return [finding for manifest in manifests for finding in validate(manifest, schema)]
