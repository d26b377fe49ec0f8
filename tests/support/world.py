"""Ranks of `support.gloo` that form a generation as workers do, without a coordinator."""

from dataclasses import asdict

import torch.distributed as dist

from regrow.control.membership import Formation, Member
from regrow.runtime.abort import Breaker
from regrow.runtime.rendezvous import Doors, form_group, leave_generation
from regrow.state.collective import gather

TIMEOUT_S = 60.0


def form(backend: str = "gloo", generation: int = 1, timeout_s: float = TIMEOUT_S) -> Breaker:
    """Leave the ranks' own group and form another of all of them; what breaks it off."""
    rank, doors, breaker = dist.get_rank(), Doors.at("127.0.0.1"), Breaker()
    members = gather(asdict(doors.of(Member(f"m{rank}", "node", "127.0.0.1", 0, rank))))
    leave_generation()
    formation = Formation(generation, tuple(Member(**each) for each in members))
    form_group(
        formation.seat_of(rank, b"secret"),
        doors,
        backend=backend,
        timeout_s=timeout_s,
        breaker=breaker,
        waiting=lambda generation, breaker: None,
    )
    return breaker
