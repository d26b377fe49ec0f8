"""What the environment tells torch and NCCL in a process that is to outlive its groups; how many files it may open.

Read by them when the first group, the first allocation or the first compilation is made: set before. Sources are
pytorch's `ProcessGroupNCCL.cpp` (`WorkNCCL`, `Watchdog`, `HeartbeatMonitor`) and `distributed_c10d.py`
(`_abort_process_group`, which asks for 0), nvidia-resiliency-ext's guide for restarts within a process, and
pytorch#109074 for launches that hold the interpreter. On an H100 torch read those that it logs, and launches into a
full queue held nothing (decision 54); between GPUs they were never tried.
"""

import logging
import resource
from collections.abc import MutableMapping

log = logging.getLogger(__name__)

# the watchdog would end a survivor up to a minute later, in its next group; what hangs is ours to break off
OUTLIVES_ITS_GROUPS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # 1 and 3 end the process, 2 aborts behind our back
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",  # its signal has another thread end the process after 480 s
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",  # for which the watchdog sleeps, four times, before it goes on
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
    "TORCH_NCCL_DESYNC_DEBUG": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
}
# a process that is restarted with its group: a collective that fails or hangs ends it
ENDS_WITH_ITS_GROUP = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
DEFAULTS = {
    "NCCL_NVLS_ENABLE": "0",  # its multicast objects do not survive an abort
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",  # blocks of one group's streams are no use to the next one's
    "TORCHINDUCTOR_USE_STATIC_CUDA_LAUNCHER": "0",  # a launch into a full queue would hold the interpreter
    "TORCH_GLOO_LAZY_INIT": "1",  # small values go to a few neighbours: no connection to every rank
}


def apply_device_settings(environment: MutableMapping[str, str], *, in_place: bool, compile_threads: int) -> None:
    """Set what a worker on a GPU needs, before anything of CUDA is used.

    `in_place`: its heartbeat breaks its groups off, and it goes on. What that depends on is set whatever the
    environment says, with a line in the log; the rest only where the environment says nothing.
    """
    for name, value in (OUTLIVES_ITS_GROUPS if in_place else ENDS_WITH_ITS_GROUP).items():
        given = environment.get(name, value)
        if given != value:
            log.warning("%s=%s would end workers that are to go on without a lost one: set to %s", name, given, value)
        environment[name] = value
    for name, value in (DEFAULTS | {"TORCHINDUCTOR_COMPILE_THREADS": str(compile_threads)}).items():
        environment.setdefault(name, value)


def allow_descriptors() -> None:
    """As many open files as the system lets this user have: gloo and NCCL hold connections to other ranks, the
    coordinator one to each node. Ray's processes begin with the limit of the shell that has started Ray, often 1,024.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
