"""Which checkpoints may be restored after a corruption. Neither Ray nor torch."""

from collections.abc import Sequence

from regrow.control.past import Past
from regrow.control.values import NOTHING
from regrow.errors import CheckpointError
from regrow.record.log import read_events
from regrow.state.disk import catalog
from regrow.storage import Storage

WRONG = "a rank computed wrong; step {step} is the newest whose state is known to be right"


def up_to(limit: int | None, found: Sequence[int], newest: int, folder: Storage) -> list[int]:
    """Those of the steps found in storage that may be restored: all where `limit` is None.

    `newest` is the newest that was there once and may be, or NOTHING. Raises CheckpointError where that is gone.
    """
    steps = [step for step in found if limit is None or step <= limit]
    if found and newest != NOTHING and not steps:
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
    committed, damaged = catalog.committed_and_damaged(checkpoints)
    found = [*committed, *damaged]
    past = Past.of(read_events(run), generation=0, logged=0, stored=found, restarted=False)
    if (limit := past.limit) is None:
        return found
    for step in committed:
        if step > limit:
            catalog.note_damaged(checkpoints, step, WRONG.format(step=limit))
    return up_to(limit, found, max((step for step in past.stored if step <= limit), default=NOTHING), checkpoints)
