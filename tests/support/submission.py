"""Jobs rendered in tests, with the code's version fixed."""

from collections.abc import Sequence
from copy import deepcopy
from functools import cache

import hydra

from regrow.config.schema import SubmitJobConfig
from regrow.config.store import CONF_DIR, register, to_dataclass
from regrow.submit.render import Code, Manifest, render
from regrow.submit.submit import pretrain_arguments

CODE = Code("0123456789ab", "2.60.0")


def compose(arguments: Sequence[str]) -> SubmitJobConfig:
    """The config of `jobs.submit` with these arguments."""
    return deepcopy(_config(tuple(arguments)))


@cache
def _config(arguments: tuple[str, ...]) -> SubmitJobConfig:
    register(SubmitJobConfig)
    with hydra.initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        return to_dataclass(hydra.compose("submit", list(arguments)), SubmitJobConfig)


def rendered(arguments: Sequence[str]) -> tuple[SubmitJobConfig, list[Manifest]]:
    """A config and its manifests."""
    config, words = _composed(tuple(arguments))
    return config, render(config, CODE, words)


@cache
def _composed(arguments: tuple[str, ...]) -> tuple[SubmitJobConfig, list[str]]:
    config = compose(arguments)
    return config, pretrain_arguments(config, arguments)
