"""What `jobs.checkpoint` does: a function a command, from its arguments to lines on standard output and a status."""

import argparse
from collections.abc import Callable

from regrow.errors import RegrowError
from regrow.record.run_folder import checkpoints_of
from regrow.state.disk import describe
from regrow.state.disk import inspect as tools


def list_(options: argparse.Namespace, start: tools.Start) -> int:
    print("\n".join(describe.list_lines(tools.survey(*checkpoints_of(options.run_folder)))))
    return 0


def inspect(options: argparse.Namespace, start: tools.Start) -> int:
    checkpoints, index = tools.choose(*checkpoints_of(options.run_folder), options.step)
    found = {}
    if options.stats:
        from regrow.state.disk.tensors import CheckpointTensors, statistics  # torch takes seconds

        found = statistics(CheckpointTensors(checkpoints, index, start(index.tensor_bytes)))
    print("\n".join(describe.inspect_lines(index, found)))
    return 0


def verify(options: argparse.Namespace, start: tools.Start) -> int:
    seen = []
    for found in tools.examine(*checkpoints_of(options.run_folder), options.step, start):
        print(f"step {found.step}: {found.problem or 'sound'}", flush=True)
        seen.append(found)
    return int(all(found.problem for found in seen) or any(found.problem and found.committed for found in seen))


def diff(options: argparse.Namespace, start: tools.Start) -> int:
    steps = options.step or [None]
    if len(steps) > 2 or (options.other is None and len(steps) < 2):
        raise RegrowError("diff takes two run folders with at most one --step for each, or one folder and two --step")
    places = [(options.run_folder, steps[0]), (options.other or options.run_folder, steps[-1])]
    opened = [tools.choose(*checkpoints_of(run_folder), step) for run_folder, step in places]
    from regrow.state.disk.tensors import CheckpointTensors, differences

    advance = start(sum(index.tensor_bytes for _, index in opened))
    first, second = (CheckpointTensors(*one, advance) for one in opened)
    lines = list(describe.diff_lines(first.index, second.index, differences(first, second)))
    print("\n".join(lines) or "the same state")
    return 1 if lines else 0


def export(options: argparse.Namespace, start: tools.Start) -> int:
    _, index = tools.choose(*checkpoints_of(options.run_folder), options.step)
    from regrow.state.exchange.runs import export_run

    print(export_run(options.format, options.run_folder, index, options.to, dtype=options.dtype, start=start))
    return 0


def import_(options: argparse.Namespace, start: tools.Start) -> int:
    from regrow.state.exchange.runs import import_run

    print(import_run(options.format, options.source, options.to, moments=options.moments, start=start))
    return 0


COMMANDS: dict[str, tuple[Callable[[argparse.Namespace, tools.Start], int], str]] = {
    "list": (list_, "which checkpoints a run has, after a quick look at each"),
    "inspect": (inspect, "what a checkpoint holds"),
    "verify": (verify, "check every byte; status 1 if a checkpoint is damaged"),
    "diff": (diff, "what differs between two checkpoints, of two runs or of one; status 1 if anything does"),
    "export": (export, "write a checkpoint for Hugging Face's LlamaForCausalLM (hf), or as torch's DCP does (dcp)"),
    "import": (import_, "make a new run that starts from such weights (hf), or goes on from such a state (dcp)"),
}
