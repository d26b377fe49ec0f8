"""The newest checkpoint is read once by the nodes that wrote it, before older ones are deleted for it. Pure."""

from collections.abc import Mapping

from regrow.control.commands import Outbox, ReadBack
from regrow.control.events import HasReadBack


class ReadBacks:
    """Of one checkpoint at a time: a newer one counts for more."""

    def __init__(self, out: Outbox, *, timeout_s: float) -> None:
        self._out, self._timeout_s = out, timeout_s
        self.step = 0  # of the checkpoint
        self.before = 0  # the newest step in storage, if that is damaged
        self._upload = 0
        self._waiting: set[str] = set()  # for these nodes' parts
        self._until = 0.0

    @property
    def busy(self) -> bool:
        return bool(self._waiting)

    def begin(self, upload: int, step: int, before: int, writers: Mapping[str, str], now: float) -> None:
        """COMMIT of this upload is there. `writers`: by origin, the node that has written its part."""
        self._upload, self.step, self.before = upload, step, before
        self._waiting, self._until = set(writers), now + self._timeout_s
        self._out.extend(ReadBack(upload, node, origin) for origin, node in writers.items())

    def is_awaited(self, event: HasReadBack) -> bool:
        """Whether it is of this checkpoint."""
        return event.upload == self._upload and event.origin in self._waiting

    def is_whole(self, origin: str) -> bool:
        """One more part is there as it was written; whether all are."""
        self._waiting.discard(origin)
        return not self._waiting

    def stop(self) -> None:
        """Nothing is deleted for this checkpoint; the next one is read in its turn."""
        self._waiting.clear()

    def tick(self, now: float) -> None:
        if now > self._until:
            self.stop()
