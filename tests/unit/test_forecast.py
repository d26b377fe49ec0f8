"""Forecasts: what follows from what, and against what others have published."""

import dataclasses
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from regrow.config.check import check, check_plan, topologies, world_sizes
from regrow.config.schema import (
    ActivationCheckpoint,
    Dtype,
    Float8,
    ParallelConfig,
    PipelineSchedule,
    PlanConfig,
    PlanJobConfig,
    PretrainConfig,
)
from regrow.config.store import pretrain_config
from regrow.errors import ConfigError
from regrow.forecast.cost import Network
from regrow.forecast.devices import (
    CALIBRATED_ON,
    DEVICES,
    GIB,
    MEASURED_SHARES,
    PUBLISHED,
    WITHIN,
    Published,
    find_device,
)
from regrow.forecast.estimate import (
    PATIENCE_S,
    USABLE_SHARE,
    Forecast,
    forecast,
    forecasts,
    gpu_of,
    network_of,
    remedy,
    share_of_this_machine,
)
from regrow.forecast.footprint import KINDS, Rank, footprint
from regrow.forecast.settle import settings_of, settle, settled
from regrow.forecast.text import MOST_ROWS, chosen, spans, to_text
from regrow.model.size import num_params, state_bytes
from regrow.plan.pipeline import Stages, cut_blocks
from regrow.simulate.world import inputs_of
from regrow.train.saver import SAFE_S
from support.commands import call
from support.simulating import configured

ROOT = Path(__file__).parents[2]
H100 = next(device for device in DEVICES if device.name == "H100")
NETWORK = Network(8, 50e9)


def config_of(*arguments: str) -> PretrainConfig:
    return pretrain_config(arguments)


def at(config: PretrainConfig, world_size: int) -> Forecast:
    return forecast(config, world_size, H100, NETWORK)


def with_parallel(config: PretrainConfig, **values: object) -> PretrainConfig:
    return dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, **values))  # type: ignore[arg-type]


EIGHT = config_of("+cluster=h100x64")


def rate(run: Published) -> float:
    """tokens/s of one GPU, as forecast."""
    config = config_of(
        "+cluster=h100x64",
        f"model={run.model}",
        f"data.seq_len={run.seq_len}",
        f"optim.global_batch_seqs={run.gpus * run.seqs}",
        f"optim.num_slices={run.gpus}",
        f"parallel.compile={str(run.compiled).lower()}",
        f"parallel.float8={'tensorwise_all_gather' if run.float8 else 'none'}",
        f"parallel.activation_checkpoint={'selective' if run.checkpointed else 'none'}",
    )
    device = find_device(run.device)
    assert device is not None
    if run.memory_bytes_per_s is not None:
        device = dataclasses.replace(device, memory_bytes_per_s=run.memory_bytes_per_s)
    return forecast(config, run.gpus, device, NETWORK).tokens_per_s / run.gpus


@pytest.mark.parametrize("run", PUBLISHED, ids=lambda run: f"{run.model}-{run.gpus}x{run.device}-{run.tokens_per_s}")
def test_a_forecast_is_near_what_others_published(run: Published) -> None:
    assert rate(run) == pytest.approx(run.tokens_per_s, rel=WITHIN)


def test_forecasts_err_to_neither_side():
    errors = [rate(run) / run.tokens_per_s for run in PUBLISHED]
    assert 0.95 <= statistics.geometric_mean(errors) <= 1.05


def test_a_forecast_says_what_it_is_calibrated_on_and_where_it_is_not():
    text = to_text(EIGHT, forecasts(EIGHT, H100, NETWORK), H100, NETWORK)
    assert "an estimate" in text
    assert CALIBRATED_ON in text
    local = config_of("observe.peak_tflops=0.3")
    here = share_of_this_machine(local, PlanConfig(), 1e11)
    assert here.shares == MEASURED_SHARES
    assert "not calibrated" in to_text(local, forecasts(local, here, NETWORK), here, NETWORK)


def test_state_is_twelve_bytes_a_parameter_shared_by_the_ranks_that_shard_it():
    for world_size in (32, 64):
        kinds = at(EIGHT, world_size).memory.kinds
        state = kinds["parameters"] + kinds["optimizer"]
        assert state == pytest.approx(12 * num_params(EIGHT.model) / world_size, rel=1e-3)
    replicated = with_parallel(EIGHT, dp_replicate=8)
    kinds = at(replicated, 64).memory.kinds
    assert kinds["parameters"] + kinds["optimizer"] == pytest.approx(12 * num_params(EIGHT.model) / 8, rel=1e-3)


# of the steps that an H100 had room for, alone
H100_ALONE = json.loads((ROOT / "benchmarks" / "results" / "2026-11-27-h100x1-diagnosis.json").read_text())
TIMED = [each for each in H100_ALONE["cases"] if "step_ms" in each and "static_launcher" not in each]


@pytest.mark.parametrize("case", TIMED, ids=lambda each: f"{each['recipe']}-{each['rows']}")
def test_a_forecast_for_one_gpu_is_near_what_an_h100_took(case: dict[str, Any]) -> None:
    """Memory; speed is forecast lower, but where that GPU waited for its host."""
    recipe, rows, seq_len = case["recipe"].removesuffix("+compile"), case["rows"], H100_ALONE["seq_len"]
    config = config_of(
        "+cluster=h100x64",
        f"model={H100_ALONE['model']}",
        f"data.seq_len={seq_len}",
        f"optim.global_batch_seqs={rows}",
        "optim.num_slices=1",
        "parallel.compile=true",
        f"parallel.float8={'none' if recipe == 'bfloat16' else recipe}",
        "parallel.activation_checkpoint=none",
        "parallel.reshard_after_forward=false",
    )
    found = at(config, 1)
    assert found.memory.total / GIB == pytest.approx(case["allocated_gib"], rel=0.02)
    if case["busy"] > 0.9:
        assert found.tokens_per_s / case["tokens_per_s"] == pytest.approx(0.75, abs=0.02)


def test_memory_is_forecast_for_the_tail_in_bfloat16_where_a_run_in_float8_has_one():
    def kinds(recipe: Float8, tail: float = 0.0) -> dict[str, int]:
        none = ActivationCheckpoint.none
        config = with_parallel(EIGHT, float8=recipe, bfloat16_tail=tail, compile=True, activation_checkpoint=none)
        return at(config, 64).memory.kinds

    plain = kinds(Float8.none)
    assert kinds(Float8.tensorwise_all_gather)["activations"] < 0.8 * plain["activations"]
    assert kinds(Float8.tensorwise_all_gather, tail=0.1) == plain


def test_ranks_of_a_unit_share_state_activations_and_arithmetic_and_wait_for_each_other():
    shared = with_parallel(EIGHT, tp=4)
    alone, unit = at(EIGHT, 32), at(shared, 32)
    assert (unit.mesh.dp_shard, unit.mesh.tp, unit.batch.world_size) == (8, 4, 8)
    state = unit.memory.kinds["parameters"] + unit.memory.kinds["optimizer"]
    assert state == pytest.approx(12 * num_params(EIGHT.model) / 32, rel=1e-3)  # norms, four times, are little
    assert unit.memory.kinds["activations"] < 0.5 * alone.memory.kinds["activations"]
    assert unit.memory.kinds["gathered"] < 0.3 * alone.memory.kinds["gathered"]
    # as many passes a unit as four ranks have together, each of a quarter of the arithmetic, and the sequences' traffic
    assert unit.batch.num_micro_batches == pytest.approx(4 * alone.batch.num_micro_batches, rel=0.15)
    assert unit.time.compute_s > alone.time.compute_s
    sizes = [each.mesh.world_size for each in forecasts(shared, H100, NETWORK)]
    assert sizes == list(range(32, 65, 4))


def test_ranks_that_share_rows_share_activations_and_wait_for_keys_and_values():
    shared = with_parallel(EIGHT, cp=4)
    alone, unit = at(EIGHT, 32), at(shared, 32)
    assert (unit.mesh.dp_shard, unit.mesh.cp, unit.batch.world_size) == (32, 4, 8)
    for kind in ("parameters", "optimizer"):
        assert unit.memory.kinds[kind] == alone.memory.kinds[kind]
    assert 0.25 < unit.memory.kinds["activations"] / alone.memory.kinds["activations"] < 0.45  # keys and values whole
    assert unit.batch.num_micro_batches == pytest.approx(4 * alone.batch.num_micro_batches, rel=0.15)
    assert unit.time.compute_s > alone.time.compute_s  # as many tokens a rank, and keys and values are waited for
    sizes = [each.mesh.world_size for each in forecasts(shared, H100, NETWORK)]
    assert sorted(set(sizes)) == list(range(32, 65, 4))
    text = to_text(shared, forecasts(shared, H100, NETWORK), H100, NETWORK)
    assert "4 ranks share each row, 2,048 of its 8,192 tokens each in two chunks" in text
    assert unit.to_dict()["axes"] == {"pp": 1, "dp_replicate": 1, "dp_shard": 8, "cp": 4, "tp": 1}


@pytest.mark.parametrize(
    ("cluster", "model", "settings"),
    [
        ("h100x64", "8b", ("parallel.cp=8",)),
        ("h100x512", "70b", ("parallel.tp=8", "parallel.cp=8", "optim.num_slices=64", "optim.global_batch_seqs=64")),
        (
            "h100x512",
            "405b",
            ("parallel.tp=8", "parallel.cp=8", "cluster.min_workers=512", "parallel.float8=none"),
        ),
    ],
)
def test_rows_of_131072_tokens_fit_where_eight_ranks_share_them_and_take_a_fraction_of_the_activations(
    cluster: str, model: str, settings: tuple[str, ...]
) -> None:
    rows = ("data.seq_len=131072", "optim.num_slices=32", "optim.global_batch_seqs=32")
    kept = ("parallel.activation_checkpoint=full", "parallel.slices_per_pass=1", "parallel.sync_every_micro_batch=true")
    config = config_of(f"+cluster={cluster}", f"model={model}", *rows, *kept, *settings)
    check(config)
    found = forecasts(config, H100, NETWORK)
    assert all(each.fits for each in found)
    assert {each.mesh.cp for each in found} == {8}
    alone = forecast(with_parallel(config, cp=1), config.optim.num_slices * config.parallel.tp, H100, NETWORK)
    print(model, found[-1].memory, alone.memory)
    assert 6 * found[-1].memory.kinds["activations"] < alone.memory.kinds["activations"]


@pytest.mark.parametrize(
    ("cluster", "settings"),
    [
        ("h100x64", ("parallel.cp=8", "optim.num_slices=56", "optim.global_batch_seqs=56")),
        ("h100x2048", ("parallel.tp=8", "parallel.cp=8", "optim.num_slices=124", "optim.global_batch_seqs=124")),
        ("h100x16384", ("parallel.tp=8", "parallel.cp=16", "optim.num_slices=126", "optim.global_batch_seqs=126")),
    ],
)
def test_the_commands_that_the_docs_give_for_rows_of_131072_tokens_fit_at_every_size(
    cluster: str, settings: tuple[str, ...]
) -> None:
    long = ("data.seq_len=131072", "parallel.activation_checkpoint=full", "parallel.dp_replicate=1")
    written = f"+cluster={cluster} $LONG {' '.join(settings)}"
    assert written in (ROOT / "docs" / "using.md").read_text()
    config, _ = settle(config_of(f"+cluster={cluster}", *long, *settings), H100, NETWORK)
    assert all(each.fits for each in forecasts(config, H100, NETWORK))


@pytest.mark.parametrize("cluster", ["h100x2048", "h100x16384", "h100x98304"])
def test_the_large_clusters_fit_at_every_size_and_a_few_nodes_may_go_for_nothing(cluster: str) -> None:
    config, _ = settle(config_of(f"+cluster={cluster}"), H100, NETWORK)
    table = check(config)
    sizes, most = world_sizes(config, table), config.cluster.max_workers
    assert all(each.fits for each in forecasts(config, H100, NETWORK))
    mesh = table[sizes[most]].mesh
    assert mesh.dp_replicate == config.parallel.dp_replicate > 1
    assert (mesh.tp * mesh.cp) <= NETWORK.ranks_per_node
    assert sizes[most - most // 64] == sizes[most]
    assert table[sizes[most]].busy_share(most) > 0.75  # bubble and spares
    assert min(sizes) == config.cluster.min_workers


def test_the_table_of_98304_workers_cuts_the_model_once_for_each_number_of_stages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuts: list[int] = []

    def counted(num_blocks: int, pp: int, per_rank: int, *, before: float, behind: float) -> Stages:
        cuts.append(pp)
        return cut_blocks(num_blocks, pp, per_rank, before=before, behind=behind)

    monkeypatch.setattr("regrow.config.stages.cut_blocks", counted)
    config = config_of("+cluster=h100x98304", "cluster.min_workers=8192")
    table = topologies(config)
    assert len(table) > 5_000
    assert len(cuts) == len(set(cuts)) <= config.model.num_layers // config.parallel.stages_per_rank


def test_a_pipeline_has_stages_a_bubble_and_an_equal_share_of_the_arithmetic():
    shaped = dataclasses.replace(EIGHT.parallel, pp=4, slices_per_pass=1)
    staged = dataclasses.replace(EIGHT, parallel=shaped)
    alone, found = at(with_parallel(EIGHT, slices_per_pass=1), 64), at(staged, 64)
    assert found.stages is not None
    assert [len(each) for each in found.stages.blocks] == [8, 9, 9, 6]  # the output takes the place of two
    passes = found.batch.num_micro_batches
    assert found.bubble_share == pytest.approx(3 / (passes + 3))
    # four times the passes of a quarter of the arithmetic each, but for stages that are not quite equal
    assert passes == pytest.approx(4 * alone.batch.num_micro_batches, rel=0.15)
    assert found.time.compute_s == pytest.approx(alone.time.compute_s, rel=0.2)
    assert found.time.step_s > found.time.compute_s / (1 - found.bubble_share)
    state = found.memory.kinds["parameters"] + found.memory.kinds["optimizer"]
    assert state < 1.6 * (alone.memory.kinds["parameters"] + alone.memory.kinds["optimizer"])
    several = dataclasses.replace(shaped, schedule=PipelineSchedule.interleaved)
    interleaved = at(dataclasses.replace(EIGHT, parallel=several), 64)
    assert interleaved.bubble_share == pytest.approx(3 / (2 * passes + 3))
    assert interleaved.memory.kinds["activations"] > found.memory.kinds["activations"]
    text = to_text(staged, [found], H100, NETWORK)
    assert "4 stages of 8, 9, 9, 6 blocks; the bubble shrinks with more passes" in text
    assert found.to_dict()["bubble_fraction"] == found.bubble_share


def test_what_is_offloaded_is_not_on_the_device_and_costs_time():
    eager = with_parallel(EIGHT, float8=Float8.tensorwise)
    here, away = at(eager, 64), at(with_parallel(eager, cpu_offload=True), 64)
    kinds = away.memory.kinds
    assert kinds["parameters"] == kinds["optimizer"] == 0
    assert away.offloaded_bytes == pytest.approx(8 * 16 * num_params(EIGHT.model) / 64, rel=1e-3)
    few = at(with_parallel(eager, cpu_offload=True), 4)  # of a node's eight: all of the state is theirs
    assert few.offloaded_bytes == pytest.approx(16 * num_params(EIGHT.model), rel=1e-3)
    assert here.offloaded_bytes == 0
    assert away.memory.total < here.memory.total - 12 * num_params(EIGHT.model) / 64 + GIB
    assert away.time.network_s > here.time.network_s
    assert away.time.update_s > 5 * here.time.update_s
    on_cpu = dataclasses.replace(eager, cluster=dataclasses.replace(eager.cluster, gpus_per_worker=0))
    assert at(with_parallel(on_cpu, cpu_offload=True), 64).memory == at(on_cpu, 64).memory


def test_gradients_of_several_passes_are_held_whole_in_float32_unless_each_pass_reduces_them():
    whole, reduced = at(EIGHT, 64), at(with_parallel(EIGHT, sync_every_micro_batch=True), 64)
    assert whole.batch.num_micro_batches == 7
    assert whole.memory.kinds["gradients"] >= 4 * num_params(EIGHT.model) * 0.9
    assert reduced.memory.kinds["gradients"] < 0.5 * whole.memory.kinds["gradients"]
    assert reduced.time.network_s > whole.time.network_s


def test_checkpointing_takes_less_memory_and_only_the_full_one_more_time():
    found = {mode: at(with_parallel(EIGHT, activation_checkpoint=mode), 64) for mode in ActivationCheckpoint}
    none, selective, full = (found[mode] for mode in ActivationCheckpoint)
    assert none.memory.kinds["activations"] >= selective.memory.kinds["activations"]
    assert selective.memory.kinds["activations"] > 2 * full.memory.kinds["activations"]
    assert none.time.compute_s == selective.time.compute_s < full.time.compute_s


def test_what_a_block_may_not_keep_is_computed_again_at_a_budget_of_nothing_as_with_full_checkpointing():
    def found(mode: ActivationCheckpoint, budget: float = 1.0, **values: object) -> Forecast:
        both = {"activation_checkpoint": mode, "activation_budget": budget}
        return at(with_parallel(EIGHT, **both, **values), 64)

    none, full = ActivationCheckpoint.none, ActivationCheckpoint.full
    times = [found(none, budget).time.step_s for budget in (1.0, 0.75, 0.5, 0.25, 0.0)]
    assert times == sorted(set(times))
    assert times[-1] == pytest.approx(found(full).time.step_s, rel=0.05)
    for axis in ({"tp": 8}, {"cp": 2}):  # what ranks wait for comes again too
        nothing, whole = (found(*each, **axis).time for each in ((none, 0.0), (full,)))
        assert nothing.compute_s == pytest.approx(whole.compute_s)
        assert found(none, 0.5, **axis).time.compute_s < nothing.compute_s
    assert "parallel.activation_budget" in to_text(EIGHT, [at(EIGHT, 64)], H100, NETWORK)


def test_chunks_of_the_loss_take_a_share_of_the_logits_memory():
    eager = with_parallel(EIGHT, compile=False, float8=Float8.none)
    whole, chunked = (at(with_parallel(eager, loss_chunk_tokens=chunk), 64) for chunk in (0, 1024))
    assert whole.memory.moment == "loss"
    assert whole.memory.kinds["logits"] == 12 * 8192 * 128256
    assert chunked.memory.total < whole.memory.total - 4 * 8192 * 128256


def test_float8_gathers_half_the_bytes_of_the_blocks():
    plain, float8 = (
        at(with_parallel(EIGHT, float8=recipe), 64) for recipe in (Float8.none, Float8.tensorwise_all_gather)
    )
    assert 0.5 < (float8.time.network_s - 0) / plain.time.network_s < 0.8
    assert float8.time.compute_s < plain.time.compute_s


def test_what_a_recipe_computes_in_bfloat16_takes_as_long_as_that() -> None:
    """Gradients of weights under rowwise_with_gw_hp, all products of a run that is all tail."""

    def compute_s(recipe: Float8, **more: object) -> float:
        return at(with_parallel(EIGHT, float8=recipe, compile=True, **more), 64).time.compute_s

    plain = compute_s(Float8.none)
    assert compute_s(Float8.rowwise) < compute_s(Float8.rowwise_with_gw_hp) < plain
    assert compute_s(Float8.rowwise) == compute_s(Float8.rowwise, bfloat16_tail=0.5)
    recipes = [each for each in Float8 if each is not Float8.none]
    for recipe in recipes:
        assert compute_s(recipe, bfloat16_tail=1.0) == plain
    gathered = with_parallel(EIGHT, float8=Float8.tensorwise_all_gather, bfloat16_tail=1.0)
    assert at(gathered, 64) == at(with_parallel(EIGHT, float8=Float8.none), 64)


def test_every_world_size_is_forecast_and_the_step_shortens_as_ranks_share_the_slices():
    found = forecasts(EIGHT, H100, NETWORK)
    assert [each.num_workers for each in found] == list(range(32, 65))
    passes = [each.batch.num_micro_batches for each in found]
    assert passes == sorted(passes, reverse=True)
    assert found[-1].time.step_s < 0.6 * found[0].time.step_s
    assert all(0 < each.mfu < 1 for each in found)
    assert all(each.snapshot_bytes >= found[-1].snapshot_bytes for each in found)


@pytest.mark.parametrize("arguments", [["+cluster=h200x8"], ["cluster.min_workers=1", "cluster.max_workers=8"]])
def test_a_node_that_has_all_ranks_holds_no_more_than_all_of_two_groups(arguments):
    config = config_of(*arguments, "optim.num_slices=96", "optim.global_batch_seqs=96")
    held = 2 * config.snapshot.slots * state_bytes(config.model)
    uneven = 1.01  # rows do not divide evenly
    assert all(held <= each.snapshot_bytes <= held * uneven for each in forecasts(config, H100, NETWORK))


def test_a_model_that_does_not_fit_is_said_not_to_and_the_setting_that_helps_is_named():
    config = config_of("+cluster=h100x64", "parallel.activation_checkpoint=none")
    small = dataclasses.replace(H100, memory_bytes=34 * GIB)
    found = forecasts(config, small, NETWORK)
    assert not any(each.fits for each in found)
    text = to_text(config, found, small, NETWORK)
    assert "does not fit at 32-64 workers: at most 31.3 GiB" in text
    settings, then = remedy(config, 32, small, NETWORK) or ("", found[0])
    assert settings == "parallel.sync_every_micro_batch=true parallel.activation_checkpoint=full"
    assert then.fits
    assert settings in text
    tiny = dataclasses.replace(H100, memory_bytes=10 * GIB)
    settings, then = remedy(config, 32, tiny, NETWORK) or ("", found[0])
    assert settings.endswith("parallel.cpu_offload=true parallel.float8=tensorwise")
    assert then.fits
    assert remedy(config, 32, dataclasses.replace(H100, memory_bytes=GIB), NETWORK) is None
    nothing = dataclasses.replace(H100, memory_bytes=GIB)
    assert "no setting of `parallel`" in to_text(config, forecasts(config, nothing, NETWORK), nothing, NETWORK)


BUDGET = ("parallel.activation_checkpoint=none", "parallel.compile=true", "parallel.activation_budget=0.5")


EAGER = ("parallel.compile=false", "parallel.float8=none", "parallel.activation_checkpoint=full")


@pytest.mark.parametrize(
    ("arguments", "settings"),
    [
        (BUDGET, "parallel.activation_checkpoint=full parallel.activation_budget=1"),
        ((*EAGER, "parallel.loss_chunk_tokens=0"), "parallel.loss_chunk_tokens=2048"),
        ((*EAGER, "parallel.prefetch_blocks=4", "data.seq_len=2048"), "parallel.prefetch_blocks=1"),
    ],
)
def test_settings_that_would_do_are_such_that_a_run_takes(arguments: tuple[str, ...], settings: str) -> None:
    """And no more of them than are needed, on a device that has just enough memory for these."""
    given = ("+cluster=h100x64", *arguments, "parallel.sync_every_micro_batch=true", "parallel.slices_per_pass=1")
    mended = config_of(*given, *settings.split())
    device = dataclasses.replace(H100, memory_bytes=int((at(mended, 32).memory.total + 1) / USABLE_SHARE) + 1)
    assert not forecast(config_of(*given), 32, device, NETWORK).fits
    found = remedy(config_of(*given), 32, device, NETWORK)
    assert found is not None
    assert found[0] == settings
    check(config_of(*given, *found[0].split()))
    assert found[1] == forecast(mended, 32, device, NETWORK)


def test_what_is_held_adds_up_to_nothing_negative_for_every_combination():
    for dtype in Dtype:
        for mode in ActivationCheckpoint:
            for chunk in (0, 1, 300):
                for dp_shard, passes in ((1, 1), (2, 1), (3, 4)):
                    for tied in (False, True):
                        rank = Rank(
                            model=dataclasses.replace(PretrainConfig().model, tied=tied),
                            parallel=ParallelConfig(
                                dtype=dtype,
                                activation_checkpoint=mode,
                                loss_chunk_tokens=chunk,
                                reshard_after_forward=dp_shard != 2,
                                sync_every_micro_batch=chunk == 1,
                                cpu_offload=chunk == 300,
                            ),
                            dp_shard=dp_shard,
                            num_passes=passes,
                            rows=4,
                            seq_len=64,
                            on_gpu=tied,
                        )
                        found = footprint(rank)
                        assert set(found.kinds) == set(KINDS)
                        assert all(value >= 0 for value in found.kinds.values())
                        assert found.total > (0 if rank.offloads else 12 * num_params(rank.model) // dp_shard)


def test_the_device_is_what_the_clusters_name_says_or_what_is_given():
    assert gpu_of(EIGHT, PlanConfig()) == H100
    assert gpu_of(EIGHT, PlanConfig(device="b200")).name == "B200"
    assert gpu_of(EIGHT, PlanConfig(memory_gib=40)).memory_bytes == 40 * GIB
    given = dataclasses.replace(EIGHT, observe=dataclasses.replace(EIGHT.observe, peak_tflops=500.0))
    assert gpu_of(given, PlanConfig()).flops == 500e12
    sxm, pcie = (find_device(f"NVIDIA A100{name}") for name in ("-SXM4-80GB", " 80GB PCIe"))
    assert sxm is not None
    assert pcie is not None
    assert sxm.link_bytes_per_s > 9 * pcie.link_bytes_per_s  # NVLink 3, and PCIe 4 with 16 lanes
    assert pcie == dataclasses.replace(sxm, name="A100 80GB PCIe", memory_bytes_per_s=1.935e12, link_bytes_per_s=32e9)
    with pytest.raises(ConfigError, match=r"cluster.name='gpu1' names none of .*B200; set plan.device=H100"):
        gpu_of(config_of("+cluster=gpu1"), PlanConfig())
    with pytest.raises(ConfigError, match=r"plan.device='V100' names none of"):
        gpu_of(EIGHT, PlanConfig(device="V100"))


def test_float8_is_refused_on_gpus_that_have_none() -> None:
    """As their workers do; the plan forecast a run that none of them begins, and a simulation took a step of 5 s."""
    on_a100 = ("+cluster=h100x64", "parallel.float8=rowwise", "plan.device=A100")
    said = "parallel.float8=rowwise needs a GPU of compute capability 8.9 or higher, and A100 is older"
    done = plan(*on_a100)
    assert (done.returncode, done.stderr) == (1, f"error: {said}; set parallel.float8=none\n")
    with pytest.raises(ConfigError, match=rf"^{said}; set parallel.float8=none$"):
        inputs_of(configured(*on_a100))
    for more in ("parallel.float8=none", "parallel.bfloat16_tail=1", "plan.device=H200"):
        found = inputs_of(configured(*on_a100, more))[0]
        assert found.figures["step_s"].source == "jobs.plan's forecast"
    assert {device.name for device in DEVICES if device.has_float8} == {
        device.name for device in DEVICES if device.float8_flops > device.flops
    }


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("workers_per_node", 0),
        ("network_gb_per_s", 0.0),
        ("memory_gib", -1.0),
        *((key, float("inf")) for key in ("memory_gib", "network_gb_per_s", "keepers_gb_per_s")),
    ],
)
def test_hardware_that_cannot_be_is_refused(key, value):
    config = PlanJobConfig()
    check_plan(config)
    setattr(config.plan, key, value)
    with pytest.raises(ConfigError, match=f"plan.{key}={value} must be"):
        check_plan(config)


def test_units_that_no_node_has_room_for_are_refused_where_nodes_are_a_clusters():
    told = plan("+cluster=h100x64", "plan.workers_per_node=4", "parallel.tp=8", "optim.num_slices=8")
    assert told.returncode == 1
    assert "error: plan.workers_per_node=4 must be a multiple of parallel.tp=8" in told.stderr
    config = PlanJobConfig()
    config.plan.workers_per_node, config.parallel.tp = 3, 2
    check_plan(config)  # on this machine it says nothing
    config.cluster.address = "auto"
    with pytest.raises(ConfigError, match=r"plan\.workers_per_node=3 must be a multiple of parallel\.tp=2"):
        check_plan(config)


def test_workers_without_gpus_share_this_machine():
    local = config_of("+cluster=cpu3", "observe.peak_tflops=0.3")
    device = share_of_this_machine(local, PlanConfig(), 0.3e12)
    assert device.flops == pytest.approx(0.1e12)
    assert network_of(local, PlanConfig()).ranks_per_node == 1
    assert forecasts(local, device, network_of(local, PlanConfig()))[-1].fits


def test_workers_that_make_no_step_faster_are_spares_and_cost_nothing():
    def found(*arguments: str) -> dict[int, Any]:
        return {each.num_workers: each for each in forecasts(config_of("+cluster=h100x64", *arguments), H100, NETWORK)}

    auto = found("cluster.max_workers=72")
    assert {size: each.spares for size, each in auto.items() if each.spares and size > 56} == {
        **{size: size - 56 for size in range(57, 64)},
        **{size: size - 64 for size in range(65, 73)},
    }
    for size, each in auto.items():
        assert each.to_dict()["world_size"] == size == each.mesh.world_size + each.to_dict()["spares"]
        assert each.time == auto[each.mesh.world_size].time
        smaller = auto.get(each.mesh.world_size - 1)
        assert smaller is None or smaller.batch.most_slices > each.batch.most_slices, "one fewer would be slower"
    none = found("cluster.spare_workers=0")
    assert {each.spares for each in none.values()} == {0}
    assert all(auto[size].batch.num_micro_batches == each.batch.num_micro_batches for size, each in none.items())


def test_the_plan_says_what_it_costs_that_a_unit_is_away():
    def said(*arguments: str) -> str:
        config = config_of("+cluster=h100x64", *arguments)
        lines = to_text(config, forecasts(config, H100, NETWORK), H100, NETWORK).splitlines()
        return next(line for line in lines if line.startswith("one unit of "))

    assert said().startswith("one unit of 1 away from 64 workers: 8 passes for 7, a step takes 14.3% longer; ")
    for spares in ("cluster.max_workers=72", "cluster.spare_workers=8"):
        assert said(spares) == "one unit of 1 away from 72 workers costs nothing: 8 of these are spares"


def most_lost(every_steps: int, commit_s: float, step_s: float) -> int:
    """Of 300 steps by the rule of `SnapshotSaver.confirm`: each waits until the snapshot before it is committed, or 5 s
    and then for none until one is; keepers send one, and the newest that was begun meanwhile after it.
    """
    now, committed, late, worst = 0.0, 0, 0, 0
    sending: tuple[float, int] | None = None  # when it is committed, its step
    waiting, done = 0, list[float]()

    def pass_until(until: float) -> None:
        nonlocal sending, waiting, committed, worst
        while sending is not None and sending[0] <= until:
            at, step = sending
            worst, committed = max(worst, sum(each <= at for each in done) - committed), step
            sending, waiting = ((at + commit_s, waiting) if waiting else None), 0

    for step in range(1, 301):
        now += step_s
        done.append(now)
        pass_until(now)
        wanted = (step - 1) // every_steps * every_steps
        if late <= committed < wanted:
            on_time = sending is not None and sending[1] >= wanted and sending[0] <= now + SAFE_S
            now = sending[0] if on_time and sending is not None else now + SAFE_S
            pass_until(now)
            late = late if on_time else wanted
        if step % every_steps == 0:
            if sending is None:
                sending = now + commit_s, step
            else:
                waiting = step
    return worst


@pytest.mark.parametrize("every_steps", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("gb_per_s", [0.25, 0.5, 0.9])
def test_where_commits_take_longer_than_is_waited_for_more_than_the_set_distance_is_lost(
    every_steps: int, gb_per_s: float
) -> None:
    assert PATIENCE_S == SAFE_S
    config = config_of("+cluster=h100x64", f"snapshot.every_steps={every_steps}")
    network = dataclasses.replace(NETWORK, keepers_bytes_per_s=gb_per_s * 1e9)
    full = forecast(settle(config, H100, network)[0], 64, H100, network)
    commits, step_s = full.commits, full.time.step_s
    assert commits.commit_s > step_s + SAFE_S
    said = full.to_dict()["steps_lost_most"]
    assert every_steps < most_lost(every_steps, commits.commit_s, step_s) <= said
    assert said <= every_steps + 2 * commits.commit_s / step_s
    text = to_text(config, [full], H100, network)
    assert "longer than a step, which waits up to 5 s, then goes on without" in text
    assert f"a lost node costs at most {said}" in text


def test_where_commits_are_waited_for_the_set_distance_is_the_most_that_is_lost() -> None:
    config = settled(config_of("+cluster=h100x64", "snapshot.every_steps=2"))[0]
    network = dataclasses.replace(NETWORK, keepers_bytes_per_s=1.2e9)
    full = forecast(config, 64, H100, network)
    assert full.time.step_s < full.commits.commit_s < full.time.step_s + SAFE_S
    assert full.commits.steps_lost == 2
    text = to_text(config, [full], H100, network)
    assert "longer than a step, which waits; snapshot.every_steps=auto does not" in text


def test_a_unit_away_is_all_ranks_of_one():
    def said(*arguments: str) -> str:
        config = config_of("+cluster=h100x64", *arguments)
        lines = to_text(config, forecasts(config, H100, NETWORK), H100, NETWORK).splitlines()
        return next((line for line in lines if line.startswith("one unit of ")), "")

    staged = ("parallel.pp=4", "parallel.least_pp=1", "parallel.slices_per_pass=1")
    assert said(*staged).startswith("one unit of 4 away from 64 workers: 30 passes for 28, a step takes ")
    few = ("parallel.tp=4", "parallel.cp=4", "optim.num_slices=16", "optim.global_batch_seqs=16")
    assert said(*few, "cluster.spare_workers=8").startswith("one unit of 16 away from 72 workers: 6 passes for 4, ")
    assert said(*few, "cluster.spare_workers=16") == (
        "one unit of 16 away from 80 workers costs nothing: 16 of these are spares"
    )


def test_a_pipelines_stages_are_those_of_the_largest_size():
    config = config_of("+cluster=h100x64", "parallel.pp=4", "parallel.least_pp=1", "cluster.min_workers=31")
    found = forecasts(config, H100, NETWORK)
    assert found[0].stages is None
    assert "4 stages of 8, 9, 9, 6 blocks" in to_text(config, found, H100, NETWORK)


def test_ranks_that_wait_or_run_passes_for_nothing_are_idle():
    config = config_of("+cluster=h100x64", "cluster.max_workers=72")
    for each in forecasts(config, H100, NETWORK):
        busy = each.batch.num_slices / each.batch.most_slices  # ranks' worth
        assert each.to_dict()["idle_fraction"] == pytest.approx(1 - busy / each.num_workers)


def test_a_table_has_the_smallest_and_the_largest_size_and_whole_nodes():
    sizes = [each.num_workers for each in chosen(forecasts(EIGHT, H100, NETWORK), NETWORK)]
    assert sizes == [32, 40, 48, 56, 64]
    many = config_of("+cluster=h100x512")
    found = chosen(forecasts(many, H100, Network(2, 50e9)), Network(2, 50e9))
    assert len(found) <= MOST_ROWS
    assert spans([1]) == "1"
    assert spans([1, 2, 3, 7, 9, 10]) == "1-3, 7, 9-10"
    assert spans([8, 12, 16, 24], step=4) == "8-16, 24"


def plan(*arguments: str) -> subprocess.CompletedProcess[str]:
    return call("plan", *arguments)


def test_the_command_prints_tables_or_json_and_needs_no_torch_for_gpus():
    code = (
        "import sys, runpy; sys.argv = ['jobs.plan', '--json', '+cluster=h100x64', 'model=70b']\n"
        "runpy.run_module('jobs.plan', run_name='__main__')\n"
        "print('HEAVY', sorted({'torch', 'ray'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert "HEAVY []" in done.stderr, done.stderr
    found = json.loads(done.stdout)
    assert found["num_params"] == 70_553_706_496
    assert [each["world_size"] for each in found["world_sizes"]] == list(range(32, 65))
    last = found["world_sizes"][-1]
    assert last["bytes"]["total"] == sum(last["bytes"][kind] for kind in KINDS)
    assert last["fits"] == (last["bytes"]["total"] <= last["usable_bytes"])
    text = plan("+cluster=h100x64", "model=70b")
    assert text.returncode == 0, text.stderr
    assert "70b: 70,553,706,496 parameters; 32 to 64 workers, 8 a node, on H100: 79 GiB" in text.stdout
    assert "assumed: " in text.stdout


def test_a_peak_that_is_given_is_of_one_workers_device_also_where_workers_share_this_machine():
    found = plan("--json", "cluster.max_workers=4", "observe.peak_tflops=0.5")
    assert json.loads(found.stdout)["device"]["flops"] == pytest.approx(0.5e12), found.stderr


@pytest.mark.parametrize(
    ("arguments", "of_plan", "differs"),
    [
        (("+cluster=h100x64",), {"memory_gib": 60.0}, True),
        (("+cluster=gpu1", "model=150m", "data.seq_len=1024"), {"device": "H100"}, True),
        (("+cluster=h100x64",), {"keepers_gb_per_s": 1.0}, False),
    ],
)
def test_what_a_plan_settles_by_its_own_hardware_is_what_a_run_has_to_be_given(
    arguments: tuple[str, ...], of_plan: dict[str, Any], differs: bool
) -> None:
    """`jobs.pretrain` knows no `plan.*`: given these it settles the same."""
    config = config_of(*arguments, "optim.num_slices=448", "optim.global_batch_seqs=448")
    plan = PlanConfig(**of_plan)
    planned, _ = settle(config, gpu_of(config, plan), network_of(config, plan))
    give = settings_of(config, planned)
    assert bool(give) is differs
    names = ("pp", "least_pp", "slices_per_pass", "sync_every_micro_batch")
    of_run, _ = settled(config_of(*arguments, "optim.num_slices=448", "optim.global_batch_seqs=448", *give))
    assert [getattr(of_run.parallel, name) for name in names] == [getattr(planned.parallel, name) for name in names]


def test_the_command_says_what_to_give_to_a_run_that_knows_no_plan() -> None:
    said = "give them parallel.least_pp=1 parallel.slices_per_pass=1 parallel.sync_every_micro_batch=true"
    told = plan("+cluster=h100x64", "plan.memory_gib=60")
    assert said in told.stdout, told.stderr
    assert told.stdout.count("give them") == 1
    assert "give them" not in plan("+cluster=h100x64").stdout
    as_json = json.loads(plan("--json", "+cluster=h100x64", "plan.memory_gib=60").stdout)
    assert as_json["give_to_a_run"] == said.split()[2:]


def test_a_mistake_is_one_line():
    done = plan("+cluster=gpu1")
    assert done.returncode == 1
    assert done.stderr.startswith("error: plan.device is not given, and cluster.name='gpu1'")
    assert done.stderr.count("\n") == 1
    assert find_device("gpu1") is None
