"""What a node's keeper has to say to the node's workers: a small file in the node's memory, no message."""

import contextlib
import os
import struct
import time
import zlib
from dataclasses import dataclass
from pathlib import Path

from regrow.control.values import NOTHING

WORD = "word"
LOOKS = 100  # at a word that is just being written
LOOK_S = 0.001
_WORD = struct.Struct("<qqq")
_CRC = struct.Struct("<I")  # of the word: without locks, a reader may see a half of what is written in place


@dataclass(frozen=True)
class ControlWord:
    """What a keeper has to say to its node's workers."""

    over: int = NOTHING  # this generation and all before it are over, also where a rank still waits in one
    traces: int = 0  # how often it has asked where each rank is, in which collectives
    newest: int = NOTHING  # the newest generation that was given a number

    @staticmethod
    def read(folder: Path) -> "ControlWord":
        with contextlib.suppress(FileNotFoundError):
            for _ in range(LOOKS):
                content = (folder / WORD).read_bytes()
                word, crc = content[: _WORD.size], content[_WORD.size :]
                if crc in (_CRC.pack(zlib.crc32(word)), b""):  # an earlier version's has none
                    return ControlWord(*_WORD.unpack(word))
                time.sleep(LOOK_S)
        return ControlWord()

    def write(self, folder: Path) -> None:
        """In place, once there is a file: a new one takes a page, and memory may be full when a generation is over."""
        word = _WORD.pack(self.over, self.traces, self.newest)
        content = word + _CRC.pack(zlib.crc32(word))
        with contextlib.suppress(FileNotFoundError), open(folder / WORD, "r+b", buffering=0) as file:
            if os.fstat(file.fileno()).st_size == len(content):  # an earlier version's has another
                file.write(content)
                return
        temporary = folder / f".{WORD}"
        temporary.write_bytes(content)
        os.replace(temporary, folder / WORD)
