"""Who is dead is known from refused connections: real processes and real sockets."""

import contextlib
import errno
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import regrow
from regrow.config.schema import ClusterConfig, ObserveConfig, PretrainConfig
from regrow.control.membership import Member
from regrow.runtime.actor import Coordinator
from regrow.runtime.liveness import probe
from regrow.runtime.liveness.probe import ANSWER_S, RUNS, Lifeline, RollCall

HOST = "127.0.0.1"
LISTEN = f"from regrow.runtime.liveness.probe import Lifeline; print(Lifeline({HOST!r}).port, flush=True); input()"


class Process:
    """A process with a lifeline, and nothing else."""

    def __init__(self, name: str) -> None:
        path = str(Path(regrow.__file__).parents[1])
        self.process = subprocess.Popen(
            [sys.executable, "-c", LISTEN],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={"PYTHONPATH": path},
        )
        assert self.process.stdout is not None
        port = int(self.process.stdout.readline())
        self.member = Member(name, f"node of {name}", HOST, 1, self.process.pid, port)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def processes() -> Iterator[list[Process]]:
    started = [Process(name) for name in "abc"]
    yield started
    for each in started:
        each.kill()


def roll_call_of(members: Sequence[Member]) -> RollCall:
    """That has met them."""
    roll_call = RollCall()
    roll_call.meet(members)
    roll_call.thread.submit(int).result(10)  # whatever comes after it is asked by the same thread
    return roll_call


def ask(roll_call: RollCall, missing: Sequence[Member]) -> list[str]:
    """What one roll call finds."""
    roll_call.ask_at = 0.0
    roll_call.gone(missing, time.monotonic())
    roll_call.thread.submit(int).result(10)
    return sorted(roll_call.gone(missing, time.monotonic()))


def hail(roll_call: RollCall, nodes: Collection[str]) -> set[str]:
    """What the first roll call finds in which some process runs: asked often, as one may take long to say so."""
    while not (running := roll_call.running(nodes)):
        roll_call.thread.submit(int).result()
    return running


def test_a_process_that_was_killed_is_gone_at_once_and_one_that_is_stopped_is_not(processes: list[Process]) -> None:
    members = [each.member for each in processes]
    roll_call = roll_call_of(members)
    assert ask(roll_call, members) == []
    processes[0].process.send_signal(19)  # SIGSTOP: the kernel takes connections still
    processes[1].kill()
    assert ask(roll_call, members) == ["b"]


def test_nodes_are_there_whose_processes_run_not_those_whose_kernel_alone_answers(processes: list[Process]) -> None:
    roll_call = roll_call_of([each.member for each in processes])
    processes[0].process.send_signal(19)  # SIGSTOP: the kernel takes connections still
    processes[1].kill()
    nodes = {each.member.node for each in processes}
    assert roll_call.running(nodes) == set(), "asked, and not waited for"
    assert hail(roll_call, nodes) == {"node of c"}
    processes[0].process.send_signal(18)
    assert hail(roll_call, {"node of a"}) == {"node of a"}


def test_as_many_names_are_compared_as_there_are_members_where_all_nodes_are_silent() -> None:
    """Each member's node was looked for in a tuple of all nodes: half a million comparisons at 1,024."""
    compared = 0

    class Name(str):
        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    roll_call = RollCall()
    roll_call.thread.shutdown()
    roll_call.thread = SimpleNamespace(submit=lambda *of: Future())  # type: ignore[assignment]
    nodes = [Name(f"node{number}") for number in range(1024)]
    roll_call.reached = {node: Member(node, Name(node), HOST, 1, 1, 1) for node in nodes}
    assert roll_call.running(tuple(nodes)) == set()
    assert roll_call.hailed is not None
    assert compared <= 2 * len(nodes)


def test_whoever_was_never_reached_is_not_missed(processes: list[Process]) -> None:
    """As behind a firewall that refuses connections in the place of the hosts behind it."""
    members = [each.member for each in processes]
    processes[1].kill()
    roll_call = roll_call_of(members)
    processes[2].kill()
    assert ask(roll_call, members) == ["c"]
    roll_call.meet([])  # another group, of others
    assert ask(roll_call, members) == []


def test_a_process_that_has_no_descriptor_left_for_a_moment_is_not_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """It took no connection from then on, and ended those that were held to it: it was taken for dead."""
    lifeline, accept, refusals = Lifeline(HOST), socket.socket.accept, [errno.EMFILE, errno.ENOBUFS]

    def taken(listening: socket.socket) -> tuple[socket.socket, Any]:
        if refusals:
            raise OSError(refusals.pop(), "as at a process' limit")
        return accept(listening)

    with socket.create_connection((HOST, lifeline.port), timeout=60) as before:
        assert before.recv(1) == RUNS
        monkeypatch.setattr(socket.socket, "accept", taken)
        with socket.create_connection((HOST, lifeline.port), timeout=60) as connection:
            assert connection.recv(1) == RUNS
        assert refusals == []
        before.setblocking(False)
        with pytest.raises(BlockingIOError):
            before.recv(1)
    lifeline.close()


def test_a_host_that_does_not_answer_proves_nothing() -> None:
    with contextlib.ExitStack() as stack:
        full = stack.enter_context(socket.create_server((HOST, 0), backlog=0))
        member = Member("m", "node", HOST, 1, 1, full.getsockname()[1])
        roll_call = roll_call_of([member])
        for _ in range(3):  # nobody takes them: the kernel lets further ones wait
            connection = stack.enter_context(socket.socket())
            connection.setblocking(False)
            connection.connect_ex((HOST, member.lifeline))
        begun = time.monotonic()
        assert ask(roll_call, [member]) == []
        assert time.monotonic() - begun >= ANSWER_S  # it was indeed not answered


def test_a_group_forms_without_the_dead_before_anybody_says_that_they_are(
    tmp_path: Path, processes: list[Process]
) -> None:
    config = PretrainConfig(
        cluster=ClusterConfig(max_workers=8), observe=ObserveConfig(tensorboard=False, metrics=False)
    )
    made = Coordinator(str(tmp_path), "run", checkpoints="checkpoints", config=config, submitted={"time": time.time()})
    members = [each.member for each in processes]
    for member in members:
        made.join(member, 3)
    assert made.formation("a", 0).seat is not None
    made.start_training(1, 0, {"workers": [{"node": member.node} for member in members]})
    time.sleep(1.0)  # they are met meanwhile
    processes[2].kill()
    for member in members[:2]:
        made.join(replace(member, port=member.port + 1), 3)  # each has another store for each group
    give_up_at = time.monotonic() + 10
    while (seat := made.formation("a", 1).seat) is None and time.monotonic() < give_up_at:
        time.sleep(0.01)
    assert seat is not None
    assert [member.id for member in seat.members] == ["a", "b"]
    made.ray_view([("node of c", members[2].pid, "worker_died", "Ray says it too")], 2, {}, {})
    failures = [update.content for update in made.updates(0)[0] if update.content.get("event") == "failure"]
    assert [(failure["cause"], failure["ranks"]) for failure in failures] == [("worker_died", [2])]
    made.shell.close()


def test_what_a_node_answered_long_ago_is_no_answer(processes: list[Process], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "OLD_S", 0.5)
    roll_call = roll_call_of([each.member for each in processes])
    assert roll_call.running({"node of a"}) == set()
    roll_call.thread.submit(int).result(10)
    processes[0].process.send_signal(19)  # SIGSTOP, and nothing was asked for some time
    time.sleep(1.0)
    assert roll_call.running({"node of a"}) == set()
    roll_call.thread.submit(int).result(10)
    assert roll_call.running({"node of a"}) == set()
    roll_call.close()
