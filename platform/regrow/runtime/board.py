"""The run's TensorBoard files, written on the log's thread: what breaks there ends them, and nothing else."""

from collections.abc import Callable, Mapping
from typing import Any

from regrow.errors import first_line
from regrow.runtime.log_writer import LogWriter
from regrow.show.tensorboard import TensorBoard
from regrow.storage import Storage


class Board:
    """Of one coordinator. TensorBoard's writer does not recover, and metrics.jsonl has the same numbers."""

    def __init__(self, folder: Storage, writer: LogWriter, note: Callable[[str], None], *, wanted: bool) -> None:
        self._folder, self._writer, self._note, self._draws = folder, writer, note, wanted
        self._files: TensorBoard | None = None

    def begin(self, start_step: int) -> None:
        """A group trains from here on: what was shown of later steps goes."""

        def begin() -> None:
            if self._files is not None:
                self._files.begin(start_step)
            else:
                self._files = TensorBoard.open(self._folder, start_step=start_step, note=self._note)
                self._draws = self._files is not None

        self._put(begin)

    def row(self, row: Mapping[str, Any]) -> None:
        self._put(lambda: self._files.row(row) if self._files else None)

    def report(self, ratios: Mapping[str, float | None], *, step: int) -> None:
        self._put(lambda: self._files.report(ratios, step=step) if self._files else None)

    def close(self) -> None:
        self._put(lambda: self._files.close() if self._files else None)

    def _put(self, work: Callable[[], None]) -> None:
        if self._draws:
            self._writer.put(lambda: self._draw(work))

    def _draw(self, work: Callable[[], None]) -> None:
        if not self._draws:
            return
        try:
            work()
        except Exception as error:
            self._files, self._draws = None, False
            self._note(f"no more TensorBoard files: {first_line(error)}")
