"""Pipeline parallelism on gloo, with FSDP2, HSDP, tensor parallelism and float8: the same training as one process."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from regrow.accept.tiny import tiny_model
from regrow.config.schema import (
    ActivationCheckpoint,
    Dtype,
    Float8,
    OptimConfig,
    ParallelConfig,
    PipelineSchedule,
)
from regrow.config.stages import stages_of
from regrow.parallel.compile import graphs_compiled
from regrow.parallel.fsdp import build_mesh
from regrow.plan.pipeline import Stages
from regrow.train.build import build_step
from support.gloo import RankError, run_ranks
from support.training import (
    Training,
    build,
    flags_and_digests,
    micro_batches,
    plain_losses,
    run_steps,
    topology_of,
    train,
    validation,
    whole,
)

torch.set_num_threads(1)  # threads that wait for each other cost tiny models more than they save

INTERLEAVED = PipelineSchedule.interleaved
OPTIM = OptimConfig(lr=1e-2, global_batch_seqs=10, num_slices=5)  # which no number of units divides
MODEL = replace(tiny_model(num_layers=5), vocab_size=98)  # nor stages the blocks
TIED = replace(MODEL, tied=True)
DEEPER = replace(MODEL, num_layers=7)
DOCUMENTS = replace(MODEL, document_attention=True)
LONG = pytest.mark.long


def losses(training: Training) -> list[tuple[float, float, int]]:
    return [(result.loss, result.grad_norm, result.num_tokens) for result in train(training)]


@pytest.mark.parametrize(
    ("world_size", "parallel"),
    [
        pytest.param(2, ParallelConfig(pp=2), id="2 stages", marks=LONG),
        pytest.param(
            2,
            ParallelConfig(
                pp=2, schedule=INTERLEAVED, activation_checkpoint=ActivationCheckpoint.full, loss_chunk_tokens=5
            ),
            id="interleaved, full checkpointing, five tokens' logits at a time",
            marks=LONG,
        ),
        pytest.param(
            4,
            ParallelConfig(
                pp=2, dp_replicate=2, reshard_after_forward=False, compile=True, compile_backend="aot_eager"
            ),
            id="HSDP, gathering once a step, compiled",
        ),
        pytest.param(
            4,
            ParallelConfig(pp=2, tp=2, activation_checkpoint=ActivationCheckpoint.selective, loss_chunk_tokens=0),
            id="2 stages x tp 2, selective checkpointing",
            marks=LONG,
        ),
        pytest.param(
            4,
            ParallelConfig(pp=2, schedule=INTERLEAVED, sync_every_micro_batch=True, prefetch_blocks=2),
            id="interleaved, 2 units, reducing every micro-batch",
        ),
        pytest.param(3, ParallelConfig(pp=3), id="3 stages"),
        pytest.param(
            6, ParallelConfig(pp=2, schedule=INTERLEAVED, stages_per_rank=3), marks=LONG, id="3 stages a rank"
        ),
        pytest.param(7, ParallelConfig(pp=7), marks=LONG, id="a block a stage"),
        pytest.param(6, ParallelConfig(pp=2, reshard_after_forward=False), marks=LONG, id="2 stages x 3 units"),
        pytest.param(6, ParallelConfig(pp=3, schedule=INTERLEAVED), marks=LONG, id="interleaved, 3 stages x 2 units"),
        pytest.param(
            6,
            ParallelConfig(pp=3, tp=2, compile=True, compile_backend="aot_eager"),
            marks=LONG,
            id="3 stages x tp 2, compiled",
        ),
        pytest.param(
            8, ParallelConfig(pp=2, tp=2, dp_replicate=2, schedule=INTERLEAVED), marks=LONG, id="2 x HSDP 2 x tp 2"
        ),
    ],
)
@pytest.mark.parametrize("num_steps", [15, pytest.param(50, marks=LONG)])
def test_losses_equal_those_of_one_process(world_size, parallel, num_steps):
    training = Training(MODEL if world_size <= 4 else DEEPER, parallel, OPTIM, num_steps=num_steps, noise=0.2)
    want = plain_losses(training)
    for got in run_ranks(losses, world_size, training, deadline_s=500.0):
        assert [loss for loss, _, _ in got] == pytest.approx(want, abs=1e-5)
        assert [tokens for _, _, tokens in got] == [10 * 16] * num_steps


def test_losses_within_documents_equal_those_of_one_process():
    parallel = ParallelConfig(pp=2, schedule=INTERLEAVED)
    training = Training(DOCUMENTS, parallel, OPTIM, num_steps=6, eot_id=7)
    for got in run_ranks(losses, 2, training):
        assert [loss for loss, _, _ in got] == pytest.approx(plain_losses(training), abs=1e-5)


@pytest.mark.parametrize(
    ("world_size", "parallel"),
    [
        (2, ParallelConfig(pp=2, loss_chunk_tokens=0)),
        (3, ParallelConfig(pp=3, reshard_after_forward=False)),
        pytest.param(4, ParallelConfig(pp=2, tp=2, schedule=INTERLEAVED), marks=LONG),
        pytest.param(6, ParallelConfig(pp=2, sync_every_micro_batch=True), marks=LONG),
    ],
)
def test_both_ends_of_a_pipeline_have_a_tied_embedding_and_train_it_as_one(world_size, parallel):
    training = Training(TIED, parallel, OPTIM, num_steps=12, noise=0.2)
    for_one = run_ranks(losses, 1, replace(training, parallel=ParallelConfig()))[0]
    for got in run_ranks(losses, world_size, training, deadline_s=500.0):
        assert [loss for loss, _, _ in got] == pytest.approx([loss for loss, _, _ in for_one], abs=1e-5)
        assert [norm for _, norm, _ in got] == pytest.approx([norm for _, norm, _ in for_one], rel=1e-5)
    weights = run_ranks(weights_after, world_size, training, 3, deadline_s=500.0)
    embeddings = [each["embed.weight"] for each in weights if "embed.weight" in each]
    assert len(embeddings) == 2 * world_size // parallel.pp
    assert parallel.tp > 1 or len(set(embeddings)) == 1


@pytest.mark.parametrize("parallel", [ParallelConfig(pp=2), ParallelConfig(pp=3, schedule=INTERLEAVED)])
def test_stages_alone_change_no_bit_of_a_loss(parallel):
    training = Training(DEEPER, parallel, OPTIM, num_steps=5)
    want = run_ranks(losses, 1, replace(training, parallel=ParallelConfig()))[0]
    for got in run_ranks(losses, parallel.pp, training):
        assert [loss for loss, _, _ in got] == [loss for loss, _, _ in want]


def gradients(training: Training, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Of the parameters that this rank has."""
    torch.set_default_dtype(dtype)
    step = build(training)
    step.accumulate(*micro_batches(training, 0))
    return {name: whole(p.grad) for name, p in step.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize(
    ("world_size", "model", "parallel"),
    [
        (3, MODEL, ParallelConfig(pp=3)),
        (4, MODEL, ParallelConfig(pp=2, schedule=INTERLEAVED)),
        (3, TIED, ParallelConfig(pp=3)),
    ],
    ids=["3 stages", "interleaved, 2 units", "3 stages, tied"],
)
def test_gradients_equal_those_of_one_process(world_size, model, parallel, dtype, tolerance):
    training = Training(model, parallel, OPTIM, noise=0.2)
    (want,) = run_ranks(gradients, 1, replace(training, parallel=ParallelConfig()), dtype)
    found = run_ranks(gradients, world_size, training, dtype)
    stages = topology_stages(training)
    for rank, got in enumerate(found):
        blocks = {int(name.split(".")[1]) for name in got if name.startswith("layers.")}
        assert blocks == {b for s in stages.of_rank(rank * stages.pp // world_size) for b in stages.blocks[s]}
    assert {name for got in found for name in got} == want.keys()
    for got in found:
        for name, gradient in got.items():
            assert gradient.dtype is dtype
            assert (gradient - want[name]).abs().max() <= tolerance * want[name].abs().max(), name


def topology_stages(training: Training) -> Stages:
    stages = stages_of(training.model, training.parallel, training.seq_len)
    assert stages is not None
    assert len({len(each) for each in stages.blocks}) > 1  # uneven
    return stages


def weights_after(training: Training, num_steps: int) -> dict[str, bytes]:
    """Of the parameters that this rank has."""
    step = build(training)
    run_steps(step, training, range(num_steps))
    return {name: whole(p.detach()).numpy().tobytes() for name, p in step.model.named_parameters()}


def test_initial_weights_are_bitwise_the_same_in_whatever_stage_they_are():
    training = Training(MODEL, seed=7)
    (want,) = run_ranks(weights_after, 1, training, 0)
    parallel = ParallelConfig(pp=2, schedule=INTERLEAVED)
    first, second = run_ranks(weights_after, 2, replace(training, parallel=parallel), 0)
    assert first | second == want
    assert not first.keys() & second.keys()


def float8_losses(training: Training) -> tuple[list[float], int]:
    return [result.loss for result in train(training)], graphs_compiled()


@LONG
def test_float8_trains_as_it_does_without_stages():
    model = replace(tiny_model(num_layers=4, dim=64, ffn_dim=96), vocab_size=96)
    parallel = ParallelConfig(
        pp=2,
        dtype=Dtype.bfloat16,
        float8=Float8.tensorwise_all_gather,
        schedule=INTERLEAVED,
        compile=True,
        compile_backend="aot_eager",
    )
    training = Training(model, parallel, OPTIM, num_steps=8)
    (apart, _), *_ = run_ranks(float8_losses, 2, replace(training, parallel=replace(parallel, pp=1)))
    for got, graphs in run_ranks(float8_losses, 4, training):
        assert got == pytest.approx(apart, rel=0.01)
        assert graphs == 1  # one for all blocks of all stages


def test_validation_counts_each_row_once_also_where_a_unit_has_none():
    training = Training(MODEL, optim=OPTIM)
    for num_rows, parallel in ((2, ParallelConfig(pp=2)), (7, ParallelConfig(pp=2, schedule=INTERLEAVED))):
        (want,) = run_ranks(validation, 1, training, num_rows)
        for got in run_ranks(validation, 4, replace(training, parallel=parallel), num_rows):
            assert got == (pytest.approx(want[0], rel=1e-6), want[1])


def test_any_rank_of_any_stage_raises_a_flag_and_a_unit_counts_its_digest_once():
    training = Training(MODEL, ParallelConfig(pp=2), OPTIM)
    want = [(True, True, (2 * 2**64 - 3) % 2**64)] * 4
    assert run_ranks(flags_and_digests, 4, training) == [want] * 4


def a_row_more(training: Training) -> None:
    step = build(training, timeout_s=4.0)
    mine, num_micro_batches = micro_batches(training, 0)
    if dist.get_rank() == 1:
        mine = [torch.cat([rows, rows[:1]]) for rows in mine]
    step.run(mine, num_micro_batches=num_micro_batches, lr=0.0)


def test_a_message_of_another_shape_is_not_taken_and_the_receive_fails_at_its_deadline():
    """gloo would fill the beginning of a larger buffer with a shorter message, and raise nothing."""
    with pytest.raises(RankError) as failed:
        run_ranks(a_row_more, 2, Training(MODEL, ParallelConfig(pp=2), OPTIM))
    assert "waited for activations [3, 16, 32] of micro-batch 0 for stage 1, from rank 0 of the pipeline" in str(
        failed.value
    )


def connected_within(parallel: ParallelConfig) -> tuple[int, int]:
    """How often `connecting` was entered, and how many messages and sums were outside of it."""
    depth, entered, outside = 0, 0, 0

    @contextmanager
    def connecting() -> Iterator[None]:
        nonlocal depth, entered
        depth, entered = depth + 1, entered + 1
        yield
        depth -= 1

    def counted(what: Any, *arguments: Any, **more: Any) -> Any:
        nonlocal outside
        outside += not depth
        return what(*arguments, **more)

    training = Training(model=MODEL, parallel=parallel, optim=OPTIM)
    topology = topology_of(training)
    mesh = build_mesh(topology.mesh, "cpu")
    for name in ("isend", "irecv", "all_reduce"):
        setattr(dist, name, partial(counted, getattr(dist, name)))
    device = torch.device("cpu")
    made = {"device": device, "seed": 0, "stages": topology.stages, "connecting": connecting}
    build_step(training.model, parallel, training.optim, mesh=mesh, **made)
    return entered, outside


@pytest.mark.parametrize(
    ("parallel", "entered"),
    [(ParallelConfig(pp=2), 1), (ParallelConfig(separate_reduce=True), 1), (ParallelConfig(), 0)],
    ids=["pipeline", "separate reductions", "neither"],
)
def test_communicators_that_a_step_makes_are_made_while_that_is_known(parallel: ParallelConfig, entered: int) -> None:
    """Nothing can break off a process that makes one: it has a deadline of its own for that."""
    assert run_ranks(connected_within, 2, parallel) == [(entered, 0)] * 2
