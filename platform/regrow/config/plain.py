"""A configuration from `key=value` arguments and conf/, without Hydra: for machines and jobs that have none of it.

What it takes is a part of Hydra's grammar: `model=NAME`, `data=NAME`, `+cluster=NAME` and settings of the schema, one
value each. Mappings and lists are for `jobs.pretrain`, or a file below conf/.
"""

import dataclasses
import difflib
import json
import math
import re
import types
from collections.abc import Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from regrow.config.schema import ModelConfig, PretrainConfig
from regrow.errors import ConfigError

CONF_DIR = Path(__file__).parents[3] / "conf"
GROUPS = {"model": "debug", "data": "python_docs"}  # and what is chosen where nothing is said
GLOBAL = "# @package _global_"
WORD = r"[A-Za-z_][A-Za-z0-9_./-]*"  # a key that YAML takes for one, but for these
NO_WORDS = ("y", "yes", "n", "no", "true", "false", "on", "off", "null")
UNPRINTABLE = r"[\x7f-\x9f\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]"  # what YAML refuses or takes for a line's end

Tree = dict[str, Any]


def pretrain_config(arguments: Sequence[str]) -> PretrainConfig:
    """The configuration of `jobs.pretrain` with these arguments. Raises ConfigError for what is no setting or value."""
    chosen, files, settings = dict(GROUPS), [], []
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals:
            raise ConfigError(f"{argument!r} is no key=value")
        if key in GROUPS:
            chosen[key] = value
        elif key == "+cluster":
            overridden, trees = _cluster(value)
            chosen |= {group: name for group, name in overridden.items() if not _chooses(arguments, group)}
            files += trees
        else:
            settings.append((key.lstrip("+"), value))
    values: Tree = {}
    for tree in [*(_read(group, name) for group, name in chosen.items()), *files]:
        _merge(values, tree)
    for key, value in settings:
        _set(values, key, value)
    return _build(PretrainConfig, values, "")


def _chooses(arguments: Sequence[str], group: str) -> bool:
    return any(each.startswith(f"{group}=") for each in arguments)


def read_model(name: str) -> ModelConfig:
    """A model of conf/model by its name. Raises ConfigError for one that there is not."""
    return _build(ModelConfig, _read("model", name)["model"], "model.")


def models() -> list[str]:
    """Of conf/model, those that are sizes alone."""
    files = sorted((CONF_DIR / "model").glob("*.yaml"))
    return [file.stem for file in files if GLOBAL not in file.read_text()]


def parse_yaml(text: str) -> Tree:
    """The YAML that conf/ uses for settings: maps nested by indentation, of words, numbers and lists of words."""
    root: Tree = {}
    stack: list[tuple[int, Tree]] = [(-1, root)]
    last: tuple[Tree, str] = (root, "")
    for line in text.splitlines():
        content = re.sub(r"(^|\s)#.*", "", line).rstrip()
        if not content.strip():
            continue
        indent, content = len(content) - len(content.lstrip()), content.strip()
        if content.startswith("- "):
            parent, key = last
            parent[key] = [*(parent[key] or []), content[2:].strip()]
            continue
        key, _, value = content.partition(":")
        while stack[-1][0] >= indent:
            stack.pop()
        parent = stack[-1][1]
        last = (parent, key)
        if value.strip():
            parent[key] = value.strip().strip("'\"") or value.strip()
        else:
            parent[key] = {}
            stack.append((indent, parent[key]))
    return root


def _cluster(name: str) -> tuple[dict[str, str], list[Tree]]:
    """The groups that a cluster's file chooses, and its settings."""
    tree = _file("cluster", name)
    overridden = {}
    for each in tree.pop("defaults", None) or []:
        if each.startswith("override /"):
            group, _, choice = each.removeprefix("override /").partition(":")
            overridden[group.strip()] = choice.strip()
    return overridden, [tree]


def _read(group: str, name: str) -> Tree:
    """The settings of a choice of a group, those of the choices that it builds on below them."""
    tree = _file(group, name)
    below: Tree = {}
    for each in tree.pop("defaults", None) or []:
        if each != "_self_":
            _merge(below, _read(group, each))
    _merge(below, tree)
    return below


def _file(group: str, name: str) -> Tree:
    path = CONF_DIR / group / f"{name}.yaml"
    if not path.exists():
        known = ", ".join(sorted(each.stem for each in (CONF_DIR / group).glob("*.yaml")))
        raise ConfigError(f"no {group} called {name!r}; available: {known}")
    text = path.read_text()
    tree = parse_yaml(text)
    if GLOBAL in text:
        return tree
    defaults = tree.pop("defaults", None)
    return {group: tree} | ({"defaults": defaults} if defaults else {})


def _merge(into: Tree, tree: Tree) -> None:
    for key, value in tree.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def _set(values: Tree, key: str, value: str) -> None:
    *groups, last = key.split(".")
    for group in groups:
        inner = values.setdefault(group, {})
        values = inner if isinstance(inner, dict) else {}
    values[last] = value


def _build(schema: Any, values: Tree, prefix: str) -> Any:
    """An instance of a dataclass of the schema. Raises ConfigError, naming the key."""
    hints = get_type_hints(schema)
    known = {each.name for each in dataclasses.fields(schema)}
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(prefix + key, list(_keys(PretrainConfig)), n=1, cutoff=0.6)
            raise ConfigError(f"unknown setting {prefix + key!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    return schema(**{key: _value(hints[key], value, prefix + key) for key, value in values.items()})


def _value(hint: Any, value: Any, key: str) -> Any:
    if get_origin(hint) in (types.UnionType, Union):
        if value == "null":
            return None
        *others, hint = (each for each in get_args(hint) if each is not types.NoneType)
        if others and re.fullmatch(r"[+-]?\d+", str(value)):  # of `int | str`
            hint = int
    if dataclasses.is_dataclass(hint) and isinstance(value, dict):
        return _build(hint, value, key + ".")
    if get_origin(hint) is dict and isinstance(value, dict):
        return {name: _value(get_args(hint)[1], each, f"{key}.{name}") for name, each in value.items()}
    if dataclasses.is_dataclass(hint) or get_origin(hint) is not None or isinstance(value, (dict, list)):
        raise ConfigError(f"{key}={value} cannot be given here; use jobs.pretrain, or a file below conf/")
    try:
        return _scalar(hint, value)
    except ValueError as error:
        allowed = f", one of {', '.join(hint.__members__)}" if issubclass(hint, Enum) else ""
        raise ConfigError(f"{key}={value} is no {hint.__name__}{allowed}") from error


def _scalar(kind: Any, text: str) -> Any:
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise ValueError(text)
        return text.lower() == "true"
    if issubclass(kind, Enum):
        if text not in kind.__members__:
            raise ValueError(text)
        return kind[text]
    return kind(text)


def _keys(schema: Any, prefix: str = "") -> Iterator[str]:
    for each in dataclasses.fields(schema):
        yield prefix + each.name
        kind = get_type_hints(schema)[each.name]
        if dataclasses.is_dataclass(kind):
            yield from _keys(kind, f"{prefix}{each.name}.")


def to_yaml(config: PretrainConfig) -> str:
    """The resolved configuration as YAML, keys in the schema's order, enumerations by their names.

    Readers of YAML 1.1 and of 1.2 read the same in it.
    """
    return "".join(_lines(dataclasses.asdict(config), ""))


def _lines(tree: Tree, indent: str) -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield f"{indent}{_key(key)}:\n"
            yield from _lines(value, indent + "  ")
        else:
            yield f"{indent}{_key(key)}: {_flow(value)}\n"


def _key(key: str) -> str:
    """A key as YAML 1.1 reads it back: quoted where it would take it for something else than a word.

    >>> [_key(key) for key in ("lr", "no", "2024", "a: b")]
    ['lr', '"no"', '"2024"', '"a: b"']
    """
    return key if re.fullmatch(WORD, key) and key.lower() not in NO_WORDS else _flow(key)


def _flow(value: Any) -> str:
    """A value on one line: JSON, but where YAML 1.1 would read that as something else.

    >>> _flow([5e-05, 1e16, float("inf"), {"no": None}])
    '[5.0e-05, 1.0e+16, .inf, {"no": null}]'
    """
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_flow(key)}: {_flow(each)}" for key, each in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_flow, value)) + "]"
    if isinstance(value, Enum):
        return json.dumps(value.name)
    if isinstance(value, float):
        if not math.isfinite(value):
            return re.sub("(inf|nan)", r".\1", repr(value))
        return re.sub(r"^(-?\d+)e", r"\1.0e", repr(value))
    return re.sub(UNPRINTABLE, lambda each: f"\\u{ord(each[0]):04x}", json.dumps(value, ensure_ascii=False))
