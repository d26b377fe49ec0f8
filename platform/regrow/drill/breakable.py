"""A folder as a file system that can break: everything passes through until it is told to be full, slow or failing.

Run as `python -m regrow.drill.breakable FOLDER MOUNT_POINT` by root: it mounts, prints a line, serves until its
standard input ends, and takes a fault as a line of JSON there: `{"kind": "slow", "delay_s": 90}`, `{}` to heal. It
speaks the kernel's FUSE protocol (include/uapi/linux/fuse.h, 7.31) itself, so that it needs no library on the machine.
Files are the folder's own; nothing is cached beyond an open file, as on NFS, for other hosts write the same folder.
"""

import contextlib
import ctypes
import errno
import json
import os
import stat
import struct
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

THREADS = 16  # requests at a time: more than a host's processes have under way
MAX_WRITE = 1 << 20
BUFFER = MAX_WRITE + 4096
ROOT_ID = 1
AUTO_INVAL_DATA, BIG_WRITES = 1 << 12, 1 << 5
SET_MODE, SET_SIZE, SET_ATIME, SET_MTIME, SET_FH = 1, 8, 16, 32, 64
GETATTR_FH = 1

IN_HEADER, OUT_HEADER = struct.Struct("<IIQQIIIHH"), struct.Struct("<IiQ")
ATTR = struct.Struct("<6Q10I")
ENTRY = struct.Struct("<4Q2I")
READ_IN, WRITE_IN = struct.Struct("<QQIIQII"), struct.Struct("<QQIIQII")
SETATTR_IN = struct.Struct("<IIQQQQQQIIIIIIII")

CHANGES = {"SETATTR", "MKNOD", "MKDIR", "UNLINK", "RMDIR", "RENAME", "RENAME2", "LINK", "SYMLINK", "WRITE", "CREATE"}
GROWS = {"MKNOD", "MKDIR", "SYMLINK", "WRITE", "CREATE", "FALLOCATE"}
SLOW = {"READ", "WRITE", "FSYNC", "CREATE", "RENAME", "MKDIR", "UNLINK"}  # what takes long on a loaded file server
NEVER_FAIL = {"INIT", "FORGET", "BATCH_FORGET", "RELEASE", "RELEASEDIR", "INTERRUPT", "DESTROY"}
KINDS = ("full", "read_only", "failing", "slow", "hung")


@dataclass(frozen=True)
class Fault:
    """What is wrong. `slow` answers after `delay_s`, `hung` not before it is healed."""

    kind: str = ""
    delay_s: float = 0.0

    def error(self, operation: str, *, writes: bool) -> int:
        """The errno of an operation, 0 where it goes through."""
        if operation in NEVER_FAIL:
            return 0
        if self.kind == "failing":
            return errno.EIO
        if self.kind == "full" and operation in GROWS:
            return errno.ENOSPC
        if self.kind == "read_only" and (operation in CHANGES or operation == "FALLOCATE" or writes):
            return errno.EROFS
        return 0


@dataclass
class Names:
    """Paths by the kernel's node ids, relative to the folder."""

    paths: dict[int, str] = field(default_factory=lambda: {ROOT_ID: ""})
    ids: dict[str, int] = field(default_factory=lambda: {"": ROOT_ID})
    looked_up: dict[int, int] = field(default_factory=dict)
    newest: int = ROOT_ID

    def enter(self, path: str) -> int:
        """The id of a path that the kernel is about to be answered; counted until it forgets it."""
        if path not in self.ids:
            self.newest += 1
            self.ids[path], self.paths[self.newest] = self.newest, path
        node = self.ids[path]
        self.looked_up[node] = self.looked_up.get(node, 0) + 1
        return node

    def forget(self, node: int, count: int) -> None:
        self.looked_up[node] = self.looked_up.get(node, 0) - count
        if node != ROOT_ID and self.looked_up[node] <= 0:
            path = self.paths.pop(node, None)
            del self.looked_up[node]
            if path is not None and self.ids.get(path) == node:
                del self.ids[path]

    def remove(self, path: str) -> None:
        """The path names nothing any more; its id stays with those that have it open."""
        self.ids.pop(path, None)

    def rename(self, old: str, new: str) -> None:
        self.ids.pop(new, None)
        for node, path in list(self.paths.items()):
            if path == old or path.startswith(f"{old}/"):
                moved = new + path[len(old) :]
                if self.ids.get(path) == node:
                    del self.ids[path]
                self.paths[node], self.ids[moved] = moved, node


class Breakable:
    """Serves one mount. `fault` may be changed at any time from any thread."""

    def __init__(self, folder: Path, device: int) -> None:
        self.folder, self.device = folder, device
        self._names, self._lock = Names(), threading.Lock()
        self._handles: dict[int, list[int]] = {}  # descriptors of nodes that are open, which may be unlinked since
        self._fault, self._changed = Fault(), threading.Condition()
        self._do: dict[int, tuple[str, Callable[[int, bytes], bytes | None]]] = {
            1: ("LOOKUP", self._lookup), 2: ("FORGET", self._forget), 3: ("GETATTR", self._getattr),
            4: ("SETATTR", self._setattr), 5: ("READLINK", self._readlink), 6: ("SYMLINK", self._symlink),
            9: ("MKDIR", self._mkdir), 10: ("UNLINK", partial(self._remove, os.unlink)),
            11: ("RMDIR", partial(self._remove, os.rmdir)),
            12: ("RENAME", self._rename), 13: ("LINK", self._link), 14: ("OPEN", self._open),
            15: ("READ", self._read), 16: ("WRITE", self._write), 17: ("STATFS", self._statfs),
            18: ("RELEASE", self._release), 20: ("FSYNC", self._fsync), 25: ("FLUSH", lambda node, body: b""),
            26: ("INIT", self._init), 27: ("OPENDIR", self._opendir), 28: ("READDIR", self._readdir),
            29: ("RELEASEDIR", lambda node, body: b""), 30: ("FSYNCDIR", lambda node, body: b""),
            34: ("ACCESS", lambda node, body: b""), 35: ("CREATE", self._create), 36: ("INTERRUPT", lambda n, b: None),
            42: ("BATCH_FORGET", self._batch_forget), 45: ("RENAME2", self._rename2),
        }  # fmt: skip

    def set(self, fault: Fault) -> None:
        with self._changed:
            self._fault = fault
            self._changed.notify_all()

    def serve(self) -> None:
        """Answer requests until the file system is unmounted. Several threads may."""
        while True:
            try:
                request = os.read(self.device, BUFFER)
            except InterruptedError:
                continue
            except OSError as error:
                if error.errno == errno.ENOENT:  # a request that was interrupted
                    continue
                return
            self._answer(request)

    def _answer(self, request: bytes) -> None:
        _, code, unique, node, *_ = IN_HEADER.unpack_from(request)
        body = request[IN_HEADER.size :]
        name, do = self._do.get(code, (str(code), None))
        try:
            failed = self._suffer(name, writes=name == "OPEN" and _writes(body))
            if failed:
                raise OSError(failed, os.strerror(failed))
            if do is None:
                raise OSError(errno.ENOSYS, "not served")
            reply = do(node, body)
        except OSError as error:
            if name not in ("FORGET", "BATCH_FORGET", "INTERRUPT"):
                self._send(unique, -(error.errno or errno.EIO), b"")
            return
        if reply is not None:
            self._send(unique, 0, reply)

    def _suffer(self, operation: str, *, writes: bool) -> int:
        """Wait as the fault says; the errno of the operation then."""
        with self._changed:
            fault = self._fault
            if fault.kind == "slow" and operation in SLOW:
                self._changed.wait_for(lambda: self._fault is not fault, fault.delay_s)
            elif fault.kind == "hung" and operation not in NEVER_FAIL:
                self._changed.wait_for(lambda: self._fault is not fault)
            if self._fault is not fault:
                fault = self._fault
        return fault.error(operation, writes=writes)

    def _send(self, unique: int, error: int, body: bytes) -> None:
        with contextlib.suppress(OSError):  # the caller was interrupted, or the file system is unmounted
            os.write(self.device, OUT_HEADER.pack(OUT_HEADER.size + len(body), error, unique) + body)

    def _path(self, node: int) -> str:
        with self._lock:
            path = self._names.paths.get(node)
        if path is None:
            raise OSError(errno.ESTALE, "forgotten")
        return path

    def _real(self, path: str) -> str:
        return str(self.folder / path)

    def _child(self, node: int, name: bytes) -> str:
        return os.path.join(self._path(node), os.fsdecode(name))

    def _entry(self, path: str) -> bytes:
        found = os.lstat(self._real(path))
        with self._lock:
            node = self._names.enter(path)
        return ENTRY.pack(node, 0, 0, 0, 0, 0) + _attr(found)

    # by the names of the protocol

    def _init(self, node: int, body: bytes) -> bytes:
        _, _, readahead, flags = struct.unpack_from("<4I", body)
        served = flags & (AUTO_INVAL_DATA | BIG_WRITES)
        return struct.pack("<4I2H2I2H2I6I", 7, 31, readahead, served, 64, 48, MAX_WRITE, 1, 0, 0, 0, 0, *[0] * 6)

    def _lookup(self, node: int, body: bytes) -> bytes:
        return self._entry(self._child(node, body.rstrip(b"\0")))

    def _forget(self, node: int, body: bytes) -> None:
        with self._lock:
            self._names.forget(node, struct.unpack_from("<Q", body)[0])

    def _batch_forget(self, node: int, body: bytes) -> None:
        (count,) = struct.unpack_from("<I", body)
        with self._lock:
            for number in range(count):
                self._names.forget(*struct.unpack_from("<QQ", body, 8 + 16 * number))

    def _getattr(self, node: int, body: bytes) -> bytes:
        flags, _, handle = struct.unpack_from("<IIQ", body)
        target = handle if flags & GETATTR_FH else self._target(node)
        return struct.pack("<QII", 0, 0, 0) + _attr(os.stat(target, follow_symlinks=isinstance(target, int)))

    def _target(self, node: int) -> int | str:
        """What to look at: an open descriptor, for its name may be gone or another file's by now, or the path."""
        with self._lock:
            opened = self._handles.get(node)
            return opened[-1] if opened else self._real(self._names.paths.get(node, "?"))

    def _opened(self, node: int, handle: int) -> bytes:
        with self._lock:
            self._handles.setdefault(node, []).append(handle)
        return struct.pack("<QII", handle, 0, 0)

    def _setattr(self, node: int, body: bytes) -> bytes:
        valid, _, handle, size, _, atime, mtime, _, atime_ns, mtime_ns, _, mode, *_ = SETATTR_IN.unpack_from(body)
        target = handle if valid & SET_FH else self._target(node)
        if valid & SET_SIZE:
            os.truncate(target, size)
        if valid & SET_MODE:
            os.chmod(target, stat.S_IMODE(mode))
        if valid & (SET_ATIME | SET_MTIME):
            before = os.stat(target)
            times = (
                atime * 10**9 + atime_ns if valid & SET_ATIME else before.st_atime_ns,
                mtime * 10**9 + mtime_ns if valid & SET_MTIME else before.st_mtime_ns,
            )
            os.utime(target, ns=times)
        return struct.pack("<QII", 0, 0, 0) + _attr(os.stat(target))

    def _readlink(self, node: int, body: bytes) -> bytes:
        return os.fsencode(os.readlink(self._real(self._path(node))))

    def _symlink(self, node: int, body: bytes) -> bytes:
        name, target = body.split(b"\0")[:2]
        path = self._child(node, name)
        os.symlink(os.fsdecode(target), self._real(path))
        return self._entry(path)

    def _mkdir(self, node: int, body: bytes) -> bytes:
        mode, _ = struct.unpack_from("<II", body)
        path = self._child(node, body[8:].rstrip(b"\0"))
        os.mkdir(self._real(path), stat.S_IMODE(mode))
        return self._entry(path)

    def _remove(self, remove: Callable[[str], None], node: int, body: bytes) -> bytes:
        path = self._child(node, body.rstrip(b"\0"))
        remove(self._real(path))
        with self._lock:
            self._names.remove(path)
        return b""

    def _rename(self, node: int, body: bytes) -> bytes:
        return self._move(node, struct.unpack_from("<Q", body)[0], body[8:])

    def _rename2(self, node: int, body: bytes) -> bytes:
        target, flags, _ = struct.unpack_from("<QII", body)
        if flags:
            raise OSError(errno.EINVAL, "not served")
        return self._move(node, target, body[16:])

    def _move(self, node: int, target: int, names: bytes) -> bytes:
        old_name, new_name = names.split(b"\0")[:2]
        old, new = self._child(node, old_name), self._child(target, new_name)
        os.rename(self._real(old), self._real(new))
        with self._lock:
            self._names.rename(old, new)
        return b""

    def _link(self, node: int, body: bytes) -> bytes:
        (existing,) = struct.unpack_from("<Q", body)
        path = self._child(node, body[8:].rstrip(b"\0"))
        os.link(self._real(self._path(existing)), self._real(path))
        return self._entry(path)

    def _open(self, node: int, body: bytes) -> bytes:
        flags, _ = struct.unpack_from("<II", body)
        kept = flags & (os.O_ACCMODE | os.O_TRUNC)
        return self._opened(node, os.open(self._real(self._path(node)), kept))

    def _create(self, node: int, body: bytes) -> bytes:
        flags, mode, _, _ = struct.unpack_from("<4I", body)
        path = self._child(node, body[16:].rstrip(b"\0"))
        kept = flags & (os.O_ACCMODE | os.O_TRUNC | os.O_EXCL) | os.O_CREAT
        handle = os.open(self._real(path), kept, stat.S_IMODE(mode))
        entry = self._entry(path)
        return entry + self._opened(struct.unpack_from("<Q", entry)[0], handle)

    def _read(self, node: int, body: bytes) -> bytes:
        handle, offset, size, *_ = READ_IN.unpack_from(body)
        return os.pread(handle, size, offset)

    def _write(self, node: int, body: bytes) -> bytes:
        handle, offset, size, *_ = WRITE_IN.unpack_from(body)
        data = memoryview(body)[WRITE_IN.size : WRITE_IN.size + size]
        return struct.pack("<II", os.pwrite(handle, data, offset), 0)

    def _fsync(self, node: int, body: bytes) -> bytes:
        os.fsync(struct.unpack_from("<Q", body)[0])
        return b""

    def _release(self, node: int, body: bytes) -> bytes:
        (handle,) = struct.unpack_from("<Q", body)
        with self._lock:
            self._handles[node].remove(handle)
            if not self._handles[node]:
                del self._handles[node]
        os.close(handle)
        return b""

    def _opendir(self, node: int, body: bytes) -> bytes:
        self._path(node)
        return struct.pack("<QII", 0, 0, 0)

    def _readdir(self, node: int, body: bytes) -> bytes:
        """Entries in the order of their names, so that an offset means the same in the next call."""
        _, offset, size, *_ = READ_IN.unpack_from(body)
        with os.scandir(self._real(self._path(node))) as found:
            here = [(os.fsencode(each.name), each.inode(), each.is_dir(follow_symlinks=False)) for each in found]
        filled = bytearray()
        for number, (name, inode, is_folder) in enumerate(sorted(here)[offset:], start=offset + 1):
            kind = stat.S_IFDIR if is_folder else stat.S_IFREG
            entry = struct.pack("<QQII", inode, number, len(name), kind >> 12) + name
            entry += b"\0" * (-len(entry) % 8)
            if len(filled) + len(entry) > size:
                break
            filled += entry
        return bytes(filled)

    def _statfs(self, node: int, body: bytes) -> bytes:
        room = os.statvfs(self.folder)
        free = (room.f_bfree, room.f_bavail) if self._fault.kind != "full" else (0, 0)
        sizes = (room.f_bsize, room.f_namemax, room.f_frsize)
        return struct.pack("<5Q4I6I", room.f_blocks, *free, room.f_files, room.f_ffree, *sizes, 0, *[0] * 6)


def _writes(body: bytes) -> bool:
    return bool(struct.unpack_from("<I", body)[0] & os.O_ACCMODE)


def _attr(found: os.stat_result) -> bytes:
    times = (found.st_atime_ns, found.st_mtime_ns, found.st_ctime_ns)
    return ATTR.pack(
        found.st_ino, found.st_size, found.st_blocks, *(each // 10**9 for each in times),
        *(each % 10**9 for each in times), found.st_mode, found.st_nlink, found.st_uid, found.st_gid, found.st_rdev,
        found.st_blksize, 0,
    )  # fmt: skip


def mount(mount_point: Path) -> int:
    """Mount a file system there; the descriptor to serve it by. Raises OSError."""
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"regrow-drill", os.fsencode(mount_point), b"fuse.regrow-drill", 0, options):
        failed = ctypes.get_errno()
        os.close(device)
        raise OSError(failed, os.strerror(failed), str(mount_point))
    return device


def main() -> None:
    folder, mount_point = map(Path, sys.argv[1:3])
    served = Breakable(folder, mount(mount_point))
    for _ in range(THREADS):
        threading.Thread(target=served.serve, daemon=True).start()
    print("mounted", flush=True)
    for line in sys.stdin:
        served.set(Fault(**json.loads(line)))
        print("set", flush=True)


if __name__ == "__main__":
    main()
