"""Scalars by step for TensorBoard, written without torch or TensorFlow."""

import math
import sys
import time
import types
from collections.abc import Callable, Mapping
from typing import Any

from regrow.storage import Storage

SCALARS = ("loss", "grad_norm", "lr", "tokens_per_s", "mfu", "world_size", "validation_loss", "data_wait_s")
FLUSH_S = 10
QUEUE_SIZE = 1000  # rows that wait for the writer's thread before training would


class TensorBoard:
    """Writes rows into the run folder's `tensorboard/`; a thread does the disk's part."""

    @staticmethod
    def open(storage: Storage, *, start_step: int, note: Callable[[str], None]) -> "TensorBoard | None":
        """Begin after `start_step`; what TensorBoard holds of later steps, from a lost attempt, is purged.

        Event files grow by appending: where storage is not local, `note` gets one line and None is returned.
        """
        if not storage.is_local:
            note(f"no TensorBoard files: {storage} cannot be appended to; metrics.jsonl has the same numbers")
            return None
        return TensorBoard(str(storage.local_path / "tensorboard"), start_step)

    def __init__(self, folder: str, start_step: int) -> None:
        if "tensorflow" not in sys.modules:  # TensorBoard's own switch: never import an installed TensorFlow
            sys.modules.setdefault("tensorboard.compat.notf", types.ModuleType("tensorboard.compat.notf"))
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._Event, self._Summary = event_pb2.Event, summary_pb2.Summary
        self._writer = EventFileWriter(folder, max_queue_size=QUEUE_SIZE, flush_secs=FLUSH_S)
        self.begin(start_step)

    def begin(self, start_step: int) -> None:
        """Purge what was shown past `start_step`: a new attempt or generation writes those steps again."""
        from tensorboard.compat.proto import event_pb2

        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._writer.add_event(self._Event(step=start_step + 1, session_log=start))

    def row(self, row: Mapping[str, Any]) -> None:
        """Write one metrics row; missing and null values leave no point."""
        values = [
            self._Summary.Value(tag=tag, simple_value=value)
            for tag in SCALARS
            if isinstance(value := row.get(tag), int | float) and not math.isnan(value)
        ]
        self._writer.add_event(
            self._Event(wall_time=row["time"], step=row["step"], summary=self._Summary(value=values))
        )

    def report(self, ratios: Mapping[str, float | None], *, step: int) -> None:
        """Write what a report says of the whole run so far."""
        values = [
            self._Summary.Value(tag=f"ratio/{name}", simple_value=value)
            for name, value in ratios.items()
            if value is not None
        ]
        self._writer.add_event(self._Event(wall_time=time.time(), step=step, summary=self._Summary(value=values)))

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
