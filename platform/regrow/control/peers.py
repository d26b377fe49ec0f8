"""Which node holds copies of which other one's snapshots, and which speaks for which. Pure."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from regrow.control.commands import Place
from regrow.control.events import KeeperUp
from regrow.control.values import Address, Peer

FAN_OUT = 8  # keepers that one node, or the coordinator, hears from and speaks to
NEIGHBOURS = 3  # that a newcomer may try to measure its link to


def plan_peers(nodes: Sequence[tuple[str, str]]) -> dict[str, str]:
    """For each of (node, failure domain) the node that holds its copies; "" where there is only one.

    Every node holds the copies of exactly one other. They are of another domain for as many nodes as that can be: for
    all of them unless one domain has more than half.

    >>> plan_peers([("a", "rack 1"), ("b", "rack 1"), ("c", "rack 2"), ("d", "rack 2")])
    {'a': 'c', 'b': 'd', 'c': 'a', 'd': 'b'}
    """
    sizes = Counter(domain for _, domain in nodes)
    # domains stand together, the largest first: a shift by its size takes every node out of its own
    order = [node for node, domain in sorted(nodes, key=lambda each: (-sizes[each[1]], each[1]))]
    shift = max(sizes.values(), default=1) % max(len(order), 1) or 1
    peers = {node: order[(at + shift) % len(order)] for at, node in enumerate(order)}
    return {node: peers[node] if peers[node] != node else "" for node, _ in nodes}


@dataclass(frozen=True)
class Branch:
    """A node's place in a tree."""

    leader: str  # "": the root, which is no node
    members: tuple[str, ...]  # that it is the leader of
    num_nodes: int  # itself, its members, theirs and so on


def plan_tree(nodes: Sequence[str], *, fan_out: int) -> dict[str, Branch]:
    """A tree in which none has more than `fan_out` members, the root included, as flat as that can be.

    >>> {node: (branch.leader, branch.num_nodes) for node, branch in plan_tree("abcde", fan_out=2).items()}
    {'a': ('', 3), 'b': ('', 2), 'c': ('a', 1), 'd': ('a', 1), 'e': ('b', 1)}
    """
    sizes = [1] * len(nodes)
    for at in reversed(range(fan_out, len(nodes))):
        sizes[at // fan_out - 1] += sizes[at]
    return {
        node: Branch(
            leader=nodes[at // fan_out - 1] if at >= fan_out else "",
            members=tuple(nodes[fan_out * (at + 1) : fan_out * (at + 2)]),
            num_nodes=sizes[at],
        )
        for at, node in enumerate(nodes)
    }


class KeeperRegistry:
    """All keepers of a run, and the current generation's places among them."""

    def __init__(self, fan_out: int = FAN_OUT) -> None:
        self.known: dict[str, KeeperUp] = {}
        self.peers: dict[str, str] = {}  # of the current generation's nodes; one alone has another one, if that is up
        self._fan_out = fan_out
        self._alive: frozenset[str] | None = None  # as Ray said last
        self._dark: set[str] = set()  # nodes that do not answer
        self._newcomers: dict[str, Peer] = {}  # whose keepers asked for neighbours, in the order of their coming
        self._turn = 0

    def up(self, keeper: KeeperUp) -> None:
        self.known[keeper.node] = keeper
        self._dark.discard(keeper.node)

    def gone_dark(self, nodes: set[str]) -> None:
        """Nothing is asked of these nodes' keepers, until their workers come back with them."""
        self._dark |= nodes

    def nodes_alive(self, nodes: frozenset[str]) -> None:
        self._alive = nodes

    def is_alive(self, node: str) -> bool:
        """Whether Ray has not found it dead, and it answers."""
        return node not in self._dark and (self._alive is None or node in self._alive)

    def can_ask(self, node: str) -> bool:
        return node in self.known and node not in self._dark

    def is_dead(self, node: str) -> bool:
        """Whether Ray has found it dead."""
        return self._alive is not None and node not in self._alive

    def known_of(self, nodes: Iterable[str]) -> tuple[str, ...]:
        """Those whose keepers are known, each once."""
        return tuple(node for node in dict.fromkeys(nodes) if node in self.known)

    @property
    def current(self) -> tuple[str, ...]:
        """The current generation's nodes whose keepers are known."""
        return tuple(node for node in self.peers if node in self.known)

    @property
    def outside(self) -> set[str]:
        """Nodes outside the group that hold its copies."""
        return set(self.peers.values()) - self.peers.keys() - {""}

    @property
    def speakers(self) -> tuple[str, ...]:
        """The nodes that hear from the coordinator, and tell the others."""
        return (*list(self.peers)[: self._fan_out], *sorted(self.outside))

    def begin(self, nodes: Sequence[str]) -> None:
        """A generation trains on these nodes. Without all their keepers nothing of it is committed."""
        self._plan(list(nodes) if self.known.keys() >= set(nodes) else [])

    def replan(self) -> bool:
        """Whether a node outside the group held its copies, and is dead: another one does from here on."""
        if all(self.is_alive(node) for node in self.outside):
            return False
        self._plan(list(self.peers))
        return True

    def places(self) -> dict[str, Place]:
        """Of each of the current generation's keepers."""
        return {
            node: Place(self._peer_of(node), branch.leader, branch.members, branch.num_nodes)
            for node, branch in plan_tree(list(self.peers), fan_out=self._fan_out).items()
        }

    def neighbours(self, node: str, address: Address) -> list[Peer]:
        """Other nodes, those that train before others that came lately, for a newcomer to measure its links to."""
        self._newcomers.pop(node, None)
        here = [each for each in self.current if each != node]
        self._turn += 1
        at = self._turn * NEIGHBOURS % max(len(here), 1)  # newcomers do not all ask the same ones
        found = [Peer(each, self.known[each].address) for each in (here[at:] + here[:at])[:NEIGHBOURS]]
        found += [peer for each, peer in reversed(self._newcomers.items()) if each not in self.peers]
        self._newcomers[node] = Peer(node, address)
        return [peer for peer in found if self.is_alive(peer.node)][:NEIGHBOURS]

    def _plan(self, nodes: list[str]) -> None:
        """Who holds whose copies; where a group is on one node, another one that has a keeper, and no rank of it."""
        self.peers = plan_peers([(node, self.known[node].domain) for node in nodes])
        if len(nodes) == 1:
            (alone,) = nodes
            domain = self.known[alone].domain
            others = [node for node in self.known if node != alone and self.is_alive(node)]
            others.sort(key=lambda node: self.known[node].domain == domain)
            self.peers[alone] = next(iter(others), "")

    def _peer_of(self, node: str) -> Peer | None:
        peer = self.peers[node]
        return Peer(peer, self.known[peer].address) if peer else None
