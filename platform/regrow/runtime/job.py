"""What the driver hands to every worker. Ray's dashboard shows parts of it, as text: nothing in it is secret.

No torch: the driver and Ray Train's controller load this too, and only workers should pay for that import.
"""

from dataclasses import dataclass
from typing import Any

from regrow.config.schema import PretrainConfig
from regrow.data.read.corpora import Corpora
from regrow.plan.topology import Table

CALL_TIMEOUT_S = 120.0  # of a call to the coordinator


@dataclass(frozen=True)
class Job:
    """One attempt at a run, as its workers need to know it."""

    config: PretrainConfig
    topologies: Table  # of every world size that the group may have
    run_id: str
    folder: str  # the run's
    checkpoints: str  # folder in it
    compile_cache: str | None  # folder
    corpora: Corpora
    coordinator: Any  # actor handles
    stream: Any
    first_generation: int  # the one that this driver starts with
    fit_at: float  # unix time at which the driver asked for workers
    driver_s: dict[str, float]  # what the driver did before that
