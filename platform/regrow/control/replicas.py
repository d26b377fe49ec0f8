"""Whether HSDP's replicas hold the same state: each snapshot's checksums, compared before it is committed. Pure."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from regrow.control.values import SnapshotAck, Version


@dataclass(frozen=True)
class Unequal:
    """Ranks that hold the same shard, and not the same bits."""

    version: Version
    ranks: tuple[int, ...]  # the odd ones; or all, where there is no majority
    is_decided: bool


class Replicas:
    """Of one generation after another: what its ranks' snapshots add up to."""

    def __init__(self) -> None:
        self._digests: dict[Version, dict[str, dict[int, int]]] = {}  # by shard, then by rank

    def begin(self) -> None:
        self._digests.clear()

    def take(self, acks: Iterable[SnapshotAck]) -> Unequal | None:
        """Take nodes' reports; the first shard of which all replicas have reported, and some hold something else."""
        for ack in acks:
            known = self._digests.setdefault(ack.version, defaultdict(dict))
            for digest in ack.digests:
                known[digest.shard][digest.rank] = digest.value
            for shard, replicas in {(digest.shard, digest.replicas) for digest in ack.digests}:
                if len(known[shard]) == replicas and (found := _unequal(ack.version, known[shard])):
                    return found
        return None

    def committed(self, version: Version) -> None:
        """What is older is compared no more."""
        self._digests = {each: known for each, known in self._digests.items() if each > version}


def _unequal(version: Version, values: dict[int, int]) -> Unequal | None:
    (most, count), *others = Counter(values.values()).most_common()
    if not others:
        return None
    is_decided = 2 * count > len(values)
    odd = [rank for rank, value in values.items() if not is_decided or value != most]
    return Unequal(version, tuple(sorted(odd)), is_decided)
