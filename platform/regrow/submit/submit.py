"""What `jobs.submit` does: render, check, and act on Kubernetes or on a running Ray cluster."""

import posixpath
import secrets
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Protocol

import yaml

from regrow.config.check import check_new, places_read
from regrow.config.schema import PretrainConfig, SubmitAction, SubmitBackend, SubmitJobConfig
from regrow.config.store import pretrain_overrides
from regrow.data.preflight import check_corpus
from regrow.errors import ConfigError, UnseenError
from regrow.forecast.settle import settled
from regrow.record.provenance import ROOT, git_sha, untracked
from regrow.record.run_folder import run_location
from regrow.storage import local_path
from regrow.submit.check import broken_rules, check_may_apply, check_secrets, check_storage, check_submit
from regrow.submit.job_status import FILLED_IN, use_token
from regrow.submit.kubectl import Kubectl
from regrow.submit.kuberay import KubeRay, LostSight
from regrow.submit.pods import stop_s
from regrow.submit.render import IN_IMAGE, Code, job_name, render, to_yaml


def submit(config: SubmitJobConfig, given: Sequence[str], files: Mapping[str, str] | None = None) -> int:
    """Carry out `submit.action` for a config and the arguments and files that it was composed from; the exit status."""
    planned, _ = settled(config)  # as the job will
    check_submit(planned)
    code = Code(git_sha(), metadata.version("ray"), untracked(*IN_IMAGE))
    asked = config if config.parallel.pp else planned

    def arguments() -> list[str]:
        return pretrain_arguments(asked, given, files)

    if config.submit.backend is SubmitBackend.ray:
        return _on_ray(planned, code, arguments)
    return _on_kuberay(planned, code, arguments)


def _on_kuberay(config: SubmitJobConfig, code: Code, arguments_of_job: Callable[[], list[str]]) -> int:
    action, options = config.submit.action, config.submit
    if action in (SubmitAction.render, SubmitAction.diff, SubmitAction.apply):
        arguments = arguments_of_job()
        if broken := broken_rules(config, code, arguments):
            print("\n".join(f"error: {line}" for line in broken), file=sys.stderr)
            return 1
        if action is SubmitAction.apply:
            check_may_apply(config, code)
            check_in_git(config)
        if action is not SubmitAction.diff:  # which starts nothing
            _look_at_corpus(config)
        # what is rendered by the same command is the same, and may be applied more than once
        owner = "" if action is SubmitAction.render else f"rayjob-{secrets.token_hex(8)}"
        manifests = render(config, code, arguments, owner)
        if action is SubmitAction.render:
            sys.stdout.write(to_yaml(manifests))
            return 0
    kubectl = Kubectl(namespace=options.namespace, context=options.context)
    if action is SubmitAction.diff:
        difference = kubectl.diff(to_yaml(manifests))
        for manifest in manifests:
            kubectl.trial(to_yaml([manifest]))
        sys.stdout.write(difference)
        if not difference:
            print(f"no difference: applying would change nothing of RayJob {job_name(config)}", file=sys.stderr)
        return 0
    job = KubeRay(kubectl, job_name(config))
    return _act(job, config, start=lambda: job.apply(manifests))


def _on_ray(config: SubmitJobConfig, code: Code, arguments_of_job: Callable[[], list[str]]) -> int:
    use_token()
    from regrow.submit.ray_jobs import RayJobs, job_spec  # ray takes a second

    action, options = config.submit.action, config.submit
    if action is SubmitAction.diff:
        raise ConfigError("submit.action=diff compares with Kubernetes; a Ray cluster keeps nothing to compare with")
    if action in (SubmitAction.render, SubmitAction.apply):
        if action is SubmitAction.apply:
            check_storage(config)
        arguments = arguments_of_job()
        check_secrets(config, arguments)
        _look_at_corpus(config)
        spec = job_spec(config, code, arguments)
        if action is SubmitAction.render:
            sys.stdout.write(yaml.safe_dump(spec, sort_keys=False, width=110))
            return 0
    jobs = RayJobs(options.address, config.run.name, run_location(config))
    return _act(jobs, config, start=lambda: jobs.apply(spec))


def check_in_git(config: SubmitJobConfig, root: Path = ROOT) -> None:
    """Refuse what a run would read by a relative path and git does not list: no image of the commit has it.

    Raises ConfigError for the first.
    """
    for setting, place in places_read(config.data):
        path = local_path(place or "")
        if path and "://" not in path and not path.startswith(("/", "~")) and not _lists(root, path):
            raise ConfigError(
                f"{setting}={place} is not in git, so that no image has it; commit it, and build the image from that, "
                "or name a URI, or a place below run.storage_path (submit.volume_claim mounts it)"
            )


def _lists(root: Path, path: str) -> bool:
    """Whether git has anything by this path or pattern, in a checkout."""
    if PurePosixPath(posixpath.normpath(path)).is_relative_to(".."):
        return False
    command = ["git", "ls-files", "--", path]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return True
    return bool(done.stdout.strip())


def _look_at_corpus(config: SubmitJobConfig) -> None:
    """After all that needs no network. Raises DataError for a corpus that cannot do."""
    if unseen := look_at_corpus(config):
        print(f"note: {unseen}", file=sys.stderr)
    try:
        check_new(config)
    except ConfigError as error:
        print(f"note: a run that has not begun refuses this: {error}", file=sys.stderr)


class _Job(Protocol):
    """A run where it was submitted to."""

    def describe(self) -> list[str]: ...
    def stop(self, *, wait_s: float) -> int: ...
    def follow(self) -> int: ...


def _act(job: _Job, config: SubmitJobConfig, start: Callable[[], None]) -> int:
    options = config.submit
    if options.action is SubmitAction.status:
        print("\n".join(job.describe()))
        return 0
    if options.action is SubmitAction.stop:
        return job.stop(wait_s=stop_s(config, options) if options.follow else 0)
    if options.action is SubmitAction.logs:
        return _until_the_end(job.follow)
    start()
    return _until_the_end(job.follow) if options.follow else 0


LOST_SIGHT = 3  # exit status: the job was there, and how it ends is not known here


def _until_the_end(follow: Callable[[], int]) -> int:
    try:
        return follow()
    except LostSight as error:
        print(f"error: {error}", file=sys.stderr)
        return LOST_SIGHT
    except KeyboardInterrupt:
        print("no longer following; the job runs on, and submit.action=stop ends it", file=sys.stderr)
        return 130


OURS = ("submit", "site")  # groups that jobs.pretrain does not have
JOIN = "cluster.address=auto"


def pretrain_arguments(
    config: SubmitJobConfig, given: Sequence[str], files: Mapping[str, str] | None = None
) -> list[str]:
    """The user's own arguments, as they were given, and what else makes up the same run, on the cluster it runs in.

    A site may choose the model and the corpus (`files`), and set what is the run's, as where it is stored: that is
    added where it differs without the site. Raises ConfigError where no arguments give it, or where the run's name or
    storage is not told by them alone.
    """
    for each in given:
        if _key(each) in _FOLDER and FILLED_IN.search(each):
            raise ConfigError(
                f"{each} has ${{...}}, which the job's environment would fill in, maybe not as this one does; write "
                "what is meant"
            )
    kept = [each for each in given if _key(each).split(".")[0] not in OURS and _key(each) not in _PLACE]
    cluster = replace(config.cluster, address="auto", local_nodes=0)
    return pretrain_overrides(replace(config, cluster=cluster), [*kept, JOIN], files)


_FOLDER = ("run", "run.name", "run.storage_path")  # what makes up the run's folder
_PLACE = ("cluster.address", "cluster.local_nodes")  # where the submitter would have run it


def _key(argument: str) -> str:
    return argument.lstrip("+~").partition("=")[0].partition("@")[0]


LOOK_S = 5.0  # for each place outside this machine; the job itself waits longer


def look_at_corpus(config: PretrainConfig) -> str:
    """Refuse a corpus that cannot do; a line on what cannot be seen from here, empty where all is well.

    Raises DataError as `check_corpus` does, but for what another machine may reach.
    """
    try:
        check_corpus(config, deadline_s=LOOK_S, footers=False)
    except UnseenError as error:
        return f"the corpus was not looked at, the job will: {error}"
    return ""
