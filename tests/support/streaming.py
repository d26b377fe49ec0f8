"""A rank's view of the token stream, for tests: its batches, and what it had to read from the shards itself."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from regrow.config.schema import PretrainConfig
from regrow.data.read.batch import layout_of
from regrow.data.read.corpora import Corpora, order_of
from regrow.data.stream.client import Ask, rank_batches


def consume_batches(
    config: PretrainConfig,
    corpora: Corpora,
    asks: Sequence[Ask],
    slices: range,
    steps: range,
    *,
    stall_timeout_s: float = 60.0,
    has_fed: bool = False,
    step_s: float = 0.0,
    seen: Callable[[int, int], Any] | None = None,
    on_fallback: Callable[[int, str], Any] | None = None,
    is_over: Callable[[], bool] = lambda: False,
) -> tuple[list[int], list[tuple[int, str]]]:
    """Take the batches of these steps, `step_s` for each; the digests of the rank's parts, and what it read directly.

    That is (window, reason) of every fallback, unless `on_fallback` takes them.
    """
    digests: list[int] = []
    fallbacks: list[tuple[int, str]] = []
    batches = rank_batches(
        asks,
        order_of(config, corpora),
        corpora.reader("train"),
        layout_of(config),
        slices=slices,
        start_step=steps.start,
        stop_step=steps.stop,
        stall_timeout_s=stall_timeout_s,
        has_fed=has_fed,
        on_fallback=on_fallback or (lambda window, reason: fallbacks.append((window, reason))),
        is_over=is_over,
    )
    for step, batch in zip(steps, batches, strict=True):
        assert batch.step == step
        digests.append(batch.digest())
        if seen is not None:
            seen(step, digests[-1])
        time.sleep(step_s)
    return digests, fallbacks
