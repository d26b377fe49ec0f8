"""Every rule finds what breaks it, says where in the manifest and what to do; 200 damaged manifests are all refused."""

import copy
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from regrow.config.schema import SubmitJobConfig
from regrow.submit.crd import validate
from regrow.submit.lint import lint
from regrow.submit.manifest import Finding, Manifest, join, quantity
from regrow.submit.render import Code, render
from support.submission import CODE, CRD, crd_schema, rendered

PLAIN = ("+cluster=h100x64", "+site=eks_p5", "run.name=lint")
REDIS = (*PLAIN, "submit.redis_address=redis://redis:6379", "submit.redis_secret=redis/password")
KUEUE = (*PLAIN, "submit.queue=kueue", "submit.queue_name=h100")
ELASTIC = (*KUEUE, "submit.kueue_elastic=true")
VOLCANO = (*PLAIN, "submit.queue=volcano", "submit.queue_name=h100")

CLUSTER = "spec.rayClusterSpec"
HEAD = f"{CLUSTER}.headGroupSpec"
HEAD_POD = f"{HEAD}.template.spec"
WORKERS = f"{CLUSTER}.workerGroupSpecs[0]"
POD = f"{WORKERS}.template.spec"
CONTAINER = f"{POD}.containers[0]"
LIMITS = f"{CONTAINER}.resources.limits"
SUBMITTER = "spec.submitterPodTemplate.spec"
DELETED = Ellipsis

Case = tuple[tuple[str, ...], str, Any, str]

# config, where to break the manifest, what to put there, what the finding there says; "PLACE: ..." where it is another
BROKEN: list[Case] = [
    # KubeRay's operator
    (PLAIN, "apiVersion", "ray.io/v1alpha1", "must be ray.io/v1"),
    (PLAIN, "kind", "RayCluster", "must be RayJob"),
    (PLAIN, "metadata.name", "x" * 48, "1 to 47"),
    (PLAIN, "metadata.name", "8b", "from a letter on"),
    (PLAIN, "metadata.name", "llama_8b", "lower-case"),
    (PLAIN, "metadata.name", DELETED, "1 to 47"),
    (KUEUE, "spec.shutdownAfterJobFinishes", False, "spec.suspend: a suspended job must end its cluster"),
    (PLAIN, "spec.shutdownAfterJobFinishes", False, "spec.ttlSecondsAfterFinished: a cluster that is not shut down"),
    (PLAIN, "spec.ttlSecondsAfterFinished", -1, "is negative"),
    (PLAIN, "spec.backoffLimit", -1, "is negative"),
    (PLAIN, "spec.activeDeadlineSeconds", 0, "must be positive"),
    (PLAIN, "spec.preRunningDeadlineSeconds", -5, "must be positive"),
    (PLAIN, "spec.submissionMode", "K8SJobMode", "must be one of K8sJobMode"),
    (PLAIN, "spec.submissionMode", "InteractiveMode", "spec.backoffLimit: an interactive job is not retried"),
    (PLAIN, "spec.submissionMode", "SidecarMode", "spec.submitterPodTemplate: is not for SidecarMode"),
    (KUEUE, "spec.clusterSelector", {"ray.io/cluster": "x"}, "spec.suspend: a job on an existing cluster"),
    (PLAIN, "spec.runtimeEnvYAML", "env_vars: {a: b", "is no YAML"),
    (PLAIN, "spec.runtimeEnvYAML", "just text", "must be a YAML mapping"),
    (PLAIN, "spec.deletionStrategy", {"deletionRules": [{}]}, "spec.deletionStrategy.deletionRules: excludes"),
    (PLAIN, "spec.deletionStrategy", {"deletionRules": [{}], "onSuccess": {}}, "excludes onSuccess"),
    (PLAIN, "spec.deletionStrategy", {"onSuccess": {"policy": "DeleteSelf"}}, "needs onSuccess and onFailure"),
    (PLAIN, CLUSTER, DELETED, "a job needs a cluster"),
    (PLAIN, f"{HEAD_POD}.containers", [], "needs at least one container"),
    (PLAIN, f"{POD}.containers", DELETED, "needs at least one container"),
    (PLAIN, f"{HEAD}.resources", {"cpu": "4"}, f"{HEAD}.rayStartParams.num-cpus: resources are given twice"),
    (PLAIN, f"{WORKERS}.rayStartParams.labels", "a=b", "is not taken here"),
    (PLAIN, f"{WORKERS}.labels", {"zone": "a b"}, f"{WORKERS}.labels.zone: 'a b' is no value"),
    (PLAIN, f"{WORKERS}.labels", {"-zone": "a"}, f"{WORKERS}.labels.-zone: '-zone' is no key"),
    (PLAIN, f"{WORKERS}.groupName", "headgroup", "other than headgroup"),
    (PLAIN, f"{WORKERS}.groupName", "GPU_workers", "lower-case DNS label"),
    (PLAIN, f"{WORKERS}.minReplicas", 9, "is above maxReplicas=8"),
    (PLAIN, f"{WORKERS}.replicas", 9, "is above maxReplicas=8"),
    (PLAIN, f"{WORKERS}.replicas", 3, "is below minReplicas=4"),
    (PLAIN, f"{WORKERS}.minReplicas", -1, "is negative"),
    (PLAIN, f"{WORKERS}.numOfHosts", 0, "must be at least 1"),
    (PLAIN, f"{WORKERS}.suspend", True, "cannot be suspended"),
    (PLAIN, f"{HEAD_POD}.containers[0].env[0].name", "RAY_REDIS_ADDRESS", "not taken from the environment"),
    (PLAIN, f"{HEAD_POD}.containers[0].env[0].name", "RAY_enable_autoscaler_v2", "not taken from the environment"),
    (PLAIN, f"{HEAD}.rayStartParams.redis-username", "me", "is not taken here"),
    (PLAIN, f"{HEAD}.rayStartParams.redis-password", "word", "is not taken here"),
    (REDIS, "metadata.annotations.ray\\.io/ft-enabled", "true", "is set beside"),
    (REDIS, "metadata.annotations.ray\\.io/external-storage-namespace", "x", "is set beside"),
    (REDIS, f"{CLUSTER}.gcsFaultToleranceOptions.redisAddress", DELETED, "is missing"),
    (PLAIN, f"{HEAD_POD}.restartPolicy", "Always", "must be Never with autoscaler v2"),
    (PLAIN, f"{POD}.restartPolicy", "OnFailure", "must be Never with autoscaler v2"),
    (PLAIN, f"{CLUSTER}.rayVersion", "2.51.0", "came with Ray 2.52"),
    (PLAIN, f"{CLUSTER}.rayVersion", "newest", "is no version"),
    # image, Ray and code
    (PLAIN, f"{CLUSTER}.rayVersion", "2.61.0", "is not the Ray 2.60.0"),
    (PLAIN, f"{CONTAINER}.image", "registry/regrow:latest", "does not say that it has Ray 2.60.0"),
    (PLAIN, f"{CONTAINER}.image", "registry/regrow:0123456789ab-ray2.59.0", "does not say that it has Ray 2.60.0"),
    (PLAIN, f"{CONTAINER}.image", "registry/regrow:ba9876543210-ray2.60.0", "holds commit 0123456789ab"),
    (PLAIN, f"{SUBMITTER}.containers[0].image", "other:0123456789ab-ray2.60.0", "use one image for all pods"),
    (PLAIN, f"{CONTAINER}.image", DELETED, "set submit.image"),
    (PLAIN, "metadata.annotations.regrow/git-sha", "ba9876543210", "render it again"),
    (PLAIN, "metadata.annotations.regrow/config-sha256", "0" * 64, "render it again"),
    # the command
    (PLAIN, "spec.entrypoint", "python -m jobs.pretrian cluster.address=auto", "must start with python -m jobs"),
    (PLAIN, "spec.entrypoint", "python -m jobs.pretrain +cluster=h100x64", "add cluster.address=auto"),
    (PLAIN, "spec.entrypoint", "python -m jobs.pretrain cluster.address=auto model={a,b}", "quote them"),
    (PLAIN, "spec.entrypoint", "python -m jobs.pretrain cluster.address=auto 'model", "cannot be read by a shell"),
    (PLAIN, "spec.entrypoint", "python -m jobs.pretrain cluster.address=auto 'run.name=$(NAME)'", "Kubernetes expands"),
    ((*PLAIN, "run.resume=false", "submit.retries=0"), "spec.backoffLimit", 3, "set run.resume=true"),
    # room
    (PLAIN, f"{WORKERS}.maxReplicas", 7, "no room for cluster.max_workers=64"),
    (PLAIN, f"{WORKERS}.minReplicas", 3, "too few for cluster.min_workers=32"),
    (PLAIN, f"{LIMITS}.nvidia\\.com/gpu", "4", f"{WORKERS}.maxReplicas: 8 nodes of 4"),
    (PLAIN, f"{LIMITS}.nvidia\\.com/gpu", DELETED, "leaves room for no worker"),
    (PLAIN, f"{LIMITS}.cpu", "60", "set submit.cpus_per_node="),
    (PLAIN, f"{CLUSTER}.workerGroupSpecs", [], "has no group of workers"),
    # memory
    (PLAIN, f"{POD}.volumes[0].emptyDir.sizeLimit", "200Gi", "raise submit.shm_gb"),
    (PLAIN, f"{POD}.volumes[0].emptyDir.sizeLimit", "plenty", "raise submit.shm_gb"),
    (PLAIN, f"{POD}.volumes[0].emptyDir.medium", DELETED, "must be Memory"),
    (PLAIN, f"{CONTAINER}.volumeMounts[0].mountPath", "/shm", f"{CONTAINER}.volumeMounts: does not mount /dev/shm"),
    (PLAIN, f"{WORKERS}.rayStartParams.object-store-memory", DELETED, "set submit.object_store_gb"),
    (PLAIN, f"{WORKERS}.rayStartParams.object-store-memory", "400000000000", f"{POD}.volumes[0].emptyDir.sizeLimit: "),
    (PLAIN, f"{LIMITS}.memory", "256Gi", "leaves nothing beside"),
    # drain and idle nodes
    (PLAIN, f"{POD}.terminationGracePeriodSeconds", 60, "end before the drain does"),
    (PLAIN, f"{POD}.terminationGracePeriodSeconds", DELETED, "end before the drain does"),
    (PLAIN, f"{CONTAINER}.lifecycle", DELETED, "does not drain the node"),
    (PLAIN, f"{CONTAINER}.lifecycle.preStop.exec.command[2]", "sleep 60", "does not drain the node"),
    ((*PLAIN, "submit.drain_s=30"), f"{CONTAINER}.lifecycle.preStop.exec.command[2]",
     "ray drain-node --deadline-remaining-seconds 5", "is too short"),
    (PLAIN, f"{CLUSTER}.autoscalerOptions.idleTimeoutSeconds", 60, "set submit.idle_timeout_s=1080"),
    (PLAIN, f"{CLUSTER}.autoscalerOptions", DELETED, "set submit.idle_timeout_s=1080"),
    (PLAIN, f"{CLUSTER}.autoscalerOptions.version", "v1", "must be v2"),
    # safety
    (PLAIN, f"{HEAD}.rayStartParams.num-cpus", "4", "the head does no work"),
    (PLAIN, f"{HEAD}.rayStartParams.num-gpus", DELETED, "the head does no work"),
    (PLAIN, f"{CLUSTER}.authOptions", DELETED, "whoever reaches an open dashboard"),
    (PLAIN, f"{CLUSTER}.authOptions.mode", "disabled", "whoever reaches an open dashboard"),
    (PLAIN, f"{CONTAINER}.env[0]", {"name": "AWS_SECRET_ACCESS_KEY", "value": "x"}, "put it into a Secret"),
    (PLAIN, f"{HEAD_POD}.containers[0].env[0]", {"name": "RAY_AUTH_TOKEN", "value": "x"}, "put it into a Secret"),
    (PLAIN, f"{CONTAINER}.env[0].value", "AKIA" + "ABCDEFGHIJKLMNOP", "looks like a secret"),
    (REDIS, f"{CLUSTER}.gcsFaultToleranceOptions.redisAddress", "redis://me:word@redis:6379", "looks like a secret"),
    (REDIS, f"{CLUSTER}.gcsFaultToleranceOptions.redisPassword", {"value": "word"}, "name its Secret"),
    (REDIS, f"{CLUSTER}.gcsFaultToleranceOptions.redisPassword.valueFrom.secretKeyRef.key", "", "Secret and its key"),
    (PLAIN, f"{POD}.securityContext", DELETED, "must be true"),
    (PLAIN, f"{HEAD_POD}.securityContext.runAsUser", 0, "is root"),
    (PLAIN, f"{SUBMITTER}.securityContext.runAsNonRoot", False, "must be true"),
    (PLAIN, f"{POD}.hostNetwork", True, "opens the host"),
    (PLAIN, f"{CONTAINER}.securityContext.privileged", True, "root on its host"),
    (PLAIN, f"{CONTAINER}.securityContext.allowPrivilegeEscalation", DELETED, "must be false"),
    # pods
    (PLAIN, f"{CONTAINER}.imagePullPolicy", "Sometimes", "is no policy"),
    (PLAIN, f"{CONTAINER}.resources.requests.nvidia\\.com/gpu", "4", "cannot be overcommitted"),
    (PLAIN, f"{CONTAINER}.resources.requests.memory", "5Ti", "is above its limit"),
    (PLAIN, f"{CONTAINER}.resources.requests.cpu", "many", "is no quantity"),
    (PLAIN, f"{HEAD_POD}.containers[0].resources.limits.memory", DELETED, "is missing"),
    (PLAIN, f"{LIMITS}.cpu", "-1", "is no positive quantity"),
    (PLAIN, f"{CONTAINER}.volumeMounts[1].mountPath", "tmp", "is no absolute path"),
    (PLAIN, f"{CONTAINER}.volumeMounts[1].name", "temp", "there is no volume 'temp'"),
    (PLAIN, f"{POD}.volumes[1].name", "shm", "names two volumes"),
    # queues
    (KUEUE, "metadata.labels.kueue\\.x-k8s\\.io/queue-name", "", "set submit.queue_name"),
    (KUEUE, "metadata.labels.kueue\\.x-k8s\\.io/queue-name", DELETED, "set submit.queue_name"),
    (KUEUE, f"{CLUSTER}.enableInTreeAutoscaling", True, "set submit.kueue_elastic=true"),
    (ELASTIC, "metadata.annotations.kueue\\.x-k8s\\.io/elastic-job", DELETED, f"{CLUSTER}.enableInTreeAutoscaling: "),
    (KUEUE, "spec.suspend", DELETED, "until Kueue admits the job"),
    (PLAIN, "spec.suspend", True, "nobody would resume"),
    (PLAIN, "metadata.labels.volcano\\.sh/queue-name", "h100", "names a queue, but submit.queue=none"),
    (VOLCANO, "metadata.labels.ray\\.io/scheduler-name", "default", "must be volcano"),
    (PLAIN, "metadata.labels.regrow/run", "a b", "is no value of a label"),
]  # fmt: skip


def steps(path: str) -> list[str | int]:
    """A path's keys and numbers; a dot that belongs to a key has a backslash."""
    found: list[str | int] = []
    for part in re.split(r"(?<!\\)\.", path):
        key, *numbers = re.split(r"\[(\d+)\]", part.replace("\\.", "."))
        found += [key, *(int(number) for number in numbers if number)]
    return found


def change(manifest: Manifest, path: str, value: Any) -> Manifest:
    """A copy with something else at this place."""
    changed = copy.deepcopy(manifest)
    *parents, last = steps(path)
    node: Any = changed
    for step in parents:
        node = node.setdefault(step, {}) if isinstance(node, dict) else node[step]
    if value is DELETED:
        del node[last]
    else:
        node[last] = value
    return changed


def findings_of(manifest: Manifest, config: SubmitJobConfig) -> list[Finding]:
    return lint([manifest], config, CODE)


def expected(case: Case) -> tuple[str, str]:
    """Where a case's finding has to be, and what it has to say."""
    _, path, _, says = case
    place, colon, text = says.partition(": ")
    elsewhere = colon and re.fullmatch(r"(spec|metadata)\.\S+", place)
    return (place, text) if elsewhere else (path.replace("\\.", "."), says)


def below(finding: Finding, place: str) -> bool:
    """Whether it is at this place, or at what lies below."""
    return finding.path == place or finding.path.startswith((f"{place}.", f"{place}["))


def names(finding: Finding, place: str) -> bool:
    """Whether it is at this place, at what would lie below, or at what the place is a part of."""
    return below(finding, place) or place.startswith((f"{finding.path}.", f"{finding.path}["))


@pytest.mark.parametrize("case", BROKEN, ids=[f"{case[1]}={case[2]!r}"[-90:] for case in BROKEN])
def test_a_broken_rule_is_found_where_it_is_broken(case: Case) -> None:
    arguments, path, value, _ = case
    config, (manifest,) = rendered(arguments)
    found = findings_of(change(manifest, path, value), config)
    place, says = expected(case)
    assert any(names(finding, place) and says in str(finding) for finding in found), [str(each) for each in found]


@pytest.mark.parametrize("arguments", [PLAIN, REDIS, KUEUE, ELASTIC, VOLCANO])
def test_what_is_not_broken_is_not_found(arguments: tuple[str, ...]) -> None:
    config, (manifest,) = rendered(arguments)
    assert findings_of(manifest, config) == []


def test_every_finding_has_a_path_and_most_a_fix() -> None:
    found = []
    for arguments, path, value, _ in BROKEN:
        config, (manifest,) = rendered(arguments)
        found += findings_of(change(manifest, path, value), config)
    assert all(finding.path for finding in found)
    assert sum(bool(finding.fix) for finding in found) > len(found) // 2


def test_no_fix_names_a_setting_that_does_not_exist() -> None:
    settings = set()
    for arguments, path, value, _ in BROKEN:
        config, (manifest,) = rendered(arguments)
        for finding in findings_of(change(manifest, path, value), config):
            settings |= set(re.findall(r"\b(submit|cluster|snapshot|train|run|data)\.([a-z_0-9]+)", str(finding)))
    config, _ = rendered(PLAIN)
    assert len(settings) > 15
    for group, name in settings:
        assert hasattr(getattr(config, group), name), f"{group}.{name}"


# Below these, keys are the user's own: a changed one is another name, not a mistake
FREE = re.compile(r"(labels|annotations|rayStartParams|nodeSelector|limits|requests|matchLabels|spec\.metadata)$")


def fields_of(node: Any, path: str = "", *, free: bool = False) -> Iterator[tuple[str, Any, bool]]:
    """Every field of a manifest: its path, its value, and whether its key is free."""
    if isinstance(node, dict):
        below = bool(FREE.search(path))
        for key, value in node.items():
            where = join(path, key.replace(".", "\\."))
            yield where, value, below
            yield from fields_of(value, where, free=below)
    elif isinstance(node, list):
        for number, value in enumerate(node):
            yield f"{path}[{number}]", value, True
            yield from fields_of(value, f"{path}[{number}]")


def typo(text: str, rng: random.Random) -> str:
    """As fingers do: a letter lost, doubled, swapped with the next or of the wrong case."""
    while True:
        at = rng.randrange(len(text))
        kinds: list[Callable[[], str]] = [
            lambda: text[:at] + text[at + 1 :],  # noqa: B023
            lambda: text[:at] + text[at] + text[at:],  # noqa: B023
            lambda: text[:at] + text[at : at + 2][::-1] + text[at + 2 :],  # noqa: B023
            lambda: text[:at] + text[at].swapcase() + text[at + 1 :],  # noqa: B023
        ]
        changed = rng.choice(kinds)()
        if changed and changed != text:
            return changed


def misspell(manifest: Manifest, path: str, rng: random.Random) -> tuple[Manifest, str]:
    """A key with a typo; the path that it has then."""
    changed = copy.deepcopy(manifest)
    *parents, last = steps(path)
    node: Any = changed
    for step in parents:
        node = node[step]
    wrong = typo(str(last), rng)
    while wrong in node:
        wrong = typo(str(last), rng)
    node[wrong] = node.pop(last)
    return changed, path[: len(path) - len(str(last).replace(".", "\\."))] + wrong


WRONG: dict[type, list[Any]] = {
    str: [7, True, ["text"], {"text": "text"}, None],
    int: ["seven", "7", True, 7.5, [7], None],
    bool: ["yes", "true", 1, [True], None],
    dict: ["text", 7, ["text"], True],
    list: ["text", 7, {"text": "text"}, True],
}
QUANTITY = re.compile(r"(sizeLimit|limits\.[^.]*|requests\.[^.]*)$")  # a whole number is one too


def mutations(count: int) -> Iterator[tuple[str, SubmitJobConfig, Manifest, str]]:
    """Damaged manifests: kind of damage, config, manifest, and the place that a refusal has to name."""
    rng = random.Random(20261122)
    sources = [rendered(arguments) for arguments in (PLAIN, REDIS, KUEUE, VOLCANO)]
    for number in range(count):
        config, (manifest,) = rng.choice(sources)
        fields = list(fields_of(manifest))
        if number % 5 < 2:
            path, _, _ = rng.choice([field for field in fields if not field[2]])
            damaged, place = misspell(manifest, path, rng)
            yield f"{number}: typo {place}", config, damaged, place
        elif number % 5 < 4:
            path, value, _ = rng.choice(fields)
            wrong = rng.choice(WRONG[type(value)])
            if QUANTITY.search(path.replace("\\.", "")) and isinstance(wrong, int) and not isinstance(wrong, bool):
                wrong = "seven"
            yield f"{number}: type {path}={wrong!r}", config, change(manifest, path, wrong), path
        else:
            case = rng.choice(BROKEN)
            arguments, path, value, _ = case
            config, (manifest,) = rendered(arguments)
            yield f"{number}: rule {path}={value!r}", config, change(manifest, path, value), expected(case)[0]


@pytest.mark.skipif(not CRD.exists(), reason=f"KubeRay's schemas are not here: {CRD.name}")
def test_200_damaged_manifests_are_all_refused_and_the_place_is_named() -> None:
    schema = crd_schema()
    escaped, elsewhere, seen = [], [], set()
    for label, config, manifest, path in mutations(200):
        found = findings_of(manifest, config) + validate(manifest, schema)
        place = path.replace("\\.", ".")
        if not found:
            escaped.append(label)
        elif not any(names(finding, place) if ": rule" in label else below(finding, place) for finding in found):
            elsewhere.append((label, [str(finding) for finding in found][:3]))
        seen.add(label.split(": ")[1])
    assert escaped == []
    assert elsewhere == []
    assert len(seen) > 150  # not the same damage again and again


def test_groups_of_one_name_are_found() -> None:
    config, (manifest,) = rendered(PLAIN)
    twice = copy.deepcopy(manifest)
    groups = twice["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    groups.append(copy.deepcopy(groups[0]))
    (finding,) = findings_of(twice, config)
    assert str(finding) == f"{CLUSTER}.workerGroupSpecs[1].groupName: 'workers' names two groups"


def test_an_image_may_be_pinned_by_its_digest_beside_its_tag() -> None:
    arguments = [*PLAIN, f"submit.image='host:5000/regrow:{CODE.tag}@sha256:{'0' * 64}'"]
    config, (manifest,) = rendered(arguments)
    assert findings_of(manifest, config) == []
    config, (manifest,) = rendered([*PLAIN, f"submit.image='host:5000/regrow@sha256:{'0' * 64}'"])
    assert {finding.path.rpartition(".")[2] for finding in findings_of(manifest, config)} == {"image"}


def test_a_checkout_with_changes_renders_with_a_tag_that_says_so() -> None:
    config, _ = rendered(PLAIN)
    dirty = Code("0123456789ab-dirty", CODE.ray_version)
    (manifest,) = render(config, dirty, ["cluster.address=auto"])
    assert lint([manifest], config, dirty) == []
    assert manifest["spec"]["submitterPodTemplate"]["spec"]["containers"][0]["image"].endswith("-dirty-ray2.60.0")


def test_rules_of_ours_find_wrong_types_by_themselves_in_what_they_read() -> None:
    config, (manifest,) = rendered(PLAIN)
    for path, wrong in (
        (f"{WORKERS}.maxReplicas", "eight"),
        (f"{WORKERS}.minReplicas", True),
        (f"{POD}.containers", {"name": "ray-worker"}),
        ("spec.backoffLimit", "3"),
        ("spec.suspend", "true"),
        (f"{CLUSTER}.workerGroupSpecs", "workers"),
        ("metadata.labels", ["a"]),
    ):
        found = findings_of(change(manifest, path, wrong), config)
        assert any(finding.path == path and "must be" in finding.problem for finding in found), path


@pytest.mark.parametrize(
    ("text", "value"),
    [("8", 8), ("500m", 0.5), ("1.5Gi", 1.5 * 2**30), ("200G", 2e11), (8, 8), ("much", None), ("", None), (None, None)],
)
def test_quantities(text: str | int | None, value: float | None) -> None:
    assert quantity(text) == value
