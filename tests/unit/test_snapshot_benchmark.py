"""benchmarks/snapshot.py: which windows follow one another, and what is made of them, without the minutes it takes."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import snapshot, snapshot_ranks  # noqa: E402
from benchmarks.measure import Result  # noqa: E402
from benchmarks.snapshot_ranks import NEVER, Cell, Windows  # noqa: E402

from regrow.control.spacing import Spacing  # noqa: E402

PLAIN_S, ADDED_S = 1.0, 0.4


def run(monkeypatch: pytest.MonkeyPatch, cell: Cell, *, commit_steps: int = 1) -> Windows:
    """Steps of a second, those with a copy beside them longer, in virtual time; a wish is heard a step later."""
    now, cpu = [0.0], [0.0]
    monkeypatch.setattr(snapshot_ranks, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(snapshot_ranks, "family_cpu_s", lambda root: cpu[0])
    begun, left = 0, 0
    saver = SimpleNamespace(on_its_way=lambda: left > 0)
    windows = Windows(cell, saver, Spacing(cell.most_steps_lost), 1)
    every = windows.wish()
    for step in range(1, 3000):
        took = PLAIN_S + (ADDED_S / commit_steps if left else 0.0)
        if left:
            left -= 1
            if not left:
                now[0] += took / 2
                windows.committed(begun)
                now[0] -= took / 2
        now[0] += took
        cpu[0] += 2 * took
        windows.log({"step": step, "step_s": took, "data_wait_s": 0.0})
        if windows.done:
            return windows
        if step - begun >= every:
            begun, left = step, commit_steps
        every = windows.wish()
    raise AssertionError("it never ends")


@pytest.mark.parametrize("commit_steps", [1, 3])
def test_windows_with_and_without_take_turns_and_give_what_one_snapshot_adds(
    monkeypatch: pytest.MonkeyPatch, commit_steps: int
) -> None:
    windows = run(monkeypatch, Cell(PLAIN_S, pairs=3, most_steps_lost=16, mtbf_s=60.0), commit_steps=commit_steps)
    assert len(windows.pairs) == 3
    for pair in windows.pairs:
        assert pair["commits"] >= 3
        assert pair["plain_s"] == pytest.approx(PLAIN_S)
        assert pair["added_s"] * pair["every"] == pytest.approx(ADDED_S, rel=0.35)
        assert pair["added_cpu_s"] == pytest.approx(2 * pair["added_s"])
    assert windows.choices[-1].added_s == pytest.approx(ADDED_S)


def test_the_peer_saves_at_the_distance_that_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    windows = run(monkeypatch, Cell(PLAIN_S, pairs=2, most_steps_lost=16, mtbf_s=60.0, every_steps=5))
    assert {pair["every"] for pair in windows.pairs} == {5}
    assert windows.wish() in (5, NEVER)


def test_cells_that_no_distance_satisfies_are_named_and_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    added = {1: 5.0, 10: 0.1}

    def part(name: str, options: Any, *, side: str, gbit: float, **more: Any) -> dict[str, Any]:
        seconds = added.get(int(gbit), 0.2)
        pair = {"plain_s": 2.0, "added_s": seconds, "plain_cpu_s": 4.0, "added_cpu_s": seconds, "every": 10}
        return {"pairs": [pair] * 3, "choices": [{"commit_s": 1.5}], "load_before": 0.0}

    monkeypatch.setattr(snapshot, "part", part)
    result = Result()
    snapshot.measure_cells(result, SimpleNamespace(quick=True, steps=[2.0], links=None))  # type: ignore[arg-type]
    assert result.runs["infeasible"] == ["2s_1gbit"]
    assert result.figures["added_step_fraction_max"] == pytest.approx(0.05)
    assert result.figures["blocked_vs_tuned_dcp"] == pytest.approx(0.5)
    assert result.figures["until_committed_s"] == 1.5
