"""What KubeRay's operator refuses after the API server has accepted a RayJob (its controllers' validation, v1.7).

A refused job exists and never starts: better to hear of it here. Pure.
"""

import re

import yaml

from regrow.submit.manifest import Finding, Manifest, Reader

MAX_NAME = 47
AUTH_SINCE = (2, 52)  # Ray versions with token authentication
DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
LABEL_KEY = re.compile(r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
START_RESOURCES = ("num-cpus", "num-gpus", "memory", "resources")
MODES = ("K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode")


def operator_rules(manifest: Manifest) -> list[Finding]:
    """What the operator would refuse of a RayJob."""
    findings: list[Finding] = []
    job = Reader(manifest, "", findings)
    _metadata(job)
    _job(job)
    cluster = job.at("spec", "rayClusterSpec")
    if cluster.get(dict) is None:
        if not job.at("spec", "clusterSelector").get(dict):
            cluster.refuse("is missing", "a job needs a cluster: rayClusterSpec or clusterSelector")
        return findings
    _groups(cluster)
    _redis(job, cluster)
    _autoscaler(cluster)
    _auth(cluster)
    return findings


def _metadata(job: Reader) -> None:
    for key, expected in (("apiVersion", "ray.io/v1"), ("kind", "RayJob")):
        if job.at(key).get(str) != expected:
            job.at(key).refuse(f"must be {expected}, not {job.at(key).value!r}")
    name = job.at("metadata", "name")
    text = name.get(str) or ""
    if len(text) > MAX_NAME or not DNS_1035.fullmatch(text):
        name.refuse(
            f"{text!r} must be 1 to {MAX_NAME} lower-case letters, digits or '-', from a letter on",
            "set submit.name",
        )


def _job(job: Reader) -> None:
    spec = job.at("spec")
    shutdown = spec.at("shutdownAfterJobFinishes").get(bool)
    suspend, ttl = spec.at("suspend"), spec.at("ttlSecondsAfterFinished")
    if suspend.get(bool) and not shutdown:
        suspend.refuse("a suspended job must end its cluster", "set spec.shutdownAfterJobFinishes: true")
    if suspend.get(bool) and spec.at("clusterSelector").get(dict):
        suspend.refuse("a job on an existing cluster cannot be suspended", "leave out spec.clusterSelector")
    seconds = ttl.get(int) or 0
    if seconds < 0:
        ttl.refuse(f"{seconds} is negative", "set submit.keep_s to 0 or more")
    if seconds > 0 and not shutdown:
        ttl.refuse("a cluster that is not shut down has no time to live", "set spec.shutdownAfterJobFinishes: true")
    backoff = spec.at("backoffLimit")
    if (backoff.get(int) or 0) < 0:
        backoff.refuse(f"{backoff.value} is negative", "set submit.retries to 0 or more")
    for key, setting in (("activeDeadlineSeconds", "submit.deadline_s"), ("preRunningDeadlineSeconds", "null")):
        deadline = spec.at(key)
        if deadline.get(int) is not None and deadline.value <= 0:
            deadline.refuse(f"{deadline.value} must be positive", f"set {setting}, or leave it out")
    mode = spec.at("submissionMode")
    if mode.get(str) is not None and mode.value not in MODES:
        mode.refuse(f"must be one of {', '.join(MODES)}, not {mode.value!r}")
    if mode.value == "InteractiveMode" and (backoff.get(int) or 0) > 0:
        backoff.refuse("an interactive job is not retried", "leave out spec.submissionMode")
    if mode.value == "SidecarMode":
        for key in ("submitterPodTemplate", "submitterConfig"):
            if spec.at(key).get(dict) is not None:
                spec.at(key).refuse("is not for SidecarMode", "use K8sJobMode")
    _deletion(spec, shutdown)
    environment = spec.at("runtimeEnvYAML")
    try:
        if not isinstance(yaml.safe_load(environment.get(str) or "{}"), dict):
            environment.refuse("must be a YAML mapping")
    except yaml.YAMLError as error:
        environment.refuse(f"is no YAML ({str(error).splitlines()[0]})")


def _deletion(spec: Reader, shutdown: bool | None) -> None:
    strategy = spec.at("deletionStrategy")
    if strategy.get(dict) is None:
        return
    rules = strategy.at("deletionRules")
    success, failure = strategy.at("onSuccess"), strategy.at("onFailure")
    if rules.get(list):
        if shutdown:
            rules.refuse("excludes spec.shutdownAfterJobFinishes and its time to live", "leave one of them out")
        if success.value is not None or failure.value is not None:
            rules.refuse("excludes onSuccess and onFailure", "leave them out")
    elif success.value is None or failure.value is None:
        strategy.refuse("needs onSuccess and onFailure, or deletionRules")


def _groups(cluster: Reader) -> None:
    head, names = cluster.at("headGroupSpec"), set()
    _group(head, "the head")
    for group in cluster.at("workerGroupSpecs").items():
        name = group.at("groupName")
        _group(group, f"group {name.value!r}")
        text = name.get(str) or ""
        if not DNS_1035.fullmatch(text) or text == "headgroup":
            name.refuse(f"{text!r} must be a lower-case DNS label other than headgroup")
        if text in names:
            name.refuse(f"{text!r} names two groups")
        names.add(text)
        least, most, now = (group.at(key) for key in ("minReplicas", "maxReplicas", "replicas"))
        counts = {each.path: each.get(int) for each in (least, most, now)}
        for each in (least, most, now):
            if (counts[each.path] or 0) < 0:
                each.refuse(f"{each.value} is negative")
        low, high, start = counts.values()
        if low is not None and high is not None and low > high:
            least.refuse(f"{low} is above maxReplicas={high}", "lower cluster.min_workers")
        if start is not None and high is not None and start > high:
            now.refuse(f"{start} is above maxReplicas={high}")
        if start is not None and low is not None and start < low:
            now.refuse(f"{start} is below minReplicas={low}")
        hosts = group.at("numOfHosts")
        if hosts.get(int) is not None and hosts.value < 1:
            hosts.refuse(f"{hosts.value} must be at least 1")
        if group.at("suspend").get(bool):
            group.at("suspend").refuse("a group cannot be suspended beside the autoscaler", "leave it out")


def _group(group: Reader, what: str) -> None:
    containers = group.at("template", "spec", "containers")
    if not containers.get(list):
        containers.refuse(f"{what} needs at least one container")
    start, resources = group.at("rayStartParams"), group.at("resources")
    given = resources.get(dict)
    for key, value in start.entries():
        value.get(str)
        if key == "labels":
            value.refuse("is not taken here", f"use {group.path}.labels")
        if key in START_RESOURCES and given:
            value.refuse(f"resources are given twice, as {resources.path} too", "give them once")
    for key, value in group.at("labels").entries():
        if not LABEL_KEY.fullmatch(key):
            value.refuse(f"{key!r} is no key of a label")
        if not LABEL_VALUE.fullmatch(value.get(str) or ""):
            value.refuse(f"{value.value!r} is no value of a label")


def _redis(job: Reader, cluster: Reader) -> None:
    head = cluster.at("headGroupSpec")
    options = cluster.at("gcsFaultToleranceOptions")
    env = next((item.at("env") for item in head.at("template", "spec", "containers").items()), head.at("none"))
    given = {item.at("name").get(str): item for item in env.items()}
    annotations = job.at("metadata", "annotations")
    for name in ("RAY_REDIS_ADDRESS", "REDIS_PASSWORD", "REDIS_USERNAME"):
        if name in given:
            given[name].refuse(f"{name} is not taken from the environment", f"use {options.path}")
    for name in ("redis-password", "redis-username"):
        if head.at("rayStartParams", name).value:
            head.at("rayStartParams", name).refuse("is not taken here", f"use {options.path}")
    if options.get(dict) is not None:
        for name in ("ray.io/ft-enabled", "ray.io/external-storage-namespace"):
            if annotations.at(name).value:
                annotations.at(name).refuse(f"is set beside {options.path}", "leave it out")
        address = options.at("redisAddress")
        if options.at("backend").value in (None, "redis") and not address.get(str):
            address.refuse("is missing", "set submit.redis_address")


def _autoscaler(cluster: Reader) -> None:
    enabled = cluster.at("enableInTreeAutoscaling").get(bool)
    version = cluster.at("autoscalerOptions", "version")
    containers = cluster.at("headGroupSpec", "template", "spec", "containers")
    for item in containers.items():
        for variable in item.at("env").items():
            if variable.at("name").value == "RAY_enable_autoscaler_v2":
                fix = f"leave it out, and use {version.path}" if enabled else "set enableInTreeAutoscaling: true"
                variable.refuse("the autoscaler's version is not taken from the environment", fix)
    if not enabled or version.get(str) != "v2":
        return
    for group in (cluster.at("headGroupSpec"), *cluster.at("workerGroupSpecs").items()):
        policy = group.at("template", "spec", "restartPolicy")
        if policy.get(str) not in (None, "Never"):
            policy.refuse(f"must be Never with autoscaler v2, not {policy.value!r}", "set it to Never")


def _auth(cluster: Reader) -> None:
    if cluster.at("authOptions", "mode").get(str) != "token":
        return
    version = cluster.at("rayVersion")
    found = re.match(r"v?(\d+)\.(\d+)", version.get(str) or "")
    if found is None:
        version.refuse(f"{version.value!r} is no version, which token authentication needs")
    elif (int(found[1]), int(found[2])) < AUTH_SINCE:
        version.refuse(f"token authentication came with Ray 2.52, not {version.value}", "use a later Ray")
