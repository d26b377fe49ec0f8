"""A run's status for people: redrawn in place at a terminal that watches, lines elsewhere."""

import io
import os
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from regrow.errors import JobNotThereError, RegrowError
from regrow.record.events import cause_words, suspicion_words
from regrow.record.history import Interruption
from regrow.record.log import is_number
from regrow.record.status import Saved, State, Status, Suspicion
from regrow.show.units import CONTROL, counted, duration, percent, ranks, si, size, when

COLOURS = {
    State.training: "green",
    State.finished: "green",
    State.starting: "cyan",
    State.regrouping: "yellow",
    State.stopped: "cyan",
}  # the others: red
LABEL, WIDTH = 17, 110  # characters: of labels, and of lines that are not at a terminal
SHORT = 110  # characters of an interruption's detail

ENDS = (State.finished, State.stopped, State.failed)

Line = tuple[str, str]  # its label, which may be empty, and what it says


class Screen:
    """Shows one status after another on a text stream. NO_COLOR turns colours off."""

    def __init__(self, stream: TextIO, *, watch: bool = False) -> None:
        self._stream, self._watch = stream, watch
        self._terminal = stream.isatty() and os.environ.get("TERM") != "dumb"
        self._live: Live | None = None
        self._newest: Status | None = None

    def __enter__(self) -> "Screen":
        if self._terminal and self._watch:
            self._live = Live(console=self._rich(), auto_refresh=False)
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, status: Status, note: str = "") -> None:
        self._newest = status
        if self._live is not None:
            self._live.update(rendered(status, note), refresh=True)
        elif self._watch:
            self._print(one_line(status))
        elif self._terminal:
            self._rich().print(rendered(status, note))
        else:
            self._print("\n".join(describe(status)))

    def say(self, text: str) -> None:
        """Something that is no status; the newest one stays."""
        if self._live is not None and self._newest is not None:
            self.show(self._newest, text)
        else:
            self._print(text)

    def _print(self, text: str) -> None:
        self._stream.write(_clean(text) + "\n")
        self._stream.flush()

    def _rich(self) -> Console:
        return Console(file=self._stream, no_color=bool(os.environ.get("NO_COLOR")), highlight=False)


def heading(status: Status) -> str:
    """The run, what it does and since when."""
    since = "" if status.since is None else f" since {when(status.since)} ({_ago(status, status.since)})"
    match status.state:
        case State.silent | State.gone:
            word = "nothing heard" if status.state is State.silent else "gone, nothing heard"
            text = f"{word}{since}"
        case State.stalled:
            text = f"stalled: no step{since}"
        case State.finished | State.stopped | State.failed:
            at = "" if status.since is None else f" {when(status.since)} ({_ago(status, status.since)} ago)"
            text = f"{status.state.value}{at}"
        case _:
            text = f"{status.state.value}{since}"
    return f"{status.run}: {text}"


def body(status: Status) -> list[Line]:
    """What there is to say beyond the heading."""
    lines = [("", status.detail)] if status.detail else []
    lines += _labelled("job", status.job)
    if status.heard_at is None:
        return lines
    lines.append(("progress", _progress(status)))
    if status.world_size is not None:
        lines.append(("ranks", _ranks(status)))
    if status.speed is not None:
        lines.append(("speed" if not status.state.over else "last speed", _speed(status)))
    if status.loss is not None or status.validation_loss is not None:
        lines.append(("loss", _loss(status)))
    if status.eta_s is not None:
        end = f"step {status.last_step:,} " if status.last_step != status.steps else ""
        lines.append(("ETA", f"{end}in {duration(status.eta_s)}, {when(status.as_of + status.eta_s)}, at this pace"))
    lines.append(("goodput", _goodput(status)))
    lines += _labelled("checkpoints", [_saved(status, saved) for saved in status.checkpoints] or ["none yet"])
    lines += _labelled("slowest rank", [_slowest(status)] if status.ranks else [])
    lines += _labelled("suspects", [_suspect(status, each) for each in status.suspects])
    lines += _labelled("interruptions", list(_interruptions(status)))
    lines += [("!", text) for text in status.warnings]
    return lines


def rendered(status: Status, note: str = "") -> Group:
    """The whole status for a terminal: a fact a row, its label in front."""
    name, colon, said = _clean(heading(status)).partition(":")
    colour = COLOURS.get(status.state, "red")
    facts = Table.grid(padding=(0, 1, 0, 0))
    facts.add_column(width=LABEL)
    facts.add_column(overflow="fold")
    for label, text in body(status):
        style = "bold red" if label == "!" else "dim"
        facts.add_row(Text(f"  {label}", style), Text(_clean(text)))
    parts: list[Text | Table] = [Text.assemble((f"{name}{colon}", "bold"), (said, f"bold {colour}")), facts]
    return Group(*parts, *([Text(f"  {_clean(note)}", "red")] if note else []))


def describe(status: Status) -> list[str]:
    """The same as lines of plain text, in which no word is broken."""
    longest = max((len(word) for _, text in body(status) for word in text.split()), default=0)
    console = Console(
        file=io.StringIO(), width=max(WIDTH, LABEL + 1 + longest, len(heading(status))), color_system=None
    )
    with console.capture() as captured:
        console.print(rendered(status))
    return [line.rstrip() for line in captured.get().splitlines()]


def one_line(status: Status) -> str:
    """The status in a line, for a log."""
    parts = [status.state.value]
    if status.step or status.steps:  # a job's folder may be out of reach
        parts.append(f"step {status.step:,}" + (f"/{status.steps:,}" if status.steps else ""))
    if status.state in (State.training, State.regrouping, State.stalled):
        parts += [f"loss {status.loss:.4f}"] if status.loss is not None else []
        if status.speed is not None and status.speed.tokens_per_s is not None:
            parts.append(f"{status.speed.tokens_per_s:,.0f} tokens/s")
        if status.world_size is not None:
            most = f" of {status.max_workers:,}" if status.max_workers is not None else ""
            parts.append(f"{status.world_size:,}{most} ranks" + _and_spares(status))
        parts += [f"ETA {duration(status.eta_s)}"] if status.eta_s is not None else []
    elif status.heard_at is not None:
        parts.append(f"last heard {_ago(status, status.heard_at)} ago")
    return f"{when(status.as_of)} {status.run}: {', '.join(parts)}" + (f": {status.detail}" if status.detail else "")


def _progress(status: Status) -> str:
    steps = f" of {status.steps:,} ({percent(status.step / status.steps)})" if status.steps else ""
    stop = ""
    if status.stop_at_step is not None and status.stop_at_step != status.steps:
        stop = f", to stop at {status.stop_at_step:,}"
    tokens = f", {si(status.tokens)} tokens" if status.tokens else ""
    heard = ""
    if status.heard_at is not None and not status.state.over and status.state is not State.silent:
        heard = f"; last heard {_ago(status, status.heard_at)} ago"
    return f"step {status.step:,}{steps}{stop}{tokens}{heard}"


def _ranks(status: Status) -> str:
    now = "" if status.state in (State.training, State.stalled) else " in the last group"
    most = status.max_workers
    target = f" of {most:,}" if most is not None else ""
    least = (
        f" (at least {status.min_workers:,})" if status.min_workers is not None and status.min_workers != most else ""
    )
    return f"{status.world_size:,}{target}{least}{now}{_and_spares(status)}, generation {status.generation}"


def _and_spares(status: Status) -> str:
    return f" and {counted(status.spares, 'spare')}" if status.spares and not status.state.over else ""


def _speed(status: Status) -> str:
    speed = status.speed
    assert speed is not None
    parts = [f"{speed.tokens_per_s:,.0f} tokens/s"] if speed.tokens_per_s is not None else []
    parts.append(f"{duration(speed.step_s)} a step")
    if speed.mfu is not None:
        parts.append(f"MFU {percent(speed.mfu)}")
    parts.append(f"waiting for data {percent(speed.data_wait_share)}, for snapshots {percent(speed.snapshot_share)}")
    return ", ".join(parts)


def _loss(status: Status) -> str:
    parts = [f"{status.loss:.4f}"] if status.loss is not None else []
    if status.validation_loss is not None:
        at = f" at step {status.validation_step:,}" if status.validation_step is not None else ""
        parts.append(f"validation {status.validation_loss:.4f}{at}")
    return ", ".join(parts)


def _goodput(status: Status) -> str:
    wall = "" if status.submitted_at is None else f"submitted {when(status.submitted_at)}"
    attempts = f", attempt {status.attempts}" if status.attempts > 1 else ""
    if status.goodput is None:
        return f"not known yet; {wall}{attempts}" if wall else "not known yet"
    stale = ""
    if status.goodput_as_of is not None and status.as_of - status.goodput_as_of > 120 and not status.state.over:
        stale = f", as of {_ago(status, status.goodput_as_of)} ago"
    others = (("effective", status.effective), ("paid", status.paid))
    shown = "".join(f", {name} {percent(ratio)}" for name, ratio in others if ratio is not None)
    return f"{percent(status.goodput)}{shown}{stale}; {wall}{attempts}"


def _saved(status: Status, saved: Saved) -> str:
    large = f", {size(saved.num_bytes)}" if saved.num_bytes else ""
    took = f" in {duration(saved.seconds)}" if saved.seconds is not None else ""
    since = status.step - saved.step
    behind = f"; {counted(since, 'step')} since" if saved is status.checkpoints[0] else ""
    return f"step {saved.step:,}, {_ago(status, saved.time)} ago{large}{took}{behind}"


def _slowest(status: Status) -> str:
    row = status.ranks[0]
    waits = sum(row.get(f"wait_{group}_s") or 0.0 for group in ("shard", "replicate", "all"))
    parts = [f"computes {duration(row['compute_s'])} a step"] if is_number(row.get("compute_s")) else []
    parts.append(f"waits {duration(waits)} for others")
    parts += [f"memory {size(row['memory_bytes'])}"] if row.get("memory_bytes") else []
    parts += [f"{row['temperature_c']:.0f} °C"] if is_number(row.get("temperature_c")) else []
    parts += [f"{row['power_w']:.0f} W"] if is_number(row.get("power_w")) else []
    return f"{row['rank']} on node {str(row.get('node', ''))[:12]}: {', '.join(parts)}"


def _suspect(status: Status, each: Suspicion) -> str:
    suspected = "the network"
    if each.node:
        suspected = f"node {each.node:.12}" if not each.pid else f"rank {each.rank} on node {each.node:.12}"
    slower = f", steps take {each.factor:.2f} times as long" if each.factor else ""
    since = f"since {when(each.since)} ({_ago(status, each.since)})"
    return f"{suspected} {suspicion_words(each.kind)} {since}{slower}: {each.detail}"


def _interruptions(status: Status) -> Iterator[str]:
    total = sum(status.causes.values())
    if not total:
        yield "none"
        return
    yield f"{total:,}: " + ", ".join(f"{cause_words(cause)} {count:,}" for cause, count in status.causes.items())
    for each in status.interruptions:
        yield f"{_clock(status, each.time)} {_interruption(each)}"


def _interruption(each: Interruption) -> str:
    detail = f" ({textwrap.shorten(each.detail, SHORT, placeholder='…')})" if each.detail.strip() else ""
    if each.ranks_after is None:
        return f"{cause_words(each.cause)}{detail}; no other group yet"
    before = f"{each.ranks_before:,} → " if each.ranks_before is not None else ""
    back = f" after {duration(each.back_s)}" if each.back_s is not None else ""
    lost = ""
    if each.lost_steps is not None:
        lost = f", {counted(each.lost_steps, 'step')} lost"
    source = f", state from {each.source}" if each.source else ""
    return f"{cause_words(each.cause)}; {before}{ranks(each.ranks_after)}{back}{lost}{source}{detail}"


def _labelled(label: str, texts: list[str]) -> list[Line]:
    return [(label if number == 0 else "", text) for number, text in enumerate(texts)]


def _clock(status: Status, time: float) -> str:
    """The time of day, with its date where that is not today."""
    day, _, clock = when(time).removesuffix(" UTC").partition(" ")
    return clock if when(status.as_of).startswith(day) else f"{day} {clock}"


def _ago(status: Status, time: float) -> str:
    return duration(max(0.0, status.as_of - time))


def _clean(text: str) -> str:
    """Without control characters, which a text from elsewhere may carry."""
    return CONTROL.sub("", text)


class JsonLines:
    """A line of JSON for each status: a cluster's, where a run is looked at from afar."""

    def __enter__(self) -> "JsonLines":
        return self

    def __exit__(self, *exception: object) -> None: ...

    def show(self, status: Status) -> None:
        print(status.to_json(), flush=True)

    def say(self, text: str) -> None:
        print(text, file=sys.stderr)


def show(look: Callable[[], Status], *, watch: bool, every_s: float, as_json: bool) -> None:
    """Show the status once, or with `watch` until the run has ended. Raises RegrowError where it is not there."""
    with JsonLines() if as_json else Screen(sys.stdout, watch=watch) as screen:
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
