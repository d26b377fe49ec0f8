"""Which node cannot copy its snapshots to which other one, as its keeper complains. Pure."""

REFUSED_S = 5.0  # without a copy that arrived: another node is to hold them
AGAIN_S, AT_MOST_S = 30.0, 480.0  # after which a link is tried again: twice as long each time, but no longer
CUT_OFF = 3  # nodes to which one cannot copy: it is itself what fails, and no others are tried


class Links:
    """Of all keepers of a run."""

    def __init__(self) -> None:
        self._refused_since: dict[tuple[str, str], float] = {}
        self._broken: dict[tuple[str, str], float] = {}  # and until when
        self._again_s: dict[tuple[str, str], float] = {}  # for how long it is given up the next time
        self._tried_at: dict[tuple[str, str], float] = {}  # when it was tried again

    def begin(self) -> None:
        """Another generation's copies begin: a refusal before them says nothing of how long a link does not do."""
        self._refused_since.clear()

    def refused(self, node: str, peer: str, tried_s: float, now: float) -> bool:
        """A copy did not arrive, for so long already; whether that is to be the last one for now."""
        since = self._refused_since.setdefault((node, peer), now - tried_s)
        if now - since < REFUSED_S:
            return False
        if since - self._tried_at.get((node, peer), since) > AT_MOST_S:  # it was whole for long
            del self._again_s[node, peer]
        self._broken[node, peer] = now + (again_s := self._again_s.get((node, peer), AGAIN_S))
        self._again_s[node, peer] = min(2 * again_s, AT_MOST_S)
        del self._refused_since[node, peer]
        return True

    def copied(self, node: str, peers: tuple[str, ...]) -> None:
        """All of them have a copy."""
        for peer in peers if self._refused_since else ():
            self._refused_since.pop((node, peer), None)

    def complains(self, node: str) -> bool:
        """Whether this node has said why it does not report."""
        return any(each == node for each, _ in self._refused_since)

    def allow(self, node: str, peer: str) -> bool:
        """A node that two others cannot copy to holds no copies, one that is cut off has none."""
        if not self._broken:
            return True
        to_it = {each for each, other in self._broken if other == peer}
        from_it = {other for each, other in self._broken if each == node}
        return not (node in to_it or len(to_it) > 1 or len(from_it) >= CUT_OFF)

    def is_back(self, node: str) -> bool:
        """Its keeper was gone, and was started anew: what was given up with it; whether that is any link."""
        over = [link for link in self._broken if node in link]
        for link in over:
            del self._broken[link]
            self._again_s[link] = max(self._again_s[link] / 2, AGAIN_S)
        self._refused_since = {link: at for link, at in self._refused_since.items() if node not in link}
        return bool(over)

    def try_again(self, now: float) -> bool:
        """Whether some link has been given up for long enough."""
        over = [link for link, until in self._broken.items() if now > until]
        for link in over:
            del self._broken[link]
            self._tried_at[link] = now
        return bool(over)
