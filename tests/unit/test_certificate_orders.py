"""In no order of events may a step be believed that is garbage on some rank: every state of three ranks is visited.

A step is two collectives: gradients, within a group of its own, and the packed sum over all ranks. Each is two rounds
in which a rank posts and then waits for the others' posts. Between them the device reads the flag that says nothing
has been aborted (`train.certificate`). At any time a host may hear that the generation is over; it then clears the flag
and aborts its communicators, in any order. An aborted kernel waits no longer, and what it posts is old or, as kernels
look late, right. A rank may die at any time, which is to do nothing more.

Two of the ranks may share rows, or a block's arithmetic: before those of all they have a collective of their own, of
one round, and what comes of it goes into their gradients.
"""

from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

import pytest


class At(IntEnum):
    """What the device does next."""

    (
        SHARE_POST,
        SHARE_WAIT,
        POST_1,
        WAIT_1,
        POST_2,
        WAIT_2,
        READ,
        SUM_POST_1,
        SUM_WAIT_1,
        SUM_POST_2,
        SUM_WAIT_2,
        END,
    ) = range(12)


POSTS = {At.POST_1: 0, At.POST_2: 1, At.SUM_POST_1: 2, At.SUM_POST_2: 3}
WAITS = {At.WAIT_1: 0, At.WAIT_2: 1, At.SUM_WAIT_1: 2, At.SUM_WAIT_2: 3}


class Rank(NamedTuple):
    at: At = At.POST_1
    posts: tuple[bool, ...] = ()  # so far: with real data?
    gradients: bool = True  # real, so far
    total: bool = True  # real, so far
    read: bool = True  # the flag, as the device read it
    flag: bool = True
    told: bool = False
    gradients_aborted: bool = False
    total_aborted: bool = False
    shares: bool = False  # something, with one other rank
    shared: tuple[bool, ...] = ()  # its post to that one
    share_aborted: bool = False


class Rules(NamedTuple):
    """Of a guard: does the number carry the flag, is the flag cleared first, is a rank's own word asked for too?"""

    carries_flag: bool = True
    clears_first: bool = True
    number: bool = True
    own_flag: bool = False


def moves(rank: Rank, others: list[Rank], rules: Rules) -> Iterator[Rank]:
    of_gradients = rank.at < At.READ
    aborted = rank.gradients_aborted if of_gradients else rank.total_aborted
    after = At(min(rank.at + 1, At.END))
    if rank.at is At.SHARE_POST:
        for posted in _either(True, rank.share_aborted):
            yield rank._replace(at=after, shared=(posted,))
    elif rank.at is At.SHARE_WAIT:
        (other,) = (each for each in others if each.shares)
        if rank.share_aborted or other.shared:
            yield rank._replace(at=after, gradients=any(other.shared))
    elif rank.at in POSTS:
        real = rank.gradients if of_gradients else rank.total and (rank.read or not rules.carries_flag)
        for posted in _either(real, aborted):
            yield rank._replace(at=after, posts=(*rank.posts, posted))
    elif rank.at in WAITS:
        number = WAITS[rank.at]
        if aborted or all(len(other.posts) > number for other in others):
            came = all(len(other.posts) > number and other.posts[number] for other in others)
            if of_gradients:
                yield rank._replace(at=after, gradients=rank.gradients and came)
            else:
                yield rank._replace(at=after, total=rank.total and came)
    elif rank.at is At.READ:
        yield rank._replace(at=after, read=rank.flag)
    if not rank.told:
        yield rank._replace(told=True, flag=rank.flag and not rules.clears_first)
    else:
        yield rank._replace(gradients_aborted=True)
        yield rank._replace(total_aborted=True)
        if rank.shares:
            yield rank._replace(share_aborted=True)
        if rank.gradients_aborted and rank.total_aborted and rank.share_aborted == rank.shares:
            yield rank._replace(flag=False)


def _either(real: bool, aborted: bool) -> set[bool]:
    """What may be posted: old data by a kernel that was aborted, right ones by one that has not looked yet."""
    return ({True} if real else set()) | ({False} if aborted or not real else set())


def believed(ranks: tuple[Rank, ...], rules: Rules) -> bool:
    return any(
        rank.at is At.END and (rank.total or not rules.number) and (not rules.own_flag or not rank.told)
        for rank in ranks
    )


def whole(rank: Rank) -> bool:
    return rank.at > At.READ and rank.gradients


def explore(rules: Rules, num_ranks: int, num_that_share: int = 0) -> tuple[int, tuple[Rank, ...] | None]:
    """How many states there are, and one in which a rank believes a step that is garbage on some rank."""
    begin = (Rank(),) * (num_ranks - num_that_share) + (Rank(At.SHARE_POST, shares=True),) * num_that_share
    seen, left = {begin}, [begin]
    while left:
        state = left.pop()
        if believed(state, rules) and not all(whole(rank) for rank in state):
            return len(seen), state
        for number, rank in enumerate(state):
            others = [*state[:number], *state[number + 1 :]]
            for moved in moves(rank, others, rules):
                if (new := tuple(sorted((*others, moved)))) not in seen:  # ranks are alike
                    seen.add(new)
                    left.append(new)
    return len(seen), None


def test_a_sum_that_is_right_proves_the_step_on_every_rank() -> None:
    num_states, wrong = explore(Rules(), 3)
    assert wrong is None
    assert num_states > 50_000


def test_nor_is_one_believed_whose_shared_rows_were_garbage() -> None:
    num_states, wrong = explore(Rules(), 2, 2)
    assert wrong is None
    assert num_states > 5_000
    _, wrong = explore(Rules(clears_first=False), 2, 2)
    assert wrong is not None


@pytest.mark.parametrize(
    "rules",
    [
        Rules(carries_flag=False),
        Rules(carries_flag=False, own_flag=True),
        Rules(clears_first=False),
        Rules(number=False, own_flag=True),
    ],
    ids=["number alone", "number and own flag", "flag cleared after the abort", "own flag alone"],
)
def test_less_does_not(rules: Rules) -> None:
    _, wrong = explore(rules, 2)
    assert wrong is not None
