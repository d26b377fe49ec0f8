"""docs/configuration.md, from the schema and from conf/.

Every setting's help is the comment on its line in schema.py, and every file's the first comment in it, so that there is
one place to say what it means. Reads source text; imports neither hydra nor omegaconf.
"""

import ast
import io
import itertools
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "configuration.md"
PRETRAIN = "PretrainConfig"  # its groups are everybody's; classes that inherit from it, <Name>JobConfig, add to them
INTRODUCTION = """\
# Configuration

Written by `GOLDEN=write python -m pytest tests/unit/test_reference.py` from `platform/regrow/config/schema.py` and
`conf/`; without GOLDEN that test fails when it is behind them. `python -m jobs.pretrain --help` shows the same with
the values that your arguments give.

A setting is changed by `GROUP.NAME=VALUE` on the command line (`train.steps=500`), a file of a group chosen by
`GROUP=FILE` (`model=8b`), or with a plus where there is no default (`+cluster=h100x64`). Entries of a mapping are added
with a plus: `+data.corpora.web=/data/web`. `null` is no value. Later arguments win. Rules that cross settings are
checked before anything starts, and a mistake is one line that names the fix. What may change when a run goes on is
[decision 4](decisions/0004-what-may-change-when-a-run-resumes.md).
"""


@dataclass(frozen=True)
class Setting:
    name: str
    kind: str
    default: str
    help: str


@dataclass(frozen=True)
class Group:
    """A dataclass of the schema, or an enumeration, whose settings are its members."""

    name: str
    base: str
    help: str
    settings: tuple[Setting, ...]


def read_schema(source: str) -> dict[str, Group]:
    """The classes of schema.py by name. Raises ValueError for a setting or a group without help."""
    comments = _comments(source)
    groups = {}
    for node in ast.parse(source).body:
        if not isinstance(node, ast.ClassDef):
            continue
        base = ast.unparse(node.bases[0]) if node.bases else ""
        settings = tuple(_settings(node, comments, needs_help=base != "StrEnum"))
        text = " ".join((ast.get_docstring(node) or "").split())
        if not text and base != "StrEnum":
            raise ValueError(f"{node.name} has no docstring")
        groups[node.name] = Group(node.name, base, text, settings)
    return groups


def render(groups: dict[str, Group], conf: Path) -> str:
    """The whole page."""
    parts, shown = [INTRODUCTION], set()
    for job in [groups[PRETRAIN], *(group for group in groups.values() if group.base == PRETRAIN)]:
        own = [each for each in job.settings if each.kind in groups]
        command = job.name.removesuffix("Config").removesuffix("Job").lower()
        beside = "" if job.name == PRETRAIN else ", beside those of `jobs.pretrain`"
        parts.append(f"## Of `jobs.{command}`{beside}\n")
        for setting in own:
            parts += _section(f"`{setting.name}`", setting.name, groups[setting.kind], groups, conf)
            shown.add(setting.kind)
            parts += _nested(setting.kind, groups, shown, conf)
    enums = [group for group in groups.values() if group.base == "StrEnum"]
    parts.append("## Values\n\nWhat a setting of one of these types may be.\n")
    parts += [_values(group) for group in enums]
    sites = list(_files(conf / "site"))
    if sites:
        parts.append("## Sites\n\nWhat a cluster's submissions have in common, chosen with `+site=NAME`.\n")
        parts.append(_table(["file", "what"], sites))
    return "\n".join(part.rstrip() + "\n" for part in parts)


def _section(title: str, path: str, group: Group, groups: dict[str, Group], conf: Path) -> list[str]:
    rows = [
        [f"`{s.name}`", _kind(s.kind, groups), f"`{s.default}`" if s.default else "", s.help] for s in group.settings
    ]
    parts = [f"### {title}\n\n{_escape(group.help)}\n", _table(["setting", "type", "default", "what"], rows)]
    files = list(_files(conf / path))
    if files:
        parts.append(_table([f"`{path}=`", "what"], files))
    return parts


def _nested(kind: str, groups: dict[str, Group], shown: set[str], conf: Path) -> Iterator[str]:
    """The dataclasses that are values of a group's settings."""
    for setting in groups[kind].settings:
        for name, group in groups.items():
            if name in setting.kind and name not in shown and group.base != "StrEnum":
                shown.add(name)
                path = f"{groups[kind].name.removesuffix('Config').lower()}.{setting.name}"
                yield from _section(f"`{name}`, of `{path}`", path, group, groups, conf)


def _values(group: Group) -> str:
    help_ = f"{_escape(group.help)} " if group.help else ""
    said = [f"`{s.default}`" + (f" ({_escape(s.help)})" if s.help else "") for s in group.settings]
    return f"**{group.name}.** {help_}{', '.join(said)}.\n"


def _files(folder: Path) -> Iterator[list[str]]:
    """The choices of a group, each with the comment that it begins with."""
    for path in sorted(folder.glob("*.yaml")):
        lines = itertools.takewhile(lambda line: line.startswith("# "), path.read_text().splitlines())
        yield [f"`{path.stem}`", " ".join(line[2:].strip() for line in lines if not line.startswith("# @package"))]


def _settings(node: ast.ClassDef, comments: dict[int, str], *, needs_help: bool) -> Iterator[Setting]:
    for item in node.body:
        if isinstance(item, ast.Assign):  # of an enumeration
            assert isinstance(item.targets[0], ast.Name)
            yield Setting(item.targets[0].id, "", str(ast.literal_eval(item.value)), comments.get(item.lineno, ""))
        elif isinstance(item, ast.AnnAssign):
            assert isinstance(item.target, ast.Name)
            kind, text = ast.unparse(item.annotation), comments.get(item.end_lineno or item.lineno, "")
            if needs_help and not text and not kind.endswith("Config"):
                raise ValueError(f"{node.name}.{item.target.id} has no comment that says what it is")
            yield Setting(item.target.id, kind, _default(item.value), text)


def _default(value: ast.expr | None) -> str:
    """As YAML would have it."""
    if value is None:
        return ""
    if isinstance(value, ast.Attribute):  # of an enumeration
        return value.attr
    if isinstance(value, ast.Call):  # field(default_factory=...)
        made = value.keywords[0].value
        if isinstance(made, ast.Lambda):
            return ast.unparse(made.body)
        return {"list": "[]", "dict": "{}"}.get(ast.unparse(made), "")
    text = ast.unparse(value)
    plain = {"None": "null", "True": "true", "False": "false"}.get(text)
    return plain or (
        ast.literal_eval(value) if isinstance(value, ast.Constant) and isinstance(value.value, str) else text
    )


def _comments(source: str) -> dict[int, str]:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {each.start[0]: each.string.lstrip("# ") for each in tokens if each.type == tokenize.COMMENT}


def _kind(kind: str, groups: dict[str, Group]) -> str:
    """A type in words, as far as YAML knows it."""
    words = {"str": "text", "int": "whole number", "float": "number", "bool": "true or false"}
    parts = [part.strip() for part in kind.split(" | ")]
    said = [words.get(part, part) for part in parts if part != "None"]
    for name, word in words.items():
        said = [each.replace(f"[{name}", f"[{word}").replace(f", {name}]", f", {word}]") for each in said]
    said = [each.replace("dict[", "mapping[") for each in said]
    return ", ".join(said + (["null"] if "None" in parts else []))


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *([_escape(cell) for cell in row] for row in rows)]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;") if "`" not in text else text.replace("|", "\\|")
