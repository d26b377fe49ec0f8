"""Passes as few, and gradients reduced as late, as memory allows, where the configuration leaves both open."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from regrow.config.check import topologies
from regrow.config.schema import PlanConfig, PretrainConfig
from regrow.config.store import pretrain_config
from regrow.errors import RegrowError
from regrow.forecast.cost import Network
from regrow.forecast.devices import GIB, Device, find_device
from regrow.forecast.estimate import USABLE_SHARE, forecast, forecasts, network_of, topologies_of_groups
from regrow.forecast.settle import ROOM_SHARE, settle, settle_passes, settled
from support.commands import call

ROOT = Path(__file__).parents[2]
NETWORK = Network(8, 50e9)
EIGHT_SLICES = ["optim.num_slices=512", "optim.global_batch_seqs=512"]  # of each of 64 ranks


def gpu(name: str, **changed: object) -> Device:
    found = find_device(name)
    assert found is not None
    return dataclasses.replace(found, **changed)  # type: ignore[arg-type]


def chosen(*arguments: str, device: Device | None = None) -> tuple[int, bool | None]:
    config, why = settle_passes(pretrain_config(arguments), device or gpu("H100"), NETWORK)
    assert f"slices_per_pass={config.parallel.slices_per_pass}" in why
    return config.parallel.slices_per_pass, config.parallel.sync_every_micro_batch


def test_gradients_are_reduced_in_every_pass_where_whole_ones_would_not_fit():
    arguments = ["+cluster=h100x64"]
    assert chosen(*arguments) == (1, False)
    small = gpu("H100", memory_bytes=60 * GIB)  # whole, 33 GiB of them would make it 61
    assert chosen(*arguments, device=small) == (1, True)
    config, _ = settle_passes(pretrain_config(arguments), small, NETWORK)
    assert all(each.fits for each in forecasts(config, small, NETWORK))
    assert not any(each.fits for each in forecasts(pretrain_config(arguments), small, NETWORK))
    assert chosen("+cluster=h100x512", "parallel.sync_every_micro_batch=null") == (1, True)  # 70B


def test_passes_are_larger_where_there_is_room_and_reducing_gradients_may_make_it():
    assert chosen("+cluster=h100x64", *EIGHT_SLICES) == (2, True)
    assert chosen("+cluster=h200x8", "optim.num_slices=64", "optim.global_batch_seqs=64", device=gpu("H200")) == (
        2,
        False,
    )
    passes, _ = chosen("+cluster=h100x64", "model=1_8b", "data.seq_len=4096", *EIGHT_SLICES)
    assert passes == 8


@pytest.mark.parametrize("model", ["8b", "1_8b"])
def test_what_is_chosen_is_no_slower_by_forecast_and_leaves_room_at_every_size(model):
    config = pretrain_config(["+cluster=h100x64", f"model={model}", *EIGHT_SLICES])
    device = gpu("H100")
    after, _ = settle_passes(config, device, NETWORK)
    assert forecast(after, 64, device, NETWORK).time.step_s < forecast(config, 64, device, NETWORK).time.step_s
    for each in forecasts(after, device, NETWORK):
        assert each.memory.total <= ROOM_SHARE * each.usable_bytes


def test_what_is_given_stays_and_passes_are_of_one_size_at_the_largest_world_size():
    arguments = ["+cluster=h100x64", *EIGHT_SLICES]
    assert chosen(*arguments, "parallel.sync_every_micro_batch=false") == (1, False)
    assert chosen(*arguments, "parallel.slices_per_pass=1")[0] == 1
    both = pretrain_config([*arguments, "parallel.slices_per_pass=4", "parallel.sync_every_micro_batch=true"])
    assert settle_passes(both, gpu("H100"), NETWORK) == (both, "")
    # 7 slices a rank: passes of 7 or of 1
    assert chosen("+cluster=h100x64", "model=1_8b", "data.seq_len=4096")[0] == 7


def test_without_a_gpu_that_is_known_a_pass_is_a_slice():
    for arguments in (["+cluster=cpu3", "parallel.slices_per_pass=0"], ["+cluster=gpu1"]):
        config, why = settled(pretrain_config([*arguments, "model=150m"]))
        assert (config.parallel.slices_per_pass, config.parallel.sync_every_micro_batch, why) == (1, False, "")
    named, why = settled(pretrain_config(["+cluster=h100x64", *EIGHT_SLICES]))
    assert named.parallel.slices_per_pass == 2
    assert why == (
        "by forecast for H100: parallel.slices_per_pass=2 parallel.sync_every_micro_batch=true, "
        "56 of 73 GiB at 32 workers"
    )


@pytest.mark.parametrize("axes", ["parallel.cp=2", "parallel.cp=4"])
def test_the_fewest_workers_that_are_whole_units_are_spoken_of(axes):
    config = pretrain_config(["+cluster=h100x64", axes, "cluster.min_workers=33"])
    least = min(topologies(config))
    assert least > 33
    _, why = settle_passes(config, gpu("H100"), NETWORK)
    assert why.endswith(f"GiB at {least} workers")


def test_the_smallest_size_with_replicas_has_room_too():
    """Of 17 to 64 workers it is the smallest one that eight replicas divide which takes most memory."""
    config = pretrain_config(["+cluster=h100x64", "parallel.dp_replicate=8", "cluster.min_workers=17"])
    late = dataclasses.replace(config.parallel, slices_per_pass=1, sync_every_micro_batch=False)
    needed = {
        size: forecast(dataclasses.replace(config, parallel=late), size, gpu("H100"), NETWORK).memory.total
        for size in topologies(config)
    }
    assert max(needed, key=needed.__getitem__) == 24
    device = gpu("H100", memory_bytes=int((needed[24] - 1) / USABLE_SHARE))
    settled, _ = settle_passes(config, device, NETWORK)
    assert all(each.fits for each in forecasts(settled, device, NETWORK))


def test_what_is_refused_is_refused_first():
    with pytest.raises(RegrowError, match="num_slices"):
        settled(pretrain_config(["+cluster=h100x64", "optim.num_slices=7", "optim.global_batch_seqs=7"]))
    assert PretrainConfig().parallel.slices_per_pass == 0


def test_jobs_plan_shows_what_a_run_would_choose():
    command = [sys.executable, "-m", "jobs.plan", "+cluster=h100x64", *EIGHT_SLICES]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("by forecast for H100: parallel.slices_per_pass=2 ")


def test_what_a_run_that_has_not_begun_refuses_is_noted_beside_its_plan():
    """Before, without a word: the run was refused. One that has begun so goes on, and may be planned."""
    done = call("plan", "+cluster=h100x64", "optim.eps=0", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["world_sizes"]
    assert done.stderr.startswith("note: a run that has not begun refuses this: optim.eps=0.0 must be positive")
    assert call("plan", "+cluster=h100x64", "--json").stderr == ""


# stages of a pipeline

WHOLE = ["+cluster=h100x64", "parallel.sync_every_micro_batch=false"]  # 8B, gradients whole until a step's last pass


def test_a_model_that_fits_without_a_pipeline_has_none_where_that_is_fastest():
    config, why = settle(pretrain_config([*WHOLE, "parallel.pp=0"]), gpu("H100"), NETWORK)
    assert (config.parallel.pp, config.parallel.least_pp) == (1, 1)
    assert "parallel.pp" not in why


def test_a_model_that_does_not_fit_otherwise_is_cut_into_stages_and_no_size_has_fewer_than_fit():
    device = gpu("H100", memory_bytes=56 * GIB)
    given, _ = settle(pretrain_config(WHOLE), device, NETWORK)
    assert not any(each.fits for each in forecasts(given, device, NETWORK))
    config, why = settle(pretrain_config([*WHOLE, "parallel.pp=0"]), device, NETWORK)
    assert (config.parallel.pp, config.parallel.least_pp) == (2, 2)
    assert why.startswith("by forecast for H100: parallel.pp=2 parallel.least_pp=2")
    assert all(each.fits for each in forecasts(config, device, NETWORK))
    # more stages than are needed where they are asked for, and at other sizes only as few as fit
    four, _ = settle(pretrain_config([*WHOLE, "parallel.pp=4"]), device, NETWORK)
    assert (four.parallel.pp, four.parallel.least_pp) == (4, 2)
    assert {each.mesh.pp for each in forecasts(four, device, NETWORK)} > {2, 4}
    roomy, _ = settle(pretrain_config([*WHOLE, "parallel.pp=4"]), gpu("H100"), NETWORK)
    assert roomy.parallel.least_pp == 1


HUGE = [
    *("model=405b", "cluster.address=auto", "cluster.name=h100", "cluster.gpus_per_worker=1", "parallel.tp=8"),
    *("cluster.min_workers=448", "cluster.max_workers=512", "optim.num_slices=1024", "optim.global_batch_seqs=1024"),
    *("parallel.dtype=bfloat16", "parallel.compile=true", "parallel.activation_checkpoint=selective"),
]


def test_a_pipeline_is_faster_than_none_though_sizes_that_it_does_not_divide_need_fewer_stages():
    """Each number was tried with as many stages at every size, which do not fit with few replicas left over."""
    asked = pretrain_config([*HUGE, "data=fineweb_edu", "data.seq_len=4096", "parallel.pp=0"])
    config, why = settle(asked, gpu("H100"), NETWORK)
    found = forecasts(config, gpu("H100"), NETWORK)
    assert all(each.fits for each in found)
    for pp in (1, 16, 32):
        given = dataclasses.replace(asked, parallel=dataclasses.replace(asked.parallel, pp=pp))
        other, _ = settle(given, gpu("H100"), NETWORK)
        fits = all(each.fits for each in forecasts(other, gpu("H100"), NETWORK))
        assert fits
        assert found[-1].time.step_s <= forecast(other, 512, gpu("H100"), NETWORK).time.step_s
    assert found[-1].time.step_s < 100
    assert why.startswith(f"by forecast for H100: parallel.pp={config.parallel.pp} parallel.least_pp=1")


def test_the_fastest_pipeline_is_that_of_the_group_of_all_workers_not_of_a_larger_one_of_fewer():
    """With 16,384 workers a group has 16,128 ranks in stages of 16; with some fewer, more ranks in another number."""
    asked = ["+cluster=h100x16384", "parallel.pp=0", "parallel.least_pp=0"]
    network = network_of(pretrain_config(asked), PlanConfig())
    config, _ = settle(pretrain_config(asked), gpu("H100"), network)
    assert config.parallel.pp == 16
    assert all(each.fits for each in forecasts(config, gpu("H100"), network))


def test_a_least_number_of_stages_that_is_given_stays_where_their_number_is_open():
    least = pretrain_config([*WHOLE, "parallel.pp=0", "parallel.least_pp=2"])
    config, _ = settle(least, gpu("H100"), NETWORK)
    assert config.parallel.least_pp == 2 <= config.parallel.pp


def test_where_nothing_fits_what_takes_least_memory_is_chosen():
    device = gpu("H100", memory_bytes=20 * GIB)
    needed = {}
    for pp in (0, 1, 2, 4, 8):
        config, _ = settle(pretrain_config([*WHOLE, f"parallel.pp={pp}"]), device, NETWORK)
        needed[pp] = forecast(config, 64, device, NETWORK).memory.total
    assert needed[0] == min(needed.values())


def test_stages_that_are_asked_for_stay():
    asked = pretrain_config([*WHOLE, "parallel.pp=4", "parallel.least_pp=3"])
    config, why = settle(asked, gpu("H100"), NETWORK)
    assert (config.parallel.pp, config.parallel.least_pp) == (4, 3)
    assert "parallel.pp" not in why


def test_sizes_that_no_group_has_need_not_fit():
    """No number of stages below 16 was found to fit, for sizes in place of which another one is taken."""
    asked = ["+cluster=h100x16384", "parallel.least_pp=0"]
    device, network = gpu("H100"), network_of(pretrain_config(asked), PlanConfig())
    config, _ = settle(pretrain_config(asked), device, network)
    assert config.parallel.least_pp < config.parallel.pp == 16
    assert all(each.fits for each in forecasts(config, device, network))
    table = topologies(config)
    assert not all(forecast(config, size, device, network).fits for size in table)
    # a group that is to tell which of two units computes wrong may have any of them
    verified, _ = settle(pretrain_config([*asked, "cluster.verify_every_steps=500"]), device, network)
    assert verified.parallel.least_pp == 16
    assert set(topologies_of_groups(config, table)) < set(topologies_of_groups(verified, table)) == set(table)


def test_without_a_gpu_that_is_known_there_is_no_pipeline_but_one_that_is_asked_for():
    config, why = settled(pretrain_config(["+cluster=cpu3", "parallel.pp=0"]))
    assert (config.parallel.pp, config.parallel.least_pp, why) == (1, 1, "")
    # nor where jobs.plan takes this machine for the device: a run takes none
    large = ["model=8b", "cluster.min_workers=4", "cluster.max_workers=4", "parallel.pp=0"]
    config, why = settle(pretrain_config(large), Device("this machine", 1, 1e11, 1e11, 1e10, 1e9), Network(4, 50e9))
    assert (config.parallel.pp, config.parallel.least_pp, why) == (1, 1, "")


def test_where_no_pipeline_is_possible_the_first_rule_that_is_broken_is_told():
    with pytest.raises(RegrowError, match=r"data\.seq_len=1"):
        settled(pretrain_config(["+cluster=h100x64", "parallel.pp=0", "data.seq_len=1"]))


@pytest.mark.parametrize(
    ("arguments", "refused"),
    [
        (["parallel.tp=0"], r"parallel\.tp=0 must be at least 1"),
        (["parallel.cp=0"], r"parallel\.cp=0 must be at least 1"),
        (["parallel.schedule=interleaved", "parallel.stages_per_rank=0"], r"parallel\.stages_per_rank=0 must be"),
        (["cluster.min_workers=0", "cluster.max_workers=0"], r"cluster\.max_workers=0"),
    ],
)
def test_what_no_pipeline_is_looked_for_with_is_refused(arguments, refused):
    """Before, by a traceback of a division by zero."""
    for cluster in ("h100x64", "cpu3"):
        with pytest.raises(RegrowError, match=refused):
            settled(pretrain_config([f"+cluster={cluster}", "parallel.pp=0", *arguments]))


def test_jobs_plan_shares_this_machine_out_to_no_fewer_workers_than_one():
    command = [sys.executable, "-m", "jobs.plan", "parallel.pp=0", "cluster.min_workers=0", "cluster.max_workers=0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr.splitlines()[-1].endswith("cluster.max_workers=0 must be at least 1")
