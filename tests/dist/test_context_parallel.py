"""Context parallelism on gloo, with FSDP2, HSDP, tensor and pipeline parallelism: the same training as one process."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from regrow.accept.tiny import tiny_model
from regrow.config.schema import (
    ActivationCheckpoint,
    Dtype,
    Float8,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    PipelineSchedule,
)
from regrow.model.llama import Llama
from regrow.model.loss import IGNORE_INDEX
from regrow.parallel.compile import graphs_compiled
from regrow.parallel.fsdp import build_mesh, context_group, coordinates_of, groups_of, let_go_of_meshes
from regrow.plan.mesh import plan_mesh
from regrow.plan.placement import dims_of
from support.gloo import run_ranks
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

FULL, SELECTIVE = ActivationCheckpoint.full, ActivationCheckpoint.selective
INTERLEAVED = PipelineSchedule.interleaved
OPTIM = OptimConfig(lr=1e-2, global_batch_seqs=10, num_slices=5)  # which no number of units divides
MODEL = replace(tiny_model(num_layers=3), vocab_size=98)
DOCUMENTS = replace(MODEL, document_attention=True)
EOT = 7  # rows count up, so that it is in most of them
LONG = pytest.mark.long


def of(model: ModelConfig, parallel: ParallelConfig, **more: Any) -> Training:
    eot_id = EOT if model.document_attention else None
    return Training(model, parallel, OPTIM, noise=0.2, eot_id=eot_id, **more)


def losses(training: Training) -> list[tuple[float, float, int]]:
    return [(result.loss, result.grad_norm, result.num_tokens) for result in train(training)]


@pytest.mark.parametrize("model", [MODEL, DOCUMENTS], ids=["whole rows", "documents"])
@pytest.mark.parametrize(
    ("world_size", "parallel", "num_steps"),
    [
        pytest.param(2, ParallelConfig(cp=2), 10, id="cp 2"),
        pytest.param(2, ParallelConfig(cp=2), 50, id="cp 2, long", marks=LONG),
        pytest.param(
            4, ParallelConfig(cp=4, activation_checkpoint=FULL), 50, id="cp 4, full checkpointing", marks=LONG
        ),
        pytest.param(
            4,
            ParallelConfig(cp=2, activation_checkpoint=SELECTIVE, loss_chunk_tokens=5, reshard_after_forward=False),
            50,
            id="2 units, selective checkpointing, five tokens' logits at a time",
            marks=LONG,
        ),
        pytest.param(
            4,
            ParallelConfig(cp=2, dp_replicate=2, compile=True, compile_backend="aot_eager"),
            50,
            id="HSDP, compiled",
            marks=LONG,
        ),
        pytest.param(
            4, ParallelConfig(cp=2, tp=2, sync_every_micro_batch=True), 50, id="tp 2, reducing each pass", marks=LONG
        ),
        pytest.param(4, ParallelConfig(cp=2, pp=2, loss_chunk_tokens=0), 50, id="2 stages, all logits", marks=LONG),
        pytest.param(
            8,
            ParallelConfig(cp=2, pp=2, tp=2, compile=True, compile_backend="aot_eager"),
            50,
            id="2 stages x tp 2, compiled",
            marks=LONG,
        ),
        pytest.param(6, ParallelConfig(cp=2), 50, id="3 units", marks=LONG),
    ],
)
def test_losses_equal_those_of_one_process(world_size, model, parallel, num_steps):
    training = of(model, parallel, num_steps=num_steps)
    want = plain_losses(training)
    for got in run_ranks(losses, world_size, training, deadline_s=500.0):
        assert [loss for loss, _, _ in got] == pytest.approx(want, abs=1e-5)
        assert [tokens for _, _, tokens in got] == [10 * 16] * num_steps


def whole_of_cut(model: Llama, name: str, tensor: torch.Tensor, tp: int) -> torch.Tensor:
    """A gradient in full, from every rank's shard of its block; ranks of one tp group are neighbours. Collective."""
    block = whole(tensor.detach()).contiguous()
    blocks = [torch.empty_like(block) for _ in range(dist.get_world_size())]
    dist.all_gather(blocks, block)
    return block if block.shape == model.boxes[name].shape else torch.cat(blocks[:tp], dim=dims_of(name)["tp"])


def gradients(training: Training, dtype: torch.dtype) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss of the whole batch, and gradients of the parameters that this rank has."""
    torch.set_default_dtype(dtype)
    step = build(training)
    assert isinstance(step.model, Llama)
    loss, _ = step.accumulate(*micro_batches(training, 0))
    dist.all_reduce(loss)
    tp, named = training.parallel.tp, step.model.named_parameters()
    return loss.item(), {
        name: whole(p.grad) if tp == 1 else whole_of_cut(step.model, name, p.grad, tp)
        for name, p in named
        if p.grad is not None
    }


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize(
    ("world_size", "model", "parallel"),
    [
        pytest.param(2, DOCUMENTS, ParallelConfig(cp=2), id="cp 2, documents"),
        pytest.param(4, MODEL, ParallelConfig(cp=2), id="2 units", marks=LONG),
        pytest.param(4, MODEL, ParallelConfig(cp=4), id="cp 4"),
        pytest.param(4, DOCUMENTS, ParallelConfig(cp=4, dp_replicate=1), id="cp 4, documents", marks=LONG),
        pytest.param(4, DOCUMENTS, ParallelConfig(cp=2, tp=2), id="tp 2, documents", marks=LONG),
        pytest.param(
            4, DOCUMENTS, ParallelConfig(cp=2, pp=2, activation_checkpoint=FULL), id="2 stages, documents", marks=LONG
        ),
        pytest.param(4, replace(MODEL, tied=True), ParallelConfig(cp=2, dp_replicate=2), id="HSDP, tied", marks=LONG),
    ],
)
def test_gradients_equal_those_of_one_process(world_size, model, parallel, dtype, tolerance):
    training = of(model, parallel)
    # the loss of a vocabulary that is cut adds up in float32, also here, in another order than that of a whole one
    alone = ParallelConfig(tp=parallel.tp if dtype is torch.float64 else 1)
    (loss, want), *_ = run_ranks(gradients, alone.tp, replace(training, parallel=alone), dtype)
    found = run_ranks(gradients, world_size, training, dtype)
    assert {name for _, got in found for name in got} == want.keys()
    for total, got in found:
        assert total == pytest.approx(loss, rel=1e-6)  # it is float32 in both
        for name, gradient in got.items():
            assert gradient.dtype is dtype
            assert (gradient - want[name]).abs().max() <= tolerance * want[name].abs().max(), name


def attention_calls(training: Training) -> tuple[Counter[str], set[tuple[int, ...]]]:
    """Collectives of one micro-batch, forward and backward, but for FSDP's; and the queries' and keys' tokens."""
    step = build(training)
    calls: Counter[str] = Counter()
    lengths: set[tuple[int, ...]] = set()

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if op.namespace == "_c10d_functional":
                calls[op.__name__.split(".")[0]] += 1
            if "scaled_dot_product" in op.__name__ and "backward" not in op.__name__:
                lengths.add((args[0].size(-2), args[1].size(-2)))
            return op(*args, **(kwargs or {}))

    mine, _ = micro_batches(training, 0)
    with Record():
        step.accumulate(mine[:1], 1)
    calls.pop("wait_tensor", None)
    return calls, lengths


@pytest.mark.parametrize("mode", ActivationCheckpoint)
def test_a_block_gathers_keys_and_values_once_more_where_it_is_computed_again_and_adds_up_their_gradients_once(mode):
    training = of(MODEL, ParallelConfig(cp=2, activation_checkpoint=mode))
    for calls, lengths in run_ranks(attention_calls, 2, training):
        (gathers, scatters) = (sum(n for name, n in calls.items() if word in name) for word in ("gather", "reduce"))
        again = mode is not ActivationCheckpoint.none
        assert (gathers, scatters) == (MODEL.num_layers * (1 + again), MODEL.num_layers)
        assert lengths == {(8, 16)}  # a rank's own queries, and all keys


def weights_after(training: Training, num_steps: int) -> dict[str, bytes]:
    step = build(training)
    run_steps(step, training, range(num_steps))
    return {name: whole(p.detach()).numpy().tobytes() for name, p in step.model.named_parameters()}


def test_initial_weights_are_bitwise_those_of_one_process():
    (want,) = run_ranks(weights_after, 1, of(MODEL, ParallelConfig(), seed=7), 0)
    assert run_ranks(weights_after, 2, of(MODEL, ParallelConfig(cp=2), seed=7), 0) == [want] * 2


def places() -> tuple[int, list[int], int, dict[str, int], set[float]]:
    """Unit, ranks that share rows, place among them, axes, timeouts."""
    mesh = build_mesh(plan_mesh(8, 2, tp=2, cp=2), "cpu", timeout_s=77.0)
    at, group = coordinates_of(mesh), context_group(mesh)
    assert group is not None
    assert at.rank == dist.get_rank()
    timeouts = {
        each._get_backend(torch.device("cpu")).options._timeout.total_seconds()  # type: ignore[attr-defined]
        for each in groups_of(mesh)
    }
    ranks, sizes = dist.get_process_group_ranks(group), at.mesh.sizes
    del group
    let_go_of_meshes()
    assert context_group(mesh) is None
    return at.mesh.unit_of(at.rank), ranks, at.mesh.share_of(at.rank).rank, sizes, timeouts


def test_neighbours_share_rows_and_their_collectives_end_when_they_are_told_to():
    found = run_ranks(places, 8)
    assert [unit for unit, *_ in found] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [ranks for _, ranks, *_ in found] == [[0, 2], [1, 3], [0, 2], [1, 3], [4, 6], [5, 7], [4, 6], [5, 7]]
    assert [rank for _, _, rank, *_ in found] == [0, 0, 1, 1, 0, 0, 1, 1]
    for *_, sizes, timeouts in found:
        assert sizes == {"pp": 1, "dp_replicate": 2, "dp_shard": 1, "cp": 2, "tp": 2}
        assert timeouts == {77.0}


def test_validation_counts_each_token_once_also_where_a_unit_has_no_rows():
    for num_rows, parallel, world_size in (
        (2, ParallelConfig(cp=2), 4),
        (7, ParallelConfig(cp=2, pp=2, schedule=INTERLEAVED, stages_per_rank=2), 4),
    ):
        training = of(replace(DOCUMENTS, num_layers=4), parallel)
        (want,) = run_ranks(validation, 1, replace(training, parallel=ParallelConfig()), num_rows)
        for got in run_ranks(validation, world_size, training, num_rows):
            assert got == (pytest.approx(want[0], rel=1e-6), want[1])


def test_any_rank_raises_a_flag_and_a_unit_counts_its_digest_once():
    want = [(True, True, (2 * 2**64 - 3) % 2**64)] * 4
    assert run_ranks(flags_and_digests, 4, of(MODEL, ParallelConfig(cp=2))) == [want] * 4


def uneven_tokens(training: Training) -> tuple[float, int]:
    """Of rows whose tails are ignored: ranks have very different numbers of valid tokens."""
    step = build(training)
    mine, num_micro_batches = micro_batches(training, 0)
    for rows in mine:
        rows[:, 5:] = IGNORE_INDEX
    result = step.run(mine, num_micro_batches=num_micro_batches, lr=0.0).resolve()
    return result.loss, result.num_tokens


def test_each_valid_token_counts_equally_whichever_rank_has_it():
    (want,) = run_ranks(uneven_tokens, 1, of(MODEL, ParallelConfig()))
    assert want[1] == 10 * 4
    for got in run_ranks(uneven_tokens, 2, of(MODEL, ParallelConfig(cp=2))):
        assert got == (pytest.approx(want[0], rel=1e-6), want[1])


def rounded_losses(training: Training) -> tuple[list[float], int]:
    return [result.loss for result in train(training)], graphs_compiled()


@pytest.mark.parametrize(
    ("parallel", "tolerance"),
    [
        pytest.param(ParallelConfig(dtype=Dtype.bfloat16), 2**-9, id="bfloat16"),
        pytest.param(
            ParallelConfig(dtype=Dtype.bfloat16, float8=Float8.tensorwise_all_gather), 2**-7, id="float8", marks=LONG
        ),
        pytest.param(
            ParallelConfig(dtype=Dtype.bfloat16, float8=Float8.rowwise, compile=True, compile_backend="aot_eager"),
            2**-7,
            id="float8 rowwise, compiled",
            marks=LONG,
        ),
    ],
)
def test_in_low_precision_it_trains_as_ranks_that_share_nothing(parallel, tolerance):
    """A loss is a mean over 160 tokens, of logits rounded to 2^-9 of their size in bfloat16: some 2^-9 / 160^0.5 of it
    a step, over 8 steps, is 2^-9.7. In float8 (e4m3) products are rounded to 2^-4, in sums of 64 of them: 2^-7.7."""
    model = replace(tiny_model(num_layers=2, dim=64, ffn_dim=96), vocab_size=96)
    training = of(model, parallel, num_steps=8)
    (apart, _), *_ = run_ranks(rounded_losses, 2, training)
    shared = replace(training, parallel=replace(parallel, cp=2))
    for got, graphs in run_ranks(rounded_losses, 2, shared):
        assert got == pytest.approx(apart, rel=tolerance)
        assert graphs == int(parallel.compile)  # one for all blocks


@LONG
def test_another_group_traces_nothing_again(tmp_path):
    """Whichever chunks of its rows a rank has, also where it is another share."""
    training = of(MODEL, ParallelConfig(cp=2, compile=True, compile_backend="aot_eager"), num_steps=3)
    found = run_ranks(graphs_of_groups, 4, training, [4, 2], str(tmp_path))
    for graphs in found[:2]:
        assert [traced for traced, _ in graphs] == [1, 1]
        assert graphs[1][1] == pytest.approx(graphs[0][1], abs=1e-5)
