"""Tickets of the stream's actor, and how ranks ask it, without Ray."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from regrow.config.schema import DataConfig, OptimConfig, PretrainConfig
from regrow.data.read.batch import BatchLayout, layout_of
from regrow.data.read.corpora import Corpora, order_of
from regrow.data.read.outage import Patience
from regrow.data.stream import actor, client
from regrow.data.stream.actor import NodeFetcher, TokenStream
from regrow.data.stream.dataset import window_table
from regrow.runtime import generation
from support.corpus import write_rows


def test_a_late_call_of_a_dataset_that_has_ended_does_not_take_the_next_ones_place() -> None:
    """Its source was taken for the new one's, which then was taken for one that Ray had run again, and ended."""

    async def draw() -> tuple[list[int], list[int], int]:
        stream = token_stream()
        stream.run = 1  # run 0 has ended
        return await stream.tickets(0, "old"), await asyncio.wait_for(stream.tickets(1, "new"), 30), stream.run

    late, drawn, run = asyncio.run(draw())
    assert (late, run) == ([], 1)
    assert drawn


def test_a_dataset_draws_no_more_tickets_than_it_may_and_the_next_one_goes_on() -> None:
    """Two windows each here: Ray keeps something for each block until a Dataset ends."""

    async def draw() -> TokenStream:
        stream = token_stream(prefetch_windows=3, dataset_blocks=11)
        assert await stream.tickets(0, "a") == [0, 1]
        assert await asyncio.wait_for(stream.tickets(0, "a"), 30) == []  # while the third is wanted
        stream._arrive(0, list("abcd"))
        assert stream.counts["finished"] == 0
        stream._arrive(0, list("efgh"))
        assert stream._end_run(0)
        assert await stream.get(0, [1, 3], True, 30.0) == ["b", "d"]
        assert await stream.tickets(1, "b") == [2]
        assert await stream.get(1, [0], False, 30.0) == ["e"]
        assert await stream.tickets(1, "b") == [3]
        stream._arrive(1, list("ijkl"))
        assert not stream._end_run(1)  # it has failed: window 3 has not come
        assert await stream.tickets(2, "c") == [3]  # which the next one has a ticket for, and for one more
        asked = asyncio.ensure_future(stream.get(3, [2], False, 30.0))
        assert await stream.tickets(2, "c") == [4]
        stream._arrive(2, list("mnop"))
        assert await asked == ["o"]
        return stream

    counts = asyncio.run(draw()).counts
    assert (counts["windows"], counts["finished"], counts["restarts"]) == (4, 1, 1)


def test_the_next_dataset_begins_at_once_and_one_that_was_stopped_before_its_first_ticket_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begun, slept = list[int](), list[float]()

    async def run() -> TokenStream:
        stream = token_stream(dataset_blocks=8)
        loop = asyncio.get_running_loop()

        def bundles(run: int) -> Iterator[Any]:
            begun.append(run)
            has_drawn = False
            while windows := asyncio.run_coroutine_threadsafe(stream.tickets(run, f"of {run}"), loop).result():
                has_drawn = True
                for window, block in [(window, block) for window in windows for block in range(4)]:
                    yield bundle(1, (window, block))
            if not has_drawn:
                yield bundle(0, "empty")  # as Ray Data passes on what a task did not yield

        def build(handle: Any, run: int, *more: Any) -> Any:
            return SimpleNamespace(iter_internal_ref_bundles=lambda: bundles(run))

        monkeypatch.setattr(actor, "build_dataset", build)
        monkeypatch.setattr(actor, "time", SimpleNamespace(monotonic=time.monotonic, sleep=slept.append))
        thread = asyncio.create_task(asyncio.to_thread(stream._produce, None))
        for window in range(7):
            assert await stream.get(window, [0, 3], window == 0, 60.0) == [(window, 0), (window, 3)]
        while len(begun) < 5:  # windows 0 to 7 are ready, so the fifth one waits for its first ticket
            await asyncio.sleep(0.01)
        await stream.stop()
        await thread
        return stream

    def bundle(num_rows: int, reference: Any) -> Any:
        return SimpleNamespace(blocks=[SimpleNamespace(metadata=SimpleNamespace(num_rows=num_rows), ref=reference)])

    stream = asyncio.run(run())
    assert (begun, slept, caplog.messages) == ([0, 1, 2, 3, 4], [], [])
    assert (stream.counts["windows"], stream.counts["finished"], stream.counts["restarts"]) == (8, 4, 0)


def test_a_dataset_of_which_nothing_comes_is_ended_and_the_next_one_goes_on_where_training_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Before, one task that hung ended the stream for good: no ticket was left, and no other Dataset began."""
    monkeypatch.setattr(actor, "STUCK", 1)
    ended = Event()
    monkeypatch.setattr(actor, "end_executions", ended.set)

    async def train() -> TokenStream:
        stream = token_stream(dataset_blocks=8, stall_timeout_s=0.0)

        def bundles(run: int) -> Iterator[Any]:
            while windows := asyncio.run_coroutine_threadsafe(stream.tickets(run, f"of {run}"), loop).result():
                if run == 0:
                    ended.wait(60)
                    return
                for block in [(window, block) for window in windows for block in range(4)]:
                    yield SimpleNamespace(blocks=[SimpleNamespace(metadata=SimpleNamespace(num_rows=1), ref=block)])

        def build(handle: Any, run: int, *more: Any) -> Any:
            return SimpleNamespace(iter_internal_ref_bundles=lambda: bundles(run))

        loop = asyncio.get_running_loop()
        monkeypatch.setattr(actor, "build_dataset", build)
        monkeypatch.setattr(actor, "time", SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: None))
        thread = asyncio.create_task(asyncio.to_thread(stream._produce, None))
        while not stream.in_flight:
            await asyncio.sleep(0.01)
        assert await stream.get(0, [0], True, 0.0) is None
        assert await stream.get(1, [0, 3], False, 60.0) == [(1, 0), (1, 3)]
        await stream.stop()
        await thread
        return stream

    stream = asyncio.run(train())
    assert (stream.counts["restarts"], stream.stuck) == (1, 0)
    assert caplog.messages == ["token stream: no window 0 for 0 s; restarting it"]


def test_a_dataset_is_given_longer_the_more_often_nothing_came_and_is_left_alone_while_blocks_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where there is no CPU for its tasks, another one does no better; a slow store gives windows late."""
    now, ended = 0.0, list[float]()
    monkeypatch.setattr(actor, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(actor, "end_executions", lambda: ended.append(now))

    async def train() -> None:
        nonlocal now
        stream = token_stream()
        while now < 1000.0:
            if not stream.in_flight:
                await stream.tickets(stream.run, f"of {stream.run}")
            assert await stream.get(0, [0], True, 0.0) is None
            now += 10.0
        assert ended == [120.0, 130.0 + 240.0, 380.0 + 480.0]  # from the next one's tickets on
        while now < 2000.0:
            now += 100.0
            stream._arrive(stream.run, ["a block"])
            assert await stream.get(9, [0], False, 0.0) is None
        assert len(ended) == 3

    asyncio.run(train())


def token_stream(**options: Any) -> TokenStream:
    """On the event loop, without the thread that runs Datasets."""
    nothing: Any = None
    layout = BatchLayout(global_batch_seqs=4, num_slices=4, window_steps=8)
    options = {"prefetch_windows": 2, "stream_cpus": 1.0, "stall_timeout_s": 20.0, **options}
    stream = TokenStream(nothing, nothing, layout, start_step=0, stop_step=64, **options)
    stream.loop, stream.changed = asyncio.get_running_loop(), asyncio.Event()
    return stream


def test_a_process_asks_for_its_nodes_fetcher_once_and_again_where_one_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 16,384 ranks that was 8 s of the actor's CPU in each generation, while the group waited for its rows."""
    asked, answer = list[str](), [None]  # nodes; what comes of a call, None where the stream has not the window

    def get(references: Any, timeout: float) -> Any:
        if isinstance(references, Exception):
            raise references
        return references

    write_rows(tmp_path, num_rows=48)
    call = SimpleNamespace(remote=lambda *arguments: answer[0])
    fetcher = SimpleNamespace(get=call)
    stream = SimpleNamespace(get=call, fetcher=SimpleNamespace(remote=lambda node: asked.append(node) or fetcher))
    coordinator = SimpleNamespace(event=SimpleNamespace(remote=lambda *said: None))
    config = PretrainConfig(data=DataConfig(seq_len=16), optim=OptimConfig(global_batch_seqs=24, num_slices=12))
    job = SimpleNamespace(
        config=config, corpora=Corpora.at(tmp_path), stream=stream, coordinator=coordinator, first_generation=1
    )
    process: Any = SimpleNamespace(job=job, fetcher=None)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "node"))
    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "wait", lambda calls, timeout: ([], calls))
    monkeypatch.setattr(generation, "gather", lambda mine: [mine, ("node", 6, 12), ("other", 0, 6)])

    def train(number: int) -> list[str]:
        formation = SimpleNamespace(members=[SimpleNamespace(node="node")])
        joined: Any = SimpleNamespace(generation=number, rank=0, formation=formation, speaks=True)
        batches = generation._batches(process, joined, Patience(0.0), range(6), range(1))
        assert [batch.step for batch in batches] == [0]
        return asked

    for number in (1, 2):
        assert train(number) == ["node"]
    answer[0] = ray.exceptions.ActorDiedError()  # a stream that was restarted has no fetchers
    assert train(3) == ["node"]
    assert train(4) == ["node", "node"]


@pytest.mark.parametrize(("nodes", "late"), [(2048, []), (1, [0])])
def test_a_large_group_gives_the_stream_longer_for_its_first_window(
    nodes: int, late: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One actor answers all nodes: at 2,048 most of them gave it up after a second, and read from storage."""
    now, there_at = 0.0, 5.0

    def get(references: Any, timeout: float) -> Any:
        nonlocal now
        if now < there_at:
            now += timeout
            raise ray.exceptions.GetTimeoutError
        return references

    write_rows(tmp_path, num_rows=48)
    config = PretrainConfig(data=DataConfig(seq_len=16), optim=OptimConfig(global_batch_seqs=24, num_slices=12))
    corpora = Corpora.at(tmp_path)
    layout, order, reader = layout_of(config), order_of(config, corpora), corpora.reader("train")
    window = window_table(0, order, reader, layout)
    monkeypatch.setattr(client, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "wait", lambda calls, timeout: ([], calls))
    fallbacks = list[int]()
    batches = client.rank_batches(
        [lambda window_number, blocks, seek, timeout_s: [window.slice(k, 1) for k in blocks]],
        *(order, reader, layout),
        slices=range(12),
        start_step=0,
        stop_step=1,
        stall_timeout_s=20.0,
        has_fed=True,
        seek_patience_s=client.seek_patience(layout, seq_len=16, num_nodes=nodes),
        on_fallback=lambda number, reason: fallbacks.append(number),
    )
    assert [len(batch.rows) for batch in batches] == [24]
    assert fallbacks == late


def test_a_window_that_was_asked_for_too_early_is_asked_for_again_once_it_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, the wait began a window ahead: what the stream had by then was read from the shards by every rank."""
    write_rows(tmp_path, num_rows=24 * 16)
    config = PretrainConfig(data=DataConfig(seq_len=16), optim=OptimConfig(global_batch_seqs=24, num_slices=12))
    corpora = Corpora.at(tmp_path)
    layout, order, reader = layout_of(config), order_of(config, corpora), corpora.reader("train")
    asked, fallbacks = list[tuple[int, bool]](), list[int]()

    def ask(number: int, blocks: list[int], seek: bool, timeout_s: float) -> list[Any] | None:
        asked.append((number, seek))
        if number == 2 or (number == 1 and asked.count((1, False)) == 1):  # the stream is late, and never has the third
            return None
        window = window_table(number, order, reader, layout)
        return [window.slice(k, 1) for k in blocks]

    monkeypatch.setattr(ray, "get", lambda references, timeout: references)
    monkeypatch.setattr(ray, "wait", lambda calls, timeout: ([], calls))
    batches = client.rank_batches(
        *([ask], order, reader, layout),  # type: ignore[list-item]
        slices=range(12),
        start_step=0,
        stop_step=2 * layout.window_steps + 1,
        stall_timeout_s=20.0,
        on_fallback=lambda number, reason: fallbacks.append(number),
    )
    assert [batch.step for batch in batches] == list(range(2 * layout.window_steps + 1))
    assert asked == [(0, True), (1, False), (1, False), (2, False), (2, False)]
    assert fallbacks == [2]


def test_a_nodes_ranks_ask_again_together_for_a_window_that_the_stream_has_refused() -> None:
    asked: list[int] = []

    async def get(window: int, blocks: list[int], seek: bool, timeout_s: float) -> list[str] | None:
        asked.append(window)
        await asyncio.sleep(0)
        return None if len(asked) == 1 else [f"block {block}" for block in blocks]

    async def ask() -> None:
        fetcher = NodeFetcher(SimpleNamespace(get=SimpleNamespace(remote=get)))
        ranks = [(1, [0, 1], 5, [block], False, 20.0) for block in (0, 1)]
        assert await asyncio.gather(*(fetcher.get(*rank) for rank in ranks)) == [None, None]
        assert await asyncio.gather(*(fetcher.get(*rank) for rank in ranks)) == [["block 0"], ["block 1"]]
        assert asked == [5, 5]

    asyncio.run(ask())


def test_of_a_nodes_ranks_one_tells_the_runs_log_that_the_stream_was_late(caplog: pytest.LogCaptureFixture) -> None:
    """At 16,384 ranks, each told the coordinator of it, a line of the log each."""
    told = list[Any]()
    coordinator: Any = SimpleNamespace(event=lambda *said: told.append(said))
    for rank, speaks in [(0, True), (1, False), (2, False)]:
        joined: Any = SimpleNamespace(rank=rank, speaks=speaks)
        generation._fallbacks(coordinator, joined)(3, "late")
    assert told == [("data_fallback", {"rank": 0, "window": 3, "reason": "late", "windows": 1})]
    assert caplog.messages == ["token stream: window 3 is read from the shards: late"] * 2


def test_a_stream_that_delivers_nothing_for_days_is_told_of_ever_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each window was an event of each node, which the coordinator keeps: millions a day."""
    write_rows(tmp_path, num_rows=24 * 16)
    config = PretrainConfig(data=DataConfig(seq_len=16), optim=OptimConfig(global_batch_seqs=24, num_slices=12))
    corpora = Corpora.at(tmp_path)
    layout, order, reader = layout_of(config), order_of(config, corpora), corpora.reader("train")
    delivered = 100  # the one window

    def ask(number: int, blocks: list[int], seek: bool, timeout_s: float) -> list[Any] | None:
        window = window_table(number, order, reader, layout) if number == delivered else None
        return None if window is None else [window.slice(k, 1) for k in blocks]

    def train(speaks: bool) -> list[Any]:
        told = list[Any]()
        coordinator: Any = SimpleNamespace(event=lambda name, fields: told.append((name, fields)))
        joined: Any = SimpleNamespace(rank=5, speaks=speaks)
        batches = client.rank_batches(
            *([ask], order, reader, layout),  # type: ignore[list-item]
            slices=range(12),
            start_step=0,
            stop_step=104 * layout.window_steps,
            stall_timeout_s=20.0,
            on_fallback=generation._fallbacks(coordinator, joined),
        )
        assert [batch.step for batch in batches] == list(range(104 * layout.window_steps))
        return told

    monkeypatch.setattr(ray, "get", lambda references, timeout: references)
    monkeypatch.setattr(ray, "wait", lambda calls, timeout: ([], calls))
    reason = "LookupError: the stream does not hold the window"
    windows = {0: 1, 1: 1, 3: 2, 7: 4, 15: 8, 31: 16, 63: 32, 101: 1, 102: 1}  # and for how many each stands
    assert train(speaks=True) == [
        ("data_fallback", {"rank": 5, "window": window, "reason": reason, "windows": stands_for})
        for window, stands_for in windows.items()
    ]
    assert not caplog.messages
    assert train(speaks=False) == []
    assert caplog.messages[:4:3] == [
        f"token stream: window 0 is read from the shards: {reason}",
        f"token stream: window 7, as the 3 before it, is read from the shards: {reason}",
    ]
    assert len(caplog.messages) == len(windows)
