"""Rows are told by the coordinator's clock: a host whose clock is wrong trains as well as another."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from regrow.plan.mesh import MeshShape
from regrow.runtime import clock as module
from regrow.runtime import generation
from regrow.runtime.clock import ALIKE_S, STANDSTILL_S, ControlClock, Deadlines, clock_of
from regrow.runtime.hardware.peak import Peak
from regrow.runtime.kept_rows import KeptRows
from regrow.train.metrics import Meter
from regrow.train.step import StepResult

T0 = 1_700_000_000.0


class Hosts:
    """This host's clock, `ahead_s` of the other one's; a question takes `takes_s`, answered in its middle."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ahead_s: float, takes_s: float = 0.01) -> None:
        self.now, self.ahead_s, self.takes_s = 0.0, ahead_s, takes_s
        here = SimpleNamespace(time=lambda: T0 + self.now + self.ahead_s, monotonic=lambda: 77.0 + self.now)
        monkeypatch.setattr(module, "time", here)

    def ask(self) -> float:
        self.now += self.takes_s / 2
        told = T0 + self.now
        self.now += self.takes_s / 2
        return told


@pytest.mark.parametrize("ahead_s", [-3600.0, -1.0, 1.0, 3600.0])
def test_a_wrong_clock_tells_the_others_time_and_goes_on_when_it_is_set_right(
    monkeypatch: pytest.MonkeyPatch, ahead_s: float
) -> None:
    hosts = Hosts(monkeypatch, ahead_s)
    clock = clock_of(hosts.ask)
    for _ in range(2):
        assert clock() == pytest.approx(T0 + hosts.now, abs=1e-6)
        hosts.now, hosts.ahead_s = hosts.now + 100.0, 0.0


@pytest.mark.parametrize("ahead_s", [-0.9 * ALIKE_S, 0.0, 0.9 * ALIKE_S])
def test_clocks_that_are_alike_are_left_as_they_are(monkeypatch: pytest.MonkeyPatch, ahead_s: float) -> None:
    hosts = Hosts(monkeypatch, ahead_s)
    assert clock_of(hosts.ask)() == T0 + hosts.now + ahead_s


@pytest.mark.parametrize("answered_s", [0.0, 10.0, 20.0])
def test_an_answer_that_took_long_makes_no_clock_wrong(monkeypatch: pytest.MonkeyPatch, answered_s: float) -> None:
    """As of a coordinator that was restarted meanwhile."""
    hosts = Hosts(monkeypatch, 0.0)

    def ask() -> float:
        hosts.now += 20.0
        return T0 + answered_s

    assert clock_of(ask)() == T0 + 20.0


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_has_its_rows_on_the_coordinators_clock_from_its_groups_first_on(
    monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    calls = list[str]()
    coordinator = SimpleNamespace(start_training=lambda *told: calls.append("start"), now=lambda: T0)
    monkeypatch.setattr(generation, "CoordinatorClient", lambda *of: coordinator)
    monkeypatch.setattr(generation, "gather", lambda worker: [worker])
    monkeypatch.setattr(generation.ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "node"))
    job = SimpleNamespace(coordinator=None, first_generation=2, driver_s={}, fit_at=0.0)
    process: Any = SimpleNamespace(job=job, device=torch.device("cpu"), rows=KeptRows())
    restored: Any = SimpleNamespace(
        source="seed", built_at=0.0, keeper_at=0.0, filled_at=0.0, progress=SimpleNamespace(step=0)
    )
    joined: Any = SimpleNamespace(generation=1, rank=rank, world_size=2)
    made, peak = meter(), Peak(1.0, "")
    generation._announce(process, joined, restored, MeshShape(1, 1), peak, made, entered=0.0, begun=0.0, ready=0.0)
    assert calls == ["start"] * (rank == 0)
    for clock in (made.clock, process.rows.clock):
        assert (abs(clock() - T0) < 1e6) == (rank == 0)  # T0 is years ago


def meter() -> Meter:
    return Meter(100, flops_per_token=1.0, peak_flops=1.0, world_size=1, generation=1)


def test_a_row_has_the_time_of_its_meters_clock() -> None:
    made = meter()
    made.clock = lambda: T0
    result = StepResult(loss=1.0, grad_norm=1.0, num_tokens=100, flag=False, blocked=False, digest=1)
    assert made.finish({"step": 1}, result)["time"] == T0


class Steady:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.at = 77.0

    def __call__(self) -> float:
        return self.at


def test_what_a_coordinator_stands_still_does_not_pass_on_controls_clock_and_it_never_goes_back() -> None:
    steady = Steady()
    clock = ControlClock(T0, steady)
    for _ in range(50):
        steady.at += 0.1
        clock.tick()
    assert clock.now == pytest.approx(T0 + 5.0)
    steady.at += STANDSTILL_S - 0.1  # a slow tick is time that passed
    clock.tick()
    assert (clock.now, clock.stood_s) == (pytest.approx(T0 + 4.9 + STANDSTILL_S), 0.0)
    seen = list[float]()
    for gap_s, ticks in ((1.0, False), (69.0, False), (0.0, True), (0.1, False), (0.0, True), (30.0, True)):
        steady.at += gap_s
        if ticks:
            clock.tick()
        seen.append(clock.now - T0 - 4.9 - STANDSTILL_S)
    assert seen == pytest.approx([1.0, STANDSTILL_S, STANDSTILL_S, 0.1 + STANDSTILL_S, 0.1 + STANDSTILL_S, 4.1])
    assert clock.stood_s == pytest.approx(70.0 + 30.0 - 2 * STANDSTILL_S)


def test_a_nodes_deadline_does_not_move_with_a_standstill_of_the_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    steady, wrong_s = Steady(), [0.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(time=lambda: T0 - 77.0 + steady.at + wrong_s[0]))
    clock, deadlines = ControlClock(T0, steady), Deadlines()

    def left_s() -> float:
        notice = deadlines.notice({"a": T0 + 300.0}, clock)
        return notice.deadlines["a"] - clock.now

    assert left_s() == pytest.approx(300.0)
    steady.at += 100.0
    assert left_s() == pytest.approx(200.0), "before its first tick"
    clock.tick()
    assert left_s() == pytest.approx(200.0)
    notice = deadlines.notice({"b": T0 + 300.0}, clock)
    assert notice.deadlines["b"] - notice.ahead_s == pytest.approx(T0 + 300.0), "as the log has it"
    assert notice.deadlines["b"] - clock.now == pytest.approx(200.0)
    assert left_s() == pytest.approx(200.0)
    wrong_s[0] = 3600.0  # the host's clock is set
    assert left_s() == pytest.approx(200.0)
