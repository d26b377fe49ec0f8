"""What a keeper has to say reaches its workers: whole, and also where memory is full."""

import errno
import struct
from pathlib import Path
from typing import Any

import pytest

from regrow.state.memory import control_word
from regrow.state.memory.control_word import WORD, ControlWord
from support.beside_writer import read_beside_writer

WRITE = """
import sys
from pathlib import Path
from regrow.state.memory.control_word import ControlWord
folder = Path(sys.argv[1])
words = ControlWord(255, 255, 255), ControlWord(256, 256, 256)
words[0].write(folder)
print(flush=True)
while True:
    for word in words:
        word.write(folder)
"""


def test_what_was_written_last_is_read(tmp_path: Path) -> None:
    assert ControlWord.read(tmp_path) == ControlWord()
    for word in (ControlWord(newest=1), ControlWord(1, 2, 3), ControlWord(2**40, 2, 3)):
        word.write(tmp_path)
        assert ControlWord.read(tmp_path) == word
    assert [path.name for path in tmp_path.iterdir()] == [WORD]


def test_a_generation_is_over_for_its_workers_where_memory_has_no_page_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing would say it again, and ranks wait in a collective until it is."""
    ControlWord(over=3, newest=4).write(tmp_path)

    def full(*of: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    ControlWord(over=4, newest=4).write(tmp_path)
    assert ControlWord.read(tmp_path) == ControlWord(over=4, newest=4)


def test_no_reader_sees_a_half_of_a_word(tmp_path: Path) -> None:
    """Of 255 and 256 it would be 511, and so the end of a generation that trains."""
    seen = set(read_beside_writer(WRITE, tmp_path, ControlWord.read))
    assert seen <= {ControlWord(255, 255, 255), ControlWord(256, 256, 256)}


def test_a_reader_waits_for_the_rest_of_a_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / WORD
    ControlWord(255, 1, 255).write(tmp_path)
    before = path.read_bytes()
    ControlWord(256, 1, 256).write(tmp_path)
    after = path.read_bytes()
    path.write_bytes(before[:1] + after[1:])  # 511
    monkeypatch.setattr(control_word.time, "sleep", lambda seconds: path.write_bytes(after))
    assert ControlWord.read(tmp_path) == ControlWord(256, 1, 256)


def test_a_word_that_stays_half_says_nothing(tmp_path: Path) -> None:
    ControlWord(255, 1, 255).write(tmp_path)
    (tmp_path / WORD).write_bytes((tmp_path / WORD).read_bytes()[:-1] + b"\x01")
    assert ControlWord.read(tmp_path) == ControlWord()
    ControlWord(256, 1, 256).write(tmp_path)
    assert ControlWord.read(tmp_path) == ControlWord(256, 1, 256)


def test_a_word_of_an_earlier_version_is_read_and_replaced(tmp_path: Path) -> None:
    (tmp_path / WORD).write_bytes(struct.pack("<qqq", 3, 2, 4))
    assert ControlWord.read(tmp_path) == ControlWord(3, 2, 4)
    ControlWord(4, 2, 4).write(tmp_path)
    assert ControlWord.read(tmp_path) == ControlWord(4, 2, 4)
