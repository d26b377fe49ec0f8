"""The token stream: one actor and one Ray Data Dataset produce windows ahead of training, for any world size.

    TokenStream (actor, outlives worker groups)              ranks (any number, new ones at every resize)
    tickets -> [ Ray Data: ticket -> window -> blocks ]  ->  get(window, blocks) -> references to blocks of slices

Where a node has several ranks, a `NodeFetcher` asks for all of them: one call a node and window.

What a rank receives is checked against `Order`, row by row; whatever the stream cannot deliver the rank reads from the
shards itself. So the stream decides how fast data comes, never which.

The Dataset's source is a task that asks the actor which windows to produce next ("tickets"). That makes three things
free that Ray Data has no setting for: it cannot run ahead (its own backpressure bounds bytes, and spins a core while it
holds), it starts in the same time however long the run is (a source with a block per window took 14 ms for each), and
a rollback is another ticket, not another Dataset. The only file of this package that imports ray.
"""

import asyncio
import contextlib
import functools
import itertools
import logging
import os
import secrets
import threading
import time
import traceback
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from regrow.config.schema import PretrainConfig
from regrow.data.batch import BatchLayout, Positions, RankBatch, RowReader, Rows, direct_batches, layout_of
from regrow.data.corpora import Corpora, order_of
from regrow.plan.order import Order

KEPT_CALLS = 4  # of a node; each holds on to its blocks
KEPT_BACK = 2  # windows behind training that stay, for a rollback
MAX_CALLS = 10_000  # calls that may wait in the actor at once: ranks times two, with room
SEEK_PATIENCE_S = 1.0  # a stream that has fed a group has the next one's first window by then, or lost it with a node
RETRY_PATIENCE_S = 0.1  # a rank that had to read directly waits no longer than this, until the stream delivers again
STOP_S = 5.0  # for its tasks to end
MAX_BACKOFF_S = 30.0  # between restarts of a Dataset that keeps failing

Block = tuple[Positions, Rows]  # of one window: slice after slice, each of them step after step
Fallback = Callable[[int, str], None]  # (window, reason)
Ask = Callable[[int, list[int], bool, float], Any]  # of `TokenStream.get`; the reference of a call under way

log = logging.getLogger(__name__)


def start_stream(config: PretrainConfig, corpora: Corpora, *, start_step: int, stop_step: int) -> Any:
    """Start the stream's actor on this node, with production under way from `start_step`; its handle, for the workers.

    Returns at once. Tasks ask for `data.stream_cpus` logical CPUs beyond those of the workers; where the cluster has
    none left, ranks read directly. Raises DataError if the corpus does not fit the run.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    # processes for the source and the first window start beside the actor's, not after it: 1.5 s earlier on two cores
    warm_up = ray.remote(_import)
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
    )
    stream.start.remote()
    return stream


def ways_to_ask(
    stream: Any, fetcher: Any, layout: BatchLayout, *, group: int, slices_on_node: Sequence[range]
) -> list[Ask]:
    """How a rank asks: through its node's `fetcher`, if that dies, the stream itself, and the other way round.

    `group` tells worker groups apart; `slices_on_node` are those of each of its ranks on this node.
    """
    if fetcher is None:
        return [stream.get.remote]
    node_blocks = sorted({block for slices in slices_on_node for block in layout.blocks_of(slices)})
    return [functools.partial(fetcher.get.remote, group, node_blocks), stream.get.remote]


def stop_stream(stream: Any) -> None:
    """End the stream for good, its tasks first: one that waits while Ray shuts down can die noisily."""
    import ray

    with contextlib.suppress(ray.exceptions.RayError):  # it may be dead already
        ray.get(stream.stop.remote(), timeout=STOP_S)
    ray.kill(stream, no_restart=True)


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
    ) -> None:
        self.order, self.corpora, self.layout = order, corpora, layout
        self.prefetch_windows, self.stream_cpus = prefetch_windows, stream_cpus
        self.last_window = (stop_step - 1) // layout.window_steps
        self.newest = start_step // layout.window_steps  # the newest window asked for
        self.claimed = False  # whether anybody asked yet: a restarted actor does not know where training is
        self.kept: dict[int, list[Any]] = {}  # window -> references to its blocks
        self.in_flight: deque[int] = deque()  # windows that tickets are out for, in their order
        self.arrived: list[Any] = []  # references of the first one in flight
        self.run = 0  # of the Dataset; grows with every restart
        self.source = ""  # the one task that may draw this run's tickets
        self.counts = {"asked": 0, "windows": 0, "restarts": 0, "refused": 0}
        self.fetchers: dict[str, Any] = {}  # node id -> actor
        self.changed: asyncio.Event | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        self.stopping = False  # no more tickets
        self.stopped = False  # the thread has ended

    async def start(self) -> None:
        """Begin to produce. The other calls do it too, for an actor that was restarted."""
        if self.loop is None:
            import ray

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
                return None
            await self._change(left_s)
        return [self.kept[window][k] for k in blocks]

    async def fetcher(self, node_id: str) -> Any:
        """The actor that asks for all ranks of a node; it ends with this one."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if node_id not in self.fetchers:
            there = NodeAffinitySchedulingStrategy(node_id, soft=False)
            options = ray.remote(NodeFetcher).options(
                num_cpus=0, scheduling_strategy=there, max_restarts=-1, max_concurrency=MAX_CALLS
            )
            self.fetchers[node_id] = options.remote(ray.get_runtime_context().current_actor)
        return self.fetchers[node_id]

    async def tickets(self, run: int, source: str) -> list[int]:
        """The next windows to produce, waiting until there are any; none: the Dataset is to end."""
        self.source = self.source or source
        if source != self.source:  # Ray ran the source again after it died: tickets that it had drawn are lost
            self._end_run(run)
        while run == self.run and not self.stopping:
            windows = [w for w in self._wanted() if w not in self.kept and w not in self.in_flight]
            if windows:
                self.in_flight += windows
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
        for reference in references:
            self.arrived.append(reference)
            if len(self.arrived) == self.layout.num_blocks:
                window, blocks, self.arrived = self.in_flight.popleft(), self.arrived, []
                self.counts["windows"] += 1
                if self._is_near(window):
                    self.kept[window] = blocks
        self._notify()

    def _end_run(self, run: int) -> None:
        if run == self.run:
            self.run, self.source = run + 1, ""
            self.in_flight.clear()
            self.arrived = []
            self.counts["restarts"] += 1
            self._notify()

    def _produce(self, handle: Any) -> None:
        """Run a Dataset, and another one after it has failed, until the stream is stopped."""
        assert self.loop is not None
        backoff_s = 0.5
        while not self.stopping:
            run, began = self.run, time.monotonic()
            try:
                dataset = build_dataset(handle, run, self.order, self.corpora, self.layout, self.stream_cpus)
                for bundle in dataset.iter_internal_ref_bundles():  # internal: no public call hands out references
                    assert all(entry.metadata.num_rows == 1 for entry in bundle.blocks)
                    self.loop.call_soon_threadsafe(self._arrive, run, [entry.ref for entry in bundle.blocks])
            except Exception as error:
                log.warning("token stream: %s; restarting it", _first_line(error))
            if self.stopping:
                break
            self.loop.call_soon_threadsafe(self._end_run, run)
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
        """As `TokenStream.get`, for a rank of a worker group whose ranks here want `node_blocks` together."""
        key = (group, window)  # another group asks again: it may have gone back, and have other blocks
        if key not in self.calls:
            self.calls[key] = asyncio.ensure_future(self._ask(window, node_blocks, seek, timeout_s))
            while len(self.calls) > KEPT_CALLS:
                self.calls.popitem(last=False)
        references = await self.calls[key]
        return references and [references[node_blocks.index(k)] for k in blocks]

    async def _ask(self, window: int, blocks: list[int], seek: bool, timeout_s: float) -> list[Any] | None:
        references: list[Any] | None = await self.stream.get.remote(window, blocks, seek, timeout_s)
        return references


def build_dataset(
    stream: Any, run: int, order: Order, corpora: Corpora, layout: BatchLayout, stream_cpus: float
) -> Any:
    """tickets -> windows -> blocks of slices, each a row of its own, in the order of the tickets. Lazy."""
    # Ray Data waits in ray.get on threads of its own, not on the event loop
    os.environ["RAY_WARN_BLOCKING_GET_INSIDE_ASYNC"] = "0"
    import pyarrow as pa
    import ray.data

    logging.getLogger("ray.data").setLevel(logging.ERROR)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.execution_options.preserve_order = True
    context.execution_no_progress_timeout_s = -1  # a paused training is no error
    context.target_max_block_size = 1  # byte: every row is a block and leaves at once
    # tickets bound everything; its own policies go by what Ray's coordinator grants a Dataset, which is nothing while
    # Train and Datasets that are gone hold their reservations (180 s), and would stall this one
    context.set_config("backpressure_policies.enabled", [])
    context._max_num_blocks_in_streaming_gen_buffer = layout.num_blocks  # a window leaves its task in one go

    def draw(batch: dict[str, Any]) -> Iterator[dict[str, Any]]:
        import ray

        source = secrets.token_hex(8)
        while windows := ray.get(stream.tickets.remote(run, source)):
            for window in windows:
                yield {"window": np.array([window])}

    def produce(batch: dict[str, Any]) -> Any:
        return window_table(int(batch["window"][0]), order, _reader(corpora), layout)

    # the source must share the actor's fate, or its tickets would be lost with another node
    here = {"ray.io/node-id": ray.get_runtime_context().get_node_id()}
    seed = ray.data.from_arrow(pa.table({"run": [run]}))  # not read_*: that would be one more task, with a CPU
    source = seed.map_batches(draw, batch_size=1, num_cpus=0, label_selector=here)
    return source.map_batches(produce, batch_size=1, batch_format="numpy", num_cpus=stream_cpus)


def _import() -> None:
    """Import what the Dataset's tasks need."""
    import importlib

    for name in ("ray.data", "regrow.data.shards"):
        importlib.import_module(name)


@functools.cache
def _reader(corpora: Corpora) -> RowReader:
    """One reader a process: Ray reuses processes for many windows."""
    return corpora.reader("train")


def window_table(window: int, order: Order, reader: RowReader, layout: BatchLayout) -> Any:
    """A window as an Arrow table with a row for each block: the bytes of its positions and of its tokens.

    Within a block slice after slice, each of them step after step. Each row group is decoded once.
    """
    import pyarrow as pa

    first = window * layout.window_rows
    shape = (layout.window_steps, layout.num_slices, layout.slice_seqs)
    positions = np.arange(first, first + layout.window_rows).reshape(shape).swapaxes(0, 1).ravel()
    rows = reader.read(order.locate(positions))

    def column(values: np.ndarray) -> Any:
        data = np.ascontiguousarray(values, values.dtype.newbyteorder("<"))
        firsts = [layout.slices_of_block(block).start for block in range(layout.num_blocks)]
        ends = np.array([*firsts, layout.num_slices], np.int64) * (data.nbytes // layout.num_slices)
        buffers = [None, pa.py_buffer(ends), pa.py_buffer(data)]
        return pa.LargeBinaryArray.from_buffers(pa.large_binary(), layout.num_blocks, buffers)

    return pa.table({"positions": column(positions), "rows": column(rows)})


def block_of(table: Any) -> Block:
    """A block as it comes from the object store: positions and rows that share its memory."""
    positions = np.frombuffer(table["positions"][0].as_buffer(), "<i8")
    return positions, np.frombuffer(table["rows"][0].as_buffer(), "<u4").reshape(len(positions), -1)


def rank_batches(
    asks: Sequence[Ask],
    order: Order,
    reader: RowReader,
    layout: BatchLayout,
    *,
    slices: range,
    start_step: int,
    stop_step: int,
    stall_timeout_s: float,
    has_fed: bool = False,
    on_fallback: Fallback | None = None,
) -> Iterator[RankBatch]:
    """A rank's batches of steps [start_step, stop_step), exactly those of `direct_batches`, as the stream delivers.

    The next window is fetched while one is trained on. A window that does not come in time, is lost, or is not the one
    that `order` asks for is read from the shards, reported to `on_fallback`, and the next one is tried again; where
    a way to ask failed, in the next of them. A stream that `has_fed` the group before this one is waited for less: Ray
    may take many seconds to find out that a node is gone, and what it held with it.
    """
    if start_step >= stop_step:
        return
    ways = itertools.cycle(asks)
    ask = next(ways)
    blocks_of = layout.blocks_of(slices)
    coming = _Fetch(ask, start_step // layout.window_steps, blocks_of, seek=True, timeout_s=stall_timeout_s)
    patience_s, step = min(stall_timeout_s, SEEK_PATIENCE_S) if has_fed else stall_timeout_s, start_step
    while step < stop_step:
        window = step // layout.window_steps
        steps = range(step, min((window + 1) * layout.window_steps, stop_step))
        try:
            blocks = coming.result(patience_s)
            batches: Iterator[RankBatch] = iter([_assemble(blocks, layout, s, slices) for s in steps])
            patience_s = stall_timeout_s
        except Exception as error:  # whatever Ray raises: the rows are on storage all the same
            (on_fallback or _warn)(window, _first_line(error))
            batches = direct_batches(order, reader, layout, slices=slices, start_step=steps.start, stop_step=steps.stop)
            patience_s = RETRY_PATIENCE_S
            if not isinstance(error, (TimeoutError, LookupError)):  # whoever was asked may be dead
                ask = next(ways)
        if steps.stop < stop_step:
            coming = _Fetch(ask, window + 1, blocks_of, seek=False, timeout_s=stall_timeout_s)
        for batch in batches:
            coming.advance()
            yield batch
        step = steps.stop


class _Fetch:
    """A rank's blocks of one window, on their way to this process.

    No thread: one that is still in `ray.get` when its process disconnects from Ray takes the process with it.
    """

    def __init__(self, ask: Ask, window: int, blocks: range, *, seek: bool, timeout_s: float) -> None:
        self._call = ask(window, list(blocks), seek, timeout_s)
        self._references: list[Any] | None = None

    def advance(self) -> None:
        """Once the stream has named the blocks, have them brought to this node. Never waits, never fails."""
        import ray

        try:
            if self._references is None and ray.wait([self._call], timeout=0)[0]:
                self._references = ray.get(self._call) or []
                if self._references:
                    ray.wait(self._references, num_returns=len(self._references), timeout=0)
        except Exception:  # `result` meets it again
            return

    def result(self, patience_s: float) -> list[Block]:
        """The blocks, waiting at most so long for them. Raises whatever is in the way."""
        import ray

        give_up_at = time.monotonic() + patience_s
        try:
            references = ray.get(self._call, timeout=patience_s)
            if references is None:
                raise LookupError("the stream does not hold the window")
            return [block_of(t) for t in ray.get(references, timeout=max(give_up_at - time.monotonic(), 0.0))]
        except ray.exceptions.GetTimeoutError:
            raise TimeoutError(f"the stream delivered nothing for {patience_s:g} s") from None


def _assemble(blocks: list[Block], layout: BatchLayout, step: int, slices: range) -> RankBatch:
    """One step's batch out of a window's blocks. Raises LookupError if a row is not where it should be."""
    per_slice, first = layout.window_steps * layout.slice_seqs, step % layout.window_steps * layout.slice_seqs
    positions, rows = [], []
    for number, (block_positions, block_rows) in zip(layout.blocks_of(slices), blocks, strict=False):
        held = layout.slices_of_block(number)
        for k in range(max(held.start, slices.start), min(held.stop, slices.stop)):
            begin = (k - held.start) * per_slice + first
            positions.append(block_positions[begin : begin + layout.slice_seqs])
            rows.append(block_rows[begin : begin + layout.slice_seqs])
    if not np.array_equal(np.concatenate(positions), layout.positions(step, slices)):
        raise LookupError(f"the stream delivered other positions than those of step {step}")
    return RankBatch(step, np.concatenate(positions), np.concatenate(rows))


def _warn(window: int, reason: str) -> None:
    log.warning("token stream: window %d is read from the shards: %s", window, reason)


def _first_line(error: BaseException) -> str:
    error = getattr(error, "cause", None) or error  # what a RayTaskError wraps, not the remote traceback
    text = (str(error).strip().splitlines() or [""])[0][:200]
    if not text and error.__traceback__:  # an assertion says at least where
        frame = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{frame.filename}:{frame.lineno}: {frame.line}"
    return f"{type(error).__name__}: {text}"
