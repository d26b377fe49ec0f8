"""What is read of a file while another process writes it again and again."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import regrow

Seen = TypeVar("Seen")
READS = 20_000


def read_beside_writer(script: str, folder: Path, read: Callable[[Path], Seen]) -> list[Seen]:
    """`script` gets the folder, prints a line once it has written, and writes on."""
    command = [sys.executable, "-c", script, str(folder)]
    path = str(Path(regrow.__file__).parents[1])
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={"PYTHONPATH": path}) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            return [read(folder) for _ in range(READS)]
        finally:
            process.kill()
