"""`train.callback`: a user's code that every rank calls after each step, and whose state is kept with the run's."""

import importlib
import json
import math
from collections.abc import Mapping
from typing import Protocol

from regrow.control.values import Scalar
from regrow.errors import ConfigError, first_line
from regrow.state.entries import Progress, user_scalars

MOST_BYTES = 512  # of a state as JSON: it is in each rank's snapshots, with the numbers that are there anyway


class Callback(Protocol):
    """What `train.callback` names, made without arguments on every rank, anew for each group.

    All ranks get the same rows in the same order, so that what is a function of them is the same on all, whatever their
    number. A state that is not is refused when a checkpoint is put together.
    """

    def after_step(self, row: Mapping[str, float]) -> None:
        """A step has succeeded on all ranks: `step loss grad_norm num_tokens tokens_seen lr`. Training waits for it."""

    def state(self) -> Mapping[str, Scalar]:
        """Finite numbers and words, at most MOST_BYTES of them as JSON. Asked for after each step."""

    def restore(self, state: Mapping[str, Scalar]) -> None:
        """What `state` gave after the step that a group goes on from. Not called where there is none yet."""


class Called:
    """A callback, or none, and what a run keeps of it: `progress.user`, that of the newest step that was read."""

    def __init__(self, name: str | None, progress: Progress) -> None:
        """Raises ConfigError for a name that leads nowhere."""
        self._name, self._values = name, progress.user
        self._callback = _made(name) if name is not None else None
        if self._callback is not None and self._values:
            self._callback.restore(dict(self._values))

    def after_step(self, row: Mapping[str, float]) -> None:
        """Raises ConfigError for a state that cannot be kept."""
        if self._callback is None:
            return
        self._callback.after_step(row)
        state = dict(self._callback.state())
        for key, value in state.items():
            if not isinstance(value, int | float | str) or (isinstance(value, float) and not math.isfinite(value)):
                raise ConfigError(f"train.callback={self._name}: its state's {key!r} is {value!r}, no number or text")
        size = len(json.dumps(user_scalars(state)).encode())
        if size > MOST_BYTES:
            raise ConfigError(f"train.callback={self._name}: its state has {size} bytes as JSON; keep {MOST_BYTES}")
        self._values.clear()
        self._values.update(state)


def _made(name: str) -> Callback:
    module, _, kind = name.partition(":")
    try:
        made: Callback = getattr(importlib.import_module(module), kind)()
        return made
    except (ImportError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"train.callback={name}: {first_line(error)}; name a class as package.module:Class that every worker can "
            "import, and that needs no arguments"
        ) from error
