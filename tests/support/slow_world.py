"""Made-up groups in which every step ends with its slowest rank, for tests and benchmarks of what is found slow."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from regrow.control.slow import READ_S, Spent, Worker


@dataclass
class World:
    """Steps of log-normal compute, one in a hundred five times as long where `tails`; collectives, as jittered, beside
    it."""

    seed: int
    size: int
    step_s: float
    jitter: float
    tails: bool = False
    slow_s: float = 0.0  # rank 1 computes so much longer, from `slow_from` on
    slow_from: int = 0
    data_s: float = 0.0  # rank 1 waits for data
    comm_s: float = 0.0  # collectives take so much longer, from `comm_from` on, or `slow_from`
    comm_from: int | None = None

    def readings(self, steps: int) -> Iterator[tuple[int, float, dict[Worker, Spent]]]:
        """The newest step, the time, and what ranks have spent by then, whenever they are read."""
        random, of_collectives = np.random.default_rng(self.seed), np.random.default_rng(self.seed + 10**6)
        now, read_at = 0.0, READ_S
        total, data = np.zeros((self.size, 2)), 0.0
        for step in range(1, steps + 1):
            own = 0.8 * self.step_s * random.lognormal(0, self.jitter, self.size)
            own *= np.where(self.tails & (random.random(self.size) < 0.01), 5.0, 1.0)
            is_slow = step >= self.slow_from
            own[1] += (self.slow_s + self.data_s) * is_slow
            data += self.data_s * is_slow
            is_slow = step >= (self.slow_from if self.comm_from is None else self.comm_from)
            comm_s = 0.2 * self.step_s * of_collectives.lognormal(0, self.jitter)
            taken = own.max() + comm_s + self.comm_s * is_slow
            now += taken
            total += np.stack([np.full(self.size, taken), taken - own], axis=1)
            if now >= read_at:
                read_at = now + READ_S
                spent = [Spent(step, step_s=float(all_s), all_s=float(wait_s)) for all_s, wait_s in total]
                spent[1] = Spent(step, step_s=float(total[1, 0]), data_s=data, all_s=float(total[1, 1]))
                yield step, now, {(f"node {rank}", rank): each for rank, each in enumerate(spent)}
