"""A rank's batches out of the token stream, checked against the order, or read from the shards."""

import functools
import itertools
import logging
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import ray

from regrow.data.read.batch import BatchLayout, RankBatch, RowReader, direct_batches
from regrow.data.stream.dataset import Block, block_of
from regrow.errors import GroupOver
from regrow.plan.order import Order

if TYPE_CHECKING:
    from ray import ObjectRef


SEEK_PATIENCE_S = 1.0  # a stream that has fed a group has the next one's first window by then, or lost it with a node
NODE_S = 3e-3  # of the stream's actor, for each node's call
WINDOW_BYTES_PER_S = 1e9  # out of the node where a window was made
LOOK_S = 0.2  # between looks whether the group is over, while nothing comes
RETRY_PATIENCE_S = 0.1  # a rank that had to read directly waits no longer than this, until the stream delivers again

Fallback = Callable[[int, str], None]  # (window, reason)

log = logging.getLogger(__name__)


class Ask(Protocol):
    """A way to call `TokenStream.get`; the reference of the call under way."""

    def __call__(
        self, window: int, blocks: list[int], seek: bool, timeout_s: float, /
    ) -> "ObjectRef[list[ObjectRef[Any]] | None]": ...


def ways_to_ask(
    stream: Any, fetcher: Any, layout: BatchLayout, *, group: int, slices_on_node: Sequence[range]
) -> list[Ask]:
    """How a rank asks: through its node's fetcher, if that dies, the stream itself, and the other way round.

    `group` tells worker groups apart; `slices_on_node` are those of each of its ranks on this node.
    """
    if fetcher is None:
        return [stream.get.remote]
    node_blocks = sorted({block for slices in slices_on_node for block in layout.blocks_of(slices)})
    return [functools.partial(fetcher.get.remote, group, node_blocks), stream.get.remote]


def seek_patience(layout: BatchLayout, *, seq_len: int, num_nodes: int) -> float:
    """Seconds for which a group on so many nodes waits for its first window, where the stream has fed the one before:
    for its place among the nodes that ask, and for the window's way to them."""
    window_bytes = layout.window_rows * (seq_len + 1) * 4  # token ids are uint32
    return SEEK_PATIENCE_S + num_nodes * NODE_S + window_bytes / WINDOW_BYTES_PER_S


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
    seek_patience_s: float = SEEK_PATIENCE_S,
    on_fallback: Fallback | None = None,
    on_failed_ask: Callable[[], None] = lambda: None,
    is_over: Callable[[], bool] = lambda: False,
) -> Iterator[RankBatch]:
    """A rank's batches of steps [start_step, stop_step), exactly those of `direct_batches`, as the stream delivers.

    The next window is fetched while one is trained on. A window that does not come in time, is lost, or is not the one
    that `order` asks for is read from the shards, reported to `on_fallback`, and the next one is tried again; where
    a way to ask failed, in the next of them, and `on_failed_ask` is told. A stream that `has_fed` the group before this
    one is waited for less, `seek_patience_s`: Ray may take many seconds to find out that a node is gone, and what it
    held with it. Raises GroupOver where the rank's group `is_over` while it waits.
    """
    if start_step >= stop_step:
        return
    ways = itertools.cycle(asks)
    ask = next(ways)
    blocks_of = layout.blocks_of(slices)
    coming = _Fetch(ask, start_step // layout.window_steps, blocks_of, seek=True, timeout_s=stall_timeout_s)
    patience_s, step = min(stall_timeout_s, seek_patience_s) if has_fed else stall_timeout_s, start_step
    while step < stop_step:
        window = step // layout.window_steps
        steps = range(step, min((window + 1) * layout.window_steps, stop_step))
        try:
            blocks = coming.result(patience_s, is_over)
            batches: Iterator[RankBatch] = iter([assemble(blocks, layout, s, slices) for s in steps])
            patience_s = stall_timeout_s
        except GroupOver:
            raise
        except Exception as error:  # whatever Ray raises: the rows are on storage all the same
            (on_fallback or warn)(window, first_line_of(error))
            batches = direct_batches(order, reader, layout, slices=slices, start_step=steps.start, stop_step=steps.stop)
            patience_s = RETRY_PATIENCE_S
            if not isinstance(error, (TimeoutError, LookupError)):  # the actor that was asked may be dead
                ask = next(ways)
                on_failed_ask()
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
        self._ask, self._seek = functools.partial(ask, window, list(blocks), seek), seek
        self._call = self._ask(timeout_s)
        self._references: list[Any] | None = None

    def advance(self) -> None:
        """Once the stream has named the blocks, have them brought to this node. Never waits, never fails."""
        try:
            if self._references is None and ray.wait([self._call], timeout=0)[0]:
                self._references = ray.get(self._call) or []
                if self._references:
                    ray.wait(self._references, num_returns=len(self._references), timeout=0)
        except Exception:  # `result` meets it again
            return

    def result(self, patience_s: float, is_over: Callable[[], bool]) -> list[Block]:
        """The blocks, waiting at most so long for them, in a group that is on. Raises whatever is in the way."""
        give_up_at = time.monotonic() + patience_s
        try:
            references = _get(self._call, give_up_at, is_over)
            if references is None and not self._seek:  # it was asked for a window ahead, and may be there by now
                references = _get(self._ask(max(0.0, give_up_at - time.monotonic())), give_up_at, is_over)
            if references is None:
                raise LookupError("the stream does not hold the window")
            return [block_of(table) for table in _get(references, give_up_at, is_over)]
        except ray.exceptions.GetTimeoutError:
            raise TimeoutError(f"the stream delivered nothing for {patience_s:g} s") from None


def _get(references: Any, give_up_at: float, is_over: Callable[[], bool]) -> Any:
    while True:
        left_s = give_up_at - time.monotonic()
        try:
            return ray.get(references, timeout=max(0.0, min(LOOK_S, left_s)))
        except ray.exceptions.GetTimeoutError:
            if is_over():
                raise GroupOver("the group was over while this rank waited for its rows") from None
            if left_s <= LOOK_S:
                raise


def assemble(blocks: list[Block], layout: BatchLayout, step: int, slices: range) -> RankBatch:
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


class FewerFallbacks:
    """Of fallbacks for windows one behind the other, tells of the 1st, 2nd, 4th, 8th, ... alone: a stream may deliver
    nothing for days, to thousands of nodes."""

    def __init__(self, tell: Callable[[int, str, int], None]) -> None:
        """`tell` is called with the window, the reason, and for how many windows since the last telling it stands."""
        self._tell, self._next, self._in_a_row = tell, 0, 0

    def __call__(self, window: int, reason: str) -> None:
        self._in_a_row = self._in_a_row + 1 if window == self._next else 1
        self._next = window + 1
        if self._in_a_row.bit_count() == 1:
            self._tell(window, reason, max(1, self._in_a_row // 2))


def warn(window: int, reason: str, windows: int = 1) -> None:
    before = f", as the {windows - 1} before it," if windows > 1 else ""
    log.warning("token stream: window %d%s is read from the shards: %s", window, before, reason)


def first_line_of(error: BaseException) -> str:
    error = getattr(error, "cause", None) or error  # what a RayTaskError wraps, not the remote traceback
    text = (str(error).strip().splitlines() or [""])[0][:200]
    if not text and error.__traceback__:  # an assertion says at least where
        frame = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{frame.filename}:{frame.lineno}: {frame.line}"
    return f"{type(error).__name__}: {text}"
