"""Small values between the live ranks of the default group, as Python objects. Never used on anything from storage."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import distributed_c10d

from regrow.errors import RegrowError

HOST_GROUP = "host"  # description of the group for host tensors, where the default one's backend only enqueues

Value = TypeVar("Value")


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def gather(value: Value) -> list[Value]:
    """Every rank's value, in rank order, on every rank. Collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=_host_group())
    return values


def from_rank_0(value: Value) -> Value:
    """Rank 0's value on every rank. Collective."""
    return gather(value)[0]


def on_first_rank(work: Callable[[], Value]) -> Value:
    """What rank 0's `work` returns, on every rank. Collective; what fails there is raised on all, as a RegrowError."""
    outcome: Value | RegrowError | None = None
    if rank() == 0:
        try:
            outcome = work()
        except RegrowError as error:
            outcome = error
        except Exception as error:  # storage raises many kinds; nobody may be left waiting
            outcome = RegrowError(f"{type(error).__name__}: {error}")
    outcome = from_rank_0(outcome)
    if isinstance(outcome, RegrowError):
        raise outcome
    return outcome  # type: ignore[return-value]


def _host_group() -> dist.ProcessGroup | None:
    """The group whose collectives are done when they return; None for the default one."""
    return next((each for each in distributed_c10d._world.pg_map if each.group_desc == HOST_GROUP), None)
