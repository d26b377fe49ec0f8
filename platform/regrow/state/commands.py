"""What `jobs.checkpoint` does: a function a command, from its arguments to lines on standard output and a status."""

import argparse
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import prod
from typing import TYPE_CHECKING

from regrow.errors import RegrowError
from regrow.record.run_folder import checkpoints_of, differences
from regrow.state.disk import catalog as tools
from regrow.state.disk.catalog import Found
from regrow.state.disk.format import Index

if TYPE_CHECKING:
    from regrow.state.disk.tensors import Difference, Statistics


def list_(options: argparse.Namespace, start: tools.Start) -> int:
    print("\n".join(list_lines(tools.survey(*checkpoints_of(options.run_folder)))))
    return 0


def inspect(options: argparse.Namespace, start: tools.Start) -> int:
    checkpoints, index = tools.choose(*checkpoints_of(options.run_folder), options.step)
    found = {}
    if options.stats:
        from regrow.state.disk.tensors import CheckpointTensors, statistics  # torch takes seconds

        with tools.may_be_deleted(checkpoints, index.step):
            found = statistics(CheckpointTensors(checkpoints, index, start(index.tensor_bytes)))
    print("\n".join(inspect_lines(index, found)))
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
    (mine, one), (others, other) = opened
    with tools.may_be_deleted(mine, one.step), tools.may_be_deleted(others, other.step):
        first, second = (CheckpointTensors(*each, advance) for each in opened)
        lines = list(diff_lines(one, other, differences(first, second)))
    print("\n".join(lines) or "the same state")
    return 1 if lines else 0


def export(options: argparse.Namespace, start: tools.Start) -> int:
    _, index = tools.choose(*checkpoints_of(options.run_folder), options.step)
    from regrow.state.exchange.runs import export_run

    print(export_run(options.format, options.run_folder, index, options.to, dtype=options.dtype, start=start))
    return 0


def import_(options: argparse.Namespace, start: tools.Start) -> int:
    from regrow.state.exchange.runs import Batch, import_of_model, import_run

    form, batch = options.format, None
    if options.global_batch_seqs is not None and options.seq_len is not None:
        batch = Batch(options.global_batch_seqs, options.seq_len)
    given = {"--model": options.model, "--global-batch-seqs": options.global_batch_seqs, "--seq-len": options.seq_len}
    of_no_use = {"hf": [*given], "dcp": [*given], "megatron": ["--global-batch-seqs", "--seq-len"]}
    for option in of_no_use.get(form, ()):
        if given[option] is not None:
            raise RegrowError(f"{option} says nothing of a folder of {form}; leave it out")
    if form in ("hf", "dcp"):
        print(import_run(form, options.source, options.to, moments=options.moments, start=start))
        return 0
    if options.model is None:
        raise RegrowError(f"a folder of {form} does not say which model it is of: give --model, a file of conf/model")
    if (options.global_batch_seqs is None) != (options.seq_len is None):
        raise RegrowError("--global-batch-seqs and --seq-len are given together")
    model, moments = options.model, options.moments
    print(import_of_model(form, options.source, options.to, model=model, batch=batch, moments=moments, start=start))
    return 0


def average(options: argparse.Namespace, start: tools.Start) -> int:
    checkpoints, run_id = checkpoints_of(options.run_folder)
    if options.last is None:
        steps = sorted(set(options.step))
    elif options.last < 2:
        raise RegrowError(f"an average takes two checkpoints or more; --last {options.last} is fewer")
    else:
        steps = [found.step for found in tools.survey(checkpoints, run_id) if not found.problem][: options.last]
        if len(steps) < options.last:
            raise RegrowError(f"{checkpoints} has {len(steps)} sound checkpoints, --last {options.last} asks for more")
    indexes = [tools.choose(checkpoints, run_id, step)[1] for step in steps]
    from regrow.state.exchange.runs import average_run

    print(average_run(options.run_folder, indexes, options.to, start=start))
    return 0


COMMANDS: dict[str, tuple[Callable[[argparse.Namespace, tools.Start], int], str]] = {
    "list": (list_, "which checkpoints a run has, after a quick look at each"),
    "inspect": (inspect, "what a checkpoint holds"),
    "verify": (verify, "check every byte; status 1 if a checkpoint is damaged"),
    "diff": (diff, "what differs between two checkpoints, of two runs or of one; status 1 if anything does"),
    "export": (
        export,
        "write a checkpoint for Hugging Face's LlamaForCausalLM (hf), for torchtitan, or as torch's DCP (dcp)",
    ),
    "average": (average, "make a new run of the mean of several checkpoints' weights, to evaluate, export or train on"),
    "import": (
        import_,
        "make a new run that starts from weights (hf, megatron), or goes on from a state (torchtitan, dcp)",
    ),
}


def list_lines(found: Iterable[Found]) -> Iterator[str]:
    """A table of a run's checkpoints; the first sound one is where the run would go on."""
    yield f"{'step':>10}  {'written (UTC)':19}  {'ranks':>5}  {'size':>12}  state"
    newest = next((each.step for each in found if not each.problem), None)
    for each in found:
        written, ranks, size = "-", "-", "-"
        if each.index is not None:
            written = _time(each.index)
            ranks = str(each.index.information.get("world_size", "-"))
            size = _size(each.index.num_bytes)
        state = each.problem or ", ".join(
            ["sound", *["kept for good"] * each.is_kept, *["newest"] * (each.step == newest)]
        )
        yield f"{each.step:>10}  {written:19}  {ranks:>5}  {size:>12}  {state}"


def inspect_lines(index: Index, statistics: Mapping[str, "Statistics"]) -> Iterator[str]:
    """What a checkpoint holds; of each tensor its statistics, where they were computed."""
    ranks = index.information.get("world_size")
    by = f" by {ranks} rank{'s' if ranks != 1 else ''}" if ranks else ""
    yield f"run {index.run_id}, generation {index.generation}, written {_time(index)} UTC{by}"
    yield ", ".join(
        f"{name} {value}" if isinstance(value, str) else f"{name} {value:,}" for name, value in index.scalars.items()
    )
    parameters = [shape for name, (_, shape) in index.tensors.items() if name.startswith("model/")]
    size = _size(index.num_bytes)
    yield f"{sum(map(prod, parameters)):,} parameters in {len(parameters)} tensors; {size} with AdamW's moments"
    width = max(len(name) for name in index.tensors)
    if statistics:
        yield f"\n  {'':{width}}  {'':8}  {'':14}  {'norm':>10}  {'largest':>10}  not finite"
    else:
        yield ""
    for name, (dtype, shape) in sorted(index.tensors.items()):
        line = f"  {name:{width}}  {dtype:8}  {' x '.join(map(str, shape)):14}"
        if name in statistics:
            of = statistics[name]
            line += f"  {of.norm:10.4g}  {of.largest:10.4g}  {of.not_finite or ''}"
        yield line.rstrip()
    yield ""
    for file in index.files:
        yield f"  {file.name}  {_size(file.num_bytes)}"


def diff_lines(first: Index, second: Index, found: Mapping[str, "Difference"]) -> Iterator[str]:
    """What differs between two checkpoints, of which `found` are tensors; nothing where they hold the same state."""
    yield from differences({**first.scalars, **_shapes(first)}, {**second.scalars, **_shapes(second)})
    if not found:
        return
    width = max(len(name) for name in found)
    yield f"  {'':{width}}  {'largest':>10}  relative difference"
    for name, apart in found.items():
        yield f"  {name:{width}}  {apart.largest:10.3g}  {apart.relative:10.3g}"
    yield f"{len(found)} of {len(first.tensors)} tensors differ"


def _shapes(index: Index) -> dict[str, str]:
    return {name: f"{dtype}{list(shape)}" for name, (dtype, shape) in index.tensors.items()}


def _time(index: Index) -> str:
    written_at = index.information.get("written_at")
    return "-" if written_at is None else time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(written_at))


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"
