"""A rank that waits in a collective for one that never comes is broken off from another thread; nothing else is."""

import socket
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from regrow.checkpoint.collective import gather
from regrow.elastic.rendezvous import FORM_S, Joined, form_group, leave_generation
from regrow.parallel.break_off import break_off, listening
from regrow.parallel.fsdp import build_mesh
from regrow.plan.membership import Formation, Member
from regrow.plan.mesh import plan_mesh
from regrow.testing.gloo import run_ranks


def wait_for_one_that_never_comes(folder: str) -> str:
    mesh = build_mesh(plan_mesh(dist.get_world_size(), 1), "cpu")  # a group of its own
    gloo = set().union(*gather(listening()))
    other = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(other.getsockname())
    server, _ = other.accept()
    left = Path(folder) / "left"
    if dist.get_rank() == 2:
        while len(list(Path(folder).glob("left-*"))) < 2:
            time.sleep(0.05)
        return "never came"
    threading.Timer(0.5, break_off, [gloo]).start()
    try:
        dist.all_reduce(torch.ones(4), group=mesh.get_group())
    except RuntimeError:
        client.sendall(b"still connected")
        said = server.recv(100).decode()
        left.with_name(f"left-{dist.get_rank()}").touch()
        return said
    return "the collective came to an end"


def test_waiting_ranks_get_an_error_and_other_connections_stay(tmp_path: Path) -> None:
    found = run_ranks(wait_for_one_that_never_comes, 3, str(tmp_path), deadline_s=60.0)
    assert found == ["still connected", "still connected", "never came"]


def wait_to_form_with_one_that_never_comes() -> float:
    """Of three, one never comes. Seconds until this rank heard that it need not wait."""
    rank = dist.get_rank()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ports = gather(store.port)
    dist.barrier()
    leave_generation()
    if rank == 2:
        return 0.0
    members = [Member(f"m{each}", "node", "127.0.0.1", port, each) for each, port in enumerate(ports)]
    joined = Joined(Formation(1, tuple(members)), rank, frozenset())
    begun = time.monotonic()
    try:
        form_group(
            joined,
            store,
            device_type="cpu",
            timeout_s=600.0,
            waiting=lambda _, listeners: threading.Timer(1.0, break_off, [listeners]).start(),
        )
    except RuntimeError:
        return time.monotonic() - begun
    raise AssertionError("a group of two instead of three was formed")


def test_who_waits_for_others_to_form_a_group_is_broken_off_too() -> None:
    assert max(run_ranks(wait_to_form_with_one_that_never_comes, 3, deadline_s=60.0)) < FORM_S


def test_an_address_reads_as_sockets_have_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        assert address in listening()
    assert address not in listening()
