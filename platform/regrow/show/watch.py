"""Looking at a run again and again: a screen, or lines of JSON."""

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from regrow.errors import JobNotThereError, RegrowError
from regrow.record.status import State, Status

if TYPE_CHECKING:
    from regrow.show.status import Screen

ENDS = (State.finished, State.stopped, State.failed)


class JsonLines:
    """A line of JSON for each status, with nothing but Python: a cluster's, where a run is looked at from afar."""

    def __enter__(self) -> "JsonLines":
        return self

    def __exit__(self, *exception: object) -> None: ...

    def show(self, status: Status) -> None:
        print(status.to_json(), flush=True)

    def say(self, text: str) -> None:
        print(text, file=sys.stderr)


def show(look: Callable[[], Status], *, watch: bool, every_s: float, as_json: bool) -> None:
    """Show the status once, or with `watch` until the run has ended. Raises RegrowError where it is not there."""
    with JsonLines() if as_json else _screen(watch) as screen:
        status = look()
        screen.show(status)
        while watch and status.state not in ENDS:
            time.sleep(every_s)
            try:
                status = look()
            except JobNotThereError:
                raise
            except (RegrowError, OSError) as error:  # the network, perhaps: it was there before
                screen.say(f"cannot look: {error}")
                continue
            screen.show(status)


def _screen(watch: bool) -> "Screen":
    from regrow.show.status import Screen  # rich

    return Screen(sys.stdout, watch=watch)
