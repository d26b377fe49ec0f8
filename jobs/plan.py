"""What a run will need, before it starts: `python -m jobs.plan [--json] [+cluster=NAME] [model=NAME] [key=value ...]`.

Bytes of a device by kind, whether they fit, arithmetic and an estimate of a step's time, for every world size allowed.
Starts nothing, and looks at no device but, where workers have no GPUs, this machine.
"""

import json
import sys
from dataclasses import asdict
from functools import partial

from regrow.config.check import check, check_before_stages, check_new, check_plan
from regrow.config.schema import PlanConfig, PlanJobConfig
from regrow.config.store import run_job
from regrow.errors import ConfigError
from regrow.forecast.cost import assumptions
from regrow.forecast.devices import Device
from regrow.forecast.estimate import check_float8, forecasts, gpu_of, network_of, share_of_this_machine
from regrow.forecast.settle import settings_of, settle
from regrow.forecast.text import to_text
from regrow.model.size import flops_per_token, num_params


def device_of(config: PlanJobConfig) -> Device:
    if config.cluster.gpus_per_worker:
        device = gpu_of(config, config.plan)
        check_float8(config, device)
        return device
    import torch

    from regrow.runtime.hardware.peak import peak_flops  # torch, which nothing else here needs

    given = config.observe.peak_tflops  # of one worker's device
    flops = peak_flops(torch.device("cpu"), config.parallel.dtype, given).flops
    return share_of_this_machine(config, config.plan, flops if given is None else flops * config.cluster.max_workers)


def _note_of_a_new_run(config: PlanJobConfig) -> None:
    """No refusal: a plan may be of a run that exists, which goes on."""
    try:
        check_new(config)
    except ConfigError as error:
        print(f"note: a run that has not begun refuses this: {error}", file=sys.stderr)


def main(config: PlanJobConfig, *, as_json: bool) -> None:
    if config.parallel.pp:  # what is refused is refused before this machine is measured
        check(config)
    else:
        check_before_stages(config)
    check_plan(config)
    _note_of_a_new_run(config)
    device, network = device_of(config), network_of(config, config.plan)
    asked = config
    config, why = settle(asked, device, network)
    give = settings_of(asked, config) if asked.plan != PlanConfig() else []  # for jobs that know no plan.*
    found = forecasts(config, device, network)
    if not as_json:
        if why:
            print(why)
        if give:
            print(f"jobs.pretrain and jobs.submit know no plan.* and settle others: give them {' '.join(give)}")
        print(to_text(config, found, device, network))
        return
    tokens = config.optim.global_batch_seqs * config.data.seq_len
    result = {
        "model": config.model.name,
        "num_params": num_params(config.model),
        "tokens_per_step": tokens,
        "flops_per_step": tokens * flops_per_token(config.model, config.data.seq_len),
        "device": asdict(device),
        "network": asdict(network),
        "slices_per_pass": config.parallel.slices_per_pass,
        "sync_every_micro_batch": config.parallel.sync_every_micro_batch,
        "give_to_a_run": give,
        "assumptions": assumptions(device),
        "world_sizes": [each.to_dict() for each in found],
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    wants_json = "--json" in sys.argv  # not a flag of Hydra's
    sys.argv = [argument for argument in sys.argv if argument != "--json"]
    run_job(partial(main, as_json=wants_json), name="plan", schema=PlanJobConfig, takes_several=True)
