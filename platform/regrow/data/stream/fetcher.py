"""A node's calls to the token stream, one for all of its ranks."""

import asyncio
from collections import OrderedDict
from typing import Any

KEPT_CALLS = 4  # of a node; each holds on to its blocks


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
