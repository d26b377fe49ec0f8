"""Strict validation of a manifest against a CustomResourceDefinition, as an API server does it when asked to be strict.

The schemas are the structural subset of OpenAPI 3 that Kubernetes has; CEL rules (x-kubernetes-validations) are not
evaluated. What a schema does not name is refused, and null, which an API server would drop. `metadata` is the API
server's own and in no such schema: here it has what people write into it.
"""

import difflib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from regrow.errors import ConfigError
from regrow.submit.manifest import Finding, Manifest, join

Schema = dict[str, Any]

STRINGS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
OBJECT_META: Schema = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "namespace": {"type": "string"},
        "generateName": {"type": "string"},
        "labels": STRINGS,
        "annotations": STRINGS,
        "finalizers": {"type": "array", "items": {"type": "string"}},
    },
}
TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
}
BITS = {"int32": 31, "int64": 63}


def load_schema(path: Path, *, kind: str, version: str) -> Schema:
    """The schema of one version of a kind from the YAML of its CustomResourceDefinition. Raises ConfigError."""
    try:
        crd = yaml.load(path.read_bytes(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        spec = crd["spec"]
        if spec["names"]["kind"] != kind:
            raise ConfigError(f"{path} defines {spec['names']['kind']}, not {kind}")
        schemas = {each["name"]: each["schema"]["openAPIV3Schema"] for each in spec["versions"]}
        return dict(schemas[version])
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} holds no CustomResourceDefinition of {kind} {version} ({error!r})") from error


def validate(manifest: Manifest, schema: Schema) -> list[Finding]:
    """Everything about the manifest that the schema does not allow."""
    whole = {
        **schema,
        "properties": schema["properties"] | {"metadata": OBJECT_META},
        "required": ["apiVersion", "kind", "metadata", *schema.get("required", [])],
    }
    return list(_check(manifest, whole, ""))


def _check(value: Any, schema: Schema, path: str) -> Iterator[Finding]:
    if value is None:
        if not schema.get("nullable"):
            yield Finding(path, "must not be null")
        return
    if schema.get("x-kubernetes-int-or-string"):
        if not isinstance(value, int | str) or isinstance(value, bool):
            yield Finding(path, f"must be a whole number or a string, not {value!r}")
        elif isinstance(value, str):
            yield from _string(value, schema, path)
        return
    kind = schema.get("type")
    if kind is None:
        return
    fits = isinstance(value, TYPES[kind]) and not (kind in ("integer", "number") and isinstance(value, bool))
    if not fits:
        yield Finding(path, f"must be of type {kind}, not {value!r}")
    elif kind == "object":
        yield from _object(value, schema, path)
    elif kind == "array":
        yield from _array(value, schema, path)
    elif kind == "string":
        yield from _string(value, schema, path)
    elif kind in ("integer", "number"):
        yield from _number(value, schema, path)


def _object(value: dict[Any, Any], schema: Schema, path: str) -> Iterator[Finding]:
    properties, others = schema.get("properties", {}), schema.get("additionalProperties")
    for key, item in value.items():
        where = join(path, str(key))
        if not isinstance(key, str):
            yield Finding(where, f"the key {key!r} must be a string")
        elif key in properties:
            yield from _check(item, properties[key], where)
        elif isinstance(others, dict):
            yield from _check(item, others, where)
        elif not (others or schema.get("x-kubernetes-preserve-unknown-fields")):
            yield Finding(where, "unknown field", _nearest(key, properties))
    for key in schema.get("required", []):
        if key not in value:
            yield Finding(join(path, key), "is missing")


def _array(value: list[Any], schema: Schema, path: str) -> Iterator[Finding]:
    if len(value) < schema.get("minItems", 0):
        yield Finding(path, f"needs at least {schema['minItems']} elements")
    keys, seen = schema.get("x-kubernetes-list-map-keys"), set()
    for number, item in enumerate(value):
        where = f"{path}[{number}]"
        yield from _check(item, schema.get("items", {}), where)
        if schema.get("x-kubernetes-list-type") == "map" and isinstance(item, dict):
            defaults = schema.get("items", {}).get("properties", {})
            identity = tuple(str(item.get(key, defaults.get(key, {}).get("default"))) for key in keys or [])
            if identity in seen:
                yield Finding(where, f"repeats {dict(zip(keys or [], identity, strict=True))}")
            seen.add(identity)


def _string(value: str, schema: Schema, path: str) -> Iterator[Finding]:
    if "enum" in schema and value not in schema["enum"]:
        yield Finding(path, f"must be one of {', '.join(schema['enum'])}, not {value!r}")
    if "pattern" in schema and re.search(schema["pattern"], value) is None:
        yield Finding(path, f"{value!r} does not match {schema['pattern']}")
    if not schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value)):
        yield Finding(path, f"{value!r} is {len(value)} characters long, which is not allowed")


def _number(value: float, schema: Schema, path: str) -> Iterator[Finding]:
    bits = BITS.get(schema.get("format", ""))
    if bits and not -(2**bits) <= value < 2**bits:
        yield Finding(path, f"{value} does not fit {schema['format']}")
    if value < schema.get("minimum", value) or value > schema.get("maximum", value):
        yield Finding(path, f"{value} is out of range")


def _nearest(key: str, properties: Schema) -> str:
    nearest = difflib.get_close_matches(key, properties, n=1, cutoff=0.6)
    return f"did you mean {nearest[0]!r}?" if nearest else ""
