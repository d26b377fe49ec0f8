"""A process that has warmed up has nothing left of it, and joins a group as any other."""

import torch
import torch.distributed as dist

from regrow.testing.gloo import run_ranks
from regrow.train.warm_up import warm_up


def warm_up_and_join() -> tuple[bool, bool]:
    dist.destroy_process_group()
    state = torch.get_rng_state()
    warm_up(torch.device("cpu"))
    same = torch.equal(torch.get_rng_state(), state)
    return same, not dist.is_initialized()


def test_nothing_is_left_of_it() -> None:
    assert run_ranks(warm_up_and_join, 2) == [(True, True)] * 2
