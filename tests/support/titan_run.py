"""torchtitan's own training on a CPU: a run that it checkpoints, and one that it goes on with from a folder.

    titan/bin/python tests/support/titan_run.py save FOLDER [--tied]  # FOLDER/checkpoint/step-5, FOLDER/run.json
    titan/bin/python tests/support/titan_run.py continue FOLDER STEP [--tied]  # from step-STEP there: prints losses

`titan` is an environment of its own (`benchmarks/step_titan.py` says how to make it). Its checkpoint manager,
optimizer, scheduler and step, on rows that are handed in; `run.json` holds those after step 5, and all losses. Learning
rates warm up over a tenth of 100 steps and are steady then, as `OPTIM` has it for ours.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "platform"), str(ROOT / "tests"), str(ROOT)]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from benchmarks.step_titan import build_trainer, micro_batches, stand_in_for_cuda  # noqa: E402
from torch import Tensor  # noqa: E402

from regrow.config.schema import ActivationCheckpoint, Dtype, ModelConfig, OptimConfig  # noqa: E402

SAVED, STEPS, TOTAL = 5, 25, 100  # the step that is saved; the last that is taken; those that the schedule spans
SEQS, SEQ_LEN = 4, 12
OPTIM = OptimConfig(global_batch_seqs=SEQS, num_slices=SEQS, lr=1e-2)


def model(tied: bool) -> ModelConfig:
    return ModelConfig(
        name="titan", vocab_size=40, dim=16, num_layers=1, num_heads=4, num_kv_heads=2, ffn_dim=24, tied=tied
    )


def rows_of(step: int) -> Tensor:
    """Of a step, counted from 1: int64 [SEQS, SEQ_LEN + 1]. Something can be learned of them."""
    dice = torch.Generator().manual_seed(step)
    return (torch.randint(40, (SEQS, 1), generator=dice) + torch.arange(SEQ_LEN + 1) ** 2) % 40


def trainer_of(folder: Path, *, tied: bool, interval: int) -> Any:
    """Of one rank. It checkpoints into `folder`/checkpoint after every `interval` steps."""
    stand_in_for_cuda()
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.components.optimizer import LRSchedulersContainer

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return build_trainer(
        model(tied),
        device=torch.device("cpu"),
        dtype=Dtype.float32,
        seq_len=SEQ_LEN,
        micro_batch_seqs=SEQS,
        num_micro_batches=1,
        lr=OPTIM.lr,
        compiled=False,
        compile_backend="inductor",
        activation_checkpoint=ActivationCheckpoint.none,
        dump_folder=str(folder),
        # its data loader is none of ours
        checkpoint=CheckpointManager.Config(enable=True, interval=interval, exclude_from_loading=["dataloader"]),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=TOTAL // 10, total_steps=TOTAL, decay_ratio=0.0),
    )


def train(trainer: Any, last_step: int) -> dict[int, float]:
    """As its own loop does; the losses by step."""
    losses: dict[int, float] = {}
    trainer.metrics_processor.should_log = lambda _: True
    trainer.metrics_processor.log = lambda step, loss, *rest, **more: losses.update({step: loss})
    while trainer.step < last_step:
        trainer.step += 1
        trainer.train_step(trainer.batch_generator(micro_batches(rows_of(trainer.step), SEQS)))
        trainer.checkpointer.save(trainer.step)
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("save", "continue"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("step", type=int, nargs="?", default=-1)
    parser.add_argument("--tied", action="store_true")
    options = parser.parse_args()
    if options.what == "save":
        trainer = trainer_of(options.folder, tied=options.tied, interval=SAVED)
        losses = train(trainer, SAVED)
        trainer.checkpointer.interval = STEPS + 1
        losses |= train(trainer, STEPS)
        rows = {step: rows_of(step).tolist() for step in range(SAVED + 1, STEPS + 1)}
        (options.folder / "run.json").write_text(json.dumps({"losses": losses, "rows": rows}) + "\n")
    else:
        trainer = trainer_of(options.folder, tied=options.tied, interval=STEPS + 1)
        assert trainer.checkpointer.load(step=options.step)
        assert trainer.step == options.step
        print(json.dumps(train(trainer, STEPS)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
