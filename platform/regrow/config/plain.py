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
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

from regrow.config.schema import ModelConfig, PretrainConfig
from regrow.errors import ConfigError

CONF_DIR = Path(__file__).parents[3] / "conf"
GROUPS = {"model": "debug", "data": "python_docs"}  # and what is chosen where nothing is said
GLOBAL, SELF = "_global_", "_self_"  # Hydra's: settings of all groups; where a file's own come among those it builds on
WORD = r"[A-Za-z_][A-Za-z0-9_./-]*"  # a key that YAML takes for one, but for these
NO_WORDS = ("y", "yes", "n", "no", "true", "false", "on", "off", "null")
UNPRINTABLE = r"[\x7f-\x9f\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]"  # what YAML refuses or takes for a line's end

Tree = dict[str, Any]


class Word(str):
    """A text of which YAML has not said what it is: the value of an argument."""


def pretrain_config(arguments: Sequence[str]) -> PretrainConfig:
    """The configuration of `jobs.pretrain` with these arguments. Raises ConfigError for what is no setting or value."""
    chosen = dict(GROUPS)
    files: list[Tree] = []
    settings: list[Tree] = []
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals:
            raise ConfigError(f"{argument!r} is no key=value")
        if key in GROUPS:
            chosen[key] = value
        elif key == "+cluster":
            if files:
                raise ConfigError(f"cluster is given twice: give it once, as {argument}")
            tree, choices = _compose("cluster", value, "cluster", [])
            files.append(tree)
            chosen |= {group: name for group, name in choices.items() if not _chooses(arguments, group)}
        else:
            settings.append(_tree(key.lstrip("+"), value))
    values: Tree = {}
    for tree in [*(_read(group, name) for group, name in chosen.items()), *files, *settings]:
        values = _merged(values, tree)
    return _build(PretrainConfig, values, "")


def _chooses(arguments: Sequence[str], group: str) -> bool:
    return any(each.startswith(f"{group}=") for each in arguments)


def _tree(key: str, value: str) -> Tree:
    """What an argument sets. Raises ConfigError for what is no setting or value."""
    tree: Any = _text(key, value)
    for name in reversed(key.split(".")):
        tree = {name: tree}
    _build(PretrainConfig, tree, "")
    return cast(Tree, tree)


def _text(key: str, value: str) -> str:
    """What an argument's value says: what is in quotes is a text, whatever it looks like, as Hydra reads it."""
    quote = value[:1]
    if quote not in ("'", '"'):
        return Word(value)
    found = re.fullmatch(rf"{quote}((?:\\.|[^\\{quote}])*){quote}", value, re.DOTALL)
    if found is None:
        raise ConfigError(f"{key}={value} has quotes that do not end, or more of them")
    return re.sub(rf"(\\+)(?={quote}|$)", lambda backslashes: "\\" * (len(backslashes[1]) // 2), found[1])


def read_model(name: str) -> ModelConfig:
    """A model of conf/model by its name. Raises ConfigError for one that there is not, or that is no model."""
    return _build(ModelConfig, _read("model", name).get("model", {}), "model.")


def models() -> list[str]:
    """Of conf/model, those that are sizes alone."""
    files = sorted((CONF_DIR / "model").glob("*.yaml"))
    return [file.stem for file in files if _package(file.read_text("utf-8")) is None]


def _read(group: str, name: str) -> Tree:
    """The settings of a model or of data. Raises ConfigError for one that chooses of other groups."""
    values, choices = _compose(group, name, group, [])
    if choices:
        raise ConfigError(f"conf/{group}/{name}.yaml: only a file of conf/cluster chooses a {' and a '.join(choices)}")
    return values


def _compose(group: str, name: str, package: str, read: list[str]) -> tuple[Tree, dict[str, str]]:
    """A file's settings over those of the files that it builds on, and what they choose of GROUPS, as Hydra has them.

    `package` is where its settings belong if it does not say it; `read` has the names of the files read before.
    """
    path = f"conf/{group}/{name}.yaml"
    if name in read:
        raise ConfigError(f"conf/{group}/{read[0]}.yaml builds on {path} twice")
    read.append(name)
    tree, package = _file(group, name, package)
    bases, own_choices = _defaults(path, tree.pop("defaults", []))
    own = tree if package == GLOBAL else {package: tree}
    try:
        _build(PretrainConfig, own, "")
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    values: Tree = {}
    choices: dict[str, str] = {}
    for base in bases:
        below, theirs = (own, {}) if base == SELF else _compose(group, base, package, read)
        values, choices = _merged(values, below), choices | theirs
    return values, choices | own_choices


def _defaults(path: str, entries: Any) -> tuple[list[str], dict[str, str]]:
    """Of a file's `defaults`: files of its group in their order, SELF among them, and choices of other groups.

    Raises ConfigError for what is neither.
    """
    if not isinstance(entries, list):
        raise ConfigError(f"{path}: defaults: {entries} is no list")
    bases: list[str] = []
    choices: dict[str, str] = {}
    for entry in entries:
        overrides = list(entry.items()) if isinstance(entry, dict) and len(entry) == 1 else []
        group, choice = overrides[0] if overrides else ("", None)
        group = "".join(re.findall(r"^override +/(\w+)$", group))
        if isinstance(entry, str) and re.fullmatch(r"\w[\w.-]*", entry) and not choices and entry not in bases:
            bases.append(entry)
        elif entry == SELF and SELF not in bases:
            bases.append(SELF)
        elif group in GROUPS and group not in choices and isinstance(choice, str):
            choices[group] = choice
        else:
            raise ConfigError(
                f"{path}: defaults: {entry} is not read here; each is a file of the same folder or _self_, after these "
                f"`override /GROUP: NAME` of {' or '.join(GROUPS)}, and all once"
            )
    return (bases if SELF in bases else [*bases, SELF]), choices


def _file(group: str, name: str, package: str) -> tuple[Tree, str]:
    """What a file holds, and the package that it belongs to: its own, or the one that is given."""
    path = CONF_DIR / group / f"{name}.yaml"
    if not path.exists():
        known = ", ".join(sorted(each.stem for each in (CONF_DIR / group).glob("*.yaml")))
        raise ConfigError(f"no {group} called {name!r}; available: {known}")
    try:
        text = path.read_text("utf-8")
        tree = _parsed(text)
    except ValueError as error:
        raise ConfigError(f"conf/{group}/{path.name}: {error}") from error
    package = _package(text) or package
    if package not in (GLOBAL, group):
        raise ConfigError(f"conf/{group}/{path.name}: @package {package} is not read here; {GLOBAL} or {group} is")
    return tree, package


def _package(text: str) -> str | None:
    """What the first line says of where a file's settings belong."""
    found = re.match(r"\s*#[ \t]*@package +(.*)", text)
    return found[1].strip() if found else None


def _parsed(text: str) -> Tree:
    """Raises ValueError for what is no YAML."""
    try:
        from regrow.config.conf_yaml import parse_yaml
    except ModuleNotFoundError:
        return _sizes(text)
    return parse_yaml(text)


def _sizes(text: str) -> Tree:
    """A file of a model's sizes, where there is no PyYAML. Raises ValueError for all but words and numbers."""
    tree: Tree = {}
    inner = tree
    for line in text.splitlines():
        content = re.sub(r"(^|\s)#.*", "", line).rstrip()
        found = re.fullmatch(r"( *)([a-z]\w*):(?: +([\w.]+))?", content)
        if content and found is None:
            raise ValueError(f"{content.strip()!r} needs PyYAML, which is not installed")
        if found is None:
            continue
        indent, key, word = found.groups()
        inner = inner if indent else tree
        if word is None:
            inner[key] = inner = {}
        else:
            inner[key] = Word(word)
    return tree


def _merged(below: Tree, above: Tree) -> Tree:
    inner = {
        key: _merged(below[key], value)
        for key, value in above.items()
        if isinstance(value, dict) and isinstance(below.get(key), dict)
    }
    return below | above | inner


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
    """A value of that type, of an argument or a file. Raises ConfigError, naming both."""
    is_word, origin = isinstance(value, Word), get_origin(hint)
    if isinstance(value, str) and ("${" in value or value == "???"):
        raise ConfigError(f"{key}={value} is for Hydra to fill in, which is not there; write what is meant")
    if value is None or (is_word and value.lower() == "null"):
        if types.NoneType in get_args(hint):
            return None
        advice = "; a text goes in quotes" if hint is str else ""
        raise ConfigError(f"{key}=null is no value: the setting is not Optional{advice}")
    if origin in (types.UnionType, Union):
        *others, hint = (each for each in get_args(hint) if each is not types.NoneType)
        if others and (type(value) is int or (is_word and re.fullmatch(r"[+-]?\d+", value))):  # of `int | str`
            hint = int
        origin = get_origin(hint)
    if dataclasses.is_dataclass(hint) and isinstance(value, dict):
        return _build(hint, value, key + ".")
    if origin is dict and isinstance(value, dict):
        return {name: _value(get_args(hint)[1], each, f"{key}.{name}") for name, each in value.items()}
    if origin is list and isinstance(value, list):
        return [_value(get_args(hint)[0], each, f"{key}[{number}]") for number, each in enumerate(value)]
    is_many = dataclasses.is_dataclass(hint) or origin is not None
    if is_word and is_many:
        raise ConfigError(f"{key}={value} cannot be given here; use jobs.pretrain, or a file below conf/")
    if is_many:
        raise ConfigError(f"{key}={value} is no {'list' if origin is list else 'mapping'}")
    try:
        return _scalar(hint, value)
    except (ValueError, OverflowError) as error:
        advice = f", one of {', '.join(hint.__members__)}" if issubclass(hint, Enum) else ""
        advice = "; write it in quotes" if hint is str and isinstance(value, bool | float) else advice
        raise ConfigError(f"{key}={value} is no {'text' if hint is str else hint.__name__}{advice}") from error


def _scalar(kind: Any, value: Any) -> Any:
    """As OmegaConf converts it, or less. Raises ValueError, or OverflowError for a whole number that no float holds."""
    if kind is bool and str(value).lower() in ("true", "false"):
        return str(value).lower() == "true"
    if issubclass(kind, Enum) and isinstance(value, str) and value in kind.__members__:
        return kind[value]
    if kind in (int, str, float) and (isinstance(value, str) or type(value) is int or type(value) is kind is float):
        return kind(value)
    raise ValueError(value)


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
