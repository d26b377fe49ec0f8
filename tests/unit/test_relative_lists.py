"""Events of many ranks are written as what changed, and read as they were."""

import itertools
import json
import random
import uuid
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow.control.membership import Member
from regrow.control.past import formed, group_of
from regrow.drill.log import RunFollower
from regrow.record import relative
from regrow.record.events import Event, Forming, Generation, Row, Stopped
from regrow.record.log import EVENTS, RunLog, read_events
from regrow.record.relative import without_lists
from regrow.storage import Storage


def members(nodes: range, per_node: int = 8) -> list[Row]:
    return [
        dict(vars(Member(f"{node:08x}{rank:04x}", f"{node:056x}", "10.0.0.1", 40000 + rank, 1000 + rank, gpu=rank)))
        for node in nodes
        for rank in range(per_node)
    ]


def lines(folder: Path) -> list[bytes]:
    return (folder / EVENTS).read_bytes().splitlines()


def test_a_node_that_dies_in_a_large_run_is_a_short_line(tmp_path: Path) -> None:
    before = members(range(2048))
    after = [*before[:8000], *before[8008:], *members(range(2048, 2049))]
    with RunLog(Storage.at(tmp_path)) as log:
        for number, each in enumerate((before, after), start=1):
            log.event(Forming(generation=number, members=each))
            log.event(Generation(generation=number, world_size=len(each), start_step=0, cause="start", workers=each))
    sizes = [len(line) for line in lines(tmp_path)]
    assert sizes[0] > 3e6
    assert max(sizes[2:]) < 2000
    (_, _, forming, _) = map(json.loads, lines(tmp_path))
    assert forming["members"] == {"since": 1, "entries": [[0, 8000], [8008, 16384], *after[-8:]]}
    found = read_events(Storage.at(tmp_path))
    assert [each["members"] for each in found if each["event"] == "forming"] == [before, after]
    assert [each["workers"] for each in found if each["event"] == "generation"] == [before, after]


def test_ports_that_are_others_in_each_generation_do_not_make_a_long_line(tmp_path: Path) -> None:
    """Each process has another store and another listener then. A coordinator that is restarted needs them."""
    dice = random.Random(0)

    def met_anew(group: list[Member]) -> list[Member]:
        return [replace(each, port=dice.randrange(1 << 16), control=dice.randrange(1 << 16)) for each in group]

    before = met_anew([Member(**each) for each in members(range(2048))])
    after = met_anew([*before[:8000], *before[8008:], *(Member(**each) for each in members(range(2048, 2049)))])
    with RunLog(Storage.at(tmp_path)) as log:
        for generation, group in enumerate((before, after), start=1):
            log.event(Forming(**formed(generation, group)))
    line = lines(tmp_path)[-1]
    assert len(line) - len(json.loads(line)["ports"]) < 2000
    assert len(line) < 16_384 * 2 * 2 * 4 / 3 + 2000, "two bytes a port, as base64"
    found = read_events(Storage.at(tmp_path))
    assert [group_of(found, generation).members for generation in (1, 2)] == [tuple(before), tuple(after)]
    assert found[1]["members"][0] is found[0]["members"][0], "hundreds of generations are read at once"
    assert without_lists(found[1]) == {"event": "forming", "time": found[1]["time"], "generation": 2}


def test_a_list_that_a_person_can_read_is_written_whole(tmp_path: Path) -> None:
    with RunLog(Storage.at(tmp_path)) as log:
        for number in (1, 2):
            log.event(Forming(generation=number, members=members(range(15))))
    assert [json.loads(line)["members"] for line in lines(tmp_path)] == [members(range(15))] * 2


ENTRIES = st.lists(
    st.fixed_dictionaries({"node": st.sampled_from("abc"), "pid": st.integers(1, 4), "graphs": st.integers(0, 1)}),
    max_size=8,
)
ONE = st.tuples(st.sampled_from(["forming", "generation", "stopped", "writer"]), ENTRIES)


@pytest.mark.parametrize("appends", [True, False], ids=["local", "object store"])
@given(happened=st.lists(ONE, max_size=12))
def test_what_is_read_is_what_happened(
    happened: list[tuple[str, list[Row]]], appends: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whatever is in the lists, an entry twice, too, and by one writer of the log after another."""
    folder = tmp_path_factory.mktemp("run")
    storage = Storage.at(folder if appends else f"memory://{uuid.uuid4().hex}/run")
    wrote: list[Row] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(relative, "FEWEST", 2)
        started = itertools.count()
        patch.setattr("secrets.token_hex", lambda size: f"{next(started):04x}")  # writers of a millisecond, in order
        patch.setattr("time.time_ns", lambda: 0)
        log, follower = RunLog(storage), RunFollower(folder)
        for number, (what, entries) in enumerate(happened, start=1):
            event: Event = Stopped(step=number, reason="finished")
            if what == "forming":
                event = Forming(generation=number, members=entries)
            elif what == "generation":
                event = Generation(generation=number, world_size=1, start_step=0, cause="start", workers=entries)
            elif what == "writer":
                log.close()
                log = RunLog(storage)
                continue
            wrote.append(log.event(replace(event, time=1.0 + number)).to_row())
            if appends:
                follower.poll()
        log.close()
    assert read_events(storage) == wrote
    assert not appends or follower.events == wrote


def test_a_line_that_was_not_written_is_not_gone_on_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full for a while; the writer tries again."""
    first, second, third = (Forming(generation=k, members=members(range(k, 20 + k)), time=1.0 + k) for k in range(3))
    with RunLog(Storage.at(tmp_path)) as log:
        log.event(first)
        with monkeypatch.context() as patch:
            patch.setattr("os.fsync", lambda file: (_ for _ in ()).throw(OSError(28, "No space left on device")))
            with pytest.raises(OSError, match="No space"):
                log.event(second)
        log.event(second)
        log.event(third)
    assert read_events(Storage.at(tmp_path)) == [each.to_row() for each in (first, second, third)]


def test_of_a_list_whose_earlier_one_is_damaged_no_entry_is_known(tmp_path: Path) -> None:
    with RunLog(Storage.at(tmp_path)) as log:
        for number in range(1, 4):
            log.event(Forming(generation=number, members=members(range(number, 20 + number))))
    first, second, third = lines(tmp_path)
    (tmp_path / EVENTS).write_bytes(b"\n".join([first, second[:-9], third, b""]))
    first_, third_ = read_events(Storage.at(tmp_path))
    assert (first_["members"], third_["generation"], third_["members"]) == (members(range(1, 21)), 3, [])
