"""The bridge to Hydra: registers the schema, turns a composed config into dataclasses, and back into YAML.

The only module of `regrow` that imports hydra or omegaconf.
"""

import difflib
import errno
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import asdict, fields, is_dataclass
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

import hydra
import yaml
from hydra._internal.hydra import Hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, StringNode, ValidationError
from omegaconf.errors import OmegaConfBaseException

from regrow.config.run_yaml import read_yaml
from regrow.config.schema import DrillJobConfig, PlanJobConfig, PretrainConfig, SimulateJobConfig, SubmitJobConfig
from regrow.deadline import leaving
from regrow.errors import ConfigError, RegrowError, first_line
from regrow.program import output
from regrow.storage import Storage, StorageUnreachable

STARTED_AT = time.time()  # of the program, but for the interpreter
CONF_DIR = Path(__file__).parents[3] / "conf"

BELOW_NULL = "Unexpected type for root"  # what omegaconf asserts of a key below a structured node that is null
NO_NAME = "Config group override must be a string"  # what hydra says of data=null
ALWAYS = ("model", "data")  # groups of which one file is chosen by default
# of what a user names, or fills
PLACE_ERRORS = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EDQUOT)
CHOICES = (*ALWAYS, "cluster")  # groups of which a job's arguments choose a file
SCHEMAS: dict[type[PretrainConfig], str] = {  # and the names that files of conf/ begin with
    PretrainConfig: "pretrain_schema",
    DrillJobConfig: "drill_schema",
    SubmitJobConfig: "submit_schema",
    PlanJobConfig: "plan_schema",
    SimulateJobConfig: "simulate_schema",
}
NOT_ALL_HAVE = {  # groups of files and settings, and which jobs have them
    "drill": "drill belongs to jobs.drill",
    "plan": "plan belongs to jobs.plan and jobs.simulate",
    "simulate": "simulate belongs to jobs.simulate",
    "site": "site belongs to jobs.submit",
    "submit": "submit, which files of site set, belongs to jobs.submit",
}

Config = TypeVar("Config", bound=PretrainConfig)
_given: list[str] = []
_files: dict[str, str] = {}


def run_job(
    job: Callable[[Config], None],
    *,
    name: str,
    schema: type[Config] = PretrainConfig,  # type: ignore[assignment]
    takes_several: bool = False,
) -> None:
    """Run `job` as a command line program with Hydra's flags, on the config of `conf/<name>.yaml` and the arguments.

    With `takes_several` on each of those that Hydra's `-m` makes, one after another; else that is a mistake.
    A user's mistake, in the arguments or anywhere in the job, ends the process with one line on stderr and status 1.
    """
    os.environ["HYDRA_FULL_ERROR"] = "1"  # hydra raises instead of printing a trace: `_one_line` below says it better
    register(schema)
    composed: list[DictConfig] = []  # the job runs after hydra has returned, whose wrapping only obscures its errors

    def compose(config: DictConfig) -> None:
        composed.append(config)
        found = HydraConfig.get()
        _given[:] = found.overrides.task
        _files.clear()
        _files.update({group: found.runtime.choices[group] for group in ALWAYS if group in found.runtime.choices})

    sys.argv[1:] = as_typed(sys.argv[1:], schema)
    with leaving(), output(), _mistakes_in_one_line(schema):
        with _texts_alone(), _groups_of(schema):
            hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name=name)(compose)()
            configs = [to_dataclass(config, schema) for config in composed]
        if len(composed) > 1 and not takes_several:
            raise ConfigError(
                f"-m makes {len(composed)} runs, and a command is for one; give each a command of its own, as "
                f"for each in A B; do python -m jobs.{name} KEY=$each; done"
            )
        for config in configs:
            job(config)


def register(schema: type[PretrainConfig]) -> DictConfig:
    """Have Hydra find a schema of SCHEMAS under the name that conf/ has for it, once; what Hydra has of it."""
    known, name = ConfigStore.instance(), SCHEMAS[schema]
    if f"{name}.yaml" not in known.repo:
        known.store(name=name, node=schema)
        # Hydra copies the store a hundred times for --help, schemas and all, and what it loads of it once more
        ConfigStore.__deepcopy__ = lambda store, memo: store  # type: ignore[attr-defined]
    return cast(DictConfig, known.repo[f"{name}.yaml"].node)


@contextmanager
def _groups_of(schema: type[PretrainConfig]) -> Iterator[None]:
    """Leave the groups of other jobs out of --help."""
    listed = Hydra.list_all_config_groups

    def own(hydra: Hydra, parent: str = "") -> list[str]:
        return [group for group in listed(hydra, parent) if not _of_another_job(group, schema)]

    Hydra.list_all_config_groups = own  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        Hydra.list_all_config_groups = listed  # type: ignore[method-assign]


def _of_another_job(key: str, schema: type[PretrainConfig]) -> str:
    """Which jobs have a group of files or a setting; empty where this one does."""
    name = re.split("[./]", key)[0]
    is_own = ("submit" if name == "site" else name) in {field.name for field in fields(schema)}
    return "" if is_own else NOT_ALL_HAVE.get(name, "")


@contextmanager
def _mistakes_in_one_line(schema: type[PretrainConfig]) -> Iterator[None]:
    try:
        yield
    except RegrowError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except (HydraException, OmegaConfBaseException) as error:
        sys.exit(f"error: {_one_line(error, schema)}")
    except StorageUnreachable as error:
        sys.exit(f"error: {str(error).splitlines()[0]}")
    except OSError as error:
        if error.errno not in PLACE_ERRORS or error.filename is None:
            raise
        sys.exit(f"error: {error.filename}: {error.strerror}")
    except AttributeError as error:
        key = re.search(r"full_key: (\S+)", str(error))
        if key is None:
            raise
        # omegaconf trips over merging a mapping into a structured node that is null
        sys.exit(f"error: {key[1]} is null and cannot be given as a mapping here; set it in a file of its group")
    except (AssertionError, ValueError) as error:
        if (mistake := _mistake_in(sys.argv[1:], error)) is None:
            raise
        sys.exit(f"error: {mistake}")


def to_dataclass(composed: DictConfig, schema: type[Config] = PretrainConfig) -> Config:  # type: ignore[assignment]
    """The composed config as plain dataclasses. Raises ConfigError for a key that the schema does not have."""
    config = cast(Config, OmegaConf.to_object(OmegaConf.merge(register(schema), composed)))
    given = cast(dict[str, Any], OmegaConf.to_container(composed))
    known = set(_keys(to_dict(config)))
    unknown = [key for key in _keys(given) if key not in known]
    if unknown:  # a plus adds keys that the schema does not have
        raise ConfigError(f"unknown setting {unknown[0]!r}{_did_you_mean(unknown[0], schema)}")
    return config


def given_overrides() -> list[str]:
    """The arguments that the running `run_job` composed its config from, without Hydra's own flags."""
    return list(_given)


def given_files() -> dict[str, str]:
    """The files of conf/model and conf/data that the running `run_job` composed, whatever chose them."""
    return dict(_files)


def as_typed(arguments: Sequence[str], schema: type[PretrainConfig] = PretrainConfig) -> list[str]:
    """The arguments, with quotes around what Hydra would take for a number or a truth value, or could not read, where
    the setting is a text.

    >>> as_typed(["run.name=2026_11_28", "+data.corpora.web=1e3", "run.seed=7", "run.storage_path=~/runs"])
    ["run.name='2026_11_28'", "+data.corpora.web='1e3'", 'run.seed=7', "run.storage_path='~/runs'"]
    """
    typed = []
    for argument in arguments:
        key, equals, text = argument.partition("=")
        needs_quotes = equals and _is_text(schema, key.lstrip("+")) and not _is_read_as_text(argument)
        typed.append(f"{key}={_argument(text)}" if needs_quotes else argument)
    return typed


def _is_text(schema: Any, key: str) -> bool:
    for name in key.split("."):
        hints = get_type_hints(schema) if is_dataclass(schema) else {}
        schema = get_args(schema)[1] if get_origin(schema) is dict else hints.get(name)
    return schema in (str, str | None)


def _is_read_as_text(argument: str) -> bool:
    """Whether Hydra takes an argument's value for a text, or for what only Hydra knows; also where it is in quotes."""
    try:
        return not isinstance(OverridesParser.create().parse_override(argument).value(), (bool, int, float))
    except HydraException:
        return argument.partition("=")[2].startswith(("'", '"'))


@contextmanager
def _texts_alone() -> Iterator[None]:
    """Refuse a truth value or a fraction where a text is wanted, which YAML has made of what was written."""
    convert = StringNode._validate_and_convert_impl

    def refuse(node: StringNode, value: Any) -> str:
        if isinstance(value, (bool, float)):
            raise ValidationError(f"a text is wanted, and this is read as {str(value).lower()}; write it in quotes")
        return convert(node, value)

    StringNode._validate_and_convert_impl = refuse  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        StringNode._validate_and_convert_impl = convert  # type: ignore[method-assign]


def chosen(arguments: Sequence[str]) -> list[str]:
    """Those that choose a file of conf/model, conf/data or conf/cluster."""
    return [each for each in arguments if each.lstrip("+").partition("=")[0] in CHOICES]


def pretrain_config(arguments: Sequence[str]) -> PretrainConfig:
    """The config of `jobs.pretrain` with these arguments. Raises ConfigError where they make none."""
    return deepcopy(_pretrain_config(tuple(arguments), CONF_DIR))


@lru_cache(maxsize=256)
def _pretrain_config(arguments: tuple[str, ...], conf: Path) -> PretrainConfig:
    """Kept, as it takes a tenth of a second, and `pretrain_overrides` asks for the same again and again."""
    with _composing(arguments):
        return to_dataclass(hydra.compose("pretrain", as_typed(arguments)))


def pretrain_overrides(
    config: PretrainConfig, given: Sequence[str] = (), files: Mapping[str, str] | None = None
) -> list[str]:
    """The arguments of `jobs.pretrain` that give this config: `given`, and where it differs from what they give.

    `files` are those of conf/model and conf/data that it was composed of. What chooses a file that conf/ lacks, as one
    of --config-dir, is left out, and what is set of keys that only such a file has: another machine has no such folder.
    One of conf/ is chosen in its place where that is needed: below what is null, nothing can be set. Raises ConfigError
    where none give it.
    """
    kept = [each for each in given if not chosen([each]) or _is_in_conf(*each.lstrip("+").partition("=")[::2])]
    in_conf = {group: file for group, file in (files or {}).items() if _is_in_conf(group, file)}
    lacks_some = len(kept) < len(given) or len(in_conf) < len(files or {})
    if in_conf:
        with _composing(kept):
            there = hydra.compose("pretrain", chosen(kept), return_hydra_config=True).hydra.runtime.choices
        kept = [*(f"{group}={file}" for group, file in in_conf.items() if there.get(group) != file), *kept]
    groups = {field.name for field in fields(PretrainConfig)}
    wanted = dict(_leaves({group: values for group, values in to_dict(config).items() if group in groups}))
    try:
        return _that_give(wanted, kept)
    except ConfigError:
        taken = {_key(each) for each in kept} | in_conf.keys()
        for group in (group for group in ALWAYS if lacks_some and group not in taken):
            for path in sorted((CONF_DIR / group).glob("*.yaml")):
                with suppress(ConfigError):
                    return _that_give(wanted, [f"{group}={path.stem}", *kept])
        raise


def _that_give(wanted: Mapping[str, Any], given: Sequence[str]) -> list[str]:
    """Arguments with which all these keys have these values, `given` among them but for what needs keys that its files
    do not have. Raises ConfigError where none give them."""
    of_files = to_dict(pretrain_config(chosen(given)))
    there, values = set(_keys(of_files)), dict(_leaves(of_files))
    if below := [key for key in wanted if values.get(key.rpartition(".")[0], ...) is None]:
        raise ConfigError(_is_below_null(below[0]))
    given = [each for each in given if each[:1] == "+" or chosen([each]) or _key(each) in there]
    before = to_dict(pretrain_config(given))
    plain, known = dict(_leaves(before)), set(_keys(before))
    differences = [
        f"{'' if key in known else '+'}{key}={_argument(value)}"
        for key, value in wanted.items()
        if value != plain.get(key, ...)
    ]
    found = dict(_leaves(to_dict(pretrain_config([*given, *differences]))))
    for key in wanted:
        if found.get(key, ...) != wanted[key]:
            raise ConfigError(
                f"no arguments of jobs.pretrain give {key}={_argument(wanted[key])} beside {' '.join(given)}; set it "
                "in a file of conf/cluster, conf/model or conf/data, and choose that"
            )
    return [*given, *differences]


def _key(argument: str) -> str:
    return argument.lstrip("+~").partition("=")[0]


def _is_in_conf(group: str, file: str) -> bool:
    return (CONF_DIR / group / f"{file}.yaml").exists()


@contextmanager
def _composing(arguments: Sequence[str]) -> Iterator[None]:
    """For hydra.compose of `pretrain`; what is wrong with its arguments becomes a ConfigError."""
    register(PretrainConfig)
    try:
        with hydra.initialize_config_dir(str(CONF_DIR), version_base="1.3"), _texts_alone():
            yield
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_one_line(error)) from error
    except (AssertionError, ValueError) as error:
        if (mistake := _mistake_in(arguments, error)) is None:
            raise
        raise ConfigError(mistake) from error


def load_run_config(folder: Path | str) -> PretrainConfig:
    """The resolved config that a run was last started with; `folder` is a path or a URI.

    Raises ConfigError where it holds no run's.
    """
    try:
        return to_dataclass(OmegaConf.create(read_yaml(Storage.at(folder).read_bytes("config.yaml")) or {}))
    except (OSError, OmegaConfBaseException) as error:
        raise ConfigError(f"{folder} holds no config.yaml of a run ({_one_line(error)})") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{folder}/config.yaml is damaged: {first_line(error)}") from error


def to_dict(config: PretrainConfig) -> dict[str, Any]:
    """The resolved config as plain dicts, strings and numbers (enumerations by name), as JSON would hold it."""
    return cast(dict[str, Any], _plain(asdict(config)))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return value.name if isinstance(value, Enum) else value


def _mistake_in(arguments: Sequence[str], error: Exception) -> str | None:
    """What is wrong with the arguments of which hydra or omegaconf says this in a way of its own; else None."""
    if NO_NAME in str(error) and (nameless := [each for each in arguments if each.startswith("=")]):
        return f"{nameless[0]} names no setting: a variable in front of it may be empty"
    if NO_NAME in str(error):
        return "a group of files takes the name of one: " + " ".join(
            f"{group}=NAME in place of {group}={value}"
            for group, equals, value in (each.lstrip("+").partition("=") for each in arguments)
            if equals and (CONF_DIR / group).is_dir() and not isinstance(yaml.safe_load(value), str)
        )
    return _below_null(arguments) if BELOW_NULL in str(error) else None


def _below_null(arguments: Sequence[str]) -> str:
    """What is wrong where omegaconf has asserted that a parent is there."""
    plain = dict(_leaves(to_dict(PretrainConfig())))
    keys = [each.lstrip("+").partition("=")[0] for each in arguments]
    key = next((key for key in keys if plain.get(key.rpartition(".")[0], ...) is None), "a setting")
    return _is_below_null(key)


def _is_below_null(key: str) -> str:
    return (
        f"{key}: {key.rpartition('.')[0]} is null, and nothing below it can be set here; set it in a file of its group"
    )


def _one_line(error: BaseException, schema: type[PretrainConfig] = PretrainConfig) -> str:
    """Hydra's multi-line complaint as one line, with the nearest valid key or choice."""
    cause = error.__cause__ or error
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    if (argument := getattr(error, "override", "")) not in text:  # of Hydra's parser
        text = f"{argument}: {text}"
    full_key = getattr(cause, "full_key", None) or ""
    quoted = re.findall(r"'([^']+)'", text)
    if (unknown := re.search(r"Key '(\w+)' not in '", str(error))) and (jobs := _of_another_job(unknown[1], schema)):
        return jobs
    if "Could not override" in text:
        key = quoted[0]
        if (CONF_DIR / key).is_dir() and not _of_another_job(key, schema):
            return f"{key!r} is chosen with a plus: +{key}=..."
        if "is not in struct" in str(cause):
            where, _, name = key.rpartition(".")
            return f"{where} has no {name} yet; new entries are added with a plus: +{key}=..."
        if key in set(_keys(to_dict(schema()))):
            return f"{key}: {str(cause).splitlines()[0].strip()}"
        return f"unknown setting {key!r}{_did_you_mean(key, schema)}"
    twice = re.search(r"Multiple values for (\w+)\..* (\S+)'|(\w+) appears more than once", text)
    if twice:
        group, choice = twice[1] or twice[3], twice[2] or "NAME"
        if group in ALWAYS:
            return f"{group} is chosen without a plus: {group}={choice}"
        return f"{group} is given twice: give it once, as +{group}={choice}"
    if "Could not find" in text and "/" in quoted[-1]:
        group, _, choice = quoted[-1].rpartition("/")
        choices = sorted(path.stem for path in (CONF_DIR / group).glob("*.yaml"))
        return f"no {group} called {choice!r}; available: {', '.join(choices)}"
    if "while composing config" in text and len(lines) > 1:
        text = lines[1]
        full_key = next((line.partition(": ")[2] for line in lines if line.startswith("full_key: ")), full_key)
    details = str(cause).splitlines()[0].strip() if cause is not error else ""
    prefix = f"{full_key}: " if full_key and full_key not in text + details else ""
    hint = next((line for line in lines[1:] if line.startswith(("To ", "Did you mean", "See "))), "")
    return "; ".join(part for part in (prefix + text, details if details not in text else "", hint) if part)


def _did_you_mean(key: str, schema: type[PretrainConfig]) -> str:
    if jobs := _of_another_job(key, schema):
        return f"; {jobs}"
    nearest = difflib.get_close_matches(key, list(_keys(to_dict(schema()))), n=1, cutoff=0.6)
    return f"; did you mean {nearest[0]!r}?" if nearest else "; --help lists them all"


def _leaves(node: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _argument(value: Any) -> str:
    """A value as Hydra's grammar of overrides has it."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_argument(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_argument, value)) + "]"
    if isinstance(value, str):
        # a backslash stands for itself but before a quote
        return "'" + re.sub(r"(\\*)('|$)", lambda found: 2 * found[1] + found[2].replace("'", "\\'"), value) + "'"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)


def _keys(node: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in node.items():
        yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _keys(value, f"{prefix}{key}.")
