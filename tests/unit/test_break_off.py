"""How groups of a device are broken off: readers are told first, then all groups at once, once, and not for ever."""

import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from regrow.runtime import abort as break_off
from regrow.runtime.abort import Breaker
from regrow.train.certificate import BrokenStep, Certificate


class Group:
    """Of NCCL's, whose abort returns once all have been aborted: as where a kernel of one waits for another's."""

    def __init__(self, together: threading.Barrier, said: list[str]) -> None:
        self.together, self.said = together, said
        self.timeouts: list[float] = []

    def _get_backend(self, device: torch.device) -> "Group":
        assert device.type == "cuda"
        return self

    def _set_default_timeout(self, timeout: Any) -> None:
        self.timeouts.append(timeout.total_seconds())

    def abort(self) -> None:
        self.said.append("abort")
        self.together.wait(30)
        self.said.append("aborted")


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[Group]:
    together, said = threading.Barrier(3), list[str]()
    made = [Group(together, said) for _ in range(3)]
    monkeypatch.setattr(distributed_c10d, "_world", SimpleNamespace(pg_map=dict.fromkeys(made)))
    monkeypatch.setattr(dist, "get_backend", lambda group: "cpu:gloo,cuda:nccl")
    return made


def test_readers_are_told_first_and_all_groups_are_aborted_side_by_side_once(groups: list[Group]) -> None:
    said, breaker = groups[0].said, Breaker()
    breaker.first(lambda: said.append("told"))
    breaker.start()
    breaker.start()
    while said.count("aborted") < 3:
        time.sleep(0.01)
    breaker.left()
    assert said == ["told"] + ["abort"] * 3 + ["aborted"] * 3
    assert [group.timeouts for group in groups] == [[break_off.ABORT_S]] * 3
    breaker.first(lambda: said.append("told late"))
    assert said[-1] == "told late"


def test_a_group_that_is_made_meanwhile_is_aborted_too(groups: list[Group], monkeypatch: pytest.MonkeyPatch) -> None:
    first, *late = groups
    known = {first: None}
    monkeypatch.setattr(distributed_c10d, "_world", SimpleNamespace(pg_map=known))
    monkeypatch.setattr(break_off, "LOOK_S", 0.05)
    breaker = Breaker()
    breaker.start()
    while not first.said:
        time.sleep(0.01)
    known |= dict.fromkeys(late)
    while first.said.count("aborted") < 3:
        time.sleep(0.01)
    breaker.left()


HANGS = """
import threading, time
from torch.distributed import distributed_c10d
import torch.distributed as dist
from regrow.runtime import abort as break_off
break_off.LEAVE_S = 0.3 if {leaves} else 600.0
break_off.ABORT_S, break_off.LOOK_S = 0.3, 0.05
class Group:
    def _get_backend(self, device): return self
    def _set_default_timeout(self, timeout): pass
    def abort(self): threading.Event().wait()
distributed_c10d._world.pg_map[Group()] = None
dist.get_backend = lambda group: "nccl"
breaker = break_off.Breaker()
if {leaves}:
    breaker.start()
    threading.Event().wait(60)
with breaker.connecting(60):
    breaker.start()
    threading.Event().wait(60)
"""


BEATS = """
import sys, threading, time
from pathlib import Path
from torch.distributed import distributed_c10d
import torch.distributed as dist
from regrow.runtime.abort import Breaker
from regrow.runtime.liveness.heartbeat import Heartbeat
from regrow.runtime.liveness.pulse import read_pulses
from regrow.state.memory.control_word import ControlWord
folder, aborting = Path(sys.argv[1]), threading.Event()
class Group:
    def _get_backend(self, device): return self
    def _set_default_timeout(self, timeout): pass
    def abort(self):
        aborting.set()
        threading.Event().wait()
distributed_c10d._world.pg_map[Group()] = None
dist.get_backend = lambda group: "nccl"
heartbeat = Heartbeat(folder)
heartbeat.enter(7, Breaker())
ControlWord(over=7).write(folder)
aborting.wait(60)
heartbeat.leave()  # takes the heartbeat's lock: the thread that trains is on its way out
heartbeat.enter(8, Breaker())
while read_pulses(folder)[0].generation != 8:
    time.sleep(0.01)
print("beats")
"""


def test_the_heart_beats_on_while_an_abort_hangs(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", BEATS, str(tmp_path)], capture_output=True, text=True, timeout=300, check=True
    )
    assert ended.stdout == "beats\n"


@pytest.mark.parametrize(
    ("leaves", "where"), [(True, "a collective or on its device"), (False, "making communicators")]
)
def test_a_process_that_does_not_come_out_ends_itself(leaves: bool, where: str) -> None:
    script = HANGS.format(leaves=leaves)
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 1
    assert where in ended.stderr


def test_a_group_that_does_not_connect_in_time_is_broken_off() -> None:
    breaker, told = Breaker(), threading.Event()
    breaker.first(told.set)
    with breaker.connecting(0.05):
        assert told.wait(60)
    breaker.left()
    assert breaker.begun


def test_a_number_that_all_ranks_sent_is_believed_and_none_other() -> None:
    certificate = Certificate(7, 3, torch.device("cpu"))
    field = certificate.field(12).item()
    certificate.check(12, 3 * field)
    for total in (
        2 * field,
        3 * field + 1,
        0.0,
        float("nan"),
        3 * Certificate(8, 3, torch.device("cpu")).field(12).item(),
    ):
        with pytest.raises(BrokenStep, match="a collective of step 12 was broken off on some rank of generation 7"):
            certificate.check(12, total)
    certificate.clear()
    assert certificate.field(13).item() == 0.0
    with pytest.raises(BrokenStep, match="over before step 12"):
        certificate.check(12, 3 * field)


def test_sums_over_16384_ranks_are_exact_in_any_order() -> None:
    torch.manual_seed(0)
    for step in range(1, 50):
        certificate = Certificate(step, 16_384, torch.device("cpu"))
        fields = certificate.field(step).repeat(16_384)
        for total in (fields.sum(), fields.view(128, 128).sum(0).sum(), fields.cumsum(0)[-1]):
            certificate.check(step, total.item())
        with pytest.raises(BrokenStep):
            certificate.check(step, fields[1:].sum().item())


def test_groups_that_are_destroyed_in_good_order_are_not_aborted(groups: list[Group]) -> None:
    """As where another member dies while this one leaves: an abort frees what NCCL has freed by then."""
    said, breaker = groups[0].said, Breaker()
    assert breaker.stand_down()
    breaker.start()
    breaker.settle()
    breaker.left()
    assert breaker.begun
    assert said == []
    other = Breaker()
    other.start()
    assert not other.stand_down(), "it is broken off: that comes first"
    other.settle()
    other.left()
    assert said.count("aborted") == 3


def test_groups_are_destroyed_once_they_are_aborted(groups: list[Group]) -> None:
    said, breaker, late = groups[0].said, Breaker(), groups.pop()
    late.together = threading.Barrier(2)  # one of them hangs until this test comes
    settled = threading.Event()

    def settle() -> None:
        breaker.settle()
        settled.set()

    for each in groups:
        each.together = threading.Barrier(1)
    breaker.start()
    threading.Thread(target=settle, daemon=True).start()
    assert not settled.wait(0.5)
    late.together.wait(30)
    assert settled.wait(30)
    assert said.count("aborted") == 3
    breaker.left()
