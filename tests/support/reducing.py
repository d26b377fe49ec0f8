"""A callback for tests that has a collective of its own, which fails where a peer is gone."""

from collections.abc import Mapping

import torch
import torch.distributed as dist


class Reducing:
    """`train.callback=support.reducing:Reducing`. All ranks have to call it."""

    group: dist.ProcessGroup | None = None
    hides = False  # what the collective raises is the cause of another error

    def after_step(self, row: Mapping[str, float]) -> None:
        try:
            dist.all_reduce(torch.ones(3), group=self.group)
        except RuntimeError as error:
            if not self.hides:
                raise
            raise ValueError("no mean") from error

    def state(self) -> Mapping[str, int | float | str]:
        return {}

    def restore(self, state: Mapping[str, int | float | str]) -> None:
        raise AssertionError("there is no state")
