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
FAREWELL = "stopped at step 7 of 100, loss 2.0000; its checkpoint is committed. Resume with the same run.name=mine: ..."
LOST = "step 7 is committed in memory and is not in storage (No space left on device); it is lost with the Ray cluster"
LOST_RUN = (
    "error: run folder x is written by another job now (process 7 on h); ends with status 0, so that nothing starts it "
    "anew; once the other one has ended, submit.action=apply goes on with the run"
)
ENDINGS = [  # a stopped job's last lines, the exit status of what follows or stops it, and the line that it shows
    (["step  7/100  loss 2.0000", FAREWELL, "step  7/100  loss 2.0000"], 0, FAREWELL),
    (["stopped before any of 100 steps was committed. Resume with ..."], 0, "stopped before any of 100 steps"),
    (["finished 100 steps, loss 2.0000; report: /r/report.html"], 0, "finished 100 steps, loss 2.0000"),
    (["ended at once; all that is committed is in storage", "interrupted"], 0, "ended at once; all that is committed"),
    (["interrupted"], 0, "interrupted"),  # before it had begun
    ([f"error: {LOST} (logs: /tmp/ray/logs)"], 1, f"error: {LOST}"),
    ([LOST, "interrupted"], 1, LOST),  # asked twice
    (["step  7/100  loss 2.0000"], 1, "error: the driver ended without a word, as one that is killed"),
]


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
