"""Properties of the pure half of checkpoints: what a box holds, who holds which, and what to read from where."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow.errors import CheckpointError
from regrow.plan.boxes import Box, Piece, chunk, common_runs
from regrow.plan.mesh import Coordinates, MeshShape
from regrow.plan.placement import TABLE, is_whole, num_copies, placed, that_hold
from regrow.state.checksums import CHUNK_BYTES
from regrow.state.reshard import Source, plan_reads, share, windows
from support.covering import covers

SHAPES = st.lists(st.integers(1, 7), min_size=1, max_size=4).map(tuple)
MESHES = st.builds(MeshShape, st.integers(1, 3), st.integers(1, 5), st.integers(1, 3))
NAMES = st.sampled_from(["norm.weight", "embed.weight", "layers.3.attention.wo.weight", "optim/exp_avg/output.weight"])


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    offsets, sizes = [], []
    for size in shape:
        offsets.append(draw(st.integers(0, size)))
        sizes.append(draw(st.integers(0, size - offsets[-1])))
    return Box("w", shape, tuple(offsets), tuple(sizes))


def elements(box: Box) -> np.ndarray:
    """The numbers that a box's elements have in the whole tensor, in the order of the box."""
    return np.arange(int(np.prod(box.shape))).reshape(box.shape)[box.slices].reshape(-1)


def ranks(mesh: MeshShape) -> list[Coordinates]:
    return [Coordinates(mesh, rank) for rank in range(mesh.world_size)]


@given(st.data(), SHAPES)
def test_the_intersection_of_boxes_holds_what_both_do(data: st.DataObject, shape: tuple[int, ...]) -> None:
    a, b = data.draw(boxes(shape)), data.draw(boxes(shape))
    both = a.intersection(b)
    assert sorted(np.intersect1d(elements(a), elements(b))) == ([] if both is None else sorted(elements(both)))


@given(st.data(), SHAPES)
def test_common_runs_are_what_two_pieces_have_in_common_each_element_once(
    data: st.DataObject, shape: tuple[int, ...]
) -> None:
    pieces = []
    for box in (data.draw(boxes(shape)), data.draw(boxes(shape))):
        start = data.draw(st.integers(0, box.num_elements))
        pieces.append(Piece(box, start, data.draw(st.integers(start, box.num_elements))))
    source, target = pieces
    runs, of_source, of_target = common_runs(source, target), elements(source.box), elements(target.box)
    got = []
    for first, at, length in zip(runs.source, runs.target, runs.length, strict=True):
        a, b = of_source[source.start + first :][:length], of_target[at : at + length]
        assert np.array_equal(a, b)
        assert source.start + first + length <= source.stop
        assert target.start <= at < at + length <= target.stop
        got += b.tolist()
    wanted = np.intersect1d(of_source[source.start : source.stop], of_target[target.start : target.stop])
    assert got == sorted(set(got)) == sorted(wanted)


@given(st.data(), SHAPES)
def test_boxes_cover_a_tensor_where_every_element_is_in_one(data: st.DataObject, shape: tuple[int, ...]) -> None:
    some = data.draw(st.lists(boxes(shape), max_size=6))
    if data.draw(st.booleans()):  # which chance seldom makes whole
        dim = data.draw(st.integers(0, len(shape) - 1))
        whole, at = Box.whole("w", shape), data.draw(st.integers(0, shape[dim]))
        some += [whole.narrow(dim, range(at)), whole.narrow(dim, range(at, shape[dim]))]
    held = {element for box in some for element in elements(box).tolist()}
    assert covers(some, shape) == (len(held) == np.prod(shape))


@given(SHAPES, st.integers(1, 300))
def test_slabs_are_the_box_in_order(shape: tuple[int, ...], most_bytes: int) -> None:
    box = Box.whole("w", shape)
    slabs = list(box.slabs(most_bytes))
    assert np.concatenate([elements(slab) for slab in slabs]).tolist() == elements(box).tolist()
    assert all(slab.num_bytes <= most_bytes or slab.sizes[0] == 1 for slab in slabs)


@given(st.integers(0, 300), st.integers(1, 40))
def test_chunks_hold_every_row_once_in_order(num_rows: int, count: int) -> None:
    assert [row for index in range(count) for row in chunk(num_rows, index, count)] == list(range(num_rows))


@given(NAMES, MESHES, st.integers(1, 12), st.integers(1, 12))
def test_a_mesh_holds_every_parameter_whole_and_each_of_its_elements_as_often(
    name: str, mesh: MeshShape, rows: int, columns: int
) -> None:
    whole = Box.whole(name, (rows * mesh.tp, columns * mesh.tp))
    held = [placed(whole, at) for at in ranks(mesh)]
    assert covers(held, whole.shape)
    counts = np.bincount(np.concatenate([elements(box) for box in held]))
    assert set(counts) == {num_copies(name, Coordinates(mesh))[1]}
    copies = [(placed(whole, at), num_copies(name, at)[0]) for at in ranks(mesh)]
    assert len({(box.offsets, box.sizes, copy) for box, copy in copies if box.num_elements}) == sum(
        box.num_elements > 0 for box, _ in copies
    )


@given(st.data(), NAMES, MESHES, st.integers(1, 6), st.integers(1, 6))
def test_those_that_hold_elements_of_a_box_are_found_in_closed_form(
    data: st.DataObject, name: str, mesh: MeshShape, rows: int, columns: int
) -> None:
    drawn = data.draw(boxes((rows * mesh.tp, columns * mesh.tp)))
    box = Box(name, drawn.shape, drawn.offsets, drawn.sizes)
    found = that_hold(box, mesh)
    for at in ranks(mesh):
        holds = placed(box, at).intersection(box) is not None
        assert holds == any(all(at.along(axis)[0] == k for axis, k in each.items()) for each in found)


def whole_in(mesh: MeshShape, some: list[Coordinates]) -> bool:
    return is_whole(mesh, np.array([at.rank for at in some], np.int64))


@given(MESHES, st.randoms())
def test_a_step_is_whole_where_every_parameter_is(mesh: MeshShape, random: object) -> None:
    some = [at for at in ranks(mesh) if random.random() < 0.8]  # type: ignore[attr-defined]
    shape = (mesh.dp_shard * mesh.tp * 2, mesh.dp_shard * mesh.tp)
    names = [row.pattern.replace("*", "0").replace("[qkv]", "q").replace("[13]", "1") for row in TABLE]
    wholes = [Box.whole(name, shape) for name in names]
    assert whole_in(mesh, some) == all(covers((placed(whole, at) for at in some), shape) for whole in wholes)


@given(MESHES, st.integers(2, 3), st.data())
def test_a_step_of_a_pipeline_is_whole_where_every_stage_is(mesh: MeshShape, pp: int, data: st.DataObject) -> None:
    staged = replace(mesh, pp=pp)
    lost = data.draw(st.sets(st.sampled_from(range(staged.world_size)), max_size=3))
    some = [at for at in ranks(staged) if at.rank not in lost]
    of_stages: list[list[Coordinates]] = [[] for _ in range(pp)]
    for at in some:
        stage, rank = divmod(at.rank, mesh.world_size)
        of_stages[stage].append(Coordinates(mesh, rank))
    assert whole_in(staged, some) == all(whole_in(mesh, each) for each in of_stages)
    for at in ranks(staged):
        assert num_copies("norm.weight", at) == num_copies("norm.weight", Coordinates(mesh, at.rank % mesh.world_size))


@given(st.integers(0, 20_000), st.integers(1, 9))
def test_replicas_share_every_element_once(num_elements: int, num_replicas: int) -> None:
    box = Box("w", (30_000,), (500,), (num_elements,))
    pieces = [share(box, replica, num_replicas) for replica in range(num_replicas)]
    assert [e for piece in pieces for e in range(piece.start, piece.stop)] == list(range(num_elements))


@given(NAMES, MESHES, MESHES, st.integers(1, 60), st.integers(1, 60), st.randoms(), st.integers(1, 4))
def test_resharding_reads_each_needed_element_once_from_a_file_that_holds_it(
    name: str, before: MeshShape, after: MeshShape, rows: int, columns: int, random: object, window_chunks: int
) -> None:
    whole = Box.whole(name, (rows * before.tp * after.tp, columns * before.tp * after.tp), "float64")
    have = [
        Source(f"file {at.rank}", share(placed(whole, at), *num_copies(name, at))) for at in ranks(before)
    ]  # of replicas and of those that hold the same each a part
    random.shuffle(have)  # type: ignore[attr-defined]
    wanted = [placed(whole, at) for at in ranks(after)]
    got = [np.full(box.num_elements, -1) for box in wanted]
    for read in plan_reads(have, [Piece.all_of(box) for box in wanted]):
        piece = read.source.piece
        stored = elements(piece.box)[piece.start : piece.stop]
        for window in windows(read, window_chunks * CHUNK_BYTES):
            data = stored[window.begin // 8 : window.end // 8]
            assert window.begin % CHUNK_BYTES == 0
            assert len(data) == (window.end - window.begin) // 8
            for first, at, length in zip(window.runs.source, window.runs.target, window.runs.length, strict=True):
                assert (got[read.want][at : at + length] == -1).all()
                got[read.want][at : at + length] = data[first : first + length]
    for box, values in zip(wanted, got, strict=True):
        assert np.array_equal(values, elements(box)), box


def test_bytes_read_are_those_needed_and_the_rest_of_their_first_and_last_chunks() -> None:
    whole = Box.whole("w", (4096, 1000))
    have = [Source(f"{k}", Piece.all_of(whole.narrow(0, chunk(4096, k, 4)))) for k in range(4)]
    reads = plan_reads(have, [Piece.all_of(whole.narrow(0, chunk(4096, 1, 3)))])
    read = sum(window.end - window.begin for each in reads for window in windows(each, 64 * CHUNK_BYTES))
    assert 0 <= read - reads[0].runs.num_elements * 4 - reads[1].runs.num_elements * 4 <= 4 * CHUNK_BYTES


def test_an_element_that_no_file_holds_is_named() -> None:
    box = Box.whole("w", (10,))
    have = [Source("a", Piece(box, 0, 4)), Source("b", Piece(box, 6, 10))]
    with pytest.raises(CheckpointError, match=r"no file holds elements of w\[0:10\]: 2 of 10 are missing"):
        plan_reads(have, [Piece.all_of(box)])
