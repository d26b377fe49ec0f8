"""A rank's dealings with its node's keeper: find it, restore from what keepers hold, take snapshots."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
import torch.distributed as dist

from regrow.checkpoint.collective import from_rank_0, gather
from regrow.checkpoint.keeper import KeeperInfo, start_keeper
from regrow.checkpoint.memory import restore_snapshot
from regrow.checkpoint.snapshot import Snapshots
from regrow.checkpoint.state import Entry, Progress
from regrow.elastic.job import CALL_TIMEOUT_S, Job
from regrow.errors import CheckpointError, first_line


class MemoryTier:
    """The snapshots of a run, from one rank's side. Every method but `__init__` is collective unless it says not."""

    def __init__(self, job: Job) -> None:
        """Ask for this node's keeper, which starts while the rank builds its model."""
        self.job, self.config, self.folder = job, job.config.snapshot, Path()
        self.node = ray.get_runtime_context().get_node_id()
        self.keeper = start_keeper(
            job.run_id, self.node, memory_folder=self.config.folder, abandon_after_s=self.config.abandon_after_s
        )
        self._serving = self.keeper.serve.remote(job.coordinator, job.secret)

    def join(self) -> None:
        """Wait for the keepers of all nodes to be up and known to the coordinator.

        Raises CheckpointError where a keeper cannot work on its node.
        """
        try:
            info: KeeperInfo = ray.get(self._serving, timeout=CALL_TIMEOUT_S)
        except ray.exceptions.RayTaskError as error:
            raise CheckpointError(
                f"snapshot.folder={self.config.folder} cannot hold snapshots ({first_line(error.cause or error)}); "
                "name a folder in every node's memory, or take no snapshots: snapshot.every_steps=0"
            ) from error
        self.folder = Path(info.folder)
        ray.get(self.job.coordinator.register_keeper.remote(self.keeper, info), timeout=CALL_TIMEOUT_S)
        gather(None)

    def restore(self, entries: Sequence[Entry], *, at_least: int) -> Progress | None:
        """Fill the entries from the newest committed snapshot, on all ranks or on none.

        None where there is no snapshot of step `at_least` or later, and where it could not be read; the entries may
        hold a mixture then.
        """
        newest = from_rank_0(
            ray.get(self.job.coordinator.newest_snapshot.remote(), timeout=CALL_TIMEOUT_S)
            if dist.get_rank() == 0
            else None
        )
        if newest is None or newest[0] < at_least:
            return None
        problem, scalars = "", {}
        try:
            scalars = restore_snapshot(
                entries,
                newest[1],
                node=self.node,
                folder=self.folder,
                secret=self.job.secret,
                reader=dist.get_rank(),
            ).scalars
        except CheckpointError as error:
            problem = str(error)
        failures = [found for found in gather(problem) if found]
        if failures:
            self._note({"step": newest[0], "detail": failures[0]})
            return None
        return Progress(**scalars)

    def start(self, entries: Sequence[Entry], generation: int) -> Snapshots:
        """This rank's slots. Raises CheckpointError on every rank if a node's memory is too small for its ranks'."""
        problem, snapshots = "", None
        ranks_on_node = gather(self.node).count(self.node)
        try:
            snapshots = Snapshots(
                self.folder,
                entries,
                run_id=self.job.run_id,
                generation=generation,
                writers_on_node=ranks_on_node,
            )
        except CheckpointError as error:
            problem = str(error)
        problems = [found for found in gather(problem) if found]
        if problems:
            raise CheckpointError(f"{problems[0]}; or take no snapshots: snapshot.every_steps=0")
        assert snapshots is not None
        return snapshots

    def _note(self, fields: dict[str, Any]) -> None:
        if dist.get_rank() == 0:
            self.job.coordinator.note.remote("snapshot_unreadable", fields)
