"""Which unit is the odd one, what is verified, and what becomes of the group and its snapshots."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from regrow.config.schema import CheckpointConfig, ParallelConfig
from regrow.control import commands as c
from regrow.control import events as e
from regrow.control.past import Past, formed, group_of
from regrow.control.read_back import StoredSteps
from regrow.control.states import GivenUp, Training, Waiting
from regrow.control.values import Digest, SnapshotAck, Version
from regrow.control.verification import ACTIVATIONS, GRADIENTS, LOSS, Checks, Outcome, named
from support.control_world import Shard, play_corrupt
from support.told import Told, log_of, one

NODES = "abcd"


def checks(num_units: int) -> Checks:
    return Checks(10, num_units, first_step=1, last_step=95)


def judged(found: Checks, step: int, *units: tuple[float, float, float]) -> Outcome:
    return found.judge(step, [number for unit in units for number in unit])


def test_a_group_verifies_at_its_first_and_last_step_and_every_so_many() -> None:
    found = checks(3)
    assert [step for step in range(1, 96) if found.is_due(step)] == [1, *range(10, 91, 10), 93, 95]
    assert not any(checks(1).is_due(step) for step in range(1, 96))


def test_the_unit_that_differs_from_most_is_odd_and_looked_at_again_in_the_next_steps() -> None:
    found = checks(3)
    assert not judged(found, 10, (1, 5, 7), (1, 5, 7), (1, 5, 7)).differs
    assert not found.is_due(11)
    assert judged(found, 20, (1, 5, 7), (1, 5, 8), (1, 5, 7)).odd == (1,)
    assert [found.is_due(step) for step in (21, 22, 23)] == [True, True, False]
    assert judged(found, 22, (1, 5, 7), (1, 6, 7), (1, 5, 7)).odd == (1,)
    assert not found.is_due(24)  # again and again would be every step


def test_of_two_that_differ_neither_is_odd() -> None:
    found = checks(2)
    judged(found, 10, (1, 5, 7), (1, 5, 7))
    assert judged(found, 20, (1, 5, 7), (1, 5, 8)).undecided == (0, 1)


def test_gradients_count_once_those_of_all_have_agreed() -> None:
    """Else the device's kernels add in any order."""
    found = checks(2)
    assert judged(found, 1, (1, 5, 7), (1, 5, 8)) == Outcome(2, compared=(LOSS,))
    assert judged(found, 10, (1, 5, 7), (1, 6, 8)).undecided == (0, 1)  # the losses do
    assert judged(found, 20, (1, 5, 7), (1, 5, 7)) == Outcome(2, compared=(LOSS, GRADIENTS))
    assert judged(found, 30, (1, 5, 7), (1, 5, 8)).undecided == (0, 1)


def test_devices_of_different_kinds_are_not_compared() -> None:
    found = judged(checks(4), 10, (1, 5, 7), (2, 6, 8), (1, 5, 7), (3, 9, 9))
    assert (found.differs, found.alone) == (False, (1, 3))


RIGHT = (1, 5, 7)  # of a stage: its kind of device, checksums of its output and its gradients


def of_stages(found: Checks, *units: list[tuple[float, float, float]]) -> Outcome:
    return found.judge(10, [number for unit in units for stage in unit for number in stage])


def of_pipelines(num_units: int, num_stages: int) -> Checks:
    return Checks(10, num_units, first_step=1, last_step=95, pp=2, num_stages=num_stages)


def test_of_a_pipeline_the_first_stage_whose_output_is_odd_tells_which_ranks_are_and_those_behind_it_are_not() -> None:
    """Interleaved: stages 0 and 2 are on pipeline rank 0. Wrong activations make all gradients wrong."""
    wrong = [(1, 5, 8), (1, 5, 8), (1, 6, 8), (1, 6, 8)]
    found = of_stages(of_pipelines(3, 4), [RIGHT] * 4, wrong, [RIGHT] * 4)
    assert (found.odd, found.pp, found.compared) == ((2,), 2, (ACTIVATIONS, GRADIENTS))
    assert named(found.odd, found.pp) == "unit 1 (pipeline rank 0)"


def test_of_a_pipeline_whose_gradients_alone_are_odd_it_is_the_last_stage_of_those() -> None:
    found = of_stages(of_pipelines(3, 2), [(1, 5, 8), (1, 5, 8)], [RIGHT] * 2, [RIGHT] * 2)
    assert found.odd == (1,)


def test_units_that_are_wrong_in_different_stages_are_both_named_and_no_other_is() -> None:
    """Behind the second one's stage no value is that of most units."""
    units = [[RIGHT] * 2, [RIGHT] * 2, [(1, 6, 8), (1, 6, 8)], [(1, 5, 9), (1, 7, 9)]]
    assert of_stages(of_pipelines(4, 2), *units).odd == (4, 7)


def test_of_two_pipelines_those_ranks_are_undecided_whose_stage_differs_first() -> None:
    found = of_pipelines(2, 2)
    of_stages(found, [RIGHT] * 2, [RIGHT] * 2)
    assert of_stages(found, [RIGHT] * 2, [(1, 5, 8), (1, 6, 8)]).undecided == (1, 3)


def test_pipelines_with_a_device_of_another_kind_in_any_stage_are_not_compared() -> None:
    found = of_stages(of_pipelines(3, 2), [RIGHT] * 2, [(2, 6, 8), (1, 6, 8)], [RIGHT] * 2)
    assert (found.differs, found.alone) == (False, (1,))


def verifying(num: int, **options: Any) -> Told:
    """A group of so many nodes, with a rank each, that trains from step 0, and verifies every 10 steps."""
    told = Told(verify_every_steps=10, min_workers=2, **options)
    told.form(*(one(pid, NODES[pid]) for pid in range(num)))
    told.begin(NODES[:num])
    return told


def outcome(told: Told, step: int, **fields: Any) -> None:
    number = len(told.control.group.membership.current)
    told(e.Verified(told.control.generation, step, Outcome(number, **fields)))


def commit(told: Told, step: int) -> None:
    told.seal(Version(told.control.generation, step), told.peers)


def test_the_odd_one_is_named_at_once_and_expelled_when_it_is_odd_again() -> None:
    told = verifying(4)
    commit(told, 8)
    outcome(told, 10)
    commit(told, 15)
    outcome(told, 20, odd=(2,))
    (suspected,) = told.records("suspected")
    assert (suspected["kind"], suspected["node"], suspected["rank"]) == ("corrupt", "c", 2)
    assert isinstance(told.control.state, Training)
    outcome(told, 21)  # not this time
    assert isinstance(told.control.state, Training)
    told.clear()
    outcome(told, 22, odd=(2,))
    (corruption,) = told.records("corruption")
    assert (corruption["ranks"], corruption["nodes"], corruption["verified_step"]) == ([2], ["c"], 20)
    (quarantine,) = told.records("quarantine")
    assert (quarantine["node"], quarantine["reason"]) == ("c", "corrupt")
    assert [kill.pid for kill in told.of(c.Kill)] == [2]
    assert told.ask("m2").unfit
    formation = told.form(*(one(pid, NODES[pid]) for pid in (0, 1, 3)))
    assert [member.node for member in formation.members] == ["a", "b", "d"]
    told.join(one(9, "c"))  # another process of that host is not taken, however few there are
    assert told.ask("m9").unfit


def test_two_gpus_of_a_node_that_are_odd_once_each_are_not_expelled_and_one_that_is_twice_is() -> None:
    """The second one cost its host and all that was not verified, however long after the first."""
    told = Told(verify_every_steps=10, min_workers=2)
    told.form(*(replace(one(pid, NODES[pid // 2]), gpu=pid % 2) for pid in range(6)))
    told.begin(NODES[:3])
    outcome(told, 10, odd=(2,))
    outcome(told, 11)
    outcome(told, 12, odd=(3,))
    assert told.records("corruption") == []
    assert isinstance(told.control.state, Training)
    outcome(told, 20)
    assert [each["pid"] for each in told.records("cleared")] == [2]
    outcome(told, 30)
    assert [each["pid"] for each in told.records("cleared")] == [2, 3]
    outcome(told, 40, odd=(3,))
    (corruption,) = told.records("corruption")
    assert (corruption["ranks"], corruption["nodes"]) == ([3], ["b"])


def test_of_a_unit_of_several_nodes_the_one_that_has_the_odd_stage_is_expelled_alone() -> None:
    nodes = "abcdef"  # three units; the first three have their first stages
    told = Told(verify_every_steps=10, min_workers=2, parallel=ParallelConfig(pp=2))
    told.form(*(one(pid, node) for pid, node in enumerate(nodes)))
    told.begin(nodes)
    for step in (10, 11):
        told(e.Verified(told.control.generation, step, Outcome(3, odd=(3,), pp=2)))  # unit 1, pipeline rank 1
    (corruption,) = told.records("corruption")
    assert (corruption["units"], corruption["ranks"], corruption["nodes"]) == ([1], [4], ["e"])
    assert "pipeline rank 1" in corruption["detail"]
    assert [each["node"] for each in told.records("quarantine")] == ["e"]
    formation = told.form(*(one(pid, node) for pid, node in enumerate(nodes) if node != "e"))
    assert {member.node for member in formation.members} <= set("abcdf")


def test_the_run_goes_back_to_the_newest_verified_snapshot_which_nodes_keep_until_then() -> None:
    told = verifying(3)
    commit(told, 7)
    outcome(told, 10)
    commit(told, 17)
    commit(told, 19)
    commit(told, 20)  # of 20 the verification in step 20 says nothing
    assert told.of(c.Announce)[-1].kept == (Version(1, 7), Version(1, 19))
    outcome(told, 20)
    assert told.control.snapshots.commits.kept == (Version(1, 19),)
    commit(told, 28)
    commit(told, 31)  # a row of 30 is yet to come
    outcome(told, 30, odd=(1,))
    outcome(told, 31, odd=(1,))
    assert told.control.newest_snapshot == Version(1, 19)
    assert told.control.corruptions.limit == 19
    assert told.of(c.Announce)[-1].newest == Version(1, 19)
    commit(told, 32)  # of the group that is over
    assert told.control.newest_snapshot == Version(1, 19)
    told.form(one(0, "a"), one(2, "c"))
    told.begin("ac", step=19)
    assert told.control.corruptions.limit is None
    assert told.control.newest_snapshot == Version(1, 19)


def test_checkpoints_of_states_that_are_not_verified_count_no_more() -> None:
    told = verifying(3, checkpoint=CheckpointConfig(every_steps=None, every_minutes=1e6))
    generation = told.control.generation
    for step in (5, 15, 25):
        told(e.Logged(generation, "checkpoint", {"step": step, "seconds": 1.0, "stall_s": 1.0, "bytes": 1}))
        outcome(told, step // 10 * 10 + 10, odd=(0,) if step == 25 else ())
    outcome(told, 31, odd=(0,))
    assert [(each.step, each.computed_wrong) for each in told.of(c.NoteDamaged)] == [(25, True)]
    assert told.control.snapshots.checkpoints.stored == 15


def test_the_newest_verified_checkpoint_is_not_deleted_for_later_ones() -> None:
    steps = StoredSteps([5])
    steps.keep, steps.compared = 2, True
    steps.add(10)
    assert steps.deletions == [c.Delete()]  # 10 and 5 stay
    steps.add(20)
    assert steps.deletions == [c.Delete(spared=5)]
    steps.verify(19)
    assert steps.deletions == [c.Delete()]


def test_nothing_is_deleted_while_each_checkpoint_may_yet_be_the_newest_verified_one() -> None:
    steps = StoredSteps([], verified=0)
    steps.keep, steps.compared = 2, True
    for step in (10, 20, 30):
        steps.add(step)
    assert (steps.spared, steps.deletions) == (None, [])
    steps.compared = False  # one unit is left, which is taken on trust
    assert steps.deletions == [c.Delete()]


def test_checkpoints_of_a_group_of_one_unit_are_deleted_and_no_snapshot_waits_for_a_verification() -> None:
    """A group that shrank to it filled its storage, and had one slot fewer for as long as it went on."""
    told = Told(verify_every_steps=20, min_workers=1, max_workers=2, checkpoint=CheckpointConfig(every_steps=10))
    told.form(one(0, "a"))
    told.begin("a", 60)
    for number, step in enumerate(range(70, 170, 10), start=1):
        told.seal(Version(1, step), {"a": ()})
        told(e.Written(number, "a"))
        told(e.IndexWritten(number))
        told(e.CheckpointCommitted(number, step, 1))
        told(e.HasReadBack(number, "a", ""))
    assert len(told.of(c.Delete)) == 10
    assert told.control.snapshots.commits.kept == ()


CHECKPOINTS_BY_RANKS = CheckpointConfig(every_steps=None, every_minutes=1e6, keep=2)


def write(told: Told, *steps: int) -> None:
    for step in steps:
        fields = {"step": step, "seconds": 1.0, "stall_s": 1.0, "bytes": 1}
        told(e.Logged(told.control.generation, "checkpoint", fields))


def test_a_coordinator_that_is_restarted_does_not_delete_the_newest_verified_checkpoint() -> None:
    """Once it had, the next corruption found nothing to restore: the run began from its seed."""
    told = verifying(3, checkpoint=CHECKPOINTS_BY_RANKS)
    told.form(*(one(pid, NODES[pid]) for pid in range(3)))
    told.begin("abc", step=5)
    outcome(told, 6)
    write(told, 15, 25)
    again = taken_up(told, stored=[25, 15, 5], checkpoint=CHECKPOINTS_BY_RANKS)
    assert again.of(c.Delete) == [c.Delete(spared=5, unread=(25,))]
    outcome(again, 30, odd=(1,))
    outcome(again, 31, odd=(1,))
    assert [each.step for each in again.of(c.NoteDamaged)] == [25, 15]
    assert again.control.snapshots.checkpoints.stored == again.control.corruptions.limit == 5
    write(told, 35)
    outcome(told, 40)
    later = taken_up(told, stored=[35, 25], checkpoint=CHECKPOINTS_BY_RANKS)
    assert later.of(c.Delete) == [], "that 35 is verified is not in the log yet"
    write(told, 45)
    later = taken_up(told, stored=[45, 35], checkpoint=CHECKPOINTS_BY_RANKS)
    assert later.of(c.Delete) == [c.Delete(unread=(45,))]


def test_what_was_verified_is_known_to_a_coordinator_that_is_restarted() -> None:
    """Not only what its group began from: that may be long ago, or not verified itself."""
    told = verifying(3)
    assert told.records("generation")[0]["verified_step"] == 0
    outcome(told, 10)
    told(e.Died((("c", 2),), 2, "worker_died", "gone"))
    told.form(one(0, "a"), one(1, "b"), one(3, "d"))
    told.begin("abd", step=14)
    assert told.records("generation")[1]["verified_step"] == 9
    for step in range(1, 16):
        told.row(step)
    again = taken_up(told, stored=[])
    outcome(again, 20, odd=(1,))
    outcome(again, 21, odd=(1,))
    assert again.control.corruptions.limit == 9
    outcome(told, 30)
    for step in range(16, 36):
        told.row(step)
    write(told, 35)
    again = taken_up(told, stored=[35])
    outcome(again, 40, odd=(1,))
    outcome(again, 41, odd=(1,))
    assert again.control.corruptions.limit == 29


@pytest.mark.parametrize(("stored", "verified"), [((), 0), ((20, 10), 20)])
def test_of_a_group_whose_beginning_is_not_in_the_log_no_step_is_taken_for_right_that_storage_does_not_have(
    stored: tuple[int, ...], verified: int
) -> None:
    """Storage was away, and a rank computed wrong; all that the group had done was taken for right."""
    submitted = {"time": 1.0, "event": "submitted"}
    forming = {"time": 2.0, "event": "forming", **formed(1, [one(1), one(2)])}
    past = Past.of([submitted, forming], generation=1, logged=0, stored=stored, restarted=True)
    assert past.verified == verified
    assert Past.of([submitted], generation=0, logged=0, stored=stored, restarted=True).verified is None


def test_what_units_come_to_counts_before_the_first_row_that_a_restarted_coordinator_gets() -> None:
    """That the group had begun was not in the log yet: the outcome was dropped, and what it did was taken for right."""
    told = Told(verify_every_steps=10, min_workers=2)
    told.form(*(one(pid, NODES[pid]) for pid in range(3)))
    events = log_of(told)
    again = Told(Past.of(events, generation=1, logged=0, stored=[], restarted=True), verify_every_steps=10)
    for node in NODES[:3]:
        again(e.KeeperUp(node, node, (node, 1)))
    again(group_of(events, 1))
    outcome(again, 20, odd=(1,))
    assert isinstance(again.control.state, Training)
    assert [each["rank"] for each in again.records("suspected")] == [1]
    outcome(again, 21, odd=(1,))
    assert again.records("corruption")[0]["verified_step"] == 0


def test_a_checkpoint_that_a_group_could_not_read_is_not_the_verified_one() -> None:
    past = Past(1, 25, stored=(25, 5))
    told = Told(past, verify_every_steps=10, min_workers=2, checkpoint=CHECKPOINTS_BY_RANKS)
    told.form(*(one(pid, NODES[pid]) for pid in range(3)))
    told(e.Logged(2, "checkpoint_damaged", {"step": 25, "detail": "a chunk fails its checksum"}))
    told.begin("abc", step=5)
    write(told, 10, 15)
    outcome(told, 16, odd=(1,))
    outcome(told, 17, odd=(1,))
    noted = [(each.step, each.computed_wrong) for each in told.of(c.NoteDamaged)]
    assert noted == [(25, False), (10, True), (15, True), (25, True)]  # the last as it may be read all the same
    assert told.control.snapshots.checkpoints.stored == 5


def corrupted(**options: Any) -> tuple[Told, e.KeepersFound]:
    """A group in which c computes wrong since step 20, and what keepers hold: they have not heard of it yet."""
    told = verifying(3, **options)
    outcome(told, 10)
    outcome(told, 20)
    for step in range(1, 32):
        told.row(step)
    held = []
    for step in (14, 28, 31):
        commit(told, step)
        held.append([Shard(Version(1, step), node, 3, step) for node in "abc"])
    outcome(told, 30, odd=(2,))
    outcome(told, 31, odd=(2,))
    return told, e.KeepersFound(tuple((node, Version(1, 31), each) for node, *each in zip("abc", *held, strict=True)))


@pytest.mark.parametrize("is_told", [True, False])
def test_a_coordinator_that_is_restarted_after_a_corruption_goes_back_before_it(is_told: bool) -> None:
    """Before, it took the newest snapshot that keepers hold, and later reports for commits."""
    told, keepers = corrupted()
    if not is_told:  # the one before has written no more
        number = next(n for n, each in enumerate(told.commands) if getattr(each, "event", "") == "corruption")
        del told.commands[number + 1 :]
    again = taken_up(told, stored=[25, 15], keepers=keepers)
    assert isinstance(again.control.state, Waiting)
    assert [each.generation for each in again.of(c.TellOver)] == [1]
    assert again.control.corruptions.limit == 19
    assert again.control.newest_snapshot == Version(1, 14)
    assert (again.control.snapshots.checkpoints.stored, [each.step for each in again.of(c.NoteDamaged)]) == (15, [25])
    again.seal(Version(1, 32), told.peers)
    assert again.control.newest_of([Version(1, 31)]) == Version(1, 14)
    again.form(one(0, "a"), one(1, "b"))
    again.begin("ab", step=15)
    assert again.control.corruptions.limit is None
    again.seal(Version(2, 32), again.peers)
    assert again.control.newest_snapshot == Version(2, 32)


def test_a_job_after_a_corruption_goes_back_before_it() -> None:
    told, keepers = corrupted()
    events = [*log_of(told), {"event": "submitted", "time": told.now}]
    past = Past.of(events, generation=1, logged=31, stored=[25, 15], restarted=False)
    again = Told(past, verify_every_steps=10, min_workers=2)
    again(keepers)
    assert again.control.corruptions.limit == 19
    assert again.control.newest_snapshot == Version(1, 14)
    assert (again.control.snapshots.checkpoints.stored, [each.step for each in again.of(c.NoteDamaged)]) == (15, [25])


def test_a_verified_checkpoint_that_is_gone_is_still_known_of() -> None:
    """So that no group begins from the seed: see `runtime.restore`."""
    told = verifying(3)
    write(told, 15, 25)
    outcome(told, 20)
    outcome(told, 30, odd=(2,))
    outcome(told, 31, odd=(2,))
    assert Past.of(log_of(told), generation=1, logged=31, stored=[25], restarted=False).stored == (25, 15)
    assert Past.of(log_of(told), generation=1, logged=31, stored=[25, 15], restarted=False).stored == (25, 15)


def test_one_that_was_damaged_when_it_was_read_back_is_not_known_of_and_is_written_anew() -> None:
    told = verifying(3)
    write(told, 15, 25)
    outcome(told, 20)
    outcome(told, 30, odd=(2,))
    outcome(told, 31, odd=(2,))
    damaged = {"event": "checkpoint_failed", "time": told.now, "step": 15, "detail": "part a is damaged"}
    past = Past.of([*log_of(told), damaged], generation=1, logged=31, stored=[25], restarted=True)
    assert past.stored == (25,)


def test_one_that_a_rank_computed_wrong_is_not_known_of_after_a_later_corruption() -> None:
    """A run was refused for a checkpoint that is "known to be right, and gone", and was there, and wrong."""
    rows = [
        {"event": "checkpoint", "step": 15},
        {"event": "checkpoint", "step": 60},
        {"event": "corruption", "verified_step": 20},
        {"event": "generation", "generation": 2, "start_step": 15},
        {"event": "corruption", "verified_step": 100},
    ]
    assert Past.of(rows, generation=2, logged=110, stored=[], restarted=False).stored == (15,)


def test_one_that_was_damaged_when_a_corruption_was_found_is_noted_for_that_too() -> None:
    """It is yet tried where no other is left."""
    steps = StoredSteps([5], verified=5)
    steps.keep = 2
    for step in (15, 25, 35):
        steps.add(step)
    for step in (15, 25):
        steps.drop(step)
    steps.add(15)
    assert steps.roll_back(10) == (5, [35, 15, 25])


def test_a_coordinator_that_is_restarted_waits_for_the_third_unit_as_the_one_before_did() -> None:
    told = verifying(2, max_workers=4, wait_for_workers_s=600.0)
    differing(told)
    again = taken_up(told, stored=[], max_workers=4, wait_for_workers_s=600.0)
    again.join(one(0, "a"), one(1, "b"))
    again.now += 300.0
    assert again.ask("m0").formation is None
    assert len(again.form(one(0, "a"), one(1, "b"), one(2, "c")).members) == 3
    alone = taken_up(told, stored=[], max_workers=4, wait_for_workers_s=600.0)
    alone.now += 601.0
    alone()
    assert isinstance(alone.control.ending, GivenUp)
    assert "one of them computes wrong" in alone.control.ending.message
    assert "no third came within 600 s" in alone.control.ending.message


def taken_up(told: Told, *, stored: Iterable[int], keepers: e.KeepersFound | None = None, **options: Any) -> Told:
    """Its coordinator dies; another one reads its log, and finds its keepers."""
    events, generation, logged = log_of(told), told.control.generation, told.control.next_step - 1
    past = Past.of(events, generation=generation, logged=logged, stored=stored, restarted=True)
    again = Told(past, verify_every_steps=10, min_workers=2, **options)
    again.now = told.now
    for node in told.peers:
        again(e.KeeperUp(node, node, (node, 1)))
    if keepers is not None:
        again(keepers)
    again(group_of(events, generation))
    return again


def test_a_newcomer_that_computes_wrong_costs_no_more_than_what_its_group_has_done() -> None:
    told = verifying(2)
    outcome(told, 10)
    commit(told, 14)
    told.form(one(0, "a"), one(1, "b"), one(2, "c"))
    told.begin("abc", step=14)
    outcome(told, 15, odd=(2,))
    outcome(told, 16, odd=(2,))
    assert told.records("corruption")[0]["verified_step"] == 14
    assert told.control.newest_snapshot == Version(1, 14)


def test_of_two_units_that_differ_twice_and_can_be_no_more_the_run_ends_with_the_verified_state_in_storage() -> None:
    told = verifying(2, max_workers=2)
    commit(told, 8)
    outcome(told, 10)
    commit(told, 18)
    outcome(told, 20, undecided=(0, 1))
    assert [each["kind"] for each in told.records("suspected")] == ["differing", "differing"]
    assert isinstance(told.control.state, Training)
    outcome(told, 21, undecided=(0, 1))
    ending = told.control.ending
    assert isinstance(ending, GivenUp)
    assert "there is no third of their kind" in ending.message
    assert told.records("corruption")[0]["is_decided"] is False
    told.clear()
    told(e.Settle())
    told.now += 6.0  # after the one that was on its way, of a state that is not verified
    told()
    assert {each.version for each in told.of(c.Write)} == {Version(1, 8)}


def differing(told: Told) -> None:
    """Two units of what was a larger group differ twice; the state of step 9 is the newest known to be right."""
    commit(told, 8)
    outcome(told, 10)
    commit(told, 18)
    for step in (20, 21):
        outcome(told, step, undecided=(0, 1))


def test_two_units_that_differ_wait_for_a_third_which_tells_which_is_wrong() -> None:
    told = verifying(2, max_workers=4)
    differing(told)
    assert isinstance(told.control.state, Waiting)
    told.clear()
    told.join(one(0, "a"), one(1, "b"))
    assert told.ask("m0", told.control.generation).formation is None
    told.now += 20.0
    told()
    assert "there is no third of their kind" in told.records("note")[-1]["text"]
    assert {each.version for each in told.of(c.Write)} == {Version(1, 8)}  # memory alone has it
    told.form(one(2, "c"))
    told.begin("abc", step=8)
    for step in (9, 10):
        outcome(told, step, odd=(1,))
    assert [each["nodes"] for each in told.records("corruption")] == [["b"]]
    told.form(one(0, "a"), one(2, "c"))  # two are enough again


def test_two_units_that_differ_beside_one_of_another_kind_wait_for_a_third_of_theirs() -> None:
    told = verifying(3, max_workers=5)
    for step in (10, 11):
        outcome(told, step, undecided=(0, 1), alone=(2,))
    assert isinstance(told.control.state, Waiting)
    told.join(one(0, "a"), one(1, "b"), one(2, "c"))
    assert told.ask("m0", told.control.generation).formation is None
    told.form(one(3, "d"))
    told.begin("abcd")
    for step in (1, 2):  # that one is of another kind, too
        outcome(told, step, undecided=(0, 1))
    told.join(*(one(pid, NODES[pid]) for pid in range(4)))
    assert told.ask("m0", told.control.generation).formation is None
    told.form(one(4, "e"))
    told.begin("abcde")
    for step in (1, 2):
        outcome(told, step, odd=(1,))
    assert [each["nodes"] for each in told.records("corruption")] == [["a", "b"], ["a", "b"], ["b"]]


@pytest.mark.parametrize(
    ("parallel", "found"),
    [
        (ParallelConfig(cp=2), Outcome(2, undecided=(0, 1))),
        (ParallelConfig(pp=2, least_pp=2), Outcome(2, undecided=(0, 2), pp=2)),
    ],
)
def test_units_of_two_ranks_that_differ_wait_for_both_of_a_third(parallel: ParallelConfig, found: Outcome) -> None:
    """Four to eight workers may be there, and a group has an even number of them: five are no world size."""
    told = Told(parallel=parallel, verify_every_steps=4, min_workers=4, max_workers=8)
    told.form(*(one(pid, NODES[pid]) for pid in range(4)))
    told.begin(NODES)
    for step in (1, 2):
        told.row(step)
        told(e.Verified(told.control.generation, step, found))
    (record,) = told.records("corruption")
    assert (record["waits_for"], record["is_decided"]) == (6, False)
    told.join(*(one(pid, node) for pid, node in enumerate("abcde")))
    assert told.ask("m0", told.control.generation).formation is None
    assert len(told.form(one(5, "f")).members) == 6


@pytest.mark.parametrize("stage", [0, 1])
def test_units_of_two_stages_that_differ_are_told_apart_in_a_group_of_three_ranks_that_may_be_a_unit_each(
    stage: int,
) -> None:
    """Before, the four ranks formed the same two units again and again. Those that differ are among the three."""
    told = Told(parallel=ParallelConfig(pp=2, least_pp=1), verify_every_steps=4, min_workers=2, max_workers=8)
    all_four = [one(pid, NODES[pid]) for pid in range(4)]
    told.form(*all_four)
    told.begin(NODES)
    for step in (1, 2):
        told.row(step)
        told(e.Verified(told.control.generation, step, Outcome(2, undecided=(stage, 2 + stage), pp=2)))
    (record,) = told.records("corruption")
    assert (record["waits_for"], record["is_decided"]) == (3, False)
    again = taken_up(told, stored=[], parallel=ParallelConfig(pp=2, least_pp=1), max_workers=8)
    for each in (told, again):
        members = each.form(*all_four).members
        assert len(members) == 3
        assert set(record["ranks"]) <= {member.pid for member in members}
    told.begin("".join(member.node for member in members))
    for step in (1, 2):
        told(e.Verified(told.control.generation, step, Outcome(3, odd=(0,))))
    assert [each["nodes"] for each in told.records("corruption")[1:]] == [[members[0].node]]
    assert told.control.ending is None


def test_three_units_of_a_kind_that_all_differ_end_the_run() -> None:
    told = verifying(3, max_workers=4)
    for step in (10, 11):
        outcome(told, step, undecided=(0, 1, 2))
    assert isinstance(told.control.ending, GivenUp)


def test_units_that_agree_with_a_third_go_on_and_need_no_third_any_more() -> None:
    told = verifying(2, max_workers=4)
    differing(told)
    told.form(*(one(pid, NODES[pid]) for pid in range(3)))
    told.begin("abc", step=8)
    outcome(told, 9)
    told(e.Died((("c", 2),), 2, "worker_died", "gone"))
    told.form(one(0, "a"), one(1, "b"))


def test_a_third_unit_is_waited_for_as_long_as_workers_are() -> None:
    told = verifying(2, max_workers=4, wait_for_workers_s=600.0)
    differing(told)
    told.join(one(0, "a"), one(1, "b"))
    told.now += 599.0
    told()
    assert told.control.ending is None
    told.now += 2.0
    told()
    assert isinstance(told.control.ending, GivenUp)
    assert "no third came within 600 s" in told.control.ending.message


def test_a_coordinator_that_is_restarted_knows_what_may_be_restored_and_which_host_is_refused() -> None:
    events = [
        {"event": "submitted", "time": 1.0},
        {"event": "generation", "time": 2.0, "start_step": 0, "generation": 1},
        {"event": "corruption", "time": 3.0, "verified_step": 19},
        {"event": "quarantine", "time": 3.0, "node": "c", "host": "host", "seconds": 60.0, "reason": "corrupt"},
    ]
    past = Past.of(events, generation=1, logged=30, stored=[25], restarted=True)
    assert (past.limit, past.corrupt) == (19, {"host"})
    later = [*events, {"event": "generation", "time": 4.0, "start_step": 19, "generation": 2}]
    assert Past.of(later, generation=2, logged=30, stored=[25], restarted=True).limit is None


def ack(told: Told, step: int, values: list[int]) -> None:
    """All nodes' reports; each rank is a replica, and these are what their snapshots add up to."""
    version, peers = Version(told.control.generation, step), told.peers
    digests = [(Digest(rank, "0.0.0", len(values), value),) for rank, value in enumerate(values)]
    told(e.Sealed([SnapshotAck(node, version, peers[node], digests=d) for node, d in zip(peers, digests, strict=True)]))


@pytest.mark.parametrize("num", [2, 3])
def test_a_snapshot_in_which_replicas_differ_is_never_committed(num: int) -> None:
    """Of three the odd one goes; of two none is known to be wrong, and both go back to where they agreed."""
    told = verifying(num)
    ack(told, 4, [7] * num)
    assert told.control.newest_snapshot == Version(1, 4)
    ack(told, 5, [7, 8, 7][:num])
    assert told.control.newest_snapshot == Version(1, 4)
    assert not isinstance(told.control.state, Training)
    (corruption,) = told.records("corruption")
    assert corruption["verified_step"] == 4
    assert corruption["ranks"] == ([1] if num == 3 else [0, 1])
    assert bool(told.records("quarantine")) == (num == 3)
    assert told.control.ending is None


@pytest.mark.parametrize("commits_between", [False, True])
def test_two_replicas_that_keep_differing_end_the_run_naming_their_nodes(commits_between: bool) -> None:
    """A shard that is always odd costs each group its snapshot; one that differs now and then ends nothing."""
    told = verifying(2)
    nodes = list(told.peers)
    for attempt in range(4):
        if told.control.ending is not None:
            break
        if attempt:
            told.form(*(one(rank, node) for rank, node in enumerate(nodes)))
            told.begin(nodes)
        told.row(1)
        if commits_between:
            ack(told, 1, [7, 7])
        told.row(2)
        ack(told, 2, [7, 8])
    if commits_between:
        assert told.control.ending is None
        return
    assert isinstance(told.control.ending, GivenUp)
    assert len(told.records("corruption")) == 2
    assert all(node in told.control.ending.message for node in nodes)


def test_what_the_first_step_of_a_group_shows_of_a_node_is_not_taken_back_with_its_row() -> None:
    told = verifying(3)
    outcome(told, 1, odd=(1,))
    told.row(1)
    assert [each["kind"] for each in told.records("suspected")] == ["corrupt"]
    assert told.records("cleared") == []


def test_whenever_a_node_begins_to_compute_wrong_nothing_that_it_spoilt_is_left_in_log_or_storage() -> None:
    found = [play_corrupt(seed) for seed in range(60)]
    expelled = [world for world in found if any(name == "quarantine" for _, name, _ in world.events)]
    assert len(expelled) > 40


def test_units_that_differ_two_steps_before_the_last_are_looked_at_in_those_that_are_left() -> None:
    found = checks(3)
    assert found.is_due(93)
    assert judged(found, 93, (1, 5, 7), (1, 5, 8), (1, 5, 7)).odd == (1,)
    assert [found.is_due(step) for step in (94, 95)] == [True, True]


@pytest.mark.parametrize("is_stopped", [False, True])
@pytest.mark.parametrize(("fields", "units"), [({"odd": (2,)}, "unit 2 (nodes c)"), ({}, "")])
def test_a_run_whose_last_verification_shows_a_difference_says_up_to_which_step_it_is_right(
    fields: dict[str, Any], units: str, is_stopped: bool
) -> None:
    told = verifying(4)
    outcome(told, 10)
    outcome(told, 20, **fields)
    if is_stopped:
        told(e.StopAsked("interrupted"))
        told(e.Leaving(told.control.generation, 20, ""))
    else:
        told(e.Done())
    notes = [each["text"] for each in told.records("note")]
    assert bool(notes) == bool(units)
    assert all(each.startswith(units) and "state of step 9 is the newest known" in each for each in notes)


def test_units_of_two_ranks_that_differ_come_to_an_end_or_to_a_third_whenever_one_begins_to_compute_wrong() -> None:
    found = [play_corrupt(seed, sizes=(4, 6), least=4, cp=2) for seed in (*range(60), 143, 260)]
    records = [[fields for _, name, fields in world.events if name == "corruption"] for world in found]
    assert sum(bool(world.given_up) for world in found) > 20, "two units are all that there may be"
    assert sum([each["waits_for"] for each in those] == [6, None] for those in records) > 3


def test_pipelines_that_differ_come_to_an_end_whenever_a_rank_begins_to_compute_wrong() -> None:
    """Of 60 runs eight formed the same two units for ever, and four more where a third left one out that differed."""
    found = [play_corrupt(seed, sizes=(4, 6, 7), least=2, pp=2) for seed in range(60)]
    records = [[fields for _, name, fields in world.events if name == "corruption"] for world in found]
    assert all(world.done and those[-1]["is_decided"] for world, those in zip(found, records, strict=True))
    assert sum(those[0]["waits_for"] == 3 for those in records) > 10
