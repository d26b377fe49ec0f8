"""Which checkpoints a folder holds: listed, opened and verified, retired. No torch, so that every process can.

`<folder>/step-00000100/` holds `g<generation>-<token>.safetensors`, `g<generation>-<token>.index.json` and `COMMIT`;
`DAMAGED` beside it where a run could not read what that COMMIT leads to.
"""

import hashlib
import json
import time

from regrow.errors import CheckpointError, first_line
from regrow.state.disk.format import COMMIT, DAMAGED, Index
from regrow.state.disk.read import check_size
from regrow.storage import Storage


def step_folder(step: int) -> str:
    return f"step-{step:08d}"


def committed_steps(folder: Storage) -> list[int]:
    """Steps whose COMMIT exists, newest first, without those that are noted to be damaged.

    What it points to may still be damaged: `open_checkpoint` tells.
    """
    return [step for step in _with_commit(folder) if not _is_noted(folder, step)]


def damaged_steps(folder: Storage) -> list[int]:
    """Those that are noted, newest first: for who has nothing else, as it may have been the reader that was wrong."""
    return [step for step in _with_commit(folder) if _is_noted(folder, step)]


def note_damaged(folder: Storage, step: int, detail: str) -> None:
    """What this step's COMMIT leads to cannot be read: it counts no more, until another COMMIT takes its place.

    Raises OSError.
    """
    commit = hashlib.sha256(folder.read_bytes(f"{step_folder(step)}/{COMMIT}")).hexdigest()
    note = {"commit": commit, "detail": detail, "time": time.time()}
    folder.write_bytes(f"{step_folder(step)}/{DAMAGED}", json.dumps(note).encode())


def _with_commit(folder: Storage) -> list[int]:
    names = [name for name in folder.list() if name.startswith("step-") and name[5:].isdigit()]
    return [int(name[5:]) for name in reversed(names) if folder.exists(f"{name}/{COMMIT}")]


def _is_noted(folder: Storage, step: int) -> bool:
    """Whether it is the COMMIT that is there which was found to be damaged."""
    try:
        note = json.loads(folder.read_bytes(f"{step_folder(step)}/{DAMAGED}"))
        commit = folder.read_bytes(f"{step_folder(step)}/{COMMIT}")
        return bool(note["commit"] == hashlib.sha256(commit).hexdigest())
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return False


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

    The newest in time: where a run went back to an earlier step, what it had written past that counts no more, and
    goes once the run has passed it. COMMIT goes first, so that a deletion cut short leaves nothing that looks whole.
    Returns the steps deleted. Raises OSError where something could not be deleted; the rest is.
    """
    sound = _sound(folder)
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


def _sound(folder: Storage) -> list[int]:
    """Steps of checkpoints that are whole, as far as a quick look tells, newest in time first, each older in steps."""
    found: list[tuple[int, int]] = []
    for step in committed_steps(folder):
        try:
            index = open_checkpoint(folder, step)
            for file in index.files:
                check_size(folder / step_folder(step), file)
        except CheckpointError:
            continue
        found.append((index.generation, step))
    sound: list[int] = []
    for _, step in sorted(found, reverse=True):
        if not sound or step < sound[-1]:
            sound.append(step)
    return sound


def try_retain(folder: Storage, *, keep: int) -> str:
    """`retain`, which training does not depend on: what to tell the user, or nothing."""
    try:
        retain(folder, keep=keep)
    except OSError as error:
        return f"old checkpoints were not all deleted, the next one tries again: {first_line(error)}"
    return ""
