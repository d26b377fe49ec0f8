"""Reports as people see them: in headless Chromium, light and dark, on a desk, on a phone and on paper.

With PAGES=FOLDER the screenshots are left there to be looked at.
"""

import math
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from regrow.record.history import History
from regrow.show.page import drill_page, run_page
from regrow.show.report import build_report
from regrow.show.timeline import draw_timeline, marks_of
from support.browser import Browser, find_browser

PROGRAM = find_browser()
pytestmark = [
    pytest.mark.skipif(PROGRAM is None, reason="needs Chromium: apt-get install chromium"),
    pytest.mark.slow,
]
T0 = 1_700_000_000.0
WINDOWS = {"desk": (1280, False), "desk-dark": (1280, True), "phone": (390, False), "phone-dark": (390, True)}
PAPER = 718  # CSS pixels between the margins of A4

# Text of plots that overlaps other text or leaves its plot, what is wider than the window, and what is hard to read.
LOOK = """
(() => {
  const wrong = [];
  const root = document.documentElement;
  if (root.scrollWidth > innerWidth + 1)
    wrong.push(`the page is ${root.scrollWidth} wide in a window of ${innerWidth}`);
  for (const plot of document.querySelectorAll('svg.timeline')) {
    const frame = plot.getBoundingClientRect();
    const texts = [...plot.querySelectorAll('text')].map(t => [t.textContent, t.getBoundingClientRect()]);
    texts.forEach(([text, a], i) => {
      if (a.left < frame.left - 1 || a.right > frame.right + 1 || a.bottom > frame.bottom + 1 || a.top < frame.top - 1)
        wrong.push(`${plot.getAttribute('aria-label')}: "${text}" leaves its plot`);
      if (a.height < 8) wrong.push(`"${text}" is ${a.height} pixels high`);
      for (const [other, b] of texts.slice(i + 1))
        if (Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
            && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 3)
          wrong.push(`${plot.getAttribute('aria-label')}: "${text}" overlaps "${other}"`);
    });
  }
  const linear = v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => .2126 * linear(r / 255) + .7152 * linear(g / 255) + .0722 * linear(b / 255);
  const colour = text => (text.match(/[\\d.]+/g) || []).map(Number);
  const paper = element => {
    for (let e = element; e; e = e.parentElement) {
      const c = colour(getComputedStyle(e).backgroundColor);
      if (c.length === 3 || c[3] === 1) return c.slice(0, 3);
    }
    return [255, 255, 255];
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node; (node = walker.nextNode());) {
    const element = node.parentElement, style = getComputedStyle(element);
    if (!node.textContent.trim() || !element.getClientRects().length || element.tagName === 'title') continue;
    const ink = colour(element instanceof SVGElement ? style.fill : style.color).slice(0, 3);
    const [a, b] = [light(ink), light(paper(element))].sort((x, y) => y - x);
    const contrast = (a + .05) / (b + .05);
    if (contrast < 4.5) wrong.push(`"${node.textContent.trim()}" has contrast ${contrast.toFixed(2)}`);
  }
  for (const box of document.querySelectorAll('.scroll'))
    if (matchMedia('print').matches && box.scrollWidth > box.clientWidth + 1)
      wrong.push(`a table is ${box.scrollWidth} wide on paper of ${box.clientWidth}`);
  return [...new Set(wrong)];
})()
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    assert PROGRAM is not None
    with Browser(PROGRAM) as found:
        yield found


def simulated(name: str, *, seed: int, steps: int, losses: int, lr: float) -> tuple[History, dict[str, Any]]:
    """A run of hours that loses ranks at random, with everything that the pages show, and its configuration."""
    dice, now, world_size, number = random.Random(seed), T0, 8, 1
    events: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []

    def event(kind: str, at: float, **fields: Any) -> None:
        events.append({"time": at, "event": kind, **fields})

    def begin(cause: str, start: int, source: str, init_s: float, restore_s: float) -> None:
        startup = {"workers": 3.0, "model": 1.5, "restore": restore_s}
        fields = {"generation": number, "world_size": world_size, "start_step": start, "cause": cause, "source": source}
        event("generation", now, init_s=init_s, restore_s=restore_s, startup_s=startup, **fields)

    versions = {"python": "3.11.7", "torch": "2.13.0", "ray": "2.60.0"}
    event("submitted", now, host="head-0", pid=4711, git=f"{seed:012x}", versions=versions, command="jobs.pretrain ...")
    now += dice.uniform(60, 120)
    begin("start", 0, "seed", 12.0, 0.0)
    failing = set(dice.sample(range(steps // 10, steps), losses))
    for step in range(1, steps + 1):
        if step in failing:
            failing.discard(step)
            cause = dice.choice(["worker_died", "node_silent", "worker_hung", "grow"])
            detect_s, regroup_s, restore_s = dice.uniform(1, 40), dice.uniform(1, 20), dice.uniform(0.2, 5)
            if cause == "grow":
                detect_s, world_size = 0.0, min(8, world_size + 1)
            else:
                event(
                    "failure", now + detect_s, cause=cause, detail="10.0.3.7: no answer", generation=number, ranks=[1]
                )
                world_size = max(4, world_size - 1)
            now += detect_s + regroup_s + restore_s
            number += 1
            begin(cause, step - 1, "snapshot" if cause != "node_silent" else "checkpoint", regroup_s, restore_s)
        step_s = dice.uniform(4.5, 5.5) * 8 / world_size
        now += step_s
        loss = 2.2 + 6.3 * math.exp(-step * lr * 90) + dice.gauss(0, 0.02)
        row = {
            "step": step,
            "tokens_seen": step * 2_097_152,
            "loss": loss,
            "grad_norm": 0.4,
            "lr": lr,
            "tokens_per_s": 2_097_152 / step_s,
            "mfu": 0.41,
            "step_s": step_s,
            "data_wait_s": 0.01,
            "snapshot_s": 0.02,
            "world_size": world_size,
            "generation": number,
            "batch_digest": f"{step:016x}",
            "time": now,
        }
        if step % 100 == 0:
            now += 9.0
            event("validation", now, step=step, loss=loss + 0.05, seconds=9.0)
            row |= {"validation_loss": loss + 0.05, "time": now}
            parts = [
                {
                    "node": f"{k:02x}" * 20,
                    "seconds": 27.0 if k else 29.0,
                    "check_s": 2.0,
                    "write_s": 24.0,
                    "bytes": 12e9,
                }
                for k in range(8)
            ]
            took = {"write_s": 27.0, "held_up_s": 2.0, "index_s": 1.5, "commit_s": 0.5, "nodes": parts}
            event("checkpoint", now + 1, step=step, bytes=96_000_000_000, seconds=31.0, **took)
        rows.append(row)
    event("stopped", now + 2, step=steps, reason="finished", detail="")
    config = {
        "run": {"name": name, "storage_path": "s3://llama/runs"},
        "train": {"steps": steps},
        "cluster": {"name": "h100x64", "min_workers": 4, "max_workers": 8},
        "data": {
            "seq_len": 8192,
            "corpora": {"web": "s3://llama/web", "code": "s3://llama/code", "books": "s3://llama/books"},
            "mixture": [
                {"from_tokens": 0, "weights": {"web": 8, "code": 1, "books": 1}},
                {"from_tokens": 6e8, "weights": {"web": 1, "code": 1, "books": 2}},
            ],
        },
        "optim": {"lr": lr, "global_batch_seqs": 256, "num_slices": 64},
    }
    events.sort(key=lambda each: each["time"])
    return History.of_logs(rows, events), config


def run_html() -> str:
    history, config = simulated("llama-8b", seed=1, steps=700, losses=9, lr=3e-4)
    ledger = history.ledger(T0 + 9000)
    nodes = [
        {"node": f"{k:02x}" * 20, "seconds": 4.0 - k / 4, "check_s": 0.5, "send_s": 3.0 - k / 4, "bytes": 12e9}
        for k in range(8)
    ]
    report = build_report(history, ledger, config)
    return run_page(report, history, ledger, config, T0 + 9000, node_snapshots=nodes)


def drill_html() -> str:
    history, config = simulated("kill_node", seed=2, steps=200, losses=3, lr=3e-4)
    ledger, marks = history.ledger(T0 + 9000), marks_of(history)
    fault = {"ranks_before": 4, "ranks_after": 3, "lost_steps": 1, "source": "snapshot", "grows": False}
    faults = [
        {
            "number": k,
            "step": 20 * k,
            "what": mark.text,
            "seconds": (mark.back or 0) - mark.time,
            "generation": k + 2,
            **fault,
        }
        for k, mark in enumerate(marks)
    ]
    case = "checkpoints/step-00000060/g000003-25770fc1-0.safetensors: " + "a long sentence about it " * 8
    verdicts = [
        {"promise": "1", "claim": "same", "holds": True, "figures": "200 of 200 digests equal", "details": []},
        {"promise": "3", "claim": "nothing names a rank", "holds": False, "figures": "1 file", "details": [case]},
        {"promise": "", "claim": "nothing is left", "holds": None, "figures": "not looked for", "details": []},
    ]
    result = {"plan": "kill_node", "holds": False, "verdicts": verdicts, "faults": faults}
    picture = draw_timeline(ledger, list(history.rows), marks, title="kill_node: 3 faults", noun="fault")
    return drill_page("kill_node-7", result, build_report(history, ledger, config), picture)


PAGES = {"report": run_html, "drill": drill_html}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = Path(os.environ["PAGES"]) if "PAGES" in os.environ else tmp_path_factory.mktemp("pages")
    made.mkdir(parents=True, exist_ok=True)
    for name, render in PAGES.items():
        (made / f"{name}.html").write_text(render(), encoding="utf-8")
    return made


def test_a_run_without_snapshots_has_nothing_to_say_of_them() -> None:
    history, config = simulated("llama-8b", seed=1, steps=20, losses=0, lr=3e-4)
    ledger = history.ledger(T0 + 9000)
    html = run_page(build_report(history, ledger, config), history, ledger, config, T0 + 9000)
    assert "<h2>Checkpoints</h2>" in html
    assert "Snapshots by node" not in html


def test_a_page_names_the_nodes_that_a_checkpoint_and_a_snapshot_waited_for() -> None:
    html = run_html()
    assert "It took 31" in html
    assert "nodes writing 27" in html
    assert "waiting for the slowest node 2" in html
    for heading, slowest, cells in (
        ("<h2>Snapshots by node, the newest</h2>", "000000000000", ("12 GB", "4.00 s", "4.00")),
        ("<h2>Checkpoints</h2>", "000000000000", ("12 GB", "29", "0.50")),
    ):
        section = html[html.index(heading) :].partition("</section>")[0]
        row = section[section.index(slowest) :].partition("</tr>")[0]
        assert "color-mix" in row
        for cell in cells:
            assert cell in row


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("name", PAGES)
def test_a_page_can_be_read_on_any_screen_and_asks_for_nothing(
    browser: Browser, folder: Path, name: str, window: str
) -> None:
    width, dark = WINDOWS[window]
    url = (folder / f"{name}.html").as_uri()
    browser.open(url, width=width, dark=dark)
    assert browser.evaluate(LOOK) == []
    assert browser.complaints == []
    assert browser.fetched == [url]
    assert browser.evaluate("document.querySelectorAll('svg.timeline').length") == 1
    picture = folder / f"{name}-{window}.png"
    browser.screenshot(picture)
    assert picture.stat().st_size > 20_000


@pytest.mark.parametrize("name", PAGES)
def test_a_page_prints_whole_and_dark_on_white(browser: Browser, folder: Path, name: str) -> None:
    browser.open((folder / f"{name}.html").as_uri(), width=PAPER, dark=True, media="print")
    assert browser.evaluate(LOOK) == []
    assert browser.evaluate("getComputedStyle(document.querySelector('h1')).color") == "rgb(27, 27, 25)"
    assert browser.evaluate("getComputedStyle(document.documentElement).colorScheme") == "light"  # white paper
    browser.screenshot(folder / f"{name}-paper.png")
    browser.pdf(folder / f"{name}.pdf")
    assert (folder / f"{name}.pdf").read_bytes().startswith(b"%PDF-")


def test_what_is_hard_to_read_would_be_noticed(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "bad.html").write_text(
        "<body style='background:#fff;width:3000px'><p style='color:#ccc'>pale</p>"
        "<svg class=timeline width=200 height=50 viewBox='0 0 200 50' aria-label=mine>"
        "<text x=10 y=20>one</text><text x=15 y=22>two</text>"
        "<text x=190 y=40>outside</text></svg><script>console.error('sorry')</script><img src=missing.png></body>"
    )
    browser.open((tmp_path / "bad.html").as_uri(), width=1000)
    found = "\n".join(browser.evaluate(LOOK))
    for words in ("3008 wide", '"pale" has contrast', '"one" overlaps "two"', '"outside" leaves its plot'):
        assert words in found, found
    assert "sorry" in browser.complaints
    assert any("not loaded" in each or "ERR_FILE_NOT_FOUND" in each for each in browser.complaints)
    assert len(browser.fetched) == 2
