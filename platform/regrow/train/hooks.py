"""What the main loop asks of its surroundings: keeping the state, logging, leaving."""

from collections.abc import Mapping
from typing import Protocol

from regrow.control.verification import Outcome
from regrow.state.entries import Progress


class Saver(Protocol):
    """Keeps the training state: when a snapshot or checkpoint is due, whether there is room, what is waited for.

    Seconds that are returned are those that the host has waited.
    """

    def has_room(self, step: int) -> bool:
        """Whether this rank's memory takes the snapshots up to that of `step`, which is about to be launched. Travels
        to all ranks with the step's reduction: one that some rank has no room for, none begins."""

    def is_held(self, step: int) -> bool:
        """Whether this rank's node holds the snapshot that all ranks are asked for as `step` is launched. Travels to
        all ranks with the step's reduction."""

    def held_by_all(self, step: int, held: bool) -> None:
        """Whether all nodes held what was asked for as `step` was launched. Before its confirmation."""

    def spacing(self) -> int:
        """How many steps should lie between snapshots, as this rank has heard; 0: it has heard nothing. Travels to all
        ranks with the step's reduction, as a sum: one rank hears of it."""

    def space(self, every_steps: int) -> None:
        """All ranks have heard it, at the same step. 0: as before."""

    def before_update(self) -> float:
        """The state is about to change: wait for the copy under way. On the stream."""

    def confirm(self, step: int) -> float:
        """All collectives of a step have succeeded: its snapshot may become visible. Again for the same step: nothing.

        Waits until so much of what came before is safe that a lost node costs no more than it may.
        """

    def is_checkpoint_due(self, step: int) -> bool:
        """Whether this step is to be in storage: its row has to be logged before, so that none is ever missing."""

    def after_step(self, progress: Progress, *, blocked: bool, read: bool) -> float:
        """Keep the state after a launched step, in memory and in storage, as far as that is due. Collective.

        `blocked`: some rank has no room. `read`: the host has seen this step succeed.
        """

    def finish(self, progress: Progress, *, blocked: bool) -> float:
        """This was the group's last step: it ends in storage. Collective. Again for the same step: nothing."""


class Hooks(Protocol):
    """What the loop tells, and asks."""

    def step_done(self, row: Mapping[str, float]) -> None:
        """A step has succeeded, on all ranks; before its snapshot is confirmed. See `train.callback`."""

    def log(self, row: dict[str, object]) -> None:
        """Take a row of metrics."""

    def verified(self, step: int, outcome: Outcome) -> None:
        """What the units' checksums in this step came to. Before its row."""

    def wants_to_leave(self) -> bool:
        """Has this rank been asked to leave? Travels to all ranks with the next step's reduction."""

    def validate(self, step: int) -> float:
        """Validation loss. Collective."""
