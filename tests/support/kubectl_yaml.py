"""YAML as kubectl reads it: sigs.k8s.io/yaml, which decodes by go-yaml v2 (YAML 1.1 with rules of its own) into JSON.

Differences to PyYAML that matter: y and n are booleans, 08 is the number 8, 0o17, 0x1F and 0b1 are numbers in either
case, 12e4 and +.5 too, 1:30 is text, and keys are text. Source: go-yaml v2's resolve.go.
"""

import json
import math
import re
from typing import Any

import yaml

Json = Any

_WORDS = {
    **dict.fromkeys(["y", "Y", "yes", "Yes", "YES", "on", "On", "ON", "true", "True", "TRUE"], True),
    **dict.fromkeys(["n", "N", "no", "No", "NO", "off", "Off", "OFF", "false", "False", "FALSE"], False),
    **dict.fromkeys(["", "~", "null", "Null", "NULL"], None),
    **dict.fromkeys([".nan", ".NaN", ".NAN"], math.nan),
    **dict.fromkeys([".inf", ".Inf", ".INF", "+.inf", "+.Inf", "+.INF"], math.inf),
    **dict.fromkeys(["-.inf", "-.Inf", "-.INF"], -math.inf),
}
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_BASES = ((re.compile(r"[-+]?0[xX][0-9a-fA-F]+"), 16), (re.compile(r"[-+]?0[bB][01]+"), 2))
_OCTAL = re.compile(r"[-+]?0[oO]?[0-7]+")
_DECIMAL = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_TIME = re.compile(r"\d{4}-\d{1,2}-\d{1,2}([Tt ]\s*\d{1,2}:\d{1,2}:\d{1,2}.*)?")


def documents(text: str) -> list[Json]:
    """The documents of a stream, as JSON would hold them. Raises ValueError for what JSON does not have."""
    return [json.loads(json.dumps(each, allow_nan=False)) for each in yaml.load_all(text, _Loader) if each is not None]


def scalar(text: str) -> Json:
    """What a bare scalar is.

    >>> [scalar(each) for each in ("y", "08", "0o17", "12e4", "1:30", "v1.2")]
    [True, 8.0, 15, 120000.0, '1:30', 'v1.2']
    """
    if text in _WORDS:
        return _WORDS[text]
    if text[0] not in "+-.0123456789":
        return text
    plain = text.replace("_", "") if text[0] != "." else text
    for pattern, base in _BASES:
        if pattern.fullmatch(plain):
            return int(plain, base)
    if _DECIMAL.fullmatch(plain):
        return int(plain)
    if _OCTAL.fullmatch(plain):
        return int(re.sub(r"[oO]", "", plain), 8)
    if _FLOAT.fullmatch(plain) and not math.isinf(float(plain)):
        return float(plain)
    return text


class _Loader(yaml.SafeLoader):
    """Of text and mappings alone; what a bare scalar is, `scalar` says."""

    def construct_text(self, node: yaml.ScalarNode) -> Json:
        return node.value if node.style in ("'", '"', "|", ">") else scalar(node.value)

    def construct_keys(self, node: yaml.MappingNode) -> Json:
        return {str(key.value): self.construct_object(value, deep=True) for key, value in node.value}


_Loader.yaml_implicit_resolvers = {}
_Loader.add_constructor("tag:yaml.org,2002:str", _Loader.construct_text)
_Loader.add_constructor("tag:yaml.org,2002:map", _Loader.construct_keys)
