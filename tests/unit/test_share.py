"""Which tokens of a row each rank of context parallelism has."""

from hypothesis import given
from hypothesis import strategies as st

from regrow.plan.mesh import MeshShape
from regrow.plan.share import WHOLE, Share


@given(cp=st.integers(1, 32), chunk=st.integers(1, 64))
def test_ranks_have_every_token_once_in_order_and_equal_work(cp: int, chunk: int) -> None:
    seq_len = 2 * cp * chunk
    shares = [Share(rank, cp) for rank in range(cp)]
    had = [[token for each in share.chunks(seq_len) for token in each] for share in shares]
    assert sorted(token for tokens in had for token in tokens) == list(range(seq_len))
    assert all(tokens == sorted(tokens) and len(tokens) == 2 * chunk for tokens in had)
    seen = [sum(token + 1 for token in tokens) for tokens in had]
    assert seen == [share.num_pairs(seq_len) for share in shares] == [seq_len * (seq_len + 1) // 2 // cp] * cp


def test_alone_a_rank_has_rows_of_any_length_whole() -> None:
    assert WHOLE.chunks(7) == (range(7),)


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.integers(1, 3))
def test_a_unit_has_each_share_once_of_each_stage_and_part(
    pp: int, replicas: int, units: int, cp: int, tp: int
) -> None:
    mesh = MeshShape(replicas, units * cp, tp, pp, (1,) * pp, cp)
    assert mesh.num_units == replicas * units
    sizes = list(mesh.sizes.values())
    product = 1
    for size in sizes:
        product *= size
    assert product == mesh.world_size
    places: dict[int, list[tuple[int, int, int]]] = {}
    for rank in range(mesh.world_size):
        stage, part = rank * pp // mesh.world_size, rank % tp
        assert mesh.share_of(rank).cp == cp
        places.setdefault(mesh.unit_of(rank), []).append((stage, mesh.share_of(rank).rank, part))
    every = [(stage, share, part) for stage in range(pp) for share in range(cp) for part in range(tp)]
    assert places == dict.fromkeys(range(mesh.num_units), every)
