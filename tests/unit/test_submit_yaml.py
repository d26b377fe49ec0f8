"""What is rendered is what kubectl reads, and the stand-in reads and owns as Kubernetes does."""

import json
import random
import shutil
import subprocess
from copy import deepcopy
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from regrow.submit.pods import binary_quantity, decimal_quantity
from regrow.submit.render import to_yaml
from support import field_ownership as ownership
from support.crd import NEEDS_CRD, openapi_schema
from support.kubectl_yaml import documents, scalar
from support.stand_in_kubectl import canonical
from support.submission import rendered

# the first ten are those that a real kubectl read as something else
LISTED = ["y", "Y", "n", "N", "08", "0o17", "0O7", "0X1f", "0B1", "+.5"]
LISTED += [".5", "12e4", "1_000", "1:30", "2026-01-01", "~", "", "null", "=", "<<", ".inf", "-.INF", ".nan", "0x", "on"]
LISTED += ["Off", "TRUE", "0123456789ab", " a", "a ", "a: b", "a #b", "---", "...", "\n---\n", "é", "2.60.0", "{a: b}"]
LETTERS = "yYnN0123456789+-._eExXoObBaAfFtruTRUlL~ :#'\"\\\n\t\r=<>{}[],&*!|%@`?\u00e9\u2028\u0085\ufeff\U0001f600\x07"


def strings() -> list[str]:
    drawn = random.Random(7)
    return LISTED + ["".join(drawn.choices(LETTERS, k=drawn.randint(0, 9))) for _ in range(1000)]


def config_map(texts: list[str]) -> dict[str, Any]:
    data = {f"k{number}": text for number, text in enumerate(texts)}
    keys = dict.fromkeys(texts, "k")
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "x", "annotations": data},
        "data": data | keys,
    }


def test_1000_strings_come_out_of_kubectls_decoder_and_of_one_for_yaml_1_1_as_they_went_in() -> None:
    manifest = config_map(strings())
    text = to_yaml([manifest])
    assert documents(text) == [manifest]
    assert list(yaml.safe_load_all(text)) == [manifest]
    assert documents(json.dumps(manifest)) == [manifest]


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not on PATH")
def test_1000_strings_come_out_of_kubectl_itself() -> None:
    manifest = config_map(strings())
    del manifest["data"][""]  # which a ConfigMap's keys cannot be
    command = ["kubectl", "label", "--local", "--filename=-", "--output=json", "a=b"]
    done = subprocess.run(command, input=to_yaml([manifest]), capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["data"] == manifest["data"]
    assert found["metadata"]["annotations"] == manifest["metadata"]["annotations"]


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not on PATH")
def test_bare_scalars_are_to_the_stand_in_what_they_are_to_kubectl() -> None:
    drawn = random.Random(3)
    texts = {"".join(drawn.choices("yYnN0123456789+.-_eExXoObBaAfFtrue:", k=drawn.randint(1, 6))) for _ in range(3000)}
    texts = {text for text in texts if text[0] not in "-:" and not text.endswith(":")} | {"-1", "-.5", "-0x1f", "-08"}
    texts |= set(LISTED[:17])
    ordered = sorted(texts)
    lines = "".join(f"  k{number}: {text}\n" for number, text in enumerate(ordered))
    document = f"apiVersion: ray.io/v1\nkind: RayJob\nmetadata: {{name: x}}\nspec:\n{lines}"
    command = ["kubectl", "label", "--local", "--filename=-", "--output=json", "a=b"]
    done = subprocess.run(command, input=document, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)["spec"]
    assert {text: found.get(f"k{number}") for number, text in enumerate(ordered)} == {
        text: scalar(text) for text in ordered
    }


UNITS = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "m": 1e-3}


def quantity(text: str) -> float:
    digits = text.rstrip("kKMGTim")
    return float(digits) * UNITS[text[len(digits) :]]


@pytest.mark.parametrize("amount", [1, 999, 1000, 17_500, 16_000, 10**6, 1024 * 10**3, 3 * 10**15])
def test_amounts_are_written_as_kuberay_would_write_them(amount: int) -> None:
    text = decimal_quantity(amount)
    assert canonical(text) == text
    assert quantity(text) == pytest.approx(amount / 1000)
    text = binary_quantity(amount << 20)
    assert canonical(text) == text
    assert quantity(text) == amount << 20


def test_every_amount_that_is_rendered_is_one_that_kuberay_leaves_as_it_is() -> None:
    for arguments in (["+cluster=h100x64"], ["+cluster=h100x512", "+site=eks_p5", "submit.disk_gb=2000"], []):
        cluster = rendered(arguments)[1][-1]["spec"]["rayClusterSpec"]
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
            for container in group["template"]["spec"]["containers"]:
                for amounts in container["resources"].values():
                    assert {key: canonical(text) for key, text in amounts.items()} == amounts
            for volume in group["template"]["spec"]["volumes"]:
                text = volume.get("emptyDir", {}).get("sizeLimit", "1")
                assert canonical(text) == text


@NEEDS_CRD
def test_the_stand_ins_lists_are_merged_as_kuberays_schema_says() -> None:
    schema = openapi_schema()
    seen = set()

    def compare(value: Any, node: Any, name: str) -> None:
        if isinstance(value, dict):
            atomic = node.get("x-kubernetes-map-type") == "atomic"
            if value and name:
                assert (name in ownership.ATOMIC) == atomic, name
            for key, below in value.items():
                deeper = node.get("properties", {}).get(key, node.get("additionalProperties"))
                if not atomic and isinstance(deeper, dict):
                    compare(below, deeper, key)
        elif isinstance(value, list):
            seen.add(name)
            keys = tuple(node.get("x-kubernetes-list-map-keys", ()))
            assert ownership.LIST_KEYS.get(name, ()) == keys, name
            if keys:
                for item in value:
                    compare(item, node["items"], "")

    more = ["+submit.node_selector={a: b}", "submit.env_secret=s", "submit.image_pull_secret=p"]
    *_, job = rendered(["+cluster=h100x64", "run.storage_path=/mnt/x", "submit.volume_claim=c", *more])[1]
    compare(job["spec"], schema["properties"]["spec"], "spec")
    assert {"containers", "env", "volumes", "volumeMounts", "ports", "workerGroupSpecs"} <= seen


OBJECT = {"metadata": {"name": "x"}, "spec": {"a": 1, "groups": [{"n": 1}], "containers": [{"name": "h", "cpu": "1"}]}}


def test_a_field_that_another_has_changed_conflicts_until_it_is_forced() -> None:
    live, owners = ownership.apply(None, OBJECT, {}, "us", force=False)
    changed = deepcopy(live)
    changed["spec"]["groups"][0]["m"] = {}
    changed["spec"]["b"] = 2
    owners = ownership.update(live, changed, owners, "operator")
    with pytest.raises(ownership.ConflictError) as caught:
        ownership.apply(changed, OBJECT, owners, "us", force=False)
    assert {ownership.written(path): who for path, who in caught.value.conflicts.items()} == {
        ".spec.groups": "operator"
    }
    forced, owners = ownership.apply(changed, OBJECT, owners, "us", force=True)
    assert forced["spec"] == OBJECT["spec"] | {"b": 2}
    assert ("spec", "groups") in owners["us"]
    assert owners["operator"] == [("spec", "b")]


@given(st.sampled_from(["a", "groups", "containers"]))
def test_a_field_that_is_no_longer_applied_goes_unless_others_own_it(name: str) -> None:
    live, owners = ownership.apply(None, OBJECT, {}, "us", force=False)
    less = deepcopy(OBJECT)
    del less["spec"][name]  # type: ignore[attr-defined]
    without, left = ownership.apply(live, less, owners, "us", force=False)
    assert not without["spec"].get(name)
    assert all(name not in path for path in left["us"])
    both = ownership.update(live, live, owners | {"them": [("spec", "a")]}, "nobody")
    kept, _ = ownership.apply(live, less, both, "us", force=False)
    assert bool(kept["spec"].get(name)) is (name == "a")
