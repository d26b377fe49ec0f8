"""What ranks import sooner or later, each for a second or two: done once, by the process that they are forked from."""

import contextlib
import importlib

from regrow.accept.child import provide
from regrow.parallel.float8 import import_torchao

provide()
for name in ("torch._dynamo", "torch._inductor.codegen.triton", "regrow.parallel.apply", "regrow.train.step"):
    importlib.import_module(name)
with contextlib.suppress(ImportError):  # bfloat16 alone needs no torchao
    import_torchao()
