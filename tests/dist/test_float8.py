"""Every float8 recipe, emulated, at world sizes that divide no width too."""

import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from regrow.accept.tiny import tiny_model
from regrow.config.schema import ActivationCheckpoint, Dtype, Float8, ModelConfig, OptimConfig, ParallelConfig
from regrow.parallel.float8 import inner_tensor, refresh_float8_scales
from support.gloo import run_ranks
from support.training import Training, build, micro_batches, run_steps, train

RECIPES = [recipe for recipe in Float8 if recipe is not Float8.none]
OPTIM = OptimConfig(lr=1e-2, global_batch_seqs=12, num_slices=6)
SMALL = tiny_model()
# 16 rows of a key projection over 5 ranks: 4 + 4 + 4 + 4 + 0
UNEVEN = ModelConfig(vocab_size=96, dim=64, num_layers=1, num_heads=4, num_kv_heads=1, ffn_dim=48, tied=True)


def parallel(recipe: Float8, **changes: object) -> ParallelConfig:
    return ParallelConfig(dtype=Dtype.bfloat16, float8=recipe, **changes)  # type: ignore[arg-type]


def losses_of_recipes(recipes: list[Float8]) -> dict[Float8, list[float]]:
    return {
        recipe: [result.loss for result in train(Training(SMALL, parallel(recipe), OPTIM, num_steps=8))]
        for recipe in recipes
    }


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.long), 3])
def test_every_recipe_trains_like_bfloat16(world_size):
    losses = run_ranks(losses_of_recipes, world_size, list(Float8))[0]
    for recipe in RECIPES:
        assert losses[recipe] == pytest.approx(losses[Float8.none], rel=0.01), recipe
        assert losses[recipe] != losses[Float8.none], recipe  # the layers were really replaced
        assert losses[recipe][-1] < 0.9 * losses[recipe][0], recipe
    gathered, tensorwise = losses[Float8.tensorwise_all_gather], losses[Float8.tensorwise]
    assert gathered == pytest.approx(tensorwise, rel=2e-3)


def gather_whole(training: Training) -> tuple[bool, list[int], float]:
    """Whether what FSDP gathers is the float8 cast of the parameters; rows of the smallest shard; the last loss."""
    step = build(training)
    result = run_steps(step, training, range(3))[-1]
    same, rows = True, []
    for layer in step.model.layers:
        parameters = dict(layer.named_parameters())
        expected = {}
        for name, parameter in parameters.items():
            local = parameter.to_local()
            rows.append(local.size(0))
            if parameter.ndim == 2:
                pieces: list[torch.Tensor] = [torch.empty(0)] * dist.get_world_size()
                dist.all_gather_object(pieces, inner_tensor(local.detach()).clone())
                weight = torch.cat(pieces)
                scale = torch.finfo(torch.float8_e4m3fn).max / weight.abs().max().double()
                expected[name] = ((weight * scale.float()).to(torch.float8_e4m3fn).float() / scale.float()).bfloat16()
        layer.unshard()
        for name, parameter in layer.named_parameters():
            if name in expected:
                same &= torch.equal(parameter.to_original_precision().bfloat16(), expected[name])
        layer.reshard()
    return same, rows, result.loss


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_float8_all_gather_delivers_the_cast_parameters_with_ragged_and_empty_shards(world_size):
    training = Training(UNEVEN, parallel(Float8.tensorwise_all_gather), OPTIM)
    results = run_ranks(gather_whole, world_size, training)
    assert all(same for same, _, _ in results)
    assert len({loss for _, _, loss in results}) == 1
    if world_size == 5:
        assert 0 in results[-1][1], "meant to cover an empty shard"


def losses_of_layouts(layouts: list[ParallelConfig]) -> list[list[float]]:
    return [[result.loss for result in train(Training(SMALL, layout, OPTIM, num_steps=4))] for layout in layouts]


def test_float8_all_gather_works_under_hsdp_and_activation_checkpointing():
    recipe = Float8.tensorwise_all_gather
    layouts = [
        parallel(recipe),
        parallel(recipe, dp_replicate=2),
        parallel(recipe, activation_checkpoint=ActivationCheckpoint.selective),
        parallel(recipe, activation_checkpoint=ActivationCheckpoint.full, sync_every_micro_batch=True),
    ]
    first, *others = run_ranks(losses_of_layouts, 4, layouts)[0]
    for other in others:
        assert other == pytest.approx(first, rel=2e-3)


def losses_of_moments(moments: Dtype) -> list[float]:
    recipe = parallel(Float8.tensorwise_all_gather)
    return [result.loss for result in train(Training(SMALL, recipe, replace(OPTIM, moments=moments), num_steps=10))]


def test_moments_in_bfloat16_train_as_those_in_float32():
    exact, narrow = (run_ranks(losses_of_moments, 3, moments)[0] for moments in Dtype)
    assert narrow != exact
    assert narrow == pytest.approx(exact, rel=0.02)
    assert exact[-1] < 0.9 * exact[0]


def scales_and_losses(power_of_2: bool) -> tuple[list[float], list[float]]:
    training = Training(SMALL, parallel(Float8.tensorwise_all_gather, float8_power_of_2=power_of_2), OPTIM)
    step = build(training)
    losses = [result.loss for result in run_steps(step, training, range(6))]
    scales = [m.float8_gather_scale for m in step.model.modules() if hasattr(m, "float8_gather_scale")]
    return [float(scale) for scale in scales], losses  # type: ignore[arg-type]


def test_scales_can_be_powers_of_two():
    scales, losses = run_ranks(scales_and_losses, 3, True)[0]
    exact, others = run_ranks(scales_and_losses, 3, False)[0]
    assert all(math.log2(scale).is_integer() for scale in scales)
    assert not all(math.log2(scale).is_integer() for scale in exact)
    assert losses != others
    assert losses == pytest.approx(others, rel=0.01)


def stale_and_fresh() -> tuple[float, float, float]:
    training = Training(SMALL, parallel(Float8.tensorwise_all_gather), OPTIM)
    step = build(training)
    before = run_steps(step, training, range(1))[0].loss

    def set_weights(factor: float) -> None:
        with torch.no_grad():
            for name, parameter in step.model.named_parameters():
                if "ffn" in name and "norm" not in name:
                    inner_tensor(parameter.to_local()).mul_(factor)

    set_weights(32.0)
    stale = step.accumulate(*micro_batches(training, 0))[0]
    step.optimizer.zero_grad()
    refresh_float8_scales(step.model)
    fresh = step.accumulate(*micro_batches(training, 0))[0]
    dist.all_reduce(stale)
    dist.all_reduce(fresh)
    return before, stale.item(), fresh.item()


def test_a_loaded_weight_needs_fresh_scales_and_gets_them():
    _, stale, fresh = run_ranks(stale_and_fresh, 2)[0]
    assert stale != pytest.approx(fresh, rel=1e-3), "a stale scale should clip"


def moves() -> bool:
    training = Training(UNEVEN, parallel(Float8.tensorwise_all_gather), OPTIM)
    step = build(training)

    def places() -> dict[str, int]:
        return {name: inner_tensor(p.to_local()).data_ptr() for name, p in step.model.named_parameters()}

    before = places()
    run_steps(step, training, range(2))
    return places() == before


def test_shards_stay_where_they_are_in_memory_from_build_on():
    assert all(run_ranks(moves, 3))
