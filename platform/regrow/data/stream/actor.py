"""The actor that keeps windows ahead of training, a node's way to ask it, and starting and ending it."""

import asyncio
import contextlib
import logging
import threading
import time
from collections import OrderedDict, deque
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from regrow.config.schema import PretrainConfig
from regrow.data.read.batch import BatchLayout, layout_of
from regrow.data.read.corpora import Corpora, order_of
from regrow.data.stream.client import first_line_of
from regrow.data.stream.dataset import build_dataset, end_executions, import_what_tasks_need
from regrow.plan.order import Order

DATASET_BLOCKS = 32_768  # of a Dataset before another goes on: Ray keeps some 1 kB for each block until it ends
KEPT_BACK = 2  # windows behind training that stay, for a rollback
MAX_CALLS = 10_000  # calls that may wait in the actor at once: ranks times two, with room
KEPT_CALLS = 4  # of a node; each holds on to its blocks
STOP_S = 5.0  # for its tasks to end
STUCK = 6  # times data.stall_timeout_s without a block, while ranks are refused: a Dataset's task hangs then
MOST_DOUBLED = 5  # how often that is doubled, where the next Dataset does no better
MAX_BACKOFF_S = 30.0  # between restarts of a Dataset that keeps failing

log = logging.getLogger(__name__)


class TokenStream:
    """Keeps the windows around the newest one asked for: `prefetch_windows` from it on, and a few behind.

    An asyncio actor: its state changes on the event loop only. A thread runs the Dataset and hands blocks over.
    """

    def __init__(
        self,
        order: Order,
        corpora: Corpora,
        layout: BatchLayout,
        *,
        start_step: int,
        stop_step: int,
        prefetch_windows: int,
        stream_cpus: float,
        stall_timeout_s: float,
        dataset_blocks: int = DATASET_BLOCKS,
    ) -> None:
        self.order, self.corpora, self.layout = order, corpora, layout
        self.prefetch_windows, self.stream_cpus, self.stall_timeout_s = prefetch_windows, stream_cpus, stall_timeout_s
        self.last_window = (stop_step - 1) // layout.window_steps
        self.newest = start_step // layout.window_steps  # the newest window asked for
        self.claimed = False  # whether a rank asked yet: a restarted actor does not know where training is
        self.kept: dict[int, list[Any]] = {}  # window -> references to its blocks
        self.in_flight: deque[int] = deque()  # windows that tickets are out for, in their order
        self.arrived: list[Any] = []  # references of the first one in flight
        self.heard_at = 0.0  # when a block arrived, or a ticket was drawn with none in flight
        self.stuck = 0  # Datasets in a row that were ended as nothing came of them
        self.run = 0  # of the Dataset; grows with every other one
        self.dataset_windows = max(1, dataset_blocks // layout.num_blocks)
        self.left = self.dataset_windows  # windows that this run may still draw tickets for
        self.source = ""  # the one task that may draw this run's tickets
        self.counts = {"asked": 0, "windows": 0, "finished": 0, "restarts": 0, "refused": 0}
        self.fetchers: dict[str, Any] = {}  # node id -> actor
        self.changed: asyncio.Event | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        self.stopping = False  # no more tickets
        self.stopped = False  # the thread has ended

    async def start(self) -> None:
        """Begin to produce. The other calls do it too, for an actor that was restarted."""
        if self.loop is None:
            self.loop, self.changed = asyncio.get_running_loop(), asyncio.Event()
            handle = ray.get_runtime_context().current_actor
            threading.Thread(target=self._produce, args=(handle,), name="token-stream", daemon=True).start()

    async def get(self, window: int, blocks: list[int], seek: bool, timeout_s: float) -> list[Any] | None:
        """References to these blocks of a window, waiting until they are there; None if they will not be.

        A rank that begins says `seek`: only that may move the stream back. A rank that lags reads directly.
        """
        await self.start()
        self.counts["asked"] += 1
        if seek or not self.claimed or window > self.newest:
            self.newest, self.claimed = min(window, self.last_window), True
            for old in [w for w in self.kept if not self._is_near(w)]:
                del self.kept[old]
            self._notify()
        give_up_at = time.monotonic() + timeout_s
        while window not in self.kept:
            left_s = give_up_at - time.monotonic()
            if left_s <= 0 or not (window in self.in_flight or window in self._wanted()):
                self.counts["refused"] += 1
                self._end_stuck()
                return None
            await self._change(left_s)
        return [self.kept[window][k] for k in blocks]

    async def fetcher(self, node_id: str) -> Any:
        """The actor that asks for all ranks of a node; it ends with this one."""
        if node_id not in self.fetchers:
            there = NodeAffinitySchedulingStrategy(node_id, soft=False)
            options = ray.remote(NodeFetcher).options(
                num_cpus=0, scheduling_strategy=there, max_restarts=-1, max_concurrency=MAX_CALLS
            )
            self.fetchers[node_id] = options.remote(ray.get_runtime_context().current_actor)
        return self.fetchers[node_id]

    async def tickets(self, run: int, source: str) -> list[int]:
        """The next windows to produce, waiting until there are any; none: the Dataset is to end."""
        if run != self.run:  # a late call of a Dataset that has ended, whose source must not stand for this one's
            return []
        self.source = self.source or source
        if source != self.source:  # Ray ran the source again after it died: tickets that it had drawn are lost
            self._end_run(run)
        while run == self.run and self.left and not self.stopping:
            windows = [w for w in self._wanted() if w not in self.kept and w not in self.in_flight][: self.left]
            if windows:
                if not self.in_flight:
                    self.heard_at = time.monotonic()
                self.in_flight += windows
                self.left -= len(windows)
                return windows
            await self._change()
        return []

    async def stop(self) -> None:
        """Let the Dataset end, and return when it has."""
        self.stopping = True
        if self.loop is not None:
            self._notify()
            while not self.stopped:
                await self._change()

    async def status(self) -> dict[str, Any]:
        """Counts since the start, and what is kept: for reports and tests."""
        await self.start()
        return {**self.counts, "kept": sorted(self.kept), "newest": self.newest, "cpu_s": time.process_time()}

    def _wanted(self) -> range:
        return range(self.newest, min(self.newest + self.prefetch_windows, self.last_window + 1))

    def _is_near(self, window: int) -> bool:
        # training is one window behind the newest, which a rank asks for when it begins the one before
        return self.newest - 1 - KEPT_BACK <= window <= self.newest + self.prefetch_windows

    def _notify(self) -> None:
        assert self.changed is not None
        self.changed.set()
        self.changed = asyncio.Event()

    async def _change(self, timeout_s: float | None = None) -> None:
        assert self.changed is not None
        try:
            await asyncio.wait_for(self.changed.wait(), timeout_s)
        except TimeoutError:
            return

    def _arrive(self, run: int, references: list[Any]) -> None:
        """Blocks come in the order of the tickets, one after another."""
        if run != self.run:
            return
        if references:
            self.heard_at, self.stuck = time.monotonic(), 0
        for reference in references:
            self.arrived.append(reference)
            if len(self.arrived) == self.layout.num_blocks:
                window, blocks, self.arrived = self.in_flight.popleft(), self.arrived, []
                self.counts["windows"] += 1
                if self._is_near(window):
                    self.kept[window] = blocks
        self._notify()

    def _end_run(self, run: int) -> bool:
        """Whether it has produced all windows that it may: the next one is no restart."""
        if run != self.run:
            return False
        is_finished = not self.left and not self.in_flight
        self.run, self.source, self.left = run + 1, "", self.dataset_windows
        self.in_flight.clear()
        self.arrived = []
        self.counts["finished" if is_finished else "restarts"] += 1
        self._notify()
        return is_finished

    def _end_stuck(self) -> None:
        """End a Dataset of which nothing comes: one task that hangs, as on a dead mount, holds up those behind its
        own, until no ticket is left. The next one's tasks may run elsewhere."""
        silent_s = time.monotonic() - self.heard_at
        if self.in_flight and silent_s >= STUCK * self.stall_timeout_s * 2**self.stuck:
            log.warning("token stream: no window %d for %.0f s; restarting it", self.in_flight[0], silent_s)
            self.stuck = min(self.stuck + 1, MOST_DOUBLED)
            self._end_run(self.run)
            end_executions()

    async def _end_dataset(self, run: int) -> bool:
        return self._end_run(run)

    def _produce(self, handle: Any) -> None:
        """Run one Dataset after another, until the stream is stopped; at once, where one has not failed.

        One ends as soon as its last window has come. That is the one furthest ahead of training, which therefore does
        not wait while the next Dataset starts.
        """
        assert self.loop is not None
        backoff_s = 0.5
        while not self.stopping:
            run, began = self.run, time.monotonic()
            try:
                dataset = build_dataset(handle, run, self.order, self.corpora, self.layout, self.stream_cpus)
                for bundle in dataset.iter_internal_ref_bundles():  # internal: no public call hands out references
                    entries = [each for each in bundle.blocks if each.metadata.num_rows]  # none: no ticket was drawn
                    assert all(entry.metadata.num_rows == 1 for entry in entries)
                    self.loop.call_soon_threadsafe(self._arrive, run, [entry.ref for entry in entries])
            except Exception as error:
                log.warning("token stream: %s; restarting it", first_line_of(error))
            if self.stopping:
                break
            if asyncio.run_coroutine_threadsafe(self._end_dataset(run), self.loop).result():
                continue
            backoff_s = 0.5 if time.monotonic() - began > MAX_BACKOFF_S else min(2 * backoff_s, MAX_BACKOFF_S)
            time.sleep(backoff_s)
        self.loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        self.stopped = True
        self._notify()


class NodeFetcher:
    """Asks the stream for a node's blocks of each window once, however many ranks of the node want theirs."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.calls: OrderedDict[tuple[int, int], asyncio.Task[list[Any] | None]] = OrderedDict()

    async def get(
        self, group: int, node_blocks: list[int], window: int, blocks: list[int], seek: bool, timeout_s: float
    ) -> list[Any] | None:
        """As `TokenStream.get`, for a rank of a worker group whose ranks here want `node_blocks` together.

        What the stream has refused is asked for anew.
        """
        key = (group, window)  # another group asks again: it may have gone back, and have other blocks
        known = self.calls.get(key)
        if known is None or (known.done() and not known.exception() and known.result() is None):
            self.calls[key] = asyncio.ensure_future(self._ask(window, node_blocks, seek, timeout_s))
            while len(self.calls) > KEPT_CALLS:
                self.calls.popitem(last=False)
        references = await self.calls[key]
        return references and [references[node_blocks.index(k)] for k in blocks]

    async def _ask(self, window: int, blocks: list[int], seek: bool, timeout_s: float) -> list[Any] | None:
        references: list[Any] | None = await self.stream.get.remote(window, blocks, seek, timeout_s)
        return references


def start_stream(
    config: PretrainConfig, corpora: Corpora, *, start_step: int, stop_step: int, dataset_blocks: int = DATASET_BLOCKS
) -> Any:
    """Start the stream's actor on this node, with production under way from `start_step`; its handle, for the workers.

    Returns at once. Tasks ask for `data.stream_cpus` logical CPUs beyond those of the workers; where the cluster has
    none left, ranks read directly. A Dataset produces windows of `dataset_blocks` blocks together, or one window.
    Raises DataError if the corpus does not fit the run.
    """
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    # processes for the source and the first window start beside the actor's, not after it: 1.5 s earlier on two cores
    warm_up = ray.remote(import_what_tasks_need)
    warm_up.options(num_cpus=0, scheduling_strategy=here).remote()
    warm_up.options(num_cpus=config.data.stream_cpus).remote()
    actor = ray.remote(TokenStream).options(
        num_cpus=0, scheduling_strategy=here, max_restarts=-1, max_concurrency=MAX_CALLS
    )
    stream: Any = actor.remote(
        order_of(config, corpora),
        corpora,
        layout_of(config),
        start_step=start_step,
        stop_step=stop_step,
        prefetch_windows=config.data.prefetch_windows,
        stream_cpus=config.data.stream_cpus,
        stall_timeout_s=config.data.stall_timeout_s,
        dataset_blocks=dataset_blocks,
    )
    stream.start.remote()
    return stream


def stop_stream(stream: Any) -> None:
    """End the stream for good, its tasks first: one that waits while Ray shuts down can die noisily."""
    with contextlib.suppress(ray.exceptions.RayError):  # it may be dead already
        ray.get(stream.stop.remote(), timeout=STOP_S)
    ray.kill(stream, no_restart=True)
