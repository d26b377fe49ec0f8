"""Looking after a run's checkpoints: which there are, and whether every byte of them is sound. No torch.

`checkpoints` is a run folder's folder of that name; `run_id` the run's own, or None to take any run's.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from regrow.errors import CheckpointError
from regrow.plan.boxes import Box, Piece
from regrow.state.checksums import CHUNK_BYTES
from regrow.state.disk.catalog import open_checkpoint, step_folder
from regrow.state.disk.format import COMMIT, Index
from regrow.state.disk.read import check_size, read_chunks, read_header
from regrow.state.reshard import Source, plan_reads
from regrow.storage import Storage

PIECE_BYTES = 1024 * CHUNK_BYTES  # read and checked at a time

Advance = Callable[[int], None]  # is told of bytes as they are done
Start = Callable[[int], Advance]  # is told beforehand how many there will be


@dataclass(frozen=True)
class Found:
    """A step's folder, and what a look at it says."""

    step: int
    index: Index | None  # None where there is none that can be read
    problem: str  # why it cannot be restored; empty if nothing was found
    committed: bool = True


def survey(checkpoints: Storage, run_id: str | None, step: int | None = None) -> list[Found]:
    """Every step's folder, or that of one, newest first, after a quick look: the index, and the size of every file.

    Raises CheckpointError where there is none.
    """
    names = [name for name in checkpoints.list() if name.startswith("step-") and name[5:].isdigit()]
    steps = sorted((int(name[5:]) for name in names), reverse=True)
    if not steps:
        raise CheckpointError(
            f"{checkpoints} holds no checkpoints; name the folder of a run, <run.storage_path>/<run.name>, that has one"
        )
    if step is not None and step not in steps:
        raise CheckpointError(f"{checkpoints} has no checkpoint of step {step}; it has {', '.join(map(str, steps))}")
    return [_look(checkpoints, each, run_id) for each in steps if step in (None, each)]


def choose(checkpoints: Storage, run_id: str | None, step: int | None = None) -> tuple[Storage, Index]:
    """The folder again, and the index of a step, or of the newest one that a quick look finds sound.

    Raises CheckpointError where there is none.
    """
    found = survey(checkpoints, run_id, step)
    for each in found:
        if each.index is not None and not each.problem:
            return checkpoints, each.index
    raise CheckpointError(f"{checkpoints}/{step_folder(found[0].step)} cannot be used: {found[0].problem}")


def examine(checkpoints: Storage, run_id: str | None, step: int | None, start: Start) -> Iterator[Found]:
    """As `survey`, but what a quick look finds sound is read whole and checked."""
    for found in survey(checkpoints, run_id, step):
        if found.index is not None and not found.problem:
            try:
                verify(checkpoints, found.index, start(found.index.tensor_bytes))
            except CheckpointError as error:
                yield replace(found, problem=str(error))
                continue
        yield found


def verify(checkpoints: Storage, index: Index, advance: Advance) -> None:
    """Read every byte and check it, and that the files hold every element.

    Raises CheckpointError naming the first file that is missing or damaged.
    """
    source = checkpoints / step_folder(index.step)
    sources = []
    for file in index.files:
        check_size(source, file)
        for stored in read_header(source, file, index):
            sources.append(Source(file.name, stored.piece))
            for begin in range(0, stored.piece.num_bytes, PIECE_BYTES):
                end = min(begin + PIECE_BYTES, stored.piece.num_bytes)
                read_chunks(source, file.name, stored, begin, end)
                advance(end - begin)
    plan_reads(sources, [Piece.all_of(whole_box(index, name)) for name in index.tensors])


def whole_box(index: Index, name: str) -> Box:
    """All of a tensor, as the index describes it."""
    dtype, shape = index.tensors[name]
    return Box.whole(name, shape, dtype)


def _look(checkpoints: Storage, step: int, run_id: str | None) -> Found:
    if not checkpoints.exists(f"{step_folder(step)}/{COMMIT}"):
        return Found(step, None, f"not committed: it has no {COMMIT}", committed=False)
    index = None
    try:
        index = open_checkpoint(checkpoints, step, run_id=run_id)
        for file in index.files:
            check_size(checkpoints / step_folder(step), file)
    except CheckpointError as error:
        return Found(step, index, str(error))
    return Found(step, index, "")
