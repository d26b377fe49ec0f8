"""What all tests have in common."""

import os
from pathlib import Path

from hypothesis import settings

settings.register_profile("regrow", deadline=None)  # a busy machine is no failure
settings.load_profile("regrow")
# processes that tests start find `support` too: Ray's workers take their path from the environment
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))


def pytest_xdist_auto_num_workers() -> int:
    """Of `-n auto`: two more than there are cores, as tests wait for processes of their own half of the time."""
    return len(os.sched_getaffinity(0)) + 2
