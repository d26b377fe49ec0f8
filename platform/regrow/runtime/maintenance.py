"""Nodes of a running group are taken out of service one after another: what `jobs.drain` does, but for its output.

Each is asked for only once the group is whole again, or no more workers can come. Whatever ends this in between, what
was asked for stands: the coordinator remembers it.
"""

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import ray

from regrow.control.drains import Maintenance, NodeState
from regrow.errors import ClusterError, first_line
from regrow.record.events import Stopped, Submitted, from_row
from regrow.record.log import read_events
from regrow.record.run_folder import read_record, run_config
from regrow.runtime.calls import CoordinatorClient
from regrow.runtime.head import NotLetIn, answering_head, other_versions
from regrow.runtime.keeper import COORDINATOR, NAMESPACE
from regrow.show.units import counted, duration, ranks
from regrow.storage import Storage

POLL_S = 0.5
TELL_AGAIN_S = 15.0  # of the same wait
LEAST_PREFIX = 4  # characters of a node's id
ALL = "all"

Tell = Callable[[str, str, dict[str, Any]], None]  # what happened, in a word and in a line, and its fields


class DrainError(ClusterError):
    """A node cannot be drained, or is not there."""


class Calls(Protocol):
    """What is asked of the coordinator."""

    def drain(self, node: str) -> str: ...
    def undrain(self, node: str) -> str: ...
    def maintenance(self) -> Maintenance: ...


@contextmanager
def attached(folder: Storage, address: str | None = None) -> Iterator[CoordinatorClient]:
    """The coordinator of the run in a folder, on its Ray cluster. Raises RegrowError where it does not run."""
    run_config(folder)  # refuses what is no run
    events = [from_row(row) for row in read_events(folder)]
    last = next((each for each in reversed(events) if isinstance(each, Stopped | Submitted)), None)
    record = read_record(folder)
    if last is None or record is None or isinstance(last, Stopped):
        ended = f": {last.reason} at step {last.step}" if isinstance(last, Stopped) else ""
        raise ClusterError(f"run {folder} does not run{ended}; python -m jobs.status {folder} says what it does")
    where = address or last.ray or "auto"
    elsewhere = f"run this on a node of that cluster (its job ran on {last.host}), or name it with --address HOST:PORT"
    try:
        head = answering_head(where)
        ray.init(address=head, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    except (NotLetIn, ray.exceptions.AuthenticationError) as error:
        raise ClusterError(f"no Ray cluster lets us in at {where!r}: {first_line(error)}") from error
    except (OSError, RuntimeError, ValueError) as error:
        not_there = f"no Ray cluster of the run at {where!r} ({first_line(error)}): {elsewhere}"
        raise ClusterError(other_versions(where, error) or not_there) from error
    try:
        yield CoordinatorClient(ray.get_actor(f"{record['run_id']}:{COORDINATOR}", NAMESPACE))
    except ValueError as error:
        if "Failed to look up actor" not in str(error):
            raise
        raise ClusterError(f"run {folder} does not run on the Ray cluster at {head}: {elsewhere}") from error
    except ray.exceptions.GetTimeoutError as error:
        raise ClusterError("the run's coordinator does not answer; what was asked for stands once it does") from error
    except ray.exceptions.RayActorError as error:
        raise ClusterError("the run has ended meanwhile, and its coordinator with it") from error
    finally:
        ray.shutdown()


def find_nodes(names: Sequence[str], nodes: Sequence[NodeState]) -> list[NodeState]:
    """The nodes that ids or their beginnings, host names, addresses or `all` mean, each once. Raises DrainError."""
    found: dict[str, NodeState] = {}
    for name in names:
        by_id = [node for node in nodes if len(name) >= LEAST_PREFIX and node.id.startswith(name)]
        if len(by_id) > 1:
            raise DrainError(f"{name!r} begins the ids of {len(by_id)} nodes: {describe(by_id)}")
        meant = by_id or [node for node in nodes if name in (ALL, node.host, node.address)]
        if not meant:
            raise DrainError(f"no node {name!r} in this run; there are {describe(nodes) or 'none'}")
        found |= {node.id: node for node in meant}
    return list(found.values())


def describe(nodes: Sequence[NodeState]) -> str:
    """Nodes in a line."""
    return ", ".join(f"{shown(node)} with {_on(node)}" for node in nodes)


def shown(node: NodeState) -> str:
    """A node, to a person."""
    return f"{node.id[:12]} ({', '.join(dict.fromkeys(filter(None, (node.host, node.address))))})"


def _on(node: NodeState) -> str:
    parts = [ranks(node.ranks)] if node.ranks else []
    parts += [counted(node.waiting, "spare")] if node.waiting else []
    return " and ".join(parts) or ("no worker, drained" if node.asked else "no worker")


@dataclass
class Rolling:
    """Drains of one command. `clock` and `sleep` are of seconds; `patience_s`: without a worker that starts, it is
    taken that no more come."""

    calls: Calls
    tell: Tell
    patience_s: float
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    asked: list[NodeState] = field(default_factory=list)
    out: list[NodeState] = field(default_factory=list)  # of service, once
    back: list[NodeState] = field(default_factory=list)

    def drain(self, nodes: Sequence[NodeState], each: Callable[[NodeState], None] | None = None) -> None:
        """Take nodes out of service in turn; with `each`, called for one that is out, each goes back before the next.

        Raises DrainError for one that the group cannot do without, and whatever `each` raises.
        """
        before = self._look()
        for number, node in enumerate(nodes, 1):
            self._leave(node, f"[{number}/{len(nodes)}] node {shown(node)}")
            if each is not None:
                each(node)
                self.give_back([node])
            if each is not None or node is not nodes[-1]:
                self._until_whole(before)

    def give_back(self, nodes: Sequence[NodeState]) -> None:
        """Nodes are in service again. Raises DrainError for one that was not drained."""
        for node in nodes:
            if problem := self.calls.undrain(node.id):
                raise DrainError(problem)
            self.back.append(node)
            self.tell("back", f"node {shown(node)} is in service again", {"node": node.id})

    def _leave(self, node: NodeState, name: str) -> None:
        begun = self.clock()
        if problem := self.calls.drain(node.id):
            raise DrainError(problem)
        self.asked.append(node)
        self.tell("asked", f"{name} is asked for, with {_on(node)}", {"node": node.id})
        told_at = begun
        while not (state := _state_of(node.id, view := self._look())).is_out:
            if self.clock() - told_at > TELL_AGAIN_S:
                told_at = self.clock()
                left = f"{_on(state)} on it" if state.ranks else "a snapshot elsewhere is awaited"
                self.tell("leaving", f"{name}: {left}, {_group(view)}", {"node": node.id})
            self.sleep(POLL_S)
        self.out.append(node)
        seconds = self.clock() - begun
        text = f"{name} is out of service after {duration(seconds)}: {_group(view)}"
        self.tell("out", text, {"node": node.id, "seconds": round(seconds, 3), **_fields(view)})

    def _until_whole(self, before: Maintenance) -> None:
        """Until the group is as fast as it was, with as many spares; or no more workers can come."""
        begun = quiet_since = told_at = self.clock()
        while True:
            view, now = self._look(), self.clock()
            seconds = {"seconds": round(now - begun, 3)}
            if view.training and view.most_slices <= before.most_slices and _in_service(view) >= _in_service(before):
                self.tell(
                    "whole", f"whole again after {duration(now - begun)}: {_group(view)}", seconds | _fields(view)
                )
                return
            if not view.training or view.num_coming:
                quiet_since = now
            if now - quiet_since > self.patience_s:
                text = f"no more workers come: {_group(view)}, {_in_service(view)} of {_in_service(before)} workers"
                self.tell("short", text, seconds | _fields(view))
                return
            if now - told_at > TELL_AGAIN_S:
                told_at = now
                self.tell("waiting", f"{counted(view.num_coming, 'worker')} on the way, {_group(view)}", _fields(view))
            self.sleep(POLL_S)

    def _look(self) -> Maintenance:
        view = self.calls.maintenance()
        if view.ending:
            raise ClusterError(f"the run ends: {view.ending}")
        return view


def run_for(command: str) -> Callable[[NodeState], None]:
    """Run a shell command for a node, which it finds in its environment; what it prints goes to stderr. Raises
    DrainError if it fails."""

    def run(node: NodeState) -> None:
        told = {"REGROW_NODE_ID": node.id, "REGROW_NODE_HOST": node.host, "REGROW_NODE_ADDRESS": node.address}
        status = subprocess.run(command, shell=True, env=os.environ | told, stdout=sys.stderr, check=False).returncode
        if status:
            raise DrainError(
                f"{command!r} ended with status {status} for node {shown(node)}, which stays out of service"
            )

    return run


def left(rolling: Rolling, nodes: Sequence[NodeState], run: str, *, undrain: bool) -> tuple[str, dict[str, Any]]:
    """What is done of a command when it ends, and what is not, in a line and by node."""
    back = {node.id for node in rolling.back}
    parts = {"back": [node for node in nodes if node.id in back]}
    if not undrain:
        asked, out = {node.id for node in rolling.asked}, {node.id for node in rolling.out}
        parts["out"] = [node for node in nodes if node.id in out - back]
        parts["leaving"] = [node for node in nodes if node.id in asked - out - back]
        parts["not asked"] = [node for node in nodes if node.id not in asked]
    else:
        parts["still drained"] = [node for node in nodes if node.id not in back]
    said = {"back": "in service again", "out": "out of service", "leaving": "asked for, and still to be left"}
    texts = [
        f"{said.get(what, what)}: {', '.join(shown(each) for each in some)}" for what, some in parts.items() if some
    ]
    away = [*parts.get("out", []), *parts.get("leaving", [])]
    if away:
        texts.append(f"to put back: python -m jobs.drain {run} --undrain {' '.join(node.id[:12] for node in away)}")
    return "; ".join(texts), {what.replace(" ", "_"): [node.id for node in some] for what, some in parts.items()}


def _state_of(node: str, view: Maintenance) -> NodeState:
    found = next((each for each in [*view.gone, *view.nodes] if each.id == node), None)
    if found is None or not found.asked:
        raise DrainError(f"node {node[:12]} was put back into service meanwhile, by another command")
    return found


def _in_service(view: Maintenance) -> int:
    """Workers that train or are ready to, but on nodes that are drained, or were and are gone."""
    gone = {node.id for node in view.gone}
    return sum(node.ranks + node.waiting for node in view.nodes if not node.asked and node.id not in gone)


def _group(view: Maintenance) -> str:
    if not view.training:
        return f"another group forms, step {view.step:,}"
    return f"generation {view.generation}, {ranks(view.world_size)}, step {view.step:,}"


def _fields(view: Maintenance) -> dict[str, Any]:
    return {"generation": view.generation, "world_size": view.world_size, "step": view.step}
