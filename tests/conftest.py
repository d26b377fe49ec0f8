"""What all tests have in common."""

import os
from pathlib import Path

import pytest
from hypothesis import settings

from support.durations import slow_tests

settings.register_profile("regrow", deadline=None)  # a busy machine is no failure
settings.load_profile("regrow")
# processes that tests start find `support` too: Ray's workers take their path from the environment
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What took long when it was measured is `slow`."""
    slow = slow_tests()
    for item in items:
        if item.nodeid.partition("[")[0] in slow:
            item.add_marker(pytest.mark.slow)
