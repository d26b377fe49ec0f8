"""A job that Kubernetes would take and that could not run is refused in lines that name value and fix."""

import re

import pytest
import yaml
from jsonschema import Draft202012Validator

from regrow.submit.check import broken_rules
from regrow.submit.render import Code, render
from support.crd import CRD, NEEDS_CRD, rayjob_schema
from support.submission import CODE, compose, rendered

PLAIN = ("+cluster=h100x64", "+site=eks_p5", "run.name=rules")
REMOTE = (*PLAIN, "run.storage_path=s3://llama/runs")
WIDE = ("+cluster=h100x2048", "run.name=rules")  # parallel.tp=4
KUEUE = (*PLAIN, "submit.queue=kueue")
VOLCANO = (*PLAIN, "submit.queue=volcano")
REDIS = (*PLAIN, "submit.redis_secret=redis/password")

BROKEN: list[tuple[tuple[str, ...], str, str]] = [
    (PLAIN, "submit.name=" + "x" * 48, "submit.name='x{48}' must be 1 to 47 .*; set submit.name"),
    (PLAIN, "submit.name=8b", "from a letter on"),
    (PLAIN, "submit.name=llama_8b", "lower-case letters"),
    (PLAIN, "submit.image=''", "submit.image is empty; set it"),
    (PLAIN, "submit.image=host/regrow:latest", "does not say that it has Ray 2.60.0.* tag it 0123456789ab-ray2.60.0"),
    (PLAIN, "submit.image=host/regrow:0123456789ab-ray2.59.0", "does not say that it has Ray 2.60.0"),
    (PLAIN, "submit.image=host/regrow:ba9876543210-ray2.60.0", "holds commit 0123456789ab; build it from this"),
    (PLAIN, f"submit.image='host:5000/regrow@sha256:{'0' * 64}'", "does not say that it has Ray"),
    (PLAIN, "submit.image_pull_policy=Sometimes", "Sometimes must be IfNotPresent, Always, Never"),
    (PLAIN, "run.storage_path='s3://$(BUCKET)/x'", r"has \$\(\.\.\.\), which Kubernetes expands"),
    ((*PLAIN, "run.resume=false"), "submit.retries=3", "3 with run.resume=false: .* or submit.retries=0"),
    (KUEUE, "submit.queue_name=null", "submit.queue=kueue names no queue; set submit.queue_name"),
    (KUEUE, "submit.queue_name='a b'", "submit.queue_name='a b' is no value of a label"),
    (VOLCANO, "submit.queue_name=''", "submit.queue=volcano names no queue"),
    ((*VOLCANO, "submit.queue_name=q"), f"submit.priority_class={'p' * 64}", "priority_class='p{64}' is no value"),
    (PLAIN, "submit.cpus_per_node=60", "submit.cpus_per_node=60 is too few for 8 workers.*set submit.cpus_per_node="),
    (PLAIN, "data.stream_cpus=900", "and one of data.stream_cpus=900; set submit.cpus_per_node="),
    (WIDE, "submit.workers_per_node=2", "workers_per_node=2 puts 2 ranks .*parallel.tp=4, .*submit.workers_per_node=4"),
    (WIDE, "submit.workers_per_node=6", "puts 6 ranks into a pod, .* parallel.tp=4, .*set submit.workers_per_node=4"),
    (PLAIN, "submit.shm_gb=200", "shm_gb=200.0 is too little: .* cluster.min_workers=32 .* lower snapshot.slots"),
    (PLAIN, "snapshot.copies=8", "snapshot.copies=8 has 7 other nodes of 8; lower it, raise cluster.max_workers"),
    (REMOTE, "data.cache_gb=500", "cache_gb=500 .* submit.disk_gb=200: .*set submit.disk_gb=520 or data.cache_gb=180"),
    (REMOTE, "submit.disk_gb=30", "data.cache_gb=20 .* submit.disk_gb=30: .*set submit.disk_gb=40 or data.cache_gb=10"),
    (REMOTE, "submit.disk_gb=10", "data.cache_gb=20 .* submit.disk_gb=10: .*set submit.disk_gb=40$"),
    (PLAIN, "submit.grace_s=60", "submit.grace_s=60 ends before .* after 70 s; set submit.grace_s=105 or more"),
    (PLAIN, "submit.idle_timeout_s=60", "=60 must be above the .*; set submit.idle_timeout_s=1080"),
    (PLAIN, "+submit.env.RAY_REDIS_ADDRESS=redis:6379", "is refused by KubeRay's operator .* use submit.redis_address"),
    (PLAIN, "+submit.env.RAY_enable_autoscaler_v2=1", "use submit.autoscale"),
    (PLAIN, "+submit.env.AWS_SECRET_ACCESS_KEY=x", "AWS_SECRET_ACCESS_KEY is given as text; put it into a Secret"),
    (PLAIN, "+submit.env.AZURE_STORAGE_ACCOUNT_KEY=x", "submit.env.AZURE_STORAGE_ACCOUNT_KEY is given as text"),
    (PLAIN, "+submit.env.AZURE_STORAGE_KEY=x", "submit.env.AZURE_STORAGE_KEY is given as text"),
    (PLAIN, "+submit.env.B2_APPLICATION_KEY=x", "submit.env.B2_APPLICATION_KEY is given as text"),
    (PLAIN, "+submit.env.AZURE_STORAGE_CONNECTION_STRING=x", "AZURE_STORAGE_CONNECTION_STRING is given as text"),
    (PLAIN, "+submit.env.WHERE='AccountName=me;AccountKey=aB+/=='", "submit.env.WHERE holds what looks like a secret"),
    (PLAIN, "+submit.env.WHERE='SharedAccessSignature=sv&sig=a'", "submit.env.WHERE holds what looks like a secret"),
    (PLAIN, "+submit.env.WHO=ghp_" + "a1" * 18, "submit.env.WHO holds what looks like a secret"),
    (PLAIN, "+submit.env.RAY_AUTH_TOKEN=x", "submit.env.RAY_AUTH_TOKEN is given as text"),
    (PLAIN, "+submit.env.GITHUBTOKEN=x", "submit.env.GITHUBTOKEN is given as text"),
    (PLAIN, "+submit.env.HFTOKEN=x", "submit.env.HFTOKEN is given as text"),
    (PLAIN, "+submit.env.authToken=x", "submit.env.authToken is given as text"),
    (PLAIN, "+submit.env.accessTokenValue=x", "submit.env.accessTokenValue is given as text"),
    (PLAIN, "+submit.env.HF_TOKENS=x", "submit.env.HF_TOKENS is given as text"),
    (PLAIN, "+submit.env.HF_TOKEN_PATH=aBcDeF123", "submit.env.HF_TOKEN_PATH is given as text"),
    (PLAIN, "+submit.env.GOOGLE_APPLICATION_CREDENTIALS='{\"type\":1}'", "APPLICATION_CREDENTIALS is given as text"),
    (PLAIN, "+submit.env.WHO=AKIA" + "ABCDEFGHIJKLMNOP", "submit.env.WHO holds what looks like a secret"),
    (REDIS, "submit.redis_address=redis://me:word@redis:6379", "submit.redis_address holds what looks like a secret"),
    (PLAIN, "run.storage_path=s3://me:word@bucket/x", "an argument holds what looks like a secret"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "change", "says"), BROKEN, ids=[each[1][:60] for each in BROKEN])
def test_a_broken_rule_names_value_and_fix_in_one_line(arguments: tuple[str, ...], change: str, says: str) -> None:
    given = [*arguments, change]
    lines = broken_rules(compose(given), CODE, given)
    assert any(re.search(says, line) for line in lines), lines
    assert not any("\n" in line for line in lines)
    change_only = [line for line in lines if line not in broken_rules(compose(arguments), CODE, arguments)]
    assert len(change_only) <= 2


def test_no_fix_names_a_setting_that_does_not_exist() -> None:
    named = set()
    for arguments, change, _ in BROKEN:
        for line in broken_rules(compose([*arguments, change]), CODE, []):
            named |= set(re.findall(r"\b(submit|cluster|snapshot|train|run|data)\.([a-z_0-9]+)", line))
    config = compose(PLAIN)
    assert len(named) > 15
    for group, name in named:
        assert hasattr(getattr(config, group), name), f"{group}.{name}"


@pytest.mark.parametrize(
    "change",
    [
        f"submit.image='host:5000/regrow:{CODE.tag}@sha256:{'0' * 64}'",  # pinned beside its tag
        "+submit.env.RAY_AUTH_TOKEN_PATH=/mnt/token",
        "+submit.env.TOKENIZERS_PARALLELISM=false",
        "+submit.env.TOKENIZER_FILE=web.json",
        "+submit.env.AZURE_STORAGE_ACCOUNT_NAME=me",
        "+submit.env.NCCL_SOCKET_IFNAME=keyless",
        "+submit.env.SSH_KEY_FILE=/mnt/key",
        "+submit.env.HF_TOKEN_PATH=/mnt/token",
        "+submit.env.HF_HUB_DISABLE_IMPLICIT_TOKEN=1",
        "+submit.env.GOOGLE_APPLICATION_CREDENTIALS=/mnt/runs/key.json",
        "+submit.env.AWS_SHARED_CREDENTIALS_FILE=/mnt/runs/credentials",
        "+submit.env.AWS_WEB_IDENTITY_TOKEN_FILE=/var/run/secrets/eks.amazonaws.com/serviceaccount/token",
        "submit.idle_timeout_s=60",  # of no autoscaler
        "data.cache_gb=180",
    ],
)
def test_what_can_run_is_not_refused(change: str) -> None:
    arguments = [*REMOTE, "submit.autoscale=false", change]
    assert broken_rules(compose(arguments), CODE, arguments) == []


@pytest.mark.parametrize(
    ("where", "caches"),
    [
        (["run.storage_path=/mnt/runs", "submit.volume_claim=runs"], False),
        (["run.storage_path=/mnt/runs", "submit.volume_claim=runs", "+data.corpora.web=/mnt/runs/web"], False),
        (["run.storage_path=/mnt/runs", "submit.volume_claim=runs", "+data.corpora.web=s3://llama/web"], True),
        (["run.storage_path=s3://llama/runs"], True),
    ],
)
def test_room_for_a_cache_is_asked_for_where_a_corpus_is_remote(where: list[str], caches: bool) -> None:
    found = broken_rules(compose([*PLAIN, "submit.disk_gb=30", *where]), CODE, [])
    assert [line.partition("=")[0] for line in found] == ["data.cache_gb"] * caches


def test_a_checkout_with_changes_renders_with_a_tag_that_says_so() -> None:
    config, dirty = compose(PLAIN), Code("0123456789ab-dirty", CODE.ray_version)
    assert broken_rules(config, dirty, []) == []
    *_, manifest = render(config, dirty, ["cluster.address=auto"])
    assert manifest["spec"]["submitterPodTemplate"]["spec"]["containers"][0]["image"].endswith("-dirty-ray2.60.0")


@NEEDS_CRD
def test_the_schema_takes_what_a_real_api_server_took_and_no_unknown_field() -> None:
    schema = Draft202012Validator(rayjob_schema())
    example = yaml.safe_load((CRD.parent / "rayjob_h100x64.example.yaml").read_text())
    assert list(schema.iter_errors(example)) == []
    *_, manifest = rendered(PLAIN)[1]
    manifest["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["maxReplica"] = 8
    manifest["spec"]["backoffLimit"] = "3"
    assert len(list(schema.iter_errors(manifest))) == 2
