"""What ranks tell each other is data: every kind that is sent arrives as it was, and nothing that arrives is run."""

import ast
import math
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from regrow.accept.tiny import tiny_model
from regrow.config.schema import Dtype
from regrow.control.values import Version
from regrow.data.read.corpora import Corpora
from regrow.errors import CheckpointError, RegrowError, ResumeError
from regrow.plan.mesh import Coordinates, MeshShape
from regrow.state.collective import from_rank_0, gather, on_first_rank
from regrow.state.disk import store
from regrow.state.memory.held import Held
from regrow.state.memory.holders import Holder, Holders
from regrow.state.memory.reader import Unrestorable
from regrow.storage import Storage
from support.gloo import RankError, run_ranks
from support.state import entries_after
from support.training import Training, train

PLATFORM = Path(__file__).parents[2] / "platform" / "regrow"
PLAIN: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 2**63, 0.1, 1e300, math.inf, "", "a\u0000b\n\u00e9\U0001f600", [], {}),
    *((), (1, "x", (None,)), {"tuple": [1], "dict": {"error": (2,)}}, [("a", {})]),
    *([[1, "x"], [None, 2.5]], {"step": 3, "detail": "no", "nested": {"all": [1, [2]]}}, ["", False]),
)
HOLDERS = (
    Holder(
        "a" * 56, ("10.0.0.1", 4), Held("g1-0.slot", Version(1, 9), Coordinates(MeshShape(2, 3, 4), 5), 8, "ab" * 32)
    ),
    Holder("n", ("::1", 65535), Held("g1-0.slot.copy", Version(1, 9), Coordinates(MeshShape(2, 3, 4), 0), 1, "")),
)
CORPORA = (
    Corpora(("",), ("/data/a",), "/tmp/cache", 10**12),
    Corpora(("en", "de"), ("s3://b/en", "s3://b/de"), "/tmp/cache", 0),
)
ERRORS: dict[Callable[[], Exception], tuple[type[RegrowError], str]] = {
    lambda: ResumeError("another run"): (ResumeError, "another run"),
    lambda: Unrestorable("nobody has it"): (CheckpointError, "nobody has it"),  # a class of its own module's
    lambda: OSError(5, "no disk"): (RegrowError, "OSError: [Errno 5] no disk"),
}


def everything() -> tuple[list[list[Any]], list[Any]]:
    rank = dist.get_rank()
    return [gather(each) for each in PLAIN], [from_rank_0(each if rank == 0 else object()) for each in PLAIN]


def test_every_value_arrives_as_it_was_at_every_rank() -> None:
    for gathered, told in run_ranks(everything, 3):
        assert gathered == [[each] * 3 for each in PLAIN]
        assert told == list(PLAIN)
        assert [type(each) for each in told] == [type(each) for each in PLAIN]


def of_different_sizes() -> list[str]:
    return gather("x" * dist.get_rank() * 1000)


def test_values_of_different_sizes_come_in_rank_order() -> None:
    assert run_ranks(of_different_sizes, 3)[1] == ["", "x" * 1000, "x" * 2000]


def holders_and_corpora() -> tuple[list[Holder], list[Corpora]]:
    holders = Holders.of_json(from_rank_0(Holders.of(HOLDERS).to_json()))
    corpora = on_first_rank(lambda: [each.to_plain() for each in CORPORA])
    return list(holders), [Corpora.of_plain(each) for each in corpora]


def test_where_snapshots_and_corpora_are_arrives_whole() -> None:
    assert run_ranks(holders_and_corpora, 2)[1] == (list(HOLDERS), list(CORPORA))


@pytest.mark.parametrize(
    "value", [{1: "a"}, [b"bytes"], Dtype.float32, np.float64(1), torch.zeros(1), {1}, MeshShape(1, 1)]
)
def test_what_json_would_change_is_refused_by_name(value: Any) -> None:
    with pytest.raises(TypeError, match="cannot be sent between ranks"):
        gather(value)


def fail_first(number: int) -> tuple[type, str]:
    make = list(ERRORS)[number]

    def work() -> int:
        raise make()

    try:
        on_first_rank(work)
    except RegrowError as error:
        return type(error), str(error)
    raise AssertionError


@pytest.mark.parametrize("number", range(len(ERRORS)))
def test_what_fails_on_the_first_rank_is_raised_on_all(number: int) -> None:
    assert run_ranks(fail_first, 2, number) == [list(ERRORS.values())[number]] * 2


class Evil:
    """Runs where it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


def send_a_pickle(path: str) -> str:
    """Rank 1 is a stranger's: it sends what torch's object collectives would run."""
    if dist.get_rank() == 0:
        try:
            gather("something")
        except ValueError as error:
            return type(error).__name__
        return "believed"
    data = torch.frombuffer(bytearray(pickle.dumps(Evil(path))), dtype=torch.uint8)
    dist.all_gather([torch.zeros(1, dtype=torch.int64) for _ in range(2)], torch.tensor([len(data)]))
    dist.all_gather([torch.zeros_like(data) for _ in range(2)], data)
    return "sent"


def test_a_pickle_that_comes_from_a_rank_is_not_run(tmp_path: Path) -> None:
    assert run_ranks(send_a_pickle, 2, str(tmp_path / "run")) == ["UnicodeDecodeError", "sent"]
    assert not (tmp_path / "run").exists()


def announce_too_much() -> list[int]:
    if dist.get_rank() == 0:
        return gather(1)
    dist.all_gather([torch.zeros(1, dtype=torch.int64) for _ in range(2)], torch.tensor([1 << 60]))
    return []


def test_a_value_that_would_fill_memory_is_refused() -> None:
    with pytest.raises(RankError, match=f"a rank announces a value of {1 << 60} bytes"):
        run_ranks(announce_too_much, 2)


def work_without_objects(folder: str) -> int:
    """Training and checkpoints, on a torch that cannot unpickle what comes over a collective."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("torch was asked to unpickle what came from a rank")

    distributed_c10d._tensor_to_object = refuse  # type: ignore[assignment]
    train(Training(tiny_model(), num_steps=1))
    entries, coordinates, group = entries_after(1, seed=1)
    storage, scalars = Storage.at(folder), {"step": 1, "cursor": 2, "tokens_seen": 16}
    index = store.save(storage, entries, scalars=scalars, run_id="r" * 16, generation=1, coordinates=coordinates)
    steps = on_first_rank(lambda: [1])
    restored = store.restore_newest(
        storage, steps, entries, coordinates, group, run_id="r" * 16, global_batch_seqs=2, damaged=lambda *_: None
    )
    assert restored is not None
    assert restored.step == 1
    return len(index.files)


def test_training_and_checkpoints_need_no_object_collective(tmp_path: Path) -> None:
    assert run_ranks(work_without_objects, 2, str(tmp_path)) == [2, 2]


UNPICKLING = {"load", "loads", "Unpickler", "read_pickle"}  # of pickle, cloudpickle, torch, joblib
OBJECTS = {
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send_object_list", "recv_object_list", "all_gather_object_enforce_type", "check_tensor_meta"),
}
KNOWN = {  # what unpickles, and of what: never what comes from a port
    ("accept/ranks.py", "loads"),  # a file in the folder, of mode 0700, that this process made for its own ranks
    ("state/exchange/dcp_folder.py", "Unpickler"),  # a checkpoint of another program's, by names that are allowed
    ("state/exchange/dcp_folder.py", "load"),  # with weights_only
}


def test_nothing_in_regrow_unpickles_or_sends_objects_by_torch() -> None:
    found = set()
    for path in PLATFORM.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                name = node.value.id
                if node.attr in OBJECTS or (name in ("pickle", "cloudpickle", "torch") and node.attr in UNPICKLING):
                    found.add((str(path.relative_to(PLATFORM)), node.attr))
            elif isinstance(node, ast.ImportFrom) and node.module in (
                "pickle",
                "cloudpickle",
                "torch",
                "ray.cloudpickle",
            ):
                found |= {
                    (str(path.relative_to(PLATFORM)), each.name) for each in node.names if each.name in UNPICKLING
                }
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.distributed"):
                found |= {(str(path.relative_to(PLATFORM)), each.name) for each in node.names if each.name in OBJECTS}
    assert found == KNOWN
