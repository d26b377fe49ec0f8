"""What is wrong with one rank is that one's error; the others have another, and go on without it."""

from pathlib import Path

import pytest
import torch.distributed as dist

from regrow.errors import RegrowError
from regrow.state.collective import PeerError, on_first_rank_or_each
from regrow.state.entries import Progress
from regrow.train.callback import Called
from support.gloo import run_ranks
from support.reducing import Reducing


def read(folders: list[str]) -> tuple[str, str]:
    """Each rank its own host's view of a file."""
    folder = Path(folders[dist.get_rank()])
    try:
        return "", on_first_rank_or_each(lambda: (folder / "steps").read_text())
    except (RegrowError, PeerError) as error:
        return type(error).__name__, str(error)


@pytest.mark.parametrize("broken", [(), (1,), (0,), (0, 2), (0, 1, 2)])
def test_an_error_is_raised_where_it_is(broken: tuple[int, ...], tmp_path: Path) -> None:
    for rank in {0, 1, 2} - set(broken):
        (tmp_path / str(rank)).mkdir()
        (tmp_path / str(rank) / "steps").write_text("60")
    found = run_ranks(read, 3, [str(tmp_path / str(rank)) for rank in range(3)])
    if 0 not in broken:
        assert found == [("", "60")] * 3, "what rank 0 reads is every rank's"
        return
    kinds = ["RegrowError" if rank in broken else "PeerError" for rank in range(3)]
    assert [kind for kind, _ in found] == kinds
    assert all("No such file" in said for _, said in found)


def reduce_without_a_peer(hides: bool) -> str:
    """What each rank's callback raises, where the second one has left."""
    Reducing.group, Reducing.hides = dist.new_group(), hides
    called = Called("support.reducing:Reducing", Progress())
    called.after_step({})
    if dist.get_rank() == 1:
        dist.destroy_process_group(Reducing.group)
        return ""
    try:
        called.after_step({})
    except Exception as error:
        return type(error).__name__
    return "nothing"


@pytest.mark.parametrize("hides", [False, True])
def test_a_callback_whose_collective_fails_meets_the_groups_end_and_is_no_trouble_of_its_rank(hides: bool) -> None:
    """Nothing has told this rank that its group is over, yet: it hears of the peer first."""
    assert run_ranks(reduce_without_a_peer, 2, hides) == ["ValueError" if hides else "RuntimeError", ""]
