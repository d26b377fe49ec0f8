"""benchmarks/checkpoint.py: what it counts and compares, without the minutes that it takes."""

import importlib.util
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    return load("checkpoint")


@pytest.fixture(scope="module")
def ranks(benchmark: ModuleType) -> ModuleType:
    return load("checkpoint_ranks")


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_bytes_are_counted_where_storage_is_read_in_folders_below_too(ranks: ModuleType, tmp_path: Path) -> None:
    storage = ranks.CountingStorage(tmp_path)
    (storage / "step").write_bytes("file", bytes(1000))
    assert (storage / "step").read_bytes("file") == bytes(1000)
    assert storage.read_range("step/file", 900, 500) == bytes(100)
    assert (storage / "step").read_into("file", 0, memoryview(bytearray(10))) == 10
    assert storage.counted == [1000, 100, 10]


def test_the_peers_bytes_are_counted_below_its_buffers(ranks: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(1_000_000))
    counting = ranks.peer.CountingFileSystem()
    with counting.create_stream(tmp_path / "file", "rb") as stream:
        stream.seek(500_000)
        stream.read(100_000)
        assert 100_000 <= counting.num_bytes <= 100_000 + 128 * 1024
    counting = ranks.peer.CountingFileSystem()
    with counting.create_stream(tmp_path / "file", "rb") as stream:
        assert len(stream.read()) == counting.num_bytes == 1_000_000


@pytest.mark.parametrize(("world_size", "num_nodes"), [(4, 2), (3, 2), (4, 1)])
def test_every_rank_has_a_place_and_every_place_knows_its_writers(
    ranks: ModuleType, world_size: int, num_nodes: int
) -> None:
    places = [ranks.Place(f"node-{number}", Path(f"/n{number}")) for number in range(num_nodes)]
    used = [ranks.place_of(rank, world_size, places) for rank in range(world_size)]
    assert used == sorted(used, key=lambda place: place.node)
    assert [ranks.writers_on(place, world_size, places) for place in places] == [used.count(place) for place in places]


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """The paths of sockets in it have to be below 108 bytes."""
    with tempfile.TemporaryDirectory(prefix="rgb", dir="/tmp") as folder:
        yield Path(folder)


@pytest.mark.long
@pytest.mark.parametrize("side", ["ours", "dcp_async_process"])
def test_a_side_saves_every_step_and_leaves_nothing_behind(
    benchmark: ModuleType, side: str, short_folder: Path
) -> None:
    settings = {"side": side, "model": "debug", "world_size": 2, "memory": str(short_folder)}
    settings |= {"step_s": 1.0, "num_steps": 2}
    result = benchmark.run_side(benchmark.SIDES, "steps", json.dumps(settings), timeout_s=250)
    assert len(result["plain_s"]) == len(result["saved_s"]) == 2
    assert result["whole_s"] > 0
    assert list(short_folder.iterdir()) == []
