"""What both of Ray Train's trainers share: its backend without process groups, and how its errors read."""

from ray.exceptions import OutOfMemoryError
from ray.train import ControllerError, WorkerGroupError
from ray.train.backend import Backend, BackendConfig
from ray.train.v2._internal.exceptions import UserExceptionWithTraceback, WorkerHealthCheckFailedError

from regrow.errors import first_line


class ProcessGroupBackend(Backend):
    """Leaves process groups to `runtime.rendezvous`."""

    share_cuda_visible_devices = True  # NCCL reaches a neighbour's memory only where it sees the device


class ProcessGroupConfig(BackendConfig):
    """In place of Ray's TorchConfig, whose module imports torch into the driver and the controller."""

    @property
    def backend_cls(self) -> type[Backend]:
        return ProcessGroupBackend


def last_line(error: BaseException) -> str:
    """What an exception of Ray's comes to; of a train function by its first line, as a CUDA error ends with advice.

    Where a node ran out of memory, its first two lines have the node, what was in use there and what may be.
    """
    if isinstance(error, WorkerGroupError) and error.worker_failures:
        rank = min(error.worker_failures)
        return f"rank {rank}: {last_line(error.worker_failures[rank])}"
    if isinstance(error, UserExceptionWithTraceback):
        return f"{type(error._base_exc).__name__}: {first_line(error._base_exc)}"
    if isinstance(error, WorkerHealthCheckFailedError):
        return last_line(error.health_check_failure)
    if isinstance(error, ControllerError):
        return last_line(error.controller_failure)
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    if isinstance(error, OutOfMemoryError):
        return "; ".join(lines[:2])[:400]
    last = lines[-1].strip() if lines else type(error).__name__
    return last.partition(" Some common causes")[0][:400]  # Ray's advice, the same every time
