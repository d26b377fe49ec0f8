"""Maps files of memory, every page at once: the process that touches a cold one first pays more than a copy takes."""

import ctypes
import errno
import mmap
import os
from concurrent.futures import ThreadPoolExecutor

MADV_POPULATE_READ = 22  # of Linux 5.14 and later, by madvise(2); for writing it takes twice as long
AT_ONCE = 256 << 20  # bytes of one call
MOST_THREADS = 8  # more were no faster on an H100's host


def map_all(descriptor: int, num_bytes: int) -> mmap.mmap:
    """A shared mapping of a file's first bytes, whose pages are there, to be mapped for reading and writing. Raises
    OSError.

    By several threads, without the interpreter: one maps some 2 GB a second, and a worker waits for tens of GB. Kernels
    that do not know how leave pages to be mapped when they are touched.
    """
    memory = mmap.mmap(descriptor, num_bytes, flags=mmap.MAP_SHARED)
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    address, starts = address_of(memory), range(0, num_bytes, AT_ONCE)

    def populate(start: int) -> int:
        failed = madvise(address + start, min(AT_ONCE, num_bytes - start), MADV_POPULATE_READ)
        return ctypes.get_errno() if failed else 0

    with ThreadPoolExecutor(min(MOST_THREADS, len(os.sched_getaffinity(0))), "populate") as threads:
        found = set(threads.map(populate, starts))
    for number in found - {0, errno.EINVAL}:
        memory.close()
        raise OSError(number, f"pages cannot be mapped: {os.strerror(number)}")
    return memory


def address_of(memory: mmap.mmap | memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
