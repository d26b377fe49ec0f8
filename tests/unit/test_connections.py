"""A node that dies is known by the connection that is held to its keeper: real processes, real sockets."""

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import regrow
from regrow.config.schema import ClusterConfig, ObserveConfig, PretrainConfig
from regrow.control import events as e
from regrow.control import health
from regrow.control.membership import Member
from regrow.control.values import Version
from regrow.runtime.actor import Coordinator
from regrow.runtime.keeper import KeeperInfo
from regrow.runtime.liveness.connections import HeldConnections
from regrow.runtime.liveness.probe import MOST_HELD, Lifeline
from support.actors import Handle

HOST = "127.0.0.1"
LISTEN = f"from regrow.runtime.liveness.probe import Lifeline; print(Lifeline({HOST!r}).port, flush=True); input()"


class Process:
    """With a lifeline, and nothing else."""

    def __init__(self) -> None:
        path = str(Path(regrow.__file__).parents[1])
        arguments: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen([sys.executable, "-c", LISTEN], env={"PYTHONPATH": path}, **arguments)
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    @property
    def pid(self) -> int:
        return self.process.pid

    def kill(self) -> None:
        self.process.kill()

    def wait(self) -> None:
        self.process.wait()


@pytest.fixture
def processes() -> Iterator[Callable[[], Process]]:
    started: list[Process] = []

    def start() -> Process:
        started.append(Process())
        return started[-1]

    yield start
    for each in started:
        each.kill()
        each.wait()


@pytest.fixture
def connections() -> Iterator[HeldConnections]:
    made = HeldConnections()
    yield made
    made.close()


def until(condition: Callable[[], Any]) -> Any:
    end = time.monotonic() + 60.0
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.002)
    return found


def held_by(port: int) -> int:
    """How many connections to a port are established, as the kernel says."""
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    return sum(line.split()[2].endswith(f":{port:04X}") and line.split()[3] == "01" for line in lines)


def hold(connections: HeldConnections, node: str, port: int) -> None:
    connections.hold(node, (HOST, port))
    until(lambda: held_by(port))


def test_a_process_that_is_killed_is_told_once_and_one_that_is_stopped_is_not(
    connections: HeldConnections, processes: Callable[[], Process]
) -> None:
    killed, stopped = processes(), processes()
    hold(connections, "a", killed.port)
    hold(connections, "b", stopped.port)
    os.kill(stopped.pid, signal.SIGSTOP)
    killed.kill()
    assert until(connections.lost) == ["a"]
    assert connections.lost() == []
    stopped.kill()
    assert until(connections.lost) == ["b"]


def test_a_keeper_that_comes_back_elsewhere_is_held_there(
    connections: HeldConnections, processes: Callable[[], Process]
) -> None:
    first, second = processes(), processes()
    hold(connections, "a", first.port)
    connections.hold("a", (HOST, first.port))  # every rank of a node names its keeper
    hold(connections, "a", second.port)
    first.kill()
    first.wait()
    second.kill()
    assert until(connections.lost) == ["a"], "of the second one alone"


def test_a_connection_that_the_network_has_ended_is_held_again(connections: HeldConnections) -> None:
    with socket.create_server((HOST, 0)) as listens:
        hold(connections, "a", listens.getsockname()[1])
        taken: queue.Queue[socket.socket] = queue.Queue()
        threading.Thread(target=lambda: [taken.put(listens.accept()[0]) for _ in range(2)], daemon=True).start()
        taken.get(timeout=60).close()
        assert until(connections.lost) == ["a"]
        taken.get(timeout=60).close()
        assert until(connections.lost) == ["a"]


def test_whoever_was_never_reached_is_not_missed(
    connections: HeldConnections, processes: Callable[[], Process]
) -> None:
    with socket.create_server((HOST, 0)) as listens:
        closed = listens.getsockname()[1]
    connections.hold("a", (HOST, closed))
    other = processes()
    hold(connections, "b", other.port)  # the same thread has tried the first by now
    other.kill()
    assert until(connections.lost) == ["b"]


def test_a_host_that_answers_no_more_is_found_by_the_kernel(connections: HeldConnections) -> None:
    """The options of the connection itself: what they do is the kernel's."""
    with socket.create_server((HOST, 0)) as listens:
        hold(connections, "a", listens.getsockname()[1])
        (held,) = connections.held.values()
        asked = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)
        assert [held.socket.getsockopt(socket.IPPROTO_TCP, option) for option in asked] == [1, 1, 3, 3000]
        assert held.socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


def test_a_process_holds_so_many_connections_and_lets_go_of_those_that_end() -> None:
    lifeline = Lifeline(HOST)
    for _ in range(3 * MOST_HELD):  # of knocks
        socket.create_connection((HOST, lifeline.port)).close()
    opened = [socket.create_connection((HOST, lifeline.port)) for _ in range(MOST_HELD + 8)]
    until(lambda: held_by(lifeline.port) == MOST_HELD)
    for connection in opened:
        connection.close()
    until(lambda: held_by(lifeline.port) == 0)
    lifeline.close()


# with the coordinator


class Node:
    """A node's keeper and its one worker, as processes; what the keeper is told."""

    def __init__(self, name: str, start: Callable[[], Process]) -> None:
        self.name, self.start = name, start
        self.keeper, self.worker = start(), start()
        self.told_over: queue.Queue[int] = queue.Queue()
        self.member = Member(f"of {name}", name, HOST, 1, self.worker.pid, self.worker.port)

    def register(self, made: Coordinator) -> None:
        info = KeeperInfo(self.name, self.name, "", (HOST, 1), Version(), (), self.keeper.port)
        made.register_keeper(Handle(self), info)
        until(lambda: held_by(self.keeper.port))

    def over(self, generation: int) -> None:
        self.told_over.put(generation)

    def take_place(self, place: Any) -> None: ...

    def end_process(self, pid: int) -> None: ...


@pytest.fixture
def group(tmp_path: Path, processes: Callable[[], Process]) -> Iterator[tuple[Coordinator, list[Node]]]:
    """A coordinator and three nodes that have joined; two of the workers will never say a word again."""
    cluster, observe = ClusterConfig(max_workers=8), ObserveConfig(tensorboard=False, metrics=False)
    config, options = PretrainConfig(cluster=cluster, observe=observe), {"submitted": {"time": time.time()}}
    made = Coordinator(str(tmp_path), "run", checkpoints="checkpoints", config=config, **options)
    nodes = [Node(name, processes) for name in "abc"]
    for node in nodes:
        made.join(node.member, 3)
    assert made.formation("of a", 0).seat is not None
    for node in nodes:
        node.register(made)
    until(lambda: len(made.shell.roll_call.reached) == 3)
    yield made, nodes
    made.shell.close()


def failures(made: Coordinator) -> list[Any]:
    updates = [update.content for update in made.updates(0)[0]]
    return [(each["cause"], each["ranks"]) for each in updates if each.get("event") == "failure"]


@pytest.mark.parametrize("trains", [True, False], ids=["trains", "forms"])
def test_a_dead_node_is_known_with_no_rank_having_come_back(
    group: tuple[Coordinator, list[Node]], trains: bool
) -> None:
    made, nodes = group
    if trains:
        made.start_training(1, 0, {"workers": [{"node": node.name} for node in nodes]})
    nodes[1].keeper.kill()
    nodes[1].worker.kill()
    assert nodes[0].told_over.get(timeout=60) == 1, "who waits in a kernel is told to break it off"
    assert failures(made) == [("worker_died", [1])]


def test_a_keeper_that_dies_alone_ends_nothing(
    group: tuple[Coordinator, list[Node]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, nodes = group
    made.start_training(1, 0, {"workers": [{"node": node.name} for node in nodes]})
    monkeypatch.setattr(health, "KNOCK_S", 1.0)
    nodes[1].keeper.kill()
    of = made.shell.control.health
    until(lambda: of.lost_at)
    until(lambda: not of.lost_at)
    assert failures(made) == []
    nodes[1].keeper = nodes[1].start()  # Ray starts it again
    nodes[1].register(made)
    nodes[1].keeper.kill()
    nodes[1].worker.kill()
    assert nodes[0].told_over.get(timeout=60) == 1
    assert failures(made) == [("worker_died", [1])]


def test_what_ends_with_the_run_is_no_loss(group: tuple[Coordinator, list[Node]]) -> None:
    made, nodes = group
    made.start_training(1, 0, {"workers": [{"node": node.name} for node in nodes]})
    made.done()
    made.shell.tell(e.ConnectionLost("b"))
    made.shell.tick()
    assert made.shell.roll_call.asked is None
