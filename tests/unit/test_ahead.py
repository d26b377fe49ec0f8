"""The main loop on a device whose host is a step ahead, by a clock that only they move."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from regrow.config.schema import ObserveConfig, OptimConfig, PretrainConfig, TrainConfig
from regrow.data.read.batch import RankBatch
from regrow.plan.topology import plan_topology
from regrow.state.entries import Progress
from regrow.storage import Storage
from regrow.train import metrics as module
from regrow.train.build import loop_settings
from regrow.train.loop import train
from regrow.train.metrics import Meter
from regrow.train.profile import ProfileWindow, profiled_steps
from regrow.train.step import StepResult

RESULT = StepResult(loss=1.0, grad_norm=1.0, num_tokens=1, flag=False, blocked=False, digest=1)


class Device:
    """A stream, and all that the loop asks of its surroundings; a step takes `step_s`, the next rows `rows_s`."""

    num_ahead = 1

    def __init__(self, step_s: float = 0.0, rows_s: float = 0.0, checkpoints: tuple[int, ...] = ()) -> None:
        self.step_s, self.rows_s, self.checkpoints = step_s, rows_s, checkpoints
        self.host_s = self.device_s = 0.0
        self.runs = False  # what the device was given, and not the host
        self.window: ProfileWindow | None = None
        self.launched: list[tuple[int, bool]] = []  # step, and whether under the profiler
        self.rows: list[dict[str, Any]] = []

    def now(self) -> float:
        return self.device_s if self.runs else self.host_s

    def submit(self, fn: Callable[[], Any]) -> "Future[Any]":
        device = self
        self.device_s, self.runs = max(self.device_s, self.host_s), True
        came, self.runs = fn(), False
        at_s = self.device_s

        class Done(Future[Any]):
            def result(self, timeout: float | None = None) -> Any:
                device.host_s = max(device.host_s, at_s)
                return super().result()

        done = Done()
        done.set_result(came)
        return done

    def run(self, micro_batches: list[torch.Tensor], *, number: int, **more: Any) -> Any:
        self.device_s += self.step_s
        self.launched.append((number, self.window is not None and self.window._profile is not None))
        return SimpleNamespace(resolve=lambda: RESULT, waits=dict)

    def batches(self, start: int) -> Iterator[RankBatch]:
        while True:
            self.host_s += self.rows_s
            yield RankBatch(start, np.zeros(1, int), np.zeros((1, 5), np.uint32))
            start += 1

    def is_checkpoint_due(self, step: int) -> bool:
        return step in self.checkpoints

    def has_room(self, step: int) -> bool:
        return True

    def wants_to_leave(self) -> bool:
        return False

    def log(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        if self.window is not None:
            self.window.after(row["step"])

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **more: 0.0


def play(device: Device, config: PretrainConfig, start: int = 0, kind: str = "cpu") -> None:
    """By a meter of a device of this kind."""
    settings = loop_settings(config, plan_topology(1, num_slices=config.optim.num_slices), config.train.steps)
    train(
        cast(Any, device),
        device.batches(start),
        Progress(start, start * config.optim.global_batch_seqs, 0),
        optim=OptimConfig(),
        settings=settings,
        meter=Meter(1, 1.0, 1.0, world_size=1, generation=1, device=torch.device(kind), _last=0.0),
        saver=cast(Any, device),
        hooks=cast(Any, device),
        device=torch.device("cpu"),
        stream=device,
    )


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("rows_s", "checkpoints", "step_s", "waits"),
    [
        (0.08, (), [0.18, 0.1, 0.1, 0.1, 0.1, 0.1], [0.08, 0.0, 0.0, 0.0, 0.0, 0.0]),
        (0.15, (), [0.3, 0.15, 0.15, 0.15, 0.15, 0.1], [0.2, 0.05, 0.05, 0.05, 0.05, 0.0]),
        # nothing is in flight behind a checkpoint's step: its successor's rows are waited for
        (0.08, (3,), [0.18, 0.1, 0.1, 0.18, 0.1, 0.1], [0.08, 0.0, 0.0, 0.08, 0.0, 0.0]),
        (0.0, (), [0.1] * 6, [0.0] * 6),
    ],
)
def test_rows_that_come_while_the_device_computes_are_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
    rows_s: float,
    checkpoints: tuple[int, ...],
    step_s: list[float],
    waits: list[float],
    kind: str,
) -> None:
    """Rows that took 0.8 s of a step of 1 s had it count as lost to data by four fifths, and the device never waited.
    Of the first row are the rows of the first two steps, the second of which come as the first one runs."""
    device = Device(0.1, rows_s, checkpoints)

    class Event:
        """As torch's of a GPU, which this stands for."""

        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at_s = device.now()

        def synchronize(self) -> None:
            assert self.at_s <= device.host_s, "the host waits for more than the step that it has read"

        def elapsed_time(self, other: "Event") -> float:
            return (other.at_s - self.at_s) * 1e3

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 0)
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=device.now, time=device.now))
    play(device, PretrainConfig(train=TrainConfig(steps=6, validation_seqs=0)), kind=kind)
    assert [row["step_s"] for row in device.rows] == pytest.approx(step_s)
    assert [row["data_wait_s"] for row in device.rows] == pytest.approx(waits, abs=1e-9)
    assert all(isinstance(row["data_wait_s"], float) for row in device.rows)


class Window(ProfileWindow):
    def _begin(self) -> None:
        self._profile = cast(Any, object())

    def _end(self, running: Any) -> str:
        self._profile = None
        return ""


@pytest.mark.parametrize("start", [0, 9])
@pytest.mark.parametrize("checkpoints", [(), (9,), (10,), (12,), (9, 12)])
@pytest.mark.parametrize(("first", "num_steps"), [(10, 3), (1, 3), (18, 3), (19, 3), (10, 1), (20, 1), (1, 20)])
def test_a_profile_holds_the_steps_that_it_says(
    first: int, num_steps: int, checkpoints: tuple[int, ...], start: int
) -> None:
    """A step later it began and ended before, and of a run's last step it held nothing."""
    observe = ObserveConfig(profile_at_step=first, profile_steps=num_steps)
    config = PretrainConfig(train=TrainConfig(steps=20, validation_seqs=0), observe=observe)
    device = Device(checkpoints=checkpoints)
    device.window = Window(Storage.at("/nowhere"), torch.device("cpu"), profiled_steps(config))
    device.window.after(start)
    play(device, config, start)
    assert [number for number, _ in device.launched] == list(range(start + 1, 21))
    under = [number for number, is_under in device.launched if is_under]
    assert under == (list(range(first, min(first + num_steps, 21))) if first > start else [])
