"""A run's config.yaml, read back: its keys are words, and its floats numbers, in older files too."""

import re
from typing import Any

import yaml

FLOAT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+|-?Infinity|NaN", re.ASCII)  # beside what YAML 1.1 takes for one


class _Loader(yaml.SafeLoader):
    """Reads what was written before keys were quoted and mantissas had a dot, as it was meant."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        for key, _ in node.value:
            key.tag = "tag:yaml.org,2002:str"  # no, 2024
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(f"(?:{FLOAT.pattern})$"), list("-+0123456789IN"))


def read_yaml(data: bytes | str) -> Any:
    """What a config.yaml holds: plain dictionaries, lists and scalars. Raises yaml.YAMLError where it is damaged."""
    return yaml.load(data, _Loader)
