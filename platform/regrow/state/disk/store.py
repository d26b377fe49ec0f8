"""Durable checkpoints: written by all ranks, committed by one act, restored into any layout.

A file name is never written twice, so that neither a zombie nor an earlier attempt can change what a COMMIT points to.
"""

import hashlib
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from regrow.errors import CheckpointError
from regrow.state.checksums import checksums
from regrow.state.collective import gather, rank
from regrow.state.disk.catalog import step_folder
from regrow.state.disk.format import COMMIT, DataFile, Index, Stored, encode_header
from regrow.state.disk.read import read_elements, read_headers
from regrow.state.disk.upload import write_index
from regrow.state.entries import Entry, fill
from regrow.state.layout import WHOLE, Part, Span, column_blocks, replica_part, written_part
from regrow.state.reshard import Source, plan_reads
from regrow.storage import Storage

Commit = Callable[[str, bytes], None]  # (folder name, content of COMMIT): writes it, or raises if fenced off
FILE_BYTES = 2**28  # of tensors that `save_one_by_one` holds, and puts into one file


def save(
    folder: Storage,
    entries: Sequence[Entry],
    *,
    scalars: dict[str, int],
    run_id: str,
    generation: int,
    part: Part = WHOLE,
    commit: Commit | None = None,
) -> Index:
    """Write and commit the checkpoint of one step. Collective over the default group (or alone, without one).

    Each element is written once: replicas share a shard's elements. `commit` performs the final act in place of a
    plain write, so that it can be fenced. Raises CheckpointError on every rank if any rank failed; nothing is
    committed then.
    """
    step = scalars["step"]
    target = folder / step_folder(step)
    token = f"g{generation:06d}-{secrets.token_hex(4)}"
    written: DataFile | str | None
    try:
        written = _write_file(target, f"{token}.safetensors", entries, (run_id, generation, step), part)
    except Exception as error:  # storage raises many kinds; every rank must hear of it
        written = f"{type(error).__name__}: {error}"
    outcomes = gather(written)
    problems = [outcome for outcome in outcomes if isinstance(outcome, str)]
    if problems:
        raise CheckpointError(f"checkpoint of step {step} at {target} was not written: {problems[0]}")

    index = Index(
        run_id=run_id,
        generation=generation,
        step=step,
        scalars=scalars,
        tensors={entry.span.name: (entry.span.dtype, entry.span.shape) for entry in entries},
        files=tuple(outcome for outcome in outcomes if isinstance(outcome, DataFile)),
        information={"world_size": len(outcomes), "num_replicas": part.num_replicas, "written_at": time.time()},
        column_blocks=column_blocks(entry.span for entry in entries),
    )
    problem = None
    if rank() == 0:
        try:
            _publish(target, index, commit)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
    problem = gather(problem)[0]
    if problem:
        raise CheckpointError(f"checkpoint of step {step} at {target} was not committed: {problem}")
    return index


def save_one_by_one(folder: Storage, entries: Iterable[Entry], *, scalars: dict[str, int], run_id: str) -> Index:
    """Write and commit a checkpoint of whole tensors that come one after another, holding about FILE_BYTES of them.

    Local. For checkpoints made of something else than a live run: their generation is 0, before every run's first.
    """
    step = scalars["step"]
    target, identity = folder / step_folder(step), (run_id, 0, step)
    files, tensors = [], {}
    for batch in _batches(entries):
        file = _write_file(target, f"g000000-{secrets.token_hex(4)}.safetensors", batch, identity, WHOLE)
        files += [file] if file else []
        tensors.update({entry.span.name: (entry.span.dtype, entry.span.shape) for entry in batch})
        del batch  # before the next ones are read
    index = Index(
        run_id=run_id,
        generation=0,
        step=step,
        scalars=scalars,
        tensors=tensors,
        files=tuple(files),
        information={"written_at": time.time()},
    )
    _publish(target, index, None)
    return index


def restore(folder: Storage, index: Index, entries: Sequence[Entry], part: Part = WHOLE) -> int:
    """Read this rank's entries in place, whatever layout the checkpoint was written in; returns the bytes read.

    Local: no collective. Of several replicas each reads a share, and `share_parts` completes them. Strict: an entry
    missing from the checkpoint, left over in it, or of another shape or dtype is a CheckpointError that names it; so is
    anything damaged. After an error the entries hold a mixture: restore again.
    """
    _check_same(index, entries, folder)
    source = folder / step_folder(index.step)
    stored = read_headers(source, index)
    blocks = [index.column_blocks.get(entry.span.name, 1) for entry in entries]
    same = [entry for entry, stored_in in zip(entries, blocks, strict=True) if entry.span.blocks[1] == stored_in]
    num_bytes = 0
    for read in plan_reads(stored, [replica_part(entry.span, part.replica, part.num_replicas) for entry in same]):
        data = read_elements(source, read, stored[read.source])
        entry = same[read.want]
        fill(entry.memory[read.start - entry.span.start : read.stop - entry.span.start], data)
        num_bytes += len(data)
    for entry, stored_in in zip(entries, blocks, strict=True):
        if entry.span.blocks[1] != stored_in:
            num_bytes += _restore_in_other_blocks(source, stored, entry, stored_in)
    return num_bytes


def _restore_in_other_blocks(source: Storage, stored: Mapping[Source, Stored], entry: Entry, num_blocks: int) -> int:
    """Fill an entry of a tensor that is stored in another number of blocks of columns than it is held in here.

    Its rows are read whole, from every block of theirs that has columns of the entry's; of replicas, each reads all.
    """
    span = entry.span
    num_rows, num_columns = span.shape
    width, stored_width = num_columns // span.blocks[1], num_columns // num_blocks
    if not span.num_elements:
        return 0
    block, first = divmod(span.start, num_rows * width)
    rows = range(first // width, first // width + span.num_elements // width)
    columns = range(block * width, (block + 1) * width)
    target, num_bytes = entry.memory.view(len(rows), width), 0
    for number in range(columns.start // stored_width, -(-columns.stop // stored_width)):
        begin = number * num_rows * stored_width
        want = replace(span, start=begin + rows.start * stored_width, stop=begin + rows.stop * stored_width)
        whole = torch.empty(want.num_elements, dtype=entry.memory.dtype)
        for read in plan_reads([each for each in stored if each.span.name == span.name], [want]):
            data = read_elements(source, read, stored[read.source])
            fill(whole[read.start - want.start : read.stop - want.start], data)
            num_bytes += len(data)
        left, right = max(columns.start, number * stored_width), min(columns.stop, (number + 1) * stored_width)
        taken = whole.view(len(rows), stored_width)[:, left - number * stored_width : right - number * stored_width]
        target[:, left - columns.start : right - columns.start].copy_(taken)
    return num_bytes


def share_parts(entries: Sequence[Entry], part: Part, group: dist.ProcessGroup | None) -> None:
    """Give the other replicas of this shard what this rank read, and take what they read. Collective over `group`.

    `group` are the ranks that hold the same shard, in the order of their replicas; None where there is one replica.
    """
    if group is None:
        return
    for entry in entries:
        spans = [replica_part(entry.span, replica, part.num_replicas) for replica in range(part.num_replicas)]
        size = max(span.num_elements for span in spans)
        if not size:
            continue
        parts = [entry.memory[s.start - entry.span.start : s.stop - entry.span.start] for s in spans]
        mine, everyone = entry.memory.new_zeros(size), [entry.memory.new_empty(size) for _ in spans]
        mine[: len(parts[part.replica])] = parts[part.replica]
        dist.all_gather(everyone, mine, group=group)
        for target, received in zip(parts, everyone, strict=True):
            target.copy_(received[: len(target)])


def _write_file(
    target: Storage,
    name: str,
    entries: Sequence[Entry],
    identity: tuple[str, int, int],
    part: Part,
) -> DataFile | None:
    """Write this rank's part; None where it has nothing to write."""
    parts: list[tuple[Span, memoryview]] = []
    for entry in entries:
        span = written_part(entry.span, part)
        if span.num_elements:
            memory = entry.memory[span.start - entry.span.start : span.stop - entry.span.start]
            parts.append((span, memoryview(memory.cpu().contiguous().view(torch.uint8).numpy().data).cast("B")))
    if not parts:
        return None
    run_id, generation, step = identity
    checked = [(span, checksums(data)) for span, data in parts]
    header = encode_header(checked, run_id=run_id, generation=generation, step=step)
    num_bytes = target.write_chunks(name, [header, *(data for _, data in parts)])
    return DataFile(name, num_bytes, len(header), hashlib.sha256(header).hexdigest())


def _publish(target: Storage, index: Index, commit: Commit | None) -> None:
    """Write the index, then COMMIT: from here on there is a checkpoint."""
    pointer = write_index(target, index)
    if commit is None:
        target.write_bytes(COMMIT, pointer)
    else:
        commit(step_folder(index.step), pointer)


def _batches(entries: Iterable[Entry]) -> Iterator[list[Entry]]:
    """Entries in runs of FILE_BYTES and at most one entry more."""
    batch: list[Entry] = []
    for entry in entries:
        batch.append(entry)
        if sum(held.memory.nbytes for held in batch) >= FILE_BYTES:
            yield batch
            batch = []
    if batch:
        yield batch


def _check_same(index: Index, entries: Sequence[Entry], folder: Storage) -> None:
    mine = {entry.span.name: (entry.span.dtype, entry.span.shape) for entry in entries}
    where = f"{folder}/{step_folder(index.step)}"
    for name in sorted(mine.keys() | index.tensors.keys()):
        if name not in index.tensors:
            raise CheckpointError(f"{where}: has no {name}, which the model needs")
        if name not in mine:
            raise CheckpointError(f"{where}: holds {name}, which the model does not have")
        if mine[name] != index.tensors[name]:
            raise CheckpointError(
                f"{where}: {name} is {index.tensors[name][0]}{list(index.tensors[name][1])}, "
                f"the model's is {mine[name][0]}{list(mine[name][1])}"
            )
