"""Checkpoints as lines for a person. Pure; no torch."""

import time
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import TYPE_CHECKING

from regrow.config.identity import differences
from regrow.state.disk.format import Index
from regrow.state.disk.inspect import Found

if TYPE_CHECKING:
    from regrow.state.disk.tensors import Difference, Statistics


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
        state = each.problem or ("sound, newest" if each.step == newest else "sound")
        yield f"{each.step:>10}  {written:19}  {ranks:>5}  {size:>12}  {state}"


def inspect_lines(index: Index, statistics: Mapping[str, "Statistics"]) -> Iterator[str]:
    """What a checkpoint holds; of each tensor its statistics, where they were computed."""
    ranks = index.information.get("world_size")
    by = f" by {ranks} rank{'s' if ranks != 1 else ''}" if ranks else ""
    yield f"run {index.run_id}, generation {index.generation}, written {_time(index)} UTC{by}"
    yield ", ".join(f"{name} {value:,}" for name, value in index.scalars.items())
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
