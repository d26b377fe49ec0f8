"""Tensor and sequence parallelism on gloo, with FSDP2, HSDP and float8: the same training, element by element."""

from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from regrow.accept.tiny import tiny_model
from regrow.config.schema import ActivationCheckpoint, Dtype, Float8, ModelConfig, OptimConfig, ParallelConfig
from regrow.model.llama import Llama
from regrow.parallel.compile import graphs_compiled
from regrow.parallel.fsdp import build_mesh
from regrow.plan.mesh import plan_mesh
from regrow.plan.placement import dims_of
from support.gloo import run_ranks
from support.reference_llama import assert_gradients
from support.training import (
    Training,
    build,
    flags_and_digests,
    graphs_of_groups,
    micro_batches,
    plain_losses,
    run_steps,
    train,
    validation,
    whole,
)

torch.set_num_threads(1)  # threads that wait for each other cost tiny models more than they save

OPTIM = OptimConfig(lr=1e-2, global_batch_seqs=12, num_slices=6)
# the rows of its blocks do not divide by three units
MODEL = replace(tiny_model(dim=40, ffn_dim=50), vocab_size=98)
TIED = replace(MODEL, tied=True)
FLOAT8 = replace(tiny_model(dim=64, ffn_dim=96), vocab_size=96)
BFLOAT16 = Dtype.bfloat16
NUM_STEPS = 4


def whole_of_cut(model: Llama, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A parameter or gradient in full, from every rank's shard of its block. Collective."""
    block, shape = whole(tensor.detach()).contiguous(), model.boxes[name].shape
    blocks = [torch.empty_like(block) for _ in range(dist.get_world_size())]
    dist.all_gather(blocks, block)
    if block.shape == shape:
        return block
    dim = dims_of(name)["tp"]
    return torch.cat(blocks[: shape[dim] // block.size(dim)], dim=dim)


def losses(training: Training) -> list[tuple[float, float, int]]:
    return [(result.loss, result.grad_norm, result.num_tokens) for result in train(training)]


@cache
def losses_of_one_rank(tied: bool) -> list[tuple[float, float, int]]:
    training = Training(TIED if tied else MODEL, ParallelConfig(), OPTIM, num_steps=NUM_STEPS)
    return run_ranks(losses, 1, training)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("world_size", "model", "parallel"),
    [
        (2, MODEL, ParallelConfig(tp=2)),
        (2, TIED, ParallelConfig(tp=2, loss_chunk_tokens=0)),
        (4, MODEL, ParallelConfig(tp=2, sync_every_micro_batch=True)),
        (4, MODEL, ParallelConfig(tp=2, dp_replicate=2, activation_checkpoint=ActivationCheckpoint.selective)),
        (6, MODEL, ParallelConfig(tp=2, loss_chunk_tokens=5, reshard_after_forward=False)),
        (6, TIED, ParallelConfig(tp=2, activation_checkpoint=ActivationCheckpoint.full)),
        (4, MODEL, ParallelConfig(tp=2, compile=True, compile_backend="aot_eager")),
    ],
    ids=[
        "one unit",
        "one unit, tied, all logits at once",
        "2 units, reducing every micro-batch",
        "HSDP, selective checkpointing",
        "3 units, five tokens' logits at a time, gathering once a step",
        "3 units, tied, full checkpointing",
        "2 units, compiled",
    ],
)
def test_losses_and_norms_equal_those_of_ranks_that_share_nothing(world_size, model, parallel):
    training = Training(model, parallel, OPTIM, num_steps=NUM_STEPS)
    want = plain_losses(training)
    for_one = losses_of_one_rank(model.tied)
    for got in run_ranks(losses, world_size, training):
        assert [loss for loss, _, _ in got] == pytest.approx(want, abs=1e-5)
        assert [norm for _, norm, _ in got] == pytest.approx([norm for _, norm, _ in for_one], rel=1e-5)
        assert [tokens for _, _, tokens in got] == [tokens for _, _, tokens in for_one]


def gradients(
    training: Training,
) -> tuple[float, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    step = build(training)
    model = step.model
    assert isinstance(model, Llama)
    weights = {name: whole_of_cut(model, name, parameter) for name, parameter in model.named_parameters()}
    loss, _ = step.accumulate(*micro_batches(training, 0))
    dist.all_reduce(loss)
    grads = {name: whole_of_cut(model, name, p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return loss.item(), weights, grads


@pytest.mark.parametrize(
    ("world_size", "model", "parallel"),
    [
        (2, MODEL, ParallelConfig(tp=2)),
        (4, replace(MODEL, num_kv_heads=4), ParallelConfig(tp=4, loss_chunk_tokens=3)),
        (6, TIED, ParallelConfig(tp=2)),
        (8, MODEL, ParallelConfig(tp=2, dp_replicate=2)),
    ],
    ids=["one unit", "four ranks a unit", "3 units, tied", "HSDP 2x2x2"],
)
def test_gradients_equal_a_float64_reference(world_size, model, parallel):
    model = replace(model, dim=40, ffn_dim=52, vocab_size=100)
    training = Training(model, parallel, OPTIM, seq_len=8)
    loss, weights, grads = run_ranks(gradients, world_size, training)[0]
    rows = training.rows(0)
    assert_gradients(model, weights, rows, loss, grads)


def timeouts_s() -> set[float]:
    mesh = build_mesh(plan_mesh(4, 2, 2), "cpu", timeout_s=77.0)
    groups = [dist.group.WORLD, *mesh.get_all_groups()]
    assert len(set(groups)) == 4  # of all, and along each axis
    return {
        group._get_backend(torch.device("cpu")).options._timeout.total_seconds()  # type: ignore[union-attr]
        for group in groups[1:]
    }


def test_collectives_along_every_axis_end_when_they_are_told_to():
    assert run_ranks(timeouts_s, 4) == [{77.0}] * 4


def initial_weights(model: ModelConfig, tp: int) -> dict[str, bytes]:
    built = build(Training(model, ParallelConfig(tp=tp), seed=7)).model
    assert isinstance(built, Llama)
    return {name: whole_of_cut(built, name, p).numpy().tobytes() for name, p in built.named_parameters()}


def test_initial_weights_are_bitwise_the_same_however_they_are_cut():
    # one that takes several blocks of the initialisation
    model = replace(MODEL, vocab_size=8192, ffn_dim=8000)
    (first,) = run_ranks(initial_weights, 1, model, 1)
    for world_size, tp in ((2, 2), (6, 2)):
        for bits in run_ranks(initial_weights, world_size, model, tp):
            assert bits == first


def float8_losses(training: Training) -> tuple[list[float], int]:
    return [result.loss for result in train(training)], graphs_compiled()


@pytest.mark.parametrize(
    ("recipe", "compiled"),
    [
        (Float8.tensorwise_all_gather, False),
        pytest.param(Float8.tensorwise_all_gather, True, marks=pytest.mark.long),
        pytest.param(Float8.tensorwise, False, marks=pytest.mark.long),
        pytest.param(Float8.rowwise, False, marks=pytest.mark.long),
    ],
)
def test_float8_trains_as_it_does_on_ranks_that_share_nothing(recipe, compiled):
    parallel = ParallelConfig(tp=2, dtype=BFLOAT16, float8=recipe, compile=compiled, compile_backend="aot_eager")
    training = Training(FLOAT8, parallel, OPTIM, num_steps=12)
    alone = replace(parallel, tp=1, compile=False)
    apart = run_ranks(float8_losses, 2, replace(training, parallel=alone))[0][0]
    results = run_ranks(float8_losses, 4 if compiled else 6, training)  # each compiles
    assert all(result == results[0] for result in results)
    got, graphs = results[0]
    assert got[-1] < 0.2 * got[0]
    assert got == pytest.approx(apart, rel=0.01)
    assert graphs == (1 if compiled else 0)  # one for all blocks


@pytest.mark.parametrize("dp_replicate", [1, pytest.param(2, marks=pytest.mark.long)])
def test_another_group_traces_nothing_again(tmp_path, dp_replicate):
    parallel = ParallelConfig(tp=2, dp_replicate=dp_replicate, compile=True, compile_backend="aot_eager")
    training = Training(MODEL, parallel, OPTIM, num_steps=3)
    first = run_ranks(graphs_of_groups, 4, training, [4, 2], str(tmp_path))[0]
    assert [graphs for graphs, _ in first] == [1, 1]
    assert first[1][1] == pytest.approx(first[0][1], abs=1e-5)


class _Counted(TorchDispatchMode):
    """How often each collective between the ranks of a unit is begun."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "_c10d_functional":
            self.counts[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))


def collectives_of_a_step(training: Training) -> dict[str, int]:
    step = build(training)
    with _Counted() as counted:
        step.accumulate(*micro_batches(training, 0))
    return dict(counted.counts)


def test_selective_checkpointing_recomputes_no_sum_over_the_unit():
    none, selective, full = (
        run_ranks(collectives_of_a_step, 2, Training(MODEL, ParallelConfig(tp=2, activation_checkpoint=mode), OPTIM))[0]
        for mode in (ActivationCheckpoint.none, ActivationCheckpoint.selective, ActivationCheckpoint.full)
    )
    assert selective["reduce_scatter_tensor"] == none["reduce_scatter_tensor"] < full["reduce_scatter_tensor"]


def test_validation_counts_each_row_once_also_where_a_unit_has_none():
    training = Training(MODEL, optim=OPTIM)
    for num_rows in (2, 7):
        (want,) = run_ranks(validation, 1, training, num_rows)
        for got in run_ranks(validation, 4, replace(training, parallel=ParallelConfig(tp=2)), num_rows):
            assert got == (pytest.approx(want[0], rel=1e-6), want[1])


def test_every_rank_s_flags_count_and_a_unit_s_digest_counts_once():
    training = Training(MODEL, ParallelConfig(tp=2), OPTIM)
    for seen in run_ranks(flags_and_digests, 4, training):
        assert seen == [(True, True, (2 * 2**64 - 3) % 2**64)] * 4


def skipped(training: Training) -> list[bool]:
    """A gradient of one rank's block alone is not finite."""
    step = build(training)
    model = step.model
    assert isinstance(model, Llama)
    results = []
    for bad in (False, True):
        mine, num_micro_batches = micro_batches(training, 0)
        loss, num_tokens = step.accumulate(mine, num_micro_batches)
        if bad and dist.get_rank() == 1:
            grad = model.layers[0].attention.wo.weight.grad  # type: ignore[union-attr]
            grad.to_local().view(-1)[0] = torch.inf  # type: ignore[union-attr, operator]
        stats = step.update(loss, num_tokens, lr=0.0, flag=False, blocked=False, digest=0)
        results.append(stats.resolve().skipped)
    return results


def test_a_gradient_that_is_not_finite_on_one_rank_of_a_unit_is_skipped_by_all():
    training = Training(MODEL, ParallelConfig(tp=2), OPTIM)
    assert run_ranks(skipped, 4, training) == [[False, True]] * 4


def resumed(training: Training) -> list[float]:
    """Steps after a few others, on the same model."""
    step = build(training)
    run_steps(step, training, range(2))
    return [result.loss for result in run_steps(step, training, range(2, 4))]


def test_ranks_agree_bit_for_bit():
    results = run_ranks(resumed, 4, Training(MODEL, ParallelConfig(tp=2), OPTIM))
    assert all(result == results[0] for result in results)
