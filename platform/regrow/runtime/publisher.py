"""A checkpoint's way into storage, but for the parts, which keepers write: index, COMMIT, retention. On a thread."""

import contextlib
import json
import math
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from typing import cast

from regrow.control import events as e
from regrow.control.commands import CleanUp, Delete, NoteDamaged, PublishCommit, PublishIndex, Write, WriteAll
from regrow.control.values import Version
from regrow.errors import first_line
from regrow.process_log import say_error
from regrow.record.claim import Superseded
from regrow.state.disk.catalog import note_damaged, step_folder, try_retain
from regrow.state.disk.format import COMMIT
from regrow.state.disk.packed import PackedFiles
from regrow.state.disk.upload import (
    Fetch,
    IndexOrder,
    Joined,
    OrderForAll,
    Published,
    Upload,
    WriteOrder,
    Written,
)
from regrow.storage import Storage, in_threads

NAME = re.compile(r"\.?g(\d+)-")  # of a file of a generation; with a dot while it is being written
NOTE_AGAIN_S = 5.0  # that a rank computed a checkpoint wrong, where storage has refused the note


class Notes:
    """That checkpoints are not to count any more; written by storage's thread. Where storage refuses one, the next
    reader that fails finds what is damaged; what a rank computed wrong none finds: that is noted again."""

    def __init__(self, checkpoints: Storage, check: Callable[[], None]) -> None:
        self._checkpoints, self._check = checkpoints, check
        self.refused: dict[int, NoteDamaged] = {}  # by step: what some rank computed wrong
        self.again_at = 0.0  # monotonic

    @property
    def are_due(self) -> bool:
        return bool(self.refused) and time.monotonic() > self.again_at

    def write(self, command: NoteDamaged) -> None:
        wrong = command.computed_wrong or command.step in self.refused
        try:
            self._check()
            if self._checkpoints.exists(f"{step_folder(command.step)}/{COMMIT}"):
                note_damaged(self._checkpoints, command.step, command.detail, computed_wrong=wrong)
        except OSError:
            self.refused |= {command.step: replace(command, computed_wrong=True)} if wrong else {}
            return
        except Superseded:
            pass
        self.refused.pop(command.step, None)

    def write_refused(self) -> None:
        for each in list(self.refused.values()):
            self.write(each)
        self.again_at = time.monotonic() + NOTE_AGAIN_S

    def replaced(self, folder: str) -> None:
        """Another checkpoint has taken the place of this step's."""
        for step in [each for each in self.refused if step_folder(each) == folder]:
            del self.refused[step]


class Publisher:
    """One thing after another; `done` tells what came of them. Nothing here waits but `commit`'s caller.

    Deletion, which takes long, has a thread of its own: it waits for what was begun before, and nothing for it.
    """

    def __init__(
        self,
        checkpoints: Storage,
        run_id: str,
        *,
        keep: int,
        flush_log: Callable[[], None],
        check: Callable[[], None] = lambda: None,
        fetch: Fetch = lambda files: cast(PackedFiles, files),
    ) -> None:
        """`flush_log` makes the log's rows durable, so that a committed step's is never missing. Raises OSError.

        `check` raises Superseded where another process writes the run: it comes before all that others see. `fetch`
        brings what many keepers have told of their files together, from where the first of them holds it.
        """
        self._checkpoints, self._run_id, self._keep, self._flush_log = checkpoints, run_id, keep, flush_log
        self._check, self._fetch = check, fetch
        self.keep_every_steps = 0  # those at multiples of it are kept for good
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="storage")
        self.deleting = ThreadPoolExecutor(1, thread_name_prefix="delete")
        self._uploads: dict[int, Upload] = {}  # the newest one, and those whose COMMIT may be there or come
        self._committing: set[int] = set()  # these
        self._stored: set[int] = set()  # those whose COMMIT is known to be there
        self._apart: list[
            set[int]
        ] = []  # of each deletion: steps that were being written when it was asked for, or since
        self._given_up: dict[int, int] = {}  # uploads that no COMMIT comes of: the step of each
        self._published: dict[int, Published] = {}  # by upload
        self._working: list[Future[e.Event | None]] = []
        self._notes = Notes(checkpoints, check)

    def order(self, write: Write) -> WriteOrder:
        """What a keeper is to be given."""
        upload = self._begun(write.upload, write.version)
        return upload.order(write.origin, copies=write.copies, describe=write.describe)

    def order_all(self, write: WriteAll) -> OrderForAll:
        """What keepers are to be given, and pass on."""
        return self._begun(write.upload, write.version).order_all(write.describes, write.timeout_s)

    def written(self, number: int, order: WriteOrder, written: Written) -> None:
        """A keeper has carried out an order of this upload."""
        if number in self._given_up:
            self._delete_late(order.moment.step, lambda: [file.name for file in written.files])
        elif number in self._uploads:
            self._uploads[number].done(order, written)

    def joined(self, number: int, joined: Joined) -> None:
        """Many have carried out the one for all."""
        if number in self._given_up:
            step = self._given_up[number]
            self._delete_late(
                step, lambda: [name.decode() for name in self._fetch(joined.files).files["name"].tolist()]
            )
        elif number in self._uploads:
            self._uploads[number].joined(joined)

    def upload(self, number: int) -> Upload:
        """The newest one whose COMMIT is there: of older ones nothing is read back any more."""
        self._uploads = {each: found for each, found in self._uploads.items() if each >= number}
        return self._uploads[number]

    def index_order(self, command: PublishIndex) -> IndexOrder:
        """What is to be put together."""
        upload = self._uploads[command.upload]
        upload.nodes = command.nodes
        return upload.index_order

    def index_written(self, number: int, published: Published) -> None:
        """It is there."""
        if number in self._given_up:
            self._delete_late(self._given_up[number], lambda: [json.loads(published.commit)["index"]])
        elif number in self._uploads:
            self._published[number] = published

    def publish_index(self, command: PublishIndex) -> None:
        order, target = self.index_order(command), self._uploads[command.upload].folder

        def publish() -> e.Event:
            try:
                self.index_written(command.upload, order.carry_out(target, self._fetch))
            except Exception as error:  # of nodes that hold different things; storage raises many kinds
                return e.IndexNotWritten(command.upload, first_line(error))
            return e.IndexWritten(command.upload)

        self._working.append(self.thread.submit(publish))

    def publish_commit(self, command: PublishCommit) -> None:
        self._committing.add(command.upload)

        def publish() -> e.Event:
            published = self._published[command.upload]
            try:
                self._commit(step_folder(command.version.step), published.commit)
            except Exception as error:
                self._committing.discard(command.upload)
                return e.PublishFailed(command.upload, first_line(error))
            return e.CheckpointCommitted(command.upload, command.version.step, published.num_bytes)

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
        self._working.append(self.thread.submit(partial(self._notes.write, command)))

    def _note_again(self) -> None:
        self._notes.again_at = math.inf  # until it is done
        self._working.append(self.thread.submit(self._notes.write_refused))

    def clean_up(self, command: CleanUp) -> None:
        """Delete what was written for an upload that no COMMIT comes of, and what is yet to be."""
        step = command.version.step
        self._given_up[command.upload] = step

        def delete() -> e.Event:
            try:
                self._check()
                self._delete_files(step, self._leftovers(command))
            except (OSError, Superseded) as error:
                what = f"what was written for the checkpoint of step {step}, which failed, was not all deleted"
                return e.Deleted(f"{what}: {first_line(error)}", command.upload)
            return e.Deleted("", command.upload)

        self._working.append(self.deleting.submit(delete))

    def _leftovers(self, command: CleanUp) -> list[str]:
        """Files of that upload's generation and of earlier ones: none where there is a COMMIT, or another upload of
        this step may lead to one."""
        step, generation = command.version.step, command.version.generation
        names = self._checkpoints.list(step_folder(step))  # before the look: what is begun after it is in none of them
        others = (each for number, each in list(self._uploads.items()) if number not in self._given_up)
        if COMMIT in names or any(each.moment.step == step for each in others):
            return []
        found = [(name, NAME.match(name)) for name in names]
        return [name for name, match in found if match is not None and int(match[1]) <= generation]

    def _delete_late(self, step: int, names: Callable[[], Sequence[str]]) -> None:
        """What a keeper has written for an upload that was given up meanwhile."""

        def delete() -> None:
            with contextlib.suppress(Exception):  # storage's, or the keeper's that had the names: then retention does
                self._check()
                self._delete_files(step, names())

        with contextlib.suppress(RuntimeError):  # it is closed
            self._working.append(self.deleting.submit(delete))

    def _delete_files(self, step: int, names: Sequence[str]) -> None:
        folder = self._checkpoints / step_folder(step)
        in_threads(folder.delete, names)

    def delete(self, command: Delete) -> None:
        """Delete checkpoints that are more than is kept."""
        earlier = tuple(self._working)  # notes of what is damaged among them
        apart = {each.moment.step for number, each in self._uploads.items() if number not in self._stored}
        apart |= {command.spared, *command.unread}

        def delete() -> e.Event:
            wait(earlier)
            apart.update(self._notes.refused)
            try:
                self._check()
            except (OSError, Superseded) as error:
                return e.Deleted(first_line(error))
            kept = {"keep": self._keep, "keep_every_steps": self.keep_every_steps}
            return e.Deleted(try_retain(self._checkpoints, **kept, apart=apart, run_id=self._run_id))

        self._apart.append(apart)
        self._working.append(self.deleting.submit(delete))

    def done(self) -> list[e.Event]:
        """What came of things since the last call."""
        if self._notes.are_due:
            self._note_again()
        done = [each for each in self._working if each.done()]
        self._working = [each for each in self._working if each not in done]  # some are by now
        for error in filter(None, (each.exception() for each in done)):  # a mistake of ours, of one of them
            say_error(error)
        events = [event for each in done if each.exception() is None and (event := each.result()) is not None]
        self._stored |= {event.upload for event in events if isinstance(event, e.CheckpointCommitted)}
        del self._apart[: sum(isinstance(event, e.Deleted) and not event.upload for event in events)]
        return events

    def close(self, timeout_s: float | None = None) -> str:
        """What is not done in time, a line, or empty; a deletion that takes longer is gone on with by the next
        attempt."""
        if self._notes.refused:
            self._note_again()
        for each in (self.thread, self.deleting):
            each.shutdown(wait=False)
        is_late = bool(wait(self._working, timeout_s).not_done)
        if refused := sorted(self._notes.refused):
            folders = ", ".join(map(step_folder, refused))
            return f"a rank computed {folders} wrong, and storage takes no note of that: delete {COMMIT} there"
        return "old checkpoints are still being deleted: the next attempt goes on with it" if is_late else ""

    def _begun(self, number: int, version: Version) -> Upload:
        if number not in self._uploads:
            folder = self._checkpoints / step_folder(version.step)
            self._uploads = {each: found for each, found in self._uploads.items() if each in self._committing}
            self._published = {each: found for each, found in self._published.items() if each in self._uploads}
            self._committing &= self._uploads.keys()
            self._stored &= self._uploads.keys()
            for apart in self._apart:
                apart.add(version.step)
            self._uploads[number] = Upload(version, (), folder, self._run_id)
        return self._uploads[number]

    def _commit(self, folder: str, pointer: bytes) -> None:
        """Whatever another process has committed meanwhile stays, where storage can write on a condition."""
        name = f"{folder}/{COMMIT}"
        self._check()
        self._flush_log()
        self._check()
        if not self._checkpoints.create(name, pointer):
            self._check()  # then it is of this run's own past, before it went back
            self._checkpoints.write_bytes(name, pointer)
        self._notes.replaced(folder)
