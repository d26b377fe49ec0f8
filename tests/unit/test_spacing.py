"""How far apart snapshots are, where that is measured."""

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow.control import events as e
from regrow.control.spacing import (
    FIRST,
    Choice,
    Spacing,
    allowed,
    best_every_steps,
    share_of_time,
    steps_of_commit,
)
from regrow.control.values import Version
from support.told import Told, one

DAY = 86400.0

seconds = st.floats(0.01, 60.0)
added = st.floats(0.0, 5.0)
mtbf = st.floats(60.0, 1e7)
most = st.integers(1, 40)


@given(added, seconds, seconds, mtbf, most)
def test_the_best_distance_is_the_one_that_trying_all_of_them_finds(
    added_s: float, commit_s: float, step_s: float, mtbf_s: float, most_steps_lost: int
) -> None:
    costs = {"added_s": added_s, "step_s": step_s, "mtbf_s": mtbf_s}
    tried = {
        k: share_of_time(k, **costs) for k in allowed(commit_s=commit_s, step_s=step_s, most_steps_lost=most_steps_lost)
    }
    best = best_every_steps(commit_s=commit_s, most_steps_lost=most_steps_lost, **costs)
    assert best in tried
    assert tried[best] == pytest.approx(min(tried.values()), rel=1e-9)


@given(seconds, seconds, most)
def test_what_is_allowed_keeps_up_and_loses_no_more_than_it_may_where_any_distance_does(
    commit_s: float, step_s: float, most_steps_lost: int
) -> None:
    commit = steps_of_commit(commit_s=commit_s, step_s=step_s)
    tried = [k for k in range(1, most_steps_lost + 1) if k >= commit and k + commit - 1 <= most_steps_lost]
    found = list(allowed(commit_s=commit_s, step_s=step_s, most_steps_lost=most_steps_lost))
    assert found == (tried or [min(commit, most_steps_lost)])


@given(added, seconds, seconds, mtbf, most)
def test_failures_bring_snapshots_closer_and_what_they_add_puts_them_apart(
    added_s: float, commit_s: float, step_s: float, mtbf_s: float, most_steps_lost: int
) -> None:
    rest = {"commit_s": commit_s, "step_s": step_s, "most_steps_lost": most_steps_lost}
    here = best_every_steps(added_s=added_s, mtbf_s=mtbf_s, **rest)
    assert best_every_steps(added_s=added_s, mtbf_s=mtbf_s / 4, **rest) <= here
    assert best_every_steps(added_s=4 * added_s, mtbf_s=mtbf_s, **rest) >= here


class Run:
    """Steps of a group whose snapshots take so long to commit, and add so much, in virtual time."""

    def __init__(self, spacing: Spacing, *, step_s: float, commit_s: float, added_s: float, noise: float = 0.0) -> None:
        self.spacing, self.step_s, self.commit_s, self.added_s, self.noise = spacing, step_s, commit_s, added_s, noise
        self.now, self.step, self.begun = 0.0, 0, 0
        self.on_way: list[tuple[int, float, float]] = []  # step, when it will be committed, what it has yet to add
        self.choices: list[Choice] = []
        self.random = random.Random(0)

    def train(self, num_steps: int, *, mtbf_s: float = DAY) -> int:
        """The distance in the end."""
        for _ in range(num_steps):
            took_s = self.step_s * (1 + self.noise * self.random.uniform(-1, 1))
            took_s += sum(adds for *_, adds in self.on_way)
            self.on_way = [(step, at, 0.0) for step, at, _ in self.on_way]
            end, self.step = self.now + took_s, self.step + 1
            for step, at, _ in [each for each in self.on_way if each[1] <= end]:
                self.spacing.committed(step, at)
            self.on_way = [each for each in self.on_way if each[1] > end]
            self.now = end
            self.spacing.stepped(self.step, took_s, self.now)
            if choice := self.spacing.choose(mtbf_s):
                self.choices.append(choice)
            if self.step - self.begun >= (self.spacing.every_steps or FIRST) and not self.on_way:
                self.begun = self.step
                self.on_way.append((self.step, self.now + self.commit_s, self.added_s))
        return self.spacing.every_steps


@pytest.mark.parametrize(
    ("step_s", "commit_s", "added_s", "mtbf_s"),
    [(1.0, 0.4, 0.0, DAY), (1.0, 0.4, 0.3, DAY), (6.0, 4.0, 0.1, 3.09 * 3600), (0.5, 2.2, 0.05, 600.0)],
)
def test_what_is_measured_leads_to_nearly_the_best_distance(
    step_s: float, commit_s: float, added_s: float, mtbf_s: float
) -> None:
    run = Run(Spacing(16), step_s=step_s, commit_s=commit_s, added_s=added_s)
    found = run.train(300, mtbf_s=mtbf_s)
    costs = {"added_s": added_s, "step_s": step_s, "mtbf_s": mtbf_s}
    best = best_every_steps(commit_s=commit_s, most_steps_lost=16, **costs)
    assert share_of_time(found, **costs) - share_of_time(best, **costs) < 0.001
    assert run.choices[-1].every_steps == found
    assert run.choices[-1].steps_lost <= 16


def test_every_change_is_told_once_and_noise_brings_few() -> None:
    run = Run(Spacing(16), step_s=0.5, commit_s=0.3, added_s=0.02, noise=0.1)
    run.train(3000)
    assert [choice.before for choice in run.choices] == [0, *(choice.every_steps for choice in run.choices[:-1])]
    assert all(choice.before != choice.every_steps for choice in run.choices)
    assert len(run.choices) < 10


def test_a_link_that_becomes_slow_is_kept_up_with_and_one_that_cannot_be_is_told() -> None:
    run = Run(Spacing(16), step_s=1.0, commit_s=0.5, added_s=0.0)
    run.train(100)
    run.commit_s = 5.0
    assert run.train(200) >= 5
    assert run.choices[-1].steps_lost <= 16
    run.commit_s = 40.0
    assert run.train(2000) == 16
    assert run.choices[-1].steps_lost > 16


def test_a_group_that_forms_anew_keeps_what_was_chosen_until_it_has_measured_itself() -> None:
    run = Run(Spacing(16), step_s=1.0, commit_s=0.4, added_s=0.3)
    chosen = run.train(200)
    run.spacing.resumed()
    assert run.spacing.every_steps == chosen
    assert run.spacing.choose(DAY) is None


def most_lost(run: Run, every_steps: int) -> int:
    """What a failure right before a commit costs."""
    return every_steps + steps_of_commit(commit_s=run.commit_s, step_s=run.step_s) - 1


@pytest.mark.parametrize("resumes", [False, True], ids=["the same group", "another group"])
def test_what_was_told_last_bounds_what_a_failure_costs_where_commits_alone_take_longer(resumes: bool) -> None:
    run = Run(Spacing(16), step_s=1.0, commit_s=0.5, added_s=0.1)
    assert run.train(300, mtbf_s=340.0) == 8
    assert run.choices[-1].steps_lost == 8
    if resumes:
        run.spacing.resumed()
    run.commit_s = 3.5
    assert run.train(600, mtbf_s=340.0) == 8
    assert (run.choices[-1].every_steps, run.choices[-1].before) == (8, 8)
    assert run.choices[-1].steps_lost == most_lost(run, 8) == 11


def test_a_bound_that_is_no_longer_half_as_high_is_told_and_one_that_moves_by_a_step_is_not() -> None:
    run = Run(Spacing(16), step_s=1.0, commit_s=0.4, added_s=0.3)
    run.train(200)
    run.commit_s = 40.0
    run.train(3000)
    assert run.choices[-1].steps_lost == most_lost(run, 16) == 55
    run.commit_s = 0.4
    assert run.train(3000) == 16
    assert run.choices[-1].steps_lost == most_lost(run, 16) == 16
    run = Run(Spacing(16), step_s=1.0, commit_s=0.5, added_s=0.1)
    run.train(300, mtbf_s=340.0)
    told = len(run.choices)
    for commit_s in (1.5, 0.5) * 5:
        run.commit_s = commit_s
        assert run.train(600, mtbf_s=340.0) == 8
    assert [choice.steps_lost for choice in run.choices[told:]] == [9]


def test_control_answers_rows_with_the_distance_and_logs_its_changes() -> None:
    told = Told()
    told.form(*(members := [one(1, "a"), one(2, "b")]))
    told.begin([member.node for member in members])
    said, begun = list[int](), 0
    for step in range(1, 60):
        told.now += 1.0
        answer = told(e.Row(1, told.metrics(step, step_s=1.0, data_wait_s=0.0)))
        said.append(answer.every_steps)
        if step - begun >= (answer.every_steps or FIRST):
            begun = step
            told.now += 0.5
            told.seal(Version(1, step), told.peers)
            told.now -= 0.5
    assert not any(said[:FIRST])
    records = told.records("snapshot_spacing")
    changes = [each for before, each in pairwise([0, *said]) if each != before]
    assert [each["every_steps"] for each in records] == changes
    assert records[-1]["commit_s"] == pytest.approx(0.5)
    assert records[-1]["added_s"] == 0.0
    assert said[-1] <= FIRST


def test_a_distance_that_is_set_is_never_changed() -> None:
    told = Told(every_steps=3)
    told.form(one(1, "a"), one(2, "b"))
    told.begin(["a", "b"])
    for step in range(1, 30):
        told.now += 1.0
        assert told(e.Row(1, told.metrics(step))).every_steps == 0
        told.seal(Version(1, step), told.peers)
    assert not told.records("snapshot_spacing")
