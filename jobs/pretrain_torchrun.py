"""Pretrain a Llama without Ray or Hydra, under torchrun or in one process; the page to read first.

  export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=600
  torchrun --nproc-per-node 8 -m jobs.pretrain_torchrun run.name=llama8b-torchrun model=8b data=fineweb_edu \\
      parallel.dtype=bfloat16 optim.num_slices=512 optim.global_batch_seqs=512
  python -m jobs.pretrain_torchrun run.name=alone train.steps=100

Step, data order, batches, checkpoints and run folder are those of `python -m jobs.pretrain`, which goes on with such a
run and the other way round. What this lacks is elasticity: the group keeps its size, and a lost rank ends it.
Ctrl-C has the ranks write a checkpoint, and torchrun kills them so many seconds later: 30 where nothing is said. torch
2.11's waits for no longer; there SIGTERM to one rank, which stops all, leaves them their time.
Settings are key=value, as `python -m jobs.pretrain --help` lists them. Of those of what it lacks some are refused, the
others do nothing: snapshot.*, cluster.* but verify_every_steps (OMP_NUM_THREADS gives a rank its threads),
train.nonfinite_rollbacks, as there is none, and observe.* but peak_tflops: no TensorBoard, figures or reports.
"""

import sys
from functools import partial

import torch

from regrow.config.check import check_train, topology_of
from regrow.config.plain import pretrain_config
from regrow.config.schema import PretrainConfig
from regrow.data.read.batch import direct_batches, layout_of
from regrow.data.read.corpora import order_of
from regrow.errors import ConfigError
from regrow.model.linears import phase_end
from regrow.parallel.fsdp import build_mesh
from regrow.plan.topology import ranks_of_unit
from regrow.runtime.hardware.peak import peak_flops
from regrow.runtime.torchrun import TorchrunRun, for_this_group, process_group, program_of_a_rank
from regrow.show.console import Console
from regrow.state.entries import Progress
from regrow.train.build import build_step, loop_settings, meter_of, verified_rows
from regrow.train.loop import train
from regrow.train.saver import Cadence, CheckpointSaver
from regrow.train.validation import Validation


def train_phase(config: PretrainConfig, run: TorchrunRun, device: torch.device) -> Progress:
    """Train from the newest checkpoint to the last step, or to where a run with float8 goes on in bfloat16."""
    rank, world_size, seed = torch.distributed.get_rank(), torch.distributed.get_world_size(), config.run.seed
    optim, parallel, corpora, layout = config.optim, config.parallel, run.corpora, layout_of(config)
    topology = topology_of(config, world_size)
    if topology.mesh.pp != parallel.pp:  # which nothing but a group that has lost ranks is to be trained with
        unit_of = ranks_of_unit(pp=parallel.pp, cp=parallel.cp, tp=parallel.tp)
        raise ConfigError(f"{world_size} workers are not whole units of {unit_of}")
    mesh, stages = build_mesh(topology.mesh, device.type, timeout_s=config.train.collective_timeout_s), topology.stages

    eot_id = corpora.eot_id if config.model.document_attention else None
    build = partial(build_step, eot_id=eot_id, stages=stages, verified=verified_rows(config, topology.batch))
    step, progress = run.restore(
        lambda recipe: build(config.model, recipe, optim, mesh=mesh, device=device, seed=seed), mesh
    )
    until = phase_end(parallel, config.train.steps, progress.step)
    until = min(until, config.train.stop_at_step or until)

    order, reader, slices = order_of(config, corpora), run.train_rows(), topology.slices_of(rank)
    batches = direct_batches(order, reader, layout, slices=slices, start_step=progress.step, stop_step=until)
    unit, units = topology.unit_of(rank), topology.mesh.num_units
    validation = Validation(config, corpora, device=device, unit=unit, num_units=units, patience=run.patience)
    peak = peak_flops(device, parallel.dtype, config.observe.peak_tflops)
    run.begin(step, mesh, progress, validation, peak)
    settings = loop_settings(config, topology, until)
    meter = meter_of(config, world_size, run.generation, device=device, peak_flops=peak.flops * world_size)
    cadence = Cadence(until, checkpoint_every_steps=config.checkpoint.every_steps)
    saver = CheckpointSaver(cadence, run.write, timeout_s=config.checkpoint.timeout_s)
    if progress.step < until:
        train(
            step, batches, progress, optim=optim, settings=settings, meter=meter, saver=saver, hooks=run, device=device
        )
    return progress


def main(arguments: list[str]) -> None:
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return
    config = pretrain_config(arguments)
    check_train(config)
    with Console(sys.stderr) as console, process_group(config.train.collective_timeout_s) as device:
        config = for_this_group(config, device)
        if (run := TorchrunRun(config, console)).is_done:
            return
        with run.errors_in_its_log():
            while not run.is_over(progress := train_phase(config, run, device)):
                pass  # float8 is over, and the next phase goes on from the checkpoint
        run.close(progress)


if __name__ == "__main__":
    with program_of_a_rank():
        main(sys.argv[1:])
