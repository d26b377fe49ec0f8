"""The coordinator's fence and lock, on the class itself: no Ray is needed to refuse a write."""

import time
from pathlib import Path

import pytest

from regrow.config.schema import ClusterConfig, ObserveConfig, PretrainConfig
from regrow.control.membership import Member
from regrow.errors import ResumeError
from regrow.record.log import METRIC_KEYS, read_events, read_metrics
from regrow.runtime import actor as module
from regrow.runtime.abort import LEAVE_S
from regrow.runtime.actor import Answer, Coordinator, Fenced
from regrow.state.disk.catalog import committed_steps
from regrow.storage import Storage


def make(folder: Path) -> Coordinator:
    return Coordinator(
        str(folder),
        "run",
        secret=b"",
        checkpoints="checkpoints",
        config=PretrainConfig(
            cluster=ClusterConfig(max_workers=8, wait_for_workers_s=60), observe=ObserveConfig(tensorboard=False)
        ),
        submitted={},
    )


def form(made: Coordinator) -> Answer:
    """The next group, of one process that comes back each time."""
    made.join(Member("m", "node", "127.0.0.1", 1, 1), 1)
    return made.formation("m", made.generation)


def generation_of(answer: Answer) -> int:
    assert answer.formation is not None
    return answer.formation.generation


def test_every_write_of_an_older_generation_is_refused(tmp_path: Path) -> None:
    made = make(tmp_path)
    old, new = generation_of(form(made)), generation_of(form(made))
    with pytest.raises(Fenced, match=f"generation {old} is over; {new} is current"):
        made.row(old, {})
    with pytest.raises(Fenced):
        made.event(old, "checkpoint", {})
    with pytest.raises(Fenced):
        made.commit(old, "step-00000001", b"{}")
    assert committed_steps(Storage.at(tmp_path) / "checkpoints") == []
    made.commit(new, "step-00000001", b"{}")
    assert committed_steps(Storage.at(tmp_path) / "checkpoints") == [1]


def test_a_run_has_one_writer_and_its_generations_go_on_counting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOCK_WAIT_S", 0.1)
    first = make(tmp_path)
    generation = generation_of(form(first))
    first.event(generation, "note", {"text": "alive"})
    with pytest.raises(ResumeError, match="is in use"):
        make(tmp_path)
    first.lock.close()  # as the process' end does
    assert generation_of(form(make(tmp_path))) > generation


def test_groups_that_keep_failing_before_a_step_give_the_run_up(tmp_path: Path) -> None:
    made = make(tmp_path)
    made.failure("worker_failed", "rank 0: no such thing", [0])
    given_up = [form(made).given_up for _ in range(module.MAX_FRUITLESS_GENERATIONS + 1)]
    assert given_up[:-1] == [""] * module.MAX_FRUITLESS_GENERATIONS
    assert "no such thing" in given_up[-1]


def test_a_death_is_noted_once_and_the_others_form_the_next_generation(tmp_path: Path) -> None:
    made = make(tmp_path)
    for pid in (1, 2, 3):
        made.join(Member(f"m{pid}", "node", "127.0.0.1", pid, pid), 3)
    first = generation_of(made.formation("m1", 0))
    made.members_died([("node", 2)], 2, "worker_died", "gone")
    made.members_died([("node", 2)], 2, "worker_died", "gone")
    assert [update.content["event"] for update in made.updates].count("failure") == 1
    made.join(Member("m1", "node", "127.0.0.1", 1, 1), 3)
    assert made.formation("m1", first).formation is None  # m3 is alive, and has not come yet
    made.join(Member("m3", "node", "127.0.0.1", 3, 3), 3)
    answer = made.formation("m3", first)
    assert answer.formation is not None
    assert [member.id for member in answer.formation.members] == ["m1", "m3"]
    assert made.cause == "worker_died"


def test_a_node_whose_workers_die_one_by_one_has_failed_once_in_each_generation(tmp_path: Path) -> None:
    made = make(tmp_path)
    for generation in range(1, PretrainConfig().cluster.quarantine_failures + 1):
        assert made.notices.avoided(time.time()) == set()
        for pid in range(6):
            made.join(Member(f"m{pid}", f"node {pid // 3}", "127.0.0.1", pid, pid), 6)
        assert generation_of(made.formation("m0", generation - 1)) == generation
        for pid in (3, 4, 5):
            made.members_died([("node 1", pid)], 5, "worker_died", "gone")
    assert made.notices.avoided(time.time()) == {"node 1"}


def test_a_failure_says_how_the_gpus_of_its_nodes_were_and_their_errors_count_as_failures(tmp_path: Path) -> None:
    made = make(tmp_path)
    for pid in range(4):
        made.join(Member(f"m{pid}", f"node {pid}", "127.0.0.1", pid, pid), 4)
    made.formation("m0", 0)
    made.watch.gpus = {f"node {number}": [f"H100 GPU-{number}: 90 C"] for number in (1, 2)}
    made.members_died([("node 1", 1), ("node 3", 3)], 2, "worker_died", "gone")
    (failure,) = [update.content for update in made.updates if update.content["event"] == "failure"]
    assert failure["gpus"] == {"node 1": ["H100 GPU-1: 90 C"]}
    for xid in (13, 31, 79, 79):  # programs' faults do not count, and the same node's failure counts once a generation
        made.gpu_error("node 2", "GPU-2", xid)
    errors = [update.content for update in made.updates if update.content["event"] == "gpu_error"]
    assert [error["meaning"] for error in errors] == ["", "", "fell off the bus", "fell off the bus"]
    assert [len(made.notices._failed_at[f"node {number}"]) for number in range(4)] == [0, 1, 1, 1]


def test_gpus_are_asked_with_a_groups_first_step_and_at_every_check_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, asked_at = make(tmp_path), list[int]()
    made.on_gpus, made.probe_every_steps = True, 4
    monkeypatch.setattr(made.watch, "read_gpus", lambda now, keepers: asked_at.append(made.log.next_step - 1))
    for steps in (range(1, 8), range(8, 12)):
        generation = generation_of(form(made))
        made.log.begin(generation, steps.start - 1)
        for step in steps:
            row = dict.fromkeys(METRIC_KEYS, 0.5) | {"generation": generation, "step": step, "batch_digest": 1}
            made.row(generation, row)
    assert asked_at == [1, 5, 8, 9]


def test_a_node_that_failed_again_and_again_is_used_where_too_few_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make(tmp_path)
    made.notices.barred_until = {"barred": time.time() + 3600}
    made.notices.deadlines = {"leaving": time.time()}
    made.join(Member("m", "node", "127.0.0.1", 1, 1), 1)
    made.formation("m", 0)
    assert made.avoided_nodes() == {"barred", "leaving"}
    made.members_died([("node", 1)], 0, "worker_died", "gone")
    assert made.avoided_nodes() == {"barred", "leaving"}  # others may come yet
    monkeypatch.setattr(module, "YIELD_S", 0.0)
    assert made.avoided_nodes() == {"leaving"}
    made.join(Member("other", "barred", "127.0.0.1", 2, 2), 1)
    made.membership.settle_s = 0.0
    assert made.formation("other", 1).formation is not None
    assert made.avoided_nodes() == {"barred", "leaving"}


@pytest.mark.parametrize("restarted", [True, False])
def test_old_checkpoints_are_deleted_by_a_coordinator_that_was_restarted_not_by_a_new_jobs(
    restarted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one before may have died doing so; a new job may need what `checkpoint.keep` would now delete."""
    first = make(tmp_path)
    first.lock.close()  # as the process' end does
    retained_in: list[str] = []
    monkeypatch.setattr(module, "_is_restarted", lambda: restarted)
    monkeypatch.setattr(
        "regrow.state.disk.catalog.retain", lambda folder, keep: retained_in.append(f"{folder}, all but {keep}")
    )
    again = make(tmp_path)
    again.fleet.storage.shutdown(wait=True)
    assert retained_in == ([f"{tmp_path}/checkpoints, all but 2"] if restarted else [])


def test_rows_may_be_missing_only_where_the_coordinator_was_restarted(tmp_path: Path) -> None:
    made = make(tmp_path)
    generation = generation_of(form(made))
    made.log.begin(generation, 0)
    row = dict.fromkeys(METRIC_KEYS, 0.5) | {"generation": generation, "step": 3, "batch_digest": 1}
    with pytest.raises(AssertionError, match="row of step 3, expected 1"):
        made.row(generation, row)
    made.missed_rows = True
    made.row(generation, row)
    made.row(generation, row | {"step": 4})
    with pytest.raises(AssertionError, match="row of step 6, expected 5"):
        made.row(generation, row | {"step": 6})
    assert [row["step"] for row in read_metrics(Storage.at(tmp_path))] == [3, 4]


def test_whoever_waits_is_told_when_the_run_is_over(tmp_path: Path) -> None:
    made = make(tmp_path)
    made.done()
    assert form(made).over


def test_too_few_for_too_long_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make(tmp_path)
    form(made)
    made.wait_for_workers_s = 0.0
    made.members_died([("node", 1)], 0, "worker_died", "gone")
    _, fatal = made.drain_updates()
    assert "fewer than cluster.min_workers=1 for 0 s" in fatal


def test_a_group_that_is_restarted_as_a_whole_waits_for_none_of_the_one_before(tmp_path: Path) -> None:
    made = make(tmp_path)
    for pid in (1, 2, 3):
        made.join(Member(f"m{pid}", "node", "127.0.0.1", pid, pid), 3)
    first = generation_of(made.formation("m1", 0))
    made.group_failed("worker_died", "gone", [1])
    for pid in (4, 5):  # a smaller one
        made.join(Member(f"m{pid}", "node", "127.0.0.1", pid, pid), 2)
    answer = made.formation("m4", first)
    assert answer.formation is not None
    assert [member.id for member in answer.formation.members] == ["m4", "m5"]
    assert [update.content["cause"] for update in made.updates if update.content["event"] == "failure"] == [
        "worker_died"
    ]


def test_a_group_that_could_not_be_formed_is_not_given_out_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, over = make(tmp_path), []
    monkeypatch.setattr(made.fleet, "over", over.append)
    members = [Member(f"m{pid}", "node", "127.0.0.1", pid, pid) for pid in (1, 2, 3)]
    for member in members:
        made.join(member, 3)
    first = generation_of(made.formation("m1", 0))
    assert generation_of(made.formation("m2", 0)) == first  # as often as it is asked for
    made.join(members[0], 3)  # it waited for the others in vain, and did not learn which generation that was
    assert over == [first]  # nor will the others
    assert made.formation("m1", 0).formation is None  # they have not come back yet
    made.members_died([("node", 3)], 2, "worker_died", "gone")
    made.join(members[1], 3)
    answer = made.formation("m2", 0)
    assert answer.formation is not None
    assert generation_of(answer) > first
    assert [member.id for member in answer.formation.members] == ["m1", "m2"]
    made.log.begin(generation_of(answer), 0)
    made.stalls.begin(0.0)  # it trains
    made.join(members[0], 2)
    assert over == [first, first]  # one for the death; who trains finds out by itself


def test_a_rank_that_fails_by_itself_has_the_others_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On NCCL they wait for it in a kernel, and hear nothing."""
    made, told = make(tmp_path), list[int]()
    monkeypatch.setattr(made.fleet, "over", told.append)
    old, new = generation_of(form(made)), generation_of(form(made))
    told.clear()  # that it came back while the first was forming
    made.broke(old, "rank 0: of a group that is over")
    assert told == []
    made.broke(new, "rank 3: OutOfMemoryError: CUDA out of memory")
    made.broke(new, "rank 0: BrokenStep: broken off")
    assert told == [new]
    third = generation_of(form(made))
    made.broke(third, "rank 1: DataError: a damaged shard")
    assert told[-1] == third


def test_a_worker_that_its_node_saw_end_is_lost_at_once_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, told = make(tmp_path), list[int]()
    generation = generation_of(form(made))
    monkeypatch.setattr(made.fleet, "over", told.append)
    made.gone("node", 99)  # of an earlier group
    assert told == []
    made.gone("node", 1)
    made.gone("node", 1)
    made.members_died([("node", 1)], 0, "worker_died", "says Ray, a second later")
    assert told == [generation]
    failures = [event for event in read_events(Storage.at(tmp_path)) if event["event"] == "failure"]
    assert [(event["cause"], event["ranks"]) for event in failures] == [("worker_died", [0])]


def test_who_ends_itself_because_its_device_hangs_does_so_before_it_is_ended() -> None:
    assert LEAVE_S < module.DEVICE_PATIENCE_S
