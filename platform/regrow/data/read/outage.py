"""Storage of a corpus that fails for a while: rows are asked for again until it gives them."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from regrow.data.read.batch import RowReader, Rows
from regrow.errors import GroupOver, UnavailableError, first_line

RETRY_S, LOOK_S = 1.0, 0.2  # between tries, and between looks whether the group is over


@dataclass(frozen=True)
class Patience:
    """How long a rank waits for rows of a storage that fails."""

    timeout_s: float
    on_wait: Callable[[str], None] = lambda detail: None  # told what storage says, once for each read that has to wait
    is_over: Callable[[], bool] = lambda: False  # whether the rank's group is
    waiting: Callable[[], AbstractContextManager[None]] = nullcontext  # in which the rank waits


class PatientReader:
    """A reader that asks again while storage is unavailable: training waits, and no rank gives up its group for it."""

    def __init__(self, reader: RowReader, patience: Patience) -> None:
        self._reader, self._patience = reader, patience

    def read(self, row_ids: NDArray[np.int64]) -> Rows:
        """As the reader does. Raises UnavailableError after `timeout_s`, GroupOver where the group is over before."""
        give_up_at = time.monotonic() + self._patience.timeout_s
        try:
            return self._reader.read(row_ids)
        except UnavailableError as error:
            if self._patience.timeout_s <= 0:
                raise
            self._patience.on_wait(first_line(error))
        with self._patience.waiting():
            while True:
                self._pause()
                try:
                    return self._reader.read(row_ids)
                except UnavailableError:
                    if time.monotonic() > give_up_at:
                        raise

    def _pause(self) -> None:
        again_at = time.monotonic() + RETRY_S
        while time.monotonic() < again_at:
            if self._patience.is_over():
                raise GroupOver("the group was over while this rank waited for storage")
            time.sleep(LOOK_S)
