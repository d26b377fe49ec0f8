"""Rules of ours for a rendered job: whether this run can live in these pods. Pure.

Manifests may have been changed by hand since they were rendered, so everything is read from them anew.
"""

import re
import shlex
from collections.abc import Iterator, Sequence

from regrow.config.schema import Queue, SubmitJobConfig
from regrow.control.nodes import MARGIN_S
from regrow.submit.manifest import Finding, Manifest, Reader, quantity
from regrow.submit.operator_rules import LABEL_KEY, LABEL_VALUE, operator_rules
from regrow.submit.pod_rules import no_secrets, pod_rules
from regrow.submit.pods import GPU
from regrow.submit.render import Code, config_sha256
from regrow.submit.sizes import HEADERS, longest_restart_s, sizes

KUBERNETES_GRACE_S = 30  # where a pod does not say


def lint(manifests: Sequence[Manifest], config: SubmitJobConfig, code: Code) -> list[Finding]:
    """Everything that is wrong with a run's manifests, by KubeRay's rules and our own."""
    findings: list[Finding] = []
    for manifest in manifests:
        findings += operator_rules(manifest)
        job = Reader(manifest, "", findings)
        cluster = job.at("spec", "rayClusterSpec")
        _code(job, cluster, config, code)
        _entrypoint(job, config)
        _queue(job, cluster, config)
        no_secrets(job)
        for pod in _pods(job):
            pod_rules(pod)
        _head(cluster, config)
        groups = list(cluster.at("workerGroupSpecs").items())
        if not groups:
            cluster.at("workerGroupSpecs").refuse("has no group of workers")
        for group in groups:
            _room(group, cluster, config)
            _memory(group, config)
            _drain(group, config)
    return list(dict.fromkeys(findings))


def _pods(job: Reader) -> Iterator[Reader]:
    cluster = job.at("spec", "rayClusterSpec")
    groups = [cluster.at("headGroupSpec"), *cluster.at("workerGroupSpecs").items()]
    yield from (group.at("template", "spec") for group in groups)
    if job.at("spec", "submitterPodTemplate").get(dict) is not None:
        yield job.at("spec", "submitterPodTemplate", "spec")


def _first_container(group: Reader) -> Reader:
    """The one that Ray runs in, to KubeRay."""
    containers = group.at("template", "spec", "containers")
    return next(containers.items(), Reader(None, f"{containers.path}[0]", containers.findings))


def _code(job: Reader, cluster: Reader, config: SubmitJobConfig, code: Code) -> None:
    version = cluster.at("rayVersion")
    if version.get(str) != code.ray_version:
        version.refuse(
            f"{version.value!r} is not the Ray {code.ray_version} that this checkout is tested with and runs here",
            f"use {code.ray_version}",
        )
    sha = (code.git_sha or "unknown").removesuffix("-dirty")
    images: dict[str, Reader] = {}
    for pod in _pods(job):
        for container in pod.at("containers").items():
            image = container.at("image")
            text = image.get(str)
            if not text:
                image.refuse("is missing", "set submit.image")
                continue
            images.setdefault(text, image)
            tag = text.rpartition("/")[2].partition("@")[0].partition(":")[2]
            if f"ray{code.ray_version}" not in re.split(r"[-_+]", tag):
                image.refuse(
                    f"{text!r} does not say that it has Ray {code.ray_version}",
                    f"tag it {code.tag}, as k8s/README.md builds it, or leave the tag of submit.image out",
                )
            if sha not in tag:
                image.refuse(
                    f"{text!r} does not say that it holds commit {sha}",
                    f"build it from this checkout with the tag {code.tag}, or check out its commit",
                )
    for image in list(images.values())[1:]:
        image.refuse(f"{image.value!r} differs from {next(iter(images))!r}", "use one image for all pods")
    annotations = job.at("metadata", "annotations")
    for key, expected in (
        ("regrow/git-sha", code.git_sha or "unknown"),
        ("regrow/config-sha256", config_sha256(config)),
        ("regrow/run-name", config.run.name),
    ):
        if annotations.at(key).get(str) != expected:
            annotations.at(key).refuse(f"must be {expected!r}, not {annotations.at(key).value!r}", "render it again")


def _entrypoint(job: Reader, config: SubmitJobConfig) -> None:
    entrypoint = job.at("spec", "entrypoint")
    text = entrypoint.get(str) or ""
    try:
        words = shlex.split(text)
    except ValueError as error:
        entrypoint.refuse(f"cannot be read by a shell ({error})", "render it again")
        return
    if words[:3] != ["python", "-m", "jobs.pretrain"]:
        entrypoint.refuse(f"{text!r} must start with python -m jobs.pretrain")
    if "cluster.address=auto" not in words:
        entrypoint.refuse("does not join the cluster that it runs on", "add cluster.address=auto")
    if shlex.join(words) != text:
        entrypoint.refuse("has words that a shell would change", "quote them")
    if "$(" in text:
        entrypoint.refuse("has $(...), which Kubernetes expands in commands", "write it in another way")
    retries = job.at("spec", "backoffLimit")
    if (retries.get(int) or 0) > 0 and not config.run.resume:
        retries.refuse(
            f"{retries.value} retries with run.resume=false: each would refuse the run that the first attempt began",
            "set run.resume=true or submit.retries=0",
        )


def _queue(job: Reader, cluster: Reader, config: SubmitJobConfig) -> None:
    labels, submit = job.at("metadata", "labels"), config.submit
    for metadata in (job.at("metadata"), *_pod_metadata(job)):
        for key, value in metadata.at("labels").entries():
            if not LABEL_KEY.fullmatch(key):
                value.refuse(f"{key!r} is no key of a label")
            if value.get(str) is None or not LABEL_VALUE.fullmatch(value.value):
                value.refuse(f"{value.value!r} is no value of a label: at most 63 letters, digits, '-', '_' or '.'")
    keys = {Queue.kueue: "kueue.x-k8s.io/queue-name", Queue.volcano: "volcano.sh/queue-name"}
    for queue, key in keys.items():
        if submit.queue is queue and not labels.at(key).get(str):
            labels.at(key).refuse("names no queue", "set submit.queue_name")
        if submit.queue is not queue and labels.at(key).value is not None:
            labels.at(key).refuse(f"names a queue, but submit.queue={submit.queue.value}", "leave it out")
    if submit.queue is Queue.kueue:
        suspend, scaling = job.at("spec", "suspend"), cluster.at("enableInTreeAutoscaling")
        elastic = job.at("metadata", "annotations", "kueue.x-k8s.io/elastic-job")
        if suspend.get(bool) is not True:
            suspend.refuse("must be true until Kueue admits the job", "set it to true")
        if scaling.get(bool) and (not submit.kueue_elastic or elastic.get(str) != "true"):
            scaling.refuse(
                "Kueue refuses jobs with an autoscaler unless its elastic jobs are on",
                "set submit.kueue_elastic=true where ElasticJobsViaWorkloadSlices is, or submit.autoscale=false",
            )
    elif job.at("spec", "suspend").get(bool):
        job.at("spec", "suspend").refuse("nobody would resume the job without Kueue", "leave it out")
    if submit.queue is Queue.volcano and labels.at("ray.io/scheduler-name").get(str) != "volcano":
        labels.at("ray.io/scheduler-name").refuse("must be volcano", "set it to volcano")


def _pod_metadata(job: Reader) -> Iterator[Reader]:
    cluster = job.at("spec", "rayClusterSpec")
    for group in (cluster.at("headGroupSpec"), *cluster.at("workerGroupSpecs").items()):
        yield group.at("template", "metadata")
    yield job.at("spec", "submitterPodTemplate", "metadata")


def _head(cluster: Reader, config: SubmitJobConfig) -> None:
    head, auth = cluster.at("headGroupSpec"), cluster.at("authOptions", "mode")
    for key in ("num-cpus", "num-gpus"):
        value = head.at("rayStartParams", key)
        if value.get(str) != "0":
            value.refuse(f'must be "0", not {value.value!r}: the head does no work that could take it down', "set it")
    if config.submit.auth and auth.get(str) != "token":
        auth.refuse(
            "must be token: whoever reaches an open dashboard runs code in the cluster",
            "set it to token, or submit.auth=false where nobody can reach it",
        )
    scaling, version = cluster.at("enableInTreeAutoscaling"), cluster.at("autoscalerOptions", "version")
    if scaling.get(bool) and version.get(str) != "v2":
        version.refuse(f"must be v2, not {version.value!r}", "set it to v2")
    idle, longest = cluster.at("autoscalerOptions", "idleTimeoutSeconds"), longest_restart_s(config)
    if scaling.get(bool) and (idle.get(int) or 0) <= longest:
        idle.refuse(
            f"{idle.value} s must be above the {longest:g} s that the longest restart takes "
            "(train.collective_timeout_s, cluster.silence_s and a start): nodes would go that the run waits for",
            f"set submit.idle_timeout_s={round(longest * 1.5)}",
        )


def _room(group: Reader, cluster: Reader, config: SubmitJobConfig) -> None:
    """Whether the ranks fit: the fewest before the job starts, all of them at most."""
    need, submit = config.cluster, config.submit
    limits = _first_container(group).at("resources", "limits")
    cpus, gpus = limits.at("cpu"), limits.at(GPU)
    have_cpus, have_gpus = quantity(cpus.value) or 0.0, quantity(gpus.value) or 0.0
    workers = sizes(config, submit).workers
    if need.gpus_per_worker and have_gpus < need.gpus_per_worker:
        gpus.refuse(f"{gpus.value} leaves room for no worker", f"set it to {workers * need.gpus_per_worker}")
        return
    per_node = int(have_gpus // need.gpus_per_worker) if need.gpus_per_worker else workers
    wanted = per_node * need.cpus_per_worker + config.data.stream_cpus
    if have_cpus < wanted:
        cpus.refuse(
            f"{have_cpus:g} CPUs are too few for {per_node} workers of "
            f"cluster.cpus_per_worker={need.cpus_per_worker:g} and one of data.stream_cpus={config.data.stream_cpus:g}",
            f"set submit.cpus_per_node={wanted + 1:.0f}",
        )
    most, all_workers = group.at("maxReplicas"), need.max_workers + need.spare_workers
    if (most.get(int) or 0) * per_node < all_workers:
        most.refuse(
            f"{most.value} nodes of {per_node} have no room for cluster.max_workers={need.max_workers} and "
            f"cluster.spare_workers={need.spare_workers}",
            f"set it to {-(-all_workers // per_node)}, or submit.workers_per_node to what a node has",
        )
    scaling = cluster.at("enableInTreeAutoscaling").get(bool)
    first = group.at("minReplicas") if scaling else group.at("replicas")
    if (first.get(int) or 0) * per_node < need.min_workers:
        first.refuse(
            f"the job would start on {first.value} nodes of {per_node}, too few for "
            f"cluster.min_workers={need.min_workers}",
            f"set it to {-(-need.min_workers // per_node)}",
        )


def _memory(group: Reader, config: SubmitJobConfig) -> None:
    """/dev/shm holds the snapshots and Ray's object store, and counts as the pod's memory."""
    container, pod = _first_container(group), group.at("template", "spec")
    mount = next(
        (each for each in container.at("volumeMounts").items() if each.at("mountPath").value == "/dev/shm"), None
    )
    if mount is None:
        container.at("volumeMounts").refuse(
            "does not mount /dev/shm: Kubernetes gives 64 MB of it", "mount a volume with emptyDir.medium: Memory"
        )
        return
    empty = pod.at("volumes").named(str(mount.at("name").value)).at("emptyDir")
    if empty.at("medium").get(str) != "Memory":
        empty.at("medium").refuse("must be Memory: snapshots are kept in it", "set it to Memory")
    limit = empty.at("sizeLimit")
    have, memory = quantity(limit.value), container.at("resources", "limits", "memory")
    store = quantity(group.at("rayStartParams", "object-store-memory").value)
    if store is None:
        group.at("rayStartParams", "object-store-memory").refuse(
            "must be given in bytes: Ray would take a third of the memory", "set submit.object_store_gb"
        )
    snapshots = sizes(config, config.submit).snapshot_bytes * HEADERS
    need = snapshots + (store or 0.0)
    if have is None or have < need:
        limit.refuse(
            f"{limit.value} is too little: {snapshots / 1e9:.1f} GB for snapshots in groups down to "
            f"cluster.min_workers={config.cluster.min_workers} and {(store or 0.0) / 1e9:.1f} GB for the object store",
            "raise submit.shm_gb, raise cluster.min_workers, or lower snapshot.slots",
        )
    if (quantity(memory.value) or 0.0) <= (have or 0.0):
        memory.refuse(
            f"{memory.value} leaves nothing beside the {limit.value} of /dev/shm, which count too",
            "raise submit.memory_gb_per_worker",
        )


def _drain(group: Reader, config: SubmitJobConfig) -> None:
    """A pod that is deleted tells Ray first, and is given the time that it said."""
    container, grace = _first_container(group), group.at("template", "spec", "terminationGracePeriodSeconds")
    hook = container.at("lifecycle", "preStop", "exec", "command")
    command = " ".join(str(word.value) for word in hook.items())
    deadline = re.search(r"--deadline-remaining-seconds[ =](\d+)", command)
    if "ray drain-node" not in command or deadline is None:
        hook.refuse("does not drain the node: KubeRay does not do it by itself", "render it again")
        return
    drain, later = int(deadline[1]), container.at("env").named("RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S")
    ends = drain + (quantity(later.at("value").value) or 0.0)
    if drain < 2 * MARGIN_S:
        hook.refuse(
            f"a deadline of {drain} s is too short: workers leave {MARGIN_S:g} s before it",
            f"set submit.drain_s={2 * MARGIN_S:.0f} or more",
        )
    given = grace.get(int)
    if (given if given is not None else KUBERNETES_GRACE_S) <= ends:
        grace.refuse(
            f"{KUBERNETES_GRACE_S if given is None else given} s end before the drain does, after {ends:g} s",
            f"set submit.grace_s={ends + 35:.0f} or more, or lower submit.drain_s={config.submit.drain_s}",
        )
