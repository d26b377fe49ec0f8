"""KubeRay's schema of RayJobs as JSON schema, as strict as an API server that is asked to be strict."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

CRD = Path(__file__).parents[3] / "shared" / "kuberay" / "ray.io_rayjobs.v1.7.0.yaml"  # beside the checkout, or nowhere
NEEDS_CRD = pytest.mark.skipif(not CRD.exists(), reason=f"KubeRay's schemas are not here: {CRD.name}")

TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
METADATA = {  # the API server's own, and in no such schema
    "type": "object",
    "properties": {"name": {"type": "string"}, "namespace": {"type": "string"}, "labels": TEXTS, "annotations": TEXTS},
    "required": ["name"],
    "additionalProperties": False,
}


@cache
def openapi_schema() -> dict[str, Any]:
    """KubeRay's own, of version v1."""
    crd = yaml.load(CRD.read_bytes(), yaml.CSafeLoader)
    (schema,) = (each["schema"]["openAPIV3Schema"] for each in crd["spec"]["versions"] if each["name"] == "v1")
    return dict(schema)


@cache
def rayjob_schema() -> dict[str, Any]:
    """For jsonschema: fields that the schema does not name are refused, and so is null."""
    schema = strict(openapi_schema())
    schema["properties"] |= {"metadata": METADATA, "apiVersion": {"const": "ray.io/v1"}, "kind": {"const": "RayJob"}}
    return schema | {"required": ["apiVersion", "kind", "metadata", "spec"]}


def strict(node: dict[str, Any]) -> dict[str, Any]:
    """The same, with nothing allowed beside what is named."""
    kept = {
        key: value for key, value in node.items() if not key.startswith("x-") and key not in ("description", "format")
    }
    if node.get("x-kubernetes-int-or-string"):
        return {**kept, "type": ["integer", "string"]}
    if node.get("nullable"):
        kept["type"] = [node["type"], "null"]
    if "items" in node:
        kept["items"] = strict(node["items"])
    if "properties" in node:
        kept["properties"] = {name: strict(below) for name, below in node["properties"].items()}
    if isinstance(node.get("additionalProperties"), dict):
        kept["additionalProperties"] = strict(node["additionalProperties"])
    elif node.get("type") == "object" and not node.get("x-kubernetes-preserve-unknown-fields"):
        kept.setdefault("additionalProperties", False)
    return kept
