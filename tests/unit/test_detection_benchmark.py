"""benchmarks/detection.py: how rounds of several calls add up, without the hours that they take."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
from benchmarks import detection  # noqa: E402


def test_rounds_of_earlier_calls_count_with_those_of_this_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("one", [3.0, 9.0]), ("other", [4.0])):
        samples = [
            {"side": "ours", "fault": "process_death", "named_s": each, "full_speed_s": 10 * each} for each in seconds
        ]
        given_up = {"side": "default", "fault": "hang", "named_s": None, "full_speed_s": None}
        result = {"runs": {"whole_jobs": {"samples": [*samples, given_up]}}, "failures": ["ours: ended"], "git": name}
        (tmp_path / name).write_text(json.dumps(result))

    arguments = ["--only", "jobs", "--rounds", "0", "--stock-rounds", "0", "--out", "all", "--add", "one", "other"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["detection.py", *arguments])
    detection.main()

    found = json.loads((tmp_path / "all").read_bytes())
    assert found["figures"] == {"process_death_named_s": 4.0, "process_death_full_speed_s": 40.0}
    assert found["spread"]["process_death_named_s"] == [3.0, 9.0]
    assert found["runs"]["default_hang_given_up"] == {"of": 2, "given_up": 2}
    assert found["failures"] == ["ours: ended"]
    assert [each["git"] for each in found["added"]] == ["one", "other"]
