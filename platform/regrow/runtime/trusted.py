"""Which checkpoints may be restored after a corruption. Neither Ray nor torch."""

from typing import NamedTuple

from regrow.control.past import Past
from regrow.control.values import COMPUTED_WRONG, NOTHING
from regrow.errors import CheckpointError
from regrow.record.log import read_events
from regrow.state.disk import catalog
from regrow.storage import Storage


class Checkpoints(NamedTuple):
    """Steps of the checkpoints that are in storage, newest first."""

    committed: list[int]
    damaged: list[int]  # as noted
    computed_wrong: list[int]  # of these

    @classmethod
    def look(cls, folder: Storage) -> "Checkpoints":
        """Raises OSError of storage."""
        committed, damaged = catalog.committed_and_damaged(folder)
        return cls(committed, damaged, catalog.computed_wrong(folder, damaged))

    @property
    def all(self) -> list[int]:
        """Those noted as damaged last: it may have been the reader that was wrong."""
        return [*self.committed, *self.damaged]


def up_to(limit: int | None, found: Checkpoints, newest: int, folder: Storage) -> list[int]:
    """Those of the steps found in storage that may be restored: where `limit` is None, all that no rank computed wrong.

    `newest` is the newest that was there once and may be, or NOTHING. Raises CheckpointError where that is gone.
    """
    steps = [step for step in found.all if step not in found.computed_wrong and (limit is None or step <= limit)]
    if limit is not None and found.all and newest != NOTHING and not steps:
        raise CheckpointError(
            f"{folder}: the checkpoint of step {newest}, the newest whose state is known to be right, is gone, and "
            "later ones have what some rank computed wrong; put it back, or train anew under another run.name"
        )
    return steps


def by_the_log(run: Storage, checkpoints: Storage) -> list[int]:
    """Steps of the checkpoints that a run may go on from, newest first, those noted as damaged last: where there is no
    coordinator to say so. Those of later steps than a corruption allows are noted as damaged, as by a coordinator.
    Raises CheckpointError as `up_to` does, OSError of storage.
    """
    found = Checkpoints.look(checkpoints)
    right = [step for step in found.all if step not in found.computed_wrong]
    past = Past.of(read_events(run), generation=0, logged=0, stored=right, restarted=False)
    limit = past.limit
    for step in right:
        if limit is not None and step > limit:
            catalog.note_damaged(checkpoints, step, COMPUTED_WRONG.format(step=limit), computed_wrong=True)
    newest = max((step for step in past.stored if limit is None or step <= limit), default=NOTHING)
    return up_to(limit, found, newest, checkpoints)
