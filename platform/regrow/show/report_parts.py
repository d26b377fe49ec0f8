"""What the report's pages are made of: the page itself, sections, tables of settings, words. Pure."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from importlib import resources
from typing import Any

from regrow.errors import ConfigError
from regrow.plan.mixture import UNIT, plan_mixture
from regrow.record.events import cause_words
from regrow.record.ledger import SILENCE_S, Ledger
from regrow.record.log import Row
from regrow.show.svg import stacked_bar
from regrow.show.units import duration, percent, when

STATE_HELP = {
    "productive": "forward, backward and optimizer of steps that count",
    "init": "starting: from the submission, or from regrouping, to the first step",
    "restore": "loading the state to go on from",
    "snapshot": "training waited for a snapshot or a checkpoint",
    "data": "training waited for data",
    "recompute": "steps that a later group took back and did again",
    "down": "from the last sign of life of a group to the beginning of the next",
    "validation": "scoring the validation split",
    "other": "between steps, and not explained by any event",
}


def page(title: str, body: str) -> str:
    """A self-contained page: no script, nothing is fetched."""
    css = resources.files("regrow.show").joinpath("report.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)} · regrow</title><style>\n{css}</style></head><body><main>\n{body}\n"
        "</main></body></html>\n"
    )


def section(title: str, body: str, kind: str = "") -> str:
    return f'<section class="{kind}"><h2>{escape(title)}</h2>{body}</section>'


def table(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = (), kind: str = "") -> str:
    """A table that scrolls by itself where it is too wide; `numbers` are columns of figures. Cells are HTML."""

    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{' class=n' if column in numbers else ''}>{cell}</{tag}>" for column, cell in enumerate(row)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f'<div class="scroll"><table class="{kind}"><tr>{cells("th", head)}</tr>{body}</table></div>'


def status_words(ledger: Ledger, metrics: Sequence[Row], now: float) -> str:
    """Since when, and how it stands or ended."""
    begun = f"Submitted {when(ledger.begin)}. "
    if not ledger.attempts or ledger.end <= ledger.begin:
        return "Nothing logged yet."
    last = ledger.attempts[-1]
    if last.stopped:
        reason, detail = str(last.stopped.get("reason", "stopped")).replace("_", " "), last.stopped.get("detail")
        at = f"at step {last.stopped.get('step', '?')}, {when(last.stopped['time'])}"
        return f"{begun}{reason.capitalize()} {at}" + (f": {detail}" if detail else ".")
    if last.failure:
        cause = cause_words(last.failure.get("cause", "unknown"))
        return f"{begun}Failed {when(last.failure['time'])}, not yet back: {cause}."
    silent_s = now - last.last_life
    step = f"At step {metrics[-1]['step']}" if metrics else "No step yet"
    silence = f", silent for {duration(silent_s)}" if silent_s > SILENCE_S else ""
    return f"{begun}{step}{silence}, as of {when(now)}."


def data_mix(config: Mapping[str, Any], tokens: int | None) -> tuple[list[str], list[str], list[list[str]], str] | None:
    """Which corpora a run mixes: their names, the stages that weigh them, a row of shares for each corpus, and a bar.

    None where there is one corpus, or where nothing is known but that they are weighed by their size.
    """
    data = config.get("data") or {}
    names, stages, seq_len = list(data.get("corpora") or {}), data.get("mixture") or [], data.get("seq_len")
    if len(names) < 2 or not stages or not seq_len:
        return None
    weights = [(float(stage.get("from_tokens", 0)), dict(stage.get("weights") or {})) for stage in stages]
    try:
        mixture = plan_mixture(weights, names, seq_len=seq_len)
    except ConfigError:
        return None
    drawn = mixture.drawn((tokens or 0) // seq_len)
    total = max(1, sum(drawn))
    rows = [
        [
            *(percent(stage.shares[k] / UNIT) for stage in mixture.stages),
            f"{drawn[k] * seq_len:,}",
            percent(count / total),
        ]
        for k, count in enumerate(drawn)
    ]
    heads = [f"from {from_tokens:,.0f}" for from_tokens, _ in weights]
    bar = stacked_bar(
        "Tokens so far by corpus",
        [
            (count / total, f"var(--r{k % 8})", f"{name}: {percent(count / total)} of the tokens so far")
            for k, (name, count) in enumerate(zip(names, drawn, strict=True))
            if count
        ],
    )
    return names, heads, rows, bar if sum(drawn) else ""


def swatch(colour: str) -> str:
    return f'<i class="swatch" style="background:{colour}"></i>'


def flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested settings as pairs of a dotted key and a value as YAML would have it."""
    pairs: list[tuple[str, str]] = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            pairs += flat(value, f"{prefix}{key}.")
        else:
            pairs.append((f"{prefix}{key}", _yaml(value)))
    return pairs


def or_dash(value: Any, show: Callable[[Any], str]) -> str:
    return "-" if value is None else show(value)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _yaml(value: Any) -> str:
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)
