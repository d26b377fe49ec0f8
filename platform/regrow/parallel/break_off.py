"""Break a process' collectives off from another thread: whoever waits in one gets an error at once, not at a timeout.

NCCL can be told. Gloo cannot (torch 2.13: `abort` returns and the collective goes on waiting), so its connections are
shut down underneath it. They are found by the addresses that gloo listens at, which every rank learns from the others:
nothing else of the process, Ray's connections neither, is touched. Who waits for another one to form a group with waits
at the group's store.
"""

import contextlib
import os
import socket
import struct
from pathlib import Path

import torch.distributed as dist
from torch.distributed import distributed_c10d

Address = tuple[str, int]  # host, port

_LISTENING = "0A"  # in /proc/net/tcp


def listening() -> set[Address]:
    """Where this process listens for TCP connections."""
    mine = set()
    for entry in os.scandir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            kind, _, inode = os.readlink(entry.path).partition(":")
            if kind == "socket":
                mine.add(inode.strip("[]"))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == _LISTENING and inode in mine:
                host, _, port = local.partition(":")
                found.add((_host(host), int(port, 16)))
    return found


def break_off(listeners: set[Address]) -> None:
    """End all process groups of this process, whose ranks' gloo, or whose store, listens there. From any thread."""
    for group in list(distributed_c10d._world.pg_map):
        if "nccl" in dist.get_backend(group):
            with contextlib.suppress(Exception):  # another thread has given it up meanwhile
                group.abort()
    for entry in os.scandir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile, or no connection
            if os.readlink(entry.path).startswith("socket:"):
                _shut_down(int(entry.name), listeners)


def _shut_down(descriptor: int, listeners: set[Address]) -> None:
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
            return
        ends = {_plain(*connection.getsockname()[:2]), _plain(*connection.getpeername()[:2])}
        if not ends.isdisjoint(_plain(*address) for address in listeners):
            connection.shutdown(socket.SHUT_RDWR)


def _plain(host: str, port: int) -> Address:
    """A socket for both of IPv6 and IPv4 shows the latter's addresses within the former's."""
    return host.removeprefix("::ffff:"), port


def _host(words: str) -> str:
    """An address as /proc has it, 32-bit words in this machine's order, as sockets have it."""
    packed = b"".join(struct.pack("=I", int(words[at : at + 8], 16)) for at in range(0, len(words), 8))
    return socket.inet_ntop(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed)
