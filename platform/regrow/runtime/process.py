"""What a worker process keeps from one generation to the next."""

from dataclasses import dataclass, field
from typing import Any

import torch

from regrow.parallel.compile import CompileCache
from regrow.parallel.stream import Stream
from regrow.runtime.hardware.probe import Prober
from regrow.runtime.job import Job
from regrow.runtime.kept_rows import KeptRows
from regrow.runtime.memory_tier import MemoryTier


@dataclass
class Process:
    """A worker: its device, where its steps run, and its ways to keeper and compile cache."""

    job: Job
    device: torch.device
    stream: Stream
    prober: Prober
    memory: MemoryTier | None  # None where nothing is snapshotted
    compiled: CompileCache | None  # that takes what the first step compiles; None once it was told, or without one
    rows: KeptRows = field(default_factory=KeptRows)
    fetcher: Any = None  # the actor that asks the token stream for this node's ranks, once one was asked for
