"""What both of Ray Train's trainers share: its backend without process groups, and how its errors read."""

from ray.train.backend import Backend, BackendConfig


class ProcessGroupBackend(Backend):
    """Leaves process groups to `runtime.rendezvous`."""

    share_cuda_visible_devices = True  # NCCL reaches a neighbour's memory only where it sees the device


class ProcessGroupConfig(BackendConfig):
    """In place of Ray's TorchConfig, whose module imports torch into the driver and the controller."""

    @property
    def backend_cls(self) -> type[Backend]:
        return ProcessGroupBackend


def last_line(error: Exception) -> str:
    """What an exception of Ray's comes to."""
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    last = lines[-1].strip() if lines else type(error).__name__
    return last.partition(" Some common causes")[0][:400]  # Ray's advice, the same every time
