"""Rules for any pod of a job: no secrets in text, no root, and what the API server refuses beyond a schema. Pure."""

import re
from collections.abc import Iterator

from regrow.submit.manifest import Reader, quantity

SECRET_NAME = re.compile(r"TOKEN|PASSWORD|PASSWD|SECRET|CREDENTIAL|PRIVATE_KEY|ACCESS_KEY|API_KEY", re.IGNORECASE)
NOT_SECRET = ("RAY_AUTH_TOKEN_PATH",)  # where one lies
SECRET_TEXT = re.compile(
    r"\bAKIA[0-9A-Z]{16}\b|://[^/\s:@]*:[^/\s@]+@|-----BEGIN [A-Z ]*PRIVATE KEY|\bhf_[A-Za-z0-9]{30,}"
)
BY_REFERENCE = "put it into a Secret and name that: submit.env_secret"


def pod_rules(pod: Reader) -> None:
    """What is wrong with a pod's spec by itself."""
    _security(pod)
    _containers(pod)
    _volumes(pod)


def no_secrets(job: Reader) -> None:
    """No secret stands in a manifest: whoever may read the job could read it."""
    for node in _walk(job):
        if isinstance(node.value, str) and SECRET_TEXT.search(node.value):
            node.refuse("holds what looks like a secret", BY_REFERENCE)
        if isinstance(node.value, dict) and isinstance(node.value.get("name"), str) and "value" in node.value:
            name = node.value["name"]
            if SECRET_NAME.search(name) and name not in NOT_SECRET and node.value["value"] not in ("", None):
                node.at("value").refuse(f"{name} is given as text", BY_REFERENCE)
    options = job.at("spec", "rayClusterSpec", "gcsFaultToleranceOptions")
    for key in ("redisPassword", "redisUsername"):
        if options.at(key, "value").value:
            options.at(key, "value").refuse("is given as text", "name its Secret: submit.redis_secret=SECRET/KEY")
        reference = options.at(key, "valueFrom", "secretKeyRef")
        if reference.get(dict) is not None and not (reference.at("name").get(str) and reference.at("key").get(str)):
            reference.refuse("needs the Secret and its key", "set submit.redis_secret=SECRET/KEY")


def _walk(node: Reader) -> Iterator[Reader]:
    yield node
    if isinstance(node.value, dict):
        for _, below in node.entries():
            yield from _walk(below)
    elif isinstance(node.value, list):
        for below in node.items():
            yield from _walk(below)


def _security(pod: Reader) -> None:
    if pod.at("securityContext", "runAsNonRoot").get(bool) is not True:
        pod.at("securityContext", "runAsNonRoot").refuse("must be true", "set it to true")
    user = pod.at("securityContext", "runAsUser")
    if user.get(int) == 0:
        user.refuse("is root", "use the image's user, 1000")
    for key in ("hostNetwork", "hostPID", "hostIPC"):
        if pod.at(key).get(bool):
            pod.at(key).refuse("opens the host to the job", "leave it out")
    for container in pod.at("containers").items():
        context = container.at("securityContext")
        if context.at("allowPrivilegeEscalation").get(bool) is not False:
            context.at("allowPrivilegeEscalation").refuse("must be false", "set it to false")
        if context.at("privileged").get(bool):
            context.at("privileged").refuse("a privileged container is root on its host", "leave it out")


def _containers(pod: Reader) -> None:
    """What the API server refuses in pods, whose schema alone does not tell."""
    policy = pod.at("restartPolicy")
    if policy.get(str) != "Never":
        policy.refuse(f"must be Never, not {policy.value!r}: KubeRay makes a new pod instead", "set it to Never")
    for container in pod.at("containers").items():
        pull = container.at("imagePullPolicy")
        if pull.get(str) not in (None, "Always", "IfNotPresent", "Never"):
            pull.refuse(f"{pull.value!r} is no policy", "set submit.image_pull_policy=IfNotPresent, Always or Never")
        requests, limits = container.at("resources", "requests"), container.at("resources", "limits")
        for key, limit in limits.entries():
            amount, request = quantity(limit.value), requests.at(key)
            asked = quantity(request.value)
            if amount is None or amount <= 0:
                limit.refuse(f"{limit.value!r} is no positive quantity")
            elif request.value is not None and asked is None:
                request.refuse(f"{request.value!r} is no quantity")
            elif asked is not None and asked > amount:
                request.refuse(f"{request.value} is above its limit {limit.value}")
            elif key not in ("cpu", "memory") and asked is not None and asked != amount:
                request.refuse(f"{key} cannot be overcommitted: {request.value} is not {limit.value}")
        for key in ("cpu", "memory"):
            if limits.at(key).value is None:
                limits.at(key).refuse("is missing", "Ray sizes its node by it")


def _volumes(pod: Reader) -> None:
    names = [volume.at("name").get(str) for volume in pod.at("volumes").items()]
    for volume in pod.at("volumes").items():
        if names.count(volume.at("name").value) > 1:
            volume.at("name").refuse(f"{volume.at('name').value!r} names two volumes")
    for container in pod.at("containers").items():
        for mount in container.at("volumeMounts").items():
            if mount.at("name").get(str) not in names:
                mount.at("name").refuse(f"there is no volume {mount.at('name').value!r}")
            if not (mount.at("mountPath").get(str) or "").startswith("/"):
                mount.at("mountPath").refuse(f"{mount.at('mountPath').value!r} is no absolute path")
