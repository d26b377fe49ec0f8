"""Which node holds copies of which other one's snapshots, and which speaks for which. Pure."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice

from regrow.control.commands import Place
from regrow.control.events import KeeperUp
from regrow.control.links import Links
from regrow.control.values import Address, Peer

FAN_OUT = 8  # keepers that one node, or the coordinator, hears from and speaks to
NEIGHBOURS = 3  # that a newcomer may try to measure its link to
MOST_MOVED = 4  # nodes whose copies move where one link does not do


Allowed = Callable[[str, str], bool]  # may this node's copies be on that one?


def plan_peers(
    nodes: Sequence[tuple[str, str]], *, copies: int = 1, allowed: Allowed = lambda node, holder: True
) -> dict[str, tuple[str, ...]]:
    """For each of (node, failure domain) the nodes that hold its copies: fewer than `copies` where there are no more.

    Every node holds as many as it has itself, as far as that is allowed. A node and its holders are all of different
    domains, unless one domain has more than one of (copies + 1) nodes: then for as many as that can be.

    >>> plan_peers([("a", "rack 1"), ("b", "rack 1"), ("c", "rack 2"), ("d", "rack 2")])
    {'a': ('c',), 'b': ('d',), 'c': ('a',), 'd': ('b',)}
    >>> plan_peers([("a", "a"), ("b", "b"), ("c", "c")], copies=2)
    {'a': ('b', 'c'), 'b': ('c', 'a'), 'c': ('a', 'b')}
    """
    domains, sizes = dict(nodes), Counter(domain for _, domain in nodes)
    # domains stand together, the largest first: a shift by its size takes every node out of its own
    order = [node for node, domain in sorted(nodes, key=lambda each: (-sizes[each[1]], each[1]))]
    shifts: list[int] = []
    for number in range(1, min(copies, len(order) - 1) + 1):
        shift = number * max(sizes.values()) % len(order)
        while shift in (0, *shifts):
            shift = (shift + 1) % len(order)
        shifts.append(shift)
    plan = {node: [order[(at + shift) % len(order)] for shift in shifts] for at, node in enumerate(order)}
    _mend(plan, domains, allowed)
    return {node: tuple(plan[node]) for node, _ in nodes}


def _mend(plan: dict[str, list[str]], domains: Mapping[str, str], allowed: Allowed) -> None:
    """Give other holders to nodes whose own are not allowed; what they held others hold in their place."""
    free: Counter[str] = Counter()  # copies that a node would hold, and does not
    short = []
    for node, holders in plan.items():
        for holder in [each for each in holders if not allowed(node, each)]:
            holders.remove(holder)
            free[holder] += 1
            short.append(node)

    def candidates(node: str, *, apart: bool) -> list[str]:
        taken = {node, *plan[node]}
        near = {domains[each] for each in taken} if apart else set()
        found = [each for each in plan if each not in taken and domains[each] not in near and allowed(node, each)]
        return sorted(found, key=lambda each: not free[each])

    def give(node: str, seen: set[str], depth: int, *, apart: bool) -> bool:
        """One holder more: one that has room, or whose copies another one can take."""
        for holder in candidates(node, apart=apart) if depth else ():
            if holder in seen:
                continue
            seen.add(holder)
            if free[holder]:
                free[holder] -= 1
                plan[node].append(holder)
                return True
            for other in [each for each, holders in plan.items() if holder in holders]:
                plan[other].remove(holder)
                if give(other, seen, depth - 1, apart=apart):
                    plan[node].append(holder)
                    return True
                plan[other].append(holder)
        return False

    for node in short:
        _ = give(node, set(), MOST_MOVED, apart=True) or give(node, set(), MOST_MOVED, apart=False)


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

    def __init__(self, fan_out: int = FAN_OUT, copies: int = 1) -> None:
        self.known: dict[str, KeeperUp] = {}
        self.links = Links()
        self.peers: dict[str, tuple[str, ...]] = {}  # of the current generation's nodes: those that hold its copies
        self.outside: set[str] = set()  # nodes outside the group that hold its copies
        self.drained: Collection[str] = ()  # nodes that hold none for a group without them
        self._lacking: tuple[str, ...] = ()  # the current generation's nodes, where not all their keepers are known
        self._fan_out, self._copies = fan_out, copies
        self._apart: frozenset[str] = frozenset()  # nodes outside the tree of reports
        self._alive: frozenset[str] | None = None  # as Ray said last
        self._met: set[str] = set()  # every node that has come, or that Ray has named
        self._came: set[str] = set()  # nodes that came since Ray was asked last
        self._dark: set[str] = set()  # nodes that do not answer
        self._newcomers: dict[str, Peer] = {}  # whose keepers asked for neighbours, in the order of their coming
        self._turn = 0
        self._needed: frozenset[int] = frozenset()  # generations, of which bystanders were told
        self._told: set[str] = set()  # bystanders

    def up(self, keeper: KeeperUp) -> None:
        self.known[keeper.node] = keeper
        self._told.discard(keeper.node)
        self._dark.discard(keeper.node)
        self.came(keeper.node)

    def came(self, node: str) -> None:
        """A process of this node speaks. Ray has not been asked about it yet, if it is the first one."""
        if node not in self._met:
            self._met.add(node)
            self._came.add(node)

    def gone_dark(self, nodes: set[str]) -> None:
        """Nothing is asked of these nodes' keepers, until their workers come back with them."""
        self._dark |= nodes

    def nodes_alive(self, nodes: frozenset[str]) -> None:
        """Ray was asked. It knows a node before any process is there, and gives no id twice."""
        self._alive = nodes
        self._met |= nodes
        self._came.clear()

    def is_there(self, node: str) -> bool:
        """Whether its keeper can be asked, and is alive as far as is known."""
        return self.can_ask(node) and self.is_alive(node)

    def is_alive(self, node: str) -> bool:
        """Whether Ray has not found it dead, and it answers."""
        return node not in self._dark and not self.is_dead(node)

    def is_silent(self, node: str) -> bool:
        """Whether it does not answer, though Ray has not found it dead."""
        return node in self._dark and node in self.known and not self.is_dead(node)

    def is_back(self, node: str) -> None:
        """A node that did not answer does again."""
        self._dark.discard(node)

    def can_ask(self, node: str) -> bool:
        return node in self.known and node not in self._dark

    def is_dead(self, node: str) -> bool:
        """Whether Ray has found it dead."""
        return self._alive is not None and node not in self._alive and node not in self._came

    def known_of(self, nodes: Iterable[str]) -> tuple[str, ...]:
        """Those whose keepers are known, each once."""
        return tuple(node for node in dict.fromkeys(nodes) if node in self.known)

    @property
    def current(self) -> tuple[str, ...]:
        """The current generation's nodes whose keepers are known."""
        return tuple(node for node in self.peers if node in self.known)

    @property
    def speakers(self) -> tuple[str, ...]:
        """The nodes that hear from the coordinator, and tell the others."""
        leaders = islice((node for node in self.peers if node not in self._apart), self._fan_out)
        return (*leaders, *sorted(self._apart), *sorted(self.outside))

    def bystanders(self, needed: frozenset[int]) -> list[str]:
        """Nodes that the group does not use and that have not heard yet that only these generations' snapshots are
        needed; they do now. They may hold an earlier group's, for as long as the run lasts."""
        if not self.peers:  # nothing of the group is committed yet
            return []
        if needed != self._needed:
            self._needed, self._told = needed, set()
        used = {*self.peers, *self.outside, *self._told}
        found = [node for node in self.known if node not in used and self.is_there(node)]
        self._told.update(found)
        return found

    def begin(self, nodes: Sequence[str]) -> None:
        """A generation trains on these nodes. Until all their keepers are known nothing of it is committed."""
        self._apart = frozenset()
        self._lacking = () if self.known.keys() >= set(nodes) else tuple(nodes)
        self._plan([] if self._lacking else list(nodes))

    @property
    def missing(self) -> tuple[str, ...]:
        """The current generation's nodes whose keepers are not known, where any is: without snapshots none."""
        unknown = [node for node in self._lacking if node not in self.known and not self.is_dead(node)]
        return tuple(unknown) if self.known else ()

    def completes(self) -> bool:
        """Whether the last keeper is known that the current generation lacked: it has its places from here on."""
        if not self._lacking or not self.known.keys() >= set(self._lacking):
            return False
        self.begin(self._lacking)
        return True

    @property
    def has_lost_holders(self) -> bool:
        """Whether a node outside the group that held its copies is dead."""
        return not all(self.is_alive(node) for node in self.outside)

    def replan(self) -> bool:
        """Whether others hold copies from here on: a link does not do, or does again, or a node outside is dead."""
        before = self.peers
        self._plan(list(self.peers))
        return self.peers != before

    def set_apart(self, nodes: Iterable[str]) -> bool:
        """Some of these may be silent, the others wait for them: each reports by itself. Whether that is new."""
        apart = self.peers.keys() & nodes
        if apart <= self._apart or len(self.peers) <= self._fan_out:
            return False
        self._apart = frozenset(apart)
        return True

    def _tree(self) -> dict[str, Branch]:
        """Of the current generation's nodes."""
        tree = plan_tree([node for node in self.peers if node not in self._apart], fan_out=self._fan_out)
        return tree | {node: Branch("", (), 1) for node in self._apart}

    def spoken_for(self, nodes: Collection[str]) -> dict[str, str]:
        """By node the one that speaks for it to the coordinator; empty unless these are the current generation's nodes,
        all of them are there, and some are spoken for by others."""
        if len(nodes) <= self._fan_out or self.peers.keys() != set(nodes) or not all(map(self.is_there, nodes)):
            return {}
        speakers: dict[str, str] = {}
        for node, branch in self._tree().items():  # leaders come first
            speakers[node] = speakers[branch.leader] if branch.leader else node
        return speakers

    def places(self) -> dict[str, Place]:
        """Of each of the current generation's keepers."""
        tree = self._tree()
        return {
            node: Place(self._known_peers(node), tree[node].leader, tree[node].members, tree[node].num_nodes)
            for node in self.peers
        }

    def neighbours(self, node: str, address: Address) -> list[Peer]:
        """Other nodes, those that train before others that came lately, for a newcomer to measure its links to."""
        self.came(node)
        self._newcomers.pop(node, None)
        here = [each for each in self.current if each != node]
        self._turn += 1
        at = self._turn * NEIGHBOURS % max(len(here), 1)  # newcomers do not all ask the same ones
        train = (Peer(each, self.known[each].address) for each in chain(here[at:], here[:at]))
        came = (peer for each, peer in reversed(self._newcomers.items()) if each not in self.peers)
        found = list(islice((peer for peer in chain(train, came) if self.is_alive(peer.node)), NEIGHBOURS))
        self._newcomers[node] = Peer(node, address)
        return found

    def _plan(self, nodes: list[str]) -> None:
        """Which node holds which one's copies: the group's, and where these are too few others that have a keeper."""
        domains = {node: self.known[node].domain for node in nodes}
        planned = plan_peers(list(domains.items()), copies=self._copies, allowed=self.links.allow)
        load = Counter(holder for holders in planned.values() for holder in holders)
        short = [node for node, holders in planned.items() if len(holders) < self._copies]
        elsewhere = [node for node in self.known if node not in domains and node not in self.drained]
        others = [node for node in elsewhere if self.is_alive(node)] if short else []
        for node in short:
            planned[node] += self._more_holders(node, planned[node], [*others, *nodes], load)
        self.peers = planned
        self.outside = {holder for holders in planned.values() for holder in holders} - planned.keys()

    def _more_holders(
        self, node: str, holders: tuple[str, ...], among: Iterable[str], load: Counter[str]
    ) -> tuple[str, ...]:
        """Of other domains first, those that hold least."""
        near = {self.known[each].domain for each in (node, *holders)}
        free = [each for each in among if each not in (node, *holders) and self.links.allow(node, each)]
        free.sort(key=lambda each: (self.known[each].domain in near, load[each]))
        more = tuple(free[: self._copies - len(holders)])
        load.update(more)
        return more

    def _known_peers(self, node: str) -> tuple[Peer, ...]:
        return tuple(Peer(each, self.known[each].address) for each in self.peers[node])
