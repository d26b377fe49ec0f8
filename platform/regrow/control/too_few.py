"""A run that stands still because fewer workers than `cluster.min_workers` are left of its group, or than it takes to
tell which unit computes wrong. Pure."""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from regrow.control.commands import Outbox

A_THIRD = "leave one of these nodes out, or have three units of their kind, and start the same command again"
YIELD_S = 10.0  # that it waits for workers elsewhere before nodes are used that failed again and again
RESTART_S = 60.0  # that Ray Train may take to start a group, before it is said that this is waited for


@dataclass
class TooFew:
    """How long that has been so, and for how long it may."""

    least: int  # workers, of the smallest group
    min_workers: int  # `cluster.min_workers`, which may be no whole units
    patience_s: float  # `cluster.wait_for_workers_s`
    out: Outbox
    since: float | None = None  # None: there are enough, or there was no group yet
    open_question: str = ""  # which unit computes wrong: what more workers than `least` are waited for to tell
    _told: bool = False
    _restarts: bool = False  # all processes are to be started, by Ray Train

    def count(self, left: int, now: float, *, deciding: int = 0) -> None:
        """So many are left of a group that is over; `deciding` are needed while the question is open."""
        if left < max(self.least, deciding) and self.since is None:
            self.since = now

    def restarts(self, now: float) -> None:
        """No process is there, until Ray Train has started a whole group."""
        self.since, self._restarts = now if self.since is None else self.since, True

    @property
    def smallest(self) -> str:
        """How many workers `least` is, and by which setting."""
        setting = f"cluster.min_workers={self.min_workers}"
        return setting if self.least == self.min_workers else f"{self.least} (the smallest group with {setting})"

    @property
    def reason(self) -> str:
        """Why the run stands still."""
        if self._restarts:
            return f"Ray Train has not started a group of {self.smallest} or more yet"
        return "a third unit is waited for" if self.open_question else f"fewer workers are left than {self.smallest}"

    def enough(self) -> None:
        """Processes are there for a group, or it forms."""
        self.since, self._told, self._restarts = None, False, False

    def yields(self, now: float) -> bool:
        """Whether it is better to take any worker than to wait on."""
        return self.since is not None and now - self.since > YIELD_S

    def tick(self, left: Callable[[], int], draining: Collection[str], now: float) -> str:
        """Say once what is waited for; why the run ends, or empty."""
        if self.since is None:
            return ""
        if now - self.since > (RESTART_S if self._restarts else YIELD_S) and not self._told:
            self._told = True
            nodes = ", ".join(sorted(node[:12] for node in draining))
            waits = f"the run waits for others, up to {self.patience_s:.0f} s"
            drain = f"; Ray starts none on nodes that drain: {nodes}" if nodes else ""
            few = f"{left()} of {self.smallest} workers are left"
            if self._restarts:
                few = f"no group of {self.smallest} or more was started for {RESTART_S:.0f} s"
            self.out.record("note", text=f"{self.open_question or few}: {waits}{drain}")
        if now - self.since <= self.patience_s:
            return ""
        if self.open_question:
            return f"{self.open_question}, and no third came within {self.patience_s:.0f} s: {A_THIRD}"
        return (
            f"fewer than {self.smallest} for {self.patience_s:.0f} s; start nodes and run the same "
            "command again, or let it wait longer with cluster.wait_for_workers_s"
        )
