"""A checkpoint's way into storage, but for the parts, which keepers write: index, COMMIT, retention. On a thread."""

import contextlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

from regrow.control import events as e
from regrow.control.commands import NoteDamaged, PublishCommit, PublishIndex, Write
from regrow.errors import first_line
from regrow.record.claim import Superseded
from regrow.state.disk.catalog import note_damaged, step_folder, try_retain
from regrow.state.disk.format import COMMIT
from regrow.state.disk.upload import Upload, WriteOrder, Written, write_index
from regrow.storage import Storage


class Publisher:
    """One thing after another; `done` tells what came of them. Nothing here waits but `commit`'s caller."""

    def __init__(
        self,
        checkpoints: Storage,
        run_id: str,
        *,
        keep: int,
        flush_log: Callable[[], None],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """`flush_log` makes the log's rows durable, so that a committed step's is never missing. Raises OSError.

        `check` raises Superseded where another process writes the run: it comes before all that others see.
        """
        self._checkpoints, self._run_id, self._keep, self._flush_log = checkpoints, run_id, keep, flush_log
        self._check = check
        self.keep_every_steps = 0  # those at multiples of it are kept for good
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="storage")
        self._upload: Upload | None = None  # the newest one
        self._number = 0  # its
        self._published: dict[int, tuple[int, bytes]] = {}  # bytes of the files, what COMMIT is to hold; by upload
        self._working: list[Future[e.Event | None]] = []

    def order(self, write: Write) -> WriteOrder:
        """What a keeper is to be given."""
        if write.upload != self._number or self._upload is None:
            self._number = write.upload
            folder = self._checkpoints / step_folder(write.version.step)
            self._upload = Upload(write.version, (), folder, self._run_id)
        return self._upload.order(write.origin, copies=write.copies, describe=write.describe)

    def written(self, number: int, order: WriteOrder, written: Written) -> None:
        """A keeper has carried out an order of this upload."""
        if number == self._number and self._upload is not None:
            self._upload.done(order, written)

    def publish_index(self, command: PublishIndex) -> None:
        upload = self._upload
        assert upload is not None
        upload.nodes = command.nodes

        def publish() -> e.Event:
            try:
                index = upload.index()
                self._published = {command.upload: (index.num_bytes, write_index(upload.folder, index))}
            except Exception as error:  # of nodes that hold different things; storage raises many kinds
                return e.PublishFailed(command.upload, first_line(error))
            return e.IndexWritten(command.upload)

        self._working.append(self.thread.submit(publish))

    def publish_commit(self, command: PublishCommit) -> None:
        def publish() -> e.Event:
            num_bytes, pointer = self._published[command.upload]
            try:
                self._commit(step_folder(command.version.step), pointer)
            except Exception as error:
                return e.PublishFailed(command.upload, first_line(error))
            return e.CheckpointCommitted(command.upload, command.version.step, num_bytes)

        self._working.append(self.thread.submit(publish))

    def commit(self, folder: str, pointer: bytes, *, fence: Callable[[], None]) -> None:
        """Write COMMIT of a checkpoint that ranks have written themselves. Waits; raises what `fence` does."""

        def commit() -> None:
            fence()
            self._commit(folder, pointer)

        self.thread.submit(commit).result()

    def withdraw(self, step: int) -> None:
        """Take COMMIT of this step away."""

        def withdraw() -> None:
            with contextlib.suppress(OSError, Superseded):  # then retention does, once it is old
                self._check()
                self._checkpoints.delete(f"{step_folder(step)}/{COMMIT}")

        self._working.append(self.thread.submit(withdraw))

    def note_damaged(self, command: NoteDamaged) -> None:
        """This step's checkpoint is not to count any more."""

        def note() -> None:
            with contextlib.suppress(OSError, Superseded):  # then the next one that fails to read it does
                self._check()
                note_damaged(self._checkpoints, command.step, command.detail)

        self._working.append(self.thread.submit(note))

    def delete(self) -> None:
        """Delete checkpoints that are more than is kept."""

        def delete() -> e.Event:
            try:
                self._check()
            except (OSError, Superseded) as error:
                return e.Deleted(first_line(error))
            return e.Deleted(try_retain(self._checkpoints, keep=self._keep, keep_every_steps=self.keep_every_steps))

        self._working.append(self.thread.submit(delete))

    def done(self) -> list[e.Event]:
        """What came of things since the last call."""
        done = [each for each in self._working if each.done()]
        self._working = [each for each in self._working if not each.done()]
        return [event for each in done if (event := each.result()) is not None]

    def close(self, timeout_s: float | None = None) -> bool:
        """Whether all is done in time; a deletion that takes longer is gone on with by the next attempt."""
        self.thread.shutdown(wait=False)
        return not wait(self._working, timeout_s).not_done

    def _commit(self, folder: str, pointer: bytes) -> None:
        """Whatever another process has committed meanwhile stays, where storage can write on a condition."""
        name = f"{folder}/{COMMIT}"
        self._check()
        self._flush_log()
        self._check()
        if not self._checkpoints.create(name, pointer):
            self._check()  # then it is of this run's own past, before it went back
            self._checkpoints.write_bytes(name, pointer)
