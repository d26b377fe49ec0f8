"""What a rank's heartbeat says of the collectives that its training thread is in."""

import json
import os
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from regrow.control.health import Pulse, left_behind
from regrow.control.slow import Worker
from regrow.parallel import tree
from regrow.runtime.abort import Breaker, listening
from regrow.runtime.liveness import pulse as pulse_module
from regrow.runtime.liveness.heartbeat import RECORDERS, Heartbeat, newest_collective
from regrow.runtime.liveness.pulse import where
from regrow.state.collective import gather
from regrow.state.memory.control_word import ControlWord
from support.gloo import run_ranks
from support.members import OFF, Member, run_members


def answers(folder: str, late: int) -> list[tuple[int, bool]]:
    """Collectives begun, and whether one has not ended, when asked twice while one rank has not come yet."""
    pulse_module.WHERE_S = 60.0  # on a busy machine
    rank, pulses, mine = dist.get_rank(), list[Pulse](), Path(folder) / f"{dist.get_rank()}"
    mine.mkdir(parents=True)
    heartbeat = Heartbeat(mine)
    heartbeat.enter(1, Breaker())
    tensor = torch.zeros(3)
    pair = dist.new_group([0, 1])
    for _ in range(4):
        dist.all_reduce(tensor)
    if rank in (0, 1):
        dist.all_reduce(tensor, group=pair)

    def ask() -> None:
        for asked in (1, 2):
            time.sleep(0.5)
            ControlWord(traces=asked).write(mine)
            pulses.extend(where(mine, asked))
        (mine / "asked").touch()

    asking = threading.Thread(target=ask)
    asking.start()
    while rank == late and len(list(Path(folder).glob("*/asked"))) < dist.get_world_size():
        time.sleep(0.01)  # a process that runs
    dist.all_reduce(tensor)
    asking.join()
    return [(pulse.collectives, pulse.waits) for pulse in pulses]


def answers_of_member(member: Member) -> list[tuple[int, bool]]:
    member.form()
    return answers(os.environ["FOLDER"], 2)


@pytest.mark.parametrize("backend", ["gloo", "asynchronous"])
def test_ranks_that_wait_say_so_and_the_one_that_they_wait_for_is_found(tmp_path, backend):
    if backend == "gloo":
        of_ranks = run_ranks(answers, 3, str(tmp_path), 2)
    else:
        _, of_ranks = run_members(answers_of_member, 3, tmp_path, OFF | {"FOLDER": str(tmp_path / "nodes")})
    (base, _), *_ = of_ranks[2]
    assert of_ranks[2] == [(base, False), (base, False)]
    assert of_ranks[:2] == [[(base + 2, True), (base + 2, True)]] * 2  # one more is that of the pair

    def asked(number: int) -> dict[Worker, Pulse]:
        return {
            (f"node {rank}", rank): Pulse(rank, 1, 9, 0.0, 0.0, "S", number, *said[number])
            for rank, said in enumerate(of_ranks)
        }

    assert left_behind(asked(0), asked(1)) == [("node 2", 2)]


def wait_longer_than_a_collective_may_take(folder: str) -> str:
    rank, mine = dist.get_rank(), Path(folder) / f"{dist.get_rank()}"
    mine.mkdir()
    gloo = set().union(*gather(list(listening())))
    heartbeat = Heartbeat(mine, collective_timeout_s=0.5)
    breaker = Breaker()
    breaker.watch(gloo)
    heartbeat.enter(1, breaker)
    tensor = torch.zeros(3)
    for step in range(3):
        dist.all_reduce(tensor)
        heartbeat.stepped(step)
    time.sleep(2.0)  # in none: that may last
    dist.all_reduce(tensor)
    heartbeat.stepped(3)
    if rank == 2:
        while len(list(Path(folder).glob("*/broken_off"))) < 2:
            time.sleep(0.01)
        return "never came"
    try:
        dist.all_reduce(tensor)  # gloo's own timeout is far away
    except RuntimeError:
        (mine / "broken_off").touch()
        return "broken off"
    return "the collective came to an end"


def test_a_collective_that_takes_too_long_is_broken_off_and_computing_for_long_is_not(tmp_path):
    found = run_ranks(wait_longer_than_a_collective_may_take, 3, str(tmp_path), deadline_s=120.0)
    assert found == ["broken off", "broken off", "never came"]


@pytest.mark.parametrize(
    ("newest", "waits"),
    [
        ({"state": "completed", "retired": False}, False),  # the device is done, torch has not looked
        ({"state": "completed", "retired": True}, False),
        ({"state": "scheduled", "retired": True}, False),  # gloo: retired as it ends
        ({"state": "scheduled", "retired": False}, True),
        ({"state": "started", "retired": False}, True),  # NCCL: its kernel waits for the others
    ],
)
def test_what_a_recorder_tells_of_a_collectives_end(newest, waits):
    """NCCL's is read by its format (version 2.x) alone: there is none here."""
    broken_off = {"record_id": 2998, "state": "scheduled", "retired": False, "time_created_ns": 99}
    ended = {"record_id": 2999, "state": "completed", "retired": True, "time_created_ns": 100}
    entries = [broken_off, ended, {"record_id": 3000, "time_created_ns": 101, **newest}]
    dump = json.dumps({"version": "2.10", "entries": entries})
    assert newest_collective(dump.encode(), 2999) == (3001, 101 if waits else 0)
    assert newest_collective(b'{"version": "2.10"}', 2999) == (0, False)


def test_a_clock_that_is_set_back_does_not_make_a_collective_one_of_an_earlier_generation(tmp_path, monkeypatch):
    monkeypatch.setattr(pulse_module, "WHERE_S", 60.0)
    with pytest.raises(RuntimeError), tree._recorded():
        raise RuntimeError("the group before was broken off")
    heartbeat, now_ns = Heartbeat(tmp_path), time.time_ns

    def waits(asked: int) -> bool:
        ControlWord(traces=asked).write(tmp_path)
        (pulse,) = where(tmp_path, asked)
        return pulse.waits and pulse.waits_s >= 0.0

    heartbeat.enter(1, Breaker())
    assert not waits(1)
    monkeypatch.setattr(time, "time_ns", lambda: now_ns() - 3600 * 10**9)
    with tree._recorded():
        assert waits(2)
        monkeypatch.setattr(time, "time_ns", lambda: now_ns() - 7200 * 10**9)
        assert waits(3)
    assert not waits(4)


def test_torch_has_the_recorder_that_is_asked():
    torch_c = torch._C._distributed_c10d
    assert hasattr(torch_c, RECORDERS[0])
    assert hasattr(torch_c, RECORDERS[1]) == dist.is_nccl_available()
