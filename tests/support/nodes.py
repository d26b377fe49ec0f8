"""Keepers of a few nodes that are lost one after the other, for tests whose ranks are processes."""

import time
from pathlib import Path

from regrow.control.peers import plan_peers
from regrow.control.values import Peer, SnapshotAck
from regrow.state.memory.holders import Holder
from regrow.state.memory.node import KeeperNode
from support.keepers import RUN, SECRET


class Nodes:
    """Keepers of a few nodes, ranks placed on them in turn."""

    def __init__(self, folder: Path, count: int) -> None:
        self.reports: list[SnapshotAck] = []
        self.keepers = {
            f"node-{k}": KeeperNode(
                folder / f"n{k}",
                node=f"node-{k}",
                host="127.0.0.1",
                secret=SECRET,
                run_id=RUN,
                report=self.reports.append,
            )
            for k in range(count)
        }
        self.set_peers()
        for keeper in self.keepers.values():
            keeper.start()

    def set_peers(self) -> None:
        """Each has the copies of another one of those that are left."""
        for node, peers in plan_peers([(node, node) for node in self.keepers]).items():
            self.keepers[node].set_peers(tuple(Peer(each, self.keepers[each].address) for each in peers))

    def folders(self) -> list[str]:
        return [str(keeper.folder) for keeper in self.keepers.values()]

    def lose(self, node: str) -> None:
        """The node, and what it held in memory."""
        self.keepers.pop(node).close(delete=True)

    def holders(self, generation: int) -> list[Holder]:
        return [
            Holder(node, keeper.address, held)
            for node, keeper in self.keepers.items()
            for held in keeper.holdings()
            if held.moment.generation == generation
        ]

    def wait_for(self, generation: int, count: int) -> None:
        """Until so many nodes have the generation's step safe."""
        give_up_at = time.monotonic() + 30
        while len({report.node for report in self.reports if report.version.generation == generation}) < count:
            assert time.monotonic() < give_up_at
            time.sleep(0.01)

    def close(self) -> None:
        for node in list(self.keepers):
            self.lose(node)
