"""benchmarks/commits.py: what it makes of the rounds, without the hour that they take."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
from benchmarks import commits, measure  # noqa: E402


def test_medians_are_compared_and_a_figure_of_one_commit_alone_is_not() -> None:
    old = [{"hang_s": 2.0, "lost_steps_max": 0.0}, {"hang_s": 4.0, "lost_steps_max": 0.0}]
    new = [{"hang_s": 3.0, "lost_steps_max": 0.0, "drain_s": 1.0}, {"hang_s": 6.0, "lost_steps_max": 1.0}]
    ratios, spread, sides = commits.summarize({"recovery": {commits.OLD: old, commits.NEW: new}})
    assert ratios == {"recovery_hang_s_vs_old": pytest.approx(1.5)}
    assert spread == {"recovery_hang_s_vs_old": [3.0 / 4.0, 6.0 / 2.0]}
    assert sides["recovery_drain_s"] == {commits.NEW: {"median": 1.0, "range": [1.0, 1.0], "all": [1.0]}}
    assert sides["recovery_lost_steps_max"][commits.OLD]["median"] == 0.0, "no ratio to nothing, but seen"


def test_rounds_of_other_commits_do_not_count(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    commits.File(out, {commits.OLD: "a", commits.NEW: "b"}).add("recovery", commits.OLD, {"hang_s": 2.0})
    again = commits.File(out, {commits.OLD: "a", commits.NEW: "b"})
    again.resume()
    assert again.has("recovery", commits.OLD, 0)
    assert not again.has("recovery", commits.NEW, 0)
    with pytest.raises(SystemExit, match="give another --out"):
        commits.File(out, {commits.OLD: "a", commits.NEW: "c"}).resume()
    assert json.loads(out.read_text())["rounds"] == {"recovery": {"old": [{"hang_s": 2.0}]}}


def test_both_sides_are_what_was_committed_whatever_the_checkout_has_become_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository, out = tmp_path / "repository", tmp_path / "figures.json"
    file = repository / "seconds"

    def git(*arguments: str) -> None:
        command = ["git", "-C", str(repository), "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
        subprocess.run(command, check=True, capture_output=True)

    repository.mkdir()
    git("init")
    for seconds in ("1", "2"):
        file.write_text(seconds)
        git("add", ".")
        git("commit", "-m", seconds)
    file.write_text("3")

    def measured(tree: Path, folder: Path) -> dict[str, float]:
        found = {"s": float((tree / "seconds").read_text())}
        git("commit", "--allow-empty", "-am", "another")  # beside the benchmark, by another hand
        return found

    monkeypatch.setattr(commits, "ROOT", repository)
    monkeypatch.setattr(commits, "BENCHMARKS", {"recovery": measured})
    monkeypatch.setattr(sys, "argv", ["commits.py", "--old", "HEAD~1", "--out", str(out), "--rounds", "2"])
    with monkeypatch.context() as patched:
        patched.setattr(commits.signal, "signal", lambda *_: None)
        commits.main()
    result = json.loads(out.read_text())
    assert result["rounds"]["recovery"] == {"old": [{"s": 1.0}] * 2, "new": [{"s": 2.0}] * 2}
    worktrees = subprocess.run(["git", "worktree", "list"], cwd=repository, capture_output=True, text=True, check=True)
    assert len(worktrees.stdout.splitlines()) == 1, "both are removed again"


def test_a_figure_is_of_the_commit_that_was_there_when_its_benchmark_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, moved in (("a", {}), ("b", {"git_at_end": "b"})):
        monkeypatch.setattr(measure, "SHA", "a")
        monkeypatch.setattr(measure, "git_sha", lambda name=name: name)
        measure.write_result(tmp_path / "x", {}, spread={}, peers={})
        result = json.loads((tmp_path / "x").read_text())
        assert {key: value for key, value in result.items() if key.startswith("git")} == {"git": "a"} | moved


def test_a_commit_that_does_not_exist_is_one_line(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks/commits.py"), "--old", "nonsense", "--out", str(tmp_path / "x")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr == "--old nonsense: there is no such commit here\n"
