"""benchmarks/snapshot.py: which windows follow one another, and what is made of them, without the minutes it takes."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import snapshot, snapshot_ranks  # noqa: E402
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


LINKS, STEPS = [1.0, 10.0], [2.0]


def measured(wanted: dict[str, Any]) -> dict[str, Any]:
    """What a part might have."""
    if wanted["part"] == "link":
        return {"seconds": [1.0, 1.25], "bytes": 10**9, "bare_bytes_per_s": [1e9], "link_bytes_per_s": 3.125e9}
    seconds = {("ours", 1.0): 5.0, ("ours", 10.0): 0.1, ("dcp_async_thread", 0): 0.3}.get(
        (wanted["side"], wanted["gbit"]), 0.2
    )
    pair = {"plain_s": 2.0, "added_s": seconds, "plain_cpu_s": 4.0, "added_cpu_s": seconds, "every": 10}
    return {"pairs": [pair] * 3, "choices": [{"commit_s": 1.5}]}


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The parts that were run."""
    done: list[dict[str, Any]] = []

    def run_part(name: str, options: Any, **more: Any) -> dict[str, Any]:
        done.append({"part": name, **more})
        return measured(done[-1])

    monkeypatch.setattr(snapshot, "run", run_part)
    return done


def measure(path: Path, *, pairs: int = 3, resume: bool = False) -> dict[str, Any]:
    options = SimpleNamespace(quick=False, steps=STEPS, links=LINKS, only=["cells", "link"])
    kept = snapshot.Kept(path, {"pairs": pairs})
    if resume:
        kept.resume()
    snapshot.measure(kept, options)  # type: ignore[arg-type]
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_cells_that_no_distance_satisfies_are_named_and_left_out(ran: list[dict[str, Any]], tmp_path: Path) -> None:
    result = measure(tmp_path / "result.json")
    assert result["infeasible"] == ["2s_1gbit"]
    assert result["figures"]["added_step_fraction_max"] == pytest.approx(0.05)
    assert result["figures"]["until_committed_s"] == 1.5
    assert result["figures"]["link_use_25gbit"] == pytest.approx(0.9)


def test_the_peers_faster_way_is_compared_at_the_distance_of_the_fastest_link(
    ran: list[dict[str, Any]], tmp_path: Path
) -> None:
    result = measure(tmp_path / "result.json")
    assert [each["every_steps"] for each in ran if each.get("side", "ours") != "ours"] == [10, 10]
    assert result["peers"]["dcp_added_s_2s"]["side"] == "dcp_async_process"
    assert result["figures"]["blocked_vs_tuned_dcp"] == pytest.approx(0.5)


def test_parts_that_are_there_count_and_what_is_missing_is_run(ran: list[dict[str, Any]], tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole.json", tmp_path / "cut.json"
    result = measure(whole)
    assert len(ran) == 5
    cut.write_text(json.dumps({**result, "parts": result["parts"][:2]}))
    ran.clear()
    again = measure(cut, resume=True)
    assert [each["side"] for each in ran] == ["ours", "dcp_async_process", "dcp_async_thread"]
    assert again["figures"] == result["figures"]


def test_parts_that_were_measured_otherwise_are_refused(ran: list[dict[str, Any]], tmp_path: Path) -> None:
    measure(tmp_path / "result.json")
    with pytest.raises(SystemExit, match=r"has settings \{'pairs': 3\}, these are \{'pairs': 5\}"):
        measure(tmp_path / "result.json", pairs=5, resume=True)
