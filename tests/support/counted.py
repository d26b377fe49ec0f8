"""A callback for tests: it counts steps, and makes a number of theirs that another order would change."""

from collections.abc import Mapping


class Counted:
    """`train.callback=support.counted:Counted`."""

    def __init__(self) -> None:
        self.steps, self.numbers, self.best, self.seen = 0, 0, 1e9, ""

    def after_step(self, row: Mapping[str, float]) -> None:
        self.steps += 1
        self.numbers = (self.numbers * 31 + int(row["step"])) % 1_000_003
        self.best = min(self.best, row["loss"])
        self.seen = f"up to step {row['step']:.0f}"

    def state(self) -> Mapping[str, int | float | str]:
        return {"steps": self.steps, "numbers": self.numbers, "best": self.best, "seen": self.seen}

    def restore(self, state: Mapping[str, int | float | str]) -> None:
        self.steps, self.numbers = int(state["steps"]), int(state["numbers"])
        self.best, self.seen = float(state["best"]), str(state["seen"])


class Another(Counted):
    """Whose state has the same keys, and is of its own steps."""


def expected(last_step: int) -> dict[str, int | float | str]:
    """What is kept of it after these steps, each once and in order, without the losses."""
    numbers = 0
    for step in range(1, last_step + 1):
        numbers = (numbers * 31 + step) % 1_000_003
    name = {"train.callback": "support.counted:Counted"}
    return {"steps": last_step, "numbers": numbers, "seen": f"up to step {last_step}", **name}
