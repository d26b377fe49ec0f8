"""What a checkpoint that failed has left is deleted before the next one is begun, which may need the room. Pure."""

from regrow.control.commands import CleanUp, Outbox
from regrow.control.events import Deleted
from regrow.control.upload import Upload

AWAITED_S = 60.0  # at most: deletions come one after another, and storage may not answer


class Deletions:
    """Of uploads that were given up before their COMMIT was on its way."""

    def __init__(self, out: Outbox) -> None:
        self._out, self._upload, self._until = out, 0, float("-inf")

    def clean_up(self, upload: Upload, now: float) -> None:
        """It was given up."""
        self._upload, self._until = upload.number, now + AWAITED_S
        self._out.append(CleanUp(upload.number, upload.version))

    def is_awaited(self, now: float) -> bool:
        """Whether the next upload has to wait."""
        return now < self._until

    def deleted(self, event: Deleted, now: float) -> None:
        """Of old checkpoints, too."""
        if event.problem:
            self._out.record("note", text=event.problem)
        if event.upload == self._upload:
            self._until = now
