"""Copies of snapshots by RDMA (`snapshot.transport=nixl`), from one agent of a process to another, by a device."""

import os
import secrets
import statistics
import threading
import time
from typing import BinaryIO

from regrow.accept.claims import NotTested, Report
from regrow.accept.generations import in_memory
from regrow.state.memory.incoming import Incomings
from regrow.state.memory.ranges import Connection, RangeServer, connected
from regrow.state.memory.rdma import NixlTransport, offer_of
from regrow.state.memory.slots import MAGIC
from regrow.state.memory.transport import FILL, Place, TransportError

DEVICES = "ib,srd"  # of UCX_TLS: InfiniBand, RoCE and EFA alone; within a host UCX would take shared memory
NUM_BYTES, ROUNDS = 512 << 20, 5
LEAST_BYTES_PER_S = 10e9


def copies(report: Report) -> None:
    """A file is put into a peer's memory as a slot is, then asked for again once it is registered no more."""
    os.environ.setdefault("UCX_TLS", DEVICES)
    try:
        sender, receiver = NixlTransport("sender"), NixlTransport("receiver")
    except TransportError as error:
        raise NotTested(str(error)) from error
    with in_memory() as folder:
        (source := folder / "source").write_bytes(data := os.urandom(NUM_BYTES))
        incomings, secret = Incomings(receiver), secrets.token_bytes()
        server = RangeServer("127.0.0.1", lambda: secret, incomings.fill)
        threading.Thread(target=server.serve, daemon=True).start()
        seconds = []
        with incomings.open(folder / "copy", NUM_BYTES) as incoming, open(source, "rb") as file:
            session = sender.connect(server.address, secret)
            for _ in range(ROUNDS):
                begun = time.perf_counter()
                session.put(file, len(MAGIC), NUM_BYTES, incoming.place)
                seconds.append(time.perf_counter() - begun)
            session.close()
            same = (folder / "copy").read_bytes()[len(MAGIC) :] == data[len(MAGIC) :]
            rate = NUM_BYTES / statistics.median(seconds)
            report.found("rdma_equal", same, f"{NUM_BYTES / 1e6:,.0f} MB compared", "the copy differs")
            figure = f"{rate / 1e9:.1f} GB/s ({NUM_BYTES / max(seconds) / 1e9:.1f} at worst)"
            report.found("rdma_rate", rate >= LEAST_BYTES_PER_S, figure, "slower than a few flows of TCP")
            with connected(server.address, secret) as connection:
                report.found("rdma_refuses", *_refuses(sender, file, incoming.place, connection))
        server.close()


def _refuses(sender: NixlTransport, file: BinaryIO, place: Place, connection: Connection) -> tuple[bool, str, str]:
    """Whether memory that is mapped, and registered no more, cannot be read."""
    offer = offer_of(sender.agent, file, NUM_BYTES)
    sender.agent.deregister_memory(offer.registered)
    connection.send({"op": FILL, "at": len(MAGIC), "bytes": 1 << 20, **place, "source": offer.source})
    answer = connection.receive()
    if "error" in answer:
        return True, answer["error"], ""
    return False, "it was read", "whatever reaches UCX's endpoint can read and write the keeper's memory"
