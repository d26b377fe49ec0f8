"""drill.html: what a drill has shown, on one self-contained page. Pure. No script, nothing is fetched."""

from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from typing import Any

WORDS = {True: ("holds", "good"), False: ("broken", "bad"), None: ("not judged", "soft")}
STYLE = """
.good { color: light-dark(#1d7a3a, #5fc27e); } .bad { color: light-dark(#c0362c, #f07a70); font-weight: 600; }
.verdict td:first-child { white-space: nowrap; } .verdict td { white-space: normal !important; }
.verdict li { margin: 2px 0; } .verdict ul { margin: 4px 0 0; padding-left: 18px; }
svg.timeline { display: block; width: 100%; height: auto; }
section.picture { padding: 6px; overflow-x: auto; } .picture svg { min-width: 760px; }
"""


def render_drill(run: str, result: Mapping[str, Any], report: Mapping[str, Any], picture: str) -> str:
    """The page as HTML text. `result` is the content of verdict.json, `report` of report.json."""
    word, kind = ("every promise held", "good") if result["holds"] else ("a promise was broken", "bad")
    css = resources.files("regrow.show").joinpath("report.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(run)} · drill</title><style>\n{css}{STYLE}</style></head><body><main>\n"
        f"<h1>{escape(run)}</h1>"
        f'<p class="soft">Drill {escape(str(result["plan"]))}: <b class="{kind}">{word}</b>.</p>\n'
        f"{_tiles(result['faults'], report)}\n"
        f'<section class="picture">{picture}</section>\n'
        f"{_verdicts(result['verdicts'])}\n{_faults(result['faults'])}\n</main></body></html>\n"
    )


def _tiles(faults: Sequence[Mapping[str, Any]], report: Mapping[str, Any]) -> str:
    back = sorted(fault["seconds"] for fault in faults if fault["seconds"] is not None and not fault["grows"])
    tiles = [
        ("faults", f"{len(faults):,}"),
        ("stopped training", f"{len(back):,}"),
        ("back after, median", f"{back[len(back) // 2]:.1f} s" if back else "-"),
        ("steps lost", f"{sum(fault['lost_steps'] for fault in faults):,}"),
        ("steps", f"{report['steps']:,}"),
        ("goodput", "-" if report["goodput"] is None else f"{report['goodput']:.1%}"),
    ]
    shown = "".join(f'<div class="tile"><b>{value}</b><span>{name}</span></div>' for name, value in tiles)
    return f'<div class="tiles">{shown}</div>'


def _verdicts(verdicts: Sequence[Mapping[str, Any]]) -> str:
    rows = ""
    for verdict in verdicts:
        word, kind = WORDS[verdict["holds"]]
        number = f"{verdict['promise']}. " if verdict["promise"] else ""
        cases = "".join(f"<li>{escape(each)}</li>" for each in verdict["details"])
        rows += (
            f'<tr><td class="{kind}">{word}</td><td>{escape(number + verdict["claim"])}</td>'
            f"<td>{escape(verdict['figures'])}{f'<ul>{cases}</ul>' if cases else ''}</td></tr>"
        )
    head = "<tr><th></th><th>promise</th><th>figures</th></tr>"
    return f'<section><h2>Verdict</h2><div class="scroll"><table class="verdict">{head}{rows}</table></div></section>'


def _faults(faults: Sequence[Mapping[str, Any]]) -> str:
    rows = ""
    for fault in faults:
        after = "-" if fault["ranks_after"] is None else str(fault["ranks_after"])
        seconds = "-" if fault["seconds"] is None else f"{fault['seconds']:.2f} s"
        rows += (
            f'<tr><td class="n">{fault["number"]}</td><td class="n">{fault["step"]:,}</td>'
            f"<td>{escape(fault['what'])}</td><td>{fault['ranks_before']} → {after}</td>"
            f'<td class="n">{seconds}</td><td class="n">{fault["lost_steps"]}</td>'
            f"<td>{escape(fault['source'] or '-')}</td></tr>"
        )
    head = (
        '<tr><th class="n">no.</th><th class="n">step</th><th>fault</th><th>ranks</th>'
        '<th class="n">to the next step</th><th class="n">steps lost</th><th>state from</th></tr>'
    )
    note = '<p class="soft">A dash: no new group was formed for it.</p>'
    return f'<section><h2>Faults</h2>{note}<div class="scroll"><table>{head}{rows}</table></div></section>'
