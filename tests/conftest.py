"""What all tests have in common."""

import os
from pathlib import Path

from hypothesis import settings

settings.register_profile("regrow", deadline=None)  # a busy machine is no failure
settings.load_profile("regrow")
# processes that tests start find `support` too: Ray's workers take their path from the environment
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
