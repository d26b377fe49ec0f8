"""What a drill orders a process to suffer: once, as long as it lives, or in one phase."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from regrow.drill.processes import is_alive
from regrow.train.flips import flipping
from regrow.train.orders import (
    ALL,
    DEVICE,
    GRADIENTS,
    HANG,
    ORDERS,
    SLOW,
    WEIGHTS,
    Order,
    Orders,
    Slowness,
    hangs_since,
)

WORKS = """
import sys
from pathlib import Path
from regrow.control.phases import Phase
from regrow.runtime.liveness.heartbeat import Heartbeat
heartbeat = Heartbeat(Path(sys.argv[1]))
for phase in (Phase.snapshot, Phase.validation):
    with heartbeat.phase(phase):
        print(phase, flush=True)
"""


def test_an_order_holds_in_later_groups_of_a_process_too_and_what_happens_once_does_not(tmp_path: Path) -> None:
    orders = Orders(tmp_path)
    assert orders.read() == []
    order, device = Order(GRADIENTS, chance=0.5), Order(DEVICE, token_s=0.1)
    order.leave(tmp_path, os.getpid())
    assert [orders.read(), orders.read(), Orders(tmp_path).read()] == [[order]] * 3
    Order(WEIGHTS).leave(tmp_path, os.getpid())
    assert [orders.read(), Orders(tmp_path).read()] == [[Order(WEIGHTS), order], [order]]
    device.leave(tmp_path, ALL)
    assert orders.read() == [order, device]
    Order(GRADIENTS).leave(tmp_path, os.getpid())
    assert orders.read() == [Order(GRADIENTS), device]


def test_steps_are_longer_by_a_share_of_what_they_took_without_it_until_its_time_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slept: list[float] = []
    clock = [100.0]

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock[0] += seconds

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    slowness, order = Slowness(), Order(SLOW, share=0.5, until=time.time() + 3600.0)
    for number in range(12):
        slowness.step(order if number >= 4 else None)
        for _ in range(2):  # passes
            slowness.compute(64)
        clock[0] += 2.0
    assert slept == [1.0] * 8  # half of a step, and not of one with it
    slowness.step(Order(SLOW, share=0.5, until=time.time() - 1.0))
    slowness.compute(64)
    assert len(slept) == 8
    slowness.step(None, Order(DEVICE, token_s=0.01))
    for _ in range(2):
        slowness.compute(64)
    assert slept[8:] == [0.64, 0.64]


def test_a_drill_s_orders_are_carried_out_before_each_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Module()
    model.norm, model.stages, model.weight = None, {0: nn.Identity()}, nn.Parameter(torch.ones(2, 2))
    assert list(flipping(iter([1, 2]), model)) == [1, 2]
    monkeypatch.setenv(ORDERS, str(tmp_path))
    Order(WEIGHTS).leave(tmp_path, os.getpid())
    assert list(flipping(iter([1, 2]), model)) == [1, 2]
    assert (model.weight != 1).sum() == 1


def test_what_a_process_suffers_is_not_ended_by_an_order_to_suffer_something_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, last = nn.Module(), nn.Identity()
    model.norm, model.stages, model.weight = None, {0: last}, nn.Parameter(torch.ones(2, 2))
    monkeypatch.setenv(ORDERS, str(tmp_path))
    slept, sleep = list[float](), time.sleep
    here = threading.get_ident()  # threads that other tests have left sleep, too
    monkeypatch.setattr(time, "sleep", lambda s: slept.append(s) if threading.get_ident() == here else sleep(s))
    hidden = torch.ones(1, 2, 2, requires_grad=True)

    def flips() -> int:
        hidden.grad = None
        last(hidden).sum().backward()
        assert hidden.grad is not None
        return int((hidden.grad != 1).sum())

    found = []
    later = [Order(GRADIENTS), Order(SLOW, share=0.5, until=time.time() + 3600.0), Order(WEIGHTS)]
    later.append(Order(SLOW, share=0.5, until=time.time() - 1.0))
    for number in flipping(iter(range(5)), model):
        found.append((flips(), len(slept)))
        for order in later[number : number + 1]:
            order.leave(tmp_path, os.getpid())
    assert found == [(0, 0), (1, 0), (1, 1), (1, 2), (1, 2)]


def test_a_process_hangs_in_the_phase_that_it_was_ordered_to_and_in_no_other(tmp_path: Path) -> None:
    environment = {**os.environ, ORDERS: str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", f"input()\n{WORKS}", str(tmp_path)],
        env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        Order(HANG, phase="validation").leave(tmp_path, process.pid)
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "snapshot\n"
        until(hangs_since(tmp_path, process.pid).exists)
        assert is_alive(process.pid)
        process.kill()
        assert process.stdout.read() == ""


def until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.05)
