"""Why a group's state came from storage, which costs more than the nodes' memory. Pure."""

from regrow.config.schema import PretrainConfig
from regrow.control.events import Began
from regrow.control.group import Group
from regrow.control.snapshots import Snapshots
from regrow.record.events import Cause, WhyStorage


def why_storage(event: Began, config: PretrainConfig, group: Group, snapshots: Snapshots) -> dict[str, str]:
    """For the `generation` event of a group that has restored, before anything is made of that; empty where its state
    is not from a checkpoint."""
    if event.details.get("source") != "checkpoint":
        return {}
    return {"source_reason": str(_why(event, config, group, snapshots))}


def _why(event: Began, config: PretrainConfig, group: Group, snapshots: Snapshots) -> WhyStorage:
    newest = snapshots.commits.newest
    if not config.snapshot.every_steps:
        return WhyStorage.off
    if newest is None:
        if group.cause in (Cause.nonfinite, Cause.corrupted):
            return WhyStorage.discarded
        return WhyStorage.started if group.cause in (Cause.start, Cause.resume) else WhyStorage.none_committed
    if newest.version.step < event.start_step:
        return WhyStorage.older
    keepers = snapshots.keepers
    is_lost = any(not any(map(keepers.is_there, (node, *peers))) for node, peers in newest.peers.items())
    return WhyStorage.copies_lost if is_lost else WhyStorage.unreadable
