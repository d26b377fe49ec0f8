"""Keepers on hosts apart, whose links `tc` shapes; the ranks stay on the machine, and share the keepers' memory.

    python benchmarks/snapshot_apart.py keep SOCKET FOLDER NODE HOST     a keeper, on a host
    python benchmarks/snapshot_apart.py send FILE HOST PORT PEER PORT    the bare loop of one direction each way

The bare loop does what a commit cannot do without, and no more: chunks are checksummed as they leave and as they
arrive, and are kept in memory that is there; one flow each way, no control.
"""

import contextlib
import json
import mmap
import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.checkpoint_keepers import SECRET, Keepers, Place, keep, keepers
from benchmarks.measure import ROOT, side_env

from regrow.drill.hosts import Host, HostProcess, HostsApart, hosts_apart
from regrow.state.checksums import checksums

NUM_NODES = 2
PIECE = 1 << 20
SHM_MB = 64  # of a host's own; keepers' folders are the machine's
PORT = 7001
READY_S, TRIES_S = 60.0, 20.0


@dataclass
class Apart:
    """Two hosts with a keeper each."""

    hosts: HostsApart
    nodes: list[Host]
    kept: Keepers

    def shape(self, gbit: float) -> None:
        for host in self.nodes:
            self.hosts.shape(host, rate_mbit=1000 * gbit)

    def bare_bytes_per_s(self, folder: Path, num_bytes: int) -> float:
        """Of the bare loop between them, each way at the same time."""
        out = folder / "bare.out"
        starts = []
        for number, (host, peer) in enumerate(zip(self.nodes, reversed(self.nodes), strict=True)):
            (data := folder / f"bare-{number}").write_bytes(os.urandom(1 << 20) * (num_bytes >> 20))
            starts.append((host, ["send", str(data), host.address, str(PORT), peer.address, str(PORT)]))
        running = [_start(host, words, out) for host, words in starts]
        for process in running:
            if process.wait(READY_S + num_bytes / 10e6):
                raise RuntimeError(out.read_text()[-2000:])
        return min(json.loads(line)["bytes_per_s"] for line in out.read_text().splitlines())


class _Process:
    """A keeper's, as `Keepers` ends it."""

    def __init__(self, process: HostProcess) -> None:
        self._process = process

    def join(self, timeout: float | None = None) -> None:
        with contextlib.suppress(TimeoutError):
            self._process.wait(timeout)

    def kill(self) -> None:
        self._process.kill()


def _start(host: Host, words: list[str], output: Path) -> HostProcess:
    command = [sys.executable, str(Path(__file__).resolve()), *words]
    return host.start(command, output, side_env(), ROOT)


@contextlib.contextmanager
def apart(memory_folder: str) -> Iterator[Apart]:
    """Hosts and keepers for a while. Raises ConfigError where this machine cannot have them."""
    folder = Path(memory_folder) / f"snapshot-bench-{os.getpid()}"
    folder.mkdir()
    try:
        with hosts_apart(storage=None, carried=[folder], shm_mb=SHM_MB) as hosts:
            nodes = [hosts.add(f"node{number}") for number in range(NUM_NODES)]
            left = list(nodes)

            def start(place: Place) -> tuple[Connection, _Process]:
                host, name = left.pop(0), str(folder / f"{place.node}.control")
                with Listener(name, "AF_UNIX", authkey=SECRET) as listener:
                    words = ["keep", name, str(place.folder), place.node, host.address]
                    process = _start(host, words, folder / "keepers.out")
                    return listener.accept(), _Process(process)

            with keepers(str(folder), NUM_NODES, start=start) as kept:
                yield Apart(hosts, nodes, kept)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def send(path: str, host: str, port: int, peer: str, peer_port: int) -> dict[str, Any]:
    """Send a file to the peer and take as much from it, at the same time."""
    size = os.path.getsize(path)
    with socket.create_server((host, port)) as server:
        give_up_at = time.monotonic() + TRIES_S
        while True:
            try:
                out = socket.create_connection((peer, peer_port))
                break
            except OSError:
                if time.monotonic() > give_up_at:
                    raise
                time.sleep(0.05)
        back, _ = server.accept()
    kept = mmap.mmap(-1, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)

    def receive() -> None:
        with memoryview(kept) as memory:
            for at in range(0, size, PIECE):
                piece, got = memory[at : at + PIECE], 0
                while got < len(piece):  # woken once, not for each packet
                    back.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, len(piece) - got)
                    got += back.recv_into(piece[got:])
                checksums(piece)
                piece.release()

    out.sendall(b"!")  # both are there
    back.recv(1)
    begun = time.perf_counter()
    receiving = threading.Thread(target=receive)
    receiving.start()
    with open(path, "rb") as file:
        memory: memoryview = np.memmap(file, np.uint8, "r").data
        for at in range(0, size, PIECE):
            checksums(memory[at : at + PIECE])
            out.sendfile(file, at, PIECE)
    receiving.join()
    return {"bytes_per_s": size / (time.perf_counter() - begun)}


if __name__ == "__main__":
    if sys.argv[1] == "keep":
        _, _, control, memory, node, address = sys.argv
        keep(Client(control, "AF_UNIX", authkey=SECRET), Place(node, Path(memory)), address)
    else:
        file_name, here, here_port, there, there_port = sys.argv[2:]
        print(json.dumps(send(file_name, here, int(here_port), there, int(there_port))), flush=True)
