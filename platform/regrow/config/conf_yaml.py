"""The YAML of files below conf/, with what Hydra takes for words, numbers and truth values (OmegaConf 2.3)."""

import re
from typing import Any

import yaml

# beside what YAML 1.1 takes for one: an exponent without a sign, or without a dot before it
FLOAT = re.compile(r"[-+]?[0-9]+(?:_[0-9]+)*(?:\.[0-9_]*)?[eE][-+]?[0-9]+$")
TAG = "tag:yaml.org,2002:"


class _Loader(yaml.SafeLoader):
    """Takes dates for words, and each key once."""

    yaml_implicit_resolvers = {  # noqa: RUF012, as PyYAML has it
        first: [(tag, pattern) for tag, pattern in resolvers if tag != TAG + "timestamp"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names: set[str] = set()
        for key, _ in node.value:
            if key.tag == TAG + "merge":
                continue
            if key.tag != TAG + "str":
                raise _error(key, f"the key {key.value!r} is no word; write it in quotes")
            if key.value in names:
                raise _error(key, f"the key {key.value!r} is there twice")
            names.add(key.value)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(TAG + "float", FLOAT, list("-+0123456789"))


def _error(node: yaml.Node, problem: str) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


def parse_yaml(text: str) -> dict[str, Any]:
    """What a file sets: nested dictionaries, lists and scalars. Raises ValueError, in one line, for what is no YAML,
    and for what is no mapping.
    """
    try:
        tree = yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise ValueError(f"{line}{error.problem}") from error
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
    if not isinstance(tree, dict | None):
        raise ValueError(f"is no mapping of settings: {str(tree)[:40]}")
    return tree or {}
