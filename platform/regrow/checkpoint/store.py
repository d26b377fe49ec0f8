"""Durable checkpoints: written by all ranks, committed by one act, restored into any layout.

A file name is never written twice, so that neither a zombie nor an earlier attempt can change what a COMMIT points to.
"""

import hashlib
import json
import secrets
import time
from collections.abc import Callable, Sequence

import torch

from regrow.checkpoint.catalog import step_folder
from regrow.checkpoint.collective import gather, rank
from regrow.checkpoint.format import (
    CHUNK_BYTES,
    COMMIT,
    ITEM_BYTES,
    DataFile,
    Index,
    Stored,
    checksums,
    decode_header,
    encode_header,
)
from regrow.checkpoint.layout import Span, replica_part
from regrow.checkpoint.reshard import Read, Source, plan_reads
from regrow.checkpoint.state import Entry
from regrow.errors import CheckpointError
from regrow.storage import Storage

Commit = Callable[[str, bytes], None]  # (folder name, content of COMMIT): writes it, or raises if fenced off


def save(
    folder: Storage,
    entries: Sequence[Entry],
    *,
    scalars: dict[str, int],
    run_id: str,
    generation: int,
    replica: int = 0,
    num_replicas: int = 1,
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
        written = _write_file(
            target, f"{token}.safetensors", entries, (run_id, generation, step), replica, num_replicas
        )
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
        information={"world_size": len(outcomes), "num_replicas": num_replicas, "written_at": time.time()},
    )
    problem = None
    if rank() == 0:
        try:
            content = index.to_json()
            name = f"{token}.index.json"
            target.write_bytes(name, content)
            pointer = json.dumps({"index": name, "sha256": hashlib.sha256(content).hexdigest()}).encode()
            if commit is None:
                target.write_bytes(COMMIT, pointer)
            else:
                commit(step_folder(step), pointer)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
    problem = gather(problem)[0]
    if problem:
        raise CheckpointError(f"checkpoint of step {step} at {target} was not committed: {problem}")
    return index


def restore(folder: Storage, index: Index, entries: Sequence[Entry]) -> int:
    """Read this rank's entries in place, whatever layout the checkpoint was written in; returns the bytes read.

    Local: no collective. Strict: an entry missing from the checkpoint, left over in it, or of another shape or dtype is
    a CheckpointError that names it; so is anything damaged. After an error the entries hold a mixture: restore again.
    """
    _check_same(index, entries, folder)
    source = folder / step_folder(index.step)
    stored: dict[Source, Stored] = {}
    for file in index.files:
        for piece in _read_header(source, file, index):
            stored[Source(file.name, piece.span)] = piece
    wanted = [entry.span for entry in entries]
    num_bytes = 0
    for read in plan_reads(stored, wanted):
        data = _read_elements(source, read, stored[read.source])
        span = wanted[read.want]
        target = entries[read.want].memory[read.start - span.start : read.stop - span.start]
        target.copy_(torch.frombuffer(bytearray(data), dtype=target.dtype))
        num_bytes += len(data)
    return num_bytes


def _write_file(
    target: Storage,
    name: str,
    entries: Sequence[Entry],
    identity: tuple[str, int, int],
    replica: int,
    num_replicas: int,
) -> DataFile | None:
    """Write this rank's part; None where it has nothing to write."""
    parts: list[tuple[Span, memoryview]] = []
    for entry in entries:
        part = replica_part(entry.span, replica, num_replicas)
        if part.num_elements:
            memory = entry.memory[part.start - entry.span.start : part.stop - entry.span.start]
            parts.append((part, memoryview(memory.cpu().contiguous().view(torch.uint8).numpy().data).cast("B")))
    if not parts:
        return None
    run_id, generation, step = identity
    header = encode_header(parts, run_id=run_id, generation=generation, step=step)
    num_bytes = target.write_chunks(name, [header, *(data for _, data in parts)])
    return DataFile(name, num_bytes, len(header), hashlib.sha256(header).hexdigest())


def _read_header(source: Storage, file: DataFile, index: Index) -> list[Stored]:
    try:
        data = source.read_range(file.name, 0, file.header_bytes)
    except FileNotFoundError as error:
        raise CheckpointError(f"{source}/{file.name}: named by the index but not there") from error
    return decode_header(data, file, index, f"{source}/{file.name}")


def _read_elements(source: Storage, read: Read, stored: Stored) -> memoryview:
    """The bytes of a read, from whole chunks whose checksums hold."""
    item = ITEM_BYTES[stored.span.dtype]
    begin, end = (read.start - stored.span.start) * item, (read.stop - stored.span.start) * item
    first = begin // CHUNK_BYTES
    aligned_begin, aligned_end = first * CHUNK_BYTES, min(-(-end // CHUNK_BYTES) * CHUNK_BYTES, stored.num_bytes)
    data = memoryview(source.read_range(read.source.file, stored.offset + aligned_begin, aligned_end - aligned_begin))
    found = checksums(data)
    expected = list(stored.crc32[first : first + len(found)])
    if data.nbytes != aligned_end - aligned_begin or found != expected:
        raise CheckpointError(
            f"{source}/{read.source.file}: {stored.span.name} fails its checksum; the file is damaged"
        )
    return data[begin - aligned_begin : end - aligned_begin]


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
