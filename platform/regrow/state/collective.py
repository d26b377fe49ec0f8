"""Small values between the live ranks of the default group, as JSON: what comes from a port is never unpickled.

Over the generation's tree where there is one (`parallel.world`), else by the default group's own collectives.

torch's object collectives would run what a stranger sends to a rank's gloo.
"""

import json
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from regrow import errors
from regrow.errors import GroupOver, RegrowError
from regrow.parallel.tree import Tree
from regrow.parallel.world import members

MOST_BYTES = 256 << 20  # of a value

Value = TypeVar("Value")  # None, bool, int, float, str, RegrowError; lists, tuples and dicts (by text) of them


class PeerError(Exception):
    """Another rank has an error that this one does not have: it goes on, without that one."""


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def gather(value: Value) -> list[Value]:
    """Every rank's value, in rank order, on every rank. Collective. TypeError for what is none to send."""
    mine, world_size = _encode(value), dist.get_world_size() if dist.is_initialized() else 1
    if world_size == 1:
        return [_decode(mine)]
    if (tree := _tree()) is not None:
        return [_decode(each) for each in tree.gather(mine)]
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world_size)]
    dist.all_gather(sizes, torch.tensor([len(mine)]))
    num_bytes = [_checked(size) for size in sizes]
    padded = torch.zeros(max(num_bytes), dtype=torch.uint8)
    padded[: len(mine)] = _tensor(mine)
    values = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(values, padded)
    return [_decode(_bytes(each[:size])) for each, size in zip(values, num_bytes, strict=True)]


def from_rank_0(value: Value) -> Value:
    """Rank 0's value on every rank. Collective. TypeError for what is none to send."""
    mine = _encode(value if rank() == 0 else None)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return cast(Value, _decode(mine))
    if (tree := _tree()) is not None:
        return cast(Value, _decode(tree.broadcast(mine)))
    dist.broadcast(size := torch.tensor([len(mine)]), 0)
    theirs = _tensor(mine) if rank() == 0 else torch.empty(_checked(size), dtype=torch.uint8)
    dist.broadcast(theirs, 0)
    return cast(Value, _decode(_bytes(theirs)))


def on_first_rank(work: Callable[[], Value]) -> Value:
    """What rank 0's `work` returns, on every rank. Collective; what fails there is raised on all, as a RegrowError."""
    outcome = from_rank_0(_outcome(work) if rank() == 0 else None)
    if isinstance(outcome, RegrowError):
        raise outcome
    return outcome  # type: ignore[return-value]


def on_first_rank_or_each(work: Callable[[], Value]) -> Value:
    """The same where the error may be rank 0's alone: all do the work then, and raise their own error, or PeerError."""
    outcome = from_rank_0(_outcome(work) if rank() == 0 else None)
    if not isinstance(outcome, RegrowError):
        return outcome  # type: ignore[return-value]
    mine = outcome if rank() == 0 else _outcome(work)
    if isinstance(mine, RegrowError):
        raise mine
    raise PeerError(f"rank 0: {outcome}")


def _outcome(work: Callable[[], Value]) -> Value | RegrowError:
    try:
        return work()
    except RegrowError as error:
        return error
    except GroupOver:  # no rank waits any more
        raise
    except Exception as error:  # storage raises many kinds; no rank may be left waiting
        return RegrowError(f"{type(error).__name__}: {error}")


def _encode(value: Any) -> bytes:
    encoded = json.dumps(_to_plain(value), separators=(",", ":")).encode()
    if len(encoded) > MOST_BYTES:
        raise TypeError(f"a value of {len(encoded)} bytes cannot be sent between ranks: at most {MOST_BYTES} are taken")
    return encoded


def _decode(data: bytes) -> Any:
    return _of_plain(json.loads(data))


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _bytes(data: torch.Tensor) -> bytes:
    return data.numpy().tobytes()


def _to_plain(value: Any) -> Any:
    """What JSON can hold; what it would change without a word stands under the name of its kind."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return [_to_plain(each) for each in value]
    if kind is tuple:
        return {"tuple": [_to_plain(each) for each in value]}
    if kind is dict and all(type(key) is str for key in value):
        return {"dict": {key: _to_plain(each) for key, each in value.items()}}
    if isinstance(value, RegrowError):
        known = next(each for each in kind.__mro__ if each.__module__ == errors.__name__)
        return {"error": [known.__name__, str(value)]}
    raise TypeError(f"{value!r} of {kind.__name__} cannot be sent between ranks: JSON does not have it")


def _of_plain(plain: Any) -> Any:
    if isinstance(plain, list):
        return [_of_plain(each) for each in plain]
    if not isinstance(plain, dict):
        return plain
    ((kind, content),) = plain.items()
    if kind == "error":
        name, text = content
        known = getattr(errors, name, None)
        ours = isinstance(known, type) and issubclass(known, RegrowError)
        return known(text) if ours else RegrowError(text)  # type: ignore[misc]
    if kind == "dict":
        return {key: _of_plain(each) for key, each in content.items()}
    return tuple(_of_plain(each) for each in content)


def _checked(size: torch.Tensor) -> int:
    num_bytes = int(size)
    if not 0 < num_bytes <= MOST_BYTES:
        raise ConnectionError(f"a rank announces a value of {num_bytes} bytes; at most {MOST_BYTES} are taken")
    return num_bytes


def _tree() -> Tree | None:
    world = members()
    return world.tree if world is not None else None
