"""What a node's keeper has to say to the node's workers: a small file in the node's memory, no message."""

import os
import struct
from dataclasses import dataclass
from pathlib import Path

from regrow.control.values import NOTHING

WORD = "word"
_WORD = struct.Struct("<qqq")


@dataclass(frozen=True)
class ControlWord:
    """What a keeper has to say to its node's workers."""

    over: int = NOTHING  # this generation and all before it are over, also where a rank still waits in one
    traces: int = 0  # how often it has asked where each rank is, in which collectives
    newest: int = NOTHING  # the newest generation that was given a number

    @staticmethod
    def read(folder: Path) -> "ControlWord":
        try:
            return ControlWord(*_WORD.unpack((folder / WORD).read_bytes()))
        except FileNotFoundError:
            return ControlWord()

    def write(self, folder: Path) -> None:
        temporary = folder / f".{WORD}"
        temporary.write_bytes(_WORD.pack(self.over, self.traces, self.newest))
        os.replace(temporary, folder / WORD)
