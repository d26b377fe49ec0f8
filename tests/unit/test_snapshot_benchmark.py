"""benchmarks/snapshot.py: which steps are beside a snapshot, and what is made of them, without the minutes it takes."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import snapshot, snapshot_ranks  # noqa: E402
from benchmarks.snapshot_ranks import Cell, Steps, Windows, compare  # noqa: E402

from regrow.control.spacing import Spacing  # noqa: E402

PLAIN_S, ADDED_S = 1.0, 0.4


def run(monkeypatch: pytest.MonkeyPatch, cell: Cell, *, commit_steps: int = 1, slower: float = 0.0) -> Windows:
    """Steps of a second, each `slower` than the one before, those with a copy beside them longer, in virtual time; a
    wish is heard a step later."""
    now, cpu = [0.0], [0.0]
    monkeypatch.setattr(snapshot_ranks, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(snapshot_ranks, "family_cpu_s", lambda root: cpu[0])
    left = 0
    saver = SimpleNamespace(begun=0, on_its_way=lambda: left > 0)
    windows = Windows(cell, saver, Spacing(cell.most_steps_lost), 1)
    every = windows.wish()
    for step in range(1, 3000):
        took = PLAIN_S + slower * step + (ADDED_S / commit_steps if left else 0.0)
        if left:
            left -= 1
            if not left:
                now[0] += took / 2
                windows.committed(saver.begun)
                now[0] -= took / 2
        now[0] += took
        cpu[0] += 2 * took
        windows.log({"step": step, "step_s": took, "data_wait_s": 0.0})
        if windows.done:
            return windows
        if step - saver.begun >= every:
            saver.begun, left = step, commit_steps
        every = windows.wish()
    raise AssertionError("it never ends")


@pytest.mark.parametrize("slower", [0.0, 0.001], ids=["steady", "slowing"])
@pytest.mark.parametrize("commit_steps", [1, 3, 6])
def test_each_snapshot_is_compared_with_the_plain_steps_around_it(
    monkeypatch: pytest.MonkeyPatch, commit_steps: int, slower: float
) -> None:
    cell = Cell(PLAIN_S, snapshots=3, most_steps_lost=16, mtbf_s=60.0)
    windows = run(monkeypatch, cell, commit_steps=commit_steps, slower=slower)
    assert len(windows.compared) == 3
    for one in windows.compared:
        assert one["added_s"] == pytest.approx(ADDED_S)
        assert one["added_cpu_s"] == pytest.approx(2 * ADDED_S)
        assert one["steps_plain"] >= 2 * one["steps_beside"] >= 2 * (commit_steps + 1)
    if not slower:
        assert [one["plain_s"] for one in windows.compared] == pytest.approx([PLAIN_S] * 3)
        assert windows.choices[-1].added_s == pytest.approx(ADDED_S)
    assert windows.spacing.every_steps == windows.choices[-1].every_steps >= commit_steps


def test_what_a_snapshot_adds_is_a_sum_over_the_steps_beside_it() -> None:
    before, one = Steps(plain=[(1.0, 2.0)] * 2), Steps(beside=[(1.5, 2.5), (1.25, 2.0)], plain=[(1.1, 2.2)] * 2)
    assert compare(before, one) == pytest.approx(
        {"added_s": 0.65, "added_cpu_s": 0.3, "plain_s": 1.05, "plain_cpu_s": 2.1, "steps_beside": 2, "steps_plain": 4}
    )


LINKS, STEPS = [1.0, 10.0], [2.0]


def measured(wanted: dict[str, Any]) -> dict[str, Any]:
    """What a part might have."""
    if wanted["part"] == "link":
        return {"seconds": [1.0, 1.25], "bytes": 10**9, "bare_bytes_per_s": [1e9], "link_bytes_per_s": 3.125e9}
    seconds = {("ours", 1.0): 5.0, ("ours", 10.0): 0.1, ("dcp_async_thread", 0): 0.3}.get(
        (wanted["side"], wanted["gbit"]), 0.2
    )
    one = {"plain_s": 2.0, "added_s": 10 * seconds, "plain_cpu_s": 4.0, "added_cpu_s": 10 * seconds}
    return {"snapshots": [one] * 3, "every_steps": 10, "choices": [{"commit_s": 1.5}]}


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The parts that were run."""
    done: list[dict[str, Any]] = []

    def run_part(name: str, options: Any, **more: Any) -> dict[str, Any]:
        done.append({"part": name, **more})
        return measured(done[-1])

    monkeypatch.setattr(snapshot, "run", run_part)
    return done


def measure(path: Path, *, snapshots: int = 3, resume: bool = False) -> dict[str, Any]:
    options = SimpleNamespace(quick=False, steps=STEPS, links=LINKS, only=["cells", "link"])
    kept = snapshot.Kept(path, {"snapshots": snapshots})
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
    assert result["peers"]["dcp_added_steps_2s"]["side"] == "dcp_async_process"
    assert result["peers"]["dcp_added_steps_2s"]["median"] == pytest.approx(1.0)
    assert result["peers"]["dcp_added_step_fraction_2s"]["median"] == pytest.approx(0.1)
    assert result["peers"]["dcp_added_step_fraction_2s"]["every_steps"] == 10
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
    with pytest.raises(SystemExit, match=r"has settings \{'snapshots': 3\}, these are \{'snapshots': 5\}"):
        measure(tmp_path / "result.json", snapshots=5, resume=True)
