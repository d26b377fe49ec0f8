"""Starting and ending the token stream on a Ray cluster."""

import contextlib
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from regrow.config.schema import PretrainConfig
from regrow.data.read.batch import layout_of
from regrow.data.read.corpora import Corpora, order_of
from regrow.data.stream.actor import MAX_CALLS, TokenStream
from regrow.data.stream.dataset import import_what_tasks_need

STOP_S = 5.0  # for its tasks to end


def start_stream(config: PretrainConfig, corpora: Corpora, *, start_step: int, stop_step: int) -> Any:
    """Start the stream's actor on this node, with production under way from `start_step`; its handle, for the workers.

    Returns at once. Tasks ask for `data.stream_cpus` logical CPUs beyond those of the workers; where the cluster has
    none left, ranks read directly. Raises DataError if the corpus does not fit the run.
    """
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    # processes for the source and the first window start beside the actor's, not after it: 1.5 s earlier on two cores
    warm_up = ray.remote(import_what_tasks_need)
    warm_up.options(num_cpus=0, scheduling_strategy=here).remote()
    warm_up.options(num_cpus=config.data.stream_cpus).remote()
    actor = ray.remote(TokenStream).options(
        num_cpus=0, scheduling_strategy=here, max_restarts=-1, max_concurrency=MAX_CALLS
    )
    stream: Any = actor.remote(
        order_of(config, corpora),
        corpora,
        layout_of(config),
        start_step=start_step,
        stop_step=stop_step,
        prefetch_windows=config.data.prefetch_windows,
        stream_cpus=config.data.stream_cpus,
    )
    stream.start.remote()
    return stream


def stop_stream(stream: Any) -> None:
    """End the stream for good, its tasks first: one that waits while Ray shuts down can die noisily."""
    with contextlib.suppress(ray.exceptions.RayError):  # it may be dead already
        ray.get(stream.stop.remote(), timeout=STOP_S)
    ray.kill(stream, no_restart=True)
