"""`train.callback`: a user's code that every rank calls after each step, and whose state is kept with the run's."""

import contextlib
import importlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

import torch.distributed as dist

from regrow.control.values import Scalar
from regrow.errors import ConfigError, first_line
from regrow.process_log import say_error
from regrow.state.entries import Progress, user_scalars

MOST_BYTES = 512  # of a state as JSON: it is in each rank's snapshots, with the numbers that are there anyway
CLASS = "train.callback"  # the key beside a state's own that says whose it is
MOST_NAME_BYTES = 256  # of that, for the same reason
NAMES = "; name a class as package.module:Class that every worker can import, and that needs no arguments"


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
        """What `state` gave after the step that a group goes on from. Not called where there is none yet of this
        class, by the name that `train.callback` has for it."""


class Called:
    """A callback, or none, and what a run keeps of it: `progress.user`, that of the newest step that was read.

    What is kept of another class is left out, and of any where there is no callback: `note` then says so, in a line.
    """

    def __init__(self, name: str | None, progress: Progress, *, is_over: Callable[[], bool] | None = None) -> None:
        """Raises ConfigError for a name that leads nowhere, and, as `after_step` does, for whatever the user's code
        raises, unless the group `is_over` or a collective failed."""
        self._name, self._values, self._is_over = name, progress.user, is_over
        self._callback = self._made(name) if name is not None else None
        self.note = ""
        state = {key: value for key, value in self._values.items() if key != CLASS}
        if self._callback is None or self._values.get(CLASS, name) != name:  # earlier versions did not say whose it is
            self.note = self._left_out() if state else ""
            self._values.clear()
        elif state:
            with self._in("restore"):
                self._callback.restore(state)

    def after_step(self, row: Mapping[str, float]) -> None:
        """Raises ConfigError for a state that cannot be kept."""
        if self._callback is None:
            return
        with self._in("after_step"):
            self._callback.after_step(row)
        with self._in("state"):
            state = dict(self._callback.state())
        for key, value in state.items():
            if not isinstance(value, int | float | str) or (isinstance(value, float) and not math.isfinite(value)):
                raise ConfigError(f"train.callback={self._name}: its state's {key!r} is {value!r}, no number or text")
        size = len(json.dumps(user_scalars(state)).encode())
        if size > MOST_BYTES:
            raise ConfigError(f"train.callback={self._name}: its state has {size} bytes as JSON; keep {MOST_BYTES}")
        if CLASS in state:
            said = f"its state's {CLASS!r} is where the class's name is kept; give it another key"
            raise ConfigError(f"train.callback={self._name}: {said}")
        self._values.clear()
        self._values.update({CLASS: str(self._name), **state})

    def _left_out(self) -> str:
        of = self._values.get(CLASS, "a callback")
        if self._name is None:
            return f"train.callback=null: the state of {of} is not kept any longer"
        return f"train.callback={self._name}: begins without a state: the one that is kept is of {of}"

    def _in(self, what: str) -> contextlib.AbstractContextManager[None]:
        return _within(self._name or "", what, is_over=self._is_over)

    def _made(self, name: str) -> Callback:
        kind = look_up(name, is_over=self._is_over)
        with _within(name, "its constructor", is_over=self._is_over, fix=NAMES):
            return kind()


def look_up(name: str, *, is_over: Callable[[], bool] | None = None) -> Callable[[], Callback]:
    """The class that `train.callback` names; its module is imported. Raises ConfigError for a name that leads nowhere,
    and as `Called` does."""
    if (size := len(json.dumps(name).encode())) > MOST_NAME_BYTES:
        said = f"has {size} bytes as JSON, and {MOST_NAME_BYTES} are kept; give it a shorter one"
        raise ConfigError(f"train.callback={name}: the name {said}")
    module, _, kind = name.partition(":")
    with _within(name, "its import", is_over=is_over, fix=NAMES):
        imported = importlib.import_module(module)
    found: Callable[[], Callback] | None = getattr(imported, kind, None)
    if found is None:
        raise ConfigError(f"train.callback={name}: {module} has no class {kind!r}{NAMES}")
    return found


@contextlib.contextmanager
def _within(name: str, what: str, *, is_over: Callable[[], bool] | None, fix: str = "") -> Iterator[None]:
    """In the user's code: what it raises is the run's trouble or this rank's, in one line; the rest is logged."""
    try:
        yield
    except (Exception, SystemExit) as error:
        if (is_over is not None and is_over()) or is_of_a_collective(error):
            raise
        module = name.partition(":")[0]
        if not (isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}.")):  # not found
            say_error(error)
        said = f"{type(error).__name__}: {first_line(error)}"
        raise ConfigError(f"train.callback={name}: {what} raised {said}{fix}") from None


def is_of_a_collective(error: BaseException | None) -> bool:
    """Whether it came of a collective that failed, as one does where a peer is lost."""
    while error is not None:
        if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "/gloo/" in str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False
