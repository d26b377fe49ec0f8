import errno
import io
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from regrow.progress import Task
from regrow.show.console import Console, StepClock


class FakeClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def make_row(step: int, time: float, **changes: object) -> dict[str, object]:
    row: dict[str, object] = {
        "step": step,
        "loss": 5.0,
        "tokens_per_s": 12345.6,
        "mfu": 0.415,
        "world_size": 3,
        "generation": 1,
        "time": time,
    }
    return row | changes


def run(step_s: float, steps: int, stream: io.StringIO, each: Callable[[Console, int], None] | None = None) -> str:
    clock = FakeClock()
    with Console(stream, clock=clock) as console:
        console.start(["global batch 24 x 256", "2 to 3 workers"], steps=steps)
        for step in range(1, steps + 1):
            clock.now += step_s
            console.row(make_row(step, clock.now))
            if each:
                each(console, step)
    return stream.getvalue()


def shown_steps(text: str) -> list[int]:
    return [int(step) for step in re.findall(r"^step +(\d+)/", text, re.MULTILINE)]


def test_without_a_terminal_a_row_is_one_plain_line_with_all_that_matters() -> None:
    text = run(2.0, 40, io.StringIO())
    assert text.splitlines()[:2] == ["global batch 24 x 256", "2 to 3 workers"]
    assert "step  2/40  loss 5.0000  12,346 tok/s  MFU 41.5%  3 ranks  ETA 1 min 16 s  gen 1" in text.splitlines()


def test_goodput_is_shown_once_a_report_has_told_it() -> None:
    def tell(console: Console, step: int) -> None:
        console.goodput, console.effective = 0.8764, 0.8123

    assert "  goodput 87.6%  effective 81.2%  gen 1" in run(2.0, 10, io.StringIO(), tell)


def test_without_a_terminal_no_control_character_is_written_whatever_a_message_holds() -> None:
    def noise(console: Console, step: int) -> None:
        console.message(f"worker \x1b[31mdied\x1b[0m at {step}\r\a")
        console.progress(Task("tokenizing"), step, 10)

    text = run(1.0, 10, io.StringIO(), noise)
    assert "worker died at 3\n" in text
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", text)


def test_slow_steps_are_all_shown_and_fast_ones_now_and_then() -> None:
    assert shown_steps(run(6.0, 8, io.StringIO())) == list(range(1, 9))
    assert shown_steps(run(0.3, 47, io.StringIO())) == [1, 2, 3, 10, 20, 30, 40, 47]
    fast = shown_steps(run(0.001, 5000, io.StringIO()))
    assert fast[:3] == [1, 2, 3]
    assert fast[-1] == 5000
    assert 9 <= len(fast) <= 15  # five seconds of them


def test_the_first_steps_of_every_generation_are_shown() -> None:
    clock, stream = FakeClock(), io.StringIO()
    with Console(stream, clock=clock) as console:
        console.start([], steps=100)
        for step, generation in [(s, 1) for s in range(1, 8)] + [(s, 2) for s in range(5, 9)]:
            clock.now += 0.01
            console.row(make_row(step, clock.now, generation=generation))
    assert shown_steps(stream.getvalue()) == [1, 2, 3, 5, 6, 7, 8]


def test_the_last_row_is_shown_even_if_the_run_stops_unforeseen() -> None:
    clock, stream = FakeClock(), io.StringIO()
    with Console(stream, clock=clock) as console:
        console.start([], steps=100)
        for step in range(1, 6):
            console.row(make_row(step, clock.now))
    assert shown_steps(stream.getvalue()) == [1, 2, 3, 5]


def test_a_validation_loss_is_always_shown() -> None:
    for stream in (io.StringIO(), Terminal()):
        with Console(stream, clock=FakeClock()) as console:
            console.start([], steps=100)
            for step in range(1, 20):
                console.row(make_row(step, 1.0) | ({"validation_loss": 4.5678} if step == 17 else {}))
        assert "validation loss 4.5678" in stream.getvalue()


def test_unknown_numbers_are_shown_as_dashes() -> None:
    stream = io.StringIO()
    with Console(stream, clock=FakeClock()) as console:
        console.row(make_row(1, 1.0, mfu=None, loss=float("nan")))
    assert "loss nan" in stream.getvalue()
    assert "MFU -" in stream.getvalue()


def test_eta_counts_to_where_this_attempt_stops() -> None:
    clock, stream = FakeClock(), io.StringIO()
    with Console(stream, clock=clock) as console:
        console.start([], steps=1000, stop_at_step=20)
        for step in range(1, 4):
            clock.now += 10.0
            console.row(make_row(step, clock.now))
    assert "step    3/1000" in stream.getvalue()
    assert "ETA 2 min 50 s" in stream.getvalue()  # 17 steps of 10 s


def test_the_smoothed_step_time_forgets_the_past_and_skips_restarts() -> None:
    clock, now = StepClock(), 0.0
    assert clock.step_s is None
    clock.update(1, 1, now)
    assert clock.step_s is None
    for step in range(2, 60):
        now += 2.0
        clock.update(1, step, now)
        assert clock.step_s == pytest.approx(2.0)
    clock.update(2, 50, now + 500.0)  # a new generation, rolled back
    assert clock.step_s == pytest.approx(2.0)
    now += 500.0
    for step in range(51, 110):
        now += 4.0
        clock.update(2, step, now)
    assert clock.step_s == pytest.approx(4.0, rel=0.01)


def test_progress_of_preparation_is_seen_and_its_end_leaves_one_line() -> None:
    clock, stream = FakeClock(), io.StringIO()
    with Console(stream, clock=clock) as console:
        for done in range(101):
            console.progress(Task("tokenizing", "B"), done * 1.302e6, 130.2e6)
            clock.now += 0.2
        console.progress(Task("writing", "shards"), 0, 0)  # nothing known yet
    assert stream.getvalue().splitlines() == [
        "tokenizing: 0% of 130.2 MB",
        "tokenizing: 25% of 130.2 MB, 6.5 MB/s, 15.0 s left",
        "tokenizing: 50% of 130.2 MB, 6.5 MB/s, 10.0 s left",
        "tokenizing: 75% of 130.2 MB, 6.5 MB/s, 5.00 s left",
        "tokenizing: done in 20.0 s, 6.5 MB/s",
        "writing: 0%",
    ]


def test_the_rate_of_progress_counts_only_what_was_done_now() -> None:
    clock, stream = FakeClock(), io.StringIO()
    with Console(stream, clock=clock) as console:
        for done in (900, 901, 902, 1000):  # 900 of them by an attempt that was killed
            console.progress(Task("writing", "shards"), done, 1000)
            clock.now += 10
        console.progress(Task("training"), 0, 1)  # what cannot be counted has no rate
        clock.now += 10
        console.progress(Task("training"), 0.5, 1)
    assert stream.getvalue().splitlines() == [
        "writing: 90% of 1,000 shards",
        "writing: 90% of 1,000 shards, 0.1 shards/s, 16 min 30 s left",
        "writing: 90% of 1,000 shards, 0.1 shards/s, 16 min 20 s left",
        "writing: done in 30.0 s, 3.3 shards/s",
        "training: 0%",
        "training: 50%, 10.0 s left",
    ]


def test_at_a_terminal_progress_shows_its_rate_beside_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    clock, stream = FakeClock(), Terminal()
    with Console(stream, clock=clock) as console:
        for done in range(3):
            console.progress(Task("verifying", "B"), done * 1e9, 4e9)
            console.message("drawn")  # the live line is drawn with it
            clock.now += 2
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue())
    assert "━" * 12 + "─" * 12 + " 50% of 4.0 GB, 500.0 MB/s, 4.00 s left" in text


def test_at_a_terminal_messages_stand_above_a_live_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)

    def each(console: Console, step: int) -> None:
        if step == 5:
            console.message("checkpoint of step 5 [committed], model.py:100: error")  # no emoji of that name

    text = run(0.1, 9, Terminal(), each)
    assert "\x1b[" in text
    assert "checkpoint of step 5 [committed], model.py:100: error" in text
    assert re.search(r"step 9/9.*loss 5.0000", re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text))
    assert text.endswith("\x1b[?25h")  # the cursor is back


def test_no_color_leaves_the_live_line_without_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1")
    text = run(0.1, 5, Terminal())
    assert "step 5/5" in text
    assert not re.search(r"\x1b\[[0-9;]*m", text)


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert "\x1b" not in run(0.1, 5, Terminal())


def test_ranks_that_wait_beside_the_group_are_shown() -> None:
    stream = io.StringIO()
    with Console(stream) as console:
        console.num_spares = 1
        console.row(make_row(1, 1.0))
    assert "  3 ranks + 1 spare  " in stream.getvalue()


class Gone(io.StringIO):
    """A terminal that was hung up."""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        raise OSError(errno.EIO, "Input/output error")


def test_a_job_goes_on_where_what_it_writes_to_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C ends `tee`, too: the line that says so was the end of the driver, without a checkpoint."""
    monkeypatch.setenv("TERM", "xterm-256color")
    reader, writer = os.pipe()
    os.close(reader)
    piped = os.fdopen(writer, "w")
    for stream in (piped, Gone()):
        console = Console(stream)
        console.start(["a line"], steps=9)
        console.row(make_row(1, 1.0))
        console.progress(Task("writing"), 1, 2)
        console.message("stopping after this step with a checkpoint")
        console.close()
    with pytest.raises(BrokenPipeError):
        piped.close()


def test_a_signal_amid_a_write_to_what_does_not_read_is_heard() -> None:
    """The handler's line went to the same stream: RuntimeError, out of the main thread's own write."""
    reader, writer = os.pipe()
    heard = threading.Event()

    def read() -> None:
        heard.wait()
        while os.read(reader, 1 << 16):
            pass

    def handle(*_: object) -> None:
        console.message("stopping after this step with a checkpoint")
        heard.set()

    reading = threading.Thread(target=read)
    before = signal.signal(signal.SIGALRM, handle)
    with os.fdopen(writer, "w") as stream:
        console = Console(stream)
        reading.start()
        signal.setitimer(signal.ITIMER_REAL, 0.2, 0.2)  # by then the pipe is full
        try:
            while not heard.is_set():
                console.message("a line of many" * 1000)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
    reading.join()
    os.close(reader)


def test_a_rank_of_torchrun_ends_well_where_what_it_writes_to_is_gone() -> None:
    script = "from regrow.deadline import leave; print('a line'); leave(None)"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as gone:
        ended = subprocess.run([sys.executable, "-c", script], stdout=gone, env=environment, timeout=300)
    assert ended.returncode == 0
