"""The certificate over a chain of axes: what is believed is whole, in every order of events of two stages x two shards.

A step is two messages between the stages of a pipeline, a sum of gradients among shards, the flag that the device
reads, and the packed sum: over shards, then over stages (`train.certificate`). Each of these is a post and a wait for
the other's. Any rank may hear at any time that the generation is over: its flag is down from then on, and it aborts its
communicators in any order. An aborted kernel posts right data or old ones, and it may stop waiting, with either,
whether the other's came or not. A rank may do nothing more at any time, which is to die.

Ranks that hear nothing wait, and go on as far as they can: what they would leave for later changes nothing but when the
others' waits end, and those of aborted kernels end at any time.
"""

from collections.abc import Iterator
from itertools import combinations
from typing import NamedTuple

import pytest

PIPE, SHARD, STAGES = range(3)  # communicators
FORWARD, BACKWARD, GRADIENTS, SUM_SHARDS, SUM_STAGES = range(5)  # what is posted
COMMUNICATOR = (PIPE, PIPE, SHARD, SHARD, STAGES)
READ = ("read", -1)
STEP = (
    ("post", GRADIENTS),
    ("wait", GRADIENTS),
    READ,
    ("post", SUM_SHARDS),
    ("wait", SUM_SHARDS),
    ("post", SUM_STAGES),
    ("wait", SUM_STAGES),
)
PROGRAM = (
    (("post", FORWARD), ("wait", BACKWARD), *STEP),
    (("wait", FORWARD), ("post", BACKWARD), *STEP),
)  # by stage
AFTER_READ, END = PROGRAM[0].index(READ) + 1, len(PROGRAM[0])


class Rank(NamedTuple):
    at: int = 0
    gradients: bool = True  # real, so far
    total: bool = False  # of the certificate: what it should be, so far
    flag: bool = True
    told: bool = False
    aborted: tuple[bool, ...] = (False,) * 3
    posts: tuple[bool | None, ...] = (None,) * 5  # of what it should be?


State = tuple[Rank, ...]  # rank 2 x stage + shard


class Rules(NamedTuple):
    """Of a guard: is the flag down before anything is aborted, and does the packed sum go over both axes?"""

    clears_first: bool = True
    both_axes: bool = True


def peer_of(number: int, what: int) -> int:
    return number ^ (1 if COMMUNICATOR[what] == SHARD else 2)


def advance(state: State, number: int) -> Iterator[Rank]:
    """What the rank's device may do next."""
    rank = state[number]
    if rank.at == END:
        return
    (kind, what), moved = PROGRAM[number // 2][rank.at], rank._replace(at=rank.at + 1)
    if (kind, what) == READ:
        yield moved._replace(total=rank.flag)
        return
    mine, aborted = rank.gradients if what < SUM_SHARDS else rank.total, rank.aborted[COMMUNICATOR[what]]
    if kind == "post":
        for posted in {mine} | ({False} if aborted else set()):
            yield moved._replace(posts=(*rank.posts[:what], posted, *rank.posts[what + 1 :]))
        return
    came = state[peer_of(number, what)].posts[what]
    for found in ({mine and came} if came is not None else set()) | ({False} if aborted else set()):
        yield moved._replace(gradients=found) if what < SUM_SHARDS else moved._replace(total=found)


def settled(state: State, told: tuple[int, ...]) -> State:
    """Once those that hear nothing have gone on as far as they can."""
    while True:
        before = state
        for number in set(range(4)) - set(told):
            for moved in advance(state, number):  # one, at the most
                state = (*state[:number], moved, *state[number + 1 :])
        if state == before:
            return state


def moves(state: State, number: int, rules: Rules) -> Iterator[Rank]:
    rank = state[number]
    yield from advance(state, number)
    if not rank.told:
        yield rank._replace(told=True, flag=not rules.clears_first)
        return
    if all(rank.aborted):
        yield rank._replace(flag=False)
    for each, is_aborted in enumerate(rank.aborted):
        if not is_aborted:
            yield rank._replace(aborted=(*rank.aborted[:each], True, *rank.aborted[each + 1 :]))


def explore(told: tuple[int, ...], rules: Rules) -> tuple[int, State | None]:
    """How many states there are where these ranks may hear of the end, and one in which a rank believes a step that is
    garbage on some rank."""
    begin = settled((Rank(),) * 4, told)
    seen, left, wrong = {begin}, [begin], None
    end = END if rules.both_axes else END - 2
    while left:
        state = left.pop()
        believed = any(rank.at >= end and rank.total and not rank.told for rank in state)
        if believed and not all(rank.at >= AFTER_READ and rank.gradients for rank in state):
            wrong = state
        for number in told:
            for moved in moves(state, number, rules):
                new = settled((*state[:number], moved, *state[number + 1 :]), told)
                if new not in seen:
                    seen.add(new)
                    left.append(new)
    return len(seen), wrong


@pytest.mark.parametrize(
    "told",
    [(0,), *(pytest.param(pair, marks=[pytest.mark.long] * (pair != (0, 3))) for pair in combinations(range(4), 2))],
)
def test_a_step_that_is_believed_over_two_axes_is_whole_on_every_rank_whichever_hear_of_its_end(
    told: tuple[int, ...],
) -> None:
    num_states, wrong = explore(told, Rules())
    assert wrong is None
    assert num_states > 50 ** len(told)


@pytest.mark.parametrize("rules", [Rules(clears_first=False), Rules(both_axes=False)], ids=["flag last", "one axis"])
def test_nor_would_less_do(rules: Rules) -> None:
    _, wrong = explore((0,), rules)
    assert wrong is not None
