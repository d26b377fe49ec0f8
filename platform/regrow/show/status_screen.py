"""Where a status is shown: a terminal, redrawn in place when it is watched; lines elsewhere; or JSON."""

import os
import re
from typing import TYPE_CHECKING, TextIO

from regrow.record.status import State, Status
from regrow.show.status_text import LABEL, describe, one_line

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

COLOURS = {
    State.training: "green",
    State.finished: "green",
    State.starting: "cyan",
    State.regrouping: "yellow",
    State.stopped: "cyan",
}  # the others: red
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Screen:
    """Shows one status after another on a text stream. NO_COLOR turns colours off."""

    def __init__(self, stream: TextIO, *, json: bool = False, watch: bool = False) -> None:
        self._stream, self._json, self._watch = stream, json, watch
        self._terminal = stream.isatty() and os.environ.get("TERM") != "dumb"
        self._live: Live | None = None
        self._newest: Status | None = None

    def __enter__(self) -> "Screen":
        if self._terminal and self._watch and not self._json:
            from rich.live import Live

            self._live = Live(console=self._rich(), auto_refresh=False)
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, status: Status, note: str = "") -> None:
        self._newest = status
        if self._live is not None:
            self._live.update(_styled(status, self._live.console.width, note), refresh=True)
        elif self._json:
            self._print(status.to_json())
        elif self._watch:
            self._print(one_line(status))
        elif self._terminal:
            console = self._rich()
            console.print(_styled(status, console.width, note), soft_wrap=True)
        else:
            self._print("\n".join(describe(status)))

    def say(self, text: str) -> None:
        """Something that is no status; the newest one stays."""
        if self._live is not None and self._newest is not None:
            self.show(self._newest, text)
        elif not self._json:
            self._print(text)

    def _print(self, text: str) -> None:
        self._stream.write(_CONTROL.sub("", text) + "\n")
        self._stream.flush()

    def _rich(self) -> "Console":
        from rich.console import Console

        return Console(file=self._stream, no_color=bool(os.environ.get("NO_COLOR")), highlight=False)


def _styled(status: Status, width: int, note: str) -> "Text":
    from rich.text import Text

    first, *rest = [_CONTROL.sub("", line) for line in describe(status, width)]
    name, colon, said = first.partition(":")
    text = Text().append(name + colon, style="bold").append(said, style=f"bold {COLOURS.get(status.state, 'red')}")
    for line in rest:
        label, fact = line[: LABEL + 3], line[LABEL + 3 :]
        text.append("\n").append(label, style="bold red" if label.strip() == "!" else "dim")
        text.append(fact)
    return text.append(f"\n  {note}" if note else "", style="red")
