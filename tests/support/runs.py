"""Run folders with checkpoints of small models, without training them."""

from pathlib import Path

import torch
from torch import Tensor

from regrow.config.schema import DataConfig, ModelConfig, OptimConfig, ParallelConfig, PretrainConfig
from regrow.optim.adamw import build_optimizer
from regrow.parallel.apply import build_model
from regrow.parallel.float8 import inner_tensor
from regrow.record.run_folder import CHECKPOINTS, identity, write_record
from regrow.state.disk import store
from regrow.state.entries import Progress, training_entries
from regrow.storage import Storage

RUN_ID = "0123456789abcdef"


def save_run(folder: Path | str, model: ModelConfig, *, steps: tuple[int, ...] = (2,)) -> dict[str, Tensor]:
    """Make a run whose checkpoints hold random weights and moments; the tensors of the last one, in their shapes."""
    run = Storage.at(folder)
    built = build_model(model, ParallelConfig(), mesh=None, device="cpu", seed=0)
    entries = training_entries(built, build_optimizer(built, OptimConfig()), inner_tensor=inner_tensor)
    for step in steps:
        dice = torch.Generator().manual_seed(step)
        for entry in entries:
            entry.memory.normal_(std=0.1, generator=dice)
        progress = Progress(step=step, cursor=12 * step, tokens_seen=96 * step)
        store.save(run / CHECKPOINTS, entries, scalars=progress.to_dict(), run_id=RUN_ID, generation=1)
    config = PretrainConfig(model=model, data=DataConfig(seq_len=8))
    write_record(run, run_id=RUN_ID, identity=identity(config), manifest_sha256="0" * 64)
    return {entry.box.name: entry.memory.view(entry.box.shape) for entry in entries}
