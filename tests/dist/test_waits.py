"""What ranks wait for each other in a step, by group, on gloo."""

import time

import pytest
import torch
import torch.distributed as dist

from regrow.config.schema import ModelConfig, ParallelConfig
from regrow.parallel.waits import ALL, REPLICATE, SHARD, Waits
from regrow.train.step import evaluate
from support.gloo import run_ranks
from support.training import Training, build, micro_batches

MODEL = ModelConfig(vocab_size=64, dim=32, num_layers=2, num_heads=2, num_kv_heads=1, ffn_dim=64)
LATE_S, LATE = 0.5, 1  # rank


def waits_of_steps(replicas: int) -> list[dict[str, float]]:
    """Of a step, and of one for which a rank comes late, with a validation before that, to which another one does."""
    training = Training(MODEL, parallel=ParallelConfig(dp_replicate=replicas))
    step, found = build(training), []
    for number in range(3):
        rows, passes = micro_batches(training, number)
        if number == 2:
            if dist.get_rank() == LATE - 1:
                time.sleep(2 * LATE_S)
            evaluate(step.model, rows, num_batches=passes, groups=step.groups)
            dist.barrier()
            if dist.get_rank() == LATE:
                time.sleep(LATE_S)
        stats = step.run(rows, num_micro_batches=passes, lr=1e-3)
        stats.resolve()
        found.append(stats.waits())
    return found[1:]


@pytest.mark.parametrize("replicas", [1, 2])
def test_ranks_wait_for_the_one_that_is_late_and_that_one_for_none(replicas: int) -> None:
    found = [late for _, late in run_ranks(waits_of_steps, 4, replicas)]
    for late in found:
        assert late.keys() == {SHARD, REPLICATE, ALL}
        assert all(seconds > 0 for group, seconds in late.items() if group != REPLICATE)
        assert (late[REPLICATE] > 0) == (replicas > 1)
    assert waited_least([sum(late.values()) for late in found]) == LATE, "what was waited in the validation is counted"


def waited_least(waited_s: list[float]) -> int:
    """The rank; all wait for the scheduler of a busy machine, too. The others wait for most of what it is late by."""
    assert sorted(waited_s)[1] > LATE_S / 2
    return waited_s.index(min(waited_s))


def waits_within_a_block(parallel: ParallelConfig, group: str) -> float:
    """Seconds that a rank waited for others of its group in a step in which one is slow within a block."""
    training = Training(MODEL, parallel=parallel)
    step = build(training)
    rows, passes = micro_batches(training, 0)
    step.run(rows, num_micro_batches=passes, lr=1e-3).resolve()
    if dist.get_rank() == LATE:
        step.model.layers[0].register_forward_pre_hook(lambda *inputs: time.sleep(LATE_S))  # type: ignore[union-attr,operator,index]
    dist.barrier()
    stats = step.run(rows[:1], num_micro_batches=1, lr=1e-3)
    stats.resolve()
    return stats.waits()[group]


def test_of_copies_that_are_a_rank_each_the_slow_one_is_told_from_the_one_that_waits_for_it() -> None:
    """FSDP calls no collective over shards there, whose end could say when gradients were ready."""
    assert waited_least(run_ranks(waits_within_a_block, 2, ParallelConfig(dp_replicate=2), REPLICATE)) == LATE


def test_of_ranks_that_share_rows_the_slow_one_is_told_from_the_one_that_waits_for_its_keys() -> None:
    assert waited_least(run_ranks(waits_within_a_block, 4, ParallelConfig(cp=2), SHARD)) == LATE


class Event:
    """A device's, in the place of CUDA's."""

    def __init__(self, *, is_over: bool) -> None:
        self.is_over = is_over

    def query(self) -> bool:
        return self.is_over


@pytest.mark.parametrize(
    ("events", "found"),
    [
        ([], True),  # its host has given it nothing
        ([(True, True)], True),
        ([(True, True), (True, False)], True),  # it waits for the others
        ([(True, True), (False, False)], False),  # a kernel before it hangs
        ([(True, False), (False, False)], True),
    ],
)
def test_a_device_that_has_come_to_no_collective_of_those_it_was_given_does_not_wait_for_others(
    events: list[tuple[bool, bool]], found: bool
) -> None:
    waits = Waits(torch.device("cuda"))
    for pair in events:
        arrived, ended = (Event(is_over=each) for each in pair)
        waits._marks.pairs.append([SHARD, arrived, ended])
    assert waits.at_a_collective() is found


@pytest.mark.parametrize("of_one_rank", [False, True])
def test_a_device_whose_kernel_hangs_before_gradients_are_ready_does_not_wait_for_other_copies(
    of_one_rank: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the shards of a copy are one rank's, too: the newest collective before them is a step's first, and over."""
    waits = Waits(torch.device("cuda"))
    waits._marks.pairs.append([ALL, Event(is_over=True), Event(is_over=True)])
    monkeypatch.setattr(waits, "_now", lambda: Event(is_over=False))  # behind the kernel
    waits.gradients_ready()
    if not of_one_rank:
        waits.leave(waits.arrive(SHARD))
    waits.copies_summed()
    assert not waits.at_a_collective()
