"""The bridge to Hydra: registers the schema, turns a composed config into dataclasses, and back into YAML.

The only module of `regrow` that imports hydra or omegaconf.
"""

import difflib
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import hydra
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from regrow.config.schema import PretrainConfig
from regrow.errors import ConfigError, RegrowError

STARTED_AT = time.time()  # of the program, but for the interpreter
CONF_DIR = Path(__file__).parents[3] / "conf"


def run_job(job: Callable[[PretrainConfig], None], *, name: str) -> None:
    """Run `job` as a command line program with Hydra's flags, on the config of `conf/<name>.yaml` and the arguments.

    A user's mistake, in the arguments or anywhere in the job, ends the process with one line on stderr and status 1.
    """
    os.environ["HYDRA_FULL_ERROR"] = "1"  # hydra raises instead of printing a trace: `_one_line` below says it better
    ConfigStore.instance().store(name="pretrain_schema", node=PretrainConfig)

    def entry(composed: DictConfig) -> None:
        job(to_dataclass(composed))

    try:
        hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name=name)(entry)()
    except RegrowError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except (HydraException, OmegaConfBaseException) as error:
        sys.exit(f"error: {_one_line(error)}")


def to_dataclass(composed: DictConfig) -> PretrainConfig:
    """The composed config as plain dataclasses. Raises ConfigError for a value still missing."""
    missing = OmegaConf.missing_keys(composed)
    if missing:
        key = sorted(missing)[0]
        raise ConfigError(f"{key} has no value; give it as {key}=...")
    return cast(PretrainConfig, OmegaConf.to_object(composed))


def to_yaml(config: PretrainConfig) -> str:
    """The resolved config as YAML, keys in the schema's order."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def to_dict(config: PretrainConfig) -> dict[str, Any]:
    """The resolved config as plain dicts, strings and numbers (enumerations by name), as JSON would hold it."""
    container = OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True)
    assert isinstance(container, dict)
    return cast(dict[str, Any], container)


def _one_line(error: BaseException) -> str:
    """Hydra's multi-line complaint as one line, with the nearest valid key or choice."""
    cause = error.__cause__ or error
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    full_key = getattr(cause, "full_key", None) or ""
    if "Could not override" in text and "'" in text:
        key = text.split("'")[1]
        nearest = difflib.get_close_matches(key, list(_keys()), n=1, cutoff=0.6)
        return f"unknown setting {key!r}" + (f"; did you mean {nearest[0]!r}?" if nearest else "; see --help")
    if "Could not find" in text and "'" in text:
        group, _, choice = text.split("'")[1].rpartition("/")
        choices = sorted(path.stem for path in (CONF_DIR / group).glob("*.yaml"))
        return f"no {group} called {choice!r}; available: {', '.join(choices)}" if group else text
    if "Multiple values for" in text or "appended" in text:
        return text
    details = str(cause).splitlines()[0].strip() if cause is not error else ""
    prefix = f"{full_key}: " if full_key and full_key not in text + details else ""
    hint = next((line for line in lines[1:] if line.startswith(("To ", "Did you mean", "See "))), "")
    return "; ".join(part for part in (prefix + text, details if details not in text else "", hint) if part)


def _keys() -> Iterator[str]:
    def walk(node: dict[str, Any], prefix: str) -> Iterator[str]:
        for key, value in node.items():
            yield prefix + key
            if isinstance(value, dict):
                yield from walk(value, f"{prefix}{key}.")

    yield from walk(to_dict(PretrainConfig()), "")
