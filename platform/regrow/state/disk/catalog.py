"""Which checkpoints a folder holds: listed, opened and verified, retired. No torch, so that every process can.

`<folder>/step-00000100/` holds `g<generation>-<token>.safetensors`, `g<generation>-<token>.index.json` and `COMMIT`.
"""

import hashlib
import json

from regrow.errors import CheckpointError, first_line
from regrow.state.disk.format import COMMIT, Index
from regrow.state.disk.read import check_size
from regrow.storage import Storage


def step_folder(step: int) -> str:
    return f"step-{step:08d}"


def committed_steps(folder: Storage) -> list[int]:
    """Steps whose COMMIT exists, newest first. What it points to may still be damaged: `open_checkpoint` tells."""
    names = [name for name in folder.list() if name.startswith("step-") and name[5:].isdigit()]
    return [int(name[5:]) for name in reversed(names) if folder.exists(f"{name}/{COMMIT}")]


def open_checkpoint(folder: Storage, step: int, *, run_id: str | None = None) -> Index:
    """The verified index of a committed step. Raises CheckpointError if it is damaged, or another run's or step's."""
    source = folder / step_folder(step)
    try:
        pointer = json.loads(source.read_bytes(COMMIT))
        name, sha256 = pointer["index"], pointer["sha256"]
        content = source.read_bytes(name)
    except (ValueError, KeyError, TypeError, FileNotFoundError) as error:
        raise CheckpointError(f"{source}/{COMMIT} does not lead to an index: {error}") from error
    if hashlib.sha256(content).hexdigest() != sha256:
        raise CheckpointError(f"{source}/{name}: its sha256 is not the one in {COMMIT}; the file is damaged or swapped")
    index = Index.from_json(content, f"{source}/{name}")
    if run_id is not None and index.run_id != run_id:
        raise CheckpointError(f"{source} belongs to run {index.run_id}, not to {run_id}")
    if index.step != step:
        raise CheckpointError(f"{source} holds a checkpoint of step {index.step}")
    return index


def retain(folder: Storage, *, keep: int) -> list[int]:
    """Delete what is older than the newest `keep` checkpoints that are whole, uncommitted leftovers included.

    COMMIT goes first, so that a deletion cut short leaves nothing that looks whole. Returns the steps deleted.
    Raises OSError where something could not be deleted; the rest is.
    """
    sound: list[int] = []
    for step in committed_steps(folder):
        try:
            index = open_checkpoint(folder, step)
            for file in index.files:
                check_size(folder / step_folder(step), file)
        except CheckpointError:
            continue
        sound.append(step)
    if len(sound) < keep:
        return []
    oldest_kept, deleted, problems = sound[keep - 1], [], []
    for name in folder.list():
        if name.startswith("step-") and name[5:].isdigit() and int(name[5:]) < oldest_kept:
            try:
                folder.delete(f"{name}/{COMMIT}")
                folder.delete(name)
                deleted.append(int(name[5:]))
            except OSError as error:
                problems.append(error)
    if problems:
        raise problems[0]
    return deleted


def try_retain(folder: Storage, *, keep: int) -> str:
    """`retain`, which training does not depend on: what to tell the user, or nothing."""
    try:
        retain(folder, keep=keep)
    except OSError as error:
        return f"old checkpoints were not all deleted, the next one tries again: {first_line(error)}"
    return ""
