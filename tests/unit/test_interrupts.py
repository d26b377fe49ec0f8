"""What ends a process in good order, and what ends that, too."""

import os
import signal
from types import SimpleNamespace

import pytest

from regrow.runtime import interrupts
from regrow.runtime.interrupts import terminable


def test_a_signal_to_a_process_and_to_its_group_does_not_cut_short_what_the_first_one_cleans_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, cleaned = [100.0], []
    monkeypatch.setattr(interrupts, "time", SimpleNamespace(monotonic=lambda: now[0]))
    before = signal.getsignal(signal.SIGTERM)

    def work() -> None:
        with terminable(SystemExit, 143):
            try:
                os.kill(os.getpid(), signal.SIGTERM)
            finally:
                os.kill(os.getpid(), signal.SIGTERM)
                cleaned.append("after the same signal")
                now[0] += 5.0
                os.kill(os.getpid(), signal.SIGTERM)
                cleaned.append("after another one")

    with pytest.raises(KeyboardInterrupt) as found:
        work()
    assert isinstance(found.value.__context__, SystemExit)
    assert cleaned == ["after the same signal"]
    assert signal.getsignal(signal.SIGTERM) is before
