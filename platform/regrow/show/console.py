"""What the terminal shows: a live line while training with messages above it; plain lines elsewhere."""

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TextIO

from regrow.progress import Task, last_step
from regrow.show.units import CONTROL, counted, duration, percent, ranks

if TYPE_CHECKING:
    from rich.live import Live
    from rich.text import Text

PLAIN_EVERY_S = 5.0  # without a terminal: a line at least this often,
PLAIN_EVERY_STEPS = 10  # and every so many steps,
PLAIN_AT_MOST_EVERY_S = 0.5  # but no more than two a second
FIRST_STEPS = 3  # each of these gets a line
SMOOTHING = 0.1  # weight of the newest step in the smoothed step time


class StepClock:
    """A smoothed time per step, from the times of finished steps; validation and checkpoints between them count."""

    def __init__(self) -> None:
        self._mean, self._weight = 0.0, 0.0
        self._last: tuple[int, int, float] | None = None  # generation, step, time

    def update(self, generation: int, step: int, time_s: float) -> None:
        """Take in one finished step. The first of a generation only starts the clock: it holds one-off costs."""
        last, self._last = self._last, (generation, step, time_s)
        if last is None or last[0] != generation or step <= last[1]:
            return
        per_step = max(0.0, time_s - last[2]) / (step - last[1])
        self._mean += SMOOTHING * (per_step - self._mean)
        self._weight += SMOOTHING * (1.0 - self._weight)

    @property
    def step_s(self) -> float | None:
        """Seconds per step; None before two steps of one generation."""
        return self._mean / self._weight if self._weight else None


class Console:
    """Shows one run on a text stream. At a terminal rich draws; elsewhere no control character is written.

    NO_COLOR turns colours off.
    """

    def __init__(self, stream: TextIO, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock = stream, clock
        self._live: Live | None = None
        self._terminal = stream.isatty() and os.environ.get("TERM") != "dumb"
        self._colour = not os.environ.get("NO_COLOR")
        self._steps: int | None = None
        self._last_step: int | None = None
        self._step_clock = StepClock()
        self._shown_at = float("-inf")
        self._num_rows, self._generation = 0, None
        self._pending: str | None = None  # newest plain row that was not shown
        self.goodput: float | None = None  # since the submission, as of the newest report
        self.effective: float | None = None  # the same: useful seconds of the full-size job
        self.num_spares = 0  # ranks that wait beside the group
        self._task: tuple[Task, float, float] | None = None  # which, when it began, what was done by then

    def start(self, lines: Iterable[str], *, steps: int, stop_at_step: int | None = None) -> None:
        """Show the resolved geometry, a line each; `steps` of the run, and where this attempt will stop short of it."""
        for line in lines:
            self.message(line)
        self._steps = steps
        self._last_step = last_step(steps, stop_at_step)

    def row(self, row: Mapping[str, Any]) -> None:
        """Show one metrics row: always at a terminal, now and then elsewhere."""
        self._task = None
        self._step_clock.update(row["generation"], row["step"], row["time"])
        text = self._describe(row)
        if self._terminal:
            self._draw(text)
            if row.get("validation_loss") is not None:
                self.message(f"step {row['step']}: validation loss {row['validation_loss']:.4f}")
        elif self._due(row):
            self._print(text)
        else:
            self._pending = text

    def message(self, text: str) -> None:
        """Show a line of text, above the live line where there is one. For signal handlers, too."""
        if self._live is not None:
            with _shown_or_not():
                self._live.console.print(_clean(text), markup=False, emoji=False, highlight=False, soft_wrap=True)
        else:
            self._print(text)

    def progress(self, task: Task, done: float, total: float) -> None:
        """Show how far a task is; a line is left when it is done.

        What was done before the task's first call, by an earlier attempt, does not count in the rate.
        """
        now = self._clock()
        if self._task is None or self._task[0] != task:
            self._task, self._shown_at = (task, now, done), float("-inf")
        _, began, done_before = self._task
        elapsed_s = now - began
        share = min(1.0, done / total) if total > 0 else 0.0
        rate = (done - done_before) / elapsed_s if elapsed_s > 1 else 0.0
        speed = f", {_amount(rate, task.unit)}/s" if rate > 0 and task.unit else ""
        if share >= 1.0:
            self._task, text = None, f"{task.name}: done in {duration(elapsed_s)}{speed}"
            if self._terminal:
                self._draw(text)
                self._end_live()
            else:
                self._print(text)
            return
        size = f" of {_amount(total, task.unit)}" if total > 0 and task.unit else ""
        left = f", {duration((total - done) / rate)} left" if rate > 0 else ""
        text = f"{share:.0%}{size}{speed}{left}"
        if self._terminal:
            width = 24
            bar = "━" * round(share * width) + "─" * (width - round(share * width))
            self._draw(f"{task.name}  {bar} {text}")
        elif now - self._shown_at >= PLAIN_EVERY_S:
            self._shown_at = now
            self._print(f"{task.name}: {text}")

    def counter(self, task: Task, total: float) -> Callable[[float], None]:
        """What shows the progress of a task when it is told how much more is done."""
        done = 0.0

        def advance(more: float) -> None:
            nonlocal done
            done += more
            self.progress(task, done, total)

        return advance

    def close(self) -> None:
        """Leave the last row as an ordinary line and give the terminal back."""
        self._end_live()
        if self._pending is not None:
            self._print(self._pending)
            self._pending = None

    def __enter__(self) -> "Console":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _due(self, row: Mapping[str, Any]) -> bool:
        """Is this row worth a plain line? The first of a generation are, the last, and some in between."""
        if row["generation"] != self._generation:
            self._generation, self._num_rows = row["generation"], 0
        self._num_rows += 1
        now = self._clock()
        since_s = now - self._shown_at
        due = (
            self._num_rows <= FIRST_STEPS
            or row["step"] == self._last_step
            or row.get("validation_loss") is not None
            or since_s >= PLAIN_EVERY_S
            or (row["step"] % PLAIN_EVERY_STEPS == 0 and since_s >= PLAIN_AT_MOST_EVERY_S)
        )
        if due:
            self._shown_at, self._pending = now, None
        return due

    def _describe(self, row: Mapping[str, Any]) -> str:
        steps = f"/{self._steps}" if self._steps is not None else ""
        parts = [
            f"step {row['step']:>{max(1, len(steps) - 1)}}{steps}",
            f"loss {_number(row.get('loss'), '.4f')}",
            f"{_number(row.get('tokens_per_s'), ',.0f')} tok/s",
            f"MFU {_number(row.get('mfu'), '.1%')}",
            ranks(row["world_size"]) + (f" + {counted(self.num_spares, 'spare')}" if self.num_spares else ""),
        ]
        if not self._terminal and row.get("validation_loss") is not None:
            parts.insert(2, f"validation loss {row['validation_loss']:.4f}")
        step_s = self._step_clock.step_s
        if step_s is not None and self._last_step is not None and row["step"] < self._last_step:
            parts.append(f"ETA {duration(step_s * (self._last_step - row['step']))}")
        if self.goodput is not None:
            parts.append(f"goodput {percent(self.goodput)}")
        if self.effective is not None:
            parts.append(f"effective {percent(self.effective)}")
        parts.append(f"gen {row['generation']}")  # last: a narrow terminal cuts it first
        return "  ".join(parts)

    def _print(self, text: str) -> None:
        with _shown_or_not():
            self._stream.write(_clean(text) + "\n")
            self._stream.flush()

    def _draw(self, text: str) -> None:
        """Replace the live line."""
        if self._live is None:
            from rich.console import Console as RichConsole
            from rich.live import Live

            console = RichConsole(file=self._stream, force_terminal=True, no_color=not self._colour, highlight=False)
            self._live = Live(console=console, refresh_per_second=8)  # other prints come out above the line
            with _shown_or_not():
                self._live.start()
        with _shown_or_not():
            self._live.update(self._styled(text))

    def _styled(self, text: str) -> "Text":
        from rich.text import Text

        styled = Text(_clean(text), no_wrap=True, overflow="ellipsis")
        if self._colour:
            styled.highlight_regex(r"loss [\d.]+", "bold")
            styled.highlight_regex(r"ETA [\d.]+ \w+( \d+ \w+)?|━+", "cyan")
        return styled

    def _end_live(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            with _shown_or_not():
                live.stop()


def _shown_or_not() -> contextlib.AbstractContextManager[None]:
    """The job goes on where its stream is gone, as where Ctrl-C ended the `tee` that it writes to (OSError), and where
    a signal came in the middle of another write to it (RuntimeError)."""
    return contextlib.suppress(OSError, RuntimeError)


def _clean(text: str) -> str:
    """Without control characters, which a message from elsewhere may carry; tabs and line ends stay."""
    return CONTROL.sub("", text)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _amount(value: float, unit: str) -> str:
    """As `130.2 MB`, `1,200 shards` or `2.1 shards`."""
    if unit != "B":
        return f"{value:,.1f} {unit}" if value < 9.95 and value != round(value) else f"{value:,.0f} {unit}"
    for prefix in ("", "k", "M", "G"):
        if value < 999.95:
            return f"{value:.1f} {prefix}B"
        value /= 1000
    return f"{value:,.1f} TB"
