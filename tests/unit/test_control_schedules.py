"""Random schedules of joins, losses, notices, slow, lost and reordered messages, and restarts, in virtual time.

`support.control_world` checks the promises as they happen: a step's row and state follow from the samples before
it, each once (1, 2); what is committed is whole and has its copies (4); a generation that is over changes nothing (6);
every new group has a cause that was recorded (8); what is committed is in storage once the run has ended, or said to
be missing (11). Once no more faults come, a run comes to its end.
"""

import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from regrow.control import checkpoints, commits, core, past, rows, takeover
from regrow.control.commands import BeginRows, Command, Outbox
from regrow.control.events import Began, Joined, KeepersFound, KeeperUp, Row, RowsAgain
from regrow.control.values import NOTHING
from regrow.runtime.kept_rows import KeptRows
from support.control_world import Broken, World, play, play_restarts, play_without_storage
from support.faulty_worlds import play_again, play_corrupt_without_storage, play_troubled
from support.restart_world import RestartWorld

NUM_SCHEDULES = 10_000
NUM_WORSE = 60


@pytest.mark.timeout(900)
def test_ten_thousand_random_schedules_keep_the_promises() -> None:
    done, names, causes, spares = 0, set(), set(), 0
    for seed in range(NUM_SCHEDULES):
        world = play(seed)
        done += world.done
        for _, name, fields in world.events:
            names.add(name)
            causes |= {fields["cause"]} if name == "generation" else set()
            spares += fields["count"] if name == "spares" else 0
    assert done > 0.99 * NUM_SCHEDULES
    assert spares
    assert names >= {
        "failure",
        "drain",
        "undrain",
        "spares",
        "coordinator_restarted",
        "checkpoint",
        "checkpoint_failed",
        "snapshot_failed",
    }
    assert causes >= {"worker_died", "worker_hung", "node_silent", "grow", "drain", "nonfinite", "worker_failed"}


def test_schedules_in_which_ray_train_starts_all_workers_anew_keep_the_promises() -> None:
    """`cluster.in_place=false`."""
    causes: set[str] = set()
    for seed in range(1500):
        world = play(seed, world_class=RestartWorld)
        causes |= {fields["cause"] for _, name, fields in world.events if name == "generation"}
    assert causes >= {"worker_died", "worker_failed", "drain", "grow"}


FAULTS: dict[str, Callable[[World, int], None]] = {
    "worker": lambda world, number: world.kill_worker(_nth(world.workers, number)),
    "node": lambda world, number: world.kill_node(_nth(world.nodes, number)),
    "keeper": lambda world, number: world.kill_keeper(_nth(world.nodes, number)),
    "coordinator": lambda world, number: world.restart_coordinator(),
    "stop": lambda world, number: world.stop_worker(_nth(world.workers, number)),
    "continue": lambda world, number: world.continue_worker(_nth(world.workers, number)),
    "drain": lambda world, number: world.drain(_nth(world.nodes, number)),
    "maintenance": lambda world, number: world.maintain(_nth(world.nodes, number)),
    "zombie": lambda world, number: world.zombie(),
    "standstill": lambda world, number: world.stand_still(10.0 * (number + 1)),
}


def _nth(things: dict[str, Any], number: int) -> Any:
    return list(things.values())[number % len(things)]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 2**32),
    num_nodes=st.integers(1, 4),
    schedule=st.lists(st.tuples(st.floats(0, 30), st.sampled_from(sorted(FAULTS)), st.integers(0, 9)), max_size=6),
)
@example(seed=0, num_nodes=4, schedule=[(11.0, "node", 0), (20.0, "keeper", 1)])  # a holder dies, a report comes late
def test_any_schedule_of_faults_keeps_the_promises(
    seed: int, num_nodes: int, schedule: list[tuple[float, str, int]]
) -> None:
    """Hypothesis makes what it finds small."""
    world = World(seed, num_nodes=num_nodes, last_step=10)
    for at, fault, number in schedule:
        world.after(at, lambda fault=fault, number=number: FAULTS[fault](world, number))  # type: ignore[misc]
    world.run(3000.0)
    world.check_log()


@pytest.mark.parametrize(("repeats", "formed_s"), [(True, (0.0, 15.0)), (False, (25.0, 200.0))])
def test_a_coordinator_killed_right_after_it_heard_of_a_death_does_not_wait_for_the_dead(
    repeats: bool, formed_s: tuple[float, float]
) -> None:
    """Before its log is written. Where that is told once, the dead are waited for: the second row."""
    world = World(7, num_nodes=3, last_step=200)
    world.repeats_views = repeats
    while not world.rows:
        world.run_for(1.0)
    (first,) = world.runs.values()
    victim = next(iter(world.workers.values()))
    world.kill_node(world.nodes[victim.node])
    world.ray_finds(victim, "its node died")
    assert world.events[-1][1] == "failure"
    world.restart_coordinator(lost_events=1)
    killed_at = world.now
    while world.newest_generation == first.formation.generation:
        world.run_for(0.5)
    assert formed_s[0] <= world.now - killed_at <= formed_s[1]


@pytest.mark.parametrize("seed", range(20))
def test_a_coordinator_that_stood_still_ends_no_worker_that_waited_for_it(seed: int) -> None:
    """A rank is lost, and some of the others have come to form the next group when their coordinator is stopped."""
    world, rng = World(seed, num_nodes=4, last_step=40), random.Random(seed)
    while not world.rows:
        world.run_for(1.0)
    world.kill_worker(_nth(world.workers, seed))
    world.run_for(2.0 * rng.random())
    world.stand_still(70.0)
    world.run(2000.0)
    world.check_log()
    assert world.done
    causes = {fields["cause"] for _, name, fields in world.events if name == "failure"}
    assert "worker_died" in causes
    assert causes <= {"worker_died", "worker_failed"}  # a collective's timeout, while rank 0 waits for an answer


def test_a_notice_is_known_to_a_coordinator_that_was_restarted_after_it() -> None:
    world = World(7, num_nodes=3, last_step=200)
    while not world.rows:
        world.run_for(1.0)
    node = next(iter(world.nodes.values()))
    world.draining[node.name] = world.now + 15.0
    world.run_for(3.0)
    assert [fields["node"] for _, name, fields in world.events if name == "drain"] == [node.name]
    world.restart_coordinator()
    world.run_for(6.0)
    assert node.name in world.control.group.nodes.exclusions.deadlines
    world.run_for(5.0)
    members = world.runs[world.newest_generation].formation.members
    assert node.name not in {member.node for member in members}, "left before its deadline"


# The schedules have teeth: with these mistakes in control, some of them must break a promise


def no_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core.Control, "fence", lambda self, generation: None)


def commits_without_all_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    def sealed(self: Any, report: Any) -> Any:
        version = report.version
        if version.generation != self._generation or (self.newest and version <= self.newest.version):
            return None
        self.newest = commits.SnapshotCommit(version, dict(self._peers))
        return self.newest

    monkeypatch.setattr(commits.CommitTracker, "sealed", sealed)


def copies_on_any_peer_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if reports of a node that has not heard of its peer were as good."""
    sealed = commits.CommitTracker.sealed

    def careless(self: Any, report: Any) -> Any:
        return sealed(self, commits.SnapshotAck(report.node, report.version, self._peers.get(report.node, ())))

    monkeypatch.setattr(commits.CommitTracker, "sealed", careless)


def rows_are_not_rolled_back(monkeypatch: pytest.MonkeyPatch) -> None:
    take = Outbox.take

    def without(self: Outbox) -> list[Command]:
        return [replace(each, start_step=1 << 60) if isinstance(each, BeginRows) else each for each in take(self)]

    monkeypatch.setattr(Outbox, "take", without)


def late_reports_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a generation that is over, while the next one forms."""
    monkeypatch.setattr(core.Control, "_sealed", lambda self, event, now: self.snapshots.sealed(event.acks, now))


def generations_are_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A coordinator that was restarted does not know what the one before it numbered."""
    init = core.Control.__init__

    def forgetful(self: Any, config: Any, *, past: Any, **options: Any) -> None:
        init(self, config, past=replace(past, generation=max(0, past.generation - 1)), **options)

    monkeypatch.setattr(core.Control, "__init__", forgetful)


def what_went_wrong_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a coordinator that was restarted."""
    monkeypatch.setattr(past, "_discarded", lambda events: NOTHING)


def a_group_whose_beginning_is_not_logged_is_taken_to_be_forming(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(takeover.Takeover, "unseen", lambda self, event: None)


def a_run_ends_without_a_look_at_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is committed there is deleted, as a stop below min_workers did."""
    monkeypatch.setattr(checkpoints.Checkpoints, "secure", lambda self, reason, now: None)


def the_index_comes_before_all_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    written = checkpoints.Checkpoints.written

    def early(self: Any, event: Any, now: float) -> None:
        if self.upload is not None:
            self.upload._written |= self.upload.peers.keys()
        written(self, event, now)

    monkeypatch.setattr(checkpoints.Checkpoints, "written", early)


@pytest.mark.parametrize(
    "mistake",
    [
        no_fence,
        commits_without_all_nodes,
        copies_on_any_peer_count,
        rows_are_not_rolled_back,
        late_reports_count,
        generations_are_used_again,
        what_went_wrong_is_forgotten,
        a_group_whose_beginning_is_not_logged_is_taken_to_be_forming,
        the_index_comes_before_all_parts,
        a_run_ends_without_a_look_at_memory,
    ],
    ids=lambda mistake: mistake.__name__,
)
def test_a_mistake_in_control_is_found(mistake: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_found(mistake, monkeypatch, range(3000)), f"3000 schedules, and none has shown {mistake.__name__}"


def is_found(mistake: Callable[..., None], monkeypatch: pytest.MonkeyPatch, seeds: Iterable[int]) -> bool:
    """Whether the first schedule that breaks a promise does so by this mistake. Raises Broken where it does so without
    it, too."""
    with monkeypatch.context() as mistaken:
        mistake(mistaken)
        seed = next((seed for seed in seeds if is_broken(seed)), None)
    if seed is not None:
        play(seed, num_faults=6)
    return seed is not None


def is_broken(seed: int) -> bool:
    try:
        play(seed, num_faults=6)
    except AssertionError:
        return True
    return False


def test_rows_of_an_outage_are_in_the_log_where_the_first_rank_had_a_seat_in_all_groups_since() -> None:
    """Ranks threw them away, though never out of a group, and a note said that they had gone with their processes."""
    for seed in range(200):
        assert play_without_storage(seed).done


def ranks_of_a_group_that_broke_as_it_formed_forget_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    was_in, begin = KeptRows.was_in, KeptRows.begin

    def late(self: KeptRows, generation: int, start_step: int) -> None:
        was_in(self, generation)
        begin(self, generation, start_step)

    monkeypatch.setattr(KeptRows, "was_in", lambda self, generation: None)
    monkeypatch.setattr(KeptRows, "begin", late)


def a_number_that_no_group_has_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a coordinator that finds a group in keepers of which the log does not know."""
    keepers_found = takeover.Takeover.keepers_found

    def skipping(self: Any, event: KeepersFound, now: float) -> None:
        before = self._group.generation
        keepers_found(self, event, now)
        self._group.membership.generation += self._group.generation > before

    monkeypatch.setattr(takeover.Takeover, "keepers_found", skipping)


def test_rows_are_in_the_log_in_whatever_order_a_new_coordinator_gets_them() -> None:
    for seed in range(300):
        world = play_restarts(seed)
        assert world.done
        assert [row["step"] for row in world.rows] == [*range(1, world.last_step + 1)]


def rows_that_are_out_of_order_are_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    take = rows.Rows.take

    def strict(self: Any, event: Any) -> Any:
        row, wanted = take(self, event)
        assert wanted is None or not vars(self).get("is_told"), f"row of step {event.row['step']}, expected {wanted}"
        self.is_told = row is not None or vars(self).get("is_told")
        return row, wanted

    monkeypatch.setattr(rows.Rows, "take", strict)


def rows_that_another_coordinator_asked_for_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    take = rows.Rows.take

    def taken(self: Any, event: Any) -> Any:
        is_again = isinstance(event, RowsAgain)
        return take(self, replace(event, since=min(event.since, self.next_step)) if is_again else event)

    monkeypatch.setattr(rows.Rows, "take", taken)


LEFT_OUT = "are left out, and rank 0 could have them"
OUT_OF_ORDER = rf"row of step .*, expected|{LEFT_OUT}"


@pytest.mark.parametrize(
    ("mistake", "play", "seeds", "said"),
    [
        (ranks_of_a_group_that_broke_as_it_formed_forget_their_rows, play_without_storage, 200, LEFT_OUT),
        (a_number_that_no_group_has_is_left_out, play_without_storage, 200, LEFT_OUT),
        (rows_that_are_out_of_order_are_asked_for_once, play_restarts, 300, OUT_OF_ORDER),
        (rows_that_another_coordinator_asked_for_are_taken, play_restarts, 300, OUT_OF_ORDER),
    ],
    ids=lambda each: each.__name__ if callable(each) else "",
)
def test_rows_that_are_thrown_away_are_found(
    mistake: Callable[[pytest.MonkeyPatch], None],
    play: Callable[[int], Any],
    seeds: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mistake(monkeypatch)
    with pytest.raises(AssertionError if said == OUT_OF_ORDER else Broken, match=said):
        all(play(seed).done for seed in range(seeds))


def test_calls_that_are_made_again_to_the_next_coordinator_keep_the_promises() -> None:
    made_again = {type(event) for seed in range(NUM_WORSE) for event in play_again(seed).made_again}
    assert made_again >= {Began, Row, Joined, KeeperUp}


def test_troubles_and_unfit_devices_among_faults_that_come_together_keep_the_promises() -> None:
    found = [play_troubled(seed) for seed in range(NUM_WORSE)]
    assert sum(world.done for world in found) > 0.8 * NUM_WORSE


@pytest.mark.parametrize("is_logged", [False, True])
def test_a_corruption_is_found_whose_group_began_as_storage_was_away(is_logged: bool) -> None:
    found = [play_corrupt_without_storage(seed, is_logged=is_logged) for seed in range(NUM_WORSE)]
    corruptions = [world for world in found if world and any(name == "corruption" for _, name, _ in world.events)]
    assert len(corruptions) > 0.5 * NUM_WORSE


def a_group_begins_again_when_its_coordinator_is_told_so_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(takeover.Takeover, "knows", lambda self, event: False)


def all_that_a_group_has_done_is_right_where_the_log_does_not_know_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(past, "_verified", lambda events, stored: None)


@pytest.mark.parametrize(
    ("mistake", "worse"),
    [
        (a_group_begins_again_when_its_coordinator_is_told_so_again, play_again),
        (
            all_that_a_group_has_done_is_right_where_the_log_does_not_know_of_it,
            partial(play_corrupt_without_storage, is_logged=False),
        ),
    ],
    ids=["made again", "without storage"],
)
def test_a_mistake_in_what_a_new_coordinator_knows_is_found(
    mistake: Callable[[pytest.MonkeyPatch], None], worse: Callable[[int], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake(monkeypatch)
    with pytest.raises(Broken):
        list(map(worse, range(NUM_WORSE)))


def test_what_control_does_wrong_without_a_mistake_shows_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was wrong in control let a row of `test_a_mistake_in_control_is_found` pass."""
    rows_are_not_rolled_back(monkeypatch)  # stands for control's own
    with pytest.raises(AssertionError):
        is_found(lambda _: None, monkeypatch, range(100))


@pytest.mark.parametrize("seed", [54, 710])
def test_what_went_wrong_does_not_come_back_as_the_step_from_which_the_next_group_began(seed: int) -> None:
    """With a coordinator that was restarted after that."""
    assert play(seed, num_faults=6).done


def test_a_schedule_is_a_function_of_its_seed() -> None:
    seed = random.Random(0).randrange(1000)
    one, other = play(seed), play(seed)
    assert one.events == other.events
    assert one.rows == other.rows
