"""Ray for a job: join a running cluster, or start one on this machine, as one node or as several raylets."""

import logging
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray._private import ray_constants

from regrow.config.schema import ClusterConfig
from regrow.config.spares import most_workers
from regrow.control.membership import ENDS_WITH_JOB
from regrow.errors import ClusterError, first_line
from regrow.process_log import say
from regrow.runtime.head import NotLetIn, answering_head, other_versions

KNOWN_RAY = "2.60."  # whose insides `runtime.ray_train` knows, as tests/unit/test_ray_contract.py makes sure of
START_S, POLL_S = 120.0, 0.1  # for a node of Ray to be up
COMING_S, LOOK_S = 900.0, 1.0  # for the nodes of a cluster that was made for its job; between looks for them
WORKER_RESOURCE = "regrow_worker"  # what a node started here offers one of per worker it may hold
POLLS_PER_S = 500.0  # of workers by Ray Train, all of them together


@dataclass(frozen=True)
class Connection:
    """What a user may want to know of the Ray cluster."""

    dashboard: str  # where it is and what it asks for, a line; empty without one
    session_dir: str  # where Ray keeps its logs


@contextmanager
def cluster_for(config: ClusterConfig, unit: int = 1, tell: Callable[[str], object] = say) -> Iterator[Connection]:
    """Connect to the cluster that the config names for as long as the context lasts.

    What was started here is ended here. Raises ClusterError if it is not there or cannot hold `min_workers`, `unit` of
    them together; `tell` gets to know where that is waited for.
    """
    nodes = None
    with _own_sigterm():
        if config.address is not None:
            context = _join(config)
        elif config.local_nodes == 0:
            context = _start_one(config)
        else:
            context, nodes = _start_several(config, unit)
    try:
        check_room(config, unit, tell)
        session_dir = context.address_info["session_dir"]
        is_here = config.address is None
        yield Connection(_dashboard(context.dashboard_url, session_dir if is_here else None), session_dir)
    finally:
        ray.shutdown()
        if nodes is not None:
            nodes.shutdown()


def _dashboard(address: str | None, session_dir: str | None) -> str:
    if not address:
        return ""
    more = []
    if os.environ.get("RAY_AUTH_MODE", "").lower() == "token":  # set by Ray where it starts or joins a cluster
        more.append("it asks once for the token that `ray get-auth-token` prints")
    if session_dir is not None:
        more.append(f"for Prometheus: {session_dir}/{ray_constants.PROMETHEUS_SERVICE_DISCOVERY_FILE}")
    return f"Ray dashboard: http://{address}" + (f" ({'; '.join(more)})" if more else "")


def why_not_in_place() -> str:
    """Why a group cannot change in place under the Ray that is installed; empty where it can."""
    if ray.__version__.startswith(KNOWN_RAY):
        return ""
    return (
        f"groups change in place under Ray {KNOWN_RAY}x, and this is {ray.__version__}: a failure restarts all "
        "workers; install the Ray of constraints.txt, or say cluster.in_place=false"
    )


def worker_resources(config: ClusterConfig) -> dict[str, float]:
    """What Ray reserves for one worker."""
    resources = {"CPU": float(config.cpus_per_worker)}
    if config.gpus_per_worker:
        resources["GPU"] = float(config.gpus_per_worker)
    if config.local_nodes:
        resources[WORKER_RESOURCE] = 1.0
    return resources


def check_room(config: ClusterConfig, unit: int = 1, tell: Callable[[str], object] = say) -> int:
    """How many workers the cluster can hold now, `unit` of them together. Raises ClusterError below `min_workers`.

    A cluster that was made for this job may have a new head, and workers that are made anew: they are waited for.
    """
    room, told, begun = room_for(config, unit), -1, time.monotonic()
    patience_s = min(config.wait_for_workers_s, COMING_S) if config.address and ENDS_WITH_JOB in os.environ else 0.0
    while room < config.min_workers and time.monotonic() - begun < patience_s:
        if room != told:
            tell(
                f"the cluster has room for {room} of cluster.min_workers={config.min_workers} workers: its nodes are "
                f"still coming, and are waited for up to {patience_s:.0f} s"
            )
        told = room
        time.sleep(LOOK_S)
        room = room_for(config, unit)
    if room >= config.min_workers:
        return room
    kind, each = ("GPU", config.gpus_per_worker) if config.gpus_per_worker else ("CPU", config.cpus_per_worker)
    found = sum(node["Resources"].get(kind, 0.0) for node in ray.nodes() if node["Alive"])
    together = f", parallel.tp={unit} of them on a node" if unit > 1 else ""
    raise ClusterError(_too_small(config, f"{kind}s", each, f"found {found:g} with room for {room} workers{together}"))


def room_for(config: ClusterConfig, unit: int = 1, *, avoided: Collection[str] = ()) -> int:
    """The same on all nodes but these, however few that are."""
    needed = worker_resources(config)
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"] and node["NodeID"] not in avoided]
    amounts = {kind: max(1, _counted(each)) for kind, each in needed.items()}
    on_nodes = [min(_counted(node.get(kind, 0.0)) // each for kind, each in amounts.items()) for node in nodes]
    return sum(on_node // unit * unit for on_node in on_nodes)


def _counted(amount: float) -> int:
    """As Ray counts: in ten-thousandths. 4.0 // 0.8 is 4."""
    return round(amount * 10_000)


def _too_small(config: ClusterConfig, unit: str, each: float, found: str) -> str:
    least = f" (at least {config.min_workers * each:g})" if config.min_workers < config.max_workers else ""
    return (
        f"cluster {config.name!r} needs {config.max_workers * each:g} {unit}{least}, {found}; "
        "start Ray on nodes that have them, set RAY_ADDRESS to their cluster, or choose another cluster, "
        "such as +cluster=cpu3 for this machine"
    )


def _join(config: ClusterConfig) -> Any:
    # a driver that is not itself a submitted job ships the checkout; a submitted job's runtime_env already did
    package = Path(__file__).parents[1]
    runtime_env = {} if "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ else {"py_modules": [str(package)]}
    try:
        address = answering_head(str(config.address))
        return ray.init(address=address, runtime_env=runtime_env, **_quiet())
    except (NotLetIn, ray.exceptions.AuthenticationError) as error:
        raise ClusterError(f"no Ray cluster lets us in at {config.address!r}: {first_line(error)}") from error
    except (OSError, RuntimeError, ValueError) as error:
        if said := other_versions(str(config.address), error):
            raise ClusterError(said) from error
        unit, each = ("GPUs", config.gpus_per_worker) if config.gpus_per_worker else ("CPUs", config.cpus_per_worker)
        first = str(error).splitlines()[0][:120]
        raise ClusterError(
            _too_small(config, unit, each, f"found 0: no Ray cluster at {config.address!r} ({first})")
        ) from error


def _start_one(config: ClusterConfig) -> Any:
    # logical CPUs beyond the workers' own, for the tasks that feed them
    num_cpus = max(os.cpu_count() or 1, int(-(-most_workers(config) * config.cpus_per_worker // 1))) + 1
    with _starting(), _dashboard_from(config.dashboard_port):
        return ray.init(
            address="local",
            num_cpus=num_cpus,
            include_dashboard=config.dashboard,
            dashboard_port=None,
            **_quiet(),
        )


def _start_several(config: ClusterConfig, unit: int) -> tuple[Any, Any]:
    """A head without workers and `local_nodes` nodes, each a raylet of its own, as separate hosts would run them.

    Each has room for whole units, so that all workers are in some."""
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 1, "include_dashboard": config.dashboard, "dashboard_port": None}
    with _starting(), _dashboard_from(config.dashboard_port):
        nodes = Cluster(initialize_head=True, head_node_args=head)
        try:
            per_node = -(-most_workers(config) // (config.local_nodes * unit)) * unit
            for _ in range(config.local_nodes):
                add_local_node(nodes, config, num_workers=per_node)
            return ray.init(address=nodes.address, **_quiet()), nodes
        except BaseException:
            nodes.shutdown()
            raise


@contextmanager
def _dashboard_from(port: int) -> Iterator[None]:
    """The dashboard of a Ray that starts here has the first free port from this one on.

    Ray's dashboard goes on to the next port by itself, also where a job that starts at the same time was faster, but
    only from Ray's own default, where it is given none.
    """
    default, ray_constants.DEFAULT_DASHBOARD_PORT = ray_constants.DEFAULT_DASHBOARD_PORT, port
    try:
        yield
    finally:
        ray_constants.DEFAULT_DASHBOARD_PORT = default


@contextmanager
def patient_start() -> Iterator[None]:
    """A node of Ray that starts in this process has START_S to be known: Ray's 30 s do not do on a busy machine."""
    from ray._private import services

    get_node = services.get_node

    def patiently(gcs_address: str, node_id: str) -> Any:
        give_up_at = time.monotonic() + START_S
        while True:
            try:
                return get_node(gcs_address, node_id)
            except RuntimeError:  # it is not there yet
                if time.monotonic() > give_up_at:
                    raise
            time.sleep(POLL_S)

    services.get_node = patiently
    try:
        yield
    finally:
        services.get_node = get_node


@contextmanager
def _out_of_our_group() -> Iterator[None]:
    """Processes of the Ray that starts here have process groups of their own.

    A SIGTERM to the driver's group, such as GNU `timeout` sends, would end what the last checkpoint is written with.
    """
    from ray._private import services

    popen = services.ConsolePopen
    services.ConsolePopen = partial(popen, process_group=0)  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        services.ConsolePopen = popen  # type: ignore[misc]


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """A handler of SIGTERM that this process has stays what it is: Ray takes the signal where it starts or joins."""
    from ray._private import utils

    own, take = signal.getsignal(signal.SIGTERM), utils.set_sigterm_handler
    if own in (None, signal.SIG_DFL) or threading.current_thread() is not threading.main_thread():
        yield
        return
    utils.set_sigterm_handler = lambda handler: None
    try:
        yield
    finally:
        utils.set_sigterm_handler = take
        signal.signal(signal.SIGTERM, own)  # Ray's C++ has taken it, too, to print its stack and abort


@contextmanager
def _starting() -> Iterator[None]:
    """Jobs of the Ray that starts here find this Python as `python`, whether its environment is active or not.

    Whatever keeps Ray from starting is a ClusterError: Ray raises many kinds, plain Exception among them.
    """
    os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
    try:
        with patient_start(), _out_of_our_group():
            yield
    except Exception as error:
        token = Path(os.path.expanduser("~/.ray/auth_token"))
        if isinstance(error, OSError) and error.filename and token.is_relative_to(error.filename):
            raise ClusterError(
                f"Ray did not start on this machine: {first_line(error)}. Ray keeps its token in ~/.ray: set HOME to a "
                "folder that can be written"
            ) from error
        folder = Path(os.environ.get("RAY_TMPDIR", tempfile.gettempdir())) / "ray"
        raise ClusterError(
            f"Ray did not start on this machine: {first_line(error)}; its logs are in {folder}/session_latest/logs. Is "
            "the machine very busy, or does that folder have a long name or no room (RAY_TMPDIR chooses another one)?"
        ) from error


def add_local_node(nodes: Any, config: ClusterConfig, *, num_workers: int = 1) -> Any:
    """Start one more raylet with room for `num_workers`."""
    return nodes.add_node(
        num_cpus=int(-(-num_workers * config.cpus_per_worker // 1)),
        num_gpus=num_workers * config.gpus_per_worker,
        resources={WORKER_RESOURCE: num_workers},
        wait=True,
    )


def _quiet() -> dict[str, Any]:
    return {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": True}
