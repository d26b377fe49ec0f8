"""What is asked of torch: the operators that some code calls, and those among them that wait for a device."""

import re
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

# of whose device a number, or how much there is, has to be read; a tensor that is given as a number is read so, too
WAITS = re.compile(r"aten\.(_local_scalar_dense|item|is_nonzero|equal|nonzero|masked_select|_?unique\w*)\b")


class Operators(TorchDispatchMode):
    """Notes what is called, on CPU tensors as it would be on others. A context manager."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    @property
    def waiting(self) -> set[str]:
        return {name for name in self.names if WAITS.match(name)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))
