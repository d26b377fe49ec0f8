"""The token stream on real raylets: exactly the batches of the order at every world size, whatever breaks."""

import gc
import itertools
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from regrow.config.schema import DataConfig, OptimConfig, PretrainConfig
from regrow.data.read.batch import direct_batches, layout_of
from regrow.data.read.corpora import Corpora, order_of
from regrow.data.stream.actor import KEPT_BACK, start_stream, stop_stream
from regrow.data.stream.client import assemble, ways_to_ask
from regrow.data.stream.dataset import block_of, window_table
from regrow.errors import GroupOver
from regrow.plan.batch import plan_batch
from support.corpus import write_rows
from support.streaming import consume_batches

CONFIG = PretrainConfig(
    data=DataConfig(seq_len=64, rows_per_group=8, rows_per_shard=64, window_steps=4, prefetch_windows=2),
    optim=OptimConfig(global_batch_seqs=24, num_slices=12),
)
LAYOUT = layout_of(CONFIG)
NUM_ROWS = 301  # 12.5 global batches an epoch: windows straddle epochs


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    write_rows(folder, num_rows=NUM_ROWS, seq_len=64)
    return folder


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    temporary = tempfile.mkdtemp(prefix="rg", dir="/tmp")  # socket paths below it have to stay short
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        logging_level=logging.ERROR,
        _temp_dir=temporary,
    )
    yield
    ray.shutdown()
    shutil.rmtree(temporary, ignore_errors=True)


@pytest.fixture
def stream(data_dir: Path) -> Iterator[Any]:
    actor = start_stream(CONFIG, Corpora.at(data_dir), start_step=0, stop_step=400)
    yield actor
    stop_stream(actor)


@ray.remote(num_cpus=0)
def consume(
    stream: Any,
    data_dir: Path,
    slices: range,
    start_step: int,
    stop_step: int,
    step_s: float = 0.0,
    fetcher: Any = None,
    slices_on_node: Sequence[range] = (),
) -> tuple[list[int], list[tuple[int, str]]]:
    """A rank: the digests of its parts, and the windows that it had to read directly."""
    ways = ways_to_ask(stream, fetcher, LAYOUT, group=start_step, slices_on_node=slices_on_node)
    steps = range(start_step, stop_step)
    return consume_batches(CONFIG, Corpora.at(data_dir), ways, slices, steps, step_s=step_s)


def expected_digests(data_dir: Path, start_step: int, stop_step: int) -> list[int]:
    corpora = Corpora.at(data_dir)
    reader, order = corpora.reader("train"), order_of(CONFIG, corpora)
    return [
        batch.digest()
        for batch in direct_batches(order, reader, LAYOUT, slices=range(12), start_step=start_step, stop_step=stop_step)
    ]


def group(
    stream: Any,
    data_dir: Path,
    world_size: int,
    start_step: int,
    stop_step: int,
    step_s: float = 0.0,
    fetcher: Any = None,
) -> tuple[list[int], list[tuple[int, str]]]:
    """A worker group's run, with a fetcher all on its node: digests of its global batches, and all fallbacks."""
    parts = plan_batch(num_slices=12, world_size=world_size).ranges
    ranks = ray.get(
        [consume.remote(stream, data_dir, part, start_step, stop_step, step_s, fetcher, parts[::-1]) for part in parts]
    )
    digests = [sum(part) % 2**64 for part in zip(*(digests for digests, _ in ranks), strict=True)]
    return digests, [fallback for _, fallbacks in ranks for fallback in fallbacks]


def test_groups_of_2_3_1_and_4_ranks_get_the_batches_of_the_order_from_any_cursor(stream: Any, data_dir: Path) -> None:
    """On through epochs, with a rollback past what the stream keeps, a jump ahead and cursors inside windows."""
    runs = [(2, 0, 30), (3, 30, 53), (1, 10, 21), (4, 50, 70), (2, 301, 320), (3, 2, 9)]
    for world_size, start_step, stop_step in runs:
        digests, fallbacks = group(stream, data_dir, world_size, start_step, stop_step)
        assert digests == expected_digests(data_dir, start_step, stop_step), (world_size, start_step)
        assert fallbacks == [], (world_size, start_step)
    counts = ray.get(stream.status.remote())
    assert counts["finished"] == counts["restarts"] == 0  # one Dataset served them all


def test_what_ray_keeps_of_each_block_goes_with_the_dataset_that_made_it(data_dir: Path) -> None:
    """One Dataset for all of a run kept 1 kB for every block, until its node had no memory."""
    actor = start_stream(CONFIG, Corpora.at(data_dir), start_step=0, stop_step=400, dataset_blocks=60)  # 5 windows
    for start_step, stop_step in [(0, 110), (50, 90)]:  # 28 windows, and 10 of them again
        digests, fallbacks = group(actor, data_dir, 2, start_step, stop_step)
        assert digests == expected_digests(data_dir, start_step, stop_step)
        assert fallbacks == []
    counts = ray.get(actor.status.remote())
    assert counts["windows"] >= 38
    assert counts["windows"] // 5 - 1 <= counts["finished"] <= counts["windows"] // 5  # the last one may be ending
    assert counts["restarts"] == 0
    held = ray.get(actor.__ray_call__.remote(lambda stream: _num_block_stats()))
    assert held <= 2 * 5 * (LAYOUT.num_blocks + 1) + 8  # of two Datasets: one that ends, and the next
    stop_stream(actor)


def _num_block_stats() -> int:
    from ray.data.block import BlockStats

    gc.collect()
    return sum(issubclass(type(each), BlockStats) for each in gc.get_objects())


def test_ranks_of_a_node_ask_once_for_all_of_them(stream: Any, data_dir: Path) -> None:
    fetcher = ray.get(stream.fetcher.remote(ray.get_runtime_context().get_node_id()))
    for start_step, stop_step in [(0, 26), (8, 14), (26, 40)]:  # the second group has gone back
        digests, fallbacks = group(stream, data_dir, 4, start_step, stop_step, fetcher=fetcher)
        assert digests == expected_digests(data_dir, start_step, stop_step)
        assert fallbacks == []
    counts = ray.get(stream.status.remote())
    assert counts["asked"] == 7 + 2 + 4  # windows: not times four ranks


def test_a_fetcher_that_dies_is_gone_around(stream: Any, data_dir: Path) -> None:
    fetcher = ray.get(stream.fetcher.remote(ray.get_runtime_context().get_node_id()))
    assert group(stream, data_dir, 4, 0, 8, fetcher=fetcher)[1] == []
    ray.kill(fetcher, no_restart=True)
    digests, fallbacks = group(stream, data_dir, 4, 8, 48, 0.2, fetcher)
    assert digests == expected_digests(data_dir, 8, 48)
    assert len([window for window, _ in fallbacks if window == 2]) == 4
    assert not [window for window, _ in fallbacks if window == 11]  # the stream itself has been asked since


def test_the_stream_does_not_run_ahead_of_training(stream: Any, data_dir: Path) -> None:
    group(stream, data_dir, 2, 0, 8)
    time.sleep(2)
    status = ray.get(stream.status.remote())
    prefetch = CONFIG.data.prefetch_windows
    assert status["windows"] <= 2 + prefetch
    assert len(status["kept"]) <= KEPT_BACK + 2 + prefetch
    before = status["cpu_s"]
    time.sleep(2)
    assert (ray.get(stream.status.remote())["cpu_s"] - before) / 2 < 0.25  # it waits, it does not spin


def test_a_stream_that_is_gone_midway_is_replaced_by_direct_reads(stream: Any, data_dir: Path) -> None:
    slices = plan_batch(num_slices=12, world_size=2).ranges
    ranks = [consume.remote(stream, data_dir, part, 0, 40, 0.1) for part in slices]
    while ray.get(stream.status.remote())["newest"] < 3:
        time.sleep(0.05)
    ray.kill(stream, no_restart=True)
    begun = time.monotonic()
    parts = ray.get(ranks)
    assert time.monotonic() - begun < 20  # 32 steps of 0.1 s: nobody sat out a timeout
    digests = [sum(pair) % 2**64 for pair in zip(*(digests for digests, _ in parts), strict=True)]
    assert digests == expected_digests(data_dir, 0, 40)
    assert all(fallbacks and min(window for window, _ in fallbacks) >= 2 for _, fallbacks in parts)


def test_a_stream_that_dies_comes_back_where_training_is(stream: Any, data_dir: Path) -> None:
    assert group(stream, data_dir, 2, 40, 44)[1] == []
    ray.kill(stream, no_restart=False)
    digests, _ = group(stream, data_dir, 2, 44, 60)
    assert digests == expected_digests(data_dir, 44, 60)
    deadline = time.monotonic() + 60
    step = 60
    while True:  # sooner or later a window is served again
        digests, fallbacks = group(stream, data_dir, 2, step, step + 4)
        assert digests == expected_digests(data_dir, step, step + 4)
        if not fallbacks:
            break
        assert time.monotonic() < deadline, fallbacks
        step += 4


def test_a_task_that_hangs_costs_some_windows_and_not_the_stream(data_dir: Path, tmp_path: Path) -> None:
    """As on a node whose mount is dead, here a shard that nothing writes: before, all ranks read directly for good."""
    mounted = shutil.copytree(data_dir, tmp_path / "mounted")
    shard, away = mounted / "train-00000.parquet", tmp_path / "away"
    shard.rename(away)
    os.mkfifo(shard)
    config = replace(CONFIG, data=replace(CONFIG.data, stall_timeout_s=0.5))
    actor = start_stream(config, Corpora.at(mounted), start_step=0, stop_step=4000)
    step, deadline, is_back, fallbacks = 0, time.monotonic() + 120, False, [(0, "")]
    while not is_back or fallbacks:
        digests, fallbacks = in_process(actor, data_dir, step, step + 4, stall_timeout_s=0.5)
        assert digests == expected_digests(data_dir, step, step + 4)
        step += 4
        if not is_back and ray.get(actor.status.remote())["restarts"]:
            away.replace(shard)
            is_back = True
        assert time.monotonic() < deadline, fallbacks
    stop_stream(actor)


def test_a_stopped_stream_leaves_no_task_behind(data_dir: Path) -> None:
    actor = start_stream(CONFIG, Corpora.at(data_dir), start_step=0, stop_step=400)
    assert in_process(actor, data_dir, 0, 8, stall_timeout_s=60.0)[1] == []
    ray.get(actor.stop.remote(), timeout=10)
    counts = ray.get(actor.status.remote())
    assert counts["finished"] == counts["restarts"] == 0
    stop_stream(actor)
    stop_stream(actor)  # of one that is dead already: nothing
    assert in_process(actor, data_dir, 8, 16, stall_timeout_s=60.0)[0] == expected_digests(data_dir, 8, 16)


def test_without_a_cpu_for_its_tasks_ranks_read_directly_after_one_timeout(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(CONFIG, data=replace(CONFIG.data, stream_cpus=1000.0))
    actor = start_stream(config, Corpora.at(data_dir), start_step=0, stop_step=100)
    begun = time.monotonic()
    digests, fallbacks = in_process(actor, data_dir, 0, 24, stall_timeout_s=2.0)
    assert time.monotonic() - begun < 8
    assert digests == expected_digests(data_dir, 0, 24)
    assert [window for window, _ in fallbacks] == [0, 1, 2, 3, 4, 5]
    assert "nothing for 2 s" in fallbacks[0][1]
    ray.kill(actor, no_restart=True)  # its task would wait for ever


def in_process(
    stream: Any, data_dir: Path, start_step: int, stop_step: int, *, stall_timeout_s: float, has_fed: bool = False
) -> tuple[list[int], list[tuple[int, str]]]:
    steps, patience = range(start_step, stop_step), {"stall_timeout_s": stall_timeout_s, "has_fed": has_fed}
    return consume_batches(CONFIG, Corpora.at(data_dir), [stream.get.remote], range(12), steps, **patience)


@ray.remote(num_cpus=0)
def _never() -> None:
    time.sleep(600)


@ray.remote(num_cpus=0)
class FaultyStream:
    """Delivers windows like the real one, but for what goes wrong at each."""

    def __init__(self, data_dir: Path, faults: dict[int, str]) -> None:
        corpora, self.faults = Corpora.at(data_dir), faults
        self.reader, self.order = corpora.reader("train"), order_of(CONFIG, corpora)

    def get(self, window: int, blocks: list[int], seek: bool, timeout_s: float) -> list[Any] | None:
        fault = self.faults.get(window)
        if fault == "refuse":
            return None
        if fault == "raise":
            raise RuntimeError("out of order")
        if fault == "hang":
            time.sleep(8)
        if fault == "never":  # its blocks are on their way, and never come
            return [_never.remote() for _ in blocks]
        table = window_table(window + (fault == "lie"), self.order, self.reader, LAYOUT)
        references = [ray.put(table.slice(k, 1)) for k in blocks]
        if fault == "lose":
            ray._private.internal_api.free(references)
        if fault == "cut":
            return references[:-1]
        return references


def faulty_stream(data_dir: Path, faults: dict[int, str]) -> Any:
    """One that is up: how long that takes is no fault."""
    actor = FaultyStream.remote(data_dir, faults)
    ray.get(actor.__ray_ready__.remote())
    return actor


def test_every_way_to_fail_costs_one_window_and_changes_no_batch(data_dir: Path) -> None:
    faults = {1: "refuse", 3: "raise", 5: "lie", 7: "lose", 9: "cut", 11: "hang"}
    actor = faulty_stream(data_dir, faults)
    digests, fallbacks = in_process(actor, data_dir, 0, 52, stall_timeout_s=4.0)
    assert digests == expected_digests(data_dir, 0, 52)
    reasons = dict(fallbacks)
    assert set(faults) <= set(reasons)
    assert set(reasons) - set(faults) <= {window + 1 for window in faults} | {window + 2 for window in faults}


def test_what_was_wrong_with_a_window_is_told(data_dir: Path) -> None:
    """Each fault meets a rank that has just begun: one that had to read directly before waits for less."""
    told = {
        1: ("refuse", "does not hold"),
        3: ("raise", "out of order"),
        5: ("lie", "other positions"),
        9: ("cut", "other positions"),
        11: ("hang", "nothing for 4 s"),
    }
    actor = faulty_stream(data_dir, {window: fault for window, (fault, _) in told.items()})
    for window, (_, reason) in told.items():
        start = window * LAYOUT.window_steps
        digests, fallbacks = in_process(actor, data_dir, start, start + 1, stall_timeout_s=4.0)
        assert digests == expected_digests(data_dir, start, start + 1)
        assert [number for number, _ in fallbacks] == [window]
        assert reason in fallbacks[0][1]


def test_a_group_that_goes_on_does_not_wait_long_for_a_window_that_a_lost_node_had(data_dir: Path) -> None:
    actor = faulty_stream(data_dir, {2: "hang"})
    digests, fallbacks = in_process(actor, data_dir, 10, 24, stall_timeout_s=60.0, has_fed=True)
    assert digests == expected_digests(data_dir, 10, 24)
    assert fallbacks[0] == (2, "TimeoutError: the stream delivered nothing for 1 s")


@pytest.mark.parametrize("fault", ["hang", "never"])
def test_a_window_is_not_waited_for_in_a_group_that_is_over(data_dir: Path, fault: str) -> None:
    """A rank that waited for what a lost node had kept the others from going on without that node, for 20 s."""
    actor, trained = faulty_stream(data_dir, {1: fault}), dict[int, float]()
    with pytest.raises(GroupOver):
        consume_batches(
            *(CONFIG, Corpora.at(data_dir), [actor.get.remote], range(12), range(0, 24)),
            seen=lambda step, digest: trained.update({step: time.monotonic()}),
            is_over=lambda: 3 in trained and time.monotonic() > trained[3] + 1.0,  # the next window is waited for
        )
    assert list(trained) == [0, 1, 2, 3]
    ray.kill(actor)


def test_a_rank_does_not_import_ray_data(stream: Any, data_dir: Path) -> None:
    @ray.remote(num_cpus=0)
    def imported() -> bool:
        import sys

        in_process(stream, data_dir, 0, 4, stall_timeout_s=60.0)
        return "ray.data" in sys.modules

    assert not ray.get(imported.options(runtime_env={"env_vars": {"FRESH": "1"}}).remote())


@pytest.mark.parametrize("most_blocks", [1, 5, 12, 100])
def test_blocks_of_a_window_hold_its_steps_in_order(
    data_dir: Path, most_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("regrow.data.read.batch.MOST_BLOCKS", most_blocks)
    corpora = Corpora.at(data_dir)
    reader, order = corpora.reader("train"), order_of(CONFIG, corpora)
    table = window_table(3, order, reader, LAYOUT)
    assert len(table) == LAYOUT.num_blocks == min(12, most_blocks)
    blocks = [block_of(table.slice(k, 1)) for k in range(len(table))]
    for step, slices in itertools.product(range(12, 16), [range(2, 5), range(12), range(11, 12)]):
        mine = [blocks[k] for k in LAYOUT.blocks_of(slices)]
        batch = assemble(mine, LAYOUT, step, slices)
        assert np.array_equal(batch.positions, LAYOUT.positions(step, slices))
        assert np.array_equal(batch.rows, reader.read(order.locate(batch.positions)))
