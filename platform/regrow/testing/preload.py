"""What every rank of `run_ranks` needs, loaded once in the process that ranks are forked from."""

import contextlib

import torch.distributed.fsdp  # noqa: F401

import regrow.parallel.apply
import regrow.train.step  # noqa: F401
from regrow.parallel.float8 import import_torchao

with contextlib.suppress(ImportError):
    import_torchao()
