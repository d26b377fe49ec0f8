"""Preparation as Ray tasks writes the same bytes as in one process, and killed at any time it goes on."""

import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
from jobs import prepare_data

from regrow.config.plain import pretrain_config
from regrow.config.schema import ClusterConfig, DataConfig
from regrow.data.prepare import distribute
from regrow.data.prepare import prepare as prepare_module
from regrow.data.prepare.distribute import on_ray
from regrow.data.prepare.documents import load_recipe
from regrow.data.prepare.prepare import prepare
from regrow.data.prepare.tokenizer import train_tokenizer
from regrow.data.read.manifest import Manifest
from regrow.errors import DataError
from regrow.progress import Task
from regrow.runtime import cluster as cluster_module
from regrow.runtime.cluster import Connection, check_room

ROOT = Path(__file__).parents[2]
NUM_FILES = 24
SETTINGS = {"vocab_size": 512, "seq_len": 32, "validation_fraction": 0.1, "rows_per_group": 8, "rows_per_shard": 256}


def quiet(stage: str, done: float, total: float) -> None:
    pass


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    rng, folder = random.Random(0), tmp_path_factory.mktemp("source")
    words = [f"w{number}" for number in range(300)]
    for number in range(NUM_FILES):
        texts = [" ".join(rng.choices(words, k=rng.randrange(20, 2000))) for _ in range(60)]
        pq.write_table(pa.table({"text": texts}), folder / f"{number:03d}.parquet")
    (folder / "torn.parquet").write_bytes(b"PAR1")
    tokenizer = folder / "tokenizer.json"
    train_tokenizer(words, vocab_size=512).save(str(tokenizer))
    return DataConfig(recipe="fineweb_edu", source=str(folder), tokenizer=str(tokenizer), **SETTINGS)


@pytest.fixture(scope="module")
def expected(config: DataConfig, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("expected") / "corpus"
    prepare(config, load_recipe(config.recipe), folder, progress=quiet)
    return read_files(folder)


def read_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A Ray of two CPUs."""
    temporary = tempfile.mkdtemp(prefix="rg", dir="/tmp")  # socket paths below it have to stay short
    ray.init(address="local", num_cpus=2, include_dashboard=False, logging_level=logging.ERROR, _temp_dir=temporary)
    yield
    ray.shutdown()
    shutil.rmtree(temporary, ignore_errors=True)


@pytest.mark.usefixtures("cluster")
def test_ray_tasks_write_the_same_bytes_and_raise_the_same_errors(
    config: DataConfig, expected: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare_module, "LOCAL_BYTES", 0)
    seen: list[tuple[Task, float, float]] = []
    recipe = load_recipe(config.recipe)
    prepare(config, recipe, tmp_path / "out", progress=lambda *update: seen.append(update), distribute=on_ray)
    assert read_files(tmp_path / "out") == expected
    shares = [done / total for stage, done, total in seen if stage.name == "tokenizing"]
    assert len(shares) == NUM_FILES + 2  # the start, and every piece
    assert shares == sorted(shares)

    def refuse(number: int) -> int:
        raise DataError(f"number {number}")

    with pytest.raises(DataError, match="number 7"):
        list(on_ray(refuse, [7]))


@pytest.mark.usefixtures("cluster")
def test_a_cluster_needs_no_gpus_for_preparing(
    config: DataConfig,
    expected: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Before, it was refused where it had no room for training, though all work is tasks of one CPU."""

    @contextmanager
    def running(config: ClusterConfig) -> Iterator[Connection]:
        check_room(config)
        yield Connection("", "")

    monkeypatch.setattr(prepare_module, "LOCAL_BYTES", 0)
    monkeypatch.setattr(cluster_module, "cluster_for", running)
    run = pretrain_config(["+cluster=h100x64"])
    prepare_data.main(replace(run, data=config, run=replace(run.run, storage_path=str(tmp_path))))
    folder = Path(capsys.readouterr().out.splitlines()[0])
    assert read_files(folder).keys() == expected.keys()


@pytest.mark.usefixtures("cluster")
def test_a_piece_whose_processes_die_is_made_after_the_others_and_named_in_the_end(
    config: DataConfig, expected: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, it was tried for ever, in silence: as where a node has too little memory for it."""
    monkeypatch.setattr(prepare_module, "LOCAL_BYTES", 0)
    monkeypatch.setattr(distribute, "MOST_DEATHS", 2)
    recipe, deaths = load_recipe(config.recipe), tmp_path / "deaths"
    made: list[int] = []

    def deadly(function: Callable[[int], Any], numbers: Sequence[int]) -> Iterator[Any]:
        def call(number: int) -> Any:
            if number == 7:
                with deaths.open("ab") as file:
                    file.write(b".")
                os.kill(os.getpid(), signal.SIGKILL)
            return function(number)

        return counted(call, numbers)

    def counted(function: Callable[[int], Any], numbers: Sequence[int]) -> Iterator[Any]:
        for result in on_ray(function, numbers):
            made.append(result[0])
            yield result

    with pytest.raises(DataError, match=r"stopped at 007\.parquet\[0:1\]: 2 processes died of it, or beside it \(the"):
        prepare(config, recipe, tmp_path / "out", progress=quiet, distribute=deadly)
    assert deaths.read_bytes() == b".."
    assert sorted(made) == [number for number in range(NUM_FILES + 1) if number != 7]
    prepare(config, recipe, tmp_path / "out", progress=quiet, distribute=counted)
    assert read_files(tmp_path / "out") == expected
    assert made[NUM_FILES] == 7, "the others are not made again"


@pytest.mark.parametrize("num_kills", [4, pytest.param(20, marks=pytest.mark.long)])
@pytest.mark.timeout(900)  # each time it is killed, it is a process that imports everything anew
def test_killed_at_any_moment_it_goes_on_and_ends_with_the_same_bytes(
    config: DataConfig, expected: dict[str, bytes], tmp_path: Path, num_kills: int
) -> None:
    rng = random.Random(num_kills)
    overrides = [f"data.{key}={value}" for key, value in SETTINGS.items()]
    command = [
        *(sys.executable, "-m", "jobs.prepare_data", "data=fineweb_edu", f"run.storage_path={tmp_path}"),
        *(f"data.source={config.source}", f"data.tokenizer={config.tokenizer}", "model.vocab_size=512", *overrides),
    ]
    kills, mid_way = 0, 0
    while kills < num_kills:
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert process.stdout is not None
        process.stdout.readline()  # it is at work
        pieces = num_pieces(tmp_path) + rng.randrange(4)
        while process.poll() is None and num_pieces(tmp_path) < pieces:
            time.sleep(0.001)
        time.sleep(rng.uniform(0.0, 0.1))
        process.send_signal(signal.SIGKILL)
        output = process.communicate(timeout=60)[0]
        assert process.returncode in (0, -signal.SIGKILL), output
        kills += process.returncode != 0
        mid_way += num_pieces(tmp_path) > 0
        if process.returncode == 0:  # it was quicker than the kills: begin again
            assert corpus_of(tmp_path) == expected
            shutil.rmtree(tmp_path / "data")
    assert mid_way > num_kills // 4
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    assert corpus_of(tmp_path) == expected
    assert "left out, cannot be read: torn.parquet: " in done.stdout


def num_pieces(storage: Path) -> int:
    """Of the corpus in the making, those that are done."""
    return len(list(storage.glob("data/.*.building/spool/*.json")))


def corpus_of(storage: Path) -> dict[str, bytes]:
    (folder,) = [path.parent for path in storage.glob("data/fineweb_edu-*/manifest.json")]
    Manifest.load(folder)
    return read_files(folder)
