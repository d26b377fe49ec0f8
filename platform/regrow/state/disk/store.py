"""Durable checkpoints: written by all ranks, committed by one act, restored into any layout.

A file name is never written twice, so that neither a zombie nor an earlier attempt can change what a COMMIT points to.
"""

import contextlib
import hashlib
import json
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from regrow.control.values import Scalar
from regrow.errors import CheckpointError, ForeignCheckpointError, NotWrittenError
from regrow.plan.mesh import ALONE, Coordinates
from regrow.plan.placement import is_first_of_stage, is_second
from regrow.state.collective import from_rank_0, gather, rank
from regrow.state.disk.catalog import is_unreadable, open_checkpoint, problem_of, read_headers, step_folder
from regrow.state.disk.format import COMMIT, DataFile, Index
from regrow.state.disk.gather import in_files, write_parts
from regrow.state.disk.packed import PackedFiles
from regrow.state.disk.reading import Reader
from regrow.state.disk.stacks import parts_of
from regrow.state.disk.tensors import read_pieces
from regrow.state.disk.upload import TOKEN_BYTES, write_index
from regrow.state.entries import USER, Entry, Progress, restored_progress
from regrow.state.reshard import share
from regrow.storage import Storage

Commit = Callable[[str, bytes], None]  # (folder name, content of COMMIT): writes it, or raises if fenced off
FILE_BYTES = 2**28  # of tensors that `save_one_by_one` holds, and puts into one file


def save(
    folder: Storage,
    entries: Sequence[Entry],
    *,
    scalars: Mapping[str, Scalar],
    run_id: str,
    generation: int,
    coordinates: Coordinates = ALONE,
    commit: Commit | None = None,
) -> Index:
    """Write and commit the checkpoint of one step. Collective over the default group (or alone, without one).

    Each element is written once: replicas share a shard's elements. `commit` performs the final act in place of a
    plain write, so that it can be fenced. Raises CheckpointError on every rank if any rank failed, or a callback's
    state is not the same on all, NotWrittenError where it was storage; nothing is committed then.
    """
    step = int(scalars["step"])
    target = folder / step_folder(step)
    token = f"g{generation:06d}-{secrets.token_hex(TOKEN_BYTES)}"
    written: list[dict[str, Any]] | CheckpointError
    complete = list[DataFile]()
    try:
        _write_files(target, token, entries, (run_id, generation, step), coordinates, complete)
        written = [file.to_plain() for file in complete]
    except Exception as error:  # every rank must hear of it
        written = _failed(f"checkpoint of step {step} at {target} was not written", error)
    told = gather((written, _user_digest(scalars)))
    outcomes = [outcome for outcome, _ in told]
    problems = [outcome for outcome in outcomes if isinstance(outcome, CheckpointError)]
    if others := [number for number, (_, digest) in enumerate(told) if digest != told[0][1]]:
        problems.append(
            CheckpointError(
                f"checkpoint of step {step} at {target} was not written: train.callback's state of rank {others[0]} is "
                "another than that of rank 0; it has to be a function of the rows"
            )
        )
    if problems:
        _delete(target, complete)
        raise next((each for each in problems if not isinstance(each, NotWrittenError)), problems[0])

    index = Index(
        run_id=run_id,
        generation=generation,
        step=step,
        scalars=dict(scalars),
        tensors=_tensors_of_all(entries, coordinates),
        files=tuple(DataFile.of_plain(file) for files in outcomes if isinstance(files, list) for file in files),
        information={
            "world_size": len(outcomes),
            "num_replicas": coordinates.along("dp_replicate")[1],
            "written_at": time.time(),
        },
    )
    problem, begun = None, False
    if rank() == 0:
        try:
            pointer = write_index(target, index, PackedFiles.of({"": index.files}))
            begun = True
            _commit(target, index.step, pointer, commit)
        except Exception as error:
            problem = _failed(f"checkpoint of step {step} at {target} was not committed", error)
    problem, begun = from_rank_0((problem, begun))
    if problem:
        if not begun:  # else COMMIT may be there, or come
            _delete(target, complete)
        raise problem
    return index


def save_one_by_one(folder: Storage, entries: Iterable[Entry], *, scalars: Mapping[str, Scalar], run_id: str) -> Index:
    """Write and commit a checkpoint of whole tensors that come one after another, holding about FILE_BYTES of them.

    Local. For checkpoints made of something else than a live run: their generation is 0, before every run's first.
    """
    step = int(scalars["step"])
    target, identity = folder / step_folder(step), (run_id, 0, step)
    files, tensors = list[DataFile](), {}
    for batch in _batches(entries):
        _write_files(target, f"g000000-{secrets.token_hex(TOKEN_BYTES)}", batch, identity, ALONE, files)
        tensors.update({entry.box.name: (entry.box.dtype, entry.box.shape) for entry in batch})
        del batch  # before the next ones are read
    index = Index(
        run_id=run_id,
        generation=0,
        step=step,
        scalars=dict(scalars),
        tensors=tensors,
        files=tuple(files),
        information={"written_at": time.time()},
    )
    _commit(target, step, write_index(target, index, PackedFiles.of({"": index.files})), None)
    return index


def restore(folder: Storage, index: Index, entries: Sequence[Entry], coordinates: Coordinates = ALONE) -> int:
    """Read this rank's entries in place, whatever layout the checkpoint was written in; returns the bytes read.

    Local: no collective. Of several replicas each reads a share, and `share_parts` completes them. Strict: an entry
    missing from the checkpoint, left over in it, or of another shape or dtype is a CheckpointError that names it; so is
    anything damaged. After an error the entries hold a mixture: restore again. What is left over in a pipeline, no rank
    knows alone: `restore_newest` counts.
    """
    _check_same(index, entries, folder, is_part=coordinates.along("pp")[1] > 1)
    source, replica = folder / step_folder(index.step), coordinates.along("dp_replicate")
    want = [(share(entry.box, *replica), entry.memory) for entry in entries]
    if index.layout is not None:
        return Reader(source, index).read(want)
    stored = read_headers(source, index)
    return read_pieces(source, stored, stored, want)


def restore_newest(
    folder: Storage,
    steps: Sequence[int],
    entries: Sequence[Entry],
    coordinates: Coordinates,
    replicas: dist.ProcessGroup | None,
    *,
    run_id: str,
    global_batch_seqs: int,
    damaged: Callable[[int, str], None],
    reading: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Progress | None:
    """Fill the entries with the newest of these checkpoints that every rank can read; None where there is none.

    Collective, with the same `steps`, newest first, on all ranks; `replicas` as `share_parts` has it. `damaged` hears
    of each that is passed over: its step, and what the first rank with a problem says of it. This rank reads, and waits
    for no other one, `reading`.
    Raises ForeignCheckpointError where any rank finds one to be another run's, or of a version that it does not read;
    CheckpointError where none of them is sound, OSError where storage does not answer.
    """
    problem, num_entries = "", _num_entries_of_all(entries, coordinates)
    for step in steps:
        mine, is_foreign, index, progress = "", False, None, None
        try:
            with reading():
                index = open_checkpoint(folder, step, run_id=run_id, with_files=False)
                restore(folder, index, entries, coordinates)
            if len(index.tensors) != num_entries:
                where = str(folder / step_folder(step))
                raise CheckpointError(f"{where}: holds {len(index.tensors)} tensors, the model has {num_entries}")
            progress = restored_progress(index.scalars, global_batch_seqs=global_batch_seqs)
        except CheckpointError as error:
            mine, is_foreign = str(error), isinstance(error, ForeignCheckpointError)
        except OSError as error:
            if not is_unreadable(folder, error):
                raise
            mine = problem_of(error)
        found = gather((mine, is_foreign))
        if foreign := next((each for each, is_one in found if is_one), ""):
            raise ForeignCheckpointError(foreign)  # the one before it is not where the run is
        problem = next((each for each, _ in found if each), "")
        if not problem:
            share_parts(entries, coordinates, replicas)
            return progress
        damaged(step, problem)
    if problem:
        raise CheckpointError(
            f"none of the checkpoints at {folder} (steps {', '.join(map(str, steps))}) can be restored; {problem}; "
            "choose another run.name to start over"
        )
    return None


def share_parts(entries: Sequence[Entry], coordinates: Coordinates, group: dist.ProcessGroup | None) -> None:
    """Give the other replicas of this shard what this rank read, and take what they read. Collective over `group`.

    `group` are the ranks that hold the same shard, in the order of their replicas; None where there is one replica.
    """
    if group is None:
        return
    replica, num_replicas = coordinates.along("dp_replicate")
    for entry in entries:
        shares = [share(entry.box, each, num_replicas) for each in range(num_replicas)]
        size = max(each.num_elements for each in shares)
        if not size:
            continue
        parts = [entry.memory[each.start : each.stop] for each in shares]
        mine, all_parts = entry.memory.new_zeros(size), [entry.memory.new_empty(size) for _ in shares]
        mine[: len(parts[replica])] = parts[replica]
        dist.all_gather(all_parts, mine, group=group)
        for target, received in zip(parts, all_parts, strict=True):
            target.copy_(received[: len(target)])


def _user_digest(scalars: Mapping[str, Scalar]) -> str:
    """Of what a callback keeps, which is to be the same on all ranks."""
    user = {key: value for key, value in scalars.items() if key.startswith(USER)}
    return hashlib.sha256(json.dumps(user, sort_keys=True).encode()).hexdigest()


def _write_files(
    target: Storage,
    name: str,
    entries: Sequence[Entry],
    identity: tuple[str, int, int],
    coordinates: Coordinates,
    complete: list[DataFile],
) -> None:
    """Write this rank's part, if it has one; `complete` gets each file once it is."""
    boxes = [entry.box for entry in entries]
    parts = parts_of(boxes, coordinates)
    memory = {
        number: memoryview(entries[number].memory.cpu().contiguous().view(torch.uint8).numpy().data).cast("B")
        for part in parts
        for number in set(part.members)
    }
    run_id, generation, step = identity
    of: dict[str, Any] = {"run_id": run_id, "generation": generation, "step": step}
    for number, some in enumerate(in_files(parts)):
        file_name = f"{name}{f'-{number}' if number else ''}.safetensors"
        complete.append(write_parts(target, file_name, some, boxes, memory, **of))


def _commit(target: Storage, step: int, pointer: bytes, commit: Commit | None) -> None:
    """From here on there is a checkpoint."""
    if commit is None:
        target.write_bytes(COMMIT, pointer)
    else:
        commit(step_folder(step), pointer)


def _delete(target: Storage, written: Sequence[DataFile]) -> None:
    """What this rank wrote for a checkpoint that is none: tried again on a full disk, they would add up."""
    for file in written:
        with contextlib.suppress(OSError):
            target.delete(file.name)


def _failed(what: str, error: Exception) -> CheckpointError:
    kind = NotWrittenError if isinstance(error, OSError) else CheckpointError
    return kind(f"{what}: {type(error).__name__}: {error}")


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


def _num_entries_of_all(entries: Sequence[Entry], coordinates: Coordinates) -> int:
    """Collective in a pipeline."""
    if coordinates.along("pp")[1] == 1:
        return len(entries)
    mine = sum(not is_second(entry.box.name, coordinates) for entry in entries)
    return sum(gather(mine if is_first_of_stage(coordinates) else 0))


def _tensors_of_all(entries: Sequence[Entry], coordinates: Coordinates) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Of every rank, by name. Collective in a pipeline, where they differ."""
    mine = {entry.box.name: (entry.box.dtype, entry.box.shape) for entry in entries}
    if coordinates.along("pp")[1] > 1:
        stages = gather(mine if is_first_of_stage(coordinates) else {})
        mine = {name: stage[name] for stage in stages for name in stage}
    return {name: mine[name] for name in sorted(mine)}


def _check_same(index: Index, entries: Sequence[Entry], folder: Storage, *, is_part: bool) -> None:
    mine = {entry.box.name: (entry.box.dtype, entry.box.shape) for entry in entries}
    where = str(folder / step_folder(index.step))
    for name in sorted(mine.keys() | index.tensors.keys()):
        if name not in index.tensors:
            raise CheckpointError(f"{where}: has no {name}, which the model needs")
        if name not in mine and is_part:
            continue
        if name not in mine:
            raise CheckpointError(f"{where}: holds {name}, which the model does not have")
        if mine[name] != index.tensors[name]:
            raise CheckpointError(
                f"{where}: {name} is {index.tensors[name][0]}{list(index.tensors[name][1])}, "
                f"the model's is {mine[name][0]}{list(mine[name][1])}"
            )
