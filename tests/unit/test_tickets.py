"""Tickets of the stream's actor, without Ray."""

import asyncio
from typing import Any

from regrow.data.read.batch import BatchLayout
from regrow.data.stream.actor import TokenStream


def test_a_late_call_of_a_dataset_that_has_ended_does_not_take_the_next_ones_place() -> None:
    """Its source was taken for the new one's, which then was taken for one that Ray had run again, and ended."""

    async def draw() -> tuple[list[int], list[int], int]:
        nothing: Any = None
        layout = BatchLayout(global_batch_seqs=4, num_slices=4, window_steps=8)
        stream = TokenStream(nothing, nothing, layout, start_step=0, stop_step=64, prefetch_windows=2, stream_cpus=1.0)
        stream.changed, stream.run = asyncio.Event(), 1  # run 0 has ended
        return await stream.tickets(0, "old"), await asyncio.wait_for(stream.tickets(1, "new"), 30), stream.run

    late, drawn, run = asyncio.run(draw())
    assert (late, run) == ([], 1)
    assert drawn
