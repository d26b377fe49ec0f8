"""The picture of a run over wall time: whole, in bounds, and of bounded size."""

import itertools
import re
import xml.etree.ElementTree as ElementTree
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from regrow.record.history import History
from regrow.record.ledger import Ledger, columns
from regrow.show.page import drill_page
from regrow.show.timeline import COLUMNS, LEFT, RIGHT, STRIPS, WIDTH, Mark, draw_timeline, marks_of

Row = dict[str, Any]
SVG = "{http://www.w3.org/2000/svg}"


def run(steps: int = 60, loses_at: int = 20) -> tuple[list[Row], list[Row]]:
    """Rows and events of a run whose group shrinks from 3 to 2 after a step, 5 s later."""
    rows, time = [], 110.0
    for step in range(1, steps + 1):
        time += 5.5 if step == loses_at + 1 else 0.5
        rows.append(
            {
                "step": step,
                "tokens_seen": 100 * step,
                "loss": 8.0 - 3.0 * step / steps,
                "tokens_per_s": 200.0 if step <= loses_at else 150.0,
                "step_s": 0.5,
                "data_wait_s": 0.0,
                "snapshot_s": 0.0,
                "world_size": 3 if step <= loses_at else 2,
                "generation": 1 if step <= loses_at else 2,
                "time": time,
            }
        )
    at = rows[loses_at - 1]["time"]
    generation: Row = {"event": "generation", "init_s": 1.0, "restore_s": 0.5, "start_step": 0}
    events: list[Row] = [
        {"event": "submitted", "time": 100.0},
        generation | {"generation": 1, "time": 110.0, "world_size": 3, "cause": "start"},
        {"event": "failure", "generation": 1, "time": at + 1.0, "cause": "worker_died"},
        generation | {"generation": 2, "time": at + 5.0, "world_size": 2, "cause": "worker_died"},
        {"event": "stopped", "time": time + 1.0, "step": steps, "reason": "finished"},
    ]
    return rows, events


def account(rows: list[Row], events: list[Row], now: float) -> Ledger:
    return History.of_logs(rows, events).ledger(now)


def picture(rows: list[Row], events: list[Row], marks: list[Mark]) -> str:
    return draw_timeline(account(rows, events, 1e4), rows, marks, title="three & two", noun="fault")


def test_a_runs_own_interruptions_are_marked_with_their_causes_and_what_they_cost() -> None:
    rows, events = run()
    rows[30]["validation_loss"] = 5.25
    (mark,) = marks_of(History.of_logs(rows, events))
    assert (mark.text, mark.time, mark.back) == ("a worker died", events[2]["time"], rows[20]["time"])
    drawn = draw_timeline(account(rows, events, 1e4), rows, [mark], title="mine")
    assert "training stood still after 1 of 1 interruption" in drawn
    assert "a worker died · 4.5 s" in drawn
    assert "step 31: validation loss 5.2500" in drawn
    assert "step 31: 3.1k tokens, 2 ranks, generation 2, loss 6.4500, 150 tokens/s" in drawn


def test_an_interruption_is_no_longer_for_steps_that_were_taken_back_later() -> None:
    """An hour of steps of the group that it brought about is undone: it was back after 5 s all the same."""
    rows, events = run()
    group = events[3]
    lost, ready = group["time"] + 3600.0, group["time"] + 3604.0
    again = {**group, "generation": 3, "time": ready, "cause": "nonfinite", "start_step": 20}
    events = [*events[:4], {"event": "failure", "generation": 2, "time": lost, "cause": "nonfinite"}, again]
    later = ready - rows[19]["time"]
    redone = [{**row, "generation": 3, "time": row["time"] + later} for row in rows[20:]]
    died, nonfinite = marks_of(History.of_logs([*rows[:20], *redone], events))
    assert (died.time, died.back) == (events[2]["time"], group["time"])
    assert (nonfinite.time, nonfinite.back) == (lost, redone[0]["time"])


def test_it_shows_faults_states_ranks_loss_and_throughput() -> None:
    rows, events = run()
    drawn = picture(rows, events, [Mark(120.0, "kill_worker rank=1", 125.5, 0)])
    root = ElementTree.fromstring(drawn)
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert texts[0] == "three & two"
    assert "60 steps, 6k tokens, 2 to 3 ranks" in str(texts[1])
    assert "training stood still after 1 of 1 fault" in str(texts[1])
    assert {"kill_worker rank=1 · 5.5 s", "ranks", "loss", "tokens/s", "3", "2"} <= set(texts)
    assert any(str(text).startswith("productive 6") for text in texts)
    said = [title.text for title in root.iter(f"{SVG}title")]
    assert "fault 0: kill_worker rank=1, 5.50 s to the first step of the next group" in said
    assert "3 ranks" in said


def test_a_node_that_comes_stops_nothing() -> None:
    drawn = picture(*run(), [Mark(120.0, "return_node", 150.0, 1, grows=True)])
    assert "training stood still after 0 of 0 faults" in drawn
    assert "return_node · in after 30.0 s" in drawn
    assert 'class="away"' not in drawn


def test_what_a_strip_tells_of_many_steps_are_their_means() -> None:
    rows, _ = run(steps=10 * STRIPS, loses_at=10 * STRIPS)
    for row in rows:
        is_last = row["step"] % 10 == 0
        row |= {"tokens_per_s": 100.0, "mfu": 0.04} if is_last else {"tokens_per_s": 1000.0, "mfu": 0.4}
    drawn = picture(rows, [], [])
    assert drawn.count(", 910 tokens/s, MFU 36.4%</title>") == STRIPS


def test_it_stands_alone_in_light_and_in_dark() -> None:
    drawn = picture(*run(), [])
    assert "prefers-color-scheme: dark" in drawn
    assert not re.search(r"(?:href|src|url\()", drawn)
    used = set(re.findall(r"var\(--(\w+)\)", drawn))
    light, dark = drawn.partition("@media")[::2]
    for name in used:
        assert f"--{name}:" in light
        assert f"--{name}:" in dark


def test_the_first_steep_steps_of_a_long_run_leave_the_panel_and_hide_nothing_of_the_rest() -> None:
    rows, events = run(steps=1000, loses_at=500)
    for row in rows[:20]:
        row["loss"] = 1000.0
    root = ElementTree.fromstring(picture(rows, events, []))
    loss = root.findall(f"{SVG}svg")[0]
    top, height = float(loss.attrib["y"]), float(loss.attrib["height"])
    corners = [corner for line in loss.iter(f"{SVG}polyline") for corner in line.attrib["points"].split()]
    ys = [float(corner.split(",")[1]) for corner in corners]
    assert min(ys) < top  # cut off there
    assert max(ys) - sorted(ys)[20] > 0.8 * height  # the others have the panel for themselves
    assert loss.attrib["viewBox"].split()[1] == loss.attrib["y"]


def test_everything_lies_inside_and_curves_break_where_the_group_changes() -> None:
    rows, events = run()
    root = ElementTree.fromstring(picture(rows, events, [Mark(120.0, "a" * 300, 125.5), Mark(149.0, "late")]))
    height = float(root.attrib["viewBox"].split()[3])
    for line in [*root.iter(f"{SVG}polyline"), *root.iter(f"{SVG}polygon")]:
        for corner in line.attrib["points"].split():
            x, y = map(float, corner.split(","))
            assert LEFT - 1 <= x <= WIDTH - RIGHT + 1
            assert 0 <= y <= height
    curves = [line for line in root.iter(f"{SVG}polyline") if len(line.attrib["points"].split()) > 4]
    assert len(curves) == 4  # loss and throughput, of two generations


def test_labels_never_cover_each_other() -> None:
    rows, events = run()
    marks = [Mark(112.0 + 0.4 * number, f"kill_worker rank={number}", None, number) for number in range(12)]
    root = ElementTree.fromstring(picture(rows, events, marks))
    labels = [text for text in root.iter(f"{SVG}text") if str(text.text).startswith("kill_worker")]
    lanes: dict[str, list[tuple[float, int]]] = {}
    for label in labels:
        lanes.setdefault(label.attrib["y"], []).append((float(label.attrib["x"]), len(str(label.text))))
    assert 4 <= len(labels) <= 12
    for lane in lanes.values():
        for (x, characters), (later, _) in itertools.pairwise(sorted(lane)):
            assert x + 6 * characters <= later
    assert len(list(root.iter(f"{SVG}g"))) == 12  # each fault has its line


def test_a_long_run_is_drawn_with_a_bounded_size() -> None:
    rows, events = run(steps=20_000, loses_at=9_000)
    marks = [Mark(110.0 + 50 * number, "kill_worker", 112.0 + 50 * number, number) for number in range(200)]
    assert len(picture(rows, events, marks)) < 400_000


def test_a_short_standstill_in_a_long_run_can_still_be_seen() -> None:
    rows, events = run(steps=20_000, loses_at=9_000)
    found = columns(account(rows, events, 1e5), COLUMNS)
    assert {"init", "down"} & {state for begin, _, state in found if begin > rows[8_990]["time"]}


@given(st.integers(1, 400), st.data())
def test_columns_cover_the_run_without_a_gap(steps: int, data: st.DataObject) -> None:
    rows, events = run(steps=steps + 1, loses_at=data.draw(st.integers(1, steps)))
    ledger = account(rows, events, 1e4)
    found = columns(ledger, COLUMNS)
    assert len(found) <= COLUMNS
    assert found[0][0] == ledger.begin
    assert abs(found[-1][1] - ledger.end) < 1e-6
    assert all(left[1] == right[0] and left[2] != right[2] for left, right in itertools.pairwise(found))


def test_a_run_that_never_trained_is_drawn_too() -> None:
    ElementTree.fromstring(picture([], [], []))
    ElementTree.fromstring(picture([], [{"event": "submitted", "time": 100.0}], [Mark(101.0, "kill_driver")]))


def test_bands_are_the_ledgers_seconds() -> None:
    rows, events = run()
    ledger = account(rows, events, 1e4)
    for state in ("init", "down", "other"):
        painted = sum(end - begin for begin, end, each in ledger.bands if each == state)
        assert abs(painted - ledger.time_s[state]) < 1e-6
    assert ledger.bands[0][0] == ledger.begin
    assert ledger.bands[-1][1] == ledger.end


def test_what_keepers_and_the_coordinator_say_while_training_stands_still_is_no_sign_of_life() -> None:
    rows, events = run()
    at = rows[19]["time"]
    said = ["snapshot_failed", "forming", "checkpoint", "note", "quarantine"]
    chatter = [{"event": name, "time": at + 2.0 + number / 10} for number, name in enumerate(said)]
    quiet = account(rows, events, 1e4).time_s
    loud = account(rows, sorted([*events, *chatter], key=lambda event: event["time"]), 1e4).time_s
    assert quiet["down"] > 2.0
    assert loud == quiet


def test_a_drill_counts_what_a_group_lost_once_however_many_faults_brought_it_about() -> None:
    """Two nodes that went at once had lost ten steps by the tile, and five by the verdict below it."""
    fault = {"step": 20, "what": "kill_node", "ranks_before": 4, "source": "snapshot", "grows": False}
    came = [(5.0, 2, 5), (4.5, 2, 5), (None, None, 0), (1.5, 3, 2), (9.0, 4, 2)]  # seconds, generation, steps
    faults = [
        fault | {"number": k, "ranks_after": 2, "seconds": seconds, "generation": generation, "lost_steps": lost}
        for k, (seconds, generation, lost) in enumerate(came)
    ]
    result = {"plan": "two", "holds": True, "verdicts": [], "faults": faults}
    page = drill_page("d", result, {"steps": 60, "goodput": 0.5, "effective": 0.4, "paid": None}, "")
    tiles = {name: figure for figure, name in re.findall(r"<b>([^<]*)</b>\s*<span>([^<]*)", page)}
    assert tiles["steps lost"] == "9"
    assert tiles["back after, median"] == "4.8 s"  # of 1.5, 4.5, 5.0 and 9.0


def test_the_page_holds_picture_verdict_and_faults_and_escapes_what_it_is_told() -> None:
    rows, events = run()
    fault = {"number": 0, "step": 20, "what": "kill <worker>", "ranks_before": 3, "ranks_after": 2, "seconds": 5.5}
    result = {
        "plan": "kill_worker",
        "holds": False,
        "verdicts": [
            {"promise": "1", "claim": "same & same", "holds": False, "figures": "1 of 2", "details": ["step <3>"]},
            {"promise": "", "claim": "left", "holds": None, "figures": "-", "details": []},
        ],
        "faults": [fault | {"lost_steps": 1, "source": "snapshot", "grows": False, "generation": 2}],
    }
    page = drill_page(
        "a<b", result, {"steps": 60, "goodput": 0.5, "effective": 0.4, "paid": None}, picture(rows, events, [])
    )
    for said in (
        "a&lt;b",
        "same &amp; same",
        "step &lt;3&gt;",
        "kill &lt;worker&gt;",
        "not judged",
        "a promise was broken",
    ):
        assert said in page
    assert "<svg" in page
    assert "<script" not in page
