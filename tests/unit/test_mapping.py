"""Memory that is mapped whole: by one call or several threads, and what is not there is an error, not a signal."""

import mmap
import os
import re
import resource
import tempfile
from pathlib import Path

import pytest

from regrow.state.memory import mapping
from regrow.state.memory.mapping import map_all

SIZE = 64 * mmap.PAGESIZE + 100


def mapped_bytes(path: Path) -> int:
    """Of a file, that this process has mapped and need not touch first."""
    maps = Path("/proc/self/smaps").read_text()
    (found,) = re.findall(rf"^\S+ .*{re.escape(str(path))}\n(?:.*\n){{2,4}}?Rss: +(\d+) kB", maps, re.MULTILINE)
    return 1024 * int(found)


@pytest.mark.parametrize("at_once", [mapping.AT_ONCE, 8 * mmap.PAGESIZE])
def test_every_page_is_mapped_and_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr(mapping, "AT_ONCE", at_once)
    path = tmp_path / "memory"
    with open(path, "w+b") as file:
        os.posix_fallocate(file.fileno(), 0, SIZE)
        memory = map_all(file.fileno(), SIZE)
    assert mapped_bytes(path) == 65 * mmap.PAGESIZE
    memory[SIZE - 4 :] = b"last"
    assert path.read_bytes()[-4:] == b"last"
    memory.close()


def test_what_is_written_to_it_takes_no_page_fault() -> None:
    """In memory, as nodes have it: mapping pages for writing takes twice as long."""
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        os.posix_fallocate(file.fileno(), 0, SIZE)
        memory = map_all(file.fileno(), SIZE)
        data, before = bytes(SIZE), resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        memory[:] = data
        assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < SIZE // mmap.PAGESIZE / 2
        memory.close()


def test_pages_that_are_not_there_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a node's memory is full: touched by the process, they would kill it."""
    path = tmp_path / "memory"
    mapped = mmap.mmap

    def shortened(descriptor: int, size: int, **more: int) -> mmap.mmap:
        memory = mapped(descriptor, size, **more)
        os.ftruncate(descriptor, mmap.PAGESIZE)
        return memory

    monkeypatch.setattr(mmap, "mmap", shortened)
    with open(path, "w+b") as file:
        os.ftruncate(file.fileno(), SIZE)
        with pytest.raises(OSError, match="pages cannot be mapped"):
            map_all(file.fileno(), SIZE)


def test_kernels_that_cannot_are_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapping, "MADV_POPULATE_READ", 9999)
    with open(tmp_path / "memory", "w+b") as file:
        os.posix_fallocate(file.fileno(), 0, SIZE)
        memory = map_all(file.fileno(), SIZE)
    memory[:4] = b"mine"
    memory.close()
