"""The step over 1 to 4 ranks against one plain process."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from regrow.accept.tiny import count_up_rows, tiny_model
from regrow.config.schema import (
    ActivationCheckpoint,
    AttentionKernel,
    Dtype,
    Float8,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
)
from regrow.train.step import IGNORE_INDEX, evaluate
from support.gloo import run_ranks
from support.ragged import ragged_model
from support.reference_llama import assert_gradients
from support.training import Training, build, micro_batches, plain_losses, run_steps, train, whole

torch.set_num_threads(1)  # threads that wait for each other cost tiny models more than they save

MODELS = {"tiny": tiny_model(), "ragged": ragged_model(), "ragged, tied": ragged_model(tied=True)}
OPTIM = OptimConfig(lr=1e-2, global_batch_seqs=12, num_slices=6)
# a model of which one parameter takes several blocks of the initialisation, cut inside blocks by 2, 3 and 4 ranks
LARGE = ModelConfig(vocab_size=5003, dim=80, num_layers=1, num_heads=4, num_kv_heads=2, ffn_dim=64)


def losses_of_models(names: list[str], parallel: ParallelConfig) -> dict[str, list[float]]:
    return {
        name: [result.loss for result in train(Training(MODELS[name], parallel, OPTIM, num_steps=5))] for name in names
    }


@pytest.fixture(scope="module")
def plain() -> dict[str, list[float]]:
    return {name: plain_losses(Training(model, optim=OPTIM, num_steps=5)) for name, model in MODELS.items()}


@pytest.mark.parametrize(
    "models",
    [
        ["ragged, tied"],  # the hardest: no width divides by the ranks, and one matrix has two gradients
        pytest.param(["tiny", "ragged"], marks=pytest.mark.long),
    ],
    ids=" and ".join,
)
@pytest.mark.parametrize(
    ("world_size", "parallel"),
    [
        (1, ParallelConfig()),
        (2, ParallelConfig(sync_every_micro_batch=True)),
        (3, ParallelConfig()),
        (3, ParallelConfig(reshard_after_forward=False)),
        (4, ParallelConfig()),
        (4, ParallelConfig(dp_replicate=2)),
        (2, ParallelConfig(loss_chunk_tokens=0)),
        (3, ParallelConfig(loss_chunk_tokens=5, sync_every_micro_batch=True)),
        (3, ParallelConfig(dp_replicate=2, activation_checkpoint=ActivationCheckpoint.selective)),
        (3, ParallelConfig(prefetch_blocks=3, attention=AttentionKernel.flash)),
        (4, ParallelConfig(dp_replicate=2, cpu_offload=True, sync_every_micro_batch=True)),
    ],
    ids=[
        "1",
        "2, reducing every micro-batch",
        "3",
        "3, gathering once a step",
        "4",
        "HSDP 2x2",
        "2, all logits at once",
        "3, five tokens' logits at a time",
        "HSDP that falls back, checkpointing",
        "3, three blocks ahead, flash attention",
        "HSDP 2x2, offloaded to where it is",
    ],
)
def test_losses_equal_those_of_a_plain_loop_in_one_process(world_size, parallel, models, plain):
    for got in run_ranks(losses_of_models, world_size, models, parallel):
        for name, losses in got.items():
            assert losses == pytest.approx(plain[name], abs=1e-5), name


def digest_weights() -> dict[str, bytes]:
    bits = {}
    for model in (ragged_model(), LARGE):
        for name, parameter in build(Training(model, seed=7)).model.named_parameters():
            bits[f"{model.name} {name}"] = whole(parameter.detach()).numpy().tobytes()
    return bits


def test_initial_weights_are_bitwise_the_same_at_every_world_size():
    (first,) = run_ranks(digest_weights, 1)
    for world_size in (2, 3, 4):
        for bits in run_ranks(digest_weights, world_size):
            assert bits == first


def gradients(
    model: ModelConfig, parallel: ParallelConfig
) -> tuple[float, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    training = Training(model, parallel, OPTIM, seq_len=9)
    step = build(training)
    weights = {name: whole(parameter.detach()).clone() for name, parameter in step.model.named_parameters()}
    loss, _ = step.accumulate(*micro_batches(training, 0))
    dist.all_reduce(loss)
    grads = {name: whole(p.grad) for name, p in step.model.named_parameters() if p.grad is not None}
    return loss.item(), weights, grads


@pytest.mark.parametrize("loss_chunk_tokens", [0, 4])
@pytest.mark.parametrize(("world_size", "tied"), [(2, False), (3, False), (3, True)])
def test_gradients_equal_a_float64_reference_where_no_width_divides_by_the_ranks(world_size, tied, loss_chunk_tokens):
    model = ragged_model(tied=tied)
    parallel = ParallelConfig(loss_chunk_tokens=loss_chunk_tokens)
    loss, weights, grads = run_ranks(gradients, world_size, model, parallel)[0]
    rows = count_up_rows(0, num_rows=OPTIM.global_batch_seqs, seq_len=9, vocab_size=model.vocab_size)
    assert_gradients(model, weights, rows, loss, grads)


def norms_flags_digests() -> list[tuple[float, bool, int]]:
    training = Training(ragged_model(), optim=OPTIM)
    step, seen = build(training), []
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    for index in range(3):
        mine, num_micro_batches = micro_batches(training, index)
        result = step.run(
            mine,
            num_micro_batches=num_micro_batches,
            lr=0.0,
            flag=index == 1 and rank == last,
            digest=2**64 - 1 if rank == 0 else rank + (2**63 if index == 2 else 0),
        ).resolve()
        seen.append((result.grad_norm, result.flag, result.digest))
    return seen


def test_norm_flag_and_digest_are_the_same_on_every_rank_and_at_every_world_size():
    norms = []
    for world_size in (1, 2, 4):
        results = run_ranks(norms_flags_digests, world_size)
        assert all(result == results[0] for result in results)
        rank_sum = world_size * (world_size - 1) // 2
        tops = 2**63 * (world_size - 1)
        assert [flag for _, flag, _ in results[0]] == [False, True, False]
        assert [digest for _, _, digest in results[0]] == [
            (2**64 - 1 + rank_sum) % 2**64,
            (2**64 - 1 + rank_sum) % 2**64,
            (2**64 - 1 + rank_sum + tops) % 2**64,
        ]
        norms.append([norm for norm, _, _ in results[0]])
    for other in norms[1:]:
        assert other == pytest.approx(norms[0], rel=1e-6)  # the gradients are float32


def evaluate_between_steps() -> tuple[list[float], tuple[float, int], bool]:
    training = Training(tiny_model(), optim=OPTIM)
    step = build(training)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    rows = count_up_rows(99, num_rows=10, seq_len=16)
    rows[9, 5:] = IGNORE_INDEX
    batches = rows.split(2)
    mine = list(batches[rank :: min(world_size, 3)]) if rank < 3 else [torch.full_like(batches[0], IGNORE_INDEX)]
    losses = [result.loss for result in run_steps(step, training, range(3))]
    result = evaluate(step.model, mine, num_batches=-(-len(batches) // min(world_size, 3)), groups=step.groups)
    sharded = all(parameter.numel() == 0 or hasattr(parameter, "placements") for parameter in step.model.parameters())
    losses += [result.loss for result in run_steps(step, training, range(3, 6))]
    return losses, result, sharded


def test_evaluation_counts_every_row_once_and_disturbs_no_later_step():
    plain = plain_losses(Training(tiny_model(), optim=OPTIM))
    scores = []
    for world_size in (1, 2, 4):
        for losses, score, sharded in run_ranks(evaluate_between_steps, world_size):
            assert losses == pytest.approx(plain, abs=1e-5)
            assert sharded
            scores.append(score)
    assert {count for _, count in scores} == {10 * 16 - 12}
    assert [loss for loss, _ in scores] == pytest.approx([scores[0][0]] * len(scores), abs=1e-3)


def test_bfloat16_trains_close_to_float32():
    parallel = ParallelConfig(dtype=Dtype.bfloat16)
    results = run_ranks(train, 2, Training(tiny_model(), parallel, OPTIM, num_steps=8))[0]
    plain = plain_losses(Training(tiny_model(), optim=OPTIM, num_steps=8))
    assert [result.loss for result in results] == pytest.approx(plain, rel=0.01)


def losses_by_chunk(parallel: ParallelConfig, chunk_tokens: tuple[int, int]) -> list[list[float]]:
    """The same run for each size of a chunk; blocks are compiled once."""
    return [
        [
            result.loss
            for result in train(Training(tiny_model(), replace(parallel, loss_chunk_tokens=size), OPTIM, num_steps=4))
        ]
        for size in chunk_tokens
    ]


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(Float8.none, marks=pytest.mark.long),
        pytest.param(Float8.rowwise, marks=pytest.mark.long),
        Float8.tensorwise_all_gather,
    ],
)
def test_chunks_of_the_loss_change_nothing_under_float8_compiled_blocks_and_checkpointing(recipe):
    parallel = ParallelConfig(
        dtype=Dtype.bfloat16,
        float8=recipe,
        compile=True,
        compile_backend="aot_eager",
        activation_checkpoint=ActivationCheckpoint.selective,
    )
    losses = run_ranks(losses_by_chunk, 2, parallel, (0, 5))[0]
    assert losses[1][0] == pytest.approx(losses[0][0], rel=1e-6)  # of the same weights
    assert losses[1] == pytest.approx(losses[0], rel=5e-3)


def memory_kept(parallel: ParallelConfig) -> bool:
    step = build(Training(ragged_model(), parallel))
    before = {name: parameter.to_local().data_ptr() for name, parameter in step.model.named_parameters()}
    run_steps(step, Training(ragged_model(), parallel), range(2))
    return all(before[name] == parameter.to_local().data_ptr() for name, parameter in step.model.named_parameters())


def test_shards_stay_where_they_are_in_memory_from_build_on():
    assert all(run_ranks(memory_kept, 3, ParallelConfig()))
