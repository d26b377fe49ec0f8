"""A folder of storage that a test can break, as a drill breaks a host's."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


class Mounted:
    """A run's folder, and what is wrong with it."""

    def __init__(self, folder: Path) -> None:
        self.real, self.folder = folder / "real", folder / "mounted"
        self.real.mkdir()
        self.folder.mkdir()
        command = [sys.executable, "-m", "regrow.drill.breakable", str(self.real), str(self.folder)]
        with_parent = ["setpriv", "--pdeathsig", "KILL", *command]
        self.server = subprocess.Popen(with_parent, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.server.stdout is not None
        assert self.server.stdout.readline(), "it could not be mounted"

    def breaks(self, **fault: Any) -> None:
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        self.server.stdin.write(json.dumps(fault) + "\n")
        self.server.stdin.flush()
        self.server.stdout.readline()

    def close(self) -> None:
        self.server.kill()
        self.server.wait()
        subprocess.run(["umount", "--lazy", str(self.folder)], check=False, capture_output=True)
