"""Strict validation as the API server does it."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from regrow.errors import ConfigError
from regrow.submit.crd import load_schema, validate
from support.submission import CRD, crd_schema

NEEDS_CRD = pytest.mark.skipif(not CRD.exists(), reason=f"KubeRay's schemas are not here: {CRD.name}")

SPEC: dict[str, Any] = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 3},
        "count": {"type": "integer", "format": "int32", "minimum": 0},
        "share": {"type": "number"},
        "on": {"type": "boolean"},
        "mode": {"type": "string", "enum": ["a", "b"]},
        "amount": {"x-kubernetes-int-or-string": True, "pattern": "^[0-9]+$"},
        "labels": {"type": "object", "additionalProperties": {"type": "string"}},
        "anything": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
        "maybe": {"type": "string", "nullable": True},
        "ports": {
            "type": "array",
            "minItems": 1,
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["port", "protocol"],
            "items": {
                "type": "object",
                "properties": {"port": {"type": "integer"}, "protocol": {"type": "string", "default": "TCP"}},
            },
        },
    },
}  # fmt: skip
SCHEMA = {"type": "object", "properties": {"apiVersion": {"type": "string"}, "kind": {"type": "string"}, "spec": SPEC}}


def check(spec: dict[str, Any], **more: Any) -> list[str]:
    manifest = {"apiVersion": "v1", "kind": "Thing", "metadata": {"name": "x"}, "spec": spec} | more
    return [str(finding) for finding in validate(manifest, SCHEMA)]


def test_what_the_schema_allows_passes() -> None:
    good = {
        "name": "abc",
        "count": 0,
        "share": 1,
        "on": False,
        "mode": "b",
        "amount": 3,
        "labels": {"any.key/at-all": "x"},
        "anything": {"goes": [1, {"x": None}]},
        "maybe": None,
        "ports": [{"port": 1}, {"port": 1, "protocol": "UDP"}],
    }
    assert check(good) == []
    assert check(good | {"amount": "31"}) == []


@pytest.mark.parametrize(
    ("spec", "line"),
    [
        ({}, "spec.name: is missing"),
        ({"name": ""}, "spec.name: '' is 0 characters long, which is not allowed"),
        ({"name": "abcd"}, "spec.name: 'abcd' is 4 characters long, which is not allowed"),
        ({"name": None}, "spec.name: must not be null"),
        ({"name": "a", "cuont": 1}, "spec.cuont: unknown field; did you mean 'count'?"),
        ({"name": "a", "count": "1"}, "spec.count: must be of type integer, not '1'"),
        ({"name": "a", "count": True}, "spec.count: must be of type integer, not True"),
        ({"name": "a", "count": 1.5}, "spec.count: must be of type integer, not 1.5"),
        ({"name": "a", "count": -1}, "spec.count: -1 is out of range"),
        ({"name": "a", "count": 2**31}, "spec.count: 2147483648 does not fit int32"),
        ({"name": "a", "share": True}, "spec.share: must be of type number, not True"),
        ({"name": "a", "on": "false"}, "spec.on: must be of type boolean, not 'false'"),
        ({"name": "a", "mode": "c"}, "spec.mode: must be one of a, b, not 'c'"),
        ({"name": "a", "amount": "3x"}, "spec.amount: '3x' does not match ^[0-9]+$"),
        ({"name": "a", "amount": [3]}, "spec.amount: must be a whole number or a string, not [3]"),
        ({"name": "a", "labels": {"x": 1}}, "spec.labels.x: must be of type string, not 1"),
        ({"name": "a", "labels": ["x"]}, "spec.labels: must be of type object, not ['x']"),
        ({"name": "a", "ports": []}, "spec.ports: needs at least 1 elements"),
        ({"name": "a", "ports": [{"port": 1}, {"port": 1, "protocol": "TCP"}]},
         "spec.ports[1]: repeats {'port': '1', 'protocol': 'TCP'}"),
        ({"name": "a", "ports": [{"prot": 1}]}, "spec.ports[0].prot: unknown field; did you mean 'port'?"),
    ],
)  # fmt: skip
def test_what_it_does_not_allow_is_named(spec: dict[str, Any], line: str) -> None:
    assert check(spec) == [line]


def test_metadata_is_checked_as_the_api_server_does() -> None:
    assert check({"name": "a"}, metadata={"name": "x", "label": {}}) == [
        "metadata.label: unknown field; did you mean 'labels'?"
    ]
    assert check({"name": "a"}, metadata={"labels": {"a": 1}}) == ["metadata.labels.a: must be of type string, not 1"]


@NEEDS_CRD
def test_a_manifest_that_a_real_api_server_accepted_passes() -> None:
    manifest = yaml.safe_load((CRD.parent / "rayjob_h100x64.example.yaml").read_text())
    assert [str(finding) for finding in validate(manifest, crd_schema())] == []


@pytest.mark.parametrize(
    "text",
    ["", "a: [", "spec: {names: {kind: RayJob}}", "spec: {names: {kind: RayCluster}, versions: []}", "- 1"],
)
def test_a_file_that_defines_no_rayjobs_ends_in_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "crd.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"crd\.yaml"):
        load_schema(tmp_path / "crd.yaml", kind="RayJob", version="v1")


def test_a_file_that_is_not_there_ends_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml"):
        load_schema(tmp_path / "none.yaml", kind="RayJob", version="v1")
