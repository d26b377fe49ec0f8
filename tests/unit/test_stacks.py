"""A checkpoint of stacks without processes: every layout to every other, damage, and what restores read and ask for."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from regrow.errors import CheckpointError
from regrow.plan.boxes import Box
from regrow.plan.mesh import Coordinates, MeshShape
from regrow.plan.placement import placed, stage_of
from regrow.state.disk import gather, reading
from regrow.state.disk.catalog import open_checkpoint, step_folder, verify
from regrow.state.disk.format import COMMIT, Index
from regrow.state.disk.packed import PackedFiles
from regrow.state.disk.reading import Reader
from regrow.state.disk.stacks import parts_of
from regrow.state.disk.upload import write_index
from regrow.state.entries import Entry
from regrow.state.reshard import share
from regrow.storage import Storage
from support.counting import Counting

RUN = "0123456789abcdef"
OF = {"run_id": RUN, "generation": 1, "step": 1}
NAMES = {
    "embed.weight": (40, 16),
    **{
        f"layers.{layer}.{name}": shape
        for layer in (0, 1, 10)
        for name, shape in {
            "attention.wq.weight": (16, 16),
            "attention.wk.weight": (8, 16),
            "attention.wo.weight": (16, 16),
            "attention_norm.weight": (16,),
            "ffn.w1.weight": (24, 16),
            "ffn.w2.weight": (16, 24),
        }.items()
    },
    "norm.weight": (16,),
    "output.weight": (40, 16),
}
STATE = {
    f"{kind}/{name}": torch.randn(shape, generator=torch.Generator().manual_seed(number)).to(dtype)
    for kind, dtype in (("model", torch.float32), ("optim/exp_avg", torch.bfloat16))
    for number, (name, shape) in enumerate(NAMES.items())
}
BLOCKS = (2, 9)  # of two stages; block 10 is in the second
MESHES = {
    "one": MeshShape(1, 1),
    "fsdp 3": MeshShape(1, 3),
    "fsdp 5": MeshShape(1, 5),
    "hsdp 3x2": MeshShape(3, 2),
    "tp 2x2": MeshShape(1, 2, 2),
    "hsdp 2x2 tp 4": MeshShape(2, 2, 4),
    "pp 2 fsdp 2": MeshShape(1, 2, 1, 2, BLOCKS),
    "pp 2 hsdp 2 tp 2": MeshShape(2, 1, 2, 2, BLOCKS),
}


def boxes_of(at: Coordinates) -> list[Box]:
    """What a rank holds."""
    mesh, stage = at.mesh, at.along("pp")[0]
    wholes = [Box.whole(name, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in STATE.items()]
    return [placed(whole, at) for whole in wholes if stage_of(whole.name, mesh) == stage]


def entries_of(at: Coordinates, *, filled: bool) -> list[Entry]:
    found = []
    for box in boxes_of(at):
        memory = STATE[box.name][box.slices].clone().reshape(-1)
        found.append(Entry(box, memory if filled else torch.full_like(memory, float("nan"))))
    return found


def ranks(mesh: MeshShape) -> list[Coordinates]:
    return [Coordinates(mesh, rank) for rank in range(mesh.world_size)]


def written(folder: Storage, mesh: MeshShape) -> Index:
    """A committed checkpoint, by the ranks of a mesh one after another."""
    step, files = folder / step_folder(1), []
    for at in ranks(mesh):
        entries = entries_of(at, filled=True)
        boxes = [entry.box for entry in entries]
        if parts := parts_of(boxes, at):
            memory = {n: memoryview(e.memory.view(torch.uint8).numpy().data) for n, e in enumerate(entries)}
            memory = {n: memory[n] for part in parts for n in part.members}
            file = gather.write_parts(step, f"g000001-{at.rank:08x}-0.safetensors", parts, boxes, memory, **OF)
            gather.read_back(step, file)
            files.append(file)
    tensors = {n: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in sorted(STATE.items())}
    index = Index(RUN, 1, 1, {"step": 1}, tensors, tuple(files))
    step.write_bytes(COMMIT, write_index(step, index, PackedFiles.of({"": files})))
    return open_checkpoint(folder, 1)


def restored(folder: Storage, index: Index, at: Coordinates) -> tuple[list[Entry], int]:
    entries = entries_of(at, filled=False)
    want = [(share(entry.box, *at.along("dp_replicate")), entry.memory) for entry in entries]
    return entries, Reader(folder / step_folder(1), index).read(want)


def assert_shares(entries: Sequence[Entry], at: Coordinates) -> None:
    """What a rank reads is that of the state, and nothing else was touched."""
    for entry in entries:
        piece, whole = share(entry.box, *at.along("dp_replicate")), STATE[entry.box.name][entry.box.slices].reshape(-1)
        assert torch.equal(entry.memory[piece.start : piece.stop], whole[piece.start : piece.stop]), entry.box
        assert entry.memory[: piece.start].isnan().all()
        assert entry.memory[piece.stop :].isnan().all()


@pytest.mark.parametrize(
    ("before", "chunk_bytes"), [("fsdp 5", 128 << 10), ("hsdp 2x2 tp 4", 128 << 10), *((each, 64) for each in MESHES)]
)
def test_state_of_any_layout_is_read_into_any_other_with_the_same_bits(
    tmp_path: Path, before: str, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("gather", "metadata", "reading", "format", "catalog"):
        monkeypatch.setattr(f"regrow.state.disk.{module}.STORED_CHUNK_BYTES", chunk_bytes)
    if chunk_bytes < 128 << 10:  # as large models have it: many pieces, requests, blocks and fences
        monkeypatch.setattr(gather, "PIECE_BYTES", 8 * chunk_bytes)
        monkeypatch.setattr(reading, "READ_BYTES", 16 * chunk_bytes)
        monkeypatch.setattr("regrow.state.disk.metadata.BLOCK_BYTES", 256)
        monkeypatch.setattr("regrow.state.disk.metadata.FENCE", 2)
    folder = Storage.at(tmp_path)
    index = written(folder, MESHES[before])
    assert sum(f.num_bytes - f.header_bytes for f in index.files) == sum(t.nbytes for t in STATE.values())
    seen: list[int] = []
    verify(folder, index, seen.append)
    assert sum(seen) == index.tensor_bytes
    for after, mesh in MESHES.items():
        for at in random.Random(0).sample(ranks(mesh), min(3, mesh.world_size)):
            entries, num_bytes = restored(folder, index, at)
            assert_shares(entries, at)
            if before == after == "fsdp 5" and chunk_bytes == 64:
                assert num_bytes == sum(entry.memory.nbytes for entry in entries)


def test_a_rank_asks_for_metadata_and_its_rows_and_for_no_header() -> None:
    folder = Counting.empty()
    index = written(folder, MESHES["fsdp 5"])
    step, at = folder / step_folder(1), Coordinates(MESHES["fsdp 3"], 1)
    counted = Counting(folder.fs, step.root, step.uri)  # type: ignore[attr-defined]
    reader = Reader(counted, index)
    pieces = [share(box, 0, 1) for box in boxes_of(at)]
    requests, _ = reader.plan(pieces)
    reader.checksums_of(requests)
    counted.taken()
    memory = [torch.empty(piece.box.num_elements, dtype=getattr(torch, piece.box.dtype)) for piece in pieces]
    assert reader.read(list(zip(pieces, memory, strict=True))) == sum(request.num_bytes for request in requests)
    asked, num_bytes = counted.taken()
    assert asked - len(requests) == 2, "spans, checksums: one block holds them"
    assert num_bytes - sum(request.num_bytes for request in requests) < 2 * 64 * 1024
    heads = {file.name: file.header_bytes for file in index.files}
    assert all(request.offset >= heads[request.file] for request in requests)


def test_a_flipped_bit_a_truncation_and_a_missing_file_are_one_line_that_names_the_file(tmp_path: Path) -> None:
    folder = Storage.at(tmp_path)
    written(folder, MESHES["fsdp 3"])
    dice, places = random.Random(0), sorted((tmp_path / step_folder(1)).iterdir())
    assert [path.suffix for path in places if path.name != COMMIT].count(".metadata") == 1
    for trial in range(60):
        path = places[trial % len(places)]
        pristine, kind = path.read_bytes(), dice.choice(["flip", "truncate", "delete"])
        data = bytearray(pristine)
        if kind == "flip":
            begin = 8 + int.from_bytes(data[:8], "little") if path.suffix == ".safetensors" else 0  # not for restores
            data[dice.randrange(begin, len(data))] ^= 1 << dice.randrange(8)
        else:
            del data[dice.randrange(len(data) // 2) :]
        path.unlink() if kind == "delete" else path.write_bytes(data)
        with pytest.raises(CheckpointError) as raised:
            restored(folder, open_checkpoint(folder, 1, with_files=False), Coordinates(MESHES["one"]))
        assert path.name == COMMIT or path.name in str(raised.value), (kind, path.name)
        assert "\n" not in str(raised.value)
        path.write_bytes(pristine)
    restored(folder, open_checkpoint(folder, 1), Coordinates(MESHES["one"]))


def test_files_that_do_not_hold_every_element_once_are_no_checkpoint(tmp_path: Path) -> None:
    folder = Storage.at(tmp_path)
    files, step = written(folder, MESHES["one"]), folder / step_folder(1)
    assert files.files[0].content is None, "a list that was read has no spans"
    made = [written(Storage.at(tmp_path / str(n)), mesh) for n, mesh in enumerate([MESHES["fsdp 3"]])]
    assert len(made[0].files) == 3
    entries = entries_of(Coordinates(MESHES["fsdp 3"], 0), filled=True)
    boxes = [entry.box for entry in entries]
    parts = parts_of(boxes, Coordinates(MESHES["fsdp 3"], 0))
    memory = {n: memoryview(e.memory.view(torch.uint8).numpy().data) for n, e in enumerate(entries)}
    file = gather.write_parts(step, "part.safetensors", parts, boxes, memory, **OF)
    with pytest.raises(CheckpointError, match=r"do not hold every element of .* once"):
        write_index(step, Index(RUN, 1, 1, {"step": 1}, made[0].tensors, ()), PackedFiles.of({"": [file]}))
