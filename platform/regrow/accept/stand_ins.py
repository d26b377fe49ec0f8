"""What a machine that is only to be looked at may lack, and checks can do without: it gets torch and a checkout."""

import importlib.util
import sys
import types
import zlib
from typing import Any


class _NoDriver(types.ModuleType):
    """NVML's binding where it is not installed: as on a machine without its driver."""

    class NVMLError(Exception): ...

    class NVMLError_Timeout(NVMLError): ...

    def nvmlInit(self) -> None:
        raise self.NVMLError("nvidia-ml-py is not installed")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return 0  # a constant


def provide() -> None:
    """Let `isal` and `pynvml` be imported in this process where they are not installed."""
    if _missing("isal"):
        isal = types.ModuleType("isal")
        isal.isal_zlib = sys.modules["isal.isal_zlib"] = zlib  # type: ignore[attr-defined]
        sys.modules["isal"] = isal
    if _missing("pynvml"):
        sys.modules["pynvml"] = _NoDriver("pynvml")


def has_nvml() -> bool:
    return not isinstance(sys.modules.get("pynvml"), _NoDriver)


def _missing(name: str) -> bool:
    return name not in sys.modules and importlib.util.find_spec(name) is None
