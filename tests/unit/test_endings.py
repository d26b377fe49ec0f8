"""200 random instants at which a run is ended, in virtual time, with checkpoints in real files.

Stopped, stopped twice, its driver killed and started again, given up, its storage away for ten minutes: what the run
had committed is in storage, or one line says what is missing (promise 11). `support.control_world` looks as a run ends.
"""

import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from regrow.control.checkpoints import Checkpoints
from support.control_world import Broken
from support.ending_world import WAYS, end_somehow

NUM_INSTANTS = 200


@pytest.fixture
def folder() -> Iterator[Path]:
    """In memory: every file is made durable."""
    found = Path(tempfile.mkdtemp(prefix="endings-", dir="/dev/shm"))
    yield found
    shutil.rmtree(found)


def test_whenever_and_however_a_run_ends_its_newest_committed_step_is_in_storage_or_said_to_be_missing(
    folder: Path,
) -> None:
    outcomes: Counter[tuple[str, str]] = Counter()
    for seed in range(NUM_INSTANTS):
        way = WAYS[seed % len(WAYS)]
        made = end_somehow(seed, folder / str(seed), way)
        outcomes[way, "missing" if made.missing is not None else "in storage"] += 1
    each = NUM_INSTANTS // len(WAYS)
    for way in ("stop", "kill the driver", "give up", "outage"):
        assert outcomes[way, "in storage"] > 0.8 * each, outcomes
    assert outcomes["outage that outlasts it", "missing"] > 0.5 * each, outcomes


def test_a_run_that_ends_without_a_look_at_its_memory_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Checkpoints, "secure", lambda self, reason, now: None)
    for seed in range(NUM_INSTANTS):
        try:
            end_somehow(seed, folder / str(seed), WAYS[seed % len(WAYS)])
        except Broken:
            return
    pytest.fail("nobody saw that nothing was written at the end")
