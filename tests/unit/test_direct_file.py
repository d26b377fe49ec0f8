"""Files written past the page cache hold what was written, however it came and whatever the file system takes."""

import errno
import os
import random
from pathlib import Path
from typing import Any

import pytest

from regrow import direct_file
from regrow.direct_file import DirectFile

SIZE = 64 << 10  # of the buffer, here


@pytest.fixture(autouse=True)
def small_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_file, "BUFFER_BYTES", SIZE)


def written(path: Path, content: bytes, pieces: random.Random | None = None) -> bytes:
    """What the file holds after `content` was written to it, in one piece or in random ones."""
    with DirectFile(path) as file:
        at = 0
        while at < len(content):
            piece = content[at : at + (pieces.randint(1, 2 * SIZE) if pieces else len(content))]
            assert file.write(piece) == len(piece)
            at += len(piece)
    return path.read_bytes()


def refusing(after: int, number: int) -> Any:
    """An `os.write` that fails `after` so many direct writes, as a file system does that takes none."""
    real, done = os.write, [0]

    def write(file: int, data: Any) -> int:
        import fcntl

        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT:
            done[0] += 1
            if done[0] > after:
                raise OSError(number, os.strerror(number))
        return real(file, data)

    return write


@pytest.mark.parametrize("size", [0, 1, 4096, SIZE - 1, SIZE, SIZE + 1, 2 * SIZE + 4096, 5 * SIZE + 4097])
def test_it_holds_what_was_written(tmp_path: Path, size: int) -> None:
    content = random.Random(size).randbytes(size)
    assert written(tmp_path / "file", content) == content
    assert written(tmp_path / "file", content, random.Random(1)) == content  # over an older one


def test_an_array_counts_by_its_bytes(tmp_path: Path) -> None:
    data = memoryview(bytes(range(16))).cast("I")
    with DirectFile(tmp_path / "file") as file:
        assert file.write(data) == 16
    assert (tmp_path / "file").read_bytes() == bytes(range(16))


@pytest.mark.parametrize("after", [0, 2])
def test_where_direct_writes_are_refused_the_rest_goes_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    content = random.Random(2).randbytes(4 * SIZE + 10)
    monkeypatch.setattr(direct_file.os, "write", refusing(after, errno.EINVAL))
    assert written(tmp_path / "file", content) == content


def test_where_not_even_opening_is_allowed_neither(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def opened(path: Any, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct files here")
        return real(path, flags, mode)

    content = random.Random(3).randbytes(2 * SIZE + 10)
    monkeypatch.setattr(direct_file.os, "open", opened)
    assert written(tmp_path / "file", content) == content


def test_a_write_that_is_cut_short_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, content = os.write, random.Random(4).randbytes(3 * SIZE)
    monkeypatch.setattr(direct_file.os, "write", lambda file, data: real(file, data[: max(1, len(data) // 3)]))
    assert written(tmp_path / "file", content) == content


def test_a_full_disk_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_file.os, "write", refusing(1, errno.ENOSPC))
    with pytest.raises(OSError, match="No space left"), DirectFile(tmp_path / "file") as file:
        file.write(bytes(3 * SIZE))
