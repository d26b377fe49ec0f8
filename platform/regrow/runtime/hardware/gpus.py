"""What NVML says of a machine's GPUs: how hot, fast and busy they are, and what shows that one is broken.

By NVIDIA's own binding (nvidia-ml-py). A machine without its driver has no GPUs. Nothing here needs CUDA: a process
that has no GPU reads all of them.
"""

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pynvml

FELL_OFF_THE_BUS = 79
# NVIDIA's "XID Errors": those that are the hardware's, not a program's
HARDWARE_XIDS = {
    48: "double-bit ECC error",
    62: "internal micro-controller halt",
    64: "row remapping failed",
    74: "NVLink error",
    FELL_OFF_THE_BUS: "fell off the bus",
    94: "contained memory error",
    95: "uncontained memory error",
    119: "GSP timeout",
    120: "GSP error",
    140: "unrecovered ECC error",
}
SLOWDOWNS = {
    "power cap": pynvml.nvmlClocksEventReasonSwPowerCap,
    "hardware": pynvml.nvmlClocksEventReasonHwSlowdown,
    "heat": pynvml.nvmlClocksEventReasonSwThermalSlowdown,
    "heat, by hardware": pynvml.nvmlClocksEventReasonHwThermalSlowdown,
    "power brake": pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown,
}
_WAIT_MS = 1000
_MASK_WORDS = 64  # of 64 CPUs


@dataclass(frozen=True)
class Gpu:
    """One GPU. What it does not tell is None."""

    uuid: str
    name: str
    temperature_c: int | None
    power_w: float | None
    sm_mhz: int | None
    slowed_by: tuple[str, ...]
    uncorrected: int | None  # ECC errors since its driver was loaded
    remap_pending: bool  # memory was found bad, and is replaced at the next reset
    remap_failed: bool
    nvlinks: int  # that are up

    def __str__(self) -> str:
        told = [
            f"{value:.0f} {unit}"
            for value, unit in ((self.temperature_c, "C"), (self.power_w, "W"), (self.sm_mhz, "MHz"))
            if value is not None
        ]
        slowed = [f"slowed down by {' and '.join(self.slowed_by)}"] if self.slowed_by else []
        return f"{f'{self.name} {self.uuid}'.rstrip()}: {', '.join([*told, *slowed]) or 'tells nothing'}"


NAMELESS = "a GPU"
LOST = Gpu("", NAMELESS, None, None, None, (), None, False, False, 0)  # it keeps its place among the others


def read_gpus() -> list[Gpu]:
    """All of this machine, by their numbers; LOST in the place of one that is."""
    with _nvml() as handles:
        return [_read(handle) if handle is not None else LOST for handle in handles]


def cpus_near(uuid: str) -> set[int]:
    """The CPUs of the socket that a GPU is attached to; empty where that is not known."""
    with _nvml() as handles:
        for handle in handles:
            if handle is not None and _uuid(handle) == uuid:
                words = _ask(pynvml.nvmlDeviceGetCpuAffinity, handle, _MASK_WORDS) or []
                return {64 * index + bit for index, word in enumerate(words) for bit in range(64) if word >> bit & 1}
    return set()


def number_of(uuid: str) -> int | None:
    """A GPU's number among the machine's, in the order of their places on its bus; None where that is not known, as of
    a part of one."""
    with _nvml() as handles:
        uuids = [_uuid(handle) if handle is not None else "" for handle in handles]
    return uuids.index(uuid) if uuid in uuids else None


def problem(gpu: Gpu, gpus: Sequence[Gpu]) -> str:
    """Why one of a machine's GPUs should not be trained on, or empty."""
    most_links = max((each.nvlinks for each in gpus if each.name == gpu.name), default=0)
    for is_so, text in (
        (bool(gpu.uncorrected), f"{gpu.uncorrected} uncorrected ECC errors since its driver was loaded; reset it"),
        (gpu.remap_failed, "bad memory could not be replaced: it is worn out"),
        (gpu.remap_pending, "bad memory waits to be replaced; reset it"),
        (gpu.nvlinks < most_links, f"{gpu.nvlinks} of its NVLinks are up, {most_links} of its neighbours'"),
    ):
        if is_so:
            return f"{gpu.name} {gpu.uuid}: {text}"
    return ""


class XidWatch:
    """Calls `seen(uuid, xid)` for every error that a driver reports from now on, on a thread of its own."""

    def __init__(self, seen: Callable[[str, int], None]) -> None:
        self._seen, self._over = seen, threading.Event()
        self._fallen: set[str] = set()  # GPUs of which it is told that they fell off the bus
        self._thread = threading.Thread(target=self._watch, name="xids", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        with _nvml() as all_handles:
            handles = [handle for handle in all_handles if handle is not None]
            if not handles:
                return
            # asked ahead: one that fell off the bus says no more which it is
            uuids = {_address(handle): _uuid(handle) for handle in handles}
            events = _listen(handles)
            while not self._over.is_set():
                try:
                    data = pynvml.nvmlEventSetWait_v2(events, _WAIT_MS)
                except pynvml.NVMLError_Timeout:
                    continue
                except pynvml.NVMLError:  # a GPU is gone: wait for what the others say, without it
                    lost = [handle for handle in handles if _is_lost(handle)]
                    for handle in lost:
                        self._tell(uuids[_address(handle)], FELL_OFF_THE_BUS)
                    handles = [handle for handle in handles if handle not in lost]
                    pynvml.nvmlEventSetFree(events)
                    events = _listen(handles)
                    self._over.wait(0 if lost else _WAIT_MS / 1000)
                else:
                    self._tell(uuids.get(_address(data.device)) or _uuid(data.device), int(data.eventData))
            pynvml.nvmlEventSetFree(events)

    def _tell(self, uuid: str, xid: int) -> None:
        """That a GPU fell off the bus is told once: it may be known by its event, and by what it answers."""
        if xid == FELL_OFF_THE_BUS:
            if uuid in self._fallen:
                return
            self._fallen.add(uuid)
        self._seen(uuid, xid)


@contextlib.contextmanager
def _nvml() -> Iterator[list[Any]]:
    """Handles of all GPUs by their numbers, for a while; None in the place of one that is lost."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no driver, or one that does not answer
        yield []
        return
    try:
        yield [_ask(pynvml.nvmlDeviceGetHandleByIndex, number) for number in range(pynvml.nvmlDeviceGetCount())]
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _listen(handles: Iterable[Any]) -> Any:
    """A set of these GPUs' errors to come."""
    events = pynvml.nvmlEventSetCreate()
    for handle in handles:
        with contextlib.suppress(pynvml.NVMLError):  # a kind that reports none
            pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, events)
    return events


def _read(handle: Any) -> Gpu:
    reasons = _ask(pynvml.nvmlDeviceGetCurrentClocksEventReasons, handle) or 0
    power = _ask(pynvml.nvmlDeviceGetPowerUsage, handle)
    uncorrected = _ask(
        pynvml.nvmlDeviceGetTotalEccErrors, handle, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
    )
    _, _, pending, failed = _ask(pynvml.nvmlDeviceGetRemappedRows, handle) or (0, 0, 0, 0)
    retiring = _ask(pynvml.nvmlDeviceGetRetiredPagesPendingStatus, handle)  # of kinds that replace no rows
    links = (_ask(pynvml.nvmlDeviceGetNvLinkState, handle, link) for link in range(pynvml.NVML_NVLINK_MAX_LINKS))
    return Gpu(
        uuid=_uuid(handle),
        name=_text(_ask(pynvml.nvmlDeviceGetName, handle) or NAMELESS),
        temperature_c=_ask(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU),
        power_w=power / 1000 if power is not None else None,
        sm_mhz=_ask(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_SM),
        slowed_by=tuple(name for name, bit in SLOWDOWNS.items() if reasons & bit),
        uncorrected=uncorrected,
        remap_pending=bool(pending or retiring),
        remap_failed=bool(failed),
        nvlinks=sum(link == pynvml.NVML_FEATURE_ENABLED for link in links),
    )


def _ask(question: Callable[..., Any], *arguments: Any) -> Any:
    """None where the GPU does not know, or does not answer."""
    try:
        return question(*arguments)
    except pynvml.NVMLError:
        return None


def _uuid(handle: Any) -> str:
    """Empty where it does not tell."""
    return _text(_ask(pynvml.nvmlDeviceGetUUID, handle) or "")


def _is_lost(handle: Any) -> bool:
    try:
        pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)  # its hardware's, not kept by the driver
    except pynvml.NVMLError as error:
        return isinstance(error, pynvml.NVMLError_GpuIsLost)
    return False


def _address(handle: Any) -> int | None:
    """The same for all handles of a GPU."""
    return ctypes.cast(handle, ctypes.c_void_p).value


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
