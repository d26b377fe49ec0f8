"""A rank that leaves its group is seen to leave by those that wait for it, though its process lives on."""

import gc
import time
import traceback
from pathlib import Path

import torch.distributed as dist

from regrow.accept.tiny import tiny_model
from regrow.config.schema import ModelConfig, OptimConfig
from regrow.runtime.rendezvous import leave_generation
from support.gloo import run_ranks
from support.training import Training, build

DEADLINE_S = 30.0  # far below the group's timeout


class Lost(Exception):
    pass


def train_until_lost(model: ModelConfig) -> None:
    training = Training(model, optim=OptimConfig(global_batch_seqs=6, num_slices=6))
    step = build(training)
    for number in range(1000):
        if number == 3 and dist.get_rank() == 2:
            raise Lost
        step.run([training.rows(number)], num_micro_batches=1, lr=1e-3)


def leave(folder: str) -> bool:
    """Rank 2 leaves; the others are to notice while it is still there. Whether all did."""
    rank, size = dist.get_rank(), dist.get_world_size()
    try:
        train_until_lost(tiny_model())
    except (RuntimeError, Lost) as error:
        traceback.clear_frames(error.__traceback__)
    gc.collect()
    leave_generation()
    Path(folder, str(rank)).touch()
    give_up_at = time.monotonic() + DEADLINE_S
    while len(list(Path(folder).iterdir())) < size:
        if time.monotonic() > give_up_at:
            return False
        time.sleep(0.05)
    return True


def test_peers_notice_at_once_whoever_their_neighbours_are(tmp_path: Path) -> None:
    assert run_ranks(leave, 4, str(tmp_path)) == [True] * 4
