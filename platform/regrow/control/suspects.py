"""Which ranks and nodes are suspected of slowing the group down, or of having hung, since when and why. Pure."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from regrow.control.commands import Outbox, ShowRanks
from regrow.control.membership import Member
from regrow.control.slow import Kind, SlowCollectives, SlowRanks, Spent, Suspicion, Worker, slow_node
from regrow.control.values import GpuReading
from regrow.plan.topology import Topology

SHOWN_WHOLE, SHOWN = 128, 8  # ranks up to which all are shown; above it, so many of the slowest
OF_RANKS = (Kind.slow_compute, Kind.slow_data, Kind.slow_copy)
LINKS_AGAIN_S = 60.0  # between two times that links are measured


class Suspects:
    """Of the newest generation."""

    def __init__(self, out: Outbox) -> None:
        self._out = out
        self.ranks, self.collectives = SlowRanks(), SlowCollectives()
        self.found: dict[tuple[Kind, str, int], Suspicion] = {}
        self._numbers: Mapping[Worker, int] = {}  # ranks
        self._measured_at = float("-inf")
        self._measure = False

    @property
    def wants_links(self) -> bool:
        """Whether keepers are to measure their links."""
        return self._measure

    def begin(self) -> None:
        """Another generation: what slowed the one before may be gone with it. Slow ranks that survive stay slow."""
        for suspicion in list(self.found.values()):
            if suspicion.kind not in OF_RANKS:
                self._clear(suspicion, recovered=False)
        self._measure = False
        self.ranks.begin()
        self.collectives.begin()

    def lost(self, workers: Collection[Worker]) -> None:
        """These are gone, and with them what they were slow at: the next group may be long in coming."""
        for suspicion in list(self.found.values()):
            if suspicion.kind in OF_RANKS and (suspicion.node, suspicion.pid) in workers:
                self._clear(suspicion, recovered=False)

    def read(
        self,
        spent: Mapping[Worker, Spent],
        ranks: Mapping[Worker, int],
        now: float,
        *,
        topology: Topology | None = None,
    ) -> None:
        """What all ranks of the generation have spent their time on so far; by its `topology` some have more to do
        than others, None: all have the same."""
        self._numbers = ranks
        self.lost({(each.node, each.pid) for each in self.found.values()} - ranks.keys())
        if not self.ranks.read(spent, now, ranks=ranks, topology=topology):
            return
        for worker in self.ranks.judge():
            for suspicion in [each for each in self.found.values() if (each.node, each.pid) == worker]:
                if suspicion.kind not in (Kind.corrupt, Kind.differing):
                    self._clear(suspicion)
            if self.ranks.is_slow(worker):
                self._suspect(self.ranks.suspicion(worker, ranks.get(worker)))
        if self.collectives.read(self.ranks.means, now) and not self.collectives.are_slow:
            for suspicion in [each for each in self.found.values() if each.kind is Kind.slow_link]:
                self._clear(suspicion)
        named = any(each.kind is Kind.slow_link for each in self.found.values())
        self._measure = self.collectives.are_slow and not named and now - self._measured_at > LINKS_AGAIN_S

    def linked(self, links: Mapping[str, Mapping[str, float]], now: float, *, all_told: bool = True) -> None:
        """Keepers have measured their links to others: bytes/s by both ends. Where not all have told and these name no
        node, links are measured again."""
        self._measure, self._measured_at = False, now
        rates: dict[str, float] = {}  # the best of each node's
        for one, rate_of in links.items():
            for other, rate in rate_of.items():
                for node in (one, other):
                    rates[node] = max(rate, rates.get(node, 0.0))
        if not self.collectives.are_slow:
            return
        node = slow_node(rates)
        if not node and not all_told:
            return
        longer = f"collectives take {self.collectives.excess:.0%} of a step longer than they did"
        if node:
            others = median(rate for other, rate in rates.items() if other != node)
            detail = f"{longer}; its links carry {rates[node] / 1e9:.2g} GB/s, the others' {others / 1e9:.2g}"
        else:
            told = ", ".join(f"{each[:12]} {rate / 1e9:.2g}" for each, rate in sorted(rates.items())[:SHOWN])
            detail = f"{longer}; no node's links stand out (GB/s: {told or 'none answered'})"
        since, factor = self.collectives.since, 1.0 + self.collectives.excess
        self._suspect(Suspicion(Kind.slow_link, node, 0, None, since, factor, detail))

    def slow_nodes(self, now: float, after_s: float) -> list[str]:
        """Nodes that have computed or sent slowly for so long."""
        kinds = (Kind.slow_compute, Kind.slow_link)
        slow = [each for each in self.found.values() if each.kind in kinds and now - each.since >= after_s]
        return sorted({each.node for each in slow if each.node})

    def hung(self, node: str, pid: int, rank: int | None, since: float, detail: str) -> None:
        """It is about to be ended; the group goes with it."""
        self._suspect(Suspicion(Kind.hung, node, pid, rank, since, 0.0, detail))

    def wrong(self, kind: Kind, node: str, pid: int, rank: int | None, now: float, detail: str) -> None:
        """It came to something else than others, from the same."""
        self._suspect(Suspicion(kind, node, pid, rank, now, 0.0, detail))

    def right(self, node: str, pid: int) -> None:
        """For long it has come to the same as the others."""
        for kind in (Kind.corrupt, Kind.differing):
            if (suspicion := self.found.get((kind, node, pid))) is not None:
                self._clear(suspicion)

    def show(self, gpus: Mapping[str, Sequence[GpuReading]], members: Sequence[Member]) -> None:
        """For people: what ranks spend a step on, once this generation has a reading. `gpus` is what those of each node
        told, `members` are all ranks."""
        means = self.ranks.means
        if not means.workers:
            return
        shown = means.slowest(len(means.workers) if len(means.workers) <= SHOWN_WHOLE else SHOWN)
        ranks = tuple(self._row(worker, mean, gpus, members) for worker, mean in shown if worker in self._numbers)
        self._out.append(ShowRanks(ranks, tuple(_told(each) for each in self.found.values())))

    def _row(
        self, worker: Worker, mean: Spent, gpus: Mapping[str, Sequence[GpuReading]], members: Sequence[Member]
    ) -> dict[str, Any]:
        node, pid = worker
        there, rank = gpus.get(node, ()), self._numbers[worker]
        place = members[rank].gpu if rank < len(members) else 0
        gpu = there[place] if place < len(there) else None
        return {
            "rank": rank,
            "node": node,
            "pid": pid,
            "step_s": mean.step_s,
            "compute_s": mean.compute_s,
            "data_wait_s": mean.data_s,
            "snapshot_s": mean.copy_s,
            "wait_shard_s": mean.shard_s,
            "wait_replicate_s": mean.replicate_s,
            "wait_all_s": mean.all_s,
            "memory_bytes": mean.memory_bytes,
            "temperature_c": getattr(gpu, "temperature_c", None),
            "power_w": getattr(gpu, "power_w", None),
        }

    def _suspect(self, suspicion: Suspicion) -> None:
        before = self.found.get(suspicion.key)
        self.found[suspicion.key] = replace(suspicion, since=before.since) if before else suspicion
        if before is None:
            self._out.record("suspected", **_told(suspicion))

    def _clear(self, suspicion: Suspicion, *, recovered: bool = True) -> None:
        del self.found[suspicion.key]
        told = {key: value for key, value in _told(suspicion).items() if key not in ("factor", "detail")}
        self._out.record("cleared", **told, recovered=recovered)


def _told(suspicion: Suspicion) -> dict[str, Any]:
    return {
        "kind": suspicion.kind.value,
        "node": suspicion.node,
        "pid": suspicion.pid,
        "rank": suspicion.rank,
        "since": suspicion.since,
        "factor": suspicion.factor,
        "detail": suspicion.detail,
    }
