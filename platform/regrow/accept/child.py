"""The process of one check: `python -m regrow.accept.child MODULE:FUNCTION REPORT ERROR`. Ends with its parent.

Whatever the check raises is written to the file ERROR: one line of what, and whether the check itself is to blame.
A machine that is only to be looked at gets torch and a checkout: what checks can do without has stand-ins.
"""

import ctypes
import importlib
import importlib.util
import json
import operator
import os
import signal
import sys
import traceback
import types
import zlib
from pathlib import Path
from typing import Any

from regrow.accept.claims import NotTested, Report

PR_SET_PDEATHSIG = 1
CRC32, ONE = 0xEDB88320, 1 << 31  # crc32's polynomial and 1, lowest powers in the highest bits
# what a device, a driver or the network does wrong is raised as RuntimeError or OSError; these are ours
OURS = (AssertionError, AttributeError, LookupError, NameError, TypeError)


def die_with_parent() -> None:
    """Be killed when the process that started this one ends, however it does."""
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended meanwhile
        os._exit(1)


def main(function: str, report: str, error_file: str) -> None:
    die_with_parent()
    provide()
    module, _, name = function.partition(":")
    error: dict[str, object]
    try:
        operator.attrgetter(name)(importlib.import_module(module))(Report(Path(report)))
        return
    except NotTested as why:
        error = {"kind": "not_tested", "text": str(why)}
    except ModuleNotFoundError as missing:
        error = {"kind": "not_tested", "text": f"needs the package {missing.name}, which is not installed"}
    except BaseException as raised:
        traceback.print_exc()
        text = next((line.strip() for line in str(raised).splitlines() if line.strip()), "")
        kind = "broke" if isinstance(raised, OURS) else "failed"
        error = {"kind": kind, "text": f"{type(raised).__name__}: {text}"[:300]}
    Path(error_file).write_text(json.dumps(error))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)  # nothing of a broken device is waited for


class _Zlib(types.ModuleType):
    """What is used of isal's zlib, by Python's."""

    crc32 = staticmethod(zlib.crc32)

    @staticmethod
    def crc32_combine(crc1: int, crc2: int, crc2_length: int) -> int:
        """The crc32 of two pieces in a row, the second of `crc2_length` bytes: zlib's, which Python does not have."""
        power, shift = ONE >> 1, 8 * crc2_length  # x to the power of 1, 2, 4 ...
        while shift:
            if shift & 1:
                crc1 = _times(power, crc1)
            power, shift = _times(power, power), shift >> 1
        return crc1 ^ crc2


def _times(a: int, b: int) -> int:
    """The product of two polynomials modulo crc32's; the highest bit is the factor of 1."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (CRC32 if b & 1 else 0)
    return product


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
        sys.modules["isal"] = types.ModuleType("isal")
        sys.modules["isal.isal_zlib"] = _Zlib("isal.isal_zlib")
    if _missing("pynvml"):
        sys.modules["pynvml"] = _NoDriver("pynvml")


def has_nvml() -> bool:
    return getattr(sys.modules["pynvml"], "__file__", None) is not None


def _missing(name: str) -> bool:
    return name not in sys.modules and importlib.util.find_spec(name) is None


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # neither
