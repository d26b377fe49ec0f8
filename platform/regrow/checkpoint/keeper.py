"""Keepers as Ray actors: one a node, detached, so that they outlive workers, the coordinator and the driver.

Ray carries control alone; bytes go through shared memory and the keepers' own sockets. A keeper whose coordinator is
gone for long deletes what it holds and ends: an abandoned run leaves nothing in memory.
"""

import contextlib
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from regrow.checkpoint.keeper_node import Held, KeeperNode, Sealed, is_served, last_used
from regrow.checkpoint.ranges import Address
from regrow.checkpoint.slots import newest_commit

NAMESPACE = "regrow-keepers"
PING_S = 5.0
CLOSE_S = 10.0


@dataclass(frozen=True)
class KeeperInfo:
    """What others need to know of a keeper."""

    node: str
    folder: str
    address: Address
    commit: tuple[int, int]  # (generation, step) of the newest commit that it knows; -1: none
    held: tuple[Held, ...]


class Keeper:
    """The actor. Starts its node's keeper in `folder`, or takes up what an earlier one left there."""

    def __init__(self, run_id: str, node: str, folder: str, abandon_after_s: float) -> None:
        self.run_id, self.node_id, self.abandon_after_s = run_id, node, abandon_after_s
        self.folder = Path(folder)
        self.keeper: KeeperNode | None = None
        self.me = ray.get_runtime_context().current_actor
        self.starting = threading.Lock()
        self.coordinator: Any = None
        self.heard_at = time.monotonic()
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    def serve(self, coordinator: Any, secret: bytes) -> KeeperInfo:
        """Work for this coordinator from now on; the same again, or another one after the first was lost."""
        self.coordinator, self.heard_at = coordinator, time.monotonic()
        with self.starting:  # every rank of the node asks
            if self.keeper is None:
                _delete_abandoned(self.folder, self.abandon_after_s)
                host = ray.util.get_node_ip_address()
                self.keeper = KeeperNode(
                    self.folder, node=self.node_id, host=host, secret=secret, run_id=self.run_id, report=self._report
                )
                self.keeper.start()
        self.keeper.secret = secret
        held = tuple(self.keeper.holdings())
        return KeeperInfo(self.node_id, str(self.folder), self.keeper.address, newest_commit(self.folder), held)

    def set_peer(self, peer: tuple[str, Address] | None) -> None:
        assert self.keeper is not None
        self.keeper.set_peer(peer)

    def committed(self, generation: int, step: int) -> None:
        assert self.keeper is not None
        self.keeper.committed(generation, step)

    def close(self) -> None:
        """Delete everything, what an earlier keeper left there too."""
        if self.keeper is not None:
            self.keeper.close(delete=True)
            self.keeper = None
        shutil.rmtree(self.folder, ignore_errors=True)

    def _report(self, sealed: Sealed) -> None:
        self.coordinator.snapshot_sealed.remote(sealed)

    def _watch(self) -> None:
        """End where no coordinator answers any more."""
        while time.monotonic() - self.heard_at < self.abandon_after_s:
            time.sleep(PING_S)
            with contextlib.suppress(ray.exceptions.RayError):
                if self.coordinator is not None:
                    ray.get(self.coordinator.ready.remote(), timeout=PING_S)
                    self.heard_at = time.monotonic()
        self.close()
        ray.kill(self.me, no_restart=True)


def _delete_abandoned(mine: Path, abandon_after_s: float) -> None:
    """Other runs' folders beside this one that no keeper serves any more, as after a power cut of Ray alone."""
    for folder in mine.parent.glob("regrow-*"):
        with contextlib.suppress(OSError):
            if folder != mine and not is_served(folder) and time.time() - last_used(folder) > abandon_after_s:
                shutil.rmtree(folder, ignore_errors=True)


def start_keeper(run_id: str, node: str, *, memory_folder: str, abandon_after_s: float) -> Any:
    """The keeper of a node; started where there is none. Returns at once."""
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    folder = str(Path(memory_folder) / f"regrow-{run_id}-{node[:12]}")
    options: Callable[..., Any] = ray.remote(Keeper).options
    return options(
        name=f"{run_id}:{node}",
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        scheduling_strategy=there,
        max_restarts=-1,
        max_concurrency=8,
    ).remote(run_id, node, folder, abandon_after_s)


def end_keepers(handles: Iterable[Any]) -> None:
    """Have keepers delete what they hold, and end them."""
    handles = list(handles)
    closing = [handle.close.remote() for handle in handles]
    ray.wait(closing, num_returns=len(closing), timeout=CLOSE_S) if closing else None
    for handle in handles:
        ray.kill(handle, no_restart=True)


def running_keepers(run_id: str) -> dict[str, Any]:
    """Keepers of a run that are up, whoever started them, by node."""
    found = {}
    for entry in ray.util.list_named_actors(all_namespaces=True):
        run, _, node = entry["name"].partition(":")
        if entry["namespace"] == NAMESPACE and run == run_id:
            with contextlib.suppress(ValueError):  # it ended just now
                found[node] = ray.get_actor(entry["name"], namespace=NAMESPACE)
    return found
